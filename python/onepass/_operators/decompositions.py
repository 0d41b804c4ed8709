"""The operators in PyTorch's own, for those who know no others: ONNX, other backends."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from onepass._operators import fake
from onepass.autograd import places_of
from onepass.line import _parse
from onepass.reference import compose


def decompositions() -> dict[torch._ops.OpOverload, Callable]:
    """What each operator of onepass is in PyTorch's own, for `exported.run_decompositions(onepass.decompositions())`.

    A graph that is decomposed holds no kernel of this package and runs without it; `torch.onnx.export` takes it. Graphs
    of gradients are refused with a RuntimeError: what forward saves for backward is left empty.
    """
    shapes = {
        "elementwise": fake.elementwise_results,
        "rowwise": fake.rowwise_results,
        **dict.fromkeys(("linear", "scores", "attention"), fake.contraction_results),
    }
    ops = torch.ops.onepass
    table = {getattr(ops, f"{name}_forward").default: _forward(of) for name, of in shapes.items()}
    table |= {getattr(ops, f"{name}_backward").default: _refused for name in (*shapes, "group")}
    return table | {ops.group_forward.default: _group_forward, ops.dropout_state.default: _dropout_state}


def _forward(shapes):
    """shapes: the fake operator, for what is saved."""

    def decomposed(x, operands, line, dropout_state, *save):
        results = [*compose(_parse(line).words, x, operands, dropout_state)]
        fakes = shapes(x, operands, line, dropout_state, *save)
        if not fakes[0].is_contiguous():  # of attention: what follows it views that
            order = fake.order_of(x)
            results[0] = results[0].permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
        return [*results, *fakes[len(results) :]]

    return decomposed


def _group_forward(xs, operands, line, state, save, own, stack):
    of_line, count = _parse(line), len(xs)
    places = [(begin - count, end - count) for begin, end in places_of(of_line, count, own)[1:]]
    each, first_row = [], 0
    for i, x in enumerate(xs):
        taken = [operands[begin + (i if end - begin > 1 else 0)] for begin, end in places]
        each.append(compose(of_line.words, x, taken, state, first_row=first_row))
        first_row += math.prod(x.shape[:-1])  # numel() would fix their number
    results = []
    for kind in zip(*each):
        results += [torch.stack(kind)] if stack else kind
    return [*results, *fake.group_results(xs, operands, line, state, save, own, stack)[len(results) :]]


def _dropout_state(like):
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=like.device)


def _refused(*_, **__):
    raise RuntimeError(
        "decompositions(): expected a graph without gradients, but got a backward operator of onepass; "
        "Line.reference(...) is differentiated by PyTorch's own operators"
    )

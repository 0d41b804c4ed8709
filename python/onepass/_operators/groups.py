"""A line of rows that is called for several tensors at once: one forward operator, one backward operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from onepass import _native
from onepass._operators.backward import run_backward
from onepass._operators.composed import Saved, composed_backward
from onepass._operators.fake import library, no_operands
from onepass.autograd import Gradient, differentiable, is_jit_traced, plan, reached_by
from onepass.line import _parse


def call(line, state, count: int, own: int, stack: bool, tensors) -> list:
    """The results, then the kept values: of each kind one tensor if stacked, else `count` of them.

    tensors: so many x, then of each operand one for all, or where its bit is in `own`, one for each.
    """
    how = (line, state, count, own, stack)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors) or is_jit_traced()):
        results = _forward(*how, tensors, False)
    elif torch.compiler.is_compiling():
        # Dynamo refuses one tensor as two inputs of an autograd function.
        views = [t.view_as(t) if any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]
        results = ApplyGroup.apply(*how, *views)
    elif differentiable() is None:
        results = ApplyGroup.apply(*how, *tensors)
    else:
        op = torch.ops.onepass.differentiable_group.default
        results = op(tensors, line.text, state, count, own, stack)
    return results[: (1 + line.keeps) * (1 if stack else count)]


def _forward(line, state, count, own, stack, tensors, save):
    op = torch.ops.onepass.group_forward.default
    return op(tensors[:count], tensors[count:] or no_operands(tensors[0]), line.text, state, save, own, stack)


def places_of(line, count, own) -> list[tuple[int, int]]:
    """Where the tensors of x, then of each operand, begin and end."""
    places, end = [(0, count)], count
    for i in range(line.operand_count):
        begin, end = end, end + (count if own >> i & 1 else 1)
        places.append((begin, end))
    return places


def run(line, state, count, own, stack, *tensors):
    """The results, the kept values and, where backward reads them, the row statistics."""
    return tuple(_forward(line, state, count, own, stack, tensors, line.reads_statistics))


def save(ctx, inputs, output):
    """Saves what backward reads."""
    line, state, count, own, stack, *tensors = inputs
    lists = 1 if stack else count
    results = (1 + line.keeps) * lists
    places = places_of(line, count, own)
    ctx.line, ctx.of = line, (count, own, stack)
    ctx.mark_non_differentiable(*output[results:])
    ctx.set_materialize_grads(False)
    ctx.results = [(r.shape, r.dtype) for r in output[:results]]
    ctx.like = (tensors[0].dtype, tensors[0].device)
    ctx.types = (
        _native.DTYPES[tensors[0].dtype],
        *[_type_of(line, i, places, tensors) for i in range(line.operand_count)],
    )
    # Operands that are rows and one for all: their gradient is a sum over the tensors'.
    ctx.summed = {
        i: tensors[begin].shape for i, (begin, end) in enumerate(places[1:]) if _is_summed(line, i, end - begin, count)
    }

    xs, k = tensors[:count] if line.reads_x else [], line.resumes_from
    resumed = [] if k is None else output[k * lists : (k + 1) * lists]
    operands = []
    for is_read, (begin, end) in zip(line.reads_operands, places[1:]):
        operands += tensors[begin:end] if is_read else [None] * (end - begin)
    statistics = output[-1] if line.reads_statistics else None
    ctx.save_for_backward(state, statistics, *xs, *resumed, *operands)


def _is_summed(line, operand, own, count) -> bool:
    return operand in line.tensor_operands and own < count


def _type_of(line, operand, places, tensors) -> int:
    begin, end = places[1 + operand]
    dtype = _native.DTYPES[tensors[begin].dtype]
    count = places[0][1]
    if operand not in line.tensor_operands:
        return dtype
    whole = end - begin == count and all(x.shape == o.shape for x, o in zip(tensors, tensors[begin:end]))
    return dtype if whole else dtype + _native.BROADCAST


def gradients(ctx, upstream):
    """Of the tensors, those that are needed."""
    line, (count, own, stack) = ctx.line, ctx.of
    upstream = upstream[: len(ctx.results)]
    reached = [reached_by(upstream if stack else upstream[i::count]) for i in range(count)]
    places = places_of(line, count, own)
    dtype, device = ctx.like
    # Zeros as dense as the others: they share a launch.
    given = [
        torch.zeros(shape, dtype=of, device=device) if g is None else g for g, (shape, of) in zip(upstream, ctx.results)
    ]
    needed = ctx.needs_input_grad[5:]
    of_kinds = [any(needed[begin:end]) for begin, end in places]
    sources, wanted, writes = plan(line.text, dtype, ctx.types[1:], (of_kinds[0], False, False, *of_kinds[1:]))
    written = ()
    if writes:
        how = GroupGradient(line, ctx.types, wanted, count, own, stack)
        written = run_backward(how, *given, *ctx.saved_tensors)
    firsts = _firsts(line, count, sources, places)
    results = [None] * len(needed)
    for kind, (source, (begin, end)) in enumerate(zip(sources, places)):
        if source is None:
            continue

        members = given[0].unbind() if stack else given[:count]
        if source >= 0:
            members = written[firsts[source] :]
        if kind - 1 in ctx.summed:
            members = [sum(m.sum_to_size(ctx.summed[kind - 1]) for m in members[:count])]
        keeps = 0 if kind == 0 else line.keeps_before[kind - 1]
        for i in range(begin, end):
            is_reached = keeps < (reached[i - begin] if end - begin == count else max(reached))
            results[i] = members[i - begin] if needed[i] and is_reached else None
    return None, None, None, None, None, *results


def _firsts(line, count, sources, places) -> list[int]:
    """The first tensor of each of the backward operator's outputs, which is one for each tensor but for columns that
    all share."""
    counts = {}
    for kind, source in enumerate(sources):
        if source is not None and source >= 0:
            rows = kind == 0 or kind - 1 in line.tensor_operands
            counts[source] = count if rows else places[kind][1] - places[kind][0]
    firsts, total = [], 0
    for output in range(len(counts)):
        firsts.append(total)
        total += counts[output]
    return firsts


@dataclass(frozen=True)
class GroupGradient(Gradient):
    """The same for several tensors."""

    count: int
    own: int
    stack: bool

    def run(self, *tensors):
        """tensors: the gradients of the results and of the kept values, then what was saved."""
        given, state, statistics, xs, resumed, operands = self._sorted(tensors)
        how = (state, self.line.text, self.types[1:], self.wanted, self.own, self.stack)
        return tuple(torch.ops.onepass.group_backward.default(given, xs, operands, resumed, statistics, *how))

    def watched(self, tensors):
        """As they are: no product is among them."""
        return tensors

    def compose(self, *tensors):
        """Each tensor by itself; the gradients of what they share are sums."""
        given, state, _, xs, resumed, operands = self._sorted(tensors)
        places = [
            (begin - self.count, end - self.count) for begin, end in places_of(self.line, self.count, self.own)[1:]
        ]
        each, first_row = [], 0
        for i in range(self.count):
            upstream = [some[i] for some in self._by_kind(given)]
            kept = next((t[i] for t in self._by_kind(resumed)), None)
            own = tuple(operands[begin + (i if end - begin > 1 else 0)] for begin, end in places)
            saved = Saved(xs[i] if xs else None, kept, None, state, None, None, own)
            each.append(composed_backward(self.line, upstream, saved, self.types, self.wanted, first_row))
            first_row += math.prod(upstream[0].shape[:-1])
        written = []
        outputs = _native.gradients(self.line.text, self.types[0], self.types[1:], self.wanted)["outputs"]
        for output, some in zip(outputs, zip(*each)):
            operand = output["input"] - 1
            is_row = operand < 0 or operand in self.line.tensor_operands
            written += some if is_row or self.own >> operand & 1 else [sum(some)]
        return tuple(written)

    def _by_kind(self, tensors):
        """Of each kind, a tensor or a list with one for each."""
        return tensors if self.stack else [tensors[i : i + self.count] for i in range(0, len(tensors), self.count)]

    def _sorted(self, tensors):
        """The gradients, the dropout state, the statistics, x, what backward resumes from, and the operands."""
        line, lists = self.line, 1 if self.stack else self.count
        tensors = list(tensors)
        counts = [
            (1 + line.keeps) * lists,
            1,
            1,
            self.count * line.reads_x,
            lists * (line.resumes_from is not None),
        ]
        some = []
        for count in counts:
            some.append(tensors[:count])
            del tensors[:count]
        given, (state,), (statistics,), xs, resumed = some
        return given, state, statistics, xs, resumed, tensors


library.define(
    "differentiable_group_backward(Tensor[] gradients, Tensor?[] saved, str line, int[] types, int wanted, int count, "
    "int own, bool stack) -> Tensor[]"
)


@torch.library.impl(library, "differentiable_group_backward", "CompositeImplicitAutograd")
def _(gradients, saved, line, types, wanted, count, own, stack):
    how = GroupGradient(_parse(line), tuple(types), wanted, count, own, stack)
    return list(run_backward(how, *gradients, *saved))


class ApplyGroup(torch.autograd.Function):
    """Calls a line for several tensors so that it can be differentiated, in terms that torch.compile can trace."""

    @staticmethod
    def forward(ctx, *inputs):
        """inputs: the line, the dropout state, how many tensors, who has operands of its own, whether results are
        stacked; then the tensors."""
        results = run(*inputs)
        save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx, *upstream):
        """Gradients of the tensors, those that are needed."""
        return gradients(ctx, upstream)

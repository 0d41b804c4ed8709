"""The operators as PyTorch's tracing sees them: outputs without data, with the strides that the kernels give."""

from __future__ import annotations

import torch

from onepass import _native
from onepass._composed import OF_DTYPE

library = torch.library.Library("onepass", "FRAGMENT")


def no_operands(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a line without operands is given for them. In a traced graph x stands there, which no operator reads:
    AOTInductor makes none of an empty list (torch 2.15)."""
    return (x,) if torch.compiler.is_compiling() else ()


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _results(x: torch.Tensor, line: str) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for _ in range(1 + _native.describe(line)["keeps"])]


def _statistics(x: torch.Tensor, line: str) -> torch.Tensor:
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return x.new_empty((_native.describe(line)["statistics"], rows), dtype=_arithmetic(x.dtype))


@torch.library.register_fake("onepass::elementwise_forward", lib=library)
def elementwise_results(x, operands, line, dropout_state):
    return _results(x, line)


@torch.library.register_fake("onepass::rowwise_forward", lib=library)
def rowwise_results(x, operands, line, dropout_state, save_statistics):
    results = _results(x, line)
    if save_statistics:
        results.append(_statistics(x, line))
    return results


@torch.library.register_fake("onepass::linear_forward", lib=library)
@torch.library.register_fake("onepass::scores_forward", lib=library)
@torch.library.register_fake("onepass::attention_forward", lib=library)
def contraction_results(x, operands, line, dropout_state, save):
    facts = _native.describe(line)
    weight = operands[facts["weight"]]

    def behind():
        return weight.new_empty((*x.shape[:-1], weight.shape[-2]))

    before = facts["keeps_before"]
    results = [x.new_empty(x.shape) if 0 < i <= before else behind() for i in range(1 + facts["keeps"])]
    if facts["values"]:
        results[0] = weight.new_empty((*x.shape[:-1], operands[-1].shape[-1]))
    if save and facts["reads_product"]:
        results.append(behind())
    if save and facts["reads_statistics"]:
        results.append(_statistics(results[0] if facts["scores"] else x, line))
    return results


def _gradients(dy: torch.Tensor, line: str, operand_types: list[int], wanted: int) -> list[torch.Tensor]:
    plan = _native.gradients(line, _native.DTYPES[dy.dtype], tuple(operand_types), wanted)
    columns = dy.shape[-1] if dy.dim() else 1
    return [
        dy.new_empty((columns,) if output["column"] else dy.shape, dtype=OF_DTYPE[output["dtype"]])
        for output in plan["outputs"]
    ]


@torch.library.register_fake("onepass::elementwise_backward", lib=library)
def _(gradients, x, operands, resumed, dropout_state, line, operand_types, wanted):
    return _gradients(gradients[0], line, operand_types, wanted)


@torch.library.register_fake("onepass::rowwise_backward", lib=library)
def _(gradients, x, operands, resumed, statistics, dropout_state, line, operand_types, wanted):
    return _gradients(gradients[0], line, operand_types, wanted)


@torch.library.register_fake("onepass::linear_backward", lib=library)
@torch.library.register_fake("onepass::scores_backward", lib=library)
@torch.library.register_fake("onepass::attention_backward", lib=library)
def _(gradients, x, operands, resumed, statistics, product, resumed_behind, dropout_state, line, types, wanted):
    facts = _native.describe(line)
    dy, weight = gradients[0], operands[facts["weight"]]

    def like(output):
        index = output["input"] - 1  # of the operand; -1: x
        if index == facts["weight"] or (facts["values"] and index == len(operands) - 1):
            return operands[index].shape
        columns = weight.shape[-2 if index > facts["weight"] else -1]
        return (columns,) if output["column"] else (*dy.shape[:-1], columns)

    plan = _native.gradients(line, types[0], tuple(types[1:]), wanted)
    return [dy.new_empty(like(output), dtype=OF_DTYPE[output["dtype"]]) for output in plan["outputs"]]


def _places(own: int, line: str, count: int) -> list[tuple[int, int]]:
    """Where in a list those of each operand begin and end: one for all tensors, or one for each of them."""
    places, end = [], 0
    for i in range(len(_native.describe(line)["reads_operands"])):
        begin, end = end, end + (count if own >> i & 1 else 1)
        places.append((begin, end))
    return places


@torch.library.register_fake("onepass::group_forward", lib=library)
def group_results(xs, operands, line, dropout_state, save, own, stack):
    facts, count = _native.describe(line), len(xs)
    has_linear = facts["weight"] is not None
    rows = operands[_places(own, line, count)[facts["weight"]][0]].shape[0] if has_linear else None

    def kind(columns):
        shapes = [x.shape if columns is None else (*x.shape[:-1], columns) for x in xs]
        return [xs[0].new_empty((count, *shapes[0]))] if stack else [xs[0].new_empty(shape) for shape in shapes]

    results = []
    for k in range(1 + facts["keeps"]):
        results += kind(None if 0 < k <= facts["keeps_before"] or not has_linear else rows)
    if save and has_linear and facts["reads_product"]:
        results += kind(rows)
    if save and facts["reads_statistics"]:
        numbers = sum(_statistics(x, line).numel() for x in xs)
        results.append(xs[0].new_empty((numbers,), dtype=_arithmetic(xs[0].dtype)))
    return results


@torch.library.register_fake("onepass::group_backward", lib=library)
def _(
    gradients,
    xs,
    operands,
    resumed,
    statistics,
    products,
    resumed_behind,
    dropout_state,
    line,
    types,
    wanted,
    own,
    stack,
):
    facts = _native.describe(line)
    count = gradients[0].shape[0] if stack else len(gradients) // (1 + facts["keeps"])
    members = list(gradients[0].unbind()) if stack else gradients[:count]
    places, weight = _places(own, line, count), facts["weight"]
    matrix = None if weight is None else operands[places[weight][0]]
    results = []
    for output in _native.gradients(line, types[0], tuple(types[1:]), wanted)["outputs"]:
        index, dtype = output["input"] - 1, OF_DTYPE[output["dtype"]]  # of the operand; -1: x
        of_operand = 0 if index < 0 else places[index][1] - places[index][0]
        if weight is not None and index == weight:
            results += [matrix.new_empty(matrix.shape) for _ in range(of_operand)]
            continue
        columns = members[0].shape[-1] if members[0].dim() else 1
        if weight is not None:
            columns = matrix.shape[0 if index > weight else 1]
        if output["column"]:
            results += [members[0].new_empty((columns,), dtype=dtype) for _ in range(of_operand)]
        else:
            shapes = [(*dy.shape[:-1], columns) if weight is not None else dy.shape for dy in members]
            results += [members[0].new_empty(shape, dtype=dtype) for shape in shapes]
    return results


# The draw is an operator of its own so that a compiled graph makes the same one as eager mode does.
library.define("dropout_state(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def draw_dropout_state(like: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """int64 {seed, offset} on the tensor's device, from its generator: what one call's dropout masks depend on."""
    return torch.empty(2, dtype=torch.int64, device=like.device).random_(generator=generator)


library.impl("dropout_state", draw_dropout_state, "CompositeExplicitAutograd")


@torch.library.register_fake("onepass::dropout_state", lib=library)
def _(like):
    return like.new_empty((2,), dtype=torch.int64)

"""Flops of the operators with products, for torch.utils.flop_counter: 2 m n k a product, as it counts torch's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import register_flop_formula

from onepass import _native

Shape = Sequence[int]

ops = torch.ops.onepass


def _rows(shape: Shape) -> int:
    return math.prod(shape[:-1])


@register_flop_formula([ops.linear_forward, ops.scores_forward])
def _product(x: Shape, operands: Sequence[Shape], line: str, *_: Any, **__: Any) -> int:
    matrix = operands[_native.describe(line)["weight"]]
    return 2 * math.prod(x) * matrix[-2]


@register_flop_formula(ops.attention_forward)
def _attention(x: Shape, operands: Sequence[Shape], line: str, *_: Any, **__: Any) -> int:
    keys, values = operands[0], operands[-1]
    return 2 * _rows(x) * keys[-2] * (x[-1] + values[-1])


class _Backward(NamedTuple):
    """The arguments of a backward operator, tensors as their shapes."""

    gradients: Sequence[Shape]
    x: Shape | None
    operands: Sequence[Shape | None]
    resumed: Shape | None
    statistics: Shape | None
    product: Shape | None
    resumed_behind: Shape | None
    state: Shape | None
    line: str
    types: Sequence[int]
    wanted: int


@register_flop_formula(ops.linear_backward)
def _linear_backward(*given: Any, out_shape: Sequence[Shape], **named: Any) -> int:
    call = _Backward(*given, **named)
    weight = _native.describe(call.line)["weight"]
    outputs = _native.gradients(call.line, call.types[0], tuple(call.types[1:]), call.wanted)["outputs"]
    shapes = {output["input"]: shape for output, shape in zip(outputs, out_shape)}
    shapes[0] = shapes.get(0, call.x)
    matrix, product = call.operands[weight], call.gradients[0]
    if not _native.describe(call.line)["numbers"][0]:
        return _products_back(weight, call.wanted, product, shapes, matrix)
    assert matrix is not None, "backward of an ending behind `linear` reads the matrix"
    again = 0 if call.resumed_behind else 2 * math.prod(product) * math.prod(matrix)
    return again + _products_back(weight, call.wanted, (*product, matrix[-2]), shapes, matrix)


@register_flop_formula(ops.linear_forward_with_gradients)
def _linear_with_gradients(x: Shape, operands: Sequence[Shape], line: str, *rest: Any, **__: Any) -> int:
    matrix, wanted = operands[_native.describe(line)["weight"]], rest[-1]
    product = (*x[:-1], matrix[-2])
    of_weight = _products_back(_native.describe(line)["weight"], wanted, product, {0: x}, matrix)
    return 2 * math.prod(x) * matrix[-2] + of_weight


def _products_back(weight: int, wanted: int, dy: Shape, shapes: dict[int, Shape | None], matrix: Shape | None) -> int:
    """Of the gradient of what the product takes, and of its matrix; shapes: by input, x first."""
    of_matrix = wanted >> weight + 1 & 1
    of_input = bool(wanted & (1 << weight + 1) - 1)
    if not of_matrix and not of_input:
        return 0
    known = matrix or shapes.get(weight + 1) or shapes[0]
    return 2 * (of_matrix + of_input) * math.prod(dy) * known[-1]


@register_flop_formula(ops.scores_backward)
def _scores_backward(*given: Any, out_shape: Any, **named: Any) -> int:
    """With the scores again, where neither they nor the result were saved."""
    call = _Backward(*given, **named)
    dims = (call.x or call.operands[0])[-1]
    is_saved = any(t is not None for t in (call.product, call.resumed_behind, call.resumed))
    again = _native.describe(call.line)["reads_x"] and not is_saved
    return 2 * math.prod(call.gradients[0]) * dims * (again + (call.wanted & 1) + (call.wanted >> 1 & 1))


@register_flop_formula(ops.attention_backward)
def _attention_backward(*given: Any, out_shape: Any, **named: Any) -> int:
    """With the weights again, as torch counts its own engines."""
    call = _Backward(*given, **named)
    keys, last = call.operands[0], len(call.operands)
    of_values = call.wanted >> last & 1
    of_weights = bool(call.wanted & (1 << last) - 1)
    of_rows = call.x[-1] * (1 + (call.wanted & 1) + (call.wanted >> 1 & 1))
    return 2 * _rows(call.x) * keys[-2] * (of_rows + call.gradients[0][-1] * (of_values + of_weights))

"""Rotary position embedding as transformers writes it: x · cos + cat(-x₂, x₁) · sin, of a row's halves x₁ and x₂."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from onepass.graph.operations import is_tensor, operation, same, value_of

__all__ = ["Rotation", "find"]


@dataclass(frozen=True)
class Rotation:
    """x, its cosines and sines, and the nodes between them and the sum."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    nodes: frozenset[fx.Node]


def find(node: fx.Node) -> Rotation | None:
    """What the node, a sum, rotates."""
    op = operation(node)
    if op is None or op.name != "add":
        return None
    for straight, turned in (op.arguments, op.arguments[::-1]):
        for x, cos in _factors(straight):
            for half_turn, sin in _factors(turned):
                between = _of_half_turn(half_turn, x)
                if between is not None and _are_positions(cos, sin, x):
                    return Rotation(x, cos, sin, frozenset({node, straight, turned, *between}))
    return None


def _factors(node: object) -> list[tuple[fx.Node, fx.Node]]:
    """Of a product, in both orders."""
    op = operation(node)
    if op is None or op.name != "mul" or not all(map(is_tensor, op.arguments)):
        return []
    return [op.arguments, op.arguments[::-1]]


def _are_positions(cos: fx.Node, sin: fx.Node, x: fx.Node) -> bool:
    tensors, shape = (value_of(cos), value_of(sin)), value_of(x).shape
    offsets = [len(shape) - t.dim() for t in tensors]
    return all(
        t.is_floating_point()
        and not t.requires_grad
        and offset >= 0
        and all(same(a, b) or same(a, 1) for a, b in zip(t.shape, shape[offset:]))
        for t, offset in zip(tensors, offsets)
    )


def _of_half_turn(node: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    """The nodes of cat((-x₂, x₁), -1)."""
    if node.op != "call_function" or node.target is not torch.cat or not isinstance(value_of(x).shape[-1], int):
        return None
    read = _joined_parts(*node.args, **node.kwargs)
    if read is None or len(read[0]) != 2 or read[1] not in (-1, value_of(node).dim() - 1):
        return None
    parts, _ = read
    negative, first = parts
    op = operation(negative)
    if op is None or op.name != "mul" or op.arguments[1] != -1.0:
        return None
    second, half = op.arguments[0], value_of(x).shape[-1] // 2
    if 2 * half != value_of(x).shape[-1] or not (_is_part(first, x, 0, half) and _is_part(second, x, half, 2 * half)):
        return None
    return [node, negative, first, second]


def _joined_parts(tensors, dim=0, *, axis=None, out=None):
    """What torch.cat joins, and along which dimension."""
    return (tensors, dim if axis is None else axis) if out is None and isinstance(tensors, (list, tuple)) else None


def _is_part(node: object, x: fx.Node, begin: int, end: int) -> bool:
    """Whether it is x[..., begin:end]."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[0] is not x:
        return False
    index = node.args[1]
    if not isinstance(index, tuple) or len(index) != 2 or index[0] is not Ellipsis or not isinstance(index[1], slice):
        return False
    if not all(isinstance(at, (int, type(None))) for at in (index[1].start, index[1].stop, index[1].step)):
        return False
    return range(*index[1].indices(value_of(x).shape[-1])) == range(begin, end)

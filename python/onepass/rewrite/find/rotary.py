"""Rotary position embedding as transformers writes it: x · cos + cat(-x₂, x₁) · sin, of a row's halves x₁ and x₂; or of
a row's first numbers, with the others behind it."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from onepass.graph.operations import is_tensor, operation, same, same_shape, value_of

__all__ = ["Rotation", "find", "may_have"]


@dataclass(frozen=True)
class Rotation:
    """x, its cosines and sines, and the nodes between them and the result; how many of x's numbers are turned, None of
    all of them. `passes` are casts of what x is a cast of, which others may need as well."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    nodes: frozenset[fx.Node]
    passes: frozenset[fx.Node] = frozenset()
    turned: int | None = None


def find(node: fx.Node) -> Rotation | None:
    """What the node, a sum or a concatenation, rotates."""
    return _of_first_numbers(node) if node.target is torch.cat else _of_rows(node)


def may_have(node: fx.Node) -> bool:
    """Whether a rotation may have such a node between x and its result."""
    return _is_slice(node) or _joined_in_rows(node) is not None


def _of_first_numbers(node: fx.Node) -> Rotation | None:
    """Of cat((rotated, x[..., n:]), -1), where x[..., :n] is rotated."""
    parts = _joined_in_rows(node)
    rotation = _of_rows(parts[0]) if parts else None
    if rotation is None or not _is_slice(rotation.x) or len(parts[0].users) > 1:
        return None
    x, length, turned = rotation.x.args[0], value_of(node).shape[-1], value_of(rotation.x).shape[-1]
    if not (_is_part(rotation.x, x, 0, turned) and _is_part(parts[1], x, turned, length)):
        return None
    if not same_shape(value_of(x).shape, value_of(node).shape) or value_of(x).dtype != value_of(node).dtype:
        return None
    nodes = rotation.nodes | {node, rotation.x, parts[1]}
    return Rotation(x, rotation.cos, rotation.sin, nodes, rotation.passes, turned)


def _of_rows(node: fx.Node) -> Rotation | None:
    op = operation(node)
    if op is None or op.name != "add":
        return None
    for straight, turned in (op.arguments, op.arguments[::-1]):
        for x, cos in _factors(straight):
            for half_turn, sin in _factors(turned):
                between, passes = _of_half_turn(half_turn, x) or ((), ())
                if between and _are_positions(cos, sin, x):
                    return Rotation(x, cos, sin, frozenset({node, straight, turned, *between}), frozenset(passes))
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


def _of_half_turn(node: fx.Node, x: fx.Node) -> tuple[list[fx.Node], set[fx.Node]] | None:
    """The nodes of cat((-x₂, x₁), -1), and x cast once more, where that is what is turned."""
    parts, length = _joined_in_rows(node), value_of(x).shape[-1]
    if parts is None or not isinstance(length, int) or length % 2 != 0:
        return None
    negative, first = parts
    op = operation(negative)
    if op is None or op.name != "mul" or op.arguments[1] != -1.0:
        return None
    second, half = op.arguments[0], length // 2
    if not (_is_slice(first) and _is_slice(second)):
        return None
    passes = {part.args[0] for part in (first, second)} - {x}
    if not all(_are_alike(other, x) for other in passes):
        return None
    if not (_is_part(first, first.args[0], 0, half) and _is_part(second, second.args[0], half, length)):
        return None
    return [node, negative, first, second], passes


def _are_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether both are what they are cast from, in one dtype."""
    return _uncast(node) is _uncast(other) and value_of(node).dtype == value_of(other).dtype


def _uncast(node: fx.Node) -> fx.Node:
    cast = operation(node)
    return cast.arguments[0] if cast is not None and cast.name in ("cast", "same") else node


def _joined_in_rows(node: object) -> tuple[fx.Node, fx.Node] | None:
    """Two tensors that are joined along the last dimension."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not torch.cat:
        return None
    read = _joined_parts(*node.args, **node.kwargs)
    if read is None or len(read[0]) != 2 or read[1] not in (-1, value_of(node).dim() - 1):
        return None
    return tuple(read[0])


def _joined_parts(tensors, dim=0, *, axis=None, out=None):
    """What torch.cat joins, and along which dimension."""
    return (tensors, dim if axis is None else axis) if out is None and isinstance(tensors, (list, tuple)) else None


def _is_slice(node: object) -> bool:
    """Whether it is x[..., begin:end] of some x."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or not is_tensor(node.args[0]):
        return False
    index = node.args[1]
    return (
        isinstance(index, tuple)
        and len(index) == 2
        and index[0] is Ellipsis
        and isinstance(index[1], slice)
        and all(isinstance(at, (int, type(None))) for at in (index[1].start, index[1].stop, index[1].step))
    )


def _is_part(node: object, x: fx.Node, begin: int, end: int) -> bool:
    """Whether it is x[..., begin:end]."""
    if not _is_slice(node) or node.args[0] is not x or not isinstance(value_of(x).shape[-1], int):
        return False
    return range(*node.args[1][1].indices(value_of(x).shape[-1])) == range(begin, end)

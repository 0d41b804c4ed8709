"""Rotary position embedding as models write it: x · cos + turned · sin, where turned is cat(-x₂, x₁) of a row's halves,
or has the two numbers of each pair change places, before or behind a cast; both halves by themselves; and of a row's
first numbers, with the others behind them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Size, Tensor, fx

from onepass.functional import _lines
from onepass.graph.operations import called, is_tensor, operation, same, same_shape, value_of

__all__ = ["Rotation", "find", "may_have"]

CALLS = ("call_function", "call_method")
PIECES = (torch.chunk, torch.split, torch.functional.split, "chunk", "split")
UNBINDS = (torch.unbind, "unbind")
RESHAPES = (torch.flatten, torch.reshape, "flatten", "reshape", "reshape_as", "view", "unflatten", torch.unflatten)


@dataclass(frozen=True)
class Rotation:
    """x, its cosines and sines, and the nodes between them and the result; how many of x's numbers are turned, None of
    all of them. `passes` are other casts of what x is a cast of, which others may need as well."""

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    nodes: frozenset[fx.Node]
    passes: frozenset[fx.Node] = frozenset()
    turned: int | None = None
    interleaved: bool = False

    @property
    def word(self) -> str:
        return _lines.rope(self.turned, self.interleaved)


@dataclass(frozen=True)
class Part:
    """Some of the columns of a row, and the nodes that take them out of it."""

    x: fx.Node
    columns: range
    nodes: frozenset[fx.Node]


def find(node: fx.Node) -> Rotation | None:
    """What the node, a sum or a concatenation, rotates."""
    if node.target is torch.cat:
        return _of_halves(node) or _of_first_numbers(node)
    return _of_rows(node)


def may_have(node: fx.Node) -> bool:
    """Whether a rotation may have such a node between x and its result."""
    return node.op in CALLS and node.target in (operator.getitem, torch.cat, torch.stack, *PIECES, *UNBINDS, *RESHAPES)


def _of_rows(node: fx.Node) -> Rotation | None:
    """x · cos + turned · sin."""
    op = operation(node)
    if op is None or op.name != "add":
        return None
    for straight, other in (op.arguments, op.arguments[::-1]):
        for x, cos in _factors(straight):
            for turned, sin in _factors(other):
                found = _turned_as(turned, x)
                if found is None or not _are_tables(cos, sin, value_of(x).shape):
                    continue
                return replace(found, cos=cos, sin=sin, nodes=found.nodes | {node, straight, other})
    return None


def _turned_as(turned: fx.Node, x: fx.Node) -> Rotation | None:
    """What is turned, if that is x, or a cast of one tensor with it; or what x, and its turned row, are casts of."""
    found = _turned(turned, value_of(x).shape)
    if found is not None:
        return replace(found, x=x, passes=frozenset({found.x} - {x})) if _is_the_same(found.x, x) else None
    source, before = _uncast(x), _uncast(turned)
    found = _turned(before, value_of(x).shape) if source is not x and before is not turned else None
    if found is None or found.x is not source or value_of(turned).dtype != value_of(x).dtype:
        return None
    own = {x} if len(x.users) == 1 else set()
    return replace(found, nodes=found.nodes | {turned} | own, passes=frozenset({x} - own))


def _of_halves(node: fx.Node) -> Rotation | None:
    """cat((x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin), -1)."""
    halves = _joined(node, torch.cat)
    difference, total = map(operation, halves or (None, None))
    if difference is None or total is None or (difference.name, total.name) != ("sub", "add"):
        return None
    for first, cos in _factors(difference.arguments[0]):
        for second, sin in _factors(difference.arguments[1]):
            for by_cos, by_sin in (total.arguments, total.arguments[::-1]):
                if (second, cos) not in _factors(by_cos) or (first, sin) not in _factors(by_sin):
                    continue
                parts = _parts((first, second), value_of(node).shape, _halves)
                if parts is None or not _are_tables(cos, sin, value_of(first).shape):
                    continue
                nodes = {node, *halves, *difference.arguments, *total.arguments}
                return Rotation(parts.x, cos, sin, parts.nodes | nodes)
    return None


def _of_first_numbers(node: fx.Node) -> Rotation | None:
    """cat((rotated, x[..., n:]), -1), where x[..., :n] is rotated."""
    rotated, rest = _joined(node, torch.cat) or (None, None)
    rotation = find(rotated) if isinstance(rotated, fx.Node) else None
    if rotation is None or rotation.turned is not None or len(rotated.users) > 1 or rotation.passes:
        return None
    turned = value_of(rotation.x).shape[-1]
    parts = _parts((rotation.x, rest), value_of(node).shape, lambda n: (range(turned), range(turned, n)))
    if parts is None or value_of(parts.x).dtype != value_of(node).dtype:
        return None
    return replace(rotation, x=parts.x, nodes=rotation.nodes | parts.nodes | {node}, turned=turned)


def _turned(node: fx.Node, shape: Size) -> Rotation | None:
    """Of a row of this shape, cat((-x₂, x₁), -1), or each pair as (-second, first); without tables."""
    joined, interleaved = _joined(node, torch.cat), False
    nodes = {node}
    if joined is None and called(node) in RESHAPES and is_tensor(node) and same_shape(value_of(node).shape, shape):
        stack = node.args[0] if node.args else None
        joined, interleaved = _joined(stack, torch.stack), True
        nodes |= {stack}
    negative, first = joined or (None, None)
    op = operation(negative)
    if op is None or op.name != "mul" or op.arguments[1] != -1.0:
        return None
    parts = _parts((first, op.arguments[0]), shape, _pairs if interleaved else _halves)
    if parts is None:
        return None
    return Rotation(parts.x, None, None, parts.nodes | nodes | {negative}, interleaved=interleaved)


def _halves(columns: int) -> tuple[range, range]:
    return range(columns // 2), range(columns // 2, columns)


def _pairs(columns: int) -> tuple[range, range]:
    return range(0, columns, 2), range(1, columns, 2)


def _parts(nodes: Iterable[object], shape: Size, columns_of) -> Part | None:
    """The row of this shape that these are the parts of, in this order; the columns of each are what columns_of(a
    row's) says."""
    columns, parts = shape[-1], [_part(node) for node in nodes]
    if not isinstance(columns, int) or columns % 2 != 0 or None in parts:
        return None
    x = parts[0].x
    if any(part.x is not x for part in parts) or not same_shape(value_of(x).shape, shape):
        return None
    if tuple(part.columns for part in parts) != columns_of(columns):
        return None
    return Part(x, range(columns), frozenset().union(*(part.nodes for part in parts)))


def _part(node: object) -> Part | None:
    """x[..., begin:end:step], one of the pieces that a row is split into, or one of the two rows, or columns, of a row
    that is seen as a matrix."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or not is_tensor(node):
        return None
    of, index = node.args
    if isinstance(index, int):
        return _of_matrix(node, of, index) if called(of) in UNBINDS else _piece(node, of, index)
    if not is_tensor(of) or not isinstance(index, tuple) or not isinstance(value_of(of).shape[-1], int):
        return None
    *before, last = index
    whole = [Ellipsis] if before == [Ellipsis] else [slice(None)] * (value_of(of).dim() - 1)
    if before != whole or not isinstance(last, slice):
        return None
    if not all(isinstance(at, (int, type(None))) for at in (last.start, last.stop, last.step)):
        return None
    return Part(of, range(*last.indices(value_of(of).shape[-1])), frozenset({node}))


def _of_matrix(node: fx.Node, unbound: fx.Node, index: int) -> Part | None:
    """Of x.reshape(..., n, 2).unbind(-1) every other number of a row, of x.reshape(..., 2, n).unbind(-2) a half."""
    matrices, dim = _tensor_and_dim(*unbound.args, **unbound.kwargs)
    if not is_tensor(matrices) or called(matrices) not in RESHAPES or not is_tensor(x := matrices.args[0]):
        return None
    shape, columns = value_of(matrices).shape, value_of(x).shape[-1]
    along = dim if dim < 0 else dim - len(shape)
    if along not in (-1, -2) or not same_shape(shape[:-2], value_of(x).shape[:-1]) or not isinstance(columns, int):
        return None
    if not same(shape[along], 2) or not same(shape[-3 - along], columns // 2):
        return None
    own = range(columns)[index % 2 :: 2] if along == -1 else range(columns)[index % 2 * columns // 2 :][: columns // 2]
    return Part(x, own, frozenset({node, unbound, matrices}))


def _tensor_and_dim(input, dim=0):
    return input, dim


def _piece(node: fx.Node, pieces: fx.Node, index: int) -> Part | None:
    """Of a row, which is what was split where the pieces' other dimensions are its own."""
    if called(pieces) not in PIECES or not is_tensor(pieces.args[0]):
        return None
    x, values = pieces.args[0], value_of(pieces)
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, Tensor) for value in values):
        return None
    columns = [value.shape[-1] for value in values]
    if not all(isinstance(n, int) for n in columns) or not same(sum(columns), value_of(x).shape[-1]):
        return None
    if not all(same_shape(value.shape[:-1], value_of(x).shape[:-1]) for value in values):
        return None
    begin = sum(columns[: index % len(columns)])
    return Part(x, range(begin, begin + columns[index]), frozenset({node, pieces}))


def _joined(node: object, by) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that torch.cat or torch.stack joins along its result's last dimension."""
    if not isinstance(node, fx.Node) or node.target is not by:
        return None
    read = _tensors_and_dim(*node.args, **node.kwargs)
    if read is None or len(read[0]) != 2 or read[1] not in (-1, value_of(node).dim() - 1):
        return None
    return tuple(read[0])


def _tensors_and_dim(tensors, dim=0, *, axis=None, out=None):
    return (tensors, dim if axis is None else axis) if out is None and isinstance(tensors, (list, tuple)) else None


def _factors(node: object) -> list[tuple[fx.Node, fx.Node]]:
    """Of a product, in both orders."""
    op = operation(node)
    if op is None or op.name != "mul" or not all(map(is_tensor, op.arguments)):
        return []
    return [op.arguments, op.arguments[::-1]]


def _is_the_same(node: fx.Node, other: fx.Node) -> bool:
    """Whether both are one tensor, or casts of one to one dtype."""
    return _uncast(node) is _uncast(other) and value_of(node).dtype == value_of(other).dtype


def _uncast(node: fx.Node) -> fx.Node:
    op = operation(node)
    return op.arguments[0] if op is not None and op.name in ("cast", "same") else node


def _are_tables(cos: fx.Node, sin: fx.Node, shape: Size) -> bool:
    """Whether they have a number, without a gradient, for each of a tensor of this shape."""
    tensors = value_of(cos), value_of(sin)
    offsets = [len(shape) - t.dim() for t in tensors]
    return all(
        t.is_floating_point()
        and not t.requires_grad
        and offset >= 0
        and all(same(a, b) or same(a, 1) for a, b in zip(t.shape, shape[offset:]))
        for t, offset in zip(tensors, offsets)
    )

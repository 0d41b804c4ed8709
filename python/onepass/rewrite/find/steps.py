"""What one more node is to a row: words that continue a line, and the tensors that they take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Size, fx

from onepass.graph.operations import is_tensor, operation, same, same_shape, value_of
from onepass.reference import ACTIVATIONS
from onepass.rewrite.find import idioms, rotary

__all__ = ["Step", "steps"]


@dataclass(frozen=True)
class Step:
    """Words of `x`, whose value is `result`'s; `nodes` are no longer needed where they stand in its place. `passes` are
    the tensors on the way, those that others need as well among them. `order` is that in which the result has x's
    dimensions, where they are permuted."""

    x: fx.Node
    words: tuple[str, ...]
    operands: tuple[fx.Node, ...]
    result: fx.Node
    nodes: frozenset[fx.Node]
    passes: frozenset[fx.Node] = frozenset()
    order: tuple[int, ...] = ()


def steps(node: fx.Node) -> Iterator[Step]:
    """All that the node can be; sums and products may continue either of their sides."""
    found = idioms.find(node) if operation(node) is not None else None
    if found is not None:
        yield Step(found.x, (found.word,), (), node, frozenset(found.nodes), found.passes)
        return
    rotation = rotary.find(node)
    if rotation is not None:
        yield Step(rotation.x, (rotation.word,), (rotation.cos, rotation.sin), node, rotation.nodes, rotation.passes)
        return
    op = operation(node)
    if op is None:
        return
    if op.name == "permuted":
        x, order = op.arguments
        yield Step(x, (), (), node, frozenset({node}), order=order)
    elif op.name in ("add", "mul"):
        for x, other in (op.arguments, op.arguments[::-1]):
            yield from _of_two(op.name, node, x, other)
    elif op.name in ("sub", "div"):
        yield from _of_two(op.name, node, *op.arguments)
    elif (read := _of_one(op.name, *op.arguments)) is not None:
        words, operands = read
        if is_tensor(op.arguments[0]):
            yield Step(op.arguments[0], words, operands, node, frozenset({node}))


def _of_one(name: str, x, *rest) -> tuple[tuple[str, ...], tuple[fx.Node, ...]] | None:
    """Words and operands of what has one row as its subject."""
    if name in ("same", "cast", "view"):
        return (), ()
    if any(isinstance(number, float) and math.isnan(number) for number in rest):  # no line has one
        return None
    if name in ACTIVATIONS or name in ("dropout", "softmax", "log_softmax", "l2_norm"):
        return (f"{name}({', '.join(map(repr, rest))})" if rest else name,), ()
    if name in ("layer_norm", "rms_norm"):
        *affine, eps = rest
        if eps is None:  # of rms_norm: the machine's
            word = name
        elif isinstance(eps, (int, float)):
            word = f"{name}({float(eps)!r})"
        else:
            return None
        pairs = [(w, o) for w, o in zip(("scale", "bias"), affine) if o is not None]
        return (word, *(w for w, _ in pairs)), tuple(o for _, o in pairs)
    return None


def _of_two(name: str, node: fx.Node, x, other) -> Iterator[Step]:
    """A sum or a product, a difference or a quotient, that continues x."""
    if not is_tensor(x) or not same_shape(value_of(x).shape, value_of(node).shape):
        return
    nodes = frozenset({node})
    if not is_tensor(other):
        if name == "mul" and isinstance(other, (int, float)) and math.isfinite(other):
            yield Step(x, () if other == 1 else (f"mul({float(other)!r})",), (), node, nodes)
        return
    shape, of_other = value_of(x).shape, value_of(other)
    if x is other or not of_other.is_floating_point() or of_other.device != value_of(x).device:
        return
    is_column = of_other.dim() == 1 and same(of_other.shape[0], shape[-1])
    if name in ("add", "mul") and (is_column or _is_batch_of_columns(of_other.shape, shape)):
        if name == "mul" and (shifted := _shifted(other)) is not None:
            yield Step(x, (f"scale({shifted[1]!r})",), (shifted[0],), node, nodes | {other})
        if name == "mul" or is_column:  # a sum with a batch of columns is `add`, which attention knows as a mask
            yield Step(x, ("bias" if name == "add" else "scale",), (other,), node, nodes)
        if is_column:
            return
    if name in ("add", "sub") and _broadcasts(of_other.shape, shape):
        yield Step(x, (name,), (other,), node, nodes)
    elif name == "div" and same_shape(of_other.shape, shape):
        yield Step(x, ("div",), (other,), node, nodes)
    elif name == "mul" and same_shape(of_other.shape, shape):
        yield Step(x, ("gate",), (other,), node, nodes)  # of the activation before it
        yield from _gated(node, x, other)
        yield Step(x, ("times",), (other,), node, nodes)


def _gated(node: fx.Node, x: fx.Node, other: fx.Node) -> Iterator[Step]:
    """A product with an activation that nobody else needs."""
    op = operation(other)
    if op is None or op.name not in ACTIVATIONS or len(other.users) > 1 or op.arguments[0] is x:
        return
    read = _of_one(op.name, *op.arguments)
    if read is not None and is_tensor(op.arguments[0]):
        ((word,), _) = read
        yield Step(x, (f"gated({word})",), (op.arguments[0],), node, frozenset({node, other}))


def _shifted(node: fx.Node) -> tuple[fx.Node, float] | None:
    """A tensor, and the number that is added to it, of a sum that nobody else asks for."""
    op = operation(node)
    if op is None or op.name != "add" or len(node.users) != 1:
        return None
    for tensor, number in (op.arguments, op.arguments[::-1]):
        if is_tensor(tensor) and isinstance(number, (int, float)) and math.isfinite(number):
            own, whole = value_of(tensor), value_of(node)
            if own.dtype == whole.dtype and same_shape(own.shape, whole.shape):
                return tensor, float(number)
    return None


def _is_batch_of_columns(shape: Size, of: Size) -> bool:
    """Whether a tensor has rows of numbers for some rows each, of a tensor of this shape."""
    return len(shape) > 1 and same(shape[-1], of[-1]) and _broadcasts(shape, of) and not same_shape(shape, of)


def _broadcasts(shape: Size, to: Size) -> bool:
    """Whether a tensor of this shape has no number twice in one of that shape but along whole dimensions."""
    offset = len(to) - len(shape)
    return offset >= 0 and all(same(a, b) or same(a, 1) for a, b in zip(shape, to[offset:]))

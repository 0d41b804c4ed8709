"""Loops over the pieces of a tensor: what is done to each, and stacked again, is done to all at once."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from onepass.rewrite.operations import is_tensor, operation, value_of

__all__ = ["join_pieces"]

ON_ROWS = {
    *("relu", "tanh", "sigmoid", "silu", "mish", "hardswish", "softplus", "gelu", "elu", "leaky_relu", "erf"),
    *("pow", "square", "sqrt", "rsqrt", "add", "sub", "mul", "div", "mean", "var"),
    *("layer_norm", "rms_norm", "softmax", "dropout", "linear", "cast", "same", "view"),
}
"""Operations that do to a row the same whatever other rows there are. (A dropout draws other masks for all at once.)"""
VIEWS = ("view", "reshape")


def join_pieces(graph: fx.Graph) -> int:
    """Moves each stack along a new first dimension before the operations whose results it stacks, as far as these are
    the same for all; a stack of all pieces of a split is a view of the tensor that was split. Returns how many
    operations became one for all pieces."""
    joined = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.stack or not _is_first(node):
            continue
        stack, moved = node, 0
        while (earlier := _moved_before(graph, stack)) is not None:
            stack, moved = earlier, moved + 1
        joined += moved
        whole = _whole_of(stack)
        if whole is not None:
            with graph.inserting_before(stack):
                viewed = graph.call_method("reshape", (whole, tuple(value_of(stack).shape)))
            viewed.meta = {"example_value": value_of(stack)}
            stack.replace_all_uses_with(viewed)
            graph.erase_node(stack)
    if joined:
        graph.eliminate_dead_code()
    return joined


def _is_first(stack: fx.Node) -> bool:
    dim = stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)
    pieces = stack.args[0] if stack.args else None
    static = is_tensor(stack) and not any(isinstance(size, torch.SymInt) for size in value_of(stack).shape)
    return static and dim == 0 and isinstance(pieces, (list, tuple)) and len(pieces) > 1 and "out" not in stack.kwargs


def _moved_before(graph: fx.Graph, stack: fx.Node) -> fx.Node | None:
    """The stack of what the stacked operations are of, where they are one operation; its result stands for theirs."""
    pieces = stack.args[0]
    first = pieces[0]
    if not all(_is_alike(piece, first) for piece in pieces):
        return None
    sources = [piece.args[0] for piece in pieces]
    shapes = {value_of(source).shape for source in sources}
    if len(shapes) != 1 or any(not isinstance(source, fx.Node) for source in sources):
        return None
    with graph.inserting_before(stack):
        inner = graph.call_function(torch.stack, (sources,))
        inner.meta = {"example_value": value_of(sources[0]).new_empty((len(sources), *shapes.pop()))}
        if first.op == "call_method" and first.target in VIEWS:
            outer = graph.call_method("reshape", (inner, tuple(value_of(stack).shape)))
        else:
            outer = graph.create_node(first.op, first.target, (inner, *first.args[1:]), dict(first.kwargs))
    outer.meta = {"example_value": value_of(stack)}
    stack.replace_all_uses_with(outer)
    graph.erase_node(stack)
    for piece in dict.fromkeys(pieces):
        graph.erase_node(piece)
    return inner


def _is_alike(piece: fx.Node, first: fx.Node) -> bool:
    """Whether two nodes do the same to different tensors, and nobody else looks at the result."""
    if len(piece.users) != 1 or piece.op not in ("call_function", "call_method") or not is_tensor(piece.args[0]):
        return False
    does, wanted = ((p.op, p.target, p.args[1:], p.kwargs) for p in (piece, first))
    shape = value_of(piece).shape
    if does != wanted or shape != value_of(first).shape or getattr(piece.target, "__name__", "").endswith("_"):
        return False
    if piece.op == "call_method" and piece.target in VIEWS:
        return True
    op = operation(piece)
    if op is None or op.name not in ON_ROWS or not shape:
        return False
    if op.name in ("softmax", "mean", "var") and _counts_from_front(piece):
        return False
    # A tensor beside the row is one for all of them: a column, or the parameters of a layer.
    others = [value_of(a) for a in (*piece.args[1:], *piece.kwargs.values()) if is_tensor(a)]
    return op.name in ("layer_norm", "rms_norm", "linear") or all(o.dim() <= len(shape) for o in others)


def _counts_from_front(piece: fx.Node) -> bool:
    """Of a dimension; there is one more in front of all pieces."""
    dims = piece.args[1] if len(piece.args) > 1 else piece.kwargs.get("dim", 0)
    return any(dim >= 0 for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _whole_of(stack: fx.Node) -> fx.Node | None:
    """The tensor of which all pieces are stacked, in their order."""
    pieces = stack.args[0]
    if not all(p.op == "call_function" and p.target is operator.getitem for p in pieces):
        return None
    split = pieces[0].args[0]
    if any(p.args != (split, i) for i, p in enumerate(pieces)) or not isinstance(split, fx.Node):
        return None
    given = value_of(split)
    whole = split.args[0] if split.args else None
    splits = split.target in (torch.split, torch.chunk, torch.unbind, torch.tensor_split, *METHODS)
    if not splits or not is_tensor(whole) or not isinstance(given, (list, tuple)) or len(given) != len(pieces):
        return None
    along_first = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) == 0
    if split.target in (torch.unbind, "unbind"):
        along_first = (split.args[1] if len(split.args) > 1 else split.kwargs.get("dim", 0)) == 0
    equal = all(isinstance(t, Tensor) and t.shape == given[0].shape for t in given)
    return whole if along_first and equal else None


METHODS = ("split", "chunk", "unbind", "tensor_split")

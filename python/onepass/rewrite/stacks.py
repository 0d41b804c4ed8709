"""Pieces of a tensor: what is done to each in a loop, and stacked again, is done to all at once; and those of a tensor
that is turned are turned one by one."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from onepass.graph.effects import effects_of, evaluated, remove_unused
from onepass.graph.operations import allocates, called, is_tensor, operation, same_shape, value_of
from onepass.reference import ACTIVATIONS
from onepass.rewrite.find.chains import Order, is_view, lies_as
from onepass.rewrite.find.rotary import PIECES

__all__ = ["join_pieces", "turn_pieces"]

ON_ROWS = {
    *("erf", "rsqrt", "add", "sub", "mul", "div", "mean", "var"),
    *("layer_norm", "rms_norm", "softmax", "dropout", "linear", "cast", "same", "view"),
}
"""Operations that, as activations do, do to a row the same whatever other rows there are. (A dropout draws other masks
for all at once.)"""
VIEWS = ("view", "reshape")  # of another row length, too


def join_pieces(graph: fx.Graph) -> int:
    """Moves each stack along a new first dimension before the operations whose results it stacks, where these are the
    same for all pieces of a split: a stack of all pieces is a view of the tensor that was split. Returns how many
    operations became one for all pieces."""
    order, joined = Order(graph), 0
    for stack in list(graph.nodes):
        if stack.op == "call_function" and stack.target is torch.stack and _is_first(stack):
            joined += _join(graph, order, stack)
    return joined


def turn_pieces(graph: fx.Graph) -> None:
    """Splits features before heads are turned, as in x.transpose(1, 2).chunk(3, -1), where that is written behind it.
    In backward gradients are joined where the tensor lies, and that is not turned back as a whole. Two pieces may be
    the halves of a rotary embedding, which is found as it is written."""
    order = Order(graph)
    for split in list(graph.nodes):
        op = operation(turned := split.args[0]) if called(split) in PIECES else None
        if op is None or op.name != "permuted" or not _is_along_last(split) or len(turned.users) > 1:
            continue
        pieces, (source, dims) = list(split.users), op.arguments
        modes = [order.modes[order.index[node]] for node in (turned, split, *pieces)]
        alike = all(piece.target is operator.getitem for piece in pieces) and all(mode == modes[0] for mode in modes)
        if len(pieces) < PACKED or not alike or order.is_written({turned}, order.index[turned]):
            continue
        with graph.inserting_before(split):
            whole = _call(graph, split.op, split.target, (source, *split.args[1:]), dict(split.kwargs))
            for piece in pieces:
                of_source = _call(graph, piece.op, piece.target, (whole, piece.args[1]))
                piece.replace_all_uses_with(_call(graph, "call_method", "permute", (of_source, dims)))
        for node in (*pieces, split, turned):
            graph.erase_node(node)
        order.look()


def _is_along_last(split: fx.Node) -> bool:
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    return dim in (-1, value_of(split.args[0]).dim() - 1)


def _join(graph: fx.Graph, order: Order, stack: fx.Node) -> int:
    """How many operations before a stack became one for all pieces."""
    pieces, operations = list(stack.args[0]), []  # from the last operation to the first
    while (whole := _whole_of(pieces)) is None:
        if not all(_is_alike(piece, pieces[0]) for piece in pieces):
            return 0
        operations.append(pieces)
        pieces = [piece.args[0] for piece in pieces]
        if not all(isinstance(piece, fx.Node) for piece in pieces):
            return 0
    if not all(isinstance(size, int) for size in value_of(whole).shape):
        return 0
    replaced = {stack, *(node for nodes in operations for node in nodes)}
    taken = {whole, *pieces, *(given for node in replaced for given in node.all_input_nodes)}
    is_new = any((op := operation(nodes[0])) is not None and allocates(op.name) for nodes in operations)
    one_mode = len({order.modes[order.index[node]] for node in replaced}) == 1
    if not is_new or not one_mode or order.is_written(taken | replaced, order.index[pieces[0].args[0]]):
        return 0  # a view where there was a copy, or numbers of another moment
    made: list[fx.Node] = []
    try:
        with graph.inserting_before(stack):
            for node in _all_at_once(graph, whole, pieces, operations):
                made.append(node)
    except Exception:  # whatever an operator raises for one more dimension
        made.append(stack)
    joined, *before = reversed(made)
    value = value_of(joined)
    shows_view = is_view(value) != is_view(value_of(stack)) and order.is_given(stack)
    if joined is stack or shows_view or not lies_as(value, value_of(stack)) or value.dtype != value_of(stack).dtype:
        for node in (joined, *before):
            if node is not stack:
                graph.erase_node(node)
        return 0
    stack.replace_all_uses_with(joined)
    remove_unused(graph, [stack])
    for nodes in operations:  # a dropout among them draws, but what it drew for nobody needs
        for node in dict.fromkeys(nodes):
            if not node._erased and not node.users:
                graph.erase_node(node)
    remove_unused(graph, [piece for piece in pieces if not piece._erased])
    return len(operations)


def _all_at_once(
    graph: fx.Graph, whole: fx.Node, pieces: list[fx.Node], operations: list[list[fx.Node]]
) -> Iterator[fx.Node]:
    """What is done to each piece, done to all in one tensor; the last node is what is stacked."""
    joined = _call(graph, "call_method", "reshape", (whole, (len(pieces), *value_of(pieces[0]).shape)))
    yield joined
    for first, *_ in reversed(operations):
        if first.op == "call_method" and first.target in VIEWS or operation(first).name == "view":
            joined = _call(graph, "call_method", "reshape", (joined, (len(pieces), *value_of(first).shape)))
        else:
            joined = _call(graph, first.op, first.target, (joined, *first.args[1:]), dict(first.kwargs))
        yield joined


def _call(graph: fx.Graph, kind: str, target, args, kwargs=None) -> fx.Node:
    node = graph.create_node(kind, target, args, kwargs)
    try:
        node.meta = {"example_value": evaluated(node)}
    except Exception:
        graph.erase_node(node)
        raise
    return node


def _is_first(stack: fx.Node) -> bool:
    dim = stack.args[1] if len(stack.args) > 1 else stack.kwargs.get("dim", 0)
    pieces = stack.args[0] if stack.args else None
    static = is_tensor(stack) and not any(isinstance(size, torch.SymInt) for size in value_of(stack).shape)
    return static and dim == 0 and isinstance(pieces, (list, tuple)) and len(pieces) > 1 and "out" not in stack.kwargs


def _is_alike(piece: object, first: object) -> bool:
    """Whether two nodes do the same to different tensors, and nobody else looks at the result."""
    if not is_tensor(piece) or len(piece.users) != 1 or piece.op not in ("call_function", "call_method"):
        return False
    does, wanted = ((p.op, p.target, p.args[1:], p.kwargs) for p in (piece, first))
    if does != wanted or not piece.args or not is_tensor(piece.args[0]):
        return False
    if piece.op == "call_method" and piece.target in VIEWS:
        return True
    shape, of_first = value_of(piece).shape, value_of(first).shape
    if not shape or not same_shape(shape, of_first):
        return False
    op = operation(piece)
    if op is None or op.name not in (ON_ROWS | ACTIVATIONS.keys()) or effects_of(piece).writes:
        return False
    if op.name in ("softmax", "mean", "var") and _counts_from_front(piece):
        return False
    # A tensor beside the row is one for all of them: a column, or the parameters of a layer.
    return op.name in ("linear", "view", "mean", "var") or same_shape(shape, value_of(piece.args[0]).shape)


def _counts_from_front(piece: fx.Node) -> bool:
    """Of a dimension; there is one more in front of all pieces."""
    dims = piece.args[1] if len(piece.args) > 1 else piece.kwargs.get("dim", 0)
    return any(dim >= 0 for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))


def _whole_of(pieces: list[fx.Node]) -> fx.Node | None:
    """The tensor of which these are all pieces, in their order."""
    if not all(p.op == "call_function" and p.target is operator.getitem for p in pieces):
        return None
    split = pieces[0].args[0]
    if not isinstance(split, fx.Node) or any(p.args != (split, i) for i, p in enumerate(pieces)):
        return None
    given = value_of(split)
    whole = split.args[0] if split.args else None
    splits = called(split) in (torch.split, torch.chunk, torch.unbind, torch.tensor_split, *METHODS)
    if not splits or not is_tensor(whole) or not isinstance(given, (list, tuple)) or len(given) != len(pieces):
        return None
    along_first = (split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)) == 0
    if split.target in (torch.unbind, "unbind"):
        along_first = (split.args[1] if len(split.args) > 1 else split.kwargs.get("dim", 0)) == 0
    equal = all(isinstance(t, Tensor) and t.shape == given[0].shape for t in given)
    return whole if along_first and equal else None


METHODS = ("split", "chunk", "unbind", "tensor_split")
PACKED = 3
"""Query, key and value."""

"""Rows that models sort by their expert, and sort back.

PyTorch's backward of `x[index]` adds the gradients of a row up, and sorts the index for that, whatever it holds. Where
a graph shows that the index is a permutation, or one divided by how often each row is taken, the gradient is taken with
the inverse permutation instead, in one kernel.
"""

from __future__ import annotations

import inspect
import operator

import torch
from torch import Tensor, fx

from onepass.graph.effects import changes_shapes, effects_of, evaluated, remove_unused
from onepass.graph.operations import called, is_tensor, same, value_of
from onepass.rewrite.find.chains import Order

__all__ = ["gather_back"]


def gather_back(graph: fx.Graph) -> None:
    """Gives `x[permutation]` and `x[permutation // times]`, of which gradients are recorded, a backward pass that
    gathers."""
    if changes_shapes(graph):
        return
    order = Order(graph)
    for permutation in [node for node in graph.nodes if _is_permutation(node)]:
        if order.is_written({permutation}, order.index[permutation]):
            continue
        # Backward of rows at the inverse needs the permutation, which a caller may overwrite where it is given.
        written = {} if order.is_given(permutation) else _inverses(permutation, order)
        taken = [(rows, 1) for rows in (permutation, *written)]
        taken += [(user, times) for user in permutation.users if (times := _divides(user, permutation, order))]
        gathers = [(node, rows, times) for rows, times in taken for node in rows.users if _gathers(node, rows, times)]
        seen = [permutation, *written, *(node for node, *_ in gathers)]
        if not gathers or order.is_transformed(permutation) or not order.in_one_mode(*seen):
            continue
        inverse = _call(graph, permutation, inverse_of, permutation)
        for node, rows, times in gathers:
            at, back = (inverse, permutation) if rows in written else (rows, inverse)
            node.target, node.args, node.kwargs = gathered, (node.args[0], at, back, times), {}
        for made, writes in written.items():
            counts = [] if writes is None else [writes.args[2]]
            if writes is not None:
                graph.erase_node(writes)
            made.replace_all_uses_with(inverse)
            graph.erase_node(made)
            remove_unused(graph, counts)


def _is_permutation(node: fx.Node) -> bool:
    """Whether it is an index that sorts a row of numbers."""
    if node.op == "output" or not is_tensor(node) or value_of(node).dim() != 1:
        return False
    if called(node) in (torch.argsort, "argsort"):
        return True
    sorts = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    return isinstance(sorts, fx.Node) and called(sorts) in (torch.sort, "sort")


def _inverses(permutation: fx.Node, order: Order) -> dict[fx.Node, fx.Node | None]:
    """What the graph makes its inverse, which nobody else writes or is given, and the nodes that write it:
    `empty_like(p)` with `[p] = arange(len(p))`."""
    found: dict[fx.Node, fx.Node | None] = {}
    for user in permutation.users:
        if user.args != (permutation,) or order.is_given(user):
            continue
        if called(user) in (torch.argsort, "argsort") and not {*user.kwargs} - {"stable"}:
            if not order.is_written({user}, order.index[user]):
                found[user] = None
        elif called(user) in (torch.empty_like, torch.zeros_like) and not user.kwargs:
            first = min(user.users, key=order.index.get, default=None)
            if first is not None and _fills(first, user, permutation, order):
                if not order.is_written({user}, order.index[first]):
                    found[user] = first
    return found


def _fills(node: fx.Node, made: fx.Node, permutation: fx.Node, order: Order) -> bool:
    """Whether it is `made[permutation] = arange(len(permutation))`."""
    if node.target is not operator.setitem or node.args[:2] != (made, permutation):
        return False
    counts = node.args[2]
    return not node.users and _counts(counts, permutation) and not order.is_written({counts}, order.index[counts])


def _counts(node: object, permutation: fx.Node) -> bool:
    """Whether it is 0, 1, 2, ..., as many numbers as the permutation has."""
    if (
        not isinstance(node, fx.Node)
        or called(node) is not torch.arange
        or len(node.args) != 1
        or {*node.kwargs} - {"device", "dtype"}
    ):
        return False
    value, like = value_of(node), value_of(permutation)
    return value.dtype == like.dtype and same(value.shape[0], like.shape[0]) and effects_of(node).none


def _divides(node: fx.Node, permutation: fx.Node, order: Order) -> int | None:
    """By what it divides the permutation, rounded down, if nobody overwrites that."""
    if node.target is not operator.floordiv or node.args[0] is not permutation:
        return None
    if order.is_written({node}, order.index[node]) or not order.in_one_mode(node, permutation):
        return None
    return node.args[1] if isinstance(node.args[1], int) and node.args[1] > 0 else None


def _gathers(node: fx.Node, rows: fx.Node, times: int) -> bool:
    """Whether it takes all rows of a tensor, each so often, and gradients are recorded of that."""
    if node.target is not operator.getitem or node.args[1] is not rows:
        return False
    source = node.args[0]
    if not is_tensor(source) or not value_of(source).is_floating_point() or not value_of(node).requires_grad:
        return False
    return same(value_of(source).shape[0] * times, value_of(rows).shape[0])


def _call(graph: fx.Graph, behind: fx.Node, target, *arguments) -> fx.Node:
    with graph.inserting_after(behind):
        made = graph.call_function(target, arguments)
    made.meta = {"example_value": evaluated(made)}
    return made


def inverse_of(permutation: Tensor) -> Tensor:
    """Where each of its numbers stands."""
    places = torch.arange(permutation.shape[0], dtype=permutation.dtype, device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def gathered(x: Tensor, rows: Tensor, inverse: Tensor, times: int) -> Tensor:
    """`x[rows]`, where rows are a permutation divided by `times`, whose inverse is given, too.

    Saved for backward: the inverse, and rows, which PyTorch saves: who overwrites them gets its error.
    """
    return _Gathered.apply(x, rows, inverse, times)


class _Gathered(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, rows, inverse, times):
        return x[rows]

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, rows, inverse, ctx.times = inputs
        ctx.save_for_backward(inverse, rows)
        ctx.save_for_forward(rows)

    @staticmethod
    def backward(ctx, gradient):
        inverse, _ = ctx.saved_tensors
        # Not by this function: PyTorch records none within a backward pass of batched gradients.
        back = gradient[inverse]
        if ctx.times > 1:
            back = back.reshape(back.shape[0] // ctx.times, ctx.times, *back.shape[1:]).sum(1)
        return back, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return tangent[ctx.saved_tensors[0]]


_Gathered.forward.__signature__ = inspect.signature(_Gathered.forward)
"""`apply` asks for it in every call, of a function with `setup_context`: 32 us a call become 20."""

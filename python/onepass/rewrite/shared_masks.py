"""Masks of attention that a model makes in each layer anew, from a position bias, say: made once, without what repeats
along batches."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onepass.graph.effects import effects_of, evaluated, remove_unused
from onepass.graph.operations import called, is_tensor, operation, same_shape, value_of
from onepass.rewrite.find.chains import Order
from onepass.rewrite.masks import CALLS, ancestors, constant, fits

__all__ = ["share_masks"]

EXPANDS = ("expand", torch.Tensor.expand, "expand_as")


def share_masks(graph: fx.Graph) -> int:
    """Has calls of PyTorch's attention take the first of masks that are computed alike, and one that is no larger than
    what it is made of: attention repeats a mask itself, and sums its gradient. `torch.where` leaves a bias as it is
    where its condition is true throughout, as of masks that models make where they are traced. Returns how many calls
    take another mask."""
    calls = [(node, op) for node in graph.nodes if (op := operation(node)) is not None and op.name == "attention"]
    calls = [(node, op.arguments) for node, op in calls if is_tensor(op.arguments[3])]
    calls = [(node, given) for node, given in calls if fits(given[3], *given[:2])]
    if not calls:
        return 0
    order, replaced = Order(graph), []
    once = _Once(order, [given[3] for _, given in calls])
    for node, given in calls:
        less = once.mask(given[3])
        if less is not given[3] and order.attends(node, (*given[:3], less, *given[4:])):
            replaced.append(given[3])
    remove_unused(graph, [*replaced, *once.made.values()])
    return len(replaced)


class _Once:
    """Which nodes of those that masks are computed from are the first to give their value.

    Attributes:
        made: what masks consist of now, by what it is computed from.
    """

    def __init__(self, order: Order, masks: list[fx.Node]) -> None:
        self.order, self.given = order, order.given()
        self.made: dict[tuple, fx.Node] = {}
        self.first: dict[fx.Node, fx.Node] = {}
        self.true: dict[fx.Node, bool] = {}
        needed, known = ancestors(masks), {}
        for node in (node for node in order.graph.nodes if node in needed):
            self.first[node] = node
            if node.op in CALLS and effects_of(node).none:
                same = known.setdefault(self._key(node, node.args, node.kwargs), node)
                self.first[node] = same if same is node or self._are_unseen(same, node) else node

    def mask(self, node: fx.Node) -> fx.Node:
        """What an attention may take in the place of this mask."""
        found = self._made_of(node)
        value, before = value_of(found), value_of(node)
        is_as_wide = value.dim() == before.dim() and same_shape(value.shape[-2:], before.shape[-2:])
        return found if is_as_wide and value.dtype == before.dtype else self.first[node]

    def _made_of(self, node: fx.Node) -> fx.Node:
        """A mask, of the parts of which it is made, as large as they are."""
        if called(node) == "contiguous":
            source = node.args[0]
            less = self._made_of(source) if is_tensor(source) and self._is_unseen(node) else source
            return self.first[node] if less in (source, self.first[source]) else self._call(node, (less,))
        if called(node) in EXPANDS:
            less = self._before_repeats(node)
            return less if self._is_unseen(node, less) else node
        if called(node) is not torch.where or len(node.args) != 3 or node.kwargs:  # noqa: PLR2004
            return self.first[node]
        parts = condition, bias, other = tuple(map(self._before_repeats, node.args))
        taken = [part for part in parts if isinstance(part, fx.Node)]
        learns = is_tensor(other) and value_of(other).requires_grad  # it has a gradient of zeros, then
        is_constant = is_tensor(bias) and not learns and self._is_true(condition)
        is_smaller = is_constant or parts != self._firsts(node.args)
        if not is_smaller or not all(map(is_tensor, taken)) or not self._is_unseen(node, *taken):
            return self.first[node]
        return bias if is_constant and value_of(bias).dtype == value_of(node).dtype else self._call(node, parts)

    def _before_repeats(self, part: object) -> object:
        """The tensor that is repeated along dimensions of one, the first that is the same."""
        while isinstance(part, fx.Node) and called(part) in EXPANDS and is_tensor(part.args[0]):
            if value_of(part.args[0]).dim() != value_of(part).dim():
                break
            part = part.args[0]
        return self.first[part] if isinstance(part, fx.Node) else part

    def _is_true(self, condition: fx.Node) -> bool:
        """Whether it is always true throughout."""
        if condition not in self.true:
            found = constant(condition, self.order) if value_of(condition).dtype == torch.bool else None
            with unset_fake_temporarily():
                self.true[condition] = found is not None and bool(found.all())
        return self.true[condition]

    def _call(self, like: fx.Node, args: tuple) -> fx.Node:
        """What a node calls, called with these once, before it."""
        key = self._key(like, args, like.kwargs)
        if key not in self.made:
            graph = self.order.graph
            with graph.inserting_before(like):
                made = graph.create_node(like.op, like.target, args, like.kwargs)
            made.meta = {**like.meta, "example_value": evaluated(made)}
            self.made[key] = self.first[made] = made
            self.order.look()
        return self.made[key]

    def _key(self, node: fx.Node, args: tuple, kwargs: dict) -> tuple:
        """What a node's value depends on."""
        return node.op, node.target, repr(self._firsts((args, kwargs))), self.order.modes[self.order.index[node]]

    def _firsts(self, arguments: tuple) -> tuple:
        return fx.node.map_arg(arguments, lambda given: self.first.get(given, given))

    def _are_unseen(self, first: fx.Node, node: fx.Node) -> bool:
        """Whether nobody can tell that one tensor is in the place of both."""
        return self._is_unseen(first, node) and self._is_unseen(node)

    def _is_unseen(self, node: fx.Node, *others: fx.Node) -> bool:
        """Whether nobody has the node's memory or asks for its gradient, and what it takes, these too, stays what it
        is."""
        taken = {node, *node.all_input_nodes, *others}
        return not (
            self.order.is_written(taken, min(self.order.index[given] for given in taken))
            or self.order.memory.of(node) & self.given
            or self.order.shows_gradient(node, frozenset())
        )

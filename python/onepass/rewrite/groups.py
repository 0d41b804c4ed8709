"""Group normalisation in a graph, with what is added to its channels before and the activation behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, fx

from onepass.call import fused
from onepass.functional import _lines
from onepass.graph.effects import effects_of, evaluated
from onepass.graph.operations import is_contiguous, is_tensor, leave_apart, operation, same, same_shape, value_of
from onepass.reference import ACTIVATIONS
from onepass.rewrite.find.chains import HOLDS, Order, lies_as
from onepass.rewrite.rewriter import as_result

__all__ = ["Groups", "group_norms", "put_groups"]


@dataclass(frozen=True)
class Groups:
    """One of them. `nodes` are those that its line stands for, the result last."""

    x: fx.Node
    shift: fx.Node | None
    """Numbers (N or 1, C, 1, ...) that are added to x's channels."""
    groups: int
    weight: fx.Node | None
    bias: fx.Node | None
    line: str
    nodes: tuple[fx.Node, ...]

    @property
    def result(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def operands(self) -> list[fx.Node]:
        """Those that there are."""
        return [node for node in (self.shift, self.weight, self.bias) if node is not None]


def group_norms(graph: fx.Graph) -> list[Groups]:
    """All that a line is the same as, in the graph's order."""
    leave_apart(graph)
    order = Order(graph)
    ops = ((node, operation(node)) for node in graph.nodes)
    found = [_read(node, *op.arguments) for node, op in ops if op is not None and op.name == "group_norm"]
    return [groups for groups in found if groups is not None and _stands_alone(order, groups)]


def _read(node: fx.Node, x, groups, weight, bias, eps) -> Groups | None:
    """The normalisation, if its numbers are known."""
    affine = [t for t in (weight, bias) if t is not None]
    is_plain = isinstance(groups, int) and isinstance(eps, (int, float)) and all(map(is_tensor, affine))
    if not is_plain or math.isnan(eps) or not is_tensor(x) or value_of(x).dtype not in HOLDS:
        return None
    nodes, activation = [node], _activation_behind(node)
    nodes += [] if activation is None else [activation[0]]
    before = _sum_before(x)
    if before is not None:
        nodes, (x, shift) = [x, *nodes], before
    words = [
        *(["bias(channels)"] if before is not None else []),
        _lines.group_norm(float(eps), weight is not None, bias is not None, activation and activation[1]),
    ]
    if any(value_of(of).dtype != value_of(x).dtype for of in nodes):
        return None  # under autocast a norm gives float32
    if not is_contiguous(value_of(x)):
        return None  # a copy would be made, and x's gradient would lie otherwise
    return Groups(x, shift if before is not None else None, groups, weight, bias, " | ".join(words), tuple(nodes))


def _activation_behind(node: fx.Node) -> tuple[fx.Node, str] | None:
    """The only user, and its word."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    op = operation(user)
    if op is None or op.name not in ACTIVATIONS or op.arguments[0] is not node:
        return None
    numbers = op.arguments[1:]
    return user, f"{op.name}({', '.join(map(repr, numbers))})" if numbers else op.name


def _sum_before(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """What a sum that nobody else needs adds to the channels of what."""
    op = operation(node)
    if op is None or op.name != "add" or len(node.users) != 1:
        return None
    for x, shift in (op.arguments, op.arguments[::-1]):
        if is_tensor(x) and is_tensor(shift) and same_shape(value_of(x).shape, value_of(node).shape):
            own, of = value_of(shift), value_of(x)
            is_row = own.dim() == of.dim() > 2 and all(same(size, 1) for size in own.shape[2:])
            if is_row and own.dtype == of.dtype and own.device == of.device and same(own.shape[1], of.shape[1]):
                return x, shift
    return None


def _stands_alone(order: Order, found: Groups) -> bool:
    """Whether nobody can tell: all in one mode, and nothing of it is overwritten but by itself."""
    first = min(order.index[node] for node in found.nodes)
    if len({order.modes[order.index[node]] for node in found.nodes}) > 1:
        return False
    if not all(effects_of(node).known for node in found.nodes):
        return False
    taken = {found.x, *found.operands}
    if any(order.depends(node, frozenset(found.nodes)) for node in found.operands):
        return False
    return not order.is_written({*taken, *found.nodes}, first, frozenset(found.nodes))


def put_groups(graph: fx.Graph, found: Groups, instead: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The line in its place; None where somebody could see that it lies otherwise than the result did. `instead`: what
    stands in the place of results since they were found."""
    order, result = Order(graph), found.result
    tensors = [instead.get(node, node) for node in (found.x, found.shift, found.weight, found.bias)]
    with graph.inserting_before(result):
        call = graph.call_function(_grouped, (found.line, found.groups, *tensors))
    call.meta = {"example_value": evaluated(call)}
    given = value_of(call)
    if not lies_as(given, value_of(result)) and not order.absorbs({result: given}, frozenset(found.nodes)):
        graph.erase_node(call)
        return None
    result.replace_all_uses_with(call)
    instead[result] = call
    for node in reversed(found.nodes):
        graph.erase_node(node)
    return call


def _grouped(
    line: str, groups: int, x: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """The line of rows that are groups of x's channels."""
    batch, channels, *sizes = x.shape
    of_group = channels // groups
    columns = [] if shift is None else [shift.reshape(shift.shape[0], groups, of_group)]
    columns += [c.reshape(groups, of_group) for c in (weight, bias) if c is not None]
    rows = x.reshape(batch, groups, of_group * math.prod(sizes))
    return as_result(fused(line, rows, *columns), (0, 1, 2), x.shape)

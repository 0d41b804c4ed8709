"""A head and its loss in a graph: PyTorch's cross_entropy of what a linear layer gives, where nobody else sees that."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onepass import functional
from onepass._arguments.shapes import is_sharded
from onepass.graph.effects import effects_of, evaluated
from onepass.graph.operations import is_tensor, operation, same, same_shape, sizes, value_of
from onepass.rewrite.find.chains import Order, lies_as

__all__ = ["put_heads"]

LEAST_LOGITS = 1 << 22
"""Below, there is little memory to be saved."""
ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
CASTS = ("float", "to", "contiguous")
FLATTENS = ("view", "reshape", "flatten", torch.reshape, torch.flatten)


@dataclass(frozen=True)
class Head:
    """A loss, with its arguments; the linear layer; and what stands between them, that behind the layer first."""

    loss: fx.Node
    given: dict[str, Any]
    layer: fx.Node
    between: tuple[fx.Node, ...]
    softcap: float | None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return self.layer, *self.between, self.loss

    @property
    def taken(self) -> set[fx.Node]:
        """What comes from elsewhere."""
        return {node for one in self.nodes for node in one.all_input_nodes} - {*self.nodes}


def put_heads(graph: fx.Graph, training: bool) -> list[fx.Node]:
    """`functional.linear_cross_entropy` in the place of heads and their losses, whose logits are never made then."""
    order, put = Order(graph), []
    for node in list(graph.nodes):
        head = _head_of(node, training)
        if head is not None and _is_large(head) and _stands_alone(order, head) and (made := _put(graph, head)):
            put.append(made)
    return put


def _head_of(loss: fx.Node, training: bool) -> Head | None:
    if loss.op != "call_function" or loss.target is not F.cross_entropy or not is_tensor(loss):
        return None
    given = {**dict(zip(ARGUMENTS, loss.args)), **loss.kwargs}
    if not _is_understood(given, training):
        return None
    between: list[fx.Node] = []
    node, softcap = given["input"], None
    while not _is_layer(node):
        if softcap is None and (capped := _capped(node)) is not None:
            softcap, *nodes = capped
            between += nodes
            node = nodes[-1].args[0]
            continue
        if not _is_between(node, given["input"], bool(between) and _flattens(between[-1])):
            return None
        between.append(node)
        node = node.args[0]
    users = zip((node, *reversed(between)), (*reversed(between), loss))
    if any(list(made.users) != [user] or user.all_input_nodes.count(made) != 1 for made, user in users):
        return None
    return Head(loss, given, node, tuple(reversed(between)), softcap)


def _capped(node: Any) -> tuple[Any, ...] | None:
    """c and the three nodes of c tanh(x / c), the last one first."""
    outer = operation(node)
    inner = operation(outer.arguments[0]) if outer is not None and outer.name == "mul" else None
    scaled = operation(inner.arguments[0]) if inner is not None and inner.name == "tanh" else None
    if scaled is None or scaled.name != "mul":
        return None
    number, inverse = outer.arguments[1], scaled.arguments[1]
    if type(number) not in (int, float) or type(inverse) not in (int, float):
        return None
    nodes = node, outer.arguments[0], inner.arguments[0]
    first = all(each.args and each.args[0] is before for each, before in zip(nodes, (*nodes[1:], scaled.arguments[0])))
    if not first or number <= 0 or not math.isclose(number * inverse, 1.0, rel_tol=1e-12):
        return None
    return float(number), *nodes


def _is_understood(given: dict[str, Any], training: bool) -> bool:
    """Classes, not probabilities, of rows of logits. Losses that are not added up in training, and smoothed ones of
    weighted classes, would take more products than they do."""
    target, weight = given.get("target"), given.get("weight")
    numbers = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    if not is_tensor(given.get("input")) or not is_tensor(target) or not (weight is None or is_tensor(weight)):
        return False
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return False
    if type(numbers[0]) is not int or type(numbers[1]) not in (int, float) or weight is not None and numbers[1]:
        return False
    rows = value_of(target).dtype == torch.int64 and value_of(target).dim() == 1 and value_of(given["input"]).dim() == 2
    return rows and given.get("reduction", "mean") in (("mean", "sum") if training else ("mean", "sum", "none"))


def _is_layer(node: Any) -> bool:
    op = operation(node)
    if op is None or op.name != "linear" or node.kwargs:
        return False
    x, weight, bias = op.arguments
    if not is_tensor(x) or not is_tensor(weight) or value_of(weight).dim() != 2:
        return False
    if bias is not None and (not is_tensor(bias) or value_of(bias).dim() != 1):
        return False
    return all(isinstance(size, int) for size in value_of(weight).shape)


def _is_between(node: Any, logits: fx.Node, is_flattened: bool) -> bool:
    """A cast to float32, a part of the rows, or all of them one behind the other, with nothing moved in a row.

    is_flattened: whether the next node flattens.
    """
    if not is_tensor(node) or not node.args or not is_tensor(node.args[0]):
        return False
    value, before = value_of(node), value_of(node.args[0])
    if value.dim() == 0 or before.dim() == 0 or not same(value.shape[-1], before.shape[-1]):
        return False
    if value.device != before.device or value.dtype != before.dtype and not _widens(before.dtype, value.dtype):
        return False
    if node.target is operator.getitem:
        return _is_part_of_rows(node.args[1], before.dim()) and value.dim() == before.dim()
    if _flattens(node):
        return value.dim() == 2 and not is_flattened and value.dtype == before.dtype
    is_cast = node.op == "call_method" and node.target in CASTS
    return is_cast and same_shape(value.shape, before.shape)


def _widens(dtype: torch.dtype, to: torch.dtype) -> bool:
    """To the arithmetic of losses."""
    return to == torch.float32 and dtype in (torch.bfloat16, torch.float16)


def _flattens(node: fx.Node) -> bool:
    return node.target in FLATTENS


def _is_part_of_rows(index: Any, dims: int) -> bool:
    index = index if isinstance(index, tuple) else (index,)
    if not all(at is Ellipsis or isinstance(at, slice) for at in index):
        return False
    bounds = [bound for at in index if isinstance(at, slice) for bound in (at.start, at.stop, at.step)]
    if not all(bound is None or type(bound) is int for bound in bounds):
        return False
    reaches_last = Ellipsis in index[:-1] or len(index) == dims and Ellipsis not in index
    return not reaches_last or index[-1] == slice(None)


def _is_large(head: Head) -> bool:
    return math.prod(sizes(value_of(head.given["input"]))) >= LEAST_LOGITS


def _stands_alone(order: Order, head: Head) -> bool:
    """Whether nobody can tell: all in one mode, without effects, and nothing of it is overwritten."""
    first = order.index[head.layer]
    modes = {order.modes[order.index[node]] for node in head.nodes}
    if len(modes) > 1 or next(iter(modes))[0] != torch.is_grad_enabled():
        return False
    if any(not effects_of(node).none for node in head.nodes):
        return False
    if any(is_sharded(value_of(node)) for node in (*head.nodes, *head.taken)):
        return False  # where a DTensor's loss lies is not asked here
    return not order.is_written({*head.nodes, *head.taken}, first)


def _put(graph: fx.Graph, head: Head) -> fx.Node | None:
    """The call; None where it does not give what the loss was."""
    x, weight, bias = operation(head.layer).arguments
    options = {
        name: head.given[name]
        for name in ("weight", "reduction", "ignore_index", "label_smoothing")
        if name in head.given
    }
    if head.softcap is not None:
        options["softcap"] = head.softcap
    made: list[fx.Node] = []

    def add(kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.create_node(kind, target, args, kwargs)
        made.append(node)
        node.meta = {"example_value": evaluated(node)}
        return node

    try:
        with graph.inserting_before(head.loss):
            for node in head.between:
                if node.target is operator.getitem:
                    x = add("call_function", operator.getitem, x, node.args[1])
            if value_of(x).dim() != 2:
                x = add("call_method", "reshape", x, -1, value_of(weight).shape[-1])
            call = result = add(
                "call_function",
                functional.linear_cross_entropy,
                x,
                weight,
                head.given["target"],
                linear_bias=bias,
                **options,
            )
            if value_of(result).dtype != value_of(head.loss).dtype:
                result = add("call_method", "to", result, value_of(head.loss).dtype)
    except Exception:  # whatever a function raises for tensors without data
        result = call = None
    if result is None or not lies_as(value_of(result), value_of(head.loss)):
        for node in reversed(made):
            graph.erase_node(node)
        return None
    head.loss.replace_all_uses_with(result)
    for node in reversed(head.nodes):
        graph.erase_node(node)
    return call

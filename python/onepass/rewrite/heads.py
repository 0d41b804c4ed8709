"""Losses in a graph: PyTorch's cross_entropy of logits, and of a linear layer whose logits nobody else sees; results
without logits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from onepass import functional
from onepass._arguments.shapes import is_sharded
from onepass.graph.effects import effects_of, evaluated
from onepass.graph.operations import called, is_tensor, operation, same, same_shape, sizes, value_of
from onepass.rewrite.find.chains import Order, lies_as

__all__ = ["Head", "heads", "put_head", "without_logits"]

LEAST_LOGITS = 1 << 22
"""Below, there is little memory to be saved."""
ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
CASTS = ("float", "to", "contiguous")
FLATTENS = ("view", "reshape", "flatten", torch.reshape, torch.flatten)


class Step(NamedTuple):
    """One of what makes logits.

    Attributes:
        kind: "linear", "softcap", or "rows" for what leaves each row's numbers what they are.
        nodes: the last one first.
        source: what it takes: a linear layer's x.
        taken: of a softcap its number; of a linear layer its matrix, its bias and what its result is multiplied by.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    source: fx.Node
    taken: Any = None


@dataclass(frozen=True)
class Head:
    """A loss, with its arguments, and the steps before it that only it sees, the last one first: as far as a linear
    layer, or logits that are there.

    Attributes:
        unread: what it would be, back to a linear layer, if nobody else read the logits that it takes.
    """

    loss: fx.Node
    given: dict[str, Any]
    steps: tuple[Step, ...]
    unread: Head | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return self.loss, *(node for step in self.steps for node in step.nodes)

    @property
    def source(self) -> fx.Node:
        """A linear layer's x, or the logits."""
        return self.steps[-1].source if self.steps else self.given["input"]

    @property
    def layer(self) -> Step | None:
        return self.steps[-1] if self.steps and self.steps[-1].kind == "linear" else None

    @property
    def logits(self) -> fx.Node:
        return self.source if self.layer is None else self.layer.nodes[0]

    @property
    def softcap(self) -> float | None:
        return next((step.taken for step in self.steps if step.kind == "softcap"), None)

    @property
    def ending(self) -> str:
        """The words behind a linear layer."""
        smoothing, ignored = (self.given.get(name) for name in ("label_smoothing", "ignore_index"))
        numbers = smoothing or 0.0, 0.0, -100 if ignored is None else ignored
        word = "cross_entropy" if numbers == (0.0, 0.0, -100) else f"cross_entropy{numbers}"
        return word if self.softcap is None else f"softcap({self.softcap}) | {word}"

    @property
    def line(self) -> str:
        if self.layer is None:
            return self.ending
        return ("linear | " if self.layer.taken[1] is None else "linear | bias | ") + self.ending

    @property
    def taken(self) -> set[fx.Node]:
        """What comes from elsewhere."""
        return {node for one in self.nodes for node in one.all_input_nodes} - {*self.nodes}

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """What stands for it."""
        return functional.cross_entropy if self.layer is None else functional.linear_cross_entropy


def heads(graph: fx.Graph, training: bool) -> Iterator[Head]:
    """The losses of many logits, each for what `put_head` has made of those before it."""
    order = Order(graph)
    for node in list(graph.nodes):
        head = _head_of(node, training)
        if head is not None and _is_large(head) and _stands_alone(order, head):
            yield head


def _head_of(loss: fx.Node, training: bool) -> Head | None:
    if loss.op != "call_function" or loss.target is not F.cross_entropy or not is_tensor(loss):
        return None
    given = {**dict(zip(ARGUMENTS, loss.args)), **loss.kwargs}
    if not _is_understood(given):
        return None
    steps: list[Step] = []
    while (step := _step(steps[-1].source if steps else given["input"], steps)) is not None:
        steps.append(step)
    users = [loss, *(step.nodes[-1] for step in steps)]
    alone = [_is_alone(step, user) for step, user in zip(steps, users)]
    own = alone.index(False) if False in alone else len(steps)
    whole = Head(loss, given, tuple(steps))
    if whole.layer is not None and training and given.get("reduction") == "none":
        return Head(loss, given, tuple(steps[: min(own, len(steps) - 1)]))  # a step would take one product more
    if own == len(steps):
        return whole
    return Head(loss, given, tuple(steps[:own]), whole if whole.layer is not None else None)


def _is_alone(step: Step, user: fx.Node) -> bool:
    """Whether what it gives, and makes on the way, is seen by what stands behind it alone, once."""
    return all(
        list(node.users) == [after] and after.all_input_nodes.count(node) == 1
        for node, after in zip(step.nodes, (user, *step.nodes))
    )


def _is_understood(given: dict[str, Any]) -> bool:
    """Classes, not probabilities, of rows of logits. Smoothed losses of weighted classes would take more products, or
    passes over logits, than they do."""
    target, weight = given.get("target"), given.get("weight")
    numbers = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    if not is_tensor(given.get("input")) or not is_tensor(target) or not (weight is None or is_tensor(weight)):
        return False
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return False
    if type(numbers[0]) is not int or type(numbers[1]) not in (int, float) or weight is not None and numbers[1]:
        return False
    logits, target = value_of(given["input"]), value_of(target)
    rows = target.dtype == torch.int64 and target.dim() == 1 and logits.dim() == 2
    return rows and isinstance(logits.shape[-1], int) and given.get("reduction", "mean") in ("mean", "sum", "none")


def _step(node: fx.Node, behind: list[Step]) -> Step | None:
    """What gives this, if it is understood; behind: the steps that follow, the last one first."""
    if behind and behind[-1].kind == "linear":
        return None
    if (layer := _layer(node)) is not None:
        return layer
    if all(step.kind != "softcap" for step in behind) and (capped := _capped(node)) is not None:
        return capped
    # Parts of rows are taken of x, before its rows are one behind the other.
    is_cut = any(each.target is operator.getitem for step in behind for each in step.nodes)
    return _rows(node, is_cut or bool(behind) and _flattens(behind[-1].nodes[-1]))


def _layer(node: fx.Node) -> Step | None:
    """A linear layer, whose result a power of two may multiply, as it may multiply x without another rounding (but of
    float16, whose range is small); or which has a bias of one row."""
    nodes, scale, bias, op = [node], None, None, operation(node)
    if op is not None and op.name == "add":
        product, bias = op.arguments if _is_bias(op.arguments[1], node) else reversed(op.arguments)
        if not _is_bias(bias, node) or not is_tensor(product):
            return None
        nodes.append(product)
    elif op is not None and op.name == "mul" and _is_power_of_two(op.arguments[1]):
        product, scale = op.arguments
        nodes.append(product)
    op = operation(nodes[-1])
    if op is None or op.name != "linear" or nodes[-1].kwargs:
        return None
    x, weight, own = op.arguments
    if not is_tensor(x) or not is_tensor(weight) or value_of(weight).dim() != 2:
        return None
    if own is not None and (len(nodes) > 1 or not is_tensor(own) or value_of(own).dim() != 1):
        return None
    first, last = (value_of(each) for each in (nodes[-1], node))
    if not same_shape(first.shape, last.shape) or last.dtype != first.dtype and not _widens(first.dtype, last.dtype):
        return None
    if scale is not None and first.dtype == torch.float16:
        return None
    if not all(isinstance(size, int) for size in value_of(weight).shape):
        return None
    return Step("linear", tuple(nodes), x, (weight, own if bias is None else bias, scale))


def _is_bias(node: Any, logits: fx.Node) -> bool:
    """A number for each class."""
    if not is_tensor(node) or not value_of(node).dim() or not value_of(node).is_floating_point():
        return False
    *rows, classes = value_of(node).shape
    return same(classes, value_of(logits).shape[-1]) and all(same(size, 1) for size in rows)


def _is_power_of_two(number: Any) -> bool:
    return type(number) in (int, float) and math.frexp(number)[0] == 0.5


def _capped(node: fx.Node) -> Step | None:
    """c tanh(x / c)."""
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
    return Step("softcap", nodes, nodes[-1].args[0], float(number))


def _rows(node: fx.Node, is_flattened: bool) -> Step | None:
    """A cast to float32, a part of the rows, or all of them one behind the other, with nothing moved in a row.

    is_flattened: whether they are that already where this is done.
    """
    if not is_tensor(node) or not node.args or not is_tensor(node.args[0]) or not _leaves_rows(node, is_flattened):
        return None
    return Step("rows", (node,), node.args[0])


def _leaves_rows(node: fx.Node, is_flattened: bool) -> bool:
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
    return called(node) in FLATTENS


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
    first = min(order.index[node] for node in head.nodes)
    modes = {order.modes[order.index[node]] for node in head.nodes}
    if len(modes) > 1 or next(iter(modes))[0] != torch.is_grad_enabled():
        return False
    if any(not effects_of(node).none for node in head.nodes):
        return False
    if any(is_sharded(value_of(node)) for node in (*head.nodes, *head.taken)):
        return False  # where a DTensor's loss lies is not asked here
    return not order.is_written({*head.nodes, *head.taken}, first)


def put_head(graph: fx.Graph, head: Head) -> fx.Node | None:
    """The call in its place; None where that does not give what the loss was."""
    options = {
        name: head.given[name]
        for name in ("weight", "reduction", "ignore_index", "label_smoothing")
        if name in head.given
    }
    if head.softcap is not None:
        options["softcap"] = head.softcap
    x, target = head.source, head.given["target"]
    made: list[fx.Node] = []

    def add(kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.create_node(kind, target, args, kwargs)
        made.append(node)
        node.meta = {"example_value": evaluated(node)}
        return node

    try:
        with graph.inserting_before(head.loss):
            for node in (node for step in reversed(head.steps) for node in reversed(step.nodes)):
                if node.target is operator.getitem:
                    x = add("call_function", operator.getitem, x, node.args[1])
            if head.layer is not None:
                weight, bias, scale = head.layer.taken
                if value_of(x).dim() != 2:
                    x = add("call_method", "reshape", x, -1, value_of(weight).shape[-1])
                if scale is not None:
                    x = add("call_function", operator.mul, x, scale)
                if bias is not None and value_of(bias).dim() != 1:
                    bias = add("call_method", "reshape", bias, -1)
                taken, options["linear_bias"] = (x, weight, target), bias
            else:
                if value_of(x).dim() != 2 and options.get("reduction") == "none":
                    x = add("call_method", "reshape", x, -1, value_of(x).shape[-1])
                elif value_of(x).dim() != 2:  # as they lie: of a part of the rows there is no copy
                    target = add("call_method", "view_as", target, add("call_function", operator.getitem, x, (..., 0)))
                    x = add("call_method", "movedim", x, -1, 1)
                taken = x, target
            call = result = add("call_function", head.function, *taken, **options)
            if value_of(result).dtype != value_of(head.loss).dtype:
                result = add("call_method", "to", result, value_of(head.loss).dtype)
    except Exception:  # whatever a function raises for tensors without data
        result = call = None
    if result is None or not lies_as(value_of(result), value_of(head.loss)):
        for node in reversed(made):
            graph.erase_node(node)
        return None
    head.loss.replace_all_uses_with(result)
    for node in head.nodes:
        graph.erase_node(node)
    return call


CACHES = ("past_key_values", "cache")
"""What models of transformers call theirs, older and newer ones."""


def without_logits(result: Any, inputs: tuple, options: dict[str, Any]) -> Any:
    """A dict, or a dataclass whose logits are optional, with a loss: without its logits while gradients are recorded,
    and a dataclass without the cache that the model's call did not ask for, whose one input and options name none.
    Anything else as it is."""
    kind = type(result)
    may_miss_them = kind is dict or hasattr(kind, "__dataclass_fields__") and hasattr(kind, "logits")
    if not torch.is_grad_enabled() or not isinstance(result, dict) or not may_miss_them:
        return result
    if result.get("loss") is None or "logits" not in result:
        return result
    asked = len(inputs) > 1 or options.get("use_cache") or any(options.get(name) is not None for name in CACHES)
    fields = {} if kind is dict or asked else kind.__dataclass_fields__
    caches = [n for n in CACHES if n in fields and fields[n].default is None and not torch.is_tensor(result.get(n))]
    others = {name: value for name, value in result.items() if name not in ("logits", *caches)}
    return others if kind is dict else kind(**others)

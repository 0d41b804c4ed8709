"""Attention masks that depend on nothing but shapes: they are computed once, when a graph is captured."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onepass.graph.effects import effects_of, remove_unused
from onepass.graph.operations import operation, same, value_of
from onepass.rewrite.find.chains import Order

__all__ = ["CALLS", "ancestors", "computed", "constant", "fits", "is_repeatable", "name_masks"]

CALLS = ("call_function", "call_method")
LARGEST = 1 << 28
"""Numbers of a mask that is looked at."""


def name_masks(graph: fx.Graph) -> int:
    """Where a call of PyTorch's attention has a mask that is always the causal one, or none at all, says so: engines
    leave out what is masked only where they are told. Models build such masks where they are traced, since they cannot
    look at their numbers. Returns how many were named."""
    known: dict[fx.Node, str | None] = {}
    order, masks = Order(graph), []
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name != "attention" or not isinstance(op.arguments[3], fx.Node) or op.arguments[5]:
            continue
        query, key, _, mask, *_ = op.arguments
        if mask not in known:
            known[mask] = _meaning(mask, order)
        if known[mask] is None or not fits(mask, query, key) or not _may_be_causal(known[mask], query, key):
            continue
        causal = known[mask] == "causal"
        named = (*op.arguments[:3], None, op.arguments[4], causal, *op.arguments[6:])
        if order.attends(node, named):  # another engine may give another layout
            masks.append(mask)
    remove_unused(graph, masks)
    return len(masks)


def fits(mask: fx.Node, query: fx.Node, key: fx.Node) -> bool:
    """Whether the mask can be added to the scores. PyTorch's attention finds one that cannot only where it runs."""
    scores = (*value_of(query).shape[:-1], value_of(key).shape[-2])
    if len(scores) == 3:  # noqa: PLR2004 (one batch, then)
        scores = (1, *scores)
    sizes = value_of(mask).shape
    return len(sizes) <= len(scores) and all(
        size == 1 or same(size, of_scores) for size, of_scores in zip(reversed(sizes), reversed(scores))
    )


def _may_be_causal(meaning: str, query: fx.Node, key: fx.Node) -> bool:
    """PyTorch's `is_causal` counts from the first query and the first key."""
    return meaning != "causal" or value_of(query).shape[-2] == value_of(key).shape[-2]


def _meaning(mask: fx.Node, order: Order) -> str | None:
    """ "causal", "none", or None for any other mask, and for one that is not known yet."""
    found = constant(mask, order)
    if found is None or found.dim() < 2:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        keeps = found if found.dtype == torch.bool else found == 0
        if keeps is not found and not bool((keeps | (found <= torch.finfo(found.dtype).min)).all()):
            return None
        if bool(keeps.all()):
            return "none"
        rows, columns = keeps.shape[-2:]
        causal = torch.ones(rows, columns, dtype=torch.bool, device=keeps.device).tril()
        return "causal" if rows == columns and bool((keeps == causal).all()) else None


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """These, and all that they are computed from."""
    needed = set(nodes)
    queue = list(needed)
    while queue:
        further = set(queue.pop().all_input_nodes) - needed
        needed |= further
        queue += further
    return needed


def constant(node: fx.Node, order: Order) -> Tensor | None:
    """What a node always gives, if no input of the graph is part of it, nothing random and nothing overwritten, and if
    it has numbers, of a size that is known, and not too many."""
    expected = value_of(node)
    if any(isinstance(size, torch.SymInt) for size in expected.shape) or expected.numel() > LARGEST:
        return None
    needed = ancestors([node])
    if expected.device.type == "meta" or not all(map(is_repeatable, needed)) or order.is_written(needed, -1):
        return None
    found = computed(n for n in node.graph.nodes if n in needed).get(node)
    return found if isinstance(found, Tensor) else None


def is_repeatable(node: fx.Node) -> bool:
    """Whether the node, a call, gives the same for the same arguments whenever it is run: not somebody's own operator,
    whose effects its schema does not say where it takes no tensor, nor one that other processes take part in."""
    if node.op not in CALLS or not effects_of(node).none:
        return False
    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        name = target.name() if isinstance(target, OpOverload) else target._qualified_op_name
        return name.partition("::")[0] in ("aten", "prims", "onepass")
    return not (getattr(target, "__module__", None) or "").startswith("torch.distributed")


def computed(nodes: Iterable[fx.Node]) -> dict[fx.Node, object]:
    """Values of nodes that take each other's alone, in the graph's order; without those that are other than captured,
    and what takes one of these."""
    values: dict[fx.Node, object] = {}
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        for current in nodes:
            if not all(node in values for node in current.all_input_nodes):
                continue
            args, kwargs = fx.node.map_arg((current.args, current.kwargs), values.__getitem__)
            try:
                if current.op == "call_method":
                    value = getattr(args[0], current.target)(*args[1:], **kwargs)
                else:
                    value = current.target(*args, **kwargs)
            except Exception:  # the call raises it, then
                continue
            if _is_as_captured(value, value_of(current)):  # else under an autocast, say
                values[current] = value
    return values


def _is_as_captured(value: object, captured: object) -> bool:
    if not isinstance(value, Tensor) or not isinstance(captured, Tensor):
        return isinstance(value, Tensor) == isinstance(captured, Tensor)
    return value.dtype == captured.dtype and value.shape == captured.shape and value.device == captured.device

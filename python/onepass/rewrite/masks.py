"""Attention masks that depend on nothing but shapes: they are computed once, when a graph is captured."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onepass.rewrite.operations import operation, value_of

__all__ = ["name_masks"]

LARGEST = 1 << 28
"""Numbers of a mask that is looked at."""


def name_masks(graph: fx.Graph) -> int:
    """Where a call of PyTorch's attention has a mask that is always the causal one, or none at all, says so: engines
    leave out what is masked only where they are told. Models build such masks where they are traced, since they cannot
    look at their numbers. Returns how many were named."""
    known: dict[fx.Node, str | None] = {}
    named = 0
    for node in graph.nodes:
        op = operation(node)
        if op is None or op.name != "attention" or not isinstance(op.arguments[3], fx.Node) or op.arguments[5]:
            continue
        query, key, value, mask, p, _, scale, grouped = op.arguments
        if mask not in known:
            known[mask] = _meaning(mask)
        if known[mask] is None or not _may_be_causal(known[mask], query, key):
            continue
        node.args = (query, key, value)
        node.kwargs = {
            "attn_mask": None,
            "dropout_p": p,
            "is_causal": known[mask] == "causal",
            "scale": scale,
            "enable_gqa": grouped,
        }
        named += 1
    if named:
        graph.eliminate_dead_code()
    return named


def _may_be_causal(meaning: str, query: fx.Node, key: fx.Node) -> bool:
    """PyTorch's `is_causal` counts from the first query and the first key."""
    return meaning != "causal" or value_of(query).shape[-2] == value_of(key).shape[-2]


def _meaning(mask: fx.Node) -> str | None:
    """ "causal", "none", or None for any other mask, and for one that is not known yet."""
    expected = value_of(mask)
    if any(isinstance(size, torch.SymInt) for size in expected.shape) or expected.numel() > LARGEST:
        return None
    if expected.device.type == "meta":  # has no numbers to look at
        return None
    with unset_fake_temporarily(), torch.no_grad():
        found = _constant(mask)
        if found is None or found.dim() < 2:
            return None
        keeps = found if found.dtype == torch.bool else found == 0
        if keeps is not found and not bool((keeps | (found <= torch.finfo(found.dtype).min)).all()):
            return None
        if bool(keeps.all()):
            return "none"
        rows, columns = keeps.shape[-2:]
        causal = torch.ones(rows, columns, dtype=torch.bool, device=keeps.device).tril()
        return "causal" if rows == columns and bool((keeps == causal).all()) else None


def _constant(node: fx.Node) -> Tensor | None:
    """What a node always gives, if no input of the graph is part of it and nothing random."""
    order, queue = {}, [node]
    while queue:
        current = queue.pop()
        if current.op not in ("call_function", "call_method") or _is_random(current) or _writes(current):
            return None
        order[current] = None
        queue += [n for n in current.all_input_nodes if n not in order]
    values: dict[fx.Node, object] = {}
    for current in node.graph.nodes:
        if current not in order:
            continue
        args, kwargs = fx.node.map_arg((current.args, current.kwargs), values.__getitem__)
        if current.op == "call_method":
            values[current] = getattr(args[0], current.target)(*args[1:], **kwargs)
        else:
            values[current] = current.target(*args, **kwargs)
    found = values[node]
    return found if isinstance(found, Tensor) else None


def _is_random(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return any(part in name for part in ("rand", "dropout", "bernoulli", "normal", "empty", "seed"))


def _writes(node: fx.Node) -> bool:
    """In place, on it or on what is made of it."""
    users = [user.target for user in node.users if isinstance(user.target, str)]
    return any(name.endswith("_") and not name.endswith("__") for name in users)

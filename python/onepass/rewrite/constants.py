"""Small tensors that a model makes of Python's numbers in each call."""

from __future__ import annotations

import math

import torch
from torch import fx

from onepass.graph.operations import is_tensor, value_of

__all__ = ["fill_constants"]


def fill_constants(graph: fx.Graph) -> None:
    """Has `torch.tensor` of a number, or of none, made on the GPU: it is made on the CPU otherwise, and the host waits
    for the copy, which CUDA graphs cannot do. (Caches of transformers begin with `torch.tensor([])`.)"""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.tensor and is_tensor(node):
            _fill(graph, node)


def _is_within(number: float, dtype: torch.dtype) -> bool:
    """Whether it is not beyond the dtype's range, where torch.tensor gives infinity and torch.full an error."""
    return not dtype.is_floating_point or not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max


def _fill(graph: fx.Graph, node: fx.Node) -> None:
    value, given = value_of(node), dict(node.kwargs)
    number = node.args[0] if node.args else given.pop("data", None)
    if value.device.type != "cuda" or len(node.args) > 1 or not set(given) <= {"dtype", "device"}:
        return
    how = {"dtype": value.dtype, "device": value.device}
    with graph.inserting_before(node):
        if type(number) in (bool, int, float) and _is_within(number, value.dtype):
            made = graph.call_function(torch.full, ((), number), how)
        elif isinstance(number, (list, tuple)) and not number:
            made = graph.call_function(torch.empty, (0,), how)
        else:
            return
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)

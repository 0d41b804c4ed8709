"""Tensors that a model makes in each call, and that are the same in all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from onepass.graph.effects import changes_shapes, remove_unused
from onepass.graph.operations import APART, is_tensor, value_of
from onepass.rewrite.find.chains import Order, lies_as
from onepass.rewrite.masks import computed, is_repeatable

__all__ = ["fill_constants", "hold_constants"]

LARGEST = 1 << 24
"""Bytes of a tensor that is held."""


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


def hold_constants(gm: fx.GraphModule) -> None:
    """Has what depends on nothing but sizes computed when the graph is captured: places, masks of windows, buckets of
    relative positions are a few dozen short kernels a step. A result that somebody may overwrite, or is given, is made
    in each call as before."""
    graph = gm.graph
    if changes_shapes(graph):
        return
    order, constants = Order(graph), set()
    for node in graph.nodes:
        is_one = is_repeatable(node) and not node.meta.get(APART) and not order.is_inferred(node)
        if is_one and all(taken in constants for taken in node.all_input_nodes) and _has_size(node):
            constants.add(node)
    constants -= {node for node in constants if order.is_written({node}, -1) or order.is_given(node)}
    values = computed(node for node in graph.nodes if node in constants)
    for node, value in values.items():
        if all(user in values for user in node.users) or not _is_held(value, value_of(node)):
            continue
        name = f"onepass_constant_{sum(1 for _ in gm.buffers())}"
        gm.register_buffer(name, value, persistent=False)
        with graph.inserting_before(node):
            held = graph.get_attr(name)
        held.meta = {**node.meta}
        node.replace_all_uses_with(held, delete_user_cb=lambda user: user not in values)
    remove_unused(graph, list(reversed(values)))


def _has_size(node: fx.Node) -> bool:
    """Whether what it gives is on a device, and no size of it changes from call to call."""
    value = value_of(node)
    if not isinstance(value, Tensor):
        return True
    return is_tensor(node) and value.device.type != "meta" and all(isinstance(size, int) for size in value.shape)


def _is_held(value: object, captured: object) -> bool:
    """Whether it is a tensor as it was captured, and not too large."""
    if not isinstance(value, Tensor) or not lies_as(value, captured):
        return False
    return value.untyped_storage().nbytes() <= LARGEST

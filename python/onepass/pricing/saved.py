"""What is held between forward and backward: by PyTorch's operators, and by a line in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, fx

from onepass.graph.operations import is_tensor, operation, sizes, value_of
from onepass.reference import ACTIVATIONS

__all__ = ["saved_by"]

INPUT = ("erf", "var", "layer_norm", "rms_norm", "l2_norm")
RESULT = ("softmax", "log_softmax", "rsqrt")


def saved_by(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the tensors that PyTorch saves for the backward of these operators, parameters not among them."""
    nodes, held, others = list(nodes), set(), 0
    for node in nodes:
        op = operation(node)
        if op is None:
            continue
        tensors = [a for a in op.arguments if is_tensor(a) and a.op not in ("placeholder", "get_attr")]
        if op.name in ACTIVATIONS:
            saved = _saved_by_activation(ACTIVATIONS[op.name], op.arguments[1:])
            held |= {node} if saved.result else set()
            held |= set(tensors) if saved.input else set()
            others += saved.others * _numbers(value_of(node)) * value_of(node).itemsize
        elif op.name in RESULT:
            held.add(node)
        elif op.name in INPUT or op.name == "linear" and value_of(op.arguments[1]).requires_grad:
            held |= set(tensors[:1])
        elif op.name in ("mul", "div") and len([a for a in op.arguments if is_tensor(a)]) == 2:
            held |= set(tensors)
        elif op.name == "dropout":
            others += _numbers(value_of(node))
    return others + sum(_numbers(value_of(node)) * value_of(node).itemsize for node in held)


class _Saved(NamedTuple):
    input: bool
    result: bool
    others: int
    """Tensors of its size besides."""


@functools.cache
def _saved_by_activation(function: Callable[..., Tensor], numbers: tuple[float, ...]) -> _Saved:
    """What PyTorch's activation saves, found by running it."""
    x, packed = torch.ones(16, device="cpu", requires_grad=True), []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = function(x, *numbers)
    memory = {tensor.untyped_storage()._cdata for tensor in packed if tensor.numel() == x.numel()}
    of_x, of_y = (tensor.untyped_storage()._cdata for tensor in (x, y))
    return _Saved(of_x in memory, of_y in memory, len(memory - {of_x, of_y}))


def _numbers(tensor: Tensor) -> int:
    count = 1
    for size in sizes(tensor):
        count *= size
    return count

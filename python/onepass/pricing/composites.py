"""Functions that a GPU does otherwise than by the ATen operators which tensors without data show: attention in one
kernel, recurrent layers by one product for all steps and one for each."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.pricing.kernels import Kernel, bytes_of, kernel_with

__all__ = ["Tell", "stand_in"]

Tell = Callable[[Kernel], None]
"""Takes a kernel of the direction that is being counted."""


def stand_in(function: Callable, tell: Tell) -> Callable:
    """What gives results without data in a function's place and tells of its kernels, those of backward when backward
    runs; the function itself if it needs none."""
    attention = functools.partial(_attention, tell)
    if function is F.scaled_dot_product_attention or function is torch._C._nn.scaled_dot_product_attention:
        return attention
    if function is F.multi_head_attention_forward:
        ours = {**function.__globals__, "scaled_dot_product_attention": attention}
        changed = types.FunctionType(function.__code__, ours, function.__name__, function.__defaults__)
        changed.__kwdefaults__ = function.__kwdefaults__
        return changed
    name = getattr(function, "__name__", "")
    if name in RECURRENT and function in (getattr(torch, name), getattr(torch._VF, name)):
        return functools.partial(_recurrent, tell, name)
    return function


class _Told(torch.autograd.Function):
    """New tensors, and gradients as large as what is given."""

    @staticmethod
    def forward(ctx, tell_backward, shapes, dtype, *tensors):
        ctx.tell, ctx.given = tell_backward, [(t.shape, t.dtype) for t in tensors]
        return tuple(tensors[0].new_empty(shape, dtype=dtype) for shape in shapes)

    @staticmethod
    def backward(ctx, *upstream):
        ctx.tell()
        needs = ctx.needs_input_grad[3:]
        made = (torch.empty(s, dtype=t) if need else None for (s, t), need in zip(ctx.given, needs))
        return None, None, None, *made


def _cast(dtype: torch.dtype) -> torch.dtype:
    """That of a product's result."""
    casts = torch.is_autocast_enabled("cpu") and dtype == torch.float32
    return torch.get_autocast_dtype("cpu") if casts else dtype


def _attention(
    tell: Tell,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One kernel each way; backward makes the scores again. Half of the scores behind a causal mask."""
    others = () if enable_gqa else (key.shape[:-2], value.shape[:-2])
    batch = torch.broadcast_shapes(query.shape[:-2], *others)
    shape = (*batch, query.shape[-2], value.shape[-1])
    tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    scores = math.prod(batch) * query.shape[-2] * key.shape[-2] / (2 if is_causal else 1)
    deep, wide, dtype = query.shape[-1], value.shape[-1], _cast(query.dtype)
    result_bytes = math.prod(shape) * dtype.itemsize
    given = sum(bytes_of(t) for t in {id(t): t for t in tensors}.values())
    gradients = sum(bytes_of(t) for t in tensors if t.requires_grad)

    def told(read: float, written: float, flops: float) -> None:
        tell(kernel_with("attention", read, written, flops, tensors)._replace(dtype=dtype))

    told(given, result_bytes, 2 * scores * (deep + wide))
    backward = functools.partial(told, given + 2 * result_bytes, gradients, 2 * scores * (3 * deep + 2 * wide))
    return _Told.apply(backward, (shape,), dtype, *tensors)[0]


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _recurrent(tell: Tell, name: str, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Of each layer and direction the product of all steps, and the steps; both twice in backward."""
    if isinstance(arguments[2], (tuple, list)):  # packed: steps have fewer and fewer rows
        batch_sizes, hidden, weights, has_bias, _, _, _, both = arguments
        steps = batch_sizes.numel()
    else:
        hidden, weights, has_bias, _, _, _, both, batch_first = arguments
        steps = x.shape[1 if batch_first and x.dim() == 3 else 0]
    states = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden]
    dtype, rows = _cast(x.dtype), x.numel() // x.shape[-1]
    projects = name == "lstm" and states[0].shape[-1] != states[1].shape[-1]
    of_layer = 2 + 2 * has_bias + projects
    kernels: list[Kernel] = []
    for at, weight in enumerate(weights):
        if weight.dim() == 2:
            kernels += _products(weight, rows, 1 if at % of_layer == 0 else steps, dtype)
    for kernel in kernels:
        tell(kernel)

    def backward() -> None:
        for kernel in kernels:
            tell(kernel)
            tell(kernel)

    shapes = ((*x.shape[:-1], states[0].shape[-1] * (2 if both else 1)), *(state.shape for state in states))
    return _Told.apply(backward, shapes, dtype, x, *states, *weights)


def _products(weight: Tensor, rows: int, times: int, dtype: torch.dtype) -> Sequence[Kernel]:
    """With a matrix, which is read once, of so many rows in all."""
    features, depth = weight.shape
    read, written = rows * depth * dtype.itemsize + bytes_of(weight), rows * features * dtype.itemsize
    of_step = (amount / times for amount in (read, written, 2 * rows * features * depth))
    return [kernel_with("recurrent", *of_step, [weight])._replace(dtype=dtype)] * times

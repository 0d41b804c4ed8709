"""Who computes an attention: this package's line, or which engine of torch's scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._shapes import is_sharded

ENGINES = {
    "cudnn": (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
}
"""Each with those that torch takes in its place where it cannot serve."""

_FIXED = 91501  # the cuDNN that is right for lengths other than multiples of 128, and that torch prefers from then on


class Call(NamedTuple):
    """What the choice depends on."""

    device: str
    """Its type."""
    dtype: torch.dtype
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None = None
    mask_dtype: torch.dtype | None = None
    is_causal: bool = False
    dropout: bool = False
    needs_gradient: bool = False
    """Of any tensor."""
    mask_needs_gradient: bool = False
    grouped: bool = False
    """Whether heads of queries share those of keys."""
    capability: tuple[int, int] = (0, 0)
    cudnn: int = 0
    """Its version, 0 if there is none."""
    sharded: bool = False
    """Whether tensors are DTensors."""


def call_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float, grouped: bool
) -> Call:
    recording = torch.is_grad_enabled()
    mask_needs_gradient = recording and mask is not None and mask.requires_grad
    capability, cudnn = _chip(query.device.index) if query.is_cuda else ((0, 0), 0)
    return Call(
        query.device.type,
        query.dtype,
        query.shape,
        key.shape,
        value.shape,
        None if mask is None else mask.shape,
        None if mask is None else mask.dtype,
        is_causal,
        dropout_p > 0,
        mask_needs_gradient or recording and (query.requires_grad or key.requires_grad or value.requires_grad),
        mask_needs_gradient,
        grouped,
        capability,
        cudnn,
        is_sharded(query),
    )


def choose(call: Call) -> str:
    """The engine that computes a call: "onepass", "torch" (as it chooses itself), or one of `ENGINES` by name.

    On CUDA it rests on measurements on an H200 (bfloat16, us forward / backward). 4x16x2048x64: flash 252 / 817,
    efficient 561 / 1810, cuDNN 169 / 593; causal flash 169 / 542, cuDNN 113 / 412; with an additive mask that heads
    share efficient 801 / 2250, cuDNN 304 / 784, with one for each head 818 / 2123 and 341 / 1104; with a bool mask that
    rows share 820 / 2193 and 302 / 980. 4x16x4096x128: flash 1621 / 5023, cuDNN 830 / 2646; additive efficient
    4318 / 11580, cuDNN 1694 / 4894. So cuDNN where it serves, which is what torch takes first itself on this chip once
    cuDNN is 9.15.1; before, it is named where lengths are multiples of 128, since for others it was wrong.

    On the CPU (2 threads of an AMD EPYC with AVX512_BF16, torch 2.15; torch's time over the line's, forward, then
    with backward): float32 1x4x64x64 1.6, 1.3, 2x8x128x64 1.7, 1.5, 1x12x512x64 1.2, 1.3, causal 1.8, 1.9,
    1x8x2048x64 1.2, 1.2, causal 1.4, 1.5; float64 1.4 to 2.7; bfloat16 1.3 to 3.0, 1.1 to 3.9. Dropout, which torch's
    engine on the CPU does not have, 4 to 18 times. One query a head with 512 keys: float32 0.5, bfloat16 2.8. float16
    0.1 to 0.4, for want of a matrix product. With a gradient of fewer weights than that the line takes some 30 us more
    at 1x2x16x32 (0.7), and is level at 2x4x16x32 (1.1), 4x8x8x64 with 256 keys 1.4.
    """
    if call.grouped and call.key[:-1] != call.value[:-1]:
        return "torch"  # the line has one number of heads for both
    if call.device == "cpu":
        return _choose_on_cpu(call)
    if call.device == "cuda":
        return _choose_on_cuda(call)
    return "torch"


def serves_itself(call: Call) -> bool:
    """Whether CUDA kernels of our own compute the call faster than torch's engines: masks, with at most 256 features,
    and 128 where a gradient is needed of boolean ones or with dropout; with dropout, no boolean ones below 128.

    Measured on an H200 beside cuDNN, bfloat16, us forward / backward, ours and cuDNN's, with an additive mask that
    heads share: 4x16x2048x64 233 / 648 and 273 / 686, 4x16x4096x128 1130 / 3886 and 1550 / 4697, 4x16x2048x128
    297 / 996 and 397 / 1267, 4x16x2048x32 229 / 572 and 270 / 651, 4x16x512x64 41 / 117 and 39 / 145; with a bool mask
    that rows share: 233 / 686 and 249 / 662, 1035 / 3824 and 1302 / 3945, 286 / 1030 and 350 / 1085, 224 / 614 and
    257 / 643, 39 / 128 and 45 / 142. With the mask's gradient 4x16x2048x64 takes 845 backward, and the efficient
    engine, the only one that gives it, 2253. Without a mask 197 / 555 and 165 / 443, 912 / 3265 and 828 / 2508.

    With an additive mask that all share, of more features: 4x16x2048x256 506 / 2912 and 1065 / 3879, 4x8x4096x256
    1054 / 5367 and 2031 / 7069, 4x16x2048x192 with values of 128 367 / 1548 and 461 / 2451.

    With dropout, forward and backward together, additive (heads share it) and bool (rows share it): 4x16x2048x64
    1567 and 1738, 1623 and 1595; 4x16x2048x32 1357 and 1563, 1859 and 1369; 4x16x2048x128 1944 and 2932, 2321 and 2608;
    4x16x4096x128 6676 and 10976, 8430 and 9157; 16x16x512x64 455 and 484, 528 and 436; 16x16x512x128 599 and 940, 740
    and 834.

    Of other numbers of keys than multiples of 8, on an H100, forward alone, with an additive mask that all share (cuDNN
    has none, so the efficient engine): 4x16x2047x64 434 and 564, 4x16x2047x32 369 and 568, 16x12x577x64 146 and 189,
    64x12x131x64 93 and 131, with a bool one that rows share 577 145 and 184, 131 94 and 137. Backward takes up to twice
    as long as the engine's, and so does forward of more than 64 features: 4x16x1023x128 301 and 191.
    """
    is_boolean = call.mask_dtype == torch.bool
    features = max(call.query[-1], call.value[-1])
    fits = (
        call.capability == (9, 0)  # torch 2.11 compiles no `!=` of such
        and call.dtype in (torch.bfloat16, torch.float16)
        and call.mask is not None
        and call.query[-1] % 8 == 0
        and call.value[-1] % 8 == 0
    )
    if not fits:
        return False
    if call.key[-2] % 8 != 0:
        return features <= 64 and call.query[-2] >= 128 and not (call.needs_gradient or call.dropout)
    trains_with_dropout = call.needs_gradient and call.dropout
    if trains_with_dropout and is_boolean and call.query[-1] < 128:
        return False
    return features <= (128 if trains_with_dropout or call.needs_gradient and is_boolean else 256)


def _choose_on_cuda(call: Call) -> str:
    mismatched = call.mask_dtype not in (None, torch.bool, call.dtype)
    if serves_itself(call) or mismatched:  # cuDNN misreads such a mask (pytorch#191612), the others refuse it
        return "onepass"
    if call.cudnn >= _FIXED and call.capability[0] in (9, 10):
        return _without_cudnn(call) if _cudnn_gives_nan(call) else "torch"
    features = call.query[-1]
    serves = (
        call.capability == (9, 0)
        and call.cudnn >= 90000
        and call.dtype in (torch.bfloat16, torch.float16)
        and len(call.query) == 4
        and features == call.value[-1] <= 128
        and features % 8 == 0
        and call.query[-2] % 128 == call.key[-2] % 128 == 0
        and not (call.dropout or call.mask_needs_gradient or call.grouped)
    )
    return "cudnn" if serves else "torch"


def _cudnn_gives_nan(call: Call) -> bool:
    """In gradients of rows whose scores are all below -88 (pytorch#196678; NVIDIA/cudnn-frontend#1072)."""
    masked = call.mask is not None and call.key[-2] % 128 == 64
    return call.needs_gradient and (masked or call.query[-2] == 1)


def _without_cudnn(call: Call) -> str:
    return "flash" if call.mask is None else "efficient"


def _choose_on_cpu(call: Call) -> str:
    if call.sharded:  # torch has no placements for its engine and looks for some, for minutes (2.15)
        return "onepass"
    rows, weights = call.query[-2], math.prod(call.query[:-1]) * call.key[-2]
    if call.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return "torch"
    if call.needs_gradient:  # which may be differentiated again, as that of torch's engine may not
        return "onepass"
    if call.dtype == torch.bfloat16:
        return "onepass" if weights >= 2**12 else "torch"
    return "onepass" if call.dropout or weights >= 2**14 and rows >= 16 else "torch"


def run(
    engine: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """torch's scaled_dot_product_attention with an engine of its own choice ("torch") or a named one."""
    if mask is not None and query.is_cuda:
        mask = _readable(mask, query, key.shape[-2])
    with _only(engine):
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _readable(mask: Tensor, query: Tensor, keys: int) -> Tensor:
    """As torch's engines on CUDA read it well."""
    if mask.dtype == torch.bool:
        # torch makes numbers of all that a mask is expanded to, at four times the attention's time (2.11); and for
        # cuDNN it filled in -65504, which leaves rows masked throughout unmasked.
        once = mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mask.stride())]
        mask = torch.where(once, query.new_zeros(()), -math.inf)
    if mask.shape[-1] != keys:  # a misaligned address, where it is one number for all keys
        mask = mask.expand(*mask.shape[:-1], keys).contiguous()
    return mask


def _only(engine: str):
    if engine == "torch":
        return contextlib.nullcontext()
    return sdpa_kernel(list(ENGINES[engine]), set_priority=engine == "cudnn")


@torch.compiler.assume_constant_result
def _chip(index: int | None) -> tuple[tuple[int, int], int]:
    return _chip_of(index)


@functools.lru_cache
def _chip_of(index: int | None) -> tuple[tuple[int, int], int]:
    return torch.cuda.get_device_capability(index), torch.backends.cudnn.version() or 0

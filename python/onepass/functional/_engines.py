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

from .. import _native
from .._arguments.shapes import is_sharded
from .._tracing import assume_constant_result

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


class Limits(NamedTuple):
    """Masked calls of one kind that are a line here: head_dim at most; head_dim and rows of queries at least."""

    head_dim: int
    least_head_dim: int
    least_queries: int


def _limits(rows: list[dict]) -> dict[tuple[bool, bool, bool, bool], Limits]:
    def of(row: dict, names: tuple[str, ...]) -> tuple:
        return tuple(row[name] for name in names)

    kind = "boolean_mask", "trains", "dropout", "odd_keys"
    return {of(row, kind): Limits(*of(row, Limits._fields)) for row in rows}


_BESIDE = _native.beside_engines()  # measured: docs/measured-facts.md, "Beside torch's engines"
_ON_CUDA, _ON_CPU = _limits(_BESIDE["cuda"]), _BESIDE["cpu"]


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


class Engine(NamedTuple):
    """Who computes an attention, and why: "onepass", "torch" (as it chooses itself), or one of `ENGINES` by name."""

    name: str
    reason: str


def choose(call: Call) -> str:
    """The name of the engine that computes a call."""
    return decide(call).name


def decide(call: Call) -> Engine:
    """The engine that computes a call.

    On CUDA that is ours where it was measured to be faster, else cuDNN where it serves, which torch takes first itself
    once cuDNN is 9.15.1; before, it is named where lengths are multiples of 128, since for others it was wrong.
    """
    if call.grouped and call.key[:-1] != call.value[:-1]:
        return _HEADS
    if call.device == "cpu":
        return _decide_on_cpu(call)
    if call.device == "cuda":
        return _decide_on_cuda(call)
    return _ELSEWHERE


_HEADS = Engine("torch", "key and value have different numbers of heads, and a line has one for both")
_ELSEWHERE = Engine("torch", "this package has kernels for the CPU and for CUDA")


def serves_itself(call: Call) -> bool:
    """Whether CUDA kernels of our own compute the call faster than torch's engines: with masks, where measured."""
    fits = (
        call.capability == (9, 0)  # torch 2.11 compiles no `!=` of such
        and call.dtype in (torch.bfloat16, torch.float16)
        and call.mask is not None
        and call.query[-1] % 8 == 0
        and call.value[-1] % 8 == 0
    )
    if not fits:
        return False
    odd_keys = call.key[-2] % 8 != 0
    limits = _ON_CUDA.get((call.mask_dtype == torch.bool, call.needs_gradient, call.dropout, odd_keys))
    return (
        limits is not None
        and max(call.query[-1], call.value[-1]) <= limits.head_dim
        and call.query[-1] >= limits.least_head_dim
        and call.query[-2] >= limits.least_queries
    )


def _decide_on_cuda(call: Call) -> Engine:
    if call.mask_dtype not in (None, torch.bool, call.dtype):
        return _MISMATCHED
    if serves_itself(call):
        return _MASKED
    if call.cudnn >= _FIXED and call.capability[0] in (9, 10):
        if not _cudnn_gives_nan(call):
            return _CUDNN_FIRST
        return _NO_CUDNN if call.mask is None else _NO_CUDNN_MASKED
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
    return _CUDNN if serves else _TORCHS


_MISMATCHED = Engine("onepass", "the mask is neither boolean nor of query's dtype: cuDNN misreads it (pytorch#191612)")
_MASKED = Engine("onepass", "masked, 16-bit, on sm_90, of sizes for which its kernels were measured to be faster")
_CUDNN_FIRST = Engine("torch", "torch takes cuDNN first here, which was measured to be faster or serves more")
_NO_CUDNN = Engine("flash", "cuDNN may give NaN in gradients of such lengths (pytorch#196678)")
_NO_CUDNN_MASKED = Engine("efficient", "cuDNN may give NaN in gradients of such lengths (pytorch#196678)")
_CUDNN = Engine("cudnn", "cuDNN is the fastest of torch's engines here, and torch does not take it first")
_TORCHS = Engine("torch", "no kernel of this package was measured to be faster here")


def _cudnn_gives_nan(call: Call) -> bool:
    """In gradients of rows whose scores are all below -88 (pytorch#196678; NVIDIA/cudnn-frontend#1072)."""
    masked = call.mask is not None and call.key[-2] % 128 == 64
    return call.needs_gradient and (masked or call.query[-2] == 1)


def _decide_on_cpu(call: Call) -> Engine:
    if call.sharded:
        return _SHARDED
    rows, weights = call.query[-2], math.prod(call.query[:-1]) * call.key[-2]
    if call.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return _NO_DTYPE
    if call.needs_gradient:
        return _TRAINS
    if call.dropout and call.dtype != torch.bfloat16:
        return _DROPS
    if call.dtype == torch.bfloat16:
        large = weights >= _ON_CPU["weights_of_bf16"]
    else:
        large = weights >= _ON_CPU["weights"] and rows >= _ON_CPU["queries"]
    return _LARGE if large else _SMALL


_SHARDED = Engine(
    "onepass", "torch has no placements of DTensors for its engine, and looks for some for minutes (2.15)"
)
_NO_DTYPE = Engine("torch", "lines take float64, float32 and bfloat16 here")
_TRAINS = Engine("onepass", "a gradient is needed: faster than torch's engine, and can be differentiated again")
_DROPS = Engine("onepass", "torch's engine on the CPU has no dropout")
_LARGE = Engine("onepass", "large enough to be faster than torch's engine")
_SMALL = Engine("torch", "small: torch's engine has less to do before it starts")


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


@assume_constant_result
def _chip(index: int | None) -> tuple[tuple[int, int], int]:
    return _chip_of(index)


@functools.lru_cache
def _chip_of(index: int | None) -> tuple[tuple[int, int], int]:
    if not torch.cuda.is_available():  # tensors without data
        return (0, 0), torch.backends.cudnn.version() or 0
    return torch.cuda.get_device_capability(index), torch.backends.cudnn.version() or 0

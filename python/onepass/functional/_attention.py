"""Attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import _lines
from .._shapes import check_tensor, given
from ..line import fused


def attention_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout(softmax(query · keyᵀ · scale, masked)): the probabilities that
    `torch.nn.functional.scaled_dot_product_attention`, whose arguments these are, multiplies with the values.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E), of query's dtype; batch sizes broadcast.
        attn_mask: broadcastable to (..., Hq, L, S). bool: True takes part; floating point: added to the scaled scores,
            and given a gradient where it requires one.
        dropout_p: the probability of zeroing a result; there is no training flag.
        is_causal: element (i, j) takes part where j <= i. Not together with attn_mask.
        scale: multiplies the scores; 1 / sqrt(E) if None.
        enable_gqa: Hq may be a multiple of H: each key's head serves as many heads of queries, that lie next to each
            other.

    Returns:
        (..., Hq, L, S), query's dtype. A row that is masked throughout is zeros, with zero gradients.

    Raises:
        RuntimeError: shapes or dtypes that do not fit each other, or is_causal with attn_mask.
        ValueError: dropout_p outside [0, 1].

    Saved for backward: query, key, the result and a boolean mask; where dropout acts instead of the result two numbers
    a row and the state of the random generator, and the scores are computed again.
    Line: `scores | mul(scale) | mask | causal | softmax | dropout(p)`.
    """
    query, key = _checked(query, key)
    if is_causal and attn_mask is not None:
        raise RuntimeError("attention_scores(): explicit attn_mask should not be set when is_causal=True")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    line = _lines.attention_scores(scale, attn_mask is not None, is_causal, dropout_p)
    if not enable_gqa:
        return fused(line, *_broadcast(query, key, 2), *given(attn_mask))
    heads = _heads_of_key(query, key)
    group = (heads, query.shape[-3] // heads) if heads else (0, 1)
    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = attn_mask.unsqueeze(-3) if attn_mask.shape[-3] == 1 else attn_mask.unflatten(-3, group)
    grouped = _broadcast(query.unflatten(-3, group), key.unsqueeze(-3), 4)
    return fused(line, *grouped, *given(attn_mask)).flatten(-4, -3)


def _checked(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    function = "attention_scores"
    for name, tensor in (("query", query), ("key", key)):
        check_tensor(function, name, tensor)
        if tensor.dim() < 2:
            raise RuntimeError(
                f"{function}(): expected {name} to be at least 2-dimensional, but got a tensor of size "
                f"{list(tensor.shape)}"
            )
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key = (t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key))
    if query.dtype != key.dtype:
        raise RuntimeError(
            f"{function}(): expected query and key to have the same dtype, but got query.dtype: {query.dtype} and "
            f"key.dtype: {key.dtype}"
        )
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"{function}(): expected query and key to have the same last dimension, but got query of size "
            f"{list(query.shape)} and key of size {list(key.shape)}"
        )
    return query, key


def _heads_of_key(query: Tensor, key: Tensor) -> int:
    if query.dim() >= 3 and key.dim() >= 3:
        heads, wanted = key.shape[-3], query.shape[-3]
        if wanted == heads or heads and wanted % heads == 0:
            return heads
    raise RuntimeError(
        "attention_scores(): expected the heads of query to be a multiple of key's where enable_gqa=True, but got "
        f"query of size {list(query.shape)} and key of size {list(key.shape)}"
    )


def _broadcast(query: Tensor, key: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """With the same sizes in front of the last `own` dimensions."""
    if query.shape[:-own] == key.shape[:-own]:
        return query, key
    try:
        batch = torch.broadcast_shapes(query.shape[:-own], key.shape[:-own])
    except RuntimeError:
        raise RuntimeError(
            f"attention_scores(): the batch sizes of query of size {list(query.shape)} and of key of size "
            f"{list(key.shape)} do not broadcast"
        ) from None
    return query.expand(*batch, *query.shape[-own:]), key.expand(*batch, *key.shape[-own:])

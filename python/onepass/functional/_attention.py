"""Attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._arguments.autocast import under_autocast
from .._arguments.remembered import plain
from .._arguments.shapes import check_dense, check_tensor, given
from .._arguments.symbolic import traceable
from ..call import fused
from . import _engines, _lines
from ._engines import Engine


@traceable
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout(softmax(query · keyᵀ · scale, masked)) · value, as `torch.nn.functional.scaled_dot_product_attention`, by
    what is fastest for the shapes: one of torch's engines (cuDNN, flash, efficient) or the line below.

    Args:
        query: (..., Hq, L, E).
        key: (..., H, S, E), of query's dtype; batch sizes broadcast.
        value: (..., H, S, Ev), likewise.
        attn_mask: broadcastable to (..., Hq, L, S). bool: True takes part; floating point (query's dtype or float32):
            added to the scaled scores, and given a gradient where it requires one.
        dropout_p: the probability of zeroing a weight; there is no training flag. Where the line runs its masks are
            those of the word `dropout`, else torch's.
        is_causal: element (i, j) takes part where j <= i. Not together with attn_mask.
        scale: multiplies the scores; 1 / sqrt(E) if None.
        enable_gqa: Hq may be a multiple of H: each head of key and value serves as many heads of queries, that lie next
            to each other.

    Returns:
        (..., Hq, L, Ev), query's dtype, in query's order of dimensions in memory (torch's own engines differ where its
        rows are not contiguous). A row that is masked throughout is zeros, with zero gradients. What one of
        torch's engines computes may differ from run to run, as that engine's results do, and cannot be differentiated
        twice: on the CPU that is float16 where a gradient is needed, on CUDA most calls.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit each other, or is_causal with attn_mask.
        IndexError: an attn_mask of fewer than two dimensions.
        ValueError: dropout_p outside [0, 1].

    Saved for backward by the line: query, key, value, the result, two numbers a row and the state of the random
    generator; the weights are computed again.
    Line: `scores | mul(scale) | mask | causal | softmax | dropout(p) | values`. `attention_engine` says who computes a
    call, and why.
    """
    function = "scaled_dot_product_attention"
    query, key, value, attn_mask = _checked(function, query, key, value, attn_mask, is_causal, enable_gqa)
    scale = _scale(function, scale, query)
    line = _lines.attention(scale, attn_mask is not None, is_causal, dropout_p, False)
    engine = _engines.choose(_engines.call_of(query, key, value, attn_mask, is_causal, dropout_p, enable_gqa))
    if engine == "onepass":
        return _run(function, line, query, key, attn_mask, value, enable_gqa)
    return _engines.run(engine, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _checked(function, query, key, value, attn_mask, is_causal, enable_gqa):
    """The tensors as autocast has them, which fit each other."""
    _check_tensors(function, attn_mask, is_causal, query=query, key=key, value=value)
    query, key, value, attn_mask = under_autocast(query.device.type, (query, key, value, attn_mask))
    _check_sizes(function, enable_gqa, query, key, value)
    _check_mask_dtype(function, query, attn_mask)
    return query, key, value, _of_one_batch(query, attn_mask)


def _of_one_batch(query: Tensor, attn_mask: Tensor | None) -> Tensor | None:
    """Of three dimensions of queries, which are those of one batch, a mask may have that dimension, too (on CUDA torch
    2.11 refuses it)."""
    if attn_mask is None or query.dim() != 3 or attn_mask.dim() != 4 or attn_mask.shape[0] != 1:  # noqa: PLR2004
        return attn_mask
    return attn_mask.squeeze(0)


def attention_engine(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Engine:
    """Who computes `scaled_dot_product_attention` of these arguments, and why, without computing it.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as `scaled_dot_product_attention` takes
            them. Whether gradients are recorded and autocast are part of the call, too.

    Returns:
        `(name, reason)`. name is "onepass" (the line runs; `Line.plan` says how), "torch" (torch's own choice), or
        "cudnn", "flash" or "efficient" of torch's engines, with the ones behind it where it cannot serve.

    Raises:
        RuntimeError, IndexError: as `scaled_dot_product_attention`.
    """
    function = "attention_engine"
    query, key, value, attn_mask = _checked(function, query, key, value, attn_mask, is_causal, enable_gqa)
    return _engines.decide(_engines.call_of(query, key, value, attn_mask, is_causal, dropout_p, enable_gqa))


@traceable
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
        RuntimeError: shapes, dtypes or devices that do not fit each other, or is_causal with attn_mask.
        IndexError: an attn_mask of fewer than two dimensions.
        ValueError: dropout_p outside [0, 1].

    Saved for backward: query, key, the result and a boolean mask; where dropout acts instead of the result two numbers
    a row and the state of the random generator, and the scores are computed again.
    Line: `scores | mul(scale) | mask | causal | softmax | dropout(p)`.
    """
    function = "attention_scores"
    _check_tensors(function, attn_mask, is_causal, query=query, key=key)
    query, key = under_autocast(query.device.type, (query, key))
    _check_sizes(function, enable_gqa, query, key)
    line = _lines.attention_scores(_scale(function, scale, query), attn_mask is not None, is_causal, dropout_p)
    return _run(function, line, query, key, _of_one_batch(query, attn_mask), None, enable_gqa)


def _run(
    function: str,
    line: str,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    value: Tensor | None,
    enable_gqa: bool,
) -> Tensor:
    if not enable_gqa:
        query, key, *values = _broadcast(function, 2, query, key, *given(value))
        return fused(line, query, key, *given(attn_mask), *values)
    heads = key.shape[-3]
    group = (heads, query.shape[-3] // heads) if heads else (0, 1)
    if attn_mask is not None and attn_mask.dim() > 2:
        attn_mask = attn_mask.unsqueeze(-3) if attn_mask.shape[-3] == 1 else attn_mask.unflatten(-3, group)
    shared = [tensor.unsqueeze(-3) for tensor in given(key, value)]
    query, key, *values = _broadcast(function, 4, query.unflatten(-3, group), *shared)
    return fused(line, query, key, *given(attn_mask), *values).flatten(-4, -3)


def _scale(function: str, scale: float | None, query: Tensor) -> float:
    if scale is not None:
        return _lines.number(function, "scale", plain(scale))
    return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0


def _check_tensors(function: str, attn_mask: Tensor | None, is_causal: bool, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        check_tensor(function, name, tensor)
        check_dense(function, name, tensor)
        if tensor.dim() < 2:
            raise RuntimeError(
                f"{function}(): expected {name} to be at least 2-dimensional, but got a tensor of size "
                f"{list(tensor.shape)}"
            )
    if attn_mask is not None:
        check_tensor(function, "attn_mask", attn_mask)
        check_dense(function, "attn_mask", attn_mask)
        if attn_mask.dim() < 2:
            raise IndexError(
                f"{function}(): expected attn_mask to be at least 2-dimensional, but got a tensor of size "
                f"{list(attn_mask.shape)}"
            )
        tensors["attn_mask"] = attn_mask
    of_query = tensors["query"].device
    for name, tensor in tensors.items():
        if tensor.device != of_query:
            raise RuntimeError(
                f"{function}(): Expected all tensors to be on the same device, but query is on {of_query} and {name} "
                f"is on {tensor.device}"
            )
    if attn_mask is not None:
        if is_causal:
            raise RuntimeError(f"{function}(): explicit attn_mask should not be set when is_causal=True")


def _check_sizes(function: str, enable_gqa: bool, query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    for name, tensor in (("key", key), ("value", key if value is None else value)):
        if tensor.dtype != query.dtype:
            raise RuntimeError(
                f"{function}(): expected query and {name} to have the same dtype, but got query.dtype: {query.dtype} "
                f"and {name}.dtype: {tensor.dtype}"
            )
        if enable_gqa:
            _check_heads(function, query, name, tensor)
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"{function}(): expected query and key to have the same last dimension, but got query of size "
            f"{list(query.shape)} and key of size {list(key.shape)}"
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise RuntimeError(
            f"{function}(): expected key and value to have as many rows, but got key of size {list(key.shape)} and "
            f"value of size {list(value.shape)}"
        )


def _check_heads(function: str, query: Tensor, name: str, tensor: Tensor) -> None:
    if query.dim() >= 3 and tensor.dim() >= 3:
        heads, wanted = tensor.shape[-3], query.shape[-3]
        if wanted == heads or heads and wanted % heads == 0:
            return
    raise RuntimeError(
        f"{function}(): expected the heads of query to be a multiple of {name}'s where enable_gqa=True, but got query "
        f"of size {list(query.shape)} and {name} of size {list(tensor.shape)}"
    )


def _check_mask_dtype(function: str, query: Tensor, attn_mask: Tensor | None) -> None:
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise RuntimeError(
            f"{function}(): expected attn_mask to be bool, float32 or of query's dtype, but got attn_mask.dtype: "
            f"{attn_mask.dtype} and query.dtype: {query.dtype}"
        )


def _broadcast(function: str, own: int, *tensors: Tensor) -> list[Tensor]:
    """With the same sizes in front of the last `own` dimensions."""
    shapes = [tensor.shape[:-own] for tensor in tensors]
    if all(shape == shapes[0] for shape in shapes):
        return list(tensors)
    try:
        batch = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        sizes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise RuntimeError(f"{function}(): the batch sizes of tensors of sizes {sizes} do not broadcast") from None
    return [tensor.expand(*batch, *tensor.shape[-own:]) for tensor in tensors]

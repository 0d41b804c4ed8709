"""What an ATen operator reads, writes and multiplies, where its arguments and its result do not say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry

__all__ = [
    *("ALLOCATE", "OVERWRITE", "SCATTER", "SELECT", "UNREAD", "WRITTEN_OUT"),
    *("flops_of", "has_formula", "is_unknown"),
]

ALLOCATE = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ set_ lift_fresh".split()
)
"""They move nothing."""
OVERWRITE = frozenset("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_".split())
"""They write their first argument without a look at it."""
SELECT = {"index_select": 0, "gather": 0, "index": 0, "_unsafe_index": 0, "take": 0, "embedding": 0}
"""They read of this argument as much as they give."""
SCATTER = frozenset(
    "index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ index_reduce_ scatter_ scatter_add_ "
    "scatter_reduce_ masked_scatter_ put_".split()
)
"""They write their first argument where another one says."""
UNREAD = {
    "max_pool2d_with_indices_backward": (1,),
    "max_pool3d_with_indices_backward": (1,),
    "adaptive_max_pool2d_backward": (1,),
    "adaptive_max_pool3d_backward": (1,),
    "avg_pool2d_backward": (1,),
    "avg_pool3d_backward": (1,),
    "_adaptive_avg_pool2d_backward": (1,),
    "_adaptive_avg_pool3d_backward": (1,),
    "nll_loss_forward": (0,),
    "nll_loss2d_forward": (0,),
    "nll_loss_backward": (1,),
    "nll_loss2d_backward": (1,),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"), (0,)),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full"), (0,)),
}
"""Arguments of which only the shape is used, or one element of a row."""

aten = torch.ops.aten


def flops_of(operator, arguments: tuple, keywords: dict[str, Any], result: Any) -> int:
    """Operations of the matrix products that an operator does: by this module's formulas, and PyTorch's."""
    packet = getattr(operator, "_overloadpacket", operator)
    if packet in _FORMULAS:
        count = _FORMULAS[packet](*arguments, result=result, **keywords)
    elif packet in flop_registry:
        count = flop_registry[packet](*arguments, **keywords, out_val=result)
    else:
        return 0
    dtypes = [a.dtype for a in arguments if isinstance(a, Tensor)]
    return int(count) * (4 if any(dtype.is_complex for dtype in dtypes) else 1)


def has_formula(operator) -> bool:
    packet = getattr(operator, "_overloadpacket", operator)
    return packet in _FORMULAS or packet in flop_registry


def is_unknown(operator) -> bool:
    """Whether an operator may do more than move its tensors, and nothing says how much: one that is not PyTorch's own,
    or one of linear algebra."""
    name = operator._overloadpacket.__name__
    return not has_formula(operator) and (
        operator.namespace not in ("aten", "prims", "prim") or any(part in name for part in _ALGEBRA)
    )


_ALGEBRA = ("linalg", "cholesky", "lu_solve", "triangular_solve", "householder", "ormqr", "geqrf", "cdist", "lstsq")


def _mm(a: Tensor, b: Tensor, *_, result: Tensor, **__) -> int:
    return 2 * result.numel() * a.shape[-1]


def _added_mm(_: Tensor, a: Tensor, b: Tensor, *__, result: Tensor, **___) -> int:
    return 2 * result.numel() * a.shape[-1]


def _addbmm(_: Tensor, a: Tensor, b: Tensor, *__, result: Tensor, **___) -> int:
    return 2 * result.numel() * a.shape[-1] * a.shape[0]


def _dot(a: Tensor, b: Tensor, *_, result: Tensor, **__) -> int:
    return 2 * a.numel()


def _attention(query: Tensor, key: Tensor, value: Tensor, *_, result: Tensor, **__) -> int:
    return 2 * math.prod(result.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _grouped_mm(a: Tensor, b: Tensor, *_, result: Tensor, **__) -> int:
    """Groups of rows, columns or of what is summed over: in the last case they share it out, and each has a result."""
    flops = 2 * result.numel() * a.shape[-1]
    return flops // result.shape[0] if a.dim() == b.dim() == 2 else flops


def _trilinear(a: Tensor, b: Tensor, c: Tensor, expand1, expand2, expand3, sumdim, unroll_dim=1, *, result) -> int:
    shapes = [list(t.shape) for t in (a, b, c)]
    for shape, expand in zip(shapes, (expand1, expand2, expand3)):
        for dim in expand:
            shape.insert(dim, 1)
    return 2 * math.prod(map(max, *shapes))


def _convolution_backward(grad_output: Tensor, x: Tensor, weight: Tensor, *rest, result, **keywords) -> int:
    """One convolution's flops for each of the gradients, whatever the groups."""
    transposed = keywords.get("transposed", rest[4] if len(rest) > 4 else False)
    mask = keywords.get("output_mask", rest[-1] if rest else (True, True, True))
    places = (x if transposed else grad_output).shape
    return 2 * places[0] * math.prod(places[2:]) * weight.numel() * (mask[0] + mask[1])


_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mv: _mm,
    aten.addmv: _added_mm,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.addbmm: _addbmm,
    aten._int_mm: _mm,
    aten._addmm_activation: _added_mm,
    aten._grouped_mm: _grouped_mm,
    aten._scaled_grouped_mm: _grouped_mm,
    aten._weight_int8pack_mm: _mm,
    aten._weight_int4pack_mm: _mm,
    aten.linear: _mm,
    aten.scaled_dot_product_attention: _attention,
    aten._trilinear: _trilinear,
    aten.convolution_backward: _convolution_backward,
}
"""Of what PyTorch has no formula for, or one that holds without groups only."""


def _attention_written_out(query, key, value, dim, heads, weight, bias, out_weight, out_bias, *_):
    """aten::_native_multi_head_attention: the result, and weights that nobody has asked for."""
    if query is key:
        projected = F.linear(query, weight, bias).unflatten(-1, (3, dim)).unbind(-2)
    else:
        projected = [F.linear(*each) for each in zip((query, key, value), weight.chunk(3), bias.chunk(3))]
    q, k, v = (each.unflatten(-1, (heads, dim // heads)).transpose(1, 2) for each in projected)
    attended = F.scaled_dot_product_attention(q, k, v)
    return F.linear(attended.transpose(1, 2).flatten(-2), out_weight, out_bias), query.new_empty(0)


def _layer_written_out(
    x, dim, heads, weight, bias, out_weight, out_bias, use_gelu, norm_first, eps, *rest: Any
) -> Tensor:
    """aten::_transformer_encoder_layer_fwd."""
    norms, layers = (rest[0:2], rest[2:4]), (rest[4:6], rest[6:8])

    def attended(y):
        return _attention_written_out(y, y, y, dim, heads, weight, bias, out_weight, out_bias)[0]

    def fed_forward(y):
        y = F.linear(y, *layers[0])
        return F.linear(F.gelu(y) if use_gelu else F.relu(y), *layers[1])

    def normed(y, i):
        return F.layer_norm(y, (dim,), *norms[i], eps)

    if norm_first:
        x = x + attended(normed(x, 0))
        return x + fed_forward(normed(x, 1))
    x = normed(x + attended(x), 0)
    return normed(x + fed_forward(x), 1)


WRITTEN_OUT: dict[Any, Callable] = {
    aten._native_multi_head_attention: _attention_written_out,
    aten._transformer_encoder_layer_fwd: _layer_written_out,
}
"""Operators that do what many do."""

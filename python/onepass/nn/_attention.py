"""Attention modules."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .._arguments.shapes import given
from .._arguments.symbolic import leaf
from ..call import fused
from ..functional import _lines
from ._settings import Called


class MultiheadAttention(Called, torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` over `functional.scaled_dot_product_attention`, and over one line where the weights
    are wanted, too.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            `torch.nn.MultiheadAttention`.

    forward takes (query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
    average_attn_weights=True, is_causal=False), batched or not, as torch's. In both masks, as there and unlike in
    `functional`, True does not take part, and floating point is added.

    Shape: query (L, N, embed_dim), key (S, N, kdim) and value (S, N, vdim), with batch_first (N, L, embed_dim) and so
    on, unbatched without N. attn_mask (L, S) or (N · num_heads, L, S), key_padding_mask (N, S). The result is (output,
    weights): query's shape, and (N, L, S), or (N, num_heads, L, S) unless averaged, behind the dropout; None without
    need_weights.

    Differences: a row that is masked throughout gives zeros (and out_proj's bias), where torch's gives NaN with
    need_weights. Nested tensors are left to torch's own.
    Raises what torch's raises: AssertionError for numbers of dimensions and sizes, RuntimeError for attn_mask's sizes.
    State dict: `in_proj_weight`, `in_proj_bias`, `out_proj.weight`, `out_proj.bias` and so on, as torch's.
    Saved for backward: as in `functional.scaled_dot_product_attention`; with need_weights the weights, which the
    caller holds, too.
    Line: `scores | mul(scale) | mask | causal | softmax | dropout(p) | keep | values`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = (embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first)
        super().__init__(*sizes, device, dtype)
        self._let_be_called()

    @leaf
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:  # its fast path, or torch's reason why not
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        rows = 1 if self.batch_first and query.dim() == 3 else 0  # the dimension of L, and of S
        self._check(query, key, value, key_padding_mask, attn_mask, is_causal, rows)
        q, k, v = (
            t.unflatten(-1, (self.num_heads, self.head_dim)).movedim(rows, -2)
            for t in self._projected(query, key, value)
        )
        # torch, too, takes the hint at its word only where nothing else is to be masked.
        is_causal = is_causal and key_padding_mask is None and self.bias_k is None and not self.add_zero_attn
        mask = None if is_causal else _merged(attn_mask, key_padding_mask, q)
        k, v, mask = self._with_more_keys(k, v, mask)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            line = _lines.attention(1 / math.sqrt(self.head_dim), mask is not None, is_causal, dropout_p, True)
            output, weights = fused(line, q, k, *given(mask), v)
            if average_attn_weights:
                weights = weights.mean(-3)
        else:
            output = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
        output = output.movedim(-2, rows).flatten(-2)
        return F.linear(output, self.out_proj.weight, self.out_proj.bias), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """A packed projection stays packed: its parts are read in place."""
        weight, bias, features = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is not None and query is key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        if weight is not None and key is value:
            of_query, of_both = weight.split((features, 2 * features))
            bias_of_query, bias_of_both = (None, None) if bias is None else bias.split((features, 2 * features))
            return F.linear(query, of_query, bias_of_query), *F.linear(key, of_both, bias_of_both).chunk(2, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases))

    def _with_more_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """With bias_k and bias_v, and a key and value of zeros, as one row more each; no mask holds for them."""
        more = (self.bias_k is not None) + self.add_zero_attn
        if self.bias_k is not None:
            k, v = _with_row(k, self.bias_k), _with_row(v, self.bias_v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None and more:
            mask = F.pad(mask, (0, more), value=mask.dtype == torch.bool)
        return k, v, mask

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        rows: int,
    ) -> None:
        F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(f"only bool and floating types of {name} are supported")
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if query.shape[-1] != self.embed_dim:
            raise AssertionError(f"was expecting embedding dimension of {self.embed_dim}, but got {query.shape[-1]}")
        if key.shape[:-1] != value.shape[:-1] or self._qkv_same_embed_dim and key.shape != value.shape:
            raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
        batch = () if query.dim() == 2 else (query.shape[1 - rows],)
        queries, keys = query.shape[rows], key.shape[rows]
        if key_padding_mask is not None and key_padding_mask.shape != (*batch, keys):
            raise AssertionError(
                f"expected key_padding_mask to have shape {(*batch, keys)}, but got {tuple(key_padding_mask.shape)}"
            )
        if attn_mask is not None:
            wanted = (math.prod(batch) * self.num_heads, queries, keys)[3 - attn_mask.dim() :]
            if attn_mask.shape != wanted:
                raise RuntimeError(
                    f"The shape of the {attn_mask.dim()}D attn_mask is {tuple(attn_mask.shape)}, but should be "
                    f"{wanted}."
                )


def _with_row(tensor: Tensor, row: Tensor) -> Tensor:
    row = row.to(tensor.dtype).unflatten(-1, (tensor.shape[-3], tensor.shape[-1])).movedim(-2, -3)[0]
    return torch.cat([tensor, row.expand(*tensor.shape[:-2], 1, tensor.shape[-1])], -2)


def _merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one that broadcasts to (N, num_heads, L, S), of a bool whose True takes part, or added."""
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.unsqueeze(-2).unsqueeze(-3)  # (N, 1, 1, S)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(*q.shape[:-2], *attn_mask.shape[1:])
    masks = given(attn_mask, key_padding_mask)
    forbidden = [mask for mask in masks if mask.dtype == torch.bool]
    added = [mask for mask in masks if mask.dtype != torch.bool]
    if not masks:
        return None
    if not added:
        return torch.logical_not(forbidden[0] if len(forbidden) == 1 else forbidden[0] | forbidden[1])
    mask = added[0] if len(added) == 1 else added[0] + added[1]
    return mask.masked_fill(forbidden[0], -math.inf) if forbidden else mask

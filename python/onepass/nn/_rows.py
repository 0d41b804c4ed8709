"""Modules of a row: norms, activations, gates, dropout, softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import functional
from .._arguments.symbolic import leaf
from ..functional import _lines
from . import _settings
from ._settings import Activated, activated_nested, probability, said


class LayerNorm(Activated, torch.nn.LayerNorm):
    """activation(layer_norm(x) · weight + bias); `torch.nn.LayerNorm` with an activation at no further pass.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as in `torch.nn.LayerNorm`.
        activation: a word such as "gelu", or None.

    Shape: (*, *normalized_shape) to the same. State dict: `weight`, `bias`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.activation = _settings.activation(self, activation)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        if getattr(x, "is_nested", False):
            return activated_nested(super().forward(x), self.activation)
        return functional.layer_norm(
            x, self.normalized_shape, self.weight, self.bias, self.eps, activation=self.activation
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + said(activation=self.activation)


class RMSNorm(Activated, torch.nn.RMSNorm):
    """activation(rms_norm(x) · weight); `torch.nn.RMSNorm` with an activation at no further pass.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as in `torch.nn.RMSNorm`.
        activation: a word such as "gelu", or None.

    Shape: (*, *normalized_shape) to the same. State dict: `weight`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.activation = _settings.activation(self, activation)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        if getattr(x, "is_nested", False):
            return activated_nested(super().forward(x), self.activation)
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        return super().extra_repr() + said(activation=self.activation)


class GroupNorm(Activated, torch.nn.GroupNorm):
    """activation(group_norm(x) · weight + bias); `torch.nn.GroupNorm` with an activation at no further pass.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in `torch.nn.GroupNorm`.
        activation: a word such as "silu", or None.

    Shape: (N, C, *) to the same. State dict: `weight`, `bias`.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        activation: str | None = None,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if affine and not bias:  # an argument of torch 2.15's
            self.register_parameter("bias", None)
        self.activation = _settings.activation(self, activation)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        return super().extra_repr() + said(activation=self.activation)


class AddLayerNorm(LayerNorm):
    """h = residual + dropout(x + input_bias), y = layer_norm(h); returns (y, h).

    In place of a dropout, a residual addition and a `torch.nn.LayerNorm`, whose state dict it has.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype, activation: as in `LayerNorm`.
        dropout_p: the probability of zeroing an element of x while training.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        dropout_p: float = 0.0,
        activation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype, activation=activation)
        self.dropout_p = probability(dropout_p)

    @leaf
    def forward(self, x: Tensor, residual: Tensor, input_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return functional.add_layer_norm(
            x,
            residual,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            input_bias=input_bias,
            dropout_p=self.dropout_p,
            training=self.training,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + said(dropout_p=self.dropout_p)


class AddRMSNorm(RMSNorm):
    """h = residual + dropout(x + input_bias), y = rms_norm(h); returns (y, h).

    In place of a dropout, a residual addition and a `torch.nn.RMSNorm`, whose state dict it has.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype, activation: as in `RMSNorm`.
        dropout_p: the probability of zeroing an element of x while training.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        dropout_p: float = 0.0,
        activation: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, activation=activation)
        self.dropout_p = probability(dropout_p)

    @leaf
    def forward(self, x: Tensor, residual: Tensor, input_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return functional.add_rms_norm(
            x,
            residual,
            self.normalized_shape,
            self.weight,
            self.eps,
            input_bias=input_bias,
            dropout_p=self.dropout_p,
            training=self.training,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + said(dropout_p=self.dropout_p)


class BiasGELU(torch.nn.Module):
    """gelu(x + bias): the bias of a `torch.nn.Linear(..., bias=False)` before it, and `torch.nn.GELU`.

    Args:
        features: N, the size of the last dimension.
        approximate: "none" or "tanh", as in `torch.nn.GELU`.
        device, dtype: of the bias.

    Shape: (..., N) to the same. State dict: `bias` (N,), zeros at first.
    """

    def __init__(
        self, features: int, approximate: str = "none", device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.features = features
        self.approximate = _settings.approximate(self, approximate)
        self.bias = torch.nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.bias)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        return functional.bias_gelu(x, self.bias, self.approximate)

    def extra_repr(self) -> str:
        return f"{self.features}, approximate={self.approximate!r}"


class DropoutAdd(torch.nn.Module):
    """residual + dropout(activation(x + bias)): `torch.nn.Dropout` and the residual addition behind it.

    Args:
        p: the probability of zeroing an element while training.
        activation: a word such as "gelu", or None.

    forward takes (x, residual, bias=None): x (..., N), residual broadcastable to x's shape, bias (N,).
    """

    def __init__(self, p: float = 0.5, *, activation: str | None = None) -> None:
        super().__init__()
        self.p = probability(p)
        self.activation = _settings.activation(self, activation)

    @leaf
    def forward(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.dropout_add(x, residual, self.p, self.training, bias=bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"p={self.p}" + said(activation=self.activation)


class SwiGLU(torch.nn.Module):
    """silu(gate) · up, of two tensors (..., N) or one packed (..., 2N), the gate half first."""

    @leaf
    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return functional.swiglu(gate, up)


class GEGLU(torch.nn.Module):
    """gelu(gate) · up, of two tensors (..., N) or one packed (..., 2N), the gate half first.

    Args:
        approximate: "none" or "tanh", as in `torch.nn.GELU`.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = _settings.approximate(self, approximate)

    @leaf
    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return functional.geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` with what stands around it in attention: a scale, masks, dropout.

    Args:
        dim: the dimension that sums to one.
        scale, is_causal, dropout_p: as in `onepass.functional.softmax`.

    forward takes (x, mask=None), mask bool (True takes part) or additive, broadcastable to x's shape.
    """

    def __init__(self, dim: int = -1, *, scale: float = 1.0, is_causal: bool = False, dropout_p: float = 0.0) -> None:
        super().__init__(dim)
        self.scale = _lines.number("Softmax", "scale", scale)
        self.is_causal = is_causal
        self.dropout_p = probability(dropout_p)

    @leaf
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return functional.softmax(
            x,
            self.dim,
            scale=self.scale,
            mask=mask,
            is_causal=self.is_causal,
            dropout_p=self.dropout_p,
            training=self.training,
        )

    def extra_repr(self) -> str:
        scale = None if self.scale == 1.0 else self.scale
        return super().extra_repr() + said(scale=scale, is_causal=self.is_causal, dropout_p=self.dropout_p)


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` as one line.

    Args:
        dim: the dimension of which the probabilities are.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        return functional.log_softmax(x, self.dim)

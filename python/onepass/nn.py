"""Modules over `onepass.functional`, drop-in for those of `torch.nn`: constructors, state dicts and repr alike.

`LayerNorm`, `RMSNorm` and `Softmax` are subclasses of torch's: what asks `isinstance(module, torch.nn.LayerNorm)`
(weight decay groups, initialisers, sharding rules) finds them. State dicts load both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import functional

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BiasGELU",
    "DropoutAdd",
    "GEGLU",
    "GatedMLP",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LinearAct",
    "RMSNorm",
    "RMSNormLinear",
    "Softmax",
    "SwiGLU",
]


class LayerNorm(torch.nn.LayerNorm):
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
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x, self.normalized_shape, self.weight, self.bias, self.eps, activation=self.activation
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + _said(activation=self.activation)


class RMSNorm(torch.nn.RMSNorm):
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
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps, activation=self.activation)

    def extra_repr(self) -> str:
        return super().extra_repr() + _said(activation=self.activation)


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
        self.dropout_p = _probability(dropout_p)

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
        return super().extra_repr() + _said(dropout_p=self.dropout_p)


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
        self.dropout_p = _probability(dropout_p)

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
        return super().extra_repr() + _said(dropout_p=self.dropout_p)


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
        self.approximate = approximate
        self.bias = torch.nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.bias)

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
        self.p = _probability(p)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.dropout_add(x, residual, self.p, self.training, bias=bias, activation=self.activation)

    def extra_repr(self) -> str:
        return f"p={self.p}" + _said(activation=self.activation)


class SwiGLU(torch.nn.Module):
    """silu(gate) · up, of two tensors (..., N) or one packed (..., 2N), the gate half first."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return functional.swiglu(gate, up)


class GEGLU(torch.nn.Module):
    """gelu(gate) · up, of two tensors (..., N) or one packed (..., 2N), the gate half first.

    Args:
        approximate: "none" or "tanh", as in `torch.nn.GELU`.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return functional.geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class LinearAct(torch.nn.Linear):
    """activation(x · weightᵀ + bias); `torch.nn.Linear` and the activation behind it.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        activation: a word such as "gelu", or None.
        strategy: as in `functional.linear`.

    Shape: (..., in_features) to (..., out_features). State dict: `weight`, `bias`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        strategy: str = "auto",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self.strategy = strategy

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias, activation=self.activation, strategy=self.strategy)

    def extra_repr(self) -> str:
        return super().extra_repr() + _said(activation=self.activation)


class _NormLinear(torch.nn.Module):
    """A norm and a linear layer as submodules `norm` and `linear`, which hold the parameters and are not called."""

    def __init__(self, norm: torch.nn.Module, linear: torch.nn.Linear, activation: str | None, strategy: str) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear
        self.activation = activation
        self.strategy = strategy

    def extra_repr(self) -> str:
        return _said(activation=self.activation).removeprefix(", ")


class LayerNormLinear(_NormLinear):
    """activation(linear(norm_activation(layer_norm(x)))): a `torch.nn.LayerNorm` and the `torch.nn.Linear` behind it.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        eps: of the norm.
        norm_activation, activation: words such as "gelu", or None.
        strategy: as in `functional.linear`.

    Shape: (..., in_features) to (..., out_features).
    State dict: `norm.weight`, `norm.bias`, `linear.weight`, `linear.bias`, as of a module that holds the two.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm_activation: str | None = None,
        activation: str | None = None,
        strategy: str = "auto",
    ) -> None:
        super().__init__(
            LayerNorm(in_features, eps, device=device, dtype=dtype, activation=norm_activation),
            torch.nn.Linear(in_features, out_features, bias, device, dtype),
            activation,
            strategy,
        )

    def forward(self, x: Tensor) -> Tensor:
        norm, linear = self.norm, self.linear
        return functional.layer_norm_linear(
            x,
            norm.weight,
            norm.bias,
            linear.weight,
            linear.bias,
            norm.eps,
            norm_activation=norm.activation,
            activation=self.activation,
            strategy=self.strategy,
        )


class RMSNormLinear(_NormLinear):
    """activation(linear(norm_activation(rms_norm(x)))): a `torch.nn.RMSNorm` and the `torch.nn.Linear` behind it.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        eps: of the norm; None is the machine epsilon.
        norm_activation, activation: words such as "gelu", or None.
        strategy: as in `functional.linear`.

    Shape: (..., in_features) to (..., out_features).
    State dict: `norm.weight`, `linear.weight`, `linear.bias`, as of a module that holds the two.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        norm_activation: str | None = None,
        activation: str | None = None,
        strategy: str = "auto",
    ) -> None:
        super().__init__(
            RMSNorm(in_features, eps, device=device, dtype=dtype, activation=norm_activation),
            torch.nn.Linear(in_features, out_features, bias, device, dtype),
            activation,
            strategy,
        )

    def forward(self, x: Tensor) -> Tensor:
        norm, linear = self.norm, self.linear
        return functional.rms_norm_linear(
            x,
            norm.weight,
            linear.weight,
            linear.bias,
            norm.eps,
            norm_activation=norm.activation,
            activation=self.activation,
            strategy=self.strategy,
        )


class LayerNormMLP(torch.nn.Module):
    """down(activation(up(layer_norm(x)))): the feed-forward block of GPT-2, BERT and ViT in front of its residual.

    Args:
        features: K, of x and of the result.
        hidden_features: F, between the two projections.
        bias, eps, device, dtype: of the projections and the norm.
        activation: the word between the projections.
        strategy: of both, as in `functional.linear`.

    Shape: (..., K) to the same.
    State dict: `norm.weight`, `norm.bias`, `up.weight`, `up.bias`, `down.weight`, `down.bias`.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "gelu",
        strategy: str = "auto",
    ) -> None:
        super().__init__()
        self.norm = LayerNorm(features, eps, device=device, dtype=dtype)
        self.up = torch.nn.Linear(features, hidden_features, bias, device, dtype)
        self.down = torch.nn.Linear(hidden_features, features, bias, device, dtype)
        self.activation = activation
        self.strategy = strategy

    def forward(self, x: Tensor) -> Tensor:
        norm, up, down = self.norm, self.up, self.down
        return functional.layer_norm_mlp(
            x,
            norm.weight,
            norm.bias,
            up.weight,
            up.bias,
            down.weight,
            down.bias,
            norm.eps,
            activation=self.activation,
            strategy=self.strategy,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GatedMLP(torch.nn.Module):
    """down(activation(gate(x)) · up(x)): the feed-forward block of Llama and its kin.

    Args:
        features: K, of x and of the result.
        hidden_features: F, of the gate.
        activation: the word applied to the gate.
        device, dtype: of the weights.
        strategy: of all three, as in `functional.linear`.

    Shape: (..., K) to the same.
    State dict: `gate_proj.weight`, `up_proj.weight`, `down_proj.weight`, as in transformers.
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        activation: str = "silu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        strategy: str = "auto",
    ) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(features, hidden_features, False, device, dtype)
        self.up_proj = torch.nn.Linear(features, hidden_features, False, device, dtype)
        self.down_proj = torch.nn.Linear(hidden_features, features, False, device, dtype)
        self.activation = activation
        self.strategy = strategy

    def forward(self, x: Tensor) -> Tensor:
        return functional.gated_mlp(
            x,
            self.gate_proj.weight,
            self.up_proj.weight,
            self.down_proj.weight,
            self.activation,
            strategy=self.strategy,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class Softmax(torch.nn.Softmax):
    """`torch.nn.Softmax` with what stands around it in attention: a scale, masks, dropout.

    Args:
        dim: the dimension that sums to one.
        scale, is_causal, dropout_p: as in `onepass.functional.softmax`.

    forward takes (x, mask=None), mask bool (True takes part) or additive, broadcastable to x's shape.
    """

    def __init__(self, dim: int = -1, *, scale: float = 1.0, is_causal: bool = False, dropout_p: float = 0.0) -> None:
        super().__init__(dim)
        self.scale = scale
        self.is_causal = is_causal
        self.dropout_p = _probability(dropout_p)

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
        return super().extra_repr() + _said(scale=scale, is_causal=self.is_causal, dropout_p=self.dropout_p)


def _probability(p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p


def _said(**settings: Any) -> str:
    """The settings that differ from nothing, behind what torch's own extra_repr says."""
    return "".join(f", {name}={value!r}" for name, value in settings.items() if value)

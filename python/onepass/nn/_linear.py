"""Modules with a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import functional
from .._arguments.symbolic import leaf
from . import _settings
from ._rows import LayerNorm, RMSNorm
from ._settings import Activated, activated_nested, said


class LinearAct(Activated, torch.nn.Linear):
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
        self.activation = _settings.activation(self, activation)
        self.strategy = _settings.strategy(self, strategy)

    @leaf
    def forward(self, x: Tensor) -> Tensor:
        if getattr(x, "is_nested", False):
            return activated_nested(super().forward(x), self.activation)
        return functional.linear(x, self.weight, self.bias, activation=self.activation, strategy=self.strategy)

    def extra_repr(self) -> str:
        return super().extra_repr() + said(activation=self.activation)


class _NormLinear(torch.nn.Module):
    """A norm and a linear layer as submodules `norm` and `linear`, which hold the parameters and are not called."""

    def __init__(self, norm: torch.nn.Module, linear: torch.nn.Linear, activation: str | None, strategy: str) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear
        self.activation = _settings.activation(self, activation)
        self.strategy = _settings.strategy(self, strategy)

    def extra_repr(self) -> str:
        return said(activation=self.activation).removeprefix(", ")


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

    @leaf
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

    @leaf
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
        self.activation = _settings.activation(self, activation)
        self.strategy = _settings.strategy(self, strategy)

    @leaf
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
        self.activation = _settings.activation(self, activation, required=True)
        self.strategy = _settings.strategy(self, strategy)

    @leaf
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

"""Layers whose `forward` takes the place of another layer's. `self` is that other layer; annotations name what is read
of it. `kernels` allows no other members than those here."""

from __future__ import annotations

from torch import Tensor, nn

from ._bundled import functional


class RMSNorm(nn.Module):
    """For `torch.nn.RMSNorm`."""

    has_backward: bool = True
    can_torch_compile: bool = True

    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    eps: float | None

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class LlamaRMSNorm(nn.Module):
    """For the norm of Llama in transformers, and those like it. The result has x's dtype."""

    has_backward: bool = True
    can_torch_compile: bool = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


class LayerNorm(nn.Module):
    """For `torch.nn.LayerNorm`."""

    has_backward: bool = True
    can_torch_compile: bool = True

    normalized_shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class SiluAndMul(nn.Module):
    """silu of a row's first half times the second: SwiGLU."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.swiglu(x)


class GeluAndMul(nn.Module):
    """gelu of a row's first half times the second: GeGLU."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.geglu(x)


class GeluTanhAndMul(nn.Module):
    """GeGLU with gelu's tanh approximation."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, x: Tensor) -> Tensor:
        return functional.geglu(x, approximate="tanh")


class RotaryPosEmb(nn.Module):
    """For `apply_rotary_pos_emb` of Llama in transformers: rows in halves, queries and keys in one kernel."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        q, k = functional.rope([q, k], cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))
        return q, k


class CrossEntropyLoss(nn.Module):
    """For `torch.nn.CrossEntropyLoss`. The loss of 16-bit logits is float32."""

    has_backward: bool = True
    can_torch_compile: bool = True

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class LinearCrossEntropyLoss(nn.Module):
    """For `torch.nn.LinearCrossEntropyLoss` without `out_features`: no logits are made."""

    has_backward: bool = True
    can_torch_compile: bool = True

    linear: nn.Linear
    weight: Tensor | None
    ignore_index: int | None
    reduction: str
    label_smoothing: float

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=-100 if self.ignore_index is None else self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

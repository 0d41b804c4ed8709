"""Modules of losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import functional
from .._arguments.symbolic import leaf
from ._settings import said


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` in one pass over the logits forward and one backward, in float32.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in `torch.nn.CrossEntropyLoss`.
        z_loss, softcap: as in `functional.cross_entropy`.

    Shape: as of `torch.nn.CrossEntropyLoss`. State dict: `weight`, if it was given.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.softcap = z_loss, softcap

    @leaf
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        return said(z_loss=self.z_loss, softcap=self.softcap).removeprefix(", ")


class LinearCrossEntropyLoss(torch.nn.modules.loss._WeightedLoss):
    """A linear layer and the cross entropy of what it gives, without the logits: as `torch.nn.LinearCrossEntropyLoss`
    of torch 2.13 and newer.

    Args:
        in_features, num_classes, bias, device, dtype: of the linear layer.
        reduction, weight, ignore_index, label_smoothing, z_loss, softcap: as in `functional.linear_cross_entropy`.

    Shape: (..., in_features), and targets (...). State dict: `linear.weight`, `linear.bias`, and `weight`, if it was
    given, as of torch's.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(weight, reduction=reduction)
        self.linear = torch.nn.Linear(in_features, num_classes, bias, device, dtype)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.z_loss, self.softcap = z_loss, softcap

    @leaf
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        return said(z_loss=self.z_loss, softcap=self.softcap).removeprefix(", ")

"""Modules over `onepass.functional`, drop-in for those of `torch.nn`: constructors, state dicts and repr alike.

`CrossEntropyLoss`, `GroupNorm`, `LayerNorm`, `LogSoftmax`, `MultiheadAttention`, `RMSNorm` and `Softmax` are subclasses
of torch's: what asks `isinstance(module, torch.nn.LayerNorm)` (weight decay groups, initialisers, sharding rules) finds
them. State dicts load both ways.
"""

from __future__ import annotations

from ._attention import MultiheadAttention
from ._linear import GatedMLP, LayerNormLinear, LayerNormMLP, LinearAct, RMSNormLinear
from ._losses import CrossEntropyLoss, LinearCrossEntropyLoss
from ._rows import (
    GEGLU,
    AddLayerNorm,
    AddRMSNorm,
    BiasGELU,
    DropoutAdd,
    GroupNorm,
    LayerNorm,
    LogSoftmax,
    RMSNorm,
    Softmax,
    SwiGLU,
)

__all__ = [
    "AddLayerNorm",
    "AddRMSNorm",
    "BiasGELU",
    "CrossEntropyLoss",
    "DropoutAdd",
    "GEGLU",
    "GatedMLP",
    "GroupNorm",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LinearAct",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "MultiheadAttention",
    "RMSNorm",
    "RMSNormLinear",
    "Softmax",
    "SwiGLU",
]

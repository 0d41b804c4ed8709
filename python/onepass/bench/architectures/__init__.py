"""Architectures by their names, of transformers and in plain PyTorch, with random weights, in any size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onepass.bench.architectures.audio import AUDIO
from onepass.bench.architectures.blocks import BLOCKS
from onepass.bench.architectures.size import Make, Size
from onepass.bench.architectures.text import TEXT
from onepass.bench.architectures.vision import VISION

__all__ = ["ARCHITECTURES", "BASE", "SMALL", "build", "floating", "floats"]

ARCHITECTURES: dict[str, Make] = TEXT | VISION | AUDIO | BLOCKS

SMALL = Size(width=32, heads=2, inner=64, vocabulary=64, batch=2, tokens=24, image=32, samples=400)
"""For values: every kind of layer, and seconds until it is captured."""
BASE = Size(width=768, heads=12, inner=3072, vocabulary=32000, batch=8, tokens=512, image=224, samples=80000)
"""For prices: as wide and as long as BERT base, two layers deep."""


def build(
    name: str, size: Size, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[nn.Module, dict[str, Any]]:
    """A model in its evaluation mode, and what it is called with, floating-point numbers in a dtype.

    Raises:
        KeyError: for an architecture that there is not.
        ModuleNotFoundError: without transformers.
    """
    make = ARCHITECTURES[name]
    with torch.device(device):
        model, inputs = make(size)
    return model.to(dtype).eval(), floats(inputs, dtype)


def floats(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs, with floating-point tensors in this dtype."""
    return {k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def floating(result: Any, path: str = "") -> dict[str, Tensor]:
    """All floating-point tensors of what a model returns, by where they stand in it."""
    if isinstance(result, Tensor):
        return {path: result} if result.is_floating_point() else {}
    if isinstance(result, dict):
        parts = ((f"{path}.{key}", value) for key, value in result.items())
    else:
        parts = ((f"{path}[{i}]", value) for i, value in enumerate(result)) if isinstance(result, (list, tuple)) else ()
    return {name: tensor for at, value in parts for name, tensor in floating(value, at).items()}

"""The demo's patterns: each as a line, as the plain PyTorch that a model's code has for it, and with real tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.patterns import add_rms_norm, bias_gelu, rms_norm, swiglu
from onepass.demo.encoder import Captured
from onepass.line import Line

__all__ = ["Pattern", "patterns_of"]

# Functions under PyTorch's own names: its layer_norm and rms_norm take their weights, so the chain is as short as a
# user would write it, where `Line.reference` has an operator a word.
Eager = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Pattern:
    """A line, PyTorch's chain for it (a keyword argument `dropout` replaces F.dropout), and the calls to make."""

    line: str
    eager: Eager
    calls: list[tuple[Tensor, ...]]

    @property
    def label(self) -> str:
        """The line, its long numbers shortened."""
        return re.sub(r"\d\.\d{5,}", lambda number: f"{float(number[0]):.4g}", self.line)

    def bytes_to_move(self, dtype: torch.dtype) -> int:
        """Of all calls, forward and backward. `Line.cost` takes a mask to have x's shape and a gradient; here it is
        one row of bools a sentence, read once each way."""
        without_masks = Line(re.sub(r"\bmask \| ", "", self.line))
        total = 0
        for x, *operands in self.calls:
            cost = without_masks.cost(x.shape, dtype)
            masks = sum(o.numel() for o in operands if o.dtype == torch.bool)
            total += cost.forward.bytes + cost.backward.bytes + 2 * masks
        return total


def patterns_of(captured: Captured, config) -> list[Pattern]:
    """The encoder's own, then those of models with RMSNorm and gated units, on the same activations."""
    eps, p, p_attention = config.layer_norm_eps, config.hidden_dropout_prob, config.attention_probs_dropout_prob
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5

    def layer_norm(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def add_layer_norm(x, b, residual, weight, bias):
        h = x + b + residual
        return layer_norm(h, weight, bias), h

    def dropout_add_layer_norm(x, b, residual, weight, bias, dropout=F.dropout):
        h = dropout(x + b, p) + residual
        return layer_norm(h, weight, bias), h

    def probabilities(scores, mask, dropout=F.dropout):
        return dropout(F.softmax((scores * scale).masked_fill(~mask, -math.inf), -1), p_attention)

    normed = f"keep | layer_norm({eps}) | scale | bias"
    halves = [(x + b).chunk(2, -1) for x, b in captured.activations]
    return [
        Pattern(f"layer_norm({eps}) | scale | bias", layer_norm, captured.norms),
        Pattern(f"bias | add | {normed}", add_layer_norm, captured.residuals),
        Pattern(f"bias | dropout({p}) | add | {normed}", dropout_add_layer_norm, captured.residuals),
        Pattern("bias | gelu", bias_gelu, captured.activations),
        Pattern(f"mul({scale}) | mask | softmax | dropout({p_attention})", probabilities, captured.scores),
        Pattern("rms_norm(1e-06) | scale", rms_norm, [(x, weight) for x, weight, _ in captured.norms]),
        Pattern(
            "add | keep | rms_norm(1e-06) | scale",
            add_rms_norm,
            [(x + b, residual, weight) for x, b, residual, weight, _ in captured.residuals],
        ),
        Pattern("gate(silu)", swiglu, halves),
    ]

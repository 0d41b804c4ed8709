"""Losses and log-probabilities of rows of logits."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from .._arguments.shapes import check_tensor
from .._arguments.symbolic import traceable
from ..call import fused

_REDUCTIONS = ("none", "mean", "sum")


@traceable
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """The cross entropy of softmax(input) and a class each, with `torch.nn.functional.cross_entropy`'s arguments.

    Args:
        input: logits, (C,), (N, C) or (N, C, d1, ...), floating point. The classes are best the last dimension in
            memory, as in (N, C): others are copied.
        target: (), (N,) or (N, d1, ...), int64 or int32: classes from 0 to C - 1, or `ignore_index`.
        weight: (C,), of each class; it gets no gradient.
        ignore_index: the target whose loss and gradient are 0, and which a mean does not count.
        reduction: "none", "mean" (of the targets that are not ignored, by their weights) or "sum".
        label_smoothing: from 0 to 1, the part of a target that all classes share (Szegedy et al., arXiv:1512.00567).
        z_loss: times the square of log Σ exp(input), added to each loss (Chowdhery et al., arXiv:2204.02311).
        softcap: c of c tanh(input / c), in input's place; None leaves it.

    Returns:
        A number, or target's shape for "none"; float32, of float64 logits float64.

    Raises:
        IndexError: a target that is no class, on the CPU; on CUDA a device-side assertion fails, as PyTorch's.
        RuntimeError: shapes that do not fit, a weight that is not of floating-point numbers.
        TypeError: a target that is not int64 or int32, an ignore_index that is not int.
        ValueError: an unknown reduction, or label_smoothing that is not from 0 to 1.

    Saved for backward: input, target, and two numbers a row.
    Line: `cross_entropy(label_smoothing, z_loss, ignore_index)`.
    """
    check_tensor("cross_entropy", "input", input)
    check_tensor("cross_entropy", "target", target)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"cross_entropy(): expected reduction to be one of {_REDUCTIONS}, but got {reduction!r}")
    ignored = _checked_ignored("cross_entropy", ignore_index)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(
            f"cross_entropy(): expected label_smoothing to be between 0 and 1, but got {label_smoothing!r}"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cross_entropy(): expected target to be torch.int64 or torch.int32, but got {target.dtype}")
    logits = input.movedim(1, -1) if input.dim() > 2 else input  # noqa: PLR2004
    words = [] if softcap is None else [f"softcap({float(softcap)!r})"]
    is_counted = target != ignore_index
    if weight is None:
        share = is_counted
        word = f"cross_entropy({float(label_smoothing)!r}, {float(z_loss)!r}, {ignored})"
        loss = fused(" | ".join([*words, word]), logits, target)
    else:
        weight = _checked_weight(weight, logits)
        share = weight[target.where(is_counted, 0)].to(_arithmetic(input)) * is_counted
        loss = -fused(" | ".join([*words, f"logprob({ignored})"]), logits, target) * share
        if label_smoothing or z_loss:
            log_sum = fused(" | ".join([*words, "logsumexp"]), logits)
        if label_smoothing:
            columns = weight.to(loss.dtype)
            of_all = log_sum * columns.sum() - fused(" | ".join([*words, "scale", "sum"]), logits, columns)
            smoothed = label_smoothing / logits.shape[-1] * of_all
            loss = (1 - label_smoothing) * loss + smoothed.where(is_counted, 0)  # ignored rows may have a NaN
        if z_loss:
            loss = loss + (z_loss * log_sum.square()).where(is_counted, 0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / share.sum()


def _checked_weight(weight: Tensor, logits: Tensor) -> Tensor:
    """Without a gradient, as a column of the logits."""
    check_tensor("cross_entropy", "weight", weight)
    if weight.shape != logits.shape[-1:]:
        raise RuntimeError(
            f"cross_entropy(): expected weight of shape {list(logits.shape[-1:])}, one number a class, but got "
            f"{list(weight.shape)}"
        )
    if not weight.is_floating_point():
        raise RuntimeError(f"cross_entropy(): expected weight of floating-point numbers, but got {weight.dtype}")
    return weight.detach()


def _checked_ignored(function: str, ignore_index: int) -> int:
    try:
        return operator.index(ignore_index)  # NumPy's integers, too
    except TypeError:
        got = type(ignore_index).__name__
        raise TypeError(f"{function}(): argument 'ignore_index' must be int, not {got}") from None


def _arithmetic(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@traceable
def log_prob(
    input: Tensor, target: Tensor, *, temperature: float = 1.0, entropy: bool = False, ignore_index: int = -100
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(input / temperature) at each row's target, and the entropy of that softmax, in one pass.

    Args:
        input: logits, (..., N), floating point.
        target: (...), int64 or int32: columns from 0 to N - 1, or `ignore_index`.
        temperature: what logits are divided by.
        entropy: whether the entropies are asked for, too.
        ignore_index: the target whose log-probability is 0, without a gradient.

    Returns:
        (...), float32, of float64 logits float64; with `entropy` two such tensors.

    Raises:
        IndexError: a target that is no column, on the CPU; on CUDA a device-side assertion fails, as PyTorch's.
        RuntimeError: shapes or dtypes that do not fit.
        TypeError: an ignore_index that is not int.
        ValueError: a temperature of 0.

    Saved for backward: input, target, and two numbers a row (four with `entropy`).
    Line: `mul(1 / temperature) | logprob(ignore_index) | entropy`.
    """
    check_tensor("log_prob", "input", input)
    check_tensor("log_prob", "target", target)
    ignored = _checked_ignored("log_prob", ignore_index)
    if temperature == 0:
        raise ValueError(f"log_prob(): expected temperature to be other than 0, but got {temperature!r}")
    words = [] if temperature == 1.0 else [f"mul({1.0 / float(temperature)!r})"]
    words += [f"logprob({ignored})", *(["entropy"] if entropy else [])]
    return fused(" | ".join(words), input, target)

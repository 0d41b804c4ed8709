"""Every word in plain PyTorch: what a line means, what the tests compare with, and what runs where nothing compiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "WORDS", "compose", "dropout_numbers", "philox"]


def layer_norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Written out, in the arithmetic of F.layer_norm, whose third derivatives are wrong (torch 2.15)."""
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # what rounding took from the mean
    return (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: Tensor, eps: float | None = None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def softmax(x: Tensor) -> Tensor:
    """Zeros, with zero gradients, where a whole row is -inf."""
    fully_masked = (x == -math.inf).all(-1, keepdim=True)
    return F.softmax(x.masked_fill(fully_masked, 0), -1).masked_fill(fully_masked, 0)


def mask(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else x + mask


def causal(x: Tensor) -> Tensor:
    above_diagonal = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return x.masked_fill(above_diagonal, -math.inf)


def dropout(x: Tensor, p: float = 0.5, numbers: Tensor | None = None) -> Tensor:
    """With `numbers` (0 to 65535, one an element) the mask that the kernels draw, else torch's own dropout.

    p is rounded to a multiple of 2^-16, and what is kept is scaled by the inverse of that rounded probability.
    """
    if numbers is None:
        return F.dropout(x, p)
    threshold = int(p * 65536 + 0.5)
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return torch.where(numbers >= threshold, x * scale, 0)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def scores(x: Tensor, keys: Tensor) -> Tensor:
    return x @ keys.transpose(-2, -1)


def values(x: Tensor, values: Tensor) -> Tensor:
    return x @ values


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu_squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "softplus": F.softplus,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "leaky_relu": lambda x, negative_slope=0.01: F.leaky_relu(x, negative_slope),
}

WORDS: dict[str, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    "bias": lambda x, b: x + b,
    "scale": lambda x, g: x * g,
    "mul": lambda x, c: x * c,
    "add": lambda x, r: x + r,
    "gate": lambda x, u, activation: activation(x) * u,
    "mask": mask,
    "causal": causal,
    "rope": rope,
    "dropout": dropout,
    "keep": lambda x: x,
    "linear": F.linear,
    "scores": scores,
    "values": values,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "softmax": softmax,
}


def compose(
    words: Sequence[Any],
    x: Tensor,
    operands: Sequence[Tensor] = (),
    dropout_state: Tensor | None = None,
    training: bool = True,
    *,
    eps_dtype: torch.dtype | None = None,
    dropouts: int = 0,
    first_row: int = 0,
) -> tuple[Tensor, ...]:
    """Runs a line word by word as plain, differentiable PyTorch.

    Args:
        words: the line's words, as `Line.words` gives them.
        x: (..., N), floating point.
        operands: the tensors that the words take, in the order in which the words stand.
        dropout_state: int64 [2], seed and offset: dropout draws exactly the mask that the kernels draw. Without it
            `torch.nn.functional.dropout` draws from torch's generator.
        training: whether dropout acts.
        eps_dtype: the dtype whose machine epsilon a `rms_norm` without a number adds, x's by default. A reference
            that computes in a wider dtype passes the original one.
        dropouts: how many dropouts stand before these words, where they are a part of a line.
        first_row: of x among those of a list, whose dropout counts all their rows.

    Returns:
        The result, then the values of each `keep` in order, all of x's dtype, behind a contraction of its matrix's. In
        between, types promote as PyTorch's operators promote them; a kept value is rounded to x's dtype before the line
        goes on, and what a contraction takes to its matrix's.
    """
    pending = iter(operands)
    kept: list[Tensor] = []
    value, dtype = x, x.dtype
    for word in words:
        function = WORDS[word.name]
        if word.kind == "dropout":
            if training:
                numbers = None
                if dropout_state is not None:
                    numbers = dropout_numbers(value.shape, dropout_state, dropouts, x.device, first_row)
                value = function(value, *word.numbers, numbers)
            dropouts += 1
            continue
        if word.kind == "keep":
            value = value.to(dtype)
            kept.append(value)
            continue
        taken = [] if word.operand == "none" else [next(pending) for _ in range(word.operands)]
        if word.kind == "contraction":
            dtype = taken[0].dtype
            value = value.to(dtype)
        arguments: list[Any] = [value, *taken]
        if word.kind == "gate":
            arguments.append(lambda v, f=ACTIVATIONS[word.activation], numbers=word.numbers: f(v, *numbers))
        elif word.name == "rms_norm" and not word.numbers:
            arguments.append(machine_epsilon(eps_dtype or x.dtype))
        else:
            arguments += word.numbers
        value = function(*arguments)
    return (value.to(dtype), *kept)


def machine_epsilon(dtype: torch.dtype) -> float:
    """Of the arithmetic: `torch.rms_norm` without eps adds float32's for bfloat16 and float16, too (read off 2.15)."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def dropout_numbers(
    shape: Sequence[int], state: Tensor, ordinal: int, device: torch.device | str, first_row: int = 0
) -> Tensor:
    """The 16 random bits of every element, as int64 from 0 to 65535, of the line's dropout number `ordinal`.

    Eight neighbours of a row share one Philox call. Its counter holds their group, counted over the whole tensor, and
    the offset; its key is the seed: a pure function of the state and the logical place, the same on every device.
    """
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    groups_a_row = (columns + 7) // 8
    seed, offset = state.to(device).unbind()
    group = torch.arange(rows * groups_a_row, dtype=torch.int64, device=device) + first_row * groups_a_row
    counter = (low_word(group), high_word(group), low_word(offset), high_word(offset) ^ ordinal)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, (low_word(seed), high_word(seed)))), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.reshape(rows, groups_a_row * 8)[:, :columns].reshape(tuple(shape))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-7 (Salmon et al., SC 2011): four counter words and two key words to four random words.

    Words are int64 tensors that hold 32 bits. A product wraps modulo 2^64, and masking after the shift undoes the sign.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high_word(second) ^ c1 ^ k0, low_word(second), high_word(first) ^ c3 ^ k1, low_word(first)
        k0, k1 = low_word(k0 + 0x9E3779B9), low_word(k1 + 0xBB67AE85)
    return c0, c1, c2, c3


def low_word(value: Tensor) -> Tensor:
    return value & 0xFFFFFFFF


def high_word(value: Tensor) -> Tensor:
    return (value >> 32) & 0xFFFFFFFF

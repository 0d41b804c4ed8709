"""What programs are written with, beside PyTorch itself."""

import math  # noqa: F401
import operator  # noqa: F401

import torch
import torch.nn.functional as F  # noqa: F401
from torch import nn  # noqa: F401
from torch.utils.checkpoint import checkpoint  # noqa: F401


def R(*shape, dtype=None):
    """Random normal numbers, the same in every dtype."""
    return torch.randn(shape, dtype=torch.float64).to(dtype or torch.get_default_dtype())


def rotated(x, cos, sin):
    """Rotary position embedding as transformers writes it."""
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def turned(x, cos, sin):
    """The same in another spelling."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat(tensors=(-second, first), dim=-1) * sin


def cast_twice(x, cos, sin):
    """Of an x that is cast by each of those that read it, as ModernBERT does."""
    wide = torch.promote_types(x.dtype, torch.float32)
    first, second = x.to(wide).chunk(2, -1)
    return (x.to(wide) * cos.to(wide) + torch.cat((-second, first), dim=-1) * sin.to(wide)).to(x.dtype)


def in_pairs(x, cos, sin):
    """Of pairs, as GPT-J writes it."""
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


def halves_apart(x, cos, sin):
    """Of halves by themselves, whose tables are half as long, as GPT-OSS writes it."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def of_first_numbers(x, cos, sin):
    """With the others behind them, as GPT-NeoX writes it."""
    count = cos.shape[-1]
    return torch.cat((rotated(x[..., :count], cos, sin), x[..., count:]), dim=-1)


def causal(n):
    """A mask by index, as transformers builds it where it is traced."""
    index = torch.arange(n)
    return index[None, :] <= index[:, None]


@torch.library.custom_op("fuzz::shift_", mutates_args={"x"})
def shift_(x: torch.Tensor, by: float) -> None:
    """Overwrites what it is given."""
    x.add_(by)


@torch.library.custom_op("fuzz::note", mutates_args={"into"})
def note(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """A new tensor, and an effect on another."""
    into.add_(1.0)
    return x * 2.0


@note.register_fake
def _(x, into):
    return torch.empty_like(x)


class Doubled(torch.autograd.Function):
    """A gradient that is not the function's."""

    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 3.0


class Tagged(torch.Tensor):
    """A subclass that adds nothing."""

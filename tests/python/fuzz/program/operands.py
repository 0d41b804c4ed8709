"""Tensors that statements take beside their subject: those that are there, or new inputs of a shape that is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.program.builder import Builder, Skip, is_row

__all__ = ["broadcast", "dtype_of", "fresh", "is_row", "like", "mask_for", "number", "operand"]


def dtype_of(t: Tensor) -> str:
    return "" if t.dtype == torch.float64 else f", dtype={t.dtype}"


def number(b: Builder) -> str:
    return b.one_of("0.125", "2.0", "-1.5", "0.5", "3", "1e-3", "1.702", "0.25")


def fresh(b: Builder, shape: tuple[str, ...], dtype: str = "", grad: bool | None = None) -> str:
    """A new input in a layout that is drawn: dense, dimensions swapped in memory, rows apart, expanded."""
    layout = b.chance.random()
    head, last = shape[:-1], shape[-1:]
    if len(shape) > 1 and layout < 0.1:
        source = f"R({', '.join((*head[:-1], *last, head[-1]))}{dtype}).mT"
    elif len(shape) > 1 and layout < 0.15:
        source = f"R({', '.join((*last, *head))}{dtype}).movedim(0, -1)"
    elif shape and layout < 0.2:
        source = f"R({', '.join((*head, f'2 * {last[0]}'))}{dtype})[..., ::2]"
    elif len(shape) > 1 and layout < 0.24:
        source = f"R({', '.join(('1', *shape[1:]))}{dtype}).expand({', '.join(shape)})"
    elif len(shape) == 4 and layout < 0.3:
        source = f"R({', '.join(shape)}{dtype}).contiguous(memory_format=torch.channels_last)"
    else:
        source = f"R({', '.join(shape)}{dtype})".replace("(, ", "(")
    return b.input(source, grad)


def like(b: Builder, x: str, grad: bool | None = None) -> str:
    """Of x's shape and dtype: one that is there, or new."""
    if b.often(0.4):
        try:
            return b.pick(lambda t: t.shape == b[x].shape and t.dtype == b[x].dtype)
        except Skip:
            pass
    return fresh(b, b.shape(x), dtype_of(b[x]), grad)


def broadcast(b: Builder, x: str, grad: bool | None = None) -> str:
    """A new input that broadcasts with x, of one of many shapes."""
    shape, dtype = b.shape(x), dtype_of(b[x])
    kind = b.chance.random()
    if kind < 0.3:
        return fresh(b, shape, dtype, grad)
    if kind < 0.5:
        return fresh(b, shape[-1:], dtype, grad)
    if kind < 0.55:
        return fresh(b, ("1", *shape[-1:]), dtype, grad)
    if kind < 0.58:
        return fresh(b, ("1",), dtype, grad)
    if kind < 0.62:
        return fresh(b, (), dtype, grad)
    if kind < 0.85:
        ones = tuple(b.one_of(s, s, "1") for s in shape)
        return fresh(b, ones[b.chance.randrange(len(ones)) :] if ones and b.often(0.4) else ones, dtype, grad)
    if kind < 0.9:
        return fresh(b, (*shape[:-1], "1"), dtype, grad)
    if kind < 0.95 and len(shape) < 5:
        return fresh(b, (b.one_of("1", "2"), *shape), dtype, grad)
    other = b.one_of("torch.float32", "torch.bfloat16") if b.often(0.5) else "torch.float64"
    return fresh(b, b.one_of(shape, shape[-1:]), f", dtype={other}", grad)


def operand(b: Builder, x: str, numbers: float = 0.15) -> str:
    """What a sum or a product may take."""
    if b.often(numbers):
        return number(b)
    if b.often(0.35):
        try:
            return b.pick(lambda t: t.is_floating_point() and fits(t, b[x]))
        except Skip:
            pass
    return broadcast(b, x)


def fits(t: Tensor, x: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(t.shape, x.shape).numel() <= 4096
    except RuntimeError:
        return False


def mask_for(b: Builder, x: str) -> str:
    """Booleans of x's shape or broadcast to it."""
    shape = b.shape(x)
    kind = b.chance.random()
    if kind < 0.4:
        return f"({b.one_of(x, like(b, x, False))} > 0)"
    if kind < 0.7:
        return b.input(f"R({', '.join(shape[-2:])}) > 0", False)
    return b.input(f"torch.arange({shape[-1]}) % 2 == 0", False) if shape else f"({x} > 0)"

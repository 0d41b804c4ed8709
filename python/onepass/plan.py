"""What a line costs, and which of its strategies runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Cost", "Plan", "Strategy", "Traffic", "chip_of", "reason"]


@dataclass(frozen=True)
class Traffic:
    """Bytes that must move (every tensor once) and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Cost:
    """What a line costs on a tensor of some shape; `saved_bytes` are held between forward and backward."""

    forward: Traffic
    backward: Traffic
    saved_bytes: int


@dataclass(frozen=True)
class Strategy:
    """A way to compute a line with `linear` forward: bytes through memory, and predicted seconds (None: not known)."""

    name: str
    bytes: int
    seconds: float | None
    why_not: str = ""


@dataclass(frozen=True)
class Plan:
    """Which strategy runs, and why."""

    strategy: str
    why: str
    alternatives: tuple[Strategy, ...]

    def __str__(self) -> str:
        return f"{self.strategy}: {self.why}"


def chip_of(device: torch.device | str | None) -> str:
    """ "cpu", a CUDA chip's name, or its device's."""
    if isinstance(device, str) and device.startswith("sm_"):
        return device
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def reason(chosen: Strategy, ways) -> str:
    said = [_said_of(chosen)]
    said += [
        f"not {way.name}: {way.why_not}" if way.why_not else f"{way.name} {_said_of(way)}"
        for way in ways
        if way is not chosen
    ]
    return "; ".join(said)


def _said_of(way: Strategy) -> str:
    if way.why_not:
        return way.why_not
    moved = f"{way.bytes / 2**20:,.1f} MiB"
    return moved if way.seconds is None else f"{1e6 * way.seconds:,.0f} µs predicted, {moved}"

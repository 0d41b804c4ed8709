"""What a line costs, and which of its strategies runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from onepass.pricing.profile import Profile, profile_of

__all__ = ["Cost", "Plan", "Strategy", "Traffic", "chip_of", "reason", "reason_of_launches"]


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
    """A way to compute a line forward: bytes through memory, predicted seconds (None: not known), and on CUDA the
    kernel that computes it, where there is one for all of the line; of a row's parts, all of them."""

    name: str
    bytes: int
    seconds: float | None
    why_not: str = ""
    kernel: str = ""


@dataclass(frozen=True)
class Plan:
    """Which strategy runs, and why."""

    strategy: str
    why: str
    alternatives: tuple[Strategy, ...]

    def __str__(self) -> str:
        return f"{self.strategy}: {self.why}"


MOST_ELEMENTS = 2**58


def checked_size(function: str, argument: str, value: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{function}(): argument '{argument}' must be of ints, not {type(value).__name__}") from None
    if not 0 <= size <= MOST_ELEMENTS:
        raise RuntimeError(f"{function}(): expected {argument} from 0 to 2^58, got {size}")
    return size


def checked_shape(function: str, shape: Iterable[int]) -> tuple[int, ...]:
    """A tensor's, whose sizes are no more than can be counted."""
    if isinstance(shape, int):
        raise TypeError(f"{function}(): argument 'shape' must be tuple of ints, not int")
    sizes = tuple(checked_size(function, "shape", size) for size in shape)
    if math.prod(sizes) > MOST_ELEMENTS:
        raise RuntimeError(f"{function}(): a tensor of shape {list(sizes)} has too many elements")
    return sizes


CHIPS = {"H200": "sm_90a", "H100": "sm_90a", "A100": "sm_80"}
"""By a part of a device's name."""


def chip_of(device: torch.device | str | Profile | None) -> str:
    """ "cpu", a CUDA chip's name, or its device's.

    Raises:
        ValueError: for a device's name that is not known.
    """
    if isinstance(device, str) and device.startswith("sm_"):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    is_torchs = isinstance(device, torch.device) or str(device).partition(":")[0] in ("cpu", "cuda")
    if is_torchs and (device := torch.device(device)).type != "cuda":
        return "cpu"
    if is_torchs and torch.cuda.is_available():
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    name = profile_of(device).name
    if name == "cpu":
        return "cpu"
    found = [chip for part, chip in CHIPS.items() if part in name]
    if not found:
        raise ValueError(f"plan(): expected device to be a torch device or a chip such as 'sm_90a', but got {name!r}")
    return found[0]


MADE_AGAIN = (
    "; beside its gradients backward takes as much as forward, since it makes a chunk's rows again "
    "(functional.linear_cross_entropy makes gradients in forward)"
)


def reason(chosen: Strategy, ways) -> str:
    said = [_said_of(chosen)]
    said += [
        f"not {way.name}: {way.why_not}" if way.why_not else f"{way.name} {_said_of(way)}"
        for way in ways
        if way is not chosen
    ]
    return "; ".join(said)


def reason_of_launches(kernels: list[dict]) -> str:
    """Of a line without a contraction: what `_native.launches` says, in words."""
    first, *others = kernels
    if others:
        names = ", ".join(of["kernel"] for of in kernels)
        return f"{len(kernels)} kernels, since a row does not fit on chip and is taken in parts: {names}"
    threads, rows = first["threads"], first["rows"]
    if first["cluster"] > 1:
        shared = f"a row is shared by a cluster of {first['cluster']} blocks of {threads} threads"
    elif "rowwise" in first["kernel"]:
        shared = f"{rows} row{'s' * (rows > 1)} of {threads} thread{'s' * (threads > 1)} in a block"
    else:
        shared = f"blocks of {threads} threads"
    blocks = first["blocks"]
    return f"one kernel, {first['kernel']}: {shared}, {blocks:,} block{'s' * (blocks != 1)}"


def _said_of(way: Strategy) -> str:
    if way.why_not:
        return way.why_not
    moved = f"{way.bytes / 2**20:,.1f} MiB"
    return moved if way.seconds is None else f"{1e6 * way.seconds:,.0f} µs predicted, {moved}"

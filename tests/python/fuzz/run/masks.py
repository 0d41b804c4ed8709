"""Dropout's masks: what fused programs draw, eager PyTorch is made to draw as well; then all else must agree exactly.

A program gives each of its dropouts a probability of its own, by which its masks are known.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["Masks", "disagreement", "intercepted"]

STEPS = 1 << 16


class Masks:
    """Draws of one run of a program: recorded where `replay` is None, else taken from there.

    `drawn` is by call and probability (in units of 2^-16, of what is dropped): all draws in their order, flat. A line
    may have drawn for a tensor whose dimensions it had turned: `in_memory` are the probabilities whose recorded numbers
    are taken in the order of memory, `not_dense` those where that makes a difference.
    """

    def __init__(self, replay: Masks | None = None, in_memory: frozenset[int] = frozenset()) -> None:
        self.drawn: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.replay, self.in_memory = replay, in_memory
        self.not_dense: set[int] = set()
        self.call = 0
        self._taken: dict[tuple[int, int], int] = defaultdict(int)

    @contextlib.contextmanager
    def of_call(self, index: int) -> Iterator[None]:
        """Draws in here are those of this call."""
        self.call = index
        before, Masks._active = Masks._active, self
        try:
            yield
        finally:
            Masks._active = before

    def keeps(self, shape: torch.Size, strides: tuple[int, ...], step: int, drawn: Tensor) -> Tensor:
        """What a dropout of a tensor of this shape keeps: what was drawn, or what was in the other run."""
        if type(drawn) is not Tensor:  # an operator is only looked at
            return drawn.reshape(shape)
        key = self.call, step
        order = sorted(range(len(shape)), key=lambda d: -strides[d])
        if order != list(range(len(shape))):
            self.not_dense.add(step)
        if self.replay is not None and self.replay.drawn.get(key):
            recorded = torch.cat(self.replay.drawn[key])
            begin = self._taken[key] % recorded.numel()
            self._taken[key] += drawn.numel()
            if begin + drawn.numel() <= recorded.numel():
                drawn = recorded[begin : begin + drawn.numel()]
        self.drawn[key].append(drawn.reshape(-1).clone())
        if step in self.in_memory:
            turned = drawn.reshape([shape[d] for d in order])
            return turned.permute(sorted(range(len(order)), key=order.__getitem__))
        return drawn.reshape(shape)

    _active: Masks | None = None


def _bernoulli(self: Tensor, p: float = 0.5, *, generator=None) -> Tensor:
    """aten::bernoulli_, with which PyTorch's dropout on the CPU draws."""
    drawn = torch.rand(self.numel(), generator=generator, dtype=torch.float64) < p
    step = round((1 - p) * STEPS)
    if Masks._active is not None and 0 < step < STEPS:
        drawn = Masks._active.keeps(self.shape, self.stride(), step, drawn)
    return self.copy_(drawn.reshape(self.shape))


def _dropout(x: Tensor, p: float = 0.5, numbers: Tensor | None = None) -> Tensor:
    """As `onepass.reference.dropout`."""
    if numbers is None:
        return torch.nn.functional.dropout(x, p)
    threshold = int(p * STEPS + 0.5)
    kept = numbers >= threshold
    if Masks._active is not None:
        kept = Masks._active.keeps(kept.shape, kept.stride(), threshold, kept.reshape(-1))
    return x * kept * (STEPS / (STEPS - threshold) if threshold < STEPS else 0.0)  # a dropped NaN stays one in eager


@contextlib.contextmanager
def intercepted() -> Iterator[None]:
    """In here masks are recorded and replayed."""
    from onepass import reference

    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("bernoulli_.float", _bernoulli, "CPU")
    before = reference.WORDS["dropout"]
    reference.WORDS["dropout"] = _dropout
    try:
        yield
    finally:
        reference.WORDS["dropout"] = before
        library._destroy()


def disagreement(fused: Masks, eager: Masks) -> str | None:
    """What is wrong with the masks that a fused run drew, beside those that eager draws for itself: a block that is
    computed again draws what it drew before, and no two dropouts draw the same."""
    seen: dict[bytes, tuple[int, int]] = {}
    for key, draws in fused.drawn.items():
        expected = eager.drawn.get(key, [])
        sizes = {t.numel() for t in expected}
        stream = torch.cat(draws)
        if len(sizes) != 1 or stream.numel() % (size := sizes.pop()):
            continue
        found = {_bytes(t) for t in stream.split(size)}
        if size >= SHORT and len(found) > len({_bytes(t) for t in expected}):
            return f"call {key[0]}, dropout {key[1] / STEPS}: a block that is computed again has drawn another mask"
        for mask in found if size >= LONG else ():
            if seen.setdefault(mask, key) != key:
                return f"dropouts {key} and {seen[mask]} have one mask"
    return None


SHORT, LONG = 24, 64
"""Numbers of a mask that two draws of one dropout, and two dropouts, do not have in common by luck."""


def _bytes(mask: Tensor) -> bytes:
    return mask.numpy().tobytes()

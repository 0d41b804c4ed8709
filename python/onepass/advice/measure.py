"""Times the lines of an explanation beside what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass.line import Line
from onepass.pricing.profile import Profile
from onepass.pricing.timing import Run, clock_for
from onepass.word import about

if TYPE_CHECKING:
    from onepass.advice.report import Explanation

__all__ = ["Measured", "inputs_for", "measure", "runs_of"]


@dataclass(frozen=True)
class Measured:
    """Seconds of one line, forward and backward: predicted, measured, and those of the same in plain PyTorch."""

    line: str
    shape: tuple[int, ...]
    dtype: str
    predicted: tuple[float, float]
    measured: tuple[float, float]
    unfused: tuple[float, float]


def measure(explained: Explanation, seconds: float) -> list[Measured]:
    """Each distinct line without a contraction, with random tensors of the same shapes."""
    device = device_of(explained.profile)
    clock, found = clock_for(device), []
    distinct = {(a.line, a.shape, a.dtype): a for a in explained.lines}
    for (text, shape, name), advice in distinct.items():
        if any(about(word.strip()).kind == "contraction" for word in text.split("|")):
            continue
        line, dtype = Line(text), getattr(torch, name)
        tensors = inputs_for(line, shape, dtype, device, explained.training)
        runs = {}
        for way, call in (("line", line), ("unfused", line.reference)):
            runs |= {f"{way} {side}": run for side, run in runs_of(call, tensors, explained.training).items()}
        times = clock.median(runs, seconds)
        pairs = [tuple(times.get(f"{way} {side}", 0.0) for side in ("forward", "backward")) for way in WAYS]
        predicted = tuple(price.seconds for price in advice.fused)
        found.append(Measured(text, shape, name, predicted, *pairs))
    return found


WAYS = ("line", "unfused")


def inputs_for(line: Line, shape, dtype: torch.dtype, device: torch.device, training: bool) -> list[Tensor]:
    """x and the operands, of which the positions of a rotation have no gradient."""
    of, made = {"column": shape[-1:], "tensor": shape}, [(shape, True)]
    taking = [word for word in line.words if word.operand not in ("none", "target")]
    made += [(of[word.operand], word.kind != "rotary") for word in taking for _ in range(word.operands)]
    tensors = [torch.randn(s, dtype=dtype, device=device, requires_grad=training and learns) for s, learns in made]
    targets = [word for word in line.words if word.operand == "target"]  # which stand behind all others
    return tensors + [torch.randint(shape[-1], shape[:-1], device=device) for _ in targets]


def runs_of(call, tensors: list[Tensor], training: bool) -> dict[str, Run]:
    """Forward, and with random upstream gradients backward."""
    runs = {"forward": Run(lambda: call(*tensors))}
    if training:
        results = call(*tensors)
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r.requires_grad]
        upstream, inputs = [torch.randn_like(r) for r in results], [t for t in tensors if t.requires_grad]
        if results:
            runs["backward"] = Run(
                lambda: torch.autograd.grad(results, inputs, upstream, retain_graph=True, allow_unused=True)
            )
    return runs


def device_of(profile: Profile) -> torch.device:
    """The present device that a profile is about.

    Raises:
        RuntimeError: if there is none.
    """
    if profile.name == "cpu":
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if torch.cuda.get_device_name(index) == profile.name:
            return torch.device("cuda", index)
    raise RuntimeError(f"measure(): expected {profile.name} to be present, but it is not")

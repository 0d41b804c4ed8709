"""How near a profile's predictions are to the times that benchmarks have measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepass.bench.patterns import PATTERNS
from onepass.bench.report import markdown_table
from onepass.line import Line
from onepass.pricing.prices import of_words
from onepass.pricing.profile import Profile, profile_of

__all__ = ["Prediction", "markdown", "predictions"]

PROFILE_OF = {"NVIDIA H200": "h200"}
"""By the device's name. CPUs differ too much for one profile to stand for another."""


@dataclass(frozen=True)
class Prediction:
    """A direction of a line: seconds predicted and measured."""

    line: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1


def predictions(results: dict[str, Any], profile: Profile) -> list[Prediction]:
    """Of each line without a contraction that a benchmark's results have."""
    found = []
    for row in results["rows"]:
        line = row["line"] if row["provider"] == "onepass" and row["failure"] is None else None
        if line is None or line not in _LINES or Line(line).weight is not None:
            continue
        shape, dtype = tuple(row["shape"]), getattr(torch, row["dtype"])
        prices = of_words(Line(line), shape, dtype, profile, _operands(Line(line), shape, dtype))
        for price, side in zip(prices, ("forward", "backward")):
            if row[f"{side}_us"] is not None:
                times = price.seconds, row[f"{side}_us"] * 1e-6
                found.append(Prediction(line, shape, row["dtype"], side == "backward", *times))
    return found


_LINES = {pattern.line for pattern in PATTERNS}


def _operands(line: Line, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Of the shapes that the benchmark's have (Pattern.inputs)."""
    keys = (shape[0], *(1 for _ in shape[1:-1]), shape[-1])
    return [
        torch.empty(keys, dtype=torch.bool, device="meta")
        if word.kind == "mask"
        else torch.empty(shape[-1:] if word.operand == "column" else shape, dtype=dtype, device="meta")
        for word in line.words
        if word.operand != "none"
    ]


def markdown(files: Iterable[Path]) -> str:
    """A row for each file of results whose device has a profile."""
    rows = []
    for path in files:
        results = json.loads(path.read_text(encoding="utf-8"))
        name = PROFILE_OF.get(results.get("device_name", ""))
        found = predictions(results, profile_of(name)) if name and "rows" in results and _is_timed(results) else []
        if not found:
            continue
        errors = [abs(p.error) for p in found]
        worst = max(found, key=lambda p: abs(p.error))
        what = f"`{worst.line}`, {'x'.join(map(str, worst.shape))} {worst.dtype}, "
        what += "backward" if worst.backward else "forward"
        median = f"{100 * statistics.median(errors):.1f} %"
        rows.append((path.stem, str(len(found)), median, f"{100 * max(errors):.0f} %", what))
    return "\n".join(markdown_table(("results", "times", "median error", "worst", "of"), rows))


def _is_timed(results: dict[str, Any]) -> bool:
    return any("forward_us" in row for row in results["rows"])

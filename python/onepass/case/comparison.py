"""A pattern unfused and fused, on every device: every tensor checked, work counted, memory and time measured."""

from __future__ import annotations

import json as _json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from onepass.bench import facts, progress_bar
from onepass.bench.accuracy import RATIO, Judge
from onepass.bench.cases import Row, clean, memory, says, time_all
from onepass.bench.patterns import Case, Pattern
from onepass.bench.providers import PROVIDERS, Provider, Trial
from onepass.bench.timing import Clock, clock_for, devices
from onepass.case import report
from onepass.case.counts import Operators, kernels

__all__ = ["Comparison", "Result", "compare"]

SECONDS, SECONDS_QUICK = 1.0, 0.1  # of rounds, for each size, dtype and direction


@dataclass(frozen=True)
class Comparison:
    """A pattern whose cases begin with the teaching size, and what to call x and its operands."""

    title: str
    pattern: Pattern
    inputs: tuple[str, ...]

    @property
    def checked(self) -> tuple[str, ...]:
        """The tensors that are compared: the output, then the gradient of each input."""
        return "output", *self.inputs


@dataclass
class Result(Row):
    """A row of the benchmark, and what was checked and counted.

    errors: the largest of each tensor, relative to the exact one's largest magnitude; None where it is not a number.
    ratios: the same over the unfused function's error, as the judge takes it.
    forward_bytes, backward_bytes: what the operators of the unfused function take and give; of the line what its cost
        says must move. forward_operators, backward_operators: those that compute. Not counted for torch.compile.
    forward_kernels, backward_kernels: launched on CUDA.
    """

    errors: dict[str, float | None] = field(default_factory=dict)
    ratios: dict[str, float | None] = field(default_factory=dict)
    forward_bytes: int | None = None
    backward_bytes: int | None = None
    forward_operators: int | None = None
    backward_operators: int | None = None
    forward_kernels: int | None = None
    backward_kernels: int | None = None


def compare(
    comparison: Comparison,
    device: str | None = None,
    json: Path | None = None,
    quick: bool = False,
    compiled: bool = False,
    console: Console | None = None,
) -> int:
    """Measures every size on every device and prints what it finds.

    Args:
        comparison: what to compare.
        device: "cpu" or "cuda"; all that there are if None.
        json: where to write the results.
        quick: the teaching size only, and few rounds.
        compiled: torch.compile of the unfused function, too.
        console: where to print.

    Returns:
        1 if the fused line failed, or an error of it is beyond the accuracy contract, else 0.
    """
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    providers = [PROVIDERS[name] for name in ("eager", *(["compile"] if compiled else []), "onepass")]
    console.print(f"{comparison.title}: {comparison.pattern.line}", style="bold", highlight=False, markup=False)
    found = []
    for on in devices(device):
        clock = clock_for(on)
        cases = comparison.pattern.of_device(on.type)
        if quick:
            cases = [case for case in cases if case.shape == cases[0].shape]
        rows: list[dict[str, Any]] = []
        with progress_bar(console) as progress:
            task = progress.add_task("", total=len(cases))
            for case in cases:
                progress.update(task, description=f"{case.shape} {case.dtype} on {on.type}", refresh=True)
                measured = measure(comparison, case, on, providers, clock, SECONDS_QUICK if quick else SECONDS)
                rows += [row.as_json() for row in measured]
                progress.advance(task)
        versions = {provider.name: provider.version() for provider in providers}
        found.append(facts(on, clock) | {"providers": versions, "rows": rows})
        report.show(comparison.checked, found[-1], console)
    if json is not None:
        results = {"case": comparison.pattern.name, "quick": quick, "devices": found}
        Path(json).write_text(_json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    console.print(report.NOTES, highlight=False)
    return report.verdict(len(comparison.checked), [row for on in found for row in on["rows"]], console)


def measure(
    comparison: Comparison,
    case: Case,
    device: torch.device,
    providers: list[Provider],
    clock: Clock,
    seconds: float,
) -> list[Result]:
    """A row for each provider; what fails says so in its row."""
    pattern = comparison.pattern
    rows: dict[str, Result] = {}
    trials: dict[str, Trial] = {}
    with clean(device):
        inputs = pattern.inputs(case.shape, case.dtype, device, case.layout, case.out_features)
        judge = Judge(pattern, inputs, sampled=False)
        judge.ask_eager()
        for provider in providers:
            row = rows[provider.name] = Result.of(pattern, case, provider)
            trial = Trial(provider, pattern, provider.build(pattern), inputs, judge.upstream)
            try:
                check(comparison, judge, trial, row)
                row.saved_bytes, row.peak_bytes = memory(trial)
                count(pattern, trial, row)
            except Exception as error:  # a provider may fail in any way, and the others go on
                row.failure = says(error)
            else:
                trials[provider.name] = trial
        time_all(pattern, inputs, trials, rows, clock, seconds)
    return list(rows.values())


def check(comparison: Comparison, judge: Judge, trial: Trial, row: Result) -> None:
    """Notes the error of the output and of every gradient, and which are beyond the contract."""
    errors = judge.errors(trial, PROVIDERS[row.provider].keep_probability)
    ratios = judge.ratios(errors)
    wrong = []
    for name, error, largest, ratio in zip(comparison.checked, errors, judge.largest, ratios, strict=True):
        row.errors[name], row.ratios[name] = finite(error / largest), finite(ratio)
        if ratio > RATIO:
            tensor = name if name == "output" else f"gradient of {name}"
            wrong.append(f"{tensor}: error {error / largest:.1e}, {ratio:.3g} times unfused PyTorch's")
    row.error_ratio = finite(max(ratios))
    row.failure = "; ".join(wrong) or None


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def count(pattern: Pattern, trial: Trial, row: Result) -> None:
    """Notes operators and bytes, and on CUDA the kernels."""
    trial.refresh()
    device = trial.inputs[0].device
    directions = ("forward", trial.forward), ("backward", trial.backward)
    for (direction, call), least in zip(directions, pattern.traffic(trial.inputs)):
        if row.provider != "compile":  # under a dispatch mode it would run the function as it is
            with Operators() as operators:
                call()
            setattr(row, f"{direction}_operators", operators.count)
            setattr(row, f"{direction}_bytes", least.bytes if row.provider == "onepass" else operators.bytes)
        if device.type == "cuda":
            setattr(row, f"{direction}_kernels", kernels(call, device))
    trial.outputs = ()

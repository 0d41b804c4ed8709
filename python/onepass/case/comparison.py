"""Patterns unfused and fused, on every device: every tensor checked, work counted, memory and time measured."""

from __future__ import annotations

import json as _json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from onepass.bench import progress_bar
from onepass.bench.accuracy import RATIO, Judge
from onepass.bench.cases import Row, clean, memory, says, time_all
from onepass.bench.machine import facts
from onepass.bench.patterns import Case, Pattern
from onepass.bench.providers import PROVIDERS, Provider, Trial
from onepass.case import report
from onepass.case.counts import Operators, kernels
from onepass.pricing.timing import Clock, clock_for, devices

__all__ = ["Comparison", "Result", "Study", "compare"]

SECONDS, SECONDS_QUICK = 1.0, 0.1  # of rounds, for each size, dtype and direction


def unfused_and_fused(compiled: bool) -> list[Provider]:
    """Eager PyTorch, torch.compile where it is asked for, and the line."""
    return [PROVIDERS[name] for name in ("eager", *(["compile"] if compiled else []), report.OURS)]


@dataclass(frozen=True)
class Comparison:
    """Patterns whose cases begin with the teaching size, who computes them, and what is done beyond.

    inputs: what to call x and its operands; by their words if not given.
    providers: given whether torch.compile is asked for; the first is what the others gain over.
    judged: providers whose failures are the case's.
    sampled: judges some rows, not all.
    further: measures and prints more, and returns what failed.
    files: of "trace" and "plot", those that `further` writes.
    show, notes: the tables of a device's rows, and what their columns mean.
    """

    name: str
    title: str
    patterns: tuple[Pattern, ...]
    inputs: tuple[str, ...] = ()
    providers: Callable[[bool], list[Provider]] = unfused_and_fused
    judged: tuple[str, ...] = (report.OURS,)
    sampled: bool = False
    further: Callable[[Study], list[str]] | None = None
    files: tuple[str, ...] = ()
    show: Callable[[dict[str, Any], Console], None] = report.show
    notes: str = report.NOTES

    def checked(self, pattern: Pattern) -> tuple[str, ...]:
        """The tensors that are compared: the output, then the gradient of each input."""
        words = [word.name for word in pattern.operand_words()]
        named = (name if name not in words[:i] else f"second {name}" for i, name in enumerate(words))
        return "output", *(self.inputs or ("x", *named))

    def cases(self, device_type: str, quick: bool) -> list[tuple[Pattern, Case]]:
        """Every pattern's; with `quick` those that are no larger than its first."""
        found = [(pattern, case) for pattern in self.patterns for case in pattern.of_device(device_type)]
        largest = {pattern.name: math.prod(case.shape) for pattern, case in reversed(found)}
        return [(p, case) for p, case in found if not quick or math.prod(case.shape) <= largest[p.name]]


@dataclass
class Study:
    """One device's part of a case: what `further` works with, and `results`, where it puts its figures."""

    comparison: Comparison
    device: torch.device
    clock: Clock
    quick: bool
    compiled: bool
    console: Console
    trace: Path | None
    plot: Path | None
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def cases(self) -> list[tuple[Pattern, Case]]:
        return self.comparison.cases(self.device.type, self.quick)

    @property
    def providers(self) -> list[Provider]:
        return self.comparison.providers(self.compiled)

    @property
    def seconds(self) -> float:
        """Of rounds."""
        return SECONDS_QUICK if self.quick else SECONDS


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
    trace: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Measures every size on every device and prints what it finds.

    Args:
        comparison: what to compare.
        device: "cpu" or "cuda"; all that there are if None.
        json: where to write the results.
        quick: the teaching size only, and few rounds.
        compiled: torch.compile of the unfused function, too.
        console: where to print.
        trace: where to write the profiler's trace, for Perfetto or chrome://tracing.
        plot: where to write the picture. Of several devices each has its name behind the file's.

    Returns:
        1 if the fused line failed, an error of it is beyond the accuracy contract, or another check failed, else 0.

    Raises:
        NotImplementedError: for a trace or picture that the case does not have.
    """
    for name, file in (("trace", trace), ("plot", plot)):
        if file is not None and name not in comparison.files:
            raise NotImplementedError(f"the case {comparison.name} has no {name}")
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    console.print(comparison.title, style="bold", highlight=False, markup=False)
    on = devices(device)
    found = []
    for each in on:
        own = [
            file if file is None or len(on) == 1 else file.with_stem(f"{file.stem}-{each.type}")
            for file in (trace, plot)
        ]
        study = Study(comparison, each, clock_for(each), quick, compiled, console, *own)
        rows = measure_all(study)
        versions = {provider.name: provider.version() for provider in study.providers}
        study.results = facts(each, study.clock) | {"providers": versions, "rows": rows}
        comparison.show(study.results, console)
        study.results["failures"] = comparison.further(study) if comparison.further else []
        found.append(study.results)
    if json is not None:
        results = {"case": comparison.name, "quick": quick, "devices": found}
        Path(json).write_text(_json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    console.print(comparison.notes, highlight=False)
    tensors = len(comparison.judged) * sum(
        len(comparison.checked(pattern)) for each in on for pattern, _ in comparison.cases(each.type, quick)
    )
    return report.verdict(comparison.judged, tensors, found, console)


def measure_all(study: Study) -> list[dict[str, Any]]:
    """The rows of every pattern and case, as JSON."""
    rows: list[dict[str, Any]] = []
    with progress_bar(study.console) as progress:
        task = progress.add_task("", total=len(study.cases))
        for pattern, case in study.cases:
            described = f"{pattern.name} {case.shape} {case.dtype} on {study.device.type}"
            progress.update(task, description=described, refresh=True)
            rows += [row.as_json() for row in measure(study, pattern, case)]
            progress.advance(task)
    return rows


def measure(study: Study, pattern: Pattern, case: Case) -> list[Result]:
    """A row for each provider; what fails says so in its row."""
    rows: dict[str, Result] = {}
    trials: dict[str, Trial] = {}
    with clean(study.device):
        inputs = pattern.inputs(case.shape, case.dtype, study.device, case.layout, case.out_features)
        judge = Judge(pattern, inputs, sampled=study.comparison.sampled)
        judge.ask_eager()
        for provider in study.providers:
            row = rows[provider.name] = Result.of(pattern, case, provider)
            function = provider.build(pattern)
            trial = Trial(provider, pattern, function, inputs, judge.upstream)
            try:
                checked = Trial(provider, pattern, function, judge.inputs, judge.upstream)
                check(study.comparison.checked(pattern), judge, checked, provider.keep_probability, row)
                row.saved_bytes, row.peak_bytes = memory(trial)
                count(pattern, trial, row)
            except Exception as error:  # a provider may fail in any way, and the others go on
                row.failure = says(error)
            else:
                trials[provider.name] = trial
        time_all(pattern, inputs, trials, rows, study.clock, study.seconds)
    return list(rows.values())


def check(names: tuple[str, ...], judge: Judge, trial: Trial, keep_probability: float, row: Result) -> None:
    """Notes the error of the output and of every gradient, and which are beyond the contract."""
    errors = judge.errors(trial, keep_probability)
    ratios = judge.ratios(errors)
    wrong = []
    for name, error, largest, ratio in zip(names, errors, judge.largest, ratios, strict=True):
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
        if not row.provider.startswith("compile"):  # under a dispatch mode it would run the function as it is
            with Operators() as operators:
                call()
            setattr(row, f"{direction}_operators", operators.count)
            setattr(row, f"{direction}_bytes", least.bytes if row.provider == report.OURS else operators.bytes)
        if device.type == "cuda":
            setattr(row, f"{direction}_kernels", kernels(call, device))
    trial.outputs = ()

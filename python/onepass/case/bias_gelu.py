"""bias + GELU: what is saved by one pass, by 16 bits a number, and what rows cost whose numbers do not lie as lanes do.

A row of odd length, or one that begins a number behind a multiple of 16 bytes, cannot be read a vector at a time as it
lies: each stands beside the aligned row, in time and bandwidth. Memory, gradients by finite differences, and the time
of many calls one behind the other come on top.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich import box
from rich.table import Table

from onepass.bench.cases import clean, says
from onepass.bench.patterns import Case, Pattern, bias_gelu_tanh
from onepass.bench.report import OURS, duration, times
from onepass.case.comparison import Comparison, Study
from onepass.case.counts import peak
from onepass.case.report import LABELS, size_and_dtype
from onepass.docs import size
from onepass.pricing.timing import Run, WallClock

__all__ = ["COMPARISON"]

DTYPES = torch.float32, torch.float16, torch.bfloat16
WARM_UP, CALLS, CALLS_QUICK = 10, 1000, 20
SAID = (
    "Said of a kernel by hand in float32, 512x4096: 1.3 to 2 times as fast, by loads of 16 bytes 1.5 to 2 times again."
)
GRADCHECK = (4, 8)  # finite differences take two calls a number


def family(rows: int, columns: int) -> tuple[Case, ...]:
    """Aligned rows, rows of odd length and misaligned ones, at every dtype."""
    return tuple(
        Case((rows, columns - odd), dtype, layout)
        for dtype in DTYPES
        for odd, layout in ((0, ""), (1, ""), (0, "misaligned"))
    )


def further(study: Study) -> list[str]:
    """What rows cost that are not aligned, many calls, memory, and gradients by finite differences."""
    of_rows = study.results["alignment"] = alignment(study.results["rows"])
    for row in of_rows:
        study.console.print(sentence(row), highlight=False, markup=False)
    study.results["loops"], failures = [], []
    for pattern, case in study.cases:
        if not case.layout and case.shape[-1] % 2 == 0:
            study.results["loops"] += many_calls(study, pattern, case)
    study.console.print("", loops_table(study.results["loops"]))
    study.console.print(SAID, highlight=False)
    for provider in study.providers:
        if provider.name in ("eager", OURS):
            failures += gradcheck(study, provider.name, provider.build(study.comparison.patterns[0]))
    return failures


def alignment(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each of our rows that is not aligned, its time for a number over that of its aligned sibling."""
    ours = [row for row in rows if row["provider"] == OURS and row["forward_us"] and row["backward_us"]]
    known = {(*row["shape"], row["dtype"]): row for row in ours if not row["layout"]}
    found = []
    for row in ours:
        count, columns = row["shape"]
        sibling = known.get((count, columns + columns % 2, row["dtype"]))
        if sibling is None or sibling is row:
            continue
        numbers = columns / sibling["shape"][-1]
        ratios = {
            f"{direction}_ratio": round(row[f"{direction}_us"] / sibling[f"{direction}_us"] / numbers, 3)
            for direction in ("forward", "backward")
        }
        found.append({key: row[key] for key in ("shape", "dtype", "layout")} | ratios)
    return found


def sentence(row: dict[str, Any]) -> str:
    why = "misaligned rows" if row["layout"] else "rows of odd length"
    of = size_and_dtype(row | {"out_features": 0})
    return (
        f"{of}: {why} cost {row['forward_ratio']:.2f} times the aligned ones' time "
        f"for a number, backward {row['backward_ratio']:.2f} times"
    )


def many_calls(study: Study, pattern: Pattern, case: Case) -> list[dict[str, Any]]:
    """Calls without gradients, one behind the other, and the most memory of one beyond its inputs."""
    calls = CALLS_QUICK if study.quick else CALLS
    found = []
    with clean(study.device):
        inputs = [t.detach() for t in pattern.inputs(case.shape, case.dtype, study.device)]
        for provider in study.providers:
            call = partial(provider.build(pattern), *inputs)
            row = {"shape": list(case.shape), "dtype": str(case.dtype).removeprefix("torch."), "layout": ""}
            row |= {"out_features": 0, "provider": provider.name, "calls": calls}
            try:
                seconds = loop(call, study.device, calls)
                row["total_us"] = round(1e6 * seconds, 1)
                # Under the counting mode a compiled function would run as it is.
                counted = study.device.type == "cuda" or provider.name != "compile"
                row["peak_bytes"] = peak(call, study.device) if counted else None
            except Exception as error:  # a provider may fail in any way, and the others go on
                row |= {"total_us": None, "peak_bytes": None, "failure": says(error)}
            found.append(row)
    return found


def loop(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of so many calls, until the device is done with the last."""

    def repeat(count: int) -> None:
        for _ in range(count):
            result = call()  # lives until the next one is made, as it does in the published loop
        del result

    repeat(WARM_UP)
    times: dict[str, list[float]] = {"": []}
    WallClock(device).round({"": Run(partial(repeat, calls))}, times)
    return times[""][0]


def loops_table(rows: list[dict[str, Any]]) -> Table:
    """A line for each provider and size."""
    filled = Table(box=box.SIMPLE, show_edge=False)
    for head, justify in (("calls in a row", "left"), ("", "left"), ("total", "right"), ("a call", "right")):
        filled.add_column(head, justify=justify)
    filled.add_column("gain", justify="right")
    filled.add_column("peak of a call", justify="right")
    for row in rows:
        unfused = next(r for r in rows if size_and_dtype(r) == size_and_dtype(row))
        total, first = row["total_us"], unfused["total_us"]
        filled.add_row(
            f"{row['calls']} x {size_and_dtype(row)}" if row is unfused else "",
            LABELS.get(row["provider"], row["provider"]),
            duration(total),
            duration(total and total / row["calls"]),
            "" if row is unfused or not total or not first else times(first / total),
            "-" if row["peak_bytes"] is None else size(row["peak_bytes"]),
        )
    return filled


def gradcheck(study: Study, name: str, function: Callable) -> list[str]:
    """Both gradients in float64 against finite differences; what failed."""
    generator = torch.Generator(study.device).manual_seed(1)
    shapes = GRADCHECK, GRADCHECK[-1:]
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64, device=study.device, requires_grad=True)
        for shape in shapes
    ]
    who = LABELS.get(name, name)
    try:
        torch.autograd.gradcheck(function, inputs, eps=1e-6)
    except Exception as error:  # its own error, or whatever the function raises
        return [f"gradcheck in float64, {who} on {study.device.type}: {says(error)}"]
    study.results.setdefault("gradcheck", []).append(name)
    study.console.print(f"gradcheck in float64, {who}: passed", highlight=False)
    return []


COMPARISON = Comparison(
    name="bias-gelu",
    title="bias + GELU",
    patterns=(
        Pattern(
            "bias-gelu",
            "bias | gelu_tanh",
            bias_gelu_tanh,
            cuda=(*family(64, 512), *family(512, 4096), *family(16384, 4096)),
            cpu=(*family(64, 512), *family(512, 4096)),
        ),
    ),
    inputs=("x", "bias"),
    further=further,
)

"""Which share of the element-wise time of an architecture is in lines, as `explain` predicts it: nothing is run."""

from __future__ import annotations

import datetime
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import onepass
from onepass.advice.explain import explain
from onepass.bench import report
from onepass.bench.architectures import ARCHITECTURES, BASE, build
from onepass.bench.machine import commit

__all__ = ["IN_MEMORY", "markdown", "row", "run"]

WAYS = {"h100": (torch.bfloat16, True), "cpu": (torch.float32, False)}
"""Of each profile the dtype, and whether the model trains."""
IN_MEMORY = frozenset({"Longformer", "FSMT", "DETR", "Autoformer", "XLNet"})
"""Models that look at numbers on their way or make tensors in memory: these are on the CPU, the others have no memory.
Operators between the graphs of a model have no price."""

IN_FLOAT32 = frozenset({"Autoformer"})
"""Fourier transforms have no bfloat16."""


def row(name: str) -> dict[str, Any]:
    """An architecture's: of each profile seconds of all, of what is element-wise, and of what of that is in lines."""
    return {"model": name, **{profile: _explained(name, profile) for profile in WAYS}}


def _explained(name: str, profile: str) -> dict[str, Any]:
    dtype, trains = WAYS[profile]
    dtype = torch.float32 if name in IN_FLOAT32 else dtype
    torch._dynamo.reset()  # or the last models stay in memory
    torch.manual_seed(0)
    model, inputs = build(name, BASE, dtype, "cpu" if name in IN_MEMORY else "meta")
    with torch.set_grad_enabled(trains):
        explained = explain(model.train(trains), **inputs, device=profile)
    now, fused = explained.seconds
    elementwise, in_lines = explained.elementwise
    return {
        "seconds": now,
        "fused_seconds": fused,
        "elementwise_seconds": elementwise,
        "in_lines_seconds": in_lines,
        "lines": sorted({advice.line for advice in explained.lines}),
    }


def run(only: str | None, json: Path | None, console: Console) -> dict[str, Any]:
    """Explains every architecture, and prints the table.

    Raises:
        ValueError: for an architecture that there is not.
    """
    chosen = [name for name in ARCHITECTURES if only is None or re.search(only, name)]
    if not chosen:
        raise ValueError(f"no architecture matches {only!r}; there are {', '.join(ARCHITECTURES)}")
    results: dict[str, Any] = {
        "schema": 1,
        "suite": "explain",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "onepass": onepass.__version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "rows": [],
    }
    for name in chosen:
        console.print(name)
        results["rows"].append(row(name))
        report.write(results, json)
    console.print(markdown(results), markup=False)
    return results


def markdown(results: dict[str, Any]) -> str:
    """The table: of each profile the share of time that is element-wise, what of that is in lines, and the gain."""
    head = ["architecture"]
    for profile, (dtype, trains) in WAYS.items():
        does = "trains" if trains else "infers"
        head += [f"{profile.upper()} {does}, {str(dtype).removeprefix('torch.')}: element-wise", "in lines", "gain"]
    rows = [(r["model"], *(cell for profile in WAYS for cell in _cells(r[profile]))) for r in results["rows"]]
    return "\n".join(report.markdown_table(head, rows))


def _cells(explained: dict[str, Any]) -> tuple[str, str, str]:
    elementwise, in_lines = explained["elementwise_seconds"], explained["in_lines_seconds"]
    share = f"{100 * in_lines / elementwise:.0f} %" if elementwise else ""
    gain = f"{explained['seconds'] / explained['fused_seconds']:.2f}"
    return f"{100 * elementwise / explained['seconds']:.0f} %", share, gain

"""The suite "fuse_shapes": how many graphs whole models become that are called with three shapes, as by default."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters

from onepass.bench import report
from onepass.bench.accuracy import WrongResult
from onepass.bench.machine import facts
from onepass.bench.whole import Run, check_providers, distance, expected_of, models_of, outcome, said
from onepass.bench.whole_models import MODELS, Whole
from onepass.pricing.timing import clock_for

__all__ = ["PROVIDERS", "markdown", "run", "show"]

PROVIDERS = ("compile", "onepass", "onepass_inductor")


def run(
    device: torch.device,
    only: str | None,
    json: Path | None,
    providers: list[str] | None,
    console: Console,
    models: Sequence[Whole] = MODELS,
) -> dict[str, Any]:
    """Calls every model of a device with three shapes, one behind the other.

    Raises:
        ValueError: for a provider or a model that there is not.
    """
    check_providers(providers, PROVIDERS)
    chosen = models_of(device, only, models)
    results = facts(device, clock_for(device)) | {"suite": "fuse_shapes", "rows": []}
    for whole in chosen:
        results["rows"] += measure(whole, device, providers or list(PROVIDERS))
        report.write(results, json)
    show(results, console)
    return results


@torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
def measure(whole: Whole, device: torch.device, providers: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each provider: of each shape how many graphs there are by then, and what its first call takes."""
    row = {"model": whole.name, "trains": whole.trains, "shapes": [list(shape) for shape in whole.shapes]}
    rows = [row | {"provider": name, "graphs": [], "first_seconds": [], "difference": []} for name in providers]
    torch._dynamo.reset()
    gc.collect()  # the model before
    try:
        model, _ = whole.build(device)
        shaped = [(each := replace(whole, shape=shape), each.inputs(model, device)) for shape in whole.shapes]
        calls = [(each, inputs, *expected_of(each, model, inputs)) for each, inputs in shaped]
    except Exception as error:
        return [row | {"failure": said(error)} for row in rows]
    for row in rows:
        try:
            _call(whole, model, row, calls)
        except Exception as error:  # a compiler may fail in any way
            row["failure"] = said(error)
            model.zero_grad(set_to_none=True)
    return rows


def _call(whole: Whole, model: nn.Module, row: dict[str, Any], calls: Sequence[tuple]) -> None:
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    one = Run(whole, model, calls[0][1], row)
    for each, inputs, expected, allowed in calls:
        began = time.perf_counter()
        found = outcome(each, model, one.call, inputs)
        row["first_seconds"].append(round(time.perf_counter() - began, 1))
        row["graphs"].append(counters["stats"]["unique_graphs"] - before)
        row["lines"] = [len(graph) for graph in one.report.graphs] if one.report else []
        row["difference"].append(max(distance(*pair) for pair in zip(found, expected)))
        for ours, theirs, most in zip(found, expected, allowed):
            if not (off := distance(ours, theirs)) <= most:
                raise WrongResult(f"{each.shape} is {off:.1e} off, more than {most:.1e}")


HEAD = ("model", "shapes", "provider", "graphs by then", "lines in each graph", "first s", "off")


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each model and provider, as text."""
    return [
        (
            row["model"],
            ", ".join("x".join(map(str, shape)) for shape in row["shapes"]),
            row["provider"],
            row.get("failure") or ", ".join(map(str, row["graphs"])),
            ", ".join(map(str, row.get("lines", []))),
            ", ".join(map(str, row["first_seconds"])),
            ", ".join(f"{off:.0e}" for off in row["difference"]),
        )
        for row in results["rows"]
    ]


def title(results: dict[str, Any]) -> str:
    """What was counted, and where."""
    return f"Whole models: graphs for three shapes; {results['device_name']}, torch {results['torch']}"


def show(results: dict[str, Any], console: Console) -> None:
    """The table on the console."""
    shown = Table(*HEAD, title=title(results))
    for row in table(results):
        shown.add_row(*row)
    console.print(shown)


def markdown(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Tables as Markdown, for docs/results.md."""
    return ["\n".join([f"**{title(run)}**", "", *report.markdown_table(HEAD, table(run))]) for run in runs]

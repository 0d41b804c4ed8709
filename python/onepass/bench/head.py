"""The suite "head": a language model's head and loss, cross_entropy(linear(x, w), target), beside its products."""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onepass import functional
from onepass.bench import report
from onepass.bench.accuracy import WrongResult
from onepass.bench.machine import facts
from onepass.bench.whole import check_providers, said
from onepass.pricing.timing import Clock, Run, clock_for

__all__ = ["CASES", "PROVIDERS", "Head", "markdown", "run", "show"]


@dataclass(frozen=True)
class Head:
    """Rows of in_features, and so many classes; the share of targets that are ignored."""

    rows: int
    in_features: int
    classes: int
    dtype: torch.dtype = torch.bfloat16
    ignored: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.rows}x{self.in_features}x{self.classes} {report.short(self.dtype)}"

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """x and w, leaves, and targets."""
        generator = torch.Generator(device).manual_seed(self.rows + self.classes)
        draw = {"generator": generator, "device": device}
        x = torch.randn(self.rows, self.in_features, dtype=self.dtype, **draw)
        w = torch.randn(self.classes, self.in_features, dtype=self.dtype, **draw) / math.sqrt(self.in_features)
        target = torch.randint(self.classes, (self.rows,), **draw)
        target[torch.rand(self.rows, **draw) < self.ignored] = -100
        return x.requires_grad_(), w.requires_grad_(), target


LLAMA = (8192, 4096, 128256)
CASES = {
    "cuda": (
        Head(*LLAMA),
        Head(16384, 2048, 32768),
        Head(4096, 1152, 262144),
        Head(*LLAMA, ignored=0.5),
        Head(*LLAMA, ignored=0.9),
    ),
    "cpu": (Head(2048, 768, 50257, torch.float32), Head(2048, 768, 50257)),
}
QUICK = Head(256, 64, 2048, torch.float32)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def _chunked() -> Loss:
    """Of torch 2.13 and newer."""
    options = torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True)
    return lambda x, w, target: F.linear_cross_entropy(x, w, target, options=options)


def _liger() -> Loss:
    function = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return lambda x, w, target: function(x, w, target)


def _quack() -> Loss:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda x, w, target: function(x, w, target)


def _again(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    each = functional.linear_cross_entropy(x, w, target, reduction="none")
    return each.sum() / (target != -100).sum()  # noqa: PLR2004


PRODUCTS = "products"
PROVIDERS: dict[str, Callable[[], Loss]] = {
    "eager": lambda: _eager,
    "compile": lambda: torch.compile(_eager, dynamic=False),
    "torch_chunked": _chunked,
    "liger": _liger,
    "quack": _quack,
    "onepass": lambda: functional.linear_cross_entropy,
    "onepass_none": lambda: _again,
}
"""What makes a loss. "onepass_none" adds losses up itself, so that backward computes the product again."""

TOLERANCE = {torch.float32: 1e-4}
"""Largest relative distance of gradients from eager's; in 16 bits, where both round each product, .02."""


def run(
    device: torch.device,
    only: str | None,
    json: Path | None,
    providers: list[str] | None,
    quick: bool,
    console: Console,
    cases: Sequence[Head] | None = None,
) -> dict[str, Any]:
    """Times forward without gradients, and a step, with every provider in turn; and how much memory a step takes.

    Raises:
        ValueError: for a provider or a shape that there is not.
    """
    check_providers(providers, PROVIDERS)
    there = cases or ((QUICK,) if quick else CASES[device.type])
    chosen = [head for head in there if only is None or re.search(only, head.name)]
    if not chosen:
        raise ValueError(f"no shape matches {only!r}; there are {', '.join(head.name for head in there)}")
    clock = clock_for(device)
    results = facts(device, clock) | {"suite": "head", "rows": []}
    for head in chosen:
        results["rows"] += measure(head, device, providers or list(PROVIDERS), clock, 0.5 if quick else 3.0)
        report.write(results, json)
    show(results, console)
    return results


def measure(
    head: Head, device: torch.device, providers: Sequence[str], clock: Clock, seconds: float
) -> list[dict[str, Any]]:
    """A row for the products and for each provider; what fails says so in its row, and the others go on."""
    tensors = head.tensors(device)
    shape = {"shape": [head.rows, head.in_features, head.classes], "dtype": report.short(head.dtype)}
    rows = {name: {**shape, "ignored": head.ignored, "provider": name} for name in (PRODUCTS, *providers)}
    expected = _gradients(_eager, tensors)
    losses: dict[str, Loss] = {}
    for name in providers:
        try:
            loss = PROVIDERS[name]()
            off = _distance(_gradients(loss, tensors), expected)
            rows[name]["difference"] = off if math.isfinite(off) else None
            if not off <= TOLERANCE.get(head.dtype, 0.02):
                raise WrongResult(f"gradients are {off:.1e} off")
            rows[name]["peak_bytes"] = _peak(loss, tensors)
            losses[name] = loss
        except Exception as error:  # a library that is not there, or fails in any way
            rows[name]["failure"] = said(error)
    del expected
    with torch.no_grad():
        forward = {name: Run(call=lambda loss=loss: loss(*tensors)) for name, loss in losses.items()}
        forward[PRODUCTS] = Run(call=lambda: tensors[0] @ tensors[1].mT)
        for name, taken in clock.median(forward, seconds).items():
            rows[name]["forward_seconds"] = taken
    steps = {name: Run(call=lambda loss=loss: _gradients(loss, tensors)) for name, loss in losses.items()}
    steps[PRODUCTS] = Run(call=lambda: _three_products(*tensors[:2]))
    for name, taken in clock.median(steps, seconds).items():
        rows[name]["step_seconds"] = taken
    return list(rows.values())


def _gradients(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*tensors), tensors[:2])


@torch.no_grad()
def _three_products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w.mT
    return logits @ w, logits.mT @ x


def _distance(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """Relative L2 difference, the larger of the two gradients'."""
    norm = torch.linalg.vector_norm
    return max((norm(a - b, dtype=torch.float32) / norm(b, dtype=torch.float32)).item() for a, b in zip(ours, theirs))


def _peak(loss: Loss, tensors: tuple[Tensor, Tensor, Tensor]) -> int | None:
    """Bytes of a step above what was there before and the gradients; on the CPU nobody counts them."""
    if not tensors[0].is_cuda:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = _gradients(loss, tensors)
    return torch.cuda.max_memory_allocated() - before - sum(t.nbytes for t in found)


COLUMNS = ("shape", "ignored", "provider", "forward ms", "over one product", "step ms", "over three", "peak GB", "off")


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row for each shape and provider, as text."""
    found = []
    for _, group in itertools.groupby(results["rows"], key=lambda row: (row["shape"], row["dtype"], row["ignored"])):
        rows = list(group)
        alone = rows[0]
        found += [
            (
                f"{'x'.join(map(str, row['shape']))} {row['dtype']}",
                f"{row['ignored']:.0%}",
                row["provider"],
                *(_cells(row, alone) if "failure" not in row else (row["failure"], "", "", "")),
                f"{row['peak_bytes'] / 1e9:.2f}" if row.get("peak_bytes") is not None else "",
                f"{row['difference']:.0e}" if row.get("difference") is not None else "",
            )
            for row in rows
        ]
    return found


def _cells(row: dict[str, Any], alone: dict[str, Any]) -> tuple[str, ...]:
    cells: list[str] = []
    for key in ("forward_seconds", "step_seconds"):
        cells += [f"{1e3 * row[key]:.2f}", f"{row[key] / alone[key]:.2f}"]
    return tuple(cells)


def title(results: dict[str, Any]) -> str:
    """What was measured, and where."""
    return (
        f"Head and loss: forward without gradients, and a step, beside the products alone; {results['device_name']}, "
        f"torch {results['torch']}"
    )


def show(results: dict[str, Any], console: Console) -> None:
    """The table on the console."""
    shown = Table(*COLUMNS, title=title(results))
    for row in table(results):
        shown.add_row(*row)
    console.print(shown)


def markdown(runs: Iterable[dict[str, Any]]) -> list[str]:
    """Tables as Markdown, for the README."""
    return ["\n".join([f"**{title(run)}**", "", *report.markdown_table(COLUMNS, table(run))]) for run in runs]

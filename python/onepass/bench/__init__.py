"""Benchmarks: every pattern forward and backward beside eager PyTorch, torch.compile and other fused libraries."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onepass.bench import any_lines, head, report, shares, whole, whole_shapes
from onepass.bench.any_lines import ANY_LINES
from onepass.bench.attention import ATTENTIONS
from onepass.bench.cases import host_case, run_case
from onepass.bench.machine import facts
from onepass.bench.models import MODELS
from onepass.bench.patterns import PATTERNS, Pattern
from onepass.bench.programs import PROGRAMS
from onepass.bench.providers import PROVIDERS, Provider
from onepass.bench.suites import SUITES, cases_of
from onepass.bench.whole_models import SMALL
from onepass.pricing.timing import clock_for

__all__ = ["run"]

SECONDS = {"cuda": 1.5, "cpu": 4.0}  # of rounds, for each case and direction of the table
OF_THEM = {"table": 1.0, "any": 0.1}  # by suite; half of them in others
LIMIT_S = 420.0  # on CUDA no case begins later: a lent machine runs a command for ten minutes


def run(
    device: str | None = None,
    only: str | None = None,
    json: Path | None = None,
    providers: list[str] | None = None,
    quick: bool = False,
    console: Console | None = None,
    suite: str = "table",
    dtype: torch.dtype | None = None,
    plot: Path | None = None,
    *,
    patterns: Sequence[Pattern] = (*PATTERNS, *ATTENTIONS, *MODELS, *PROGRAMS, *ANY_LINES),
) -> dict[str, Any]:
    """Times the patterns, prints a table and returns what was measured.

    Args:
        device: "cpu" or "cuda"; CUDA where there is a device if None.
        only: a regular expression that a pattern's name must hold.
        json: where to write the results.
        providers: of eager, compile, compile_max, liger, quack, onepass, for attention sdpa, sdpa_cudnn, sdpa_flash,
            sdpa_efficient, flex and onepass_line; None is all that are installed, without compile_max, which takes
            minutes, and onepass_line.
        quick: one moderate shape of each pattern, and few rounds.
        console: where to print.
        suite: "table", the README's shapes; "curve", row lengths from 64 to 262144; "awkward", lengths that no kernel
            likes; "layouts", strided and misaligned rows; "small", where the cost of a call counts; "linear", lines
            with `linear` beside the product alone; "attention", beside the engines that PyTorch has for it;
            "attention_curve", its probabilities over the number of keys; "attention_odd", of odd numbers of keys;
            "models", whole ones with their attentions; "programs", endings, several row words, columns of a batch,
            codes and rope behind a norm; "programs_curve", some of them over the row's length; "any", random lines of
            random lengths, with a summary (`only` is of their names, any_000 to any_199); "host", only the host's time
            for a call; "fuse", whole ones as they are, compiled and fused (providers eager, compile, onepass,
            onepass_inductor); "fuse_small", those whose time is the host's, as CUDA graphs, too (providers also
            compile_reduce_overhead, onepass_reduce_overhead, onepass_inductor_reduce_overhead, eager_cuda_graph,
            onepass_cuda_graph); "fuse_shapes", how many graphs a model becomes that is called with three shapes
            (providers compile, onepass, onepass_inductor); "head", a language model's head and loss beside its products
            (`only` is of their shapes; providers eager, compile, torch_chunked, liger, quack, onepass, onepass_none);
            "explain", what of architectures lines would do (`only` is of their names), which runs none.
        dtype: of x, to run those cases only.
        plot: a directory for pictures: the share of copy bandwidth over the row length for each pattern of which there
            are several lengths, and a roofline of all.

    Raises:
        ValueError: for a pattern, provider or suite that there is not.
    """
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    if suite == "explain":
        return shares.run(only, json, console)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if suite in ("fuse", "head"):
        return (whole if suite == "fuse" else head).run(on, only, json, providers, quick, console)
    if suite == "fuse_small":
        return whole.run(on, only, json, providers, quick, console, SMALL, suite)
    if suite == "fuse_shapes":
        return whole_shapes.run(on, only, json, providers, console)
    chosen = [pattern for pattern in patterns if only is None or re.search(only, pattern.name)]
    if not chosen:
        raise ValueError(f"no pattern matches {only!r}; there are {', '.join(p.name for p in patterns)}")
    if suite not in SUITES:
        raise ValueError(f"no suite is called {suite!r}; there are {', '.join(SUITES)}")
    competitors, versions = find_providers(providers, on, suite)
    clock = clock_for(on)
    seconds = 0.3 if quick else SECONDS[on.type] * OF_THEM.get(suite, 0.5)
    cases = [(pattern, case) for pattern in chosen for case in cases_of(pattern, on.type, quick, suite)]
    if dtype is not None:
        cases = [(pattern, case) for pattern, case in cases if case.dtype == dtype]
    results = facts(on, clock) | {"suite": suite, "providers": versions, "seconds": 0.0, "rows": [], "host": []}
    begin = time.monotonic()
    with progress_bar(console) as progress:
        task = progress.add_task("", total=len(cases))
        for pattern, case in cases:
            of = f"{report.size_of(case.shape)} {report.short(case.dtype)} {case.layout}"
            progress.update(task, description=f"{pattern.name} {of}", refresh=True)
            late = on.type == "cuda" and time.monotonic() - begin > LIMIT_S
            measured = run_case(pattern, case, on, competitors, clock, seconds, late)
            results["rows"] += [row.as_json() for row in measured]
            results["seconds"] = round(time.monotonic() - begin, 1)
            report.write(results, json)
            progress.advance(task)
        if suite == "host":
            progress.update(task, description="host time of a call", refresh=True)
            timed = [pattern for pattern in chosen if not pattern.contracts and pattern.suite != "any"]
            results["host"] = [row for pattern in timed for row in host_case(pattern, on, competitors)]
    (any_lines if suite == "any" else report).show(results, console)
    report.write(results, json)
    if plot is not None:
        for file in report.plot(results, plot):
            console.print(f"wrote {file}")
    return results


def progress_bar(console: Console) -> Progress:
    """What is being timed, and how many cases are done."""
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True, auto_refresh=False)  # its thread would take time


def find_providers(names: list[str] | None, device: torch.device, suite: str) -> tuple[list[Provider], dict[str, str]]:
    """Those that can run here, and for every one its version or why it cannot run."""
    unknown = [name for name in names or () if name not in PROVIDERS]
    if unknown:
        raise ValueError(f"no provider is called {', '.join(unknown)}; there are {', '.join(PROVIDERS)}")
    found, versions = [], {}
    for provider in PROVIDERS.values():
        if provider.name not in names if names is not None else not provider.is_default(suite):
            continue
        if provider.cuda_only and device.type != "cuda":
            versions[provider.name] = "not run: needs CUDA"
            continue
        try:
            versions[provider.name] = provider.version()
            found.append(provider)
        except Exception as error:  # a library may fail to load in any way
            versions[provider.name] = f"not run: {type(error).__name__}: {error}"
    return found, versions

"""A comparison's tables on the terminal, and its verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onepass.bench.accuracy import RATIO
from onepass.bench.report import DIRECTIONS, MEMORY, OURS, Row, duration, fraction, pair, short, size_of, times, title
from onepass.docs import size

__all__ = ["NOTES", "show", "size_and_dtype", "verdict"]

LABELS = {"eager": "unfused", OURS: "fused"}
NOTES = f"""
Errors: the largest of the output and of each input's gradient against float64, relative to the exact tensor's
largest magnitude; upstream gradients and all inputs are random. Red: more than {RATIO} times the unfused error, where
that is more than a few units in the last place.
Forward / backward. time: medians, all ways in turn. gain: the unfused time over this one. products: the share of
the time that the matrix products alone take; same size: that of a copy of the bytes that must move. kernels: launched
on the GPU. operators: those below autograd that compute; onepass's are one each, whatever they call. bytes: unfused,
of the tensors that its operators take and give; fused, of each tensor of the line once, the least that must move.
held: by the graph between forward and backward, inputs among it. peak: the most of a step beyond the inputs.
"""


def size_and_dtype(row: Row) -> str:
    """4x4x8→16 fp32."""
    behind = f"→{row['out_features']}" if row["out_features"] else ""
    return f"{size_of(row['shape'])}{behind} {short(row['dtype'])} {row['layout']}".strip()


def show(results: dict[str, Any], console: Console) -> None:
    """Prints a device's tables of each line: errors of the tensors, times, and work with memory."""
    on_cuda = results["device"] == "cuda"
    work = "kernels" if on_cuda else "operators"
    memory = MEMORY[: 1 + on_cuda]
    console.print(f"\n{title(results)}", style="cyan", highlight=False, markup=False)
    for line in dict.fromkeys(row["line"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["line"] == line]
        checked = list(dict.fromkeys(name for row in rows for name in row["errors"]))
        tables = (
            ([f"error: {name}" if name == "output" else name for name in checked], partial(errors_of, checked)),
            (["time", "gain", "products"] if "linear" in line else ["time", "gain", "same size"], times_of),
            ([work, "bytes", *("held", "peak")[: len(memory)]], lambda row, _: work_of(row, work, memory)),
        )
        console.print(f"\n{line}", highlight=False, markup=False)
        for heads, cells in tables:
            console.print("", table(heads, rows, cells))


def table(heads: Sequence[str], rows: list[Row], cells: Callable[[Row, Row], list[str]]) -> Table:
    """A line for each row. The size stands beside its first, the unfused one, which `cells` gets too."""
    filled = Table(box=box.SIMPLE, show_edge=False)
    filled.add_column("", no_wrap=True, min_width=20)
    filled.add_column("", no_wrap=True)
    for head in heads:
        filled.add_column(head, justify="right")
    last = None
    for row in rows:
        of = size_and_dtype(row)
        if of != last:
            unfused = row
        filled.add_row("" if of == last else of, LABELS.get(row["provider"], row["provider"]), *cells(row, unfused))
        last = of
    return filled


def errors_of(checked: Sequence[str], row: Row, _: Row) -> list[str]:
    """Of all tensors."""
    return [error(row, name) for name in checked]


def error(row: Row, name: str) -> str:
    """Of one tensor; red beyond the contract, and a dash where nothing came."""
    if name not in row["errors"]:
        return "-"
    value, ratio = row["errors"][name], row["ratios"][name]
    text = "not finite" if value is None else f"{value:.1e}"
    return text if ratio is not None and ratio <= RATIO else f"[red]{text}[/]"


def times_of(row: Row, unfused: Row) -> list[str]:
    """Times, what they gain, and the share of the products."""
    gains = [
        times(unfused[key] / row[key]) if row[key] and unfused[key] else "-"
        for key in (f"{direction}_us" for direction in DIRECTIONS)
    ]
    return [
        pair(known(duration), row, "{}_us"),
        "" if row is unfused else " / ".join(gains),
        pair(fraction, row, "{}_same_size_fraction"),
    ]


def work_of(row: Row, work: str, memory: Sequence[str]) -> list[str]:
    """Kernels or operators, bytes moved, and memory of the kinds named."""
    least = "≥ " if row["provider"] == OURS else ""
    return [
        pair(known(str), row, f"{{}}_{work}"),
        pair(known(lambda count: least + size(count)), row, "{}_bytes"),
        *(known(size)(row[f"{kind}_bytes"]) for kind in memory),
    ]


def known(form: Callable[[Any], str]) -> Callable[[Any], str]:
    """The same, with a dash for what was not measured."""
    return lambda value: "-" if value is None else form(value)


def verdict(judged: Sequence[str], tensors: int, devices: Sequence[dict[str, Any]], console: Console) -> int:
    """Prints how many of the judged providers' tensors keep the accuracy contract, and what failed.

    Returns:
        1 if they do not, or another check failed, else 0.
    """
    rows = [row for on in devices for row in on["rows"]]
    ours = [row for row in rows if row["provider"] in judged]
    kept = sum(ratio is not None and ratio <= RATIO for row in ours for ratio in row["ratios"].values())
    others = [text for on in devices for text in on["failures"]]
    failed = any(row["failure"] for row in ours) or bool(others)
    text = f"{kept} of {tensors} errors at most {RATIO} times unfused PyTorch's"
    several = len({row["line"] for row in rows}) > 1
    for row in rows:
        if row["failure"]:
            who = LABELS.get(row["provider"], row["provider"])
            of = f"{row['line']}, " if several else ""
            console.print(f"{of}{size_and_dtype(row)} {who}: {row['failure']}", markup=False, highlight=False)
    for other in others:
        console.print(other, markup=False, highlight=False)
    console.print(
        f"{'failed' if failed else 'passed'}: {text}", style=f"bold {'red' if failed else 'green'}", highlight=False
    )
    return int(failed)

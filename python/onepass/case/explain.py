"""What the figures of `fuse-or-not` say, in sentences: every number in them is of the run that is explained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table

from onepass.bench.patterns import Case
from onepass.bench.report import OURS, duration, size_of, times
from onepass.case.comparison import Study
from onepass.case.report import LABELS, size_and_dtype
from onepass.case.timeline import Lane
from onepass.docs import size

__all__ = ["graph_breaks", "show", "size_of"]

SPLIT, COMBINED = "split_stack", "combined"
STARVED = 0.6  # of the time in which anything runs: below, a device waits for its host


@contextlib.contextmanager
def graph_breaks(results: dict[str, Any]) -> Iterator[None]:
    """Adds to `graph_breaks` how often torch.compile gave up a graph meanwhile."""

    def count() -> int:
        return sum(torch._dynamo.utils.counters["graph_break"].values())

    before = count()
    yield
    results["graph_breaks"] = results.get("graph_breaks", 0) + count() - before


@dataclass(frozen=True)
class Facts:
    """One variant, forward, and `step` with backward: from start to finish, on the device, what it launches."""

    name: str
    whole: float
    whole_step: float
    device: float | None
    device_backward: float | None
    bytes: int | None
    lane: Lane

    @property
    def launches(self) -> int:
        return len(self.lane.bars)


def facts_of(study: Study, case: Case, panels: dict[str, list[Lane]]) -> dict[str, Facts]:
    """Of the size that is explained, by variant."""
    dtype = str(case.dtype).removeprefix("torch.")

    def same(row: dict[str, Any]) -> bool:
        return row["shape"] == list(case.shape) and row["dtype"] == dtype

    rows = {row["provider"]: row for row in study.results["rows"] if same(row)}
    found = {}
    for whole in filter(same, study.results["start_to_finish"]):
        name = whole["variant"]
        lane = next((lane for lane in panels["forward"] if lane.name == f"{name}, forward"), None)
        if lane is not None:
            row = rows[name]
            of_row = (row[key] for key in ("forward_us", "backward_us", "forward_bytes"))
            found[name] = Facts(name, whole["forward_us"], whole["step_us"], *of_row, lane)
    return found


def show(study: Study, case: Case, panels: dict[str, list[Lane]]) -> None:
    """Prints the times from start to finish and the explanation, and keeps its sentences."""
    study.console.print("", table(study.results["start_to_finish"]))
    facts = facts_of(study, case, panels)
    found = list(sentences(study, case, facts)) if {SPLIT, COMBINED, OURS} <= facts.keys() else []
    study.results["explanation"] = found
    study.console.print(f"\nWhy, at {size_of(case.shape)}:", highlight=False)
    for sentence in found:
        study.console.print(f"- {sentence}", highlight=False, markup=False)


def table(rows: list[dict[str, Any]]) -> Table:
    """Start to finish of every size and variant, beside what was published."""
    filled = Table(box=box.SIMPLE, show_edge=False)
    filled.add_column("start to finish", no_wrap=True)
    filled.add_column("", no_wrap=True)
    for head in ("forward", "and backward", "gain", "published (A100)"):
        filled.add_column(head, justify="right")
    last = None
    for row in rows:
        if (of := size_and_dtype(row)) != last:
            first = row
        gain = " / ".join(times(first[key] / row[key]) for key in ("forward_us", "step_us"))
        is_variant = row["variant"] != "modules"
        filled.add_row(
            "" if of == last else of,
            LABELS.get(row["variant"], row["variant"]) if is_variant else "modules alone",
            duration(row["forward_us"]),
            duration(row["step_us"]) if is_variant else "",
            gain if row is not first and is_variant else "",
            "" if row["published"] is None else times(row["published"]),
        )
        last = of
    return filled


def sentences(study: Study, case: Case, facts: dict[str, Facts]) -> Iterator[str]:
    """Launches, horizontal fusion, intermediates and vertical fusion, then torch.compile."""
    on_cuda = study.device.type == "cuda"
    made = "kernels" if on_cuda else "operators"
    aside = "on the device alone" if on_cuda else "with the modules made beforehand"
    split, combined, line = facts[SPLIT], facts[COMBINED], facts[OURS]
    published = {row["variant"]: row["published"] for row in study.results["start_to_finish"]}
    yield claim(combined, split, published[COMBINED])
    yield from launch_overhead(study, split, combined, made)
    yield horizontal(case, split, combined, aside)
    yield from traffic(study, combined, line)
    yield vertical(split, combined, line, made, aside)
    yield from of_compile(study, facts, published, made)
    modules = next(row for row in study.results["start_to_finish"] if is_modules_of(row, case))
    share = modules["forward_us"] / line.whole
    yield (
        f"Making the modules takes {duration(modules['forward_us'])} of each call, {share:.0%} of the line's "
        f"{duration(line.whole)}: what is made once, outside, is not paid for in every call."
    )


def is_modules_of(row: dict[str, Any], case: Case) -> bool:
    dtype = str(case.dtype).removeprefix("torch.")
    return row["variant"] == "modules" and row["shape"] == list(case.shape) and row["dtype"] == dtype


def claim(variant: Facts, split: Facts, published: float) -> str:
    gain, step = split.whole / variant.whole, split.whole_step / variant.whole_step
    return (
        f"{variant.name} takes {duration(variant.whole)} from start to finish, split_stack {duration(split.whole)}: "
        f"{gain:.1f} times as fast here, {published} as published; with backward {step:.1f} times."
    )


def launch_overhead(study: Study, split: Facts, combined: Facts, made: str) -> Iterator[str]:
    """What more launches cost, and whether the device waits for them."""
    more, spent = split.launches - combined.launches, split.whole - combined.whole
    where, host = ("the device", "the host") if study.device.type == "cuda" else ("an operator", "Python and dispatch")
    if more > 0 and spent > 0:
        yield (
            f"Launches: split_stack runs {split.launches} {made}, combined {combined.launches}; the {more} more make "
            f"{duration(spent)} of difference, {duration(spent / more)} each."
        )
    for one in (split, combined):
        share = one.lane.busy / one.lane.duration
        verdict = (
            f"the rest is waiting for {host}, so fewer launches are what helps"
            if share < STARVED
            else "less work is what helps"
        )
        yield (
            f"In the profile of {one.name} {where} is busy for {duration(one.lane.busy)} of "
            f"{duration(one.lane.duration)} ({share:.0%}): {verdict}."
        )
    launches = sorted(split.lane.launch_us)
    if launches:
        yield f"The driver's part of a launch is {duration(launches[len(launches) // 2])} (median, profiled)."


def horizontal(case: Case, split: Facts, combined: Facts, aside: str) -> str:
    """The same work in fewer, larger pieces."""
    text = (
        f"Horizontal fusion: one norm and one tanh over {case.shape[0]} x {case.shape[1]} rows do what "
        f"{case.shape[0]} of each did over {case.shape[1]}"
    )
    if split.device and combined.device:
        text += f"; {aside} that is {duration(split.device)} before and {duration(combined.device)} after"
    if split.bytes and combined.bytes:
        text += f". It also spares the stack: {size(split.bytes)} through memory before, {size(combined.bytes)} after"
    return f"{text}."


def traffic(study: Study, combined: Facts, line: Facts) -> Iterator[str]:
    """What intermediates cost in bytes, and in time at this device's copy bandwidth."""
    if not combined.bytes or not line.bytes:
        return
    speed = study.results["copy_bytes_per_second"]
    more = combined.bytes - line.bytes
    yield (
        f"Intermediates: combined moves {size(combined.bytes)}, the line must move {size(line.bytes)}. The "
        f"{size(more)} of intermediate results between take {duration(1e6 * more / speed)} at the "
        f"{speed / 1e9:,.0f} GB/s at which this device copies."
    )


def vertical(split: Facts, combined: Facts, line: Facts, made: str, aside: str) -> str:
    """The line beside both."""
    text = (
        f"Vertical fusion: the line runs {line.launches} {made} where combined runs {combined.launches}, "
        f"start to finish {combined.whole / line.whole:.1f} times as fast as combined and "
        f"{split.whole / line.whole:.1f} times as fast as split_stack, with backward "
        f"{combined.whole_step / line.whole_step:.1f} and {split.whole_step / line.whole_step:.1f}"
    )
    if line.device and combined.device:
        text += f"; {aside} {combined.device / line.device:.1f} times as fast as combined"
    return f"{text}."


def of_compile(study: Study, facts: dict[str, Facts], published: dict[str, float], made: str) -> Iterator[str]:
    """What torch.compile fuses of each, where it was asked for."""
    split = facts[SPLIT]
    for name in (f"compile_{SPLIT}", f"compile_{COMBINED}"):
        if name in facts:
            yield claim(facts[name], split, published[name])
            if study.device.type == "cuda":  # on the CPU the profile shows a compiled region as one
                yield f"{name} runs {facts[name].launches} {made}, uncompiled {facts[name[8:]].launches}."
    if study.results["graph_breaks"]:
        yield (
            f"torch.compile broke {study.results['graph_breaks']} graphs while it compiled all sizes; a function "
            "that makes a module's parameters is compiled in parts, with the host between."
        )

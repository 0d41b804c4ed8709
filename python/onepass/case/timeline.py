"""When things ran: the profiler's trace of some calls, what each launched within its time, and a picture of both."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from onepass.bench.report import save

__all__ = ["Bar", "Lane", "draw", "record"]

ON_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"
LAUNCHES = "cudaLaunchKernel", "cuLaunchKernel"  # and their longer names
VIEWS = {f"aten::{name}" for name in ("detach", "expand", "reshape", "select", "split", "t", "unbind", "view")}
OPERATORS = (
    "aten::",
    "onepass::",
    "Torch-Compiled Region",
    "CompiledFunctionBackward",
)  # on the CPU the outermost of these stand for kernels
OTHER = 7  # of matplotlib's ten colours: grey, for what takes little time


@dataclass(frozen=True)
class Bar:
    """A kernel, or on the CPU an operator; times in microseconds from the beginning of its lane."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Lane:
    """A call from its beginning until the device is done."""

    name: str
    duration: float
    bars: tuple[Bar, ...]
    launch_us: tuple[float, ...]  # host time of each launch on CUDA

    @property
    def busy(self) -> float:
        """Microseconds with anything running; bars may overlap."""
        total = end = 0.0
        for bar in self.bars:
            total += max(0.0, bar.start + bar.duration - max(end, bar.start))
            end = max(end, bar.start + bar.duration)
        return total

    def as_json(self) -> dict[str, Any]:
        launches = sorted(self.launch_us)
        return {
            "duration_us": round(self.duration, 1),
            "launches": len(self.bars),
            "busy_us": round(self.busy, 1),
            "launch_us": round(launches[len(launches) // 2], 2) if launches else None,
        }


def record(calls: dict[str, Callable[[], object]], device: torch.device, file: Path | None) -> list[Lane]:
    """A lane for each call, by name, of one profile; `file` gets the trace."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with profile(activities=activities):  # the first profile of a process starts what all need
        finish()
    with profile(activities=activities) as profiler:
        for name, call in calls.items():
            finish()
            with record_function(name):
                call()
                finish()
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(written))
        events = json.loads(written.read_text(encoding="utf-8"))["traceEvents"]
        if file is not None:
            shutil.copyfile(written, file)
    return list(lanes(events, list(calls), device))


def lanes(events: list[dict[str, Any]], names: Sequence[str], device: torch.device) -> Iterator[Lane]:
    """Of a trace's events: those on the device, or the outermost operators, within each name's window."""
    timed = sorted((e for e in events if "dur" in e), key=lambda e: (e["ts"], -e["dur"]))
    windows = {e["name"]: e for e in timed if e.get("cat") == "user_annotation"}
    if device.type == "cuda":
        shown = [e for e in timed if e.get("cat") in ON_DEVICE]
    else:
        shown = [e for e in outermost(e for e in timed if e["name"].startswith(OPERATORS)) if e["name"] not in VIEWS]
    launches = [e for e in timed if e["name"].startswith(LAUNCHES)]
    for name in names:
        begin, duration = windows[name]["ts"], windows[name]["dur"]
        bars = tuple(Bar(e["name"], e["ts"] - begin, e["dur"]) for e in within(shown, begin, duration))
        yield Lane(name, duration, bars, tuple(e["dur"] for e in within(launches, begin, duration)))


def within(events: list[dict[str, Any]], begin: float, duration: float) -> list[dict[str, Any]]:
    return [e for e in events if begin <= e["ts"] < begin + duration]


def outermost(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those that lie in no other of their thread."""
    ends: dict[Any, float] = {}
    for event in events:
        if event["ts"] >= ends.get(event["tid"], 0.0):
            ends[event["tid"]] = event["ts"] + event["dur"]
            yield event


def draw(panels: dict[str, list[Lane]], labels: Sequence[str], title: str, file: Path) -> None:
    """A panel for each group of lanes, a row for each lane; gaps are where nothing runs."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.4 + 0.45 * len(labels) * len(panels)), layout="constrained")
    drawn = [lane for group in panels.values() for lane in group]
    spent: dict[str, float] = {}
    for bar in (bar for lane in drawn for bar in lane.bars):
        spent[bar.name] = spent.get(bar.name, 0.0) + bar.duration
    *palette, grey = (*colormaps["tab10"].colors[:OTHER], *colormaps["tab10"].colors[OTHER:][::-1])
    dearest = sorted(spent, key=lambda name: -spent[name])[: len(palette)]
    colours = dict(zip(dearest, palette))
    for axes, (heading, group) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items()):
        for i, lane in enumerate(group):
            axes.broken_barh([(0, lane.duration)], (i - 0.42, 0.84), color="0.93")
            spans = [(bar.start, bar.duration) for bar in lane.bars]
            shades = [colours.get(bar.name, grey) for bar in lane.bars]
            axes.broken_barh(spans, (i - 0.36, 0.72), facecolors=shades, edgecolor="white", linewidth=0.2)
            text = f" {len(lane.bars)} launched, busy {lane.busy:,.0f} of {lane.duration:,.0f} µs"
            axes.text(lane.duration, i, text, va="center", fontsize=7)
        axes.set_yticks(range(len(group)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.3 * max(lane.duration for lane in group))
        axes.set_title(heading, loc="left", fontsize=9)
        axes.set_xlabel("µs from the call's beginning")
    handles = [Patch(color=colours[name], label=name if len(name) < 60 else f"{name[:57]}...") for name in dearest]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=6)
    figure.suptitle(title, fontsize=9)
    save(figure, file)

"""The roofline's tables on the terminal, and its picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from onepass.bench.report import ABBREVIATED, DIRECTIONS, duration, save, short, times, title
from onepass.case.report import size_and_dtype
from onepass.case.roofs import Point, pairs

__all__ = ["NOTES", "draw", "heading", "show"]

NOTES = """
GB/s: of the bytes that the unfused operators take and give, and of those that the line must move. Tflop/s: of the
line's flops. Fuse or not: by the lowest of three roofs over the unfused operators, their bytes at copy bandwidth, flops
at the rate of the best product (float32's where nothing is contracted), or launches; nothing to fuse is where the line
moves as much. What fits a cache moves faster than a copy does. gain: with --compile torch.compile's in brackets.
"""


def heading(results: dict[str, Any], console: Console) -> None:
    """What the figures stand under."""
    console.print(f"\n{title(results)}", style="cyan", highlight=False, markup=False)


def show(results: dict[str, Any], console: Console) -> None:
    """Prints roofs, what lies below them, and what became of the rules of thumb."""
    roofs = results["roofs"]
    rates = ", ".join(f"{rate / 1e12:.3g} Tflop/s in {short(d)}" for d, rate in roofs["flops_per_second"].items())
    console.print(
        f"roofs: {roofs['copy_bytes_per_second'] / 1e9:.4g} GB/s, {rates}, {roofs['launch_us']:.3g} µs a launch\n",
        highlight=False,
    )
    console.print(table(results))
    console.print("\nRules of thumb, and this device:", highlight=False)
    for claim in results["claims"]:
        console.print(f"- {claim}", highlight=False, markup=False)


def table(results: dict[str, Any]) -> Table:
    """Two lines for each size, forward and backward, from before to after."""
    filled = Table(box=box.SIMPLE, show_edge=False, collapse_padding=True)
    filled.add_column("unfused → fused", no_wrap=True)
    filled.add_column("", no_wrap=True)
    for head in ("time", "flops a byte", "GB/s", "Tflop/s"):
        filled.add_column(head, justify="right", no_wrap=True)
    filled.add_column("fuse or not", no_wrap=True)
    filled.add_column("gain", justify="right", no_wrap=True)
    last = None
    for (before, after), verdict in zip(pairs(results["points"]), results["verdicts"], strict=True):
        if before["pattern"] != last:
            filled.add_row(f"[bold]{before['pattern']}[/]")
        last = before["pattern"]
        first = before["direction"] == DIRECTIONS[0]

        def both(form: Callable[[Point], str], pair=(before, after)) -> str:
            return " → ".join(map(form, pair))

        filled.add_row(
            f"  {size_and_dtype(before)}" if first else "",
            ABBREVIATED[before["direction"]],
            both(lambda p: duration(p["us"])),
            both(lambda p: f"{p['intensity']:.{2 if p['intensity'] < 10 else 0}f}"),
            both(lambda p: f"{p['bytes_per_second'] / 1e9:,.0f}"),
            both(lambda p: f"{p['flops_per_second'] / 1e12:.3f}"[:5]),
            verdict["verdict"],
            times(verdict["gain"]) + (f" ({times(verdict['compile_gain'])})" if verdict["compile_gain"] else ""),
        )
    return filled


def draw(results: dict[str, Any], file: Path) -> None:
    """Flops a second over flops a byte: a panel for each dtype, an arrow from each chain to its line."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found = list(pairs(results["points"]))
    dtypes = list(dict.fromkeys(before["dtype"] for before, _ in found))
    names = list(dict.fromkeys(before["pattern"] for before, _ in found))
    colours = dict(zip(names, colormaps["tab20"].colors, strict=False))
    figure = Figure(figsize=(7.5 * len(dtypes), 7), layout="constrained")
    panels = figure.subplots(1, len(dtypes), sharex=True, sharey=True, squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes):
        own = [(before, after) for before, after in found if before["dtype"] == dtype]
        roof(axes, results["roofs"], dtype, own)
        for before, after in own:
            arrow(axes, before, after, colours[before["pattern"]])
        axes.set(xscale="log", yscale="log", xlabel="flops a byte", title=short(dtype))
    panels[0].set_ylabel("Gflop/s")
    handles = [panels[0].plot([], [], "s", color=colours[name], label=name)[0] for name in names]
    handles += [
        panels[0].plot([], [], marker, color="black", fillstyle=fill, label=f"{who} {ABBREVIATED[direction]}")[0]
        for direction, marker in zip(DIRECTIONS, "o^")
        for who, fill in (("before", "none"), ("after", "full"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7)
    figure.suptitle(f"Roofline. {title(results)}", fontsize=9)
    save(figure, file)


def roof(axes, roofs: dict[str, Any], dtype: str, own: list[tuple[Point, Point]]) -> None:
    """Copy bandwidth up to where products are as fast as they get; float32's rate for all that is none."""
    bandwidth, rates = roofs["copy_bytes_per_second"], roofs["flops_per_second"]
    low = min(point["intensity"] for pair in own for point in pair) / 2
    high = max(2 * rates[dtype] / bandwidth, 2 * max(point["intensity"] for pair in own for point in pair))
    ridge = rates[dtype] / bandwidth
    axes.plot([low, ridge, high], [low * bandwidth / 1e9, *[rates[dtype] / 1e9] * 2], color="grey")
    axes.axvline(ridge, color="0.85", linewidth=0.8)
    if dtype != "float32" and "float32" in rates:
        axes.plot([rates["float32"] / bandwidth, high], [rates["float32"] / 1e9] * 2, ":", color="grey")


def arrow(axes, before: Point, after: Point, colour) -> None:
    """From hollow to full; small sizes are small."""
    marker = dict(zip(DIRECTIONS, "o^"))[before["direction"]]
    places = [(point["intensity"], point["flops_per_second"] / 1e9) for point in (before, after)]
    small = before["bound"] == "launch"
    for place, fill in zip(places, ("none", "full")):
        axes.plot(*place, marker, color=colour, fillstyle=fill, markersize=3 if small else 6)
    axes.annotate("", places[1], places[0], arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 0.7})

"""The suite "fuse" as a picture: time and memory of training steps of models with a head, a bar for each provider."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onepass.bench import report
from onepass.bench.whole import WITH_HEAD, alike, has_graphs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["has_pictures", "plot"]

BARS = {
    "eager": ("eager", "#c3c7cd"),
    "compile": ("torch.compile", "#7cb2dd"),
    "liger": ("Liger", "#f2b04e"),
    "onepass": ("onepass", "#17365f"),
}
"""Of each provider the name that is shown, and a colour; as greys they differ, too."""
LIMIT, TEXT, FAINT = "#c81e1e", "#1f2328", "#d8dce1"
APART = 1.1
"""Between two models, in bars."""
ACROSS, DOWN, AROUND = 8.33, 0.155, 1.25
"""Inches: 800 pixels, those of a bar, and those of titles and legend."""


def has_pictures(results: dict[str, Any]) -> bool:
    """Whether there is something to draw: training steps of a model with a head, without CUDA graphs."""
    with_head = any(row["model"] in WITH_HEAD for row in results["rows"])
    return results["device"] == "cuda" and with_head and not has_graphs(results)


def plot(runs: Iterable[dict[str, Any]], directory: Path) -> list[Path]:
    """A picture of each GPU and torch: what was measured alike, if not in one run, is one.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    files = []
    for results in filter(has_pictures, alike(runs).values()):
        directory.mkdir(parents=True, exist_ok=True)
        files.append(directory / f"{report.device_name(results)}-training.svg")
        _draw(results, files[-1])
    return files


def _draw(results: dict[str, Any], file: Path) -> None:
    """Two panels that share their rows: a group of bars for each model."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    models = _by_model(results["rows"])
    places, middles, end = _places(models)
    with rc_context({"font.size": 8.5, "text.color": TEXT, "axes.labelcolor": TEXT, "ytick.color": TEXT}):
        figure = Figure(figsize=(ACROSS, DOWN * end + AROUND), layout="constrained", facecolor="white")
        time, memory = figure.subplots(1, 2, sharey=True)
        _panel(time, models, places, "seconds", 1e3, ".1f")
        _panel(memory, models, places, "step_bytes", 2**-30, ".1f")
        time.set_title("training step, ms", loc="left", fontsize=9.5)
        memory.set_title("peak memory above the weights, GiB", loc="left", fontsize=9.5)
        for name, rows in models.items():
            own = [places[name, provider] for provider in rows]
            for limit in (1e3 * row["products_seconds"] for row in rows.values() if "products_seconds" in row):
                for colour, width in (("white", 3.2), (LIMIT, 1.6)):
                    time.vlines(limit, min(own) - 0.62, max(own) + 0.62, color=colour, linewidth=width)
        time.set_ylim(end - 0.2, -0.9)
        time.set_yticks(list(middles.values()), [name.replace(", ", ",\n") for name in middles])
        there = {provider for rows in models.values() for provider in rows}
        shown = [Patch(color=colour, label=label) for name, (label, colour) in BARS.items() if name in there]
        shown.append(Line2D([], [], color=LIMIT, linewidth=1.6, label="products and attention alone"))
        figure.legend(handles=shown, loc="outside upper center", ncols=len(shown), frameon=False, handlelength=1.4)
        figure.supxlabel(f"{results['device_name']}, weights in bfloat16, torch {results['torch']}", fontsize=7.5)
        report.save(figure, file)


def _by_model(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The rows that are drawn, in the order of the bars: what failed has none."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["provider"] in BARS and "seconds" in row:
            found.setdefault(row["model"], {})[row["provider"]] = row
    return {model: {name: of[name] for name in BARS if name in of} for model, of in found.items()}


def _places(models: dict[str, dict[str, Any]]) -> tuple[dict[tuple[str, str], float], dict[str, float], float]:
    """Of each bar where it is, downwards, of each model its middle, and where all end."""
    places, middles, at = {}, {}, 0.0
    for model, rows in models.items():
        middles[model] = at + (len(rows) - 1) / 2
        for provider in rows:
            places[model, provider] = at
            at += 1
        at += APART
    return places, middles, at - APART


def _panel(
    axes: Axes,
    models: dict[str, dict[str, dict[str, Any]]],
    places: dict[tuple[str, str], float],
    key: str,
    unit: float,
    form: str,
) -> None:
    """The bars, with their numbers at their ends."""
    most = max(unit * row[key] for rows in models.values() for row in rows.values())
    for (model, provider), place in places.items():
        value = unit * models[model][provider][key]
        axes.barh(place, value, height=0.86, color=BARS[provider][1])
        weight = "bold" if provider == report.OURS else "normal"
        axes.text(value + 0.012 * most, place, f"{value:{form}}", va="center_baseline", fontsize=7.5, fontweight=weight)
    axes.set_xlim(0, 1.1 * most)
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "left")
        spine.set_color(FAINT)

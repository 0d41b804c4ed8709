"""Results as a table on the terminal, as Markdown for the README, and as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["device_name", "markdown", "plot", "save", "short", "show", "size_of", "summary", "write"]

SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
ABBREVIATED = {"forward": "fwd", "backward": "bwd"}
DIRECTIONS = tuple(ABBREVIATED)
MEMORY = ("saved", "peak")  # for backward; of forward and backward beyond the inputs
OURS = "onepass"
SQUARE = "of one product of square matrices with as many flops"
ALONE = {  # of the suites whose tables have times: what stands alone
    "linear": "the time of the product alone over ours",
    "attention": f"the time {SQUARE}, or without values of a copy of the same bytes, over ours",
    "models": f"the time {SQUARE} over ours",
}
HOST = "Host time of a call of 4 rows of 64 numbers, µs, inference / forward and backward"

Row = dict[str, Any]


def write(results: dict[str, Any], file: Path | None) -> None:
    """As JSON, if there is a file; again after every case, that nothing is lost where a run is cut off."""
    if file is not None:
        Path(file).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def short(dtype: torch.dtype | str) -> str:
    """bf16 for torch.bfloat16."""
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def size_of(shape: Sequence[int]) -> str:
    """4096x4096."""
    return "x".join(map(str, shape))


def cases(results: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Row]]:
    """The rows by pattern, shape and dtype, then by provider."""
    found: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in results["rows"]:
        behind = f"→{row['out_features']}" if row.get("out_features") else ""
        key = row["pattern"], f"{size_of(row['shape'])}{behind} {row.get('layout', '')}".strip(), short(row["dtype"])
        found.setdefault(key, {})[row["provider"]] = row
    return found


def providers(results: dict[str, Any]) -> list[str]:
    """Those with a row, in the order in which they ran."""
    return list(dict.fromkeys(row["provider"] for row in results["rows"]))


def speed_up(rows: dict[str, Row], direction: str) -> float | None:
    """The best peer's time over ours; what failed or computes something else is no peer."""
    ours = rows.get(OURS)
    peers = [
        row[f"{direction}_us"]
        for name, row in rows.items()
        if name != OURS and row["failure"] is None and row[f"{direction}_us"] is not None
    ]
    if ours is None or ours["failure"] or ours[f"{direction}_us"] is None or not peers:
        return None
    return min(peers) / ours[f"{direction}_us"]


def fraction(value: float | None) -> str:
    """A share of one, to two places: .93, 1.02."""
    return "-" if value is None else f"{value:.2f}".removeprefix("0")


def times(value: float | None) -> str:
    """A ratio: 1.3x."""
    return "-" if value is None else f"{value:.2f}x"


def failures(results: dict[str, Any]) -> list[str]:
    """One line for each row that failed, and for each provider that could not run."""
    found = [
        f"{row['provider']}, {row['pattern']} {size_of(row['shape'])} {short(row['dtype'])}: {row['failure']}"
        for row in results["rows"]
        if row["failure"]
    ]
    return found + [f"{name} {text}" for name, text in results["providers"].items() if text.startswith("not run")]


def title(results: dict[str, Any]) -> str:
    """Where and when."""
    threads = f", {results['threads']} threads" if results["device"] == "cpu" else ""
    versions = ", ".join(
        f"{name} {text}"
        for name, text in results["providers"].items()
        if name in ("liger", "quack") and text[0] in "0123456789"
    )
    return (
        f"{results['device_name']}{threads}, torch {results['torch']}{', ' + versions if versions else ''}, "
        f"{results['date']}, copy {results['copy_bytes_per_second'] / 1e9:,.1f} GB/s"
    )


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    names = providers(results)
    caption = (
        "time, and share of copy bandwidth; gain: best other / ours; "
        "same size: share of what the same bytes (the product alone) reach; "
        "MiB: ours / eager's"
    )
    table = Table(title=title(results), caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE)
    table.add_column("pattern", no_wrap=True)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", min_width=8)
    for head in ("gain", "same size", "MiB saved, peak"):
        table.add_column(head, justify="right")
    for (pattern, shape, dtype), rows in cases(results).items():
        for direction in DIRECTIONS:
            first = direction == "forward"
            cells = [cell(rows.get(name), direction) for name in names]
            own = fraction(rows[OURS][f"{direction}_same_size_fraction"]) if OURS in rows else "-"
            label = pattern if first else f"  {shape} {dtype}"
            cells += [times(speed_up(rows, direction)), own, memory(rows, "saved" if first else "peak")]
            table.add_row(label, ABBREVIATED[direction], *cells, end_section=not first)
    if results["rows"]:
        console.print(table)
    if results["host"]:
        console.print(host_table(results))
    for text in failures(results):
        console.print(text, markup=False, highlight=False)


def cell(row: Row | None, direction: str) -> str:
    """Time and fraction; an asterisk where the row failed."""
    if row is None:
        return ""
    mark = "*" if row["failure"] else ""
    spent = row[f"{direction}_us"]
    return f"-{mark}" if spent is None else f"{duration(spent)} {fraction(row[f'{direction}_fraction'])}{mark}"


def duration(us: float | None) -> str:
    """To three places: 8.02 ms, 553 µs."""
    if us is None:
        return "-"
    value, unit = (us / 1000, "ms") if us >= 1000 else (us, "µs")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def host_table(results: dict[str, Any]) -> Table:
    """Host time of a call."""
    names, found = host_cells(results)
    table = Table(title=HOST, title_justify="left", box=box.SIMPLE)
    for head in ("pattern", *names):
        table.add_column(head)
    for cells in found:
        table.add_row(*cells)
    return table


def host_cells(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The providers, and a row for each pattern."""
    names = list(dict.fromkeys(row["provider"] for row in results["host"]))
    found: dict[str, dict[str, str]] = {}
    for row in results["host"]:
        found.setdefault(row["pattern"], {})[row["provider"]] = row.get("failure") or " / ".join(
            "-" if row[key] is None else f"{row[key]:.1f}" for key in ("inference_us", "training_us")
        )
    return names, [[pattern, *(cells.get(name, "") for name in names)] for pattern, cells in found.items()]


def markdown(results: dict[str, Any]) -> str:
    """The README's tables: fractions of copy bandwidth forward / backward, and the gain over the best other.

    Of contractions times, and how near they come to that of the products alone.
    """
    names = providers(results)
    multiplies = results.get("suite") in ALONE
    told = "Time" if multiplies else "Share of copy bandwidth"
    beside = f" Alone: {ALONE[results['suite']]}." if multiplies else ""
    lines = [
        f"**{title(results)}.** {told}, forward / backward. Gain: the best other's time "
        f"over ours.{beside} Method: {results['method']}",
        "",
    ]
    measured = [name for name in MEMORY if any(row[f"{name}_bytes"] is not None for row in results["rows"])]
    head = ["pattern", "shape", "dtype", *names, "alone" if multiplies else "onepass, same size", "gain"]
    head += [f"{name} MiB, onepass / eager" for name in measured]
    table = []
    for (pattern, shape, dtype), rows in cases(results).items():
        cells = [pattern, shape, dtype]
        form, key = (duration, "{}_us") if multiplies else (fraction, "{}_fraction")
        cells += [pair(form, rows.get(name), key) + mark(rows.get(name)) for name in names]
        cells.append(pair(fraction, rows.get(OURS), "{}_same_size_fraction"))
        cells.append(" / ".join(times(speed_up(rows, direction)) for direction in DIRECTIONS))
        cells += [memory(rows, name) for name in measured]
        table.append(cells)
    lines += markdown_table(head, table)
    failed = failures(results)
    if failed:
        lines += ["", *(f"- \\* {text}" for text in failed)]
    return "\n".join(lines) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines; a bar inside a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


SUMMARY = (  # of the tables on a GPU: pattern, shape
    ("layer_norm", [32768, 4096]),
    ("add_rms_norm", [32768, 4096]),
    ("layer_norm_gelu", [32768, 4096]),
    ("bias_gelu", [16384, 4096]),
    ("swiglu", [16384, 14336]),
    ("bias_dropout_add", [32768, 4096]),
    ("softmax", [16384, 65536]),
    ("attention_probabilities", [8, 16, 2048, 2048]),
)
LIBRARIES = ("eager", "compile_max", "liger", "quack", OURS)


def summary(every: Sequence[dict[str, Any]]) -> str:
    """A few rows of the table of an H200 and of its heads, in bfloat16, as Markdown: milliseconds forward and backward
    together; of torch.compile the faster of its modes."""
    rows: list[tuple[str, ...]] = []

    def add(of: str, shape: Sequence[int], times: dict[str, float]) -> None:
        best = min(times.values())
        found = (times.get(name) for name in LIBRARIES)
        cells = ("" if t is None else f"**{t:.2f}**" if t == best else f"{t:.2f}" for t in found)
        rows.append((of, "x".join(map(str, shape)), *cells))

    on_h200 = [found for found in every if "H200" in found.get("device_name", "")]
    for found in (f for f in on_h200 if f.get("suite") == "table"):
        for pattern, shape in SUMMARY:
            of_it = [r for r in found["rows"] if r["pattern"] == pattern and r["shape"] == shape and not r["layout"]]
            both = {
                r["provider"]: r for r in of_it if r["dtype"] == "bfloat16" and r["backward_us"] and r["forward_us"]
            }
            times = {name: (r["forward_us"] + r["backward_us"]) / 1e3 for name, r in both.items()}
            if "compile" in times:
                times["compile_max"] = min(times.pop("compile"), times.get("compile_max", math.inf))
            if times:
                add(pattern, shape, times)
    for found in (f for f in on_h200 if f.get("suite") == "head"):
        shapes = dict.fromkeys(tuple(r["shape"]) for r in found["rows"])
        for shape in shapes:
            of_it = [r for r in found["rows"] if tuple(r["shape"]) == shape and not r["ignored"]]
            times = {r["provider"]: 1e3 * r["step_seconds"] for r in of_it if r.get("step_seconds")}
            times["compile_max"] = times.pop("compile")
            add("linear + cross_entropy", shape, {name: t for name, t in times.items() if name in LIBRARIES})
    head = ("H200, bfloat16", "shape", "eager", "torch.compile", "Liger", "quack", OURS)
    return "\n".join(markdown_table(head, rows))


def host_markdown(results: dict[str, Any]) -> str:
    """Likewise of the host's times."""
    names, found = host_cells(results)
    return "\n".join([f"**{title(results)}.** {HOST}.", "", *markdown_table(["pattern", *names], found)]) + "\n"


def pair(form, row: Row | None, key: str) -> str:
    """Forward / backward."""
    return "" if row is None else " / ".join(form(row[key.format(direction)]) for direction in DIRECTIONS)


def memory(rows: dict[str, Row], kind: str) -> str:
    """MiB of ours / of eager's."""
    counts = [rows[name][f"{kind}_bytes"] if name in rows else None for name in (OURS, "eager")]
    return " / ".join("-" if count is None else f"{count / 2**20:,.1f}" for count in counts)


def mark(row: Row | None) -> str:
    """Points at the list of failures."""
    return " \\*" if row is not None and row["failure"] else ""


def plot(results: dict[str, Any], directory: Path | str) -> list[Path]:
    """Writes the pictures: a curve over the row length for each pattern that has one, and a roofline of all lines.

    Returns:
        The files.
    """
    directory = Path(directory)
    curves = plot_curves(results, directory)
    return curves if results.get("suite") == "models" else [*curves, plot_roofline(results, directory)]


def is_of_scores(row: Row) -> bool:
    return row["line"].startswith("scores")


def length_of(row: Row) -> int:
    """Of a row; of attention's too, which is as long as there are keys."""
    return row["out_features"] if is_of_scores(row) else row["shape"][-1]


def panel_of(row: Row) -> str:
    """What a panel is for."""
    return short(row["dtype"]) + (f", {row['shape'][-1]} features" if is_of_scores(row) else "")


def plot_curves(results: dict[str, Any], directory: Path) -> list[Path]:
    """The share of copy bandwidth over the row length: a panel for each dtype (of attention also each number of
    features) and direction, a line each provider."""
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for pattern in dict.fromkeys(row["pattern"] for row in results["rows"]):
        found = [row for row in results["rows"] if row["pattern"] == pattern and row["failure"] is None]
        dtypes = list(dict.fromkeys(row["dtype"] for row in found))
        if len(set(map(length_of, found))) < 3:
            continue
        kinds = list(dict.fromkeys(map(panel_of, found)))
        figure = Figure(figsize=(6 * len(kinds), 7), layout="constrained")
        panels = figure.subplots(2, len(kinds), sharex=True, sharey=True, squeeze=False)
        for i, direction in enumerate(DIRECTIONS):
            for k, kind in enumerate(kinds):
                axes = panels[i][k]
                for name in providers(results):
                    points = sorted(
                        (length_of(row), row[f"{direction}_fraction"])
                        for row in found
                        if row["provider"] == name and panel_of(row) == kind and row[f"{direction}_fraction"]
                    )
                    if points:
                        width = 2.2 if name == OURS else 1.2
                        axes.plot(*zip(*points, strict=True), marker=".", linewidth=width, label=name)
                axes.axhline(1, color="grey", linewidth=0.8)
                axes.set_xscale("log", base=2)
                axes.set_title(f"{direction}, {kind}")
        for axes in panels[-1]:
            axes.set_xlabel("row length")
        for row in panels:
            row[0].set_ylabel("share of copy bandwidth")
        panels[0][0].legend()
        figure.suptitle(f"{pattern}. {title(results)}")
        files.append(directory / f"{device_name(results)}-{pattern}-{'-'.join(map(short, dtypes))}.svg")
        save(figure, files[-1])
    return files


def device_name(results: dict[str, Any]) -> str:
    """For file names: `cpu`, or which GPU, as `h200`."""
    if results["device"] == "cpu":
        return "cpu"
    return "-".join(results["device_name"].lower().removeprefix("nvidia ").split())


def save(figure, file: Path) -> None:
    """The same bytes for the same picture."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "onepass", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None} if Path(file).suffix == ".svg" else None)


def plot_roofline(results: dict[str, Any], directory: Path) -> Path:
    """Flops a second over flops a byte, ours forward and backward, below what copy bandwidth allows."""
    from matplotlib.figure import Figure

    from onepass.line import Line

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    intensities = []
    for direction, marker in zip(DIRECTIONS, "o^", strict=True):
        points = []
        for row in results["rows"]:
            if row["provider"] != OURS or row["failure"] is not None or row[f"{direction}_us"] is None:
                continue
            if row["pattern"] == "gated_mlp":  # no one line
                continue
            line, dtype = Line(row["line"]), getattr(torch, row["dtype"])
            cost = getattr(line.cost(row["shape"], dtype, row["out_features"] or None), direction)
            points.append((cost.flops / cost.bytes, cost.flops / row[f"{direction}_us"] / 1e3, row["pattern"]))
        for name in dict.fromkeys(point[2] for point in points):
            own = [point[:2] for point in points if point[2] == name]
            axes.plot(*zip(*own, strict=True), marker, label=f"{name} {ABBREVIATED[direction]}", markersize=5)
        intensities += [point[0] for point in points]
    ends = [min(intensities, default=1) * 0.8, max(intensities, default=1) * 1.25]
    axes.plot(ends, [x * results["copy_bytes_per_second"] / 1e9 for x in ends], color="grey", label="copy bandwidth")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("flops a byte that must move")
    axes.set_ylabel("Gflop/s")
    axes.legend(fontsize="x-small", ncols=2)
    figure.suptitle(f"Roofline. {title(results)}")
    file = directory / f"{results['device']}-roofline-{results.get('suite', 'table')}.svg"
    save(figure, file)
    return file

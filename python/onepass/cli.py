"""The command `onepass`: demo, bench, cases, the kernel cache, the vocabulary, and what this machine offers."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import itertools
import math
import os
import re
import sys
import time
from dataclasses import asdict
from json import dumps as json_text
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Column, Table

import onepass
from onepass import _log, _native, cache, docs, doctor
from onepass._words.command import word_app
from onepass.pricing.profile import profile_of

__all__ = ["app", "main"]

app = typer.Typer(
    help="Fused operators for PyTorch, written as lines of words.",
    epilog="Exit codes: 0, all is well; 1, something is wrong, failed, or was ended by Ctrl-C; 2, an argument does not "
    "fit. `onepass COMMAND --help` says what a command means by wrong.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
cache_app = typer.Typer(help="The disk cache of kernels compiled at first use.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(word_app, name="word")
console = Console()

SUITES = (
    "table, curve, awkward, layouts, small, linear, attention, attention_curve, attention_odd, models, programs, "
    "programs_curve, any, host, fuse, fuse_small, fuse_shapes, head or explain"
)
MOST_ELEMENTS = 2**58
STATES = {"works": "green", "missing": "yellow", "fails": "red"}
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def main() -> None:
    """The command, whose errors are a line where they are no faults of this package."""
    try:
        app(prog_name="onepass")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in doctor.OPTIONAL:
            raise
        fail(f"this needs {error.name}: pip install {package}")
    except torch.OutOfMemoryError as error:
        fail(doctor.first_line(error))
    except OSError as error:  # a file that cannot be read or written
        fail(str(error))


def fail(message: str) -> None:
    """Ends the command."""
    typer.echo(f"onepass: {message}", err=True)
    sys.exit(1)


def say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onepass {onepass.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="of onepass and torch")
    ] = False,
) -> None:
    _log.say_by_default()


def check_there(package: str, wanted: object) -> None:
    """Before minutes of timing: what the end of a command needs."""
    if wanted and importlib.util.find_spec(package) is None:
        raise typer.BadParameter(f"pictures need {package}: pip install {package}")


def bars() -> Progress:
    """What is done, how much of it, and since when."""
    return Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console)


def say_if_busy(seconds: float = 0.3) -> None:
    """Before times are taken on processors that others use."""
    busy = busy_processors(seconds)
    if busy > 0.25:
        said = f"other work takes {busy:.1f} of {os.cpu_count()} processors: times on the CPU are noise"
        typer.echo(f"onepass: {said}", err=True)


def busy_processors(seconds: float) -> float:
    """How many of the machine's are at work while this process sleeps so long; 0 where the system does not say."""
    before = processor_ticks()
    time.sleep(seconds)
    after = processor_ticks()
    if before is None or after is None or after[1] == before[1]:
        return 0.0
    return (1 - (after[0] - before[0]) / (after[1] - before[1])) * (os.cpu_count() or 1)


def processor_ticks() -> tuple[int, int] | None:
    """Idle ones of all processors since the system began, and all; None where it is not Linux (man 5 proc_stat)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(number) for number in stat.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def parse_dtype(name: str) -> torch.dtype:
    """A dtype by its short name or PyTorch's own."""
    known = {**DTYPES, **{str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}}
    if name not in known:
        raise typer.BadParameter(f"expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape such as 4096x4096."""
    parts = text.lower().split("x")
    if not all(part.strip().isdecimal() and len(part) < 20 for part in parts):
        raise typer.BadParameter(f"expected sizes joined by 'x', as in 4096x4096, got {text!r}")
    sizes = tuple(int(part) for part in parts)
    if math.prod(sizes) > MOST_ELEMENTS:
        raise typer.BadParameter(f"expected a tensor of at most 2^58 elements, got {text!r}")
    return sizes


def parse_device(name: str | None) -> str | None:
    """A device that is here."""
    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"expected cpu or cuda, got {name!r}: {doctor.first_line(error)}") from None
    there = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type)
    if there is None:
        raise typer.BadParameter(f"expected cpu or cuda, got {name!r}")
    if (device.index or 0) >= there:
        raise typer.BadParameter(f"no device is called {name!r} here: there are {there} of type {device.type}")
    return name


def parse_pattern(text: str | None) -> str | None:
    """A regular expression."""
    try:
        re.compile(text or "")
    except re.error as error:
        raise typer.BadParameter(f"expected a regular expression, got {text!r}: {error}") from None
    return text


def parse_line(text: str) -> onepass.Line:
    """The line, or the command's end with the parser's own message, whose carets stand under the fault."""
    try:
        return onepass.Line(text)
    except onepass.LineError as error:
        typer.echo(error, err=True)
        raise typer.Exit(2) from None


@app.command()
def demo(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; all that there are if not given")] = None,
) -> None:
    """Runs a real sentence encoder's activations through PyTorch's chains and the fused lines, and compares."""
    from onepass import demo as demonstration

    say_if_busy()
    raise typer.Exit(demonstration.run(device=parse_device(device)))


@app.command()
def demo_distributed(
    steps: Annotated[int, typer.Option(min=1, help="of the loss curves")] = 50,
) -> None:
    """Trains a transformer's block on several ranks beside PyTorch's modules. Exits with 1 where losses differ."""
    from onepass.demo import distributed

    raise typer.Exit(distributed.run(steps))


@app.command()
def bench(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one if not given")] = None,
    only: Annotated[str | None, typer.Option(metavar="REGEX", help="patterns to run, by name")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
    providers: Annotated[str | None, typer.Option(metavar="A,B", help="what to time, as in eager,compile")] = None,
    quick: Annotated[bool, typer.Option(help="few rounds and small shapes")] = False,
    suite: Annotated[str, typer.Option(help=SUITES)] = "table",
    dtype: Annotated[str | None, typer.Option(help="only cases of this dtype: " + ", ".join(DTYPES))] = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="where to write pictures")] = None,
) -> None:
    """Times every pattern beside eager PyTorch, torch.compile and the libraries that are installed."""
    from onepass import bench as benchmark

    check_there("matplotlib", plot)
    make_directory_of(json)
    names = None if providers is None else [name.strip() for name in providers.split(",")]
    options = {
        "device": parse_device(device),
        "only": parse_pattern(only),
        "json": json,
        "providers": names,
        "quick": quick,
        "suite": suite,
        "dtype": None if dtype is None else parse_dtype(dtype),
        "plot": plot,
    }
    say_if_busy()
    try:
        benchmark.run(**options)
    except ValueError as error:  # of a pattern, provider or suite that there is not
        raise typer.BadParameter(str(error)) from None


@app.command("case")
def run_case(
    name: Annotated[str, typer.Argument(metavar="CASE", help="as in layernorm-linear")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; all that there are if not given")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the results")] = None,
    quick: Annotated[bool, typer.Option(help="few rounds and the teaching size only")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile of the unfused function, too")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the profiler's trace, where a case has one")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="a picture, where a case has one")] = None,
) -> None:
    """Runs a teaching case unfused and fused: errors against float64, work, memory, times. Exits with 1 where wrong."""
    from onepass import case

    if name not in case.CASES:
        raise typer.BadParameter(f"no case is called {name!r}; there are {', '.join(case.CASES)}")
    check_there("matplotlib", plot)
    make_directory_of(json, trace, plot)
    say_if_busy()
    try:
        code = case.CASES[name](
            device=parse_device(device), json=json, quick=quick, compiled=compiled, trace=trace, plot=plot
        )
    except NotImplementedError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(code)


def make_directory_of(*files: Path | None) -> None:
    """Before minutes of timing, which would be lost at the end."""
    for file in files:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)


@app.command()
def words(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="only those whose name or meaning holds one of these")
    ] = None,
) -> None:
    """Lists the vocabulary. As in: onepass words norm; exits with 2 where no word is meant."""
    meant = [name.lower() for name in names or [""]]
    found = [w for w in onepass.words() if any(name in f"{w.name} {w.meaning}".lower() for name in meant)]
    if not found:
        close = difflib.get_close_matches(meant[0], [word.name for word in onepass.words()], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise typer.BadParameter(f"no word's name or meaning holds {', '.join(map(repr, names or []))}{hint}")
    columns = (Column(name, overflow="fold") for name in ("formula", "meaning"))
    table = Table(Column("word", no_wrap=True), Column("takes", max_width=40), *columns)
    for word in found:
        takes = "; ".join(filter(None, (docs.operand(word), docs.number(word))))
        table.add_row(*map(escape, (word.name, takes, word.formula, word.meaning)))
    console.print(table)


@app.command()
def line(
    text: Annotated[str, typer.Argument(metavar="LINE", help='as in "bias | gelu"')],
    shape: Annotated[str, typer.Option(help="x's shape")] = "4096x4096",
    dtype: Annotated[str, typer.Option(help="x's dtype: " + ", ".join(DTYPES))] = "fp32",
    out_features: Annotated[int, typer.Option(min=1, help="of `linear`, in a line that has it")] = 4096,
) -> None:
    """Says what a line does, and what it costs on a tensor: bytes that must move, flops, bytes saved for backward."""
    parsed, of_shape, of_dtype = parse_line(text), parse_shape(shape), parse_dtype(dtype)
    table = Table("word", "operand", "formula", title=parsed.text, title_justify="left")
    for word in parsed.words:
        table.add_row(*map(escape, (str(word), docs.operand(word), word.formula)))
    console.print(table)
    try:
        cost = parsed.cost(of_shape, of_dtype, None if parsed.weight is None else out_features)
    except RuntimeError as error:
        raise typer.BadParameter(str(error)) from None
    traffic = Table("", "bytes", "flops", "flops a byte", title=f"{shape}, {of_dtype}", title_justify="left")
    for name, side in (("forward", cost.forward), ("backward", cost.backward)):
        intensity = side.flops / side.bytes if side.bytes else math.nan
        traffic.add_row(name, docs.size(side.bytes), f"{side.flops:,}", f"{intensity:.2f}")
    console.print(traffic)
    console.print(f"saved for backward: {docs.size(cost.saved_bytes)}")


@app.command()
def plan(
    text: Annotated[str, typer.Argument(metavar="LINE", help='as in "rms_norm(1e-6) | scale | linear"')],
    shape: Annotated[str, typer.Option(help="x's shape")] = "4096x4096",
    dtype: Annotated[
        str | None, typer.Option(help="x's dtype: " + ", ".join(DTYPES) + "; bf16, on the CPU fp32, if not given")
    ] = None,
    out_features: Annotated[
        int, typer.Option(min=1, help="of `linear`, or keys of `scores`, in a line with one")
    ] = 4096,
    device: Annotated[
        str | None, typer.Option(help="h200, h100, a100, cpu, a chip as in sm_90a; the one that is here if not given")
    ] = None,
    train: Annotated[bool, typer.Option("--train/--inference", help="whether tensors are saved for backward")] = True,
) -> None:
    """Says how a line would be computed forward, and why so: strategies, kernels, bytes, on a GPU predicted times."""
    on_cpu = device == "cpu" or device is None and not torch.cuda.is_available()
    of_dtype = parse_dtype(dtype or ("fp32" if on_cpu else "bf16"))
    parsed, of_shape = parse_line(text), parse_shape(shape)
    contracts = parsed.weight is not None or parsed.scores
    try:
        found = parsed.plan(of_shape, of_dtype, out_features if contracts else None, device=device, training=train)
    except (RuntimeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    timed = any(way.seconds is not None for way in found.alternatives)
    columns = [Column("MiB", justify="right"), *([Column("µs predicted", justify="right")] if timed else [])]
    table = Table("strategy", *columns, Column("kernel, or why not", overflow="fold"), title=f"{shape}, {of_dtype}")
    for way in found.alternatives:
        name = f"[bold]{way.name}[/]" if way.name == found.strategy else way.name
        seconds = ["" if way.seconds is None else f"{1e6 * way.seconds:,.3g}"] if timed else []
        moved = "" if way.why_not else f"{way.bytes / 2**20:,.1f}"
        table.add_row(name, moved, *seconds, escape(way.why_not or way.kernel))
    console.print(table)
    console.print(f"{found.strategy}: {found.why}", markup=False, highlight=False)


@app.command("explain")
def explain_model(
    factory: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="called without arguments; gives the model")],
    input: Annotated[list[str], typer.Option(metavar="SHAPE[:DTYPE]", help="as in 8x128 or 8x128:int64; repeatable")],
    device: Annotated[str | None, typer.Option(help="h200, h100, a100, cpu, or a file of `calibrate`")] = None,
    train: Annotated[bool, typer.Option("--train", help="forward and backward")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write the explanation")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="where to draw the roofline")] = None,
    measured: Annotated[bool, typer.Option("--measure", help="times the lines here, too")] = False,
) -> None:
    """Says what lines a model is worth, what they would save, and what won't help."""
    check_there("matplotlib", plot)
    make_directory_of(json, plot)
    inputs = [parse_input(text) for text in input]
    try:
        profile = profile_of(device)
    except (ValueError, TypeError) as error:  # of no such device, or a file that is no profile
        raise typer.BadParameter(str(error)) from None
    model = made_by(factory).train(train)
    with torch.set_grad_enabled(train):
        explained = onepass.explain(model, *inputs, device=profile)
    console.print(explained)
    if json is not None:
        json.write_text(explained.to_json(), encoding="utf-8")
    if plot is not None:
        explained.plot(plot)
    if measured:
        explained.measure()


def made_by(text: str) -> torch.nn.Module:
    """What the factory that "module:name" names gives; its own errors are its own."""
    factory = load(text)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise typer.BadParameter(f"{text!r} is called without arguments: {error}") from None
    except ValueError:  # of a builtin, which does not say
        pass
    model = factory()
    if not isinstance(model, torch.nn.Module):
        raise typer.BadParameter(f"expected {text!r} to give a torch.nn.Module, and it gave {type(model).__name__}")
    return model


def load(text: str):
    """What "module:name" names."""
    module, _, name = text.partition(":")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(f"expected MODULE:FACTORY, got {text!r}: {error}") from None


def parse_input(text: str) -> torch.Tensor:
    """A tensor of a shape and a dtype: numbers from a normal distribution, integers and bools of 1."""
    shape, _, name = text.partition(":")
    dtype = parse_dtype(name or "fp32") if name not in ("int64", "bool") else getattr(torch, name)
    sizes = parse_shape(shape)
    try:
        return torch.randn(sizes, dtype=dtype) if dtype.is_floating_point else torch.ones(sizes, dtype=dtype)
    except RuntimeError as error:  # no memory for it
        raise typer.BadParameter(f"{text!r}: {doctor.first_line(error)}") from None


@app.command()
def calibrate(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="where to write the profile")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one if not given")] = None,
) -> None:
    """Measures what `explain` and `fuse` need to know of this device; takes about a minute."""
    from onepass.pricing.calibrate import STEPS
    from onepass.pricing.calibrate import calibrate as measure

    chosen = parse_device(device)
    make_directory_of(output)
    say_if_busy()
    with bars() as progress:
        task = progress.add_task("begins", total=STEPS)
        profile = measure(chosen, said=lambda step: progress.update(task, advance=1, description=step))
    output.write_text(profile.to_json(), encoding="utf-8")
    console.print(f"{profile.name}: {profile.bandwidth / 1e9:,.0f} GB/s; wrote {output}")


@app.command()
def tune(
    line: Annotated[list[str] | None, typer.Option(help="a line without a contraction; repeatable")] = None,
    columns: Annotated[
        list[int] | None, typer.Option(min=1, max=cache.MOST_COLUMNS, help="the length of its rows; repeatable")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="of x and operands: " + ", ".join(DTYPES))] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="as many as make 2^26 elements if not given")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="tunes what fuse() makes of a model, for its --input")
    ] = None,
    input: Annotated[
        list[str] | None, typer.Option(metavar="SHAPE[:DTYPE]", help="as in 8x128 or 8x128:int64; repeatable")
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="forward alone")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write what was found")] = None,
) -> None:
    """Measures how kernels share rows out on this GPU, and keeps the fastest in the cache, for all that comes.

    A line takes some 20 s. As in: onepass tune --line "bias | gelu" --columns 5120, or
    onepass tune --model mine:make --input 8x512:int64
    """
    from onepass.tuning import Tuned, tune_step
    from onepass.tuning import tune as tune_line

    if (model is None) == (not line) or (line and not columns) or (model is not None and (not input or columns)):
        raise typer.BadParameter("expected --line with --columns, or --model with --input")
    make_directory_of(json)
    lines, dtypes = [parse_line(text) for text in line or []], [parse_dtype(name) for name in dtype or ["bf16"]]
    if not torch.cuda.is_available():
        fail("tune needs a CUDA device: CPU kernels have nothing to tune")
    found: list[Tuned] = []
    failed: list[str] = []
    with bars() as progress:
        if model is not None:
            task = progress.add_task("the model runs", total=1.0)
            step = step_of(made_by(model), [parse_input(text) for text in input or []], inference)
            try:
                found += tune_step(
                    step, said=lambda what, share: progress.update(task, completed=share, description=what)
                )
            except RuntimeError as error:
                fail(doctor.first_line(error))
        for of, length, of_dtype in itertools.product(lines, columns or [], dtypes):
            task = progress.add_task(of.text, total=1.0)
            try:
                found += tune_line(
                    of,
                    length,
                    of_dtype,
                    rows=rows,
                    training=not inference,
                    said=lambda what, share, t=task: progress.update(t, completed=share, description=what),
                )
            except (RuntimeError, ValueError) as error:
                failed.append(f"{of.text}, {length} columns: {doctor.first_line(error)}")
    console.print(table_of_tuned(found))
    if json is not None:
        json.write_text(tuned_json(found), encoding="utf-8")
    if failed:
        fail("; ".join(failed))


def step_of(model: torch.nn.Module, inputs: list[torch.Tensor], inference: bool):
    """What a fused model does once on the GPU; in training, with the sum of its results for a loss."""
    model = onepass.fuse(model.cuda().train(not inference))
    inputs = [tensor.cuda() for tensor in inputs]

    def step() -> None:
        with torch.set_grad_enabled(not inference):
            leaves = torch.utils._pytree.tree_leaves(model(*inputs))
        sums = [leaf.float().sum() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()

    return step


def table_of_tuned(found: list) -> Table:
    columns = (Column(name, justify="right") for name in ("µs", "now", "tried"))
    table = Table(Column("line", overflow="fold"), *columns, Column("way", overflow="fold"))
    for of in found:
        where = f"{'backward' if of.backward else 'forward'}, {of.rows}x{of.columns} {str(of.dtype)[6:]}"
        before, after = (f"{1e6 * seconds:,.4g}" for seconds in of.seconds)
        way = of.way or "[dim]as the rules have it[/]"
        table.add_row(f"{escape(of.line)}\n[dim]{where}[/]", before, after, str(of.tried), way)
    return table


def tuned_json(found: list) -> str:
    rows = [{**asdict(of), "dtype": str(of.dtype).removeprefix("torch.")} for of in found]
    return json_text({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tuned": rows}, indent=1)


@app.command("docs", hidden=True)
def write_docs(
    output: Annotated[Path, typer.Option(metavar="FILE", help="the language reference")] = Path("docs/language.md"),
    results: Annotated[bool, typer.Option(help="also fill docs/results.md and README.md from bench/results")] = False,
) -> None:
    """Writes the language reference from the words' descriptors; for who works on onepass, in its repository."""
    if not Path("docs/language.md").exists() or not Path("python/onepass").exists():
        raise typer.BadParameter("this writes the documentation of onepass, in its repository")
    check_there("matplotlib", results)
    output.write_text(docs.language(), encoding="utf-8")
    console.print(f"wrote {output}")
    if results:
        console.print(f"filled docs/results.md and README.md from {docs.fill_results(Path())} files of results")


@app.command("doctor")
def run_doctor(
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="where to write what was found")] = None,
) -> None:
    """Says what works here, and what to do about what does not. Exits with 1 where lines give errors."""
    make_directory_of(json)
    found = []
    for finding in doctor.findings():
        found.append(finding)
        state = f"[{STATES[finding.state]}]{finding.state:<8}[/]"
        console.print(f"{state}[bold]{finding.name}[/]: {escape(finding.said)}", highlight=False)
        if finding.advice:
            console.print(f"        → {escape(finding.advice)}", highlight=False)
    if json is not None:
        json.write_text(doctor.to_json(found), encoding="utf-8")
    raise typer.Exit(any(finding.state == "fails" for finding in found))


@app.command(hidden=True, deprecated=True)
def info() -> None:
    """What `doctor` says."""
    run_doctor(None)


@cache_app.command("list")
def cache_list() -> None:
    """Lists the cached kernels."""
    entries = onepass.cache.list()
    table = Table("kind", "size", "age", "kernel")
    for entry in entries:
        table.add_row(entry.kind, docs.size(entry.bytes), f"{entry.age / 3600:.1f} h", entry.label)
    console.print(table)
    total = docs.size(sum(entry.bytes for entry in entries))
    console.print(f"{len(entries)} kernels, {total}, in {_native.info()['cache_directory']}", soft_wrap=True)


@cache_app.command("clear")
def cache_clear() -> None:
    """Removes every cached kernel."""
    console.print(f"removed {onepass.cache.clear()} kernels")


@cache_app.command("build")
def cache_build(
    arch: Annotated[list[str] | None, typer.Option(help="a chip, as in sm_90a; may be repeated")] = None,
    line: Annotated[
        list[str] | None, typer.Option(help="a line; may be repeated; the named functions' if not given")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="of x and operands: " + ", ".join(DTYPES) + "; may be repeated")
    ] = None,
    columns: Annotated[
        list[int] | None, typer.Option(min=1, max=cache.MOST_COLUMNS, help="a row length; may be repeated")
    ] = None,
    verbose: Annotated[bool, typer.Option(help="name every kernel")] = False,
) -> None:
    """Compiles CUDA kernels ahead of their first use; needs NVRTC but no GPU."""
    options = {}
    if arch:
        options["archs"] = arch
    if dtype:
        options["dtypes"] = [parse_dtype(name) for name in dtype]
    if columns:
        options["columns"] = columns
    lines = [parse_line(text).text for text in line or _native.common_lines()]
    for text in track(lines, "compiling", console=console):
        try:
            for label in onepass.cache.build(lines=[text], **options):
                if verbose:
                    console.print(label, markup=False, highlight=False)
        except RuntimeError as error:  # a chip that is not known, a length that the line does not take, or NVRTC's
            typer.echo(f"{text}: {error}", err=True)
            raise typer.Exit(1) from None
    kernels = [entry for entry in onepass.cache.list() if entry.kind == "cuda"]
    console.print(f"{len(kernels)} CUDA kernels are in {_native.info()['cache_directory']}", soft_wrap=True)

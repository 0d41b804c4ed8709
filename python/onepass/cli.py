"""The command `onepass`: demo, bench, cases, the kernel cache, the vocabulary, and what this machine offers."""

from __future__ import annotations

import ctypes
import importlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Column, Table

import onepass
from onepass import _native, cache, docs
from onepass._words.command import word_app
from onepass.pricing.profile import profile_of

__all__ = ["app"]

app = typer.Typer(help="Fused operators for PyTorch, written as lines of words.", no_args_is_help=True)
cache_app = typer.Typer(help="The disk cache of kernels compiled at first use.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(word_app, name="word")
console = Console()

SUITES = (
    "table, curve, awkward, layouts, small, linear, attention, attention_curve, attention_odd, models, programs, "
    "programs_curve, host, fuse, head or explain"
)
MOST_ELEMENTS = 2**58
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


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
        raise typer.BadParameter(f"expected cpu or cuda, got {name!r}: {str(error).splitlines()[0]}") from None
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
    make_directory_of(json, trace, plot)
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
def words() -> None:
    """Lists the vocabulary."""
    table = Table(Column("word", no_wrap=True), Column("takes", max_width=40), "formula", "meaning")
    for word in onepass.words():
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
    make_directory_of(json)
    inputs = [parse_input(text) for text in input]
    try:
        profile = profile_of(device)
    except (ValueError, TypeError) as error:  # of no such device, or a file that is no profile
        raise typer.BadParameter(str(error)) from None
    model = load(factory)().train(train)
    with torch.set_grad_enabled(train):
        explained = onepass.explain(model, *inputs, device=profile)
    console.print(explained)
    if json is not None:
        json.write_text(explained.to_json(), encoding="utf-8")
    if plot is not None:
        explained.plot(plot)
    if measured:
        explained.measure()


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
        raise typer.BadParameter(f"{text!r}: {str(error).splitlines()[0]}") from None


@app.command()
def calibrate(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="where to write the profile")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda where there is one if not given")] = None,
) -> None:
    """Measures what `explain` and `fuse` need to know of this device; takes about a minute."""
    from onepass.pricing.calibrate import calibrate as measure

    make_directory_of(output)
    profile = measure(parse_device(device))
    output.write_text(profile.to_json(), encoding="utf-8")
    console.print(f"{profile.name}: {profile.bandwidth / 1e9:,.0f} GB/s; wrote {output}")


@app.command("docs")
def write_docs(
    output: Annotated[Path, typer.Option(metavar="FILE", help="the language reference")] = Path("docs/language.md"),
    results: Annotated[bool, typer.Option(help="also fill docs/results.md and README.md from bench/results")] = False,
) -> None:
    """Writes the language reference from the words' descriptors."""
    output.write_text(docs.language(), encoding="utf-8")
    console.print(f"wrote {output}")
    if results:
        console.print(f"filled docs/results.md and README.md from {docs.fill_results(Path())} files of results")


@app.command()
def info() -> None:
    """Says what this machine offers: versions, SIMD target, compiler, NVRTC, GPUs, and where kernels are cached."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None)
    for name, value in machine_facts():
        table.add_row(name, value)
    console.print(table)


def machine_facts() -> Iterator[tuple[str, str]]:
    """What there is, by name."""
    native = _native.info()
    yield "onepass", onepass.__version__
    yield "torch", torch.__version__
    yield "SIMD target", native["simd_target"]
    yield "cache", native["cache_directory"]
    if prebuilt := len([*Path(native["prebuilt_directory"]).glob("*.cubin")]):
        yield "prebuilt", f"{prebuilt} CUDA kernels in {native['prebuilt_directory']}"
    yield (
        "C++ compiler",
        native["compiler"] or "none: lines outside the ahead-of-time table run as PyTorch operators on the CPU",
    )
    yield "NVRTC", find_nvrtc() or "none: CUDA kernels cannot be compiled"
    for index in range(torch.cuda.device_count()):
        chip = torch.cuda.get_device_properties(index)
        memory = docs.size(chip.total_memory)
        yield f"GPU {index}", f"{chip.name}, sm_{chip.major}{chip.minor}, {chip.multi_processor_count} SMs, {memory}"
    if not torch.cuda.is_available():
        yield "GPU", "none"


def find_nvrtc() -> str | None:
    """NVRTC's version and path."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}, {path}"


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

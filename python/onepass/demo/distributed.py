"""`onepass demo-distributed`: a transformer's block trained on several ranks, PyTorch's modules beside this package's.

On two GPUs or more by NCCL, else by gloo in two processes on the CPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Column, Table

from onepass.demo.block import Size, Training, ways_for

__all__ = ["Row", "run"]

TOLERANCE = 1e-5  # of a loss, relative; seen on the CPU: 2e-7
FOR_CURVES = Size(features=64, heads=8, hidden=256, batch=8, tokens=16)
FOR_TIMES = {
    "cpu": Size(features=256, heads=8, hidden=1024, batch=8, tokens=128),
    "cuda": Size(features=2048, heads=16, hidden=8192, batch=16, tokens=2048),
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}  # that are timed; curves are float32
NOTES = """loss: of the last step. distance: the largest between the two
curves, relative to eager's. ms: of a step, the median."""


@dataclass(frozen=True)
class Row:
    """Of a way to train; pairs are eager's and fused's. seconds: of a step."""

    way: str
    losses: tuple[list[float], list[float]]
    seconds: tuple[float, float]

    @property
    def distance(self) -> float:
        """Infinite where a loss is no number."""
        eager, fused = map(torch.tensor, self.losses)
        return ((fused - eager) / eager).abs().nan_to_num(torch.inf).max().item()

    @property
    def failed(self) -> bool:
        return self.distance > TOLERANCE


def run(steps: int = 50, rounds: int = 10, console: Console | None = None) -> int:
    """Trains a block every way that there are ranks for, and prints what it finds.

    Args:
        steps: of the loss curves.
        rounds: of which the median time counts.
        console: where to print.

    Returns:
        0 if every loss is PyTorch's up to rounding, else 1.
    """
    console = console or Console()
    count = torch.cuda.device_count()
    device, ranks = ("cuda", 1 << min(count, 8).bit_length() - 1) if count > 1 else ("cpu", 2)
    with tempfile.TemporaryDirectory() as directory, console.status(f"training on {ranks} ranks"):
        # Such processes leave without taking the interpreter apart: gloo's threads ask for it, to free a tensor that
        # Python knew, whenever they come to it, and a thread that asks too late aborts the process.
        multiprocessing.start_processes(
            _train, (ranks, device, directory, steps, rounds), nprocs=ranks, start_method="forkserver"
        )
        told = json.loads((Path(directory) / "rows").read_text())
    rows = [Row(**row) for row in told]
    console.print(report(rows, device, ranks, steps))
    console.print(NOTES)
    failed = sum(row.failed for row in rows)
    verdict = f"{len(rows) - failed} of {len(rows)} loss curves within {TOLERANCE:.0e} of PyTorch's over {steps} steps"
    style = "bold red" if failed else "bold green"
    console.print(f"{'failed' if failed else 'passed'}: {verdict}", style=style, highlight=False)
    return int(failed > 0)


def _train(rank: int, ranks: int, device: str, directory: str, steps: int, rounds: int) -> None:
    """On every rank; the first one writes what was found."""
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    rows = []
    for way in ways_for(ranks):
        losses = tuple(Training(FOR_CURVES, fused, way, device).curve(steps) for fused in (False, True))
        rows.append(Row(way, losses, times(way, device, rounds)))
    if rank == 0:
        (Path(directory) / "rows").write_text(json.dumps([asdict(row) for row in rows]))
    dist.barrier()  # none leaves while another one still has to
    dist.destroy_process_group()


def times(way: str, device: str, rounds: int) -> tuple[float, float]:
    """Median seconds of a step, eager and fused, which take turns, after three rounds that do not count."""
    trainings = [Training(FOR_TIMES[device], fused, way, device, DTYPES[device]) for fused in (False, True)]
    x = trainings[0].batch()
    taken: list[list[float]] = [[], []]
    for number in range(3 + rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            dist.barrier()
            begin = time.perf_counter()
            trainings[which].step(x)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 3:
                taken[which].append(time.perf_counter() - begin)
    return statistics.median(taken[0]), statistics.median(taken[1])


def report(rows: list[Row], device: str, ranks: int, steps: int) -> Table:
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    names = ("loss\neager", "\nfused", "distance", "ms\neager", "\nfused", "speed-\nup")
    table = Table(
        Column(f"{steps} steps"),
        *(Column(name, justify="right", no_wrap=True) for name in names),
        title=f"A transformer's block on {ranks} ranks of {where}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    for row in rows:
        distance = f"[red]{row.distance:.1e}[/]" if row.failed else f"{row.distance:.1e}"
        eager, fused = row.seconds
        table.add_row(
            row.way,
            *(f"{curve[-1]:.6f}" for curve in row.losses),
            distance,
            f"{eager * 1e3:.1f}",
            f"{fused * 1e3:.1f}",
            f"{eager / fused:.2f}x",
        )
    return table

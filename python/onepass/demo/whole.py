"""The whole encoder as it is and fused: the same embeddings, the times, and what `onepass.fuse` has put into it."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Group
from rich.table import Table
from torch import Tensor

import onepass
from onepass.demo.encoder import Encoder

__all__ = ["report"]

TOLERANCE = 1e-4
"""Of unit vectors' numbers, in float32."""


def report(encoder: Encoder, sentences: Sequence[str], device: torch.device, rounds: int) -> Group:
    """What was fused, and how the two compare.

    Raises:
        RuntimeError: if their embeddings differ.
    """
    model = copy.deepcopy(encoder.model).to(device)
    batch = encoder.tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt").to(device)
    fused = onepass.fuse(copy.deepcopy(model))
    seconds, results = _compare({"eager": model, "fused": fused}, batch, rounds)
    difference = (results["fused"] - results["eager"]).abs().max().item()
    if not difference <= TOLERANCE * results["eager"].abs().max().item():
        raise RuntimeError(f"the fused model's result differs from the model's by {difference:.1e}")
    said = (
        f"onepass.fuse(model) on {device.type}: {1e3 * seconds['eager']:.1f} ms as it is, "
        f"{1e3 * seconds['fused']:.1f} ms fused, results differ by at most {difference:.0e}"
    )
    return Group(said, _lines(fused))


@torch.no_grad()
def _compare(models: dict, batch, rounds: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Median seconds and last hidden states, in turn."""
    results = {name: model(**batch).last_hidden_state for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            began = time.perf_counter()
            model(**batch).last_hidden_state.sum().item()  # the device is done
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(samples) for name, samples in times.items()}, results


def _lines(fused: torch.nn.Module) -> Table:
    """80 characters wide."""
    table = Table("times", "operators", "line", box=None, padding=(0, 1, 0, 0), pad_edge=False, width=80)
    counts: dict[tuple[str, int], int] = {}
    for found in onepass.report(fused).lines:
        counts[found.line, found.operators] = counts.get((found.line, found.operators), 0) + 1
    for (line, operators), count in counts.items():
        table.add_row(str(count), str(operators), line)
    return table

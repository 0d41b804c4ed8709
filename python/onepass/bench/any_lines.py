"""The suite "any": lines that nobody tuned, of random words, lengths and dtypes, the same in every run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from onepass.bench.patterns import Case, Shape
from onepass.bench.programs import Program
from onepass.bench.report import DIRECTIONS, OURS, failures, fraction, speed_up, title
from onepass.bench.report import cases as rows_of
from onepass.line import parsed

__all__ = ["ANY_LINES", "AnyLine", "quantiles", "random_lines", "show"]

COUNT, SEED = 200, 46
ELEMENTS = {"cuda": 2**26, "cpu": 2**21}  # of x
SHORTEST, LONGEST = 64, 2**18
ACTIVATIONS = (
    *("gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "relu_squared", "quick_gelu", "softplus", "mish", "hardswish"),
    *("elu(1)", "softsign", "softcap(5)", "mul(1.5)"),
)
"""Without those whose gradient jumps at 0, where rounding decides on it, and those of a part of the numbers."""
WITH_OPERANDS = ("bias", "scale", "add", "times", "gate(silu)", "gate(gelu)", "gated(sigmoid)")
ROW_WORDS = ("layer_norm(1e-5)", "rms_norm(1e-6)", "softmax", "log_softmax", "l2_norm")
ENDINGS = ("logsumexp", "entropy", "mean", "cross_entropy")
DTYPES = (*(torch.bfloat16,) * 7, torch.float16, *(torch.float32,) * 2)
STEPS = (64, 64, 8, 1)  # lengths are multiples of one of these
WORST = 10


@dataclass(frozen=True)
class AnyLine(Program):
    """A line beside its composition of PyTorch's operators, of which torch.compile makes kernels of its own."""

    suite = "any"


def composed(text: str) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """What the line computes, in float32 within."""
    return lambda *inputs: parsed(text).reference(*inputs)


def random_lines(count: int = COUNT, seed: int = SEED) -> tuple[AnyLine, ...]:
    """So many lines, each of one shape and dtype."""
    draw = random.Random(seed)
    return tuple(of_one(draw, number) for number in range(count))


def of_one(draw: random.Random, number: int) -> AnyLine:
    text, length, dtype = words(draw), columns(draw), draw.choice(DTYPES)
    of_device = {device: (Case(shape(length, elements), dtype),) for device, elements in ELEMENTS.items()}
    return AnyLine(f"any_{number:03}", text, composed(text), **of_device)


def words(draw: random.Random) -> str:
    """Up to three words, most often a row word and up to three more, now and then a sum that is kept and a second
    norm, or an ending."""
    found = some(draw)
    if not found or draw.random() < 0.7:
        found += [draw.choice(ROW_WORDS), *some(draw)]
    if draw.random() < 0.15:
        found += ["add", "keep", draw.choice(ROW_WORDS[:2]), *some(draw, 1)]
    if draw.random() < 0.15:
        found.append(draw.choice(ENDINGS))
    return " | ".join(found)


def some(draw: random.Random, most: int = 3) -> list[str]:
    return [draw.choice(draw.choice((ACTIVATIONS, WITH_OPERANDS))) for _ in range(draw.randint(0, most))]


def columns(draw: random.Random) -> int:
    """As many lengths between 64 and 128 as between 131072 and 262144; none a power of two."""
    step = draw.choice(STEPS)
    while True:
        length = round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST))) / step) * step
        if length >= SHORTEST and length & (length - 1):
            return length


def shape(length: int, elements: int) -> Shape:
    return max(elements // length, 1), length


ANY_LINES = random_lines()


def quantiles(shares: list[float]) -> dict[str, float]:
    """The least, a twentieth, a quarter, the median."""
    ordered = sorted(shares)
    at = {"least": 0.0, "5 %": 0.05, "25 %": 0.25}
    return {name: ordered[int(part * (len(ordered) - 1))] for name, part in at.items()} | {
        "median": statistics.median(ordered)
    }


def show(results: dict[str, Any], console: Console) -> None:
    """Quantiles of the shares of what a copy of the same size reaches, how many torch.compile is ahead of, and the
    lines that are farthest off."""
    every = rows_of(results)
    console.print(title(results))
    for direction in DIRECTIONS:
        key = f"{direction}_same_size_fraction"
        timed = [(found[OURS][key], case, found) for case, found in every.items() if OURS in found and found[OURS][key]]
        if not timed:
            continue
        gains = [gain for *_, found in timed if (gain := speed_up(found, direction)) is not None]
        behind = sum(gain < 1 for gain in gains)
        shares = ", ".join(f"{name} {fraction(share)}" for name, share in quantiles([t[0] for t in timed]).items())
        peers = f"; another is ahead in {behind} of {len(gains)}" if gains else ""
        console.print(f"{direction}, {len(timed)} lines, share of a copy of the same size: {shares}{peers}")
        console.print(farthest_off(sorted(timed, key=lambda t: t[0])[:WORST], direction))
    for text in failures(results):
        console.print(text, markup=False, highlight=False)


def farthest_off(timed: list[tuple[float, tuple[str, str, str], dict[str, Any]]], direction: str) -> Table:
    """The lines with the least shares; gain: the best other's time over ours; what limits their kernels."""
    table = Table(title=f"{direction}, farthest off", title_justify="left", box=box.SIMPLE)
    for head in ("share", "gain", "shape", "dtype", "registers, threads an SM, flops", "line"):
        table.add_column(head, overflow="fold")
    for share, (_, of, dtype), found in timed:
        gain, ours = speed_up(found, direction), found[OURS]
        said = cause(ours.get("kernels") or [], direction)
        table.add_row(fraction(share), "" if gain is None else f"{gain:.2f}x", of, dtype, said, ours["line"])
    return table


def cause(kernels: list[dict[str, Any]], direction: str) -> str:
    """Of each kernel: registers of a thread and bytes that they had no room for, threads that an SM has room for, flops
    of an element beside the row word."""
    own = [kernel for kernel in kernels if kernel["backward"] == (direction == "backward")]
    spilled = [f" and {kernel['spilled']} B" if kernel["spilled"] else "" for kernel in own]
    return "; ".join(
        f"{kernel['registers']}{beside}, {kernel['threads']}, {kernel['flops']}" for kernel, beside in zip(own, spilled)
    )

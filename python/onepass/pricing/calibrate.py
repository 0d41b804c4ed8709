"""Measures what :class:`Profile` says of a device: `onepass calibrate`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.line import Line
from onepass.pricing.profile import Profile, Rates
from onepass.pricing.timing import Clock, Run, clock_for, host_time

__all__ = ["STEPS", "calibrate"]

LENGTHS = {"cuda": (256, 1024, 4096, 16384), "cpu": (256, 1024, 4096)}
LINE_LENGTHS = {"cuda": (64, 256, 1024, 4096, 16384, 65536, 262144), "cpu": (256, 1024, 4096)}
ELEMENTS = {"cuda": 2**26, "cpu": 2**22}
DTYPES = (torch.float32, torch.bfloat16)
PRODUCT = {"cuda": 8192, "cpu": 960}  # on the CPU no power of two, whose rows share a few sets of a cache

Operator = tuple[Callable[..., Tensor], int, tuple[int, int], tuple[int, int]]
"""A function of x and columns or tensors, how many tensors beside x it takes, and how many tensors of x's size its
forward and its backward read and write."""

OPERATORS: dict[str, Operator] = {
    "add": (lambda x, r: x + r, 1, (2, 1), (0, 0)),
    "relu": (F.relu, 0, (1, 1), (2, 1)),
    "tanh": (torch.tanh, 0, (1, 1), (2, 1)),
    "sigmoid": (torch.sigmoid, 0, (1, 1), (2, 1)),
    "silu": (F.silu, 0, (1, 1), (2, 1)),
    "gelu": (F.gelu, 0, (1, 1), (2, 1)),
    "pow": (lambda x: x.pow(2), 0, (1, 1), (2, 1)),
    "mean": (lambda x: x.mean(-1, keepdim=True), 0, (1, 0), (0, 1)),
    "sum": (lambda x: x.sum(tuple(range(x.dim() - 1))), 0, (1, 0), (0, 1)),
    "dropout": (lambda x: F.dropout(x, 0.1), 0, (1, 1), (2, 1)),
    "softmax": (lambda x: torch.softmax(x, -1), 0, (1, 1), (2, 1)),
    "layer_norm": (lambda x, g, b: F.layer_norm(x, x.shape[-1:], g, b), -2, (1, 1), (2, 1)),
    "group_norm": (lambda *tensors: _groups(*tensors), -2, (1, 1), (2, 1)),
    "rms_norm": (lambda x, g: F.rms_norm(x, x.shape[-1:], g), -1, (1, 1), (2, 1)),
}
"""A negative count is one of columns."""


def _groups(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Rows are channels, of which two are a group."""
    return F.group_norm(x.view(-1, 64, x.shape[-1]), 32, g[:64], b[:64], 1e-5).view(x.shape)


LINES = {
    "": "mul(0.5) | add",
    "activation": "gate(silu)",
    "column activation": "bias | gelu",
    "dropout": "dropout(0.1) | add",
    "dropout activation": "gelu | dropout(0.1) | add",
    "dropout column": "bias | dropout(0.1) | add",
    "norm column": "rms_norm(1e-6) | scale",
    "norm column mean": "layer_norm(1e-5) | scale | bias",
    "norm column activation mean": "layer_norm(1e-5) | scale | bias | gelu",
    "softmax": "mul(0.5) | softmax",
    "softmax dropout": "mul(0.5) | softmax | dropout(0.1)",
}
"""A line for each set of features."""
STARTS = {"cuda": ((1, 4096), (64, 1024), (512, 4096)), "cpu": ((1, 4096), (64, 1024))}
"""Shapes so small that launches count; on the CPU, that caches hold."""
STEPS = 2 + len(OPERATORS) + len(LINES)
"""What a calibration says: copies, each operator, each line, products."""


def calibrate(
    device: torch.device | str | None = None, seconds: float = 0.1, said: Callable[[str], None] = lambda step: None
) -> Profile:
    """Times PyTorch's operators and lines on a device, forward and backward, for some row lengths and dtypes.

    Args:
        device: "cuda" or "cpu"; CUDA where there is one if None.
        seconds: that each measurement lasts. All take some two minutes.
        said: is called with the name of each of the STEPS, as it begins.
    """
    said("copies, calls")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    clock = clock_for(device)
    fixed = _fixed(clock, device, seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    x = torch.randn(8, 64, device=device)
    line = Line("gelu_tanh")
    host = host_time({"operator": lambda: torch.relu(x), "line": lambda: line(x)}, device)
    base = Profile(name, clock.copy_bytes_per_second, fixed, host["operator"], host["line"], {})
    rates = {
        "operators": {},
        "lines": {},
        "starts": {},
    }
    for key, operator in OPERATORS.items():
        said(key)
        rates["operators"][key] = _rates(base, clock, device, seconds, *operator)
    for key, text in LINES.items():
        said(text)
        rates["lines"][key], rates["starts"][key] = _rates_of_line(base, clock, device, seconds, text)
    said("products")
    measured = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "method": clock.method}
    found = {str(t).removeprefix("torch."): _products(clock, device, seconds, t) for t in DTYPES}
    rates["products"] = {name: library for name, (library, _) in found.items()}
    rates["own_products"] = {name: own for name, (_, own) in found.items() if own is not None}
    return Profile(**{**vars(base), **rates, "measured": measured})


def _fixed(clock: Clock, device: torch.device, seconds: float) -> float:
    """What a copy of nearly nothing takes."""
    source, target = torch.ones(2**12, device=device), torch.ones(2**12, device=device)
    return clock.median({"copy": Run(lambda: target.copy_(source))}, seconds)["copy"]


def _products(clock: Clock, device, seconds: float, dtype: torch.dtype) -> tuple[float, float | None]:
    """Operations a second of a linear layer, and of a line of it that has products of its own, behind the packing of
    its matrix."""
    n, line = PRODUCT[device.type], Line("linear")
    x, weight = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    runs = {"library": Run(lambda: F.linear(x, weight))}
    if line.plan((n, n), dtype, n, device=device).strategy == "panels":
        runs["own"] = Run(lambda: line(x, weight))
    times = clock.median(runs, 3 * seconds)
    if "own" in times:
        times["own"] -= 2 * weight.nbytes / clock.copy_bytes_per_second
    return tuple(2 * n**3 / times[name] if name in times else None for name in ("library", "own"))


def _rates(base: Profile, clock: Clock, device, seconds: float, function, takes: int, forward, backward) -> Rates:
    rates: Rates = {}
    for dtype in DTYPES:
        points = []
        for columns in LENGTHS[device.type]:
            shape = ELEMENTS[device.type] // columns, columns
            others = [shape] * takes if takes > 0 else [shape[1:]] * -takes
            x, *others = _inputs(device, dtype, shape, *others)
            times = _times(clock, seconds, function, x, *others)
            bytes = [x.nbytes * sum(side) for side in (forward, backward)]
            points.append((columns, *map(lambda t, b: _share(base, t, b), times, bytes)))
        rates[str(dtype.itemsize)] = points
    return rates


def _rates_of_line(base: Profile, clock: Clock, device, seconds: float, text: str) -> tuple[Rates, Rates]:
    """Shares of copy's bandwidth by row length, and seconds that small tensors take beside their bytes'."""
    rates: Rates = {}
    starts: Rates = {}
    for dtype in DTYPES:

        def timed(shape: tuple[int, int], dtype=dtype) -> list[tuple[float, float]]:
            """Seconds, and those of a copy of as many bytes; forward and backward."""
            line = Line(text)
            of = {"tensor": shape, "column": shape[1:]}
            inputs = _inputs(device, dtype, shape, *(of[w.operand] for w in line.words if w.operand != "none"))
            cost = line.cost(shape, dtype)
            bytes = cost.forward.bytes, cost.backward.bytes
            return [(t, b / base.bandwidth) for t, b in zip(_times(clock, seconds, line, *inputs), bytes)]

        small = [(math.prod(shape), *(t - copy for t, copy in timed(shape))) for shape in STARTS[device.type]]
        starts[str(dtype.itemsize)] = [(numbers, *(max(s, 0.0) for s in both)) for numbers, *both in small]
        rates[str(dtype.itemsize)] = [
            (columns, *(round(copy / max(t - s, 0.05 * t), 3) for (t, copy), s in zip(both, small[-1][1:])))
            for columns in LINE_LENGTHS[device.type]
            for both in [timed((ELEMENTS[device.type] // columns, columns))]
        ]
    return rates, starts


def _share(base: Profile, seconds: float, bytes: float) -> float:
    """Of copy's bandwidth, behind what a kernel takes however small it is."""
    moving = max(seconds - base.fixed, 0.05 * seconds)
    return round(bytes / moving / base.bandwidth, 3) if bytes else 1.0


def _inputs(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def _times(clock: Clock, seconds: float, function, *inputs: Tensor) -> tuple[float, float]:
    result = function(*inputs)
    upstream = torch.randn_like(result)
    runs = {
        "forward": Run(lambda: function(*inputs)),
        "backward": Run(lambda: torch.autograd.grad(result, inputs, upstream, retain_graph=True)),
    }
    times = clock.median(runs, seconds)
    return times["forward"], times["backward"]

"""Measures what :class:`Profile` says of a device: `onepass calibrate`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.advice.profile import Profile, Rates
from onepass.bench.timing import Clock, Run, clock_for, host_time
from onepass.line import Line

__all__ = ["calibrate"]

LENGTHS = {"cuda": (256, 1024, 4096, 16384), "cpu": (256, 1024, 4096)}
ELEMENTS = {"cuda": 2**26, "cpu": 2**22}
DTYPES = (torch.float32, torch.bfloat16)
PRODUCT = {"cuda": 8192, "cpu": 1024}

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
    "rms_norm": (lambda x, g: F.rms_norm(x, x.shape[-1:], g), -1, (1, 1), (2, 1)),
}
"""A negative count is one of columns."""

LINES = {
    "elementwise": "bias | gelu_tanh",
    "dropout": "dropout(0.1) | add",
    "norm": "layer_norm(1e-5) | scale | bias",
    "softmax": "mul(0.5) | softmax",
}
"""A line for each kind."""


def calibrate(device: torch.device | str | None = None, seconds: float = 0.1) -> Profile:
    """Times PyTorch's operators and lines on a device, forward and backward, for some row lengths and dtypes.

    Args:
        device: "cuda" or "cpu"; CUDA where there is one if None.
        seconds: that each measurement lasts. All take about a minute.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    clock = clock_for(device)
    fixed = _fixed(clock, device, seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    x = torch.randn(8, 64, device=device)
    line = Line("gelu_tanh")
    host = host_time({"operator": lambda: torch.relu(x), "line": lambda: line(x)}, device)
    base = Profile(name, clock.copy_bytes_per_second, fixed, host["operator"], host["line"], {})
    rates = {
        "operators": {key: _rates(base, clock, device, seconds, *operator) for key, operator in OPERATORS.items()},
        "lines": {key: _rates_of_line(base, clock, device, seconds, text) for key, text in LINES.items()},
    }
    measured = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "method": clock.method}
    products = {str(t).removeprefix("torch."): _product(clock, device, seconds, t) for t in DTYPES}
    return Profile(**{**vars(base), **rates, "products": products, "measured": measured})


def _fixed(clock: Clock, device: torch.device, seconds: float) -> float:
    """What a copy of nearly nothing takes."""
    source, target = torch.ones(2**12, device=device), torch.ones(2**12, device=device)
    return clock.median({"copy": Run(lambda: target.copy_(source))}, seconds)["copy"]


def _product(clock: Clock, device: torch.device, seconds: float, dtype: torch.dtype) -> float:
    n = PRODUCT[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / clock.median({"product": Run(lambda: a @ b)}, 3 * seconds)["product"]


def _rates(base: Profile, clock: Clock, device, seconds: float, function, takes: int, forward, backward) -> Rates:
    rates: Rates = {}
    for dtype in DTYPES:
        points = []
        for columns in LENGTHS[device.type]:
            x, *others = _inputs(device, columns, dtype, max(takes, 0), max(-takes, 0))
            times = _times(clock, seconds, function, x, *others)
            bytes = [x.nbytes * sum(side) for side in (forward, backward)]
            points.append((columns, *map(lambda t, b: _share(base, t, b), times, bytes)))
        rates[str(dtype.itemsize)] = points
    return rates


def _rates_of_line(base: Profile, clock: Clock, device, seconds: float, text: str) -> Rates:
    rates, line = {}, Line(text)
    takes = [word.operand for word in line.words if word.operand != "none"]
    for dtype in DTYPES:
        points = []
        for columns in LENGTHS[device.type]:
            x, *others = _inputs(device, columns, dtype, takes.count("tensor"), takes.count("column"))
            cost = line.cost(x.shape, dtype)
            times = _times(clock, seconds, line, x, *others)
            kernels = 1, 1 + ("column" in takes)
            bytes = cost.forward.bytes, cost.backward.bytes
            points.append((columns, *map(lambda t, b, k: _share(base, t, b, k), times, bytes, kernels)))
        rates[str(dtype.itemsize)] = points
    return rates


def _share(base: Profile, seconds: float, bytes: float, kernels: int = 1) -> float:
    """Of copy's bandwidth, behind what a kernel takes however small it is."""
    moving = max(seconds - kernels * base.fixed, 0.05 * seconds)
    return round(bytes / moving / base.bandwidth, 3) if bytes else 1.0


def _inputs(device, columns: int, dtype: torch.dtype, tensors: int, vectors: int) -> list[Tensor]:
    rows = ELEMENTS[device.type] // columns
    shapes = [(rows, columns)] * (1 + tensors) + [(columns,)] * vectors
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

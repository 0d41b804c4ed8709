"""One pattern through PyTorch's chain and through the fused line: errors, times, memory held for backward."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepass.bench.accuracy import RATIO
from onepass.bench.cases import saved_bytes
from onepass.call import fused
from onepass.demo.patterns import Eager, Pattern
from onepass.line import Line
from onepass.reference import dropout, dropout_numbers

__all__ = ["Pair", "Row", "measure"]

# Below so many machine epsilons of a tensor's largest value an error counts as none. The gradient of a norm's weight is
# a sum that can cancel to a few per cent of its terms, where their rounding to fp32 alone leaves up to 4.5 of them.
UNITS = {torch.float32: 8.0, torch.bfloat16: 1.0}


@dataclass(frozen=True)
class Pair:
    """A quantity of PyTorch's chain and of the fused line."""

    eager: float
    fused: float


@dataclass(frozen=True)
class Row:
    """What was found for a pattern at a dtype, all its calls together.

    error: the largest, of every result and gradient, relative to the exact tensor's largest magnitude.
    compared, failed: how many tensors, and how many of them are further from the exact ones than the contract allows.
    seconds: forward and backward, the median. held: bytes that the graph keeps between them, inputs included.
    """

    error: Pair
    compared: int
    failed: int
    seconds: Pair
    bytes: int
    held: Pair


@dataclass(frozen=True)
class Call:
    """The tensors of one call, and the gradients that arrive from upstream."""

    inputs: list[Tensor]
    upstream: list[Tensor]

    def forward(self, function: Callable) -> tuple[Tensor, ...]:
        results = function(*self.inputs)
        return results if isinstance(results, tuple) else (results,)

    def backward(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, [t for t in self.inputs if t.requires_grad], self.upstream)

    def run(self, function: Callable) -> list[Tensor]:
        """Every result and gradient."""
        results = self.forward(function)
        return [*(r.detach() for r in results), *self.backward(results)]

    def double(self) -> Call:
        return Call([leaf(t.detach(), torch.float64) for t in self.inputs], [g.double() for g in self.upstream])


def measure(pattern: Pattern, device: torch.device, dtype: torch.dtype, rounds: int) -> Row:
    """Runs every call of the pattern both ways."""
    line = Line(pattern.line)
    calls = []
    for number, tensors in enumerate(pattern.calls):
        inputs = [leaf(t.detach().to(device), dtype) for t in tensors]
        generator = torch.Generator(device).manual_seed(number)
        upstream = [
            torch.randn(inputs[0].shape, generator=generator, dtype=dtype, device=device)
            for _ in range(1 + line.keeps)
        ]  # fmt: skip
        calls.append(Call(inputs, upstream))

    def ours(*tensors: Tensor):
        return fused(pattern.line, *tensors)

    errors = [pair for call in calls for pair in call_errors(line, pattern.eager, ours, call)]

    def held(function: Callable) -> int:
        return saved_bytes(lambda: [call.forward(function) for call in calls])

    floor = UNITS[dtype] * torch.finfo(dtype).eps
    return Row(
        error=Pair(max(e.eager for e in errors), max(e.fused for e in errors)),
        compared=len(errors),
        failed=sum(e.fused > max(RATIO * e.eager, floor) for e in errors),
        seconds=times(pattern.eager, ours, calls, device, rounds),
        bytes=pattern.bytes_to_move(dtype),
        held=Pair(held(pattern.eager), held(ours)),
    )


def leaf(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers at another dtype; a bool mask stays as it is."""
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format).requires_grad_()


def call_errors(line: Line, eager: Eager, ours: Callable, call: Call) -> list[Pair]:
    """Of each result and gradient, against the line in fp64. All three drop the same elements."""
    x = call.inputs[0]
    state, masked = None, {}
    if line.has_dropout:
        torch.manual_seed(x.numel())
        state = torch.ops.onepass.dropout_state(x)
        numbers = dropout_numbers(x.shape, state, 0, x.device)
        masked = {"dropout": lambda value, p: dropout(value, p, numbers)}
        torch.manual_seed(x.numel())  # the fused line draws the same state
    fused_tensors = call.run(ours)
    eager_tensors = call.run(lambda *tensors: eager(*tensors, **masked))
    exact_tensors = call.double().run(lambda *tensors: line.reference(*tensors, dropout_state=state))
    return [
        Pair(relative_error(e, exact), relative_error(f, exact))
        for e, f, exact in zip(eager_tensors, fused_tensors, exact_tensors, strict=True)
    ]


def relative_error(tensor: Tensor, exact: Tensor) -> float:
    """The largest, in units of the exact tensor's largest magnitude; infinite where a number is none."""
    error = ((tensor.double() - exact).abs().max() / exact.abs().max()).item()
    return error if math.isfinite(error) else math.inf


def times(eager: Eager, ours: Callable, calls: list[Call], device: torch.device, rounds: int) -> Pair:
    """Median seconds of all calls, forward and backward; the two take turns, after a round that does not count."""
    taken: dict[Callable, list[float]] = {eager: [], ours: []}
    for number in range(1 + rounds):
        for function in (eager, ours) if number % 2 else (ours, eager):
            seconds = timed(function, calls, device)
            if number:
                taken[function].append(seconds)
    return Pair(statistics.median(taken[eager]), statistics.median(taken[ours]))


def timed(function: Callable, calls: list[Call], device: torch.device) -> float:
    if device.type == "cuda":
        with torch.cuda.device(device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for call in calls:
                call.backward(call.forward(function))
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
    begin_time = time.perf_counter()
    for call in calls:
        call.backward(call.forward(function))
    return time.perf_counter() - begin_time

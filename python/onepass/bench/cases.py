"""One pattern of one shape and dtype: every provider checked, measured for memory, and timed in turn."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from onepass import _native
from onepass.bench.accuracy import Judge, WrongResult
from onepass.bench.patterns import Case, Pattern
from onepass.bench.providers import Provider, Trial
from onepass.bench.report import OURS
from onepass.pricing.timing import Clock, Run, host_time

__all__ = ["Row", "clean", "host_case", "memory", "run_case", "saved_bytes", "says", "time_all"]

FLOOR = "floor"


@dataclass
class Row:
    """What one provider did. A fraction is of the copy bandwidth, or of what the same bytes reach (with `linear`: of
    what the matrix products alone reach)."""

    pattern: str
    line: str
    shape: list[int]
    dtype: str
    layout: str
    out_features: int
    provider: str
    forward_us: float | None = None
    backward_us: float | None = None
    forward_fraction: float | None = None
    backward_fraction: float | None = None
    forward_same_size_fraction: float | None = None
    backward_same_size_fraction: float | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    error_ratio: float | None = None
    failure: str | None = None
    kernels: list[dict[str, Any]] | None = None
    """This package's own of rows and tiles on CUDA, forward's and backward's: registers of a thread, bytes that they
    had no room for, threads that an SM has room for, flops of an element."""

    @classmethod
    def of(cls, pattern: Pattern, case: Case, provider: Provider) -> Self:
        """With nothing measured yet."""
        dtype = str(case.dtype).removeprefix("torch.")
        return cls(pattern.name, pattern.line, list(case.shape), dtype, case.layout, case.out_features, provider.name)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_case(
    pattern: Pattern,
    case: Case,
    device: torch.device,
    providers: list[Provider],
    clock: Clock,
    seconds: float,
    late: bool,
) -> list[Row]:
    """A row for each provider that offers the pattern; what fails says so in its row."""
    rows: dict[str, Row] = {}
    trials: dict[str, Trial] = {}
    with clean(device):
        inputs, judge, reason = [], None, "not run: the time for the whole run was spent"
        if not late:
            try:
                inputs = pattern.inputs(case.shape, case.dtype, device, case.layout, case.out_features)
                judge = Judge(pattern, inputs)
                judge.ask_eager()
            except torch.OutOfMemoryError as error:
                judge, reason = None, says(error)
        for provider in providers:
            row = Row.of(pattern, case, provider)
            try:
                function = provider.build(pattern)
                if function is None:
                    continue
                rows[provider.name] = row
                if judge is None:
                    row.failure = reason
                else:
                    trials[provider.name] = examine(provider, pattern, function, inputs, judge, row)
            except Exception as error:  # a provider may fail in any way, and the others go on
                rows[provider.name] = row
                row.failure = says(error)
        judge = None
        time_all(pattern, inputs, trials, rows, clock, seconds)
        trials.clear()
    return list(rows.values())


def examine(provider: Provider, pattern: Pattern, function, inputs: list[Tensor], judge: Judge, row: Row) -> Trial:
    """Checks the results, then measures the memory; a wrong result raises nothing but stands in the row."""
    try:
        checked = Trial(provider, pattern, function, judge.inputs, judge.upstream)
        row.error_ratio = judge.ratio(judge.errors(checked, provider.keep_probability))
        del checked
    except WrongResult as wrong:
        row.failure = str(wrong)
    trial = Trial(provider, pattern, function, inputs, upstream_of(pattern, inputs))
    has_kernels = provider.name == OURS and trial.inputs[0].is_cuda
    with _native.listening() if has_kernels else contextlib.nullcontext():
        row.saved_bytes, row.peak_bytes = memory(trial)
    row.kernels = _native.tuning("launched") if has_kernels else None
    return trial


def memory(trial: Trial) -> tuple[int | None, int | None]:
    """Bytes that are held for backward (None where there is none), and on CUDA the most of a step beyond its inputs."""
    device = trial.inputs[0].device
    saved = peak = None
    trial.outputs = ()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    if trial.forward_only:
        trial.forward()
    else:
        saved = saved_bytes(trial.refresh)
        trial.backward()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - before
    trial.outputs = ()
    return saved, peak


def saved_bytes(forward: Callable[[], object]) -> int:
    """Of the distinct storages that the graphs hold for backward, inputs among them."""
    held: list[Tensor] = []  # alive until the end, so that no two storages share an address

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def time_all(
    pattern: Pattern,
    inputs: list[Tensor],
    trials: dict[str, Trial],
    rows: dict[str, Row],
    clock: Clock,
    seconds: float,
) -> None:
    """Both directions, providers and the floor in turn."""
    if not trials:
        return
    forward, backward = pattern.traffic(inputs)
    size = inputs[0].numel() * inputs[0].element_size()
    if pattern.contracts:
        floors = tuple(map(Run, pattern.products(inputs)))
    else:
        floors = clock.floor(forward, size), clock.floor(backward, size)
    runs = {name: Run(trial.forward) for name, trial in trials.items()}
    times = clock.median(runs | {FLOOR: floors[0]}, seconds)
    note(rows, "forward", times, forward.bytes / clock.copy_bytes_per_second)
    runs = {}
    for name, trial in trials.items():
        if trial.forward_only:
            continue
        try:
            trial.refresh()
            runs[name] = Run(trial.backward, trial.refresh if trial.overwrites else None)
        except torch.OutOfMemoryError as error:  # the graphs of all providers are held at once
            rows[name].failure = says(error)
    times = clock.median(runs | {FLOOR: floors[1]}, seconds)
    note(rows, "backward", times, backward.bytes / clock.copy_bytes_per_second)


def note(rows: dict[str, Row], direction: str, times: dict[str, float], at_copy_speed: float) -> None:
    """Puts the times, and what share of the copy's speed they are, into the rows."""
    floor = times.pop(FLOOR)
    for name, seconds in times.items():
        setattr(rows[name], f"{direction}_us", float(f"{1e6 * seconds:.5g}"))
        setattr(rows[name], f"{direction}_fraction", float(f"{at_copy_speed / seconds:.4g}"))
        setattr(rows[name], f"{direction}_same_size_fraction", float(f"{floor / seconds:.4g}"))


def upstream_of(pattern: Pattern, inputs: list[Tensor]) -> list[Tensor]:
    """A fixed random gradient for each result, unless the pattern is forward alone."""
    if pattern.forward_only:
        return []
    device, shapes = inputs[0].device, pattern.result_shapes(inputs)
    generator = torch.Generator(device).manual_seed(len(shapes))
    normal = partial(torch.randn, generator=generator, device=device)
    return [normal(shape, dtype=dtype) for shape, dtype in zip(shapes, pattern.result_dtypes(inputs))]


def says(error: BaseException) -> str:
    """An error as one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@contextlib.contextmanager
def clean(device: torch.device) -> Iterator[None]:
    """Leaves no memory and no compiled code behind.

    A graph that torch.compile made may be run twice only where its saved tensors are not its backward's to reuse.
    """
    with torch._functorch.config.patch(donated_buffer=False):
        yield
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def host_case(pattern: Pattern, device: torch.device, providers: list[Provider]) -> list[dict[str, Any]]:
    """Microseconds of host time for a call: inference, and forward with backward, on 4 rows of 64 numbers. A provider
    that does not take them has none, and its failure."""
    attention = any(len(case.shape) > 2 for case in (*pattern.cuda, *pattern.cpu))
    inputs = pattern.inputs((1, 1, 4, 64) if attention else (4, 64), torch.float32, device, out_features=64)
    constants = [t.detach() for t in inputs]
    inference, training, failures = {}, {}, {}
    with clean(device):
        for provider in providers:
            try:
                function = provider.build(pattern)
                if function is None:
                    continue
                trial = Trial(provider, pattern, function, inputs, upstream_of(pattern, inputs))
                with torch.no_grad():
                    function(*constants)
                if not trial.forward_only:
                    forward_and_backward(trial)
                    training[provider.name] = partial(forward_and_backward, trial)
                inference[provider.name] = partial(function, *constants)
            except Exception as error:
                failures[provider.name] = says(error)
        with torch.no_grad():
            inferred = host_time(inference, device)
        trained = host_time(training, device)
    rows: list[dict[str, Any]] = [
        {
            "pattern": pattern.name,
            "provider": name,
            "inference_us": round(1e6 * inferred[name], 2),
            "training_us": round(1e6 * trained[name], 2) if name in trained else None,
        }
        for name in inference
    ]
    return rows + [{"pattern": pattern.name, "provider": name, "failure": text} for name, text in failures.items()]


def forward_and_backward(trial: Trial) -> tuple[Tensor, ...]:
    """One step through autograd, the graph freed."""
    return torch.autograd.grad(trial.forward(), trial.wanted, trial.upstream)

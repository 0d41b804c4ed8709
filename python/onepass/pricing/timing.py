"""Clocks: what is compared runs in turn, round after round, beside a copy of the same bytes; the median counts."""

from __future__ import annotations

import gc
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Clock", "CpuClock", "CudaClock", "Run", "Traffic", "WallClock", "clock_for", "devices", "host_time"]

LEAST, MOST = 5, 200  # rounds
HUGE_PAGE = 2 << 20
CYCLES_PER_US = 2000  # no chip's clock is faster


@dataclass(frozen=True)
class Traffic:
    """What one direction must move: the bytes, and how many tensors of x's shape are read and written."""

    bytes: int
    reads: int
    writes: int


@dataclass
class Run:
    """One competitor: `before` is not timed; what `call` returns is freed outside the timed region."""

    call: Callable[[], object]
    before: Callable[[], object] | None = None
    host_us: float = 300.0  # the last launch took so long


class Clock:
    """Times runs on one device."""

    method: str
    copy_bytes_per_second: float

    def floor(self, traffic: Traffic, size: int) -> Run:
        """What no single pass over memory beats: `size` is that of x in bytes."""
        raise NotImplementedError

    def round(self, runs: dict[str, Run], times: dict[str, list[float]]) -> None:
        """Times each run once, in seconds."""
        raise NotImplementedError

    def median(self, runs: dict[str, Run], seconds: float) -> dict[str, float]:
        """Median seconds of each run, from as many rounds as the time allows."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        begin, rounds = time.perf_counter(), 0
        gc.disable()
        try:
            while rounds < LEAST or (rounds < MOST and time.perf_counter() - begin < seconds):
                self.round({name: runs[name] for name in names}, times)
                names.append(names.pop(0))
                rounds += 1
        finally:
            gc.enable()
        return {name: statistics.median(samples) for name, samples in times.items()}


class WallClock(Clock):
    """Start to finish: from the call on the host until the device is done with it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def finish(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def round(self, runs: dict[str, Run], times: dict[str, list[float]]) -> None:
        for name, run in runs.items():
            if run.before:
                run.before()
            self.finish()
            begin = time.perf_counter()
            result = run.call()
            self.finish()
            times[name].append(time.perf_counter() - begin)
            del result


class CpuClock(WallClock):
    """Wall-clock time; every call writes fresh tensors, as in real use."""

    method = (
        "wall-clock time of each call, providers in turn, median; outputs are fresh tensors. "
        "Same-size: the same reads, and writes into memory that is there, on huge pages."
    )

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sources: list[Tensor] = []
        self.targets: list[Tensor] = []
        source, target = torch.ones(2**24), torch.ones(2**24)
        seconds = self.median({"copy": Run(lambda: target.copy_(source))}, 1.0)["copy"]
        self.copy_bytes_per_second = 2 * source.nbytes / seconds

    def floor(self, traffic: Traffic, size: int) -> Run:
        size += -size % 4  # of whole numbers
        if not self.sources or self.sources[0].nbytes != size:
            self.sources, self.targets = [torch.ones(size // 4) for _ in range(4)], []
        reads, writes = traffic.reads, traffic.writes
        self.targets += [on_huge_pages(size).zero_() for _ in range(writes - len(self.targets))]
        if not writes:  # but numbers of rows
            return Run(lambda: [source.sum() for source in self.sources[:reads]])

        def call() -> list[Tensor]:
            targets = self.targets[:writes]
            given = self.sources[: max(reads, 1)]
            for target in targets[:-1]:
                target.copy_(given[0])
                given = given[1:] if len(given) > 1 else given
            if len(given) == 1:
                targets[-1].copy_(given[0])
            elif len(given) == 2:
                torch.add(*given, out=targets[-1])
            else:
                torch.addcmul(*given[:3], out=targets[-1])
            return targets

        return Run(call)


def on_huge_pages(size: int) -> Tensor:
    """Untouched float32 memory, on huge pages where the system has them. The floor reuses it: where little memory is
    free, the system takes up to a hundred times as long to clear 4 MB as to write them."""
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size // 4)
    area = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets none
    area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + size].view(torch.float32)


class CudaClock(Clock):
    """Device time between two events, with a cold L2 and the launches already in the queue."""

    method = (
        "CUDA events around each call, providers in turn, median; before each a 256 MB buffer is read, so that L2 is "
        "cold, and the device waits until the host has launched. Same-size: a copy that moves the same bytes."
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.ones(2**26, device=device)
        area = min(4 << 30, torch.cuda.get_device_properties(device).total_memory // 8)
        self.source = torch.ones(area, dtype=torch.uint8, device=device)
        self.target = torch.ones(area, dtype=torch.uint8, device=device)
        seconds = self.median({"copy": self._copy(2 * area)}, 0.5)["copy"]
        self.copy_bytes_per_second = 2 * area / seconds

    def floor(self, traffic: Traffic, size: int) -> Run:
        return self._copy(traffic.bytes)

    def _copy(self, total: int) -> Run:
        """Reads half of the bytes and writes as many."""
        area = self.source.numel()
        pieces = [area] * (total // 2 // area) + [total // 2 % area]
        pairs = [(self.target[:n], self.source[:n]) for n in pieces if n]
        return Run(lambda: [target.copy_(source) for target, source in pairs])

    def round(self, runs: dict[str, Run], times: dict[str, list[float]]) -> None:
        events = {}
        for name, run in runs.items():
            if run.before:
                run.before()
            torch.cuda._sleep(int(CYCLES_PER_US * (50 + 1.5 * run.host_us)))
            self.flush.sum()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            started = time.perf_counter()
            begin.record()
            result = run.call()
            end.record()
            run.host_us = min(1e6 * (time.perf_counter() - started), 2000.0)
            del result
            events[name] = begin, end
        torch.cuda.synchronize(self.device)
        for name, (begin, end) in events.items():
            times[name].append(1e-3 * begin.elapsed_time(end))


def devices(name: str | None) -> list[torch.device]:
    """The one asked for, or all kinds that there are."""
    if name is not None:
        return [torch.device(name)]
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def clock_for(device: torch.device) -> Clock:
    """The clock of a device, its copy bandwidth measured."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def host_time(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int = 20) -> dict[str, float]:
    """Host seconds a call: the median over rounds of 20 calls, which the device's queue takes without waiting."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.disable()
    try:
        for _ in range(1 + rounds):
            for name, call in calls.items():
                begin = time.perf_counter()
                for _ in range(20):
                    call()
                times[name].append((time.perf_counter() - begin) / 20)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    finally:
        gc.enable()
    return {name: statistics.median(samples[1:]) for name, samples in times.items()}

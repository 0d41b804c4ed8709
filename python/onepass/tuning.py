"""Measures how a line's kernels share its rows out on the present GPU, and keeps what is faster: `onepass tune`.

A kernel of a line holds so many numbers of a row in a thread, has so many rows in a block, reads so many rows ahead, or
takes a long row in parts. Which of these it does follows from the line, the row's length and the chip, by rules that
were measured on an H200 (src/cuda/row/tuning.h). Tuning measures them all where it runs, as Triton's autotuner does,
but only where it is asked to: a call never measures anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from onepass import _native
from onepass.advice.measure import inputs_for, runs_of
from onepass.line import Line, parsed
from onepass.pricing.timing import Clock, Run, clock_for

__all__ = ["Tuned", "tune", "tune_step"]

ELEMENTS = 2**26
"""Of x, where nobody says how many rows there are: more than any chip's caches hold."""
GAIN = 1.02
"""What a way must be faster by than the rules', to be kept."""
FINALISTS = 3
OFF = 1e-2
"""How far a way's results may be from the rules', as a share of their norm: several roundings to 16 bits."""

Said = Callable[[str, float], None]
"""Is told what is done, and which share of all is behind it."""


@dataclass(frozen=True)
class Tuned:
    """One direction of a line, for a dtype and a class of row lengths.

    Attributes:
        line, backward, dtype: what was measured.
        rows, columns: of its x. What is kept serves all lengths from the last of eight steps between powers of two to
            the next, and any number of rows.
        way: what is kept, in the kernel's terms; "" where the rules' own way was not beaten by 2 %.
        seconds: of a call, by the rules and as it is now.
        tried: how many ways were measured.
    """

    line: str
    backward: bool
    dtype: torch.dtype
    rows: int
    columns: int
    way: str
    seconds: tuple[float, float]
    tried: int


def tune(
    line: str | Line,
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int | None = None,
    training: bool = True,
    device: torch.device | str | None = None,
    said: Said = lambda what, share: None,
) -> list[Tuned]:
    """Measures the ways to compute a line on the present GPU, and keeps the fastest in the kernel cache, which this
    process and all that come use from now on.

    Args:
        line: one without `linear` or `scores`, whose kernels follow from the matrix.
        columns: the length of its rows.
        dtype: of x and the operands.
        rows: how many; such that x has 2^26 elements if None.
        training: backward too.
        device: a CUDA device; the present one if None.
        said: is told what is done, and the share of all that is behind it.

    Returns:
        What was found, forward first.

    Raises:
        LineError: for a line that cannot be read.
        RuntimeError: without a CUDA device; for a dtype or a length that the line does not take; where the cache cannot
            be written.
        ValueError: for a line with a contraction.
    """
    on = _checked("tune", device)
    of = parsed(line) if isinstance(line, str) else line
    if of.weight is not None or of.scores:
        raise ValueError(f"tune(): {of.text!r} has a contraction: tune the words before and behind it as lines")
    _native.dtype_number("tune", dtype)
    shape = (max(ELEMENTS // max(columns, 1), 1) if rows is None else rows), columns
    _native.check_shape(of.text, shape)
    with torch.cuda.device(on):
        clock = clock_for(on)
        runs = runs_of(of, inputs_for(of, shape, dtype, on, training), training)
        calls = _heard_in(lambda: [run.call() for run in runs.values()])
        found = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC compiles without Python's lock
            for number, call in enumerate(calls):
                run = runs["backward" if call["backward"] else "forward"]
                of_all = _share_of(said, number, len(calls))
                found.append(_Search(call, run, clock, pool, of_all).found(of.text, dtype))
    return found


def tune_step(
    step: Callable[[], object], *, device: torch.device | str | None = None, said: Said = lambda what, share: None
) -> list[Tuned]:
    """Runs a function, such as a training step of a fused model, and tunes each line, dtype and class of row lengths
    that it calls on the GPU.

    Args:
        step: runs once here. Backward of a line is tuned where it ran.
        device, said: as :func:`tune` has them.

    Returns:
        What was found. Lines of a kernel's own within `linear` are left out, and those whose row words end in a
        product's features.

    Raises:
        RuntimeError: as :func:`tune` does.
    """
    device = _checked("tune_step", device)
    calls = _heard_in(step)
    learns = {_kind(call) for call in calls if call["backward"]}
    kinds = {_kind(call): call for call in calls if call["line"]}
    found = []
    for number, (kind, call) in enumerate(kinds.items()):
        of_kind = tune(
            call["line"],
            call["columns"],
            getattr(torch, call["dtype"]),
            rows=max(call["rows"], ELEMENTS // 64 // call["columns"], 1),
            training=kind in learns,
            device=device,
            said=_share_of(said, number, len(kinds)),
        )
        for own in calls:  # whose tensors may lie otherwise, have other dtypes, or no gradient
            for tuned in of_kind if _kind(own) == kind else []:
                if tuned.backward == own["backward"]:
                    _keep(own["key"], tuned)
        found += of_kind
    return found


def _checked(function: str, device: torch.device | str | None) -> torch.device:
    if not torch.cuda.is_available():
        raise RuntimeError(f"{function}(): needs a CUDA device: CPU kernels have nothing to tune")
    on = torch.device("cuda" if device is None else device)
    if on.type != "cuda":
        raise RuntimeError(f"{function}(): expected a CUDA device, got {str(on)!r}: CPU kernels have nothing to tune")
    return on


def _share_of(said: Said, number: int, count: int) -> Said:
    """Of one of several."""
    return lambda what, share: said(what, (number + share) / count)


def _keep(key: str, found: Tuned) -> None:
    direction, dtype = "backward" if found.backward else "forward", str(found.dtype).removeprefix("torch.")
    label = f"{direction} {dtype} {found.columns} {found.way or 'as the rules have it'}: {found.line}"
    if not _native.tuning("keep", key, found.way, label)["done"]:
        raise RuntimeError("tune(): the kernel cache cannot be written (ONEPASS_CACHE_DIR names another place)")


def _kind(call: dict) -> tuple[str, str, int]:
    return call["line"], call["dtype"], call["columns"]


def _heard_in(step: Callable[[], object]) -> list[dict]:
    """The calls of kernels of rows and tiles, one of each kind."""
    with _native.listening():
        step()
    return _native.tuning("heard")


class _Search:
    """The fastest way of one kernel: of those that the rules have for any line and length, and of what is near the best
    of them."""

    def __init__(self, call: dict, run: Run, clock: Clock, pool: ThreadPoolExecutor, said: Said) -> None:
        self.call, self.run, self.clock, self.pool, self.said = call, run, clock, pool, said
        self.key, self.tried = call["key"], 0

    def found(self, line: str, dtype: torch.dtype) -> Tuned:
        """Measures, and keeps."""
        try:
            first = self.timed(["", *self.built(_native.tuning("ways", self.key), 0.0)], 0.2)
            best = sorted(first, key=first.get)[:FINALISTS]
            near = [way for at in best[:1] if at for way in _native.tuning("ways", self.key, at)]
            second = self.timed([*best, *self.built([way for way in near if way not in first], 0.5)], 0.2)
            finalists = [way for way in sorted(second, key=second.get)[:FINALISTS] if self.agrees(way)]
            last = self.timed(list(dict.fromkeys(["", *finalists])), 0.3)
        finally:
            self.use("")
        way = min(last, key=last.get)
        if last[""] < GAIN * last[way]:
            way = ""
        rows, columns, backward = self.call["rows"], self.call["columns"], self.call["backward"]
        found = Tuned(line, backward, dtype, rows, columns, way, (last[""], last[way]), self.tried)
        _keep(self.key, found)
        self.said("backward" if backward else "forward", 1.0)
        return found

    def agrees(self, way: str) -> bool:
        """Whether a way gives what the rules' does, but for the order of its sums."""
        results = []
        for name in ("", way):
            self.use(name)
            torch.cuda.manual_seed(0)  # dropout's
            given = self.run.call()
            results.append([t.double() for t in (given if isinstance(given, tuple) else (given,)) if t is not None])
        return all((a - b).norm() <= OFF * b.norm() for a, b in zip(results[1], results[0]))

    def built(self, ways: list[str], begin: float) -> list[str]:
        """Those that compile."""
        done = []

        def build(way: str) -> str | None:
            try:
                _native.tuning("build", self.key, way)
            except RuntimeError:  # more shared memory, say, than the chip has
                return None
            return way

        for number, way in enumerate(self.pool.map(build, ways), 1):
            self.said("compiling", begin + 0.4 * number / len(ways))
            if way is not None:
                done.append(way)
        return done

    def timed(self, ways: list[str], seconds: float) -> dict[str, float]:
        """Median seconds of each, those that do not run left out."""
        runs = {}
        for way in ways:
            try:
                self.use(way)
                self.run.call()
                torch.cuda.synchronize()
            except RuntimeError:
                if not way:
                    raise
                continue
            runs[way] = Run(self.run.call, before=lambda way=way: self.use(way))
        self.tried = max(self.tried, len(runs))
        return self.clock.median(runs, seconds)

    def use(self, way: str) -> None:
        _native.tuning("use", self.key, way)

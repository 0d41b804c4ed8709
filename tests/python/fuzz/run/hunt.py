"""Programs by their seeds, in several processes; what fails is made small."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import queue
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

__all__ = ["Finding", "Summary", "hunt"]


@dataclass
class Finding:
    """A program that fails: how, and the script that shows it (empty where enough of its kind were made small)."""

    seed: int
    kind: str
    text: str
    script: str = ""
    program: str = ""


@dataclass
class Summary:
    """Counts of all programs."""

    programs: int = 0
    statements: int = 0
    with_lines: int = 0
    raises: int = 0
    no_gradient: int = 0
    refused: int = 0
    rounding: int = 0
    findings: list[Finding] = field(default_factory=list)
    torchs_own: Counter = field(default_factory=Counter)
    seconds: float = 0.0

    def __str__(self) -> str:
        kinds = Counter(f.kind for f in self.findings)
        count = max(1, self.programs)
        return (
            f"{self.programs} programs of {self.statements / count:.1f} statements in {self.seconds:.0f} s; "
            f"{self.with_lines} ({self.with_lines / count:.0%}) with lines; {self.raises} that eager refuses, "
            f"{self.no_gradient} without backward in eager, {self.refused} without it in a line; "
            f"{self.rounding} with rounding; "
            f"{sum(self.torchs_own.values())} that Dynamo alone does not run as eager does {dict(self.torchs_own)}; "
            f"{len(self.findings)} findings {dict(kinds)}"
        )


def hunt(programs: int, seed: int, processes: int, then: str = "eager", each: int = 3) -> Iterator[Summary]:
    """Tries as many programs, whose seeds are counted from `seed`; gives the summary as it grows.

    each: how many findings of one kind each process makes small.
    """
    context = multiprocessing.get_context("spawn")
    results, taken = context.Queue(), context.Value("q", 0)
    seeds = list(range(seed, seed + programs))
    places = [context.RawArray("q", [-1, -1]) for _ in range(processes)]

    def started(place):
        worker = context.Process(target=_work, args=(seeds, taken, place, results, then, each), daemon=True)
        worker.start()
        return worker

    ended: set[int] = set()
    summary, start = Summary(), time.monotonic()
    while seeds:
        before = len(ended)
        workers = [started(place) for place in places]
        while any(w.is_alive() for w in workers) or not results.empty():
            try:
                which, value = results.get(timeout=1)
            except queue.Empty:
                for i, (worker, (begun, ran)) in enumerate(zip(workers, places)):
                    if worker.is_alive() or not worker.exitcode or begun in ended:
                        continue
                    if begun == ran:
                        summary.findings.append(Finding(begun, "crash", f"the process ended with {worker.exitcode}"))
                    else:  # eager PyTorch alone
                        summary.torchs_own["crash"] += 1
                    ended.add(begun)
                    workers[i] = started(places[i])
                continue
            _add(summary, value)
            ended.add(which)
            summary.seconds = time.monotonic() - start
            yield summary
        # A process that dies has not sent all it has put. Where none began there is nothing to wait for.
        seeds, taken.value = [s for s in seeds if s not in ended], 0
        if len(ended) == before:
            break
    yield summary


def _add(summary: Summary, one: Summary) -> None:
    for name in ("programs", "statements", "with_lines", "raises", "no_gradient", "refused", "rounding"):
        setattr(summary, name, getattr(summary, name) + getattr(one, name))
    summary.findings += one.findings
    summary.torchs_own += one.torchs_own


def _work(seeds: list[int], taken, place, results, then: str, each: int) -> None:
    """taken: how many of the seeds the processes have taken. place: which seed has begun, and the last one that eager
    PyTorch has run."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch says of graphs that raise
    import torch

    from fuzz.run.execution import prepared
    from fuzz.run.masks import intercepted

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.freeze()  # collections of all that torch has imported take a tenth of the time
    gc.set_threshold(100_000, 50, 100)
    small: Counter = Counter()
    with intercepted():
        hunter = multiprocessing.parent_process()  # one that was killed has not ended its processes
        while hunter.is_alive() and (seed := _next_of(seeds, taken)) is not None:
            place[0] = seed
            with prepared(then, linear=seed % 2 == 1, attention=seed // 2 % 2 == 1):
                results.put((seed, one(seed, then, small, each, functools.partial(place.__setitem__, 1, seed))))


def _next_of(seeds: list[int], taken) -> int | None:
    with taken.get_lock():
        at = taken.value
        taken.value += 1
    return seeds[at] if at < len(seeds) else None


def one(seed: int, then: str, small: Counter, each: int, ran: Callable[[], None] = lambda: None) -> Summary:
    """The program of one seed; `ran` as for `trial`."""
    import torch

    from fuzz.program.drawing import build
    from fuzz.run.minimise import minimised
    from fuzz.run.reproduction import reproduction
    from fuzz.run.trial import trial

    torch.manual_seed(seed)
    try:
        program = build(random.Random(seed))
        outcome = trial(program, then, ran)
    except Exception:  # noqa: BLE001
        return Summary(1, findings=[Finding(seed, "fuzzer", traceback.format_exc())])
    summary = Summary(1, len(program.statements), bool(outcome.lines), outcome.raises, outcome.no_gradient)
    summary.refused, summary.rounding = bool(outcome.refused), bool(outcome.rounding)
    summary.torchs_own.update({d.kind for d in outcome.torchs_own})
    for kind in list(dict.fromkeys(d.kind for d in outcome.found))[:1]:
        found = [d for d in outcome.found if d.kind == kind]
        finding = Finding(seed, kind, str(found[0]))
        if small[kind] < each:
            small[kind] += 1
            raises = outcome.raises

            def fails(smaller, kind=kind, raises=raises):
                try:
                    tried = trial(smaller, then)
                except Exception:  # noqa: BLE001  no program any more
                    return False
                return tried.raises == raises and any(d.kind == kind for d in tried.found)

            least = minimised(program, fails)
            told = [str(d) for d in trial(least, then).found if d.kind == kind]
            finding.text = next(iter(told), finding.text + " (not again)")
            finding.script = reproduction(least, f"seed {seed}\n{finding.text}")
            finding.program = least.source
        summary.findings.append(finding)
    return summary

"""One program's trial: eager against fused, and where they differ, against Dynamo alone."""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import dataclass, field, replace

import torch
from torch._dynamo.utils import counters

import onepass
from fuzz.comparison import Difference, differences, tolerance_of
from fuzz.execution import calls_of, observe
from fuzz.masks import Masks, disagreement
from fuzz.programs import Program

__all__ = ["Outcome", "trial"]


OVERWRITTEN = "modified by an inplace operation"


@dataclass
class Outcome:
    """What a trial showed.

    Attributes:
        found: the differences.
        torchs_own: those that Dynamo alone has as well.
        refused: those where a gradient is refused aloud: a line saved what was overwritten between two graphs, or by a
            block that runs again, and the operators in its place did not.
        lines: all that were put in.
        raises, no_gradient: whether eager itself does not run, or has no backward.
    """

    found: list[Difference] = field(default_factory=list)
    torchs_own: list[Difference] = field(default_factory=list)
    refused: list[Difference] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    raises: bool = False
    no_gradient: bool = False


def trial(program: Program, then: str = "eager") -> Outcome:
    """Runs it, within `execution.prepared` and `masks.intercepted`.

    then: what runs the rest of a graph: "eager", "inductor", or in its place "aot_eager", which traces as that does
        and compiles nothing. A trace draws masks that nobody sees: programs with dropout are left out there.
    """
    if then != "eager":
        program = replace(program, twice=False)  # what is traced has no second derivatives
    calls, tolerance = calls_of(program), tolerance_of(program)
    draws = "dropout(" in program.source
    drawn = Masks()
    expected = observe(program, lambda made: made, calls, drawn)
    if drawn.drawn and then != "eager":
        return Outcome()
    fused, masks = [], Masks()

    def fuse(made):
        fused.append(onepass.fuse(made, then="eager" if then == "eager" else "inductor"))
        return fused[0]

    found, captures = _compiled(program, fuse, calls, masks)
    outcome = Outcome(raises=any(o.error for o in expected), no_gradient=any(o.gradient_error for o in expected))
    outcome.lines = [f.line for f in onepass.report(fused[0]).lines]
    outcome.found, order = differences(calls, expected, found, tolerance), frozenset()
    if masks.drawn:
        expected, outcome.found, order = _with_masks(program, calls, found, masks, tolerance)
    if draws and (text := disagreement(masks, drawn)):
        outcome.found.append(Difference("masks", "dropout", text))
    if re.search(r"graph_break|checkpoint\(", program.source):
        outcome.refused = [d for d in outcome.found if d.kind.endswith("gradient error") and OVERWRITTEN in d.text]
        outcome.found = [d for d in outcome.found if d not in outcome.refused]
    if outcome.found or program.varies:
        _beside_dynamo(program, outcome, calls, expected, Masks(masks, order), captures, then)
    return outcome


def _with_masks(program, calls, found, masks, tolerance):
    """Eager with the fused run's masks, in the one or the other order: what it gives, the fewest differences, and
    the order."""
    ways = []
    orders = [frozenset()]
    for order in orders:
        replayed = Masks(masks, order)
        expected = observe(program, lambda made: made, calls, replayed)
        ways.append((expected, differences(calls, expected, found, tolerance), order))
        if not ways[-1][1]:
            break
        if len(orders) == 1:
            turned = sorted(replayed.not_dense)[:3]
            orders += [frozenset(c) for n in range(1, len(turned) + 1) for c in itertools.combinations(turned, n)]
    return min(ways, key=lambda way: len(way[1]))


def _beside_dynamo(program, outcome, calls, expected, masks, captures, then) -> None:
    found, alone = _compiled(program, lambda made: torch.compile(made, backend=then), calls, masks)
    theirs = {(d.kind, d.where) for d in differences(calls, expected, found, tolerance_of(program))}
    outcome.torchs_own = [d for d in outcome.found if (d.kind, d.where) in theirs]
    outcome.found = [d for d in outcome.found if (d.kind, d.where) not in theirs]
    if then == "eager" and captures > alone:  # a trace may begin anew
        text = f"{captures}, Dynamo alone {alone}"
        outcome.found.append(Difference("captures", f"lengths {program.lengths}", text))


def _compiled(program, way, calls, masks):
    """What was observed, and how many graphs Dynamo captured for it."""
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return observe(program, way, calls, masks), counters["stats"]["unique_graphs"]

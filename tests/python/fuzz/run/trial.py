"""One program's trial: eager against fused, and where they differ, against Dynamo alone."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onepass
from fuzz.program import prelude
from fuzz.program.programs import Program
from fuzz.run.comparison import Difference, differences, tolerance_of
from fuzz.run.execution import BEFORE_2_12, calls_of, observe
from fuzz.run.masks import Masks, disagreement
from onepass.rewrite import fuse as fusing
from onepass.rewrite.find.chains import lies_as

__all__ = ["Outcome", "trial"]


OVERWRITTEN = re.compile(
    "modified by an inplace operation|has been modified inplace|Recomputed values .* have different metadata"
)
ONCE = "where its matrix needs no gradient, since what that is multiplied with is not saved"


@dataclass
class Outcome:
    """What a trial showed.

    Attributes:
        found: the differences.
        torchs_own: those that Dynamo alone has as well, and second derivatives that PyTorch's layer_norm does not have.
        rounding: those in narrow types where eager is as far from the same program in float64.
        refused: those where a gradient is refused aloud: a line saved what was overwritten between two graphs, or by a
            block that runs again, and the operators in its place did not; or the second derivative of `linear` by a
            matrix that needs none.
        lines: all that were put in.
        raises, no_gradient: whether eager itself does not run, or has no backward.
    """

    found: list[Difference] = field(default_factory=list)
    torchs_own: list[Difference] = field(default_factory=list)
    rounding: list[Difference] = field(default_factory=list)
    refused: list[Difference] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    raises: bool = False
    no_gradient: bool = False


def trial(program: Program, then: str = "eager", ran: Callable[[], None] = lambda: None) -> Outcome:
    """Runs it, within `execution.prepared` and `masks.intercepted`.

    then: what runs the rest of a graph: "eager", "inductor", or in its place "aot_eager", which traces as that does
        and compiles nothing. A trace draws masks that nobody sees: programs with dropout are left out there.
    ran: called when eager PyTorch alone has run the program.
    """
    if then != "eager":
        program = replace(program, twice=False)  # what is traced has no second derivatives
    calls, tolerance = calls_of(program), tolerance_of(program)
    draws = "dropout(" in program.source
    drawn = Masks()
    expected = observe(program, lambda made: made, calls, drawn)
    ran()
    if drawn.drawn and then != "eager":
        return Outcome()
    fused, masks = [], Masks()

    def fuse(made):
        fused.append(onepass.fuse(made, then="eager" if then == "eager" else "inductor"))
        return fused[0]

    found, captures = _compiled(program, fuse, calls, masks)
    broken = bool(counters["graph_break"])
    outcome = Outcome(raises=any(o.error for o in expected), no_gradient=any(o.gradient_error for o in expected))
    outcome.lines = [f.line for f in onepass.report(fused[0]).lines]
    outcome.found, order = differences(calls, expected, found, tolerance), frozenset()
    if masks.drawn:
        expected, outcome.found, order = _with_masks(program, calls, found, masks, tolerance)
    if draws and (text := disagreement(masks, drawn)):
        outcome.found.append(Difference("masks", "dropout", text))
    in_parts = broken or "checkpoint(" in program.source
    outcome.refused = [d for d in outcome.found if _is_refused(d, in_parts)]
    outcome.found = [d for d in outcome.found if d not in outcome.refused]
    if any(d.error is not None for d in outcome.found):
        _beside_float64(program, outcome, calls, expected, found, Masks(masks, order))
    if any("gradient" in d.kind for d in outcome.found) and "checkpoint(" in program.source:
        _beside_run_once(program, outcome, calls, expected, Masks(masks, order), tolerance)
    if any(d.kind == "second gradient" for d in outcome.found):
        _beside_written_out(program, outcome, calls, found, Masks(masks, order), tolerance)
    off = any(d.kind in ("value", "gradient", "second gradient") for d in outcome.found)
    if off and not (BEFORE_2_12 and "func.jvp" in program.source):  # torch 2.11 dies of a dispatch mode within jvp
        _beside_shaken(program, outcome, calls, expected, Masks(masks, order), tolerance)
    if any(d.kind == "strides" for d in outcome.found):
        _beside_fakes(program, outcome, calls, Masks(masks, order))
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


def _is_refused(difference: Difference, in_parts: bool) -> bool:
    if not difference.kind.endswith("gradient error"):
        return False
    return in_parts and bool(OVERWRITTEN.search(difference.text)) or ONCE in difference.text


def _beside_float64(program, outcome, calls, expected, found, masks) -> None:
    """Sets apart what is rounding: the same program in float64 says how far eager is from what it should be."""
    wide = program.widened()
    if wide == program:
        return
    truth = observe(wide, lambda made: made, calls_of(wide), masks)
    theirs, ours = (
        {(d.kind, d.where): d.error for d in differences(calls, truth, observed, 0.0)} for observed in (expected, found)
    )

    def is_rounding(d: Difference) -> bool:
        error, allowed = ours.get((d.kind, d.where)), theirs.get((d.kind, d.where))
        return error is not None and allowed is not None and error <= RATIO * allowed

    outcome.rounding = [d for d in outcome.found if d.error is not None and is_rounding(d)]
    outcome.found = [d for d in outcome.found if d not in outcome.rounding]


RATIO = 16.0
"""Of two errors of the same kind: of few numbers, so that luck is in it."""


def _run_once(block, *args, **_):
    return block(*args)


def _beside_run_once(program, outcome, calls, expected, masks, tolerance) -> None:
    """Sets apart gradients of what a checkpointed block has overwritten: backward runs it again, on other numbers, or
    nobody says that what it needs was overwritten."""
    with mock.patch.object(prelude, "checkpoint", _run_once):
        once = observe(program, lambda made: made, calls, masks)
    apart = [d for d in differences(calls, expected, once, tolerance) if "gradient" in d.kind]
    theirs = {(d.kind, d.where) for d in apart}
    refused = {d.where.partition(":")[0] for d in apart if d.kind.endswith("error")}
    set_apart = [
        d
        for d in outcome.found
        if "gradient" in d.kind and ((d.kind, d.where) in theirs or d.where.partition(":")[0] in refused)
    ]
    outcome.torchs_own += set_apart
    outcome.found = [d for d in outcome.found if d not in set_apart]


def _beside_written_out(program, outcome, calls, found, masks, tolerance) -> None:
    """Sets apart second derivatives that eager has not where layer_norm's bias alone needs a gradient (torch 2.15)."""
    with mock.patch.object(torch, "layer_norm", _layer_norm):
        expected = observe(program, lambda made: made, calls, masks)
    right = {(d.kind, d.where) for d in differences(calls, expected, found, tolerance)}
    theirs = [d for d in outcome.found if d.kind == "second gradient" and (d.kind, d.where) not in right]
    outcome.torchs_own += theirs
    outcome.found = [d for d in outcome.found if d not in theirs]


def _layer_norm(x, shape, weight=None, bias=None, eps=1e-5, _=True):
    """torch.layer_norm, of operators that can be differentiated any number of times."""
    dims, wide = tuple(range(-len(shape), 0)), x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


SHAKES = 4
"""Times that a program is run with other roundings: one may leave a comparison as it was."""


class _Shaken(TorchDispatchMode):
    """Every new tensor of floating-point numbers is off by some of their last bits."""

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not any(r.alias_info for r in function._schema.returns) and "dropout" not in function.name():
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and t.is_floating_point() and t.layout == torch.strided:
                    chance = torch.Generator().manual_seed(t.numel() + self.seed)
                    off = torch.rand(t.shape, generator=chance, dtype=torch.float64) - 0.5
                    t.mul_((1 + 8 * torch.finfo(t.dtype).eps * off).to(t.dtype))
        return result


def _beside_shaken(program, outcome, calls, expected, masks, tolerance) -> None:
    """Sets apart what rounding decides, such as which of equal numbers is the largest, or the sign of what should be
    zero: eager itself gives something else, and as far off, where its operators round otherwise."""

    for seed in range(SHAKES):
        if outcome.found:
            _beside_one_shake(program, outcome, calls, expected, masks, tolerance, seed)


def _beside_one_shake(program, outcome, calls, expected, masks, tolerance, seed) -> None:
    def shaken(made):
        def call(*args):
            with _Shaken(seed):
                return made(*args)

        return call

    found = observe(program, shaken, calls, masks)
    theirs = {(d.kind, d.where): d.error for d in differences(calls, expected, found, tolerance)}

    def is_rounding(d: Difference) -> bool:
        if d.error is None:
            return (d.kind, d.where) in theirs
        return d.error <= RATIO * (theirs.get((d.kind, d.where)) or 0.0)

    outcome.rounding += [d for d in outcome.found if is_rounding(d)]
    outcome.found = [d for d in outcome.found if d not in outcome.rounding]


def _beside_fakes(program, outcome, calls, masks) -> None:
    """Sets apart strides where PyTorch's own tensors without data have others than its kernels, in Dynamo's graphs:
    what a line gives follows the former."""
    differing: list[fx.Node] = []

    class Compared(fx.Interpreter):
        def run_node(self, n: fx.Node):
            value, fake = super().run_node(n), n.meta.get("example_value")
            if isinstance(value, Tensor) and isinstance(fake, Tensor) and not value.is_nested:
                differing.extend([n] * (not lies_as(value, fake)))
            return value

    def backend(graph: fx.GraphModule, _):
        return lambda *inputs: Compared(graph).run(*inputs)

    _compiled(program, lambda made: torch.compile(made, backend=backend), calls, masks)
    if differing:
        outcome.torchs_own += [d for d in outcome.found if d.kind == "strides"]
        outcome.found = [d for d in outcome.found if d.kind != "strides"]


def _beside_dynamo(program, outcome, calls, expected, masks, captures, then) -> None:
    called = fusing.called if BEFORE_2_12 else lambda made: made  # arguments that are passed on are used

    def compiled():
        found, alone = _compiled(program, lambda made: torch.compile(called(made), backend=then), calls, masks)
        return {(d.kind, d.where) for d in differences(calls, expected, found, tolerance_of(program))}, alone

    theirs, alone = compiled()
    if any(kind == "gradient error" for kind, _ in theirs) and "checkpoint(" in program.source:
        with mock.patch.object(prelude, "checkpoint", _run_once):  # its gradients, had it any
            theirs |= compiled()[0]
    outcome.torchs_own += [d for d in outcome.found if (d.kind, d.where) in theirs]
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

"""Tells two observations apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuzz.program.programs import Program
from fuzz.run.execution import Call, Observation

__all__ = ["Difference", "differences", "tolerance_of"]


@dataclass(frozen=True)
class Difference:
    """`kind` is a word by which findings are counted, `where` what differs in which call, `text` how, `error` by how
    much where it is numbers that differ."""

    kind: str
    where: str
    text: str
    error: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.text}"


# In torch 2.11 whether F.linear with a bias gives a view depends on how its input lies.
SAYS_VIEWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)

_NARROW = (("bfloat16|half|float16|autocast", 0.1), ("float32|float\\(\\)", 1e-3))


def tolerance_of(program: Program) -> float:
    """Of an error as a share of the largest value: exact but for rounding in float64, coarse where anything is
    narrow."""
    text = program.source + program.input_source
    if "autocast" in program.modes and "float32" in text:
        return 0.1
    return next((tolerance for pattern, tolerance in _NARROW if re.search(pattern, text)), 1e-9)


def differences(
    calls: list[Call], expected: list[Observation], found: list[Observation], tolerance: float
) -> list[Difference]:
    """All of them, call by call."""
    result = []
    for i, (call, theirs, ours) in enumerate(zip(calls, expected, found)):
        for kind, where, text, *error in _of_call(theirs, ours, tolerance):
            result.append(Difference(kind, f"call {i} ({call.mode}, {call.length}): {where}", text, *error))
    return result


def _of_call(theirs: Observation, ours: Observation, tolerance: float):
    if theirs.left_in != ours.left_in:
        yield "modes", "left in", f"{ours.left_in}, expected {theirs.left_in}"
    if theirs.error or ours.error:
        if theirs.error != ours.error:
            yield "error", "raises", f"{ours.error} ({ours.message.strip()[:300]}), expected {theirs.error}"
        return
    if len(theirs.results) != len(ours.results):
        yield "results", "their number", f"{len(ours.results)}, expected {len(theirs.results)}"
        return
    for i, (a, b) in enumerate(zip(theirs.results, ours.results)):
        yield from _of_values("value", f"result {i}", a, b, tolerance)
        yield from _of_layouts(f"result {i}", theirs.layouts[i], ours.layouts[i])
    if theirs.sharing != ours.sharing:
        yield "sharing", "inputs, state, results", f"{ours.sharing}, expected {theirs.sharing}"
    for what, a_all, b_all in (("input", theirs.inputs, ours.inputs), ("state", theirs.state, ours.state)):
        if a_all.keys() != b_all.keys():
            yield what, "names", f"{list(b_all)}, expected {list(a_all)}"
        for name in a_all.keys() & b_all.keys():
            (a, of_a), (b, of_b) = a_all[name], b_all[name]
            yield from _of_values(what, name, a, b, tolerance)
            yield from _of_layouts(name, of_a, of_b)
    for kind, of_theirs, of_ours, refused, error in (
        ("gradient", theirs.gradients, ours.gradients, theirs.gradient_error, ours.gradient_error),
        ("second gradient", theirs.second, ours.second, theirs.second_error, ours.second_error),
    ):
        if refused:
            return  # what eager refuses nobody can ask for
        if error:
            yield f"{kind} error", "raises", f"{error} ({ours.message.strip()[:300]})"
            return
        yield from _of_gradients(kind, of_theirs, of_ours, tolerance)


def _of_gradients(kind: str, theirs: dict[str, Any], ours: dict[str, Any], tolerance: float):
    if theirs.keys() != ours.keys():
        yield kind, "of what", f"{list(ours)}, expected {list(theirs)}"
        return
    largest = max([1.0, *(_largest(g) for g in theirs.values() if g is not None)])
    for name, a in theirs.items():
        b = ours[name]
        if (a is None) != (b is None):
            zero = _largest(a if b is None else b) == 0.0
            if not zero:
                yield kind, name, f"{'none' if b is None else 'one'}, expected {'none' if a is None else 'one'}"
        elif a is not None:
            yield from _of_values(kind, name, a, b, tolerance, largest)


def _of_layouts(where: str, a: Any, b: Any):
    if a == b:
        return
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        yield "type", where, f"{b}, expected {a}"
        return
    for what, x, y in zip(("type", "dtype", "shape", "strides", "requires_grad", "is_leaf", "is_view"), a, b):
        if x != y and (what != "is_view" or y and SAYS_VIEWS):  # `detach_` refuses views
            yield what, where, f"{y}, expected {x}"
            return


def _of_values(kind: str, where: str, a: Any, b: Any, tolerance: float, scale: float = 1.0):
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        if type(a) is not type(b) or not isinstance(a, Tensor) and a != b:
            yield kind, where, f"{b!r}, expected {a!r}"
        return
    if a.shape != b.shape or a.numel() == 0:
        return  # told by its layout
    if not a.is_floating_point():
        if not torch.equal(a, b.to(a.dtype)):
            yield kind, where, f"{int((a != b).sum())} of {a.numel()} differ"
        return
    x, y = a.double(), b.double()
    if not torch.equal(x.isnan(), y.isnan()):
        yield kind, where, "NaN in other places"
        return
    same = (x == y) | x.isnan()
    error = torch.where(same, 0.0, (x - y).abs()).max().item()
    if not error <= tolerance * max(scale, _largest(a)):
        yield kind, where, f"off by {error:.3g}, largest {_largest(a):.3g}", error


def _largest(t: Tensor) -> float:
    t = t.detach().double()
    finite = t[t.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0

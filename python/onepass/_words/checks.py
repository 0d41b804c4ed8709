"""What a user's word must pass: its formulas are its reference, it compiles, agrees with its reference, and its
gradient is the derivative."""

from __future__ import annotations

import ast
import functools
import operator
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepass import _native
from onepass.line import Line
from onepass.word import WordError

if TYPE_CHECKING:
    from onepass.define import Definition

__all__ = ["Report", "check"]

SHAPE = (5, 67)  # whole vectors, and a rest, of every type and chip
ULPS = {torch.float64: 64, torch.float32: 16, torch.bfloat16: 1}
"""Of a dtype's epsilon, relative to the largest result: so much more than twice the reference's own error, which is
measured against float64, may a word be off."""


@dataclass
class Report:
    """What the checks found: seconds that the compilers took (next to none where the result was cached), and errors
    relative to the largest result, by device and dtype."""

    compile_seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)


def check(word: Definition) -> Report:
    """Raises WordError, or says how well the word does. Where nothing can compile it, that is a warning."""
    for formula in word.formulas:
        _compare_formula(word, formula)
    report = Report()
    text = line_of(word)
    try:
        _compile(word, text, report)
    except _native.CannotCompile as missing:
        if not torch.cuda.is_available():
            warnings.warn(f"onepass: the word '{word.name}' is not checked: {missing}", stacklevel=4)
            return report
    else:
        _compare(word, text, "cpu", report)
    if torch.cuda.is_available():
        _compare(word, text, "cuda", report)
    return report


def reference_of(word: Definition) -> Callable[..., Tensor]:
    """The reference; of an ending in the dtype of its numbers."""
    if word.kind != "ending":
        return word.reference
    return lambda x, *numbers: word.reference(x if x.dtype == torch.float64 else x.float(), *numbers)


def of_nothing(word: Definition) -> float | None:
    """An ending's number of a row without elements, where the reference has one."""
    if word.kind != "ending":
        return 0.0
    try:
        return float(word.reference(torch.empty(1, 0, dtype=torch.float64), *word.example))
    except Exception:  # a user's code; what is wrong with it is said when it is compared
        return None


def maps_zero_to_zero(word: Definition) -> bool:
    """Whether the reference has it so, with a finite derivative, for the numbers of the example and others, and for
    operands of the domain."""
    if word.kind != "elementwise":
        return False
    least, most = word.domain
    drawn = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * (most - least) + least
    operands = [] if word.operand is None else [drawn]
    for numbers in (word.example, tuple(1.3 * number + 0.1 for number in word.example)):
        try:
            function = functools.partial(_reference_of, word, operands, numbers)
            y, gradient = _with_gradient("reference", function, torch.zeros_like(drawn))
        except Exception:  # a user's code; what is wrong with it is said when it is compared
            return False
        if y.count_nonzero() or not gradient.isfinite().all():
            return False
    return True


def _reference_of(word: Definition, operands: list[Tensor], numbers: tuple[float, ...], x: Tensor) -> Tensor:
    return word.reference(x, *operands, *numbers)


def line_of(word: Definition) -> str:
    """The word alone, with the numbers of its example."""
    return f"{word.name}({', '.join(map(repr, word.example))})" if word.example else word.name


FORMULA_TOLERANCE = 1e-5
"""Relative to the largest result in float64: constants are often written with six digits. What is found in a model is
replaced by the word, whose results are the reference's."""


def _compare_formula(word: Definition, formula: str) -> None:
    """Raises WordError where a formula is not the reference or does not have its gradient: for the numbers of the
    example, and for others, where the reference has a result."""
    least, most = word.domain
    drawn = torch.rand(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * (most - least) + least
    body = ast.parse(formula, mode="eval").body
    for numbers in dict.fromkeys((word.example, tuple(1.3 * number + 0.1 for number in word.example))):
        names = dict(zip(word.parameters, numbers))
        try:
            wanted = _with_gradient("reference", functools.partial(_reference_of, word, [], numbers), drawn)
        except Exception:  # a user's code
            if numbers != word.example:
                continue
            raise
        try:
            got = _with_gradient("it", lambda x: _evaluated(body, {"x": x, **names}), drawn)  # noqa: B023
        except Exception as failure:
            raise WordError(f"define_word(): the formula {formula!r} of '{word.name}' fails: {failure}") from failure
        for what, theirs, exact in zip(("", "the gradient of "), got, wanted):
            _agree_with_reference(f"{what}the formula {formula!r}", word, names, drawn, theirs, exact)


def _agree_with_reference(what: str, word: Definition, names: dict, x: Tensor, got: Tensor, exact: Tensor) -> None:
    there = exact.isfinite()
    if not there.any():
        return
    largest = exact[there].abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    off = torch.where(there, (got - exact).abs(), 0.0)
    off = torch.where(off.isnan(), torch.inf, off)
    if off.max() > FORMULA_TOLERANCE * largest:
        at = off.argmax()
        numbers = "".join(f", {name} = {number:.6g}" for name, number in names.items())
        raise WordError(
            f"define_word(): {what} is not that of the reference of '{word.name}': at x = {x[at].item():.6g}{numbers} "
            f"expected {exact[at].item():.9g}, got {got[at].item():.9g}"
        )


def _with_gradient(what: str, function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    x = at.clone().requires_grad_()
    with torch.enable_grad():
        y = function(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise WordError(
                f"define_word(): expected {what} to give a tensor of x's shape {list(x.shape)}, but got {got}"
            )
        (gradient,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), gradient


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def _evaluated(node: ast.expr, names: dict):
    """A formula that `idioms.check` has read."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_evaluated(node.operand, names))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluated(node.left, names), _evaluated(node.right, names))
    name = node.func.id
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name, None)
    if function is None:
        raise NotImplementedError(f"there is no function {name!r} of a tensor")
    return function(*(_evaluated(argument, names) for argument in node.args))


def _compile(word: Definition, text: str, report: Report) -> None:
    began = time.perf_counter()
    try:
        _native.cpu_prepare(text, 0, None)
    except _native.CannotCompile:
        raise
    except RuntimeError as failure:
        raise WordError(f"define_word(): '{word.name}' does not compile\n{at_lines(word, str(failure))}") from None
    report.compile_seconds["cpu"] = round(time.perf_counter() - began, 3)


def at_lines(word: Definition, log: str) -> str:
    """The compiler's messages that are about the word's source, each with the line it is about; all of them where none
    is."""
    source = word.source.splitlines()
    found = []
    for number, column, message in re.findall(rf"^{word.name}[:(](\d+)[:)]?(\d*):? *((?:fatal )?error.*)$", log, re.M):
        found.append(f"  {word.name}, line {number}: {message}")
        if 0 < int(number) <= len(source):
            found.append(f"    {source[int(number) - 1]}")
            if column:
                found.append(" " * (3 + int(column)) + "^")
        if re.search(r"\bto ['\"‘]bool|bool type", message):
            found.append("  a vector has no branch (if, ?:, &&): where(x > 0, yes, no) chooses for each number")
    return "\n".join(found) if found else log


def _compare(word: Definition, text: str, device: str, report: Report) -> None:
    generator = torch.Generator().manual_seed(0)
    least, most = word.domain
    shapes = [SHAPE, *([SHAPE[-1:]] if word.operand == "column" else [SHAPE] if word.operand == "tensor" else [])]
    drawn = [torch.rand(s, generator=generator, dtype=torch.float64) * (most - least) + least for s in shapes]
    line = Line(text)
    for dtype in ULPS:
        given = [t.to(device, dtype) for t in drawn]
        try:
            ours = line(*given)
        except RuntimeError as failure:
            raise WordError(f"define_word(): '{word.name}' on {device}: {at_lines(word, str(failure))}") from None
        theirs = _reference(word, given)
        exact = _reference(word, [t.double() for t in given])
        _agree(word, ours.double(), theirs.double(), exact, given[0], dtype, device, report)
    wide = [t.to(device).requires_grad_() for t in drawn]
    try:
        torch.autograd.gradcheck(lambda *tensors: line(*tensors), wide, eps=1e-6, atol=1e-5, rtol=1e-4)
    except RuntimeError as failure:  # gradcheck's own, or a compiler's
        where = _wrong_gradient(word, line, wide) or f"\n{at_lines(word, str(failure))}"
        raise WordError(
            f"define_word(): the gradient of '{word.name}' on {device} is not its derivative{where}"
        ) from None


def _wrong_gradient(word: Definition, line: Line, given: list[Tensor]) -> str:
    """Where a gradient is the farthest from the reference's; "" where none is off, or there is none."""
    try:
        ours, exact = (torch.autograd.grad(f(*given).sum(), given) for f in (line, lambda *t: _reference(word, [*t])))
    except RuntimeError:
        return ""
    for name, got, wanted in zip(("x", word.operand_name), ours, exact):
        off = (got - wanted).abs()
        off = torch.where(off.isnan(), torch.inf, off)
        if off.max() > 1e-5 * wanted.abs().max():
            at, (expected, found) = off.argmax(), (t.flatten()[off.argmax()].item() for t in (wanted, got))
            values = [(n, t) for n, t in zip(("x", word.operand_name), given) if t.shape == got.shape]
            where = ", ".join(f"{n} = {t.flatten()[at].item():.6g}" for n, t in values)
            return f": that of {name} at {where} is {found:.6g}, not {expected:.6g}"
    return ""


def _reference(word: Definition, tensors: list[Tensor]) -> Tensor:
    result = reference_of(word)(*tensors, *word.example)
    shape = SHAPE[:-1] if word.kind == "ending" else SHAPE
    if not isinstance(result, Tensor) or result.shape != shape:
        got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        of = "one number a row, shape" if word.kind == "ending" else "a tensor of x's shape"
        raise WordError(f"define_word(): expected reference to give {of} {list(shape)}, but got {got}")
    return result


def _agree(word, ours, theirs, exact, x, dtype, device, report) -> None:
    if not exact.isfinite().all():
        wrong = ~exact.isfinite()
        raise WordError(
            f"define_word(): the reference of '{word.name}' is {exact[wrong][0].item()} at {_where(word, x, wrong)}; "
            f"domain and example say where it is checked"
        )
    largest = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    off = (ours - exact).abs()
    off = torch.where(off.isnan(), torch.inf, off)
    allowed = 2 * (theirs - exact).abs().max() + ULPS[dtype] * torch.finfo(dtype).eps * largest
    if not off.max() <= allowed:
        wanted, got = (t.flatten()[off.argmax()].item() for t in (exact, ours))
        raise WordError(
            f"define_word(): '{word.name}' is not its reference on {device}, {dtype}: at "
            f"{_where(word, x, off == off.max())} expected {wanted:.9g}, got {got:.9g}"
        )
    report.errors[device, str(dtype).removeprefix("torch.")] = (off.max() / largest).item()


def _where(word: Definition, x: Tensor, found: Tensor) -> str:
    """The first place that was found, in words."""
    if word.kind == "ending":
        return f"row {found.nonzero()[0].item()}"
    return f"x = {x[found][0].item():.6g}"

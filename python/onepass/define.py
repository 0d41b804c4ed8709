"""A user's own word: one struct of C++, a word of every line on both devices from then on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from onepass import _native, autograd
from onepass import line as lines
from onepass import reference as references
from onepass._words.checks import Report, check, maps_zero_to_zero, of_nothing, reference_of
from onepass.graph import operations
from onepass.rewrite.find import idioms
from onepass.word import Word, WordError, words

__all__ = ["Definition", "WordError", "define_word", "defined_words", "undefine_word"]


@dataclass(frozen=True)
class Definition:
    """A user's word as :func:`define_word` was given it, and what its checks found."""

    name: str
    kind: str
    source: str
    reference: Callable[..., Tensor]
    parameters: tuple[str, ...]
    operand: str | None
    operand_name: str
    formulas: tuple[str, ...]
    targets: tuple[Any, ...]
    numbers: Callable[..., tuple[float, ...] | None]
    meaning: str
    flops: tuple[int, int]
    example: tuple[float, ...]
    domain: tuple[float, float]
    report: Report | None = None

    @property
    def sums(self) -> int:
        """Over the row, of a word that looks at one."""
        return 0 if self.kind == "elementwise" else 1 + _has(self.source, "second_sum")


def _has(source: str, function: str) -> bool:
    return re.search(rf"\b{function}\s*\(", source) is not None


_DEFINED: dict[str, Definition] = {}


def defined_words() -> dict[str, Definition]:
    """The words that :func:`define_word` has added, by name."""
    return dict(_DEFINED)


def define_word(
    name: str,
    *,
    source: str,
    reference: Callable[..., Tensor],
    kind: str = "elementwise",
    parameters: Sequence[str] = (),
    operand: str | None = None,
    operand_name: str | None = None,
    formulas: Sequence[str] = (),
    targets: Sequence[Callable[..., Tensor] | str] = (),
    numbers: Callable[..., tuple[float, ...] | None] | None = None,
    meaning: str = "",
    flops: tuple[int, int] = (16, 32),
    example: Sequence[float] | None = None,
    domain: tuple[float, float] = (-4.0, 4.0),
) -> Word:
    """Adds a word to the vocabulary of this process, and checks it.

    From then on it may stand in every line, where it is part of the line's one kernel: compiled at first use for CUDA
    by NVRTC and for the CPU by the system's compiler, and kept in the disk cache. An elementwise word without an
    operand may also stand in ``gate(...)``. One that is defined again takes the place of the first.

    Args:
        name: letters, digits and underscores; not the name of another word of onepass.
        source: C++, the members of a struct: ``template <class L> static L forward(L x, scalar a)`` and, if it is
            not to be derived, ``template <class L> static L backward(L x, L dy, scalar a)``, which gives the gradient
            of x. ``L`` is a vector of consecutive numbers of a row, ``scalar`` one with the same number everywhere;
            plain numbers mix with both. Functions: docs/own-words.md. With an operand they take it as ``L`` behind x,
            and ``backward`` gives ``gradients<L>``, as in ``return {dx, doperand};``.
            Those of a row word say what is summed over the row and what is made of it: ``template <class L> static L
            sum(L x, scalar a)``, perhaps ``second_sum``, and ``template <class L> static L forward(L x, scalar sum,
            scalar second_sum, scalar n, scalar a)``, n being the row's length. An ending has ``static scalar
            number(scalar sum, scalar second_sum, scalar n, scalar a)`` in its place. Their gradient is derived.
        reference: the same in PyTorch, ``reference(x, *operand, *numbers)``, differentiable: elementwise, over the last
            dimension, or without it, of an ending. It is what the word is checked against, and what runs where there is
            no compiler.
        kind: ``"elementwise"``; ``"row"``, where a value depends on its whole row through one or two sums, of which one
            or two numbers a row are saved for backward; or ``"ending"``, which gives one number a row of them, in
            float32 (float64 of float64), and ends its line.
        parameters: names of the numbers that a line gives in parentheses, as in ``snake(0.5)``; all are required.
        operand: of an elementwise word, ``None``, ``"column"`` (a tensor of shape [N], whose gradient is summed over
            rows) or ``"tensor"`` (x's shape, or broadcast to it).
        operand_name: in messages; ``"c"`` or ``"u"`` if not given.
        formulas: how models write an elementwise word out, for ``fuse`` and ``explain``: an expression of ``x`` and
            the parameters with ``+ - * / **`` and functions such as ``sin``; the first is also the formula in
            documentation.
        targets: how models call an elementwise word, for ``fuse`` and ``explain``: functions of x that Dynamo leaves in
            a graph, such as ``F.logsigmoid`` and operators of ``torch.library``, and names of a tensor's methods. A
            module is found where it calls one of them.
        numbers: gives the numbers of a call of a target, ``numbers(*arguments, **keywords)`` of what stands behind x;
            None where the call is not the word. If it is not given, the arguments behind x are the parameters.
        meaning: in a few words.
        flops: of one number, forward and backward, for ``explain``.
        example: the numbers with which it is checked; 0.5 each if not given.
        domain: from where the values of x and the operand are drawn that it is checked with.

    Returns:
        The word, as ``onepass.words()`` lists it.

    Raises:
        WordError: (a ValueError) where it does not compile, with the compiler's messages at the lines of `source`;
            where it differs from `reference` by more than rounding; where its gradient is not that of finite
            differences in float64.
        TypeError, ValueError: for arguments that are no such thing.
    """
    definition = Definition(
        name=name,
        kind=kind,
        source=inspect.cleandoc(source) if isinstance(source, str) else source,
        reference=reference,
        parameters=tuple(parameters),
        operand=operand,
        operand_name=operand_name or {"column": "c", "tensor": "u"}.get(operand, ""),
        formulas=tuple(formulas),
        targets=tuple(targets),
        numbers=numbers or _numbers_of(tuple(parameters)),
        meaning=meaning,
        flops=tuple(flops),
        example=(0.5,) * len(tuple(parameters)) if example is None else tuple(map(float, example)),
        domain=tuple(map(float, domain)),
    )
    _check_arguments(definition)
    before = _DEFINED.get(name)
    if before is not None:
        undefine_word(name)
    _enter(definition)
    try:
        report = check(definition)
    except BaseException:
        undefine_word(name)
        if before is not None:
            _enter(before)
        raise
    _DEFINED[name] = replace(definition, report=report)
    return next(word for word in words() if word.name == name)


def undefine_word(name: str) -> None:
    """Takes a word of :func:`define_word` out of the vocabulary.

    Raises:
        ValueError: for another.
    """
    definition = _DEFINED.pop(name, None)
    if definition is None:
        raise ValueError(f"undefine_word(): expected a word that define_word has added, but got {name!r}")
    _native.undefine_word(name)
    references.forget(name)
    lines.forget(name)
    autograd.forget_plans()


def _enter(definition: Definition) -> None:
    d = definition
    formula = d.formulas[0] if d.formulas else ""
    _native.define_word(
        *(d.name, d.kind, d.operand or "none", d.operand_name, d.parameters, d.sums, d.flops, maps_zero_to_zero(d)),
        *(of_nothing(d), formula, d.meaning, d.source),
    )
    _DEFINED[d.name] = d
    in_torch = references.InTorch(reference_of(d), d.targets, d.numbers, d.formulas)
    references.add(d.name, in_torch, is_activation=d.kind == "elementwise" and d.operand is None)
    autograd.forget_plans()


def _numbers_of(parameters: tuple[str, ...]) -> Callable[..., tuple[float, ...] | None]:
    """Of a call that takes the parameters behind x, in their order or by their names."""
    signature = inspect.Signature([inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters])

    def numbers(*args, **kwargs):
        found = signature.bind(*args, **kwargs).arguments.values()
        return tuple(map(float, found)) if all(isinstance(n, (int, float)) for n in found) else None

    return numbers


def _check_arguments(d: Definition) -> None:
    for what, value in (("name", d.name), ("source", d.source), ("meaning", d.meaning)):
        if not isinstance(value, str):
            raise TypeError(f"define_word(): argument '{what}' must be str, not {type(value).__name__}")
    if not callable(d.reference):
        raise TypeError(f"define_word(): argument 'reference' must be callable, not {type(d.reference).__name__}")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", d.name):
        raise ValueError(f"define_word(): expected name to be letters, digits and underscores, but got {d.name!r}")
    if d.name not in _DEFINED and any(word.name == d.name for word in words()):
        raise ValueError(f"define_word(): '{d.name}' is a word of onepass")
    if d.kind not in ("elementwise", "row", "ending"):
        raise ValueError(f"define_word(): expected kind to be 'elementwise', 'row' or 'ending', but got {d.kind!r}")
    if d.operand not in (None, "column", "tensor"):
        raise ValueError(f"define_word(): expected operand to be None, 'column' or 'tensor', but got {d.operand!r}")
    if d.operand is not None and d.kind != "elementwise":
        raise ValueError(f"define_word(): operand is for elementwise words, but got {d.operand!r} with kind {d.kind!r}")
    for parameter in d.parameters:
        if not isinstance(parameter, str) or not parameter.isidentifier() or parameter == "x":
            raise ValueError(f"define_word(): expected parameters to be names other than x, but got {parameter!r}")
    if len(d.example) != len(d.parameters):
        raise ValueError(
            f"define_word(): expected example to have {len(d.parameters)} numbers, one a parameter, "
            f"but got {len(d.example)}"
        )
    for function in {"elementwise": ("forward",), "row": ("sum", "forward"), "ending": ("sum", "number")}[d.kind]:
        if not _has(d.source, function):
            raise WordError(f"define_word(): the source of '{d.name}' has no function '{function}'")
    if len(d.domain) != 2 or not d.domain[0] < d.domain[1]:
        raise ValueError(f"define_word(): expected domain to be (least, most), but got {d.domain!r}")
    if len(d.flops) != 2 or not all(isinstance(n, int) and n > 0 for n in d.flops):
        raise ValueError(f"define_word(): expected flops to be two positive integers, but got {d.flops!r}")
    if (d.formulas or d.targets) and (d.operand is not None or d.kind != "elementwise"):
        raise ValueError("define_word(): formulas and targets are for elementwise words without an operand")
    for target in d.targets:
        if not callable(target) and not isinstance(target, str) or isinstance(target, type):
            raise TypeError(f"define_word(): expected targets to be functions or names of methods, but got {target!r}")
        if target in operations.OTHERS or set(references.words_called(target)) - {d.name}:
            raise ValueError(f"define_word(): {target!r} is known as another operation")
    if not callable(d.numbers):
        raise TypeError(f"define_word(): argument 'numbers' must be callable, not {type(d.numbers).__name__}")
    for formula in d.formulas:
        idioms.check(formula, d.parameters)

"""Programs as data: inputs, state and statements over named tensors, and the Python source that says the same."""

from __future__ import annotations

import itertools
import linecache
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fuzz.program import prelude

__all__ = ["CALL", "LENGTH", "Input", "Program", "Statement", "leaf", "names_in", "rendered"]

LENGTH, CALL = "T", "C"
"""In an input's source: the size that differs from call to call, and the number of the call."""
_NAME = re.compile(r"\b(?:self\.)?[a-z]\d+\b")


def names_in(source: str) -> set[str]:
    """The tensors' names (a letter and a number) that stand in a piece of source."""
    return set(_NAME.findall(source))


@dataclass(frozen=True)
class Input:
    """An argument: an expression of R, T, C and earlier ones, and whether it is a leaf that gets a gradient."""

    name: str
    source: str
    grad: bool = False


@dataclass(frozen=True)
class Statement:
    """One or more lines of Python, and the names that they bind. `contexts` are with-blocks that they stand in."""

    source: str
    binds: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()

    @property
    def uses(self) -> set[str]:
        return names_in(self.source)

    def render(self) -> str:
        return rendered([self])


def rendered(statements: Iterable[Statement]) -> str:
    """Source of statements; those that stand in the same with-blocks one after the other are in one."""
    parts = []
    for contexts, group in itertools.groupby(statements, lambda s: s.contexts):
        lines = "\n".join(s.source for s in group)
        for context in reversed(contexts):
            lines = f"{context}\n{textwrap.indent(lines, '    ')}"
        parts.append(lines)
    return "\n".join(parts)


@dataclass(frozen=True)
class Program:
    """A function, or a module where there is state.

    Attributes:
        state: statements of the module's `__init__`, by the attribute's name ("self.w3").
        returns: expressions.
        lengths: the values of T in the order of the calls.
        modes: in which it is called, one after the other; see `execution.MODES`.
        twice: whether second derivatives are compared, too.
        shapes: of every name, as expressions of T, and its dtype: with them a statement can be made an input.
    """

    inputs: tuple[Input, ...]
    state: tuple[Input, ...]
    statements: tuple[Statement, ...]
    returns: tuple[str, ...]
    lengths: tuple[int, ...]
    modes: tuple[str, ...] = ("training", "no_grad")
    twice: bool = False
    shapes: dict[str, tuple[str, str]] = field(default_factory=dict, hash=False, compare=False)

    @property
    def body(self) -> str:
        return rendered(self.statements)

    @property
    def varies(self) -> bool:
        """Whether its inputs are of another kind from call to call, so that it may be captured again."""
        return len(self.lengths) > 1 or any(re.search(rf"\b{CALL}\b", i.source) for i in self.inputs)

    @property
    def source(self) -> str:
        """Of the function `program`, or of the class `Program`."""
        arguments = ", ".join(i.name for i in self.inputs)
        body = f"{self.body}\nreturn {self.result}".lstrip("\n")
        if not self.state:
            return f"def program({arguments}):\n{textwrap.indent(body, '    ')}\n"
        state = "\n".join(s.source for s in self.state)
        forward = f"def forward(self, {arguments}):\n{textwrap.indent(body, '    ')}"
        init = f"def __init__(self):\n    super().__init__()\n{textwrap.indent(state, '    ')}"
        return f"class Program(nn.Module):\n{textwrap.indent(init, '    ')}\n\n{textwrap.indent(forward, '    ')}\n"

    @property
    def result(self) -> str:
        return self.returns[0] if len(self.returns) == 1 else f"({', '.join(self.returns)})"

    @property
    def input_source(self) -> str:
        """Of the function that makes the arguments."""
        lines = "\n".join(f"{i.name} = {leaf(i)}" for i in self.inputs)
        names = "".join(f"{i.name}, " for i in self.inputs)
        body = textwrap.indent(f"{lines}\nreturn ({names})", "    ")
        return f"def inputs({LENGTH}, {CALL}):\n{body}\n"

    def make(self) -> Callable[..., Any]:
        """A new function, or a new module with its state drawn from torch's generator."""
        made = _compiled(self.source)
        return made["Program"]() if self.state else made["program"]

    def make_inputs(self, length: int, call: int) -> tuple[Any, ...]:
        """New ones, from torch's generator."""
        return _compiled(self.input_source)["inputs"](length, call)

    def widened(self) -> Program:
        """The same in float64 throughout."""
        return replace(
            self,
            inputs=tuple(replace(i, source=_wide(i.source)) for i in self.inputs),
            state=tuple(replace(i, source=_wide(i.source)) for i in self.state),
            statements=tuple(
                replace(s, source=_wide(s.source), contexts=tuple(map(_wide, s.contexts))) for s in self.statements
            ),
            returns=tuple(map(_wide, self.returns)),
            modes=tuple("training" if mode == "autocast" else mode for mode in self.modes),
        )

    def without(self, statement: Statement) -> Program:
        return replace(self, statements=tuple(s for s in self.statements if s is not statement))


def _wide(source: str) -> str:
    source = re.sub(r"torch\.autocast\([^)]*\)", "torch.autocast('cpu', enabled=False)", source)
    source = re.sub(r"torch\.(float32|bfloat16|float16|half)\b", "torch.float64", source)
    return re.sub(r"\.(float|bfloat16|half)\(\)", ".mul(1.0)", source)


def leaf(made: Input) -> str:
    """The expression with which an input is made."""
    return f"({made.source}).detach().requires_grad_()" if made.grad else made.source


_files = itertools.count()


def _compiled(source: str) -> dict[str, Any]:
    """The names that a source binds. Its lines are to be found by Dynamo's messages; its code is new each time."""
    file = f"<fuzz {next(_files)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    linecache.cache.pop(file.replace(file[6:-1], str(int(file[6:-1]) - 64)), None)
    names = {**vars(prelude), "nn": nn, "torch": torch}
    exec(compile(source, file, "exec"), names)  # noqa: S102
    return names

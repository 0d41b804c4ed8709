"""Draws a program: each statement is tried at once, by eager PyTorch on every length, and kept if it runs."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.program import prelude
from fuzz.program.programs import CALL, LENGTH, Input, Statement, leaf, rendered

__all__ = ["Builder", "Form", "Hopeless", "Skip", "Spoiled", "form", "forms", "is_row"]

LARGEST = 1e4
"""Of values: what is larger is not drawn, lest rounding be seen."""
NARROW = (torch.float32, torch.bfloat16, torch.float16)

Form = Callable[["Builder"], Any]
forms: list[tuple[float, Form]] = []
"""All that statements are drawn from, with their weights."""


def form(weight: float) -> Callable[[Form], Form]:
    """Makes a function that adds statements one that is drawn."""

    def register(function: Form) -> Form:
        forms.append((weight, function))
        return function

    return register


class Skip(Exception):
    """What was drawn does not fit here."""


class Hopeless(Exception):
    """The program cannot be made anew, or gives nothing: another is drawn."""


class Spoiled(Exception):
    """A trial has changed tensors and failed: the whole program is tried anew without the statement."""


class Builder:
    """A program that grows, and its values at each of its lengths."""

    def __init__(self, chance: random.Random, lengths: tuple[int, ...]) -> None:
        self.chance, self.lengths = chance, lengths
        self.inputs: list[Input] = []
        self.state: list[Input] = []
        self.statements: list[Statement] = []
        self.names: list[str] = []
        self.contexts: tuple[str, ...] = ()
        self.functions: set[str] = set()
        self.count = self.dropouts = 0
        self.depth = 0
        self._begin()

    def _begin(self) -> None:
        self.environments = [
            {**vars(prelude), LENGTH: n, CALL: 0, "self": nn.Module()} for n in dict.fromkeys(self.lengths)
        ]

    # --- chance ---

    def often(self, probability: float) -> bool:
        return self.chance.random() < probability

    def one_of(self, *values: Any) -> Any:
        return self.chance.choice(values)

    # --- values ---

    def __getitem__(self, name: str) -> Tensor:
        """A tensor's value at the first length."""
        return self._value(name, 0)

    def _value(self, name: str, which: int) -> Tensor:
        environment = self.environments[which]
        return getattr(environment["self"], name[5:]) if name.startswith("self.") else environment[name]

    def pick(self, test: Callable[[Tensor], bool] = lambda t: True) -> str:
        """One of the values that pass, the newest the likeliest."""
        names = [n for n in reversed(self.names) if not self[n].is_nested and is_readable(self[n]) and test(self[n])]
        if not names:
            raise Skip
        return next((n for n in names if self.often(0.45)), self.one_of(*names))

    def row(self, dims: int = 1) -> str:
        """A floating-point tensor with rows of two numbers or more."""
        return self.pick(lambda t: is_row(t) and t.dim() >= dims)

    def shape(self, name: str) -> tuple[str, ...]:
        """As expressions of T, for the source of an input."""
        shapes = [self._value(name, i).shape for i in range(len(self.environments))]
        return tuple(self._size([s[d] for s in shapes]) for d in range(len(shapes[0])))

    def _size(self, sizes: list[int]) -> str:
        lengths = [e[LENGTH] for e in self.environments]
        if len(set(sizes)) == 1:
            return str(sizes[0])
        factor = sizes[0] // lengths[0]
        if [factor * n for n in lengths] != sizes:
            raise Skip
        return LENGTH if factor == 1 else f"{factor} * {LENGTH}"

    def size(self, name: str, dim: int) -> str:
        """For the source of a statement: a number, or the length looked up."""
        size = self.shape(name)[dim]
        return f"{name}.shape[{dim}]" if LENGTH in size else size

    # --- what is drawn ---

    def new(self, letter: str = "t") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def probability(self) -> float:
        """Of a dropout: another for each, by which its masks are known; a multiple of 2^-16, as lines round it."""
        self.dropouts += 1
        return (16384 + 4096 * self.chance.randrange(7) + self.dropouts) / 65536

    def input(self, source: str, grad: bool | None = None, argument: bool = False) -> str:
        """A new argument; or, now and then, a parameter or a buffer."""
        grad = self.often(0.75) if grad is None else grad
        name = self.new("x")
        if self.state and not argument and self.often(0.4) and LENGTH not in source and "expand" not in source:
            name = f"self.{name}"
            code = f"{name} = nn.Parameter({source})" if grad else f'self.register_buffer("{name[5:]}", {source})'
            made = Input(name, code)
            self._run(code)
            self.state.append(made)
        else:
            made = Input(name, source, grad)
            if not self.runs(leaf(made)):
                raise Skip
            self._run(f"{name} = {leaf(made)}")
            self.inputs.append(made)
        self.names.append(name)
        return name

    def number(self, source: str) -> str:
        """A new argument that is a number, not a tensor."""
        made = Input(self.new("a"), source)
        self._run(f"{made.name} = {made.source}")
        self.inputs.append(made)
        return made.name

    def attribute(self, source: str, letter: str = "m") -> str:
        """A new attribute of the module; the program is one from then on. `source` has {} in the place of its name."""
        name = f"self.{self.new(letter)}"
        code = source.format(name, name[5:])
        self._run(code)
        self.state.append(Input(name, code))
        return name

    def emit(self, source: str, letter: str = "t") -> str:
        """A new value, from an expression."""
        name = self.new(letter)
        self.statement(f"{name} = {source}", (name,))
        return name

    def statement(self, source: str, binds: tuple[str, ...] = (), effect: bool = False) -> None:
        """Tries a statement and adds it. An effect must leave backward possible."""
        made = Statement(source, binds, self.contexts)
        try:
            self._run(made.render())
        except Exception:  # noqa: BLE001
            if effect:
                raise Spoiled from None
            raise Skip from None
        if not all(map(self._is_usable, binds)):
            raise Spoiled if effect else Skip
        self.statements.append(made)
        self.names += binds
        if effect and not self._backward_runs():
            raise Spoiled

    def runs(self, expression: str) -> bool:
        """Whether an expression without effects has a value."""
        try:
            self._run(expression)
        except Exception:  # noqa: BLE001
            return False
        return True

    def _run(self, source: str) -> None:
        for environment in self.environments:
            exec(source, environment)  # noqa: S102

    def _is_usable(self, name: str) -> bool:
        """Whether a value is a tensor, not too large, and not longer than a program needs."""
        for i in range(len(self.environments)):
            value = self._value(name, i)
            if not isinstance(value, Tensor):
                return not isinstance(value, (tuple, list))
            if not is_readable(value):
                return False
            if value.is_nested or value.numel() > 4096 or value.numel() == 0 or value.dim() > 6:
                return False
            if value.is_floating_point() and not (value.detach().abs() < LARGEST).all():
                return False
        return True

    def _backward_runs(self) -> bool:
        if self.depth:
            return True  # seen when the block is whole
        try:
            for i in range(len(self.environments)):
                found = [self._value(name, i) for name in self.names if not self[name].is_nested]
                found = [t.double().sum() for t in found if is_differentiable(t)]
                if found:
                    torch.stack(found).sum().backward(retain_graph=True)
        except Exception:  # noqa: BLE001  a checkpointed function that runs again may raise anything
            return False
        return True

    # --- what statements stand in ---

    @contextmanager
    def within(self, context: str) -> Iterator[None]:
        """Statements that are drawn here stand in this with-block."""
        before, self.contexts = self.contexts, (*self.contexts, context)
        try:
            yield
        finally:
            self.contexts = before

    def function(self, arguments: list[str], steps: int) -> str:
        """A nested function of as many arguments, that ends with one value; it may use what is outside, too."""
        name, own = self.new("f"), [self.new("p") for _ in arguments]
        outer, self.statements = self.statements, []
        known, contexts = list(self.names), self.contexts
        self.contexts, self.depth = (), self.depth + 1
        try:
            for parameter, argument in zip(own, arguments):
                self._run(f"{parameter} = {argument}")
            self.names = [n for n in self.names if self.often(0.3)] + own
            begun = len(self.names)
            self.steps(steps)
            results = [n for n in self.names[begun:] if not n.startswith(("x", "self"))] or own
            inner = self.statements
            inputs = [n for n in self.names[begun:] if n.startswith(("x", "self"))]
        finally:
            self.statements, self.contexts, self.depth = outer, contexts, self.depth - 1
            self.names = known
        self.names = known + inputs
        body = "\n".join(filter(None, (rendered(inner), f"return {results[-1]}")))
        indented = textwrap.indent(body, "    ")
        made = f"def {name}({', '.join(own)}):\n{indented}"
        self.statement(made)
        return name

    # --- the whole ---

    def steps(self, count: int) -> None:
        """Adds statements, as many as fit in a few tries for each."""
        weights = [weight for weight, _ in forms]
        for _ in range(count):
            for _ in range(8):
                (_, function), *_ = self.chance.choices(forms, weights)
                before = self.depth, self.contexts
                try:
                    function(self)
                    break
                except Skip:
                    assert (self.depth, self.contexts) == before
                except Spoiled:
                    if self.depth:
                        raise
                    self._again()

    def _again(self) -> None:
        """Makes all values anew, as the program is without the statement that spoiled them."""
        self._begin()
        try:
            for made in self.state:
                self._run(made.source)
            for made in self.inputs:
                self._run(f"{made.name} = {leaf(made)}")
            for statement in self.statements:
                self._run(statement.render())
        except Exception:  # noqa: BLE001
            raise Hopeless from None
        bound = {n for s in self.statements for n in s.binds} | {i.name for i in (*self.inputs, *self.state)}
        self.names = [n for n in self.names if n in bound]


def is_readable(t: Tensor) -> bool:
    """Not so a piece of a split that was made without gradients and written since."""
    try:
        return t.is_leaf or t.requires_grad
    except RuntimeError:
        return False


def is_differentiable(t: Tensor) -> bool:
    return t.is_floating_point() and t.requires_grad and not t.is_leaf


def is_row(t: Tensor) -> bool:
    """Whether a line could begin with it."""
    return t.is_floating_point() and not t.is_nested and t.dim() > 0 and t.shape[-1] > 1

"""A word, of the vocabulary or of a line."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepass import _native

__all__ = ["Word", "words"]


@dataclass(frozen=True)
class Word:
    """One word: of the vocabulary (`parameters` are its defaults), or of a line (`parameters` are its numbers)."""

    name: str
    kind: str
    operand: str
    operand_name: str
    """Of several operands, with commas."""
    operands: int
    parameter_name: str
    """Of several numbers, with commas."""
    parameters: tuple[float, ...]
    """NaN is the machine epsilon."""
    formula: str
    meaning: str
    activation: str | None = None
    strategy: str | None = None
    """Of a contraction."""

    def __str__(self) -> str:
        inner = self.activation or (self.strategy if self.strategy != "auto" else "") or ""
        if self.numbers:
            numbers = ", ".join(map(repr, self.numbers))
            inner = f"{inner}({numbers})" if inner else numbers
        return f"{self.name}({inner})" if inner else self.name

    @property
    def numbers(self) -> tuple[float, ...]:
        """The parameters, if they are not the machine epsilon."""
        return tuple(n for n in self.parameters if not math.isnan(n))


def words() -> list[Word]:
    """The vocabulary, each word with its operand, meaning and formula."""
    known = {"name", "kind", "operand", "operand_name", "operands", "parameter_name", "formula", "meaning"}
    return [
        Word(parameters=() if w["default"] is None else (w["default"],), **{k: v for k, v in w.items() if k in known})
        for w in _native.words()
    ]

"""A word, of the vocabulary or of a line; and words that installed packages add to the vocabulary."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib import metadata

import torch

from onepass import _native

__all__ = ["Word", "WordError", "load_words", "words"]

ENTRY_POINTS = "onepass.words"
"""Packages ship words by an entry point of this group: the word's name, and a function that defines it."""


class WordError(ValueError):
    """A user's word that does not compile, or does not do what its reference does."""


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


def load_words(text: str) -> bool:
    """Defines what packages ship of a line's unknown words; whether there was any."""
    if torch.compiler.is_dynamo_compiling():
        return False
    names = set(re.findall(r"[A-Za-z]\w*", text)) - _names()
    found = [point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name in names]
    for point in found:
        point.load()()
        if point.name not in _names():
            raise WordError(f"{point.value}, the entry point of the word '{point.name}', has not defined it")
    return bool(found)


def _names() -> set[str]:
    return {word["name"] for word in _native.words()}

"""A word, of the vocabulary or of a line; and words that installed packages add to the vocabulary."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from importlib import metadata

import torch

from onepass import _native

__all__ = ["Word", "WordError", "about", "load_words", "word_of", "words"]

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
    flops: tuple[int, int]
    """Of one number, forward and backward."""
    properties: tuple[str, ...] = ()
    """What the word is in mathematics, as its descriptor says (include/onepass/word/descriptor.h)."""
    dtypes: str = ""
    """What its result may be stored as where that is not x's dtype, with commas."""
    option: str = ""
    """A name behind the numbers."""
    activation: str | None = None
    dtype: str | None = None
    """What its result is stored as; None: x's."""
    group: int = 0
    """Of codes: columns that share a scale; 0: a row, or the scale is given."""
    strategy: str | None = None
    """Of a contraction."""

    def __str__(self) -> str:
        dtype = f"{self.dtype}, static" if self.dtype and self.operand == "tensor" else self.dtype
        dtype = f"{dtype}, {self.group}" if self.group else dtype
        inner = self.activation or dtype or (self.strategy if self.strategy != "auto" else "") or ""
        if self.numbers:
            numbers = ", ".join(map(repr, self.numbers))
            inner = f"{inner}({numbers})" if inner else numbers
        if self.option:
            inner = f"{inner}, {self.option}" if inner else self.option
        return f"{self.name}({inner})" if inner else self.name

    @property
    def numbers(self) -> tuple[float, ...]:
        """The parameters, if they are not the machine epsilon."""
        return tuple(n for n in self.parameters if not math.isnan(n))

    @property
    def is_bias(self) -> bool:
        """Whether it adds a column."""
        return self.operand == "column" and "adds" in self.properties


def word_of(told: dict, parameters: tuple[float, ...]) -> Word:
    """A word as the library tells it, with these numbers."""
    more = {"parameters": parameters, "flops": tuple(told["flops"]), "properties": tuple(told["properties"])}
    return Word(**{**told, **more})


def words() -> list[Word]:
    """The vocabulary, each word with its operand, meaning and formula."""
    return list(_vocabulary().values())


def about(word: str) -> Word:
    """The word of the vocabulary that a line's word is: "mul" of "mul(0.5)"."""
    return _vocabulary()[word.partition("(")[0]]


_known: tuple[list[dict], dict[str, Word]] = ([], {})  # what the library told, and the words that it makes


def _vocabulary() -> dict[str, Word]:
    global _known
    told = _native.words()  # another list where a word has come or gone
    if _known[0] is not told:
        defaults = [tuple(w["defaults"]) for w in told]
        of_all = ({k: v for k, v in w.items() if k != "defaults"} for w in told)
        _known = told, {w["name"]: word_of(w, default) for w, default in zip(of_all, defaults)}
    return _known[1]


def load_words(text: str) -> bool:
    """Defines what packages ship of a line's unknown words; whether there was any."""
    if torch.compiler.is_dynamo_compiling():
        return False
    names = set(re.findall(r"[A-Za-z]\w*", text)) - _vocabulary().keys()
    found = [point for point in metadata.entry_points(group=ENTRY_POINTS) if point.name in names]
    for point in found:
        point.load()()
        if point.name not in _vocabulary():
            raise WordError(f"{point.value}, the entry point of the word '{point.name}', has not defined it")
    return bool(found)

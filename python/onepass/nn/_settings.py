"""What constructors check, and extra_repr says."""

from __future__ import annotations

from typing import Any

from .. import _lines, _native


def probability(p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p


def activation(module: Any, word: str | None, required: bool = False) -> str | None:
    """An activation with its numbers.

    Raises:
        TypeError, ValueError: as the function does that the module calls.
    """
    name = type(module).__name__
    if _lines.activation_word(name, word) is not None:
        _parsed(name, f"gate({word})")
    elif required:
        raise ValueError(f"{name}(): expected activation to be a word such as 'silu', but got None")
    return word


def strategy(module: Any, name: str) -> str:
    """A strategy of `linear`; the same."""
    _parsed(type(module).__name__, _lines.linear_word(type(module).__name__, name))
    return name


def approximate(module: Any, name: str) -> str:
    """Of gelu; RuntimeError for another."""
    _lines.gelu_word(type(module).__name__, name)
    return name


def _parsed(name: str, line: str) -> None:
    try:
        _native.describe(line)
    except _native.LineError as error:
        raise ValueError(f"{name}(): {error}") from None


def said(**settings: Any) -> str:
    """The settings that differ from nothing, behind what torch's own extra_repr says."""
    return "".join(f", {name}={value!r}" for name, value in settings.items() if value)

"""What constructors check and extra_repr says, and what torch's own modules must know of ours."""

from __future__ import annotations

from typing import Any

import torch

from ..functional import _lines
from ..line import Line, LineError


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
    """A strategy of `linear`, by its present name; ValueError for another."""
    return _parsed(type(module).__name__, _lines.linear_word(type(module).__name__, name)).words[0].strategy


def approximate(module: Any, name: str) -> str:
    """Of gelu; RuntimeError for another."""
    _lines.gelu_word(type(module).__name__, name)
    return name


def _parsed(name: str, line: str) -> Line:
    try:
        return Line(line)
    except LineError as error:
        raise ValueError(f"{name}(): {error}") from None


def said(**settings: Any) -> str:
    """The settings that differ from nothing, behind what torch's own extra_repr says."""
    return "".join(f", {name}={value!r}" for name, value in settings.items() if value)


class Called(torch.nn.Module):
    """A module that torch's fast paths must call: `torch.nn.TransformerEncoderLayer` in inference reads the parameters
    of its norms and linear layers and computes without them, unless a hook listens."""

    def _let_be_called(self) -> None:
        if _listens not in self._forward_hooks.values():
            self.register_forward_hook(_listens)


class Activated(Called):
    """A module whose activation such a path would lose."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "activation" and value is not None:
            self._let_be_called()


def activated_nested(result: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Nested tensors have no kernels of ours: by torch's."""
    return result if activation is None else Line(activation).reference(result)


def _listens(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Changes nothing."""

"""What constructors check, and extra_repr says."""

from __future__ import annotations

from typing import Any


def probability(p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p


def said(**settings: Any) -> str:
    """The settings that differ from nothing, behind what torch's own extra_repr says."""
    return "".join(f", {name}={value!r}" for name, value in settings.items() if value)

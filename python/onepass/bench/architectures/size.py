"""How large an architecture is made, what of it changes nothing in its graph, and how one of transformers is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Built", "Make", "Size", "image", "mask_of_padding", "tokens", "transformer", "without_dropout"]

Built = tuple[nn.Module, dict[str, Any]]
"""A model, and what it is called with."""


@dataclass(frozen=True)
class Size:
    """The numbers that a paper gives of its model.

    Attributes:
        width: of hidden states, the last stage's where there are stages; `heads` divides it.
        inner: width of the feed-forward layers.
        image: pixels of an image's side.
        samples: numbers of a recording.
    """

    width: int
    heads: int
    inner: int
    vocabulary: int
    batch: int
    tokens: int
    image: int
    samples: int
    layers: int = 2

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def patch(self) -> int:
        return self.image // 8 if self.image < 128 else 16


Make = Callable[[Size], Built]


def transformer(name: str, options: dict[str, Any], inputs: dict[str, Any], model: str = "", attention=None) -> Built:
    """One of transformers, by its configuration's name without "Config", without dropout.

    Raises:
        ModuleNotFoundError: without transformers.
    """
    import transformers

    configuration = without_dropout(getattr(transformers, f"{name}Config")(**options))
    of = getattr(transformers, model or f"{name}Model")
    kinds = {} if attention is None else {"attn_implementation": attention}
    if of._can_set_experts_implementation():  # not in groups, whose products are for float32 and below
        kinds["experts_implementation"] = "batched_mm"
    return of._from_config(configuration, **kinds), inputs


def without_dropout(configuration: Any) -> Any:
    """The same configuration, and those within it: nothing is drawn, neither elements nor paths nor layers."""
    for name, value in vars(configuration).items():
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "pdrop" in name):
            setattr(configuration, name, 0.0)
    return configuration


def tokens(size: Size, **more: Any) -> dict[str, Any]:
    """Identifiers from 3 on: those below stand for padding and for begin and end."""
    return {"input_ids": torch.randint(3, size.vocabulary, (size.batch, size.tokens)), **more}


def mask_of_padding(size: Size) -> Tensor:
    """The last third of the last text is padding."""
    mask = torch.ones(size.batch, size.tokens, dtype=torch.long)
    mask[-1, size.tokens - size.tokens // 3 :] = 0
    return mask


def image(size: Size, *shape: int, side: int | None = None) -> Tensor:
    """Of shape (batch, *shape, 3, side, side)."""
    side = side or size.image
    return torch.randn(size.batch, *shape, 3, side, side)

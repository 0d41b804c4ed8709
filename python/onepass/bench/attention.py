"""Attention's patterns: its probabilities alone, and the whole of it with values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.bench.patterns import Case, P, Pattern, Shape, Traffic
from onepass.line import Line

__all__ = ["ATTENTIONS", "CAP", "SCALE", "Attention", "cases", "curve_of", "square_product"]

SCALE = 0.125  # of all scores
CAP = 50.0  # scores lie between -CAP and CAP


def padding(shape: Shape, device: torch.device, normal: Callable[[Shape], Tensor]) -> Tensor:
    """[B, 1, 1, S], bool: the last eighth of the keys takes no part."""
    keys = shape[-1]
    return (torch.arange(keys, device=device) < keys - keys // 8).repeat(shape[0], 1, 1, 1)


def expanded_padding(shape: Shape, device: torch.device, normal: Callable[[Shape], Tensor]) -> Tensor:
    """The same as [B, H, L, S], in place."""
    return padding(shape, device, normal).expand(shape)


def shared_bias(shape: Shape, device: torch.device, normal: Callable[[Shape], Tensor]) -> Tensor:
    """[1, 1, L, S], added."""
    return normal((1, 1, *shape[2:]))


def bias(shape: Shape, device: torch.device, normal: Callable[[Shape], Tensor]) -> Tensor:
    """[B, H, L, S], added."""
    return normal(shape)


@dataclass(frozen=True)
class Attention(Pattern):
    """A line that begins with `scores`. A case's shape is the queries', its out_features says how many keys there are;
    what is sampled is matrices, not rows."""

    mask: Callable[[Shape, torch.device, Callable[[Shape], Tensor]], Tensor] | None = None

    own = 2
    suite = "attention"

    @property
    def parsed(self) -> Line:
        return Line(self.line)

    def has(self, name: str) -> bool:
        """Whether the line has a word."""
        return any(word.name == name for word in self.parsed.words)

    @property
    def fused(self) -> Callable[..., Tensor]:
        if not self.parsed.values:
            return lambda query, key, mask=None: functional.attention_scores(query, key, mask, scale=SCALE)
        return self.through(functional.scaled_dot_product_attention) or super().fused

    def through(self, attention: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
        """By a function of `torch.nn.functional.scaled_dot_product_attention`'s arguments; None where they do not
        express it."""
        if not self.parsed.values or self.has("tanh"):
            return None
        p, causal = P if self.has("dropout") else 0.0, self.has("causal")

        def call(query: Tensor, key: Tensor, *others: Tensor) -> Tensor:
            mask, value = others if len(others) == 2 else (None, *others)
            return attention(query, key, value, attn_mask=mask, dropout_p=p, is_causal=causal, scale=SCALE)

        return call

    def inputs(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str = "", out_features: int = 0
    ) -> list[Tensor]:
        """Queries, keys, a mask and values; all but the mask require a gradient."""
        generator = torch.Generator(device).manual_seed(math.prod(shape))
        normal = functools.partial(torch.randn, generator=generator, dtype=dtype, device=device)

        keys = (*shape[:-2], out_features, shape[-1])
        tensors = [normal(size).requires_grad_() for size in (shape, keys, *([keys] if self.parsed.values else []))]
        if self.mask is not None:
            tensors.insert(2, self.mask((*shape[:-1], out_features), device, normal))
        return tensors

    def result_shapes(self, inputs: list[Tensor]) -> list[Shape]:
        return [(*inputs[0].shape[:-1], inputs[1].shape[-1 if self.parsed.values else -2])]

    def traffic(self, inputs: list[Tensor]) -> tuple[Traffic, Traffic]:
        """Backward reads the inputs, the result and its gradient; an expanded mask counts once."""
        result = math.prod(self.result_shapes(inputs)[0]) * inputs[0].element_size()
        read = sum(t.untyped_storage().nbytes() for t in inputs)
        wanted = sum(t.nbytes for t in inputs if t.requires_grad)
        return Traffic(read + result, 1, 1), Traffic(read + 2 * result + wanted, 2, 1)

    def products(self, inputs: list[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
        """A copy that moves the same bytes; with values one product of square matrices with as many flops, of which
        backward has the scores again and four more."""
        query, key = inputs[:2]
        if not self.parsed.values:
            halves = (torch.ones(t.bytes // 2, dtype=torch.uint8, device=query.device) for t in self.traffic(inputs))
            return tuple(half.clone for half in halves)
        flops = 4 * query.numel() * key.shape[-2] / (2 if self.has("causal") else 1)
        return square_product(flops, query), square_product(2.5 * flops, query)


def square_product(flops: float, like: Tensor) -> Callable[[], Tensor]:
    """One product of square matrices, of about so many flops: what a chip reaches where nothing is in its way."""
    n = max(64, 64 * round((flops / 2) ** (1 / 3) / 64))
    a, b = (torch.randn(n, n, dtype=like.dtype, device=like.device) for _ in range(2))
    return lambda: a @ b


def probabilities(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-1, -2) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return F.softmax(scores, -1)


def attention(query, key, value):
    return probabilities(query, key) @ value


def causal_attention(query, key, value):
    takes_part = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return probabilities(query, key, takes_part) @ value


def masked_attention(query, key, mask, value):
    return probabilities(query, key, mask) @ value


def attention_with_dropout(query, key, mask, value, dropout=F.dropout):
    return dropout(probabilities(query, key, mask), P) @ value


def softcapped_attention(query, key, value):
    return F.softmax(CAP * torch.tanh(query @ key.transpose(-1, -2) * (SCALE / CAP)), -1) @ value


def cases(dtypes: tuple[torch.dtype, ...], *shapes: Shape) -> tuple[Case, ...]:
    """With as many keys as queries."""
    return tuple(Case(shape, dtype, "", shape[-2]) for dtype in dtypes for shape in shapes)


def curve_of(device_type: str, features: int) -> tuple[Case, ...]:
    """From 128 keys on, always as many probabilities."""
    total, longest, dtype = (2**28, 8192, torch.bfloat16) if device_type == "cuda" else (2**22, 2048, torch.float32)
    lengths = [2**k for k in range(7, 14) if 2**k <= longest]
    matrices = [total // length**2 for length in lengths]
    shapes = [(max(1, n // 16), min(n, 16), length, features) for n, length in zip(matrices, lengths)]
    return cases((dtype,), *shapes)


CUDA = cases((torch.bfloat16,), (4, 16, 2048, 64), (4, 16, 4096, 128), (4, 16, 2048, 32), (16, 16, 512, 64))
CPU = cases((torch.float32, torch.bfloat16), (1, 12, 512, 64), (8, 12, 128, 64))
ATTENTIONS: tuple[Attention, ...] = tuple(
    Attention(name, f"scores | {words}", eager, CUDA if "values" in words else CUDA[:1], CPU, mask)
    for name, words, eager, mask in (
        ("attention", f"mul({SCALE}) | softmax | values", attention, None),
        ("attention_causal", f"mul({SCALE}) | causal | softmax | values", causal_attention, None),
        ("attention_shared_bias", f"mul({SCALE}) | mask | softmax | values", masked_attention, shared_bias),
        ("attention_bias", f"mul({SCALE}) | mask | softmax | values", masked_attention, bias),
        ("attention_mask", f"mul({SCALE}) | mask | softmax | values", masked_attention, padding),
        ("attention_expanded_mask", f"mul({SCALE}) | mask | softmax | values", masked_attention, expanded_padding),
        (
            "attention_dropout",
            f"mul({SCALE}) | mask | softmax | dropout({P}) | values",
            attention_with_dropout,
            padding,
        ),
        (
            "attention_softcap",
            f"mul({SCALE / CAP}) | tanh | mul({CAP}) | softmax | values",
            softcapped_attention,
            None,
        ),
        ("attention_scores", f"mul({SCALE}) | softmax", probabilities, None),
        ("attention_scores_mask", f"mul({SCALE}) | mask | softmax", probabilities, padding),
    )
)

"""A norm and an activation behind it: what one read and one write are worth, and what both directions hold.

The tanh approximation, as transformers have it, at every dtype; the exact gelu and relu beside it where memory is all.
"""

import torch
import torch.nn.functional as F

from onepass.bench.patterns import Case, Pattern, layer_norm, layer_norm_gelu, layer_norm_gelu_tanh
from onepass.case.comparison import Comparison

__all__ = ["COMPARISON"]

DTYPES = torch.float32, torch.float16, torch.bfloat16
NORM = "layer_norm(1e-5) | scale | bias"
TEACHING, SIBLING = (2, 8, 64), (8, 512, 768)
LARGE = (8192, 4096), (4096, 16384)


def layer_norm_relu(x, weight, bias):
    return F.relu(layer_norm(x, weight, bias))


def sizes(dtypes: tuple[torch.dtype, ...], *shapes: tuple[int, ...]) -> tuple[Case, ...]:
    return tuple(Case(shape, dtype) for shape in shapes for dtype in dtypes)


def beside(name: str, activation: str, eager) -> Pattern:
    """Another activation at the teaching size, and where memory is all."""
    teaching = sizes(DTYPES[:1], TEACHING)
    return Pattern(
        name,
        f"{NORM} | {activation}",
        eager,
        cuda=(*teaching, *sizes(DTYPES[2:], LARGE[0])),
        cpu=(*teaching, *sizes(DTYPES[:1], SIBLING)),
    )


COMPARISON = Comparison(
    name="layernorm-activation",
    title="LayerNorm + activation",
    patterns=(
        Pattern(
            "layernorm-gelu-tanh",
            f"{NORM} | gelu_tanh",
            layer_norm_gelu_tanh,
            cuda=(*sizes(DTYPES, TEACHING, SIBLING, LARGE[0]), *sizes(DTYPES[2:], LARGE[1])),
            cpu=sizes(DTYPES, TEACHING, SIBLING),
        ),
        beside("layernorm-gelu", "gelu", layer_norm_gelu),
        beside("layernorm-relu", "relu", layer_norm_relu),
    ),
    inputs=("x", "norm weight", "norm bias"),
)

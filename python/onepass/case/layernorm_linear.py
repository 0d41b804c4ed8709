"""LayerNorm before a linear layer, with all five gradients: an operator bound by memory, then one by arithmetic.

At the teaching size the cost of a call is everything. For larger ones the norm's share of the time falls as
out_features grows, and with it what fusion can win; what it saves in memory, the norm's result, stays.
"""

import torch

from onepass.bench.patterns import Case, Pattern, layer_norm_linear
from onepass.case.comparison import Comparison

__all__ = ["COMPARISON"]

TEACHING = (4, 4, 8), 16
SIBLINGS = ((8, 128, 768), 768), ((8, 128, 768), 3072)
LARGE = ((65536, 256), 64), ((8192, 4096), 4096)

EVERYWHERE = tuple(
    Case(shape, dtype, "", out_features)
    for shape, out_features in (TEACHING, *SIBLINGS)
    for dtype in (torch.float32, torch.bfloat16)
)
COMPARISON = Comparison(
    name="layernorm-linear",
    title="LayerNorm + Linear",
    patterns=(
        Pattern(
            "layernorm-linear",
            "layer_norm(1e-5) | scale | bias | linear | bias",
            layer_norm_linear,
            cuda=(*EVERYWHERE, *(Case(shape, torch.bfloat16, "", out_features) for shape, out_features in LARGE)),
            cpu=EVERYWHERE,
        ),
    ),
    inputs=("x", "norm weight", "norm bias", "linear weight", "linear bias"),
)

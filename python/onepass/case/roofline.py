"""Operators before they are fused and lines after, below the roofs that this device has been seen to reach.

Norms by hand and by PyTorch's function, activations and dropout behind them, softmax's chains, and matrix products
alone and with words around them. For each: bytes, flops, their ratio, time, and which of memory, arithmetic and
launches bounds it; with that, whether fusing it is worth while.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onepass.bench.patterns import (
    Case,
    P,
    Pattern,
    bias_dropout_add,
    gelu_dropout_add,
    layer_norm,
    layer_norm_gelu,
    layer_norm_linear,
    swiglu,
)
from onepass.case import roofs, roofs_report
from onepass.case.comparison import Comparison, Study

__all__ = ["COMPARISON"]

FP32, BF16 = torch.float32, torch.bfloat16
SMALL, ON_CPU, ON_CUDA = (256, 1024), (4096, 1024), (8192, 4096)
NORM = "layer_norm(1e-5) | scale | bias"


def layer_norm_by_hand(x, weight, bias):
    """As formulas are written down: statistics, the normalised row, the affine part."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    normalised = (x - mean) / torch.sqrt(variance + 1e-5)
    return normalised * weight + bias


def relu_layer_norm_by_hand(x, weight, bias):
    return torch.relu(layer_norm_by_hand(x, weight, bias))


def rms_norm_by_hand(x, weight):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def softmax_by_hand(x):
    numerator = torch.exp(x - x.amax(-1, keepdim=True))
    return numerator / numerator.sum(-1, keepdim=True)


def softmax_dropout(x, dropout=F.dropout):
    return dropout(F.softmax(x, -1), P)


def scaled_masked_softmax(x, mask):
    return F.softmax(x * 0.125 + mask, -1)


def linear_bias_gelu(x, matrix, bias):
    return F.gelu(F.linear(x, matrix) + bias)


def of_rows(name: str, line: str, eager) -> Pattern:
    """Where a call is all there is to pay for, and where memory is."""
    small = Case(SMALL, FP32)
    cuda = small, Case(ON_CUDA, FP32), Case(ON_CUDA, BF16)
    return Pattern(name, line, eager, cuda=cuda, cpu=(small, Case(ON_CPU, FP32)))


def product(name: str, line: str, eager, cpu: tuple[tuple[int, int, int], ...], cuda) -> Pattern:
    """Of rows, features and out_features; on CUDA in both dtypes."""

    def of(sizes, dtypes) -> tuple[Case, ...]:
        return tuple(Case((m, k), dtype, "", n) for m, k, n in sizes for dtype in dtypes)

    return Pattern(name, line, eager, cuda=(*of(cpu[:1], (FP32,)), *of(cuda, (FP32, BF16))), cpu=of(cpu, (FP32,)))


def square(*sizes: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((n, n, n) for n in sizes)


PATTERNS = (
    of_rows(roofs.BY_HAND, NORM, layer_norm_by_hand),
    of_rows("layer_norm", NORM, layer_norm),
    of_rows(roofs.RELU_BY_HAND, f"{NORM} | relu", relu_layer_norm_by_hand),
    of_rows("layer_norm + gelu", f"{NORM} | gelu", layer_norm_gelu),
    of_rows("gelu + dropout + add", f"gelu | dropout({P}) | add", gelu_dropout_add),
    of_rows("rms_norm by hand", "rms_norm(1e-6) | scale", rms_norm_by_hand),
    of_rows("bias + dropout + add", f"bias | dropout({P}) | add", bias_dropout_add),
    of_rows("swiglu", "gate(silu)", swiglu),
    of_rows("softmax by hand", "softmax", softmax_by_hand),
    of_rows("softmax + dropout", f"softmax | dropout({P})", softmax_dropout),
    of_rows("mul + add + softmax", "mul(0.125) | add | softmax", scaled_masked_softmax),
    product(roofs.MATMUL, "linear", F.linear, square(256, 1024), square(1024, 4096, 8192)),
    product(
        "matmul + bias + gelu",
        "linear | bias | gelu",
        linear_bias_gelu,
        ((256, 256, 256), (1024, 1024, 1024)),
        square(4096),
    ),
    product(
        "layer_norm + matmul to few",
        f"{NORM} | linear | bias",
        layer_norm_linear,
        ((256, 256, 16), (16384, 256, 16)),
        ((65536, 1024, 64),),
    ),
)


def further(study: Study) -> list[str]:
    """Places everything below the roofs, judges it, and holds rules of thumb against it."""
    results = study.results
    dtypes = {case.dtype for _, case in study.cases}
    results["roofs"] = measured = roofs.measure(study.clock, study.device, sorted(dtypes, key=str), study.quick)
    results["points"] = roofs.points(results["rows"], measured, study.device.type)
    results["verdicts"] = roofs.verdicts(results["points"], results["rows"])
    results["claims"] = list(roofs.claims(results["points"], measured, study.device.type))
    roofs_report.show(results, study.console)
    if study.plot is not None:
        roofs_report.draw(results, study.plot)
        study.console.print(f"wrote {study.plot}", highlight=False, soft_wrap=True)
    return []


COMPARISON = Comparison(
    name="roofline",
    title="Roofline: operators before, lines after",
    patterns=PATTERNS,
    sampled=True,
    further=further,
    files=("plot",),
    show=roofs_report.heading,
    notes=roofs_report.NOTES,
)

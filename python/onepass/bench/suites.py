"""Which shapes of a pattern are timed: a suite's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from onepass.bench.attention import cases, curve_of
from onepass.bench.patterns import LAYOUTS, Case, Pattern, bf16
from onepass.line import Line

__all__ = ["SUITES", "cases_of"]


def table(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """The shapes of the README's tables."""
    return () if pattern.contracts or pattern.suite in ("programs", "any") else pattern.of_device(device_type)


def linear(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Lines with `linear`, beside the product alone."""
    return pattern.of_device(device_type) if pattern.contracts and not pattern.suite else ()


def attention(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Attention, and its probabilities alone."""
    return pattern.of_device(device_type) if pattern.suite == "attention" else ()


def attention_curve(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Attention's probabilities, always as many, of 128 to 8192 keys."""
    features = {"attention_scores": (64,), "attention_scores_mask": (32, 64, 128)}
    return tuple(case for d in features.get(pattern.name, ()) for case in curve_of(device_type, d))


def attention_odd(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Attention of numbers of keys that are no multiples of 8: a vision transformer's, and text as it comes."""
    if pattern.name not in ("attention", "attention_causal", "attention_shared_bias", "attention_mask"):
        return ()
    if device_type == "cuda":
        shapes = ((4, 16, 2047, 64), (4, 16, 1023, 128), (16, 12, 577, 64), (16, 12, 197, 64), (64, 12, 131, 64))
        return cases((torch.bfloat16,), *shapes)
    return cases((torch.float32, torch.bfloat16), (1, 12, 577, 64), (1, 12, 197, 64), (8, 12, 131, 64))


def models(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Whole models that return their attentions."""
    return pattern.of_device(device_type) if pattern.suite == "models" else ()


def programs(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Endings, several row words, columns of a batch."""
    return pattern.of_device(device_type) if pattern.suite == "programs" else ()


def any(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Lines that nobody tuned."""
    return pattern.of_device(device_type) if pattern.suite == "any" else ()


LENGTHS = tuple(2**k for k in range(6, 19))  # of a curve's rows


def curve_elements(device_type: str) -> int:
    """Of x, at each length."""
    return 2**27 if device_type == "cuda" else 2**22


def programs_curve(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Row lengths from 64 to 262144 of a tensor of always the same size, in 16 batches where columns are a batch's."""
    if pattern.name not in ("two_norms", "cross_entropy", "log_softmax", "modulated_norm", "norm_fp8"):
        return ()
    batches = (16,) if pattern.name == "modulated_norm" else ()
    rows = curve_elements(device_type) // math.prod(batches)
    return bf16(*((*batches, rows // length, length) for length in LENGTHS))


CURVES = ("bias_gelu", "layer_norm", "rms_norm", "softmax", "layer_norm_gelu", "add_rms_norm")


def curve(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Row lengths from 64 to 262144 of a tensor of always the same size."""
    if pattern.name not in CURVES:
        return ()
    elements = curve_elements(device_type)
    return tuple(
        Case((elements // length, length), dtype) for dtype in (torch.bfloat16, torch.float32) for length in LENGTHS
    )


def awkward(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Row lengths that are no multiple of what a kernel likes, each behind a neighbour that is, few long rows and many
    short ones."""
    if pattern.name not in CURVES:
        return ()
    elements = 2**26 if device_type == "cuda" else 2**22
    lengths = (768, 760, 1024, 1023, 1152, 1128, 3072, 3000, 13312, 12980)
    extremes = ((1, 2**24), (8, 2**20), (2**22, 32)) if device_type == "cuda" else ()
    return bf16(*((elements // length, length) for length in lengths), *extremes)


def layouts(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Rows that lie apart and rows that do not begin at 16 bytes, beside contiguous ones."""
    if pattern.name not in CURVES:
        return ()
    elements = curve_elements(device_type)
    shapes = ((elements // length, length) for length in (1024, 4096))
    return tuple(Case(shape, torch.bfloat16, layout) for shape in shapes for layout in ("", *LAYOUTS))


def small(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """Where the cost of a call counts; on the CPU also what fits the caches."""
    if Line(pattern.line).weight is not None or pattern.suite == "any":
        return ()
    if device_type == "cuda":
        shapes = ((512, 4096), (64, 1024), (1, 4096))
        return tuple(Case(shape, dtype) for dtype in (torch.bfloat16, torch.float32) for shape in shapes)
    shapes = ((1, 64), (8, 64), (64, 64), (1, 768), (16, 768), (64, 768), (256, 768), (1, 4096), (64, 4096))
    return tuple(Case(shape, dtype) for dtype in (torch.float32, torch.bfloat16) for shape in shapes)


def host(pattern: Pattern, device_type: str) -> tuple[Case, ...]:
    """None: a call of a small tensor is timed on the host (cases.host_case)."""
    return ()


SUITES: dict[str, Callable[[Pattern, str], tuple[Case, ...]]] = {
    suite.__name__: suite
    for suite in (
        table,
        curve,
        awkward,
        layouts,
        small,
        linear,
        attention,
        attention_curve,
        attention_odd,
        models,
        programs,
        programs_curve,
        any,
        host,
    )
}


def cases_of(pattern: Pattern, device_type: str, quick: bool = False, suite: str = "table") -> tuple[Case, ...]:
    """The shapes and dtypes; with `quick` one, the smallest that is more than the cost of a call."""
    found = SUITES[suite](pattern, device_type)
    if not quick or not found:
        return found
    sizes = {case: math.prod(case.shape) for case in found}
    return (min(found, key=lambda case: (sizes[case] < 2**20, sizes[case], case.dtype.itemsize)),)

"""One small call of every CUDA kernel, and of each form that it has (sanitized_forms.py): what tools/sanitize runs, and
the process that runs some of them under a sanitizer.

usage: sanitized_calls.py REPORT [--log FILE] [--launches] CALL...
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "python")]

import torch  # noqa: E402

import onepass  # noqa: E402
from helpers import make_inputs, upstream, with_strategy  # noqa: E402
from onepass import functional as F  # noqa: E402

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@dataclass(frozen=True)
class Call:
    """A call forward and, where its inputs have gradients, backward; kernels: those that it must launch; text: its
    line, if it is of `onepass.fused`."""

    name: str
    kernels: tuple[str, ...]
    run: Callable[[str], None]
    text: str = ""


CALLS: dict[str, Call] = {}


def add(name: str, kernels: str, run: Callable[[str], None], text: str = "") -> None:
    """A call whose kernels stand in one text."""
    assert name not in CALLS, name
    CALLS[name] = Call(name, tuple(kernels.split()), run, text)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, one further than where an allocation begins."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that have three more."""
    return x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]].copy_(x)


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in rows that begin at 16 bytes."""
    step = 16 // x.element_size()
    return x.new_zeros((*x.shape[:-1], -(-x.shape[-1] // step) * step))[..., : x.shape[-1]].copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, the first dimension innermost but one."""
    return x.transpose(0, -2).contiguous().transpose(0, -2)


def both_ways(of: Callable, tensors: list[torch.Tensor], backward: bool = True) -> None:
    """of(*tensors), and the gradients of all that can have one."""
    tensors = [t.detach().requires_grad_(backward and t.is_floating_point()) for t in tensors]
    results = of(*tensors)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    wanted = [t for t in tensors if t.requires_grad]
    results = [r for r in results if r.requires_grad or not wanted]  # codes have none
    if wanted and results:
        torch.autograd.grad(results, wanted, upstream(results), allow_unused=True)


def line(
    name: str,
    kernels: str,
    text: str,
    shape: tuple[int, ...],
    dtype=BF16,
    *,
    how: str = "",
    lies=None,
    backward=True,
    **of,
) -> None:
    """A line's call. how: its strategy; lies: how x and operands of its size do."""
    given = with_strategy(text, how) if how else text

    def run(device: str) -> None:
        tensors = make_inputs(text, shape, dtype, device, **of).tensors
        if lies:
            tensors = [lies(t.detach()) if t.dim() > 1 else t for t in tensors]
        both_ways(lambda *ts: onepass.fused(given, *ts), tensors, backward)

    add(name, kernels, run, text)


def columns_of_batches(name: str, kernels: str, text: str, shape: tuple[int, int, int]) -> None:
    """A call of a line of two operands, each with columns of its own for a batch of rows."""
    shapes = (shape, *((shape[0], 1, shape[2]),) * 2)

    def run(device: str) -> None:
        both_ways(lambda *ts: onepass.fused(text, *ts), [torch.randn(s, device=device, dtype=BF16) for s in shapes])

    add(name, kernels, run, text)


def lists(name: str, kernels: str, text: str, columns: int, rows: tuple[int, ...], dtype=BF16, own=False) -> None:
    """A call for several tensors, with operands for all of them or (own) for each."""

    def run(device: str) -> None:
        made = [make_inputs(text, (n, columns), dtype, device, seed=i).tensors for i, n in enumerate(rows)]
        count = len(made[0])
        given = [[m[i].detach().requires_grad_() for m in made] if i == 0 or own else made[0][i] for i in range(count)]
        results = onepass.fused(text, *given)
        kinds = results if isinstance(results, tuple) else (results,)
        flat = [r for kind in kinds for r in kind]
        leaves = [t for one in given for t in (one if isinstance(one, list) else [one])]
        torch.autograd.grad(flat, leaves, upstream(flat), allow_unused=True)

    add(name, kernels, run, text)


def scores(
    name: str,
    kernels: str,
    text: str,
    shape: tuple[int, ...],
    keys: int,
    dtype=BF16,
    *,
    how="",
    values=0,
    turned=False,
    **of,
) -> None:
    """A line's call with `scores`. values: numbers of each, where it ends in them; turned: heads lie between rows."""
    given = with_strategy(text, how) if how else text

    def run(device: str) -> None:
        inputs = make_inputs(text, shape, dtype, device, out_features=keys, **of)
        if values:
            inputs.operands[-1] = torch.randn(*shape[:-2], keys, values, device=device).to(dtype)
        tensors = inputs.tensors
        for place in (0, 1, len(tensors) - 1) if turned else ():
            tensors[place] = tensors[place].detach().transpose(1, 2).contiguous().transpose(1, 2)
        both_ways(lambda *ts: onepass.fused(given, *ts), tensors)

    add(name, kernels, run, text)


NORM = "layer_norm(1e-5) | scale | bias"
TWO_NORMS = "rms_norm(1e-6) | scale | add | keep | layer_norm(1e-5) | scale"
KEEPING = "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale"
ELEMENTWISE, ROWWISE = "elementwise_forward elementwise_backward", "rowwise_forward rowwise_backward"
STREAMED, PAIRED, TILES = "rowwise_forward_streamed", "rowwise_forward_paired", "rowwise_backward_tiles"
PARTS = " ".join(f"rowwise_{way}_{part}" for way in ("forward", "backward") for part in ("parts", "combined", "tiles"))


def head(words: int, device: str) -> None:
    x, matrix = torch.randn(40, 64, device=device, dtype=BF16), torch.randn(words, 64, device=device, dtype=BF16)
    target = torch.randint(words, (40,), device=device)
    both_ways(lambda x, matrix: F.linear_cross_entropy(x, matrix, target), [x, matrix])


def norms_and_rope(device: str) -> None:
    """Queries and keys behind tokens, with tables of pairs."""
    tables = torch.randn(2, 1, 20, 32, device=device).to(BF16)
    heads = [torch.randn(2, 20, count, 64, device=device).to(BF16) for count in (6, 2)]
    both_ways(
        lambda q, k, *weights: onepass.functional.qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), *weights, *tables),
        [*heads, *torch.randn(2, 64, device=device)],
    )


def first_neighbours(device: str) -> None:
    tables = torch.randn(2, 20, 12, device=device)
    both_ways(
        lambda x, g: onepass.fused("scale | rope(12, interleaved)", x, g, *tables),
        [torch.randn(3, 20, 36, device=device), torch.randn(36, device=device)],
    )


def plain_lines() -> None:
    line("one long row", ELEMENTWISE, "gelu", (64, 512))
    line("few rows", ELEMENTWISE, "bias | gelu_tanh", (40, 256))
    line("many rows", f"{ELEMENTWISE} add_columns", "bias | gelu_tanh", (6000, 136))
    line("gate", ELEMENTWISE, "gate(silu)", (64, 512), F32)
    line("dropout, keep", ELEMENTWISE, "bias | dropout(0.1) | add | keep", (70, 264), F16)
    line("float64", f"{ELEMENTWISE} add_columns", "bias | silu | add", (3000, 65), F64)
    line("odd rows", ELEMENTWISE, "bias | gelu | add", (50, 1001))
    line("odd rows, many", f"{ELEMENTWISE} add_columns", "bias | gelu | add", (4000, 101))
    line("misaligned", ELEMENTWISE, "bias | gelu | add", (50, 256), lies=misaligned)
    line("strided", ELEMENTWISE, "scale | tanh | gate(gelu)", (50, 256), lies=strided)
    line("strided, float32", ELEMENTWISE, "bias | relu | add", (50, 255), F32, lies=strided)
    line("transposed", ELEMENTWISE, "gelu | add", (4, 50, 64), lies=transposed)
    add(
        "rope",
        ELEMENTWISE,
        lambda device: both_ways(
            lambda x: onepass.fused("rope", x, *torch.randn(2, 20, 64, device=device).to(BF16)),
            [torch.randn(2, 3, 20, 64, device=device).to(BF16)],
        ),
    )
    add("norms of heads and rope", f"{ROWWISE} add_columns", norms_and_rope)
    add("the first numbers, neighbours", ELEMENTWISE, first_neighbours)
    line("one row", ELEMENTWISE, "bias | gelu", (1, 4096))
    add(
        "one number for a row",
        ELEMENTWISE,
        lambda device: both_ways(
            lambda x, y, z: onepass.fused("add | gate(silu)", x, y, z),
            [torch.randn(s, device=device, dtype=BF16) for s in ((4, 8, 64), (4, 8, 1), (8, 64))],
        ),
    )
    for dtype in (BF16, F32, F16, F64):
        line(f"norm in a warp, {dtype}", ROWWISE, NORM, (200, 128), dtype)
    line("norm in a block", f"{ROWWISE} add_columns", NORM, (300, 1024))
    line("norm of two rows", ROWWISE, NORM, (2, 1024))
    line("norm in a block of one row", ROWWISE, NORM, (70, 6144))
    line("norm with much around it", ROWWISE, "bias | gelu | layer_norm(1e-5) | scale | bias | gelu", (70, 1024))
    line("keeping", ROWWISE, KEEPING, (130, 768))
    line("keeping, 2048", ROWWISE, KEEPING, (130, 2048), F32)
    line("softmax", ROWWISE, "mul(0.125) | mask | softmax | dropout(0.1)", (130, 512), F16)
    line("softmax, added mask", ROWWISE, "mul(0.125) | mask | softmax", (130, 512), bool_mask=False)
    line("causal", ROWWISE, "mul(0.125) | causal | softmax", (3, 100, 104), F32)
    line("norm, odd rows", ROWWISE, NORM, (130, 1001))
    line("norm, odd and short", ROWWISE, NORM, (130, 37), F16)
    line("norm, odd and long", ROWWISE, NORM, (9, 5003))
    line("norm, misaligned", ROWWISE, NORM, (130, 256), lies=misaligned)
    line("norm, strided", ROWWISE, KEEPING, (130, 256), lies=strided)
    line("norm, transposed", ROWWISE, NORM, (4, 30, 64), lies=transposed)
    line("six column sums", ROWWISE, "bias | scale | bias | layer_norm(1e-5) | scale | bias | scale", (40, 4096))
    for columns in (1280, 5120, 10240, 20480):
        line(f"{columns} columns", ROWWISE, "layer_norm(1e-6) | scale(1) | bias", (12, columns))
    line("16384 columns", ROWWISE, NORM, (12, 16384))
    line("32768 columns", ROWWISE, "rms_norm(1e-6) | scale", (9, 32768))
    line("log_softmax", ROWWISE, "sub | mask | log_softmax", (130, 512), F16)
    line("l2_norm", ROWWISE, "times | l2_norm | scale | gated(silu)", (130, 512), F32)
    line("l2_norm and log_softmax", ROWWISE, "round | l2_norm | mul(8) | keep | log_softmax", (37, 1000))
    line("32768 columns, log_softmax", ROWWISE, "log_softmax", (9, 32768))
    for where, shape in (
        ("of two batches", (2, 300, 1024)),
        ("of 200 batches", (200, 2, 1024)),
        ("of 1500 batches", (1500, 2, 1024)),
    ):
        columns_of_batches(f"norm, columns {where}", ROWWISE, "layer_norm(1e-6) | scale(1) | bias", shape)
        columns_of_batches(f"columns {where}", ELEMENTWISE, "scale | bias", shape)
    channels = "layer_norm(1e-5) | scale(channels) | bias(channels) | silu"
    line("channels", ROWWISE, channels, (40, 4, 960))
    for columns in (11009, 50257):
        line(f"{columns} columns, log_softmax", ROWWISE, "log_softmax", (5, columns))
    line("11520 columns, much around it", ROWWISE, "bias | gelu | layer_norm(1e-6) | gelu | scale", (9, 11520), F32)
    line("channels, odd rows", ROWWISE, channels, (40, 4, 147), F16)
    line("channels, long rows", ROWWISE, channels, (2, 4, 40960))
    line("kept in float32", ROWWISE, "add | keep(float32) | rms_norm(1e-6) | scale", (130, 1024))
    line("kept in float32, odd rows", ROWWISE, "add | keep(float32) | rms_norm(1e-6) | scale", (37, 1001), F16)
    line("kept in float32, long rows", PARTS, "add | keep(float32) | rms_norm(1e-6) | scale", (3, 600000))
    codes = "times | add | keep | layer_norm(1e-6) | scale(1) | bias | quantize(fp8)"
    line("codes", "rowwise_forward elementwise_backward", codes, (130, 1024))
    line("codes, odd rows", "rowwise_forward elementwise_backward", "keep | rms_norm | quantize(int8)", (37, 1001), F16)
    line("codes of groups", "elementwise_forward", "silu | times | quantize(fp8, 128)", (130, 384))
    groups = "add | keep | rms_norm(1e-6) | scale | quantize(fp8, 128)"
    line("codes of groups behind a norm", "rowwise_forward", groups, (37, 1152), lies=misaligned)
    forward_parts = " ".join(PARTS.split()[:3])
    line("codes, long rows", forward_parts, "rms_norm(1e-6) | quantize(fp8e5m2)", (3, 600000))
    line("numbers of a row", ROWWISE, "add | keep | rms_norm(1e-3) | scale | logsumexp | entropy", (37, 1000))
    line("32000 columns, logsumexp", f"{STREAMED} {TILES}", "logsumexp | amax", (9, 32000), BF16)
    line("whole rounds, entropy", f"{STREAMED} {TILES}", "logsumexp | entropy", (9, 16384), BF16)
    line("float64, mean", f"{STREAMED} rowwise_backward", "mean | logprob", (5, 5001), F64)
    line("an ending alone", f"rowwise_forward {TILES} add_columns", "bias | logsumexp", (130, 1000))
    line("targets", f"rowwise_forward {TILES}", "cross_entropy(0.1, 0.01, 3)", (130, 1000))
    line("targets in a thread", f"rowwise_forward {TILES}", "cross_entropy", (70, 64))
    line("targets, 1800 columns", f"rowwise_forward {TILES}", "cross_entropy", (9, 1800))
    line("targets, 8000 columns", f"{STREAMED} {TILES}", "cross_entropy", (9, 8000))
    line("targets in a warp", ROWWISE, "add | keep | rms_norm(1e-3) | scale | logprob | entropy", (70, 120), F32)
    line("targets, 128256 columns", f"{STREAMED} {TILES}", "bias | cross_entropy(0.1)", (5, 128256))
    line("targets, padded rows", ROWWISE, "bias | logprob | entropy", (37, 1001), lies=padded)
    line("targets, padded long rows", f"{STREAMED} {TILES}", "bias | cross_entropy(0.1)", (5, 32001), F16, lies=padded)
    line("another row, padded", f"{PAIRED} {TILES}", "kl_div(0.5)", (9, 5001), lies=padded)
    add("a head of 1001 words", ROWWISE, partial(head, 1001))
    add("a head of 30522 words", f"{STREAMED} {TILES}", partial(head, 30522))
    line("another row, short", f"{PAIRED} {TILES}", "kl_div", (50, 200), BF16)
    line("another row, of odd length", f"{PAIRED} {TILES}", "bias | kl_div(0.5, 2)", (9, 5001), F16)
    line("another row, long", f"{PAIRED} {TILES}", "kl_div(1)", (5, 30000), BF16)
    line("another row, float64", f"{PAIRED} {TILES}", "kl_div(1)", (5, 3000), F64)
    line("one sum of three endings", f"{STREAMED} {TILES}", "logprob | entropy | cross_entropy(0.1)", (5, 32001))
    line("targets, odd rows", ROWWISE, "logprob | entropy", (37, 1001), F16)
    parts_and_sums = PARTS.replace(" rowwise_forward_tiles", "")
    line("targets, long rows", parts_and_sums, "l2_norm | mul(100) | cross_entropy", (3, 600000), F32)
    line("long rows, numbers", PARTS, "rms_norm(1e-3) | keep | logsumexp | sum", (3, 600000), F32)
    line("long rows, l2_norm and log_softmax", PARTS, "l2_norm | mul(100) | log_softmax | exp", (3, 600000), F32)
    line("32768 columns, softmax", ROWWISE, "softmax", (9, 32768))
    line("32768 columns, gelu", ROWWISE, f"{NORM} | gelu", (9, 32768))
    line("65536 columns", ROWWISE, NORM, (5, 65536))
    line("65536 columns, softmax", ROWWISE, "softmax", (5, 65536), F16)
    line("65536 columns, float32", ROWWISE, NORM, (5, 65536), F32)
    line("131072 columns", ROWWISE, NORM, (4, 131072))
    line("131072 columns, gelu", ROWWISE, f"{NORM} | gelu", (4, 131072))
    line("cluster, odd rows", ROWWISE, NORM, (4, 40001))
    line("long rows", PARTS, NORM, (3, 600000))
    line("long rows, softmax", PARTS, "mul(0.1) | softmax", (3, 600000), F32)
    line("long rows, odd", PARTS, NORM, (3, 600001))
    line("two norms in a warp", ROWWISE, TWO_NORMS, (130, 128))
    line("two norms in a block", ROWWISE, TWO_NORMS, (70, 4096), F32)
    line("two norms, odd rows", ROWWISE, TWO_NORMS, (70, 1001))
    line("two norms in a cluster", ROWWISE, TWO_NORMS, (4, 65536))
    line("two norms, long rows", PARTS, TWO_NORMS, (2, 600000))
    for own in (False, True):
        whose = "their own operands" if own else "operands for all"
        lists(f"list, {whose}", ELEMENTWISE, "bias | gelu_tanh", 64, (3, 10, 1, 40, 7), own=own)
        lists(f"list of norms, {whose}", f"{ROWWISE} add_columns", NORM, 64, (3, 10, 1, 40, 700), F32, own)
        lists(f"list of long endings, {whose}", f"{STREAMED} rowwise_backward", "logsumexp", 4100, (3, 10, 7), F16, own)
        lists(
            f"list of endings, {whose}",
            f"rowwise_forward {TILES}",
            "bias | logsumexp | mean",
            64,
            (3, 10, 700),
            own=own,
        )
    lists("list of rows and others", f"{PAIRED} {TILES}", "kl_div(0.5)", 264, (3, 10, 7), F16, own=True)
    lists("list, keeping", ROWWISE, KEEPING, 1000, (3, 40, 300), own=True)
    lists("list of many", f"{ROWWISE} add_columns", NORM, 64, (300,) * 120, own=True)


def linear_lines() -> None:
    normed, deferred = f"{NORM} | linear | bias", "linear_forward fold"
    line("tiles", "linear_forward", "linear | bias | gelu", (300, 264), how="tiled", out_features=392)
    line("tiles of few rows", "linear_forward", "linear | bias | gelu", (100, 72), how="tiled", out_features=64)
    line("tiles of 128", "linear_forward", "linear | add", (300, 136), F16, how="tiled", out_features=128)
    line("tiles, kept", "linear_forward", "linear | bias | keep | gelu", (300, 264), how="tiled", out_features=392)
    line("deferred", deferred, normed, (300, 264), how="deferred", out_features=64)
    line("deferred, wide", f"{deferred} rowwise_forward", normed, (300, 264), how="deferred", out_features=520)
    line("deferred, rms_norm", deferred, "rms_norm(1e-6) | scale | linear | bias | keep | silu", (300, 264), F16,
         how="deferred", out_features=136)  # fmt: skip
    line("deferred, 1024 to 256", f"{deferred} rowwise_backward add_columns", normed, (4096, 1024), how="deferred",
         out_features=256)  # fmt: skip
    line("small_m", "small_m_forward rowwise_backward", "rms_norm(1e-6) | scale | linear", (8, 1024), how="small_m",
         out_features=256)  # fmt: skip
    line("small_m, sixteen rows", "small_m_forward", f"{NORM} | linear | bias | gelu", (16, 4096), how="small_m",
         out_features=264)  # fmt: skip
    line(
        "small_m, gate",
        "small_m_forward",
        "gate(silu) | linear | add",
        (3, 520),
        F16,
        how="small_m",
        out_features=72,
    )
    line("small_k", "small_k_forward", normed, (300, 128), how="small_k", out_features=64)
    line("small_k, many rows", "small_k_forward", f"{NORM} | linear | bias | gelu", (20000, 136), F16, how="small_k",
         out_features=72)  # fmt: skip
    line("small_k, gate", "small_k_forward", "gate(silu) | linear", (300, 128), how="small_k", out_features=40)
    small_n = "small_n_forward small_n_backward"
    for dtype, features in ((F32, 1), (BF16, 3), (F64, 8)):
        line(f"features, {dtype}", small_n, "layer_norm(1e-5) | tanh | linear | bias | relu", (700, 200), dtype,
             how="small_n", out_features=features)  # fmt: skip
    line("features, odd rows", small_n, "add | keep | rms_norm(1e-6) | scale | linear | bias | keep | silu", (70, 1001),
         how="small_n", out_features=5)  # fmt: skip
    line("unfused", f"{ROWWISE} {ELEMENTWISE}", f"{NORM} | linear | bias | gelu", (300, 1024), how="unfused",
         out_features=256)  # fmt: skip


def attention() -> None:
    masked, causal = "scores | mul(0.125) | mask | softmax", "scores | mul(0.125) | causal | softmax"
    both = "attention_backward_queries_sm90 attention_backward_keys_sm90"
    by_warps = "attention_forward_sm80 attention_backward_queries_sm80 attention_backward_keys_sm80"
    scores("scores by warps", "probabilities_forward_sm80", masked, (2, 2, 37, 64), 129, how="two_pass")
    scores(
        "scores by warps, deep",
        "probabilities_forward_sm80",
        "scores | mul(0.1) | softmax",
        (2, 2, 37, 256),
        131,
        F16,
        how="two_pass",
    )
    scores("scores, causal", "attention_forward_sm90", causal, (2, 2, 150, 64), 264, how="two_pass")
    scores("scores, deep", "attention_forward_sm90", masked, (2, 2, 150, 192), 264, how="two_pass")
    scores("held", "probabilities_forward_sm90", masked, (2, 2, 150, 64), 136, how="two_pass")
    scores(
        "held, one block",
        "probabilities_forward_sm90",
        "scores | mul(0.1) | softmax",
        (2, 2, 150, 64),
        128,
        how="two_pass",
    )
    scores(
        "held, in a cluster",
        "probabilities_forward_sm90 probabilities_backward_sm90",
        masked,
        (2, 2, 150, 64),
        520,
        how="two_pass",
    )
    scores("held, in a cluster of sixteen", "probabilities_forward_sm90 probabilities_backward_sm90",
           "scores | mul(0.1) | softmax", (1, 2, 70, 64), 4096, F16, how="two_pass")  # fmt: skip
    scores(
        "held, four warpgroups",
        "probabilities_forward_sm90",
        f"{masked} | dropout(0.3)",
        (1, 2, 70, 64),
        4096,
        how="two_pass",
    )
    scores("probabilities, one block", "probabilities_backward_sm90", "scores | mul(0.1) | softmax", (3, 150, 64), 128)
    scores("probabilities, deep", "probabilities_backward_sm90", masked, (2, 2, 150, 128), 512)
    scores(
        "probabilities, row tiles shared",
        "probabilities_backward_sm90 probabilities_backward_reduce_dk",
        masked,
        (1, 2000, 64),
        1000,
    )
    for mask in (False, True):
        kernels = "probabilities_forward_sm90 probabilities_backward_sm90 probabilities_backward_reduce_dk"
        add(f"attention_scores{', mask' * mask}", kernels, attention_scores(mask))
    add("keys left out", "probabilities_forward_sm90", keys_left_out)
    values = f"{masked} | values"
    scores("values", f"attention_forward_sm90 {both}", values, (2, 2, 130, 64), 136, values=64, how="flash")
    scores("values, added mask", f"attention_forward_sm90 {both}", values, (2, 2, 130, 64), 264, F16, values=32,
           how="flash", bool_mask=False)  # fmt: skip
    scores(
        "values, causal",
        f"attention_forward_sm90 {both}",
        f"{causal} | values",
        (2, 2, 200, 64),
        200,
        values=64,
        how="flash",
    )
    scores("values, dropout", f"attention_forward_sm90 {both}", f"{masked} | dropout(0.1) | values", (2, 2, 130, 96),
           136, values=48, how="flash")  # fmt: skip
    scores("values, turned", f"attention_forward_sm90 {both}", values, (2, 3, 130, 72), 136, values=64, how="flash",
           turned=True)  # fmt: skip
    scores("values by warps, turned", by_warps, values, (2, 3, 37, 64), 131, values=72, how="flash", turned=True)
    scores("values, deep", f"attention_forward_sm90 {both}", values, (1, 2, 130, 256), 136, values=256, how="flash")
    scores("values by warps", by_warps, values, (2, 2, 37, 64), 131, values=64, how="flash")
    scores(
        "values by warps, causal", by_warps, f"{causal} | values", (2, 2, 130, 40), 131, F16, values=128, how="flash"
    )
    scores("values, unfused", "rowwise_forward rowwise_backward", values, (2, 2, 37, 64), 136, values=64, how="unfused")


def attention_scores(mask: bool) -> Callable[[str], None]:
    """As probabilities of a model's attention are asked for."""

    def run(device: str) -> None:
        query, key = (torch.randn(2, 16, 512, 64, device=device, dtype=BF16) for _ in range(2))
        given = [torch.rand(2, 1, 512, 512, device=device) < 0.8] if mask else []
        both_ways(F.attention_scores, [query, key, *given])

    return run


def keys_left_out(device: str) -> None:
    """Of a mask that is one for all rows of a matrix."""
    query, key = (torch.randn(2, 3, n, 64, device=device, dtype=BF16) for n in (70, 264))
    mask = torch.rand(2, 1, 1, 264, device=device) < 0.7
    both_ways(lambda *ts: onepass.fused("scores(two_pass) | mul(0.1) | mask | softmax", *ts), [query, key, mask])


plain_lines()
linear_lines()
attention()


# Calls that are wrong, one for each tool: a run of tools/sanitize in which it does not see its own is no good.
PLANTED = {
    "planted for memcheck": "data[1 << 28] = 1.0f;",
    "planted for racecheck": """__shared__ float of[64];
        of[threadIdx.x] = data[threadIdx.x], data[threadIdx.x] = of[63 - threadIdx.x];""",
    "planted for synccheck": """__shared__ unsigned long long box;
        const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(&box));
        for (int i = 0; i < 2 && threadIdx.x == 0; ++i)
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
        if (threadIdx.x < 40) __syncthreads();""",
}


def planted(body: str, device: str) -> None:
    """Launches a kernel of 64 threads and as many numbers."""
    source = f'extern "C" __global__ void onepass_planted(float* data) {{ {body} }}'
    kernel = torch.cuda._compile_kernel(source, "onepass_planted")
    kernel((1, 1, 1), (64, 1, 1), (torch.zeros(64, device=device),))


def launched(run: Callable[[], None]) -> Iterator[str]:
    """Our kernels that a call launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("onepass_"):
            yield event.name.removeprefix("onepass_")


def main() -> int:
    """Runs calls one by one; REPORT gets a line of JSON as each begins and as it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=Path)
    parser.add_argument("calls", nargs="+", choices=[*CALLS, *PLANTED], metavar="CALL")
    parser.add_argument("--log", type=Path, help="the sanitizer's, whose length is noted")
    parser.add_argument("--launches", action="store_true", help="note the kernels")
    given = parser.parse_args()
    torch.cuda.init()
    runs = {name: call.run for name, call in CALLS.items()} | {n: partial(planted, b) for n, b in PLANTED.items()}
    with given.report.open("a", buffering=1) as report:
        for name in given.calls:

            def note(**more) -> None:
                length = given.log.stat().st_size if given.log and given.log.exists() else 0
                report.write(json.dumps({"call": name, "log": length, **more}) + "\n")  # noqa: B023

            note(begins=True)
            torch.manual_seed(0)
            start = time.perf_counter()
            try:
                if given.launches:
                    kernels = sorted(set(launched(lambda: runs[name]("cuda"))))  # noqa: B023
                else:
                    kernels = []
                    runs[name]("cuda")
                    torch.cuda.synchronize()
            except Exception as error:  # the context may be gone: the rest is another process's
                note(error=f"{type(error).__name__}: {error}"[:500])
                return 3
            note(seconds=round(time.perf_counter() - start, 3), kernels=kernels)
    return 0


if __name__ == "__main__":
    sys.exit(main())

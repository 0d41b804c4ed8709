"""Programs of a row: several row words, columns of a batch, endings, codes, rope behind a norm. A loss has them, a
diffusion transformer, and what serves or trains in float8."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass.bench.patterns import Case, Pattern, Shape, Traffic, bf16
from onepass.line import Line

__all__ = ["PROGRAMS", "Program"]


@dataclass(frozen=True)
class Program(Pattern):
    """A line of the suite 'programs'. Of x with three dimensions each batch has its own columns."""

    suite = "programs"

    def inputs(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str = "", out_features: int = 0
    ) -> list[Tensor]:
        x, *operands = super().inputs(shape, dtype, device, layout, out_features)
        if len(shape) != 3:
            return [x, *operands]
        generator = torch.Generator(device).manual_seed(math.prod(shape) + 1)
        normal = functools.partial(torch.randn, generator=generator, dtype=dtype, device=device)
        sizes = self.sizes_of_column(shape)
        words = zip(operands, self.operand_words())
        return [x, *(normal(sizes).requires_grad_() if word.operand == "column" else t for t, word in words)]

    def sizes_of_column(self, shape: Shape) -> Shape:
        """Beside x of three dimensions."""
        return (shape[0], 1, shape[-1])

    def traffic(self, inputs: list[Tensor]) -> tuple[Traffic, Traffic]:
        """As the line's cost has it, but that heads share what `rope` takes; in backward results count as their
        gradients."""
        x = inputs[0]
        cost = Line(self.line).cost(x.shape, x.dtype)
        words = zip(inputs[1:], self.operand_words())
        shared = sum((x.numel() - t.numel()) * t.element_size() for t, word in words if word.kind == "rotary")
        whole = sum(t.is_floating_point() and t.shape == x.shape for t in inputs)
        rows = sum(shape == tuple(x.shape) for shape in self.result_shapes(inputs))
        forward = Traffic(cost.forward.bytes - shared, whole, rows)
        return forward, Traffic(max(cost.backward.bytes - shared, 0), 1 + rows, whole)


def pixels(columns: int) -> int:
    """Of a channel, where a group has that many columns: 32x32, or 128x128 of long ones."""
    return 16384 if columns > 65536 else 1024


class Groups(Program):
    """Rows are groups of channels, and each group has its own."""

    own = 2

    def sizes_of_column(self, shape: Shape) -> Shape:
        return (shape[1], max(shape[-1] // pixels(shape[-1]), 1))


def wide(x: Tensor) -> Tensor:
    """In float32 where x is narrower."""
    return x.float() if x.dtype.itemsize < 4 else x


def cross_entropy(x, target):
    return F.cross_entropy(wide(x), target, reduction="none")


def logprob_entropy(x, target):
    log = F.log_softmax(wide(x), -1)
    return log.gather(-1, target.unsqueeze(-1)).squeeze(-1), -(log.exp() * log).sum(-1)


def kl_div(x, teacher):
    logs = (F.log_softmax(wide(t), -1) for t in (x, teacher))
    return F.kl_div(*logs, reduction="none", log_target=True).sum(-1)


def jensen_shannon(x, teacher):
    log_p, log_q = (F.log_softmax(wide(t), -1) for t in (x, teacher))
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    parts = (F.kl_div(log_m, log, reduction="none", log_target=True).sum(-1) for log in (log_p, log_q))
    return sum(parts) / 2


def logsumexp(x):
    return torch.logsumexp(wide(x), -1)


def log_softmax(x):
    return F.log_softmax(x, -1)


def two_norms(x, weight, residual, next_weight):
    h = F.rms_norm(x, x.shape[-1:], weight, 1e-6) + residual
    return F.rms_norm(h, h.shape[-1:], next_weight, 1e-6), h


def modulated_norm(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def group_norm(x, weight, bias):
    """Of rows that are groups of an image's channels."""
    batch, groups, _ = x.shape
    channels = groups * weight.shape[-1]
    y = F.group_norm(x.view(batch, channels, -1), groups, weight.view(-1), bias.view(-1), 1e-5)
    return F.silu(y).view(x.shape)


def gated_residual(x, gate, residual):
    return residual + gate * x


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8 codes and the scale of each row."""
    x = wide(x)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=2**-126) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def norm_fp8(x, weight):
    return coded(F.rms_norm(x, x.shape[-1:], weight, 1e-6))


def add_norm_fp8(x, residual, weight):
    h = x + residual
    codes, scale = norm_fp8(h, weight)
    return codes, h, scale


def silu_mul_fp8(gate, up):
    return coded(F.silu(gate) * up)


def norm_rope(x, weight, cos, sin):
    z = F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    first, second = z.chunk(2, -1)
    return z * cos + torch.cat((-second, first), -1) * sin


VOCABULARIES = bf16((8192, 32768), (4096, 128256))
BATCHES = bf16((16, 4096, 1152), (8, 4096, 3072))
CODED = bf16((32768, 4096), (8192, 14336))


# On the CPU: those of a small language model and its vocabulary, MiniLM, a ViT and a small DiT.
CPU_VOCABULARIES = ((512, 32000), (128, 128256), (64, 262144))
CPU_ROWS = ((4096, 4096), (4096, 384), (6304, 768))
CPU_BATCHES = ((16, 256, 1152), (16, 256, 384))


def on_cpu(*shapes: Shape) -> tuple[Case, ...]:
    return tuple(case for shape in shapes for case in (Case(shape, torch.float32), *bf16(shape)))


PROGRAMS: tuple[Program, ...] = (
    Program("cross_entropy", "cross_entropy", cross_entropy, VOCABULARIES, on_cpu(*CPU_VOCABULARIES)),
    Program(
        "logprob_entropy",
        "logprob | entropy",
        logprob_entropy,
        bf16((4096, 128256), (8192, 151936)),
        on_cpu((512, 32000)),
    ),
    Program("kl_div", "kl_div", kl_div, VOCABULARIES, on_cpu((512, 32000))),
    Program("jensen_shannon", "kl_div(0.5)", jensen_shannon, VOCABULARIES[1:], on_cpu((512, 32000))),
    Program("logsumexp", "logsumexp", logsumexp, VOCABULARIES[1:], on_cpu((512, 32000))),
    Program("log_softmax", "log_softmax", log_softmax, VOCABULARIES[1:], on_cpu(*CPU_VOCABULARIES)),
    Program(
        "two_norms",
        "rms_norm(1e-6) | scale | add | keep | rms_norm(1e-6) | scale",
        two_norms,
        bf16((32768, 3584)),
        on_cpu(*CPU_ROWS),
    ),
    Program(
        "modulated_norm",
        "layer_norm(1e-6) | scale(1) | bias",
        modulated_norm,
        BATCHES,
        on_cpu(*CPU_BATCHES),
    ),
    Groups(
        "group_norm",
        "layer_norm(1e-5) | scale(channels) | bias(channels) | silu",
        group_norm,
        bf16((8, 32, 163840), (8, 32, 40960), (16, 32, 20480)),
        on_cpu((2, 32, 20480)),
    ),
    Program("gated_residual", "scale | add", gated_residual, BATCHES, on_cpu(*CPU_BATCHES)),
    Program("norm_fp8", "rms_norm(1e-6) | scale | quantize(fp8)", norm_fp8, CODED, on_cpu(*CPU_ROWS)),
    Program(
        "add_norm_fp8",
        "add | keep | rms_norm(1e-6) | scale | quantize(fp8)",
        add_norm_fp8,
        CODED,
        on_cpu(*CPU_ROWS),
    ),
    Program("silu_mul_fp8", "gate(silu) | quantize(fp8)", silu_mul_fp8, CODED, on_cpu(*CPU_ROWS)),
    Program(
        "norm_rope", "rms_norm(1e-6) | scale | rope", norm_rope, bf16((8, 4096, 32, 128)), on_cpu((4, 512, 32, 128))
    ),
)

"""What is timed: each pattern as a line and as the plain PyTorch that a user would write, with its shapes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import _native, functional
from onepass.call import fused
from onepass.line import Line
from onepass.pricing.timing import Traffic
from onepass.word import Word

__all__ = ["PATTERNS", "Case", "Pattern", "Traffic"]

P = 0.1  # of every dropout

Shape = tuple[int, ...]


class Case(NamedTuple):
    """What x is, and every operand of its shape."""

    shape: Shape
    dtype: torch.dtype
    layout: str = ""
    """Contiguous, or a key of LAYOUTS."""
    out_features: int = 0
    """Of `linear`, or how many keys `scores` has, where the line has one of them."""


def strided(values: Callable[[Shape], Tensor], shape: Shape) -> Tensor:
    """Rows with 64 numbers of another tensor between them."""
    return values((*shape[:-1], shape[-1] + 64))[..., : shape[-1]]


def misaligned(values: Callable[[Shape], Tensor], shape: Shape) -> Tensor:
    """One number behind where torch's memory begins."""
    return values((math.prod(shape) + 1,))[1:].view(shape)


LAYOUTS = {function.__name__: function for function in (strided, misaligned)}


@dataclass(frozen=True)
class Pattern:
    """A line beside its eager composition, whose dropout can be replaced by a known mask."""

    name: str
    line: str
    eager: Callable[..., Tensor | tuple[Tensor, ...]]
    cuda: tuple[Case, ...]
    cpu: tuple[Case, ...]

    own = 1  # dimensions of what is computed by itself: a row; of attention a matrix
    suite = ""  # that alone has it

    def of_device(self, device_type: str) -> tuple[Case, ...]:
        """The shapes of its tables."""
        return self.cuda if device_type == "cuda" else self.cpu

    @property
    def forward_only(self) -> bool:
        """Whether the line ends in codes, which have no gradient."""
        return any("gives_codes" in word.properties for word in Line(self.line).words)

    @property
    def contracts(self) -> bool:
        """Whether the line has `linear`."""
        return Line(self.line).weight is not None

    @property
    def fused(self) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """What onepass has for it."""
        line = self.line
        return lambda *inputs: fused(line, *inputs)

    def operand_words(self) -> list[Word]:
        """A word for each operand; `rope` has two."""
        words = (word for word in Line(self.line).words if word.operand != "none")
        return [word for word in words for _ in range(2 if word.kind == "rotary" else 1)]

    def products(self, inputs: list[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
        """The matrix products of a line with `linear`, forward and backward: what is left where all else is free. Of
        random numbers: with equal ones a chip takes less power, and a tenth less time."""
        x, weight = inputs[0].detach().flatten(0, -2), inputs[1 + Line(self.line).weight].detach()
        dy = torch.randn(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
        return lambda: x @ weight.t(), lambda: (dy @ weight, dy.t() @ x)

    def inputs(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str = "", out_features: int = 0
    ) -> list[Tensor]:
        """x and the operands, random and the same in every run; all but masks, targets and what `rope` takes require a
        gradient, unless the pattern is forward alone."""
        generator = torch.Generator(device).manual_seed(math.prod(shape))
        normal = functools.partial(torch.randn, generator=generator, dtype=dtype, device=device)

        def laid_out() -> Tensor:
            return LAYOUTS[layout](normal, shape) if layout else normal(shape)

        tensors = [laid_out()]
        constant: list[Tensor] = []
        for word in Line(self.line).words:
            if word.kind == "rotary":  # of x (..., sequence, heads, numbers)
                angles = torch.rand((*shape[-3:-2], 1, shape[-1]), generator=generator, device=device) * math.tau
                constant = [angles.cos().to(dtype), angles.sin().to(dtype)]
                tensors += constant
            elif word.kind == "mask":  # of padded keys, one row for all queries and heads
                keys = (shape[0], *(1 for _ in shape[1:-1]), shape[-1])
                tensors.append(torch.rand(keys, generator=generator, device=device) < 0.9)
            elif word.operand == "matrix":
                tensors.append(normal((out_features, shape[-1])) / math.sqrt(shape[-1]))
                shape = (*shape[:-1], out_features)
            elif word.operand == "column":
                tensors.append(normal(shape[-1:]))
            elif word.operand == "target":
                tensors.append(torch.randint(0, shape[-1], shape[:-1], generator=generator, device=device))
            elif word.operand == "tensor":
                tensors.append(laid_out())
        if not self.forward_only:
            for t in tensors:
                t.requires_grad_(t.is_floating_point() and all(t is not c for c in constant))
        return tensors

    def result_shapes(self, inputs: list[Tensor]) -> list[Shape]:
        """Of the result, then of the kept values and of further numbers of the rows."""
        line, shape = Line(self.line), tuple(inputs[0].shape)
        kept = []
        for word in line.words:
            if word.kind == "contraction":
                shape = (*shape[:-1], inputs[1 + line.weight].shape[0])
            if word.kind == "keep":
                kept.append(shape)
        shapes = [shape, *kept, *[shape] * (line.keeps - len(kept))]
        if line.weight is None:
            return _native.result_shapes(self.line, inputs[0].shape)
        return shapes

    def result_dtypes(self, inputs: list[Tensor]) -> list[torch.dtype]:
        """Of the result, then of the others."""
        return _native.result_dtypes(self.line, inputs[0].dtype)

    def traffic(self, inputs: list[Tensor]) -> tuple[Traffic, Traffic]:
        """Forward and backward. `Line.cost` takes every tensor operand to have x's shape and dtype and a gradient."""
        x, *operands = inputs
        line = Line(self.line)
        if line.weight is not None:
            cost = line.cost(x.shape, x.dtype, out_features=operands[line.weight].shape[0])
            return Traffic(cost.forward.bytes, 1, 1), Traffic(cost.backward.bytes, 2, 1)
        cost = line.cost(x.shape, x.dtype)
        size = x.numel() * x.element_size()
        masks = [operand for operand in operands if not operand.requires_grad]
        smaller = sum(size - mask.numel() * mask.element_size() for mask in masks)
        many = line.cost((2**30, 2**10), torch.float32)  # of so large a tensor the columns and statistics are nothing
        tensors = [round(b / 2**42) for b in (many.forward.bytes, many.backward.bytes, many.saved_bytes)]
        written = 1 + line.keeps
        forward = Traffic(cost.forward.bytes - smaller, tensors[0] - written - len(masks), written)
        read = tensors[2] + written - len(masks)
        backward = Traffic(cost.backward.bytes - smaller - len(masks) * size, read, tensors[1] - read - 2 * len(masks))
        return forward, backward


class GatedMLP(Pattern):
    """Two products of x, the gate that they make, and its product: no line has it all. `line` is the last one's."""

    @property
    def fused(self) -> Callable[..., Tensor]:
        return functional.gated_mlp

    def operand_words(self) -> list[Word]:
        return [word for word in Line(self.line).words if word.operand == "matrix"] * 3

    def inputs(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str = "", out_features: int = 0
    ) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(math.prod(shape))
        features = shape[-1]
        sizes = shape, (out_features, features), (out_features, features), (features, out_features)
        tensors = [torch.randn(size, generator=generator, dtype=dtype, device=device) for size in sizes]
        tensors[1:] = [t / math.sqrt(t.shape[1]) for t in tensors[1:]]
        return [t.requires_grad_() for t in tensors]

    def result_shapes(self, inputs: list[Tensor]) -> list[Shape]:
        return [tuple(inputs[0].shape)]

    def traffic(self, inputs: list[Tensor]) -> tuple[Traffic, Traffic]:
        tensors = [t.numel() * t.element_size() for t in inputs]
        hidden = 2 * tensors[0] // inputs[0].shape[-1] * inputs[1].shape[0]  # what is held, written and read again
        forward = sum(tensors) + tensors[0] + 2 * hidden
        return Traffic(forward, 1, 1), Traffic(2 * sum(tensors) + tensors[0] + 2 * hidden, 2, 1)

    def products(self, inputs: list[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
        x, gate, up, down = (t.detach().flatten(0, -2) for t in inputs)
        hidden, dy = x @ gate.t(), torch.randn_like(x)
        return (
            lambda: (x @ gate.t(), x @ up.t(), hidden @ down.t()),
            lambda: (dy @ down, dy.t() @ hidden, hidden @ gate, hidden @ up, hidden.t() @ x, hidden.t() @ x),
        )


class FeatureStack(Pattern):
    """Independent features of which each row becomes one number: x is (features, rows, numbers), taken whole."""

    contracts = False  # a table's: x is what crosses memory

    def traffic(self, inputs: list[Tensor]) -> tuple[Traffic, Traffic]:
        forward, backward = super().traffic(inputs)
        return Traffic(forward.bytes, 1, 1), Traffic(backward.bytes, 1, 1)

    def products(self, inputs: list[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
        raise NotImplementedError("a product with one column is no floor")


class SplitFeatureStack(FeatureStack):
    """The same as a list of pieces, stacked at the end."""

    @property
    def fused(self) -> Callable[..., Tensor]:
        line = self.line
        return lambda x, *operands: fused(line, pieces_of(x), *operands, stack=True)


def pieces_of(x: Tensor) -> list[Tensor]:
    """Of one long tensor, as a feature store has it."""
    features, *shape = x.shape
    return [piece.view(shape) for piece in torch.split(x.view(-1), x.numel() // features)]


def feature_stack(x, matrix, bias):
    return F.relu(F.linear(torch.tanh(F.layer_norm(x, x.shape[-1:], eps=0.0)), matrix, bias))


def feature_split_stack(x, matrix, bias):
    normed = [torch.tanh(F.layer_norm(piece, piece.shape[-1:], eps=0.0)) for piece in pieces_of(x)]
    return F.relu(F.linear(torch.stack(normed), matrix, bias))


def bias_gelu(x, b):
    return F.gelu(x + b)


def bias_gelu_tanh(x, b):
    return F.gelu(x + b, approximate="tanh")


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def layer_norm_gelu(x, weight, bias):
    return F.gelu(layer_norm(x, weight, bias))


def layer_norm_gelu_tanh(x, weight, bias):
    return F.gelu(layer_norm(x, weight, bias), approximate="tanh")


def rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def add_rms_norm(x, residual, weight):
    h = x + residual
    return rms_norm(h, weight), h


def swiglu(gate, up):
    return F.silu(gate) * up


def bias_dropout_add(x, b, residual, dropout=F.dropout):
    return residual + dropout(x + b, P)


def gelu_dropout_add(x, residual, dropout=F.dropout):
    return residual + dropout(F.gelu(x), P)


def softmax(x):
    return F.softmax(x, -1)


def attention_probabilities(scores, mask, dropout=F.dropout):
    return dropout(F.softmax((scores * 0.125).masked_fill(~mask, -math.inf), -1), P)


def layer_norm_linear(x, weight, bias, matrix, linear_bias):
    return F.linear(layer_norm(x, weight, bias), matrix, linear_bias)


def rms_norm_linear(x, weight, matrix):
    return F.linear(rms_norm(x, weight), matrix)


def linear_gelu(x, matrix, bias):
    return F.gelu(F.linear(x, matrix, bias))


def linear_gelu_tanh(x, matrix, bias):
    return F.gelu(F.linear(x, matrix, bias), approximate="tanh")


def linear_silu(x, matrix, bias):
    return F.silu(F.linear(x, matrix, bias))


def gated_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def swiglu_linear(gate, up, matrix):
    return F.linear(F.silu(gate) * up, matrix)


def bf16(*shapes: Shape) -> tuple[Case, ...]:
    return tuple(Case(shape, torch.bfloat16) for shape in shapes)


def on_cpu(large: Shape = (4096, 4096), medium: Shape = (2048, 1024), small: Shape = (64, 768)) -> tuple[Case, ...]:
    return Case(large, torch.float32), *bf16(large), Case(medium, torch.float32), Case(small, torch.float32)


def contractions(dtype: torch.dtype, *sizes: tuple[int, int, int]) -> tuple[Case, ...]:
    """Of rows, features and out_features."""
    return tuple(Case((rows, features), dtype, "", out_features) for rows, features, out_features in sizes)


NORM_LINEARS = (
    *contractions(torch.bfloat16, (8192, 4096, 4096), (32768, 4096, 4096), (32768, 1024, 4096), (65536, 1024, 1024)),
    *contractions(torch.bfloat16, (65536, 256, 64), (65536, 4096, 64), (32768, 8192, 256)),
    *contractions(torch.bfloat16, (131072, 128, 128), (262144, 64, 64)),
    *contractions(torch.bfloat16, *((m, 4096, n) for n in (4096, 14336) for m in (1, 8, 16, 32, 64, 128))),
    *contractions(torch.float32, (8192, 1024, 1024)),
)
CPU_LINEARS = tuple(
    case
    for dtype in (torch.float32, torch.bfloat16)
    for case in contractions(dtype, (12288, 768, 768), (12288, 768, 3072), (16384, 256, 64), (1, 768, 768), (16, 8, 16))
)
FEATURES = tuple(Case(shape, torch.float32, "", 1) for shape in ((16, 1024, 256), (64, 16384, 256)))
MLP = contractions(torch.bfloat16, (8192, 4096, 16384))
NORMS = bf16((32768, 1024), (32768, 4096), (8192, 16384))
SOFTMAXES = bf16((32768, 1024), (32768, 4096), (16384, 65536))
PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "bias_gelu",
        "bias | gelu",
        bias_gelu,
        (Case((16384, 16384), torch.float32), *bf16((16384, 16384), (16384, 4096))),
        on_cpu(),
    ),
    Pattern("bias_gelu_tanh", "bias | gelu_tanh", bias_gelu_tanh, bf16((16384, 4096)), on_cpu()),
    Pattern("layer_norm", "layer_norm(1e-5) | scale | bias", layer_norm, (*bf16((32768, 256)), *NORMS), on_cpu()),
    Pattern("layer_norm_gelu", "layer_norm(1e-5) | scale | bias | gelu", layer_norm_gelu, NORMS[:2], on_cpu()),
    Pattern("layer_norm_gelu_tanh", "layer_norm(1e-5) | scale | bias | gelu_tanh", layer_norm_gelu_tanh, (), on_cpu()),
    Pattern("rms_norm", "rms_norm(1e-6) | scale", rms_norm, (*NORMS, *bf16((16384, 65536))), on_cpu()),
    Pattern("add_rms_norm", "add | keep | rms_norm(1e-6) | scale", add_rms_norm, NORMS[1:2], on_cpu()),
    Pattern("swiglu", "gate(silu)", swiglu, bf16((16384, 14336)), on_cpu()),
    Pattern("bias_dropout_add", f"bias | dropout({P}) | add", bias_dropout_add, bf16((32768, 4096)), on_cpu()),
    Pattern("gelu_dropout_add", f"gelu | dropout({P}) | add", gelu_dropout_add, bf16((32768, 4096)), on_cpu()),
    Pattern("softmax", "softmax", softmax, SOFTMAXES, on_cpu()),
    Pattern(
        "attention_probabilities",
        f"mul(0.125) | mask | softmax | dropout({P})",
        attention_probabilities,
        bf16((8, 16, 2048, 2048)),
        on_cpu((1, 4, 2048, 2048), (2, 1, 1024, 1024), (1, 12, 64, 64)),
    ),
    Pattern(
        "layer_norm_linear",
        "layer_norm(1e-5) | scale | bias | linear | bias",
        layer_norm_linear,
        NORM_LINEARS,
        CPU_LINEARS,
    ),
    Pattern("rms_norm_linear", "rms_norm(1e-6) | scale | linear", rms_norm_linear, NORM_LINEARS[:4], CPU_LINEARS[:1]),
    Pattern("linear_gelu", "linear | bias | gelu", linear_gelu, MLP, CPU_LINEARS[1:2]),
    Pattern("linear_gelu_tanh", "linear | bias | gelu_tanh", linear_gelu_tanh, MLP, ()),
    Pattern("linear_silu", "linear | bias | silu", linear_silu, MLP, ()),
    Pattern(
        "swiglu_linear",
        "gate(silu) | linear",
        swiglu_linear,
        contractions(torch.bfloat16, (8192, 14336, 4096)),
        CPU_LINEARS[:1],
    ),
    FeatureStack("feature_stack", "layer_norm(0) | tanh | linear | bias | relu", feature_stack, FEATURES, FEATURES[:1]),
    SplitFeatureStack(
        "feature_split_stack",
        "layer_norm(0) | tanh | linear | bias | relu",
        feature_split_stack,
        FEATURES,
        FEATURES[:1],
    ),
    GatedMLP(
        "gated_mlp",
        "gate(silu) | linear",
        gated_mlp,
        contractions(torch.bfloat16, (8192, 4096, 14336)),
        contractions(torch.float32, (4096, 768, 2048)),
    ),
)

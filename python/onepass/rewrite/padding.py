"""Linear layers whose number of features suits no fast kernel of cuBLAS: words of a vocabulary, as a rule.

cuBLAS takes several times as long where a row of a 16-bit matrix is no multiple of 16 bytes (50257 words are not, nor
are 30522 and 51865). A head that nobody sees the logits of is padded within its chunks; this is for logits that a model
returns.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from onepass._arguments.autocast import under_autocast
from onepass.graph.operations import is_tensor, operation, sizes, value_of
from onepass.rewrite.find.chains import Order
from onepass.rewrite.rewriter import is_bias

__all__ = ["pad_features"]

STEP = 8
"""Numbers of 16 bits in 16 bytes."""
LEAST_ROWS = (256, 1024)
"""Of how many padding saves time: where the number of features is odd, and else."""
LEAST_WORK = 2**32
"""Multiplications: of fewer it saves less than the host takes for it."""


def pad_features(graph: fx.Graph) -> None:
    """Has such layers compute some features more, which nobody sees."""
    order = Order(graph)
    for node in list(graph.nodes):
        op = operation(node)
        if op is None or op.name != "linear" or order.is_transformed(node) or not _gains(node, *op.arguments[:2]):
            continue
        *taken, bias = op.arguments
        if bias is not None and not is_bias(bias, node):
            continue
        if value_of(node).requires_grad and order.is_written(set(taken), order.index[node]):
            continue  # PyTorch saves a copy of x where it does not lie row by row
        order.replaces(node, padded_linear, op.arguments, {})


def _gains(node: fx.Node, x: fx.Node, weight: fx.Node) -> bool:
    if not is_tensor(x) or not is_tensor(weight):
        return False
    result, matrix = value_of(node), value_of(weight)
    is_short = result.is_cuda and result.dtype in (torch.bfloat16, torch.float16)
    if not is_short or matrix.dim() != 2 or not all(isinstance(size, int) for size in matrix.shape):  # noqa: PLR2004
        return False
    features, inner = matrix.shape
    rows = torch.Size(sizes(result)).numel() // max(features, 1)
    enough = rows >= LEAST_ROWS[features % 2 == 0] and rows * features * inner >= LEAST_WORK
    return features % STEP != 0 and inner % STEP == 0 and enough


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` by a matrix with zeros behind its rows.

    Saved for backward: of x and the matrix what the other's gradient needs, as `linear` saves them.
    """
    return _Padded.apply(*under_autocast(x.device.type, (x, weight, bias)), -weight.shape[0] % STEP)


class _Padded(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, more):
        bias = None if bias is None else F.pad(bias, (0, more))
        return F.linear(x, F.pad(weight, (0, 0, 0, more)), bias)[..., : weight.shape[0]].clone(
            memory_format=torch.contiguous_format
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.more = inputs
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.save_for_forward(x, weight)
        ctx.features = weight.shape[0]

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        if needs_bias:
            of_bias = gradient.sum_to_size(ctx.features)
        gradient = F.pad(gradient, (0, ctx.more))
        if needs_x:
            of_x = gradient @ F.pad(weight, (0, 0, 0, ctx.more))
        if needs_weight:
            rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
            of_weight = (rows.mT @ inputs)[: ctx.features]
        return of_x, of_weight, of_bias, None

    @staticmethod
    def jvp(ctx, of_x, of_weight, of_bias, _):
        x, weight = ctx.saved_tensors
        parts = [] if of_x is None else [F.linear(of_x, weight)]
        parts += [] if of_weight is None else [F.linear(x, of_weight)]
        if of_bias is not None:
            parts.append(of_bias.expand(*x.shape[:-1], weight.shape[0]))
        return sum(parts)


_Padded.forward.__signature__ = inspect.signature(_Padded.forward)

"""A sum of a line's numbers, each times a share that is known before: its gradients are made in forward."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _native
from .._arguments.autocast import under_autocast
from ..autograd import alive, is_jit_traced, is_transformed, plan
from ..call import as_torch_raises, fused, runs_on_cpu
from ..line import Line, parsed


def weighted_sum(line: str, share: Tensor, x: Tensor, *operands: Tensor) -> Tensor:
    """Σ fused(line, x, *operands) · share, over rows.

    Where a gradient is recorded, a line with `linear` makes the gradients of a chunk of rows in forward, while what
    `linear` gives is there: three products in all. A call that is compiled, transformed (torch.func, forward mode) or
    under hooks for saved tensors (a checkpoint), and gradients that are to be differentiated, take the line's own
    backward, which computes that product again.

    Args:
        line: has one result, one number a row, behind `linear`; its operands are columns, a matrix and targets.
        share: of the result's shape and dtype; it gets no gradient.

    Returns:
        A number of the arithmetic's dtype.

    Saved for backward: x, the operands, and their gradients, which the first backward uses up.
    """
    known = parsed(line)
    if not _may_go_ahead((x, *operands)) or x.is_cpu and not runs_on_cpu(known, operands):
        return (fused(line, x, *operands) * share).sum()
    matrices = under_autocast("cpu" if x.is_cpu else x.device.type, operands, known._matrix_operands)
    try:
        return WeightedSum.apply(known, share, *alive((x, *matrices)))
    except RuntimeError as error:
        known._check_tensors(x, operands)
        raise as_torch_raises(error, [x]) from None


def _may_go_ahead(tensors: tuple[Tensor, ...]) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_transformed() or is_jit_traced():
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False  # in a checkpoint, say: forward runs twice, and gradients held between would be what it saves
    plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    return plain and tensors[0].numel() > 0 and any(t.requires_grad for t in tensors)


class WeightedSum(torch.autograd.Function):
    """As above."""

    @staticmethod
    def forward(ctx, line: Line, share: Tensor, *tensors: Tensor) -> Tensor:
        """Runs forward and backward of each chunk, with the shares as upstream gradients."""
        x, *operands = tensors
        types = tuple(_native.DTYPES[t.dtype] for t in tensors)
        ctx.line, ctx.needed = line, ctx.needs_input_grad[2:]
        sources, wanted, _ = plan(line.text, types, tuple(ctx.needed))
        op = torch.ops.onepass.linear_forward_with_gradients.default
        numbers, *written = op(x, operands, line.text, None, [share], types, wanted)
        ctx.sources, ctx.written = sources, written
        ctx.save_for_backward(share, *tensors)
        return (numbers * share).sum()

    @staticmethod
    def backward(ctx, upstream: Tensor):
        """The gradients that forward made, times the upstream one. A second time, and where they are to
        be differentiated, the line's own."""
        share, *tensors = ctx.saved_tensors
        written, differentiated = ctx.written, torch.is_grad_enabled()
        if written is None or differentiated:
            with torch.enable_grad():
                total = (fused(ctx.line.text, *tensors) * share).sum()
            needed = [t for t, is_needed in zip(tensors, ctx.needed) if is_needed]
            found = iter(torch.autograd.grad(total, needed, upstream, create_graph=differentiated))
            return None, None, *[next(found) if is_needed else None for is_needed in ctx.needed]
        ctx.written = None
        scaled = [_times(written.pop(0), upstream) for _ in range(len(written))]
        return None, None, *[None if at is None else scaled[at] for at in ctx.sources]


def _times(gradient: Tensor, upstream: Tensor) -> Tensor:
    """Of a number on CUDA, with which PyTorch's product takes three times as long."""
    if gradient.is_cuda:
        return fused("times", gradient, upstream.reshape([1] * gradient.dim()))
    return gradient.mul_(upstream)

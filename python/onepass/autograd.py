"""A line's gradient: one forward operator, one backward operator, and what is held between them."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from onepass import _native


@torch.compiler.assume_constant_result
def gradient_sources(line: str, dtype: int, operand_types: tuple[int, ...], wanted: int) -> tuple[int | None, ...]:
    """For x and each operand: None (not wanted), -1 (the upstream gradient itself), or the backward op's output."""
    return tuple(_native.gradients(line, dtype, operand_types, wanted)["inputs"])


class Apply(torch.autograd.Function):
    """Runs a line so that it can be differentiated once.

    Saved for backward: of x and the operands only those that backward reads, a kept value in x's place where the line
    can resume from it, the row statistics, and the dropout state (two integers). Never a normalised row, an activation
    or a mask.
    """

    @staticmethod
    def forward(x, line, state, *operands):
        """Returns the result, the kept values and, of a row line, its statistics."""
        if line.rowwise:
            return tuple(line.forward_op(x, operands, line.text, state, True))
        return tuple(line.forward_op(x, operands, line.text, state))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Saves what backward reads."""
        x, line, state, *operands = inputs
        ctx.line = line
        ctx.set_materialize_grads(False)
        ctx.x_like = (x.shape, x.dtype, x.device)
        ctx.operand_types = [
            _native.DTYPES[o.dtype] + (_native.BROADCAST if is_tensor and o.shape != x.shape else 0)
            for o, is_tensor in zip(operands, line.operand_is_tensor)
        ]
        ctx.operand_shapes = [o.shape for o in operands]
        if line.rowwise:
            ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(
            x if line.reads_x else None,
            None if line.resumes_from is None else output[1 + line.resumes_from],
            output[-1] if line.rowwise else None,
            state,
            *(o if read else None for o, read in zip(operands, line.reads_operands)),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *upstream):
        """Gradients of x and of the operands, those that are needed."""
        line = ctx.line
        x, resumed, statistics, state, *operands = ctx.saved_tensors
        shape, dtype, device = ctx.x_like
        wanted = 0
        for bit, needed in enumerate((ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])):
            wanted |= int(needed) << bit
        given = [
            torch.zeros((), dtype=dtype, device=device).expand(shape) if g is None else g
            for g in upstream[: 1 + line.keeps]
        ]
        sources = gradient_sources(line.text, _native.DTYPES[dtype], tuple(ctx.operand_types), wanted)
        written = []
        if any(s is not None and s >= 0 for s in sources):
            rest = (state, line.text, ctx.operand_types, wanted)
            if line.rowwise:
                written = line.backward_op(given, x, operands, resumed, statistics, *rest)
            else:
                written = line.backward_op(given, x, operands, resumed, *rest)
        results = [None if s is None else given[0] if s < 0 else written[s] for s in sources]
        for i, (result, operand_shape) in enumerate(zip(results[1:], ctx.operand_shapes), start=1):
            if result is not None and result.shape != operand_shape:
                results[i] = result.sum_to_size(operand_shape)
        return results[0], None, None, *results[1:]

"""A sum of a line's numbers, each times a share that is known before: its gradients are made in forward."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .. import _native
from .._arguments.autocast import under_autocast
from .._tracing import assume_constant_result
from ..autograd import alive, is_jit_traced, is_transformed, plan
from ..call import as_torch_raises, fused, runs_on_cpu
from ..line import Line, parsed


def weighted_sum(line: str, share: Tensor, x: Tensor, *operands: Tensor) -> Tensor:
    """Σ fused(line, x, *operands) · share, over rows.

    Where a gradient is recorded, a line with `linear` makes the gradients of a chunk of rows in forward, while what
    `linear` gives is there: three products in all. Four are those of float16, whose range has no room for gradients
    before what scales the loss is known; of a call that is exported, transformed (torch.func, forward mode) or under
    hooks for saved tensors (a checkpoint); and of gradients that are to be differentiated: the line's own backward
    computes that product again.

    Args:
        line: has one result, one number a row, behind `linear`; its operands are columns, a matrix and targets.
        share: of the result's shape and dtype; it gets no gradient.

    Returns:
        A number of the arithmetic's dtype.

    Saved for backward: x, the operands, and their gradients, which the first backward uses up.
    """
    known = parsed(line)
    goes_ahead = _may_go_ahead((x, *operands))
    if goes_ahead:
        operands = under_autocast("cpu" if x.is_cpu else x.device.type, operands, known._matrix_operands)
        is_narrow = any(operands[i].dtype == torch.float16 for i in known._matrix_operands)
        goes_ahead = not is_narrow and (not x.is_cpu or runs_on_cpu(known, x.dtype, operands))
    if not goes_ahead:
        return (fused(line, x, *operands) * share).sum()
    if _is_in_graph((x, *operands)):
        return TracedSum.apply(known, share, x, *operands)
    try:
        return WeightedSum.apply(known, share, *alive((x, *operands)))
    except RuntimeError as error:
        known._check_tensors(x, operands)
        raise as_torch_raises(error, [x]) from None


def _may_go_ahead(tensors: tuple[Tensor, ...]) -> bool:
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors) or is_transformed() or is_jit_traced():
        return False
    if _is_in_graph(tensors):
        if _is_exported() or torch._C._are_functorch_transforms_active():
            return False  # what is exported may only ever run forward
        return all(type(t) in _PLAIN or type(t) in _TRACED for t in tensors)
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False  # in a checkpoint, say: forward runs twice, and gradients held between would be what it saves
    return all(type(t) in _PLAIN for t in tensors) and tensors[0].numel() > 0


def _is_in_graph(tensors: tuple[Tensor, ...]) -> bool:
    """Whether Dynamo captures the call, or AOTAutograd what Dynamo has captured, of which torch 2.11 says nothing."""
    return torch.compiler.is_compiling() or any(type(t) is FunctionalTensor for t in tensors)


@assume_constant_result
def _is_exported() -> bool:
    """Dynamo itself says of torch.compile, too, that it exports, before torch 2.12."""
    return torch.compiler.is_exporting()


_PLAIN, _TRACED = (Tensor, torch.nn.Parameter), (FakeTensor, FunctionalTensor)


def _with_gradients(line: Line, share: Tensor, tensors: tuple[Tensor, ...], needed: tuple[bool, ...]):
    """The sum, the gradients that are wanted, and which of them each tensor has."""
    x, *operands = tensors
    types = tuple(_native.DTYPES[t.dtype] for t in tensors)
    sources, wanted, _ = plan(line.text, types, needed)
    op = torch.ops.onepass.linear_forward_with_gradients.default
    numbers, *written = op(x, operands, line.text, None, [share], types, wanted)
    return (numbers * share).sum(), written, sources


class WeightedSum(torch.autograd.Function):
    """As above."""

    @staticmethod
    def forward(ctx, line: Line, share: Tensor, *tensors: Tensor) -> Tensor:
        """Runs forward and backward of each chunk, with the shares as upstream gradients."""
        ctx.line, ctx.needed = line, tuple(ctx.needs_input_grad[2:])
        total, ctx.written, ctx.sources = _with_gradients(line, share, tensors, ctx.needed)
        ctx.save_for_backward(share, *tensors)
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor):
        """The gradients that forward made, times the upstream one. A second time, and where they are to
        be differentiated, the line's own."""
        share, *tensors = ctx.saved_tensors
        written, differentiated = ctx.written, torch.is_grad_enabled()
        if written is None or differentiated:
            with torch.enable_grad():
                tensors = [t.view_as(t) for t in tensors]  # x may itself be made of the matrix
                total = (fused(ctx.line.text, *tensors) * share).sum()
            needed = [t for t, is_needed in zip(tensors, ctx.needed) if is_needed]
            found = iter(torch.autograd.grad(total, needed, upstream, create_graph=differentiated))
            return None, None, *[next(found) if is_needed else None for is_needed in ctx.needed]
        ctx.written = None
        scaled = [_times(written.pop(0), upstream) for _ in range(len(written))]
        return None, None, *[None if at is None else scaled[at] for at in ctx.sources]


class TracedSum(torch.autograd.Function):
    """The same in a graph: of what Dynamo captures, gradients have none themselves."""

    @staticmethod
    def forward(ctx, line: Line, share: Tensor, *tensors: Tensor) -> Tensor:
        """As above."""
        total, written, ctx.sources = _with_gradients(line, share, tensors, tuple(ctx.needs_input_grad[2:]))
        ctx.save_for_backward(*written)
        return total

    @staticmethod
    def backward(ctx, upstream: Tensor):
        """The gradients that forward made, times the upstream one."""
        scaled = [gradient * upstream for gradient in ctx.saved_tensors]
        return None, None, *[None if at is None else scaled[at] for at in ctx.sources]


def _times(gradient: Tensor, upstream: Tensor) -> Tensor:
    """In place. On CUDA nothing is read or written where the factor is 1, as in nearly all steps a loss' is."""
    if is_legacy_batchedtensor(upstream):  # several at once (is_grads_batched)
        return gradient * upstream
    if gradient.is_cuda and gradient.shape[-1] * gradient.element_size() % _WINDOW == 0:
        torch.ops.onepass.times_.default(gradient, upstream.reshape([1] * gradient.dim()))
        return gradient
    return gradient.mul_(upstream)


_WINDOW = 16  # bytes: threads read rows that are no multiple of it by windows, in which others write

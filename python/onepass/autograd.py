"""A line's gradient: one forward operator, one backward operator, and what is held between them."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from onepass import _native
from onepass._operators.backward import derivative_along, run_backward
from onepass._operators.composed import Saved, cannot_be_made_again, composed_backward
from onepass._operators.fake import library, no_operands
from onepass.line import Line, _parse
from onepass.reference import compose


@functools.cache
def front():
    """What calls a line in C++ where nothing but kernels and autograd would see its tensors; None where it is neither
    built for the installed torch nor compiled, for which inference does not wait.

    It takes a line without dropout, x and the operands, and gives None for a call that is not for it.
    """
    return _native.open_autograd(may_compile=False)


@functools.cache
def differentiable():
    """The operator that does in C++ what Apply does, at a third of its cost for the host.

    Built for the installed torch, or compiled at first use, from src/torch/autograd/autograd_function.h. Without a
    compiler it is None, with one warning, and Apply serves.
    """
    try:
        _native.open_autograd()
    except RuntimeError as reason:
        warnings.warn(f"onepass: gradients take Python's way, some 20 us a call slower: {reason}", stacklevel=4)
        return None
    front.cache_clear()
    return torch.ops.onepass.differentiable.default


@functools.lru_cache(maxsize=_native.REMEMBERED)
def _plan(line: str, dtype: torch.dtype, operand_types: tuple[int, ...], needed: tuple[bool, ...]):
    bits = (needed[0], *needed[3:])  # x, the line, the dropout state, the operands
    wanted = sum(1 << bit for bit, is_needed in enumerate(bits) if is_needed)
    sources = tuple(_native.gradients(line, _native.DTYPES[dtype], operand_types, wanted)["inputs"])
    return sources, wanted, any(s is not None and s >= 0 for s in sources)


forget_plans = _plan.cache_clear


@torch.compiler.assume_constant_result
def plan(line: str, dtype: torch.dtype, operand_types: tuple[int, ...], needed: tuple[bool, ...]):
    """Where gradients come from, the bits of those wanted (x first), and whether the backward op writes any.

    For x and each operand: None (not wanted), -1 (the upstream gradient itself), or the backward op's output.
    """
    return _plan(line, dtype, operand_types, needed)


_is_traced, _has_transforms = torch.compiler.is_dynamo_compiling, torch._C._are_functorch_transforms_active


def is_transformed() -> bool:
    """Whether torch.func or forward mode sees a call."""
    return not _is_traced() and (_has_transforms() or forward_ad._current_level >= 0)


def is_jit_traced() -> bool:
    """Whether torch.jit.trace sees a call: its graph is the same with gradients and without, as of torch's own."""
    return not _is_traced() and torch.jit.is_tracing()


def run(x, line, state, *operands):
    """The result, the kept values and, where backward reads them, what `linear` gives and the row statistics."""
    operands = operands or no_operands(x)
    if line.weight is not None:
        return tuple(line.forward_op(x, operands, line.text, state, True))
    if line.rowwise:
        return tuple(line.forward_op(x, operands, line.text, state, line.reads_statistics))
    return tuple(line.forward_op(x, operands, line.text, state))


def save(ctx, inputs, output, everything=False):
    """Saves what backward reads; or everything, for forward mode too."""
    x, line, state, *operands = inputs
    ctx.line = line
    ctx.set_materialize_grads(False)
    ctx.results = [(r.shape, r.dtype) for r in output[: 1 + line.keeps]]
    ctx.like = (x.dtype, x.device)
    types = [_native.DTYPES[o.dtype] for o in operands]
    shapes = [line.shape_behind(x, operands) if line.is_behind(i) else x.shape for i in line.tensor_operands]
    ctx.broadcast = [
        (i, operands[i].shape) for i, shape in zip(line.tensor_operands, shapes) if operands[i].shape != shape
    ]
    for i, _ in ctx.broadcast:
        types[i] += _native.BROADCAST
    ctx.operand_types = tuple(types)
    ctx.mark_non_differentiable(*output[1 + line.keeps :])
    for_weight = line.weight is not None and ctx.needs_input_grad[3 + line.weight]
    saved = (
        x if everything or line.reads_x and (for_weight or not line.x_for_weight) else None,
        None if line.resumes_from is None else output[line.resumes_from],
        output[-1] if line.reads_statistics else None,
        state,
        output[1 + line.keeps] if line.reads_product else None,
        None if line.resumes_behind is None else output[line.resumes_behind],
        *[
            o if everything or read and (for_weight or not only_for_it) else None
            for o, read, only_for_it in zip(operands, line.reads_operands, line.operands_for_weight)
        ],
    )
    ctx.save_for_backward(*saved)
    if everything:
        ctx.save_for_forward(*saved)


def gradients(ctx, upstream):
    """Of x and of the operands, those that are needed."""
    line = ctx.line
    dtype, device = ctx.like
    given = [
        torch.zeros((), dtype=of, device=device).expand(shape) if g is None else g
        for g, (shape, of) in zip(upstream, ctx.results)
    ]
    sources, wanted, writes = plan(line.text, dtype, ctx.operand_types, ctx.needs_input_grad)
    written = ()
    if writes:
        how = Gradient(line, (_native.DTYPES[dtype], *ctx.operand_types), wanted)
        written = run_backward(how, *given, *ctx.saved_tensors)
    results = [None if s is None else given[0] if s < 0 else written[s] for s in sources]
    for i, operand_shape in ctx.broadcast:
        if results[1 + i] is not None:
            results[1 + i] = results[1 + i].sum_to_size(operand_shape)
    reached = reached_by(upstream)
    results[1:] = [g if n < reached else None for g, n in zip(results[1:], line.keeps_before)]
    return results[0], None, None, *results[1:]


def reached_by(upstream) -> int:
    """Operands with fewer keeps before them than this have a gradient. Where nobody asks for the result's, those behind
    the last kept value whose gradient is asked for have none, as with PyTorch's operators."""
    if upstream[0] is not None:
        return len(upstream) + 1
    return max((i for i, g in enumerate(upstream) if g is not None), default=0)


@dataclass(frozen=True)
class Gradient:
    """What a backward operator is told besides tensors."""

    line: Line
    types: tuple[int, ...]
    """Of x, then of the operands."""
    wanted: int
    """Bit 0: x's gradient, bit i + 1: operand i's."""

    def run(self, *tensors):
        """tensors: the gradients of the result and of the kept values, then what was saved."""
        line, count = self.line, 1 + self.line.keeps
        given = list(tensors[:count])
        x, resumed, statistics, state, product, resumed_behind, operands = Saved.of(tensors[count:])
        if line.weight is not None:
            if not self.wanted >> 1 + line.weight & 1:  # what is there for forward mode alone must not choose the way
                x = None if line.x_for_weight else x
                operands = [None if only else o for o, only in zip(operands, line.operands_for_weight)]
            rest = (state, line.text, self.types, self.wanted)
            return tuple(line.backward_op(given, x, operands, resumed, statistics, product, resumed_behind, *rest))
        rest = (state, line.text, self.types[1:], self.wanted)
        if line.rowwise:
            return tuple(line.backward_op(given, x, operands, resumed, statistics, *rest))
        return tuple(line.backward_op(given, x, operands, resumed, *rest))

    def watched(self, tensors):
        """The same tensors, so that what cannot be differentiated again says so: a product that cannot be made again
        has no graph, and a gradient made of it would be taken for a constant."""
        at = 1 + self.line.keeps + Saved._fields.index("product")
        if not cannot_be_made_again(self.line, Saved.of(tensors[1 + self.line.keeps :])):
            return tensors
        return (*tensors[:at], tensors[at].detach().requires_grad_(), *tensors[at + 1 :])

    def compose(self, *tensors):
        """The same of PyTorch's operators."""
        count = 1 + self.line.keeps
        return composed_backward(self.line, tensors[:count], Saved.of(tensors[count:]), self.types, self.wanted)


# C++ calls it where a gradient may be differentiated.
library.define(
    "differentiable_backward(Tensor[] gradients, Tensor?[] saved, str line, int[] types, int wanted) -> Tensor[]"
)


@torch.library.impl(library, "differentiable_backward", "CompositeImplicitAutograd")
def _(gradients, saved, line, types, wanted):
    return list(run_backward(Gradient(_parse(line), tuple(types), wanted), *gradients, *saved))


class Apply(torch.autograd.Function):
    """Runs a line so that it can be differentiated, in terms that torch.compile can trace.

    Saved for backward: of x and the operands only those that backward reads, a kept value or the result in x's place
    where the line can resume from it, the row statistics, and the dropout state (two integers). Never a normalised row,
    an activation or a mask.
    """

    @staticmethod
    def forward(ctx, *inputs):
        """inputs: x, the line, the dropout state, the operands."""
        results = run(*inputs)
        save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx, *upstream):
        """Gradients of x and of the operands, those that are needed."""
        return gradients(ctx, upstream)


class Transformable(Apply):
    """The same for torch.func's transforms and for forward mode, which want forward and its context apart (that costs
    every call more). Forward mode has no kernel: its derivatives are those of the reference."""

    generate_vmap_rule = True
    forward = staticmethod(run)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Saves the same for both modes, as vmap has it."""
        save(ctx, inputs, output, everything=True)
        ctx.outputs = len(output)

    @staticmethod
    def jvp(ctx, *tangents):
        """Of the result and of the kept values."""
        x, _, _, state, _, _, *operands = ctx.saved_tensors
        of_x, _, _, *of_operands = tangents

        def run(*tensors):
            return compose(ctx.line.words, tensors[0], tensors[1:], state)

        results = derivative_along((of_x, *of_operands), run, (x, *operands))
        return *results, *[None] * (ctx.outputs - len(results))

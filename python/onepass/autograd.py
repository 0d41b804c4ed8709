"""A line's gradient: one forward operator, one backward operator, and what is held between them."""

from __future__ import annotations

import functools
import warnings

import torch

from onepass import _native


@functools.cache
def differentiable():
    """The operator that does in C++ what Apply does, at a third of its cost for the host.

    Built for the installed torch, or compiled at first use, from src/torch/autograd_function.h. Without a compiler it
    is None, with one warning, and Apply serves.
    """
    try:
        _native.open_autograd()
    except RuntimeError as reason:
        warnings.warn(f"onepass: gradients take Python's way, some 20 us a call slower: {reason}", stacklevel=4)
        return None
    return torch.ops.onepass.differentiable.default


@functools.cache
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


def run(x, line, state, *operands):
    """The result, the kept values and, where backward reads them, what `linear` gives and the row statistics."""
    if line.weight is not None:
        return tuple(line.forward_op(x, operands, line.text, state, True))
    if line.rowwise:
        return tuple(line.forward_op(x, operands, line.text, state, line.reads_statistics))
    return tuple(line.forward_op(x, operands, line.text, state))


def save(ctx, inputs, output):
    """Saves what backward reads."""
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
    ctx.save_for_backward(
        x if line.reads_x and (for_weight or not line.x_for_weight) else None,
        None if line.resumes_from is None else output[line.resumes_from],
        output[-1] if line.reads_statistics else None,
        output[1 + line.keeps] if line.reads_product else None,
        None if line.resumes_behind is None else output[line.resumes_behind],
        state,
        *[
            o if read and (for_weight or not only_for_it) else None
            for o, read, only_for_it in zip(operands, line.reads_operands, line.operands_for_weight)
        ],
    )


def gradients(ctx, upstream):
    """Of x and of the operands, those that are needed."""
    line = ctx.line
    x, resumed, statistics, product, resumed_behind, state, *operands = ctx.saved_tensors
    dtype, device = ctx.like
    given = [
        torch.zeros((), dtype=of, device=device).expand(shape) if g is None else g
        for g, (shape, of) in zip(upstream, ctx.results)
    ]
    sources, wanted, writes = plan(line.text, dtype, ctx.operand_types, ctx.needs_input_grad)
    written = ()
    if writes:
        rest = (state, line.text, ctx.operand_types, wanted)
        if line.weight is not None:
            rest = (state, line.text, (_native.DTYPES[dtype], *ctx.operand_types), wanted)
            written = line.backward_op(given, x, operands, resumed, statistics, product, resumed_behind, *rest)
        elif line.rowwise:
            written = line.backward_op(given, x, operands, resumed, statistics, *rest)
        else:
            written = line.backward_op(given, x, operands, resumed, *rest)
    results = [None if s is None else given[0] if s < 0 else written[s] for s in sources]
    for i, operand_shape in ctx.broadcast:
        if results[1 + i] is not None:
            results[1 + i] = results[1 + i].sum_to_size(operand_shape)
    return results[0], None, None, *results[1:]


class Once(torch.autograd.Function):
    """Passes gradients on, and refuses to be differentiated."""

    @staticmethod
    def forward(count, *tensors):
        """tensors: `count` gradients, then those that they depend on."""
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Saves nothing."""

    @staticmethod
    def backward(ctx, *upstream):
        """Raises RuntimeError."""
        raise RuntimeError("onepass: a fused line cannot be differentiated twice; Line.reference(...) can")


def differentiated_once(ctx, upstream, gradients):
    """Calls gradients(ctx, upstream). Where they are asked for with create_graph, constants would drop a second
    derivative without a word."""
    if not torch.is_grad_enabled():
        return gradients(ctx, upstream)
    with torch.no_grad():
        results = gradients(ctx, upstream)
    depends_on = [t for t in (*ctx.saved_tensors, *upstream) if t is not None and t.requires_grad]
    if not depends_on:
        depends_on = [torch.zeros((), requires_grad=True)]
    there = [i for i, r in enumerate(results) if r is not None]
    once = Once.apply(len(there), *[results[i] for i in there], *depends_on)
    return tuple(once[there.index(i)] if i in there else None for i in range(len(results)))


class Apply(torch.autograd.Function):
    """Runs a line so that it can be differentiated once, in terms that torch.compile can trace.

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
        return differentiated_once(ctx, upstream, gradients)


class Transformable(Apply):
    """The same for torch.func's transforms, which want forward and its context apart (that costs every call more)."""

    forward = staticmethod(run)
    setup_context = staticmethod(save)

"""A line's call, on its way down from `fused` to an operator.

`call` asks the C++ front first. Calls that it leaves are brought to calls with plain tensors: a proxy of torch.fx
becomes a node, lists go through `_arguments/lists.py` and DTensors through `_arguments/vocabulary.py`, which are handed
the functions that call a line. A plain tensor takes the first open one of the doors into the one forward:

| door                             | taken when                                      | code                           |
|----------------------------------|-------------------------------------------------|--------------------------------|
| C++ front                        | eager, without dropout; kernels are ready, and  | `front` in fast_path.h, opened |
|                                  | only autograd and kernels see the tensors       | by `autograd.front`            |
| `Transformable`                  | torch.func or forward mode is active            | autograd.py                    |
| `Apply`                          | a gradient is recorded, in a graph of           | autograd.py                    |
|                                  | torch.compile or without a C++ compiler         |                                |
| `onepass::differentiable`,       | a gradient is recorded, and only kernels see    | `run_kernels` in               |
| kernels by pointers              | the tensors below autograd                      | autograd_function.h            |
| `onepass::differentiable`,       | a gradient is recorded, and a mode, a subclass  | `run_forward` in               |
| operators by the dispatcher      | or a profiler sees the call below autograd      | autograd_function.h            |
| `Line.forward_op`                | no gradient is recorded                         | src/torch/ops.cc               |

The headers stand in src/torch/autograd. torch.jit.trace takes the doors of a recorded gradient. The kernels are the
same behind all doors. `Line.reference` runs in their place where the CPU has none for a line and cannot compile them.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.autograd import profiler

from onepass import _native
from onepass._arguments import lists
from onepass._arguments.autocast import under_autocast
from onepass._arguments.shapes import is_sharded
from onepass._arguments.symbolic import node_of, proxy_among
from onepass._operators.backward import is_profiled
from onepass._operators.fake import draw_dropout_state
from onepass._tracing import assume_constant_result
from onepass.autograd import (
    Apply,
    Transformable,
    alive,
    apply,
    differentiable,
    forward,
    front,
    is_jit_traced,
    is_transformed,
    is_transformed_in_graph,
)
from onepass.line import Line, _parse, parsed

__all__ = ["as_torch_raises", "call", "fused", "runs_on_cpu"]

ARITHMETIC = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_is_traced = torch.compiler.is_dynamo_compiling


def fused(
    line: str,
    x: torch.Tensor | list[torch.Tensor],
    *operands: torch.Tensor | list[torch.Tensor],
    training: bool = True,
    generator=None,
    stack: bool = False,
):
    """Runs a line of words over the rows of a tensor: one kernel forward, one backward, every tensor moved once.

    Args:
        line: words separated by ``|``; :func:`words` lists them.
        x: tensor of shape (..., N), float32, float64, bfloat16 or float16; or a list or tuple of such tensors of one
            row length, dtype and device, for all of which the line is called once.
        operands: one for each word that takes one, in the order in which the words stand. Columns have shape [N], or
            are rows of N numbers that broadcast to x's shape, such as [B, 1, N]; tensors have x's shape or broadcast to
            it. Their dtypes may differ from x's. `linear` takes a matrix [N', N] (under autocast it is cast); behind it
            rows have N' numbers of the matrix's dtype. `scores` takes keys [..., N', N] with x's batch sizes (of which
            the last may be 1), and likewise. Where x is a list, an operand is for all of its tensors, or a list with
            one for each.
        training: ``False`` leaves dropout out.
        generator: for dropout, a ``torch.Generator`` of x's device; PyTorch's default one otherwise.
        stack: where x is a list, whether results are stacked as ``torch.stack`` does; else they are lists.

    Returns:
        The result, of x's shape and dtype (behind `linear` (..., N') and its matrix's; of an ending such as
        ``logsumexp`` x's shape without the last dimension, in float32, or float64 of float64 x) and contiguous; a tuple
        (result, kept values..., numbers of further endings) where there are several. Arithmetic is float32 (float64
        for float64 x), with one rounding at the store.

    Raises:
        LineError: (a ValueError) for a line that cannot be read.
        TypeError: for a wrong number of operands.
        RuntimeError: for shapes, dtypes or devices that do not fit, naming the operand, expected and got; of x's dtype
            NotImplementedError, which is one.

    Saved for backward: the inputs that backward reads (or a kept value or the result in their place) and the row
    statistics; masks are drawn again. What stands before `linear` is computed again for the gradient of its matrix;
    what it gives is saved only where a word behind it needs it (an activation does, a bias does not).
    """
    known = parsed(line) if _is_traced() else _parse(line)  # `parsed` alone would cost another call
    return call(known, x, operands, training, generator, stack)


def call(line: Line, x, operands, training: bool = True, generator=None, stack: bool = False, shard: int = 0):
    """Calls a line; see :func:`fused`.

    Args:
        shard: which part of a sharded tensor x is; each has dropout masks of its own.
    """
    if line.table_operands and torch.is_grad_enabled():
        _check_positions(operands[i] for i in line.table_operands if i < len(operands))
    if not (line.has_dropout or stack or _is_traced()) and (in_one := front()) is not None:
        results = in_one(line.text, x, *operands)
        if results is not None:
            return results
    if is_profiled():
        with profiler.record_function(f"onepass: {line.text}"):
            return _run(line, x, operands, training, generator, stack, shard)
    return _run(line, x, operands, training, generator, stack, shard)


Line._call = call


def _run(line: Line, x, operands, training: bool, generator, stack: bool, shard: int):
    """A call that the C++ front has left."""
    proxy = None if _is_traced() else proxy_among(x, operands)
    if proxy is not None:
        given = {"training": training, "generator": generator, "stack": stack}
        return node_of(proxy, fused, (line.text, x, *operands), given)
    if isinstance(x, (list, tuple)):
        return _run_list(line, list(x), list(operands), training, generator, stack)
    if stack:
        raise TypeError("fused(): argument 'stack' is for a list of tensors")
    try:
        if len(operands) != line.operand_count:
            raise TypeError(line._operand_message(len(operands)))
        if line.has_dropout and not training:
            return call(parsed(line._without_dropout), x, operands) if line._without_dropout else x
        if type(x) is not torch.Tensor and is_sharded(x):
            from onepass._arguments import vocabulary  # imports torch.distributed

            return vocabulary.run(line, x, operands, generator, call)
        state = _draw(x, generator, shard) if line.has_dropout else None
        if line.weight is not None:
            operands = under_autocast("cpu" if x.is_cpu else x.device.type, operands, line._matrix_operands)
        if is_transformed_in_graph() or x.is_cpu and not runs_on_cpu(line, x.dtype, operands):
            line._check_tensors(x, operands)
            line._check_shapes(x, operands)
            return line.reference(x, *operands, dropout_state=state)
        results = _forward(line, state, (x, *operands))
    except (AttributeError, TypeError):
        line._check_tensors(x, operands)
        raise
    except RuntimeError as error:
        line._check_tensors(x, operands)
        raise as_torch_raises(error, [x]) from None
    return results[0] if line.keeps == 0 else tuple(results[: 1 + line.keeps])


def _run_list(line: Line, xs: list, operands: list, training: bool, generator, stack: bool):
    if len(operands) != line.operand_count:
        raise TypeError(line._operand_message(len(operands)))

    def one(x, own):
        return call(line, x, own, True, generator)

    def in_one_launch(taken):
        if line.weight is not None or is_transformed() or is_transformed_in_graph():
            return None
        if xs[0].is_cpu and not runs_on_cpu(line, xs[0].dtype, lists.own(taken, 0)):
            return None
        state = _draw(xs[0], generator) if line.has_dropout else None
        return lists.in_one_launch(line, xs, taken, stack, functools.partial(_forward, line, state))

    try:
        if line.has_dropout and not training:
            if line._without_dropout:
                return call(parsed(line._without_dropout), xs, operands, stack=stack)
            return lists.unchanged(line, xs, stack)
        return lists.run(line, xs, operands, stack, one, in_one_launch)
    except RuntimeError as error:
        line._check_tensors(xs, operands)
        raise as_torch_raises(error, xs) from None


def _forward(line: Line, state, tensors, count: int = 0, own: int = 0, stack: bool = False) -> Any:
    """Takes the first open door of the table above. The arguments are those of a call in autograd.py."""
    how = (line, state, count, own, stack)
    if is_transformed():
        return apply(Transformable, *how, *tensors)
    if not _is_traced():
        tensors = alive(tensors)
    if not (torch.is_grad_enabled() and _requires_grad(tensors) or is_jit_traced()):
        return forward(*how, tensors, False)
    if torch.compiler.is_compiling():
        # Dynamo refuses one tensor as two inputs of an autograd function.
        views = [t.view_as(t) if any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]
        return Apply.apply(*how, *views)
    in_one = differentiable()
    if in_one is None:
        return apply(Apply, *how, *tensors)
    return in_one(tensors, line.text, state, count, own, stack)


def _requires_grad(tensors) -> bool:
    for t in tensors:  # any() with a generator takes twice as long
        if t.requires_grad:
            return True
    return False


def _check_positions(operands) -> None:
    tensors = [t for o in operands for t in (o if isinstance(o, (list, tuple)) else [o])]
    if any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
        raise RuntimeError("fused(): cos and sin of 'rope' get no gradient: expected requires_grad=False")


def _draw(x, generator, shard: int = 0) -> torch.Tensor:
    if torch.compiler.is_compiling() and generator is None:
        state = torch.ops.onepass.dropout_state(x)
    elif is_transformed():  # transforms know what their randomness means for a call that makes a tensor
        state = torch.randint(2**63 - 1, (2,), device=x.device, generator=generator)
    else:
        state = draw_dropout_state(x, generator)
    if shard:
        state[1:].add_(shard)  # the offset
    return state


def runs_on_cpu(line: Line, dtype: torch.dtype, operands) -> bool:
    """Whether the line's CPU kernels for x of a dtype exist or can be compiled; where not, warns once."""
    if line.weight is not None and operands[line.weight].dtype != dtype:
        dtype = None  # what stands behind the product has the matrix's: kernels for all dtypes
    masks = 0
    for i in line._mask_operands:
        masks |= int(operands[i].dtype == torch.bool) << i
    if torch.compiler.is_compiling():  # a constant: with a guard on what is known so far, the next call would recompile
        return _prepare_on_cpu(line.text, masks, dtype)
    ready = line._ready_on_cpu.get((masks, dtype))
    if ready is None:
        ready = line._ready_on_cpu[masks, dtype] = _prepare_on_cpu(line.text, masks, dtype)
    return ready


@assume_constant_result
def _prepare_on_cpu(text: str, masks: int, dtype: torch.dtype | None) -> bool:
    try:
        _native.cpu_prepare(text, masks, dtype)
    except _native.CannotCompile as missing:
        warnings.warn(f'onepass: the line "{text}" runs as a composition of PyTorch operators: {missing}', stacklevel=4)
        return False
    return True


def as_torch_raises(error: RuntimeError, xs) -> Exception:
    """The same error; of a dtype that there are no kernels for, which torch has none for either, and of a target that
    is no column, its kind."""
    if "is out of bounds" in str(error):
        return IndexError(str(error))
    if type(error) is RuntimeError and not all(x.dtype in ARITHMETIC for x in xs):
        return NotImplementedError(str(error))
    return error

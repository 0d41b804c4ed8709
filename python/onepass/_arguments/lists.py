"""A list of tensors as a line's first argument: one call for all of them, and its results as a list again."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from onepass import _native
from onepass._arguments.autocast import under_autocast
from onepass._arguments.shapes import is_sharded
from onepass.autograd import is_transformed
from onepass.line import Line


def run(line: Line, xs, operands, stack: bool, call: Callable, in_one_launch: Callable):
    """Calls a line for all tensors of a list.

    Args:
        line: the line.
        xs: the tensors.
        operands: each a tensor for all of them, or a list with one for each.
        stack: whether results are stacked, else they are lists.
        call: calls the line for one tensor and its operands.
        in_one_launch: calls the line for all tensors, wherever they are, given all operands: the kinds of results, or
            None where no kernel takes tensors so: with `linear` or `scores`, a tensor is a call.
    """
    operands = [_cast(o) if i in line._matrix_operands else o for i, o in enumerate(operands)]
    whole = _pieces_of(xs) if xs else None
    if whole is not None and not _may_be_one_tensor(line, xs[0]):
        whole = None
    _check(line, None if whole is not None else xs, len(xs), operands)
    if stack and whole is None:
        _check_stack(xs)
    taken = None if whole is None else _pieces_of_operands(line, xs, operands)
    if taken is not None:
        results = _kinds(line, call(whole, taken))
    elif is_sharded(xs[0]) or _has_batches_of_columns(line, operands):
        results = _one_by_one(call, line, xs, operands)
    else:
        results = (
            in_one_launch(operands) or _copied(call, line, xs, whole, operands) or _one_by_one(call, line, xs, operands)
        )
    # A tensor has all of them, a dimension more in front.
    results = [torch.stack(r) if stack and _is_list(r) else r if stack else list(r) for r in results]
    return tuple(results) if line.keeps else results[0]


def unchanged(line: Line, xs, stack: bool):
    """What a line of dropouts gives where they are off."""
    _check(line, xs, len(xs), [])
    if not stack:
        return list(xs)
    _check_stack(xs)
    return torch.stack(xs)


def _is_list(value) -> bool:
    return isinstance(value, (list, tuple))


def _cast(matrices):
    """What autocast makes of them."""
    some = matrices if _is_list(matrices) else [matrices]
    if not all(isinstance(m, torch.Tensor) for m in some):
        return matrices
    some = under_autocast(some[0].device.type, some) if some else some
    return list(some) if _is_list(matrices) else some[0]


def _kinds(line, results) -> list:
    return list(results) if line.keeps else [results]


def own(operands, i: int) -> list:
    """Those of a tensor."""
    return [o[i] if _is_list(o) else o for o in operands]


def _check(line, xs, count, operands):
    """Raises as PyTorch would, naming the tensor that is at fault. xs: None where they are known to fit."""
    if count == 0:
        raise RuntimeError("fused(): expected a non-empty list of tensors")
    lists = [] if xs is None else [("x", xs)]
    if operands:
        lists += zip(line._operand_names(), operands)
    for name, tensors in lists:
        if not _is_list(tensors):
            if not isinstance(tensors, torch.Tensor):
                raise TypeError(f"fused(): {name} must be Tensor, not {type(tensors).__name__}")
            continue
        for i, t in enumerate(tensors):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"fused(): element {i} of {name} must be Tensor, not {type(t).__name__}")
        if len(tensors) != count:
            raise RuntimeError(
                f"fused(): {name} must be a tensor, or a list of {count} as x is, got {len(tensors)} elements"
            )
        _check_alike(name, tensors)


def _check_alike(name, tensors):
    first = tensors[0]
    for i, t in enumerate(tensors):
        whats = [("dtype", t.dtype, first.dtype), ("device", t.device, first.device)]
        if name == "x":
            whats = [("row length", list(t.shape[-1:]), list(first.shape[-1:])), *whats]
        for what, a, b in whats:
            if a != b:
                raise RuntimeError(
                    f"fused(): elements of {name} must have one {what}, got {a} for element {i}, {b} for 0"
                )


def _check_stack(xs):
    for i, x in enumerate(xs):
        if x.shape != xs[0].shape:
            raise RuntimeError(
                f"fused(): stack expects each tensor to be equal size, but got {list(xs[0].shape)} at entry 0 "
                f"and {list(x.shape)} at entry {i}"
            )


def in_one_launch(line: Line, xs, operands, stack: bool, forward: Callable) -> list:
    """The kinds of results, of one launch for all tensors, wherever they are."""
    tensors, listed = list(xs), 0
    for i, o in enumerate(operands):
        listed |= int(_is_list(o)) << i
        tensors += o if _is_list(o) else [o]
    count = len(xs)
    results = forward(tensors, count, listed, stack)[: (1 + line.keeps) * (1 if stack else count)]
    return list(results) if stack else [list(results[k : k + count]) for k in range(0, len(results), count)]


def _one_by_one(call, line, xs, operands) -> list:
    each = [call(x, own(operands, i)) for i, x in enumerate(xs)]
    return list(zip(*each)) if line.keeps else [each]


def _has_batches_of_columns(line, operands) -> bool:
    """Each of them serves some rows of its own tensor: a launch for several tensors has columns for all rows."""
    some = [o for i in line.column_operands for o in (operands[i] if _is_list(operands[i]) else [operands[i]])]
    return any(o.dim() > 1 for o in some)


def _may_be_one_tensor(line, x) -> bool:
    """Whether the line does the same to tensors of this shape and to a tensor of one dimension more."""
    return not line.scores and x.dim() > (1 if line.looks_at_rows else 0)


def _copied(call, line, xs, whole, operands):
    """Of one call for all, which are brought together first: each result a tensor of one dimension more, or a list.
    None where one call cannot be."""
    shape = xs[0].shape
    columns = [_is_list(o) and i not in line.tensor_operands for i, o in enumerate(operands)]
    if any(columns) or not _may_be_one_tensor(line, xs[0]):
        return None
    if whole is not None or all(x.shape == shape for x in xs):
        whole = torch.stack(xs) if whole is None else whole
        taken = [_as_one(_expanded(o, xs, line, operands, i)) if _is_list(o) else o for i, o in enumerate(operands)]
        return _kinds(line, call(whole, taken))
    if line.looks_at_rows:
        return None
    width = shape[-1]
    rows = [x.numel() // width if width else x.shape[:-1].numel() for x in xs]
    whole = torch.cat([x.reshape(r, width) for x, r in zip(xs, rows)])
    taken = list(operands)
    for i in line.tensor_operands:
        parts = _expanded(operands[i], xs, line, operands, i)
        taken[i] = torch.cat([p.reshape(r, p.shape[-1]) for p, r in zip(parts, rows)])
    return [
        [part.reshape(*x.shape[:-1], *part.shape[1:]) for part, x in zip(torch.split(r, rows), xs)]
        for r in _kinds(line, call(whole, taken))
    ]


def _expanded(operand, xs, line, operands, i):
    """A tensor operand for each input, of the shape of what the line is at."""
    own = operand if _is_list(operand) else [operand] * len(xs)
    shapes = [line.shape_behind(x, operands) if line.is_behind(i) else x.shape for x in xs]
    if i in line.table_operands:  # whose rows have a length of their own
        shapes = [(*s[:-1], o.shape[-1]) for o, s in zip(own, shapes)]
    return [o.expand(s) for o, s in zip(own, shapes)]


def _as_one(tensors):
    """All of them as one tensor with a dimension more in front."""
    whole = _pieces_of(tensors)
    return torch.stack(tensors) if whole is None else whole


def _pieces_of_operands(line, xs, operands):
    """Those of all tensors as one each, without a copy; None where that is not to be had."""
    taken = []
    for i, o in enumerate(operands):
        if _is_list(o):
            o = _pieces_of(_expanded(o, xs, line, operands, i)) if i in line.tensor_operands else None  # noqa: PLW2901
            if o is None:
                return None
        taken.append(o)
    return taken


def _pieces_of(tensors):
    """The same as a view, where they are equal pieces of one tensor; else None."""
    if torch.compiler.is_compiling() or is_transformed():
        return None
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors):
        return None
    joined = _joined_op()
    found = joined(tensors) if joined else None
    return found[0] if found else None


@functools.cache
def _joined_op():
    try:
        _native.open_autograd()
    except RuntimeError:  # without a compiler: autograd.differentiable has warned
        return None
    return torch.ops.onepass.joined.default

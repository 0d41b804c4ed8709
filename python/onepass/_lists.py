"""A list of tensors as a line's first argument: one call for all of them, and its results as a list again."""

from __future__ import annotations

import functools

import torch

from onepass import _native


def run(call, line, xs, operands, stack):
    """Calls a line for all tensors of a list.

    Args:
        call: runs the line on a tensor and operands.
        line: the :class:`Line`.
        xs: the tensors.
        operands: each a tensor for all of them, or a list with one for each.
        stack: whether results are stacked, else they are lists.
    """
    xs, operands = list(xs), list(operands)
    whole = _pieces_of(xs)
    _check(line, xs if whole is None else None, len(xs), operands)
    if stack and whole is None:
        _check_stack(xs)
    results = _together(call, line, xs, whole, operands)
    if results is None:
        each = [call(x, [o[i] if _is_list(o) else o for o in operands]) for i, x in enumerate(xs)]
        results = list(zip(*each)) if line.keeps else [each]
        results = [torch.stack(r) if stack else list(r) for r in results]
    else:
        results = [r if stack and torch.is_tensor(r) else torch.stack(r) if stack else list(r) for r in results]
    return tuple(results) if line.keeps else results[0]


def _is_list(value) -> bool:
    return isinstance(value, (list, tuple))


def _check(line, xs, count, operands):
    """Raises as PyTorch would, naming the tensor that is at fault. xs: None where they are known to fit."""
    if count == 0:
        raise RuntimeError("fused(): expected a non-empty list of tensors")
    lists = [] if xs is None else [("x", xs)]
    if any(_is_list(o) for o in operands):
        lists += [(name, o) for name, o in zip(line._operand_names(), operands) if _is_list(o)]
    for name, tensors in lists:
        for i, t in enumerate(tensors):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"fused(): element {i} of {name} must be Tensor, not {type(t).__name__}")
        if len(tensors) != count:
            raise RuntimeError(
                f"fused(): {name} must be a tensor, or a list of {count} as x is, got {len(tensors)} elements"
            )
    for i, x in enumerate(xs or ()):
        first = xs[0]
        for what, a, b in (
            ("row length", x.shape[-1:], first.shape[-1:]),
            ("dtype", x.dtype, first.dtype),
            ("device", x.device, first.device),
        ):
            if a != b:
                a, b = (list(a), list(b)) if what == "row length" else (a, b)
                raise RuntimeError(f"fused(): elements of x must have one {what}, got {a} for element {i}, {b} for 0")


def _check_stack(xs):
    for i, x in enumerate(xs):
        if x.shape != xs[0].shape:
            raise RuntimeError(
                f"fused(): stack expects each tensor to be equal size, but got {list(xs[0].shape)} at entry 0 "
                f"and {list(x.shape)} at entry {i}"
            )


def _together(call, line, xs, whole, operands):
    """Of one call for all: each result a tensor of one dimension more, or a list. None where one call cannot be."""
    shape = xs[0].shape
    looks_at_rows = line.looks_at_rows
    columns = [_is_list(o) and i not in line.tensor_operands for i, o in enumerate(operands)]
    if line.scores or not shape or any(columns) or (looks_at_rows and len(shape) < 2):
        return None
    if whole is not None or all(x.shape == shape for x in xs):
        whole = torch.stack(xs) if whole is None else whole
        taken = [_as_one(_expanded(o, xs, line, operands, i)) if _is_list(o) else o for i, o in enumerate(operands)]
        results = call(whole, taken)
        return list(results) if line.keeps else [results]
    if looks_at_rows:
        return None
    width = shape[-1]
    rows = [x.numel() // width if width else x.shape[:-1].numel() for x in xs]
    whole = torch.cat([x.reshape(r, width) for x, r in zip(xs, rows)])
    taken = list(operands)
    for i in line.tensor_operands:
        parts = _expanded(operands[i], xs, line, operands, i)
        taken[i] = torch.cat([p.reshape(r, p.shape[-1]) for p, r in zip(parts, rows)])
    results = call(whole, taken)
    return [
        [part.reshape(*x.shape[:-1], part.shape[-1]) for part, x in zip(torch.split(r, rows), xs)]
        for r in (results if line.keeps else (results,))
    ]


def _expanded(operand, xs, line, operands, i):
    """A tensor operand for each input, of the shape of what the line is at."""
    own = operand if _is_list(operand) else [operand] * len(xs)
    shapes = [line.shape_behind(x, operands) if line.is_behind(i) else x.shape for x in xs]
    return [o.expand(s) for o, s in zip(own, shapes)]


def _as_one(tensors):
    """All of them as one tensor with a dimension more in front."""
    whole = _pieces_of(tensors)
    return torch.stack(tensors) if whole is None else whole


def _pieces_of(tensors):
    """The same as a view, where they are equal pieces of one tensor; else None."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
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

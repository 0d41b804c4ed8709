"""A backward operator that can be differentiated itself, by what it does in PyTorch's own terms; and forward mode."""

from __future__ import annotations

import functools

import torch
from torch.autograd import profiler

_is_traced = torch.compiler.is_dynamo_compiling


def is_profiled() -> bool:
    """Whether a call's line should stand in a profile, or in NVTX ranges; tracing must not ask, it would guard."""
    return not _is_traced() and profiler._is_profiler_enabled


def run_backward(how, *tensors):
    """A backward operator, as one that may be differentiated where PyTorch asks for that.

    Traced, a gradient has one derivative: torch.compile itself refuses a second.

    Args:
        how: what the operator is told besides tensors, with the operator as `run` and the same of PyTorch's operators
            as `compose`. No tuple: torch.func would look for tensors in one.
    """
    run = how.run
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        run, tensors = functools.partial(Backward.apply, how), how.watched(tensors)
    if is_profiled():
        with profiler.record_function(f"onepass backward: {how.line.text}"):
            return run(*tensors)
    return run(*tensors)


class Backward(torch.autograd.Function):
    """Runs a backward operator; its own derivatives are those of what PyTorch's operators make of the same tensors."""

    generate_vmap_rule = True

    @staticmethod
    def forward(how, *tensors):
        """What the operator writes."""
        return how.run(*tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Saves all tensors."""
        ctx.how, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.like = [(t.shape, t.dtype, t.device) for t in output]

    @staticmethod
    def backward(ctx, *upstream):
        """Of the tensors, those that are needed."""
        tensors = ctx.saved_tensors
        needed = [i for i, is_needed in enumerate(ctx.needs_input_grad[1:]) if is_needed]
        _, pull = torch.func.vjp(_at(needed, ctx.how.compose, tensors), *[tensors[i] for i in needed])
        given = [
            torch.zeros(shape, dtype=dtype, device=device) if g is None else g
            for g, (shape, dtype, device) in zip(upstream, ctx.like)
        ]
        found = dict(zip(needed, pull(tuple(given))))
        return None, *[found.get(i) for i in range(len(tensors))]

    @staticmethod
    def jvp(ctx, _, *tangents):
        """Of what is written."""
        return derivative_along(tangents, ctx.how.compose, ctx.saved_tensors)


def derivative_along(tangents, function, tensors):
    """Of a function at the tensors; where a tangent is None it is zero.

    The transpose of what takes gradients back, which is linear: forward mode has no levels to nest.
    """
    places = [i for i, tangent in enumerate(tangents) if tangent is not None]
    results, pull = torch.func.vjp(_at(places, function, tensors), *[tensors[i] for i in places])
    _, push = torch.func.vjp(pull, tuple(torch.zeros_like(r) for r in results))
    return push(tuple(tangents[i] for i in places))[0]


def _at(places, function, tensors):
    """The function of the tensors at these places alone."""

    def run(*some):
        given = dict(zip(places, some))
        return function(*[given.get(i, t) for i, t in enumerate(tensors)])

    return run

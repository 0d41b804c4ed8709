"""Activation checkpointing: what is computed again is what was computed, dropout's masks too."""

import functools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import onepass
from helpers import Recorder, as_tuple, make_inputs, upstream

LINES = [
    "bias | gelu",
    "bias | dropout(0.3) | add | keep | layer_norm(1e-5) | scale | bias",
    "mul(0.125) | mask | softmax | dropout(0.3)",
    "layer_norm(1e-5) | scale | bias | linear | bias | dropout(0.3) | add",
    "scores | mul(0.125) | mask | softmax | dropout(0.3) | values",
]


def outcome(function, inputs):
    torch.manual_seed(3)
    results = as_tuple(function(*inputs.tensors))
    for tensor in inputs.differentiable:
        tensor.grad = None
    torch.autograd.backward(results, upstream(results))
    return [*results, *(t.grad for t in inputs.differentiable)]


def line_and_more(line, *tensors):
    first, *kept = as_tuple(onepass.fused(line, *tensors))
    return (onepass.fused("mul(0.7) | softplus | mul(1.3) | tanh", first), *kept)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("line", LINES)
def test_all_is_computed_again(line, use_reentrant, device):
    inputs = make_inputs(line, (2, 5, 6), torch.float32, device)
    function = functools.partial(line_and_more, line)
    ours = outcome(lambda *t: checkpoint(function, *t, use_reentrant=use_reentrant), inputs)
    for a, b in zip(ours, outcome(function, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("line", LINES[1:])
def test_operators_are_chosen_by_name(line, device):
    """The line's forward is kept, the activation's is computed again."""
    inputs = make_inputs(line, (2, 5, 6), torch.float32, device)
    kept = onepass.Line(line).forward_op

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == kept else CheckpointPolicy.PREFER_RECOMPUTE

    function = functools.partial(line_and_more, line)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    recorder = Recorder()
    with recorder:
        ours = outcome(lambda *t: checkpoint(function, *t, use_reentrant=False, context_fn=contexts), inputs)
    for a, b in zip(ours, outcome(function, inputs), strict=True):
        assert torch.equal(a, b)
    forwards = [str(op) for op, _, _ in recorder.calls if "forward" in str(op)]
    assert forwards.count("onepass.elementwise_forward.default") == 2
    assert forwards.count(str(kept)) == 1


def test_a_compiled_checkpoint(device):
    inputs = make_inputs(LINES[1], (2, 5, 6), torch.float32, device)
    function = functools.partial(line_and_more, LINES[1])
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *t: checkpoint(function, *t, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    results = outcome(compiled, inputs)
    dropped = 0.1 < (results[1] == inputs.operands[1]).double().mean() < 0.5
    assert dropped and torch.isfinite(torch.stack([r.sum() for r in results])).all()

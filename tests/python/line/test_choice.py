"""What `Line.plan` says is what runs: calls are drawn, and a profiler says by which kernel they went."""

import random
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import onepass
from helpers import assert_equal, make_inputs, run

LINES = {
    "linear": (
        "linear | bias | gelu",
        "layer_norm(1e-5) | scale | bias | linear | bias",
        "rms_norm(1e-6) | scale | linear",
        "gate(silu) | linear",
    ),
    "scores": ("scores | softmax", "scores | mul(0.125) | add | softmax", "scores | causal | softmax"),
    "values": ("scores | mul(0.125) | softmax | values", "scores | add | softmax | values"),
}
ONE_KERNEL = {
    "linear_forward",
    "small_m_forward",
    "small_k_forward",
    "small_n_forward",
    "probabilities_forward_sm80",
    "probabilities_forward_sm90",
    "attention_forward_sm90",
    "attention_forward_sm80",
}
"""The kernels that are all of such a line."""


def kernels_of(call):
    call()  # compiled
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        call()
        torch.cuda.synchronize()
    return {event.key.removeprefix("onepass_") for event in profiled.key_averages()}


def expect_runs(way, text, inputs, device):
    """On CUDA by the kernel's name; on the CPU, where ways differ in the order of sums, by the bits."""
    if device == "cuda":
        assert kernels_of(lambda: run(text, inputs)) & ONE_KERNEL == ({way.kernel} if way.kernel else set())
    else:
        named = re.sub("linear|scores", lambda found: f"{found[0]}({way.name})", text)
        assert_equal(run(text, inputs)[0][0], run(named, inputs)[0][0])


def sizes_of(kind, drawn, device):
    if kind == "linear":
        rows = drawn.choice([1, 16, 300, 4096])
        return (rows, drawn.choice([7, 64, 256, 1000])), drawn.choice([1, 8, 64, 100, 512])
    batch = drawn.choice([1, 2, 6])
    shape = (batch, drawn.choice([1, 100, 257]), drawn.choice([8, 60, 64, 128] + [256] * (device == "cuda")))
    return shape, drawn.choice([1, 64, 131, 1000, 1001])


@pytest.mark.parametrize("kind", LINES)
def test_what_is_planned_is_what_runs(kind, device):
    drawn = random.Random(11)
    dtypes = [torch.bfloat16, torch.bfloat16, torch.float16] if device == "cuda" else []
    found = set()
    for _ in range(40 if device == "cuda" else 12):
        text, dtype = drawn.choice(LINES[kind]), drawn.choice([*dtypes, torch.float32])
        shape, columns = sizes_of(kind, drawn, device)
        line, inputs = onepass.Line(text), make_inputs(text, shape, dtype, device, out_features=columns)
        if kind == "values":  # as long as the keys, as a plan takes them to be
            inputs.operands[-1] = torch.randn_like(inputs.operands[0])
        plan = line.plan(shape, dtype, columns, device=device, training=False)
        way = next(way for way in plan.alternatives if way.name == plan.strategy)
        found.add(way.name)
        try:
            with torch.no_grad():
                expect_runs(way, text, inputs, device)
        except AssertionError as error:
            raise AssertionError(f"{text}, {shape}, {columns}, {dtype}: planned {plan}") from error
    assert len(found) > 1

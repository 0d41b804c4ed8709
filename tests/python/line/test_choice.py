"""What `Line.plan` says is what runs: calls are drawn, and a profiler says by which kernel they went."""

import functools
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a profiler shows CUDA's kernels by name")
def test_kernels_of_rows_are_those_planned_on_cuda():
    """One for rows that fit on chip, three for the parts of those that do not."""
    drawn, counts = random.Random(7), set()
    for _ in range(24):
        text = drawn.choice(("bias | gelu", "add | rms_norm(1e-6) | scale", "layer_norm | scale | bias", "softmax"))
        shape = drawn.choice([(4096, 64), (300, 1000), (64, 4096), (16, 50_000), (2, 300_000), (1, 2_000_001)])
        dtype, training = drawn.choice([torch.bfloat16, torch.float32]), drawn.random() < 0.5
        inputs = make_inputs(text, shape, dtype, "cuda")
        with torch.set_grad_enabled(training):
            found = kernels_of(functools.partial(onepass.fused, text, *inputs.tensors))
        plan = onepass.Line(text).plan(shape, dtype, device="cuda", training=training)
        (way,) = plan.alternatives
        planned = set(way.kernel.split(", "))
        counts.add(len(planned))
        assert {name for name in found if re.match("rowwise|elementwise", name)} == planned, (text, shape, dtype, plan)
        assert (len(planned) > 1) == ("in parts" in plan.why)
    assert counts == {1, 3}


@pytest.mark.parametrize("line", ["bias | gelu", "layer_norm | scale | bias", "add | keep | softmax"])
def test_plans_of_rows_for_a_chip_that_is_not_here(line):
    line = onepass.Line(line)
    for rows, columns, whole in ((8192, 4096, True), (4, 2_000_001, "gelu" in str(line)), (1, 1, True)):
        plan = line.plan((rows, columns), device="sm_90a")
        (way,) = plan.alternatives
        assert plan.strategy == way.name == "fused" and way.seconds is None
        assert plan.why.startswith("one kernel, " if whole else "3 kernels, since a row does not fit on chip"), plan
        assert way.kernel and all(name in plan.why for name in way.kernel.split(", "))
    assert line.plan((0, 8), device="sm_80").why == "no kernel: there are no elements"
    assert line.plan((8, 8), device="cpu").why == "one kernel"


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

"""What `Line.plan` says is what runs: calls are drawn, and a profiler says which kernels and products they took."""

import random

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import onepass
from helpers import make_inputs, run

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
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear"}


def seen(call):
    """The names of what ran: PyTorch's operators, and on CUDA its kernels."""
    on_cuda = torch.cuda.is_available()
    call()  # compiled
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        call()
        if on_cuda:
            torch.cuda.synchronize()
    return {event.key for event in profiled.key_averages()}


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
        plan = line.plan(shape, dtype, columns, device=device, training=False)
        way = next(way for way in plan.alternatives if way.name == plan.strategy)
        with torch.no_grad():
            names = seen(lambda: run(text, inputs))  # noqa: B023
        told = f"{text}, {shape}, {columns}, {dtype}: {plan}"
        found.add(plan.strategy)
        if plan.strategy == "unfused":
            assert names & PRODUCTS, told
        elif device == "cpu":
            assert not names & PRODUCTS, told
        else:
            assert f"onepass_{way.kernel}" in names, told
    assert len(found) > 1

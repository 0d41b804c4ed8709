"""Bit for bit the same: run after run, for any number of threads, and a row in any batch."""

import pytest
import torch

import onepass
from helpers import as_tuple, make_inputs, upstream, words_of

LINES = [
    "bias | gelu",
    "gate(silu)",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | mask | softmax | dropout(0.1)",
    "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | bias",
]
SHAPES = [(1000, 96), (3, 4096), (20000, 8), (64, 2, 33, 40)]


def outcome(line, inputs):
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs.tensors]
    generator = torch.Generator(inputs.x.device).manual_seed(9)
    results = as_tuple(onepass.fused(line, *leaves, generator=generator))
    grads = torch.autograd.grad(results, [t for t in leaves if t.requires_grad], upstream(results))
    return [*(r.detach() for r in results), *grads]


def assert_bits(first, second, what):
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        bits = torch.int16 if a.element_size() == 2 else torch.int32
        assert torch.equal(a.view(bits), b.view(bits)), f"{what}: tensor {i} differs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("line", LINES)
def test_run_after_run(line, shape, dtype, device):
    inputs = make_inputs(line, shape, dtype, device)
    first = outcome(line, inputs)
    for _ in range(4):
        assert_bits(first, outcome(line, inputs), "repeated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("line", LINES)
def test_any_number_of_threads(line, shape, dtype):
    inputs = make_inputs(line, shape, dtype)
    before = torch.get_num_threads()
    try:
        outcomes = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            outcomes.append(outcome(line, inputs))
    finally:
        torch.set_num_threads(before)
    for threads, other in zip((2, 3, 7), outcomes[1:]):
        assert_bits(outcomes[0], other, f"{threads} threads")


@pytest.mark.parametrize("line", [line for line in LINES if "dropout" not in line])
def test_a_row_does_not_depend_on_its_batch(line, device):
    """Results and row gradients of rows 5 to 8 alone and among 300 others."""
    inputs = make_inputs(line, (300, 129), torch.float32, device)
    kinds = [word.operand for word in words_of(line) if word.operand != "none"]

    def of(rows):
        x = inputs.x.detach()[rows].clone().requires_grad_()
        operands = [
            o.detach()[rows].clone() if kind == "tensor" else o.detach() for o, kind in zip(inputs.operands, kinds)
        ]
        results = as_tuple(onepass.fused(line, x, *operands))
        grads = [g[rows] for g in upstream([torch.empty(300, 129, device=device)] * len(results))]
        return [*(r.detach() for r in results), *torch.autograd.grad(results, x, grads)]

    everything, few, one = of(slice(None)), of(slice(5, 9)), of(slice(7, 8))
    assert_bits([t[5:9].contiguous() for t in everything], few, "four rows")
    assert_bits([t[7:8].contiguous() for t in everything], one, "one row")


@pytest.mark.parametrize("shape", [(3, 20, 96), (3, 20, 1152), (3, 20, 2048), (2, 8, 20480)], ids=str)
def test_a_batch_does_not_depend_on_others(shape, device):
    """Results and row gradients of the second batch alone, whose columns are then those of all rows, and of one row."""
    x, scale, bias = (torch.randn(size, device=device).bfloat16() for size in (shape, *[(shape[0], 1, shape[2])] * 2))
    up = torch.randn(shape, device=device).bfloat16()

    def of(batches, rows):
        leaf = x[batches, rows].clone().requires_grad_()
        y = onepass.fused("layer_norm(1e-6) | scale(1) | bias", leaf, scale[batches], bias[batches])
        return [y.detach(), *torch.autograd.grad(y, leaf, up[batches, rows])]

    everything = of(slice(None), slice(None))
    for rows in (slice(None), slice(3, 4)):
        alone = of(slice(1, 2), rows)
        assert_bits([t[1:2, rows].contiguous() for t in everything], alone, f"rows {rows}")


def test_deterministic_algorithms_are_all_there_are(device):
    """Nothing raises or warns where the user forbids nondeterminism, and nothing changes."""
    line = "layer_norm(1e-5) | scale | bias"
    inputs = make_inputs(line, (1000, 96), torch.float32, device)
    expected = outcome(line, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert_bits(expected, outcome(line, inputs), "deterministic mode")
    finally:
        torch.use_deterministic_algorithms(False)


def test_streams(cuda):
    line = "layer_norm(1e-5) | scale | bias"
    inputs = make_inputs(line, (1000, 1024), torch.float32, cuda)
    expected = outcome(line, inputs)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outcomes = []
    for stream in streams:
        with torch.cuda.stream(stream):
            outcomes.append(outcome(line, inputs))
    torch.cuda.synchronize()
    for other in outcomes:
        assert_bits(expected, other, "another stream")

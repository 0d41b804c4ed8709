"""Backward of a norm and a `linear` of at most 64 features, which is one pass over x on compute capability 9.0."""

import pytest
import torch

import onepass
from helpers import assert_equal, check_line, gradients, make_inputs, run, upstream

NORM_LINEAR = "layer_norm(1e-5) | scale | bias | linear | bias"
LINES = (
    NORM_LINEAR,
    "layer_norm(1e-5) | linear",
    "layer_norm(1e-5) | bias | linear | gelu",
    "rms_norm(1e-6) | linear | add",
    "rms_norm(1e-6) | scale | linear | bias | keep | silu",
)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel is for compute capability 9.0",
)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    "rows, columns, out_features", [(4096, 256, 64), (70001, 24, 8), (1021, 1032, 40), (600, 4096, 64), (130, 8192, 16)]
)
def test_error_is_no_more_than_pytorchs(line, rows, columns, out_features):
    check_line(line, make_inputs(line, (rows, columns), torch.bfloat16, "cuda", out_features=out_features), slack=2.0)


@pytest.mark.parametrize("ratio", [1, 64, 1024])
def test_however_large_the_mean_is(ratio):
    inputs = make_inputs(NORM_LINEAR, (2048, 1024), torch.bfloat16, "cuda", out_features=64)
    with torch.no_grad():
        inputs.x.add_(ratio)
    check_line(NORM_LINEAR, inputs, slack=2.0)


@pytest.mark.parametrize("wanted", range(1, 32))
def test_any_gradients(wanted):
    """Whatever is asked for, and so whichever way is taken."""
    inputs = make_inputs(NORM_LINEAR, (1100, 1000), torch.bfloat16, "cuda", out_features=24)
    all_results, _ = run(NORM_LINEAR, inputs)
    expected = gradients(all_results, inputs, upstream(all_results))
    tensors = inputs.differentiable
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> i & 1))
    results, _ = run(NORM_LINEAR, inputs)
    got = torch.autograd.grad(results, [t for t in tensors if t.requires_grad], upstream(results))
    some = [e for i, e in enumerate(expected) if wanted >> i & 1]
    for ours, all_of_them in zip(got, some):
        torch.testing.assert_close(ours, all_of_them, rtol=2e-2, atol=2e-2 * all_of_them.abs().max().item())


def test_the_same_bits_every_time():
    inputs = make_inputs(NORM_LINEAR, (9000, 2048), torch.bfloat16, "cuda", out_features=64)

    def once():
        results, _ = run(NORM_LINEAR, inputs)
        return gradients(results, inputs, upstream(results))

    torch.manual_seed(0)
    first = once()
    for _ in range(4):
        torch.manual_seed(0)
        for a, b in zip(once(), first):
            assert_equal(a, b)


@pytest.mark.parametrize("layout", ["rows", "leading", "misaligned", "expanded gradient"])
def test_layouts(layout):
    x = torch.randn(4, 600, 520, device="cuda", dtype=torch.bfloat16)
    g, b = (torch.randn(512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w, c = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16) / 20, torch.randn(64, device="cuda").bfloat16()
    x = {"leading": x.transpose(0, 1), "misaligned": x[..., 1:]}.get(layout, x)[..., :512]
    up = torch.randn(64, device="cuda").bfloat16() if layout == "expanded gradient" else torch.randn_like(x[..., :64])

    def of(x, strategy):
        tensors = [t.detach().requires_grad_() for t in (x, g, b, w, c)]
        y = onepass.fused(NORM_LINEAR.replace("linear", f"linear({strategy})"), *tensors)
        return torch.autograd.grad(y, tensors, up.expand_as(y))

    for ours, expected in zip(of(x, "auto"), of(x.contiguous(), "unfused")):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


def test_in_a_cuda_graph():
    inputs = make_inputs(NORM_LINEAR, (2048, 1024), torch.bfloat16, "cuda", out_features=64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results, _ = run(NORM_LINEAR, inputs)
        up = upstream(results)
        gradients(results, inputs, up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results, _ = run(NORM_LINEAR, inputs)
        captured = gradients(results, inputs, up)
    for _ in range(2):
        with torch.no_grad():
            inputs.x.normal_()
        graph.replay()
        again, _ = run(NORM_LINEAR, inputs)
        for a, b in zip(captured, gradients(again, inputs, up)):
            assert_equal(a, b)

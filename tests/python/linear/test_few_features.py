"""`linear` of at most 8 features, whose rows end in dot products in one kernel forward and one backward."""

import pytest
import torch

import onepass
from helpers import (
    LINEAR_LINES,
    Recorder,
    assert_equal,
    check_line,
    gradients,
    make_inputs,
    run,
    upstream,
    with_strategy,
    words_of,
)
from onepass.reference import compose

STACK = "layer_norm(0) | tanh | linear | bias | relu"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
# Compiled on the CPU for each number of features: few of them.
LINES = (
    STACK,
    "linear",
    "add | keep | rms_norm(1e-6) | scale | linear | bias | keep | silu",
    "dropout(0.1) | add | keep | linear | dropout(0.1) | add",
    "softmax | linear | relu | add",
)
ON_CUDA = (*LINES, *LINEAR_LINES, "mask | softmax | bias | linear | gate(silu)", "relu | add | linear | mul(2.0)")


def small_n(line):
    return with_strategy(line, "small_n")


def check(line, *arguments, **keywords):
    inputs = make_inputs(line, *arguments, **keywords)
    # A column of few numbers may have a sum that is small beside its terms.
    scales = [float(t.numel() <= 8) for t in inputs.differentiable]
    check_line(small_n(line), inputs, slack=2.0, floor_scales=scales, grad_outputs=off_the_kink(line, inputs))


def off_the_kink(line, inputs):
    """Upstream gradients, zero where rounding decides on which side of relu's kink a product is."""
    grads = upstream(run(line, inputs)[0])
    before, kink, _ = line.partition(" | relu")
    if kink and "linear" in before and "dropout" not in before:
        wide = inputs.to(torch.float64)
        value = compose(words_of(before), wide.x, wide.operands[: onepass.Line(before).operand_count])[0]
        grads[0][value.abs() < 0.02] = 0
    return grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("device", DEVICES)
def test_error_is_no_more_than_pytorchs(line, dtype, device):
    check(line, (3, 40, 256), dtype, device, out_features=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("line", ON_CUDA)
@pytest.mark.parametrize("shape, features", [((1, 8), 1), ((3, 50, 200), 3), ((700, 1001), 5), ((5000, 256), 8)])
def test_lines_on_cuda(line, dtype, shape, features):
    check(line, shape, dtype, "cuda", out_features=features)


@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (5, 1, 31), (2, 3, 1000), (4, 4096), (4099, 16)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_shapes(shape, device):
    line = STACK.replace("layer_norm(0)", "layer_norm(1e-3)")
    inputs = make_inputs(line, shape, torch.float32, device, out_features=1)
    # The gradient of few numbers' norm is small beside what it is the difference of.
    scales = [g.abs().max().item() for g in inputs.tensors] if shape[-1] <= 3 else None
    check_line(small_n(line), inputs, slack=4.0, floor_scales=scales)


@pytest.mark.parametrize("device", DEVICES)
def test_float64(device):
    inputs = make_inputs(STACK, (6, 20), torch.float64, device, out_features=1)

    def of(*tensors):
        return onepass.fused(small_n(STACK), *tensors)

    assert torch.autograd.gradcheck(of, inputs.tensors)


@pytest.mark.parametrize("wanted", range(1, 8))
@pytest.mark.parametrize("device", DEVICES)
def test_any_gradients(wanted, device):
    inputs = make_inputs(STACK, (130, 256), torch.float32, device, out_features=1)
    all_results, _ = run(small_n(STACK), inputs)
    expected = gradients(all_results, inputs, upstream(all_results))
    tensors = inputs.differentiable
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> i & 1))
    results, _ = run(small_n(STACK), inputs)
    got = torch.autograd.grad(results, [t for t in tensors if t.requires_grad], upstream(results))
    for ours, whole in zip(got, [e for i, e in enumerate(expected) if wanted >> i & 1]):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5 * whole.abs().max().item())


@pytest.mark.parametrize("layout", ["rows", "leading", "misaligned", "expanded gradient", "expanded x"])
@pytest.mark.parametrize("device", DEVICES)
def test_layouts(layout, device):
    x = torch.randn(4, 60, 264, device=device)
    w, c = torch.randn(1, 520, device=device)[:, ::2][:, :256] / 16, torch.randn(1, device=device)
    x = {
        "leading": x.transpose(0, 1),
        "misaligned": x[..., 1:],
        "expanded x": x[:1].expand(4, 60, 264),
    }.get(layout, x)[..., :256]
    up = torch.randn(1, device=device) if layout == "expanded gradient" else torch.randn_like(x[..., :1])

    def of(x, w, line):
        tensors = [t.detach().requires_grad_() for t in (x, w, c)]
        y = onepass.fused(line, *tensors)
        return y, *torch.autograd.grad(y, tensors, up.expand_as(y))

    unfused = with_strategy(STACK, "unfused")
    for ours, expected in zip(of(x, w, small_n(STACK)), of(x.contiguous(), w.contiguous(), unfused)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5 * expected.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_every_time_and_whatever_the_batch(device):
    inputs = make_inputs(STACK, (9000, 256), torch.float32, device, out_features=1)

    def once():
        results, _ = run(small_n(STACK), inputs)
        return results[0], *gradients(results, inputs, upstream(results))

    first = once()
    for _ in range(3):
        for a, b in zip(once(), first):
            assert_equal(a, b)
    x, w, c = inputs.tensors
    assert_equal(onepass.fused(small_n(STACK), x[:7], w, c), first[0][:7])


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_taken_without_being_named(device):
    plan = onepass.Line(STACK).plan((16, 1024, 256), torch.float32, 1, device=device)
    assert plan.strategy == "small_n" and "unfused" in str(plan)
    inputs = make_inputs(STACK, (64, 256), torch.float32, device, out_features=1)
    (named,), _ = run(small_n(STACK), inputs)
    (automatic,), _ = run(STACK, inputs)
    assert_equal(named, automatic)


@pytest.mark.parametrize("device", DEVICES)
def test_says_why_it_cannot(device):
    x, w = torch.randn(4, 16, device=device), torch.randn(9, 16, device=device)
    with pytest.raises(RuntimeError, match="at most 8 features"):
        onepass.fused("linear(small_n)", x, w)
    with pytest.raises(RuntimeError, match="one dtype"):
        onepass.fused("linear(small_n)", x, w[:1].double())


def test_empty():
    x, w = torch.randn(0, 16, requires_grad=True), torch.randn(1, 16, requires_grad=True)
    y = onepass.fused("layer_norm | linear", x, w)
    assert y.shape == (0, 1)
    y.sum().backward()
    assert x.grad.shape == x.shape and not w.grad.any()


def test_nothing_but_two_operators():
    inputs = make_inputs(STACK, (64, 256), torch.float32, out_features=1)
    recorder = Recorder()
    with recorder:
        y = onepass.fused(STACK, *inputs.tensors)
        y.sum().backward()
    assert [str(call[0]) for call in recorder.calls if "linear" in str(call[0])] == [
        "onepass.linear_forward.default",
        "onepass.linear_backward.default",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_a_cuda_graph():
    inputs = make_inputs(STACK, (2048, 256), torch.float32, "cuda", out_features=1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results, _ = run(STACK, inputs)
        up = upstream(results)
        gradients(results, inputs, up)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results, _ = run(STACK, inputs)
        captured = gradients(results, inputs, up)
    for _ in range(2):
        with torch.no_grad():
            inputs.x.normal_()
        graph.replay()
        again, _ = run(STACK, inputs)
        for a, b in zip(captured, gradients(again, inputs, up)):
            assert_equal(a, b)

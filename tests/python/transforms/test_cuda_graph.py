"""CUDA graphs: capture after a warm-up, replays, fresh dropout masks, and a clear error where nothing was built."""

import copy

import pytest
import torch

import onepass
from helpers import as_tuple, make_inputs, upstream

LINES = [
    "bias | gelu",
    "gate(silu)",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | mask | softmax",
]


def warmed_up(step):
    """As PyTorch's notes ask: a few runs on a side stream before capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("line", LINES)
def test_replays_follow_the_inputs(line, cuda):
    inputs = make_inputs(line, (64, 1000), torch.bfloat16, cuda)
    grads = upstream(as_tuple(onepass.fused(line, *inputs.tensors)))

    def step():
        results = as_tuple(onepass.fused(line, *inputs.tensors))
        return [*results, *torch.autograd.grad(results, inputs.differentiable, grads)]

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (5, 6):
        fresh = make_inputs(line, (64, 1000), torch.bfloat16, cuda, seed=seed)
        for static, new in zip(inputs.tensors, fresh.tensors):
            static.data.copy_(new.data)
        for tensor in captured:
            tensor.data.fill_(float("nan"))
        graph.replay()
        replayed = [t.detach().clone() for t in captured]
        for ours, expected in zip(replayed, step(), strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize("line", ["dropout(0.1) | add", "softmax | dropout(0.1)"])
def test_replays_draw_anew(line, cuda):
    x = torch.rand(256, 1000, device=cuda) + 0.5
    x.requires_grad_()
    operands = [torch.zeros(1000, device=cuda)] if "add" in line else []

    def step():
        y = onepass.fused(line, x, *operands)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    masks = []
    for _ in range(4):
        graph.replay()
        masks.append((y != 0).clone())
        if "add" in line:
            assert torch.equal(dx != 0, y != 0), "backward draws another mask than forward"
    rate = torch.stack(masks).double().mean().item()
    assert abs(rate - 0.9) < 5e-3
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[i + 1 :])
    torch.manual_seed(3)
    graph.replay()
    first = (y != 0).clone()
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(y != 0, first), "manual_seed does not govern replays"


def test_a_line_that_was_never_built_says_so(cuda, tmp_path, monkeypatch):
    """Compiling inside a capture would break it; the message names the cure."""
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    x = torch.randn(8, 1000, device=cuda)
    x + 1
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="(?s)captur.*(warm|once|before)"), torch.cuda.graph(graph):
        onepass.fused("mul(0.1) | mish | mul(0.2) | hardswish | mul(0.3) | mish", x)
    torch.cuda.synchronize()
    torch.testing.assert_close(onepass.fused("gelu", x), torch.nn.functional.gelu(x))


def test_make_graphed_callables(cuda):
    block = torch.nn.Sequential(
        onepass.nn.LayerNorm(256), torch.nn.Linear(256, 512), onepass.nn.SwiGLU(), onepass.nn.RMSNorm(256)
    )
    block.to(cuda)
    x = torch.randn(32, 256, device=cuda, requires_grad=True)
    eager = copy.deepcopy(block)  # a graph kept alive over the same parameters would tie the capture to its stream
    expected = eager(x)
    (dx,) = torch.autograd.grad(expected, x, torch.ones_like(expected))
    expected = expected.detach()
    graphed = torch.cuda.make_graphed_callables(block, (x,))
    y = graphed(x)
    (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(got, dx)


def test_compiled_with_cuda_graphs(cuda):
    inputs = make_inputs("layer_norm(1e-5) | scale | bias", (64, 1000), torch.float32, cuda)
    compiled = torch.compile(lambda *t: onepass.fused("layer_norm(1e-5) | scale | bias", *t), mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        ours = compiled(*inputs.tensors).clone()
    assert torch.equal(ours, onepass.fused("layer_norm(1e-5) | scale | bias", *inputs.tensors))

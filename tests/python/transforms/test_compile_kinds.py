"""torch.compile of every kind of line, function and module: batch sizes come and go without a graph each."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import onepass
from helpers import as_tuple, make_inputs
from test_export import Model, tensors

LINES = [
    "bias | gelu",
    "layer_norm(1e-5) | scale | bias",
    "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale",
    "rope",
    "rms_norm(1e-6) | scale | rope(4)",
    "linear | bias | gelu",
    "layer_norm(1e-5) | scale | bias | linear | bias | gelu_tanh",
    "scores | mul(0.125) | softmax",
    "scores | mul(0.125) | mask | softmax | values",
]
BATCHES = [(2, 4), (3, 4), (8, 4), (5, 7), (16, 9), (2, 30), (1, 4)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("line", LINES)
def test_a_sweep_of_batch_sizes(line, training, device):
    """The first graph, and at most two more: for the first, and the second size that changes."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *t: onepass.fused(line, *t), fullgraph=True, backend=counter)
    for shape in BATCHES[:-1]:
        inputs = make_inputs(line, (*shape, 8), torch.float32, device)
        given = inputs.tensors if training else [t.detach() for t in inputs.tensors]
        results = [as_tuple(function(*given)) for function in seeded(compiled, lambda *t: onepass.fused(line, *t))]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        if training:
            grads = [torch.autograd.grad(sum(r.sum() for r in some), inputs.differentiable) for some in results]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count <= 3


def seeded(*functions):
    """Each draws the same."""

    def with_seed(function, *tensors):
        torch.manual_seed(7)
        return function(*tensors)

    return [lambda *t, f=f: with_seed(f, *t) for f in functions]


def test_a_sweep_with_a_model(device):
    model = Model().to(device).eval()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (2, 3, 8, 5, 16):
        x = tensors(rows, device)
        for a, b in zip(compiled(*x), model(*x), strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count <= 3


def test_max_autotune(device):
    """A step of training with Inductor's search on around the lines."""
    model = torch.nn.Sequential(
        onepass.nn.LayerNorm(16), torch.nn.Linear(16, 32), onepass.nn.SwiGLU(), onepass.nn.LinearAct(16, 8)
    ).to(device)
    x = torch.randn(6, 16, device=device)
    compiled = torch.compile(model, fullgraph=True, mode="max-autotune")
    results = [f(x) for f in (compiled, model)]
    gradients = [torch.autograd.grad(r.square().sum(), list(model.parameters())) for r in results]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_compiled_vmap(device):
    """Without gradients: Dynamo takes no autograd function under vmap."""
    x, b = torch.randn(3, 5, 8, device=device), torch.randn(8, device=device)
    compiled = torch.compile(torch.func.vmap(lambda x: onepass.fused("bias | gelu", x, b)), backend="aot_eager")
    assert torch.equal(compiled(x), onepass.fused("bias | gelu", x, b))


def test_a_second_derivative_is_refused(device):
    """By torch.compile itself, which has none."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: onepass.fused("tanh", x), fullgraph=True, backend=backend)
        (dx,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            dx.sum().backward()

"""What PyTorch does to modules and around them: meta device, parametrizations, AMP, determinism, profiles, streams."""

import copy

import pytest
import torch
from torch.nn.utils import parametrize

import onepass
from helpers import as_tuple, make_inputs, upstream

MODULES = {
    "LayerNorm": lambda **to: onepass.nn.LayerNorm(16, activation="gelu", **to),
    "RMSNorm": lambda **to: onepass.nn.RMSNorm(16, **to),
    "AddLayerNorm": lambda **to: onepass.nn.AddLayerNorm(16, **to),
    "BiasGELU": lambda **to: onepass.nn.BiasGELU(16, **to),
    "LinearAct": lambda **to: onepass.nn.LinearAct(16, 8, activation="gelu", **to),
    "LayerNormLinear": lambda **to: onepass.nn.LayerNormLinear(16, 8, **to),
    "RMSNormLinear": lambda **to: onepass.nn.RMSNormLinear(16, 8, **to),
    "LayerNormMLP": lambda **to: onepass.nn.LayerNormMLP(16, 32, **to),
    "GatedMLP": lambda **to: onepass.nn.GatedMLP(16, 32, **to),
    "MultiheadAttention": lambda **to: onepass.nn.MultiheadAttention(16, 2, batch_first=True, **to),
}


def called(module, x):
    kind = type(module).__name__
    if "Attention" in kind:
        return module(x, x, x, need_weights=False)[0]
    return module(x, x)[0] if kind.startswith("Add") else module(x)


@pytest.mark.parametrize("name", list(MODULES))
def test_meta_device(name, device):
    """Made without memory in three ways, then filled from a state dict, or by reset_parameters."""
    module = MODULES[name](device=device)
    x = torch.randn(2, 5, 16, device=device)
    with torch.device("meta"):
        made = MODULES[name]()
    for empty in (made, MODULES[name](device="meta"), copy.deepcopy(module).to("meta")):
        assert all(p.is_meta for p in empty.parameters())
        result = called(empty, x.to("meta"))
        assert result.is_meta and result.shape == called(module, x).shape
        filled = empty.to_empty(device=device)
        filled.load_state_dict(module.state_dict())
        assert torch.equal(called(filled, x), called(module, x))
    skipped = torch.nn.utils.skip_init(type(module), *arguments(name), device=device)
    assert [p.shape for p in skipped.parameters()] == [p.shape for p in module.parameters()]


def arguments(name):
    return {"LinearAct": (16, 8), "LayerNormLinear": (16, 8), "RMSNormLinear": (16, 8), "LayerNormMLP": (16, 32),
            "GatedMLP": (16, 32), "MultiheadAttention": (16, 2)}.get(name, (16,))  # fmt: skip


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LinearAct"])
def test_parametrized_weights(name, device):
    module = MODULES[name](device=device)
    twice = copy.deepcopy(module)
    with torch.no_grad():
        twice.weight.mul_(2)
    parametrize.register_parametrization(module, "weight", Doubled())
    x = torch.randn(5, 16, device=device)
    result = called(module, x)
    torch.testing.assert_close(result, called(twice, x))
    result.sum().backward()
    called(twice, x).sum().backward()
    torch.testing.assert_close(module.parametrizations.weight.original.grad, 2 * twice.weight.grad)


def test_mixed_precision_with_a_scaler(device):
    """Training as AMP's recipe has it: the loss falls, and a step whose gradients overflow is left out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        onepass.nn.LayerNormLinear(16, 32),
        onepass.nn.BiasGELU(32),
        onepass.nn.LinearAct(32, 16),
        onepass.nn.RMSNorm(16),
    ).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
    x, target = torch.randn(32, 16, device=device), torch.randn(32, 16, device=device)
    losses = []
    for step in range(20):
        optimiser.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = (model(x).float() - target).square().mean()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
        scaler.step(optimiser)
        scaler.update()
        if step == 3:
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before))
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0] and scaler.get_scale() < 2.0**10


LINES = [
    "layer_norm(1e-5) | scale | bias | linear | bias | gelu",
    "bias | dropout(0.1) | add | keep | rms_norm(1e-6) | scale",
    "scores | mul(0.125) | mask | softmax | values",
]


@pytest.mark.parametrize("line", LINES)
def test_deterministic_algorithms(line, device, monkeypatch):
    """Nothing is refused, and nothing changes: it always was."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which PyTorch asks for before any product on CUDA
    inputs = make_inputs(line, (2, 5, 6), torch.float32, device)

    def outcome():
        torch.manual_seed(3)
        results = as_tuple(onepass.fused(line, *inputs.tensors))
        return [*results, *torch.autograd.grad(results, inputs.differentiable, upstream(results))]

    expected = outcome()
    torch.use_deterministic_algorithms(True)
    try:
        found = outcome()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("way", ["C++", "Python"])
@pytest.mark.parametrize("line", LINES)
def test_profiles_show_the_line(line, way, device, monkeypatch):
    if way == "Python":
        monkeypatch.setattr("onepass.call.differentiable", lambda: None)
    inputs = make_inputs(line, (2, 5, 6), torch.float32, device)
    with torch.profiler.profile() as profile:
        results = as_tuple(onepass.fused(line, *inputs.tensors))
        torch.autograd.grad(results, inputs.differentiable, upstream(results))
    names = {event.key for event in profile.key_averages()}
    assert {f"onepass: {line}", f"onepass backward: {line}"} <= names


def test_profiles_show_lists(device):
    xs, b = [torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2)], torch.randn(8, device=device)
    with torch.profiler.profile() as profile:
        sum(y.sum() for y in onepass.fused("bias | gelu", xs, b)).backward()
    names = {event.key for event in profile.key_averages()}
    assert {"onepass: bias | gelu", "onepass backward: bias | gelu"} <= names


def test_pinned_memory_on_a_stream(cuda):
    """Copied, computed and copied back on a stream that is not the default one."""
    x, b = torch.randn(4000, 256).pin_memory(), torch.randn(256).pin_memory()
    expected = onepass.fused("bias | gelu", x, b)  # pinned memory is the CPU's, too
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        results = [onepass.fused("bias | gelu", *(t.to(cuda, non_blocking=True) for t in (x, b))) for _ in range(10)]
        back = [torch.empty_like(x).pin_memory().copy_(r, non_blocking=True) for r in results]
    stream.synchronize()
    for result in back:
        torch.testing.assert_close(result, expected)


def test_graphed_callables_of_every_kind(cuda):
    block = torch.nn.Sequential(
        onepass.nn.LayerNormLinear(64, 128), onepass.nn.BiasGELU(128), onepass.nn.LinearAct(128, 64)
    ).to(cuda)
    x = torch.randn(32, 64, device=cuda, requires_grad=True)
    eager = copy.deepcopy(block)
    (expected,) = torch.autograd.grad(eager(x).sum(), x)
    graphed = torch.cuda.make_graphed_callables(block, (x,))
    (found,) = torch.autograd.grad(graphed(x).sum(), x)
    torch.testing.assert_close(found, expected)

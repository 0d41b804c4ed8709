"""fuse on architectures, every line that can be said: in float64 the same numbers, gradients and strides as eager's.

A dozen run always; `pytest -m slow tests/python/rewrite` runs the others, a quarter of an hour of a core.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch.overrides import TorchFunctionMode

import onepass
from onepass.bench.architectures import ARCHITECTURES, SMALL, build, floating
from onepass.rewrite import fuse as fusing

RELATIVE = 1e-9
"""Of a tensor's largest number. Float64's rounding leaves 1e-13; a bias left out, or a part of a gradient, 1e-2."""
ALWAYS = (
    *("DeBERTa", "GPT-Neo", "BLOOM", "MPT", "Llama", "Llama 4", "Qwen 3", "Mamba 2"),
    *("Swin v2", "ConvNeXt v2", "VideoMAE", "SpeechT5", "Stable Diffusion 3"),
)
"""Of each kind one: relative positions, windows, ALiBi, rotations, experts, norms of heads, states, convolutions,
permuted results, two streams. A minute of a core."""
DRAWS = {"BigBird"}
"""Draws blocks by NumPy while it trains, others when it is captured than when it runs: its gradients are asked for in
evaluation mode."""


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Whatever a line can say becomes one, the longest first."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))
    torch._dynamo.reset()


class InDouble(TorchFunctionMode):
    """Many models compute norms and softmax in float32 whatever their own dtype is, where a line may round otherwise
    than eager does. Here they compute in float64 what they compute in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def in_double():
    torch.set_default_dtype(torch.float64)  # of constants
    with InDouble():
        yield
    torch.set_default_dtype(torch.float32)


def model_of(name):
    """In double precision, no parameter being zero or one: a term left out would not be seen."""
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    model, inputs = build(name, SMALL, torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, inputs


@dataclass
class Outcome:
    """What a call gives, and what it leaves behind, by name; None for what got no gradient."""

    values: dict[str, torch.Tensor | None]
    strides: dict[str, tuple[int, ...]]


def trained(name, model, inputs):
    """Results, their gradients and those of all parameters from random upstream gradients, and buffers."""
    model.train(name not in DRAWS)
    results = floating(model(**inputs))
    values = {key: result.detach().clone() for key, result in results.items()}
    generator = torch.Generator().manual_seed(5)
    differentiable = {key: result for key, result in results.items() if result.requires_grad}
    for result in differentiable.values():
        result.retain_grad()  # of hidden states, on which later results depend
    upstream = [torch.randn(r.shape, generator=generator, dtype=r.dtype) for r in differentiable.values()]
    torch.autograd.backward(list(differentiable.values()), upstream)
    values |= {f"gradient of {key}": result.grad for key, result in differentiable.items()}
    values |= {f"gradient of {key}": parameter.grad for key, parameter in model.named_parameters()}
    values |= floating(dict(model.named_buffers()), "buffer")
    return Outcome(values, {key: result.stride() for key, result in results.items()})


@torch.no_grad()
def evaluated(model, inputs):
    results = floating(model.eval()(**inputs))
    return Outcome(
        {key: result.clone() for key, result in results.items()}, {k: r.stride() for k, r in results.items()}
    )


def assert_equal(fused, eager):
    """Gradients that are zero but for rounding (of a key's bias) have the largest one's rounding."""
    assert fused.values.keys() == eager.values.keys()
    gradients = [t.abs().max().item() for k, t in eager.values.items() if k.startswith("gradient") and t is not None]
    floor = 1e-3 * RELATIVE * max(gradients, default=0.0)
    for key, true in eager.values.items():
        ours = fused.values[key]
        if true is None:
            assert ours is None, key
            continue
        assert ours is not None and ours.dtype == true.dtype and ours.shape == true.shape, key
        if true.numel():
            error, scale = (ours - true).abs().max().item(), true.abs().max().item()
            assert error <= RELATIVE * scale + floor, f"{key}: {error:.2e} of {scale:.2e}"
    assert fused.strides == eager.strides


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.slow) for n in ARCHITECTURES]
)
def test_the_same_as_eager(name):
    model, inputs = model_of(name)
    fused = onepass.fuse(copy.deepcopy(model))
    assert_equal(trained(name, fused, inputs), trained(name, model, inputs))
    lines = onepass.report(fused).lines
    assert lines
    model.zero_grad()
    expected = evaluated(model, inputs)
    for _ in range(2):  # RWKV remembers from the first that it evaluates
        assert_equal(evaluated(fused, inputs), expected)
    captured = len(onepass.report(fused).graphs)
    assert_equal(evaluated(fused, inputs), expected)
    assert len(onepass.report(fused).graphs) == captured

"""What torch's tracers make of modules and functions: leaves and calls, with the same results, as of torch.nn's."""

import io

import pytest
import torch
from torch import nn

import onepass
import onepass.functional as F
from helpers import as_tuple

MODULES = {
    "LayerNorm": lambda: (onepass.nn.LayerNorm(8, activation="gelu"), 1),
    "RMSNorm": lambda: (onepass.nn.RMSNorm(8), 1),
    "AddLayerNorm": lambda: (onepass.nn.AddLayerNorm(8), 2),
    "AddRMSNorm": lambda: (onepass.nn.AddRMSNorm(8, eps=1e-6), 2),
    "BiasGELU": lambda: (onepass.nn.BiasGELU(8), 1),
    "DropoutAdd": lambda: (onepass.nn.DropoutAdd(0.1).eval(), 2),
    "SwiGLU": lambda: (onepass.nn.SwiGLU(), 2),
    "GEGLU": lambda: (onepass.nn.GEGLU(), 1),
    "Softmax": lambda: (onepass.nn.Softmax(), 1),
    "LogSoftmax": lambda: (onepass.nn.LogSoftmax(), 1),
    "LinearAct": lambda: (onepass.nn.LinearAct(8, 4, activation="gelu"), 1),
    "LayerNormLinear": lambda: (onepass.nn.LayerNormLinear(8, 4), 1),
    "RMSNormLinear": lambda: (onepass.nn.RMSNormLinear(8, 4, eps=1e-6), 1),
    "LayerNormMLP": lambda: (onepass.nn.LayerNormMLP(8, 16), 1),
    "GatedMLP": lambda: (onepass.nn.GatedMLP(8, 16), 1),
    "MultiheadAttention": lambda: (onepass.nn.MultiheadAttention(8, 2), 3),
}


@pytest.fixture(params=MODULES)
def module_and_inputs(request):
    module, count = MODULES[request.param]()
    return module, tuple(torch.randn(3, 2, 8) for _ in range(count))


def tensors(results):
    return [t for t in as_tuple(results) if t is not None]


class Around(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner = module


class One(Around):
    def forward(self, a):
        return self.inner(a)


class Two(Around):
    def forward(self, a, b):
        return self.inner(a, b)


class Three(Around):
    def forward(self, a, b, c):
        return self.inner(a, b, c)


def test_symbolic_trace_of_a_module(module_and_inputs):
    module, inputs = module_and_inputs
    whole = (One, Two, Three)[len(inputs) - 1](module)
    traced = torch.fx.symbolic_trace(whole)
    called = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    assert [(node.op, node.target) for node in called] == [("call_module", "inner")]
    for ours, expected in zip(tensors(traced(*inputs)), tensors(module(*inputs)), strict=True):
        assert torch.equal(ours, expected)


def test_symbolic_trace_of_functions():
    def several(x, weight, heads):
        y = F.layer_norm(x, (8,), weight, weight, activation="gelu")
        y = onepass.fused("bias", y, weight)
        y, h = onepass.Line("add | keep | rms_norm(1e-6) | scale")(x, y, weight)
        pair = onepass.fused("scale", [y, h], weight)
        return F.swiglu(F.softmax(pair[0])), F.dropout_add(x, residual=y, p=0.0), F.attention_scores(heads, heads)

    traced = torch.fx.symbolic_trace(several)
    calls = [node for node in traced.graph.nodes if node.op == "call_function" and "onepass" in node.target.__module__]
    assert len(calls) == 8
    inputs = torch.randn(3, 8), torch.randn(8), torch.randn(1, 2, 3, 4)
    for ours, expected in zip(traced(*inputs), several(*inputs), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("recording", [True, False], ids=["grad mode", "no grad"])
def test_jit_trace_of_a_module(module_and_inputs, recording):
    module, inputs = module_and_inputs
    with torch.set_grad_enabled(recording):
        traced = torch.jit.trace(module, inputs)  # checks by another trace, without gradients
    stored = io.BytesIO()
    torch.jit.save(traced, stored)
    stored.seek(0)
    loaded = torch.jit.load(stored)
    expected = tensors(module(*inputs))
    for graph in (traced, loaded):
        for ours, wanted in zip(tensors(graph(*inputs)), expected, strict=True):
            torch.testing.assert_close(ours, wanted)
            assert ours.requires_grad == wanted.requires_grad
    parameters = list(module.parameters())
    if parameters:
        found = torch.autograd.grad(tensors(traced(*inputs))[0].square().sum(), parameters)
        for ours, wanted in zip(found, torch.autograd.grad(expected[0].square().sum(), parameters), strict=True):
            torch.testing.assert_close(ours, wanted)


def test_jit_trace_of_a_list():
    xs, scale = [torch.randn(2, 8), torch.randn(3, 8)], torch.randn(8)

    def scaled(a, b):
        return tuple(onepass.fused("scale", [a, b], scale))

    traced = torch.jit.trace(scaled, tuple(xs))
    for ours, x in zip(traced(*xs), xs, strict=True):
        torch.testing.assert_close(ours, x * scale)

"""Words with a tensor operand, and row words that PyTorch has a function for, as `fuse` finds them in models."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.rewrite import fuse as fusing


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Tests' tensors are small: whatever a line can say becomes one, the longest first."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, *_, **__: float(len(chain.nodes)))
    torch._dynamo.reset()


CALLS = {
    "sub | tanh": lambda x, t: torch.tanh(x - t),
    "div | tanh": lambda x, t: torch.tanh(x / t),
    "times | add": lambda x, t: x * t + t,
    "tanh | gated(silu) | keep | rms_norm(1e-06)": lambda x, t: F.rms_norm(torch.tanh(x) * F.silu(t), (64,), eps=1e-6),
    "layer_norm(1e-05) | gated(sigmoid)": lambda x, t: F.layer_norm(x, (64,)) * torch.sigmoid(t),
    "layer_norm(1e-05) | times": lambda x, t: F.layer_norm(x, (64,)) * t,
    "tanh | log_softmax": lambda x, t: F.log_softmax(torch.tanh(x), -1),
    "tanh | l2_norm(1e-12)": lambda x, t: F.normalize(torch.tanh(x), dim=-1),
    "tanh | l2_norm(0.001)": lambda x, t: F.normalize(torch.tanh(x), dim=1, eps=1e-3),
}


@pytest.mark.parametrize("line", CALLS)
def test_calls(line):
    """The one line, its result, and the gradients."""
    function = CALLS[line]
    x, t = torch.randn(8, 64, requires_grad=True), (torch.rand(8, 64) + 0.5).requires_grad_()
    model = torch.nn.Module()
    model.forward = function
    fused = onepass.fuse(model)
    ours, theirs = fused(x, t), function(x, t)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), (x, t), allow_unused=True) for y in (ours, theirs))):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    assert [found.line for found in onepass.report(fused).lines] == [line]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: F.normalize(torch.tanh(x), p=1.0, dim=-1),
        lambda x, t: F.normalize(torch.tanh(x), dim=0),
        lambda x, t: F.log_softmax(torch.tanh(x), 0),
    ],
)
def test_other_norms_and_dimensions_are_no_words(function):
    model = torch.nn.Module()
    model.forward = function
    fused = onepass.fuse(model)
    x = torch.randn(8, 64)
    torch.testing.assert_close(fused(x, x), function(x, x))
    assert not any("norm" in found.line or "softmax" in found.line for found in onepass.report(fused).lines)


def test_an_activation_that_others_need_is_no_gate():
    def function(x, t):
        gate = F.silu(t)
        return F.layer_norm(x, (64,)) * gate, gate.sum()

    model = torch.nn.Module()
    model.forward = function
    fused = onepass.fuse(model)
    x, t = torch.randn(8, 64), torch.randn(8, 64)
    for a, b in zip(fused(x, t), function(x, t)):
        torch.testing.assert_close(a, b)
    assert not any("gated" in found.line for found in onepass.report(fused).lines)

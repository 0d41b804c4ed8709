"""Linear layers in captured graphs: on the CPU, in inference, they and what stands behind them are lines."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import onepass
from onepass.pricing.profile import profile_of
from onepass.rewrite import fuse as fusing

X, W, B = torch.randn(4, 64, 96), torch.randn(128, 96), torch.randn(128)
R = torch.randn(4, 64, 128)


@pytest.fixture(autouse=True)
def fast_products(monkeypatch):
    """A processor on which products of our own are worth it, whatever the machine that wrote the profile."""
    profile = profile_of("cpu")
    fast = {name: 2 * rate for name, rate in profile.products.items()}
    monkeypatch.setattr(fusing, "profile_of", lambda device: replace(profile, own_products=fast))


def lines(function, *inputs, training=False):
    """The lines with which fuse gives the same result."""
    torch._dynamo.reset()
    fused = onepass.fuse(function)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(fused(*inputs), function(*inputs), rtol=1e-4, atol=1e-4)
    return [found.line for found in onepass.report(fused).lines]


def conv1d(x, w, b, activation=F.gelu):
    """As GPT-2 has its layers: the matrix transposed, x viewed as one."""
    y = torch.addmm(b, x.view(-1, x.shape[-1]), w)
    return activation(y.view(*x.shape[:-1], w.shape[-1]))


@pytest.mark.parametrize(
    "function, inputs, expected",
    [
        (lambda x, w, b: F.linear(x, w, b), (X, W, B), ["linear | bias"]),
        (lambda x, w: F.linear(x, w), (X, W), ["linear"]),
        (lambda x, w, b: F.gelu(F.linear(x, w, b)), (X, W, B), ["linear | bias | gelu"]),
        (lambda x, w, b, r: F.linear(x, w, b).tanh() + r, (X, W, B, R), ["linear | bias | tanh | add"]),
        (lambda x, w, b, r: F.layer_norm(F.linear(x, w, b) + r, (128,)), (X, W, B, R), ["linear | bias"]),
        (conv1d, (X, W.t().contiguous(), B), ["linear | bias | gelu"]),
        (lambda x, w, b: F.relu(torch.addmm(b, x[0], w)), (X.repeat(1, 4, 1), W.t(), B), ["linear | bias | relu"]),
        (lambda x, w, b: torch.addmm(b, x[0], w, beta=2), (X, W.t(), B), []),
        (lambda x, w, b: F.linear(x, w, b), (X[:, :8], W, B), []),
        (lambda x, w, b: F.linear(x, w, b), (X, W, B[:1]), []),
        (lambda x, w, b: torch.addmm(b, x[0], w), (X.repeat(1, 4, 1), W.t(), B[:1]), []),
        (lambda x, w, b: F.linear(x, w, b), (X.bfloat16(), W.bfloat16(), B.bfloat16()), []),
    ],
)  # fmt: skip
def test_inference(function, inputs, expected):
    found = lines(function, *inputs)
    assert [line for line in found if "linear" in line] == expected


def test_a_result_that_others_need_is_written():
    def function(x, w, b):
        y = F.linear(x, w, b)
        return F.gelu(y), y.sum()

    torch._dynamo.reset()
    fused = onepass.fuse(function)
    with torch.no_grad():
        for ours, theirs in zip(fused(X, W, B), function(X, W, B), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)
    assert "linear | bias" in [found.line for found in onepass.report(fused).lines]


def test_autocast_has_other_products():
    """In bfloat16, which panels do not multiply."""
    torch._dynamo.reset()
    fused = onepass.fuse(lambda x, w, b: F.linear(x, w, b))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fused(X, W, B).dtype == torch.bfloat16
    assert onepass.report(fused).lines == []


def test_training_takes_the_librarys_products():
    w = W.clone().requires_grad_()
    found = lines(lambda x, b: F.gelu(F.linear(x, w, b)), X, B, training=True)
    assert not any("linear" in line for line in found)


def test_a_slower_product_is_not_taken(monkeypatch):
    profile = profile_of("cpu")
    slow = {name: 0.5 * rate for name, rate in profile.products.items()}
    monkeypatch.setattr(fusing, "profile_of", lambda device: replace(profile, own_products=slow))
    assert lines(lambda x, w, b: F.linear(x, w, b), X, W, B) == []


def test_one_sum_is_left_alone():
    assert lines(lambda x, r: x + r, R, R) == []

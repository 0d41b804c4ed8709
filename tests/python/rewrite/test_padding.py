"""Linear layers of a number of features that no fast kernel takes: padded, with the same results."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from captures import captured
from onepass.graph.operations import leave_apart
from onepass.rewrite import padding
from onepass.rewrite.padding import pad_features, padded_linear


def tensors(features, dtype=torch.float64, device="cpu", shape=(3, 5), inner=8):
    torch.manual_seed(0)
    sizes = ((*shape, inner), (features, inner), (features,))
    return [torch.randn(size, dtype=dtype, device=device).requires_grad_() for size in sizes]


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_is_linear(shape, has_bias):
    x, weight, bias = tensors(13, shape=shape)
    inputs = (x, weight, bias) if has_bias else (x, weight)
    result, expected = padded_linear(*inputs), F.linear(*inputs)
    torch.testing.assert_close(result, expected)
    assert result.stride() == expected.stride()
    upstream = torch.randn_like(result)
    ours, theirs = (torch.autograd.grad(t, inputs, upstream) for t in (result, expected))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("has_bias", [False, True])
def test_derivatives(has_bias):
    inputs = tensors(5, shape=(2, 3), inner=4)[: 3 if has_bias else 2]
    torch.autograd.gradcheck(padded_linear, inputs, check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradgradcheck(padded_linear, inputs)


def test_what_needs_no_gradient():
    x, weight, bias = tensors(5)
    padded_linear(x.detach(), weight, bias.detach()).sum().backward()
    assert weight.grad is not None and not weight.grad._is_view()
    assert not padded_linear(x.detach(), weight.detach()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype, device):
    inputs = tensors(13, torch.float32, device)
    with torch.autocast(torch.device(device).type, dtype):
        result, expected = padded_linear(*inputs), F.linear(*inputs)
    assert result.dtype == expected.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    ours, theirs = (torch.autograd.grad(t.float().square().sum(), inputs) for t in (result, expected))
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.dtype == its.dtype == torch.float32
        torch.testing.assert_close(mine, its, rtol=5e-2, atol=5e-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("features", "rows", "dtype", "is_padded"),
    [
        (50257, 1024, torch.bfloat16, True),
        (30522, 1024, torch.float16, True),
        (50257, 512, torch.bfloat16, True),
        (30522, 512, torch.bfloat16, False),
        (50264, 1024, torch.bfloat16, False),
        (50257, 1, torch.bfloat16, False),
        (50257, 1024, torch.float32, False),
    ],
)
def test_which_are_padded(features, rows, dtype, is_padded):
    x, weight, bias = tensors(features, dtype, "cuda", (rows,), 1024)

    def model(x, weight, bias):
        return F.linear(x, weight, bias), x * 2

    graph = captured(model, x, weight, bias)
    leave_apart(graph)
    pad_features(graph)
    assert any(node.target is padded_linear for node in graph.nodes) is is_padded
    torch._dynamo.reset()
    outcomes = []
    for way in (model, onepass.fuse(model)):
        result, _ = way(x, weight, bias)
        assert result.is_contiguous()
        outcomes.append((result, *torch.autograd.grad(result, (x, weight, bias), torch.ones_like(result) / 64)))
    exact = F.linear(x.detach().float(), weight.detach().float(), bias.detach().float())
    theirs, ours = ((found[0].float() - exact).norm() for found in outcomes)
    assert ours <= 1.2 * theirs + 1e-6 * exact.norm()
    for its, mine in zip(*outcomes):
        torch.testing.assert_close(mine, its, rtol=5e-2, atol=1e-1)


def test_a_frozen_matrix_saves_no_input():
    x, weight, _ = tensors(13)
    hidden = x * 1
    result = padded_linear(hidden, weight.detach())
    hidden.relu_()
    result.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand_as(x))


def test_inputs_that_are_overwritten(monkeypatch):
    """Of an input that does not lie row by row PyTorch saves a copy."""
    monkeypatch.setattr(padding, "_gains", lambda node, x, weight: True)
    torch._dynamo.reset()
    x, weight, _ = tensors(13, shape=(3, 5, 2))
    given = x.detach().contiguous(memory_format=torch.channels_last)

    def function(x, weight):
        result = F.linear(x, weight)
        x.mul_(2.0)
        return result

    ours, theirs = (
        torch.autograd.grad(way(given.clone(), weight).sum(), weight)[0] for way in (onepass.fuse(function), function)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(), (1,), (1, 13), (5, 13)], ids=str)
def test_biases_that_are_no_column_stay(monkeypatch, shape):
    monkeypatch.setattr(padding, "_gains", lambda node, x, weight: True)
    x, weight, _ = tensors(13, shape=(5,))
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    graph = captured(lambda *t: F.linear(*t).tanh(), x, weight, bias)
    leave_apart(graph)
    pad_features(graph)
    assert padded_linear not in [node.target for node in graph.nodes]


def test_a_layer_in_a_graph(monkeypatch):
    """As on a GPU: here by a rule that takes all."""
    monkeypatch.setattr(padding, "_gains", lambda node, x, weight: True)
    torch._dynamo.reset()
    x, weight, bias = tensors(13, torch.float32)
    graph = captured(lambda *t: F.linear(*t).tanh(), x, weight, bias)
    leave_apart(graph)
    pad_features(graph)
    graph.lint()
    assert [node.target for node in graph.nodes].count(padded_linear) == 1

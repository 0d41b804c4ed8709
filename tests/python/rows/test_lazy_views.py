"""Tensors whose storage is not what they are: views that are negated when they are read, zeros without a storage."""

import pytest
import torch

import onepass
import onepass.functional as F
from helpers import ATTENTION_LINES, LINEAR_LINES, NAMED_LINES, SCORES_LINES, as_tuple, make_inputs, upstream

LINES = [line for line in NAMED_LINES + LINEAR_LINES + SCORES_LINES + ATTENTION_LINES if "dropout" not in line]


def negated(tensor):
    """The same numbers, of a dense storage that has their negatives."""
    view = torch._neg_view(-tensor.detach()).requires_grad_(tensor.requires_grad)
    assert view.is_neg() and view.is_contiguous()
    return view


def results_and_gradients(call, tensors):
    results = as_tuple(call(*tensors))
    return results, torch.autograd.grad(results, [t for t in tensors if t.requires_grad], upstream(results))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("line", LINES)
def test_any_tensor_of_a_line(line, device):
    tensors = make_inputs(line, (2, 3, 16), torch.float32, device).tensors
    expected = results_and_gradients(onepass.Line(line), tensors)
    for i, t in enumerate(tensors):
        if t.is_floating_point():
            found = results_and_gradients(onepass.Line(line), [*tensors[:i], negated(t), *tensors[i + 1 :]])
            torch.testing.assert_close(found, expected, msg=lambda text, i=i: f"tensor {i}: {text}")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("line", ["bias | gelu", "layer_norm(1e-5) | scale | bias", "linear | bias", "gate(silu)"])
def test_any_tensor_of_a_list(line, device):
    several = [make_inputs(line, (3, 16), torch.float32, device, seed=i).tensors for i in range(2)]
    lists = [list(kind) for kind in zip(*several)]

    def call(*tensors):
        kinds = [list(tensors[i : i + 2]) for i in range(0, len(tensors), 2)]
        return tuple(onepass.fused(line, *kinds))

    flat = [t for kind in lists for t in kind]
    expected = results_and_gradients(call, flat)
    for i, t in enumerate(flat):
        found = results_and_gradients(call, [*flat[:i], negated(t), *flat[i + 1 :]])
        torch.testing.assert_close(found, expected, msg=lambda text, i=i: f"tensor {i}: {text}")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_some_pieces_of_a_storage(device, requires_grad):
    z = torch.randn(3, 2, 4, dtype=torch.complex64, device=device)
    scale = torch.randn(4, device=device, requires_grad=requires_grad)
    for pieces in ([z.imag[0], z.conj().imag[1], z.imag[2]], [z.conj().imag[i] for i in range(3)]):
        assert any(p.is_neg() for p in pieces)
        for ours, piece in zip(onepass.fused("scale", pieces, scale), pieces):
            torch.testing.assert_close(ours, piece * scale)


def test_some_pieces_of_a_tensor_that_requires_grad(device):
    whole = torch.randn(3, 2, 4, device=device, requires_grad=True)
    first, second, third = whole.unbind()
    pieces = [first, torch._neg_view(second), third]
    results = onepass.fused("gelu", pieces)
    (ours,) = torch.autograd.grad(sum(r.sum() for r in results), whole)
    (expected,) = torch.autograd.grad(sum(torch.nn.functional.gelu(p).sum() for p in pieces), whole)
    torch.testing.assert_close(ours, expected)


def test_a_gradient(device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    y = onepass.fused("gelu", x)
    given = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, given, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y, x, negated(given), retain_graph=True)[0], expected)
    nothing = torch._efficientzerotensor(4, 16, device=device)
    assert not torch.autograd.grad(y, x, nothing)[0].any()


def test_zeros_without_a_storage(device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    nothing = torch._efficientzerotensor(4, 16, device=device)
    y = onepass.fused("gate(silu)", x, nothing)
    assert not y.any() and not torch.autograd.grad(y.sum(), x)[0].any()
    assert not onepass.fused("scale", [x.detach(), nothing], torch.ones(16, device=device))[1].any()


def test_attention_by_torch(device):
    q, k, v = (torch.randn(1, 2, 4, 8, device=device) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(F.scaled_dot_product_attention(negated(q), negated(k), negated(v)), expected)

"""CrossEntropyLoss and LinearCrossEntropyLoss, drop-in for torch's."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F

from onepass import nn

HOW = [
    {},
    {"ignore_index": 3},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none"},
    {"weight": torch.linspace(0.5, 2, 7)},
    {"size_average": False},
]


@pytest.mark.parametrize("how", HOW)
def test_cross_entropy_in_the_place_of_torchs(how, device):
    ours, theirs = nn.CrossEntropyLoss(**how).to(device), torch.nn.CrossEntropyLoss(**how).to(device)
    assert isinstance(ours, torch.nn.CrossEntropyLoss) and repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for shape in ((5, 7), (7,), (2, 7, 3)):
        logits = torch.randn(shape, device=device, requires_grad=True)
        target = torch.randint(0, 7, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
        loss, expected = ours(logits, target), theirs(logits, target)
        torch.testing.assert_close(loss, expected)
        g = torch.randn_like(expected)
        torch.testing.assert_close(torch.autograd.grad(loss, logits, g), torch.autograd.grad(expected, logits, g))
    if "ignore_index" not in how:  # which torch refuses beside probabilities
        probabilities, logits = torch.rand(5, 7, device=device).softmax(-1), torch.randn(5, 7, device=device)
        torch.testing.assert_close(ours(logits, probabilities), theirs(logits, probabilities))


def test_cross_entropy_with_more_than_torchs(device):
    ours = nn.CrossEntropyLoss(z_loss=0.01, softcap=2.0).to(device)
    logits, target = torch.randn(5, 7, device=device), torch.randint(0, 7, (5,), device=device)
    capped = 2.0 * torch.tanh(logits / 2.0)
    expected = F.cross_entropy(capped, target) + 0.01 * capped.logsumexp(-1).square().mean()
    torch.testing.assert_close(ours(logits, target), expected)
    assert repr(ours) == "CrossEntropyLoss(z_loss=0.01, softcap=2.0)"
    probabilities = torch.rand_like(logits).softmax(-1)
    expected = F.cross_entropy(capped, probabilities) + 0.01 * capped.logsumexp(-1).square().mean()
    torch.testing.assert_close(ours(logits, probabilities), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", HOW[:5])
def test_linear_cross_entropy(how, bias, device):
    loss = nn.LinearCrossEntropyLoss(4, 7, bias=bias, **how).to(device)
    names = ["linear.weight", *["linear.bias"] * bias]
    assert set(loss.state_dict()) == {*names, *(["weight"] if "weight" in how else [])}
    x, target = torch.randn(2, 3, 4, device=device, requires_grad=True), torch.randint(0, 7, (2, 3), device=device)
    logits = F.linear(x, loss.linear.weight, loss.linear.bias)
    with_weight = {**how, **({"weight": loss.weight} if "weight" in how else {})}
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), **with_weight).reshape(
        target.shape if how.get("reduction") == "none" else ()
    )
    found = loss(x, target)
    torch.testing.assert_close(found, expected)
    leaves, g = [x, *loss.parameters()], torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, g), torch.autograd.grad(expected, leaves, g))
    again = copy.deepcopy(loss)
    torch.testing.assert_close(again(x, target), found)


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyLoss"), reason="torch has none before 2.13")
def test_linear_cross_entropy_beside_torchs():
    ours, theirs = nn.LinearCrossEntropyLoss(4, 7, bias=True), torch.nn.LinearCrossEntropyLoss(4, 7, bias=True)
    theirs.load_state_dict(ours.state_dict())
    x, target = torch.randn(5, 4), torch.randint(0, 7, (5,))
    torch.testing.assert_close(ours(x, target), theirs(x, target))
    mine, torchs = (inspect.signature(m.__init__).parameters for m in (type(ours), type(theirs)))
    assert set(torchs) - set(mine) == {"out_features", "options"}

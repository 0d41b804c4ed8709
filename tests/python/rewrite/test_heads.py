"""A head and its loss become linear_cross_entropy where nobody else sees the logits, and stay elsewhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from captures import Count
from onepass.rewrite import heads
from sound import runs

HEAD = "linear_cross_entropy"


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(heads, "LEAST_LOGITS", 0)
    torch._dynamo.reset()


def given(dtype=torch.float64):
    hidden = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    weight, bias = torch.randn(30, 8, dtype=dtype, requires_grad=True), torch.randn(30, dtype=dtype, requires_grad=True)
    target = torch.randint(0, 30, (2, 5))
    target[0, 1] = -100
    return hidden, weight, bias, target


def without_gradients(function, *tensors):
    fused = onepass.fuse(function)
    with torch.no_grad():
        torch.testing.assert_close(fused(*tensors), function(*tensors), check_stride=True)
    return [found.line for found in onepass.report(fused).lines]


def lines(function, *tensors, tolerance=1e-9):
    """What has become of a function that gives what it gave."""
    fused = onepass.fuse(function)
    for theirs, ours in zip(runs(function, tensors), runs(fused, tensors), strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_stride=True)
    return [found.line for found in onepass.report(fused).lines]


def flat(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).view(-1, 30), t.view(-1))


def of_two_dimensions(h, w, b, t):
    return F.cross_entropy(F.linear(h.flatten(0, 1), w), t.flatten(), label_smoothing=0.1)


def shifted(h, w, b, t):
    logits = F.linear(h, w, b)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, 30), t[..., 1:].contiguous().view(-1), reduction="sum")


def by_modules(h, w, b, t):
    return nn.CrossEntropyLoss(ignore_index=3)(F.linear(h, w, b).reshape(-1, 30), t.reshape(-1).clamp(min=0))


def weighted(h, w, b, t):
    return F.cross_entropy(F.linear(h, w).flatten(0, 1), t.flatten(), weight=b.detach().abs())


def tied(h, w, b, t):
    hidden = torch.tanh(F.embedding(t.clamp(min=0), w) + h)
    return F.cross_entropy(F.linear(hidden, w).view(-1, 30), t.view(-1))


def capped(h, w, b, t):
    logits = torch.tanh(F.linear(h, w, b) / 3.0) * 3.0
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


HEADS = [capped, flat, of_two_dimensions, shifted, by_modules, weighted, tied]


@pytest.mark.parametrize("function", HEADS)
def test_heads(function):
    assert HEAD in lines(function, *given())
    assert HEAD in without_gradients(function, *given())


def each(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).view(-1, 30), t.view(-1), reduction="none")


def test_losses_that_are_not_added_up():
    """A step would multiply once more."""
    assert HEAD not in lines(each, *given())
    assert HEAD in without_gradients(each, *given())


def given_too(h, w, b, t):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits.view(-1, 30), t.view(-1)), logits


def used_too(h, w, b, t):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits.view(-1, 30), t.view(-1)) + logits.exp().mean()


def narrowed(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).float().view(-1, 30), t.view(-1))


def moved_within_rows(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).mT.reshape(-1, 30), t.view(-1))


def part_of_rows(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b)[..., :29].reshape(-1, 29), t.view(-1).clamp(max=28))


def regrouped(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).view(-1, 15), t.view(-1).repeat(2).clamp(max=14))


def of_probabilities(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).view(-1, 30), torch.softmax(h.sum(-1).view(-1, 1).expand(-1, 30), -1))


def classes_second(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).mT, t)


def overwritten_between(h, w, b, t):
    t = t.clone()
    logits = F.linear(h, w, b)
    t.fill_(7)
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


def in_a_checkpoint(h, w, b, t):
    return checkpoint(lambda h: F.cross_entropy(F.linear(h, w, b).view(-1, 30), t.view(-1)), h, use_reentrant=False)


def smoothed_by_weights(h, w, b, t):
    return F.cross_entropy(F.linear(h, w).flatten(0, 1), t.flatten(), b.detach().abs(), label_smoothing=0.1)


def capped_otherwise(h, w, b, t):
    logits = torch.tanh(F.linear(h, w, b) / 3.0) * 2.0
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


def capped_twice(h, w, b, t):
    logits = F.linear(h, w, b)
    for c in (3.0, 2.0):
        logits = torch.tanh(logits / c) * c
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


ELSEWHERE = [
    capped_otherwise,
    capped_twice,
    smoothed_by_weights,
    given_too,
    used_too,
    narrowed,
    moved_within_rows,
    part_of_rows,
    regrouped,
    of_probabilities,
    classes_second,
    overwritten_between,
    in_a_checkpoint,
]


@pytest.mark.parametrize("function", ELSEWHERE)
def test_what_stays(function):
    assert HEAD not in lines(function, *given(), tolerance=1e-6)


@pytest.mark.parametrize("function", [flat, shifted, tied])
def test_in_float32_of_16_bits(function):
    def wide(h, w, b, t):
        logits = F.linear(h, w, b).float()
        return F.cross_entropy(logits.view(-1, 30), t.view(-1))

    assert HEAD in lines(wide, *given(torch.bfloat16), tolerance=2e-2)
    assert HEAD in lines(function, *given(torch.bfloat16), tolerance=5e-2)  # whose loss is bfloat16


def test_under_autocast():
    hidden, weight, bias, target = given(torch.float32)
    fused = onepass.fuse(flat)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (way(hidden, weight, bias, target) for way in (fused, flat))
    assert ours.dtype == theirs.dtype and HEAD in [found.line for found in onepass.report(fused).lines]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    found, expected = (torch.autograd.grad(loss, (hidden, weight, bias)) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-3)


def test_lengths_that_change():
    """Two captures, as of Dynamo alone."""
    hidden, weight, bias, target = given()
    fused, count = onepass.fuse(flat), Count()
    alone = torch.compile(lambda *tensors: flat(*tensors), backend=count)
    for length in (5, 4, 3, 2):
        some = hidden[:, :length].contiguous(), weight, bias, target[:, :length].contiguous()
        torch.testing.assert_close(fused(*some), alone(*some))
    assert len(onepass.report(fused).nodes) == count.graphs == 2


def test_small_ones_stay(monkeypatch):
    monkeypatch.setattr(heads, "LEAST_LOGITS", 1 << 22)
    assert HEAD not in lines(flat, *given())


def test_a_causal_language_model():
    """Of transformers: the loss alone, and with the logits that a caller reads."""
    transformers = pytest.importorskip("transformers", reason="needs onepass[demo]")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **sizes))
    other, tokens = copy.deepcopy(model), torch.randint(0, 100, (2, 9))
    fused = onepass.fuse(lambda tokens: model(input_ids=tokens, labels=tokens).loss)
    loss, expected = fused(tokens), other(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert HEAD in [found.line for found in onepass.report(fused).lines]
    whole = onepass.fuse(copy.deepcopy(other))
    torch.testing.assert_close(
        whole(input_ids=tokens, labels=tokens).logits, other(input_ids=tokens).logits, rtol=1e-4, atol=1e-5
    )
    assert HEAD not in [found.line for found in onepass.report(whole).lines]

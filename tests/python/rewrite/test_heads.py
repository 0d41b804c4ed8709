"""A head and its loss become linear_cross_entropy where nobody else sees the logits; of others a loss is one line."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onepass
from captures import Count, captured
from onepass.graph.operations import is_tensor, value_of
from onepass.pricing.profile import profile_of
from onepass.rewrite import heads
from onepass.rewrite.fuse import rewrite
from sound import runs

HEAD, LOSS = "linear_cross_entropy", "cross_entropy"


pytestmark = pytest.mark.usefixtures("small_heads")


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


def biased_behind(h, w, b, t):
    """As Bart's."""
    logits = F.linear(h, w) + b[None]
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


def scaled(h, w, b, t):
    """As Granite's and Cohere's."""
    logits = F.linear(h, w) / 8.0
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


def scaled_and_capped(h, w, b, t):
    logits = torch.tanh(F.linear(h, w) * 0.25 / 3.0) * 3.0
    return F.cross_entropy(logits[:, 1:].reshape(-1, 30), t[:, 1:].reshape(-1))


def by_items(h, w, b, t):
    """As transformers' where a batch is one of several that are added up."""
    targets = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(F.linear(h, w, b).view(-1, 30), targets.view(-1), reduction="sum") / (t >= 0).sum()


def in_a_checkpoint(h, w, b, t):
    return checkpoint(lambda h: F.cross_entropy(F.linear(h, w, b).view(-1, 30), t.view(-1)), h, use_reentrant=False)


def chunks_in_checkpoints(h, w, b, t):
    def loss(h, t):
        return F.cross_entropy(F.linear(h, w, b), t, reduction="sum")

    parts = zip(h.flatten(0, 1).chunk(2), t.flatten().chunk(2))
    return sum(checkpoint(loss, *part, use_reentrant=False) for part in parts) / 9


HEADS = [
    *(capped, flat, of_two_dimensions, shifted, by_modules, weighted, tied),
    *(biased_behind, scaled, scaled_and_capped, by_items, in_a_checkpoint, chunks_in_checkpoints),
]


@pytest.mark.parametrize("function", HEADS)
def test_heads(function):
    assert HEAD in lines(function, *given())
    assert HEAD in without_gradients(function, *given())


def tensors_of_logits(function, *tensors):
    """How many of the graph's tensors have as many numbers as the logits, before and behind."""
    graph = captured(function, *tensors)
    bodies = [graph, *(module.graph for _, module in graph.owning_module.named_children())]
    counts = [_of_logits(bodies)]
    rewrite(graph.owning_module)
    return [*counts, _of_logits(bodies)]


def _of_logits(graphs):
    nodes = [node for graph in graphs for node in graph.nodes if node.op.startswith("call") and is_tensor(node)]
    return sum(value_of(node).numel() >= 4 * 30 for node in nodes)


@pytest.mark.parametrize("function", HEADS)
def test_heads_without_logits(function):
    before, after = tensors_of_logits(function, *given())
    assert before and not after


def each(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b).view(-1, 30), t.view(-1), reduction="none")


def test_losses_that_are_not_added_up():
    """A step would multiply once more."""
    assert LOSS in lines(each, *given())
    assert HEAD in without_gradients(each, *given())
    assert not onepass.fuse(each)(*given())._is_view()


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


def scaled_otherwise(h, w, b, t):
    """Which would be rounded otherwise."""
    return F.cross_entropy((F.linear(h, w) / 6.0).view(-1, 30), t.view(-1))


def biased_before_scaled(h, w, b, t):
    return F.cross_entropy((F.linear(h, w, b) / 8.0).view(-1, 30), t.view(-1))


def biased_by_rows(h, w, b, t):
    return F.cross_entropy((F.linear(h, w) + h[..., :1]).view(-1, 30), t.view(-1))


def biased_by_integers(h, w, b, t):
    return F.cross_entropy((F.linear(h, w) + torch.arange(30)).view(-1, 30), t.view(-1))


def every_other(h, w, b, t):
    """Of all rows one behind the other, not of each batch: there are as many."""
    return F.cross_entropy(F.linear(h, w, b).view(-1, 30)[::2], t.view(-1)[::2])


def every_other_too(h, w, b, t):
    logits = F.linear(h, w, b)
    return F.cross_entropy(logits.view(-1, 30)[1::2], t.view(-1)[1::2]), logits


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
    scaled_otherwise,
    biased_before_scaled,
    biased_by_rows,
    biased_by_integers,
    every_other,
    every_other_too,
]


@pytest.mark.parametrize("function", ELSEWHERE)
def test_what_stays(function):
    assert HEAD not in lines(function, *given(), tolerance=1e-6)


def shifted_too(h, w, b, t):
    logits = F.linear(h, w, b)
    rows = logits[..., :-1, :].contiguous().view(-1, 30)
    return F.cross_entropy(rows, t[..., 1:].contiguous().view(-1), label_smoothing=0.1), logits


def shifted_each(h, w, b, t):
    logits = F.linear(h, w, b)
    rows = logits[..., :-1, :].reshape(-1, 30)
    return F.cross_entropy(rows, t[..., 1:].reshape(-1), reduction="none").view(2, 4), logits


def capped_too(h, w, b, t):
    """As Gemma's, which gives its capped logits."""
    logits = torch.tanh(F.linear(h, w) / 3.0) * 3.0
    return F.cross_entropy(logits.view(-1, 30), t.view(-1)), logits


def capped_behind(h, w, b, t):
    logits = F.linear(h, w)
    return F.cross_entropy((torch.tanh(logits / 3.0) * 3.0).view(-1, 30), t.view(-1)), logits


def twice(h, w, b, t):
    logits = F.linear(h, w)
    return F.cross_entropy(logits.view(-1, 30), t.view(-1)) + F.cross_entropy(logits[0], t[0], b.detach().abs())


def of_an_input(h, w, b, t):
    return F.cross_entropy(w, t.view(-1).repeat(3).clamp(max=7))


def logits_in_a_checkpoint(h, w, b, t):
    def block(h):
        logits = F.linear(h, w, b)
        return F.cross_entropy(logits.view(-1, 30), t.view(-1)), logits.sum(-1)

    return checkpoint(block, h, use_reentrant=False)


LOSSES = [
    *(given_too, used_too, shifted_too, shifted_each, capped_too, capped_behind, twice, of_an_input),
    *(scaled_otherwise, biased_by_rows, moved_within_rows, logits_in_a_checkpoint),
]


@pytest.mark.parametrize("function", LOSSES)
def test_losses_of_logits_that_are_there(function):
    found = lines(function, *given())
    assert LOSS in found and HEAD not in found
    assert LOSS in without_gradients(function, *given())


@pytest.mark.parametrize("function", [given_too, shifted_too])
def test_logits_that_are_given_are_not_copied(function):
    """Nor cast: beside the logits there are views of them alone."""

    def wide(h, w, b, t):
        logits = function(h, w, b, t)[1]
        return F.cross_entropy(logits[..., :-1, :].float().reshape(-1, 30), t[..., 1:].reshape(-1)), logits

    for each in (function, wide):
        graph = captured(each, *given(torch.bfloat16))
        rewrite(graph.owning_module)
        memory = {
            value_of(n).untyped_storage()._cdata for n in graph.nodes if is_tensor(n) and value_of(n).numel() >= 240
        }
        weight = next(n for n in graph.nodes if is_tensor(n) and value_of(n).shape == (30, 8))
        assert len(memory - {value_of(weight).untyped_storage()._cdata}) == 1


def overwritten_behind(h, w, b, t):
    logits = F.linear(h, w, b)
    loss = F.cross_entropy(logits.view(-1, 30), t.view(-1))
    return loss, logits.detach().mul_(2.0)


def hooked(h, w, b, t):
    logits = F.linear(h, w, b)
    logits.register_hook(lambda gradient: gradient * 2)
    return F.cross_entropy(logits.view(-1, 30), t.view(-1))


@pytest.mark.parametrize("function", [smoothed_by_weights, of_probabilities, classes_second, overwritten_behind])
def test_losses_that_stay(function):
    assert not {HEAD, LOSS} & {*lines(function, *given(), tolerance=1e-6)}


def test_hooks_of_logits_run():
    assert HEAD not in lines(hooked, *given())


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


@pytest.mark.parametrize("function, line", [(flat, HEAD), (given_too, LOSS), (shifted_too, LOSS)])
def test_lengths_that_change(function, line):
    """Two captures, as of Dynamo alone."""
    hidden, weight, bias, target = given()
    fused, count = onepass.fuse(function), Count()
    alone = torch.compile(lambda *tensors: function(*tensors), backend=count)
    for length in (5, 4, 3):
        some = hidden[:, :length].contiguous(), weight, bias, target[:, :length].contiguous()
        torch.testing.assert_close(fused(*some), alone(*some))
    assert len(onepass.report(fused).nodes) == count.graphs == 2
    assert [found.line for found in onepass.report(fused).lines].count(line) == 2


def test_small_ones_stay(monkeypatch):
    """Those of classifiers, say."""
    monkeypatch.setattr(heads, "LEAST_LOGITS", 1 << 22)
    assert not {HEAD, LOSS} & {*lines(flat, *given()), *lines(given_too, *given())}


def test_losses_of_logits_before_inductor():
    """It has kernels of its own for them."""
    assert not rewrite(captured(given_too, *given()).owning_module, then="inductor")


def test_heads_before_inductor():
    """Three products in training, as without it; but in a checkpoint it would make gradients twice."""
    tensors = given()
    fused = onepass.fuse(flat, then="inductor")
    loss, expected = fused(*tensors), flat(*tensors)
    torch.testing.assert_close(loss, expected)
    leaves = [t for t in tensors if t.requires_grad]
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))
    assert [found.line for found in onepass.report(fused).lines] == [HEAD]
    assert not rewrite(captured(in_a_checkpoint, *tensors).owning_module, then="inductor")


def test_explain_says_what_logits_cost():
    """Their bytes, and the time; and the same prices as fuse."""
    with torch.no_grad():
        tensors = given(torch.float32)
    (head,), (loss,) = [onepass.explain(f, *tensors, device="h200").lines for f in (flat, given_too)]
    assert head.line == "linear | bias | cross_entropy" and loss.line == "cross_entropy"
    assert "0.0012 MB, are never made" in head.why and head.shape == loss.shape == (10, 30)
    assert loss.why.startswith("others read the logits: 0.0012 MB, and as much for their gradient; if nobody did")
    assert loss.why.endswith(" ms more")
    assert head.saved_bytes[0] == loss.saved_bytes[0] == loss.saved_bytes[1] == 4 * 300
    graph = captured(flat, *tensors)
    (found,) = rewrite(graph.owning_module, profile=profile_of("h200"))
    assert found.seconds == tuple(sum(p.seconds for p in side) for side in (head.now, head.fused))


def test_explain_counts_a_checkpointed_head_twice():
    (plain,), (again,) = [onepass.explain(f, *given(), device="h200").lines for f in (flat, in_a_checkpoint)]
    assert again.now[1].flops == plain.now[0].flops + plain.now[1].flops
    product = 2 * 10 * 8 * 30
    assert again.fused[1].flops == plain.fused[0].flops + plain.fused[1].flops + product  # of a chunk's logits, again

"""What accelerate does to a model in mixed precision: autocast within the graph, and casts of all that is returned."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from captures import captured
from onepass.graph.effects import bodies, effects_of


def head(hidden, weight, target):
    """As transformers has it."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float(), target), logits


def given():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    return hidden, weight, torch.randint(0, 30, (6,))


def cast(*tensors):
    loss, logits = head(*tensors)
    logits.float()
    return loss


def autocast(*tensors):
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = head(*tensors)
    logits.float()
    return loss


@pytest.mark.parametrize("function", [cast, autocast])
def test_heads_whose_logits_nobody_reads(function, small_heads):
    tensors, fused = given(), onepass.fuse(function)
    ours, theirs = fused(*tensors), function(*tensors)
    assert "cross_entropy" in str(onepass.report(fused).lines)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    found, expected = (torch.autograd.grad(loss, tensors[:2]) for loss in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-3)


def attention(x, weight, table):
    """Queries are of float32, as behind rope, and values of bfloat16: autocast makes them alike."""
    q, v = F.linear(x, weight) * table, F.linear(x, weight)
    y = F.scaled_dot_product_attention(q, q, v, is_causal=True)
    return F.gelu(F.linear(y, weight) + x) * 2.0


def within(*tensors):
    with torch.autocast("cpu", torch.bfloat16):
        return attention(*tensors)


def around_a_block(*tensors):
    with torch.autocast("cpu", torch.bfloat16):
        return checkpoint(attention, *tensors, use_reentrant=False)


def queries():
    return torch.randn(1, 2, 64, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True), torch.randn(64, 32)


@pytest.mark.parametrize("function", [within, around_a_block])
def test_attention_within_autocast_is_known(function):
    graph = captured(function, *queries())
    inner = [node for call in graph.nodes for body in bodies(call) for node in body.graph.nodes]
    (node,) = [node for node in (*graph.nodes, *inner) if node.target is F.scaled_dot_product_attention]
    assert effects_of(node).known


@pytest.mark.parametrize("function", [within, around_a_block])
def test_autocast_within_finds_what_autocast_around_does(function):
    tensors = queries()
    torch._dynamo.reset()
    ours, theirs = onepass.fuse(function), onepass.fuse(attention)
    found = ours(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(*tensors)
    lines = [line.line for line in onepass.report(ours).lines]
    assert lines == [line.line for line in onepass.report(theirs).lines]
    assert "scaled_dot_product_attention" in lines
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_is_not_read_but_writes_stays():
    def function(x):
        y = x * 2.0
        y.mul_(3.0)
        y.add(1.0)
        return y

    torch._dynamo.reset()
    torch.testing.assert_close(onepass.fuse(function)(torch.ones(4)), torch.full((4,), 6.0))

"""Keys with rope that a model joins with an empty cache, before attention takes them."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from attended import agree, expanded, heads, joined
from captures import captured
from onepass.graph.operations import leave_apart
from onepass.rewrite.attention import drop_empty_joins


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def with_rope(x, weights, tables, repeats=False, join=joined):
    """As models of transformers write their first step with a cache."""
    q, k, v = (heads(F.linear(x, w), n) for w, n in zip(weights, (4, 2, 2), strict=True))
    k = join(turned(k, *tables))
    if repeats:
        k, v = (expanded(t, 2) for t in (k, v))
    return F.scaled_dot_product_attention(turned(q, *tables), k, v, enable_gqa=not repeats).transpose(1, 2).flatten(2)


ANGLES = torch.linspace(-2, 2, 24).view(6, 4).repeat(1, 2)
TABLES = ANGLES.cos(), ANGLES.sin()


def rope_inputs():
    torch.manual_seed(0)
    weights = [torch.randn(n, 32).requires_grad_() for n in (32, 16, 16)]
    return torch.randn(2, 6, 32).requires_grad_(), weights


@pytest.mark.parametrize("repeats", [False, True])
def test_keys_behind_an_empty_cache_under_autocast(repeats, every_line):
    """The rotation and autocast's cast are one line, as those of queries are."""
    x, weights = rope_inputs()

    def function(x, *weights):
        tables = [table.to(x.dtype) for table in TABLES]
        return with_rope(x, weights, tables, repeats)

    fused = onepass.fuse(function)
    leaves = [t.detach().double().requires_grad_() for t in (x, *weights)]
    outcomes = []
    for way, inputs, is_cast in (
        (fused, (x, *weights), True),
        (function, (x, *weights), True),
        (function, leaves, False),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            result = way(*inputs)
        upstream = torch.cos(torch.arange(result.numel())).view_as(result).to(result)
        outcomes.append((result, *torch.autograd.grad(result, inputs, upstream)))
    assert [found.line for found in onepass.report(fused).lines].count("rope") == 2
    for ours, theirs, exact in zip(*outcomes, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


def joined_and_given(x, *weights):
    keys = []

    def join(k):
        keys.append(joined(k))
        return keys[-1]

    return with_rope(x, weights, TABLES, join=join), *keys


def joined_and_written(x, *weights):
    return with_rope(x, weights, TABLES, join=lambda k: joined(k).mul_(2.0))


def read_twice(x, *weights):
    def join(k):
        keys = joined(k)
        return keys + keys.mean()

    return with_rope(x, weights, TABLES, join=join)


@pytest.mark.parametrize("function", [joined_and_given, joined_and_written, read_twice])
def test_joined_keys_that_others_see(function):
    x, weights = rope_inputs()
    graph = captured(function, x, *weights)
    leave_apart(graph)
    drop_empty_joins(graph)
    graph.lint()
    assert [node.args[0][0].target for node in graph.nodes if node.target is torch.cat].count(torch.tensor) == 1
    agree(function, (x, *weights))

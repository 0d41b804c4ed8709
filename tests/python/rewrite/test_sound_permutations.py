"""Permutations of the dimensions before the last, between two words of a line: rows stand elsewhere and are what they
were, so that the line goes on behind them; and the places where somebody could tell."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from captures import Count, captured
from onepass.graph.operations import operation
from onepass.rewrite import fuse as fusing

pytestmark = pytest.mark.usefixtures("every_line")


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def outcome(call, tensors, training=True):
    """Results, and gradients of leaves as `backward` leaves them, from gradients of results that lie as these do or
    otherwise."""
    found, gradients = [], []
    for upstream in (torch.ones_like, lambda r: torch.ones(r.shape, dtype=r.dtype)):
        leaves = [t.clone().requires_grad_(training and t.is_floating_point()) for t in tensors]
        results = call(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        found += results
        wanted = [r for r in results if r.requires_grad]
        if wanted:
            ways = [upstream(r) * torch.linspace(-1, 2, r.numel(), dtype=r.dtype).view(r.shape) for r in wanted]
            torch.autograd.backward(wanted, ways)
            gradients += [leaf.grad for leaf in leaves]
    return found, gradients


def agrees(function, *tensors, training=True):
    """The lines with which results, gradients and strides are eager's, in float64."""
    fused = onepass.fuse(function)
    (expected, gradients), (found, ours) = (outcome(way, tensors, training) for way in (function, fused))
    assert [r.stride() for r in found] == [r.stride() for r in expected]
    assert [r.requires_grad for r in found] == [r.requires_grad for r in expected]
    assert [r._is_view() for r in found] == [r._is_view() for r in expected]
    assert [None if g is None else strides(g) for g in ours] == [None if g is None else strides(g) for g in gradients]
    torch.testing.assert_close((*found, *ours), (*expected, *gradients), rtol=1e-9, atol=1e-11)
    return [f.line for f in onepass.report(fused).lines]


def strides(tensor):
    """Those by which a gradient's numbers are found: autograd makes no others alike."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin)


def heads(x, w, cos, sin):
    """As Qwen 3 has them: normalised, and then turned behind a transposition."""
    q = F.rms_norm(x.view(2, x.shape[1], 3, 8), (8,), w, 1e-6).transpose(1, 2)
    return rotated(q, cos.unsqueeze(1), sin.unsqueeze(1))


def test_norms_of_heads_and_rotary_embedding():
    """With positions for all texts, and for each."""
    for batch in (1, 2):
        tensors = double(2, 5, 24), double(8)
        cos, sin = double(batch, 5, 8).cos(), double(batch, 5, 8).sin()
        line = ["rms_norm(1e-06) | scale | rope"]
        assert agrees(lambda x, w, cos=cos, sin=sin: heads(x, w, cos, sin), *tensors) == line
        assert agrees(heads, *tensors, cos, sin, training=False) == line


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t.transpose(-2, 0),
        lambda t: torch.swapaxes(t, 0, 1),
        lambda t: t.permute(2, 0, 1, 3),
        lambda t: torch.permute(t, (1, 2, 0, -1)),
        lambda t: t.permute(dims=(1, 0, 2, 3)),
        lambda t: t.permute(0, 1, 2, 3),
        lambda t: t.movedim(0, 2),
        lambda t: torch.moveaxis(t, (0, 1), (2, 0)),
        lambda t: t.transpose(0, 1).transpose(1, 2),
    ],
)
def test_permutations_that_pass(move):
    """In lines whose result lies as eager's, and in those whose result is contiguous in any order."""
    x, r = double(2, 3, 4, 8), double(2, 3, 4, 8)
    assert agrees(lambda x, r: F.gelu(move(x + r)), x, r) == ["add | gelu"]
    assert agrees(lambda x, r: F.layer_norm(move(x + r), (8,)), x, r) == ["add | keep | layer_norm(1e-05)"]
    assert agrees(lambda x: torch.tanh(move(x.mT * 2.0)), double(2, 3, 8, 4)) == ["mul(2.0) | tanh"]


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.transpose(1, 3),
        lambda t: t.mT,
        lambda t: t.permute(3, 0, 1, 2),
        lambda t: t.permute(0, 2, 3, 1),
        lambda t: t.movedim(-1, 0),
        lambda t: t.movedim((3, 0), (0, 3)),
        lambda t: t.transpose(-1, -2),
    ],
)
def test_the_last_dimension_stays(move):
    """All of the same length, so that shapes do not tell them."""
    found = agrees(lambda x: F.layer_norm(move(x * 2.0), (4,)), double(4, 4, 4, 4))
    assert sorted(found) == ["layer_norm(1e-05)", "mul(2.0)"]


@pytest.mark.parametrize(
    "before, behind",
    [
        *(((2, 3, 4, 8), (2, 1, 8)), ((3, 1, 8), (4, 2, 3, 8)), ((2, 1, 1, 8), (1, 2, 3, 8)), ((1, 3, 4, 8), (8,))),
        *(((4, 8), (4, 1, 1, 8)), ((8,), (3, 8))),
    ],
)
def test_operands_on_either_side(before, behind):
    """Sums and products, also of tensors that broadcast and have fewer dimensions."""

    def function(x, a, b, c, d):
        return torch.tanh((x * a + b).permute(2, 0, 1, 3) * c - d)

    (line,) = agrees(function, double(2, 3, 4, 8), double(*before), double(*before), double(*behind), double(*behind))
    assert line.count("|") == 4


def test_equal_lengths():
    """Nothing but the permutation itself says where a row stands."""

    def function(x, a, b):
        return F.silu((x + a).transpose(0, 1)) * b

    assert agrees(function, *(double(3, 3, 8) for _ in range(3))) == ["add | gate(silu)"]
    assert agrees(function, double(3, 3, 8), double(3, 1, 8), double(3, 3, 8)) == ["add | gate(silu)"]
    twice = agrees(lambda x, a: F.relu((x + a).transpose(0, 1).transpose(0, 1)) * a, double(3, 3, 8), double(3, 3, 8))
    assert twice == ["add | gate(relu)"]


def between_views(x):
    return torch.tanh((x * 2.0).view(1, 4, 4).permute(1, 0, 2).reshape(2, 2, 4))


def view_before(x, r):
    return torch.tanh((x + r).view(2, 3, 8).transpose(0, 1))


def view_behind(x, r):
    return torch.tanh((x.view(2, 3, 8) + r.view(2, 3, 8)).transpose(0, 1).reshape(6, 8))


@pytest.mark.parametrize("function, count", [(between_views, 1), (view_before, 2), (view_behind, 2)])
def test_views_and_permutations(function, count):
    """Rows that are counted otherwise are not followed through a permutation."""
    agrees(function, *([double(2, 2, 4)] if count == 1 else [double(6, 8), double(6, 8)]))


def returned(x, r, w):
    h = x + r
    return F.rms_norm(h.transpose(0, 1), (8,), w), h


def returned_behind(x, r, w):
    h = (x + r).transpose(0, 1)
    return F.rms_norm(h, (8,), w), h


def used_twice(x, r, w):
    h = x + r
    return F.rms_norm(h.transpose(0, 1), (8,), w) + h.transpose(0, 1)


def used_on_both_sides(x, r, w):
    h = x + r
    return F.rms_norm(h.transpose(0, 1), (8,), w).transpose(0, 1) * h


def kept_before(x, r, w):
    h = x + r
    y = F.layer_norm(h, (8,))
    return F.rms_norm((h + y).transpose(0, 1), (8,), w), h * 2.0


def kept_behind(x, r, w):
    h = torch.tanh(x).transpose(0, 1) + r.transpose(0, 1)
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * w - torch.cumsum(h, 0)


def hooked(x, r, w):
    h = (x + r).transpose(0, 1)
    if h.requires_grad:
        h.register_hook(lambda g: g * 3.0)
    return F.rms_norm(h, (8,), w)


def overwritten(x, r, w):
    h = x + r
    y = torch.tanh(h.transpose(0, 1) * 2.0)
    h.mul_(2.0)
    return y * w, h


def overwritten_through_the_view(x, r, w):
    h = (x + r).transpose(0, 1)
    h.mul_(2.0)
    return F.rms_norm(h, (8,), w)


def detached(x, r, w):
    h = (x + r).transpose(0, 1)
    return F.rms_norm(h.detach(), (8,), w) + h.detach()


def in_two_modes(x, r, w):
    with torch.no_grad():
        h = torch.tanh(x + r)
    return F.rms_norm(h.transpose(0, 1), (8,), w)


def dropped(x, r, w):
    return F.rms_norm(F.dropout(x + r, 0.0).transpose(0, 1), (8,), w)


FUNCTIONS = [
    *(returned, returned_behind, used_twice, used_on_both_sides, kept_before, kept_behind, hooked, overwritten),
    *(overwritten_through_the_view, detached, in_two_modes, dropped),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_who_sees_values_on_the_way(function, training):
    agrees(function, double(3, 4, 8), double(3, 4, 8), double(8), training=training)


def test_a_value_before_a_permutation_is_not_kept():
    """It lies in another order than the results; one behind it does not."""
    tensors = double(3, 4, 8), double(3, 4, 8), double(8)
    assert "keep" not in " ".join(agrees(returned, *tensors, training=False))
    assert "rms_norm | scale" in agrees(returned, *tensors, training=False)
    assert agrees(kept_behind, *tensors)[0] == "tanh | add | keep | rms_norm(1e-06) | scale"


def test_retained_gradients():
    def function(x, w):
        h = (x + w).transpose(0, 1)
        h.retain_grad()
        return F.layer_norm(h, (8,)), h

    gradients = []
    for call in (function, onepass.fuse(function)):
        x, w = (double(3, 4, 8).fill_(0.5).requires_grad_() for _ in range(2))
        y, h = call(x, w)
        (y * torch.linspace(0, 1, 96, dtype=torch.float64).view(4, 3, 8)).sum().backward()
        gradients.append(h.grad)
    torch.testing.assert_close(*gradients)


def test_dropout_stays_where_it_is():
    """Its mask would follow the order."""
    x = double(3, 4, 8)
    fused = onepass.fuse(lambda x: F.layer_norm(F.dropout(x * 2.0, 0.5).transpose(0, 1), (8,)))
    fused(x)
    assert [f.line.split("(")[0] for f in onepass.report(fused).lines] == ["mul", "layer_norm"]


def test_lengths_that_change():
    """One capture for all, and the line in it."""
    w = double(8)
    tables = [(double(1, t, 8).cos(), double(1, t, 8).sin()) for t in range(5, 10)]
    counts, fused = [], onepass.fuse(heads)
    for call in (fused, torch.compile(heads, backend=(alone := Count()))):
        torch._dynamo.reset()
        for cos, sin in tables:
            x = double(2, cos.shape[1], 24)
            found, expected = call(x, w, cos, sin), heads(x, w, cos, sin)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, check_stride=True)
        counts.append(len(onepass.report(call).graphs) if not counts else alone.graphs)
    assert counts[0] == counts[1] <= 2
    for graph in onepass.report(fused).graphs:
        assert [f.line for f in graph] == ["rms_norm(1e-06) | scale | rope"]


def test_linear_layers_stay_before_a_permutation(monkeypatch):
    """A product of permuted rows would copy them."""
    monkeypatch.setattr(fusing, "gain_behind_products", lambda chain, **how: float(len(chain.nodes)))

    def function(x, w, b, v):
        return F.linear(F.layer_norm(F.gelu(F.linear(x, w, b)).transpose(0, 1), (16,)), v)

    tensors = double(3, 4, 8), double(16, 8), double(16), double(8, 16)
    for training in (True, False):
        lines = agrees(function, *tensors, training=training)
        assert not any("linear" in line and "gelu | layer_norm" in line for line in lines)


def test_attention_with_permuted_scores():
    """The rows of a product's result stand where its factors' do."""

    def function(q, k, v):
        return torch.softmax((q @ k.mT * 0.5).transpose(0, 1), -1) @ v

    found = agrees(function, *(double(3, 3, 5, 5) for _ in range(3)))
    assert found == ["mul(0.5) | softmax"]


def test_orders_of_dimensions():
    """What a node is said to be."""
    x = double(2, 3, 4, 8)
    for move, order in (
        (lambda t: t.transpose(-2, 0), (2, 1, 0, 3)),
        (lambda t: t.permute(2, 0, 1, -1), (2, 0, 1, 3)),
        (lambda t: t.movedim((0, 2), (1, 0)), (2, 0, 1, 3)),
        (lambda t: t.moveaxis(-3, 0), (1, 0, 2, 3)),
        (lambda t: t.movedim(0, -1), None),
    ):
        *_, node, _ = captured(move, x).nodes
        op = operation(node)
        assert (op and op.name, op and op.arguments[1]) == (("permuted", order) if order else (None, None))


def given_with_a_view_of_it(x):
    h = F.hardswish(x.transpose(0, 1))
    return h, h.transpose(0, 1).flatten(1)


def probabilities(x):
    return (F.softmax(x.transpose(0, 1), -1),)


def nearest(x):
    return (F.gelu(x.unsqueeze(0).to(memory_format=torch.channels_last) * 2.0),)


def turned_twice(x):
    return (x.mT * 2.0).mT.transpose(0, 1) * 3.0


def through_dropout_that_is_off(x):
    turned = turned_twice(x)
    return F.dropout(turned, 0.5, training=False), turned.sum()


def through_a_cast_to_its_dtype(x):
    turned = turned_twice(x)
    return turned.to(x.dtype), turned.sum()


def through_a_checkpoint(x):
    return (checkpoint(lambda t: F.dropout(t, 0.0), turned_twice(x), use_reentrant=False),)


def stacked_views(x):
    return (torch.stack([p.tanh().exp().view(-1) for p in x.unbind()]),)


OTHERWISE = [
    given_with_a_view_of_it,
    probabilities,
    nearest,
    through_dropout_that_is_off,
    through_a_cast_to_its_dtype,
    through_a_checkpoint,
    stacked_views,
]


@pytest.mark.parametrize("function", OTHERWISE)
@pytest.mark.parametrize("training", [True, False])
def test_what_lies_otherwise_is_no_view(function, training):
    """A result whose rows lie elsewhere than a line writes them is still one of its own: `detach_` takes it, what views
    it is overwritten with it, and backward hears of that."""
    x = double(3, 4, 8)
    fused = onepass.fuse(function)
    for way in (function, fused):
        results = way(x.clone().requires_grad_(training))
        assert not results[0]._is_view()
        results[0].detach_()
    assert onepass.report(fused).lines
    found = []
    for way in (function, fused):
        leaf = x.clone().requires_grad_(training)
        results = way(leaf)
        overwritten = torch.sigmoid_(results[0])
        found.append((overwritten, *results))
        if training and function is not probabilities:
            total = sum((t * t.cos()).sum() for t in results)
            found[-1] += torch.autograd.grad(total, [leaf, results[0]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    if training and function is probabilities:
        for way in (function, fused):
            leaf = x.clone().requires_grad_()
            (y,) = way(leaf)
            y.mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_what_is_no_view_in_torch_func():
    x, t = double(3, 4, 8), double(3, 4, 8)
    for results in (probabilities, given_with_a_view_of_it):
        fused = onepass.fuse(results)
        loss = lambda way: lambda x: sum(r.sin().sum() for r in way(x))  # noqa: E731, B023
        torch.testing.assert_close(torch.func.grad(loss(fused))(x), torch.func.grad(loss(results))(x))
        torch.testing.assert_close(torch.func.jvp(fused, (x,), (t,)), torch.func.jvp(results, (x,), (t,)))
        leaf = x.clone().requires_grad_()
        assert torch.autograd.gradgradcheck(lambda x: fused(x)[0], leaf)  # noqa: B023

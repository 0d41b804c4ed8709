"""Linear layers of one input, and of a bias: one call, whose backward adds up gradients in the products."""

import functools

import pytest
import torch
import torch.nn.functional as F

import onepass
from captures import captured
from onepass.rewrite import fuse as fusing
from onepass.rewrite.linears import join_linears, linears


def given(device="cpu", dtype=torch.float32, rows=(2, 5)):
    torch.manual_seed(0)
    shapes = [(*rows, 16), (16, 16), (8, 16), (8, 16), (16,), (8,)]
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def projected(x, q, k, v, of_q, of_v):
    q, k, v = F.linear(x, q, of_q), F.linear(x, k), F.linear(x, v, of_v)
    return torch.cat([q.sigmoid(), k.square(), v.tanh()], -1)


def one_is_unused(x, q, k, v, of_q, of_v):
    q, k, v = F.linear(x, q, of_q), F.linear(x, k), F.linear(x, v, of_v)
    return q, k.detach(), v.detach()


def overwritten_results(x, q, k, v, of_q, of_v):
    q, k = F.linear(x, q, of_q), F.linear(x, k)
    return q.mul_(2.0), k.add_(1.0).square()


def with_a_bias(x, q, k, v, of_q, of_v):
    return F.linear(F.linear(x.sigmoid(), q, of_q).mean(-2, keepdim=True), k)


def one_behind_the_other(x, q, k, v, of_q, of_v):
    x = F.linear(x, q, of_q)
    first, second = F.linear(x, q), F.linear(x, k)
    x = x * 1.0
    with torch.no_grad():
        x.add_(1.0)
    return first, second, F.linear(x, v, of_v), F.linear(x, v)


def joined(function, tensors):
    """How many layers each joint call has."""
    graph = captured(function, *tensors)
    join_linears(graph)
    graph.lint()
    return [len(node.args[1]) for node in graph.nodes if node.target is linears]


def outcome(way, tensors):
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    results = way(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    loss = sum((t * torch.randn(t.shape, generator=generator).to(t)).sum() for t in results if t.requires_grad)
    loss.backward()
    return [*results, *(leaf.grad for leaf in leaves)]


def agree(function, tensors, is_short=False):
    torch._dynamo.reset()
    ours, theirs = outcome(torch.compile(function, backend=fusing.Rewriter()), tensors), outcome(function, tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.stride(), a.dtype, a.requires_grad) == (b.shape, b.stride(), b.dtype, b.requires_grad)
            is_narrow = is_short or a.dtype not in (torch.float32, torch.float64)
            torch.testing.assert_close(a, b, rtol=5e-2 if is_narrow else 1e-4, atol=5e-2 if is_narrow else 1e-5)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (projected, [3]),
        (one_is_unused, [3]),
        (overwritten_results, [2]),
        (with_a_bias, [1]),
        (one_behind_the_other, [1, 2, 2]),
    ],
)
@pytest.mark.parametrize("rows", [(2, 5), (7,), (0, 3)], ids=str)
def test_layers_of_one_input(function, expected, rows, device, monkeypatch):
    monkeypatch.setattr("onepass.rewrite.linears.LONG_SUM", 0)
    tensors = given(device, rows=rows)
    assert joined(function, tensors) == expected
    agree(function, tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype, device):
    agree(projected, given(device, dtype))


@pytest.mark.parametrize("frozen", [(0,), (1, 4), (1, 2, 3), (4, 5), (0, 2, 3, 5)], ids=str)
def test_frozen_tensors(frozen, device):
    tensors = given(device)
    for i in frozen:
        tensors[i].requires_grad_(False)
    agree(projected, tensors)


def test_what_is_saved():
    """As by PyTorch's: x for the gradients of weights, and weights for that of x."""
    for frozen, expected in (((), 3), ((0,), 1), ((1, 2), 2)):
        x, q, k, *_ = given()
        for i in frozen:
            (x, q, k)[i].requires_grad_(False)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(remember, saved), lambda t: t):
            linears(x, (q, k), (None, None))
        assert len(saved) == expected


def remember(saved, tensor):
    saved.append(tensor)
    return tensor


def test_under_autocast(device):
    def function(*tensors):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return projected(*tensors).float()

    tensors = given(device)
    assert joined(function, tensors) == [3]
    agree(function, tensors, is_short=True)


def test_gradients_of_gradients(device):
    x, q, k, v, of_q, of_v = given(device, torch.float64)

    def function(x, q, k, of_q):
        return tuple(t.sigmoid() for t in linears(x, (q, k), (of_q, None)))

    assert torch.autograd.gradcheck(function, (x, q, k, of_q))
    assert torch.autograd.gradgradcheck(function, (x, q, k, of_q))


def test_transforms():
    x, q, k, *_ = (t.detach() for t in given())

    def function(x):
        return sum(t.square().sum() for t in linears(x, (q, k), (None, None)))

    expected = torch.func.grad(lambda x: F.linear(x, q).square().sum() + F.linear(x, k).square().sum())(x)
    torch.testing.assert_close(torch.func.grad(function)(x), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(function))(x), expected)


def far_apart(x, q, k, v, of_q, of_v):
    first = F.linear(x, k)
    between = F.linear(x.sigmoid(), q)
    return first * F.linear(x, v), between


def overwritten_between(x, q, k, v, of_q, of_v):
    x = x * 1.0
    first = F.linear(x, k)
    with torch.no_grad():
        x.mul_(2.0)
    return first.detach() * F.linear(x, v)


def of_a_later_weight(x, q, k, v, of_q, of_v):
    first = F.linear(x, k)
    return F.linear(x, v * first.mean())


def without_gradients(x, q, k, v, of_q, of_v):
    with torch.no_grad():
        first = F.linear(x, k)
    return first * F.linear(x, v)


def turned(x, q, k, v, of_q, of_v):
    return F.linear(x.transpose(0, 1), k) * F.linear(x.transpose(0, 1), v)


@pytest.mark.parametrize("function", [far_apart, overwritten_between, of_a_later_weight, without_gradients, turned])
def test_what_stays_apart(function):
    assert joined(function, given()) == []
    agree(function, given())


def test_evaluation_is_left_alone():
    graph = captured(projected, *(t.detach() for t in given()))
    join_linears(graph)
    assert not any(node.target is linears for node in graph.nodes)


def test_a_fused_model_in_a_compiled_one():
    fused = onepass.fuse(projected)
    torch._dynamo.reset()
    tensors = given()
    ours, theirs = outcome(torch.compile(fused, backend="aot_eager"), tensors), outcome(projected, tensors)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

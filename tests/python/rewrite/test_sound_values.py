"""What fuse must not change, whatever a line could say: gradients, shapes, strides, dtypes.

Programs at random are in test_fuse_fuzz.py; here is one of each kind of fault that there was."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import onepass
from sound import R, agrees, grad

pytestmark = pytest.mark.usefixtures("every_line")


def returned(x, w):
    h = x + w
    return h * 2.0 + F.layer_norm(h, (8,)), h


def returned_view(x, w):
    h = x + w
    return h * 2.0 + F.layer_norm(h, (8,)), h.contiguous()


def hooked(x, w):
    h = x + w
    h.register_hook(lambda g: g * 3.0)
    return h * 2.0 + F.layer_norm(h, (8,))


def asked_inside(x, w):
    h = x + w
    y = h * 2.0 + F.layer_norm(h, (8,))
    return y, h.mul(1.5)


def returned_as_it_was(x, w):
    h = x + w
    return h * 2.0 + F.layer_norm(h, (8,)), F.dropout(h, 0.0)


@pytest.mark.parametrize("function", [returned, returned_view, returned_as_it_was, hooked, asked_inside])
def test_gradients_of_values_on_the_way(function):
    agrees(function, grad(6, 8), grad(6, 8))


def kept_unseen(x, w):
    h = x + 1.0
    return h.view(-1), F.rms_norm(h, (8,), w)


def kept_beside(x, w):
    h = x + 1.0
    return h.softmax(-1), F.layer_norm(h, (8,), w)


@pytest.mark.parametrize("function", [kept_unseen, kept_beside])
def test_values_on_the_way_need_no_gradient_for_what_is_behind_them(function):
    """A line's results all need one where an operand of it does."""
    x, w = R(6, 8), grad(8)
    assert agrees(function, x, w)
    for theirs, ours in zip(*(tree_leaves(f(x, w)) for f in (function, onepass.fuse(function)))):
        assert ours.requires_grad == theirs.requires_grad


def test_retained_gradients():
    def function(x, w):
        h = x + w
        h.retain_grad()
        return h * 2.0 + F.layer_norm(h, (8,)), h

    fused, gradients = onepass.fuse(function), []
    x, w = grad(6, 8), grad(6, 8)
    for call in (function, fused):
        y, h = call(x, w)
        (y * torch.linspace(0, 1, 48).view(6, 8)).sum().backward()
        gradients.append(h.grad)
    torch.testing.assert_close(*gradients)


def between_views(x, p):
    return F.gelu(((x * 2.0).view(4, 2, 2, -1) + p).view(x.shape))


def windows(q, k, v, b, m):
    s = q @ k.mT + b[None]
    s = s.view(-1, 4, 3, 9, 9) + m[:, None][None]
    return F.softmax(s.view(-1, 3, 9, 9), -1) @ v


def test_operands_between_views():
    agrees(between_views, R(2, 2, 4, 64), R(1, 2, 1, 64))
    agrees(between_views, R(2, 2, 4, 64), R(4, 2, 2, 64))
    agrees(lambda x, p: ((x * 2.0).reshape(1, 1, 6, -1) + p).reshape(x.shape), R(3, 2, 6), R(6, 1, 1, 6).movedim(0, -1))
    assert "add" in agrees(windows, *(R(8, 3, 9, 5) for _ in range(3)), R(3, 9, 9), R(4, 9, 9))
    line = "bias | mul(2.0) | gelu"
    assert agrees(lambda x, b: F.gelu((x.view(6, 2, 4) + b).view(12, 4) * 2.0), R(12, 4), R(4)) == [line]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stack([p.unsqueeze(0) for p in x.unbind()]),
        lambda x: torch.stack([p + x for p in x.unbind()]),
        lambda x: torch.stack([F.gelu(p + x) for p in x.unbind()]),
        lambda x: torch.stack([p.unsqueeze(0) + x for p in x.unbind()]),
        lambda x: torch.stack([F.gelu(p).unsqueeze(0) for p in x.unbind()]),
        lambda x: torch.stack([F.gelu(p.view(2, 4)).flatten() for p in x.unbind()]),
        lambda x: torch.stack([p.sigmoid_() for p in (x * 2.0).unbind()]),
        lambda x: torch.stack([x[0] + p for p in x.unbind()]),
        lambda x: torch.stack([p for p in x.unbind()]).mul_(2.0) + x,
    ],
)
def test_loops_over_pieces(function):
    agrees(function, R(4, 8))


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x, r: F.gelu(x.mT + r.mT).mT.view(x.shape[0], -1), ["add | gelu"]),
        (lambda x, r: torch.sigmoid(x.permute(2, 0, 1) * 2.0 + r.permute(2, 0, 1)), ["mul(2.0) | add | sigmoid"]),
        (lambda x, r: F.relu(x.transpose(0, 1) + r.transpose(0, 1)), ["add | relu"]),
        (lambda x, r: F.layer_norm(x.transpose(0, 1) + r.transpose(0, 1), (6,)), ["add | layer_norm(1e-05)"]),
        (lambda x, r: F.gelu(x.mT + r.mT[:, :, :1]), ["add | gelu"]),
        (lambda x, r: F.relu(x.mT + r[0, 0, :5]), ["relu"]),
        (lambda x, r: F.relu(x.mT + r[0, 0, :5]) @ x, ["bias | relu"]),
        (lambda x, r: F.relu(x.mT - r[0, 0, :5]), ["sub | relu"]),
        (lambda x, r: x.mT - r[0, 0, :5], ["sub"]),
    ],
)
def test_strides(function, expected):
    assert agrees(function, R(4, 5, 6), R(4, 5, 6)) == expected


def test_numbers_read_by_their_strides():
    """As eager's result lies: Dynamo has made its strides numbers."""

    def function(x, b):
        y = F.gelu(x.mT + b)
        return y.as_strided(y.shape, y.stride()) * 2.0

    agrees(function, grad(6, 8), R(6))


def test_channels_last():
    x = R(2, 3, 4, 5).to(memory_format=torch.channels_last)
    fused = onepass.fuse(lambda x: F.gelu(x * 2.0))
    assert fused(x).stride() == x.stride()
    assert [f.line for f in onepass.report(fused).lines] == ["mul(2.0) | gelu"]


def test_casts_that_lose_something_stay():
    """A value that is rounded on the way is rounded: it may overflow, too."""
    assert agrees(lambda x: torch.tanh((x * 1e6).half().float()), R(4, 8)) == ["mul(1000000.0)", "tanh"]
    assert agrees(lambda x: F.gelu((x * 2.0).to(torch.float32).double()), R(4, 8).double()) == ["mul(2.0)", "gelu"]
    x = R(4, 8).bfloat16()
    assert agrees(lambda x: F.gelu(x.float() * 2.0).to(torch.bfloat16), x) == ["mul(2.0) | gelu"]


def test_constants_that_are_near_a_formula_s():
    for slope in (1.701, 1.7021):
        assert "quick_gelu" not in agrees(lambda x, slope=slope: x * torch.sigmoid(slope * x), R(4, 8))


def test_rotary_embedding_by_keywords():
    def function(x, cos, sin):
        return x * cos + torch.cat(tensors=(-x[..., 4:], x[..., :4]), dim=-1) * sin

    assert agrees(function, grad(3, 8), R(8), R(8)) == ["rope"]


@pytest.mark.parametrize("number", [1e-40, 1e39, 1e-39, 0.0])
def test_divisions_whose_inverse_is_no_number(number):
    for x in (torch.zeros(4, 8), torch.full((4, 8), 1e38), R(4, 8).double()):
        agrees(lambda x: torch.tanh(x / number), x)


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_rows_of_one_dimension_with_themselves(shape):
    """An operand that is the same tensor is a column, the row is none."""
    assert agrees(lambda x: (F.gelu(x) * x).view(shape), grad(8))


def test_strides_of_dimensions_of_one():
    """They say whether PyTorch takes a tensor for channels-last, and then what it gives is, too."""

    def function(x):
        return torch.stack([F.silu(part) for part in torch.hsplit(F.gelu(x), 2)], 1)

    x = R(2, 2, 8, 4).contiguous(memory_format=torch.channels_last)
    fused = onepass.fuse(function)
    for taken in (x, x.requires_grad_()):
        assert fused(taken).stride() == function(taken).stride() == (64, 1, 64, 8, 2)
    assert onepass.report(fused).lines


def _overwritten_cast(x, c):
    t = x.float()
    t.add_(c)
    return (torch.sigmoid(t) * t).to(x.dtype)


def _overwritten_behind_a_cast(x, c):
    y = x * 2.0
    t = y.float()
    y.add_(c)
    return (torch.sigmoid(t) * t).to(x.dtype) + y, y


def _cast_without_gradient(x, c):
    with torch.no_grad():
        t = x.float()
    return (torch.sigmoid(t) * t).to(x.dtype) + x * c


def _cast_that_is_returned(x, c):
    t = x.float()
    return (torch.sigmoid(t) * t).to(x.dtype) * c, t


def _overwritten_view(x, c):
    t = x.reshape(x.shape[0], -1)
    t.mul_(c)
    return torch.sigmoid(t) * t


@pytest.mark.parametrize(
    "function",
    [_overwritten_cast, _overwritten_behind_a_cast, _cast_without_gradient, _cast_that_is_returned, _overwritten_view],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("training", [True, False])
def test_what_a_formula_looks_through(function, dtype, training):
    """Casts and views between x and the formula: they are not x where one of them was overwritten, their gradients can
    be asked for, and none of x flows through one without a gradient."""

    def called(way):
        torch.manual_seed(0)
        x, c = R(6, 8).to(dtype).requires_grad_(training), R(8).requires_grad_(training)
        taken = R(8, 6).to(dtype).mT if function is _overwritten_view else x * 1.0
        results = way(function)(taken, c)
        results = results if isinstance(results, tuple) else (results,)
        wanted = [t for t in (x, taken, c, *results[1:]) if t.requires_grad]
        return *results, *(torch.autograd.grad(results[0].sum(), wanted, allow_unused=True) if wanted else ())

    for theirs, ours in zip(called(lambda f: f), called(onepass.fuse), strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)

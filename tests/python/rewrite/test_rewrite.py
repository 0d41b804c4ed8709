"""What is found in captured graphs: formulas in any order, chains and what may not be one, masks that are constant."""

import math

import pytest
import torch
import torch.nn.functional as F

import onepass
from captures import captured
from onepass.graph.operations import operation
from onepass.rewrite import fuse as fusing
from onepass.rewrite.find.chains import Order, chains
from onepass.rewrite.masks import name_masks


def lines(function, *inputs):
    """All that a line can say of it, the longest chains first."""
    return [chain.line for chain in chains(captured(function, *inputs), lambda chain: float(len(chain.nodes)))]


def agrees(function, *inputs):
    """The lines with which fuse gives the same results and gradients."""
    torch._dynamo.reset()
    leaves = [[t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs] for _ in range(2)]
    fused = onepass.fuse(function)
    results = []
    for call, tensors in zip((function, fused), leaves):
        found = call(*tensors)
        found = found if isinstance(found, tuple) else (found,)
        sum((t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view_as(t)).sum() for t in found).backward()
        results.append([*found, *(t.grad for t in tensors if t.requires_grad)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
    return [f.line for f in onepass.report(fused).lines]


@pytest.fixture
def every_line(monkeypatch):
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))


X, R, W, B = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8), torch.randn(8)
C = math.sqrt(2 / math.pi)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * x**3))), "gelu_tanh"),
        (lambda x: x * 0.5 * (1 + torch.tanh((x + 0.044715 * torch.pow(x, 3.0)) * C)), "gelu_tanh"),
        (lambda x: 0.5 * (x * (torch.tanh(C * x * (1 + 0.044715 * x * x)) + 1)), "gelu_tanh"),
        (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
        (lambda x: x * torch.sigmoid(1.702 * x), "quick_gelu"),
        (lambda x: torch.sigmoid(x).mul(x), "silu"),
        (lambda x: x * torch.tanh(F.softplus(x)), "mish"),
        (lambda x: torch.square(F.relu(x)), "relu_squared"),
        (lambda x: F.relu(x).pow(2), "relu_squared"),
        (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), "rms_norm(1e-06)"),
        (lambda x: x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-5), None),
        (lambda x: x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + 1e-5), "rms_norm(1e-05)"),
        (
            lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
            "layer_norm(1e-05)",
        ),
    ],
)
def test_formulas(function, expected, every_line):
    found = agrees(function, X)
    if expected is not None:
        assert found == [expected]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: 0.5 * x * (1 + torch.tanh(0.7 * (x + 0.044715 * x**3))),
        lambda x: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
        lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
        lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
        lambda x: x * torch.sigmoid(1.5 * x),
    ],
)
def test_what_only_looks_like_a_formula(function, every_line):
    words = " ".join(agrees(function, X))
    assert not any(word in words for word in ("norm", "gelu"))


def test_inner_values_that_are_used_elsewhere(every_line):
    def function(x):
        t = torch.tanh(C * (x + 0.044715 * x**3))
        return 0.5 * x * (1 + t), t

    assert not any("gelu" in line for line in agrees(function, X))


def rotated(x, cos, sin, half=4):
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos) + (turned * sin)


def test_rotary_embedding(every_line):
    """As transformers writes it, of queries and keys behind a transposition, with tables that broadcast."""
    angles = torch.randn(1, 5, 8)

    def function(q, k):
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        return rotated(q.view(2, 5, 3, 8).transpose(1, 2), cos, sin), rotated(k.view(2, 1, 5, 8), cos, sin)

    assert agrees(function, torch.randn(2, 5, 24), torch.randn(2, 5, 8)) == ["rope", "rope"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_heads_and_rotary_embedding(dtype, every_line):
    """As Gemma 3 has it in transformers: heads behind a transposition are normalised, scaled by 1 + w and turned."""
    angles = torch.randn(1, 5, 8).to(dtype)

    def normalised(x, w):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).type_as(x)

    def function(q, k, w):
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        q, k = (t.view(2, 5, -1, 8).transpose(1, 2) for t in (q, k))
        return rotated(normalised(q, w), cos, sin), rotated(F.rms_norm(k, (8,), w, 1e-6), cos, sin)

    inputs = [torch.randn(*size).to(dtype) for size in ((2, 5, 24), (2, 5, 16), (8,))]
    bound = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert_fused(function, ["rms_norm(1e-06) | scale | rope", "rms_norm(1e-06) | scale(1.0) | rope"], *inputs, **bound)


def turned_halves(x):
    return torch.cat((-x[..., 4:], x[..., :4]), dim=-1)


def turned_in_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1)


def turned_pieces(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def of_halves(x, cos, sin):
    first, second = torch.chunk(x, 2, dim=-1)
    cos, sin = cos[..., : first.shape[-1]], sin[..., : first.shape[-1]]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def turned_columns(x):
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-second, first], dim=-1).flatten(x.dim() - 1)


def turned_rows(x):
    first, second = torch.unbind(x.unflatten(-1, (2, -1)), dim=-2)
    return torch.cat([-second, first], dim=-1)


def of_first_numbers(x, cos, sin):
    first, rest = x[:, :, :, :6], x[:, :, :, 6:]
    first = first * cos[..., :6] + turned_in_pairs(first).flatten(-2) * sin[..., :6]
    return torch.cat([first, rest], dim=-1)


ROTATIONS = {
    "GPT-NeoX": (
        "rope(4)",
        lambda x, c, s: torch.cat((rotated(x[..., :4], c[..., :4], s[..., :4], 2), x[..., 4:]), -1),
    ),
    "ModernBERT": ("rope", lambda x, c, s: (x.float() * c + turned_halves(x.float()) * s).to(x.dtype)),
    "pieces": ("rope", lambda x, c, s: x * c + turned_pieces(x) * s),
    "GPT-OSS": ("rope", of_halves),
    "Cohere": ("rope(interleaved)", lambda x, c, s: x * c + turned_in_pairs(x).flatten(-2) * s),
    "RoFormer": ("rope(interleaved)", lambda x, c, s: x * c + turned_in_pairs(x).reshape_as(x) * s),
    "Flux": ("rope(interleaved)", lambda x, c, s: (x.float() * c + turned_columns(x).float() * s).to(x.dtype)),
    "CogView": ("rope", lambda x, c, s: (x.float() * c + turned_rows(x).float() * s).to(x.dtype)),
    "GPT-J": ("rope(6, interleaved)", of_first_numbers),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotary_embedding_as_models_write_it(name, dtype, every_line):
    """Of packed heads behind a transposition, with the result and the gradient laid out as they were."""
    line, rotation = ROTATIONS[name]
    angles = torch.randn(5, 8)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def function(packed):
        q, k, _ = packed.view(2, 5, 3, 24).transpose(1, 2).chunk(3, dim=-1)
        return rotation(q, cos, sin), rotation(k, cos, sin)

    assert_fused(function, [line, line], torch.randn(2, 5, 72).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_of_streams_and_rotary_embedding(dtype, every_line):
    """As Flux has them in diffusers: rows are turned behind their norm, or behind that of two streams, in float32."""
    angles = torch.randn(7, 8)
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]

    def turned(x):
        return (x.float() * cos + turned_columns(x).float() * sin).to(x.dtype)

    def function(q, k, w):
        q, k = (t.unflatten(-1, (3, 8)) for t in (q, k))
        normed = F.rms_norm(q, (8,), w, 1e-6)
        both = torch.cat([F.rms_norm(t, (8,), w, 1e-6) for t in (k[:, :5], k[:, 5:])], dim=1)
        return turned(normed), turned(both)

    inputs = [torch.randn(*size).to(dtype) for size in ((2, 7, 24), (2, 7, 24), (8,))]
    norm = "rms_norm(1e-06) | scale"
    bound = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert_fused(function, [f"{norm} | rope(interleaved)", norm, norm, "rope(interleaved)"], *inputs, **bound)


def test_a_cast_that_others_take(every_line):
    """What x is a cast of is turned; x is left to the others."""

    def function(x):
        wide = x.float()
        turned = wide * angles.cos() + turned_columns(x).float() * angles.sin()
        return turned.to(x.dtype), wide.sum(-1)

    angles = torch.randn(5, 8)
    assert_fused(function, ["rope(interleaved)"], torch.randn(2, 5, 8).bfloat16(), rtol=0.02, atol=0.1)


def assert_fused(function, lines, *inputs, **bound):
    """The lines, in any order, the results and the gradients, with the strides they had."""
    inputs = [x.requires_grad_() for x in inputs]
    fused = onepass.fuse(function)
    found, expected = fused(*inputs), function(*inputs)
    assert sorted(f.line for f in onepass.report(fused).lines) == sorted(lines)
    if not bound:
        bound = {"rtol": 0.02, "atol": 0.02} if inputs[0].dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    ups = [torch.randn_like(y) for y in expected]
    gradients = (torch.autograd.grad(ys, inputs, ups) for ys in (found, expected))
    for a, b in zip(*([*ys, *g] for ys, g in zip((found, expected), gradients))):
        assert a.stride() == b.stride() and a.dtype == b.dtype
        torch.testing.assert_close(a, b, **bound)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, t: rotated(x, t[:3], t[3:], half=3),
        lambda x, t: x * t[:3] + torch.cat((x[..., 4:], -x[..., :4]), -1) * t[3:],
        lambda x, t: x * t[:3] + torch.cat((-x[..., 4:], x[..., :4]), -1) * (t[3:] + t.sum()),
        lambda x, t: x * t[:3] - torch.cat((-x[..., 4:], x[..., :4]), -1) * t[3:],
        lambda x, t: torch.cat((rotated(x[..., :4], t[:3, :4], t[3:, :4], 2), x[..., :4]), -1),
        lambda x, t: torch.cat((x[..., 4:], rotated(x[..., :4], t[:3, :4], t[3:, :4], 2)), -1),
        lambda x, t: x.double() * t[:3] + torch.cat((-x[..., 4:].float(), x[..., :4].float()), -1).double() * t[3:],
        lambda x, t: x * t[:3] + torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2) * t[3:],
        lambda x, t: x * t[:3] + torch.stack((-x[..., 4:], x[..., :4]), -1).flatten(-2) * t[3:],
        lambda x, t: x * t[:3] + torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2) * t[3:],
        lambda x, t: x.bfloat16().float() * t[:3] + turned_columns(x).bfloat16().float() * t[3:],
        lambda x, t: x * t[:3] + turned_columns(x).bfloat16().float() * t[3:],
        lambda x, t: x.double() * t[:3] + turned_columns(x).bfloat16() * t[3:],
        lambda x, t: x * t[:3] + torch.cat((lambda a, b: (-b, a))(*x.unflatten(-1, (-1, 2)).unbind(-1)), -1) * t[3:],
        lambda x, t: x * t[:3] + torch.cat((lambda a, b: (-a, b))(*x.unflatten(-1, (2, -1)).unbind(-2)), -1) * t[3:],
        lambda x, t: x * t[:3] + torch.cat((lambda a, b: (-b, a))(*x.view(3, 2, 4).transpose(0, 1)), -1) * t[3:],
        lambda x, t: x.bfloat16().float() * t[:3] + torch.cat((-x[..., 4:], x[..., :4]), -1) * t[3:],
        lambda x, t: of_halves(x, t[:3], t[3:]) + of_halves(x, t[:3], t[3:]).flip(-1),
        lambda x, t: torch.cat((x[..., :4] * t[0, :4] - x[..., 4:] * t[3, :4], x[..., 4:] * t[0, :4]), -1),
        lambda x, t: torch.cat(
            (x[..., :4] * t[0, :4] - x[..., 4:] * t[3, :4], x[..., 4:] * t[3, :4] + x[..., :4] * t[0, :4]), -1
        ),
    ],
)
def test_what_only_looks_like_a_rotary_embedding(function, every_line):
    """Other halves, another sign, and tables whose gradient somebody wants."""
    assert "rope" not in agrees(function, torch.randn(3, 8), torch.randn(6, 8))


def test_casts_stand_before_what_moves(every_line):
    """Under autocast the keys of a narrow type are repeated, not those of float32; the result is that of a line.
    Scores are small: on the CPU those of 16 bits are rounded, and torch's engine has them in float32."""

    def whole(x, w, cos, sin):
        q = rotated(F.linear(x, w).view(2, 5, 6, 8).transpose(1, 2), cos, sin)
        k = rotated(F.linear(x, w[:16]).view(2, 5, 2, 8).transpose(1, 2), cos, sin)
        k = k[:, :, None].expand(2, 2, 3, 5, 8).reshape(2, 6, 5, 8)
        return F.scaled_dot_product_attention(q, k, k)

    x, w = torch.randn(2, 5, 32), (0.2 * torch.randn(48, 32)).requires_grad_()
    angles = torch.randn(5, 8)
    fused = onepass.fuse(whole)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = fused(x, w, angles.cos(), angles.sin()), whole(x, w, angles.cos(), angles.sin())
    assert [f.line for f in onepass.report(fused).lines][:2] == ["rope", "rope"] and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    up = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(y, w, up)[0] for y in (found, expected)), rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "function, inputs, expected",
    [
        (lambda x, r, w, b: F.layer_norm(x + r, (8,), w, b), (X, R, W, B), ["add | layer_norm(1e-05) | scale | bias"]),
        (lambda x, r, w: F.rms_norm(x + r, (8,), w), (X, R, W), ["add | rms_norm | scale"]),
        (lambda x, u: F.silu(x) * u, (X, R), ["gate(silu)"]),
        (lambda x, u: u * F.gelu(x, approximate="tanh"), (X, R), ["gate(gelu_tanh)"]),
        (lambda x, m: torch.softmax(x * 0.125 + m, -1), (X, R), ["mul(0.125) | add | softmax"]),
        (lambda x, w, b: F.leaky_relu(x * w + b, 0.2), (X, W, B), ["scale | bias | leaky_relu(0.2)"]),
        (lambda x: F.elu(x / 4), (X,), ["mul(0.25) | elu(1.0)"]),
        (lambda x, b: F.gelu((x + b).view(2, 3, 8)).reshape(6, 8), (X, B), ["bias | gelu"]),
        (lambda x: F.layer_norm(F.layer_norm(x, (8,)), (8,)), (X,), ["layer_norm(1e-05) | layer_norm(1e-05)"]),
        (lambda x: F.layer_norm(x.view(3, 16), (16,)), (X,), ["layer_norm(1e-05)"]),
        (lambda x: F.layer_norm(x, (6, 8)), (X,), []),
        (lambda x: torch.softmax(x, 0), (X,), []),
        (lambda x, r: x.transpose(0, 1) + r.transpose(0, 1), (X, R), ["add"]),
        (lambda x, r: torch.add(x, r, alpha=2), (X, R), []),
    ],
)  # fmt: skip
def test_chains(function, inputs, expected):
    assert lines(function, *inputs) == expected


def test_a_value_that_others_need_is_kept(every_line):
    def block(x, r, w):
        h = x + r
        return h + F.rms_norm(h, (8,), w, 1e-6)

    assert agrees(block, X, R, W)[0] == "add | keep | rms_norm(1e-06) | scale"


def test_what_an_operand_is_made_of(every_line):
    """The gate is made of the very value that it gates."""

    def function(x, w):
        y = F.silu(x)
        return y * (y @ w)

    agrees(function, X, torch.randn(8, 8))


def test_what_is_overwritten_is_read_before(every_line):
    def function(x, r):
        y = x * 2.0
        z = y + r
        y.add_(1.0)
        return torch.tanh(z), y

    agrees(function, X, R)

    def later(x, r):
        x = x * 2.0
        y = x + 1.0 * r
        x.add_(1.0)
        return F.gelu(y), x

    agrees(later, X, R)


def test_a_dimension_is_no_flag(every_line):
    """1 equals True, and is no `inplace`."""
    assert agrees(lambda x: F.gelu(x * 2.0).unsqueeze(1).sum(1), X) == ["mul(2.0) | gelu"]


def test_in_place_operators_of_new_tensors(every_line):
    def function(x, w, r):
        y = x @ w
        y += r
        return F.relu(y, inplace=True)

    assert agrees(function, X, torch.randn(8, 8), R) == ["add | relu"]


def test_nothing_else_is_overwritten(every_line):
    """A view's base is not."""

    def function(x):
        y = x * 1.0
        view = y.view(48)
        view += 1.0
        return F.relu(y)

    agrees(function, X)


def test_a_line_stands_where_gradients_are_recorded(every_line):
    """Pegasus makes its positions without: the line of what they are added to comes behind."""

    def function(x, r):
        y = x * 2.0
        with torch.no_grad():
            positions = torch.sin(r)
        return F.gelu(y + positions) + r

    assert agrees(function, X, R) == ["mul(2.0) | add | gelu | add"]


def test_what_has_no_gradient_gets_none(every_line):
    def function(x, r):
        with torch.no_grad():
            y = torch.tanh(x * 2.0)
        return F.gelu(y + r) + x

    assert agrees(function, X, R) == ["add | gelu | add"]


def test_autocasts_are_apart():
    def function(x, w):
        y = x * 2.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inner = F.relu(y + w)
        return torch.sigmoid(inner + y)

    assert lines(function, X, W) == ["mul(2.0)", "bias | relu", "add | sigmoid"]


def test_within_vmap_nothing_is_fused(every_line):
    """Its tensors have no memory of their own; before it and behind it lines are found as ever."""

    def function(x, r):
        y, overwritten = F.gelu(x + r), r.clone()
        overwritten.mul_(2.0)
        z = torch.vmap(lambda row: torch.tanh(row + 1.0) * row)(y)
        return torch.sigmoid(z + r), overwritten

    assert agrees(function, X, R) == ["add | gelu", "add | sigmoid"]


def test_mixed_dtypes(every_line):
    """A line's results have x's dtype: a sum of bfloat16 and float32 is one of float32."""
    x, r = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 8)
    assert lines(lambda x, r: F.relu(x + r), x, r) == ["add | relu"]
    graph = captured(lambda x, r: F.relu(x + r), x, r)
    (chain,) = chains(graph, lambda chain: float(len(chain.nodes)))
    assert chain.x.meta["example_value"].dtype == torch.float32
    norm = lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w  # noqa: E731
    assert lines(norm, x, torch.randn(8, dtype=torch.bfloat16)) == ["rms_norm(1e-06) | scale"]


def test_shapes_that_broadcast(every_line):
    x, one, row = torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.randn(8)
    assert agrees(lambda x, one, row: F.relu(x + one) * row, x, one, row) == ["add | relu | scale"]
    assert agrees(lambda x, one: F.relu(one + x), x, one) == ["add | relu"]
    agrees(lambda x, one: F.relu(one) + x, x, one)


def test_factors_of_one(every_line):
    """As diffusers divides by, where nothing is to be scaled: backward has no gradient of their own to write."""
    x, y, row = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    assert agrees(lambda x, y: (x + y) / 1.0, x, y) == ["add"]
    norm = lambda x, y, row: F.rms_norm(x / 1.0 + y * 1, (8,), row)  # noqa: E731
    assert agrees(norm, x, y, row) == ["add | keep | rms_norm | scale"]
    assert agrees(lambda x, y: F.gelu(x) * 1.0 * y / 1, x, y) == ["gate(gelu)"]
    assert agrees(lambda x: x * 1.0, x) == []


def attention_with(mask_of):
    def function(q):
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask_of(q.shape[-2], q))

    return function


def causal_by_index(n, q):
    index = torch.arange(n, device=q.device)
    return (index[None, None, None, :] <= index[None, None, :, None]).expand(2, 1, n, n)


@pytest.mark.parametrize(
    "mask_of, expected",
    [
        (causal_by_index, True),
        (lambda n, q: torch.ones(n, n, dtype=torch.bool).tril(), True),
        (lambda n, q: torch.full((n, n), -math.inf).triu(1), True),
        (lambda n, q: torch.ones(n, n, dtype=torch.bool), False),
        (lambda n, q: torch.ones(n, n, dtype=torch.bool).tril(1), None),
        (lambda n, q: torch.zeros(n, n).tril(), False),
        (lambda n, q: torch.ones(n, n).tril(), None),
        (lambda n, q: q[0, 0, :, :1] > 0, None),
        (lambda n, q: torch.rand(n, n) > 0.0, None),
    ],
)
def test_masks(mask_of, expected):
    q = torch.randn(2, 2, 5, 4)
    graph = captured(attention_with(mask_of), q)
    assert name_masks(graph) == int(expected is not None)
    (node,) = [n for n in graph.nodes if (op := operation(n)) is not None and op.name == "attention"]
    _, _, _, mask, _, is_causal, *_ = operation(node).arguments
    assert (mask is None) == (expected is not None) and is_causal == bool(expected)


def test_a_mask_that_does_not_fit():
    """PyTorch's attention finds a mask of more dimensions than scores have where it runs, not where it is captured."""
    mask_of = lambda n, q: torch.ones((1, n, n) if q.dim() == 2 else (1, 1, n, n), dtype=torch.bool)  # noqa: E731
    q = torch.randn(2, 5, 4)  # one batch: its mask has that of the batch
    assert name_masks(captured(attention_with(mask_of), q)) == 1
    torch.testing.assert_close(onepass.fuse(attention_with(mask_of))(q), attention_with(mask_of)(q))

    def unused(q):
        attention_with(mask_of)(q)
        return q * 2.0

    q = torch.randn(5, 4)
    for function in (unused, attention_with(mask_of)):
        for way in (function, onepass.fuse(function)):
            with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"), torch.no_grad():
                way(q)


def test_place():
    """A line stands behind what it takes, and before what asks for its results."""

    def function(x, r):
        y = F.relu(x)
        z = torch.cumsum(y, 0)
        return F.rms_norm(y + torch.cumsum(r, 0), (8,)), z

    graph = captured(function, X, R)
    for chain in chains(graph, lambda chain: float(len(chain.nodes))):
        assert Order(graph).place(chain) is not None


def split_stack(x, norm, w, b):
    pieces = [torch.tanh(norm(piece.view(4, 8))) for piece in torch.split(x, 32)]
    return F.relu(F.linear(torch.stack(pieces), w, b))


def test_a_loop_over_pieces(every_line):
    norm = torch.nn.LayerNorm(8, eps=0.0, elementwise_affine=False)
    x, w, b = torch.randn(96), torch.randn(1, 8), torch.randn(1)
    found = agrees(lambda x, w, b: split_stack(x, norm, w, b), x, w, b)
    assert found in (["layer_norm(0.0) | tanh | linear | bias | relu"], ["layer_norm(0.0) | tanh", "bias | relu"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stack([F.gelu(p) for p in x.unbind()]),
        lambda x: torch.stack([F.gelu(p) * 2.0 for p in x.chunk(3)]),
        lambda x: torch.stack([F.layer_norm(p, (8,)) for p in torch.unbind(x, 1)]),
        lambda x: torch.stack([F.gelu(p) for p in x.unbind()][::-1]),
        lambda x: torch.stack([F.gelu(p) if i else F.relu(p) for i, p in enumerate(x.unbind())]),
        lambda x: torch.stack([F.gelu(p) for p in x.unbind()], 1),
        lambda x: torch.stack([torch.softmax(p, -1) for p in torch.split(x, 2)]),
        lambda x: torch.stack([torch.softmax(p, 0) for p in torch.split(x, 2)]),
        lambda x: torch.stack([torch.softmax(p, 1) for p in x.unbind()]),
    ],
)
def test_loops_over_pieces(function, every_line):
    agrees(function, torch.randn(6, 4, 8))


def test_modulation_and_gates(every_line):
    """As diffusion transformers write them."""
    x, scale, shift, gate = torch.randn(2, 5, 8), *torch.randn(3, 2, 8)

    def modulated(x, scale, shift):
        return F.layer_norm(x, (8,), eps=1e-6) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)

    assert agrees(modulated, x, scale, shift) == ["layer_norm(1e-06) | scale(1.0) | add"]
    found = agrees(lambda x, r, gate: r + gate.unsqueeze(1) * x, x, x.clone(), gate)
    assert found == ["scale | add"]
    found = agrees(lambda x, gate, w: F.linear(gate.unsqueeze(1) * x, w), x, gate, torch.randn(8, 8))
    assert found == ["scale"]  # a line with `linear` has columns for all rows

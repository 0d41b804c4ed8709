"""What fuse must not change, whatever a line could say: effects, masks of dropout, gradients, strides, captures.

Programs at random are in test_fuse_fuzz.py; here is one of each kind of fault that there was."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import onepass
from onepass.rewrite import attention as attentions
from onepass.rewrite import fuse as fusing

R = torch.randn


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Whatever a line can say becomes one."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))
    torch._dynamo.reset()


def runs(call, tensors):
    """Results, the inputs afterwards, and gradients of leaves and of results that are returned on the way."""
    leaves = [t.clone().requires_grad_(t.is_floating_point() and t.requires_grad) for t in tensors]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    found = [*results, *leaves]
    wanted = [t for t in (*leaves, *results) if t.requires_grad]
    if wanted:
        total = sum((r * torch.linspace(-1, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in results)
        found += torch.autograd.grad(total, wanted, allow_unused=True)
    return found


def agrees(function, *tensors):
    """The lines with which results, inputs, gradients and strides are those of eager."""
    fused = onepass.fuse(function)
    for theirs, ours in zip(runs(function, tensors), runs(fused, tensors), strict=True):
        assert (theirs is None) == (ours is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, check_stride=True, equal_nan=True)
    return [f.line for f in onepass.report(fused).lines]


def grad(*shape):
    return R(*shape).requires_grad_()


def causal(q):
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def counted(q, s):
    s.add_(1.0)
    return causal(q)


def copied(q, s):
    s.index_copy_(0, torch.tensor([1]), torch.full((1,), 5.0))
    s.clamp_(max=2.0).masked_fill_(s > 1.5, 7.0)
    return causal(q)


def stacked(q, s):
    s += 1.0
    return torch.stack([F.gelu(p) for p in q.unbind()])


@pytest.mark.parametrize("function", [counted, copied, stacked])
def test_calls_with_effects_stay(function):
    agrees(function, R(2, 2, 8, 4), torch.zeros(3))


def test_buffers_are_counted():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, q):
            self.calls.add_(1.0)
            return self.norm(causal(q).flatten(0, 1).mT).mT

    model = Model()
    other = copy.deepcopy(model)
    onepass.fuse(model)
    q = R(2, 2, 8, 4)
    torch.testing.assert_close(model(q), other(q))
    for ours, theirs in zip(model.state_dict().items(), other.state_dict().items()):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1])


class Blocks(nn.Module):
    """A chain within a checkpointed block, within another."""

    def __init__(self, nested):
        super().__init__()
        self.nested = nested

    def forward(self, x):
        def inner(t):
            return F.dropout(F.gelu(t * 0.5), 0.5)

        def outer(t):
            return checkpoint(inner, t + 1.0, use_reentrant=False) * 3.0

        return checkpoint(outer if self.nested else inner, x, use_reentrant=False)


@pytest.mark.parametrize("then", ["eager", "inductor"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dry_run", [False, True])
def test_checkpointed_blocks(nested, then, dry_run):
    """Their lines are found, and backward draws the masks of forward."""
    if then == "inductor" and (dry_run or nested):
        pytest.skip("the same graphs")
    model = onepass.fuse(Blocks(nested), then=then, dry_run=dry_run)
    x = grad(64, 64)
    y = model(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g != 0, y != 0) and 0.4 < (y != 0).float().mean() < 0.6
    assert any("gelu | dropout(0.5)" in f.line for f in onepass.report(model).lines)


def test_checkpoints_draw_as_often_as_eager():
    """Random numbers behind a checkpointed block are those of eager."""

    def function(x):
        y = checkpoint(lambda t: torch.rand_like(t) * t, x, use_reentrant=False)
        return y, torch.rand_like(y)

    fused, x = onepass.fuse(function), grad(4, 8)
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    for ours, theirs in zip(fused(x), expected):
        assert torch.equal(ours, theirs)
    ours, theirs = (torch.autograd.grad(call(x)[0].sum(), x)[0] for call in (fused, function))
    assert ours.shape == theirs.shape


def test_draws_before_a_line_are_those_of_eager():
    def function(x):
        h = F.gelu(x * 2.0)
        return torch.rand(4), F.dropout(h, 0.5)

    fused, x = onepass.fuse(function), R(4, 8)
    torch.manual_seed(3)
    expected, _ = function(x)
    torch.manual_seed(3)
    found, _ = fused(x)
    assert torch.equal(found, expected)
    assert [f.line for f in onepass.report(fused).lines] == ["mul(2.0) | gelu | dropout(0.5)"]


def test_names_stay():
    def function(x, scale: float = 2.0):
        """Its own."""
        return x * scale

    fused = onepass.fuse(function)
    assert fused.__name__ == "function" and fused.__doc__ == "Its own."
    assert list(inspect.signature(fused).parameters) == ["x", "scale"]
    assert onepass.unfuse(fused) is function


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


def test_pieces_are_read_when_they_were():
    def function(x):
        pieces = x.unbind()
        y = torch.stack([F.gelu(p) for p in pieces])
        x.add_(1.0)
        return y, torch.stack([F.gelu(p) for p in pieces])

    agrees(function, R(4, 8))


def overwriting(how):
    def function(x, r):
        t = x + r
        y = how(t)
        return y * 2.0 + t

    return function


@pytest.mark.parametrize(
    "how",
    [
        lambda t: F.leaky_relu(t, 0.2, True),
        lambda t: F.elu(t, inplace=True),
        lambda t: F.selu(t, True),
        lambda t: F.hardtanh(t, -1.0, 1.0, True),
        lambda t: torch.relu_(t),
        lambda t: F.threshold_(t, 0.0, 0.5),
        lambda t: (torch._foreach_mul_([t], 3.0), t)[1],
        lambda t: torch.mul(t, 3.0, out=t),
        lambda t: t.view(-1).mul_(3.0).view(t.shape),
        lambda t: t.detach().mul_(3.0),
        lambda t: t.t().sigmoid_().t(),
        lambda t: t.copy_(t * 3.0),
        lambda t: t.__setitem__(slice(1, 2), 0.0) or t,
        lambda t: torch.nn.init.zeros_(t),
        lambda t: t.index_fill_(0, torch.tensor([1]), 4.0),
    ],
)
def test_overwriting_is_seen(how):
    agrees(overwriting(how), R(4, 8), R(4, 8))


@pytest.mark.parametrize(
    "overwrites", [lambda y, m: y.relu_(), lambda y, m: y.narrow(-1, 0, 1).zero_(), lambda y, m: m.view(-1).add_(1.0)]
)
def test_attention_whose_tensors_are_overwritten(overwrites, monkeypatch):
    """PyTorch's written-out attention saves neither its mask nor its result."""
    monkeypatch.setattr(attentions, "choose", lambda call: "onepass")

    def function(q, m, of_mask):
        m = m + of_mask
        y = F.scaled_dot_product_attention(q, q, q, m)
        overwrites(y, m)
        return y * 1.0

    with sdpa_kernel(SDPBackend.MATH):
        assert "scaled_dot_product_attention" not in agrees(function, grad(2, 8, 8), R(8, 8), R(8, 8))


def test_captures():
    """Lengths that change are captured as often as Dynamo alone does."""

    def function(s, m, w):
        x = F.layer_norm(F.softmax(s * 0.125 + m, -1) @ s, s.shape[-1:])
        return F.linear(F.gelu(x + m), w[:, : s.shape[-1]])

    counts = []
    for call in (onepass.fuse(function), torch.compile(function, backend=(alone := Count()))):
        torch._dynamo.reset()
        for t in range(20, 27):
            s, m, w = R(2, 3, t, t), R(2, 1, t, t), R(8, 32)
            torch.testing.assert_close(call(s, m, w), function(s, m, w), rtol=1e-4, atol=1e-5)
        counts.append(len(onepass.report(call).graphs) if not counts else alone.graphs)
    assert counts[0] == counts[1] <= 2


class Count:
    def __init__(self):
        self.graphs = 0

    def __call__(self, gm, _):
        self.graphs += 1
        return gm.forward


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


def test_memory_is_shared_as_before():
    """A result that was a tensor of the caller's, or two names of one, is that."""
    x = R(4, 8)
    same = onepass.fuse(lambda x: (F.dropout(x, 0.5, False), x.contiguous(), x.to(torch.float32)))
    assert all(r.data_ptr() == x.data_ptr() for r in same(x))
    first, second = onepass.fuse(lambda x: ((y := F.gelu(x * 2.0)), y.contiguous()))(x)
    assert first.data_ptr() == second.data_ptr()
    (y,) = onepass.fuse(lambda x: (torch.stack(x.unbind()),))(x)
    assert y.data_ptr() != x.data_ptr()


def test_casts_that_lose_something_stay():
    """A value that is rounded on the way is rounded: it may overflow, too."""
    assert agrees(lambda x: torch.tanh((x * 1e6).half().float()), R(4, 8)) == ["mul(1000000.0)", "tanh"]
    assert agrees(lambda x: F.gelu((x * 2.0).to(torch.float32).double()), R(4, 8).double()) == ["mul(2.0)", "gelu"]
    x = R(4, 8).bfloat16()
    assert agrees(lambda x: F.gelu(x.float() * 2.0).to(torch.bfloat16), x) == ["mul(2.0) | gelu"]


def test_constants_that_are_near_a_formula_s():
    for slope in (1.701, 1.7021):
        assert "quick_gelu" not in agrees(lambda x, slope=slope: x * torch.sigmoid(slope * x), R(4, 8))


def test_nested_tensors_are_left_alone():
    jagged = torch.nested.nested_tensor([R(3, 8), R(5, 8)], layout=torch.jagged)

    def function(x):
        return F.gelu(x * 2.0)

    found = onepass.fuse(function)(jagged)
    assert torch.equal(found.values(), function(jagged).values())


def test_hooks_that_come_later_run():
    model, seen, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), [], grad(4, 8)
    onepass.fuse(model)
    model(x)
    for add in (model[1].register_forward_hook, model[2].register_forward_pre_hook, model.register_forward_hook):
        handle = add(lambda *_: seen.append(1))
        for expected in (1, 2):
            model(x)
            assert len(seen) == expected
        handle.remove()
        model(x)
        assert len(seen) == 2
        seen.clear()
    handle = model[0].register_full_backward_hook(lambda *_: seen.append(1))
    model(x).sum().backward()
    assert len(seen) == 1
    handle.remove()
    captures = len(onepass.report(model).graphs)
    model(x)
    assert len(onepass.report(model).graphs) == captures  # the first capture serves again


def test_copies_are_not_fused():
    model, x = onepass.fuse(nn.Sequential(nn.LayerNorm(8), nn.ReLU())), R(4, 8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(x), model(x))
        with pytest.raises(ValueError, match="a copy of a fused model is not: call fuse"):
            onepass.report(other)
        onepass.fuse(other)(x)
        assert onepass.report(other).lines


def test_what_compile_has_put_there_comes_back():
    model = nn.Sequential(nn.LayerNorm(8), nn.ReLU())
    model.compile(backend="eager")
    before = model._compiled_call_impl
    onepass.fuse(onepass.fuse(model))
    assert model._compiled_call_impl is not before
    assert onepass.unfuse(model)._compiled_call_impl is before


def test_mode():
    model, x = nn.Sequential(nn.LayerNorm(8), nn.ReLU()), R(4, 8)
    for call in (
        onepass.fuse(copy.deepcopy(model), then="inductor", mode="max-autotune-no-cudagraphs"),
        torch.compile(model, backend="onepass", mode="default"),
    ):
        torch.testing.assert_close(call(x), model(x))
    with pytest.raises(ValueError, match="expected mode to be one of .*max-autotune.*, but got 'fast'"):
        onepass.fuse(model, then="inductor", mode="fast")
    with pytest.raises(ValueError, match="expected mode to be None where then='eager', but got 'reduce-overhead'"):
        onepass.fuse(model, mode="reduce-overhead")


@pytest.mark.parametrize("first", ["apart", "together"])
@pytest.mark.parametrize("dynamic", [False, None])
def test_inputs_that_share_memory_in_one_call_and_not_in_another(first, dynamic):
    """Whether the line may be computed behind the write is another question in each."""

    def function(x, y):
        t = x * 2.0
        y.add_(1.0)
        return F.gelu(t + y * 3.0)

    fused = onepass.fuse(function, dynamic=dynamic)
    array = R(4, 8).numpy()

    def inputs():
        x = R(4, 8)
        whole = R(8, 8)
        apart = [(R(4, 8), R(4, 8)), (whole[:4], whole[4:])]
        together = [
            (x, x.view(4, 8)),
            (x, x),
            (torch.from_numpy(array), torch.from_numpy(array)),
            (whole[:4], whole[2:6]),
        ]
        return apart + together if first == "apart" else together + apart

    torch.manual_seed(0)
    ours = inputs()
    torch.manual_seed(0)
    theirs = inputs()
    for a, b in zip(ours, theirs):
        if isinstance(b[0], torch.Tensor) and b[0].data_ptr() == a[0].data_ptr():  # from_numpy: once for both
            before = b[0].clone()
            expected = function(*b)
            b[0].copy_(before)
            torch.testing.assert_close(fused(*a), expected)
        else:
            torch.testing.assert_close(fused(*a), function(*b))
            torch.testing.assert_close(a[1], b[1])
    assert any(f.line for f in onepass.report(fused).lines)


def test_buffers_that_are_written_leave_lines_alone():
    """A counter is no other parameter's memory: norms are found around it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            y = self.norm(x + 1.0 * x)
            self.calls += 1.0
            return y

    model = onepass.fuse(Model())
    for _ in range(3):
        model(R(4, 8))
    assert model.calls == 3 and len(onepass.report(model).graphs) == 1
    assert any("layer_norm" in f.line for f in onepass.report(model).lines)


def test_rotary_embedding_by_keywords():
    def function(x, cos, sin):
        return x * cos + torch.cat(tensors=(-x[..., 4:], x[..., :4]), dim=-1) * sin

    assert agrees(function, grad(3, 8), R(8), R(8)) == ["rope"]


def test_sizes_that_depend_on_numbers():
    def function(x):
        return F.layer_norm(F.gelu(x[x[:, 0] > 0] * 2.0), (8,))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fused, x = onepass.fuse(function), R(12, 8)
        torch.testing.assert_close(fused(x), function(x))


@pytest.mark.parametrize("other", [torch.mul, torch.add])
def test_long_chains(other, monkeypatch):
    """Of more operators than Python's stack is deep; looked at, not compiled."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: 0.0)

    def function(x):
        y = x
        for _ in range(400):
            y = other(y, x)
        return y

    fused, x = onepass.fuse(function), torch.full((4, 8), 1.0, dtype=torch.float64)
    torch.testing.assert_close(fused(x), function(x))


def test_devices_that_lines_do_not_run_on():
    model = onepass.fuse(nn.Sequential(nn.LayerNorm(8, device="meta"), nn.GELU()))
    assert model(R(4, 8, device="meta")).device.type == "meta"
    assert not onepass.report(model).lines


@pytest.mark.parametrize("number", [1e-40, 1e39, 1e-39, 0.0])
def test_divisions_whose_inverse_is_no_number(number):
    for x in (torch.zeros(4, 8), torch.full((4, 8), 1e38), R(4, 8).double()):
        agrees(lambda x: torch.tanh(x / number), x)


def test_shapes_that_change_behind_a_block():
    """Dynamo changes the one tensor that stands for the block's result."""

    def function(x, w):
        y = checkpoint(lambda x: F.layer_norm(x + 1.0, (8,)), x, use_reentrant=False)
        y.unsqueeze_(0)
        return y * w

    agrees(function, grad(6, 8), R(8))


@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_rows_of_one_dimension_with_themselves(shape):
    """An operand that is the same tensor is a column, the row is none."""
    assert agrees(lambda x: (F.gelu(x) * x).view(shape), grad(8))


def test_graphs_in_no_order_stay():
    gm = torch.fx.symbolic_trace(lambda x, y: F.gelu(x + 1.0) * y)
    last = next(node for node in gm.graph.nodes if node.name == "y")
    next(node for node in gm.graph.nodes if node.target == "output").prepend(last)
    rewriter = fusing.Rewriter()
    assert rewriter(gm, []) == gm.forward and not rewriter.report.lines


def test_what_a_checkpointed_block_overwrites():
    """A counter is changed by each run of the block, as in eager."""

    def function(x, s):
        def block(t):
            s.add_(1.0)
            return F.gelu(t * 2.0)

        return checkpoint(block, x, use_reentrant=False)

    counts = []
    for call in (function, onepass.fuse(function)):
        x, s = grad(4, 8), torch.zeros(())
        call(x, s).sum().backward()
        counts.append(s.item())
    assert counts[0] == counts[1] == 2.0


def test_strides_of_dimensions_of_one():
    """They say whether PyTorch takes a tensor for channels-last, and then what it gives is, too."""

    def function(x):
        return torch.stack([F.silu(part) for part in torch.hsplit(F.gelu(x), 2)], 1)

    x = R(2, 2, 8, 4).contiguous(memory_format=torch.channels_last)
    fused = onepass.fuse(function)
    for taken in (x, x.requires_grad_()):
        assert fused(taken).stride() == function(taken).stride() == (64, 1, 64, 8, 2)
    assert onepass.report(fused).lines


def test_what_a_checkpointed_block_within_another_overwrites():
    """Backward computes it anew in the outer block, and from that what the inner block had before it overwrote it."""

    def function(x, w):
        def inner(t):
            t *= w

        def outer(x):
            t = F.softmax(F.gelu(x * 2.0) * x, -1)
            checkpoint(inner, t, use_reentrant=False)
            return t

        return checkpoint(outer, x, use_reentrant=False)

    assert agrees(function, grad(3, 4, 6), grad(3, 4, 6))


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


def test_many_overwriting_operators():
    def function(x):
        y = x * 1.0
        for _ in range(600):
            y = y.mul_(1.001)
        return y

    fused, x = onepass.fuse(function), R(2, 4)
    torch.testing.assert_close(fused(x), function(x))

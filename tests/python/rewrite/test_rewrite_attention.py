"""What attention is given in captured graphs: what models copy for it, it takes as it lay before."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import onepass
from attended import agree, expanded, heads, joined
from captures import captured
from onepass.graph.operations import leave_apart, operation
from onepass.rewrite import fuse as fusing
from onepass.rewrite.attention import drop_second_copies, fold_scales, take_before_copies


def attend(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).contiguous().flatten(2) * 2.0


def grouped(q, k, v):
    return attend(heads(q, 4), expanded(heads(k, 2), 2), expanded(heads(v, 2), 2), is_causal=True)


def unsqueezed(q, k, v):
    k, v = (expanded(heads(t, 2), 2, lambda x: x.unsqueeze(2)) for t in (k, v))
    return attend(heads(q, 4).contiguous(), k.contiguous(), v, is_causal=True)


def of_one(q, k, v):
    return attend(heads(q, 4), expanded(k.unsqueeze(1), 4), expanded(v.unsqueeze(1), 4))


def made_contiguous(q, k, v):
    return attend(*(heads(t, 2).contiguous() for t in (q[..., :8], k, v)))


def behind_an_empty_cache(q, k, v):
    none = torch.tensor([], dtype=q.dtype)
    k, v = (torch.cat([none, heads(t, 2).contiguous()], dim=-2) for t in (k, v))
    return attend(heads(q[..., :8], 2), k, v)


def given(k=8):
    torch.manual_seed(0)
    return [torch.randn(2, 6, n).requires_grad_() for n in (16, k, k)]


def calls(function, *inputs):
    """Names of what the graph calls once attention takes what it may, and the attention's arguments."""
    graph = captured(function, *inputs)
    leave_apart(graph)
    take_before_copies(graph)
    drop_second_copies(graph)
    graph.lint()
    found = [node for node in graph.nodes if (op := operation(node)) is not None and op.name == "attention"]
    names = [getattr(node.target, "__name__", node.target) for node in graph.nodes if node.op.startswith("call")]
    return names, [operation(node).arguments for node in found]


@pytest.mark.parametrize("function", [grouped, unsqueezed, of_one])
def test_repeated_heads(function):
    tensors = given(4 if function is of_one else 8)
    names, [(_, _, _, _, _, _, _, is_grouped)] = calls(function, *tensors)
    assert is_grouped and not {"expand", "reshape", "cat"} & set(names)
    assert names.count("contiguous") == 1  # of the result, which reads nothing where it lies so
    agree(function, tensors)


@pytest.mark.parametrize("function", [made_contiguous, behind_an_empty_cache])
def test_copies(function):
    names, _ = calls(function, *given())
    assert names.count("contiguous") == 1 and "cat" not in names
    agree(function, given())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_repeated_heads_on_cuda():
    """PyTorch's fast engines know groups of heads; that for float32 does not, and none of them with a mask."""
    tensors = [torch.randn(2, 64, n, device="cuda").requires_grad_() for n in (128, 64, 64)]
    short = [t.detach().bfloat16().requires_grad_() for t in tensors]

    def of_32(q, k, v, **options):
        k, v = (expanded(heads(t, 2), 2) for t in (k, v))
        return attend(heads(q, 4), k, v, **options)

    def masked(q, k, v):
        return of_32(q, k, v, attn_mask=torch.ones(64, 64, dtype=torch.bool, device="cuda").tril(3))

    for function, inputs, expected in ((of_32, short, True), (of_32, tensors, False), (masked, short, False)):
        _, [(_, _, _, _, _, _, _, is_grouped)] = calls(function, *inputs)
        assert is_grouped is expected
        torch._dynamo.reset()
        result, exact = onepass.fuse(function)(*inputs), function(*(t.detach().float() for t in inputs))
        torch.testing.assert_close(result.float(), exact, rtol=3e-2, atol=3e-2)
        ways = onepass.fuse(function), function
        gradients = (torch.autograd.grad(way(*inputs).float().square().sum(), inputs) for way in ways)
        for found, wanted in zip(*gradients):
            torch.testing.assert_close(found, wanted, rtol=5e-2, atol=5e-2)


def with_hook(q, k, v):
    k = expanded(heads(k, 2), 2)
    k.register_hook(lambda g: g * 2)
    return attend(heads(q, 4), k, expanded(heads(v, 2), 2))


def returned(q, k, v):
    k, v = (expanded(heads(t, 2), 2) for t in (k, v))
    return attend(heads(q, 4), k, v), k, v


def views_returned(q, k, v):
    apart = heads(k, 2)[:, :, None]
    k = apart.expand(2, 2, 2, 6, 4)
    result = attend(heads(q, 4), k.reshape(2, 4, 6, 4), expanded(heads(v, 2), 2))
    return result, apart


def without_gradients(q, k, v):
    k = heads(k, 2)
    with torch.no_grad():
        repeated = expanded(k, 2)
    return attend(heads(q, 4), repeated, expanded(heads(v, 2), 2)) + k.mean()


def overwritten_before(q, k, v):
    k, v = (expanded(heads(t, 2), 2) for t in (k, v))
    return attend(heads(q, 4), k.mul_(2.0), v)


def overwritten_since(q, k, v):
    k = k * 1.0
    repeated = expanded(heads(k, 2), 2)
    result = attend(heads(q, 4), repeated, expanded(heads(v, 2), 2))
    with torch.no_grad():
        k.zero_()
    return result, k


def one_of_them(q, k, v):
    return attend(heads(q, 4), expanded(heads(k, 2), 2), heads(torch.cat([v, v], -1), 4))


def in_another_order(q, k, v):
    k, v = (heads(t, 2)[:, None].expand(2, 2, 2, 6, 4).reshape(2, 4, 6, 4) for t in (k, v))
    return attend(heads(q, 4), k, v)


def columns_first(q, k, v):
    return attend(*(heads(t, 2).mT.contiguous().mT.contiguous() for t in (q[..., :8], k, v)))


def half_full(q, k, v):
    k, v = (torch.cat([heads(t, 2), heads(t, 2)], dim=-2) for t in (k, v))
    return attend(heads(q[..., :8], 2), k, v)


@pytest.mark.parametrize(
    "function",
    [
        *(with_hook, returned, views_returned, overwritten_before, overwritten_since),
        *(one_of_them, in_another_order, half_full, without_gradients),
    ],
)
def test_what_stays_as_it_is(function):
    """Where somebody sees the copy or its gradient, or another tensor was copied."""
    try:
        _, [(_, _, _, _, _, _, _, is_grouped)] = calls(function, *given())
        assert not is_grouped
    except ValueError:  # a graph that Dynamo breaks at a hook
        assert function is with_hook
    agree(function, given())


def cached(q, k, v):
    none = torch.tensor([], dtype=q.dtype)
    k, v = (torch.cat([none, heads(t, 2).contiguous()], dim=-2) for t in (k, v))
    return attend(heads(q[..., :8], 2), k, v), k, v


def test_a_cache_that_is_given_is_copied_once():
    """Attention takes what is given, whose gradient somebody may ask for."""
    names, [(_, key, value, *_)] = calls(cached, *given())
    assert names.count("contiguous") == 3 and "cat" not in names and "tensor" not in names
    assert [operation(node).name for node in (key, value)] == ["same", "same"]
    agree(cached, given())
    outcomes = []
    for way in (cached, onepass.fuse(cached)):
        result, k, v = way(*given())
        assert not k._is_view() and k.is_contiguous() and not v._is_view()
        outcomes.append(torch.autograd.grad(result.square().sum(), (k, v)))
        with torch.no_grad():
            k.zero_()
    for theirs, ours in zip(*outcomes):
        torch.testing.assert_close(ours, theirs)


def looked_at(q, k, v):
    copy = heads(k, 2).contiguous()
    return q, torch.cat([k.new_empty(0), copy], dim=-2), copy


def of_a_row(q, k, v):  # contiguous already: a view
    return q, torch.cat([k.new_empty(0), heads(k, 1).contiguous()], dim=-2)


def lying_otherwise(q, k, v):
    return q, torch.cat([k.new_empty(0), heads(k, 2)], dim=-2)


def needing_a_gradient(q, k, v):
    return q, torch.cat([v[:0, 0, 0], heads(k, 2).contiguous()], dim=-2)


def in_another_mode(q, k, v):
    copy = heads(k, 2).contiguous()
    with torch.no_grad():
        return q, torch.cat([k.new_empty(0), copy], dim=-2)


def of_a_result(q, k, v):  # backward reads what exp gives, which the caller may overwrite where it is given
    return q, torch.cat([k.new_empty(0), k.exp()], dim=-1)


@pytest.mark.parametrize(
    "function", [looked_at, of_a_row, lying_otherwise, needing_a_gradient, in_another_mode, of_a_result]
)
def test_tensors_that_cat_copies(function):
    graph = captured(function, *given())
    leave_apart(graph)
    drop_second_copies(graph)
    assert any(node.target is torch.cat for node in graph.nodes)
    tensors = given()
    _, joined, *others = onepass.fuse(function)(*tensors)
    assert not joined._is_view()
    with torch.no_grad():
        joined.zero_()
    assert all(tensor.abs().sum() > 0 for tensor in (*tensors, *others))
    (joined.sum() + sum(t.sum() for t in tensors)).backward()


def with_scaled(scale, given=1.0, **options):
    """Attention of queries that a model has multiplied, as Whisper and BART do it."""

    def function(q, k, v):
        return attend(heads(scale(q), 2), heads(k, 2), heads(v, 2), scale=given, **options)

    return function


def scales(function, *inputs):
    graph = captured(function, *inputs)
    leave_apart(graph)
    fold_scales(graph)
    graph.lint()
    found = [op.arguments[6] for node in graph.nodes if (op := operation(node)) is not None and op.name == "attention"]
    return found, [node.target for node in graph.nodes].count(operator.mul)


@pytest.mark.parametrize(
    ("function", "scale"),
    [
        (with_scaled(lambda q: q * 0.3, is_causal=True), 0.3),
        (with_scaled(lambda q: 0.25 * q, given=None), 0.125),
        (with_scaled(lambda q: (q / 4).contiguous(), given=0.5), 0.125),
    ],
)
def test_scaled_queries(function, scale):
    """The number becomes part of attention's scale, exactly where it is a power of two."""
    q, k, v = torch.randn(2, 6, 8).requires_grad_(), *given()[1:]
    found, products = scales(function, q, k, v)
    assert found == [pytest.approx(scale)] and products == 1  # that behind attention
    agree(function, (q, k, v))


def scaled_and_seen(q, k, v):
    q = q * 0.5
    return attend(heads(q, 2), heads(k, 2), heads(v, 2), scale=1.0), q


def overwritten_since_scaled(q, k, v):
    q = q.tanh()
    scaled = q * 0.5
    with torch.no_grad():
        q.zero_()
    return attend(heads(scaled, 2), heads(k, 2), heads(v, 2), scale=1.0)


def scaled_in_inference_mode(q, k, v):
    with torch.inference_mode():
        s = q * 0.5
    return attend(heads(s, 2), heads(k.detach(), 2), heads(v.detach(), 2), scale=1.0)


def test_queries_scaled_in_inference_mode_have_no_gradient():
    assert not onepass.fuse(scaled_in_inference_mode)(torch.randn(2, 6, 8).requires_grad_(), *given()[1:]).requires_grad


def test_queries_without_features():
    q = torch.randn(2, 2, 5, 0)
    assert onepass.fuse(lambda q: F.scaled_dot_product_attention(q * 0.5, q.cos(), q))(q).shape == q.shape


@pytest.mark.parametrize("joins", [False, True])
def test_sources_that_a_caller_overwrites(joins):
    """PyTorch saves the copy."""

    def function(q, k, v):
        source = k + 1
        keys = joined(heads(source, 2)) if joins else heads(k, 2)
        return attend(heads(q[..., :8] if joins else source * 0.5, 2), keys, heads(v, 2)), source

    for way in (function, onepass.fuse(function)):
        result, source = way(*given())
        with torch.no_grad():
            source.zero_()
        result.sum().backward()


def scaled_keys_too(q, k, v):
    q = heads(q * 0.5, 2)
    return attend(q, q, heads(v, 2), scale=1.0)


@pytest.mark.parametrize(
    "function",
    [
        *(scaled_and_seen, overwritten_since_scaled, lambda q, k, v: scaled_keys_too(q + k.mean(), k, v)),
        with_scaled(lambda q: q * -1.0),
        with_scaled(lambda q: q * torch.full((8,), 0.5)),
        with_scaled(lambda q: torch.cat([q, q], -1)[..., :8] * 0.5),
    ],
)
def test_scaled_queries_that_stay(function):
    q, k, v = torch.randn(2, 6, 8).requires_grad_(), *given()[1:]
    found, products = scales(function, q, k, v)
    assert found == [1.0] and products == 2
    if function is not overwritten_since_scaled:  # which eager refuses to differentiate
        agree(function, (q, k, v))


def test_rows_stay_one_number_behind_the_other():
    """No engine takes others."""
    _, [(query, *_)] = calls(columns_first, *given())
    assert query.meta["example_value"].stride(-1) == 1
    agree(columns_first, given())


def test_results_that_are_seen_lie_as_they_did():
    """Attention's result lies as queries do."""

    def function(q, k, v):
        return F.scaled_dot_product_attention(*(heads(t, 2).contiguous() for t in (q[..., :8], k, v)))

    agree(function, given())

    def both(q, k, v):
        result = F.scaled_dot_product_attention(*(heads(t, 2).contiguous() for t in (q[..., :8], k, v)))
        return result.transpose(1, 2), result.transpose(1, 2).contiguous()

    torch._dynamo.reset()
    view, copy = onepass.fuse(both)(*given())
    assert view.data_ptr() != copy.data_ptr()
    loss = onepass.fuse(lambda *t: both(*t)[1])(*given())
    loss.add_(1.0)  # it is no view of what backward reads
    loss.sum().backward()


def written_out(q, k, v):
    q, k, v = (heads(t, 2) for t in (q, k, v))
    return ((q @ k.transpose(-2, -1)) * 0.3).softmax(-1) @ v


def test_products_that_are_a_line_lie_as_they_did(every_line):
    """Attention's result lies as queries do, that of a product is contiguous: nobody sees it who copies it, or reads
    its numbers alone."""

    def joined(*given):
        return written_out(*given).transpose(1, 2).contiguous().view(2, 6, 8) * 2.0

    def viewed(*given):
        return written_out(*given).view(4, 6, 4) * 2.0

    def overwritten(*given):
        result = written_out(*given).transpose(1, 2).contiguous()
        return result.mul_(2.0), result + 1.0

    for function, copies in ((joined, 0), (written_out, 1), (viewed, 1), (overwritten, 1)):
        torch._dynamo.reset()
        fused, inputs = onepass.fuse(function), [t[..., :8].detach().requires_grad_() for t in given()]
        results = [fused(*inputs), function(*inputs)]
        ours, theirs = ([*r] if isinstance(r, tuple) else [r] for r in results)
        assert any("values" in found.line for found in onepass.report(fused).lines)
        for mine, its in zip(ours, theirs, strict=True):
            assert mine.stride() == its.stride() and mine._is_view() == its._is_view()
            torch.testing.assert_close(mine, its)
        upstream = [torch.randn_like(t) for t in theirs]
        gradients = [torch.autograd.grad(r, inputs, upstream) for r in (ours, theirs)]
        torch.testing.assert_close(*gradients)
        graph = captured(function, *inputs)
        fusing.rewrite(graph.owning_module)
        copied = [n.args[0] for n in graph.nodes if n.target == "contiguous"]
        assert sum(node.target is onepass.fused for node in copied) == copies


def test_results_that_are_given_are_no_views():
    def repeated(q, k, v):
        k, v = (expanded(heads(t, 2), 2) for t in (k, v))
        return F.scaled_dot_product_attention(heads(q, 4), k, v)

    def shared(q, k, v):
        return F.scaled_dot_product_attention(heads(q, 4), heads(k, 2), heads(v, 2), enable_gqa=True)

    for function in (repeated, shared):
        torch._dynamo.reset()
        result = onepass.fuse(function)(*given())
        assert not result._is_view()
        torch.testing.assert_close(result, function(*given()))


def test_sizes_that_change():
    fused = torch.compile(grouped, backend=fusing.Rewriter(), dynamic=True)
    torch._dynamo.reset()
    for length in (6, 9, 12):
        tensors = [torch.randn(2, length, n).requires_grad_() for n in (16, 8, 8)]
        torch.testing.assert_close(fused(*tensors), grouped(*tensors), rtol=2e-4, atol=2e-5)


def norm(x, w):
    """Gemma's, which keeps its weights 16 bits wide and computes with float32 ones."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + w.float())).type_as(x)


def operands(function, *inputs):
    graph = captured(function, *inputs)
    fusing.rewrite(graph.owning_module)
    return [[n.meta["example_value"].dtype for n in c.args[1:]] for c in graph.nodes if "fused" in str(c.target)], graph


def test_columns_as_they_are_stored(every_line):
    x, w = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    [dtypes], graph = operands(norm, *leaves)
    assert dtypes == [torch.bfloat16, torch.bfloat16] and not [n for n in graph.nodes if n.target == "float"]
    torch._dynamo.reset()
    outcomes = []
    for way in (norm, onepass.fuse(norm)):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = way(*leaves)
        y.backward(torch.linspace(-1, 1, 32).view(4, 8).bfloat16())
        outcomes.append([y, *(leaf.grad for leaf in leaves)])
    for theirs, ours in zip(*outcomes):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)

    def others(x, w):
        return norm(x, w), w.float()

    def narrower(x, w):
        return norm(x.float(), w)

    assert operands(others, x, w)[0] in ([[torch.bfloat16, torch.bfloat16]], [[torch.bfloat16, torch.float32]])
    assert [torch.float32, torch.bfloat16] not in operands(narrower, x, w)[0]


def test_turned_heads_are_turned_back_once(every_line):
    """Models turn heads before their norm, and a line has rows as they lie."""

    def function(x, w):
        return F.rms_norm(heads(x, 2), (4,), w, 1e-6) * 2.0

    x, w = torch.randn(2, 6, 8).requires_grad_(), torch.randn(4).requires_grad_()
    _, graph = operands(function, x, w)
    turns = [n.target for n in graph.nodes if n.target in ("permute", "transpose")]
    assert len(turns) == 1  # of the result
    torch.testing.assert_close(onepass.fuse(function)(x, w), function(x, w))


def test_turned_heads_that_are_returned_have_the_gradient_of_what_is_made_of_them(every_line):
    def function(x):
        turned = heads(x, 2)
        return turned, F.elu(turned, 0.5)

    for way in (function, onepass.fuse(function)):
        turned, y = way(torch.randn(2, 6, 8).requires_grad_())
        (found,) = torch.autograd.grad(y.sum(), turned)
        torch.testing.assert_close(found, torch.where(turned < 0, 0.5 * turned.exp(), 1.0))


def packed(x, w, cos, sin):
    """GPT-NeoX: each head has its query, key and value behind one another, of which the first numbers are turned."""
    q, k, v = (x @ w).view(2, 6, 2, 24).transpose(1, 2).chunk(3, dim=-1)

    def turned(t):
        a, rest = t[..., :4], t[..., 4:]
        half = torch.cat((-a[..., 2:], a[..., :2]), dim=-1)
        return torch.cat((a * cos + half * sin, rest), dim=-1)

    return attend(turned(q), turned(k), v, is_causal=True)


def test_packed_heads_are_split_before_they_are_turned(every_line):
    """Gradients of pieces are joined as the product's result lies, and rope's result lies so, too."""
    angle = torch.randn(6, 2)
    cos, sin = (torch.cat((f(angle), f(angle)), -1)[None, None] for f in (torch.cos, torch.sin))
    tensors = [torch.randn(2, 6, 16), torch.randn(16, 48)]
    _, graph = operands(packed, *(t.requires_grad_() for t in tensors), cos, sin)
    (split,) = (n for n in graph.nodes if n.target == "chunk")
    assert split.args[0].target == "view"
    (attention,) = (n for n in graph.nodes if "scaled_dot_product" in str(n.target))
    assert [t.target for t in attention.args[:3]] == ["permute"] * 3
    agree(lambda x, w: packed(x, w, cos, sin), tensors)


def test_pieces_of_turned_tensors(every_line):
    def nested(x):
        a, b, c = heads(x, 2).chunk(3, -1)
        d, e, f = a.chunk(3, dim=-1)
        return torch.cat([F.gelu(d), e * 2.0, f, F.gelu(b), c], -1)

    def of_some_sizes(x):
        a, b, c = torch.split(heads(x, 2), [2, 4, 3], dim=3)
        return F.gelu(b) + 1.0, a, torch.softmax(c, -1)

    def along_rows(x):
        a, b, c = heads(x, 2).chunk(3, 2)
        return F.gelu(a) * b + c

    def seen(x):
        turned = heads(x, 2)
        a, b, c = turned.split(3, dim=-1)
        return F.gelu(a) * b + c, turned

    for function in (nested, of_some_sizes, along_rows, seen):
        agree(function, [torch.randn(2, 6, 18)])


def test_a_block_takes_what_is_named_as_a_method():
    """Its input is called "view", as what made it, and is none."""

    def function(q, k, v):
        heads = q.view(2, 6, 2, 8), k.view(2, 6, 2, 4).repeat(1, 1, 1, 2)

        def block(k):
            return F.scaled_dot_product_attention(heads[0], heads[0], k)

        return checkpoint(block, heads[1], use_reentrant=False) + v.mean()

    agree(function, given())

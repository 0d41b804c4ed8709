"""rope: queries and keys as models lay them out, tables that broadcast, rows of any even length, lists, and errors."""

import pytest
import torch

import onepass
from helpers import Recorder, check_error, check_line, make_inputs
from onepass.reference import rope as composed


def tables(tokens, columns, dtype, device):
    """As transformers makes them."""
    frequencies = 10000.0 ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies)
    angles = torch.cat((angles, angles), -1)[None, None]
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [2, 6, 10, 64, 100, 128, 1000, 4098])
def test_row_lengths(columns, dtype, device):
    check_line("rope", make_inputs("rope", (37, columns), dtype, device))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 3, 4, 5, 16), (5, 1, 8)], ids=str)
def test_shapes(shape, device):
    check_line("rope", make_inputs("rope", shape, torch.float32, device))


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 80, 36])
def test_heads(columns, dtype, table, device):
    """Heads behind tokens in memory, tables of one batch and one head: as accurate as what transformers does."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 17, 4, columns, generator=generator, dtype=torch.float64)
    up = torch.randn(2, 4, 17, columns, generator=generator, dtype=torch.float64)
    cos, sin = tables(17, columns, table, device)

    def run(function, of, cos, sin):
        x = exact.to(device, of).requires_grad_()
        y = function(x.transpose(1, 2), cos, sin)
        return y.detach(), *torch.autograd.grad(y, x, up.to(device, y.dtype))

    ours = run(onepass.functional.rope, dtype, cos, sin)
    theirs = [t.to(dtype) for t in run(composed, dtype, cos, sin)]
    true = run(composed, torch.float64, cos.double(), sin.double())
    for a, b, c, what in zip(ours, theirs, true, ("result", "gradient")):
        assert a.dtype == dtype and a.shape == c.shape
        check_error(a, b, c.cpu(), what)


def test_misaligned_and_strided(device):
    memory = torch.randn(3, 7, 2 * 66 + 1, device=device)
    cos, sin = (torch.randn(7, 66, device=device) for _ in range(2))
    for x in (memory[..., 1:67], memory[:, ::2, 3:69], memory[:, :, 0:132:2]):
        c, s = cos[: x.shape[1]], sin[: x.shape[1]]
        torch.testing.assert_close(onepass.fused("rope", x, c, s), composed(x, c, s))


def test_queries_and_keys_in_one_call(device):
    """Of different numbers of heads."""
    q, k = (torch.randn(2, 9, heads, 64, device=device).transpose(1, 2).requires_grad_() for heads in (8, 2))
    cos, sin = tables(9, 64, torch.float32, device)
    recorder = Recorder()
    with recorder:
        both = onepass.functional.rope([q, k], cos, sin)
    assert len(recorder.calls) == 1
    ups = [torch.randn_like(t) for t in both]
    grads = torch.autograd.grad(both, (q, k), ups)
    for t, y, up, grad in zip((q, k), both, ups, grads):
        assert torch.equal(y, onepass.functional.rope(t, cos, sin))
        torch.testing.assert_close(grad, torch.autograd.grad(composed(t, cos, sin), t, up)[0])


LINES = [
    "rms_norm(1e-6) | scale | rope",
    "rope(interleaved)",
    "rms_norm(1e-6) | scale | rope(32)",
    "scale | rope(32, interleaved)",
    "bias | dropout(0.3) | rope(16) | gate(silu) | keep | scale",
    "add | keep | rms_norm(1e-6) | rope | scale | layer_norm(1e-3) | bias | dropout(0.2)",
    "causal | softmax | rope(interleaved) | logsumexp",
]
"""Before and behind row words and others; halves and neighbours; all numbers of a row and the first."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [32, 34, 64, 80, 100, 128, 1000])
@pytest.mark.parametrize("line", LINES)
def test_words_around_it(line, columns, dtype, device):
    check_line(line, make_inputs(line, (3, 13, columns), dtype, device), slack=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [32, 48, 100, 128])
@pytest.mark.parametrize("line", LINES[:5])
def test_tables_of_pairs(line, columns, dtype, device):
    check_line(line, make_inputs(line, (3, 13, columns), dtype, device, tables_of_pairs=True), slack=2)


@pytest.mark.parametrize("line", ["rms_norm(1e-6) | scale | rope", "rms_norm(1e-6) | scale | rope(32)"])
@pytest.mark.parametrize("columns", [5000, 40000, 600000])
def test_long_rows(line, columns, device):
    check_line(line, make_inputs(line, (3, columns), torch.float32, device), slack=2)


@pytest.mark.parametrize("line", ["rms_norm(1e-6) | scale | rope", "rms_norm(1e-6) | scale | rope(32)"])
def test_columns_of_a_batch(line, device):
    """Sums over groups of rows, in the columns' own order."""
    inputs = make_inputs(line, (3, 13, 64), torch.float32, device)
    inputs.operands[0] = torch.randn(3, 1, 64, device=device, requires_grad=True)
    check_line(line, inputs, slack=2)


@pytest.mark.parametrize("line", LINES[:5])
def test_one_number_for_a_row(line, device):
    inputs = make_inputs(line, (3, 13, 64), torch.float32, device)
    for i in onepass.Line(line).table_operands:
        inputs.operands[i] = torch.randn(13, 1, device=device)
    check_line(line, inputs, slack=2)


@pytest.mark.parametrize("line", LINES)
def test_layouts(line, device):
    """Strides, offsets that allow small accesses only, tables that lie apart, gradients that are one number."""
    memory = torch.randn(2, 9, 3, 2 * 66 + 1, device=device)
    tables = torch.randn(2, 9, 70, 2, device=device)
    for x in (memory[..., 1:67].transpose(1, 2), memory[..., 3:67], memory[..., 0:132:2]):
        inputs = make_inputs(line, x.shape, torch.float32, device)
        inputs.x = x.detach().requires_grad_()
        for table, i in enumerate(onepass.Line(line).table_operands):
            own = tables[table, : x.shape[-2], : inputs.operands[i].shape[-1]]
            inputs.operands[i] = own[..., 0] if x.stride(-1) == 1 else own[..., table]
        check_line(line, inputs, slack=2)


def test_inverse(device):
    """The other way round with the negative sine."""
    x = torch.randn(5, 64, device=device)
    cos, sin = (t[0, 0] for t in tables(5, 64, torch.float32, device))
    there = onepass.functional.rope(x, cos, sin)
    torch.testing.assert_close(onepass.functional.rope(there, cos, -sin), x)
    torch.testing.assert_close(there.norm(dim=-1), x.norm(dim=-1))


def packed_heads(dtype, device, columns=64, **like):
    """q and k as transposed views of a packed projection, [B, H, L, D], and cos and sin, [1, L, D]."""
    qkv = torch.randn(2, 9, (8 + 2 + 2) * columns, dtype=torch.float64).to(device, dtype).requires_grad_()
    q, k = (
        part.unflatten(-1, (-1, columns)).transpose(1, 2)
        for part in qkv.split([8 * columns, 2 * columns, 2 * columns], -1)[:2]
    )
    weights = [torch.randn(columns, dtype=torch.float64).to(device, dtype).requires_grad_() for _ in range(2)]
    cos, sin = (t[0] for t in tables(9, columns, dtype, device))
    return qkv, q, k, weights, cos, sin


def norm_rope(x, weight, cos, sin, offset=0.0, **how):
    """As models write it."""
    y = torch.nn.functional.rms_norm(x.double(), x.shape[-1:], eps=1e-6)
    y = y if weight is None else y * (offset + weight.double())
    return composed(y, cos.double(), sin.double(), **how)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0, None], ids=["weight", "1 + weight", "no weight"])
def test_qk_norm_rope(offset, dtype, device):
    qkv, q, k, weights, cos, sin = packed_heads(dtype, device)
    weights = [None, None] if offset is None else weights
    recorder = Recorder()
    with recorder:
        found = onepass.functional.qk_norm_rope(q, k, *weights, cos, sin, weight_offset=offset or 0.0)
    assert len(recorder.calls) == 1
    exact = [norm_rope(t, w, cos[:, None], sin[:, None], offset or 0.0) for t, w in zip((q, k), weights)]
    ups = [torch.randn_like(y) for y in found]
    wanted = [qkv, *(w for w in weights if w is not None)]
    ours = torch.autograd.grad(found, wanted, ups)
    theirs = torch.autograd.grad(exact, wanted, [up.double() for up in ups])
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    for a, b in zip([*found, *ours], [*exact, *theirs], strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert (a.double() - b.double()).norm() <= bound * b.double().norm()


def test_qk_norm_rope_takes_tables_and_layouts(device):
    """Heads behind tokens, the first numbers only, neighbours, tables of pairs, tables that broadcast already."""
    _, q, k, weights, _, _ = packed_heads(torch.float32, device)
    cos, sin = torch.randn(2, 1, 9, 16, device=device)
    expected = [norm_rope(t, w, cos, sin, r=32, interleaved=True) for t, w in zip((q, k), weights)]
    how = {"rotary_dim": 32, "interleaved": True}
    found = onepass.functional.qk_norm_rope(q, k, *weights, cos, sin, **how)
    behind = (t.transpose(1, 2) for t in (q, k))
    other = onepass.functional.qk_norm_rope(*behind, *weights, cos, sin, unsqueeze_dim=2, **how)
    whole = onepass.functional.qk_norm_rope(q, k, *weights, cos[:, None], sin[:, None], **how)
    for y, a, b, c in zip(expected, found, other, whole, strict=True):
        torch.testing.assert_close(a.double(), y, rtol=1e-4, atol=1e-5)
        assert torch.equal(a, b.transpose(1, 2)) and torch.equal(a, c)
    with pytest.raises(ValueError, match="expected both q_weight and k_weight, or neither"):
        onepass.functional.qk_norm_rope(q, k, weights[0], None, cos, sin)
    with pytest.raises(TypeError, match="'weight_offset' must be float, not str"):
        onepass.functional.qk_norm_rope(q, k, *weights, cos, sin, weight_offset="1")


def test_functional_variants(device):
    x, (cos, sin) = torch.randn(3, 9, 64, device=device), torch.randn(2, 9, 16, device=device)
    y = onepass.functional.rope(x, cos, sin, 32)
    torch.testing.assert_close(y, composed(x, cos, sin, 32))
    y = onepass.functional.rope(x, cos, sin, 32, interleaved=True)
    torch.testing.assert_close(y, composed(x, cos, sin, 32, True))
    assert repr(onepass.Line("rope(32,interleaved)")) == "onepass.Line('rope(32, interleaved)')"


@pytest.mark.parametrize("line", ["rms_norm(1e-6) | scale | rope", "scale | rope(4, interleaved)"])
def test_derivatives(line, device):
    """gradcheck, gradgradcheck and opcheck, with tables of pairs; under vmap; composed for export."""
    inputs = make_inputs(line, (2, 3, 8), torch.float64, device, tables_of_pairs=True)
    g, cos, sin = inputs.operands

    def run(x, g):
        return onepass.fused(line, x, g, cos, sin)

    assert torch.autograd.gradcheck(run, (inputs.x, g)) and torch.autograd.gradgradcheck(run, (inputs.x, g))
    name = "rowwise" if onepass.Line(line).rowwise else "elementwise"
    more = (False,) if name == "rowwise" else ()
    op = getattr(torch.ops.onepass, f"{name}_forward").default
    torch.library.opcheck(op, (inputs.x.detach(), [t.detach() for t in inputs.operands], line, None, *more))
    many = torch.randn(4, 2, 3, 8, dtype=torch.float64, device=device)
    every = torch.func.vmap(run, (0, None))(many, g)
    own = torch.func.vmap(lambda x, c: onepass.fused(line, x, g, c, sin))(many, cos.expand(4, *cos.shape))
    torch.testing.assert_close(every, torch.stack([run(x, g) for x in many]))
    torch.testing.assert_close(own, every)


def test_lists_of_tables(device):
    """Each tensor with its own, and pieces of one tensor."""
    line = "scale | rope(32, interleaved)"
    xs = torch.randn(3, 2, 9, 64, device=device).requires_grad_()
    g, cos, sin = (
        torch.randn(64, device=device),
        torch.randn(3, 9, 16, device=device),
        torch.randn(3, 9, 16, device=device),
    )
    expected = [onepass.fused(line, x, g, c, s) for x, c, s in zip(xs, cos, sin)]
    for found in (
        onepass.fused(line, list(xs.unbind()), g, list(cos.unbind()), list(sin.unbind())),
        onepass.fused(line, [x.clone() for x in xs], g, [c.clone() for c in cos], list(sin.unbind())),
    ):
        assert all(map(torch.equal, found, expected))


def test_compile(device):
    x = torch.randn(2, 4, 9, 64, device=device, requires_grad=True)
    cos, sin = tables(9, 64, torch.float32, device)
    expected = onepass.functional.rope(x, cos, sin)
    found = torch.compile(onepass.functional.rope, fullgraph=True)(x, cos, sin)
    assert torch.equal(found, expected)
    up = torch.randn_like(found)
    assert torch.equal(*(torch.autograd.grad(y, x, up)[0] for y in (found, expected)))


def test_errors(device):
    x, t = torch.randn(3, 6, device=device), torch.randn(3, 6, device=device)
    for line, message in {
        "rope | mul(2) | rope": "a second 'rope': a line has at most one",
        "rope | linear": "'linear' in one line with 'rope': there is no kernel for both",
        "linear | rope": "'rope' in one line with 'linear'",
        "scores | rope": "'rope' in one line with 'scores'",
        "rope | cross_entropy": "'cross_entropy' in one line with 'rope'",
        "rope(3)": "'rope' turns an even number of a row's first numbers, from 2 on",
        "rope(-2)": "an even number of a row's first numbers",
        "rope(x)": "'rope' knows the option 'interleaved', got 'x'",
        "rope(4, 5)": "knows the option 'interleaved', got '5'",
        "rope(interleaved, 4)": "expected '\\)' to end 'rope'",
        "rope(4, halves)": "'rope' knows the option 'interleaved', got 'halves'",
    }.items():
        with pytest.raises(onepass.LineError, match=message):
            onepass.Line(line)
    with pytest.raises(
        RuntimeError, match="'rope\\(8\\)' needs rows of that length at least, got x of shape \\[3, 6\\]"
    ):
        onepass.fused("rope(8)", x, t, t)
    with pytest.raises(
        RuntimeError, match=r"operand 0 \(cos of 'rope'\) .* \(with 4 or 2 numbers a row\), got \[3, 6\]"
    ):
        onepass.fused("rope(4)", x, t, t)
    with pytest.raises(RuntimeError, match="'rope' needs rows of an even length, got x of shape \\[3, 5\\]"):
        onepass.fused("rope", x[:, :5], t[:, :5], t[:, :5])
    with pytest.raises(RuntimeError, match="operand 1 \\(sin of 'rope'\\) must have x's shape \\[3, 6\\]"):
        onepass.fused("rope", x, t, t[:2])
    with pytest.raises(TypeError, match="takes 2 operands \\(cos of 'rope', sin of 'rope'\\) after x, got 1"):
        onepass.fused("rope", x, t)
    with pytest.raises(RuntimeError, match="cos and sin of 'rope' get no gradient"):
        onepass.fused("rope", x, t.clone().requires_grad_(), t)

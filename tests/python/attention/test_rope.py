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


def test_inverse(device):
    """The other way round with the negative sine."""
    x = torch.randn(5, 64, device=device)
    cos, sin = (t[0, 0] for t in tables(5, 64, torch.float32, device))
    there = onepass.functional.rope(x, cos, sin)
    torch.testing.assert_close(onepass.functional.rope(there, cos, -sin), x)
    torch.testing.assert_close(there.norm(dim=-1), x.norm(dim=-1))


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
    with pytest.raises(onepass.LineError, match="'rope' behind 'mul': 'rope' must be the only word"):
        onepass.Line("mul(0.5) | rope")
    with pytest.raises(onepass.LineError, match="'mul' behind 'rope': 'rope' must be the only word"):
        onepass.Line("rope | mul(0.5)")
    with pytest.raises(RuntimeError, match="'rope' needs rows of an even length, got x of shape \\[3, 5\\]"):
        onepass.fused("rope", x[:, :5], t[:, :5], t[:, :5])
    with pytest.raises(RuntimeError, match="operand 1 \\(sin of 'rope'\\) must have x's shape \\[3, 6\\]"):
        onepass.fused("rope", x, t, t[:2])
    with pytest.raises(TypeError, match="takes 2 operands \\(cos of 'rope', sin of 'rope'\\) after x, got 1"):
        onepass.fused("rope", x, t)
    with pytest.raises(RuntimeError, match="cos and sin of 'rope' get no gradient"):
        onepass.fused("rope", x, t.clone().requires_grad_(), t)

"""Lines that end in one number of each row: their results' shapes and dtypes, everywhere a line goes."""

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import onepass
from helpers import as_tuple, check_line, make_inputs
from onepass import _native

ENDINGS = ["logsumexp", "entropy", "sum", "mean", "amax"]
SEVERAL = "add | keep | rms_norm(1e-3) | scale | logsumexp | entropy"
SHAPES = [(), (7,), (5, 33), (2, 3, 257), (3, 1), (0, 4)]


def expected(line, *tensors):
    return as_tuple(onepass.Line(line).reference(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_have_x_s_shape_without_its_last_dimension(shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    y = onepass.fused("logsumexp", x)
    assert y.shape == x.shape[:-1] and y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert y.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 77, 1000, 32000])
@pytest.mark.parametrize("line", [SEVERAL, "logsumexp", "bias | gelu | mean | sum"])
def test_error_is_no_more_than_pytorchs(line, columns, dtype, device):
    check_line(line, make_inputs(line, (3, 5, columns), dtype, device), slack=2.0)


@pytest.mark.parametrize("line", [*ENDINGS, SEVERAL, "mul(2) | logsumexp | amax | mean", "softcap(3) | entropy"])
def test_second_derivatives(line, device):
    inputs = make_inputs(line, (2, 5), torch.float64, device)
    assert gradcheck(lambda *tensors: onepass.fused(line, *tensors), tuple(inputs.tensors))
    assert gradgradcheck(lambda *tensors: onepass.fused(line, *tensors), tuple(inputs.tensors))


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)], ids=str)
def test_gradients_of_some_results(given, device):
    """The others' count as zeros: of rows, and of numbers."""
    inputs = make_inputs(SEVERAL, (4, 6, 40), torch.float64, device)
    ours, theirs = onepass.fused(SEVERAL, *inputs.tensors), expected(SEVERAL, *inputs.tensors)
    grads = [torch.randn_like(ours[i]) for i in given]
    found = [
        torch.autograd.grad([r[i] for i in given], inputs.tensors, grads, allow_unused=True) for r in (ours, theirs)
    ]
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_layouts(device):
    """Strided rows, and gradients of every layout, a single number for all rows among them."""
    base = torch.randn(6, 4, 3, 80, device=device, dtype=torch.float64)
    for x in (base[..., :41], base.transpose(0, 2), base[:, ::2], base.expand(6, 4, 3, 80)[1:2]):
        x = x.detach().requires_grad_()  # noqa: PLW2901
        ours, theirs = onepass.fused("logsumexp", x), torch.logsumexp(x, -1)
        torch.testing.assert_close(ours, theirs)
        for grad in (torch.randn_like(ours), torch.randn_like(ours.mT).mT, torch.ones((), device=device).double()):
            grad = grad.expand(ours.shape)  # noqa: PLW2901
            both = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for y in (ours, theirs)]
            torch.testing.assert_close(*both)


def test_rows_without_elements(device):
    x = torch.randn(3, 0, device=device, requires_grad=True)
    for name in ENDINGS[:-1]:
        y = onepass.fused(name, x)
        torch.testing.assert_close(y, expected(name, x)[0], equal_nan=True)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.shape == x.shape
    with pytest.raises(RuntimeError, match=r"amax\(\): expected rows with at least one element"):
        onepass.fused("amax", x)


@pytest.mark.parametrize("line", ENDINGS)
def test_no_rows(line, device):
    x = torch.randn(0, 9, device=device, requires_grad=True)
    y = onepass.fused(line, x)
    assert y.shape == (0,) and torch.autograd.grad(y, x, torch.ones_like(y))[0].shape == (0, 9)


def test_infinities_and_nan(device):
    inf, nan = math.inf, math.nan
    x = torch.tensor([[1, -inf, 2], [-inf, -inf, -inf], [inf, 1, 2], [nan, 1, 2], [3, 3, 1]], device=device)
    for name, theirs in (("logsumexp", torch.logsumexp(x, -1)), ("amax", x.amax(-1)), ("sum", x.sum(-1))):
        torch.testing.assert_close(onepass.fused(name, x), theirs, equal_nan=True)
    rows = x[[0, 2, 3, 4]]  # PyTorch's gradients of a row of nothing but -infinity are NaN
    for name, theirs in (("logsumexp", torch.logsumexp), ("amax", torch.amax), ("sum", torch.sum)):
        a, b = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        onepass.fused(name, a).sum().backward(), theirs(b, -1).sum().backward()
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)
    tied = x[4:].clone().requires_grad_()
    (shared,) = torch.autograd.grad(onepass.fused("amax", tied).sum(), tied)
    assert shared.tolist() == [[0.5, 0.5, 0]]


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("pieces", ["of one tensor", "apart", "of any length"])
def test_lists(pieces, stack, device):
    line = "keep | logsumexp | mean"
    whole = torch.randn(3, 4, 40, device=device, dtype=torch.float64, requires_grad=True)
    xs = list(whole.unbind()) if pieces == "of one tensor" else [t.detach().clone().requires_grad_() for t in whole]
    if pieces == "of any length":
        if stack:
            return
        xs = [torch.randn(n, 40, device=device, dtype=torch.float64, requires_grad=True) for n in (1, 5, 2)]
    results = onepass.fused(line, xs, stack=stack)
    each = [expected(line, x) for x in xs]
    for kind, theirs in zip(results, zip(*each), strict=True):
        assert len(kind) == len(theirs)
        for ours, their in zip(kind, theirs):
            torch.testing.assert_close(ours, their)
    for last in (False, True):  # of numbers alone, and of all
        chosen = [k for i, k in enumerate(results) if last or i != 1]
        their = [k for i, k in enumerate(zip(*each)) if last or i != 1]
        total = sum((1 + i) * t.square().sum() for k in chosen for i, t in enumerate(k))
        reference = sum((1 + i) * t.square().sum() for k in their for i, t in enumerate(k))
        of = [whole] if pieces == "of one tensor" else xs
        for a, b in zip(*(torch.autograd.grad(t, of, retain_graph=True) for t in (total, reference)), strict=True):
            torch.testing.assert_close(a, b)


def test_transforms(device):
    x = torch.randn(3, 4, 20, device=device, dtype=torch.float64)
    w = torch.randn(20, device=device, dtype=torch.float64)

    def ours(x, w):
        return onepass.fused("scale | logsumexp | entropy", x, w)

    def theirs(x, w):
        return expected("scale | logsumexp | entropy", x, w)

    for dims in ((0, None), (1, None)):
        torch.testing.assert_close(torch.func.vmap(ours, dims)(x, w), torch.func.vmap(theirs, dims)(x, w))
    torch.testing.assert_close(torch.func.jacrev(ours, (0, 1))(x[0], w), torch.func.jacrev(theirs, (0, 1))(x[0], w))
    per_sample = [
        torch.func.vmap(torch.func.grad(lambda x, w, f=f: f(x, w)[0].sum()), (0, None))(x, w) for f in (ours, theirs)
    ]
    torch.testing.assert_close(*per_sample)
    tangent = torch.randn_like(x)
    torch.testing.assert_close(
        torch.func.jvp(lambda x: ours(x, w), (x,), (tangent,)), torch.func.jvp(lambda x: theirs(x, w), (x,), (tangent,))
    )


def test_graphs(device):
    """Compiled for sizes that change, forward and backward; exported, and decomposed."""

    def function(x, r, w):
        return onepass.fused(SEVERAL, x, r, w)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5, 8):
        inputs = make_inputs(SEVERAL, (rows, 4, 40), torch.float32, device)
        grads = [torch.randn_like(y) for y in function(*inputs.tensors)]
        ours, theirs = compiled(*inputs.tensors), function(*inputs.tensors)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(
            *(torch.autograd.grad(y, inputs.tensors, grads) for y in (ours, theirs)), rtol=1e-6, atol=1e-6
        )

    class Module(torch.nn.Module):
        def forward(self, x, r, w):
            return function(x, r, w)

    given = tuple(t.detach() for t in make_inputs(SEVERAL, (3, 4, 40), torch.float32, device).tensors)
    exported = torch.export.export(Module(), given)
    torch.testing.assert_close(exported.module()(*given), function(*given))
    decomposed = exported.run_decompositions(onepass.decompositions())
    torch.testing.assert_close(decomposed.module()(*given), function(*given))


def test_operators_are_as_registered(device):
    inputs = make_inputs("bias | logsumexp | mean", (3, 24), torch.float32, device)
    arguments = (inputs.x, inputs.operands, "bias | logsumexp | mean", None, True)
    torch.library.opcheck(torch.ops.onepass.rowwise_forward.default, arguments)


@pytest.mark.parametrize("line", ["logsumexp | gelu", "mean | rms_norm", "sum | keep"])
def test_nothing_but_endings_follows_an_ending(line):
    with pytest.raises(onepass.LineError, match="ends a line: it gives one number a row"):
        onepass.Line(line)


@pytest.mark.parametrize("line", ["linear | amax", "scores | softmax | sum"])
def test_no_ending_behind_a_contraction(line):
    with pytest.raises(onepass.LineError, match="behind a contraction, where it has no kernel"):
        onepass.Line(line)


def test_costs():
    """Numbers are few: forward reads x, backward reads it and writes its gradient."""
    cost = onepass.Line("logsumexp").cost((64, 1000), torch.bfloat16)
    x, numbers = 64 * 1000 * 2, 64 * 4
    assert cost.forward.bytes == x + 3 * numbers  # two statistics
    assert cost.backward.bytes == 2 * x + 3 * numbers
    assert _native.describe("keep | logsumexp | sum")["numbers"] == [True, False, True]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [0, -1, (1,), (0, 2), [-1, 0], (2, 0, 1)], ids=str)
def test_logsumexp_over_dimensions(dim, keepdim, device):
    x = torch.randn(3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    ours, theirs = onepass.functional.logsumexp(x, dim, keepdim), torch.logsumexp(x, dim, keepdim)
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, x, g), torch.autograd.grad(theirs, x, g))


@pytest.mark.parametrize(
    "dim, error", [((0, 0), RuntimeError), ((0, -3), RuntimeError), ((), RuntimeError), ((3,), IndexError)]
)
def test_logsumexp_refuses(dim, error):
    with pytest.raises(error):
        torch.logsumexp(torch.ones(3, 4, 5), dim)
    with pytest.raises(error, match="logsumexp"):
        onepass.functional.logsumexp(torch.ones(3, 4, 5), dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("apart", [100.0, -3000.0])
@pytest.mark.parametrize(
    "line", ["logsumexp", "entropy", "cross_entropy(0.1)", "logprob | entropy", "kl_div(0.5)", "kl_div"]
)
def test_errors_do_not_grow_with_what_all_of_a_row_have_in_common(line, apart, dtype, device):
    """Beside gradients of the same rows around zero: what is saved is as exact as its shift is large."""
    inputs = make_inputs(line, (6, 1000), dtype, device)
    x = ((inputs.x.detach() + apart) - apart).requires_grad_()  # rounded as the shifted rows are
    operands = [((t + apart) - apart).detach() if t.dtype == dtype else t for t in inputs.operands]
    shifted = [(t.detach() + apart).requires_grad_() if t.dtype == dtype else t for t in (x, *operands)]
    g = torch.randn(6, device=device, dtype=dtype)

    def gradient(of, *others):
        results = onepass.fused(line, of, *others)
        return torch.autograd.grad(
            results if isinstance(results, tuple) else [results], of, [g, g][: 1 + ("|" in line)]
        )[0]

    got, expected = gradient(*shifted), gradient(x, *operands)
    unit = torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=8 * torch.finfo(dtype).eps, atol=4 * unit)

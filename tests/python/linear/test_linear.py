"""Lines with `linear`: against PyTorch's chain and fp64, what is saved, and every argument's gradient."""

import pytest
import torch
from torch.autograd import gradcheck

import onepass
from helpers import (
    DTYPES,
    LINEAR_LINES,
    NAMED_LINES,
    assert_equal,
    check_error,
    check_line,
    gradients,
    make_inputs,
    run,
    upstream,
)
from onepass.bench.cases import saved_bytes

# A structure outside the CPU's table.
COMPILED = ("keep | linear | bias | keep | silu", "scale | keep | linear | gate(gelu) | keep")


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("line", LINEAR_LINES + COMPILED)
def test_error_is_no_more_than_pytorchs(line, dtype, device):
    check_line(line, make_inputs(line, (37, 200), dtype, device, out_features=24), slack=2.0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 1), (2, 3, 31), (64,), (3, 1, 2, 128)])
@pytest.mark.parametrize("out_features", [1, 17, 64])
def test_shapes(shape, out_features, device):
    before = (
        "rms_norm(1e-6) | scale" if shape[-1] > 1 else "bias | gelu"
    )  # the norm of one number has hardly a gradient
    line = f"{before} | linear | bias | silu"
    check_line(line, make_inputs(line, shape, torch.float32, device, out_features=out_features), slack=2.0)


@pytest.mark.parametrize("line", ["linear", "layer_norm(1e-5) | scale | bias | linear | bias | gelu"])
@pytest.mark.parametrize("shape, out_features", [((0, 8), 5), ((4, 8), 0), ((2, 0, 8), 3)])
def test_empty(line, shape, out_features, device):
    inputs = make_inputs(line, shape, torch.float32, device, out_features=out_features)
    (y,), _ = run(line, inputs)
    assert y.shape == (*shape[:-1], out_features)
    for grad, tensor in zip(gradients([y], inputs, upstream([y])), inputs.differentiable):
        assert grad.shape == tensor.shape and not grad.any()


def test_no_columns(device):
    """A product of no terms is zero."""
    inputs = make_inputs("linear | bias", (4, 0), torch.float32, device, out_features=5)
    (y,), _ = run("linear | bias", inputs)
    assert_equal(y, inputs.operands[1].expand(4, 5))


@pytest.mark.parametrize("line", LINEAR_LINES[:8])
def test_gradcheck(line, device):
    inputs = make_inputs(line, (3, 5), torch.float64, device, seed=3, out_features=4)

    def function(*tensors):
        return onepass.fused(line, *tensors, generator=torch.Generator(device).manual_seed(5))

    assert gradcheck(function, tuple(inputs.differentiable))


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("shape", [(37, 200), (2, 3, 31), (1, 20000)], ids=str)
@pytest.mark.parametrize(
    "before",
    [
        "layer_norm(1e-5) | scale | bias",
        "layer_norm(1e-5) | scale | bias | gelu",
        "rms_norm(1e-6) | scale",
        "gate(silu)",
        "bias | gelu",
        "add | keep | layer_norm(1e-5) | scale | bias",
        "dropout(0.1) | add | keep",
    ],
)
def test_what_linear_read_is_made_again(before, shape, dtype, device):
    """The matrix's gradient where backward leaves its product's input, and where a pass of its own makes it."""
    line = f"{before} | linear"
    inputs = make_inputs(line, shape, dtype, device, out_features=8)
    matrix = inputs.operands[-1]

    def gradient():
        torch.manual_seed(4)
        results, _ = run(line, inputs)
        return gradients(results, inputs, upstream(results))[-1]

    beside_others = gradient()
    for tensor in inputs.differentiable:
        tensor.requires_grad_(tensor is matrix)
    if dtype == torch.float64:  # the pass of its own may add a row's numbers up in another order
        torch.testing.assert_close(gradient(), beside_others, rtol=1e-12, atol=1e-12)
    elif device == "cuda" and ("layer_norm" in before or "gelu" in before):
        # There forward takes the mean off a row that it holds before it divides, and backward has gelu's value beside
        # its slope.
        torch.testing.assert_close(gradient(), beside_others)
    else:
        assert_equal(gradient(), beside_others)


@pytest.mark.parametrize("wanted", range(1, 32))
def test_only_the_gradients_that_are_wanted(wanted, device):
    line = "layer_norm(1e-5) | scale | bias | linear | bias"
    inputs = make_inputs(line, (6, 33), torch.float32, device, out_features=9)
    everything = gradients(run(line, inputs)[0], inputs, [torch.ones(6, 9, device=device)])
    for i, tensor in enumerate(inputs.tensors):
        tensor.requires_grad_(bool(wanted >> i & 1))
    results, _ = run(line, inputs)
    some = gradients(results, inputs, [torch.ones(6, 9, device=device)])
    for ours, expected in zip(some, [g for i, g in enumerate(everything) if wanted >> i & 1], strict=True):
        if device == "cuda" and not wanted & 0b111:  # the rows are made by a pass of their own: as above
            torch.testing.assert_close(ours, expected)
        else:
            assert_equal(ours, expected)


@pytest.mark.parametrize("factor", [1.0, -2.5])
def test_one_number_before_linear(factor, device):
    """Its gradient, and the input of the product, which the kernel that multiplies in place writes, too."""
    x, w = (torch.randn(rows, 64, device=device, requires_grad=True) for rows in (40, 16))
    by = torch.tensor([[factor]], device=device, requires_grad=True)
    g = torch.randn(40, 16, device=device)
    found = torch.autograd.grad(onepass.fused("times | linear", x, by, w), (x, by, w), g)
    right = torch.autograd.grad((x.double() * by) @ w.double().t(), (x, by, w), g.double())
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_one_result_of_several_has_a_gradient(device):
    line = "keep | linear | bias | keep | silu"
    for which in range(3):
        inputs = make_inputs(line, (6, 33), torch.float32, device, out_features=9)
        ours, _ = run(line, inputs)
        theirs = onepass.Line(line).reference(inputs.x, *inputs.operands)
        grad = torch.randn_like(ours[which])
        for a, b in zip(gradients(ours[which], inputs, grad), gradients(theirs[which], inputs, grad)):
            if a is None or b is None:
                assert b is None and (a is None or not a.any())
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["rows", "columns", "swapped", "expanded", "offset"])
def test_layouts(layout, device):
    line = "layer_norm(1e-5) | scale | bias | linear | bias | gelu"
    inputs = make_inputs(line, (12, 40), torch.float32, device, out_features=16)
    expected = run(line, inputs)[0][0]
    x, w = inputs.x.detach(), inputs.operands[2].detach()
    if layout == "rows":
        x, w = torch.stack((x, x), 1)[:, 0], torch.stack((w, w), 1)[:, 1]
    elif layout == "columns":
        x, w = torch.stack((x, x), -1)[..., 0], torch.stack((w, w), -1)[..., 1]
    elif layout == "swapped":
        x, w = x.t().contiguous().t(), w.t().contiguous().t()
    elif layout == "expanded":
        x = x[:1].expand(12, 40)
        expected = expected[:1].expand(12, 16)
    else:
        x, w = torch.cat((x[:3], x)).view(5, 3, 40)[1:], torch.cat((w[:3], w))[3:]
        expected = expected.view(4, 3, 16)
    x, w = x.requires_grad_(), w.requires_grad_()
    operands = [*inputs.operands[:2], w, *inputs.operands[3:]]
    y = onepass.fused(line, x, *operands)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(16, device=device).expand(y.shape)
    ours = torch.autograd.grad(y, (x, w, *inputs.operands[:2]), grad)
    theirs = torch.autograd.grad(onepass.Line(line).reference(x, *operands), (x, w, *inputs.operands[:2]), grad)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_masks_differ_before_and_behind(device):
    """One state, two dropouts: were they the same stream, x · I would keep all or nothing twice."""
    x = torch.ones(64, 128, device=device)
    eye = torch.eye(128, device=device)
    y = onepass.fused("dropout(0.5) | linear | dropout(0.5)", x, eye)
    assert 0.2 < (y != 0).float().mean() < 0.3


@pytest.mark.parametrize("line", ["layer_norm(1e-5) | scale | bias | linear | bias | gelu", LINEAR_LINES[-1]])
def test_the_same_bits_every_time(line, device):
    inputs = make_inputs(line, (130, 300), torch.bfloat16, device, out_features=70)
    first = None
    for _ in range(3):
        torch.manual_seed(4)
        results, _ = run(line, inputs)
        everything = [*results, *gradients(results, inputs, upstream(results))]
        if first is not None:
            for a, b in zip(everything, first):
                assert_equal(a, b)
        first = everything


def test_the_normalised_row_is_never_held(device):
    m, k, n = 256, 512, 384
    line = "layer_norm(1e-5) | scale | bias | linear | bias"
    inputs = make_inputs(line, (m, k), torch.float32, device, out_features=n)
    ours = saved_bytes(lambda: onepass.fused(line, *inputs.tensors))
    theirs = saved_bytes(lambda: onepass.Line(line).reference(*inputs.tensors))
    assert ours == 4 * (m * k + n * k + 2 * k + 3 * m)
    assert theirs >= ours + 4 * m * k


@pytest.mark.parametrize("line", ["linear", "linear | bias", "bias | linear"])
def test_a_frozen_matrix_needs_no_x(line, device):
    m, k, n = 256, 512, 384
    inputs = make_inputs(line, (m, k), torch.float32, device, out_features=n)
    matrix = next(i for i, t in enumerate(inputs.operands) if t.dim() == 2)
    expected = gradients([onepass.fused(line, *inputs.tensors)], inputs, [torch.ones(m, n, device=device)])
    inputs.operands[matrix] = inputs.operands[matrix].detach()
    assert saved_bytes(lambda: onepass.fused(line, *inputs.tensors)) == 4 * n * k
    ours = gradients([onepass.fused(line, *inputs.tensors)], inputs, [torch.ones(m, n, device=device)])
    for a, b in zip(ours, [g for i, g in enumerate(expected) if i != 1 + matrix], strict=True):
        assert_equal(a, b)


def test_cost_is_what_is_saved(device):
    m, k, n = 64, 128, 96
    for line in ("linear | bias | gelu", "rms_norm(1e-6) | scale | linear"):
        inputs = make_inputs(line, (m, k), torch.float32, device, out_features=n)
        cost = onepass.Line(line).cost((m, k), out_features=n)
        assert saved_bytes(lambda line=line, inputs=inputs: onepass.fused(line, *inputs.tensors)) == cost.saved_bytes


class TestErrors:
    def test_columns(self, device):
        x, w = torch.randn(4, 8, device=device), torch.randn(3, 9, device=device)
        with pytest.raises(RuntimeError, match=r"operand 0 \(W of 'linear'\) must have shape \[N, 8\].*got \[3, 9\]"):
            onepass.fused("linear", x, w)

    def test_dimensions(self, device):
        x = torch.randn(4, 8, device=device)
        with pytest.raises(RuntimeError, match=r"\[N, 8\]"):
            onepass.fused("linear", x, torch.randn(8, device=device))
        with pytest.raises(RuntimeError, match="at least 1 dimension"):
            onepass.fused("linear", torch.tensor(1.0, device=device), torch.randn(1, 1, device=device))

    def test_dtype(self, device):
        x, w = torch.randn(4, 8, device=device), torch.ones(3, 8, device=device, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="must be a floating point tensor, got torch.int32"):
            onepass.fused("linear", x, w)

    def test_the_operand_behind_is_counted_from_the_lines_start(self, device):
        x, w, b = (torch.randn(*s, device=device) for s in ((4, 8), (3, 8), (5,)))
        with pytest.raises(RuntimeError, match=r"operand 2 \(b of 'bias'\) must have shape \[3\]"):
            onepass.fused("bias | linear | bias | gelu", x, x[0], w, b)

    def test_number_of_operands(self, device):
        with pytest.raises(TypeError, match="takes 2 operands"):
            onepass.fused("linear | bias", torch.randn(4, 8, device=device), torch.randn(3, 8, device=device))

    def test_second_derivative(self, device):
        x, w = torch.randn(4, 8, device=device, requires_grad=True), torch.randn(3, 8, device=device)
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.autograd.grad(onepass.fused("linear | tanh", x, w).sum(), x, create_graph=True)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("line", ["linear | bias", "layer_norm(1e-5) | scale | bias | linear | bias | gelu", "linear"])
def test_under_autocast_the_product_is_in_its_dtype(line, x_dtype, device):
    """As torch.nn.functional.linear: float32 parameters, of x as it is."""
    inputs = make_inputs(line, (37, 200), x_dtype, device, parameter_dtype=torch.float32)
    inputs.operands = [t.detach().float().requires_grad_() for t in inputs.operands]
    with torch.autocast(device, dtype=torch.bfloat16):
        (y,), _ = run(line, inputs)
        chain = onepass.Line(line).reference(*inputs.tensors)
    assert y.dtype == chain.dtype == torch.bfloat16
    exact_inputs = inputs.to(torch.float64)
    exact = onepass.Line(line).reference(*exact_inputs.tensors)
    check_error(y, chain, exact, line)
    grad = torch.randn_like(y)
    ours, theirs = gradients([y], inputs, [grad]), gradients([chain], inputs, [grad])
    for a, b, e, tensor in zip(ours, theirs, gradients([exact], exact_inputs, [grad.double()]), inputs.tensors):
        assert a.dtype == tensor.dtype
        check_error(a, b, e, line, precision=torch.bfloat16)


@pytest.mark.parametrize("which", [0, 1])
def test_a_matrix_of_another_dtype(which, device):
    """From there on everything has its dtype; what stood before keeps its own."""
    line = "keep | linear | bias | silu"
    inputs = make_inputs(line, (6, 33), torch.float32, device, out_features=9)
    inputs.operands[0] = inputs.operands[0].detach().bfloat16().requires_grad_()
    results, _ = run(line, inputs)
    assert [r.dtype for r in results] == [torch.bfloat16, torch.float32]
    grads = gradients([results[which]], inputs, [torch.randn_like(results[which])])
    for grad, tensor in zip(grads, inputs.tensors):
        assert grad is None or (grad.dtype == tensor.dtype and grad.shape == tensor.shape)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("shape, out_features", [((16, 8), 16), ((9, 5), 1), ((2, 8, 3), 33), ((1, 40), 70)])
def test_small_products(shape, out_features, dtype, device):
    for line in ("linear | bias", "scale | bias | linear"):
        check_line(line, make_inputs(line, shape, dtype, device, out_features=out_features), slack=2.0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, device):
    line = "add | keep | layer_norm(1e-5) | scale | bias | linear | bias | gelu"
    compiled = torch.compile(lambda *t: onepass.fused(line, *t), fullgraph=True, dynamic=dynamic)
    for rows in (6, 7):
        inputs = make_inputs(line, (rows, 64), torch.float32, device, out_features=24)
        ours, expected = compiled(*inputs.tensors), onepass.fused(line, *inputs.tensors)
        grads = upstream(expected)
        for a, b in zip([*ours, *gradients(ours, inputs, grads)], [*expected, *gradients(expected, inputs, grads)]):
            assert_equal(a, b)


@pytest.mark.quick
def test_opcheck(device):
    line = "add | keep | layer_norm(1e-5) | scale | bias | linear | bias | gelu"
    inputs = make_inputs(line, (5, 32), torch.float32, device, out_features=8)
    tensors = [t.detach() for t in inputs.tensors]
    torch.library.opcheck(torch.ops.onepass.linear_forward, (tensors[0], tensors[1:], line, None, True))
    y, kept, product, statistics = torch.ops.onepass.linear_forward(tensors[0], tensors[1:], line, None, True)
    grads = [torch.randn_like(y), torch.randn_like(kept)]
    torch.library.opcheck(
        torch.ops.onepass.linear_backward,
        (grads, None, tensors[1:], kept, statistics, product, None, None, line, [1] * 6, 0b111111),
    )


def test_torch_funcs_grad(device):
    x, w = torch.randn(3, 4, 8, device=device, requires_grad=True), torch.randn(5, 8, device=device)
    grad = torch.func.grad(lambda t: onepass.fused("linear | tanh", t, w).sum())(x)
    assert_equal(grad, torch.autograd.grad(onepass.fused("linear | tanh", x, w).sum(), x)[0])


def test_lines_without_linear_are_as_they_were():
    for line in NAMED_LINES:
        assert onepass.Line(line).weight is None

"""Hard numbers: large means, constant rows, infinities and NaN, fully masked rows, the tails of the activations."""

import math

import pytest
import torch
import torch.nn.functional as F

import onepass
from helpers import (
    DTYPES,
    OF_POSITIVE,
    Inputs,
    as_tuple,
    assert_equal,
    check_error,
    check_line,
    gradients,
    make_inputs,
    run,
    shown,
    upstream,
)
from onepass.reference import ACTIVATIONS, compose

INF, NAN = math.inf, math.nan
NORMS = ["layer_norm(1e-5)", "rms_norm(1e-6)", "l2_norm", "softmax", "log_softmax"]


def exact_of(line, x):
    return compose(onepass.Line(line).words, x.double(), eps_dtype=x.dtype)[0]


@pytest.mark.parametrize("mean", [1e2, 1e4, 1e6])
@pytest.mark.parametrize(
    "line", ["layer_norm(1e-5) | scale | bias", "rms_norm(1e-6) | scale", "l2_norm", "softmax", "log_softmax"]
)
def test_large_means(line, mean, device):
    """E[x²] - mean² in fp32 would lose everything here."""
    inputs = make_inputs(line, (16, 1000), torch.float32, device)
    inputs.x.data += mean
    check_line(line, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_means_with_small_variance(dtype, device):
    inputs = make_inputs("layer_norm(1e-5) | scale | bias", (16, 768), dtype, device)
    inputs.x.data = inputs.x.data * 0.25 + 64
    check_line("layer_norm(1e-5) | scale | bias", inputs)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1000.0, 0.1])
@pytest.mark.parametrize("columns", [64, 1000])
def test_constant_rows(value, columns, device):
    """The variance is zero but for the rounding of the mean, and 1/√eps is 316."""
    x = torch.full((4, columns), value, device=device, requires_grad=True)
    y = onepass.fused("layer_norm(1e-5)", x)
    unit = torch.finfo(torch.float32).eps * max(abs(value), 1e-30) / math.sqrt(1e-5)
    assert y.abs().max().item() <= 2 * unit
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert dx.isfinite().all() and dx.abs().max() < 2000
    assert_equal(onepass.fused("softmax", x.detach())[:, :1], onepass.fused("softmax", x.detach())[:, -1:])
    torch.testing.assert_close(
        onepass.fused("rms_norm(1e-6)", x.detach()), F.rms_norm(x.detach(), (columns,), eps=1e-6)
    )


def test_values_whose_square_overflows_16_bits(device):
    """fp16: 300² is beyond 65504; the square is taken in fp32."""
    for line in ("layer_norm(1e-5)", "rms_norm(1e-6)"):
        x = torch.randn(8, 500, device=device).mul(3000).half().requires_grad_()
        check_line(line, Inputs(x))


def test_rows_whose_square_overflows_float32_follow_pytorch(device):
    x = torch.tensor([[1e25, -1e25, 3e24, 1.0]], device=device)
    ours, theirs = onepass.fused("rms_norm(1e-6)", x), F.rms_norm(x, (4,), eps=1e-6)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_infinities_and_nan_through_activations(name, dtype, device):
    """As PyTorch's fp64, which has no fast path: its fp32 gelu on the CPU gives NaN at infinity (seen in 2.15)."""
    special = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1e30, -1e30], dtype=torch.float64).repeat(5)
    line = shown(name)
    with_bias = onepass.fused(
        f"bias | {line}", special.to(dtype).to(device), torch.zeros(35, dtype=dtype, device=device)
    )
    for ours in (onepass.fused(line, special.to(dtype).to(device)), with_bias):
        exact = exact_of(line, special.to(dtype)).to(dtype)  # infinite where the dtype cannot hold it
        if name == "gelu":  # at -infinity PyTorch gives -inf · 0, we may give the limit
            ours = torch.where((ours == 0) & (special.to(ours) == -INF), NAN, ours)
        assert_equal(ours.isnan().cpu(), exact.isnan(), "NaN")
        assert_equal(ours.isinf().cpu(), exact.isinf(), "infinities")
        assert torch.equal(ours.cpu()[exact.isinf()] > 0, exact[exact.isinf()] > 0)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_nan_comes_back_as_nan(name, device):
    other = 0.5 if name in OF_POSITIVE else -1.0
    x = torch.tensor([NAN, 1.0, NAN, other, 2.0], device=device, requires_grad=True)
    y = onepass.fused(shown(name), x)
    assert y.isnan().tolist() == [True, False, True, False, False]
    (dx,) = torch.autograd.grad(y, x, torch.tensor([1.0, NAN, 1.0, 1.0, 1.0], device=device))
    assert not dx[3:].isnan().any()
    if name != "relu":  # of relu PyTorch gives the gradient of a NaN as if it were positive
        assert dx[1].isnan(), "a NaN gradient is lost"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "line",
    [
        *(form.format(shown(name)) for form in ("{}", "bias | {}", "gate({})", "gated({})") for name in ACTIVATIONS),
        *("mask", "causal", "times", "div", "bias | mask | mul(2)", "clamp(-1.5, inf)", "leaky_relu(0)"),
    ],
)
def test_infinite_and_nan_gradients(line, dtype, device):
    """Finite where PyTorch's are: what selects in forward selects in backward, and multiplies nothing by zero."""
    places = torch.tensor([-30, -4, -3, -1, -0.0, 0, 0.5, 1, 3, 4, 30], dtype=dtype, device=device)
    inputs = make_inputs(line, (4, 4, len(places)), dtype, device)
    inputs.x.data = places.expand_as(inputs.x).clone()
    for operand in inputs.operands:  # of gated, what its activation takes
        if operand.is_floating_point() and line.startswith("gated"):
            operand.data = places.expand_as(operand).clone()
    grad = torch.tensor([1.0, NAN, INF, -INF], dtype=dtype, device=device)[:, None, None].expand_as(inputs.x)
    (ours,), _ = run(line, inputs)
    (exact,) = compose(
        onepass.Line(line).words,
        inputs.x.double(),
        [o.double() if o.is_floating_point() else o for o in inputs.operands],
    )
    differentiable = inputs.differentiable
    for got, expected in zip(
        torch.autograd.grad(ours, differentiable, grad),
        torch.autograd.grad(exact, differentiable, grad.double()),
        strict=True,
    ):
        assert_equal(got.isfinite(), expected.isfinite(), line)
        finite = expected.isfinite()
        torch.testing.assert_close(got[finite], expected[finite])


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("columns", [5, 64, 1000])
@pytest.mark.parametrize("line", NORMS)
def test_infinities_and_nan_stay_in_their_row(line, columns, bad, device):
    x = torch.randn(6, columns, device=device)
    clean = onepass.fused(line, x)
    x[2, columns // 2] = bad
    ours, exact = onepass.fused(line, x), exact_of(line, x.cpu())  # rms_norm on CUDA makes the whole row NaN (2.11)
    assert_equal(ours[2].isnan().cpu(), exact[2].isnan(), line)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(ours[others], clean[others])


class TestMaskedRows:
    def masks(self, device, columns):
        keep = torch.rand(6, columns, device=device) < 0.7
        keep[:, 0] = True
        keep[1] = keep[4] = False
        yield keep
        yield torch.zeros(6, columns, device=device).masked_fill(~keep, -INF)

    @pytest.mark.parametrize("columns", [1, 7, 64, 1000])
    def test_fully_masked_rows_are_zeros(self, columns, device):
        for mask in self.masks(device, columns):
            x = torch.randn(6, columns, device=device, requires_grad=True)
            y = onepass.fused("mask | softmax", x, mask)
            assert not y[1].any() and not y[4].any() and y.isfinite().all()
            kept = [0, 2, 3, 5]
            torch.testing.assert_close(y[kept].sum(-1), torch.ones(4, device=device))
            (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
            assert dx.isfinite().all() and not dx[1].any() and not dx[4].any()
            assert columns == 1 or dx[kept].any()

    def test_what_is_masked_gets_no_gradient(self, device):
        mask = torch.rand(8, 100, device=device) < 0.5
        x = torch.randn(8, 100, device=device, requires_grad=True)
        y = onepass.fused("mask | softmax", x, mask)
        (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
        assert not y[~mask].any() and not dx[~mask].any()

    def test_masked_nan_and_infinity_do_not_leak(self, device):
        mask = torch.ones(4, 50, dtype=torch.bool, device=device)
        mask[:, 10:20] = False
        x = torch.randn(4, 50, device=device)
        clean = onepass.fused("mask | softmax", x, mask)
        x[:, 10:15], x[:, 15:20] = NAN, INF
        assert torch.equal(onepass.fused("mask | softmax", x, mask), clean)

    @pytest.mark.parametrize("shape", [(3, 7, 7), (2, 3, 5, 9), (2, 9, 5), (1, 64)], ids=str)
    def test_causal_follows_the_last_two_dimensions(self, shape, device):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = onepass.fused("causal | softmax", x)
        lower = torch.ones(shape[-2:], dtype=torch.bool, device=device).tril()
        torch.testing.assert_close(y, x.masked_fill(~lower, -INF).softmax(-1))
        (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
        assert not dx[..., ~lower].any()

    def test_an_additive_mask_of_the_smallest_number_is_no_full_mask(self, device):
        """As transformers build theirs: finfo.min everywhere gives uniform probabilities, not zeros."""
        x = torch.zeros(2, 10, device=device)
        mask = torch.full((2, 10), torch.finfo(torch.float32).min, device=device)
        torch.testing.assert_close(onepass.fused("mask | softmax", x, mask), torch.full((2, 10), 0.1, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("line", ["softmax", "mul(1) | softmax"])
@pytest.mark.parametrize("columns", [64, 4096])
def test_softmax_of_scores_far_from_zero(columns, line, dtype, device):
    """Half of a row is masked, the other so low that exp(-score) overflows; and rows at the ends of the range."""
    rest = torch.linspace(-1000, -995, columns // 2)
    half_masked = torch.cat([torch.full((columns // 2,), -INF), rest])
    least = torch.finfo(dtype).min
    x = torch.stack([half_masked, half_masked.flip(0), rest.repeat(2), torch.full((columns,), -INF)]).to(dtype)
    ends = torch.full((4, columns), least, dtype=dtype)
    ends[1, 3], ends[2, 7] = 1.0, -least
    ends[3, columns // 2 :] = 1.0
    x = torch.cat([x, ends]).to(device)
    exact = x.double().cpu().softmax(-1).nan_to_num(0).to(dtype)  # a row that is masked as a whole gives zeros
    ours = onepass.fused(line, x).cpu()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(ours, exact, rtol=tolerance, atol=1e-30)


@pytest.mark.parametrize("scores", [1e4, 1e30])
def test_softmax_of_large_scores(scores, device):
    x = torch.randn(4, 100, device=device) * scores
    torch.testing.assert_close(onepass.fused("softmax", x), x.softmax(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_tails_of_the_activations(name, dtype, device):
    """Slices of the argument, each judged by itself, so that no large value hides what happens to small ones."""
    line = shown(name)
    for low, high in [(-100, -30), (-30, -13), (-13, -6), (-6, -3), (-3, -1), (-1, 1), (1, 6), (6, 30), (30, 100)]:
        x = torch.linspace(low, high, 4096, dtype=torch.float64).to(dtype).to(device).requires_grad_()
        exact_x, chain_x = x.detach().double().requires_grad_(), x.detach().clone().requires_grad_()
        y, exact, chain = onepass.fused(line, x), exact_of(line, exact_x), compose(onepass.Line(line).words, chain_x)[0]
        what = f"{name} on [{low}, {high}]"
        check_error(y, chain, exact, what, scale=1e-30)
        (dx,), (dexact,), (dchain,) = (
            torch.autograd.grad(out, at, torch.ones_like(out))
            for out, at in ((y, x), (exact, exact_x), (chain, chain_x))
        )
        # A derivative that has died out is judged against one ULP of what the derivative is elsewhere: around 1.
        check_error(dx, dchain, dexact, f"derivative of {what}", scale=1e-6)


def test_small_arguments_keep_their_digits(device):
    """f(x) around 0 to a few ULP relative: what expm1, log1p and tanh are for."""
    x = torch.logspace(-30, -2, 2000, dtype=torch.float64).to(torch.float32).to(device)
    for line, f in {"tanh": torch.tanh, "elu(1.0)": F.elu, "gelu": F.gelu, "silu": F.silu, "mish": F.mish}.items():
        for sign in (1, -1):
            ours, exact = onepass.fused(line, sign * x).double(), f(sign * x.double())
            assert ((ours - exact) / exact).abs().max() < 6 * torch.finfo(torch.float32).eps, line


def test_zero_weights(device):
    """gamma = 0: nothing divides by it."""
    inputs = make_inputs("layer_norm(1e-5) | scale | bias", (9, 64), torch.float32, device)
    inputs.operands[0].data[::2] = 0
    check_line("layer_norm(1e-5) | scale | bias", inputs)


def test_16_bit_results_round_once(device):
    """bias, gelu, dropout and add in bfloat16: half a unit of the fp64 result everywhere, and 2^-12 of gelu."""
    line = "bias | gelu | dropout(0.1) | add"
    inputs = make_inputs(line, (64, 300), torch.bfloat16, device)
    (y,), state = run(line, inputs)
    x, (bias, residual) = _wide(inputs)
    exact = compose(onepass.Line(line).words, x, [bias, residual], state)[0]
    unit = torch.finfo(torch.bfloat16).eps * torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(1e-30))))
    assert ((y.double() - exact).abs() <= 0.5001 * unit + 2**-12 * (exact - residual).abs()).all()


def _wide(inputs):
    wide = inputs.to(torch.float64)
    return wide.x.detach(), [o.detach() for o in wide.operands]


def test_gradients_of_a_tall_sum(device):
    """A column's gradient over 2^17 rows, summed in fp32 but not one after the other."""
    inputs = make_inputs("layer_norm(1e-5) | scale | bias", (2**17, 8), torch.float32, device)
    results = (onepass.fused("layer_norm(1e-5) | scale | bias", inputs.x, *inputs.operands),)
    grads = upstream(results)
    _, _, dbias = gradients(results, inputs, grads)
    exact = grads[0].double().sum(0)
    bound = 8 * torch.finfo(torch.float32).eps * grads[0].double().square().sum(0).sqrt()
    assert ((dbias.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("columns", [8, 1000, 4097])
@pytest.mark.parametrize("line", ["layer_norm(1e-12) | scale | bias", "add | keep | layer_norm(1e-12) | scale | bias"])
def test_rows_whose_deviation_is_a_few_units_of_their_mean(line, columns, device):
    """The mean, rounded, is off by a good part of the deviation."""
    x = 1024 + torch.randint(-6, 7, (5, columns), device=device) * 2.0**-13
    operands = [torch.zeros_like(x)] if "add" in line else []
    scale, bias, upstream = (torch.randn(n, columns, device=device).squeeze(0) for n in (1, 1, 5))

    def gradients_of(call, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, *operands, scale, bias)]
        y = as_tuple(call(*leaves))[0]
        return [y, *torch.autograd.grad(y, leaves, upstream.to(dtype))]

    def exact(x, *rest):
        *_, scale, bias = rest
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt() * scale + bias + 0 * sum(rest[:-2])

    ours = gradients_of(onepass.Line(line), torch.float32)
    expected = gradients_of(exact, torch.float64)
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if not (operands and i == 2):  # the residual's gradient is x's
            assert (a - b).norm() <= 1e-6 * b.norm(), i


def test_soft_capped_scores(device):
    """Capped by tanh, which multiplies its error by the cap; over many draws, since one draw rounds by luck."""
    line, ours, theirs = onepass.Line("mul(0.02) | tanh | mul(50.0) | softmax"), 0.0, 0.0
    for seed in range(20):
        scores = 10 * torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).to(device)
        exact = line.reference(scores.double())
        ours += (line(scores) - exact).square().sum().item()
        theirs += (line.reference(scores) - exact).square().sum().item()
    assert ours**0.5 <= 1.15 * theirs**0.5

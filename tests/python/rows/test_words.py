"""Every word of the vocabulary: error ratio forward and backward, and gradcheck in fp64."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import onepass
from helpers import DTYPES, OF_POSITIVE, assert_equal, check_line, make_inputs, shown, words_of

pytestmark = pytest.mark.quick

# The shortest line that shows the word. An activation follows a bias: that line is compiled ahead of time.
LINES = {
    "bias": "bias | tanh",
    "scale": "scale",
    "mul": "mul(0.7)",
    "add": "add",
    "sub": "sub",
    "times": "times",
    "div": "div",
    "dropout": "dropout(0.25)",
    "mask": "mask | softmax",
    "causal": "causal | softmax",
    "rope": "rope",
    "keep": "keep",
    "layer_norm": "layer_norm(1e-5)",
    "rms_norm": "rms_norm(1e-6)",
    "l2_norm": "l2_norm",
    "softmax": "softmax",
    "log_softmax": "log_softmax",
    "logsumexp": "logsumexp",
    "entropy": "entropy",
    "sum": "sum",
    "mean": "mean",
    "amax": "amax",
    "cross_entropy": "cross_entropy",
    "logprob": "logprob",
    "kl_div": "kl_div(0.3, 2)",
    "round": "scale | round | scale",
}
# What gives codes is in test_quantize.py.
VOCABULARY = [w for w in onepass.words() if w.kind != "contraction" and "gives_codes" not in w.properties]
ACTIVATIONS = [word.name for word in VOCABULARY if word.kind == "activation"]


def of_its_domain(activation, word):
    return f"abs | {word}" if activation in OF_POSITIVE else word


def lines():
    for word in VOCABULARY:
        if word.kind == "activation":
            yield f"bias | {of_its_domain(word.name, shown(word.name))}"
        elif word.kind == "gate":
            named = ACTIVATIONS if word.name == "gate" else ("silu", "clamp", "exp")
            yield from (of_its_domain(name, f"{word.name}({shown(name)})") for name in named)
        else:
            yield LINES[word.name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("line", list(lines()))
def test_error_is_no_more_than_pytorchs(line, dtype, device):
    # The root mean square error of kl_div's gradients is .52 and .94 of PyTorch's on CUDA (of 100 seeds); the largest
    # is luck.
    slack = 2.0 if line.startswith("kl_div") else 1.0
    check_line(line, make_inputs(line, (37, 200), dtype, device), slack=slack)


@pytest.mark.parametrize("line", ["bias | gelu", "layer_norm(1e-5) | scale | bias", "rms_norm(1e-6) | scale", "scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_parameters_with_16_bit_activations(line, dtype, device):
    inputs = make_inputs(line, (37, 200), dtype, device, parameter_dtype=torch.float32)
    _, grads = check_line(line, inputs)
    assert all(g.dtype == torch.float32 for g in grads[1:])


@pytest.mark.parametrize("line", ["bias | gelu", "gate(silu)", "layer_norm(1e-5) | scale | bias", "softmax"])
def test_float64(line, device):
    """fp64 has fp64 arithmetic: an fp32 path would be wrong by 1e-7."""
    check_line(line, make_inputs(line, (5, 67), torch.float64, device))


def test_additive_mask(device):
    line = "mask | softmax"
    inputs = make_inputs(line, (6, 9, 70), torch.float32, device, bool_mask=False)
    _, (dx, dmask) = check_line(line, inputs)
    assert torch.equal(dx, dmask)


@pytest.mark.parametrize("line", list(lines()))
def test_gradcheck(line, device):
    inputs = make_inputs(line, (3, 6 if line == "rope" else 5), torch.float64, device, seed=3)
    held = {i: t for i, t in enumerate(inputs.operands) if not t.requires_grad}

    def function(x, *differentiable):
        given = iter(differentiable)
        operands = [held[i] if i in held else next(given) for i in range(len(inputs.operands))]
        generator = torch.Generator(device).manual_seed(5)
        return onepass.fused(line, x, *operands, generator=generator)

    assert gradcheck(function, tuple(inputs.differentiable))


def test_gradcheck_of_an_additive_mask(device):
    inputs = make_inputs("mask | softmax", (3, 5), torch.float64, device)
    mask = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(lambda x, m: onepass.fused("mask | softmax", x, m), (inputs.x, mask))


@pytest.mark.parametrize("line", ["add | keep | layer_norm(1e-5) | scale | bias", "keep | add | keep | softplus | add"])
def test_gradcheck_of_kept_values(line, device):
    inputs = make_inputs(line, (3, 5), torch.float64, device)
    assert gradcheck(lambda x, *operands: onepass.fused(line, x, *operands), tuple(inputs.tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [-3, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 7])
def test_powers(p, dtype, device):
    """Of negative bases where the exponent is whole; 0 where it is 0, and PyTorch's infinities at 0."""
    x = torch.tensor([-2.5, -1, -0.75, -0.0, 0, 0.3, 1, 4, math.inf, -math.inf, math.nan], dtype=dtype, device=device)
    x.requires_grad_()
    ours, theirs = onepass.fused(f"pow({p})", x), torch.pow(x, p)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-15, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=0, equal_nan=True)
    (dx,), (expected,) = (torch.autograd.grad(y, x, torch.full_like(y, 1.5)) for y in (ours, theirs))
    torch.testing.assert_close(dx, expected, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize("bounds", [(-1, 1), (0, math.inf), (-math.inf, 0.5), (1, -1), (0.25, 0.25)])
def test_clamp_is_torchs(bounds, device):
    """At bounds, of NaN and infinities, with bounds in the wrong order. At a bound the gradient is 0, as PyTorch's is
    since some version behind 2.11, whose is 1."""
    x = torch.tensor(
        [-2, -1, -0.0, 0, 0.25, 0.5, 1, 3, math.inf, -math.inf, math.nan], device=device, requires_grad=True
    )
    ours = onepass.fused(f"clamp({bounds[0]}, {bounds[1]})", x)
    theirs = x.clamp(*(None if math.isinf(b) else b for b in bounds))
    assert_equal(ours, theirs)
    (dx,), (expected,) = (torch.autograd.grad(y, x, torch.ones_like(y)) for y in (ours, theirs))
    at_bound = sum(x.detach() == bound for bound in bounds if math.isfinite(bound)) > 0
    assert_equal(dx, expected.masked_fill(at_bound, 0))


def test_default_numbers():
    defaults = {"layer_norm": 1e-5, "dropout": 0.5, "elu": 1.0, "leaky_relu": 0.01}
    for name, default in defaults.items():
        assert words_of(name)[0].parameters == (default,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rms_norm_without_eps_adds_what_torch_adds(dtype, device):
    """Rows so small that eps decides the result."""
    x = torch.full((4, 64), 3e-4, dtype=dtype, device=device)
    ours = onepass.fused("rms_norm", x)
    torch.testing.assert_close(ours, torch.nn.functional.rms_norm(x, (64,)))


def test_numbers_are_not_part_of_the_kernel(device):
    """Two lines that differ in a number only: the second must not run with the first one's."""
    x = torch.randn(7, 33, device=device)
    for factor in (0.7, -3.0):
        torch.testing.assert_close(onepass.fused(f"mul({factor})", x), x * factor)


def test_round_is_keep_without_a_result(device):
    x, r = (torch.randn(8, 96, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    w = torch.randn(96, device=device)
    y, _ = onepass.fused("add | keep | rms_norm(1e-6) | scale", x, r, w)
    rounded = onepass.fused("add | round | rms_norm(1e-6) | scale", x, r, w)
    assert torch.equal(y, rounded) and not torch.equal(y, onepass.fused("add | rms_norm(1e-6) | scale", x, r, w))
    for ours, kept in zip(*(torch.autograd.grad(of.sum(), (x, r)) for of in (rounded, y)), strict=True):
        assert torch.equal(ours, kept)


def test_lengths_below_eps_are_torchs(device):
    """Rows longer and shorter than the number, one of exactly its length, and a row of zeros."""
    x = torch.randn(6, 40, device=device) * torch.tensor([1, 0.1, 0.01, 0, 1, 1], device=device)[:, None]
    x[4] = 0
    x[4, 3] = 0.5
    x.requires_grad_()
    ours, theirs = onepass.fused("l2_norm(0.5)", x), torch.nn.functional.normalize(x, dim=-1, eps=0.5)
    torch.testing.assert_close(ours, theirs)
    dy = torch.randn_like(ours)
    (dx,), (expected,) = (torch.autograd.grad(y, x, dy) for y in (ours, theirs))
    expected[4] = dy[4] / 0.5  # at the number, as in PyTorch 2.15; 2.11 takes the other side
    torch.testing.assert_close(dx, expected)


def test_kept_values_come_in_order(device):
    x, r, s = (torch.randn(4, 40, device=device) for _ in range(3))
    line = "keep | add | keep | softplus | add"
    result, first, second = onepass.fused(line, x, r, s)
    assert torch.equal(first, x) and torch.equal(second, x + r)
    torch.testing.assert_close(result, torch.nn.functional.softplus(x + r) + s)


def test_keep_rounds_what_the_rest_of_the_line_sees(device):
    """The result is what the row word gives of the kept tensor, to the bit."""
    x, r = (torch.randn(8, 96, device=device, dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(96, device=device)
    y, h = onepass.fused("add | keep | rms_norm(1e-6) | scale", x, r, w)
    assert torch.equal(h, x + r)
    assert torch.equal(y, onepass.fused("rms_norm(1e-6) | scale", h, w))

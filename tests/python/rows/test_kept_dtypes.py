"""Values kept in float32 beside x of another dtype: `keep(float32)`, everywhere a line goes."""

import copy

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import onepass
from helpers import as_tuple, check_line, make_inputs, run
from onepass import _native

RESIDUAL = "add | keep(float32) | rms_norm(1e-6) | scale"
LINES = [
    RESIDUAL,
    "keep(float32)",
    "add | keep(float32) | gelu",
    "add | keep(float32) | bias | tanh | keep",
    "rms_norm(1e-6) | scale | add | keep(float32) | layer_norm(1e-5) | scale | bias",
    "bias | dropout(0.25) | add | keep(float32) | rms_norm(1e-6)",
    "add | keep(float32) | rms_norm(1e-3) | keep | logsumexp | entropy",
]
HALF = [torch.bfloat16, torch.float16]


def expected(line, *tensors):
    return as_tuple(onepass.Line(line).reference(*tensors))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 256), (7,), (0, 8)], ids=str)
def test_a_kept_value_is_float32_or_wider(shape, dtype, device):
    x, residual = torch.randn(shape, device=device).to(dtype), torch.randn(shape, device=device)
    y, kept = onepass.fused("add | keep(float32) | gelu", x, residual)
    assert y.dtype == dtype and kept.dtype == torch.promote_types(dtype, torch.float32)
    if dtype in HALF:
        assert torch.equal(kept, x.float() + residual)  # not rounded to x's dtype
        torch.testing.assert_close(y, torch.nn.functional.gelu(kept).to(dtype))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [8, 77, 1000])
@pytest.mark.parametrize("line", LINES)
def test_error_is_no_more_than_pytorchs(line, columns, dtype, device):
    check_line(line, make_inputs(line, (3, 5, columns), dtype, device, parameter_dtype=torch.float32), slack=3.0)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_have_the_dtypes_of_their_tensors(residual_dtype, device):
    x = torch.randn(6, 40, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(6, 40, device=device, dtype=residual_dtype, requires_grad=True)
    g = torch.randn(40, device=device, requires_grad=True)
    y, kept = onepass.fused(RESIDUAL, x, residual, g)
    upstream = torch.randn_like(y), torch.randn_like(kept)
    found = torch.autograd.grad((y, kept), (x, residual, g), upstream)
    assert [t.dtype for t in found] == [x.dtype, residual.dtype, g.dtype]
    wide = [t.detach().double().requires_grad_() for t in (x, residual, g)]
    exact = torch.autograd.grad(expected(RESIDUAL, *wide), wide, [t.double() for t in upstream])
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-2 if ours.dtype == x.dtype else 1e-4, atol=1e-4)


@pytest.mark.parametrize("line", LINES[:5])
def test_derivatives_in_float64(line, device):
    inputs = make_inputs(line, (2, 5), torch.float64, device)
    assert gradcheck(lambda *tensors: onepass.fused(line, *tensors), tuple(inputs.tensors))
    assert gradgradcheck(lambda *tensors: onepass.fused(line, *tensors), tuple(inputs.tensors))


@pytest.mark.parametrize("given", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("line", [RESIDUAL, "add | keep(float32) | gelu", "add | keep(float32) | logsumexp"])
def test_second_derivatives_beside_16_bits(line, given, device):
    """As of the reference, whose kept value is float32, too."""
    inputs = make_inputs(line, (4, 16), torch.bfloat16, device)

    def second(call):
        own = [t.detach().clone().requires_grad_() for t in inputs.tensors]
        results = call(*own)
        first = torch.autograd.grad(
            [results[i].square().sum() for i in given], own, create_graph=True, allow_unused=True
        )
        total = sum(g.float().square().sum() for g in first if g is not None)
        return torch.autograd.grad(total, own, allow_unused=True)

    pairs = zip(
        second(lambda *ts: onepass.fused(line, *ts)), second(lambda *ts: onepass.Line(line).reference(*ts)), strict=True
    )
    for ours, theirs in pairs:
        if theirs is None:
            assert ours is None or not ours.any()
        else:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05 * float(theirs.abs().max()))


def test_what_backward_reads_is_the_kept_value(device):
    line = onepass.Line(RESIDUAL)
    assert line.resumes_from == 1 and not line.reads_x
    x = torch.randn(6, 40, device=device, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, kept = line(x, torch.randn(6, 40, device=device), torch.ones(40, device=device))
    assert [t.dtype for t in saved if t.shape == x.shape] == [torch.float32]
    assert any(t.data_ptr() == kept.data_ptr() for t in saved)
    # A number's gradient does not say what x's dtype is: x does.
    assert (
        onepass.Line("add | keep(float32) | logsumexp").reads_x and not onepass.Line("add | keep | logsumexp").reads_x
    )


def test_bytes():
    plain, wide = onepass.Line("add | keep | rms_norm | scale"), onepass.Line("add | keep(float32) | rms_norm | scale")
    shape, elements = (64, 256), 64 * 256
    a, b = plain.cost(shape, torch.bfloat16), wide.cost(shape, torch.bfloat16)
    assert b.forward.bytes - a.forward.bytes == 4 * elements  # the residual and its sum
    assert b.saved_bytes - a.saved_bytes == 2 * elements
    assert wide.cost(shape).forward.bytes == plain.cost(shape).forward.bytes


@pytest.mark.parametrize("stack", [False, True])
def test_lists(stack, device):
    xs = [torch.randn(3, 40, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    residuals = [torch.randn(3, 40, device=device, requires_grad=True) for _ in range(3)]
    g = torch.randn(40, device=device, requires_grad=True)
    results = onepass.fused(RESIDUAL, xs, residuals, g, stack=stack)
    each = [onepass.fused(RESIDUAL, x, r, g) for x, r in zip(xs, residuals)]
    for kind, theirs in zip(results, zip(*each), strict=True):
        for ours, their in zip(kind, theirs, strict=True):
            assert ours.dtype == their.dtype and torch.equal(ours, their)
    for last in (False, True):  # the kept values alone, and both
        ours = sum((k.float() * k.float()).sum() for i, k in enumerate(_flat(results)) if last or _is_kept(i, stack))
        theirs = sum((k.float() * k.float()).sum() for t in each for i, k in enumerate(t) if last or i == 1)
        wanted = [*xs, *residuals]
        for a, b in zip(
            torch.autograd.grad(ours, wanted, retain_graph=True), torch.autograd.grad(theirs, wanted, retain_graph=True)
        ):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


def _flat(results):
    return [t for kind in results for t in (kind if isinstance(kind, (list, tuple)) else [kind])]


def _is_kept(i, stack):
    return i >= (1 if stack else 3)


def test_vmap(device):
    x = torch.randn(4, 3, 16, device=device, dtype=torch.bfloat16)
    residual, g = torch.randn(4, 3, 16, device=device), torch.randn(16, device=device)

    def call(x, r):
        return onepass.fused(RESIDUAL, x, r, g)

    for ours, theirs in zip(torch.func.vmap(call)(x, residual), call(x, residual), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)

    def loss(x, r):
        return sum(t.float().square().sum() for t in call(x, r))

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(x, residual)
    for ours, theirs in zip(each, torch.func.grad(loss, argnums=(0, 1))(x, residual), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


def test_forward_mode(device):
    x, residual = torch.randn(3, 16, device=device, dtype=torch.bfloat16), torch.randn(3, 16, device=device)
    tangents = torch.randn_like(x), torch.randn_like(residual)
    line = "add | keep(float32) | gelu"
    ours = torch.func.jvp(lambda *ts: onepass.fused(line, *ts), (x, residual), tangents)[1]
    theirs = torch.func.jvp(lambda *ts: onepass.Line(line).reference(*ts), (x, residual), tangents)[1]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("line", [RESIDUAL, "add | keep(float32) | gelu", "add | keep(float32) | rms_norm | logsumexp"])
def test_operators(line, device):
    inputs = make_inputs(line, (4, 16), torch.bfloat16, device)
    _, state = run(line, inputs)
    known = onepass.Line(line)
    args = (inputs.x.detach(), [t.detach() for t in inputs.operands], line, state)
    torch.library.opcheck(known.forward_op, (*args, True) if known.rowwise else args)


def test_compiled(device):
    def block(x, residual, g):
        y, residual = onepass.fused(RESIDUAL, x, residual, g)
        y, residual = onepass.fused(RESIDUAL, y, residual, g)
        return y, residual

    x = torch.randn(5, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual, g = (torch.randn(*s, device=device, requires_grad=True) for s in ((5, 32), (32,)))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(x, residual, g), block(x, residual, g), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    found = []
    for call in (compiled, block):
        y, kept = call(x, residual, g)
        found.append(torch.autograd.grad(y.float().sum() + kept.square().sum(), (x, residual, g)))
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.g = torch.nn.Parameter(torch.ones(16))

    def forward(self, x, residual):
        return onepass.fused(RESIDUAL, x, residual, self.g)


def test_exported():
    inputs = torch.randn(3, 16, dtype=torch.bfloat16), torch.randn(3, 16)
    model = Block()
    program = torch.export.export(model, inputs)
    for ours, theirs in zip(program.module()(*inputs), copy.deepcopy(model)(*inputs), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_layouts(dtype, device):
    base, wide = torch.randn(6, 4, 80, device=device).to(dtype), torch.randn(6, 4, 80, device=device)
    g = torch.randn(41, device=device)
    for x, r in ((base[..., :41], wide[..., 1:42]), (base[:, ::2, 3:44], wide[:1, ::2, :41])):
        ours = onepass.fused(RESIDUAL, x, r, g)
        theirs = onepass.fused(RESIDUAL, x.contiguous(), r.expand(x.shape).contiguous(), g)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_words_say_their_dtype():
    line = onepass.Line("add | keep( float32 ) | gelu")
    assert [w.dtype for w in line.words] == [None, "float32", None]
    assert repr(line) == "onepass.Line('add | keep(float32) | gelu')"
    assert _native.result_dtypes("keep | keep(float32) | sum", torch.float16) == [
        torch.float32,
        torch.float16,
        torch.float32,
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("keep(bfloat16)", "'keep' takes float32, got 'bfloat16'"),
        ("keep()", "expected a dtype"),
        ("keep(float32", "expected ')' to end 'keep'"),
        ("keep(float32) | linear", "in a line with a contraction"),
        ("linear | keep(float32)", "in a line with a contraction"),
        ("scores | keep(float32) | softmax", "in a line with a contraction"),
    ],
)
def test_errors(line, message):
    with pytest.raises(onepass.LineError) as error:
        onepass.Line(line)
    assert message in str(error.value)


def test_a_gradient_of_another_dtype_is_refused(device):
    x, residual = torch.randn(3, 8, device=device, dtype=torch.bfloat16), torch.randn(3, 8, device=device)
    line = "add | keep(float32) | gelu"
    y, kept = onepass.fused(line, x, residual)
    types = [_native.DTYPES[torch.float32]]
    with pytest.raises(
        RuntimeError, match="gradient of a value kept in float32 must have that dtype, got torch.bfloat16"
    ):
        torch.ops.onepass.elementwise_backward([y, y], None, [None], kept, None, line, types, 3)

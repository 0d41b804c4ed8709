"""Words by channels, whose operands have a number for some neighbouring columns, and group normalisation."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import onepass
from helpers import DTYPES, Inputs, check_error, check_line, make_inputs
from onepass import functional as OF
from onepass import nn as onn

NORM = "layer_norm(1e-5) | scale(channels) | bias(channels) | silu"
LINES = [
    NORM,
    "scale(channels)",
    "scale(1, channels) | bias(channels) | gelu",
    "add | keep | rms_norm(1e-6) | scale(channels)",
    "bias(channels) | gelu | log_softmax",
    "scale(0.5, channels) | bias | scale | logsumexp",
]
# x's shape, and the channels of each operand that has some.
SHAPES = {
    "rows": ((6, 48), [(4,), (3,)]),
    "lanes of several channels": ((5, 7, 60), [(30,), (20,)]),
    "one channel": ((5, 33), [(1,), (1,)]),
    "a column each": ((5, 33), [(33,), (33,)]),
    "groups": ((3, 4, 96), [(4, 6), (4, 6)]),
    "batches": ((3, 4, 96), [(3, 1, 6), (12,)]),
    "both": ((3, 4, 96), [(3, 4, 6), (4, 8)]),
    "nested": ((2, 3, 5, 16), [(3, 1, 4), (2, 1, 1, 2)]),
    "odd": ((9, 77), [(7,), (11,)]),
    # Gradients are added up for 32 columns and more at a time.
    "units of groups": ((3, 4, 256), [(4, 4), (4, 2)]),
    "units of all rows": ((37, 640), [(5,), (20,)]),
    "units of some rows": ((2, 3, 5, 128), [(3, 1, 2), (2, 1, 1, 4)]),
    "units and columns": ((6, 96), [(3,), (32,)]),
}


def inputs_of(line, shapes, dtype, device, parameter_dtype=None, seed=0):
    shape, own = shapes
    whole = make_inputs(line, shape, dtype, device, parameter_dtype=parameter_dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    sizes = iter(own)
    words = [word for word in onepass.Line(line).words if word.operand != "none"]
    operands = [
        torch.randn(next(sizes), generator=generator, dtype=torch.float64)
        .to(parameter_dtype or dtype)
        .to(device)
        .requires_grad_()
        if "by_channels" in word.properties
        else operand
        for word, operand in zip(words, whole.operands, strict=True)
    ]
    return Inputs(whole.x, operands)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("line", LINES)
def test_results_and_gradients(line, shapes, dtype, device):
    check_line(line, inputs_of(line, shapes, dtype, device), slack=3.0)  # sums of few numbers, which cancel


@pytest.mark.parametrize("columns", [8192, 40960, 300_000])
def test_long_rows(columns, device):
    check_line(NORM, inputs_of(NORM, ((2, 4, columns), [(4, 8), (4, 8)]), torch.bfloat16, device), slack=2.0)


def test_float32_parameters_beside_16_bits(device):
    _, grads = check_line(NORM, inputs_of(NORM, SHAPES["groups"], torch.bfloat16, device, torch.float32))
    assert all(g.dtype == torch.float32 for g in grads[1:])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", [((2, 3, 12), [(3, 4), (6,)]), ((2, 64), [(2,), (1,)])], ids=["columns", "units"])
@pytest.mark.parametrize("line", LINES)
def test_gradcheck(line, sizes, device):
    inputs = inputs_of(line, sizes, torch.float64, device)

    def function(*tensors):
        return onepass.fused(line, *tensors)

    assert gradcheck(function, tuple(inputs.tensors))
    assert gradgradcheck(function, tuple(inputs.tensors))


def test_strided_operands_and_rows(device):
    x = torch.randn(4, 5, 24, device=device).transpose(0, 1).requires_grad_()
    g = torch.randn(6, 8, device=device)[:, ::2].t().requires_grad_()  # (4, 6), which lies otherwise
    ours = onepass.fused("scale(channels)", x, g)
    expected = x * g.repeat_interleave(4, -1)
    torch.testing.assert_close(ours, expected)
    dy = torch.randn_like(ours)
    for own, other in zip(torch.autograd.grad(ours, (x, g), dy), torch.autograd.grad(expected, (x, g), dy)):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("columns", [24, 768])
def test_lists(columns, device):
    xs = [torch.randn(n, columns, device=device, requires_grad=True) for n in (3, 5)]
    shared, own = torch.randn(6, device=device), [torch.randn(4, device=device) for _ in xs]
    operands = [t.requires_grad_() for t in (shared, *own)]
    results = onepass.fused("scale(channels) | bias(channels) | tanh", xs, shared, own)
    dys = [torch.randn_like(r) for r in results]
    expected = [
        torch.tanh(x * shared.repeat_interleave(columns // 6) + o.repeat_interleave(columns // 4))
        for x, o in zip(xs, own)
    ]
    for found, right in zip(results, expected):
        torch.testing.assert_close(found, right)
    found, right = (torch.autograd.grad(some, [*xs, *operands], dys) for some in (results, expected))
    for a, b in zip(found, right):
        torch.testing.assert_close(a, b)


def test_empty(device):
    for shape in ((0, 3, 8), (2, 0, 8)):
        x = torch.randn(shape, device=device, requires_grad=True)
        g = torch.randn(4, device=device, requires_grad=True)
        dx, dg = torch.autograd.grad(onepass.fused("scale(channels)", x, g).sum(), (x, g))
        assert dx.shape == shape
        assert torch.equal(dg, torch.zeros_like(g))


@pytest.mark.parametrize("columns", [24, 384])
def test_transforms(columns, device):
    x, g, b = (torch.randn(size, device=device) for size in ((3, 4, columns), (4, 6), (4, 6)))
    each = columns // 6
    line = "layer_norm(1e-5) | scale(channels) | bias(channels)"

    def plain(x, g, b):
        y = F.layer_norm(x, x.shape[-1:], eps=1e-5)
        return y * g.repeat_interleave(each, -1) + b.repeat_interleave(each, -1)

    def ours(x, g, b):
        return onepass.fused(line, x, g, b)

    many = torch.randn(5, 4, 6, device=device)
    torch.testing.assert_close(
        torch.func.vmap(ours, (None, 0, None))(x, many, b), torch.func.vmap(plain, (None, 0, None))(x, many, b)
    )
    loss = lambda f: lambda *t: f(*t).square().mean()  # noqa: E731
    of_samples = torch.func.vmap(torch.func.grad(loss(ours), (1, 2)), (None, 0, None))(x, many, b)
    expected = torch.func.vmap(torch.func.grad(loss(plain), (1, 2)), (None, 0, None))(x, many, b)
    for found, right in zip(of_samples, expected):
        torch.testing.assert_close(found, right)
    _, tangent = torch.func.jvp(ours, (x, g, b), (x, g, b))
    torch.testing.assert_close(tangent, torch.func.jvp(plain, (x, g, b), (x, g, b))[1])


@pytest.mark.parametrize("columns", [24, 96, 384])
@pytest.mark.parametrize("line", ["scale(channels) | bias(channels)", "scale(channels) | times", f"scale | {NORM}"])
def test_samples_of_one_row(line, columns, device):
    """Their gradients are whole, and stand in another order than sums do."""
    sizes = {"scale(channels)": (4,), "bias(channels)": (12,), "scale": (columns,), "times": (columns,)}
    names = [word.strip() for word in line.split("|")]
    tensors = [torch.randn(3, columns, device=device, dtype=torch.float64)]
    tensors += [torch.randn(3, *sizes[name], device=device, dtype=torch.float64) for name in names if name in sizes]
    places = tuple(range(len(tensors)))

    def ours(*given):
        return onepass.fused(line, *given).square().sum()

    def plain(*given):
        return onepass.Line(line).reference(*given).square().sum()

    found, expected = (torch.func.vmap(torch.func.grad(f, places))(*tensors) for f in (ours, plain))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    one = tuple(t[0] for t in tensors)
    found, expected = (torch.func.jacrev(f, places)(*one) for f in (ours, plain))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_samples_share_no_operand_with_more_dimensions(device):
    x, g = torch.randn(2, 24, device=device), torch.randn(2, 4, device=device)
    for line, operand in (("scale(channels)", g), ("scale", torch.randn(2, 24, device=device))):
        with pytest.raises(RuntimeError, match="must broadcast to x, which has 1 dimensions"):
            torch.func.vmap(lambda a, line=line, operand=operand: onepass.fused(line, a, operand))(x)
    with pytest.raises(RuntimeError, match="at least one dimension"):
        torch.func.vmap(lambda a, b: onepass.fused("scale(channels)", a, b))(x, torch.randn(2, device=device))


@pytest.mark.parametrize("columns", [24, 384])
def test_compiled(columns, device):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, g, b: onepass.fused(NORM, x, g, b), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows in (3, 5, 6):
        tensors = [torch.randn(s, device=device, requires_grad=True) for s in ((rows, 4, columns), (4, 6), (4, 6))]
        ours, expected = compiled(*tensors), onepass.fused(NORM, *tensors)
        torch.testing.assert_close(ours, expected)
        dy = torch.randn_like(ours)
        for a, b in zip(torch.autograd.grad(ours, tensors, dy), torch.autograd.grad(expected, tensors, dy)):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("columns", [24, 384])
def test_opcheck(columns, device):
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((3, 4, columns), (4, 6), (6,))]
    arguments = (inputs[0], inputs[1:], "layer_norm(1e-5) | scale(channels) | bias(channels)", None, True)
    torch.library.opcheck(torch.ops.onepass.rowwise_forward.default, arguments)


class TestText:
    def test_infinities_are_numbers(self):
        numbers = [onepass.Line(f"scale({n})").words[0].parameters[0] for n in ("inf", "-inf")]
        assert numbers == [math.inf, -math.inf]

    def test_is_what_was_read(self):
        words = onepass.Line(" scale( 1,channels) | bias(channels )").words
        assert list(map(str, words)) == ["scale(1, channels)", "bias(channels)"]

    @pytest.mark.parametrize(
        ("line", "message"),
        {
            "scale(rows)": "'scale' knows the option 'channels', got 'rows'",
            "scale(channels, 1)": "expected '\\)' to end 'scale'",
            "scale(1, 2)": "knows the option 'channels', got '2'",
            "bias(1)": "'bias' takes no number",
            "bias()": "'bias' takes no number",
            "bias(channels) | linear": "'linear' in one line with 'bias\\(channels\\)': there is no kernel for both",
            "rope | scale(channels)": "'scale\\(channels\\)' in one line with 'rope': there is no kernel for both",
        }.items(),
    )
    def test_faults(self, line, message):
        with pytest.raises(onepass.LineError, match=message):
            onepass.Line(line)

    @pytest.mark.parametrize("size", [(5,), (0,), (), (2, 4), (48,)])
    def test_operands_that_are_no_channels(self, size, device):
        message = "operand 0 \\(g of 'scale'\\) must have one number for each channel, as many as divide the 24 columns"
        with pytest.raises(RuntimeError, match=message):
            onepass.fused("scale(channels)", torch.randn(3, 24, device=device), torch.randn(size, device=device))


class TestGroupNorm:
    SIZES = [
        ((3, 8, 4, 6), 2),
        ((2, 12, 5), 3),
        ((4, 12), 3),
        ((2, 32, 7, 7), 8),
        ((1, 8, 16), 1),
        ((2, 6, 3, 2, 5), 6),
    ]

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("affine", [(True, True), (True, False), (False, True), (False, False)])
    @pytest.mark.parametrize(("shape", "groups"), SIZES)
    def test_is_pytorchs(self, shape, groups, affine, dtype, device):
        generator = torch.Generator().manual_seed(3)

        def normal(*size):
            return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device).requires_grad_()

        x, dy = normal(*shape), normal(*shape).detach()
        weight, bias = (normal(shape[1]) if is_there else None for is_there in affine)
        given = [t for t in (x, weight, bias) if t is not None]

        def run(function, *tensors, wide=False):
            own = iter(t.detach().double().requires_grad_() if wide else t for t in tensors)
            x, w, b = (None if t is None else next(own) for t in (tensors[0], weight, bias))
            y = function(x, groups, w, b, 1e-4)
            wanted = [t for t in (x, w, b) if t is not None]
            return [y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))]

        def pytorchs(x, groups, w, b, eps):
            if w is None and b is not None:  # of which torch 2.11's backward fails on CUDA
                w = torch.ones_like(b)
            return F.silu(F.group_norm(x, groups, w, b, eps))

        ours = run(lambda *a: OF.group_norm(*a, activation="silu"), *given)
        theirs, exact = run(pytorchs, *given), run(pytorchs, *given, wide=True)
        for name, a, b, e in zip(("y", "dx", "dw", "db"), ours, theirs, exact):
            check_error(a, b, e, name, slack=2.0)

    @pytest.mark.parametrize("form", [torch.channels_last, torch.contiguous_format])
    def test_other_layouts(self, form, device):
        x = torch.randn(2, 8, 5, 6, device=device).contiguous(memory_format=form).requires_grad_()
        ours, expected = OF.group_norm(x, 4), F.group_norm(x, 4)
        torch.testing.assert_close(ours, expected)
        dy = torch.randn_like(expected)
        for a, b in zip(torch.autograd.grad(ours, x, dy), torch.autograd.grad(expected, x, dy)):
            torch.testing.assert_close(a, b)

    def test_module(self, device):
        torch.manual_seed(1)
        ours = onn.GroupNorm(4, 8, 1e-4, device=device, activation="silu")
        theirs = torch.nn.GroupNorm(4, 8, 1e-4, device=device)
        with torch.no_grad():
            for p in ours.parameters():
                p.normal_()
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(3, 8, 5, device=device)
        torch.testing.assert_close(ours(x), F.silu(theirs(x)))
        assert isinstance(ours, torch.nn.GroupNorm)
        assert "activation='silu'" in repr(ours)
        assert onn.GroupNorm(2, 4, bias=False, device=device).bias is None
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert torch.equal(again(x), ours(x))

    def test_compiled_without_breaks(self, device):
        module = onn.GroupNorm(4, 8, device=device)
        x = torch.randn(3, 8, 5, 5, device=device)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))

    @pytest.mark.parametrize(
        ("shape", "groups", "size", "error", "message"),
        [
            ((8,), 2, 8, RuntimeError, "at least 2 dimensions"),
            ((2, 8), 3, 8, RuntimeError, "divisible by num_groups"),
            ((2, 8), 0, 8, RuntimeError, "greater than 0"),
            ((2, 8), 2.0, 8, TypeError, "num_groups"),
            ((2, 8), 2, 4, RuntimeError, "a number for each of the 8 channels"),
            ((1, 4), 4, 4, ValueError, "more than 1 value per channel"),
            ((2, 8, 0), 4, 8, RuntimeError, "behind the channels to be greater than 0"),
        ],
    )
    def test_faults(self, shape, groups, size, error, message, device):
        x, w = torch.randn(shape, device=device), torch.randn(size, device=device)
        with pytest.raises(error, match=message):
            OF.group_norm(x, groups, w)

    def test_empty(self, device):
        assert OF.group_norm(torch.randn(0, 8, 4, device=device), 2).shape == (0, 8, 4)

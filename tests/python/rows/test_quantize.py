"""`quantize`: codes of float8 or int8 and the scales of their rows, bit for bit those of PyTorch's operators."""

import math
import re

import pytest
import torch

import onepass
from helpers import LARGEST_CODES, Inputs, assert_equal, check_codes, make_inputs
from onepass.reference import CODES

NORM = "times | add | keep | layer_norm(1e-6) | scale(1) | bias | quantize(fp8)"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def codes_of(values, name):
    """PyTorch's own of values that are scaled already."""
    largest = LARGEST_CODES[name]
    values = values.clamp(-largest, largest).float()
    if name == "int8":
        return values.nan_to_num(0).round().to(torch.int8)
    return values.to(CODES[name])


def assert_same_codes(ours, theirs, what=""):
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    if ours.dtype == torch.int8:
        assert torch.equal(ours, theirs), what
    else:
        assert_equal(ours.float(), theirs.float(), what)


def every_bfloat16():
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("name", CODES)
def test_every_bfloat16_is_rounded_as_by_torch(name, device):
    """Beside the largest number of the format, whose row has the scale 1."""
    numbers = every_bfloat16().to(device)
    numbers = numbers[numbers.abs() <= LARGEST_CODES[name]]  # neither infinite nor NaN
    rows = torch.cat((numbers, numbers.new_full((-numbers.numel() % 64,), 0.0))).view(-1, 64)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.cat((rows.to(dtype), rows.new_full((len(rows), 1), LARGEST_CODES[name]).to(dtype)), -1)
        codes, scale = onepass.fused(f"quantize({name})", x)
        assert (scale == 1).all() and scale.shape == (len(rows), 1)
        assert_same_codes(codes, codes_of(x, name), f"{name} of {dtype}")


@pytest.mark.parametrize("name", CODES)
def test_every_float32_near_a_tie(name, device):
    """Each code's midpoints and their neighbours, one unit in the last place away."""
    if name == "int8":
        codes = torch.arange(-127, 128, dtype=torch.float32)
    else:
        codes = torch.arange(0, 256).to(torch.uint8).view(CODES[name]).float()
        codes = codes[codes.isfinite()].unique()
    middle = (codes[1:] + codes[:-1]) / 2
    up, down = (torch.nextafter(middle, torch.tensor(sign * math.inf)) for sign in (1, -1))
    x = torch.cat((codes, middle, up, down, torch.tensor([LARGEST_CODES[name]]))).to(device)
    ours, scale = onepass.fused(f"quantize({name})", x)
    assert scale.item() == 1
    assert_same_codes(ours, codes_of(x, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 33), (2, 3, 256), (3, 1), (0, 4), (4, 0), (), (9, 1000)], ids=str)
@pytest.mark.parametrize("name", CODES)
def test_codes_and_scales(name, shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    line = f"quantize({name})"
    codes, scale = onepass.fused(line, x)
    assert codes.shape == x.shape and codes.dtype == CODES[name] and codes.is_contiguous()
    assert scale.shape == ((*shape[:-1], 1) if shape else ()) and scale.is_contiguous()
    assert scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if shape:
        theirs = onepass.Line(line).reference(x)
        assert torch.equal(scale, theirs[1])
        assert_same_codes(codes, theirs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 77, 1000])
@pytest.mark.parametrize("name", CODES)
def test_behind_a_norm(name, columns, dtype, device):
    line = NORM.replace("fp8", name)
    x, t, r = (torch.randn(3, 5, columns, device=device).to(dtype) for _ in range(3))
    g, b = (torch.randn(columns, device=device).to(dtype) for _ in range(2))
    codes, kept, scale = onepass.fused(line, x, t, r, g, b)
    assert [o.dtype for o in (codes, kept, scale)] == [CODES[name], dtype, torch.float32]
    assert torch.equal(kept, (x.float() * t.float() + r.float()).to(dtype)) or dtype == torch.float32
    check_codes(line, Inputs(x, [t, r, g, b]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [8, 20, 64, 1000, 9000])
@pytest.mark.parametrize(
    "line", ["rope", "rope(8)", "rope(8, interleaved)", "rms_norm(1e-6) | scale | rope", "rope | keep"]
)
def test_behind_rope(line, columns, dtype, device):
    """Halves of a row are together where they are turned, and codes go back to their own columns."""
    for name in CODES:
        check_codes(
            f"{line} | quantize({name})", make_inputs(f"{line} | quantize({name})", (3, columns), dtype, device)
        )


def test_where_each_code_is_behind_rope(device):
    x, tables = torch.arange(-8.0, 8.0, device=device)[None], torch.tensor([1.0, 0.0], device=device)
    cos, sin = tables[:, None].expand(2, 16)
    codes = onepass.fused("quantize(int8)", x)[0]
    assert torch.equal(onepass.fused("rope | quantize(int8)", x, cos, sin)[0], codes)
    static = torch.tensor(0.5, device=device)
    assert torch.equal(
        onepass.fused("rope | quantize(int8, static)", x, cos, sin, static)[0],
        onepass.fused("quantize(int8, static)", x, static)[0],
    )


@pytest.mark.parametrize("name", CODES)
def test_zeros_infinities_and_nan(name, device):
    inf, nan = math.inf, math.nan
    x = torch.tensor(
        [[0, -0.0, 0], [inf, 1, 0], [-inf, 1, 2], [nan, 1, 2], [1e-45, -1e-40, 0], [3e38, -1, 2]], device=device
    )
    line = f"quantize({name})"
    codes, scale = onepass.fused(line, x)
    theirs, their_scale = onepass.Line(line).reference(x)
    assert_same_codes(codes, theirs)
    assert_equal(scale, their_scale)
    assert scale[0].item() == 2.0**-126 and not codes[0].float().any()
    assert scale[1].item() == inf and scale[3].isnan().all()
    for row in range(3):
        first = codes[1 + row, 0].float()
        assert (first == 0) if name == "int8" else first.isnan()


def test_layouts(device):
    base = torch.randn(6, 4, 3, 80, device=device, dtype=torch.bfloat16)
    for x in (
        base[..., :41],
        base.transpose(0, 2),
        base[:, ::2],
        base[..., ::2],
        base[:1].expand(6, 4, 3, 80),
        base[..., 3:40],
    ):
        for ours, theirs in zip(
            onepass.fused("quantize(fp8)", x), onepass.fused("quantize(fp8)", x.contiguous()), strict=True
        ):
            assert torch.equal(ours.float(), theirs.float()) and ours.is_contiguous()


def test_gradients_are_those_of_kept_values(device):
    """Codes and scales have none; what stands behind the last kept value gets none."""
    tensors = [torch.randn(4, 40, device=device, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    columns = [torch.randn(40, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    codes, kept, scale = onepass.fused(NORM, *tensors, *columns)
    assert [t.requires_grad for t in (codes, kept, scale)] == [False, True, False]
    upstream = torch.randn_like(kept)
    found = torch.autograd.grad(kept, (*tensors, *columns), upstream, allow_unused=True)
    x, t, _ = tensors
    for ours, theirs in zip(found, (upstream * t, upstream * x, upstream, None, None), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)
    several = "bias | keep | layer_norm(1e-5) | scale | keep(float32) | rms_norm | quantize(int8)"
    x, b, g = tensors[0], *columns
    _, first, second, _ = onepass.fused(several, x, b, g)
    _, plain_first, plain = onepass.fused("bias | keep | layer_norm(1e-5) | scale | keep", x, b, g)
    given = torch.randn_like(second), torch.randn_like(first)
    ours = torch.autograd.grad((second, first), (x, b, g), given)
    for a, c in zip(ours, torch.autograd.grad((plain, plain_first), (x, b, g), given), strict=True):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("line", ["add | keep(float32) | rms_norm(1e-6) | scale | quantize(fp8)"])
def test_beside_a_residual_in_float32(line, device):
    x = torch.randn(6, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    residual, g = torch.randn(6, 64, device=device, requires_grad=True), torch.ones(64, device=device)
    codes, kept, scale = onepass.fused(line, x, residual, g)
    assert [t.dtype for t in (codes, kept, scale)] == [torch.float8_e4m3fn, torch.float32, torch.float32]
    dx, dresidual = torch.autograd.grad(kept.square().sum(), (x, residual))
    assert dx.dtype == torch.bfloat16 and torch.equal(dresidual, 2 * kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_shape", [(1,), (), (5, 1), (33,)], ids=str)
@pytest.mark.parametrize("name", CODES)
def test_static_scales(name, scale_shape, dtype, device):
    line = onepass.Line(f"quantize({name}, static)")
    x = torch.randn(4, 5, 33, device=device).to(dtype)
    x[0, 0, :3] = torch.tensor([math.inf, -math.inf, math.nan])
    for factor in (1.0, 1e-3):  # the latter saturates
        scale = factor * (0.01 + torch.rand(scale_shape, device=device))
        codes = line(x, scale)
        assert codes.shape == x.shape and codes.dtype == CODES[name]
        assert_same_codes(codes, line.reference(x, scale))
    assert LARGEST_CODES[name] == codes[0, 0, 0].float() == -codes[0, 0, 1].float()
    assert repr(line) == f"onepass.Line('quantize({name}, static)')"


def test_static_scales_behind_a_norm(device):
    line = "bias | keep | rms_norm(1e-6) | quantize(fp8, static)"
    x, b = torch.randn(6, 40, device=device, requires_grad=True), torch.randn(40, device=device, requires_grad=True)
    scale = torch.tensor(0.02, device=device, requires_grad=True)
    codes, kept = onepass.fused(line, x, b, scale)
    value = onepass.fused("rms_norm(1e-6)", kept.detach())
    assert ((codes.float() * scale - value).abs() <= (2.0**-4 * value.abs()).clamp(min=2.0**-10 * 0.02) + 1e-6).all()
    found = torch.autograd.grad(kept.square().sum(), (x, b, scale), allow_unused=True)
    assert torch.equal(found[0], 2 * kept) and found[1] is not None and found[2] is None
    codes, kept = torch.compile(onepass.fused, fullgraph=True, backend="aot_eager")(line, x, b, scale)
    assert torch.equal(torch.autograd.grad(kept.square().sum(), x)[0], found[0])


def in_groups(values, name, group):
    """Codes and scales by PyTorch's operators."""
    wide = values if values.dtype == torch.float64 else values.float()
    parts = wide.unflatten(-1, (values.shape[-1] // group, group))
    magnitudes = parts.abs().amax(-1, keepdim=True)
    scales = (magnitudes / torch.full_like(magnitudes, LARGEST_CODES[name])).clamp(min=2.0**-126)
    return codes_of(parts * (1 / scales), name).flatten(-2), scales.squeeze(-1)


GROUPS = [("fp8", 128), ("fp8e5m2", 128), ("int8", 128), ("fp8", 16), ("int8", 256)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "group"), GROUPS)
def test_codes_of_groups(name, group, dtype, device):
    line = onepass.Line(f"quantize({name}, {group})")
    assert repr(line) == f"onepass.Line('quantize({name}, {group})')"
    for shape in ((1,), (5, 2), (2, 3, 4), (7, 9), (1, 150), (37, 3), (0, 2), (4, 0)):
        x = torch.randn(*shape[:-1], shape[-1] * group, device=device).to(dtype)
        codes, scales = line(x)
        assert codes.shape == x.shape and codes.dtype == CODES[name] and codes.is_contiguous()
        assert scales.shape == shape and scales.is_contiguous()
        assert scales.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        if x.numel():
            for theirs in (in_groups(x, name, group), line.reference(x)):
                assert torch.equal(scales, theirs[1])
                assert_same_codes(codes, theirs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "line",
    [
        "silu | times | quantize(fp8, 128)",
        "add | keep | rms_norm(1e-6) | scale | quantize(fp8, 128)",
        "bias | dropout(0.3) | add | keep(float32) | layer_norm | rms_norm | quantize(int8, 64)",
    ],
)
def test_groups_behind_words(line, dtype, device):
    for shape in ((3, 5, 384), (2, 128), (300, 256)):
        check_codes(line, make_inputs(line, shape, dtype, device))


@pytest.mark.parametrize("name", CODES)
def test_groups_of_zeros_infinities_and_nan(name, device):
    inf, nan = math.inf, math.nan
    first = torch.tensor(
        [[0, -0.0, 0], [inf, 1, 0], [-inf, 1, 2], [nan, 1, 2], [1, 2, nan], [3e38, -1, 2]], device=device
    )
    x = torch.zeros(6, 128, device=device)
    x[:, 61:64] = first
    x = x.reshape(2, 3 * 128)
    codes, scales = onepass.fused(f"quantize({name}, 128)", x)
    rows = onepass.fused(f"quantize({name})", x.view(6, 128))
    assert_same_codes(codes.view(6, 128), rows[0])
    assert_equal(scales.view(6, 1), rows[1])
    assert scales.view(-1)[0].item() == 2.0**-126 and scales.view(-1)[1].item() == inf
    assert scales.view(-1)[3].isnan() and scales.view(-1)[4].isnan()


def test_groups_in_any_layout(device):
    for dtype in (torch.bfloat16, torch.float32):
        base = torch.randn(6, 4, 3, 400, device=device).to(dtype)
        for x in (
            base[..., :128],
            base[..., 1:257],
            base[..., 2:130],
            base[..., :256].transpose(0, 2),
            base[:, ::2, :, :384],
            base[..., :256:2],
            base[:1, ..., 4:132].expand(6, 4, 3, 128),
            base[0, 0, 0, 3:387],
        ):
            for line in ("quantize(fp8, 128)", "keep | rms_norm(1e-6) | quantize(fp8, 128)"):
                for ours, theirs in zip(onepass.fused(line, x), onepass.fused(line, x.contiguous()), strict=True):
                    assert torch.equal(ours.float(), theirs.float()) and ours.is_contiguous()
    # An operand that is one number for all, where x is one long row.
    t, x = torch.tensor(2.0, device=device), torch.randn(256, device=device)
    for shape in ((256,), (1, 256), (2, 128)):
        codes, scales = onepass.fused("times | quantize(fp8, 128)", x.view(shape), t)
        assert torch.equal(scales, in_groups(2 * x.view(shape), "fp8", 128)[1])
        assert_same_codes(codes, in_groups(2 * x.view(shape), "fp8", 128)[0])


GROUPED = "bias | keep | rms_norm(1e-6) | quantize(fp8, 32)"


def test_groups_and_gradients(device):
    x, b = (torch.randn(*s, device=device, dtype=torch.float64, requires_grad=True) for s in ((4, 64), (64,)))
    codes, kept, scales = onepass.fused(GROUPED, x, b)
    assert [t.requires_grad for t in (codes, kept, scales)] == [False, True, False]
    upstream = torch.randn_like(kept)
    dx, db = torch.autograd.grad(kept, (x, b), upstream)
    assert torch.equal(dx, upstream)
    torch.testing.assert_close(db, upstream.sum(0))
    codes, scales = onepass.fused("silu | times | quantize(fp8, 128)", x.view(2, 128), x.view(2, 128))
    assert not codes.requires_grad and not scales.requires_grad


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("line", [GROUPED, "bias | quantize(fp8, 32)"])
def test_lists_in_groups(line, stack, device):
    shapes = [(3, 96)] * 3 if stack else [(3, 96), (2, 5, 96), (1, 96), (0, 96)]
    xs, b = [torch.randn(s, device=device) for s in shapes], torch.randn(96, device=device)
    results = onepass.fused(line, xs, b, stack=stack)
    each = [onepass.fused(line, x, b) for x in xs]
    for kind, theirs in zip(results, zip(*each), strict=True):
        same(kind, theirs)


def test_vmap_in_groups(device):
    x, b = torch.randn(4, 3, 64, device=device), torch.randn(64, device=device)
    same(torch.func.vmap(lambda t: onepass.fused(GROUPED, t, b))(x), onepass.fused(GROUPED, x, b))
    same(
        torch.func.vmap(lambda t: onepass.fused("quantize(fp8, 128)", t.flatten(-1)))(x.view(6, 128)),
        onepass.fused("quantize(fp8, 128)", x.view(6, 128)),
    )
    each = torch.func.vmap(torch.func.grad(lambda t: onepass.fused(GROUPED, t, b)[1].square().sum()))(x)
    torch.testing.assert_close(each, 2 * (x + b))


def test_compiled_in_groups(device):
    b = torch.randn(64, device=device, requires_grad=True)
    compiled = torch.compile(
        lambda x, b: onepass.fused(GROUPED, x, b), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (5, 6):
        x = torch.randn(rows, 64, device=device, requires_grad=True)
        results, eager = compiled(x, b), onepass.fused(GROUPED, x, b)
        same(results, eager)
        same(*(torch.autograd.grad(r[1].square().sum(), (x, b)) for r in (results, eager)))


class InGroups(torch.nn.Module):
    def forward(self, x):
        return onepass.fused("quantize(fp8, 128)", x)


def test_exported_in_groups():
    x = torch.randn(3, 256)
    same(torch.export.export(InGroups(), (x,)).module()(x), InGroups()(x))


def test_bytes_of_groups():
    cost = onepass.Line("silu | times | quantize(fp8, 128)").cost((64, 256), torch.bfloat16)
    assert cost.forward.bytes == 64 * 256 * 5 + 4 * 64 * 2
    assert cost.backward.bytes == cost.saved_bytes == 0


@pytest.mark.parametrize("shape", [(3, 100), (127,), ()], ids=str)
def test_rows_that_are_no_whole_groups(shape, device):
    x, line = torch.randn(shape, device=device), onepass.Line("quantize(fp8, 128)")
    needs = "'quantize(fp8, 128)' needs rows whose length is a multiple of 128"
    message = re.escape(f"{needs}, got x of shape {list(shape)}")
    with pytest.raises(RuntimeError, match=message):
        line(x)
    with pytest.raises(RuntimeError, match=message):
        onepass.fused("quantize(fp8, 128)", x.to("meta"))
    with pytest.raises(RuntimeError, match="multiple of 128"):
        line.reference(x)


def test_codes_alone_have_no_gradient(device):
    x = torch.randn(4, 40, device=device, requires_grad=True)
    codes, scale = onepass.fused("gelu | quantize(fp8)", x)
    assert not codes.requires_grad and not scale.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        scale.sum().backward()


def test_second_derivatives(device):
    tensors = [torch.randn(2, 5, device=device, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    columns = [torch.randn(5, device=device, dtype=torch.float64) for _ in range(2)]

    def kept(*some):
        return onepass.fused(NORM, *some, *columns)[1]

    assert torch.autograd.gradcheck(kept, tensors) and torch.autograd.gradgradcheck(kept, tensors)


@pytest.mark.parametrize("stack", [False, True])
def test_lists(stack, device):
    line = "bias | keep | rms_norm(1e-6) | quantize(fp8)"
    xs = [torch.randn(3, 40, device=device, requires_grad=True) for _ in range(3)]
    b = torch.randn(40, device=device, requires_grad=True)
    results = onepass.fused(line, xs, b, stack=stack)
    each = [onepass.fused(line, x, b) for x in xs]
    for kind, theirs in zip(results, zip(*each), strict=True):
        for ours, their in zip(kind, theirs, strict=True):
            assert ours.dtype == their.dtype and torch.equal(ours.float(), their.float())
    ours = torch.autograd.grad(sum(k.square().sum() for k in results[1]), [*xs, b])
    theirs = torch.autograd.grad(sum(t[1].square().sum() for t in each), [*xs, b])
    for a, c in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, c)


def test_vmap(device):
    x, b = torch.randn(4, 3, 16, device=device), torch.randn(16, device=device)
    line = "bias | keep | quantize(int8)"
    for ours, theirs in zip(
        torch.func.vmap(lambda t: onepass.fused(line, t, b))(x), onepass.fused(line, x, b), strict=True
    ):
        assert torch.equal(ours, theirs)
    each = torch.func.vmap(torch.func.grad(lambda t: onepass.fused(line, t, b)[1].square().sum()))(x)
    torch.testing.assert_close(each, 2 * (x + b))


def test_forward_mode(device):
    x, tangent = torch.randn(3, 16, device=device), torch.randn(3, 16, device=device)
    ours = torch.func.jvp(lambda t: onepass.fused("tanh | keep | quantize(fp8)", t)[1], (x,), (tangent,))[1]
    torch.testing.assert_close(ours, torch.func.jvp(torch.tanh, (x,), (tangent,))[1])


@pytest.mark.parametrize(
    "line",
    [
        "quantize(fp8)",
        "bias | keep | rms_norm(1e-6) | quantize(int8)",
        "bias | keep | rms_norm(1e-6) | quantize(fp8, 32)",
        "quantize(fp8, 128)",
    ],
)
def test_operators(line, device):
    known = onepass.Line(line)
    x = torch.randn(4, 128, device=device)
    operands = [torch.randn(128, device=device)] * known.operand_count or [x]
    for save in [(False,), (True,)] if known.rowwise else [()]:
        torch.library.opcheck(known.forward_op, (x, operands, line, None, *save))


def test_compiled(device):
    x, b = torch.randn(5, 32, device=device, requires_grad=True), torch.randn(32, device=device, requires_grad=True)
    line = "bias | keep | rms_norm(1e-6) | quantize(fp8)"

    def block(x, b):
        return onepass.fused(line, x, b)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = []
    for call in (compiled, block):
        codes, kept, scale = call(x, b)
        assert [t.requires_grad for t in (codes, kept, scale)] == [False, True, False]
        found.append((codes.float(), scale, kept, *torch.autograd.grad(kept.square().sum(), (x, b))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Quantized(torch.nn.Module):
    def forward(self, x):
        return onepass.fused("rms_norm(1e-6) | quantize(fp8)", x)


def test_exported():
    x = torch.randn(3, 16)
    program = torch.export.export(Quantized(), (x,))
    for ours, theirs in zip(program.module()(x), Quantized()(x), strict=True):
        assert torch.equal(ours.float(), theirs.float())


def test_bytes():
    rows, columns = 64, 256
    cost = onepass.Line("rms_norm | quantize(fp8)").cost((rows, columns), torch.bfloat16)
    assert cost.forward.bytes == rows * columns * 3 + 4 * rows
    assert cost.backward.bytes == cost.saved_bytes == 0
    keeping = onepass.Line("bias | keep | rms_norm | quantize(fp8)").cost((rows, columns), torch.bfloat16)
    assert keeping.backward.bytes >= 2 * rows * columns * 2


def test_results_depend_on_their_rows_alone(device):
    x = torch.randn(50, 300, device=device, dtype=torch.bfloat16)
    whole = onepass.fused("rms_norm | quantize(fp8)", x)
    for ours, theirs in zip(onepass.fused("rms_norm | quantize(fp8)", x[17:30]), whole, strict=True):
        assert torch.equal(ours.float(), theirs[17:30].float())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("quantize", "'quantize' takes one of fp8, fp8e5m2, int8: quantize(fp8)"),
        ("quantize(fp4)", "'quantize' takes one of fp8, fp8e5m2, int8, got 'fp4'"),
        ("quantize(float32)", "got 'float32'"),
        ("quantize(fp8, dynamic)", "expected 'static' or a number of columns, got 'dynamic'"),
        ("quantize(fp8, 100)", "'quantize' takes a power of two from 16 to 256 columns, got '100'"),
        ("quantize(fp8, 8)", "'quantize' takes a power of two from 16 to 256 columns, got '8'"),
        ("quantize(fp8, 99999999999)", "'quantize' takes a power of two from 16 to 256 columns, got '99999999999'"),
        ("quantize(fp8, 128, static)", "expected ')' to end 'quantize'"),
        ("quantize(fp8, 128) | gelu", "'gelu' behind 'quantize', which ends a line"),
        ("linear | quantize(fp8, 128)", "'quantize' behind a contraction, where it has no kernel"),
        (
            "rms_norm | rope | quantize(fp8, 128)",
            "'quantize' of groups in one line with 'rope': there is no kernel for both",
        ),
        ("keep(float32, static)", "expected ')' to end 'keep'"),
        ("linear | quantize(fp8, static)", "'quantize' behind a contraction, where it has no kernel"),
        ("quantize(fp8) | gelu", "'gelu' behind 'quantize', which ends a line"),
        ("quantize(fp8) | quantize(fp8)", "'quantize' behind 'quantize', which ends a line"),
        ("logsumexp | quantize(fp8)", "'quantize' behind 'logsumexp', which ends a line"),
        ("quantize(fp8) | logsumexp", "'logsumexp' behind 'quantize', which ends a line"),
        ("linear | quantize(fp8)", "'quantize' behind a contraction, where it has no kernel"),
    ],
)
def test_errors(line, message):
    with pytest.raises(onepass.LineError) as error:
        onepass.Line(line)
    assert message in str(error.value)


def test_words_say_their_format():
    assert repr(onepass.Line("bias | quantize( fp8e5m2 )")) == "onepass.Line('bias | quantize(fp8e5m2)')"

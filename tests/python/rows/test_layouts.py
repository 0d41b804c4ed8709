"""Any layout in: a strided, expanded or misaligned tensor gives what its contiguous copy gives; empty and odd sizes."""

import pytest
import torch

import onepass
from helpers import Inputs, as_tuple, assert_equal, check_line, gradients, make_inputs, run, upstream, words_of

LINES = [
    "bias | gelu",
    "gate(silu)",
    "dropout(0.1) | add",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.125) | mask | softmax | dropout(0.1)",
]


def every_other_column(t):
    return torch.stack((t, torch.full_like(t, float("nan"))), -1).flatten(-2)[..., ::2]


def rows_of_a_wider_tensor(t):
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 3), float("nan"), dtype=t.dtype, device=t.device)
    wide[..., 1:-2] = t
    return wide[..., 1:-2]


def every_other_row(t):
    return torch.stack((t, torch.full_like(t, float("nan"))), -2).flatten(-3, -2)[..., ::2, :]


def transposed(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def misaligned(t):
    """A dense tensor whose first element lies one element beyond an allocation's start."""
    room = torch.full((t.numel() + 1,), float("nan"), dtype=t.dtype, device=t.device)
    room[1:] = t.flatten()
    return room[1:].view(t.shape)


def of_permuted_dims(t):
    return t.permute(1, 0, *range(2, t.dim())).contiguous().permute(1, 0, *range(2, t.dim()))


FLOATING = [every_other_column, rows_of_a_wider_tensor, every_other_row, transposed, misaligned, of_permuted_dims]


def relaid(layout, t):
    """t's numbers in another layout; a bool mask is moved as bytes, without NaN beside it."""
    if t.dtype == torch.bool:
        return layout(t.to(torch.float32)).bool() if layout is not misaligned else misaligned(t.float()).bool()
    out = layout(t.detach())
    assert torch.equal(out, t)
    return out


def results_and_gradients(line, x, operands, grads, state_seed=3):
    x = x.detach().requires_grad_()
    operands = [o.detach().requires_grad_() if o.is_floating_point() else o for o in operands]
    generator = torch.Generator(x.device).manual_seed(state_seed)
    results = as_tuple(onepass.fused(line, x, *operands, generator=generator))
    leaves = [t for t in (x, *operands) if t.requires_grad]
    return results, torch.autograd.grad(results, leaves, grads(results) if callable(grads) else grads)


def assert_same(ours, expected, what):
    """On the CPU to the bit; on CUDA another layout is another kernel, whose compiler may fuse other operations."""
    for got, want in zip(ours[0] + ours[1], expected[0] + expected[1], strict=True):
        if got.is_cuda:
            unit = 8 * torch.finfo(got.dtype).eps
            torch.testing.assert_close(got, want, rtol=unit, atol=unit * want.abs().nan_to_num(0, 0, 0).max().item())
        else:
            assert torch.equal(got, want), f"{what}: largest difference {(got - want).abs().max().item():.3e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", FLOATING)
@pytest.mark.parametrize("line", LINES)
def test_strided_inputs_give_the_contiguous_result(line, layout, dtype, device):
    """Neither the order of a sum nor the dropout mask depends on the layout."""
    inputs = make_inputs(line, (6, 5, 67), dtype, device)
    columns = [word.operand == "column" for word in words_of(line) if word.operand != "none"]
    expected = results_and_gradients(line, inputs.x, inputs.operands, upstream)
    operands = [
        every_other_column(o) if is_column else relaid(layout, o) for o, is_column in zip(inputs.operands, columns)
    ]
    strided = results_and_gradients(line, relaid(layout, inputs.x), operands, upstream)
    for result in strided[0]:
        assert result.is_contiguous()
    assert_same(strided, expected, layout.__name__)


@pytest.mark.parametrize("layout", FLOATING)
@pytest.mark.parametrize("line", LINES)
def test_strided_gradients(line, layout, device):
    inputs = make_inputs(line, (6, 5, 67), torch.float32, device)
    expected = results_and_gradients(line, inputs.x, inputs.operands, upstream)
    strided = results_and_gradients(
        line, inputs.x, inputs.operands, lambda results: [relaid(layout, g) for g in upstream(results)]
    )
    assert_same(strided, expected, layout.__name__)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_expanded_gradients(line, dims, device):
    """`sum().backward()` hands over a gradient with strides of zero."""
    shape = (6, 5, 67)
    inputs = make_inputs(line, shape, torch.float32, device)
    small = [1 if d in dims else size for d, size in enumerate(shape)]
    count = sum(word.kind == "keep" for word in words_of(line)) + 1
    grads = [torch.randn(small, device=device).expand(shape) for _ in range(count)]
    expanded = results_and_gradients(line, inputs.x, inputs.operands, grads)
    expected = results_and_gradients(line, inputs.x, inputs.operands, [g.contiguous() for g in grads])
    assert_same(expanded, expected, "expanded gradient")


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_expanded_x(line, dims, device):
    shape = (6, 5, 67)
    inputs = make_inputs(line, shape, torch.float32, device)
    small = [1 if d in dims else size for d, size in enumerate(shape)]
    x = torch.randn(small, device=device).expand(shape)
    ours = results_and_gradients(line, x, inputs.operands, upstream)
    expected = results_and_gradients(line, x.contiguous(), inputs.operands, upstream)
    assert_same(ours, expected, "expanded x")


@pytest.mark.parametrize("shape", [(67,), (1, 67), (5, 1), (6, 1, 67), (1, 5, 67), (1, 1, 1), (5, 67), ()], ids=str)
@pytest.mark.parametrize(
    "line", ["add", "gate(silu)", "add | keep | layer_norm(1e-5) | scale | bias", "mask | softmax"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operands_broadcast(line, shape, dtype, device):
    """Their gradient has their own shape: the sum over what was repeated."""
    inputs = make_inputs(line, (6, 5, 67), dtype, device)
    kinds = [word.operand for word in words_of(line) if word.operand != "none"]
    operands = []
    for operand, kind in zip(inputs.operands, kinds):
        if kind == "tensor" and operand.dtype == torch.bool:
            operand = torch.rand(shape, device=device) < 0.8
        elif kind == "tensor":
            operand = torch.randn(shape, device=device).to(dtype).requires_grad_()
        operands.append(operand)
    check_line(line, Inputs(inputs.x, operands))


@pytest.mark.parametrize(
    "shape", [(0, 8), (8, 0), (0,), (0, 0), (3, 0, 8), (3, 8, 0), (1,), (1, 1), (1, 1, 1, 1), (1, 5), (5, 1)], ids=str
)
@pytest.mark.parametrize("line", LINES)
def test_empty_and_single(line, shape, device):
    inputs = make_inputs(line, shape, torch.float32, device)
    results, grads = results_and_gradients(line, inputs.x, inputs.operands, upstream)
    for result in results:
        assert result.shape == shape and result.isfinite().all()
    for gradient, tensor in zip(grads, [t for t in inputs.tensors if t.is_floating_point()], strict=True):
        assert gradient.shape == tensor.shape and gradient.isfinite().all()
        if inputs.x.numel() == 0:
            assert not gradient.any(), "nothing flowed back, so the columns' gradients are zeros"


@pytest.mark.parametrize("columns", [1, 2, 3, 17, 63, 760, 1023, 1128, 3000, 12980])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("line", LINES)
def test_odd_columns(line, columns, dtype, device):
    inputs = make_inputs(line, (5, columns), dtype, device, seed=columns)
    scales = None
    if columns <= 3 and ("norm" in line or "softmax" in line):
        # The exact gradient of a normalisation over so few columns is the small difference of large terms.
        scales = [100.0 for _ in inputs.differentiable]
    check_line(line, inputs, floor_scales=scales)


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 33, 257, 70001])
@pytest.mark.parametrize(
    "line", ["bias | gelu", "layer_norm(1e-5) | scale | bias", "add | keep | rms_norm(1e-6) | scale"]
)
def test_any_number_of_rows(line, rows, device):
    """More rows than a grid has blocks, fewer than it has, and more than 65535."""
    inputs = make_inputs(line, (rows, 8), torch.float32, device)
    check_line(line, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [65536, 2**17, 2**17 + 8, 2**18, 300007, 2**20])
@pytest.mark.parametrize(
    "line",
    [
        "softmax",
        "layer_norm(1e-5) | scale | bias",
        "rms_norm(1e-6) | scale",
        "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | gelu",
    ],
)
def test_long_rows(line, columns, dtype, device):
    check_line(line, make_inputs(line, (2, columns), dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [16384, 40000, 65536, 2**17])
@pytest.mark.parametrize("line", ["softmax", "layer_norm(1e-5) | scale | bias", "add | keep | rms_norm(1e-6) | scale"])
def test_many_long_rows(line, columns, dtype, cuda):
    """A block, or a cluster, takes many rows one after another: each is what it is alone, to the bit."""
    inputs = make_inputs(line, (400, columns), dtype, cuda)
    results, _ = run(line, inputs)
    grads = upstream(results)
    ours = gradients(results, inputs, grads)
    for row in (0, 1, 133, 267, 399):
        only = slice(row, row + 1)
        one = Inputs(inputs.x[only], [o[only] if o.ndim > 1 else o for o in inputs.operands]).clone()
        alone, _ = run(line, one)
        for result, expected in zip(results, alone, strict=True):
            assert_equal(result[only], expected, f"row {row}")
        expected = gradients(alone, one, [g[only] for g in grads])
        for i, tensor in enumerate(inputs.differentiable):
            if tensor.ndim > 1:
                assert_equal(ours[i][only], expected[i], f"gradient {i} of row {row}")


def test_more_dimensions_than_a_kernel_walks(device):
    """Six dimensions of which no two collapse."""
    x = torch.randn(3, 2, 4, 2, 3, 8, 17, device=device)[:, :, :, :, :, ::3].permute(2, 0, 4, 1, 3, 5, 6)
    weight = torch.randn(17, device=device)
    ours = results_and_gradients("rms_norm(1e-6) | scale", x, [weight], upstream)
    expected = results_and_gradients("rms_norm(1e-6) | scale", x.contiguous(), [weight], upstream)
    assert_same(ours, expected, "six dimensions")


def test_seven_by_seven_layouts(device):
    """x and the residual each in any layout beside the other."""
    line = "add | keep | layer_norm(1e-5) | scale | bias"
    inputs = make_inputs(line, (6, 5, 67), torch.float32, device)
    expected = results_and_gradients(line, inputs.x, inputs.operands, upstream)
    for first in [torch.clone, *FLOATING]:
        for second in [torch.clone, *FLOATING]:
            operands = [relaid(second, inputs.operands[0]), *inputs.operands[1:]]
            ours = results_and_gradients(line, relaid(first, inputs.x), operands, upstream)
            assert_same(ours, expected, f"{first.__name__}, {second.__name__}")


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operand_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_mixed_dtypes(x_dtype, operand_dtype, device):
    for line in ("add | keep | layer_norm(1e-5) | scale | bias", "gate(silu)"):
        inputs = make_inputs(line, (9, 70), torch.float32, device)
        operands = [o.detach().to(operand_dtype).requires_grad_() for o in inputs.operands]
        x = inputs.x.detach().to(x_dtype).requires_grad_()
        results, grads = check_line(line, Inputs(x, operands))
        assert all(r.dtype == x_dtype for r in results)
        assert [g.dtype for g in grads] == [x_dtype, *(operand_dtype for _ in operands)]


def test_outputs_are_written_whole(device):
    """Freed memory full of NaN is handed out again: an element that nothing wrote would show."""
    for columns in (1, 17, 1000, 4096):
        line = "bias | gelu"
        inputs = make_inputs(line, (50, columns), torch.float32, device)
        for _ in range(3):
            poison = [torch.full((50, columns), float("nan"), device=device) for _ in range(4)]
            del poison
            results, _ = run(line, inputs)
            grads = torch.autograd.grad(results, inputs.differentiable, upstream(results))
            assert all(t.isfinite().all() for t in (*results, *grads))

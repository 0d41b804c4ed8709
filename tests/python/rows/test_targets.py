"""Lines that take a target, a column of each row: cross_entropy and logprob, and the functions over them."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import onepass
from helpers import as_tuple, check_line, gradients, make_inputs
from onepass import _native
from onepass import functional as OF

LINES = [
    "cross_entropy",
    "cross_entropy(0.1)",
    "cross_entropy(0.1, 0.001, -1)",
    "logprob",
    "logprob | entropy",
    "softcap(3) | cross_entropy(0, 0.01)",
    "bias | gelu | keep | logprob | cross_entropy | logsumexp",
    "add | keep | rms_norm(1e-3) | scale | cross_entropy(0.2)",
    "rms_norm(1e-3) | scale | logprob | entropy",
    "entropy | cross_entropy(0.1, 0.001) | logsumexp",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 7, 77, 1000, 2500, 32000])
@pytest.mark.parametrize("line", LINES)
def test_error_is_no_more_than_pytorchs(line, columns, dtype, device):
    inputs = make_inputs(line, (3, 5, columns), dtype, device)
    scales = [1.0] * len(inputs.differentiable) if columns == 1 else None  # where exact gradients are nothing
    # PyTorch's own float64 is 9e-14 off where ours is 6e-16, beside long doubles.
    slack = 30.0 if dtype == torch.float64 else 3.0
    check_line(line, inputs, slack=slack, floor_scales=scales)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("columns", [131072, 300001])
def test_long_rows(line, columns, device):
    check_line(line, make_inputs(line, (3, columns), torch.bfloat16, device), slack=3.0)


@pytest.mark.parametrize("line", LINES)
def test_second_derivatives(line, device):
    inputs = make_inputs(line, (2, 5), torch.float64, device)
    target = [t for t in inputs.tensors if not t.is_floating_point()]
    others = [t for t in inputs.tensors if t.is_floating_point()]

    def function(*tensors):
        return onepass.fused(line, *tensors, *target)

    assert gradcheck(function, tuple(others)) and gradgradcheck(function, tuple(others))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_layouts(dtype, device):
    x = torch.randn(6, 4, 33, device=device).transpose(0, 1).requires_grad_()
    target = torch.randint(0, 33, (6, 8), device=device, dtype=dtype)[:, ::2].t()
    x_, g = x.detach().clone().requires_grad_(), torch.randn(4, 6, device=device)
    expected = F.cross_entropy(x_.flatten(0, 1), target.flatten().long(), reduction="none").view(4, 6)
    y = onepass.fused("cross_entropy", x, target)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], torch.autograd.grad(expected, x_, g)[0])


@pytest.mark.parametrize("columns", [50, 5000])
@pytest.mark.parametrize("line", ["logprob | entropy", "entropy | cross_entropy(0, 0.01)", "logsumexp | entropy"])
def test_masked_classes(line, columns, device):
    """-inf, of which there may be whole vectors: others are as without them, and their gradients are 0."""
    masked = torch.rand(4, columns, device=device) < 0.3
    masked[:, 0], masked[:, 16:32] = False, True
    x = torch.randn(4, columns, device=device).masked_fill(masked, -math.inf).requires_grad_()
    target = [] if "logsumexp" in line else [torch.zeros(4, dtype=torch.int64, device=device)]
    upstream = [torch.randn(4, device=device) for _ in range(2)]
    (of_x,) = torch.autograd.grad(onepass.fused(line, x, *target), x, upstream)
    assert of_x[masked].eq(0).all()
    for row, of_row in enumerate(of_x):
        alone = x[row : row + 1, ~masked[row]].detach().requires_grad_()
        results = onepass.fused(line, alone, *(t[:1] for t in target))
        (expected,) = torch.autograd.grad(results, alone, [g[row : row + 1] for g in upstream])
        torch.testing.assert_close(of_row[~masked[row]], expected[0])


def test_of_one_row_and_of_none(device):
    x = torch.randn(9, device=device, requires_grad=True)
    target = torch.tensor(4, device=device)
    torch.testing.assert_close(onepass.fused("cross_entropy", x, target), F.cross_entropy(x, target))
    nothing = onepass.fused("cross_entropy", torch.randn(0, 9, device=device), target.new_empty(0))
    assert nothing.shape == (0,)
    with pytest.raises(RuntimeError, match="at least one element"):
        onepass.fused("cross_entropy", torch.randn(3, 0, device=device), target.expand(3))


def test_infinities(device):
    inf = torch.inf
    x = torch.tensor([[1.0, -inf, 2.0], [1.0, -inf, 2.0], [-inf, -inf, -inf], [inf, 0.0, 1.0]], device=device)
    for target in ([0] * 4, [1] * 4):
        t = torch.tensor(target, device=device)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, theirs = onepass.fused("cross_entropy", a, t), F.cross_entropy(b, t, reduction="none")
        torch.testing.assert_close(ours[:3], theirs[:3], equal_nan=True)
        ours[:2].sum().backward(), theirs[:2].sum().backward()
        torch.testing.assert_close(a.grad[:2], b.grad[:2], equal_nan=True)


def test_targets_that_are_no_column():
    """On CUDA an assertion of the kernel fails, which ends the process's use of the device."""
    x = torch.randn(4, 7)
    for bad in (7, -1, 1 << 40):
        with pytest.raises(IndexError, match=f"Target {bad} is out of bounds"):
            onepass.fused("cross_entropy", x, torch.tensor([0, 1, bad, -100]))
    with pytest.raises(IndexError, match="Target 9"):
        OF.log_prob(x.requires_grad_(), torch.tensor([0, 1, 9, -100]))


@pytest.mark.parametrize(
    "target, message",
    [
        (torch.zeros(4), "int64 or torch.int32"),
        (torch.zeros(4, 1, dtype=torch.int64), "shape"),
        (torch.zeros(3, dtype=torch.int64), "shape"),
        (torch.zeros(4, dtype=torch.bool), "int64 or torch.int32"),
    ],
)
def test_what_is_no_target(target, message):
    with pytest.raises(RuntimeError, match=message):
        onepass.fused("cross_entropy", torch.randn(4, 7), target)
    line, x = onepass.Line("cross_entropy"), torch.randn(4, 7)
    with pytest.raises(RuntimeError, match=message):  # without a compiler
        line._check_shapes(x, [target])
        line.reference(x, target)


def test_lists(device):
    xs = [torch.randn(n, 40, device=device, requires_grad=True) for n in (3, 1, 0, 5)]
    targets = [torch.randint(0, 40, (len(x),), device=device) for x in xs]
    log_p, entropies = onepass.fused("bias | logprob | entropy", xs, torch.ones(40, device=device), targets)
    for *each, x, t in zip(log_p, entropies, xs, targets, strict=True):
        for a, b in zip(each, onepass.fused("bias | logprob | entropy", x, torch.ones(40, device=device), t)):
            assert torch.equal(a, b)


def test_transforms(device):
    line = "cross_entropy(0.1)"
    x = torch.randn(3, 5, 11, device=device)
    target = torch.randint(0, 11, (3, 5), device=device)

    def loss(x, t):
        return onepass.fused(line, x, t).sum()

    def reference(x, t):
        return onepass.Line(line).reference(x, t).sum()

    ours = torch.func.vmap(torch.func.grad(loss))(x, target)
    torch.testing.assert_close(ours, torch.func.vmap(torch.func.grad(reference))(x, target))
    shared = torch.func.vmap(loss, in_dims=(0, None))(x, target[0])
    torch.testing.assert_close(shared, torch.stack([reference(each, target[0]) for each in x]))
    tangent = torch.randn_like(x)
    _, ours = torch.func.jvp(lambda x: loss(x, target), (x,), (tangent,))
    _, theirs = torch.func.jvp(lambda x: reference(x, target), (x,), (tangent,))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs(dynamic, device):
    def function(x, t):
        return OF.cross_entropy(x * 2.0, t, label_smoothing=0.1)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (4, 6):
        x = torch.randn(rows, 9, device=device, requires_grad=True)
        t = torch.randint(0, 9, (rows,), device=device)
        expected = F.cross_entropy(x * 2.0, t, label_smoothing=0.1)
        y = compiled(x, t)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(torch.autograd.grad(y, x), torch.autograd.grad(expected, x))


def test_operators_are_as_registered(device):
    for line in ("cross_entropy", "add | keep | logprob | entropy"):
        inputs = make_inputs(line, (3, 8), torch.float32, device)
        arguments = (inputs.x, inputs.operands, line, None, True)
        torch.library.opcheck(torch.ops.onepass.rowwise_forward.default, arguments)


def test_export():
    class Loss(torch.nn.Module):
        def forward(self, x, t):
            return onepass.fused("cross_entropy(0.1)", x, t)

    x, t = torch.randn(5, 7), torch.randint(0, 7, (5,))
    exported = torch.export.export(Loss(), (x, t))
    torch.testing.assert_close(exported.module()(x, t), Loss()(x, t))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(11,), (6, 11), (2, 11, 3), (2, 11, 3, 2), (6, 1)], ids=str)
def test_cross_entropy_is_pytorchs(shape, label_smoothing, weighted, reduction, dtype, device):
    torch.manual_seed(0)
    classes = shape[0] if len(shape) == 1 else shape[1]
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    target = torch.randint(0, classes, shape[:1] * (len(shape) > 1) + shape[2:], device=device)
    if target.dim():
        target.view(-1)[1] = -3
    weight = torch.rand(classes, dtype=dtype, device=device) + 0.1 if weighted else None
    options = {"ignore_index": -3, "reduction": reduction, "label_smoothing": label_smoothing}
    ours, theirs = OF.cross_entropy(x, target, weight, **options), F.cross_entropy(x, target, weight, **options)
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, x, g)[0], torch.autograd.grad(theirs, x, g)[0])


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_with_z_loss_and_softcap(weighted, device):
    x = torch.randn(5, 9, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([1, 2, -100, 0, 8], device=device)
    weight = torch.rand(9, dtype=torch.float64, device=device) if weighted else None
    capped = 5 * torch.tanh(x / 5)
    z = (capped.logsumexp(-1).square() * (target >= 0)) * 0.01
    expected = F.cross_entropy(capped, target, weight, reduction="none") + z
    ours = OF.cross_entropy(x, target, weight, reduction="none", z_loss=0.01, softcap=5.0)
    torch.testing.assert_close(ours, expected)
    g = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(ours, x, g), torch.autograd.grad(expected, x, g))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing, weighted", [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("shape", [(9,), (5, 9), (2, 9, 3)])
def test_cross_entropy_of_probabilities(shape, smoothing, weighted, reduction, device):
    x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.rand(shape, dtype=torch.float64, device=device).requires_grad_()
    weight = torch.rand(9, dtype=torch.float64, device=device) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing}
    ours, theirs = (f(x, target, weight, **options) for f in (OF.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, target), g), torch.autograd.grad(theirs, (x, target), g))
    assert OF.cross_entropy(x.bfloat16(), target.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("ignored", [255, 1, -100, 2**53, 2**60, -(2**60), 2**63 - 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
def test_targets_that_are_ignored(dtype, ignored, device):
    """PyTorch takes bytes, and numbers that double precision does not tell apart."""
    x = torch.randn(5, 300, dtype=torch.float64, device=device, requires_grad=True)
    target = torch.tensor([1, 255, 0, 1, 7], dtype=dtype, device=device)
    if dtype == torch.int64:
        target[2] = ignored
    w = torch.eye(300, dtype=torch.float64, device=device)
    for reduction in ("mean", "none"):
        options = {"ignore_index": ignored, "reduction": reduction}
        theirs = F.cross_entropy(x, target, **options)
        for ours in (OF.cross_entropy(x, target, **options), OF.linear_cross_entropy(x, w, target, **options)):
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(*[torch.autograd.grad(t.sum(), x, retain_graph=True) for t in (ours, theirs)])
    torch.testing.assert_close(OF.log_prob(x, target, ignore_index=ignored), -theirs)


def test_cross_entropy_of_16_bits_is_float32(device):
    x = torch.randn(4, 9, dtype=torch.bfloat16, device=device)
    assert OF.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device=device)).dtype == torch.float32


def test_cross_entropy_refuses():
    x, t = torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduction"):
        OF.cross_entropy(x, t, reduction="average")
    with pytest.raises(ValueError, match="label_smoothing"):
        OF.cross_entropy(x, t, label_smoothing=1.5)
    with pytest.raises(RuntimeError, match="or 9 probabilities, but got torch.float32 of shape"):
        OF.cross_entropy(x, t.float())
    with pytest.raises(TypeError, match="int64"):
        OF.cross_entropy(x, t.bool())
    with pytest.raises(RuntimeError, match="ignore_index is not supported for floating point target"):
        OF.cross_entropy(x, x.softmax(-1), ignore_index=2)
    with pytest.raises(TypeError, match="'ignore_index' must be int, not float"):
        OF.cross_entropy(x, t, ignore_index=1.5)
    with pytest.raises(TypeError, match="'weight' must be Tensor, not list"):
        OF.cross_entropy(x, t, [1.0] * 9)
    with pytest.raises(RuntimeError, match="weight of floating-point numbers"):
        OF.cross_entropy(x, t, torch.ones(9, dtype=torch.int64))
    for shape in ((8,), (10,), (9, 9), (81,), ()):
        needs = f"weight of shape [9], one number a class, but got {list(shape)}"
        with pytest.raises(RuntimeError, match=re.escape(needs)):
            OF.cross_entropy(x, t, torch.ones(shape))
    with pytest.raises(TypeError, match="'ignore_index' must be int, not float"):
        OF.log_prob(x, t, ignore_index=1.5)
    with pytest.raises(ValueError, match="temperature to be other than 0"):
        OF.log_prob(x, t, temperature=0)


@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_ignored_rows_may_have_any_number(weighted, label_smoothing, z_loss, device):
    rows = torch.randn(3, 9, device=device)
    rows[1] = math.nan
    weight = torch.rand(9, device=device) if weighted else None
    target = torch.tensor([2, -100, 0], device=device)
    of = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    for reduction in ("none", "mean", "sum"):
        ours = OF.cross_entropy(rows, target, weight, reduction=reduction, **of)
        without = OF.cross_entropy(rows[::2], target[::2], weight, reduction=reduction, **of)
        torch.testing.assert_close(ours[::2] if reduction == "none" else ours, without)
    x = torch.randn(2, 9, device=device, requires_grad=True)
    OF.cross_entropy(x, target.new_full((2,), -100), weight, **of).backward()
    assert not x.grad.any()


@pytest.mark.parametrize("entropy", [False, True])
def test_log_prob(entropy, device):
    x = torch.randn(3, 4, 17, device=device, requires_grad=True)
    target = torch.randint(0, 17, (3, 4), device=device)
    log_p = torch.log_softmax(x / 0.7, -1)
    expected = [log_p.gather(-1, target[..., None])[..., 0], *([-(log_p.exp() * log_p).sum(-1)] if entropy else [])]
    ours = as_tuple(OF.log_prob(x, target, temperature=0.7, entropy=entropy))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)
    g = [torch.randn_like(a) for a in ours]
    torch.testing.assert_close(torch.autograd.grad(ours, x, g), torch.autograd.grad(expected, x, g))


def test_the_target_gets_no_gradient(device):
    inputs = make_inputs("cross_entropy", (4, 6), torch.float32, device)
    y = onepass.fused("cross_entropy", *inputs.tensors)
    assert len(gradients([y], inputs, [torch.ones_like(y)])) == 1


def test_numbers_that_are_left_out_are_the_defaults():
    assert [w.parameters for w in onepass.Line("cross_entropy | cross_entropy(0.1) | logprob").words] == [
        (0.0, 0.0, -100.0),
        (0.1, 0.0, -100.0),
        (-100.0,),
    ]
    assert _native.describe("cross_entropy")["numbers"] == [True]

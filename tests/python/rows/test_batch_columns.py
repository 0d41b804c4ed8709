"""Operands that repeat along leading dimensions: their gradients are summed in stages and never made whole."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from helpers import DTYPES, Inputs, as_tuple, check_line, make_inputs
from onepass import _native
from onepass._arguments.shapes import repetition

# x's shape, and for each operand its own; a line of three operands at most takes as many.
SHAPES = {
    "batches": ((3, 5, 40), [(3, 1, 40), (40,), (3, 1, 40)]),
    "many small batches": ((200, 3, 24), [(200, 1, 24), (200, 1, 24), (24,)]),
    "long batches": ((2, 700, 33), [(2, 1, 33), (1, 1, 33), (33,)]),
    "positions": ((4, 6, 24), [(1, 6, 24), (6, 24), (24,)]),
    "nested": ((2, 3, 5, 16), [(2, 1, 1, 16), (2, 3, 1, 16), (2, 1, 1, 16)]),
    "heads": ((2, 3, 5, 16), [(3, 1, 16), (3, 1, 16), (1, 3, 1, 16)]),
    "ends": ((2, 3, 5, 16), [(2, 1, 5, 16), (1, 5, 16), (2, 1, 1, 16)]),
    "unlike": ((2, 6, 24), [(2, 1, 24), (6, 24), (24,)]),
    "one batch": ((1, 6, 24), [(1, 1, 24), (1, 1, 24), (24,)]),
    "one row": ((6, 1, 24), [(6, 1, 24), (1, 1, 24), (24,)]),
}
LINES = [
    "layer_norm(1e-6) | scale(1) | bias",
    "scale | bias | gelu | add",
    "add | keep | rms_norm(1e-6) | scale",
    "scale(0.5) | add",
    "rms_norm(1e-6) | scale(1) | bias | layer_norm(1e-5) | scale",
]


def inputs_of(line, shapes, dtype, device, parameter_dtype=None, seed=0):
    shape, own = shapes
    whole = make_inputs(line, shape, dtype, device, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    operands = []
    for _, size in zip(whole.operands, own):
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        operands.append(drawn.to(parameter_dtype or dtype).to(device).requires_grad_())
    return Inputs(whole.x, operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("line", LINES)
def test_results_and_gradients(line, shapes, dtype, device):
    check_line(line, inputs_of(line, shapes, dtype, device), slack=2.0)


def test_one_column(device):
    """A norm's row would be nothing but rounding."""
    check_line(LINES[1], inputs_of(LINES[1], ((3, 4, 1), [(3, 1, 1), (1,), (3, 1, 1)]), torch.float32, device))


@pytest.mark.parametrize("shapes", [SHAPES["batches"], SHAPES["positions"]], ids=["batches", "positions"])
def test_operands_in_float32_beside_16_bits(shapes, device):
    line = "layer_norm(1e-6) | scale(1) | bias"
    check_line(line, inputs_of(line, shapes, torch.bfloat16, device, torch.float32))


@pytest.mark.usefixtures("way")
def test_words_that_take_tensors(device):
    x = torch.randn(3, 5, 40, device=device, dtype=torch.float64, requires_grad=True)
    for size in [(3, 1, 40), (5, 40), (40,), (1,), (), (3, 1, 1), (3, 5, 1), (5, 1)]:
        for line in ("gate(silu)", "add | tanh", "mask | tanh", "add | softmax"):
            operand = torch.randn(size, device=device, dtype=torch.float64, requires_grad=True)
            assert torch.autograd.gradcheck(lambda a, b, line=line: onepass.fused(line, a, b), (x, operand))


class _Sizes(TorchDispatchMode):
    """Numbers of the tensors that operators give."""

    def __init__(self):
        super().__init__()
        self.all = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.all += [(str(func), t.numel()) for t in as_tuple(results) if isinstance(t, torch.Tensor)]
        return results


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [(8, 1, 48), (16, 48), (48,), (), (8, 1, 1)])
@pytest.mark.parametrize("line", ["add | gelu", "gate(silu)", "add | softmax"])
def test_no_gradient_is_made_whole(line, size, device):
    x = torch.randn(8, 16, 48, device=device)
    operand = torch.randn(size, device=device, requires_grad=True)
    result = onepass.fused(line, x, operand)
    seen = _Sizes()
    with seen:
        result.backward(torch.ones_like(result))
    assert operand.grad.shape == operand.shape
    backward = [numel for name, numel in seen.all if name.startswith("onepass")]
    assert backward and max(backward) < x.numel() // 4


@pytest.mark.usefixtures("way")
def test_operands_that_are_slices_or_expanded(device):
    """As chunks of what one projection gives."""
    x = torch.randn(3, 5, 16, device=device, requires_grad=True)
    shift, scale = torch.randn(3, 32, device=device, requires_grad=True).unsqueeze(1).chunk(2, -1)
    line = "layer_norm(1e-6) | scale(1) | bias"
    ours = onepass.fused(line, x, scale, shift)
    expected = torch.nn.functional.layer_norm(x, (16,), eps=1e-6) * (1 + scale) + shift
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(onepass.fused(line, x, scale.expand(3, 5, 16), shift.expand(3, 5, 16)), expected)
    transposed = x.transpose(0, 1)
    torch.testing.assert_close(
        onepass.fused(line, transposed, scale.transpose(0, 1), shift.transpose(0, 1)), expected.transpose(0, 1)
    )


@pytest.mark.usefixtures("way")
def test_empty(device):
    for shape, size in (((0, 5, 8), (1, 1, 8)), ((3, 0, 8), (3, 1, 8)), ((3, 5, 0), (3, 1, 0))):
        x = torch.randn(shape, device=device, requires_grad=True)
        g = torch.randn(size, device=device, requires_grad=True)
        onepass.fused("layer_norm | scale", x, g).sum().backward()
        assert g.grad.shape == g.shape and not g.grad.any()


def test_deterministic_and_apart(device):
    """A batch's gradients are the same whatever stands in others."""
    line = "layer_norm(1e-6) | scale(1) | bias"

    def run(x, g, b):
        leaves = [t.clone().requires_grad_() for t in (x, g, b)]
        onepass.fused(line, *leaves).square().sum().backward()
        return [t.grad for t in leaves]

    x, g, b = (torch.randn(s, device=device) for s in ((6, 37, 64), (6, 1, 64), (6, 1, 64)))
    first = run(x, g, b)
    assert all(torch.equal(a, c) for a, c in zip(first, run(x, g, b)))
    x[1:] *= 2
    assert all(torch.equal(a[0], c[0]) for a, c in zip(first, run(x, g, b)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("sizes", [[(3, 1, 8), (8,)], [(4, 8), (1, 4, 8)], [(3, 1, 8), (4, 8)]])
def test_second_derivatives(sizes, device):
    x = torch.randn(3, 4, 8, device=device, dtype=torch.float64, requires_grad=True)
    operands = [torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in sizes]
    line = "layer_norm(1e-6) | scale(1) | bias | tanh"
    assert torch.autograd.gradgradcheck(lambda *t: onepass.fused(line, *t), (x, *operands), atol=1e-4)


def test_operators_as_torch_checks_them(device):
    x = torch.randn(3, 4, 8, device=device)
    g, b = torch.randn(3, 1, 8, device=device), torch.randn(4, 8, device=device)
    args = (x, [g, b], "layer_norm(1e-6) | scale(1) | bias", None, True)
    torch.library.opcheck(torch.ops.onepass.rowwise_forward.default, args)
    y, statistics = torch.ops.onepass.rowwise_forward(*args)
    number = _native.DTYPES[torch.float32]
    types = [number + repetition(t.shape, x.shape) for t in (g, b)]
    given = ([y], x, [g, None], None, statistics, None, args[2], types, 7)
    torch.library.opcheck(torch.ops.onepass.rowwise_backward.default, given)


def test_compiled(device):
    line = "layer_norm(1e-6) | scale(1) | bias"

    def run(x, g, b):
        return onepass.fused(line, x, g, b)

    compiled = torch.compile(run, dynamic=True, fullgraph=True, backend="aot_eager")
    for batch, length in ((3, 5), (4, 7), (2, 2)):
        leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((batch, length, 8), (batch, 1, 8), (8,))]
        eager = torch.autograd.grad(run(*leaves).square().sum(), leaves)
        again = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(eager, again))


def test_refused(device):
    x = torch.randn(3, 4, 8, device=device)
    for size in ((2, 1, 8), (3, 1, 1), (1,), (), (5, 3, 1, 8)):
        with pytest.raises(RuntimeError, match="must have"):
            onepass.fused("scale", x, torch.randn(size, device=device))
    matrix = torch.randn(8, 8, device=device)
    with pytest.raises(RuntimeError, match="one dimension"):
        onepass.fused("scale | linear", x, torch.randn(3, 1, 8, device=device), matrix)


def test_scale_plus_is_not_scale():
    assert str(onepass.Line("scale").words[0]) == "scale"
    assert str(onepass.Line("scale(1)").words[0]) == "scale(1)"
    x, g = torch.randn(4, 8), torch.randn(8)
    torch.testing.assert_close(onepass.fused("scale(0)", x, g), onepass.fused("scale", x, g))


def test_lists(device):
    """A call each."""
    xs = [torch.randn(3, length, 8, device=device, requires_grad=True) for length in (4, 6)]
    g, b = torch.randn(3, 1, 8, device=device, requires_grad=True), torch.randn(8, device=device, requires_grad=True)
    line = onepass.Line("layer_norm | scale(1) | bias")
    ours, expected = line(xs, g, b), [line.reference(x, g, b) for x in xs]
    torch.testing.assert_close(ours, expected)
    for some in zip(*(torch.autograd.grad([r.square().sum() for r in all], [*xs, g, b]) for all in (ours, expected))):
        torch.testing.assert_close(*some)


def test_vmap(device):
    """Samples' own columns, and columns of a batch in each sample."""
    x, g = torch.randn(2, 3, 5, 8, device=device), torch.randn(2, 3, 1, 8, device=device)
    line = onepass.Line("layer_norm | scale(1) | bias")
    for b in (torch.randn(2, 8, device=device), torch.randn(2, 5, 8, device=device)):

        def loss(call, x, g, b):
            return call(x, g, b).square().sum()

        ours, expected = (
            torch.func.vmap(torch.func.grad(lambda *t, call=call: loss(call, *t), (0, 1, 2)))(x, g, b)
            for call in (line, line.reference)
        )
        for some in zip(ours, expected):
            torch.testing.assert_close(*some, rtol=1e-4, atol=1e-4)

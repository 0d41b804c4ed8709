"""Second derivatives: those of PyTorch's composition, of every kind of line, in both ways of taking the first."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import onepass
from helpers import as_tuple, make_inputs, upstream

LINES = [
    "bias | gelu",
    "gate(silu)",
    "add",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "keep | add | keep | softplus | add",
    "bias | dropout(0.1) | add | keep | layer_norm(1e-5) | scale | bias",
    "mul(0.125) | causal | softmax",
    "mul(0.125) | mask | softmax | dropout(0.1)",
    "rope",
    "rms_norm(1e-6) | scale | rope(4)",
    "linear",
    "layer_norm(1e-5) | scale | bias | linear | bias | gelu",
    "dropout(0.1) | add | keep | linear | dropout(0.1) | add",
    "scores | mul(0.125) | mask | softmax",
    "scores | mul(0.125) | mask | softmax | dropout(0.1) | keep | values",
]


pytestmark = pytest.mark.usefixtures("way")


def seeded(function):
    def call(*tensors):
        torch.manual_seed(3)
        return function(*tensors)

    return call


@pytest.mark.parametrize("line", LINES)
def test_gradgradcheck(line, device):
    inputs = make_inputs(line, (2, 3, 4), torch.float64, device, out_features=5)
    assert gradgradcheck(seeded(onepass.Line(line)), inputs.tensors, fast_mode=True, atol=1e-4)


def twice(results, tensors):
    """The gradients of a function of all first ones, and those of what these are of."""
    grads = [g.requires_grad_() for g in upstream(results)]
    first = torch.autograd.grad(results, tensors, grads, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), [*tensors, *grads], allow_unused=True)


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (-1,)], ids=["none", "x", "the first operand", "the last"])
@pytest.mark.parametrize(
    "line",
    [
        "add | keep | layer_norm(1e-5) | scale | bias",
        "linear | add",
        "layer_norm(1e-5) | scale | bias | gelu | linear | bias | gelu_tanh",
        "scores | mul(0.125) | softmax",
    ],
)
def test_where_some_need_no_gradient(line, frozen, device):
    """Less is saved then."""
    inputs = make_inputs(line, (2, 3, 6), torch.float32, device, out_features=5)
    for i in frozen:
        inputs.tensors[i].requires_grad_(False)
    ours = twice(as_tuple(onepass.fused(line, *inputs.tensors)), inputs.differentiable)
    expected = twice(as_tuple(onepass.Line(line).reference(*inputs.tensors)), inputs.differentiable)
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None) or not (a if b is None else b).any()
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_what_was_not_saved_is_missed(device):
    """With a matrix that needs no gradient, what the activation reads is saved in the place of what it is made of."""
    inputs = make_inputs("linear | bias | gelu", (3, 6), torch.float32, device)
    inputs.operands[0].requires_grad_(False)
    refused = pytest.raises(RuntimeError, match=r"linear \| bias \| gelu.*matrix needs no gradient.*reference")
    with refused:
        torch.autograd.grad(onepass.fused("linear | bias | gelu", *inputs.tensors).sum(), inputs.x, create_graph=True)
    # Of another way to x alone the second derivative would be wrong, and nobody would hear of it.
    with refused:
        y = onepass.fused("linear | bias | gelu", inputs.x.sin(), *inputs.operands)
        torch.autograd.grad(y.sum(), inputs.x, create_graph=True)
    first = torch.func.grad(lambda x: onepass.fused("linear | bias | gelu", x, *inputs.operands).sum())(inputs.x)
    expected = torch.func.grad(lambda x: F.gelu(F.linear(x, *inputs.operands)).sum())(inputs.x)
    torch.testing.assert_close(first, expected)


def test_a_gradient_penalty(device):
    """As a critic is trained; the penalty is no constant."""
    norm = onepass.nn.LayerNorm(8, activation="gelu", device=device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(norm(x).sum(), x, create_graph=True)
    penalty = (dx.norm(dim=-1) - 1).square().mean()
    penalty.backward()
    line = onepass.Line("layer_norm(1e-5) | scale | bias | gelu")
    weight, bias = norm.weight.detach().requires_grad_(), norm.bias.detach().requires_grad_()
    (dx,) = torch.autograd.grad(line.reference(x, weight, bias).sum(), x, create_graph=True)
    expected = torch.autograd.grad((dx.norm(dim=-1) - 1).square().mean(), (weight, bias))
    assert norm.weight.grad.any()
    for ours, wanted in zip((norm.weight.grad, norm.bias.grad), expected):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("stack", [False, True], ids=["list", "stack"])
@pytest.mark.parametrize(
    "line", ["add | keep | rms_norm(1e-6) | scale", "layer_norm(1e-5) | scale | linear | bias | gelu"]
)
def test_a_list_of_tensors(line, stack, device):
    inputs = make_inputs(line, (2, 6), torch.float32, device, out_features=3)
    xs = [inputs.x, *(torch.randn(2, 6, device=device, requires_grad=True) for _ in range(2))]
    own = {"add": [torch.randn(2, 6, device=device, requires_grad=True) for _ in xs]}
    operands = [own.get(line.split(" |")[0], inputs.operands[0]), *inputs.operands[1:]]
    leaves = [*xs, *(operands[0] if isinstance(operands[0], list) else operands[:1]), *operands[1:]]

    def results_of(function):
        each = [function(x, *[o[i] if isinstance(o, list) else o for o in operands]) for i, x in enumerate(xs)]
        kinds = zip(*each) if "keep" in line else [each]
        return [torch.stack(k) for k in kinds] if stack else [t for k in kinds for t in k]

    ours = onepass.fused(line, xs, *operands, stack=stack)
    ours = as_tuple(ours) if stack else [t for k in (ours if "keep" in line else [ours]) for t in k]
    in_one = len(ours[0].grad_fn.next_functions) == len(leaves)
    assert in_one == ("linear" not in line)
    for a, b in zip(twice(ours, leaves), twice(results_of(onepass.Line(line).reference), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stack", [False, True], ids=["list", "stack"])
def test_a_list_with_dropout(stack, device):
    """Whose masks count the rows of the tensors before."""
    inputs = make_inputs("dropout(0.5) | add | keep | rms_norm(1e-6)", (3, 4), torch.float64, device)
    other, third = torch.randn(2, 3, 4, dtype=torch.float64, device=device)

    def run(x, residual, *more):
        results = onepass.fused("dropout(0.5) | add | keep | rms_norm(1e-6)", [x, *more], residual, stack=stack)
        return results if stack else [t for kind in results for t in kind]

    given = (*inputs.tensors, other.requires_grad_(), third.requires_grad_())
    assert gradgradcheck(seeded(run), given, fast_mode=True, atol=1e-4)


# Every row word and activation, in lines that other tests compile, too.
THIRD = [
    "bias | gelu",
    "bias | gelu_tanh",
    "mul(0.7) | softplus | mul(1.3) | tanh",
    "scale | bias | mish | add",
    "bias | scale | hardswish | mul(-0.5)",
    "quick_gelu | gate(sigmoid) | bias | keep",
    "elu(0.7) | scale | leaky_relu(0.2)",
    "relu_squared | bias | rms_norm(1e-5) | gate(silu)",
    "bias | layer_norm | elu | gate(elu(0.5)) | dropout(0.1)",
    "layer_norm(1e-5) | scale | bias | gelu",
    "add | keep | layer_norm(1e-5) | scale | bias",
    "rms_norm",
    "mul(0.3) | causal | mask | softmax | dropout(0.3) | gate(relu)",
    "layer_norm(1e-5) | scale | bias | linear | bias",
    "scores | mul(0.125) | mask | softmax | values",
]


@pytest.mark.parametrize("line", THIRD)
def test_third_derivatives(line, device):
    """Against differences of second ones: F.layer_norm's own are wrong (torch 2.15)."""
    inputs = make_inputs(line, (2, 2, 4), torch.float64, device, out_features=3)

    def second(*tensors):
        results = as_tuple(seeded(onepass.Line(line))(*tensors))
        tensors = [t for t in tensors if t.requires_grad]
        first = torch.autograd.grad(results, tensors, upstream(results), create_graph=True)
        weighted = sum((g * torch.linspace(0.5, 2, g.numel(), device=device).view_as(g)).sum() for g in first)
        found = torch.autograd.grad(weighted, tensors, create_graph=True, materialize_grads=True)
        return tuple(g for g in found if g.requires_grad)  # gradcheck of torch 2.11 mixes up what has no gradient

    assert gradcheck(second, inputs.tensors, fast_mode=True, atol=1e-4)


def test_a_third_derivative_of_layer_norm(device):
    """Beside its formula, written out."""
    x = torch.randn(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.linspace(-1, 2, 15, dtype=torch.float64, device=device).view(3, 5)

    def third(function):
        value = function(x).square()
        for _ in range(3):
            (value,) = torch.autograd.grad((weights * value).sum(), x, create_graph=True)
        return value

    def written_out(x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    torch.testing.assert_close(third(onepass.Line("layer_norm(1e-5)")), third(written_out))
    torch.testing.assert_close(third(onepass.Line("layer_norm(1e-5)").reference), third(written_out))

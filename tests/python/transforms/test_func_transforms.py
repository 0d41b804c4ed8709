"""torch.func: vmap, grad, jacobians and forward mode of every kind of line, beside PyTorch's composition."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap

import onepass
import onepass.functional as F
from helpers import as_tuple, make_inputs

# What an operator says whose gradient is lost.
pytestmark = pytest.mark.filterwarnings("error:.*an autograd kernel was not registered")

LINES = [
    "bias | gelu",
    "gate(silu)",
    "layer_norm(1e-5) | scale | bias",
    "add | keep | rms_norm(1e-6) | scale",
    "mul(0.5) | causal | softmax",
    "rope",
    "rms_norm(1e-6) | scale | rope(4)",
    "linear | bias | gelu",
    "layer_norm(1e-5) | scale | bias | linear | add",
    "scores | mul(0.125) | softmax",
    "scores | mul(0.125) | mask | softmax | values",
]
SIZE = 3  # of the batch


def fused(line):
    return lambda *tensors: as_tuple(onepass.fused(line, *tensors))


def reference(line):
    return lambda *tensors: as_tuple(onepass.Line(line).reference(*tensors))


def loss_of(function):
    return lambda *tensors: sum((t * t.cos()).sum() for t in function(*tensors))


def tensors_of(line, device, dtype=torch.float64):
    return [t.detach() for t in make_inputs(line, (5, 6), dtype, device, out_features=4).tensors]


def batch_of(tensors, dims):
    """Another sample each, in the dimension asked for."""
    factors = [1.0, 0.5, -1.5]
    return [
        t if d is None else torch.stack([t * f if t.is_floating_point() else t for f in factors], d)
        for t, d in zip(tensors, dims)
    ]


def assert_close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-9)


def choices(count):
    """Which tensors are batched: x, the first operand, the last, all, in the last dimension."""
    some = [(0, *[None] * (count - 1)), (0,) * count, (-1, *[None] * (count - 1))]
    return some if count == 1 else [*some, (None, 0, *[None] * (count - 2)), (*[None] * (count - 1), 0)]


def differentiable_places(tensors, line):
    constants = 2 if "rope" in line else 0
    return tuple(i for i, t in enumerate(tensors[: len(tensors) - constants]) if t.is_floating_point())


@pytest.mark.parametrize("line", LINES)
def test_vmap_over_any_argument(line, device):
    tensors = tensors_of(line, device)
    for dims in choices(len(tensors)):
        batch = batch_of(tensors, dims)
        assert_close(vmap(fused(line), dims)(*batch), vmap(reference(line), dims)(*batch))


@pytest.mark.parametrize("line", LINES)
def test_vmap_of_grad_and_grad_of_vmap(line, device):
    """Gradients of each sample, and of all."""
    tensors = tensors_of(line, device)
    places = differentiable_places(tensors, line)
    for dims in choices(len(tensors)):
        batch = batch_of(tensors, dims)
        of_each = [vmap(grad(loss_of(f(line)), places), dims)(*batch) for f in (fused, reference)]
        assert_close(*of_each)
        of_all = [grad(loss_of(vmap(f(line), dims)), places)(*batch) for f in (fused, reference)]
        assert_close(*of_all)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("transform", [jacrev, jacfwd, hessian], ids=lambda t: t.__name__)
def test_jacobians(transform, line, device):
    tensors = tensors_of(line, device)
    places = differentiable_places(tensors, line)
    assert_close(*[transform(loss_of(f(line)), places)(*tensors) for f in (fused, reference)])


@pytest.mark.parametrize("line", LINES)
def test_jacobians_of_gradients(line, device):
    """Of each input alone, others being constants."""
    tensors = tensors_of(line, device)
    for place in differentiable_places(tensors, line):
        ours, theirs = (grad(loss_of(f(line)), place) for f in (fused, reference))
        assert_close(jacrev(ours, place)(*tensors), jacrev(theirs, place)(*tensors))


@pytest.mark.parametrize("line", ["layer_norm(1e-5) | scale | bias", "mul(0.5) | causal | softmax"])
def test_jacobians_of_all_numbers(line, device):
    """Where vmap sees the backward operator, with one x and many gradients."""
    tensors = tensors_of(line, device)
    assert_close(*[jacrev(f(line))(*tensors) for f in (fused, reference)])
    assert_close(*[jacfwd(f(line))(*tensors) for f in (fused, reference)])


def test_torchs_older_vmap_is_refused(device):
    """Of torch.autograd, where operators of lists have no rules."""
    x = torch.randn(5, 6, device=device, requires_grad=True)
    y = onepass.fused("softmax", x)
    with pytest.raises(RuntimeError, match=r"is_grads_batched.*use torch\.func\.vmap"):
        torch.autograd.grad(y, x, torch.randn(SIZE, 5, 6, device=device), is_grads_batched=True)


@pytest.mark.parametrize("line", ["bias | gelu", "layer_norm(1e-5) | scale | bias", "scores | mul(0.125) | softmax"])
def test_nested_vmap(line, device):
    x, *operands = tensors_of(line, device)
    batch = torch.stack([torch.stack([x, x * 2]), torch.stack([-x, x + 1]), torch.stack([x * x, x])])
    outer = (0, 0, *[None] * (len(operands) - 1))
    operands[0] = torch.stack([operands[0], operands[0] * 3, operands[0] - 1])
    inner = (0, *[None] * len(operands))
    found = [vmap(vmap(f(line), inner), outer)(batch, *operands) for f in (fused, reference)]
    assert_close(*found)


def test_a_vector_and_a_number_each(device):
    """Samples of one dimension, and of none, where a row word must not see the batch as a row."""
    x = torch.randn(SIZE, 6, dtype=torch.float64, device=device)
    assert_close(vmap(onepass.Line("softmax"))(x), torch.softmax(x, -1))
    assert_close(vmap(onepass.Line("tanh"))(x[:, 0]), torch.tanh(x[:, 0]))
    assert_close(vmap(onepass.Line("softmax"))(x[:, 0]), torch.ones_like(x[:, 0]))
    with pytest.raises(RuntimeError, match="'causal' needs a tensor of at least 2 dimensions"):
        vmap(onepass.Line("causal | softmax"))(x)


def test_rows_are_one_call(device):
    """The batch of x joins the rows, and columns of samples are columns of a batch: one kernel, whatever the batch."""
    from helpers import Recorder

    x, b = torch.randn(SIZE, 5, 6, device=device), torch.randn(6, device=device)
    for dims, calls in (((0, None), 1), ((0, 0), 1), ((None, 0), 1)):
        recorder = Recorder()
        with recorder:
            given = x if dims[0] == 0 else x[0], b if dims[1] is None else b.expand(SIZE, 6)
            vmap(onepass.Line("bias | gelu"), dims)(*given)
        assert len(recorder.calls) == calls


def test_forward_mode(device):
    """torch.func.jvp, and dual tensors, which no transform announces."""
    line = "layer_norm(1e-5) | scale | bias"
    tensors = tuple(tensors_of(line, device))
    tangents = tuple(torch.randn_like(t) for t in tensors)
    ours, expected = (jvp(f(line), tensors, tangents) for f in (fused, reference))
    assert_close(ours, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], tangents[0])
        result = onepass.fused(line, dual, *tensors[1:])
        along = torch.autograd.forward_ad.unpack_dual(result).tangent
    zeros = tuple(torch.zeros_like(t) for t in tensors[1:])
    assert_close(along, jvp(reference(line), tensors, (tangents[0], *zeros))[1][0])
    xs = [tensors[0], tensors[0] * 2]
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, tangents[0]) for x in xs]
        of_list = onepass.fused(line, duals, *tensors[1:])
        assert_close(torch.autograd.forward_ad.unpack_dual(of_list[0]).tangent, along)


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("line", ["dropout(0.5)", "bias | dropout(0.5) | add | keep | rms_norm(1e-6)"])
def test_the_randomness_of_dropout(line, randomness, device):
    """As PyTorch's own; the mask is the same in backward as in forward."""
    x, *operands = [torch.ones_like(t) for t in tensors_of(line, device)]
    batch = torch.stack([x] * SIZE)

    def dropped(x):
        return fused(line)(x, *operands)[-1]

    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(dropped)(batch)
        return
    y, pull = torch.func.vjp(vmap(dropped, randomness=randomness), batch)
    assert torch.equal(y[0], y[1]) == (randomness == "same")
    (dx,) = pull(torch.ones_like(y))
    assert torch.equal(dx == 0, y == y.min()) and torch.equal(dx == 2, y == y.max())
    of_each = vmap(grad(lambda x: dropped(x).sum()), randomness=randomness)(batch)
    assert (of_each == 0).any() and (of_each == 2).any()
    assert torch.equal(of_each[0], of_each[1]) == (randomness == "same")


def test_gradients_of_each_sample_and_ensembles(device):
    """torch.func's two examples: gradients of one model by sample, and many models at once."""
    models = [
        torch.nn.Sequential(
            onepass.nn.LayerNorm(6), onepass.nn.LinearAct(6, 4, activation="gelu"), onepass.nn.RMSNorm(4)
        ).to(device, torch.float64)
        for _ in range(SIZE)
    ]
    x = torch.randn(SIZE, 5, 6, dtype=torch.float64, device=device)
    parameters = {name: p.detach() for name, p in models[0].named_parameters()}

    def loss(parameters, x):
        return functional_call(models[0], parameters, (x,)).square().sum()

    each = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(SIZE):
        for name, gradient in grad(loss)(parameters, x[i]).items():
            assert_close(each[name][i], gradient)
    stacked, buffers = stack_module_state(models)
    found = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)), (0, 0, 0))(stacked, buffers, x)
    for i, model in enumerate(models):
        assert_close(found[i], model(x[i]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own engines for attention
def test_named_functions_and_lists(device):
    x, u = (torch.randn(SIZE, 5, 6, dtype=torch.float64, device=device) for _ in range(2))
    assert_close(vmap(F.swiglu)(x, u), F.swiglu(x, u))
    assert_close(vmap(F.softmax)(x), F.softmax(x))
    q, k, v = (torch.randn(SIZE, 2, 5, 6, dtype=torch.float64, device=device) for _ in range(3))
    assert_close(vmap(F.scaled_dot_product_attention)(q, k, v), F.scaled_dot_product_attention(q, k, v))
    first, second = vmap(lambda x, u: tuple(onepass.fused("gelu", [x, u])))(x, u)
    assert_close((first, second), (onepass.fused("gelu", x), onepass.fused("gelu", u)))


class Same(torch.autograd.Function):
    generate_vmap_rule = True
    forward = staticmethod(lambda x: x.view_as(x))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, gradient: gradient)


def left_behind(function, x):
    """What the function makes of x where torch.func sees it, but differentiates something else."""
    kept = []

    def loss(other):
        kept.append(function(x))
        return other.sum()

    grad(loss)(torch.ones(3, dtype=x.dtype, device=x.device))
    return kept[0]


@pytest.mark.parametrize("made_by", [Same.apply, torch.sin], ids=["function", "operator"])
@pytest.mark.parametrize("line", [*LINES, "dropout(0.5)", "bias | dropout(0.5) | add | keep | rms_norm(1e-6)"])
def test_what_is_left_behind_has_its_gradient(line, made_by, device):
    """A value that leaves torch.func by another way than as a result is wrapped still; what autograd.Function gave
    says then that it needs no gradient."""
    given = tensors_of(line, device)
    gradients = {}
    for is_left in (True, False):
        leaves, tensors = [], list(given)
        for i in differentiable_places(given, line):
            leaves.append(given[i].clone().requires_grad_())
            tensors[i] = left_behind(made_by, leaves[-1]) if is_left else made_by(leaves[-1])
        torch.manual_seed(1)
        gradients[is_left] = torch.autograd.grad(loss_of(fused(line))(*tensors), leaves)
    assert_close(gradients[True], gradients[False])


@pytest.mark.parametrize("stack", [False, True])
def test_lists_of_what_is_left_behind(stack, device):
    x = torch.randn(5, 6, dtype=torch.float64, device=device, requires_grad=True)
    left = left_behind(Same.apply, x)
    found = onepass.fused("gelu", [left, left], stack=stack)
    (gradient,) = torch.autograd.grad(sum(t.sin().sum() for t in found), x)
    (expected,) = torch.autograd.grad(2 * onepass.fused("gelu", x).sin().sum(), x)
    assert_close(gradient, expected)


def test_attention_of_what_is_left_behind(device):
    q = torch.randn(1, 2, 8, 8, dtype=torch.float64, device=device, requires_grad=True)
    left = left_behind(Same.apply, q)
    (gradient,) = torch.autograd.grad(F.scaled_dot_product_attention(left, left, left).sin().sum(), q)
    (expected,) = torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sin().sum(), q)
    assert_close(gradient, expected)


COMPILED = {
    "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (2 * w,))[1],
    "grad of grad": lambda f: torch.func.grad(lambda w: torch.func.grad(f)(w).square().sum()),
    "hessian": torch.func.hessian,
    "jacrev": torch.func.jacrev,
    "vmap": lambda f: lambda w: torch.func.vmap(f)(torch.stack([w, 2 * w])),
    "grad of vmap": lambda f: torch.func.grad(lambda w: torch.func.vmap(f)(torch.stack([w, 2 * w])).sum()),
    "vmap of grad": lambda f: lambda w: torch.func.vmap(torch.func.grad(f))(torch.stack([w, 2 * w])),
}


@pytest.mark.parametrize("function", ["line", "list", "loss"])
@pytest.mark.parametrize("transform", COMPILED)
def test_transforms_in_a_compiled_function(transform, function, device):
    """Dynamo knows no tangents of autograd functions, nor derivatives of their derivatives: PyTorch computes them."""
    torch._dynamo.reset()
    w = torch.randn(5, 4, dtype=torch.float64, device=device)
    x, target = torch.randn(3, 4, dtype=torch.float64, device=device), torch.tensor([0, 4, -100], device=device)

    def ours(w):
        if function == "line":
            return onepass.fused("tanh | rms_norm(1e-3)", w).sin().sum()
        if function == "list":
            return sum(t.sin().sum() for t in onepass.fused("gelu", [w, 2 * w]))
        return onepass.functional.linear_cross_entropy(x, w, target)

    def theirs(w):
        if function == "line":
            return torch.nn.functional.rms_norm(w.tanh(), (4,), eps=1e-3).sin().sum()
        if function == "list":
            return sum(torch.nn.functional.gelu(t).sin().sum() for t in (w, 2 * w))
        return torch.nn.functional.cross_entropy(x @ w.T, target)

    compiled = torch.compile(COMPILED[transform](ours), fullgraph=True, backend="aot_eager")
    expected = COMPILED[transform](theirs)(w)
    torch.testing.assert_close(compiled(w), expected)
    w.requires_grad_()
    results = compiled(w), COMPILED[transform](theirs)(w)
    torch.testing.assert_close(*results)
    of_results = [torch.autograd.grad(result.sin().sum(), w)[0] for result in results]
    torch.testing.assert_close(*of_results, msg="a gradient is lost")

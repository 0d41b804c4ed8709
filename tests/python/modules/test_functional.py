"""The named functions: PyTorch's chain in values and gradients, their lines, shapes and combinations of options."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as TF

import onepass.functional as F
from helpers import DTYPES, Recorder, as_tuple, check_error, upstream


def compare(ours, theirs, tensors, *, needs_kernel=True):
    """The error-ratio rule between a named function and the chain of torch.nn.functional that it stands for.

    Both take the tensors; a None stays None. theirs runs in the tensors' dtype and in fp64.
    """
    recorder = Recorder()
    runs = []
    for function, dtype in ((ours, None), (theirs, None), (theirs, torch.float64)):
        leaves = [
            t if t is None or t.dtype == torch.bool else t.detach().to(dtype or t.dtype).requires_grad_()
            for t in tensors
        ]
        if function is ours:
            with recorder:
                results = as_tuple(function(*leaves))
            grads = upstream(results)
        else:
            results = as_tuple(function(*leaves))
        given = [g.to(r.dtype) for g, r in zip(grads, results, strict=True)]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        runs.append((results, torch.autograd.grad(results, wanted, given)))
    assert recorder.calls or not needs_kernel, "composed of PyTorch operators"
    (results, gradients), (chain, chain_gradients), (exact, exact_gradients) = runs
    for i, result in enumerate(results):
        assert result.shape == exact[i].shape and result.dtype == tensors[0].dtype
        check_error(result, chain[i], exact[i], f"result {i}")
    for i, gradient in enumerate(gradients):
        check_error(gradient, chain_gradients[i], exact_gradients[i], f"gradient {i}")


def normal(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)


def line_of(function, *args, **kwargs):
    """The line that a named function runs."""
    recorder = Recorder()
    with recorder, torch.no_grad():
        function(*args, **kwargs)
    (call,) = recorder.calls
    func, args, kwargs = call
    names = [argument.name for argument in func._schema.arguments]
    return args[names.index("line")]


ACTIVATION = {None: lambda v: v, "gelu": TF.gelu, "silu": TF.silu, "leaky_relu(0.2)": lambda v: TF.leaky_relu(v, 0.2)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu", "leaky_relu(0.2)"])
def test_bias_act(activation, dtype, device):
    tensors = normal(9, 70, dtype=dtype, device=device), normal(70, dtype=dtype, device=device)
    compare(lambda x, b: F.bias_act(x, b, activation), lambda x, b: ACTIVATION[activation](x + b), tensors)


def test_bias_act_defaults_to_gelu(device):
    x, b = normal(9, 70, device=device), normal(70, device=device)
    assert line_of(F.bias_act, x, b) == "bias | gelu"
    assert line_of(F.bias_gelu, x, b) == "bias | gelu"
    assert line_of(F.bias_gelu, x, b, "tanh") == line_of(F.bias_gelu, x, b, approximate="tanh") == "bias | gelu_tanh"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu(approximate, device):
    tensors = normal(9, 70, device=device), normal(70, device=device)
    compare(lambda x, b: F.bias_gelu(x, b, approximate), lambda x, b: TF.gelu(x + b, approximate=approximate), tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("has_weight, has_bias", list(itertools.product([False, True], repeat=2)))
def test_layer_norm(has_weight, has_bias, activation, dtype, device):
    if has_bias and not has_weight:
        pytest.skip("compiled at first use: test_a_bias_without_a_weight")
    x = normal(2, 9, 70, dtype=dtype, device=device)
    w = normal(70, dtype=dtype, device=device) if has_weight else None
    b = normal(70, dtype=dtype, device=device) if has_bias else None
    compare(
        lambda x, w, b: F.layer_norm(x, (70,), w, b, 1e-3, activation=activation),
        lambda x, w, b: ACTIVATION[activation](TF.layer_norm(x, (70,), w, b, 1e-3)),
        (x, w, b),
    )


def test_a_bias_without_a_weight(device):
    """scale and bias must not be mistaken for each other."""
    x, b = normal(9, 70, device=device), normal(70, device=device)
    compare(lambda x, b: F.layer_norm(x, 70, None, b), lambda x, b: TF.layer_norm(x, (70,), None, b), (x, b))
    assert line_of(F.layer_norm, x, 70, None, b) == "layer_norm(1e-05) | bias"


@pytest.mark.parametrize("shape", [70, (70,), [70], torch.Size([70])], ids=str)
def test_normalized_shape_of_one_dimension(shape, device):
    x, w = normal(9, 70, device=device), normal(70, device=device)
    expected = TF.rms_norm(x, (70,), w, 1e-6)
    torch.testing.assert_close(F.rms_norm(x, shape, w, 1e-6), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_normalized_shape_of_several_dimensions(dims, device):
    x = normal(3, 4, 5, 6, device=device)
    shape = x.shape[-dims:]
    w, b = normal(*shape, device=device), normal(*shape, device=device)
    compare(lambda x, w, b: F.layer_norm(x, shape, w, b), lambda x, w, b: TF.layer_norm(x, shape, w, b), (x, w, b))
    compare(lambda x, w: F.rms_norm(x, shape, w, 1e-6), lambda x, w: TF.rms_norm(x, shape, w, 1e-6), (x, w))


def test_the_whole_tensor_may_be_normalised(device):
    x = normal(4, 6, device=device)
    torch.testing.assert_close(F.layer_norm(x, (4, 6)), TF.layer_norm(x, (4, 6)))
    torch.testing.assert_close(F.layer_norm(x[0], 6), TF.layer_norm(x[0], (6,)))


def test_several_dimensions_of_a_strided_tensor(device):
    x = normal(4, 6, 5, device=device).transpose(1, 2)
    w = normal(6, 5, device=device).t()
    torch.testing.assert_close(F.rms_norm(x, (5, 6), w, 1e-6), TF.rms_norm(x, (5, 6), w, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [None, 1e-6, 1e-2])
@pytest.mark.parametrize("has_weight", [False, True])
def test_rms_norm(has_weight, eps, dtype, device):
    x, w = normal(9, 70, dtype=dtype, device=device), normal(70, dtype=dtype, device=device) if has_weight else None
    exact_eps = torch.finfo(torch.float32).eps if eps is None else eps

    def theirs(x, w):
        return TF.rms_norm(x, (70,), w, exact_eps if x.dtype == torch.float64 else eps)

    compare(lambda x, w: F.rms_norm(x, (70,), w, eps), theirs, (x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_input_bias", [False, True])
@pytest.mark.parametrize("has_affine", [False, True])
def test_add_layer_norm(has_affine, has_input_bias, dtype, device):
    x, r = normal(2, 9, 70, dtype=dtype, device=device), normal(2, 9, 70, dtype=dtype, device=device)
    w, b, c = (normal(70, dtype=dtype, device=device) for _ in range(3))
    if not has_affine:
        w = b = None

    def theirs(x, r, w, b, c):
        h = (x if c is None else x + c) + r
        return TF.layer_norm(h, (70,), w, b), h

    compare(
        lambda x, r, w, b, c: F.add_layer_norm(x, r, (70,), w, b, input_bias=c),
        theirs,
        (x, r, w, b, c if has_input_bias else None),
    )


@pytest.mark.parametrize("has_input_bias", [False, True])
@pytest.mark.parametrize("has_weight", [False, True])
def test_add_rms_norm(has_weight, has_input_bias, device):
    x, r = normal(2, 9, 70, device=device), normal(2, 9, 70, device=device)
    w, c = normal(70, device=device) if has_weight else None, normal(70, device=device) if has_input_bias else None

    def theirs(x, r, w, c):
        h = (x if c is None else x + c) + r
        return TF.rms_norm(h, (70,), w, 1e-6), h

    compare(lambda x, r, w, c: F.add_rms_norm(x, r, 70, w, 1e-6, input_bias=c), theirs, (x, r, w, c))


def test_add_norms_over_several_dimensions(device):
    """input_bias follows the last dimension, weight and bias normalized_shape; the residual broadcasts."""
    x, r = normal(2, 3, 4, 6, device=device), normal(3, 1, 6, device=device)
    w, b, c = normal(4, 6, device=device), normal(4, 6, device=device), normal(6, device=device)

    def theirs(x, r, w, b, c):
        h = x + c + r
        return TF.layer_norm(h, (4, 6), w, b), h

    compare(lambda x, r, w, b, c: F.add_layer_norm(x, r, (4, 6), w, b, input_bias=c), theirs, (x, r, w, b, c))
    y, h = F.add_rms_norm(x, r, (4, 6), w, 1e-6)
    torch.testing.assert_close(h, x + r)
    torch.testing.assert_close(y, TF.rms_norm(h, (4, 6), w, 1e-6))


@pytest.mark.parametrize("function", [F.add_layer_norm, F.add_rms_norm])
def test_dropout_in_add_norms(function, device):
    x, r = torch.ones(64, 96, device=device), torch.zeros(64, 96, device=device)
    y, h = function(x, r, 96, dropout_p=0.25)
    assert 0.15 < (h == 0).double().mean().item() < 0.35
    torch.testing.assert_close(h[h != 0], torch.full_like(h[h != 0], 1 / 0.75))
    y, h = function(x, r, 96, dropout_p=0.25, training=False)
    assert torch.equal(h, x)
    norm = F.layer_norm if function is F.add_layer_norm else F.rms_norm
    assert torch.equal(y, norm(h, 96))


def test_dropout_comes_after_the_input_bias_and_before_the_residual(device):
    zeros, c = torch.zeros(64, 96, device=device), torch.ones(96, device=device)
    _, h = F.add_layer_norm(zeros, zeros + 5, 96, input_bias=c, dropout_p=0.5)
    assert set(h.unique().tolist()) == {5.0, 7.0}


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_dropout_add_without_dropout(has_bias, activation, device):
    x, r = normal(9, 70, device=device), normal(9, 70, device=device)
    b = normal(70, device=device) if has_bias else None

    def theirs(x, r, b):
        return r + ACTIVATION[activation](x if b is None else x + b)

    for options in ({"p": 0.0}, {"p": 0.5, "training": False}):
        compare(lambda x, r, b: F.dropout_add(x, r, bias=b, activation=activation, **options), theirs, (x, r, b))  # noqa: B023


def test_dropout_add_drops_behind_the_activation(device):
    x, r = torch.zeros(64, 96, device=device), torch.zeros(64, 96, device=device)
    y = F.dropout_add(x, r + 5, 0.5, activation="sigmoid")
    assert set(y.unique().tolist()) == {5.0, 6.0}


def test_dropout_adds_defaults_are_torchs(device):
    x = torch.ones(64, 96, device=device)
    assert set(F.dropout_add(x, torch.zeros_like(x)).unique().tolist()) == {0.0, 2.0}


GATES = {
    "swiglu": (F.swiglu, TF.silu),
    "geglu": (F.geglu, TF.gelu),
    "geglu tanh": (lambda g, u=None: F.geglu(g, u, approximate="tanh"), lambda v: TF.gelu(v, approximate="tanh")),
    "reglu": (F.reglu, TF.relu),
    "gated": (F.gated, TF.silu),
    "gated elu": (lambda g, u=None: F.gated(g, u, "elu(0.5)"), lambda v: TF.elu(v, 0.5)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(GATES))
def test_gates(name, dtype, device):
    ours, activation = GATES[name]
    tensors = normal(9, 70, dtype=dtype, device=device), normal(9, 70, dtype=dtype, device=device)
    compare(ours, lambda g, u: activation(g) * u, tensors)


@pytest.mark.parametrize("name", list(GATES))
@pytest.mark.parametrize("shape", [(9, 70), (2, 3, 14), (8,), (4, 2)], ids=str)
def test_packed_gates(name, shape, device):
    """The gate half comes first."""
    ours, activation = GATES[name]

    def theirs(packed):
        gate, up = packed.chunk(2, -1)
        return activation(gate) * up

    compare(lambda packed: ours(packed), theirs, (normal(*shape, device=device),))


def test_packed_gates_are_read_where_they_lie(device):
    """No copy of the halves: the operator gets views of the packed tensor."""
    packed = normal(9, 140, device=device)
    recorder = Recorder()
    with recorder, torch.no_grad():
        F.swiglu(packed)
    ((_, args, _),) = recorder.calls
    assert args[0].data_ptr() == packed.data_ptr()
    assert args[1][0].data_ptr() == packed.data_ptr() + 70 * 4


@pytest.mark.parametrize("mask", [None, "bool", "additive", "row"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_softmax(scale, is_causal, mask, device):
    x = normal(2, 3, 9, 17, device=device)
    keep = torch.rand(2, 3, 9, 17, device=device) < 0.8
    keep[..., 0] = True
    masks = {
        None: None,
        "bool": keep,
        "additive": normal(2, 3, 9, 17, device=device),
        "row": keep[:, :1, :1],
    }

    def theirs(x, m):
        scores = x * scale
        if m is not None:
            scores = scores.masked_fill(~m, float("-inf")) if m.dtype == torch.bool else scores + m
        if is_causal:
            scores = scores.masked_fill(torch.ones(9, 17, dtype=torch.bool, device=device).triu(1), float("-inf"))
        return scores.softmax(-1)

    compare(lambda x, m: F.softmax(x, scale=scale, mask=m, is_causal=is_causal), theirs, (x, masks[mask]))


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -4])
def test_softmax_over_any_dimension(dim, device):
    x, m = normal(3, 4, 5, 6, device=device), normal(3, 4, 5, 6, device=device)
    compare(lambda x: F.softmax(x, dim), lambda x: x.softmax(dim), (x,))
    compare(lambda x, m: F.softmax(x, dim, mask=m), lambda x, m: (x + m).softmax(dim), (x, m))
    row = normal(4, 1, 6, device=device)
    torch.testing.assert_close(F.softmax(x, dim, mask=row), (x + row).softmax(dim))


def test_softmax_of_one_dimension(device):
    x = normal(17, device=device)
    for dim in (0, -1):
        torch.testing.assert_close(F.softmax(x, dim), x.softmax(dim))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-1, 0, 1, -2, -3])
def test_logsumexp_over_any_dimension(dim, keepdim, device):
    x = torch.randn(3, 5, 24, device=device)
    compare(lambda x: F.logsumexp(x, dim, keepdim), lambda x: x.logsumexp(dim, keepdim), (x,))
    assert F.logsumexp(x[0, 0, 0], 0, keepdim).shape == x[0, 0, 0].logsumexp(0, keepdim).shape
    with pytest.raises(IndexError, match="out of range"):
        F.logsumexp(x, 3)


@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2, -4])
def test_log_softmax_and_normalize_over_any_dimension(dim, device):
    x = normal(3, 4, 5, 6, device=device)
    compare(lambda x: F.log_softmax(x, dim), lambda x: x.log_softmax(dim), (x,))
    compare(lambda x: F.normalize(x, dim=dim), lambda x: TF.normalize(x, dim=dim), (x,))
    compare(lambda x: F.normalize(x, dim=dim, eps=2.3), lambda x: TF.normalize(x, dim=dim, eps=2.3), (x,))


def test_normalize_takes_torchs_arguments(device):
    x = normal(5, 7, device=device)
    assert torch.equal(F.normalize(x), F.normalize(x, 2.0, 1, 1e-12))
    zero = torch.zeros(3, 8, device=device, requires_grad=True)
    y = F.normalize(zero, eps=0.25)
    assert torch.equal(y, zero)
    assert torch.equal(torch.autograd.grad(y.sum(), zero)[0], torch.full_like(zero, 4.0))
    with pytest.raises(ValueError, match="p to be 2"):
        F.normalize(x, 1)
    with pytest.raises(IndexError):
        F.normalize(x, dim=2)
    with pytest.raises(IndexError):
        F.log_softmax(x, 2)


def test_a_row_without_a_distribution_has_no_logarithms(device):
    """As in PyTorch, where softmax gives zeros."""
    x = torch.full((2, 5), -math.inf, device=device)
    x[1, 2] = 3.0
    assert F.log_softmax(x)[0].isnan().all()
    assert torch.equal(
        F.log_softmax(x)[1], torch.tensor([-math.inf, -math.inf, 0, -math.inf, -math.inf], device=device)
    )


def test_softmax_dropout(device):
    x = torch.zeros(64, 100, device=device)
    y = F.softmax(x, dropout_p=0.25)
    assert 0.15 < (y == 0).double().mean().item() < 0.35
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 0.01 / 0.75))
    torch.testing.assert_close(F.softmax(x, dropout_p=0.25, training=False), torch.full_like(x, 0.01))


def test_lines(device):
    """Every option is a word, and an option that is off is none."""
    x = normal(4, 8, device=device)
    w = normal(8, device=device)
    assert line_of(F.layer_norm, x, 8, w, w, activation="gelu") == "layer_norm(1e-05) | scale | bias | gelu"
    assert line_of(F.rms_norm, x, 8, w) == "rms_norm | scale"
    assert line_of(F.rms_norm, x, 8, w, 1e-6) == "rms_norm(1e-06) | scale"
    assert (
        line_of(F.add_layer_norm, x, x, 8, w, w, input_bias=w, dropout_p=0.1)
        == "bias | dropout(0.1) | add | keep | layer_norm(1e-05) | scale | bias"
    )
    assert line_of(F.add_rms_norm, x, x, 8, w, dropout_p=0.1, training=False) == "add | keep | rms_norm | scale"
    assert line_of(F.dropout_add, x, x, 0.1, bias=w, activation="gelu") == "bias | gelu | dropout(0.1) | add"
    assert line_of(F.swiglu, x) == line_of(F.gated, x, x) == "gate(silu)"
    assert line_of(F.softmax, x, scale=0.5, mask=x > 0, dropout_p=0.1) == "mul(0.5) | mask | softmax | dropout(0.1)"
    assert line_of(F.softmax, x, is_causal=True) == "causal | softmax"
    assert line_of(F.log_softmax, x) == "log_softmax" and line_of(F.normalize, x) == "l2_norm(1e-12)"


def test_a_learning_schedule_of_numbers_does_not_grow_without_bound(device):
    """Thousands of probabilities, one kernel; texts are forgotten."""
    from onepass.functional import _lines

    x = normal(2, 8, device=device)
    for i in range(1500):
        F.dropout_add(x, x, 0.1 + i * 1e-4)
    cached = _lines.dropout_add.__closure__
    sizes = [c.cell_contents.cache_info().currsize for c in cached if hasattr(c.cell_contents, "cache_info")]
    assert sizes and max(sizes) <= 1024

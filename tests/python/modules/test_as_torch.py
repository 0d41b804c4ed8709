"""Arguments, devices and memory: what torch's own functions take and refuse, these do."""

import numpy as np
import pytest
import torch
import torch.nn.functional as TF

import onepass
import onepass.functional as F

META = {"device": "meta"}
R = torch.randn
THERE = r"Expected all tensors to be on the same device, but {} is on {} and .*{}.* is on {}"


def heads(**where):
    return R(2, 2, 128, 64, **where)


ELSEWHERE = {
    "fused": (lambda: onepass.fused("add", R(2, 64), R(2, 64, **META)), "r of 'add'"),
    "with a gradient": (lambda: onepass.fused("add", R(2, 64, requires_grad=True), R(2, 64, **META)), "r of 'add'"),
    "a Line": (lambda: onepass.Line("layer_norm | scale")(R(2, 64), R(64, **META)), "g of 'scale'"),
    "a word of two": (lambda: F.rope(R(2, 64), R(2, 64), R(2, 64, **META)), "sin of 'rope'"),
    "a function": (lambda: F.dropout_add(R(2, 64), R(2, 64, **META)), "r of 'add'"),
    "a mask": (lambda: F.softmax(R(2, 64), mask=R(2, 64, **META)), "mask of 'mask'"),
    "a module": (lambda: onepass.nn.LayerNorm(64, **META)(R(2, 64)), "g of 'scale'"),
    "a module with a matrix": (lambda: onepass.nn.LayerNormLinear(64, 3, **META)(R(2, 64)), "g of 'scale'"),
    "linear": (lambda: F.linear(R(2, 64), R(3, 64, **META)), "W of 'linear'"),
    "behind linear": (lambda: F.linear(R(2, 64), R(3, 64), R(3, **META)), "b of 'bias'"),
    "scores": (lambda: F.attention_scores(heads(), heads(**META)), "key"),
    "keys of a line": (lambda: onepass.fused("scores | softmax", heads(), heads(**META)), "K of 'scores'"),
    "values of a line": (
        lambda: onepass.fused("scores | softmax | values", heads(), heads(), heads(**META)),
        "V of 'values'",
    ),
    "a list": (lambda: onepass.fused("add", [R(2, 64), R(3, 64)], R(64, **META)), "r of 'add'"),
    "a list's own": (lambda: onepass.fused("add", [R(2, 64), R(2, 64)], 2 * [R(2, 64, **META)]), "r of 'add'"),
    "pieces": (lambda: onepass.fused("scale", list(R(4, 64).split(2)), R(64, **META)), "g of 'scale'"),
    "linear of a list": (lambda: onepass.fused("linear", [R(2, 64), R(3, 64)], R(3, 64, **META)), "W of 'linear'"),
    "vmap": (lambda: torch.vmap(onepass.Line("add"))(R(2, 64), R(2, 64, **META)), "r of 'add'"),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_operand_on_another_device(name):
    call, operand = ELSEWHERE[name]
    with pytest.raises(RuntimeError, match=THERE.format(".*", "cpu", operand, "meta")):
        call()


@pytest.mark.parametrize("line", ["add", "layer_norm | add"])
def test_x_alone_on_the_meta_device(line):
    with pytest.raises(RuntimeError, match=THERE.format("x", "meta", "r of 'add'", "cpu")):
        onepass.fused(line, R(2, 64, **META), R(2, 64))


@pytest.mark.parametrize("argument", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("size", [8, 128])
def test_attention_on_two_devices(argument, size):
    given = {name: R(1, 2, size, 16) for name in ("query", "key", "value")} | {"attn_mask": R(size, size)}
    given[argument] = given[argument].to("meta")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        F.scaled_dot_product_attention(**given)


def test_an_operator_of_gradients_on_two_devices():
    there = [([R(2, 64, **META)], R(2, 64)), ([R(2, 64)], R(2, 64, **META))]
    for gradients, x in there:
        with pytest.raises(RuntimeError, match="same device"):
            torch.ops.onepass.elementwise_backward(gradients, x, [], None, None, "gelu", [], 1)


def test_everything_on_the_meta_device():
    assert onepass.fused("add", R(2, 64, **META), R(64, **META)).is_meta
    assert onepass.nn.LayerNormLinear(64, 3, **META)(R(2, 64, **META)).shape == (2, 3)


@pytest.mark.parametrize("make", [np.float32, np.float64, torch.tensor, lambda eps: int(eps > 1)], ids=range(4))
def test_numbers_that_torch_takes(make):
    x, eps = R(4, 8), make(1e-3)
    torch.testing.assert_close(F.layer_norm(x, 8, eps=eps), TF.layer_norm(x, (8,), eps=eps))
    torch.testing.assert_close(F.rms_norm(x, 8, eps=eps), TF.rms_norm(x, (8,), eps=float(eps)))
    q = R(1, 2, 8, 4)
    ours, theirs = (f(q, q, q, scale=eps) for f in (F.scaled_dot_product_attention, TF.scaled_dot_product_attention))
    torch.testing.assert_close(ours, theirs)
    assert F.dropout_add(x, x, p=eps).shape == x.shape


def test_a_tensors_number_as_it_is_now():
    x, eps = R(4, 8), torch.tensor(1e-3)
    F.layer_norm(x, 8, eps=eps)
    eps.fill_(2.0)
    torch.testing.assert_close(F.layer_norm(x, 8, eps=eps), TF.layer_norm(x, (8,), eps=2.0))


@pytest.mark.parametrize("bad", [torch.tensor([1e-3]), torch.tensor(1e-3, requires_grad=True), "1"], ids=range(3))
def test_numbers_that_torch_refuses(bad):
    for function in (F.layer_norm, F.rms_norm):
        with pytest.raises(TypeError, match="'eps' must be float"):
            function(R(4, 8), 8, eps=bad)


def test_a_negative_eps():
    x = R(4, 8)
    for eps in (-0.1, -100.0):  # NaN, where it is more than the variance
        for function in ("layer_norm", "rms_norm"):
            ours, theirs = (getattr(of, function)(x, (8,), eps=eps) for of in (F, TF))
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_sizes_of_numpy():
    x = R(4, 8)
    for shape in (np.int64(8), (np.int64(8),), [np.int32(4), np.int64(8)]):
        assert torch.equal(F.layer_norm(x, shape), F.layer_norm(x, shape if np.ndim(shape) else int(shape)))
    assert onepass.nn.LayerNorm(np.int64(8))(x).shape == x.shape


def test_a_norm_without_weight_before_linear():
    x, w = R(4, 8), R(3, 8)
    normalised = TF.layer_norm(x, (8,))
    torch.testing.assert_close(F.layer_norm_linear(x, None, None, w), TF.linear(normalised, w))
    torch.testing.assert_close(F.rms_norm_linear(x, None, w), TF.linear(TF.rms_norm(x, (8,)), w))
    torch.testing.assert_close(
        F.layer_norm_mlp(x, None, None, w, None, w.mT), TF.linear(TF.gelu(TF.linear(normalised, w)), w.mT)
    )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_dtype_without_kernels(dtype):
    x = torch.ones(4, 8, dtype=dtype)
    weight = torch.ones(8, requires_grad=True)
    for call in (
        lambda: onepass.fused("gelu", x),
        lambda: F.layer_norm(x, 8, weight),
        lambda: onepass.fused("scale", [x, x[:2]], weight),
    ):
        with pytest.raises(NotImplementedError, match=str(dtype)):
            call()


def test_a_mask_of_one_dimension():
    q = R(1, 2, 8, 4)
    for mask in (R(8), torch.ones(8, dtype=torch.bool), R(())):
        for call in (F.scaled_dot_product_attention, TF.scaled_dot_product_attention):
            with pytest.raises(IndexError):
                call(q, q, q, attn_mask=mask)
        with pytest.raises(IndexError, match="attn_mask.*2-dimensional"):
            F.attention_scores(q, q, attn_mask=mask)


@pytest.mark.parametrize("rows", [4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention_is_differentiated_twice(rows, dtype):
    tensors = [R(1, 2, rows, 8, dtype=dtype, requires_grad=True) for _ in range(3)]

    def second(call):
        first = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    def written_out(q, k, v):
        return torch.softmax(q @ k.mT / 8**0.5, -1) @ v

    for ours, expected in zip(second(F.scaled_dot_product_attention), second(written_out), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)


LARGE = (1024, 768)  # 3 MB: in pages of our own


@pytest.fixture
def large():
    x = R(LARGE)
    return x, F.rms_norm(x, LARGE[-1:])


def test_a_large_results_memory_can_be_given_back_and_taken_again(large):
    """As checkpoints do that discard an output, and sharded parameters."""
    x, y = large
    expected = y.clone()
    storage = y.untyped_storage()
    assert storage.resizable()
    bytes_of = storage.nbytes()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(bytes_of)
    y.copy_(F.rms_norm(x, LARGE[-1:]))
    assert torch.equal(y, expected)


def test_a_large_result_grows(large):
    x, y = large
    expected = y.clone()
    y.resize_(2 * LARGE[0], LARGE[1])
    assert torch.equal(y[: LARGE[0]], expected)
    _, out = large[0], F.rms_norm(x, LARGE[-1:]).resize_(0)
    assert torch.equal(torch.add(x, x, out=out), x + x)


def test_a_large_result_is_shared_and_copied(large):
    _, y = large
    expected = y.clone()
    copy = torch.empty_like(y).set_(y.untyped_storage().clone(), 0, y.shape, y.stride())
    assert torch.equal(copy, expected)
    assert torch.equal(y.share_memory_(), expected)

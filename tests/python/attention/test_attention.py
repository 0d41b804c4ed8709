"""scaled_dot_product_attention against PyTorch's chain and fp64, by the line and by the engine chosen."""

import math
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass.functional as F
from helpers import DTYPES, Recorder, assert_equal, check_error
from onepass.functional import _engines

torchs = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(params=["onepass", "chosen"])
def engine(request, monkeypatch):
    """Every call by the line, or by what is chosen for it."""
    if request.param == "onepass":
        monkeypatch.setattr(_engines, "choose", lambda call: "onepass")
    return request.param


def chain(query, key, value, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        additive = attn_mask.dtype != torch.bool
        scores = scores + attn_mask if additive else scores.masked_fill(~attn_mask, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0).to(value.dtype) @ value


def gradients_of(function, tensors, dtype=None, device=None, **options):
    """The result, and the gradients of all floating-point tensors for a random one of the result."""
    leaves = [
        t.detach().to(device) if t.dtype == torch.bool else t.detach().to(device, dtype).requires_grad_()
        for t in tensors
    ]
    result = function(*leaves, **options)
    up = torch.randn(result.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return result, torch.autograd.grad(result, [t for t in leaves if t.requires_grad], up.to(result))


def check(engine, query, key, value, mask=None, **options):
    """The line is held to PyTorch's chain, what is chosen to what torch would have taken: a choice makes no error."""
    tensors = [query, key, value, *([] if mask is None else [mask])]
    ours, grads = gradients_of(F.scaled_dot_product_attention, tensors, **options)
    # torch's engines do not read a mask of one dimension, nor one of one number for all keys.
    beside = chain if engine == "onepass" or mask is not None and (mask.dim() < 2 or mask.shape[-1] == 1) else torchs
    theirs, their_grads = gradients_of(beside, tensors, **options)
    exact, exact_grads = gradients_of(chain, tensors, torch.float64, "cpu", **options)
    assert ours.dtype == query.dtype and ours.shape == exact.shape
    check_error(ours, theirs, exact, "result", slack=2.0)
    for i, (a, b, c) in enumerate(zip(grads, their_grads, exact_grads, strict=True)):
        assert a.shape == c.shape and a.dtype == tensors[i].dtype
        # Softmax of one key has no gradient, nor has what all keys of a row have in common: what is left is rounding.
        nothing = c.abs().max() < 1e-9 or i == 3 and mask.shape[-1] == 1
        scale = 4.0 if nothing else None
        check_error(a, b, c, f"gradient {i}", slack=2.0, scale=scale)


def make(*shapes, dtype=torch.float32, device="cpu"):
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(6, 20), (1, 20), (6, 1), (4, 6, 20), (1, 6, 20), (2, 1, 1, 20), (2, 4, 6, 20)], ids=str
)
@pytest.mark.parametrize("boolean", [True, False])
def test_masks(shape, boolean, dtype, device, engine):
    tensors = make((2, 4, 6, 32), (2, 4, 20, 32), (2, 4, 20, 24), dtype=dtype, device=device)
    mask = torch.rand(shape) < 0.7 if boolean else torch.randn(shape).to(dtype)
    if boolean:
        mask[..., 0] = True
    check(engine, *tensors, mask.to(device))


@pytest.mark.parametrize("heads", [1, 4])
def test_three_dimensions_are_one_batch(heads, device, engine):
    """A mask may have that of the batch."""
    q, k, v = make((4, 6, 32), (4, 20, 32), (4, 20, 24), device=device)
    mask = torch.randn(heads, 6, 20, device=device)
    expected, gradients = gradients_of(F.scaled_dot_product_attention, [q, k, v, mask])
    found, ours = gradients_of(F.scaled_dot_product_attention, [q, k, v, mask[None]])
    torch.testing.assert_close((found, *ours), (expected, *gradients[:3], gradients[3][None]))
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k, v, mask.expand(2, heads, 6, 20))


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_queries_and_keys(is_causal, dtype, device, engine):
    for queries, keys in ((40, 40), (40, 33), (17, 41), (1, 37), (31, 1), (1, 1)):
        check(
            engine, *make((2, 3, queries, 64), *2 * [(2, 3, keys, 64)], dtype=dtype, device=device), is_causal=is_causal
        )


@pytest.mark.parametrize("features, value_features", [(1, 1), (5, 5), (40, 40), (67, 67), (64, 24), (24, 136)])
def test_head_sizes(features, value_features, device, engine):
    for dtype in (torch.float32, torch.bfloat16):
        tensors = make(
            (2, 2, 19, features), (2, 2, 23, features), (2, 2, 23, value_features), dtype=dtype, device=device
        )
        check(engine, *tensors, scale=0.3)


@pytest.mark.parametrize("mask_shape", [None, (6, 20), (2, 1, 6, 20), (2, 6, 6, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_heads(mask_shape, dtype, device, engine):
    tensors = make((2, 6, 6, 32), (2, 2, 20, 32), (2, 2, 20, 32), dtype=dtype, device=device)
    mask = None if mask_shape is None else torch.randn(mask_shape).to(device, dtype)
    check(engine, *tensors, mask, enable_gqa=True)


def test_grouped_heads_of_different_numbers(device):
    check("chosen", *make((2, 6, 8, 16), (2, 3, 20, 16), (2, 2, 20, 16), device=device), enable_gqa=True)


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (7, 8), (7, 8)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((3, 1, 5, 8), (1, 4, 7, 8), (3, 4, 7, 8)),
        ((5, 8), (2, 7, 8), (2, 7, 8)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
    ],
)
def test_batch_sizes(shapes, device, engine):
    check(engine, *make(*shapes, device=device))


def test_expanded_and_strided_keys_and_values(device, engine):
    query, shared = make((2, 4, 9, 16), (2, 1, 13, 16), device=device)
    packed = torch.randn(2, 13, 4, 32, device=device).transpose(1, 2)
    for key, value in ((shared.expand(2, 4, 13, 16),) * 2, packed.chunk(2, -1)):
        ours = F.scaled_dot_product_attention(query, key, value)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key.contiguous(), value.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_are_large(dtype, device, engine):
    """Up to some 10000 before the scale of 1: no overflow, and what remains is the largest one's value."""
    query, key, value = make((2, 3, 30, 64), (2, 3, 50, 64), (2, 3, 50, 64), dtype=dtype, device=device)
    query, key = 35 * query, 35 * key
    ours, grads = gradients_of(F.scaled_dot_product_attention, [query, key, value], scale=1.0)
    assert ours.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    scores = query.double() @ key.double().transpose(-2, -1)
    two = scores.topk(2).values
    clear = two[..., 0] - two[..., 1] > 200  # more than what rounding scores of 10000 to bfloat16 moves
    assert scores.abs().max() > 5000 and clear.any()
    expected = value.take_along_dim(scores.argmax(-1, keepdim=True), -2)
    torch.testing.assert_close(ours[clear], expected[clear])


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_masked_throughout_are_zeros(boolean, dtype, device, engine):
    for length in (20, 128):
        tensors = make(*3 * [(2, 3, length, 32)], dtype=dtype, device=device)
        mask = torch.rand(2, 1, length, length, device=device) < 0.5
        mask[..., 0] = True
        mask[:, :, 3] = False
        if not boolean:
            mask = torch.zeros(mask.shape, device=device, dtype=dtype).masked_fill(~mask, -math.inf)
        query, key, value = (t.requires_grad_() for t in tensors)
        y = F.scaled_dot_product_attention(query, key, value, mask)
        assert not y[:, :, 3].any()
        y.backward(torch.randn_like(y))
        assert all(t.grad.isfinite().all() for t in tensors) and not query.grad[:, :, 3].any()


def test_a_mask_of_another_dtype(device, engine):
    """float32 beside 16-bit queries, which torch's engines on CUDA cannot read."""
    query, key, value = make(*3 * [(2, 3, 20, 32)], dtype=torch.bfloat16, device=device)
    mask = torch.zeros(20, 20, device=device).masked_fill_(torch.rand(20, 20, device=device) < 0.3, -math.inf)
    expected = F.scaled_dot_product_attention(query, key, value, mask.bfloat16())
    torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, mask), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shapes", [((2, 0, 8), (2, 5, 8)), ((0, 4, 8), (0, 5, 8)), ((2, 4, 8), (2, 0, 8))])
def test_empty(shapes, device, engine):
    query, key = (t.requires_grad_() for t in make(*shapes, device=device))
    y = F.scaled_dot_product_attention(query, key, key)
    assert y.shape == query.shape and not y.any()
    y.sum().backward()
    assert not query.grad.any() and not key.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout(dtype, device, engine):
    """The values are the unit matrix, so that the result is the weights."""
    query, key = (t.requires_grad_() for t in make(*2 * [(2, 4, 64, 64)], dtype=dtype, device=device))
    value = torch.eye(64, device=device, dtype=dtype).expand(2, 4, 64, 64)
    torch.manual_seed(0)
    y = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
    kept = y != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(y[kept], (chain(query, key, value) / 0.75)[kept], atol=1e-2, rtol=3e-2)
    grads = torch.autograd.grad(y, (query, key), torch.ones_like(y))
    torch.manual_seed(0)
    again = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
    assert_equal(again, y)
    assert not torch.equal(F.scaled_dot_product_attention(query, key, value, dropout_p=0.25), y)
    if engine == "onepass":
        for a, b in zip(torch.autograd.grad(again, (query, key), torch.ones_like(y)), grads):
            assert_equal(a, b)


def test_dropout_of_everything(device, engine):
    query, key, value = make(*3 * [(2, 5, 8)], device=device)
    assert not F.scaled_dot_product_attention(query, key, value, dropout_p=1.0).any()


def test_checkpoint(device, engine):
    tensors = [t.requires_grad_() for t in make(*3 * [(2, 4, 32, 16)], device=device)]

    def attend(*tensors):
        return F.scaled_dot_product_attention(*tensors, dropout_p=0.2, is_causal=True)

    up = torch.randn(2, 4, 32, 16, device=device)
    torch.manual_seed(1)
    expected = torch.autograd.grad(attend(*tensors), tensors, up)
    torch.manual_seed(1)
    ours = torch.autograd.grad(checkpoint(attend, *tensors, use_reentrant=False), tensors, up)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b)


def test_autocast(device, engine):
    tensors = [t.requires_grad_() for t in make(*3 * [(2, 4, 40, 16)], (4, 40, 40), device=device)]
    with torch.autocast(device, torch.bfloat16):
        y = F.scaled_dot_product_attention(*tensors)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), chain(*tensors), atol=3e-2, rtol=3e-2)
    y.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 and t.grad.any() for t in tensors)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": (2, 1, 1, 96)},
    "dropout": {"dropout_p": 0.2},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compile(options, dtype, device):
    heads = 2 if "enable_gqa" in options else 4
    tensors = make((2, 4, 96, 32), *2 * [(2, heads, 96, 32)], dtype=dtype, device=device)
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(options["attn_mask"], device=device) < 0.8}
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    results = []
    for function in (F.scaled_dot_product_attention, compiled):
        torch.manual_seed(0)
        results.append(gradients_of(function, tensors, **options))
    torch.testing.assert_close(*results)


def test_one_tensor_for_all(device, engine):
    x = torch.randn(2, 4, 96, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    results = [function(x, x, x) for function in (F.scaled_dot_product_attention, compiled)]
    gradients = [torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in results]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients, atol=2e-2, rtol=2e-2)  # three sums, in another order


def test_one_operator_each_way(device, engine):
    if engine == "chosen":
        pytest.skip("the line's")
    tensors = [t.requires_grad_() for t in make(*3 * [(2, 4, 16)], device=device)]
    with Recorder() as recorder:
        F.scaled_dot_product_attention(*tensors).sum().backward()
    assert [str(call[0]) for call in recorder.calls] == [
        "onepass.attention_forward.default",
        "onepass.attention_backward.default",
    ]


class TestErrors:
    """Bad input raises what torch raises, whichever engine would run."""

    CASES = {
        "mask and causal": lambda q, k: ((q, k, k, torch.ones(4, 5, dtype=torch.bool)), {"is_causal": True}),
        "dtypes": lambda q, k: ((q, k.double(), k), {}),
        "value's dtype": lambda q, k: ((q, k, k.double()), {}),
        "features": lambda q, k: ((q, k[..., :8], k), {}),
        "batch": lambda q, k: ((q, torch.randn(3, 5, 16), k), {}),
        "heads": lambda q, k: ((q, torch.randn(3, 5, 16), k), {"enable_gqa": True}),
        "one dimension": lambda q, k: ((q[0, 0], k, k), {}),
        "no tensor": lambda q, k: ((q, None, k), {}),
        "no tensor as a mask": lambda q, k: ((q, k, k, [1]), {}),
        "mask's size": lambda q, k: ((q, k, k, torch.zeros(3, 5)), {}),
        "mask's dtype": lambda q, k: ((q, k, k, torch.zeros(4, 5, dtype=torch.int64)), {}),
        "a wider mask": lambda q, k: ((q, k, k, torch.zeros(4, 5, dtype=torch.float64)), {}),
        "mask's dimensions": lambda q, k: ((q, k, k, torch.zeros(3, 2, 4, 5)), {}),
        "scale": lambda q, k: ((q, k, k), {"scale": "half"}),
    }

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
    def test_as_torchs(self, case, engine):
        arguments, options = case(torch.randn(2, 4, 16), torch.randn(2, 5, 16))
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            torchs(*arguments, **options)
        with pytest.raises(theirs.type):
            F.scaled_dot_product_attention(*arguments, **options)

    def test_messages(self, device, engine):
        query, key = make((2, 4, 16), (2, 5, 16), device=device)
        with pytest.raises(RuntimeError, match=r"attention\(\): expected key and value to have as many rows"):
            F.scaled_dot_product_attention(query, key, key[:, :4])
        with pytest.raises(RuntimeError, match=r"attention\(\): expected query and value to have the same dtype"):
            F.scaled_dot_product_attention(query, key, key.double())
        with pytest.raises(
            RuntimeError, match=r"attention\(\): expected the heads of query to be a multiple of value's"
        ):
            F.scaled_dot_product_attention(query, key, torch.randn(3, 5, 16, device=device), enable_gqa=True)
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.scaled_dot_product_attention(query, key, key, dropout_p=1.5)


def test_no_warning(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        F.scaled_dot_product_attention(*make(*3 * [(2, 4, 8, 16)], device=device))

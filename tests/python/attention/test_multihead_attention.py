"""nn.MultiheadAttention in the place of torch's: masks, weights, projections, gradients, layers built from it."""

import copy
import inspect
import io
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepass.nn as nn
from helpers import DTYPES, Recorder, assert_equal, check_error

WIDTH, HEADS = 32, 4
KINDS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "more keys": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 24, "vdim": 40},
}
MASKS = ["none", "bool", "additive", "bool for each head", "additive for each head"]
PADDING = ["none", "bool", "additive"]


def pair(device="cpu", dtype=torch.float32, **options):
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours.to(device, dtype), theirs.to(device, dtype)


def inputs(queries, keys, batch, device="cpu", dtype=torch.float32, batch_first=False, kdim=WIDTH, vdim=WIDTH, **_):
    def of(rows, width):
        shape = (rows, width) if batch is None else (batch, rows, width) if batch_first else (rows, batch, width)
        return torch.randn(shape).to(device, dtype)

    return of(queries, WIDTH), of(keys, kdim), of(keys, vdim)


def mask_of(kind, *shape):
    if kind == "none":
        return None
    forbidden = torch.rand(shape) < 0.3
    forbidden[..., 0] = False
    return forbidden if kind.startswith("bool") else torch.randn(shape).masked_fill(forbidden, -math.inf)


def masks_of(kind, padding, queries, keys, batch):
    heads = (HEADS * (batch or 1),) if kind.endswith("head") else ()
    batches = () if batch is None else (batch,)
    mask, key_padding_mask = mask_of(kind, *heads, queries, keys), mask_of(padding, *batches, keys)
    return {"attn_mask": mask, "key_padding_mask": key_padding_mask}


def moved(tensors, device, dtype):
    """Masks to x's dtype, too, as torch wants them."""
    return {
        name: t if t is None else t.to(device) if t.dtype == torch.bool else t.to(device, dtype)
        for name, t in tensors.items()
    }


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch", [3, None])
def test_in_the_place_of_torchs(options, need_weights, batch, device):
    ours, theirs = pair(device, **options)
    tensors = inputs(5, 7, batch, device, **options)
    for kind in MASKS:
        for padding in PADDING:
            masks = moved(masks_of(kind, padding, 5, 7, batch), device, torch.float32)
            for average in (True, False):
                flags = {"need_weights": need_weights, "average_attn_weights": average, **masks}
                torch.testing.assert_close(ours(*tensors, **flags), theirs(*tensors, **flags), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["none", "bool", "additive for each head"])
def test_error_is_no_more_than_torchs(kind, need_weights, dtype, device):
    """Results and gradients of inputs and parameters, for a random gradient of both results."""
    ours, theirs = pair(device, dtype)
    exact = copy.deepcopy(theirs).to("cpu", torch.float64)
    tensors, masks = inputs(13, 17, 2, dtype=torch.float64), masks_of(kind, "none", 13, 17, 2)

    def run(module, device):
        of = module.in_proj_weight.dtype
        leaves = [t.to(dtype).to(device, of).requires_grad_() for t in tensors]
        rounded = {n: m if m is None or m.dtype == torch.bool else m.to(dtype) for n, m in masks.items()}
        results = module(*leaves, need_weights=need_weights, **moved(rounded, device, of))
        results = [r for r in results if r is not None]
        generator = torch.Generator().manual_seed(3)
        ups = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(dtype).to(r) for r in results]
        return [*results, *torch.autograd.grad(results, [*leaves, *module.parameters()], ups)]

    sets = run(ours, device), run(theirs, device), run(exact, "cpu")
    for i, (a, b, c) in enumerate(zip(*sets, strict=True)):
        check_error(a, b, c, f"result or gradient {i}", slack=4.0)


@pytest.mark.parametrize("need_weights", [True, False])
def test_causal(need_weights, device):
    ours, theirs = pair(device, batch_first=True)
    x = torch.randn(2, 9, WIDTH, device=device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9, device=device)
    for padding in (None, torch.arange(9, device=device).expand(2, 9) > 6):
        flags = {"key_padding_mask": padding, "attn_mask": mask, "need_weights": need_weights, "is_causal": True}
        expected = theirs(x, x, x, **{**flags, "key_padding_mask": None if padding is None else padding.float() * -1e9})
        torch.testing.assert_close(ours(x, x, x, **flags), expected)


@pytest.mark.parametrize("shared", ["all", "keys and values", "none"])
def test_self_attention_and_others(shared, device):
    ours, theirs = pair(device)
    query, key, value = inputs(6, 6, 2, device)
    key, value = (query, query) if shared == "all" else (key, key) if shared != "none" else (key, value)
    torch.testing.assert_close(ours(query, key, value), theirs(query, key, value))


def test_rows_that_are_masked_throughout_are_zeros(device):
    ours, _ = pair(device, bias=False)
    x = torch.randn(9, 2, WIDTH, device=device, requires_grad=True)
    padding = torch.zeros(2, 9, dtype=torch.bool, device=device)
    padding[1] = True
    for need_weights in (True, False):
        y, weights = ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        assert not y[:, 1].any() and y[:, 0].all()
        assert weights is None or not weights[1].any()
        (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
        assert grad.isfinite().all()


def test_dropout(device):
    """Acts while training, on the weights that are returned, and follows manual_seed."""
    ours, _ = pair(device, dropout=0.3)
    x = torch.randn(40, 2, WIDTH, device=device)
    torch.manual_seed(0)
    y, weights = ours(x, x, x, average_attn_weights=False)
    assert 0.25 < (weights == 0).float().mean() < 0.35
    torch.manual_seed(0)
    again, _ = ours(x, x, x)
    assert_equal(again, y)
    for need_weights in (True, False):
        assert not torch.equal(ours(x, x, x, need_weights=need_weights)[0], y)
    ours.eval()
    torch.testing.assert_close(ours(x, x, x)[0], ours(x, x, x, need_weights=False)[0])
    assert ours(x, x, x)[1].all()


def test_one_operator_each_way(device):
    ours, _ = pair(device, dropout=0.1)
    x = torch.randn(5, 2, WIDTH, device=device)
    with Recorder() as recorder:
        y, weights = ours(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.bool, device=device))
        (y.sum() + weights.sum()).backward()
    assert [str(call[0]) for call in recorder.calls] == [
        "onepass.attention_forward.default",
        "onepass.attention_backward.default",
    ]


@pytest.mark.parametrize("need_weights", [True, False])
def test_compile(need_weights, device):
    ours, _ = pair(device, batch_first=True, dropout=0.1)
    x = torch.randn(2, 9, WIDTH, device=device)
    padding = torch.rand(2, 9, device=device) < 0.3
    padding[:, 0] = False

    def attend(x):
        return ours(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        y = function(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), ours.parameters())))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_and_checkpoint(need_weights, device):
    ours, theirs = pair(device, add_bias_kv=True)
    x = torch.randn(6, 2, WIDTH, device=device, requires_grad=True)
    mask = torch.randn(6, 6, device=device)

    def attend(module, x):
        return module(x, x, x, attn_mask=mask, need_weights=need_weights)[0]

    with torch.autocast(device, torch.bfloat16):
        y = checkpoint(attend, ours, x, use_reentrant=False)
        expected = attend(theirs, x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, atol=5e-2, rtol=5e-2)
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_state_dicts_load_both_ways(options):
    ours, theirs = pair(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == repr(theirs) and isinstance(ours, torch.nn.MultiheadAttention)


def test_has_torchs_arguments():
    for name in ("__init__", "forward"):
        ours, theirs = (
            inspect.signature(getattr(m, name)) for m in (nn.MultiheadAttention, torch.nn.MultiheadAttention)
        )
        assert [(p.name, p.default) for p in ours.parameters.values()] == [
            (p.name, p.default) for p in theirs.parameters.values()
        ]


def test_copies(device):
    ours, _ = pair(device)
    x = torch.randn(5, 2, WIDTH, device=device)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert type(other) is nn.MultiheadAttention
        assert_equal(other(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("training", [True, False])
def test_inside_torchs_layers(training, device):
    """In the place of self_attn and multihead_attn, with the masks that torch's layers make."""
    torch.manual_seed(0)
    theirs = torch.nn.Transformer(WIDTH, HEADS, 1, 1, 64, 0.0, batch_first=True).to(device).train(training)
    ours = copy.deepcopy(theirs)
    for module in list(ours.modules()):
        for name, child in module.named_children():
            if type(child) is torch.nn.MultiheadAttention:
                replacement = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
                replacement.load_state_dict(child.state_dict())
                setattr(module, name, replacement.to(device).train(training))
    source, target = torch.randn(2, 7, WIDTH, device=device), torch.randn(2, 5, WIDTH, device=device)
    flags = {
        "tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(5, device=device),
        "src_key_padding_mask": torch.arange(7, device=device).expand(2, 7) > 4,
        "tgt_is_causal": True,
    }
    torch.testing.assert_close(ours(source, target, **flags), theirs(source, target, **flags), atol=1e-5, rtol=1e-4)


BAD = {
    "dimensions": lambda q, k, v: ((q, k[0], v), {}),
    "width": lambda q, k, v: ((q[..., :8], k, v), {}),
    "keys and values": lambda q, k, v: ((q, k, v[:5]), {}),
    "mask's size": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(4, 7)}),
    "mask for each head": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(3, 5, 7)}),
    "mask's dimensions": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(7)}),
    "mask's dtype": lambda q, k, v: ((q, k, v), {"attn_mask": torch.zeros(5, 7, dtype=torch.int64)}),
    "padding's size": lambda q, k, v: ((q, k, v), {"key_padding_mask": torch.zeros(2, 6)}),
    "padding's dimensions": lambda q, k, v: ((q, k, v), {"key_padding_mask": torch.zeros(7)}),
    "padding's dtype": lambda q, k, v: ((q, k, v), {"key_padding_mask": torch.zeros(2, 7, dtype=torch.uint8)}),
    "a hint without a mask": lambda q, k, v: ((q, k, v), {"is_causal": True}),
    "dtype": lambda q, k, v: ((q.double(), k, v), {}),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("need_weights", [True, False])
def test_errors_are_torchs(case, need_weights):
    ours, theirs = pair()
    tensors, flags = case(*inputs(5, 7, 2))
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        theirs(*tensors, need_weights=need_weights, **flags)
    with pytest.raises(expected.type):
        ours(*tensors, need_weights=need_weights, **flags)


def test_nested_tensors_are_refused():
    ours, _ = pair(batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)])
    with pytest.raises(AssertionError, match="NestedTensor"):
        ours(x, x, x)

"""Lines with `scores`, and attention_scores: against PyTorch's chain and fp64, masks, groups of heads, strategies."""

import math

import pytest
import torch
from torch.autograd import gradcheck

import onepass
import onepass.functional as F
from helpers import (
    DTYPES,
    HALF_TYPES,
    SCORES_LINES,
    Recorder,
    assert_equal,
    check_error,
    check_line,
    gradients,
    make_inputs,
    run,
    upstream,
    with_strategy,
)
from onepass.case.counts import peak


def strategies(device):
    return ("unfused", "two_pass") if device == "cuda" else ("unfused", "auto")


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("line", SCORES_LINES)
def test_error_is_no_more_than_pytorchs(line, dtype, device):
    check_line(line, make_inputs(line, (2, 3, 37, 64), dtype, device, out_features=130), slack=2.0)


@pytest.mark.parametrize("shape", [(1, 1), (5, 8), (2, 7, 24), (2, 1, 3, 16), (2, 3, 2, 4, 8)])
@pytest.mark.parametrize("keys", [1, 17, 64])
def test_shapes(shape, keys, device):
    line = "scores | mul(0.3) | mask | softmax"
    check_line(line, make_inputs(line, shape, torch.float32, device, out_features=keys), slack=2.0)


@pytest.mark.parametrize("shape, keys", [((0, 3, 8), 5), ((2, 0, 8), 5), ((2, 3, 8), 0)])
def test_empty(shape, keys, device):
    line = "scores | softmax"
    inputs = make_inputs(line, shape, torch.float32, device, out_features=keys)
    (y,), _ = run(line, inputs)
    assert y.shape == (*shape[:-1], keys)
    for grad, tensor in zip(gradients([y], inputs, upstream([y])), inputs.differentiable):
        assert grad.shape == tensor.shape and not grad.any()


@pytest.mark.parametrize("line", SCORES_LINES[:4])
def test_gradcheck(line, device):
    inputs = make_inputs(line, (2, 3, 4), torch.float64, device, out_features=5, bool_mask=False)
    fixed = [t.detach() if t.isinf().any() else t for t in inputs.tensors]
    assert gradcheck(lambda *tensors: onepass.fused(line, *tensors), fixed)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("rows, keys", [(1, 1), (16, 128), (100, 129), (300, 515), (257, 1000)])
@pytest.mark.parametrize("depth", [8, 32, 64, 72, 128, 256])
def test_strategies_are_as_accurate_as_pytorchs_chain(rows, keys, depth, dtype, device):
    for name in strategies(device):
        line = with_strategy("scores | mul(0.1) | mask | softmax", name)
        check_line(line, make_inputs(line, (2, 2, rows, depth), dtype, device, out_features=keys), slack=2.0)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("keys", [8, 136, 256, 264, 520, 1000, 2048, 4096])
@pytest.mark.parametrize("words", ["mul(0.1)", "mul(0.1) | mask", "add", "mul(0.1) | tanh | mul(30) | mask"])
def test_rows_that_clusters_share(words, keys, dtype, device):
    if device == "cpu":
        pytest.skip("clusters of blocks are CUDA's")
    for behind, depth in (("", 64), (" | dropout(0.3)", 64), ("", 128)):
        line = f"scores | {words} | softmax{behind}"
        check_line(line, make_inputs(line, (2, 2, 150, depth), dtype, device, out_features=keys), slack=2.0)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("keys", [8, 136, 264, 1000, 2048, 4096, 8192])
@pytest.mark.parametrize(
    "words",
    ["mask", "mul(0.1) | mask", "mask | mul(0.1) | mask", "mul(-0.1) | mask", "mul(0.1) | tanh | mul(30) | mask"],
)
def test_padding(words, keys, dtype, device):
    """Keys that a mask leaves out for all rows of a matrix, whatever they hold; of one matrix all of them."""
    query, key = (torch.randn(2, 3, n, 64, device=device).to(dtype) for n in (70, keys))
    masks = [torch.rand(2, 1, 1, keys, device=device) < p for p in (0.9, 0.6)[: words.count("mask")]]
    masks[0][1] = False
    masks[0][0, ..., 0] = masks[-1][0, ..., 0] = True
    key = key.masked_fill(~masks[0].mT, math.nan)
    line = onepass.Line(f"scores | {words} | softmax")
    ours, theirs = line(query, key, *masks), line.reference(query, key, *masks)
    exact = line.reference(query.double(), key.double(), *masks)
    check_error(ours[0], theirs[0], exact[0], words, slack=2.0)
    assert not ours[1].any()


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("shape, keys", [((1, 2000, 64), 2048), ((17, 200, 64), 1000), ((70, 200, 32), 264)])
def test_strips_that_clusters_share(shape, keys, dtype, device):
    """Fewer batches than clusters, or some more: several clusters have a part of one."""
    if device == "cpu":
        pytest.skip("clusters of blocks are CUDA's")
    line = "scores | mul(0.1) | mask | softmax"
    check_line(line, make_inputs(line, shape, dtype, device, out_features=keys), slack=2.0)


@pytest.mark.parametrize("shape, keys", [((3, 150, 64), 1024), ((2, 150, 128), 512), ((2, 150, 64), 128)])
def test_rows_whose_gradients_differ_in_size(shape, keys, device):
    """Each row is as accurate as the others, nothing stays nothing, and a NaN stays where it is."""
    line = "scores | mul(0.1) | softmax"
    query, key = (
        torch.randn(*of, device=device, dtype=torch.bfloat16).requires_grad_()
        for of in (shape, (shape[0], keys, shape[2]))
    )
    size = torch.logspace(-20, 30, shape[1], device=device, dtype=torch.float64)[:, None]
    given = (torch.randn(*shape[:2], keys, device=device, dtype=torch.float64) * size).bfloat16()
    given[0, 7] = 0
    weights = onepass.fused(line, query, key)
    of_query = torch.autograd.grad(weights, query, given, retain_graph=True)[0].double()
    exact_query = query.detach().double().requires_grad_()
    probabilities = (exact_query @ key.detach().double().mT * 0.1).softmax(-1)
    exact = torch.autograd.grad(probabilities, exact_query, given.double())[0]
    assert not of_query[0, 7].any()
    error, norm = (of_query - exact).norm(dim=-1), exact.norm(dim=-1)
    assert (error <= 0.02 * norm).all()
    given[1, 9, 3] = math.nan
    of_query = torch.autograd.grad(weights, query, given)[0]
    assert of_query[1, 9].isnan().all()
    assert of_query.isnan().sum() == shape[2]


def test_backward_makes_nothing_of_the_weights_size(device):
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("one kernel for it is there for compute capability 9.0")
    query, key = (torch.randn(2, 8, 2048, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    weights = onepass.fused("scores | mul(0.125) | softmax", query, key)
    given = torch.randn_like(weights)
    for _ in range(2):
        most = peak(lambda: torch.autograd.grad(weights, (query, key), given, retain_graph=True), torch.device(device))
    assert most < weights.numel() * weights.element_size() / 4


@pytest.mark.parametrize(
    "line", ["scores | mul(0.1) | add | causal | softmax | dropout(0.3)", "scores | add | keep | softmax | scale"]
)
def test_other_words(line, device):
    for name in strategies(device):
        inputs = make_inputs(line, (2, 2, 70, 64), torch.bfloat16, device, out_features=150)
        check_line(with_strategy(line, name), inputs, slack=2.0)


def test_scores_that_are_large(device):
    """Up to some 10000: no overflow, and rows sum to one."""
    for name in strategies(device):
        q, k = (100 * torch.randn(2, 50, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
        y = onepass.fused(with_strategy("scores | softmax", name), q, k)
        assert y.isfinite().all()
        torch.testing.assert_close(y.float().sum(-1), torch.ones(2, 50, device=device), atol=1e-2, rtol=0)


def test_rows_that_are_masked_throughout_are_zeros(device):
    for name in strategies(device):
        q, k = (torch.randn(2, 3, 20, 32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        mask = torch.rand(2, 1, 20, 20, device=device) < 0.5
        mask[:, :, 3] = False
        y = onepass.fused(with_strategy("scores | mul(0.2) | mask | softmax", name), q, k, mask)
        assert not y[:, :, 3].any()
        y.backward(torch.randn_like(y))
        assert q.grad.isfinite().all() and k.grad.isfinite().all() and not q.grad[:, :, 3].any()


@pytest.mark.parametrize("layout", ["heads behind rows", "expanded keys", "strided rows", "misaligned"])
def test_layouts(layout, device):
    q, k = (torch.randn(2, 3, 40, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    if layout == "heads behind rows":
        apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k)]
    elif layout == "expanded keys":
        k = k[:, :1].expand(2, 3, 40, 64)
        apart = [q, k]
    elif layout == "strided rows":
        apart = [torch.cat([t, t], -1)[..., :64] for t in (q, k)]
    else:
        apart = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in (q, k)]
    expected = F.attention_scores(q.contiguous(), k.contiguous())
    if layout == "misaligned" and device == "cuda":  # another way, which rounds the scores
        torch.testing.assert_close(F.attention_scores(*apart), expected, atol=1e-2, rtol=2e-2)
        return
    assert_equal(F.attention_scores(*apart), expected)
    up = torch.randn_like(expected)
    for ours, same in zip(_gradients_of(apart, up), _gradients_of([q.contiguous(), k.contiguous()], up)):
        assert_equal(ours, same)


def _gradients_of(tensors, up):
    leaves = [t.detach().requires_grad_() for t in tensors]
    return torch.autograd.grad(F.attention_scores(*leaves), leaves, up)


def test_the_same_bits_every_time(device):
    for name in strategies(device):
        line = with_strategy("scores | mul(0.125) | softmax", name)
        inputs = make_inputs(line, (2, 4, 300, 64), torch.bfloat16, device, out_features=200)
        first = run(line, inputs)[0][0]
        assert_equal(run(line, inputs)[0][0], first)
        if name == "two_pass":  # a row does not depend on the others
            assert_equal(
                onepass.fused(line, inputs.x[:1, 2:3, 7:9].detach(), inputs.operands[0][:1, 2:3]), first[:1, 2:3, 7:9]
            )


def test_saves_inputs_and_the_result_only(device):
    line = onepass.Line("scores | mul(0.125) | softmax")
    assert line.cost((2, 4, 32, 64), torch.bfloat16, 128).saved_bytes == 2 * (2 * 4 * (32 * 64 + 128 * 64 + 32 * 128))
    with_dropout = onepass.Line("scores | mul(0.125) | softmax | dropout(0.1)")
    assert (
        with_dropout.cost((2, 4, 32, 64), torch.bfloat16, 128).saved_bytes
        == 2 * 4 * (32 * 64 + 128 * 64) * 2 + 2 * 4 * 32 * 8
    )


def test_plan():
    line = onepass.Line("scores | mul(0.125) | softmax")
    plan = line.plan((4, 16, 2048, 64), out_features=2048, device="sm_90a")
    assert plan.strategy == "two_pass" and [way.name for way in plan.alternatives] == ["unfused", "two_pass"]
    assert plan.alternatives[1].kernel == "probabilities_forward_sm90"
    plan = line.plan((4, 16, 2048, 64), out_features=2048, device="sm_80")
    assert plan.strategy == "two_pass" and plan.alternatives[1].kernel == "probabilities_forward_sm80"
    assert line.plan((4, 16, 2048, 64), torch.float32, 2048, device="sm_90a").strategy == "unfused"
    plan = line.plan((4, 16, 2048, 64), torch.float32, 2048, device="cpu")
    assert plan.strategy == "panels" and [way.name for way in plan.alternatives] == ["unfused", "panels"]
    assert line.plan((2, 16, 64), torch.float32, 16, device="cpu").strategy == "unfused"
    assert line.plan((4, 16, 2048, 64), torch.float16, 2048, device="cpu").strategy == "unfused"
    assert line.plan((0, 16, 2048, 64), out_features=0, device="sm_90a").strategy in ("unfused", "two_pass")


@pytest.mark.parametrize(
    "line, message",
    [
        ("bias | scores", "'scores' must be the first word"),
        ("scores | linear", "a second contraction, 'linear'"),
        ("scores(tiled)", "expected one of auto, unfused, two_pass, flash, panels"),
        ("scores | softmax | layer_norm", "a second row word"),
    ],
)
def test_lines_that_cannot_be(line, message):
    with pytest.raises(onepass.LineError, match=message):
        onepass.Line(line)


def test_bad_operands(device):
    q = torch.randn(2, 3, 8, device=device)
    for keys in (torch.randn(2, 5, 7), torch.randn(3, 5, 8), torch.randn(5, 8), torch.randn(1, 2, 5, 8)):
        with pytest.raises(RuntimeError, match=r"K of 'scores'\) must have shape \[..., S, 8\]"):
            onepass.fused("scores", q, keys.to(device))
    with pytest.raises(RuntimeError, match="at least 2 dimensions"):
        onepass.fused("scores", q[0, 0], q[0, 0])
    with pytest.raises(RuntimeError, match="must be a floating point tensor"):
        onepass.fused("scores", q, torch.ones(2, 5, 8, device=device, dtype=torch.int64))


def test_a_strategy_that_cannot_be(device):
    q = torch.randn(2, 3, 8, device=device)
    with pytest.raises(RuntimeError, match=r"scores\(two_pass\)' cannot take this call"):
        onepass.fused("scores(two_pass) | softmax", q, q)


class TestAttentionScores:
    """The named function against PyTorch's math."""

    @staticmethod
    def chain(query, key, mask=None, is_causal=False, scale=None, enable_gqa=False):
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1)

    def check(self, query, key, mask=None, **options):
        def run_with(function, dtype=None, device=None):
            tensors = [query, key, *([] if mask is None or mask.dtype == torch.bool else [mask])]
            leaves = [t.detach().to(device, dtype).requires_grad_() for t in tensors]
            masks = [leaves[2]] if len(leaves) == 3 else [] if mask is None else [mask.to(device)]
            result = function(leaves[0], leaves[1], *masks, **options)
            up = torch.randn(result.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            return result, torch.autograd.grad(result, leaves, up.to(result))

        ours, theirs = run_with(F.attention_scores), run_with(self.chain)
        exact = run_with(self.chain, torch.float64, "cpu")
        assert ours[0].dtype == query.dtype and ours[0].is_contiguous()
        check_error(ours[0], theirs[0], exact[0], "probabilities", slack=2.0)
        for i, (a, b, c) in enumerate(zip(ours[1], theirs[1], exact[1], strict=True)):
            assert a.shape == c.shape
            # What all keys of a row have in common has no gradient: what is left is rounding.
            scale = 1.0 if i == 2 and mask.shape[-1] == 1 else None
            check_error(a, b, c, f"gradient {i}", slack=2.0, scale=scale)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(6, 20), (1, 20), (6, 1), (4, 6, 20), (1, 6, 20), (2, 1, 1, 20), (2, 4, 6, 20)])
    @pytest.mark.parametrize("boolean", [True, False])
    def test_masks(self, shape, boolean, dtype, device):
        query, key = torch.randn(2, 4, 6, 32).to(device, dtype), torch.randn(2, 4, 20, 32).to(device, dtype)
        mask = torch.rand(shape) < 0.7 if boolean else torch.randn(shape).to(dtype)
        if boolean:
            mask[..., 0] = True
        self.check(query, key, mask.to(device))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_causal_and_scale(self, dtype, device):
        query, key = (torch.randn(2, 4, 40, 64).to(device, dtype) for _ in range(2))
        self.check(query, key, is_causal=True)
        self.check(query, key[:, :, :33].contiguous(), is_causal=True, scale=0.3)

    @pytest.mark.parametrize("mask_shape", [None, (6, 20), (2, 1, 6, 20), (2, 6, 6, 20)])
    def test_grouped_heads(self, mask_shape, device):
        query, key = torch.randn(2, 6, 6, 32).to(device), torch.randn(2, 2, 20, 32).to(device)
        mask = None if mask_shape is None else torch.randn(mask_shape).to(device)
        self.check(query, key, mask, enable_gqa=True)

    def test_batch_sizes_broadcast(self, device):
        self.check(torch.randn(3, 1, 5, 8).to(device), torch.randn(1, 4, 7, 8).to(device))
        self.check(torch.randn(5, 8).to(device), torch.randn(2, 7, 8).to(device))

    def test_dropout(self, device):
        query, key = (torch.randn(2, 4, 64, 64, device=device, requires_grad=True) for _ in range(2))
        torch.manual_seed(0)
        y = F.attention_scores(query, key, dropout_p=0.25)
        kept = y != 0
        assert abs(kept.float().mean().item() - 0.75) < 0.02
        torch.testing.assert_close(y[kept], (self.chain(query, key) / 0.75)[kept], atol=1e-5, rtol=1e-4)
        y.backward(torch.randn_like(y))
        assert query.grad.isfinite().all()

    def test_autocast(self, device):
        query, key = (torch.randn(2, 4, 16, device=device, requires_grad=True) for _ in range(2))
        with torch.autocast(device, torch.bfloat16):
            y = F.attention_scores(query, key)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert query.grad.dtype == torch.float32

    def test_errors(self, device):
        query, key = torch.randn(2, 4, 16, device=device), torch.randn(2, 5, 16, device=device)
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
            F.attention_scores(query, key, torch.ones(4, 5, dtype=torch.bool, device=device), is_causal=True)
        with pytest.raises(RuntimeError, match="same dtype"):
            F.attention_scores(query, key.double())
        with pytest.raises(RuntimeError, match="same last dimension"):
            F.attention_scores(query, key[..., :8])
        with pytest.raises(RuntimeError, match="do not broadcast"):
            F.attention_scores(query, torch.randn(3, 5, 16, device=device))
        with pytest.raises(RuntimeError, match="multiple of key's"):
            F.attention_scores(query, torch.randn(3, 5, 16, device=device), enable_gqa=True)
        with pytest.raises(RuntimeError, match="at least 2-dimensional"):
            F.attention_scores(query[0, 0], key)
        with pytest.raises(TypeError, match="must be Tensor"):
            F.attention_scores(query, None)
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.attention_scores(query, key, dropout_p=1.5)

    def test_one_operator_each_way(self, device):
        query, key = (torch.randn(2, 4, 16, device=device, requires_grad=True) for _ in range(2))
        with Recorder() as recorder:
            F.attention_scores(query, key).sum().backward()
        assert [str(call[0]) for call in recorder.calls] == [
            "onepass.scores_forward.default",
            "onepass.scores_backward.default",
        ]

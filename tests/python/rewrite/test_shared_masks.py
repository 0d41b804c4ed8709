"""Masks of attention with a position bias in them: one for all layers, as small as what it is made of."""

import pytest
import torch
import torch.nn.functional as F

import onepass
from captures import captured
from onepass.graph.operations import called, leave_apart, operation
from onepass.rewrite.shared_masks import share_masks

LEAST = torch.finfo(torch.float32).min


def bias_of(x, weight):
    """(1, heads, length, length), as it lies behind an embedding."""
    at = torch.arange(x.shape[-2])
    return F.embedding((at[None] - at[:, None]).clamp(-2, 2) + 2, weight).permute(2, 0, 1).unsqueeze(0)


def attend(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def layers(mask_of, times=3):
    """Of attentions, each with a mask made anew; the bias is one for all."""

    def function(x, weight):
        bias = bias_of(x, weight)
        for _ in range(times):
            x = attend(x, mask_of(x, bias))
        return x

    return function


def of_rows(x, keeps=torch.ge):
    """As transformers makes a mask while a graph is captured: for each batch the same."""
    at = torch.arange(x.shape[-2])
    return keeps(at[:, None], at[None]).view(1, 1, len(at), -1).expand(x.shape[0], -1, -1, -1)


def causal(x, bias):
    return torch.where(of_rows(x), bias, LEAST).contiguous()


def unmasked(x, bias):
    return torch.where(of_rows(x, lambda i, j: i + j >= 0), bias, LEAST).contiguous()


def plain(x, bias):
    return bias.contiguous()


def summed(x, bias):
    at = torch.arange(x.shape[-2])
    return bias - 0.25 * (at[:, None] - at[None]).abs()


def repeated(x, bias):
    return (bias * 0.5).expand(x.shape[0], -1, -1, -1).contiguous()


def given(batch=3, heads=2, length=6):
    torch.manual_seed(0)
    return torch.randn(batch, heads, length, 4).requires_grad_(), torch.randn(5, heads).requires_grad_()


def masks_of(graph):
    ops = (operation(node) for node in graph.nodes)
    return [op.arguments[3] for op in ops if op is not None and op.name == "attention"]


def count(graph, *targets):
    return sum(called(node) in targets for node in graph.nodes)


@pytest.mark.parametrize(
    ("mask_of", "wheres", "contiguous"),
    [(causal, 1, 1), (unmasked, 0, 1), (plain, 0, 1), (summed, 0, 0), (repeated, 0, 1)],
)
def test_layers_have_one_mask(mask_of, wheres, contiguous):
    """The graph has one, without batches, and results and gradients are what they were."""
    inputs = given()
    graph = captured(layers(mask_of), *inputs)
    leave_apart(graph)
    assert share_masks(graph) >= 2
    masks = masks_of(graph)
    assert len(masks) == 3 and len(set(masks)) == 1
    assert tuple(masks[0].meta["example_value"].shape) == (1, 2, 6, 6)
    assert count(graph, torch.where) == wheres and count(graph, "contiguous") == contiguous
    assert share_masks(graph) == 0
    graph.lint()
    found, expected = (call(layers(mask_of), *inputs) for call in (fused, run))
    torch.testing.assert_close(found, expected)


def run(function, *inputs):
    result = function(*inputs)
    return result, *torch.autograd.grad(result.square().mean(), [i for i in inputs if i.requires_grad])


def fused(function, *inputs):
    return run(onepass.fuse(function), *inputs)


@pytest.mark.parametrize("then", ["eager", "inductor"])
def test_padding_is_joined_with_the_bias_once(then):
    """A mask that the caller gives has its batches."""
    x, weight = given()
    keeps = torch.arange(6)[None, None, None] < torch.tensor([6, 4, 5])[:, None, None, None]

    def function(x, weight, keeps):
        return layers(lambda x, bias: torch.where(keeps, bias, LEAST).contiguous())(x, weight)

    graph = captured(function, x, weight, keeps)
    leave_apart(graph)
    assert share_masks(graph) == 2
    assert len(set(masks_of(graph))) == 1 and count(graph, torch.where) == 1
    found = run(onepass.fuse(function, then=then), x, weight, keeps)
    torch.testing.assert_close(found, run(function, x, weight, keeps))


def test_a_condition_alone():
    """PyTorch's engines make numbers of all that a boolean mask is expanded to."""

    def function(x, keeps):
        return attend(attend(x, keeps.expand(3, -1, -1, -1)), keeps.expand(3, 1, 6, 6))

    x, keeps = given()[0], torch.rand(1, 1, 6, 6) > 0.3
    graph = captured(function, x, keeps)
    leave_apart(graph)
    assert share_masks(graph) == 2
    assert [mask.op for mask in masks_of(graph)] == ["placeholder", "placeholder"]
    torch.testing.assert_close(fused(function, x, keeps), run(function, x, keeps))


def written(x, weight):
    bias = bias_of(x, weight.detach()) * 1.0
    x = attend(x, causal(x, bias))
    bias.mul_(2.0)
    return attend(x, causal(x, bias))


def mask_written(x, weight):
    first, second = (causal(x, bias_of(x, weight.detach())) for _ in range(2))
    x = attend(x.detach(), first)
    second.mul_(2.0)
    return attend(x, second) * weight.sum()


def mask_given(x, weight):
    bias = bias_of(x, weight)
    mask = causal(x, bias)
    return attend(attend(x, mask), causal(x, bias)), mask


def without_gradient(x, weight):
    bias = bias_of(x, weight)
    with torch.no_grad():
        first = attend(x, causal(x, bias))
    return attend(x + first, causal(x, bias))


def drawn(x, weight):
    bias = bias_of(x, weight)
    masks = [bias + torch.rand(6, 6) for _ in range(2)]
    return attend(attend(x, masks[0]), masks[1])


@pytest.mark.parametrize("function", [written, mask_written, mask_given, without_gradient, drawn])
def test_masks_that_stay_apart(function):
    """What is overwritten, given, recorded otherwise or drawn is not what was computed before."""
    inputs = given()
    graph = captured(function, *inputs)
    leave_apart(graph)
    share_masks(graph)
    first, *_, last = [n for n in graph.nodes if called(n) is F.scaled_dot_product_attention]
    assert first.kwargs["attn_mask"] is not last.kwargs["attn_mask"]
    torch.manual_seed(1)
    expected = function(*inputs)
    torch.manual_seed(1)
    torch.testing.assert_close(onepass.fuse(function)(*inputs), expected)


def test_masks_of_more_batches_than_queries():
    """PyTorch's attention refuses them where it runs, not where it is captured."""

    def function(x, weight):
        mask = of_rows(x.expand(4, -1, -1, -1))
        return attend(x, torch.where(mask, bias_of(x, weight), LEAST)).sum()

    inputs = given(batch=1)
    for way in (function, onepass.fuse(function)):
        with pytest.raises(RuntimeError, match="broadcast"):
            way(*inputs)


def test_sizes_that_change():
    """A mask has no constant then; what repeats is still left out."""
    function = onepass.fuse(layers(causal), dynamic=True)
    for length in (6, 7, 9):
        inputs = given(length=length)
        torch.testing.assert_close(run(function, *inputs), run(layers(causal), *inputs))


def test_t5_has_two_masks(monkeypatch):
    """One for its encoder's layers, one for its decoder's: where torch before 2.14 captures it, too."""
    transformers = pytest.importorskip("transformers")
    from transformers import masking_utils

    config = transformers.T5Config(
        **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4},
        **{"decoder_start_token_id": 0, "dropout_rate": 0.0, "use_cache": False},
    )
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    ids = torch.randint(2, 64, (2, 12))

    def step(ids):
        return model(input_ids=ids, labels=ids).loss

    def gradients(step):
        return torch.autograd.grad(step(ids), list(model.parameters()))

    expected = gradients(step)
    for always in (False, True):
        if always and hasattr(masking_utils, "is_torchdynamo_exporting"):
            monkeypatch.setattr(masking_utils, "is_torchdynamo_exporting", lambda: True)
        torch._dynamo.reset()
        graph = captured(step, ids)
        leave_apart(graph)
        share_masks(graph)
        masks = {mask for mask in masks_of(graph) if mask is not None and mask.meta["example_value"].requires_grad}
        assert len(masks) == 2
        assert {mask.meta["example_value"].shape[0] for mask in masks} == {1}
        torch.testing.assert_close(gradients(onepass.fuse(step)), expected)


def of_sizes(x, weight):
    for _ in range(2):
        x = attend(x, torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()) * weight.sum()
    return x


def of_pieces(x, weight):
    for _ in range(2):
        first, second = weight.chunk(2, 1)
        x = attend(x, (first - second).sum() * torch.ones(x.shape[-2], x.shape[-2]))
    return x


@pytest.mark.parametrize("function", [of_sizes, of_pieces])
def test_what_is_no_tensor_may_be_on_the_way(function):
    """Sizes, where they change from call to call, and tuples of tensors."""
    made = onepass.fuse(function)
    for length in (6, 7, 8):
        inputs = given(length=length)
        torch.testing.assert_close(run(made, *inputs), run(function, *inputs))

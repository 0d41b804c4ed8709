"""Heads of transformers' models, where a caller takes the loss alone; and losses, where it reads the logits."""

import copy
from collections import OrderedDict, defaultdict
from functools import partial

import pytest
import torch

import onepass
from onepass.rewrite.heads import CACHES

HEAD, LOSS = "linear_cross_entropy", "cross_entropy"


pytestmark = pytest.mark.usefixtures("small_heads")


SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = {"intermediate_size": 64, "pad_token_id": 0, **SIZES}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **DECODER}
OF_BART = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
MODELS = {
    "LlamaForCausalLM": DECODER,
    "Gemma2ForCausalLM": {"num_key_value_heads": 1, "head_dim": 16, "final_logit_softcapping": 2.0, **DECODER},
    "GraniteForCausalLM": {"logits_scaling": 8.0, **DECODER},
    "OPTForCausalLM": {
        "ffn_dim": 64,
        "max_position_embeddings": 16,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
        **SIZES,
    },
    "BertForMaskedLM": ENCODER,
    "ModernBertForMaskedLM": DECODER,
    "T5ForConditionalGeneration": {"vocab_size": 100, "d_model": 32, "d_kv": 16, "num_layers": 1, "dropout_rate": 0.0},
    "BartForConditionalGeneration": {"vocab_size": 100, "d_model": 32, "dropout": 0.0, **OF_BART},
}


def model_of(name):
    transformers = pytest.importorskip("transformers", reason="needs onepass[demo]")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    numbers = {"pad_token_id": 0, "decoder_start_token_id": 0} if "Conditional" in name else {}
    return kind(kind.config_class(use_cache=False, **{**MODELS[name], **numbers})).train()


def batch():
    tokens = torch.randint(3, 100, (2, 9))
    labels = tokens.clone()
    labels[0, 2:5] = -100
    return {"input_ids": tokens, "labels": labels}


def assert_trains_as(model, loss, reference, inputs):
    """In float64, where transformers itself does not take float32."""
    expected = reference.double()(**inputs).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=2e-5, check_dtype=False)


@pytest.mark.parametrize("name", MODELS)
def test_models_that_give_their_loss(name):
    model, inputs = model_of(name), batch()
    reference = copy.deepcopy(model)
    fused = onepass.fuse(lambda inputs: model(**inputs).loss)
    assert_trains_as(model, fused(inputs), reference, inputs)
    assert HEAD in [found.line for found in onepass.report(fused).lines]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "BartForConditionalGeneration"])
def test_models_that_give_their_logits(name):
    """Of a model that is fused itself a caller may read all of its outputs."""
    model, inputs = model_of(name), batch()
    reference = copy.deepcopy(model)
    outputs = onepass.fuse(model)(**inputs)
    found = [found.line for found in onepass.report(model).lines]
    assert LOSS in found and HEAD not in found
    torch.testing.assert_close(outputs.logits, reference(**inputs).logits, rtol=1e-4, atol=1e-5)
    assert_trains_as(model, outputs.loss, reference, inputs)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "BartForConditionalGeneration"])
def test_models_that_skip_their_logits(name):
    """While gradients are recorded and there is a loss."""
    model, inputs = model_of(name), batch()
    reference = copy.deepcopy(model)
    onepass.fuse(model, skip_logits=True)
    outputs = model(**inputs)
    assert "logits" not in outputs and HEAD in [found.line for found in onepass.report(model).lines]
    assert type(outputs) is type(reference(**inputs))
    with torch.no_grad():
        for given in (inputs, {"input_ids": inputs["input_ids"], "decoder_input_ids": inputs["labels"].relu()}):
            if "Bart" not in name:
                given.pop("decoder_input_ids", None)
            torch.testing.assert_close(model(**given).logits, reference(**given).logits, rtol=1e-4, atol=1e-5)
    assert_trains_as(model, outputs.loss, reference, inputs)


def test_models_that_skip_their_logits_skip_a_cache():
    """That nobody asked for."""
    transformers = pytest.importorskip("transformers")
    model, inputs = model_of("LlamaForCausalLM"), batch()
    model.config.use_cache = True
    onepass.fuse(model, skip_logits=True)
    name = next(name for name in CACHES if hasattr(model(**inputs), name))
    assert getattr(model(**inputs), name) is None
    assert getattr(model(**inputs, use_cache=True), name).get_seq_length() == inputs["input_ids"].shape[1]
    cache = transformers.DynamicCache(config=model.config)
    assert getattr(model(**inputs, **{name: cache}), name) is not None
    assert cache.get_seq_length() == inputs["input_ids"].shape[1]
    given = [inputs["input_ids"], inputs.get("attention_mask"), None, transformers.DynamicCache(config=model.config)]
    assert getattr(model(*given, labels=inputs["labels"]), name) is not None
    with torch.no_grad():
        assert getattr(model(**inputs), name) is not None


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("kind", [tuple, dict, OrderedDict, partial(defaultdict, list)], ids=str)
def test_other_results_keep_their_logits(kind, loss):
    """But a plain dict with a loss, whatever its other keys are."""
    layer, x = torch.nn.Linear(8, 8), torch.randn(3, 8)

    def model(x):
        logits = layer(x)
        return kind([("logits", logits), ("loss", logits.sum() if loss else None), (0, x)])

    result, expected = onepass.fuse(model, skip_logits=True)(x), model(x)
    assert type(result) is type(expected)
    if loss and kind is dict:
        assert [*result] == ["loss", 0]
    else:
        assert torch.equal(dict(result)["logits"], layer(x))
        assert getattr(result, "default_factory", None) is getattr(expected, "default_factory", None)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_models_whose_layers_are_checkpointed(name):
    model, inputs = model_of(name), batch() | {"num_items_in_batch": torch.tensor(13)} if "Llama" in name else batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    reference = copy.deepcopy(model)
    fused = onepass.fuse(lambda inputs: model(**inputs).loss)
    assert_trains_as(model, fused(inputs), reference, inputs)
    assert HEAD in [found.line for found in onepass.report(fused).lines]

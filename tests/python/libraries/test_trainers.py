"""What accelerate, peft, TRL and sentence-transformers do with a model that is fused: the same as with eager's."""

import copy
from functools import partial

import pytest
import torch

import onepass
from models import DECODER, assert_as_near, make, output, trained
from test_libraries import WORDS, assert_close, evaluated, library, lora, sentence_transformer

library = partial(library, reason="needs onepass[demo,train,libraries]")


@pytest.fixture
def accelerator():
    """What makes one; it keeps its options for the process."""
    state = library("accelerate.state").AcceleratorState
    yield partial(library("accelerate").Accelerator, cpu=True)
    state._reset_state(reset_partial_state=True)


def llama():
    """A model in double precision, and what it is called with."""
    return make("llama", num_hidden_layers=1)


def lines_of(model):
    return {found.line for found in onepass.report(model).lines}


@pytest.mark.parametrize("first", ["fuse", "prepare"])
def test_accelerate_in_mixed_precision(first, accelerator):
    """accelerate puts another `forward` into the model, with autocast around the old one; either may come first."""
    exact_model, inputs = llama()
    exact, model = trained(exact_model, inputs), copy.deepcopy(exact_model).float()
    accelerator = accelerator(mixed_precision="bf16")
    eager = trained(accelerator.prepare(copy.deepcopy(model)), inputs)
    if first == "fuse":
        fused = accelerator.prepare(onepass.fuse(model))
    else:
        fused = onepass.fuse(accelerator.prepare(model))
    found = trained(fused, inputs)
    assert found[0].dtype == torch.float32 and "gate(silu)" in lines_of(fused)
    # Gradients of layers that share their input are added in bfloat16 where autocast casts once: see numerics.md.
    for ours, theirs, true in zip(found, eager, exact, strict=True):
        assert (ours - true).norm().item() <= 2 * (theirs - true).norm().item() + 1e-3 * true.norm().item()


def test_accelerate_saves_and_loads(accelerator, tmp_path):
    """A step that is repeated from what was saved is the same."""
    model, inputs = llama()
    accelerator = accelerator()
    model, optimizer = accelerator.prepare(onepass.fuse(model.float()), torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step():
        optimizer.zero_grad()
        accelerator.backward(output(model(**inputs)).square().mean())
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    step()
    accelerator.save_state(tmp_path)
    expected = step()
    accelerator.load_state(tmp_path)
    for ours, theirs in zip(step(), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_adapters_are_merged_and_left_out():
    """After the model was captured, and of the model that is left when adapters are merged for good."""
    torch.manual_seed(3)
    model, inputs = lora()
    model = model.float().eval()
    fused = onepass.fuse(copy.deepcopy(model))
    for _ in range(2):
        assert_close(evaluated(fused, inputs), evaluated(model, inputs))
        with model.disable_adapter(), fused.disable_adapter():
            base = evaluated(model, inputs)
            assert_close(evaluated(fused, inputs), base)
        assert (evaluated(model, inputs) - base).abs().max() > 1e-2
        model.merge_adapter(), fused.merge_adapter()
        assert_close(evaluated(fused, inputs), evaluated(model, inputs))
        model.unmerge_adapter(), fused.unmerge_adapter()
    merged = onepass.fuse(fused.merge_and_unload())
    assert_close(evaluated(merged, inputs), evaluated(model, inputs))
    assert "gate(silu)" in lines_of(merged)


def test_adapters_alone_are_trained():
    torch.manual_seed(3)
    model, inputs = lora()
    fused = onepass.fuse(copy.deepcopy(model))
    for each in (model, fused):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(**inputs, labels=inputs["input_ids"]).loss.backward()
            optimizer.step()
    for (name, ours), theirs in zip(fused.named_parameters(), model.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None) == ("lora" not in name), name
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def preferences(tokenizer, directory, fused):
    """The losses of three steps of DPO."""
    trl, transformers = library("trl"), library("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(DECODER | {"num_hidden_layers": 1})))
    reference = copy.deepcopy(model)
    if fused:
        onepass.fuse(model), onepass.fuse(reference)
    rows = [{"prompt": f"{n} {n}", "chosen": f" {n} {n + 1} {n + 2}", "rejected": f" {n} {n}"} for n in range(2, 26)]
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = trl.DPOTrainer(
        model,
        reference,
        trl.DPOConfig(directory, **options, **quiet),
        train_dataset=library("datasets").Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    return model, [step["loss"] for step in trainer.state.log_history if "loss" in step]


def test_preferences(accelerator, tmp_path):
    """DPO: TRL gives the model a head of its own, which returns log-probabilities."""
    tokenizer = sentence_transformer()[0].tokenizer
    tokenizer.eos_token = WORDS[1]
    _, eager = preferences(tokenizer, tmp_path, False)
    model, fused = preferences(tokenizer, tmp_path, True)
    assert len(set(fused)) == 3
    assert fused == pytest.approx(eager, rel=1e-4)
    assert "gate(silu)" in lines_of(model)


def test_sentences(tmp_path):
    """Encoded, trained with a loss that calls the model for each column, and saved. The transformer within is no place
    for fuse: its `forward` is what is called."""
    model, _ = sentence_transformer()
    texts = [" ".join(WORDS[2 : 2 + n]) for n in (3, 20, 7, 12, 9)]
    fused, within = onepass.fuse(copy.deepcopy(model)), copy.deepcopy(model)
    onepass.fuse(within[0].model).eval()
    expected = model.encode(texts, batch_size=2, convert_to_tensor=True)
    for batch_size in (2, 3):
        assert_close(fused.encode(texts, batch_size=batch_size, convert_to_tensor=True), expected)
    assert "add | layer_norm(1e-12) | scale | bias" in lines_of(fused)
    assert torch.equal(within.encode(texts, batch_size=2, convert_to_tensor=True), expected)
    assert lines_of(within[0].model) == set()

    losses = library("sentence_transformers.sentence_transformer.losses")
    pairs = [model.preprocess(texts[:3]), model.preprocess(texts[2:])]
    exact_model = copy.deepcopy(model).double()
    found = [
        trained(losses.MultipleNegativesRankingLoss(each.eval()), {"sentence_features": pairs, "labels": None})
        for each in (fused, model, exact_model)
    ]
    assert_as_near(*found)

    fused.save(str(tmp_path))
    loaded = library("sentence_transformers").SentenceTransformer(str(tmp_path), device="cpu")
    assert torch.equal(loaded.encode(texts, batch_size=2, convert_to_tensor=True), expected)

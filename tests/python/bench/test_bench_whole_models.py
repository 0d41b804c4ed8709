"""Models of the suites "fuse", "fuse_small" and "fuse_shapes" at small sizes: what they give, and what is counted."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

from onepass import bench
from onepass.bench import whole, whole_shapes
from onepass.bench.whole import PROVIDERS, WITH_GRAPHS, Run, expected_of, outcome
from onepass.bench.whole_models import (
    CAUSAL,
    CLASSES,
    CONTRASTIVE,
    DIT,
    FLUX,
    MASKED,
    MODELS,
    NOISE,
    SEQ2SEQ,
    UNET,
    Whole,
    t5,
)
from onepass.rewrite import fuse as fusing

pytest.importorskip("transformers", reason="needs onepass[demo]")
CPU = torch.device("cpu")
TEXT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
LLAMA = TEXT | {"num_key_value_heads": 1, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE = TEXT | {"image_size": 32, "patch_size": 8}
WORDS = TEXT | {"max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2}
CLIP = {"text_config": WORDS, "vision_config": IMAGE}
MAMBA2 = {
    **{"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16},
    **{"n_groups": 1, "state_size": 8, "chunk_size": 8},
}
FLUX_SIZES = {"width": 32, "heads": 2, "joint": 1, "single": 1, "text_width": 24}
DIT_SIZES = {"width": 32, "heads": 2, "inner": 64, "tokens": 16}


class Training(Whole):
    """On the CPU, too."""

    trains = True


TRAINED = (
    Training("Qwen 3 MoE", "cpu", "Qwen3Moe", (2, 16), LLAMA | EXPERTS, CAUSAL),
    Training("T5", "cpu", "T5", (2, 16), t5(32, 2, 2, 64) | {"vocab_size": 50, "decoder_start_token_id": 0}, SEQ2SEQ),
    Training("BERT", "cpu", "Bert", (2, 16), TEXT, MASKED),
    Training("ViT", "cpu", "ViT", (2, 3, 32, 32), IMAGE | {"num_labels": 5}, CLASSES),
    Training("CLIP", "cpu", "CLIP", (3, 3, 32, 32), CLIP, CONTRASTIVE),
    Training("UNet", "cpu", UNET, (2, 4, 8, 8), {"widths": (32, 64), "text_width": 24}, NOISE),
    Training("Flux", "cpu", FLUX, (2, 16), FLUX_SIZES, NOISE),
    Training("Mamba 2", "cpu", "Mamba2", (2, 16), MAMBA2, CAUSAL),
    Training("Llama with LoRA", "cpu", "Llama", (2, 16), LLAMA, CAUSAL, rank=4),
)
TOKEN = Whole("one token", "cpu", "Llama", (1, 1), LLAMA, cached=20)
INFERRED = (
    Whole("Llama", "cpu", "Llama", (2, 16), LLAMA, infers=torch.bfloat16),
    Whole("BERT", "cpu", "Bert", (2, 16), TEXT, infers=torch.bfloat16),
    Whole("DiT", "cpu", DIT, (2, 16), DIT_SIZES, infers=torch.bfloat16),
    Whole("one token, bfloat16", "cpu", "Llama", (1, 1), LLAMA, infers=torch.bfloat16, cached=20),
    TOKEN,
)


@pytest.fixture(autouse=True)
def norms(monkeypatch):
    """Of tensors so small no line would be worth it, and most are compiled when they are met."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, **_: float(chain.line.startswith("add | layer_norm")))


@pytest.mark.parametrize("model", TRAINED, ids=lambda model: model.name)
def test_losses_and_gradients(model):
    """As near to the step in float32 as eager's are; each trained parameter has a gradient."""
    network, inputs = model.build(CPU)
    expected, allowed = expected_of(model, network, inputs)
    one = Run(model, network, inputs, {"provider": "onepass"})
    one.compare(expected, allowed)
    assert one.report.graphs and 0 < one.row["gradient_difference"] < 0.1
    trained = [gradient for gradient, p in zip(expected[1], network.parameters()) if p.requires_grad]
    assert trained and sum(bool(gradient.any()) for gradient in trained) > 0.8 * len(trained)


def test_of_lora_only_adapters_are_trained():
    network, _ = TRAINED[-1].build(CPU)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert len(trained) == 14 and all("lora_A" in name or "lora_B" in name for name in trained)


@pytest.mark.parametrize("model", INFERRED, ids=lambda model: model.name)
def test_inference(model):
    eager, ours = whole.measure(model, CPU, ["eager", "onepass"], 1)
    for row in (eager, ours):
        assert row.get("failure") is None and row["seconds"] > 0 and not row["trains"]
        assert row["dtype"] == str(model.dtype).removeprefix("torch.")
    assert (0 < eager["difference"] < 0.1) if model.rounds else ours["difference"] < 1e-5


def test_steps_with_a_cache_begin_at_the_same_place():
    network, inputs = TOKEN.build(CPU)
    first = outcome(TOKEN, network, network, inputs)
    assert all(int(layer.cumulative_length) == 21 for layer in inputs_cache(inputs).layers)
    again = outcome(TOKEN, network, network, inputs)
    assert torch.equal(first[0][0], again[0][0])
    with torch.no_grad():
        assert not torch.equal(network(**inputs)[0], first[0][0])  # a token later


def inputs_cache(inputs):
    return next(value for value in inputs.values() if hasattr(value, "layers"))


def test_tables_say_how_it_was_measured():
    """Training and inference, and what bfloat16 is compared with, are tables of their own."""
    rows = [
        {"model": "BERT base", "shape": (4, 128), "provider": "eager", "seconds": 0.1, "trains": trains, "dtype": dtype}
        for trains, dtype in ((True, "float32"), (False, "float32"), (False, "bfloat16"))
    ]
    found = {"device_name": "H200", "torch": "2.11", "suite": "fuse", "rows": rows}
    training, inference, rounded = (text.splitlines()[0] for text in whole.markdown([found]))
    assert "training step" in training and "inference, float32, distance from eager's" in inference
    assert "inference, bfloat16, distance from float32's" in rounded and "Whole" in rounded
    assert "Small models: " in whole.markdown([found | {"suite": "fuse_small"}])[0]


def test_graphs_of_three_shapes(tmp_path):
    """The second shape is a graph of its own, in which a length or a batch may change; the third has it already."""
    llama = Whole("Llama", "cpu", "Llama", (4, 16), LLAMA)
    assert llama.shapes == ((4, 16), (2, 16), (4, 8))
    console, file = Console(file=StringIO(), width=200), tmp_path / "shapes.json"
    found = whole_shapes.run(CPU, None, file, ["onepass"], console, (llama,))
    (row,) = found["rows"]
    assert "failure" not in row and "4x16, 2x16, 4x8" in console.file.getvalue()
    assert row["graphs"][0] == 1 < row["graphs"][1] <= row["graphs"][2] == len(row["lines"]) <= 3
    assert len(row["first_seconds"]) == 3 and max(row["difference"]) < 1e-5
    assert json.loads(file.read_text())["suite"] == "fuse_shapes"
    (table,) = whole_shapes.markdown([found])
    assert table.splitlines()[-1].startswith("| Llama | 4x16, 2x16, 4x8 | onepass | 1, 2")


def test_what_fails_with_a_shape_shows(monkeypatch):
    monkeypatch.setitem(PROVIDERS, "wrong", lambda: lambda graph, _: lambda *inputs: [2 * x for x in graph(*inputs)])
    (row,) = whole_shapes.measure(Whole("BERT", "cpu", "Bert", (2, 16), TEXT), CPU, ["wrong"])
    assert row["failure"].startswith("WrongResult: (2, 16) is 1.0e+00 off") and len(row["graphs"]) == 1


def test_three_shapes_differ():
    for model in MODELS:
        assert len(set(model.shapes)) == 3 and min(shape[0] for shape in model.shapes) > 1


def test_cuda_graphs_are_for_small_models(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        whole, "measure", lambda model, device, providers, _: asked.update({model.name: providers}) or []
    )
    for suite in ("fuse", "fuse_small"):
        bench.run(device="cpu", suite=suite, only="MiniLM", quick=True, console=Console(file=StringIO()))
    assert set(asked) == {"MiniLM", "MiniLM, bfloat16", "MiniLM, one text"}
    assert not any(WITH_GRAPHS & set(providers) for providers in asked.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph_gives_the_same():
    model = Whole("one token", "cuda", "Llama", (1, 1), LLAMA, infers=torch.bfloat16, cached=20)
    rows = whole.measure(model, torch.device("cuda"), ["eager", "eager_cuda_graph", "onepass_cuda_graph"], 1)
    assert all("failure" not in row and row["seconds"] > 0 for row in rows)

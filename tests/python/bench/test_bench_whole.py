"""The suite "fuse": each of its models can be built, rows say what was measured, and what fails or is wrong shows."""

import json
import sys
from dataclasses import replace
from io import StringIO
from types import ModuleType

import pytest
import torch
from rich.console import Console

import onepass
from onepass import bench
from onepass.bench import whole, whole_picture
from onepass.bench.whole import PROVIDERS, WITH_HEAD, measure
from onepass.bench.whole_models import (
    CAUSAL,
    DECODERS,
    DIFFUSION,
    DIT,
    ENCODER_LAYER,
    MASKED,
    MODELS,
    NOISE,
    Whole,
    encoder_layer,
)
from onepass.rewrite import fuse as fusing

CPU = torch.device("cpu")
NAMES = [f"{model.name}, {model.device}" for model in MODELS]
BERT = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
TINY = (
    Whole("tiny BERT", "cpu", "Bert", (2, 16), BERT),
    Whole("tiny layer", "cpu", ENCODER_LAYER, (2, 16, 32), encoder_layer(32, 2, 64)),
)
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
WITH_HEADS = (
    Whole("tiny Llama", "cpu", "Llama", (2, 16), SMALL | {"num_key_value_heads": 1}, CAUSAL),
    Whole("tiny ELECTRA", "cpu", "Electra", (2, 16), SMALL | {"embedding_size": 32}, MASKED),
    Whole("tiny DiT", "cpu", DIT, (2, 16), {"width": 32, "heads": 2, "inner": 64, "tokens": 16}, NOISE),
)
PARAMETERS = {
    "BERT base": 109e6,
    "RoBERTa base": 125e6,
    "GPT-2": 124e6,
    "GPT-2 medium": 355e6,
    "Llama 1B": 1.1e9,
    "Qwen3 0.6B": 506e6,  # 151936 words in the place of 32000 would be 0.6e9
    "T5 small": 60.5e6,
    "T5 base": 223e6,
    "ViT base": 86.4e6,
    "MiniLM": 22.6e6,
    "Llama, 8 layers": 1.01e9,
    "Gemma 3, 8 layers": 515e6,
    "DiT, 8 layers": 197e6,
    "Qwen 3 MoE, 6 layers": 289e6,
    "CLIP base": 150e6,
    "UNet, 3 levels": 273e6,
    "Flux, 3 + 6 layers": 478e6,
    "Mamba 2, 4 layers": 64e6,
    "Whisper tiny": 37.8e6,
}


class Training(Whole):
    """On the CPU, too."""

    trains = True


@pytest.fixture(autouse=True)
def two_lines(monkeypatch):
    """Of tensors so small none would be worth it, and most are compiled when they are met."""

    def gain(chain, **_):
        return float(chain.line == "bias | gelu" or chain.line.startswith("add | layer_norm"))

    monkeypatch.setattr(fusing, "gain_of", gain)


@pytest.fixture
def results(tmp_path):
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    console, file = Console(file=StringIO(), width=200), tmp_path / "results.json"
    found = whole.run(CPU, None, file, ["eager", "onepass"], True, console, TINY)
    assert "tiny BERT" in console.file.getvalue()
    read = json.loads(file.read_text())
    assert read["rows"] == [row | {"shape": list(row["shape"])} for row in found["rows"]]
    return found


def test_rows_and_markdown(results):
    assert results["suite"] == "fuse" and results["device"] == "cpu" and results["copy_bytes_per_second"] > 1e8
    rows = {(row["model"], row["provider"]): row for row in results["rows"]}
    assert list(rows) == [(model.name, provider) for model in TINY for provider in ("eager", "onepass")]
    for (_, provider), row in rows.items():
        assert row.get("failure") is None and row["seconds"] > 0 and not row["trains"]
        assert row["difference"] == 0 if provider == "eager" else row["difference"] < 1e-5
        assert ("bytes" in row) == (provider == "onepass") and "peak_bytes" not in row
    before, after = rows["tiny BERT", "onepass"]["bytes"]
    assert 0 < after < before
    tables = [line for line in whole.markdown([results])[0].splitlines() if line.startswith("|")]
    assert len(tables) == 2 + len(rows) and len({line.count("|") for line in tables}) == 1
    assert tables[3].startswith("| tiny BERT | 2x16 | onepass | ") and " MB" in tables[0] and " %) |" in tables[3]


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_training(model):
    """With dropout, and compared without."""
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    model = Training(**vars(model))
    eager, ours = measure(model, CPU, ["eager", "onepass"], 1)
    for row in (eager, ours):
        assert row.get("failure") is None and row["seconds"] > 0 and row["trains"]
    for name in whole.DIFFERENCES:  # from float32
        assert 1e-4 < eager[name] < 0.1 and ours[name] <= whole.RATIO * eager[name]
    before, after = ours["bytes"]
    assert 0 < after < before


@pytest.mark.parametrize("model", WITH_HEADS, ids=lambda model: model.name)
def test_losses(model):
    """In bfloat16, beside the step in float32; of the logits nothing is returned."""
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    model = Training(**vars(model))
    network, inputs = model.build(CPU)
    assert all(p.dtype == torch.bfloat16 for p in network.parameters())
    assert model.step(network)(**inputs).shape == ()
    eager, ours = measure(model, CPU, ["eager", "onepass"], 1)
    for row in (eager, ours):
        assert row.get("failure") is None and row["seconds"] > 0 and row["trains"] and row["first_seconds"] >= 0
        assert row["difference"] < 0.01 and 0 < row["gradient_difference"] < 0.1
    assert 0 <= ours["in_lines"] <= 1


def test_liger_is_measured_where_it_has_the_model(monkeypatch):
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    monkeypatch.setattr(whole, "liger_kinds", lambda: {"llama": None})
    llama, _, dit = (Training(**vars(model)) for model in WITH_HEADS)
    assert [row["provider"] for row in measure(llama, CPU, ["eager", "liger"], 1)] == ["eager", "liger"]
    assert [row["provider"] for row in measure(dit, CPU, ["eager", "liger"], 1)] == ["eager"]


def test_others_run_nothing_of_liger(monkeypatch):
    """Which puts its functions into transformers' modules; a later model has them neither."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs onepass[demo]")
    own, seen = modeling.apply_rotary_pos_emb, []

    def patched(model):
        modeling.apply_rotary_pos_emb = lambda *args, **kwargs: seen.append("liger") or own(*args, **kwargs)

    liger = ModuleType("liger_kernel.transformers.monkey_patch")
    liger._apply_liger_kernel_to_instance = patched
    for name in ("liger_kernel", "liger_kernel.transformers", liger.__name__):
        monkeypatch.setitem(sys.modules, name, liger)
    monkeypatch.setattr(whole, "liger_kinds", lambda: {"llama": None})
    times = whole.Run.time
    monkeypatch.setattr(whole.Run, "time", lambda run, on: seen.append(run.row["provider"]) or times(run, on))
    llama = Training(**vars(WITH_HEADS[0]))
    rows = {row["provider"]: row for row in measure(llama, CPU, ["eager", "onepass", "liger"], 2)}
    assert all(row.get("failure") is None and row["seconds"] > 0 for row in rows.values())
    assert set(seen[: seen.index("eager")]) == {"liger"} and seen.count("liger") > 2  # calls, beside two rounds
    assert seen[seen.index("eager") :] == ["eager", "onepass"] * 2
    assert modeling.apply_rotary_pos_emb is own


def test_bytes_are_those_of_what_is_timed(monkeypatch):
    """Not of the comparison without dropout as well."""
    made = []
    monkeypatch.setitem(PROVIDERS, "kept", lambda: made.append(fusing.Rewriter()) or made[-1])
    (row,) = measure(Training(**vars(TINY[1])), CPU, ["kept"], 1)
    compared, timed = ([f.bytes[0] - f.bytes[1] for f in graph] for graph in made[0].report.graphs)
    before, after = row["bytes"]
    assert sum(compared) > 0 and before - after == pytest.approx(sum(timed))


def test_explain_and_fuse_count_alike():
    """But for sums of gradients, which are no operators of explain's."""
    tiny = Training(**vars(TINY[1]))
    model, inputs = tiny.build(CPU)
    with tiny.mode():
        now, fused = onepass.explain(model, **inputs, device="cpu").bytes
    (row,) = measure(tiny, CPU, ["onepass"], 1)
    before, after = row["bytes"]
    assert before - after == pytest.approx(now - fused) and before >= now


def broken(graph, inputs):
    raise NotImplementedError("no such kernel")


def scaled(by):
    return lambda graph, inputs: lambda *arguments: [by * result for result in graph(*arguments)]


def test_what_fails_or_is_wrong_shows_and_is_not_timed(monkeypatch):
    monkeypatch.setitem(PROVIDERS, "broken", lambda: broken)
    monkeypatch.setitem(PROVIDERS, "wrong", lambda: scaled(1.01))
    monkeypatch.setitem(PROVIDERS, "no number", lambda: scaled(float("nan")))
    rows = {row["provider"]: row for row in measure(TINY[1], CPU, ["broken", "wrong", "no number", "onepass"], 1)}
    assert "no such kernel" in rows["broken"]["failure"]
    assert rows["wrong"]["failure"] == "WrongResult: difference is 1.0e-02, more than 1.0e-05"
    assert rows["wrong"]["difference"] == pytest.approx(0.01, rel=1e-3)
    assert rows["no number"]["failure"].startswith("WrongResult") and rows["no number"]["difference"] is None
    assert "failure" not in rows["onepass"] and rows["onepass"]["seconds"] > 0
    assert not any("seconds" in rows[name] for name in ("broken", "wrong", "no number"))
    found = {"device": "cpu", "device_name": "", "torch": "", "rows": list(rows.values())}
    json.dumps(found, allow_nan=False)
    (table,) = whole.markdown([found])
    assert "no such kernel" in table and "WrongResult" in table


def of_a_gpu(*rows):
    return {"device": "cuda", "device_name": "NVIDIA H200", "torch": "2.11.0", "rows": list(rows)}


def row_of(model, provider, ms, gib, **more):
    times = {"seconds": ms / 1e3, "peak_bytes": 2**36, "step_bytes": gib * 2**30}
    return {"model": model, "shape": [4, 2048], "trains": True, "provider": provider, **times, **more}


LLAMA, BERT_BASE = "Llama, 8 layers", "BERT base"
MEASURED = of_a_gpu(
    row_of(LLAMA, "eager", 91.3, 18.5, products_seconds=0.0524),
    row_of(LLAMA, "onepass", 80.6, 9.25),
    row_of(BERT_BASE, "eager", 33.3, 7.5),
    row_of(LLAMA, "onepass_inductor", 81.3, 11.2),
    {"model": LLAMA, "shape": [4, 2048], "trains": True, "provider": "liger", "failure": "OutOfMemoryError: no room"},
)


def test_models_with_a_head_have_a_table_of_their_own():
    """Whose title says in which dtypes they are: `Whole.mode`."""
    assert {model.head != "" for model in MODELS if model.name in WITH_HEAD} == {True}
    without, with_head = whole.markdown([MEASURED, MEASURED])
    assert "autocast" in without.splitlines()[0] and without.count(f"| {BERT_BASE} |") == 2
    assert "weights in bfloat16, d" in with_head.splitlines()[0] and with_head.count(f"| {LLAMA} |") == 8
    assert LLAMA not in without and BERT_BASE not in with_head and "autocast" not in with_head
    console = Console(file=StringIO(), width=200)
    whole.show(MEASURED, console)
    assert console.file.getvalue().count("Whole models") == 2


def test_a_picture_of_training_steps(tmp_path):
    """Of models with a head: a bar for each number, the same bytes each time."""
    pytest.importorskip("matplotlib")
    (file,) = whole_picture.plot([MEASURED], tmp_path / "one")
    (again,) = whole_picture.plot([MEASURED], tmp_path / "two")
    assert file.name == "h200-training.svg" and file.read_bytes() == again.read_bytes()
    picture = file.read_text(encoding="utf-8")
    assert all(f">{number}<" in picture for number in ("91.3", "80.6", "18.5", "9.2"))
    assert ">Llama,<" in picture and "BERT" not in picture and ">81.3<" not in picture and "<dc:date>" not in picture
    assert whole_picture.plot([of_a_gpu(MEASURED["rows"][2])], tmp_path) == []


def test_a_model_that_cannot_be_built_is_reported():
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    rows = measure(replace(TINY[0], architecture="NoSuch"), CPU, ["eager", "onepass"], 1)
    assert [row["provider"] for row in rows] == ["eager", "onepass"]
    assert all("NoSuchConfig" in row["failure"] for row in rows)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no provider is called fast; there are eager, compile, onepass"):
        bench.run(device="cpu", suite="fuse", providers=["fast"])
    with pytest.raises(ValueError, match="no model matches 'Mamba'; there are MiniLM, BERT base"):
        bench.run(device="cpu", suite="fuse", only="Mamba")


def test_both_devices_have_every_architecture():
    of = {
        device: {model.architecture for model in MODELS if model.device == device and not (model.head or model.infers)}
        for device in ("cpu", "cuda")
    }
    assert of["cuda"] == {"Bert", "Roberta", "GPT2", "Llama", "Qwen3", "T5", "ViT", ENCODER_LAYER}
    assert of["cpu"] == of["cuda"] | {"MiniLM", "Whisper"}
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("model", MODELS, ids=NAMES)
def test_every_model_can_be_built_and_takes_its_inputs(model):
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    meta = torch.device("meta")
    network, inputs = model.build(meta)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == pytest.approx(PARAMETERS.get(model.name, count), rel=0.01)
    assert network.training == model.trains == (model.device == "cuda" and model.infers is None)
    assert {parameter.dtype for parameter in network.parameters()} == {model.dtype}
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
    assert tensors and all(tensor.device == meta for tensor in tensors)
    assert any(tensor.shape[: len(model.shape)] == model.shape for tensor in tensors)
    if not model.head and model.architecture not in (*DIFFUSION, "Whisper"):
        assert all(tensor.shape == model.shape for tensor in tensors)
    if model.architecture not in (*DECODERS, "Whisper") and not model.head:  # those look at numbers of their masks
        network(**inputs)

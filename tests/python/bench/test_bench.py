"""The benchmark: what it counts, that a wrong or failing provider shows and cannot win, and the form of its results."""

import functools
import json
import resource
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import onepass
from onepass import bench
from onepass.bench import report
from onepass.bench.accuracy import Judge, WrongResult
from onepass.bench.attention import ATTENTIONS, SCALE
from onepass.bench.cases import Row
from onepass.bench.models import MODELS, network
from onepass.bench.patterns import PATTERNS, Case, P, Traffic
from onepass.bench.providers import PROVIDERS, Provider, Trial, flex, sdpa
from onepass.bench.suites import SUITES
from onepass.pricing import timing

BY_NAME = {pattern.name: pattern for pattern in (*PATTERNS, *ATTENTIONS)}
WITH_VALUES = [pattern.name for pattern in ATTENTIONS if "values" in pattern.line]
# Forward and backward: tensors of x's shape that are read and written, counted by hand.
TENSORS = {
    "bias_gelu": ((1, 1), (2, 1)),
    "layer_norm": ((1, 1), (2, 1)),
    "add_rms_norm": ((2, 2), (3, 1)),
    "swiglu": ((2, 1), (3, 2)),
    "bias_dropout_add": ((2, 1), (1, 1)),
    "gelu_dropout_add": ((2, 1), (2, 1)),
    "softmax": ((1, 1), (2, 1)),
    "attention_probabilities": ((1, 1), (2, 1)),
}


def tiny(name):
    pattern = BY_NAME[name]
    shape = (2, 3, 8, 16) if name.startswith("attention") else (8, 16)
    cases = (Case(shape, torch.float32, out_features=24 if onepass.Line(pattern.line).weight is not None else 0),)
    return replace(pattern, cuda=cases, cpu=cases)


def judged(pattern, device, shape=None):
    case = pattern.cpu[0]
    inputs = pattern.inputs(shape or case.shape, torch.float32, torch.device(device), out_features=case.out_features)
    judge = Judge(pattern, inputs)
    judge.ask_eager()
    return judge


def ratio(judge, function, provider=PROVIDERS["eager"]):
    trial = Trial(provider, judge.pattern, function, judge.inputs, judge.upstream)
    return judge.ratio(judge.errors(trial, provider.keep_probability))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "results.json"
    patterns = [tiny("add_rms_norm"), tiny("gelu_dropout_add")]
    found = bench.run(device="cpu", quick=True, providers=["eager", "onepass"], json=file, patterns=patterns)
    assert json.loads(file.read_text()) == found
    return found


def test_results_say_what_was_measured_and_where(results):
    assert results["schema"] == 1
    assert results["device"] == "cpu" and results["device_name"]
    assert results["torch"] == torch.__version__ and results["onepass"] == onepass.__version__
    assert results["copy_bytes_per_second"] > 1e8
    assert {row["provider"] for row in results["rows"]} == {"eager", "onepass"} == set(results["providers"])
    assert len(results["rows"]) == 4 and results["host"] == []
    for row in results["rows"]:
        assert row["failure"] is None and row["shape"] == [8, 16] and row["dtype"] == "float32"
        for direction in ("forward", "backward"):
            assert row[f"{direction}_us"] > 0
            assert row[f"{direction}_fraction"] > 0 and row[f"{direction}_same_size_fraction"] > 0
        assert row["error_ratio"] < 10 and row["peak_bytes"] is None


def test_host_times_of_every_provider():
    patterns = [tiny("layer_norm"), tiny("bias_gelu")]
    found = bench.run(device="cpu", suite="host", providers=["eager", "compile", "onepass"], patterns=patterns)
    assert found["rows"] == []
    assert {(row["pattern"], row["provider"]) for row in found["host"]} == {
        (pattern, provider) for pattern in ("layer_norm", "bias_gelu") for provider in ("eager", "compile", "onepass")
    }
    assert all(row["inference_us"] > 0 and row["training_us"] > 0 for row in found["host"])
    table = report.host_markdown(found)
    assert "| pattern | eager | compile | onepass |" in table and "| bias_gelu | " in table
    asked = bench.find_providers(None, torch.device("cpu"), "host")[1]
    assert {"eager", "compile", "liger", "quack", "onepass"} == set(asked)


def test_what_fails_has_no_host_time(monkeypatch):
    def fails(*_):
        raise NotImplementedError("only at night")

    failing = replace(PROVIDERS["compile"], build=lambda _: fails)
    monkeypatch.setattr(bench, "find_providers", lambda *_: ([failing], {"compile": "1"}))
    found = bench.run(device="cpu", suite="host", patterns=[tiny("layer_norm")])
    assert found["host"] == [
        {"pattern": "layer_norm", "provider": "compile", "failure": "NotImplementedError: only at night"}
    ]


def test_saved_bytes_are_those_of_distinct_storages(results):
    saved = {(row["pattern"], row["provider"]): row["saved_bytes"] for row in results["rows"]}
    tensor = 8 * 16 * 4
    assert saved["gelu_dropout_add", "onepass"] == tensor + 16  # x, and the generator's seed and offset
    assert saved["add_rms_norm", "onepass"] == tensor + 16 * 4 + 8 * 4  # h, the weight, a number a row
    assert saved["gelu_dropout_add", "eager"] > tensor + 16


def test_markdown_has_a_row_for_each_case(results):
    text = report.markdown(results)
    assert f"torch {torch.__version__}" in text
    assert "| add_rms_norm | 8x16 | fp32 |" in text and "| gelu_dropout_add | 8x16 | fp32 |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:4]} == {tables[0].count("|")}


def test_plot_writes_a_roofline(results, tmp_path):
    pytest.importorskip("matplotlib")
    (file,) = report.plot(results, tmp_path / "pictures")
    assert file.read_text().count("<path") > 10


def test_plot_writes_a_curve_of_several_lengths(results, tmp_path):
    pytest.importorskip("matplotlib")
    row = next(row for row in results["rows"] if row["provider"] == "onepass")
    lengths = [row | {"shape": [8, length]} for length in (64, 128, 256)]
    files = report.plot(results | {"rows": lengths}, tmp_path)
    assert {file.name for file in files} == {f"cpu-{row['pattern']}-fp32.svg", "cpu-roofline-table.svg"}


def test_an_unknown_suite_is_an_error():
    with pytest.raises(ValueError, match="no suite is called 'speed'; there are table, curve"):
        bench.run(device="cpu", suite="speed")


def test_a_provider_that_fails_or_is_wrong_shows_and_is_no_peer(monkeypatch):
    def broken(pattern):
        raise NotImplementedError("no such kernel\nsecond line")

    def wrong(pattern):
        return lambda x: torch.softmax(1.01 * x, -1)

    monkeypatch.setitem(PROVIDERS, "broken", Provider("broken", broken))
    monkeypatch.setitem(PROVIDERS, "wrong", Provider("wrong", wrong))
    monkeypatch.setitem(PROVIDERS, "absent", Provider("absent", wrong, module="no_such_module"))
    names = ["broken", "wrong", "absent", "onepass"]
    found = bench.run(device="cpu", quick=True, providers=names, patterns=[tiny("softmax")])
    rows = {row["provider"]: row for row in found["rows"]}
    assert rows["broken"]["failure"] == "NotImplementedError: no such kernel" and rows["broken"]["forward_us"] is None
    assert rows["wrong"]["failure"].startswith("wrong result") and rows["wrong"]["forward_us"] > 0
    assert rows["onepass"]["failure"] is None
    assert "absent" not in rows and found["providers"]["absent"].startswith("not run: ModuleNotFoundError")
    assert report.speed_up(rows, "forward") is None
    text = report.markdown(found)
    assert "no such kernel" in text and "wrong result" in text and "no_such_module" in text


def test_speed_up_is_over_the_best_peer_that_is_right():
    def row(us, failure=None):
        return {"forward_us": us, "failure": failure}

    rows = {"eager": row(30.0), "compile": row(20.0), "liger": row(1.0, "wrong result"), "onepass": row(10.0)}
    assert report.speed_up(rows, "forward") == 2.0
    assert report.speed_up(rows | {"onepass": row(None, "OutOfMemoryError")}, "forward") is None


def test_what_was_measured_is_written_where_a_run_is_cut_off(monkeypatch, tmp_path):
    patterns = [tiny("layer_norm"), tiny("softmax")]
    row = Row.of(patterns[0], patterns[0].cpu[0], PROVIDERS["onepass"])
    monkeypatch.setattr(bench, "run_case", Mock(side_effect=[[row], KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        bench.run(device="cpu", json=tmp_path / "cut.json", providers=["onepass"], patterns=patterns)
    assert [row["pattern"] for row in json.loads((tmp_path / "cut.json").read_text())["rows"]] == ["layer_norm"]


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="no provider is called fast; there are eager"):
        bench.run(device="cpu", providers=["fast"])
    with pytest.raises(ValueError, match="no pattern matches 'batch_norm'; there are bias_gelu"):
        bench.run(device="cpu", only="batch_norm")


def test_a_line_with_linear_is_timed_beside_its_product():
    found = bench.run(device="cpu", suite="linear", providers=["onepass"], patterns=[tiny("linear_gelu")], quick=True)
    (row,) = found["rows"]
    assert row["out_features"] == 24 and row["failure"] is None
    assert row["forward_same_size_fraction"] > 0 and row["backward_same_size_fraction"] > 0


@pytest.mark.parametrize("name", TENSORS)
def test_traffic_counts_each_tensor_once(name):
    inputs = tiny(name).inputs(tiny(name).cpu[0].shape, torch.float32, torch.device("cpu"))
    traffic = BY_NAME[name].traffic(inputs)
    size = inputs[0].numel() * 4
    for (reads, writes), counted in zip(TENSORS[name], traffic):
        assert (counted.reads, counted.writes) == (reads, writes)
        assert (reads + writes) * size <= counted.bytes < (reads + writes + 1) * size


@pytest.mark.parametrize("name", BY_NAME)
def test_every_pattern_is_its_line(name, device):
    pattern = tiny(name)
    shape = (2, 3, 64, 128) if name.startswith("attention") else (384, 128)
    function = PROVIDERS["onepass_line"].build(pattern) or PROVIDERS["onepass"].build(pattern)
    assert ratio(judged(pattern, device, shape), function, PROVIDERS["onepass"]) <= 1.5


@pytest.mark.parametrize(
    "name, function",
    [
        ("softmax", lambda x: torch.softmax(x, -1).detach() + 0 * x),  # gradients of zero
        ("swiglu", lambda g, u: torch.nn.functional.silu(u) * g),
        ("rms_norm", lambda x, w: torch.full_like(x, float("nan")) * x * w),
        ("gelu_dropout_add", lambda x, r: r + torch.dropout(torch.nn.functional.gelu(x), 2 * P, True)),
        ("gelu_dropout_add", lambda x, r: r + torch.nn.functional.gelu(x)),
    ],
)
def test_judge_finds_what_is_wrong(name, function):
    with pytest.raises(WrongResult):
        ratio(judged(tiny(name), "cpu", (384, 128)), function)


class Destructive(torch.autograd.Function):
    """Doubles, and writes its gradient over the one it is given and over its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, upstream):
        with torch.no_grad():
            ctx.saved_tensors[0].data.zero_()
            return upstream.mul_(2)


def test_a_backward_that_overwrites_gets_its_tensors_anew():
    provider = Provider("destructive", lambda pattern: Destructive.apply, overwrites=("softmax",))
    x, upstream = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    before = x.detach().clone()
    trial = Trial(provider, BY_NAME["softmax"], Destructive.apply, [x], [upstream])
    for _ in range(2):
        trial.refresh()
        assert torch.equal(trial.outputs[0], 2 * before)
        assert torch.equal(trial.backward()[0], 2 * upstream)
    assert torch.equal(x, before)


def test_rounds_interleave_and_rotate():
    calls = []
    clock = timing.WallClock(torch.device("cpu"))
    runs = {name: timing.Run(lambda name=name: calls.append(name)) for name in "abc"}
    assert set(clock.median(runs, 0)) == set("abc")
    assert calls[:9] == list("abcbcacab") and len(calls) == 3 * timing.LEAST


@pytest.mark.parametrize("reads, writes", [(1, 1), (2, 1), (3, 1), (3, 2), (2, 2)])
def test_floor_writes_as_many_tensors_as_the_pattern(reads, writes):
    clock = timing.CpuClock.__new__(timing.CpuClock)
    clock.sources, clock.targets = [], []
    for size in (4 << 20, (4 << 20) - 2):
        written = clock.floor(Traffic(0, reads, writes), size).call()
        assert len(written) == writes and all(t.nbytes == 4 << 20 and t.min() >= 1 for t in written)


def test_memory_comes_on_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("needs transparent huge pages")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    timing.on_huge_pages(64 << 20).fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 4096  # of 16384 small pages


def test_attention_is_timed_beside_torchs_engines(monkeypatch):
    refused = functools.partial(sdpa, engine=SDPBackend.CUDNN_ATTENTION)
    monkeypatch.setitem(PROVIDERS, "refused", Provider("refused", refused))
    names = ["eager", "sdpa", "refused", "onepass_line", "onepass"]
    patterns = [tiny("attention_mask"), tiny("attention_softcap"), tiny("attention_scores")]
    found = bench.run(device="cpu", suite="attention", providers=names, patterns=patterns, quick=True)
    rows = {(row["pattern"], row["provider"]): row for row in found["rows"]}
    assert len(rows) == 5 + 2 + 2  # torch's function has neither tanh nor probabilities
    assert rows.pop(("attention_mask", "refused"))["failure"].startswith("RuntimeError: No ")
    for row in rows.values():
        assert row["failure"] is None and row["shape"] == [2, 3, 8, 16] and row["out_features"] == 24
        assert row["forward_same_size_fraction"] > 0 and row["backward_same_size_fraction"] > 0
    text = report.markdown(found)
    assert "Time, forward / backward" in text and "square matrices" in text
    assert "| attention_mask | 2x3x8x16→24 | fp32 |" in text


def test_only_attentions_suites_have_its_providers_unnamed():
    default = {suite: [p.name for p in PROVIDERS.values() if p.is_default(suite)] for suite in SUITES}
    assert default["table"] == default["curve"] == ["eager", "compile", "liger", "quack", "onepass"]
    engines = ["sdpa", "sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex"]
    assert default["attention"] == ["eager", "compile", *engines, "onepass"]
    assert default["models"] == ["eager", "compile", "onepass"]


@pytest.mark.parametrize("name", WITH_VALUES)
def test_torchs_attention_computes_the_pattern(name):
    judge = judged(tiny(name), "cpu", (2, 3, 64, 32))
    function = sdpa(BY_NAME[name])
    assert (function is None) == (name == "attention_softcap")
    assert function is None or ratio(judge, function) < 4


@pytest.mark.filterwarnings("ignore::UserWarning")  # that it is not compiled
@pytest.mark.parametrize("name", WITH_VALUES)
def test_flex_computes_the_pattern(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    pattern = BY_NAME[name]
    function = flex(pattern)
    assert (function is None) == (name == "attention_dropout")
    if function is not None:  # on the CPU it has no backward
        inputs = [t.detach() for t in pattern.inputs((2, 3, 64, 32), torch.float32, torch.device("cpu"), "", 48)]
        torch.testing.assert_close(function(*inputs), pattern.eager(*inputs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "name, function",
    [
        ("attention_scores", lambda q, k: torch.softmax(SCALE * q @ k.mT, -1) + 0.01),
        ("attention_causal", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=SCALE)),
        ("attention_mask", lambda q, k, m, v: F.scaled_dot_product_attention(q, k, v, ~m, scale=SCALE)),
        ("attention_dropout", lambda q, k, m, v: F.scaled_dot_product_attention(q, k, v, m, scale=SCALE)),
        ("attention_dropout", lambda q, k, m, v: F.scaled_dot_product_attention(q, k, v, m, 2 * P, scale=SCALE)),
        ("attention_dropout", lambda q, k, m, v: F.scaled_dot_product_attention(q, k, v, None, P, scale=SCALE)),
    ],
)
def test_judge_finds_what_is_wrong_with_attention(name, function):
    with pytest.raises(WrongResult):
        ratio(judged(tiny(name), "cpu", (2, 3, 64, 32)), function)


def test_attentions_traffic_counts_an_expanded_mask_once():
    inputs = tiny("attention_expanded_mask").inputs((2, 3, 8, 16), torch.float32, torch.device("cpu"), "", 24)
    forward, backward = BY_NAME["attention_expanded_mask"].traffic(inputs)
    queries, keys, mask = 4 * 2 * 3 * 8 * 16, 4 * 2 * 3 * 24 * 16, 2 * 24
    assert forward.bytes == queries + 2 * keys + mask + queries
    assert backward.bytes == queries + 2 * keys + mask + 2 * queries + queries + 2 * keys


def test_plot_writes_attentions_curve_over_the_keys(results, tmp_path):
    pytest.importorskip("matplotlib")
    row = next(row for row in results["rows"] if row["provider"] == "onepass")
    row |= {"pattern": "attention_scores", "line": BY_NAME["attention_scores"].line}
    sizes = [(keys, features) for keys in (128, 256, 512) for features in (32, 64)]
    rows = [row | {"shape": [1, 1, keys, features], "out_features": keys} for keys, features in sizes]
    files = report.plot(results | {"rows": rows, "suite": "attention_curve"}, tmp_path)
    assert [file.name for file in files] == ["cpu-attention_scores-fp32.svg", "cpu-roofline-attention_curve.svg"]
    assert "forward, fp32, 32 features" in files[0].read_text()


@pytest.mark.parametrize("name, shape", [("minilm", (2, 24, 384)), ("gpt2", (1, 16, 768))])
def test_models_return_the_same_attentions(name, shape):
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    (model,) = (model for model in MODELS if model.name == name)
    cases = (Case(shape, torch.float32),)
    options = {"inputs_embeds": model.inputs(*cases[0][:2], torch.device("cpu"))[0], "output_attentions": True}
    if name == "minilm":
        options["attention_mask"] = torch.arange(shape[1]) < torch.tensor([[shape[1]], [5]])
    with torch.no_grad():
        expected, found = (network(name, way, torch.device("cpu"))(**options) for way in ("eager", "onepass"))
    assert len(found.attentions) == len(expected.attentions)
    for own, eagers in zip(found.attentions, expected.attentions):
        torch.testing.assert_close(own, eagers, atol=1e-5, rtol=1e-3)
    if name == "minilm":
        small = [replace(model, cpu=cases)]
        names = ["eager", "compile", "onepass"]
        rows = bench.run(device="cpu", suite="models", providers=names, patterns=small, quick=True)["rows"]
        assert [row["provider"] for row in rows] == ["eager", "onepass"]
        assert all(row["failure"] is None and row["backward_us"] > 0 for row in rows)

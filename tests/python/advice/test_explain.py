"""explain: what it finds without running anything, that its sums are right, and what it says of a device."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import onepass
from models import make
from onepass.cli import app
from onepass.pricing import calibrate as calibrating
from onepass.pricing.profile import PROFILES, SCALED, Profile, profile_of


def mlp():
    """For the command line."""
    return torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024))


@pytest.mark.parametrize("device", ["h200", "h100", "a100", "cpu"])
def test_explains_a_transformer(device):
    model, inputs = make("bert", "eager", hidden_size=256, intermediate_size=1024, max_position_embeddings=512)
    inputs = {k: v.repeat(4, 8) for k, v in inputs.items()}
    explained = onepass.explain(model.float(), **inputs, device=device)
    assert explained.training and explained.profile == profile_of(device)
    lines = [advice.line for advice in explained.lines]
    assert any(line.startswith("scores") and "softmax" in line for line in lines)
    if device != "cpu":  # whose caches hold these tensors: a norm alone gains next to nothing there
        assert sum("layer_norm" in line for line in lines) >= 4
    now, fused = explained.seconds
    assert 0 < fused < now
    moved_now, moved_fused = explained.bytes
    assert 0 < moved_fused < moved_now
    text = str(explained)
    assert "worth a line" in text and "left alone" in text and explained.profile.name in text
    told = json.loads(explained.to_json())
    assert len(told["lines"]) == len(lines) and told["seconds"] == [now, fused]
    products = [o for o in explained.operators if o.name == "linear" and o.bound == "compute"]
    assert products and all("leave it to the library" in o.why and o.line is None for o in products)


def test_runs_nothing(monkeypatch):
    """The model may be one that no memory holds."""
    with torch.device("meta"):
        model = torch.nn.TransformerEncoderLayer(8192, 64, 65536, batch_first=True, dtype=torch.bfloat16)
    x = torch.empty(64, 2048, 8192, dtype=torch.bfloat16, device="meta")
    explained = onepass.explain(model, x, device="h200")
    assert any("layer_norm" in advice.line for advice in explained.lines)
    assert max(o.forward.flops for o in explained.operators) == 2 * 64 * 2048 * 8192 * 65536


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "t5"])
def test_decoders_without_memory(name):
    """Their masks have no numbers to look at."""
    model, inputs = make(name)
    model = model.float()  # norms take float32
    with torch.no_grad():
        explained = onepass.explain(model.to("meta"), **{k: _on_meta(v) for k, v in inputs.items()}, device="h200")
    assert any("norm" in advice.line for advice in explained.lines)
    heads = [advice.line for advice in explained.lines if "rope" in advice.line]
    assert heads == {"llama": ["rope"] * 4, "qwen3": ["rms_norm(1e-06) | scale | rope"] * 4}.get(name, [])


def _on_meta(value):
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def test_what_else_is_compiled_stays():
    captures = []

    def backend(gm, _):
        captures.append(gm)
        return gm.forward

    other = torch.compile(lambda x: x * 2.0, backend=backend)
    other(torch.ones(3))
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert onepass.explain(mlp(), torch.randn(64, 256), device="h200").lines
    other(torch.ones(3))
    assert len(captures) == 1


def test_savings_are_of_what_there_is():
    """The residual's gradients are summed: in what there is now as in what a line saves of it."""
    norm = torch.nn.LayerNorm(512)
    x, r = (torch.randn(1024, 512, requires_grad=True) for _ in range(2))

    def block(x, r):
        h = x + r
        return h + norm(h)

    explained = onepass.explain(block, x, r, device="h200")
    assert any(o.name == "sum of gradients" and o.backward.bytes == 3 * x.nbytes for o in explained.operators)
    now, fused = explained.bytes
    assert fused > 0
    lines = sum(price.bytes for line in explained.lines for price in line.now)
    assert lines == sum(o.forward.bytes + o.backward.bytes for o in explained.operators if o.line is not None)


def test_model_is_left_as_it_was():
    model = mlp()
    onepass.explain(model, torch.randn(8, 256), device="cpu")
    assert model._compiled_call_impl is None and "_onepass_rewriter" not in model.__dict__


def test_bytes_are_counted():
    """x + r then relu: three kernels' worth of tensors in eager, one pass in the line."""
    x, r = torch.randn(1024, 512), torch.randn(1024, 512)
    with torch.no_grad():
        explained = onepass.explain(lambda x, r: torch.relu(x + r), x, r, device="h200")
    (advice,) = explained.lines
    assert advice.line == "add | relu"
    assert advice.now[0].bytes == 5 * x.nbytes and advice.fused[0].bytes == 3 * x.nbytes
    assert advice.now[0].kernels == 2 and advice.fused[0].kernels == 1
    assert advice.now[1].bytes == 0 and not explained.training


def test_saved_bytes():
    """LayerNorm and GELU hold both inputs; a line holds x and the row's statistics."""
    x = torch.randn(1024, 512, requires_grad=True)
    norm = torch.nn.LayerNorm(512)
    explained = onepass.explain(lambda x: torch.nn.functional.gelu(norm(x * 2.0)), x, device="h200")
    (advice,) = explained.lines
    before, after = advice.saved_bytes
    assert before == 2 * x.nbytes
    assert x.nbytes < after < 1.1 * x.nbytes


def test_linear_layers_on_the_cpu():
    """In inference they are lines there, for the product's sake."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    profile = replace(profile_of("cpu"), products={"float32": 1e11}, own_products={"float32": 1.5e11})
    with torch.no_grad():
        explained = onepass.explain(model, torch.randn(512, 256), device=profile)
    first, second = explained.lines
    assert first.line == "linear | bias | gelu" and "1.50 times" in first.why and "cache" in first.why
    assert second.line == "linear | bias" and "1.50 times" in second.why and "cache" not in second.why
    now, fused = explained.seconds
    assert now == sum(o.forward.seconds for o in explained.operators) and fused < 0.8 * now


@pytest.mark.parametrize("device", ["h200", "cpu"])
@pytest.mark.parametrize("dtype, features", [(torch.float32, 512), (torch.float32, 4), (torch.bfloat16, 4)], ids=str)
def test_norms_before_linear_layers_have_prices(dtype, features, device):
    """Whichever way `linear` goes, on a device of which the model's tensors are not, too."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, features)).to(dtype)
    with torch.no_grad():
        explained = onepass.explain(model, torch.randn(2048, 256, dtype=dtype), device=device)
    now, fused = explained.seconds
    assert 0 < fused < 2 * now  # what decides is the prediction of `linear`'s own ways


def test_launch_bound():
    explained = onepass.explain(lambda x: torch.relu(x * 2.0 + x.sigmoid()), torch.randn(4, 8), device="h200")
    assert all(o.bound == "launch" for o in explained.operators)
    assert "launch-bound" in str(explained)


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    explained = onepass.explain(mlp(), torch.randn(64, 256), device="h200")
    explained.plot(tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


def test_measure(device, capsys):
    profile = profile_of(device)
    if device == "cuda" and torch.cuda.get_device_name() != profile.name:
        pytest.skip("no profile of this chip")
    explained = onepass.explain(mlp().to(device), torch.randn(512, 256, device=device), device=profile)
    found = explained.measure(seconds=0.01)
    assert found and all(t > 0 for row in found for t in (*row.predicted, *row.measured, *row.unfused))
    assert found[0].line in capsys.readouterr().out.replace("\n", " ") or len(found[0].line) > 40


def test_measure_where_the_device_is_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    explained = onepass.explain(mlp(), torch.randn(512, 256), device="h200")
    with pytest.raises(RuntimeError, match="expected NVIDIA H200 to be present"):
        explained.measure()


def test_errors():
    with pytest.raises(TypeError, match="argument 'model' must be callable, not str"):
        onepass.explain("model")
    with pytest.raises(ValueError, match="expected device to be one of .*'h200'.* but got 'h300'"):
        onepass.explain(mlp(), torch.randn(2, 256), device="h300")


def test_profiles():
    for name in (*(file.stem for file in PROFILES.glob("*.json")), *SCALED):
        profile = profile_of(name)
        assert Profile.from_json(profile.to_json()) == profile
        assert profile.bandwidth > 1e9 and profile.measured


def test_rates_between_measurements():
    profile = Profile("x", 1e9, 0.0, 0.0, 0.0, {"float32": 1.0}, {"add": {"4": [[64, 0.2, 0.1], [256, 0.6, 0.5]]}})
    assert profile.rate("operators", "add", 8, 4) == 0.2
    assert profile.rate("operators", "add", 128, 4) == pytest.approx(0.4)
    assert profile.rate("operators", "add", 128, 2, backward=True) == pytest.approx(0.3)
    assert profile.rate("operators", "add", 4096, 4) == 0.6
    assert profile.rate("operators", "unknown", 4096, 4) == 1.0


def test_calibrate(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrating, "LENGTHS", {"cpu": (64,), "cuda": (64,)})
    monkeypatch.setattr(calibrating, "LINE_LENGTHS", {"cpu": (64,), "cuda": (64,)})
    monkeypatch.setattr(calibrating, "ELEMENTS", {"cpu": 2**14, "cuda": 2**14})
    monkeypatch.setattr(calibrating, "PRODUCT", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(calibrating.calibrate, "__defaults__", (None, 0.001, calibrating.calibrate.__defaults__[2]))
    result = CliRunner().invoke(app, ["calibrate", str(tmp_path / "own.json"), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    profile = profile_of(str(tmp_path / "own.json"))
    assert set(profile.lines) == set(profile.starts) == set(calibrating.LINES) and profile.bandwidth > 0
    assert profile.line_rate(("norm", "column"), 64, 4) == profile.lines["norm column"]["4"][0][1]
    assert profile.start(("norm",), 4096, 2, backward=True) == profile.starts["norm column"]["2"][0][2]


def test_command(tmp_path):
    arguments = ["explain", "test_explain:mlp", "--input", "64x256", "--device", "h200", "--train"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert "worth a line" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["training"]
    result = CliRunner().invoke(app, ["explain", "test_explain:nothing", "--input", "64x256"])
    assert result.exit_code == 2 and "MODULE:FACTORY" in result.output

"""fuse on real architectures: the same results and gradients, the lines that were found, and all of it taken back."""

import copy
import pickle

import pytest
import torch

import onepass
from models import ARCHITECTURES, assert_as_near, make, moved, output, trained
from onepass.pricing.profile import profile_of
from onepass.rewrite import fuse as fusing


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Tests' tensors are small: whatever a line can say becomes one, the longest first."""

    def gain(chain, profile, training, then):
        return fusing.is_for_us(chain) * float(len(chain.nodes)) if then == "inductor" else float(len(chain.nodes))

    monkeypatch.setattr(fusing, "gain_of", gain)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, dtype, device):
    exact_model, inputs = make(name)
    exact_model, exact_inputs = exact_model.to(device), moved(inputs, torch.float64, device)
    exact = trained(exact_model, exact_inputs)
    model, inputs = copy.deepcopy(exact_model).to(dtype), moved(inputs, dtype, device)
    eager = trained(model, inputs)
    before = {key: id(value) for key, value in model.named_parameters()}
    keys = list(model.state_dict())
    assert onepass.fuse(model) is model
    assert_as_near(trained(model, inputs), eager, exact)
    assert {key: id(value) for key, value in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    lines = [fused.line for fused in onepass.report(model).lines]
    assert sum("_norm" in line for line in lines) >= 2
    assert onepass.unfuse(model) is model
    for ours, theirs in zip(trained(model, inputs), eager):
        assert torch.equal(ours, theirs)


EXPECTED = {
    "bert": {
        "add | add | keep | layer_norm(1e-12) | scale | bias",
        "bias | add | keep | layer_norm(1e-12) | scale | bias",
        "bias | gelu",
    },
    "gpt2": {"bias | gelu_tanh", "bias | add | keep | layer_norm(1e-05) | scale | bias"},
    "llama": {"rms_norm(1e-06) | scale", "add | keep | rms_norm(1e-06) | scale", "gate(silu)"},
    "qwen3": {"rms_norm(1e-06) | scale | rope", "add | keep | rms_norm(1e-06) | scale", "gate(silu)"},
    "t5": {"rms_norm(1e-06) | scale", "add | keep | rms_norm(1e-06) | scale", "gate(gelu_tanh)"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_lines(name):
    model, inputs = make(name)
    onepass.fuse(model.float())
    output(model(**moved(inputs, torch.float32, "cpu"))).sum().backward()
    assert EXPECTED[name] <= {fused.line for fused in onepass.report(model).lines}


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_attention_that_is_written_out(name):
    """Its probabilities are returned, too."""
    model, inputs = make(name, "eager")
    model, inputs = model.float().eval(), moved(inputs, torch.float32, "cpu") | {"output_attentions": True}
    with torch.no_grad():
        expected = model(**inputs)
        found = onepass.fuse(model)(**inputs)
    assert any(f.line.startswith("scores") and f.line.endswith("values") for f in onepass.report(model).lines)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_autocast(name, device):
    exact_model, inputs = make(name)
    exact = trained(exact_model.to(device), moved(inputs, torch.float64, device))
    model, inputs = copy.deepcopy(exact_model).float(), moved(inputs, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        eager = trained(model, inputs)
        fused = trained(onepass.fuse(model), inputs)
    # Gradients of layers that share their input are added in bfloat16 where autocast casts once: see numerics.md.
    for ours, theirs, true in zip(fused, eager, exact, strict=True):
        scale = true.norm().item()
        assert (ours - true).norm().item() <= 2 * (theirs - true).norm().item() + 1e-3 * scale


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_inductor(name, device):
    """The same through torch.compile's compiler, to which element-wise chains are left."""
    exact_model, inputs = make(name)
    exact = trained(exact_model.to(device), moved(inputs, torch.float64, device))
    model, inputs = copy.deepcopy(exact_model).float(), moved(inputs, torch.float32, device)
    eager = trained(model, inputs)
    assert_as_near(trained(onepass.fuse(model, then="inductor"), inputs), eager, exact)
    lines = [fused.line for fused in onepass.report(model).lines]
    assert lines and all("_norm" in line or "softmax" in line or "attention" in line for line in lines)


def test_backend_of_torch_compile():
    model, inputs = make("bert")
    model, inputs = model.float().eval(), moved(inputs, torch.float32, "cpu")
    with torch.no_grad():
        expected = output(model(**inputs))
        found = output(torch.compile(model, backend="onepass")(**inputs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("behind", ["softmax", "rms_norm"])
def test_several_row_words(behind):
    """A norm, a residual and a norm are one line; behind attention's scores there is one row word."""

    def two_norms(x, residual, weight):
        h = residual + torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)
        return torch.nn.functional.rms_norm(h, (16,), weight, 1e-5), h

    def after_scores(q, k, _):
        y = torch.softmax(q @ k.mT * 0.5, -1)
        return torch.softmax(y, -1) if behind == "softmax" else torch.nn.functional.rms_norm(y, (4,))

    given = [torch.randn(3, 4, 16, dtype=torch.float64) for _ in range(2)] + [torch.randn(16, dtype=torch.float64)]
    for function in (two_norms, after_scores):
        fused = onepass.fuse(function)
        torch.testing.assert_close(fused(*given), function(*given))
        lines = [f.line for f in onepass.report(fused).lines]
        assert len(lines) == 1
        assert sum(w.kind == "row" for w in onepass.Line(lines[0]).words) == 2


def test_dropout_is_drawn():
    """As often as asked, another each time, governed by manual_seed."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.25))
    x = torch.randn(256, 64)
    onepass.fuse(model)
    torch.manual_seed(0)
    first, second = model(x), model(x)
    torch.manual_seed(0)
    again = model(x)
    assert [fused.line for fused in onepass.report(model).lines] == ["bias | gelu | dropout(0.25)"]
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert abs((first == 0).float().mean().item() - 0.25) < 0.02
    model.eval()
    assert (model(x) != 0).float().mean().item() > 0.99


def test_function():
    def function(x, w):
        return torch.nn.functional.rms_norm(x + w, (8,), eps=1e-6).relu()

    fused = onepass.fuse(function)
    x, w = torch.randn(5, 8), torch.randn(5, 8)
    torch.testing.assert_close(fused(x, w), function(x, w))
    assert [f.line for f in onepass.report(fused).lines] == ["add | rms_norm(1e-06) | relu"]
    assert onepass.unfuse(fused) is function


def test_many_models_one_after_the_other():
    """More than Dynamo keeps captures of one function: the later ones are fused, too."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        model = onepass.fuse(torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.ReLU()))
        with torch.no_grad():
            model(torch.randn(4, 16))
        assert [f.line for f in onepass.report(model).lines] == ["layer_norm(1e-05) | scale | bias | relu"]


def test_dry_run_changes_nothing():
    model, inputs = make("bert")
    model, inputs = model.float(), moved(inputs, torch.float32, "cpu")
    eager = trained(model, inputs)
    onepass.fuse(model, dry_run=True)
    for ours, theirs in zip(trained(model, inputs), eager, strict=True):
        assert torch.equal(ours, theirs)
    assert onepass.report(model).lines


def test_dynamic_shapes():
    """Another batch size, another length: the same results, two captures at most."""
    model = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0).eval()
    captures = 0
    with torch.no_grad():
        expected = [model(torch.ones(n, n + 3, 32)) for n in (2, 3, 5, 7)]
        onepass.fuse(model)
        for n, wanted in zip((2, 3, 5, 7), expected):
            torch.testing.assert_close(model(torch.ones(n, n + 3, 32)), wanted, rtol=1e-4, atol=1e-5)
        captures = len(onepass.report(model).graphs)
    assert captures <= 2


def test_small_gains_are_left_alone(monkeypatch):
    monkeypatch.undo()
    torch._dynamo.reset()
    model = onepass.fuse(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
    model(torch.randn(2, 4))
    assert onepass.report(model).lines == []
    assert "nothing was fused" in str(onepass.report(model))


def test_model_can_be_copied_and_saved():
    model, inputs = make("bert")
    onepass.fuse(model.float().eval())
    inputs = moved(inputs, torch.float32, "cpu")
    with torch.no_grad():
        expected = output(model(**inputs))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            torch.testing.assert_close(output(other(**inputs)), expected, rtol=1e-4, atol=1e-5)


def test_report():
    model = onepass.fuse(torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.ReLU()))
    with torch.no_grad():
        model(torch.randn(128, 64))
    report = onepass.report(model)
    assert "layer_norm(1e-05) | scale | bias | relu" in str(report)
    assert '"line": "layer_norm(1e-05) | scale | bias | relu"' in report.to_json()
    (fused,) = report.lines
    assert fused.operators == 2 and fused.kernels == (2, 1) and fused.bytes[1] < fused.bytes[0]


def test_device_is_what_times_are_predicted_for(tmp_path):
    """A name, or the file that `onepass calibrate` wrote."""
    file = tmp_path / "here.json"
    file.write_text(profile_of("a100").to_json())
    predicted = {}
    for device in ("h200", "a100", file, str(file)):
        fused = onepass.fuse(lambda x: torch.relu(torch.sigmoid(x)), device=device)
        fused(torch.randn(1024, 1024))
        predicted[str(device), type(device)] = onepass.report(fused).lines[0].seconds
    h200, *others = predicted.values()
    assert others == [others[0]] * 3 and all(ours < theirs for ours, theirs in zip(h200, others[0]))
    with pytest.raises(ValueError, match="expected device to be one of .*'h200'.* but got 'h300'"):
        onepass.fuse(torch.nn.ReLU(), device="h300")


def test_errors():
    with pytest.raises(TypeError, match="argument 'model' must be callable, not int"):
        onepass.fuse(3)
    with pytest.raises(ValueError, match="expected then to be one of eager, inductor, but got 'jit'"):
        onepass.fuse(torch.nn.ReLU(), then="jit")
    with pytest.raises(ValueError, match="a model that fuse\\(\\) returned"):
        onepass.report(torch.nn.ReLU())

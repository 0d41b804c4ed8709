"""fuse decides by one prediction and reports it: no line is there that is predicted to gain less than a twentieth."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from models import make, moved
from onepass.pricing.profile import profile_of
from onepass.rewrite import prices
from onepass.rewrite.fuse import Rewriter

CPU = profile_of("cpu")
PROFILES = {
    "cpu": CPU,
    "slow products": replace(CPU, own_products={name: 0.5 * rate for name, rate in CPU.products.items()}),
    "fast products": replace(CPU, own_products={name: 2 * rate for name, rate in CPU.products.items()}),
    "h200": profile_of("h200"),
}


def reports(monkeypatch, model, inputs, training):
    """Of one capture, by each profile, and before Inductor; and the decisions that were made for lines."""
    rewriters = [Rewriter("eager", True, profile) for profile in PROFILES.values()]
    rewriters.append(Rewriter("inductor", True, CPU))
    decided = set()
    is_worth_it = prices.is_worth_it

    def noted(before, after):
        found = is_worth_it(before, after)
        if found:
            decided.add((before.seconds, after.seconds, before.bytes, after.bytes))
        return found

    def look(gm, example_inputs):
        for rewriter in rewriters:
            rewriter(gm, example_inputs)
        return gm.forward

    monkeypatch.setattr(prices, "is_worth_it", noted)
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        torch.compile(model, backend=look)(**inputs)
    return [rewriter.report for rewriter in rewriters], decided


def llama(width, tokens, **options):
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": 512}
    model, inputs = make("llama", num_hidden_layers=1, **(sizes | options))
    return model.float(), {"input_ids": torch.zeros(2, tokens, dtype=torch.long), "use_cache": False}


def other(name, attention="sdpa", **options):
    model, inputs = make(name, attention, **options)
    return model.float(), moved(inputs, torch.float32, "cpu")


MODELS = {
    "llama 32x128": lambda: llama(128, 32),
    "llama 200x256": lambda: llama(256, 200),
    "bert": lambda: other("bert", "eager", hidden_size=256, intermediate_size=1024, num_hidden_layers=1),
    "gpt2": lambda: other("gpt2", n_embd=256, n_layer=1),
    "encoder": lambda: (nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), {"src": torch.randn(4, 64, 256)}),
    "norm and few features": lambda: (
        nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 4), nn.GELU()),
        {"input": torch.randn(4096, 256)},
    ),
    "norm and layers": lambda: (
        nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 64)),
        {"input": torch.randn(512, 256)},
    ),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_reported_lines_gain_a_twentieth(name, training, monkeypatch):
    model, inputs = MODELS[name]()
    made, decided = reports(monkeypatch, model.train(training), inputs, training)
    lines = [line for report in made for line in report.lines if any(line.seconds)]
    for line in lines:
        before, after = line.seconds
        assert before - after > prices.WORTH * before, line
        assert line.bytes[0] >= prices.LEAST_BYTES
        assert (*line.seconds, *line.bytes) in decided, line
    assert lines or "few" in name


def test_a_sum_behind_a_product_is_left_alone():
    """What stands behind a linear layer that no line computes does not begin in a core's cache."""
    model, inputs = llama(128, 32)
    onepass.fuse(model)
    with torch.no_grad():
        model(**inputs)
    assert "add" not in [line.line for line in onepass.report(model).lines]


def test_a_norm_before_a_slow_product_stays_a_line_of_its_own(monkeypatch):
    """Panels that multiply at half the library's rate gain nothing for what a norm gains."""
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512)).eval()
    made, _ = reports(monkeypatch, model, {"input": torch.randn(4096, 256)}, False)
    _, slow, fast, *_ = [[line.line for line in report.lines] for report in made]
    assert slow == ["layer_norm(1e-05) | scale | bias"]
    assert fast == ["layer_norm(1e-05) | scale | bias | linear | bias"]


def test_explain_says_what_fuse_decides():
    """The same gain, whether what stays as it is is counted or not."""
    x = torch.randn(4, 8, 128, 64)

    def attended(q):
        return F.softmax(q @ q.transpose(-1, -2) * 0.125, -1) @ q

    with torch.no_grad():
        (advice,) = onepass.explain(attended, x, device="cpu").lines
        rewriter = Rewriter(device="cpu")
        torch.compile(attended, backend=rewriter)(x)
    (line,) = rewriter.report.lines
    assert advice.line == line.line == "scores | mul(0.125) | softmax | values"
    assert advice.now[0].seconds - advice.fused[0].seconds == pytest.approx(line.seconds[0] - line.seconds[1])
    assert advice.now[0].flops > 2 * 2 * 4 * 8 * 128**2 * 64 and line.seconds[0] < advice.now[0].seconds

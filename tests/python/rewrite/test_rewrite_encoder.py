"""PyTorch's operator for a whole encoder layer: written out, it gives the same, and lines are found in it."""

import pytest
import torch
from torch import nn

import onepass
from onepass.rewrite import fuse as fusing


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))
    torch._dynamo.reset()


def layer(**options):
    torch.manual_seed(2)
    made = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, **options).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return made


def lines(model):
    return [fused.line for fused in onepass.report(model).lines]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_written_out(norm_first, activation, dtype):
    model = layer(norm_first=norm_first, activation=activation, layer_norm_eps=1e-4).to(dtype)
    x = torch.randn(3, 17, 48, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
        found = onepass.fuse(model)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert sum("layer_norm(0.0001)" in line for line in lines(model)) == 2
    assert any(line.endswith(activation) for line in lines(model))


def test_several_layers_and_lengths():
    model = nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False).eval()
    inputs = [torch.randn(2, n, 48) for n in (5, 7, 9)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        onepass.fuse(model)
        for x, wanted in zip(inputs, expected):
            torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert len(onepass.report(model).graphs) <= 2
    assert sum("layer_norm" in line for line in lines(model)) >= 6


def test_masked_ones_stay():
    model, x = layer(), torch.randn(2, 9, 48)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        found = onepass.fuse(model)(x, src_key_padding_mask=padding)
    assert torch.equal(found, expected) and lines(model) == []

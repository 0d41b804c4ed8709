"""Torch's encoder computes without calling its modules where it may: not where something of ours would be lost."""

import pickle

import pytest
import torch
from torch import nn

import onepass


def layer_of(change, **arguments):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **arguments)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    change(layer)
    return layer.eval()


def norm_with_activation(layer):
    layer.norm1 = onepass.nn.LayerNorm(16, activation="tanh")
    layer.norm2 = onepass.nn.LayerNorm(16)
    layer.norm2.activation = "gelu"  # later, too


def linear_with_activation(layer):
    layer.linear2 = onepass.nn.LinearAct(32, 16, activation="gelu")


def attention(layer):
    mine = onepass.nn.MultiheadAttention(16, 2, batch_first=True)
    mine.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = mine


def copied(layer):
    norm_with_activation(layer)
    layer.norm1 = pickle.loads(pickle.dumps(layer.norm1))


CHANGES = [norm_with_activation, linear_with_activation, attention, copied]


@pytest.mark.parametrize("change", CHANGES)
def test_an_encoder_layer(change):
    layer = layer_of(change)
    x = torch.randn(3, 5, 16)
    expected = layer(x)  # with gradients there is no fast path
    assert expected.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("later", [False, True], ids=["as made", "changed later"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_makes_nested_tensors(change, later):
    if later:
        encoder = nn.TransformerEncoder(layer_of(lambda _: None), 2).eval()
        for layer in encoder.layers:
            change(layer)
    else:
        encoder = nn.TransformerEncoder(layer_of(change), 2)
    encoder.eval()
    x = torch.randn(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    expected = encoder(x, src_key_padding_mask=padding)
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding])


def test_a_plain_norm_leaves_the_fast_path():
    """It has nothing to lose, and calls cost nothing more."""
    assert not onepass.nn.LayerNorm(16)._forward_hooks and not onepass.nn.RMSNorm(16)._forward_hooks


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    for ours, theirs in (
        (onepass.nn.LayerNorm(8, activation="gelu"), nn.Sequential(nn.LayerNorm(8), nn.GELU())),
        (onepass.nn.LayerNorm(8), nn.LayerNorm(8)),
    ):
        for a, b in zip(ours(nested).unbind(), theirs(nested).unbind(), strict=True):
            torch.testing.assert_close(a, b)

"""The named functions and modules with a matrix: each is its line."""

import copy

import pytest
import torch

from onepass import functional as F
from onepass import nn


class TestFunctions:
    """Each named function is its line."""

    def tensors(self, device, *shapes):
        return [torch.randn(*s, device=device) for s in shapes]

    def test_linear(self, device):
        x, w, b = self.tensors(device, (4, 8), (3, 8), (3,))
        torch.testing.assert_close(F.linear(x, w), torch.nn.functional.linear(x, w))
        torch.testing.assert_close(
            F.linear(x, w, b, activation="gelu"), torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))
        )

    def test_layer_norm_linear(self, device):
        x, g, b, w, c = self.tensors(device, (4, 8), (8,), (8,), (3, 8), (3,))
        normed = torch.nn.functional.layer_norm(x, (8,), g, b, 1e-3)
        expected = torch.nn.functional.linear(torch.relu(normed), w, c)
        torch.testing.assert_close(F.layer_norm_linear(x, g, b, w, c, 1e-3, norm_activation="relu"), expected)
        without = torch.nn.functional.linear(torch.nn.functional.layer_norm(x, (8,), g), w)
        torch.testing.assert_close(F.layer_norm_linear(x, g, None, w), without)

    def test_rms_norm_linear(self, device):
        x, g, w, c = self.tensors(device, (4, 8), (8,), (3, 8), (3,))
        expected = torch.tanh(torch.nn.functional.linear(torch.nn.functional.rms_norm(x, (8,), g), w, c))
        torch.testing.assert_close(F.rms_norm_linear(x, g, w, c, activation="tanh"), expected)

    def test_gated_mlp(self, device):
        x, gate, up, down = self.tensors(device, (4, 8), (16, 8), (16, 8), (8, 16))
        f = torch.nn.functional
        expected = f.linear(f.silu(f.linear(x, gate)) * f.linear(x, up), down)
        torch.testing.assert_close(F.gated_mlp(x, gate, up, down), expected)

    def test_layer_norm_mlp(self, device):
        x, g, b, w, c, v, d = self.tensors(device, (4, 8), (8,), (8,), (16, 8), (16,), (8, 16), (8,))
        f = torch.nn.functional
        hidden = f.gelu(f.linear(f.layer_norm(x, (8,), g, b), w, c))
        torch.testing.assert_close(F.layer_norm_mlp(x, g, b, w, c, v, d), f.linear(hidden, v, d))

    def test_bad_activation(self):
        x, w = self.tensors("cpu", (4, 8), (3, 8))
        with pytest.raises(ValueError, match="linear.*activation"):
            F.linear(x, w, activation="celu")


class TestModules:
    """State dicts load from the modules that they stand for, and training gives the same gradients."""

    def check(self, ours, theirs, x):
        ours.load_state_dict(theirs.state_dict())
        a, b = ours(x), theirs(x)
        torch.testing.assert_close(a, b)
        grad = torch.randn_like(a)
        a.backward(grad)
        b.backward(grad)
        for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)
        assert copy.deepcopy(ours).state_dict().keys() == ours.state_dict().keys()

    def test_linear_act(self, device):
        linear = torch.nn.Linear(12, 7, device=device)
        ours = nn.LinearAct(12, 7, device=device)
        self.check(ours, linear, torch.randn(5, 12, device=device))
        assert "activation='gelu'" in repr(nn.LinearAct(3, 4, activation="gelu"))

    def test_norm_linear(self, device):
        class Block(torch.nn.Module):
            def __init__(self, norm):
                super().__init__()
                self.norm, self.linear = norm, torch.nn.Linear(12, 7)

            def forward(self, x):
                return torch.nn.functional.gelu(self.linear(self.norm(x)))

        x = torch.randn(5, 12, device=device)
        ours = nn.LayerNormLinear(12, 7, activation="gelu").to(device)
        self.check(ours, Block(torch.nn.LayerNorm(12)).to(device), x)
        ours = nn.RMSNormLinear(12, 7, activation="gelu").to(device)
        self.check(ours, Block(torch.nn.RMSNorm(12)).to(device), x)

    def test_mlps(self, device):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=2)
        theirs = transformers.models.llama.modeling_llama.LlamaMLP(config).to(device)
        self.check(nn.GatedMLP(16, 40).to(device), theirs, torch.randn(5, 16, device=device))

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)

            def forward(self, x):
                return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

        self.check(nn.LayerNormMLP(16, 40).to(device), Block().to(device), torch.randn(5, 16, device=device))

"""What a fused model holds for backward: a sum, not all that was added."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass
from onepass.bench.cases import saved_bytes

WIDTH = 512


class Adapted(nn.Module):
    """A linear layer with an adapter, as peft's LoRA is computed."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


class Gated(nn.Module):
    """looks: whether somebody else sees what the adapted layer's base gives."""

    def __init__(self, looks=False):
        super().__init__()
        self.gate, self.other, self.looks = Adapted(), Adapted(), looks

    def forward(self, x):
        if self.looks:
            base = self.gate.base(x)
            return F.silu(base + self.gate.up(self.gate.down(x)) * 2.0) * self.other(x), base.exp()
        return F.silu(self.gate(x)) * self.other(x)


@pytest.mark.parametrize("looks", [False, True])
def test_a_sum_of_products(device, looks):
    model = Gated(looks).to(device)
    fused = copy.deepcopy(model)
    onepass.fuse(fused, device="h200")
    x = torch.randn(4096, WIDTH, device=device)
    ours, expected = fused(x), model(x)
    before, after = saved_bytes(lambda: model(x)), saved_bytes(lambda: fused(x))
    lines = [line.line for graph in onepass.report(fused).graphs for line in graph]
    assert ("mul(2.0) | add | keep | gate(silu)" in lines) is not looks
    if not looks:
        wide = x.nbytes
        assert after <= before - wide  # the gate's result is made again, and the sum is all that is held of two
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    total = lambda results: sum(r.square().mean() for r in (results if looks else [results]))  # noqa: E731
    parameters = [[p for p in m.parameters() if p.requires_grad] for m in (model, fused)]
    want = torch.autograd.grad(total(expected), parameters[0])
    torch.testing.assert_close(torch.autograd.grad(total(ours), parameters[1]), want, rtol=1e-3, atol=1e-6)

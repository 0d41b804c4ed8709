"""Group normalisations in models: lines of rows that are groups of channels."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onepass

NORM = "layer_norm(1e-05) | scale(channels) | bias(channels)"
SIZE = 6  # pixels a side


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Whatever is predicted for tensors as small as these."""
    torch._dynamo.reset()
    monkeypatch.setattr("onepass.rewrite.prices.is_worth_it", lambda before, after: True)


class Block(nn.Module):
    """As U-Nets of diffusion models have it."""

    def __init__(self, inplace=False, channels=16):
        super().__init__()
        self.norm1, self.norm2 = (nn.GroupNorm(4, channels) for _ in range(2))
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(8, channels)
        self.act = nn.SiLU(inplace)

    def forward(self, x, t):
        h = self.conv1(self.act(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        return x + self.conv2(self.act(self.norm2(h)))


def drawn(model, dtype=torch.float64):
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.to(dtype)


def same(model, inputs, lines, **options):
    """Results and all gradients of a model and of the same fused, which has these lines."""
    other = onepass.fuse(copy.deepcopy(model), **options)
    results = []
    for each in (model, other):
        given = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
        y = each(*given)
        torch.manual_seed(3)
        wanted = [*[t for t in given if t.requires_grad], *each.parameters()]
        results.append([y, *torch.autograd.grad(y, wanted, torch.randn_like(y), allow_unused=True)])
        assert y.stride() == results[0][0].stride()
    for found, expected in zip(*results[::-1]):
        torch.testing.assert_close(found, expected)
    assert [fused.line for fused in onepass.report(other).lines] == lines
    with torch.no_grad():
        torch.testing.assert_close(other(*inputs), model(*inputs))
    return other


def images(*channels, dtype=torch.float64, device="cpu"):
    return [torch.randn(2, c, SIZE, SIZE, dtype=dtype, device=device) for c in channels]


@pytest.mark.parametrize("inplace", [False, True])
def test_blocks_of_u_nets(inplace, device):
    torch.manual_seed(0)
    model = drawn(Block(inplace)).to(device)
    x, t = images(16, device=device)[0], torch.randn(2, 8, dtype=torch.float64, device=device)
    same(model, (x, t), [f"{NORM} | silu", f"bias(channels) | {NORM} | silu"])


def test_without_affine_and_with_other_activations():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(2, 8, affine=False)

        def forward(self, x):
            return F.leaky_relu(self.norm(x), 0.2) + F.relu(F.group_norm(x.sin(), 4, eps=1e-3))

    same(Model(), images(8), ["layer_norm(1e-05) | leaky_relu(0.2)", "layer_norm(0.001) | relu"])


def test_what_others_see_stays():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(2, 8)

        def forward(self, x, how):
            y = self.norm(x)
            z = F.silu(y)
            if how == "read":
                return y * z
            if how == "overwritten":
                x.mul_(2)
                return z
            return z

    for how, lines in {"read": [NORM], "overwritten": []}.items():
        model = drawn(Model())
        x = images(8)[0]
        fused = onepass.fuse(copy.deepcopy(model))
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(fused(mine, how), model(theirs, how))
        torch.testing.assert_close(mine, theirs)
        assert [line.line for line in onepass.report(fused).lines] == lines


def test_channels_last_stays():
    model = drawn(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()))
    x = images(8)[0].contiguous(memory_format=torch.channels_last).requires_grad_()
    for function in (model, lambda x: model(x).sum(1)):
        fused = onepass.fuse(copy.deepcopy(function) if function is model else function)
        ours, theirs = fused(x), function(x)
        torch.testing.assert_close(ours, theirs, check_stride=True)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs)]
        torch.testing.assert_close(*gradients, check_stride=True)
        assert onepass.report(fused).lines == []


def test_an_epsilon_that_is_no_number():
    x = images(8)[0]
    fused = onepass.fuse(lambda x: F.silu(F.group_norm(x, 2, eps=float("nan"))))
    assert fused(x).isnan().all()


def test_results_may_be_overwritten():
    model = drawn(nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()))
    fused = onepass.fuse(copy.deepcopy(model))
    for each in (model, fused):
        x = images(8)[0].requires_grad_()
        y = each(x)
        y += 1
        y.sum().backward()
        assert not y._is_view()


def test_under_autocast():
    model = drawn(Block(), torch.float32)
    x, t = images(16, dtype=torch.float32)[0], torch.randn(2, 8)
    fused = onepass.fuse(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = fused(x, t), model(x, t)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


def test_sizes_that_change():
    model = drawn(Block())
    fused = onepass.fuse(copy.deepcopy(model))
    for side in (6, 8, 9):
        x, t = torch.randn(3, 16, side, side, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
        torch.testing.assert_close(fused(x, t), model(x, t))


def test_explain():
    explained = onepass.explain(Block(), *images(16, dtype=torch.float32), torch.randn(2, 8), device="h200")
    assert [advice.line for advice in explained.lines] == [f"{NORM} | silu", f"bias(channels) | {NORM} | silu"]
    assert all(sum(side.bytes for side in a.now) > sum(side.bytes for side in a.fused) for a in explained.lines)

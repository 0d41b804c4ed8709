"""A fused transformer under DDP and FSDP2 on two processes: gradients and steps are those of one that is not fused."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import onepass
from models import take_every_line

TWO = [(2, "cpu"), (2, "cuda")]
STEPS, TOKENS, WIDTH = 2, 6, 16


class Model(nn.Module):
    """Two layers, one with its norms behind and one with them before, and a head."""

    def __init__(self):
        super().__init__()
        options = {"nhead": 2, "dim_feedforward": 32, "dropout": 0.0, "activation": "gelu", "batch_first": True}
        layers = (nn.TransformerEncoderLayer(WIDTH, norm_first=first, **options) for first in (False, True))
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def as_it_is(model):
    return model


def fuse_layers(model):
    for layer in model.layers:
        onepass.fuse(layer)
    return model


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def sharded(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = {
    "DDP": (onepass.fuse, data_parallel, as_it_is),
    "DDP, then fuse": (as_it_is, data_parallel, onepass.fuse),
    "FSDP2": (fuse_layers, sharded, as_it_is),
    "FSDP2, then fuse": (as_it_is, sharded, fuse_layers),
    "FSDP2, then fuse the whole": (as_it_is, sharded, onepass.fuse),
}
"""What is done before a model is wrapped, how it is wrapped, and what is done then."""


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(model, batches):
    """All gradients of each step, and the parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for x, target in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
        found += [whole(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
    return found + [whole(parameter).detach().clone() for parameter in model.parameters()]


def lines(model):
    """What was found, of each module that is fused."""
    found = []
    for module in model.modules():
        with contextlib.suppress(ValueError):
            found.append({fused.line for fused in onepass.report(module).lines})
    return found


def as_one_that_is_not_fused(device, way):
    """Every rank has other data. Dynamo keeps one capture of a function: that of one layer is not another's."""
    before, wrap, after = WAYS[way]
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    model = Model().double().to(device)
    fused = after(wrap(before(copy.deepcopy(model)), mesh))
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(STEPS, 3, TOKENS, WIDTH, dtype=torch.float64, device=device)
    batches = list(zip(x, torch.randint(0, 5, (STEPS, 3, TOKENS), device=device)))
    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(recompile_limit=1):
        take_every_line(patch)
        patch.setattr("onepass.rewrite.linear.LARGE", 0)  # what layers take is made again in backward
        ours = trained(fused, batches)
    theirs = trained(wrap(model, mesh), batches)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    return lines(fused)


@pytest.mark.parametrize("ranks", TWO, indirect=True, ids=["cpu", "cuda"])
@pytest.mark.parametrize("way", WAYS)
def test_a_fused_model(ranks, way):
    """Where the whole is fused after it was sharded, Dynamo ends its graphs at each layer and finds none here."""
    for found in ranks.run(as_one_that_is_not_fused, way):
        joined = [any(line.startswith("bias | gelu | linear(unfused)") for line in lines) for lines in found]
        assert joined and all(joined) or "whole" in way, found


def layers_of_a_norm(device):
    """Of a tensor that all ranks have, by matrices of which each has a part."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((6, WIDTH), (WIDTH,), (8, WIDTH), (4, WIDTH))]
    placements = Replicate(), Replicate(), Shard(0), Shard(0)

    def function(x, scale, *weights):
        y = nn.functional.rms_norm(x, (WIDTH,), scale, 1e-6)
        return sum(nn.functional.linear(y, weight).square().sum() for weight in weights)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        take_every_line(patch)
        patch.setattr("onepass.rewrite.linear.LARGE", 0)
        for call in (onepass.fuse(function), function):
            given = [distribute_tensor(t.to(device), mesh, [p]).requires_grad_() for t, p in zip(tensors, placements)]
            found.append([whole(gradient) for gradient in torch.autograd.grad(whole(call(*given)), given)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    return True


@pytest.mark.parametrize("ranks", TWO, indirect=True, ids=["cpu", "cuda"])
def test_layers_of_sharded_matrices_that_take_a_norm(ranks):
    """Lines below autograd have no placements: what the layers take is held there."""
    assert all(ranks.run(layers_of_a_norm))

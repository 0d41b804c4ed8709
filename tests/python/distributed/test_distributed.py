"""Training on several ranks: loss curves are PyTorch's, whatever is sharded."""

import copy

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.demo.block import Size, Training, ways_for
from onepass.distributed import SequenceParallel

SIZE = Size(features=32, heads=4, hidden=64, batch=4, tokens=8)
STEPS = 50


def curve(device, way):
    return Training(SIZE, True, way, device).curve(STEPS)


@pytest.fixture(scope="module")
def alone():
    """The curve of PyTorch's modules on one rank."""
    losses = torch.tensor(Training(SIZE, False, None, "cpu").curve(STEPS))
    assert losses[-1] < 0.7 * losses[0]
    return losses


@pytest.mark.parametrize("way", ways_for(4))
def test_loss_curve(ranks, way, alone):
    if way not in ways_for(len(ranks)):
        pytest.skip("needs 4 ranks")
    found = torch.tensor(ranks.run(curve, way))
    torch.testing.assert_close(found, alone.expand_as(found), rtol=1e-5, atol=0)


MODULES = {
    "LayerNormMLP": (
        lambda: onepass.nn.LayerNormMLP(16, 32),
        {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
        Partial(),
    ),
    "GatedMLP": (
        lambda: onepass.nn.GatedMLP(16, 32),
        {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()},
        Partial(),
    ),
    "LayerNormLinear": (
        lambda: onepass.nn.LayerNormLinear(16, 32, activation="gelu"),
        {"norm": SequenceParallel(), "linear": ColwiseParallel()},
        Shard(2),
    ),
    "RMSNormLinear": (
        lambda: onepass.nn.RMSNormLinear(16, 32),
        {"norm": SequenceParallel(), "linear": ColwiseParallel()},
        Shard(2),
    ),
}


def tensor_parallel(device, name):
    """What a module gives that uses its submodules' parameters without calling them, and every gradient."""
    make, plan, given = MODULES[name]
    torch.manual_seed(0)
    whole = make().double().to(device)
    ours = copy.deepcopy(whole)
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    parallelize_module(ours, mesh, plan)
    tokens = PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        output_layouts=(given,),
        desired_output_layouts=(Shard(1),),
    )
    parallelize_module(ours, mesh, tokens)
    x = torch.randn(2, 8, 16, device=device, dtype=torch.float64, requires_grad=True)
    part = x.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()].clone().requires_grad_()
    expected, result = whole(x), ours(part)
    torch.testing.assert_close(result, expected.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (result * weights.chunk(mesh.size(), 1)[mesh.get_local_rank()]).sum().backward()
    torch.testing.assert_close(part.grad, x.grad.chunk(mesh.size(), 1)[mesh.get_local_rank()])
    for own, other in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("name", MODULES)
def test_tensor_parallel(ranks, name):
    ranks.run(tensor_parallel, name)


def masks(device):
    """What DDP's ranks drop, seeded apart as their data are."""
    torch.manual_seed(torch.distributed.get_rank())
    module = torch.nn.Sequential(torch.nn.Linear(4, 64, device=device), onepass.nn.LayerNorm(64, device=device))
    model = DistributedDataParallel(module)
    dropped = onepass.nn.DropoutAdd(0.5)
    normed = model(torch.ones(8, 4, device=device))
    result = dropped(normed, torch.zeros_like(normed))
    return (result != 0).cpu(), normed.detach().cpu()


def test_data_parallel_masks(ranks):
    found, normed = zip(*ranks.run(masks))
    assert all(torch.equal(n, normed[0]) for n in normed)
    assert not any(torch.equal(mask, found[0]) for mask in found[1:])

"""A block of a transformer in PyTorch's modules or in this package's, and the ways to train it on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import onepass
from onepass.distributed import SequenceParallel

__all__ = ["WAYS", "Block", "Size", "Way", "ways_for"]


@dataclass(frozen=True)
class Size:
    """Of a block and what it is trained on; batch is of all ranks together."""

    features: int
    heads: int
    hidden: int
    batch: int
    tokens: int


class Attention(torch.nn.Module):
    """Causal self-attention; with its projections sharded by features a rank has some of the heads."""

    def __init__(self, size: Size, linear: Callable[..., torch.nn.Module], attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (linear(size.features, size.features) for _ in range(4))
        self.attend = attend
        self.width = size.features // size.heads

    def forward(self, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.query, self.key, self.value))
        heads = (t.unflatten(-1, (-1, self.width)).transpose(1, 2) for t in projected)
        return self.out(self.attend(*heads, is_causal=True).transpose(1, 2).flatten(2))


class MLP(torch.nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, size: Size, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.up = onepass.nn.LinearAct(size.features, size.hidden, activation="gelu")
            self.down = onepass.nn.LinearAct(size.hidden, size.features)
        else:
            self.up = torch.nn.Linear(size.features, size.hidden)
            self.down = torch.nn.Linear(size.hidden, size.features)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) if self.fused else F.gelu(self.up(x)))


class Block(torch.nn.Module):
    """h = x + attention(norm(x)), h + mlp(second_norm(h)); the state dict is the same, fused or not."""

    def __init__(self, size: Size, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            linear, attend = onepass.nn.LinearAct, onepass.functional.scaled_dot_product_attention
            self.norm, self.second_norm = onepass.nn.LayerNorm(size.features), onepass.nn.AddLayerNorm(size.features)
        else:
            linear, attend = torch.nn.Linear, F.scaled_dot_product_attention
            self.norm, self.second_norm = (torch.nn.LayerNorm(size.features) for _ in range(2))
        self.attention = Attention(size, linear, attend)
        self.mlp = MLP(size, fused)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm(x))
        if self.fused:
            normed, h = self.second_norm(attended, x)
        else:
            h = x + attended
            normed = self.second_norm(h)
        return h + self.mlp(normed)


@dataclass(frozen=True)
class Way:
    """parallelize: gives the module that is called, from a block, a device type and how many ranks there are.
    parts: into how many of them a batch is split, of so many ranks."""

    parallelize: Callable[[Block, str, int], torch.nn.Module]
    parts: Callable[[int], int]


def data_parallel(block: Block, device: str, ranks: int) -> torch.nn.Module:
    return DistributedDataParallel(block)


def fully_sharded(block: Block, device: str, ranks: int) -> torch.nn.Module:
    return _fully_shard(block, init_device_mesh(device, (ranks,)))


def tensor_parallel(block: Block, device: str, ranks: int) -> torch.nn.Module:
    return _tensor_parallel(block, init_device_mesh(device, (ranks,)))


def both(block: Block, device: str, ranks: int) -> torch.nn.Module:
    """Two ranks share every row's features, and the others have rows of their own."""
    mesh = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("rows", "features"))
    return _fully_shard(_tensor_parallel(block, mesh["features"]), mesh["rows"])


def _fully_shard(block: Block, mesh: DeviceMesh) -> torch.nn.Module:
    for part in (block.attention, block.mlp):
        fully_shard(part, mesh=mesh)
    return fully_shard(block, mesh=mesh)


def _tensor_parallel(block: Block, mesh: DeviceMesh) -> torch.nn.Module:
    """Tokens are sharded outside of attention and MLP, features within."""
    gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    scatter = {"output_layouts": Shard(1), "use_local_output": False}
    parallelize_module(
        block,
        mesh,
        {
            "norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gather),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(**scatter),
            "second_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(**gather),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(**scatter),
        },
    )
    tokens = PrepareModuleInputOutput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Shard(1),),
        output_layouts=(Shard(1),),
        desired_output_layouts=(Replicate(),),
    )
    return parallelize_module(block, mesh, tokens)


WAYS = {
    "DDP": Way(data_parallel, lambda ranks: ranks),
    "FSDP2": Way(fully_sharded, lambda ranks: ranks),
    "TP + SP": Way(tensor_parallel, lambda ranks: 1),
    "FSDP2 + TP + SP": Way(both, lambda ranks: ranks // 2),
}


def ways_for(ranks: int) -> list[str]:
    """Those that so many ranks can take."""
    return [name for name in WAYS if ranks >= 4 and ranks % 2 == 0 or name != "FSDP2 + TP + SP"]


class Training:
    """A block in training on this rank's part of every batch, or on whole batches without a way."""

    def __init__(
        self, size: Size, fused: bool, way: str | None, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.size, self.device, self.dtype = size, device, dtype
        block = Block(size, fused).to(device, dtype)
        self.parts, self.part = 1, 0
        self.model: torch.nn.Module = block
        if way is not None:
            ranks = dist.get_world_size()
            self.parts = WAYS[way].parts(ranks)
            self.part = dist.get_rank() * self.parts // ranks
            self.model = WAYS[way].parallelize(block, device, ranks)
        # Foreach, CUDA's default, loses momentum where a gradient is a sum over ranks (torch 2.11, not 2.15).
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9, foreach=False)
        self.number = 0

    def batch(self) -> Tensor:
        """This rank's part of the next one."""
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        shape = self.size.batch, self.size.tokens, self.size.features
        return torch.randn(shape, generator=generator).chunk(self.parts)[self.part].to(self.device, self.dtype)

    def step(self, x: Tensor) -> Tensor:
        """The loss before a step of the optimizer."""
        loss = F.mse_loss(self.model(x), x.cumsum(1) / x.shape[1] ** 0.5)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def curve(self, steps: int) -> list[float]:
        """Losses of whole batches, the same on every rank."""
        losses = torch.stack([self.step(self.batch()) for _ in range(steps)]).float()
        if self.parts > 1:
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        return losses.tolist()

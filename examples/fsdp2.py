"""FSDP2 on two processes: a model whose parameters are sharded, with fused layers and a loss without logits. Its loss
curve is that of one process.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Each process has a GPU where there are as many, else all are on the CPU.

Parameters are whole while the module that holds them runs, so the loss is made within it: the head's matrix is sharded
with the outermost one. Layers are fused one by one, for Dynamo ends a graph at each module's gathering.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import onepass
from onepass.functional import linear_cross_entropy

STEPS, VOCABULARY, TOKENS = 20, 4096, 64
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class WithLogits(nn.Module):
    """The loss that the model makes itself."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES)).to(device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens."""
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


class WithoutLogits(WithLogits):
    """The same, sharded; a chunk of the logits exists at a time."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(onepass.fuse(layer), mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens of this process."""
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], self.model.lm_head.weight, tokens[:, 1:])


def curve(module: type[WithLogits], ranks: int, device: str) -> list[float]:
    """The losses of a training from the same weights on the same tokens, shared out among the ranks."""
    torch.manual_seed(0)
    model, tokens = module(device), torch.randint(0, VOCABULARY, (4, TOKENS)).to(device)
    mine = tokens.chunk(ranks)[dist.get_rank() % ranks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def main() -> None:
    """Both curves compared."""
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    ours, theirs = curve(WithoutLogits, dist.get_world_size(), device), curve(WithLogits, 1, device)
    if dist.get_rank() == 0:
        print(f"losses of {len(ours)} steps from {ours[0]:.4f} to {ours[-1]:.4f}, on one process to {theirs[-1]:.4f}")
        print(f"largest difference: {max(abs(a - b) for a, b in zip(ours, theirs)):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

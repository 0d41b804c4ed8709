"""A training loop of one's own under `accelerate`, with gradient accumulation: a module that gives the loss without
logits, with its layers fused, and transformers' model as it is. The loss curves are equal."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import onepass
from onepass.functional import linear_cross_entropy

STEPS, VOCABULARY, TOKENS = 20, 4096, 64
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


class WithLogits(nn.Module):
    """The loss that the model makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens."""
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


class WithoutLogits(WithLogits):
    """The same; a chunk of the logits exists at a time. What `accelerate` calls is the whole module, so that wrappers
    of several processes see its parameters used within it."""

    def __init__(self) -> None:
        super().__init__()
        onepass.fuse(self.model.model)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean over the tokens."""
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden[:, :-1], self.model.lm_head.weight, tokens[:, 1:])


def curve(module: type[WithLogits]) -> list[float]:
    """The losses of a training from the same weights on the same tokens: of each step, two batches together."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model, tokens = module(), torch.randint(0, VOCABULARY, (8, TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=2))
    losses, of_step = [], []
    while len(losses) < STEPS:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            of_step.append(loss.item())
            if accelerator.sync_gradients:
                losses.append(sum(of_step) / len(of_step))
                of_step = []
    return losses


def main() -> None:
    """Both curves compared."""
    ours, theirs = curve(WithoutLogits), curve(WithLogits)
    print(f"losses of {len(ours)} steps from {ours[0]:.4f} to {ours[-1]:.4f}, with logits to {theirs[-1]:.4f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(ours, theirs)):.1e}")


if __name__ == "__main__":
    main()

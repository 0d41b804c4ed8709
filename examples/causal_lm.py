"""A causal language model of transformers, trained with its head and loss as one call: the logits are never there."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from onepass.functional import linear_cross_entropy

STEPS = 20
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def without_logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of each token from those before it; a chunk of the logits exists at a time."""
    hidden = model.model(input_ids=tokens).last_hidden_state
    return linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:])


def with_logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """The same by the model itself."""
    return model(input_ids=tokens, labels=tokens).loss


def curve(loss_of) -> list[float]:
    """Losses of a few steps, from the same weights on the same tokens."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, **SIZES))
    tokens = torch.randint(0, 4096, (4, 64))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model, tokens)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Both curves compared."""
    ours, theirs = curve(without_logits), curve(with_logits)
    print(f"losses from {ours[0]:.4f} to {ours[-1]:.4f}, with logits to {theirs[-1]:.4f}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(ours, theirs)):.1e}")


if __name__ == "__main__":
    main()

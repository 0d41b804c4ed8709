"""A policy-gradient step of a tiny language model, as GRPO takes it: log-probabilities and entropies of the chosen
tokens, without the logits."""

import torch
from torch import nn
from torch.nn import functional

from onepass.functional import linear_log_prob

VOCABULARY, WIDTH, TOKENS, CLIP, BONUS = 4096, 64, 512, 0.2, 0.01


class Policy(nn.Module):
    """Hidden states of tokens; the head shares the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.RMSNorm(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(tokens, WIDTH)."""
        return self.body(self.embed(tokens))


def without_logits(hidden: torch.Tensor, head: torch.Tensor, actions: torch.Tensor):
    """A chunk of the logits exists at a time; backward makes it again."""
    return linear_log_prob(hidden, head, actions, temperature=0.7, entropy=True)


def with_logits(hidden: torch.Tensor, head: torch.Tensor, actions: torch.Tensor):
    """The same of PyTorch's operators."""
    log_p = functional.log_softmax(functional.linear(hidden, head) / 0.7, -1)
    return log_p.gather(-1, actions[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss_of(policy: Policy, tokens, actions, old_log_p, advantages, log_prob) -> torch.Tensor:
    """The clipped objective with an entropy bonus (Schulman et al., arXiv:1707.06347; GRPO: arXiv:2402.03300)."""
    log_p, entropy = log_prob(policy(tokens), policy.embed.weight, actions)
    ratio = (log_p - old_log_p).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain + BONUS * entropy).mean()


def main() -> None:
    """One step both ways: losses and gradients compared."""
    torch.manual_seed(0)
    policy = Policy()
    tokens, actions = torch.randint(0, VOCABULARY, (2, TOKENS))
    advantages = torch.randn(TOKENS)
    with torch.no_grad():
        old_log_p, _ = without_logits(policy(tokens), policy.embed.weight, actions)
    found = []
    for log_prob in (without_logits, with_logits):
        policy.zero_grad()
        loss = loss_of(policy, tokens, actions, old_log_p, advantages, log_prob)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in policy.parameters())])
    (loss, *gradients), (expected, *expected_gradients) = found
    off = max(((a - b).norm() / b.norm()).item() for a, b in zip(gradients, expected_gradients))
    print(f"loss {loss:.6f}, with logits {expected:.6f}")
    print(f"largest relative difference of gradients: {off:.1e}")


if __name__ == "__main__":
    main()

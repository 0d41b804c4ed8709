"""A post-norm encoder block: bias, dropout, residual and norm as one line each, beside the block's matrix products."""

import torch
from torch import Tensor, nn

import onepass


class Block(nn.Module):
    """Attention and a feed-forward network; the biases of the two output projections live in the fused lines."""

    def __init__(self, features: int = 64, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features)
        self.projection = nn.Linear(features, features, bias=False)
        self.up = nn.Linear(features, 4 * features, bias=False)
        self.down = nn.Linear(4 * features, features, bias=False)
        self.probabilities = onepass.nn.Softmax(scale=(features // heads) ** -0.5, dropout_p=dropout)
        self.activation = onepass.nn.BiasGELU(4 * features)
        self.after_attention = onepass.nn.AddLayerNorm(features, dropout_p=dropout)
        self.after_feed_forward = onepass.nn.AddLayerNorm(features, dropout_p=dropout)
        self.projection_bias = nn.Parameter(torch.zeros(features))
        self.down_bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = self.probabilities(q @ k.mT, mask) @ v
        x, _ = self.after_attention(self.projection(attended.transpose(1, 2).flatten(2)), x, self.projection_bias)
        x, _ = self.after_feed_forward(self.down(self.activation(self.up(x))), x, self.down_bias)
        return x


def main() -> None:
    """One step of training on random numbers."""
    torch.manual_seed(0)
    block = Block()
    optimiser = torch.optim.AdamW(block.parameters(), lr=1e-3)
    x, target = torch.randn(2, 8, 32, 64).unbind()
    mask = torch.ones(8, 1, 1, 32, dtype=torch.bool)  # True takes part
    mask[:, ..., 24:] = False  # padding
    for step in range(5):
        loss = (block(x, mask) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

"""Architectures in plain PyTorch: torch.nn's own, and those of papers that transformers does not have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onepass.bench.architectures.size import Built, Make, Size

__all__ = ["BLOCKS"]


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """adaLN: a sample's own shift and scale, (batch, width), for each of its rows."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class DiTBlock(nn.Module):
    """Attention and feed-forward layers whose norms a condition shifts and scales, and whose results it gates."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(modulated(self.norm1(x), shift1, scale1)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1.unsqueeze(1) * self.proj(attended)
        return x + gate2.unsqueeze(1) * self.mlp(modulated(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Peebles and Xie, 2023: from noisy patches and a time to noise, four numbers a patch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.time = nn.Sequential(nn.Linear(2 * (width // 4), width), nn.SiLU(), nn.Linear(width, width))
        self.embed, self.width = nn.Linear(4, width), width
        self.position = nn.Parameter(torch.zeros(1, size.tokens, width))
        self.blocks = nn.ModuleList(DiTBlock(width, size.heads, size.inner) for _ in range(size.layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation, self.out = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width)), nn.Linear(width, 4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(self.width // 4, device=x.device, dtype=x.dtype) / (self.width // 4))
        angles = time[:, None] * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.out(modulated(self.norm(x), shift, scale))


class Stream(nn.Module):
    """What a joint block has for text, and again for images."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_q, self.norm_k = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, width))

    def before(self, x: Tensor, condition: Tensor) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        shift, scale, *rest = self.modulation(condition).chunk(6, dim=1)
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(modulated(self.norm1(x), shift, scale)).chunk(3, -1))
        return [self.norm_q(q), self.norm_k(k), v], (x, *rest)

    def behind(self, attended: Tensor, x: Tensor, gate1: Tensor, shift: Tensor, scale: Tensor, gate2: Tensor) -> Tensor:
        x = x + gate1.unsqueeze(1) * self.proj(attended.transpose(1, 2).flatten(2))
        return x + gate2.unsqueeze(1) * self.mlp(modulated(self.norm2(x), shift, scale))


class MMDiT(nn.Module):
    """Stable Diffusion 3 (Esser et al., 2024): text and image have their own weights and attend together."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        sizes = size.width, size.heads, size.inner
        self.texts = nn.ModuleList(Stream(*sizes) for _ in range(size.layers))
        self.images = nn.ModuleList(Stream(*sizes) for _ in range(size.layers))

    def forward(self, image: Tensor, text: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        for of_text, of_image in zip(self.texts, self.images):
            (here, its), (there, other) = of_text.before(text, condition), of_image.before(image, condition)
            q, k, v = (torch.cat(pair, dim=2) for pair in zip(here, there))
            attended = F.scaled_dot_product_attention(q, k, v).split([text.shape[1], image.shape[1]], dim=2)
            text, image = of_text.behind(attended[0], *its), of_image.behind(attended[1], *other)
        return image, text


class EVABlock(nn.Module):
    """EVA-02 (Fang et al., 2023): rotated queries and keys, and a norm within attention and within SwiGLU."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.inner_attn_ln, self.proj = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, width)
        self.w1, self.w2 = nn.Linear(width, inner), nn.Linear(width, inner)
        self.ffn_ln, self.w3 = nn.LayerNorm(inner, eps=1e-6), nn.Linear(inner, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (heads_of(of(normed), self.heads) for of in (self.q, self.k, self.v))
        q = torch.cat([q[:, :, :1], self._rotated(q[:, :, 1:], cos, sin)], dim=-2).type_as(v)  # not the class token
        k = torch.cat([k[:, :, :1], self._rotated(k[:, :, 1:], cos, sin)], dim=-2).type_as(v)
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        attended = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.proj(self.inner_attn_ln(attended))
        normed = self.norm2(x)
        return x + self.w3(self.ffn_ln(F.silu(self.w1(normed)) * self.w2(normed)))

    @staticmethod
    def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Neighbours are pairs, not the halves of a row."""
        pairs = x.unflatten(-1, (-1, 2))
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
        return x * cos + turned * sin


class EVA02(nn.Module):
    """Blocks, with the angles of a square of patches."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EVABlock(size.width, size.heads, size.inner) for _ in range(size.layers))
        side, half = size.image // size.patch, size.head_dim // 2
        angles = torch.arange(side)[:, None] / 100 ** (torch.arange(0, half, 2) / half)
        rows, columns = angles[:, None].expand(-1, side, -1), angles[None].expand(side, -1, -1)
        both = torch.cat([rows, columns], -1).flatten(0, 1).repeat_interleave(2, -1)
        self.register_buffer("cos", both.cos())
        self.register_buffer("sin", both.sin())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def dit(size: Size) -> Built:
    return DiT(size), {"x": torch.randn(size.batch, size.tokens, 4), "time": torch.rand(size.batch)}


def mmdit(size: Size) -> Built:
    image, text = torch.randn(2, size.batch, size.tokens, size.width).unbind()
    return MMDiT(size), {
        "image": image,
        "text": text[:, : size.tokens // 2],
        "condition": torch.randn(size.batch, size.width),
    }


def eva(size: Size) -> Built:
    return EVA02(size), {"x": torch.randn(size.batch, (size.image // size.patch) ** 2 + 1, size.width)}


def torch_transformer(size: Size) -> Built:
    """Encoder and decoder, norms behind the sums, as the first of its kind."""
    sizes = {"d_model": size.width, "nhead": size.heads, "dim_feedforward": size.inner}
    counts = {"num_encoder_layers": size.layers, "num_decoder_layers": size.layers}
    model = nn.Transformer(**sizes, **counts, dropout=0.0, batch_first=True)
    source, target = torch.randn(2, size.batch, size.tokens, size.width).unbind()
    mask = nn.Transformer.generate_square_subsequent_mask(size.tokens)
    return model, {"src": source, "tgt": target, "tgt_mask": mask, "tgt_is_causal": True}  # else it looks at numbers


BLOCKS: dict[str, Make] = {
    "torch.nn.Transformer": torch_transformer,
    "EVA-02": eva,
    "DiT": dit,
    "Stable Diffusion 3": mmdit,
}

"""Diffusion models in the operators that the library diffusers writes them in: Flux, and Stable Diffusion's UNet."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Flux", "UNet"]


class TimeEmbedding(nn.Module):
    """Sines and cosines of times, and two linear layers."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.half = width // 2
        self.linear_1, self.linear_2 = nn.Linear(width, out), nn.Linear(out, out)

    def forward(self, time: Tensor) -> Tensor:
        frequencies = 10000 ** -(torch.arange(self.half, device=time.device, dtype=torch.float32) / self.half)
        angles = time[:, None].float() * frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.linear_1.weight.dtype)
        return self.linear_2(F.silu(self.linear_1(waves)))


class AdaLayerNorm(nn.Module):
    """A norm that a condition shifts and scales; what the condition says beside that comes with it."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.parts, self.linear = parts, nn.Linear(width, parts * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, ...]:
        shift, scale, *rest = self.linear(F.silu(condition)).chunk(self.parts, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], *rest


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of (batch, tokens, heads, features): neighbours are pairs; in float32."""
    cos, sin = cos[None, :, None, :], sin[None, :, None, :]
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


class Projections(nn.Module):
    """Queries, keys and values of a stream, heads apart, the first two with a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.norm_q, self.norm_k = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (to(x).unflatten(-1, (self.heads, -1)) for to in (self.to_q, self.to_k, self.to_v))
        return self.norm_q(q), self.norm_k(k), v


def attended(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    q, k, v = (t.permute(0, 2, 1, 3) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).flatten(2, 3).to(q.dtype)


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj, self.drop, self.out = nn.Linear(width, inner), nn.Dropout(0.0), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(F.gelu(self.proj(x), approximate="tanh")))


class JointStream(nn.Module):
    """What a block of both streams has for images, and again for text."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.to_out = AdaLayerNorm(width, 6), Projections(width, heads), nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.ff = FeedForward(width, 4 * width)

    def behind(self, x: Tensor, attention: Tensor, gate: Tensor, shift: Tensor, scale: Tensor, last: Tensor) -> Tensor:
        x = x + gate.unsqueeze(1) * self.to_out(attention)
        normed = self.norm2(x) * (1 + scale[:, None]) + shift[:, None]
        return x + last.unsqueeze(1) * self.ff(normed)


class JointBlock(nn.Module):
    """FluxTransformerBlock: text and image have their own weights and attend together."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.image, self.text = JointStream(width, heads), JointStream(width, heads)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        normed, *of_image = self.image.norm1(image, condition)
        normed_text, *of_text = self.text.norm1(text, condition)
        pairs = zip(self.text.attn(normed_text), self.image.attn(normed))
        both = attended(*(torch.cat(pair, dim=1) for pair in pairs), cos, sin)
        texts, images = both.split_with_sizes([text.shape[1], image.shape[1]], dim=1)
        return self.image.behind(image, images, *of_image), self.text.behind(text, texts, *of_text)


class SingleBlock(nn.Module):
    """FluxSingleTransformerBlock: attention and feed-forward layer side by side."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attn = AdaLayerNorm(width, 3), Projections(width, heads)
        self.proj_mlp, self.proj_out = nn.Linear(width, 4 * width), nn.Linear(5 * width, width)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed, gate = self.norm(x, condition)
        inner = F.gelu(self.proj_mlp(normed), approximate="tanh")
        both = torch.cat([attended(*self.attn(normed), cos, sin), inner], dim=2)
        return x + gate.unsqueeze(1) * self.proj_out(both)


class Flux(nn.Module):
    """Black Forest Labs, 2024: patches of a square image, 64 numbers each, and embedded text."""

    def __init__(self, width: int, heads: int, joint: int, single: int, text_width: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.time, self.x_embedder = TimeEmbedding(256, width), nn.Linear(64, width)
        self.context_embedder = nn.Linear(text_width, width)
        self.joint = nn.ModuleList(JointBlock(width, heads) for _ in range(joint))
        self.single = nn.ModuleList(SingleBlock(width, heads) for _ in range(single))
        self.norm_out, self.proj_out = AdaLayerNorm(width, 2), nn.Linear(width, 64)

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        condition = self.time(1000 * time)
        cos, sin = self._angles(x.shape[1], text.shape[1], x.device)
        image, text = self.x_embedder(x), self.context_embedder(text)
        for block in self.joint:
            image, text = block(image, text, condition, cos, sin)
        both = torch.cat([text, image], dim=1)
        for block in self.single:
            both = block(both, condition, cos, sin)
        return self.proj_out(self.norm_out(both[:, text.shape[1] :], condition)[0])

    def _angles(self, patches: int, words: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and columns take half of a head's features each; text stands at 0."""
        at, quarter = torch.arange(patches, device=device), self.head_dim // 4
        side = int(patches**0.5)
        places = F.pad(torch.stack([at // side, at % side], dim=-1), (0, 0, words, 0))
        frequencies = 10000 ** -(torch.arange(quarter, device=device, dtype=torch.float32) / quarter)
        angles = (places[..., None].float() * frequencies).flatten(1).repeat_interleave(2, dim=1)
        return angles.cos(), angles.sin()


class ResnetBlock(nn.Module):
    """ResnetBlock2D: two norms of groups and two convolutions, with the time between them."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels, eps=1e-5), nn.GroupNorm(32, out, eps=1e-5)
        self.conv1, self.conv2 = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time_emb_proj, self.dropout = nn.Linear(time, out), nn.Dropout(0.0)
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time_emb_proj(F.silu(time))[:, :, None, None]
        hidden = self.conv2(self.dropout(F.silu(self.norm2(hidden))))
        return (self.shortcut(x) + hidden) / 1.0


class Attention(nn.Module):
    """Attention with AttnProcessor2_0, of x to itself or to text."""

    def __init__(self, width: int, of: int) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.to_k, self.to_v = (nn.Linear(of, width, bias=False) for _ in range(2))
        self.heads, self.dropout = max(width // 64, 1), nn.Dropout(0.0)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        batch = x.shape[0]
        q, k, v = (t.view(batch, -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2) for t in self._made(x, of))
        result = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=False)
        result = result.transpose(1, 2).reshape(batch, -1, x.shape[-1]).to(q.dtype)
        return self.dropout(self.to_out(result)) / 1.0

    def _made(self, x: Tensor, of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.to_q(x), self.to_k(of), self.to_v(of)


class Transformer(nn.Module):
    """Transformer2DModel with one BasicTransformerBlock: attention to itself and to text, and a gated layer."""

    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width, eps=1e-6)
        self.proj_in, self.proj_out = nn.Linear(width, width), nn.Linear(width, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.attn1, self.attn2 = Attention(width, width), Attention(width, text)
        self.gated, self.drop, self.out = nn.Linear(width, 8 * width), nn.Dropout(0.0), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        batch, width, height, across = x.shape
        tokens = self.proj_in(self.norm(x).permute(0, 2, 3, 1).reshape(batch, height * across, width))
        normed = self.norm1(tokens)
        tokens = self.attn1(normed, normed) + tokens
        tokens = self.attn2(self.norm2(tokens), text) + tokens
        hidden, gate = self.gated(self.norm3(tokens)).chunk(2, dim=-1)
        tokens = self.out(self.drop(hidden * F.gelu(gate))) + tokens
        back = self.proj_out(tokens).reshape(batch, height, across, width).permute(0, 3, 1, 2).contiguous()
        return back + x


class UNet(nn.Module):
    """Stable Diffusion's (Rombach et al., 2021), a layer on each level down, two up, where what came down joins."""

    def __init__(self, widths: tuple[int, ...], text_width: int) -> None:
        super().__init__()
        first, last = widths[0], widths[-1]
        time = 4 * first
        self.time, self.conv_in = TimeEmbedding(first, time), nn.Conv2d(4, first, 3, padding=1)
        pairs = [*zip((first, *widths), widths)]
        self.down = nn.ModuleList(self._layer(*pair, time, text_width) for pair in pairs)
        self.downsample = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = self._layer(last, last, time, text_width)
        self.up = nn.ModuleList(self._layer(2 * w, w, time, text_width) for w in reversed(widths))
        self.upsample = nn.ModuleList(nn.Conv2d(w, n, 3, padding=1) for n, w in reversed([*zip(widths, widths[1:])]))
        self.norm_out, self.conv_out = nn.GroupNorm(32, first, eps=1e-5), nn.Conv2d(first, 4, 3, padding=1)

    @staticmethod
    def _layer(channels: int, out: int, time: int, text: int) -> nn.ModuleList:
        return nn.ModuleList([ResnetBlock(channels, out, time), Transformer(out, text)])

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Tensor:
        condition, x, came = self.time(1000 * time), self.conv_in(x), []
        for i, (residual, attention) in enumerate(self.down):
            x = attention(residual(x, condition), text)
            came.append(x)
            x = self.downsample[i](x) if i < len(self.downsample) else x
        x = self.middle[1](self.middle[0](x, condition), text)
        for i, (residual, attention) in enumerate(self.up):
            x = attention(residual(torch.cat([x, came.pop()], dim=1), condition), text)
            if i < len(self.upsample):
                x = self.upsample[i](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.conv_out(F.silu(self.norm_out(x)))

"""Architectures of images and videos, and those of images with text."""

from __future__ import annotations

from typing import Any

import torch

from onepass.bench.architectures.size import (
    Built,
    Make,
    Size,
    image,
    mask_of_padding,
    tokens,
    transformer,
    without_dropout,
)
from onepass.bench.architectures.text import bart, encoder

__all__ = ["VISION"]


def vit(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
        "image_size": size.image,
        "patch_size": size.patch,
    }


def image_inputs(size: Size, *shape: int) -> dict[str, Any]:
    return {"pixel_values": image(size, *shape), "output_hidden_states": True}


def of_vit(name: str, **more: Any) -> Make:
    return lambda size: transformer(name, vit(size) | more, image_inputs(size))


def stages(size: Size) -> tuple[int, ...]:
    """Widths of two stages; the second one has half as many rows and columns."""
    return size.width // 2, size.width


def window(size: Size) -> int:
    """Rows of patches that attend to each other."""
    return 4 if size.image < 128 else 7


def swin(size: Size) -> dict[str, Any]:
    """Two stages of two layers, whose second one has its windows shifted; the second stage has half as many rows and
    columns of patches."""
    return {
        "image_size": size.image,
        "patch_size": size.patch // 2,
        "embed_dim": size.width // 2,
        "depths": (2, 2),
        "num_heads": (size.heads // 2, size.heads),
        "window_size": window(size),
    }


def beit(size: Size) -> Built:
    return transformer("Beit", vit(size) | {"use_relative_position_bias": True}, image_inputs(size))


def blip(size: Size) -> Built:
    text = encoder(size) | {"encoder_hidden_size": size.width, "projection_dim": size.width, "bos_token_id": 1}
    text |= {"sep_token_id": 2, "eos_token_id": 2}
    options = {"text_config": text, "vision_config": vit(size), "projection_dim": size.width}
    inputs = tokens(size, attention_mask=mask_of_padding(size), pixel_values=image(size))
    return transformer("Blip", options, inputs)


def clip(name: str) -> Make:
    def make(size: Size) -> Built:
        text = encoder(size) | {"eos_token_id": 2, "bos_token_id": 1, "projection_size": size.width}
        options = {"text_config": text, "vision_config": vit(size)}
        options |= {"projection_dim": size.width} if name == "CLIP" else {}
        inputs = tokens(size, attention_mask=mask_of_padding(size), pixel_values=image(size))
        return transformer(name, options, inputs)

    return make


def convnext(size: Size) -> Built:
    options = {"hidden_sizes": stages(size), "depths": (2, 2), "num_stages": 2, "patch_size": size.patch // 2}
    return transformer("ConvNextV2", options, image_inputs(size))


def resnet(size: Size) -> dict[str, Any]:
    return {
        "model_type": "resnet",
        "embedding_size": size.width // 2,
        "hidden_sizes": stages(size),
        "depths": (1, 1),
        "layer_type": "basic",
        "out_features": ["stage2"],
    }


def detr(size: Size) -> Built:
    options = {
        key: value for key, value in bart(size).items() if key not in ("max_position_embeddings", "pad_token_id")
    }
    more = {"backbone_config": backbone("resnet", size), "num_queries": size.tokens // 2}
    return transformer("Detr", options | more, image_inputs(size))


def backbone(kind: str, size: Size) -> Any:
    import transformers

    if kind == "resnet":
        options = resnet(size)
        options.pop("model_type")
        return transformers.ResNetConfig(**options)
    return transformers.MaskFormerSwinConfig(**four_stages(size), out_features=[f"stage{i}" for i in range(1, 5)])


def four_stages(size: Size) -> dict[str, Any]:
    """Smaller patches: each of three merges halves their rows."""
    heads = tuple(max(2**i * size.heads // 4, 1) for i in range(4))
    widths = {"embed_dim": size.width // 8, "depths": (1, 2, 1, 1), "num_heads": heads}
    return swin(size) | widths | {"patch_size": max(size.patch // 4, 1)}


def maskformer(size: Size) -> Built:
    import transformers

    options = {
        key: value for key, value in bart(size).items() if key not in ("max_position_embeddings", "pad_token_id")
    }
    features = {"fpn_feature_size": size.width, "mask_feature_size": size.width}
    queries = transformers.DetrConfig(**options, num_queries=size.tokens // 2)
    parts = {"backbone_config": backbone("swin", size), "decoder_config": queries}
    return transformer("MaskFormer", {**parts, **features}, image_inputs(size))


def donut(size: Size) -> Built:
    import transformers

    sees = transformers.DonutSwinConfig(**swin(size))
    writes = transformers.MBartConfig(
        **bart(size), vocab_size=size.vocabulary, is_decoder=True, add_cross_attention=True
    )
    both = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(sees, writes)
    model = transformers.VisionEncoderDecoderModel(config=without_dropout(both))
    words = tokens(size)["input_ids"]
    return model, {"pixel_values": image(size), "decoder_input_ids": words, "use_cache": False}


def perceiver(size: Size) -> Built:
    """Without a preprocessor: it takes arrays of numbers."""
    options = {
        "num_latents": size.tokens // 2,
        "d_latents": size.width,
        "d_model": size.width // 2,
        "num_self_attends_per_block": size.layers,
        "num_self_attention_heads": size.heads,
        "num_cross_attention_heads": size.heads // 2,
    }
    return transformer("Perceiver", options, {"inputs": torch.randn(size.batch, size.tokens, size.width // 2)})


def sam(size: Size) -> Built:
    """One layer of attention in windows, one of all; a point for each image."""
    sees = {key: value for key, value in vit(size).items() if key != "intermediate_size"}
    sees |= {
        "output_channels": size.width,
        "mlp_dim": size.inner,
        "window_size": window(size),
        "global_attn_indexes": (1,),
    }
    sees |= {"num_pos_feats": size.width // 2}
    prompts = {"hidden_size": size.width, "image_size": size.image, "patch_size": size.patch, "mask_input_channels": 4}
    prompts["image_embedding_size"] = size.image // size.patch
    decoder = {"hidden_size": size.width, "mlp_dim": size.inner, "num_attention_heads": size.heads}
    decoder |= {"iou_head_hidden_dim": size.width, "num_hidden_layers": size.layers}
    parts = {"vision_config": sees, "prompt_encoder_config": prompts, "mask_decoder_config": decoder}
    points = {"input_points": size.image * torch.rand(size.batch, 1, 1, 2)}
    return transformer("Sam", parts, {"pixel_values": image(size), **points})


def segformer(size: Size) -> Built:
    options = {
        "num_encoder_blocks": 2,
        "depths": (2, 2),
        "sr_ratios": (2, 1),
        "hidden_sizes": stages(size),
        "patch_sizes": (7, 3),
        "strides": (size.patch // 2, 2),
        "num_attention_heads": (size.heads // 2, size.heads),
        "mlp_ratios": (4, 4),
    }
    return transformer("Segformer", options, image_inputs(size))


def swin2sr(size: Size) -> Built:
    options = swin(size) | {"patch_size": 1, "image_size": size.image // 2, "embed_dim": size.width}
    options |= {"num_heads": (size.heads,) * 2, "window_size": window(size)}
    side = size.image // 2
    return transformer("Swin2SR", options, {"pixel_values": image(size, side=side)}, "Swin2SRForImageSuperResolution")


def video(name: str, frames: int = 4) -> Make:
    more = {"num_frames": frames} | ({"tubelet_size": 2} if name == "VideoMAE" else {})
    return lambda size: transformer(name, vit(size) | more, image_inputs(size, frames))


VISION: dict[str, Make] = {
    "ViT": of_vit("ViT"),
    "DeiT": of_vit("DeiT"),
    "BEiT": beit,
    "DINOv2": lambda size: transformer("Dinov2", vit(size) | {"use_swiglu_ffn": True}, image_inputs(size)),
    "ConvNeXt v2": convnext,
    "Swin": lambda size: transformer("Swin", swin(size), image_inputs(size)),
    "Swin v2": lambda size: transformer("Swinv2", swin(size), image_inputs(size)),
    "Swin2SR": swin2sr,
    "SegFormer": segformer,
    "DETR": detr,
    "MaskFormer": maskformer,
    "Donut": donut,
    "SAM": sam,
    "VideoMAE": video("VideoMAE"),
    "TimeSformer": video("Timesformer"),
    "CLIP": clip("CLIP"),
    "SigLIP": clip("Siglip"),
    "BLIP": blip,
    "Perceiver": perceiver,
}

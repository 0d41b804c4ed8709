"""Architectures of sound, and of series of numbers."""

from __future__ import annotations

from typing import Any

import torch

from onepass.bench.architectures.size import Built, Make, Size, mask_of_padding, tokens, transformer
from onepass.bench.architectures.text import bart, encoder
from onepass.bench.architectures.vision import swin

__all__ = ["AUDIO"]


def convolutions(size: Size) -> dict[str, Any]:
    """Three before the encoder's layers, and its positions."""
    return {
        "conv_dim": (size.width,) * 3,
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 2),
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "apply_spec_augment": False,
    }


def wav2vec2(name: str, **more: Any) -> Make:
    def make(size: Size) -> Built:
        options = encoder(size) | convolutions(size) | more
        options.pop("max_position_embeddings")
        inputs = {"input_values": torch.randn(size.batch, size.samples), "output_hidden_states": True}
        return transformer(name, options, inputs)

    return make


def whisper(size: Size) -> Built:
    options = bart(size) | {"vocab_size": size.vocabulary, "num_mel_bins": 16, "max_source_positions": size.tokens}
    options |= {
        "max_target_positions": 2 * size.tokens,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    options.pop("max_position_embeddings")
    sound = torch.randn(size.batch, 16, 2 * size.tokens)
    return transformer(
        "Whisper", options, {"input_features": sound, "decoder_input_ids": tokens(size)["input_ids"]} | CACHE
    )


CACHE = {"use_cache": False, "output_hidden_states": True}


def speecht5(size: Size) -> Built:
    """Text to mel spectrograms."""
    options = {key: value for key, value in bart(size).items() if key not in ("d_model", "max_position_embeddings")}
    options |= {"hidden_size": size.width, "vocab_size": size.vocabulary, "num_mel_bins": 16} | convolutions(size)
    options |= {
        "speech_decoder_prenet_units": size.width,
        "speaker_embedding_dim": 8,
        "max_text_positions": 2 * size.tokens,
    }
    options |= {"speech_decoder_postnet_units": size.width, "max_speech_positions": 2 * size.tokens}
    options |= {"encoder_max_relative_position": size.tokens // 2}
    inputs = tokens(size, attention_mask=mask_of_padding(size), use_cache=False)
    inputs |= {
        "decoder_input_values": torch.randn(size.batch, size.tokens, 16),
        "speaker_embeddings": torch.randn(size.batch, 8),
    }
    return transformer("SpeechT5", options, inputs, "SpeechT5ForTextToSpeech")


def clap(size: Size) -> Built:
    text = encoder(size) | {"projection_dim": size.width, "pad_token_id": 1}
    hears = swin(size) | {"patch_embeds_hidden_size": size.width // 2, "hidden_size": size.width}
    hears |= {"num_attention_heads": hears.pop("num_heads"), "num_mel_bins": size.image // 2, "spec_size": size.image}
    hears |= {"patch_size": size.patch // 2, "patch_stride": (size.patch // 2,) * 2, "projection_dim": size.width}
    hears |= {"num_hidden_layers": 2, "num_classes": 4}
    for name in ("image_size", "embed_dim"):
        hears.pop(name)
    inputs = tokens(size, attention_mask=mask_of_padding(size))
    sound = torch.randn(size.batch, 1, 2 * size.image, size.image // 2)
    options = {"text_config": text, "audio_config": hears, "projection_dim": size.width}
    return transformer("Clap", options, inputs | {"input_features": sound})


def patchtst(size: Size) -> Built:
    options = {
        "num_input_channels": 3,
        "context_length": 4 * size.tokens,
        "patch_length": 4,
        "patch_stride": 4,
        "num_hidden_layers": size.layers,
        "d_model": size.width,
        "num_attention_heads": size.heads,
        "ffn_dim": size.inner,
        "channel_attention": True,
    }
    return transformer("PatchTST", options, {"past_values": torch.randn(size.batch, 4 * size.tokens, 3)})


def series(name: str) -> Make:
    def make(size: Size) -> Built:
        options = {
            key: value for key, value in bart(size).items() if key not in ("max_position_embeddings", "pad_token_id")
        }
        steps = {"prediction_length": size.tokens // 2, "context_length": size.tokens, "lags_sequence": [1, 2, 3]}
        options |= steps | {"num_time_features": 2}
        options |= {"label_length": size.tokens // 4, "moving_average": 5} if name == "Autoformer" else {}
        past, future = size.tokens + 3, size.tokens // 2
        inputs = {
            "past_values": torch.randn(size.batch, past),
            "past_time_features": torch.randn(size.batch, past, 2),
            "past_observed_mask": torch.ones(size.batch, past),
            "future_values": torch.randn(size.batch, future),
            "future_time_features": torch.randn(size.batch, future, 2),
        }
        return transformer(name, options, inputs | CACHE)

    return make


AUDIO: dict[str, Make] = {
    "Wav2Vec2": wav2vec2("Wav2Vec2"),
    "HuBERT": wav2vec2("Hubert", do_stable_layer_norm=True, feat_extract_norm="layer"),
    "Whisper": whisper,
    "SpeechT5": speecht5,
    "CLAP": clap,
    "PatchTST": patchtst,
    "Time Series Transformer": series("TimeSeriesTransformer"),
    "Autoformer": series("Autoformer"),
}

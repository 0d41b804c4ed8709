"""Whole models: architectures of transformers and of PyTorch, in the sizes and shapes that are timed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onepass.bench.architectures import BASE, floats
from onepass.bench.architectures.blocks import dit
from onepass.bench.architectures.size import without_dropout
from onepass.bench.models import network

__all__ = ["MODELS", "Whole"]

DECODERS = ("GPT2", "Llama", "Qwen3")
ENCODER_LAYER, MINILM, DIT = "TransformerEncoderLayer", "MiniLM", "DiT"
CAUSAL, MASKED, NOISE = "ForCausalLM", "ForMaskedLM", "mse_loss"


@dataclass(frozen=True)
class Whole:
    """A model, and the shape of its tokens, images or hidden states.

    Attributes:
        architecture: a configuration of transformers without its "Config", a layer of torch.nn, or MiniLM, whose
            weights are real where they are installed; those of all others are random.
        options: of the configuration or the layer.
        head: what stands behind the architecture's name in that of its class, "ForCausalLM": a step gives the loss
            alone, and dropout is off. Its weights are bfloat16, those of others float32 under autocast.
    """

    name: str
    device: str
    architecture: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    head: str = ""

    @property
    def trains(self) -> bool:
        """Forward, backward, and the gradients of all parameters, in bfloat16; else inference, float32."""
        return self.device == "cuda"

    def mode(self) -> contextlib.AbstractContextManager:
        """In which the model is called."""
        if not self.trains:
            return torch.no_grad()
        return contextlib.nullcontext() if self.head else torch.autocast(self.device, torch.bfloat16)

    def step(self, model: nn.Module) -> Callable[..., Any]:
        """What is called: of a model with a head a function that gives its loss alone."""
        if not self.head:
            return model
        return loss_of_noise(model) if self.head == NOISE else lambda **inputs: model(**inputs).loss

    def exact(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        """The same in float32, to be called in no mode."""
        return (copy.deepcopy(model).float(), floats(inputs, torch.float32)) if self.head else (model, inputs)

    def build(self, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
        """The model, and what it is called with.

        Raises:
            ModuleNotFoundError: without transformers.
        """
        torch.manual_seed(0)
        model = network("minilm", "sdpa", device) if self.architecture == MINILM else self._random(device)
        with device:
            inputs = self._inputs(model)
        if self.head:
            model, inputs = model.to(torch.bfloat16), floats(inputs, torch.bfloat16)
        return model.train(self.trains), inputs

    def _random(self, device: torch.device) -> nn.Module:
        """Biases and norms' weights, too: they begin as zeros and ones, without which a result is the same."""
        with device, torch.no_grad():
            model = self._initial()
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model

    def _initial(self) -> nn.Module:
        if self.architecture == ENCODER_LAYER:
            return nn.TransformerEncoderLayer(**self.options)
        if self.architecture == DIT:
            return dit(replace(BASE, **self.options))[0]
        import transformers

        configuration = getattr(transformers, f"{self.architecture}Config")(**self.options)
        if self.head:
            name = self.architecture.removesuffix("Text") + self.head
            return getattr(transformers, name)._from_config(without_dropout(configuration))
        of = transformers.AutoModelForCausalLM if self.architecture in DECODERS else transformers.AutoModel
        kinds = {} if self.architecture == "T5" else {"attn_implementation": "sdpa"}  # T5 has its own alone
        return of.from_config(configuration, **kinds)

    def _inputs(self, model: nn.Module) -> dict[str, Any]:
        if self.architecture == ENCODER_LAYER:
            return {"src": torch.randn(self.shape)}
        if self.architecture == DIT:
            x, noise = torch.randn(2, *self.shape, 4)
            return {"x": x, "time": torch.rand(self.shape[0]), "target": noise}
        if self.architecture in ("ViT", "Dinov2"):
            classes = {"labels": torch.arange(self.shape[0]) % model.config.num_labels} if self.head else {}
            return {"pixel_values": torch.randn(self.shape), **classes}
        if self.architecture == "Whisper":
            sound = torch.randn(self.shape[0], model.config.num_mel_bins, 2 * model.config.max_source_positions)
            labels = torch.randint(2, model.config.vocab_size, self.shape)
            return {"input_features": sound, "labels": labels, "use_cache": False}
        ids: Tensor = torch.randint(2, model.config.vocab_size, self.shape)  # below are paddings, which mask
        if self.head == CAUSAL or self.architecture in DECODERS:
            return {"input_ids": ids, "use_cache": False, **({"labels": ids} if self.trains else {})}
        if self.head:
            return {"input_ids": ids, "labels": ids}
        if self.architecture == "T5":
            return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        return {"input_ids": ids}


def loss_of_noise(model: nn.Module) -> Callable[..., Tensor]:
    """Of a diffusion model: the mean square of what its noise is missed by."""
    return lambda target, **inputs: nn.functional.mse_loss(model(**inputs), target)


def gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads}


def decoder(width: int, layers: int, heads: int, groups: int, inner: int, head_dim: int) -> dict[str, Any]:
    """A small vocabulary: of the time, the product with it is the library's."""
    return {
        "vocab_size": 32000,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "head_dim": head_dim,
    }


def t5(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    return {"d_model": width, "d_kv": 64, "d_ff": inner, "num_layers": layers, "num_heads": heads}


def encoder_layer(width: int, heads: int, inner: int) -> dict[str, Any]:
    options = {"d_model": width, "nhead": heads, "dim_feedforward": inner, "dropout": 0.1}
    return options | {"activation": "gelu", "norm_first": False, "batch_first": True}


def decoding(width: int, heads: int, groups: int, inner: int, head_dim: int, vocabulary: int) -> dict[str, Any]:
    """Eight layers, and today's vocabulary."""
    return decoder(width, 8, heads, groups, inner, head_dim) | {"vocab_size": vocabulary}


def encoding(width: int, layers: int, heads: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512}
WHISPER = {
    f"{side}_{name}": number
    for side in ("encoder", "decoder")
    for name, number in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))
}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}

MODELS: tuple[Whole, ...] = (
    Whole("Llama, 8 layers", "cuda", "Llama", (4, 2048), decoding(2048, 32, 8, 8192, 64, 128256), CAUSAL),
    Whole("Qwen 3, 8 layers", "cuda", "Qwen3", (4, 2048), decoding(1024, 16, 8, 3072, 128, 151936), CAUSAL),
    Whole(
        "Gemma 3, 8 layers", "cuda", "Gemma3Text", (2, 2048), decoding(1152, 4, 1, 6912, 256, 262144) | GEMMA, CAUSAL
    ),
    Whole("OLMo 2, 8 layers", "cuda", "Olmo2", (4, 2048), decoding(2048, 16, 16, 8192, 128, 100352), CAUSAL),
    Whole(
        "GPT-NeoX, 8 layers", "cuda", "GPTNeoX", (8, 2048), encoding(1024, 8, 16, 4096) | {"vocab_size": 50304}, CAUSAL
    ),
    Whole("ModernBERT, 10 layers", "cuda", "ModernBert", (16, 1024), encoding(768, 10, 12, 1152), MASKED),
    Whole("ELECTRA base", "cuda", "Electra", (32, 512), encoding(768, 12, 12, 3072) | {"embedding_size": 768}, MASKED),
    Whole(
        "Whisper, 6 + 6 layers", "cuda", "Whisper", (8, 448), {"d_model": 768, **WHISPER}, "ForConditionalGeneration"
    ),
    Whole(
        "DINOv2 large, 12 layers",
        "cuda",
        "Dinov2",
        (64, 3, 224, 224),
        encoding(1024, 12, 16, 4096) | {"num_labels": 1000},
        "ForImageClassification",
    ),
    Whole(
        "DiT, 8 layers",
        "cuda",
        DIT,
        (16, 1024),
        {"width": 1152, "heads": 16, "inner": 4608, "tokens": 1024, "layers": 8},
        NOISE,
    ),
    Whole("BERT base", "cuda", "Bert", (32, 512), {}),
    Whole("RoBERTa base", "cuda", "Roberta", (32, 512), ROBERTA),
    Whole("GPT-2 medium", "cuda", "GPT2", (8, 1024), gpt2(1024, 24, 16)),
    Whole("Llama 1B", "cuda", "Llama", (4, 2048), decoder(2048, 16, 32, 8, 8192, 64)),
    Whole("Qwen3 0.6B", "cuda", "Qwen3", (4, 2048), decoder(1024, 28, 16, 8, 3072, 128)),
    Whole("T5 small", "cuda", "T5", (32, 512), t5(512, 6, 8, 2048)),
    Whole("ViT base", "cuda", "ViT", (64, 3, 224, 224), {}),
    Whole("torch.nn encoder layer", "cuda", ENCODER_LAYER, (64, 512, 1024), encoder_layer(1024, 16, 4096)),
    Whole("MiniLM", "cpu", MINILM, (8, 128), {}),
    Whole("BERT base", "cpu", "Bert", (4, 128), {}),
    Whole("RoBERTa base", "cpu", "Roberta", (4, 128), ROBERTA),
    Whole("GPT-2", "cpu", "GPT2", (1, 256), {}),
    Whole("Llama small", "cpu", "Llama", (1, 256), decoder(512, 8, 8, 2, 1408, 64)),
    Whole("Qwen3 small", "cpu", "Qwen3", (1, 256), decoder(512, 8, 8, 2, 1408, 64)),
    Whole("T5 small", "cpu", "T5", (2, 128), t5(512, 6, 8, 2048)),
    Whole("ViT base", "cpu", "ViT", (2, 3, 224, 224), {}),
    Whole("torch.nn encoder layer", "cpu", ENCODER_LAYER, (8, 128, 256), encoder_layer(256, 4, 1024)),
)

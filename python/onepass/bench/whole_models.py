"""Whole models: architectures of transformers and of PyTorch, in the sizes and shapes that are timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onepass.bench.models import network

__all__ = ["MODELS", "Whole"]

DECODERS = ("GPT2", "Llama", "Qwen3")
ENCODER_LAYER, MINILM = "TransformerEncoderLayer", "MiniLM"


@dataclass(frozen=True)
class Whole:
    """A model, and the shape of its tokens, images or hidden states.

    Attributes:
        architecture: a configuration of transformers without its "Config", a layer of torch.nn, or MiniLM, whose
            weights are real where they are installed; those of all others are random.
        options: of the configuration or the layer.
    """

    name: str
    device: str
    architecture: str
    shape: tuple[int, ...]
    options: dict[str, Any]

    @property
    def trains(self) -> bool:
        """Forward, backward, and the gradients of all parameters, under bfloat16 autocast; else inference, float32."""
        return self.device == "cuda"

    def build(self, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
        """The model, and what it is called with.

        Raises:
            ModuleNotFoundError: without transformers.
        """
        torch.manual_seed(0)
        model = network("minilm", "sdpa", device) if self.architecture == MINILM else self._random(device)
        with device:
            return model.train(self.trains), self._inputs(model)

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
        import transformers

        configuration = getattr(transformers, f"{self.architecture}Config")(**self.options)
        of = transformers.AutoModelForCausalLM if self.architecture in DECODERS else transformers.AutoModel
        kinds = {} if self.architecture == "T5" else {"attn_implementation": "sdpa"}  # T5 has its own alone
        return of.from_config(configuration, **kinds)

    def _inputs(self, model: nn.Module) -> dict[str, Any]:
        if self.architecture == ENCODER_LAYER:
            return {"src": torch.randn(self.shape)}
        if self.architecture == "ViT":
            return {"pixel_values": torch.randn(self.shape)}
        ids: Tensor = torch.randint(2, model.config.vocab_size, self.shape)  # below are paddings, which mask
        if self.architecture in DECODERS:
            return {"input_ids": ids, "use_cache": False, **({"labels": ids} if self.trains else {})}
        if self.architecture == "T5":
            return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
        return {"input_ids": ids}


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


ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}

MODELS: tuple[Whole, ...] = (
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

"""Whole models: architectures of transformers and of PyTorch, in the sizes and shapes that are timed."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from onepass.bench.architectures import BASE, floats
from onepass.bench.architectures.blocks import dit
from onepass.bench.architectures.diffusers import Flux, UNet
from onepass.bench.architectures.lora import with_lora
from onepass.bench.architectures.size import without_dropout
from onepass.bench.models import network

__all__ = ["MODELS", "ROOM", "SMALL", "Whole"]

DECODERS = ("GPT2", "Llama", "Qwen3")
ENCODER_LAYER, MINILM = "TransformerEncoderLayer", "MiniLM"
DIT, FLUX, UNET = DIFFUSION = ("DiT", "Flux", "UNet")
CAUSAL, MASKED, NOISE = "ForCausalLM", "ForMaskedLM", "mse_loss"
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Flux's attention: backward of cuDNN's fails in eager PyTorch 2.11 on an H200 ("Expected mha_graph.execute ...")."""
SEQ2SEQ, CLASSES, CONTRASTIVE = "ForConditionalGeneration", "ForImageClassification", "Model"


@dataclass(frozen=True)
class Whole:
    """A model, and the shape of its tokens, images or hidden states.

    Attributes:
        architecture: a configuration of transformers without its "Config", a layer of torch.nn, a diffusion model, or
            MiniLM, whose weights are real where they are installed; those of all others are random.
        options: of the configuration or the layer.
        head: what stands behind the architecture's name in that of its class, "ForCausalLM": a step gives the loss
            alone, and dropout is off. Its weights are bfloat16, those of others float32 under autocast.
        infers: a dtype: the model infers, on CUDA, too, its weights in this dtype. On the CPU all models infer, in
            float32 if nothing else is said.
        rank: of the adapters (LoRA) that alone are trained; none if 0.
        cached: tokens before this one, whose keys and values are in a static cache.
    """

    name: str
    device: str
    architecture: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    head: str = ""
    infers: torch.dtype | None = None
    rank: int = 0
    cached: int = 0

    @property
    def trains(self) -> bool:
        """Forward, backward, and the gradients of all parameters, in bfloat16; else inference."""
        return self.device == "cuda" and self.infers is None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of what the model takes."""
        return torch.bfloat16 if self.head else self.infers or torch.float32

    @property
    def rounds(self) -> bool:
        """Whether results are as far from those in float32 as bfloat16 is; else they are eager's but for some ULP."""
        return self.trains or self.dtype != torch.float32

    def mode(self) -> contextlib.AbstractContextManager:
        """In which the model is called."""
        if not self.trains:
            return torch.no_grad()
        if self.architecture == FLUX:
            return sdpa_kernel(WITHOUT_CUDNN)
        return contextlib.nullcontext() if self.head else torch.autocast(self.device, torch.bfloat16)

    def step(self, model: nn.Module) -> Callable[..., Any]:
        """What is called: of a model with a head a function that gives its loss alone."""
        if not self.head:
            return model
        return loss_of_noise(model) if self.head == NOISE else lambda **inputs: model(**inputs).loss

    def exact(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
        """The same in float32, to be called in no mode where it trains."""
        if self.dtype == torch.float32:
            return model, inputs
        inputs = {name: in_float32(value) if name in CACHES else value for name, value in inputs.items()}
        return copy.deepcopy(model).float(), floats(inputs, torch.float32)

    def begin(self, inputs: dict[str, Any]) -> None:
        """Takes back what calls have put into a cache."""
        for layer in (layer for name in CACHES if name in inputs for layer in inputs[name].layers):
            layer.cumulative_length.fill_(self.cached)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """This one, another batch, and another length, or a third batch where a length is the model's own. No batch is
        1, of which Dynamo makes a graph of its own."""
        batch, rest = max(self.shape[0], 2), self.shape[1:]
        fewer, third = (batch // 2, batch - 1) if batch > 3 else (batch + 1, batch + 2)  # noqa: PLR2004
        last = (third, *rest) if self.architecture in (*IMAGES, *DIFFUSION) else (batch, rest[0] // 2, *rest[1:])
        return (batch, *rest), (fewer, *rest), last

    def build(self, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
        """The model, and what it is called with.

        Raises:
            ModuleNotFoundError: without transformers.
        """
        torch.manual_seed(0)
        if self.architecture == MINILM:
            model = copy.deepcopy(network("minilm", "sdpa", device))
        else:
            model = self._random(device)
        return model.to(self.dtype).train(self.trains), self.inputs(model, device)

    def inputs(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """What a model is called with, of this shape."""
        with device:
            return floats(self._inputs(model), self.dtype)

    def _random(self, device: torch.device) -> nn.Module:
        """Biases and norms' weights, too: they begin as zeros and ones, without which a result is the same."""
        with device, torch.no_grad():
            model = self._initial()
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
            return with_lora(model, self.rank) if self.rank else model

    def _initial(self) -> nn.Module:
        if self.architecture == ENCODER_LAYER:
            return nn.TransformerEncoderLayer(**self.options)
        if self.architecture == DIT:
            return dit(replace(BASE, **self.options))[0]
        if self.architecture in DIFFUSION:
            return (Flux if self.architecture == FLUX else UNet)(**self.options)
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
        if self.architecture in DIFFUSION:
            x, noise = torch.randn(2, *self.shape, *CHANNELS[self.architecture])
            text = {} if self.architecture == DIT else {"text": torch.randn(self.shape[0], *self._words())}
            return {"x": x, "time": torch.rand(self.shape[0]), **text, **({"target": noise} if self.head else {})}
        if self.architecture in IMAGES:
            return {"pixel_values": torch.randn(self.shape), **self._beside_images(model.config)}
        if self.architecture == "Whisper":
            sound = torch.randn(self.shape[0], model.config.num_mel_bins, 2 * model.config.max_source_positions)
            ids = torch.randint(2, model.config.vocab_size, self.shape)
            return {"input_features": sound, "labels" if self.head else "decoder_input_ids": ids, "use_cache": False}
        ids: Tensor = torch.randint(2, model.config.vocab_size, self.shape)  # below are paddings, which mask
        if self.cached:
            return {"input_ids": ids, **self._cache(model)}
        if self.head == CAUSAL or self.architecture in DECODERS:
            return {"input_ids": ids, "use_cache": False, **({"labels": ids} if self.trains else {})}
        if self.architecture == "T5":
            return {"input_ids": ids, "labels" if self.head else "decoder_input_ids": ids, "use_cache": False}
        if self.head:
            return {"input_ids": ids, "labels": ids}
        return {"input_ids": ids}

    def _words(self) -> tuple[int, int]:
        """How many, and how wide: of T5 for Flux, of CLIP for a UNet."""
        return 512 if self.architecture == FLUX else 77, self.options["text_width"]

    def _beside_images(self, config: Any) -> dict[str, Any]:
        """Their classes, or a text for each."""
        if self.architecture == "CLIP":
            text = config.text_config
            ids = torch.randint(2, text.vocab_size, (self.shape[0], text.max_position_embeddings))
            return {"input_ids": ids, "return_loss": True}
        return {"labels": torch.arange(self.shape[0]) % config.num_labels} if self.head else {}

    def _cache(self, model: nn.Module) -> dict[str, Any]:
        """Random keys and values, and room for as many steps as are timed at once."""
        from transformers import StaticCache

        config = model.config
        cache = StaticCache(config=config, max_cache_len=self.cached + ROOM)
        sizes = config.num_key_value_heads, config.head_dim
        cache.early_initialization(self.shape[0], *sizes, dtype=self.dtype, device=next(model.parameters()).device)
        for layer in cache.layers:
            for states in (layer.keys, layer.values):
                states[:, :, : self.cached].normal_()
        name = next(name for name in CACHES if name in inspect.signature(model.forward).parameters)
        inputs = {name: cache}
        self.begin(inputs)
        return inputs


CACHES = ("cache", "past_key_values")
"""What models of transformers call theirs, newer and older ones."""
ROOM = 128
IMAGES = ("ViT", "Dinov2", "CLIP")
CHANNELS = {DIT: (4,), FLUX: (64,), UNET: ()}
"""Of a patch; a UNet's shape has them."""


def in_float32(cache: Any) -> Any:
    """A copy of it."""
    cache = copy.deepcopy(cache)
    for layer in cache.layers:
        layer.keys, layer.values, layer.dtype = layer.keys.float(), layer.values.float(), torch.float32
    return cache


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

WHISPER_TINY = {
    f"{side}_{name}": number
    for side in ("encoder", "decoder")
    for name, number in (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))
} | {"d_model": 384}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1408}
CLIP = {"text_config": encoding(512, 12, 8, 2048), "vision_config": {"patch_size": 16}}
MAMBA2 = {
    **{"vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 4, "num_heads": 24, "head_dim": 64},
    **{"n_groups": 1, "state_size": 64, "chunk_size": 64},
}
DIT_SIZES = {"width": 1152, "heads": 16, "inner": 4608, "tokens": 1024, "layers": 8}

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
    Whole("DiT, 8 layers", "cuda", DIT, (16, 1024), DIT_SIZES, NOISE),
    Whole(
        "Qwen 3 MoE, 6 layers",
        "cuda",
        "Qwen3Moe",
        (4, 2048),
        decoder(1024, 6, 16, 4, 3072, 64) | EXPERTS,
        CAUSAL,
    ),
    Whole("T5 base", "cuda", "T5", (16, 512), t5(768, 12, 12, 3072) | {"decoder_start_token_id": 0}, SEQ2SEQ),
    Whole("BERT base, masked words", "cuda", "Bert", (32, 512), {}, MASKED),
    Whole("ViT base, classes", "cuda", "ViT", (128, 3, 224, 224), {"num_labels": 1000}, CLASSES),
    Whole("CLIP base", "cuda", "CLIP", (128, 3, 224, 224), CLIP, CONTRASTIVE),
    Whole("UNet, 3 levels", "cuda", UNET, (8, 4, 64, 64), {"widths": (320, 640, 1280), "text_width": 768}, NOISE),
    Whole(
        "Flux, 3 + 6 layers",
        "cuda",
        FLUX,
        (4, 1024),
        {"width": 1536, "heads": 12, "joint": 3, "single": 6, "text_width": 2048},
        NOISE,
    ),
    Whole("Mamba 2, 4 layers", "cuda", "Mamba2", (2, 1024), MAMBA2, CAUSAL),
    Whole(
        "Llama with LoRA, 8 layers",
        "cuda",
        "Llama",
        (4, 2048),
        decoding(2048, 32, 8, 8192, 64, 128256),
        CAUSAL,
        rank=16,
    ),
    Whole("BERT base", "cuda", "Bert", (32, 512), {}),
    Whole("RoBERTa base", "cuda", "Roberta", (32, 512), ROBERTA),
    Whole("GPT-2 medium", "cuda", "GPT2", (8, 1024), gpt2(1024, 24, 16)),
    Whole("Llama 1B", "cuda", "Llama", (4, 2048), decoder(2048, 16, 32, 8, 8192, 64)),
    Whole("Qwen3 0.6B", "cuda", "Qwen3", (4, 2048), decoder(1024, 28, 16, 8, 3072, 128)),
    Whole("T5 small", "cuda", "T5", (32, 512), t5(512, 6, 8, 2048)),
    Whole("ViT base", "cuda", "ViT", (64, 3, 224, 224), {}),
    Whole("torch.nn encoder layer", "cuda", ENCODER_LAYER, (64, 512, 1024), encoder_layer(1024, 16, 4096)),
    Whole(
        "Llama, inference",
        "cuda",
        "Llama",
        (4, 2048),
        decoding(2048, 32, 8, 8192, 64, 128256),
        infers=torch.bfloat16,
    ),
    Whole("BERT base, inference", "cuda", "Bert", (32, 512), {}, infers=torch.bfloat16),
    Whole("ViT base, inference", "cuda", "ViT", (128, 3, 224, 224), {}, infers=torch.bfloat16),
    Whole("DiT, inference", "cuda", DIT, (16, 1024), DIT_SIZES, infers=torch.bfloat16),
    Whole("MiniLM", "cpu", MINILM, (8, 128), {}),
    Whole("BERT base", "cpu", "Bert", (4, 128), {}),
    Whole("RoBERTa base", "cpu", "Roberta", (4, 128), ROBERTA),
    Whole("GPT-2", "cpu", "GPT2", (1, 256), {}),
    Whole("Llama small", "cpu", "Llama", (1, 256), decoder(512, 8, 8, 2, 1408, 64)),
    Whole("Qwen3 small", "cpu", "Qwen3", (1, 256), decoder(512, 8, 8, 2, 1408, 64)),
    Whole("T5 small", "cpu", "T5", (2, 128), t5(512, 6, 8, 2048)),
    Whole("ViT base", "cpu", "ViT", (2, 3, 224, 224), {}),
    Whole("torch.nn encoder layer", "cpu", ENCODER_LAYER, (8, 128, 256), encoder_layer(256, 4, 1024)),
    Whole("Whisper tiny", "cpu", "Whisper", (1, 64), WHISPER_TINY),
    Whole("MiniLM, bfloat16", "cpu", MINILM, (8, 128), {}, infers=torch.bfloat16),
    Whole("BERT base, bfloat16", "cpu", "Bert", (4, 128), {}, infers=torch.bfloat16),
    Whole("ViT base, bfloat16", "cpu", "ViT", (2, 3, 224, 224), {}, infers=torch.bfloat16),
    Whole("Whisper tiny, bfloat16", "cpu", "Whisper", (1, 64), WHISPER_TINY, infers=torch.bfloat16),
)

SMALL: tuple[Whole, ...] = (
    Whole("MiniLM, one text", "cuda", MINILM, (1, 128), {}, infers=torch.bfloat16),
    Whole(
        "Llama 1B, one token",
        "cuda",
        "Llama",
        (1, 1),
        decoder(2048, 16, 32, 8, 8192, 64),
        infers=torch.bfloat16,
        cached=512,
    ),
    Whole("MiniLM, one text", "cpu", MINILM, (1, 128), {}),
    Whole("Llama small, one token", "cpu", "Llama", (1, 1), decoder(512, 8, 8, 2, 1408, 64), cached=512),
)
"""Where a step's time on a GPU is the host's: the suite "fuse_small"."""

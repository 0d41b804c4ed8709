"""Small models of transformers, with random weights and without dropout, and how a fused one is judged."""

import copy

import pytest
import torch

from onepass.rewrite import fuse as fusing

TOKENS = 24
RATIO = 1.5
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DECODER = {k: v for k, v in SMALL.items() if "dropout" not in k} | {"num_key_value_heads": 1, "attention_dropout": 0.0}
ARCHITECTURES = (
    *("bert", "roberta", "gpt2", "llama", "qwen3", "t5", "vit", "encoder_layer", "encoder_layer_norm_first"),
    *("mamba", "pegasus"),
)
"""mamba asks vmap for masks, and pegasus makes positions without gradients."""


def make(name, attention="sdpa", **changed):
    """The model in double precision, and what it is called with."""
    torch.manual_seed(3)
    if name.startswith("encoder_layer"):
        options = {"batch_first": True, "norm_first": "norm_first" in name, "activation": "gelu", "dropout": 0.0}
        return torch.nn.TransformerEncoderLayer(32, 2, 64, **(options | changed)).double(), {
            "src": torch.randn(2, 24, 32)
        }
    transformers = pytest.importorskip("transformers", reason="needs onepass[demo]")
    ids = torch.randint(2, 50, (2, TOKENS))
    tokens = {"input_ids": ids, "use_cache": False}
    configurations = {
        "bert": (transformers.BertConfig, SMALL, {"input_ids": ids, "attention_mask": _padding()}),
        "roberta": (transformers.RobertaConfig, SMALL, {"input_ids": ids}),
        "gpt2": (transformers.GPT2Config, GPT2, tokens),
        "llama": (transformers.LlamaConfig, DECODER, tokens),
        "qwen3": (transformers.Qwen3Config, DECODER | {"head_dim": 16}, tokens),
        "t5": (transformers.T5Config, T5, {**tokens, "decoder_input_ids": ids}),
        "mamba": (transformers.MambaConfig, MAMBA, tokens),
        "pegasus": (transformers.PegasusConfig, PEGASUS, {**tokens, "decoder_input_ids": ids}),
        "vit": (transformers.ViTConfig, VIT, {"pixel_values": torch.randn(2, 3, 32, 32)}),
    }
    configuration, options, inputs = configurations[name]
    options = {k: v for k, v in (options | changed).items()}
    kinds = {} if name in ("t5", "mamba") else {"attn_implementation": attention}
    return transformers.AutoModel.from_config(configuration(**options), **kinds).double(), inputs


GPT2 = {
    "vocab_size": 50,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
T5 = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
}
MAMBA = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8} | dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id"), 0
)
PEGASUS = {
    "vocab_size": 50,
    "d_model": 32,
    "max_position_embeddings": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
}
VIT = {k: v for k, v in SMALL.items() if k not in ("vocab_size", "max_position_embeddings")} | {
    "image_size": 32,
    "patch_size": 8,
}


def _padding():
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 15:] = 0
    return mask


def output(result):
    """Of what a model returns, its last hidden states, or a SentenceTransformer's embeddings."""
    if isinstance(result, dict) and "sentence_embedding" in result:
        return result["sentence_embedding"]
    return result if isinstance(result, torch.Tensor) else result[0]


def moved(inputs, dtype, device):
    """The inputs on a device, numbers in a dtype."""
    return {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype) if isinstance(v, torch.Tensor) else v
        for k, v in inputs.items()
    }


def take_every_line(monkeypatch):
    """Models of tests are small: whatever a line can say becomes one, the longest first."""
    monkeypatch.setattr(fusing, "gain_of", lambda chain, profile, training, then: float(len(chain.nodes)))
    torch._dynamo.reset()


def trained(model, inputs):
    """The result and all parameters' gradients, from random upstream gradients. Some models write into their inputs."""
    model.zero_grad()
    result = output(model(**copy.deepcopy(inputs)))
    generator = torch.Generator().manual_seed(5)
    upstream = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.device, result.dtype)
    (result * upstream).sum().backward()
    return [result.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())]


def assert_as_near(fused, eager, exact):
    """The contract, with a floor of a few units of the largest gradient: some are zero but for rounding."""
    largest = max(t.abs().max().item() for t in exact[1:])
    for i, (ours, theirs, true) in enumerate(zip(fused, eager, exact, strict=True)):
        scale = true.abs().max().item() if i == 0 else largest
        floor = 16 * torch.finfo(ours.dtype).eps * scale
        error, allowed = (ours - true).abs().max().item(), (theirs - true).abs().max().item()
        assert error <= RATIO * allowed + floor, f"tensor {i}: {error:.2e}, PyTorch's {allowed:.2e}"

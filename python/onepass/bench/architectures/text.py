"""Architectures of text: encoders, decoders, and both together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from onepass.bench.architectures.size import Built, Make, Size, mask_of_padding, tokens, transformer

__all__ = ["TEXT"]

NONE = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def encoder(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.inner,
        "max_position_embeddings": 2 * size.tokens,
    }


def decoder(size: Size) -> dict[str, Any]:
    """Two heads of queries share one of keys."""
    return encoder(size) | {"num_key_value_heads": size.heads // 2, "head_dim": size.head_dim, **NONE}


def gpt(size: Size) -> dict[str, Any]:
    sizes = {"n_embd": size.width, "n_layer": size.layers, "n_head": size.heads, "n_positions": 2 * size.tokens}
    return {"vocab_size": size.vocabulary, **sizes, **NONE}


def experts(size: Size) -> dict[str, Any]:
    """Four, of which each token takes two."""
    return decoder(size) | {"num_experts_per_tok": 2, "moe_intermediate_size": size.inner // 2}


def bart(size: Size) -> dict[str, Any]:
    both = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", size.layers), ("attention_heads", size.heads), ("ffn_dim", size.inner))
    }
    return {"d_model": size.width, "max_position_embeddings": 2 * size.tokens, **both, "pad_token_id": 1}


def t5(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "d_model": size.width,
        "d_kv": size.head_dim,
        "d_ff": size.inner,
        "num_layers": size.layers,
        "num_heads": size.heads,
    }


def encoder_inputs(size: Size, **more: Any) -> dict[str, Any]:
    """What an encoder takes: texts, of which one is padded."""
    return tokens(size, attention_mask=mask_of_padding(size), output_hidden_states=True, **more)


def decoder_inputs(size: Size) -> dict[str, Any]:
    """What a decoder takes."""
    return tokens(size, use_cache=False, output_hidden_states=True)


def seq2seq_inputs(size: Size) -> dict[str, Any]:
    return encoder_inputs(size, decoder_input_ids=tokens(size)["input_ids"], use_cache=False)


def of_encoder(name: str, attention: str | None = None, **more: Any) -> Make:
    return lambda size: transformer(name, encoder(size) | more, encoder_inputs(size), attention=attention)


def of_decoder(name: str, attention: str | None = None, **more: Any) -> Make:
    return lambda size: transformer(name, decoder(size) | more, decoder_inputs(size), attention=attention)


def of_bart(name: str) -> Make:
    def make(size: Size) -> Built:
        return transformer(name, bart(size) | {"vocab_size": size.vocabulary}, seq2seq_inputs(size))

    return make


def big_bird(size: Size) -> Built:
    """Its blocks are drawn while it trains: see `test_architectures.py`."""
    block = size.tokens // 8
    sparse = {"attention_type": "block_sparse", "block_size": block, "num_random_blocks": 1}
    return transformer("BigBird", encoder(size) | sparse, encoder_inputs(size))


def bloom(size: Size) -> Built:
    options = {"vocab_size": size.vocabulary, "hidden_size": size.width, "n_layer": size.layers, "n_head": size.heads}
    return transformer("Bloom", options, decoder_inputs(size))


def deberta(size: Size) -> Built:
    """Positions as a part of attention's scores, as version 3 has them."""
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": size.tokens // 4}
    more = {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}
    return transformer("DebertaV2", encoder(size) | relative | more, encoder_inputs(size))


def deepseek(size: Size) -> Built:
    """Latent attention; the first layer is dense, the second one has experts."""
    ranks = {"kv_lora_rank": size.width // 2, "q_lora_rank": size.width // 2}
    half = {"qk_rope_head_dim": size.head_dim // 2, "qk_nope_head_dim": size.head_dim // 2}
    routing = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    heads = {"v_head_dim": size.head_dim, "num_key_value_heads": size.heads}
    options = experts(size) | ranks | half | routing | heads
    options.pop("head_dim")
    return transformer("DeepseekV3", options, decoder_inputs(size))


def electra(size: Size) -> Built:
    return transformer("Electra", encoder(size) | {"embedding_size": size.width // 2}, encoder_inputs(size))


def falcon(size: Size) -> Built:
    options = {key: value for key, value in encoder(size).items() if key != "intermediate_size"}
    more = {"alibi": True, "parallel_attn": False, "ffn_hidden_size": size.inner, "multi_query": False, "bias": True}
    return transformer("Falcon", options | more | NONE, encoder_inputs(size, use_cache=False))


def fsmt(size: Size) -> Built:
    vocabulary = {"src_vocab_size": size.vocabulary, "tgt_vocab_size": size.vocabulary}
    return transformer("FSMT", bart(size) | vocabulary, seq2seq_inputs(size))


def funnel(size: Size) -> Built:
    sizes = {"d_model": size.width, "n_head": size.heads, "d_head": size.head_dim, "d_inner": size.inner}
    blocks = {"block_sizes": (1, 1), "num_decoder_layers": 1}
    return transformer("Funnel", {"vocab_size": size.vocabulary, **sizes, **blocks}, encoder_inputs(size))


def gpt_neo(size: Size) -> Built:
    """One layer looks at all that is before, one at a window."""
    options = {key: value for key, value in encoder(size).items() if not key.startswith("num")}
    heads = {"num_layers": size.layers, "num_heads": size.heads, "window_size": size.tokens // 4}
    kinds = {"attention_types": [[["global", "local"], size.layers // 2]]}
    return transformer("GPTNeo", options | heads | kinds | NONE, decoder_inputs(size))


def layout(size: Size) -> Built:
    corners, extents = torch.randint(0, 32, (2, size.batch, size.tokens, 2)).unbind()
    boxes = torch.cat([corners, corners + extents], -1)
    return transformer("LayoutLM", encoder(size) | {"max_2d_position_embeddings": 64}, encoder_inputs(size, bbox=boxes))


def longformer(size: Size) -> Built:
    """The first token sees all, and is seen by all."""
    everywhere = torch.zeros(size.batch, size.tokens, dtype=torch.long)
    everywhere[:, 0] = 1
    window = {"attention_window": [size.tokens // 4] * size.layers, "pad_token_id": 1}
    return transformer("Longformer", encoder(size) | window, encoder_inputs(size, global_attention_mask=everywhere))


def recurrent(size: Size) -> Size:
    """Fewer tokens, for models that loop over them: a graph has all their steps."""
    return replace(size, tokens=max(size.tokens // 8, 6))


def mamba(size: Size) -> dict[str, Any]:
    options = {"hidden_size": size.width, "num_hidden_layers": size.layers, "state_size": 8}
    return {"vocab_size": size.vocabulary, **options, **NONE}


def mamba2(size: Size) -> Built:
    heads = {"num_heads": size.heads, "head_dim": 2 * size.head_dim, "n_groups": 1, "chunk_size": size.tokens // 4}
    return transformer("Mamba2", mamba(size) | heads, decoder_inputs(size))


def mpt(size: Size) -> Built:
    options = {"d_model": size.width, "n_heads": size.heads, "n_layers": size.layers, "max_seq_len": 2 * size.tokens}
    return transformer("Mpt", {"vocab_size": size.vocabulary, **options, "expansion_ratio": 4}, decoder_inputs(size))


def opt(size: Size) -> Built:
    options = encoder(size) | {"ffn_dim": size.inner, "word_embed_proj_dim": size.width}
    return transformer("OPT", options, encoder_inputs(size, use_cache=False))


def recurrent_gemma(size: Size) -> Built:
    """One layer of each kind."""
    size = recurrent(size)
    more = {"block_types": ("recurrent", "attention"), "attention_window_size": size.tokens // 2}
    options = decoder(size) | more | {"lru_width": size.width}
    options.pop("head_dim")
    return transformer("RecurrentGemma", options, decoder_inputs(size))


def rwkv(size: Size) -> Built:
    size = recurrent(size)
    options = {"vocab_size": size.vocabulary, "hidden_size": size.width, "num_hidden_layers": size.layers}
    return transformer("Rwkv", options | {"context_length": size.tokens, "rescale_every": 0}, decoder_inputs(size))


def xglm(size: Size) -> Built:
    sizes = {"d_model": size.width, "ffn_dim": size.inner, "num_layers": size.layers, "attention_heads": size.heads}
    positions = {"max_position_embeddings": 2 * size.tokens}
    return transformer(
        "XGLM", {"vocab_size": size.vocabulary, **sizes, **positions}, encoder_inputs(size, use_cache=False)
    )


def xlnet(size: Size) -> Built:
    sizes = {"d_model": size.width, "n_layer": size.layers, "n_head": size.heads, "d_inner": size.inner}
    return transformer("XLNet", {"vocab_size": size.vocabulary, **sizes}, encoder_inputs(size))


GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "layer_types": ["sliding_attention", "full_attention"]}

TEXT: dict[str, Make] = {
    "BERT": of_encoder("Bert"),
    "ELECTRA": electra,
    "DeBERTa": deberta,
    "ModernBERT": lambda size: transformer(
        "ModernBert", encoder(size) | {"local_attention": size.tokens // 2, **NONE}, encoder_inputs(size)
    ),
    "ESM": of_encoder("Esm", position_embedding_type="rotary", pad_token_id=1, mask_token_id=2, token_dropout=True),
    "RoFormer": of_encoder("RoFormer"),
    "LayoutLM": layout,
    "Longformer": longformer,
    "BigBird": big_bird,
    "Funnel": funnel,
    "XLNet": xlnet,
    "GPT-2": lambda size: transformer("GPT2", gpt(size), decoder_inputs(size), attention="eager"),
    "GPT-Neo": gpt_neo,
    "GPT-J": lambda size: transformer("GPTJ", gpt(size) | {"rotary_dim": size.head_dim // 2}, decoder_inputs(size)),
    "GPT-NeoX": of_decoder("GPTNeoX"),
    "OPT": opt,
    "BLOOM": bloom,
    "Falcon": falcon,
    "MPT": mpt,
    "XGLM": xglm,
    "Phi": of_decoder("Phi", partial_rotary_factor=0.5),
    "Llama": of_decoder("Llama"),
    "Llama 4": lambda size: transformer(
        "Llama4Text",
        experts(size)
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": size.inner}
        | {"interleave_moe_layer_step": 2, "attention_chunk_size": size.tokens // 2, "no_rope_layers": [1, 0]},
        decoder_inputs(size),
    ),
    "Qwen 2": of_decoder("Qwen2"),
    "Qwen 3": of_decoder("Qwen3", attention="eager"),
    "Qwen 3 MoE": lambda size: transformer("Qwen3Moe", experts(size) | {"num_experts": 4}, decoder_inputs(size)),
    "Mixtral": lambda size: transformer("Mixtral", experts(size) | {"num_local_experts": 4}, decoder_inputs(size)),
    "GPT-OSS": lambda size: transformer(
        "GptOss", experts(size) | {"num_local_experts": 4, "sliding_window": size.tokens // 2}, decoder_inputs(size)
    ),
    "DeepSeek V3": deepseek,
    "Gemma 2": lambda size: transformer(
        "Gemma2", decoder(size) | GEMMA | {"sliding_window": size.tokens // 2}, decoder_inputs(size), attention="eager"
    ),
    "Gemma 3": lambda size: transformer(
        "Gemma3Text",
        decoder(size) | GEMMA | {"sliding_window": size.tokens // 2},
        decoder_inputs(size),
        "Gemma3TextModel",
    ),
    "OLMo 2": of_decoder("Olmo2"),
    "Cohere": of_decoder("Cohere", use_qk_norm=True),
    "GLM-4": of_decoder("Glm4"),
    "Mamba": lambda size: transformer("Mamba", mamba(size), decoder_inputs(recurrent(size))),
    "Mamba 2": mamba2,
    "RWKV": rwkv,
    "RecurrentGemma": recurrent_gemma,
    "T5": lambda size: transformer("T5", t5(size), seq2seq_inputs(size)),
    "mT5": lambda size: transformer("MT5", t5(size) | {"feed_forward_proj": "gated-gelu"}, seq2seq_inputs(size)),
    "BART": of_bart("Bart"),
    "Pegasus": of_bart("Pegasus"),
    "Marian": of_bart("Marian"),
    "FSMT": fsmt,
}

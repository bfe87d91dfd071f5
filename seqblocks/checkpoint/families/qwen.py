"""Qwen3-Next and Qwen3.5 from the config.json of transformers."""

from __future__ import annotations

from seqblocks.checkpoint.families.layers import TYPES, decoder, gated_network, layer_map, layer_types
from seqblocks.checkpoint.families.text import language
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    numbers,
    require,
    rotary,
    rotated,
    std_of,
    whole,
    whole_or,
    written,
)


def qwen3_next(config: Config) -> str:
    """Write a Qwen3-Next language model.

    Its layers have Gated DeltaNet or gated attention, and dense or mixture-of-experts networks.
    """
    require(config, attention_bias=False)
    layers = [
        word + ("_experts" if _is_sparse(config, at) else "") for at, word in enumerate(_mixers(config))
    ]
    return _written(config, "Qwen3-Next language model", layers)


def qwen3_5_text(config: Config) -> str:
    """Write the language model of Qwen3.5, whose networks are dense.

    Its rotary positions have parts for the rows and columns of images, which are all equal for text.
    """
    require(config, attention_bias=False, attn_output_gate=(True, None))
    return _written(config, "Qwen3.5 language model", _mixers(config))


def _mixers(config: Config) -> list[str]:
    """Return the kind of each layer's mixer."""
    interval = whole_or(config, "full_attention_interval", 4)
    types = layer_types(config, [TYPES[(at + 1) % interval == 0] for at in range(depth_of(config))])
    return ["memory" if kind == TYPES[0] else "attention" for kind in types]


def _written(config: Config, about: str, layers: list[str]) -> str:
    eps = above_0(config, "rms_norm_eps", 1e-6)
    kinds = {word: _layer(config, word, eps) for word in dict.fromkeys(layers)}
    names = layer_map(
        kinds,
        ("input_layernorm", "post_attention_layernorm"),
        {"gated_deltanet_mixer": "linear_attn", "gated_attention_mixer": "self_attn"},
        {"swiglu": "mlp", "sparse_network": "mlp"},
    )
    model = language(config, about, ["deltanet", "attention", "hybrids"], eps, gain="one_plus")
    return model.text(layers, kinds, names)


def _is_sparse(config: Config, layer: int) -> bool:
    step = whole(config, "decoder_sparse_step", 1)
    listed = layer in numbers(config, "mlp_only_layers")
    return not listed and whole(config, "num_experts", 512, least=0) > 0 and (layer + 1) % step == 0


def _layer(config: Config, word: str, eps: float) -> str:
    mixer = _memory(config, eps) if word.startswith("memory") else _attention(config, eps)
    network = _experts(config) if word.endswith("experts") else gated_network(config)
    return decoder(mixer, network, eps, "one_plus")


def _memory(config: Config, eps: float) -> str:
    head = whole(config, "linear_key_head_dim", 128)
    arguments = {
        "heads": whole(config, "linear_num_key_heads", 16),
        "value_heads": whole(config, "linear_num_value_heads", 32),
        "head": head,
        "expand_v": whole(config, "linear_value_head_dim", 128) / head,
        "kernel": whole(config, "linear_conv_kernel_dim", 4),
        "eps": eps,
        "std": std_of(config),
        "A_min": 0.01,
        "dt_random": False,
    }
    return f"gated_deltanet_mixer: {{dim: dim, {written(arguments)}}}"


def _attention(config: Config, eps: float) -> str:
    head, (base, part) = whole(config, "head_dim", 256), rotary(config, 0.25)
    arguments = {
        "heads": whole(config, "num_attention_heads"),
        "kv_heads": whole(config, "num_key_value_heads"),
        "head": head,
        "turned": rotated(head, part),
        "rotary": base,
        "eps": eps,
        "std": std_of(config),
    }
    return f"gated_attention_mixer: {{dim: dim, cache: cache, {written(arguments)}}}"


def _experts(config: Config) -> str:
    require(config, hidden_act="silu")
    arguments = {
        "experts": whole(config, "num_experts", 512),
        "top": whole(config, "num_experts_per_tok", 10),
        "hidden": whole(config, "moe_intermediate_size", 512),
        "shared": whole(config, "shared_expert_intermediate_size", 512),
        "normalize": flag(config, "norm_topk_prob", True),
        "std": std_of(config),
    }
    return f"sparse_network: {{dim: dim, {written(arguments)}}}"

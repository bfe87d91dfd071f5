"""Kimi Linear from the config.json of transformers and of its releases."""

from __future__ import annotations

from seqblocks.checkpoint.families.layers import TYPES, decoder, gated_network, layer_map, layer_types
from seqblocks.checkpoint.families.text import language, swiglu
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    follows,
    mapping,
    number,
    numbers,
    require,
    std_of,
    whole,
    whole_or,
    words,
    written,
)
from seqblocks.errors import UsageError

NETWORKS = ("dense", "sparse")


def kimi_linear(config: Config) -> str:
    """Write a Kimi Linear language model.

    Its layers have Kimi Delta Attention or latent attention, and dense or mixture-of-experts networks.
    """
    require(config, hidden_act="silu", num_expert_group=(1, None), topk_group=(1, None), mla_use_nope=True)
    require(config, moe_router_activation_func="sigmoid", moe_layer_freq=1, topk_method="noaux_tc")
    eps, linear = above_0(config, "rms_norm_eps", 1e-5), mapping(config, "linear_attn_config")
    layers = [
        ("memory" if kind == TYPES[0] else "attention") + ("_experts" if network == "sparse" else "")
        for kind, network in zip(_types(config, linear), _networks(config), strict=True)
    ]
    kinds = {word: _layer(config, word, linear, eps) for word in dict.fromkeys(layers)}
    names = layer_map(
        kinds,
        ("input_layernorm", "post_attention_layernorm"),
        {"kda_mixer": "self_attn", "latent_attention_mixer": "self_attn"},
        {"swiglu": "mlp", "corrected_network": "block_sparse_moe"},
    )
    if "mlp" in names:  # transformers saves dense networks under the name of the mixture of experts, too
        lines = swiglu("layers.{layer}.decoder_layer.channel.network.swiglu", "model.layers.{layer}.block_sparse_moe")
        names += "layouts:\n  transformers:\n" + "".join(f"    {line}\n" for line in lines.splitlines())
    model = language(config, "Kimi Linear language model", ["kda", "attention", "hybrids"], eps)
    return model.text(layers, kinds, names)


def _types(config: Config, linear: Config) -> list[str]:
    """Return the kind of each layer; the lists in releases count layers from 1."""
    depth, full = depth_of(config), numbers(linear, "full_attn_layers")
    usual = [TYPES[bool(at and at % 4 == 0)] for at in range(depth)]
    if full and config.get("layer_types") is None:
        usual = [TYPES[at + 1 in full] for at in range(depth)]
    return layer_types(config, usual)


def _networks(config: Config) -> list[str]:
    depth = depth_of(config)
    if config.get("mlp_layer_types") is not None:
        found = words(config, "mlp_layer_types", NETWORKS)
        if len(found) != depth:
            raise UsageError(f"config.json: mlp_layer_types has {len(found)} entries, but num_hidden_layers is {depth}")
        return found
    dense = whole(config, "first_k_dense_replace", 1, least=0)
    return [NETWORKS[at >= dense] for at in range(depth)]


def _layer(config: Config, word: str, linear: Config, eps: float) -> str:
    mixer = _memory(config, linear, eps) if word.startswith("memory") else _attention(config)
    return decoder(mixer, _experts(config) if word.endswith("experts") else gated_network(config), eps)


def _memory(config: Config, linear: Config, eps: float) -> str:
    """Return the step of Kimi Delta Attention. linear: the mapping in which releases store its sizes."""

    def size(theirs: str, name: str, default: int) -> int:
        return whole(linear, theirs) if theirs in linear else whole(config, name, default)

    arguments = {
        "heads": size("num_heads", "linear_num_heads", 32),
        "head": size("head_dim", "linear_head_dim", 128),
        "kernel": size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        "gate_bias": False,
        "eps": eps,
        "std": std_of(config),
    }
    return f"kda_mixer: {{dim: dim, {written(arguments)}}}"


def _attention(config: Config) -> str:
    head, common = whole(config, "qk_nope_head_dim", 128), whole(config, "qk_rope_head_dim", 64)
    follows(config, "qk_head_dim", head + common, "qk_nope_head_dim + qk_rope_head_dim")
    arguments = {
        "heads": whole(config, "num_attention_heads"),
        "head": head,
        "common": common,
        "value": whole_or(config, "v_head_dim", 128),
        "rank": whole(config, "kv_lora_rank", 512),
        "q_rank": whole_or(config, "q_lora_rank", 0),
        "bias": flag(config, "attention_bias", False),
        "std": std_of(config),
    }
    return f"latent_attention_mixer: {{dim: dim, cache: cache, {written(arguments)}}}"


def _experts(config: Config) -> str:
    each, count = whole(config, "moe_intermediate_size", 1024), whole_or(config, "num_shared_experts", 1)
    arguments = {
        "experts": whole(config, "num_experts", 256),
        "top": whole(config, "num_experts_per_token"),
        "hidden": each,
        "shared": each * count,
        "normalize": flag(config, "moe_renormalize", True),
        "factor": number(config, "routed_scaling_factor", 2.446),
        "std": std_of(config),
    }
    return f"corrected_network: {{{written(arguments)}}}"

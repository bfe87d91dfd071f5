"""DeepSeek-V2 and -V3 from the config.json of transformers: latent attention, and experts chosen in groups."""

from __future__ import annotations

import math

from seqblocks.checkpoint.families.layers import decoder, gated_network, layer_map, used
from seqblocks.checkpoint.families.rope import rope, scaling_of
from seqblocks.checkpoint.families.text import language
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    check_choice,
    depth_of,
    flag,
    number,
    require,
    std_of,
    whole,
    whole_or,
    written,
)

GROUPED, GREEDY = "group_limited_greedy", "greedy"


def deepseek_v2(config: Config) -> str:
    """Write a DeepSeek-V2 language model (arXiv:2405.04434)."""
    require(config, mlp_bias=(False, None), topk_method=(GREEDY, GROUPED, None), norm_topk_prob=(False, None))
    grouped = config.get("topk_method") == GROUPED
    experts: dict[str, float | str] = {"score": "softmax"}
    if grouped:
        experts |= {"groups": whole(config, "n_group"), "top_groups": whole(config, "topk_group")}
    return _deepseek(config, "DeepSeek-V2", experts, (64, 2, 1407, 1.0, 0))


def deepseek_v3(config: Config) -> str:
    """Write a DeepSeek-V3 language model (arXiv:2412.19437), without the layers that predict further tokens."""
    require(config, rope_interleave=(True, None))
    experts: dict[str, float | str] = {
        "score": "sigmoid", "corrected": True, "normalize": flag(config, "norm_topk_prob", True),
        "groups": whole_or(config, "n_group", 8), "top_groups": whole_or(config, "topk_group", 4),
    }  # fmt: skip
    return _deepseek(config, "DeepSeek-V3", experts, (256, 1, 2048, 2.5, 3))


def _deepseek(
    config: Config, name: str, experts: dict[str, float | str], usual: tuple[int, int, int, float, int]
) -> str:
    """usual: the experts, the shared ones, the width of one, the factor of their sum, and the dense layers at first."""
    require(config, hidden_act="silu")
    count, shared, each, factor, first = usual
    eps, depth = above_0(config, "rms_norm_eps", 1e-6), depth_of(config)
    width = whole(config, "moe_intermediate_size", each)
    dense = whole(config, "first_k_dense_replace", first, least=0)
    layers = ["dense" if at < dense else "sparse" for at in range(depth)]
    sparse = {
        "experts": whole(config, "n_routed_experts", count), "top": whole_or(config, "num_experts_per_tok", 8),
        "hidden": width, "shared": width * whole(config, "n_shared_experts", shared),
        "factor": number(config, "routed_scaling_factor", factor), "std": std_of(config), **experts,
    }  # fmt: skip
    check_choice(sparse, "experts")
    mixer = _attention(config)
    kinds = used(
        {
            "dense": decoder(mixer, gated_network(config), eps),
            "sparse": decoder(mixer, f"grouped_network: {{{written(sparse)}}}", eps),
        },
        layers,
    )
    names = layer_map(
        kinds, ("input_layernorm", "post_attention_layernorm"), {"latent_attention_mixer": "self_attn"},
        {"swiglu": "mlp", "grouped_network": "mlp"},
    )  # fmt: skip
    model = language(config, f"{name} language model", ["attention", "hybrids"], eps)
    return model.text(layers, kinds, names)


def _attention(config: Config) -> str:
    """Return the mixer. transformers gives its two norms the default epsilon, whatever the config says."""
    head, common = whole(config, "qk_nope_head_dim", 128), whole(config, "qk_rope_head_dim", 64)
    q_rank = config.get("q_lora_rank", 1536)
    arguments = {
        "heads": whole(config, "num_attention_heads"), "head": head, "common": common,
        "value": whole_or(config, "v_head_dim", 128), "rank": whole(config, "kv_lora_rank", 512),
        "q_rank": 0 if q_rank is None else whole(config, "q_lora_rank", 1536), "rotary": rope(config, common).base,
        "bias": flag(config, "attention_bias", False), "std": std_of(config), "compressed": True,
    }  # fmt: skip
    scaling = scaling_of(config)
    text = written(arguments)
    if scaling:
        text += f", scaling: {scaling.text}"
        if growth := scaling.entries.get("mscale_all_dim"):
            grown = 0.1 * float(growth) * math.log(float(scaling.entries["factor"])) + 1
            text += f", scale: {grown * grown / math.sqrt(head + common)!r}"
    return f"latent_attention_mixer: {{dim: dim, cache: cache, {text}}}"

"""Jamba and Bamba from the config.json of transformers: attention layers between layers of Mamba or Mamba-2."""

from __future__ import annotations

from seqblocks.checkpoint.families.layers import decoder, gated_network, layer_map, used
from seqblocks.checkpoint.families.mamba import limits
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    follows,
    head_of,
    number,
    numbers,
    rank,
    require,
    rotary,
    rotated,
    shared_heads,
    std_of,
    whole,
    written,
)
from seqblocks.errors import UsageError

NORMS = ("input_layernorm", "pre_ff_layernorm")
NAMES = ("model.embed_tokens", "model.final_layernorm")


def jamba(config: Config) -> str:
    """Write a Jamba language model: Mamba and attention, with dense or mixture-of-experts networks."""
    require(config, use_mambapy=(False, True, None), mamba_inner_layernorms=True)
    eps, count = above_0(config, "rms_norm_eps", 1e-6), whole(config, "num_experts", 16)
    mixers = {"mamba": _mamba(config, eps), "attention": _attention(config)}
    layers = [
        ("attention" if _is_of_kind(config, "attn", at, 8, 4) else "mamba")
        + ("_experts" if count > 1 and _is_of_kind(config, "expert", at, 2, 1) else "")
        for at in range(depth_of(config))
    ]
    network = gated_network(config)
    top = whole(config, "num_experts_per_tok", 2)
    router = f'init: {{router.weight: "{normal(std_of(config))}"}}'
    experts = f"experts: {{count: {count}, top: {top}, normalize: false, {router}, steps: [{{{network}}}]}}"
    kinds = {
        word: decoder(mixers[word.split("_")[0]], experts if word.endswith("experts") else network, eps)
        for word in dict.fromkeys(layers)
    }
    names = layer_map(
        kinds, NORMS, {"mamba_mixer": "mamba", "attention_mixer": "self_attn"},
        {"swiglu": "feed_forward", "experts": "feed_forward"},
    )  # fmt: skip
    model = language(config, "Jamba language model", ["mamba", "attention", "hybrids"], eps)
    return model._replace(names=NAMES).text(layers, kinds, names)


def _is_of_kind(config: Config, kind: str, layer: int, period: int, offset: int) -> bool:
    first = whole(config, f"{kind}_layer_offset", offset, least=0)
    return layer % whole(config, f"{kind}_layer_period", period) == first


def _mamba(config: Config, eps: float) -> str:
    arguments = {
        "state": whole(config, "mamba_d_state", 16),
        "expand": number(config, "mamba_expand", 2),
        "kernel": whole(config, "mamba_d_conv", 4),
        "rank": rank(config, "mamba_dt_rank"),
        "bias": flag(config, "mamba_proj_bias", False),
        "conv_bias": flag(config, "mamba_conv_bias", True),
        "norms": True,
        "eps": eps,
        "std": std_of(config),
        "std_all": True,
    }
    return f"mamba_mixer: {{dim: dim, layers: layers, {written(arguments)}}}"


def _attention(config: Config, **more: float) -> str:
    head_of(config)
    heads = whole(config, "num_attention_heads")
    shared = shared_heads(config, heads, absent=8)
    arguments = {"heads": heads, "kv_heads": shared, **more, "std": std_of(config)}
    return f"attention_mixer: {{dim: dim, cache: cache, {written(arguments)}}}"


def bamba(config: Config) -> str:
    """Write a Bamba language model: Mamba-2 and attention, a dense network after each."""
    eps, (base, part) = above_0(config, "rms_norm_eps", 1e-5), rotary(config, 0.5, share_at_the_top=False)
    bias, turned = flag(config, "attention_bias", False), rotated(head_of(config), part)
    follows(config, "attn_rotary_emb", turned, "the features of a head that are rotated")
    attention = _attention(config, rotary=base, turned=turned, bias=bias, bias_out=bias)
    listed = numbers(config, "attn_layer_indices")
    layers = ["attention" if at in listed else "mamba2" for at in range(depth_of(config))]
    wide = flag(config, "mlp_bias", False)
    network = gated_network(config, wide)
    kinds = used(
        {
            "mamba2": decoder(mamba2_mixer(config, eps), network, eps),
            "attention": decoder(attention, network, eps),
        },
        layers,
    )
    mixers = {"mamba2_mixer": "mamba", "attention_mixer": "self_attn"}
    names = layer_map(kinds, NORMS, mixers, {"swiglu": "feed_forward"}, bias=wide)
    model = language(config, "Bamba language model", ["mamba2", "attention", "hybrids"], eps)
    return model._replace(names=NAMES).text(layers, kinds, names)


def mamba2_mixer(config: Config, eps: float) -> str:
    """Return the step of a Mamba-2 mixer as YAML, with the entries of Bamba's config."""
    require(config, hidden_act="silu")
    inner = whole(config, "mamba_expand", 2) * whole(config, "hidden_size")
    heads = whole(config, "mamba_n_heads", 128)
    head = inner // heads if config.get("mamba_d_head") in (None, "auto") else whole(config, "mamba_d_head")
    if heads * head != inner:
        raise UsageError(
            f"config.json: mamba_n_heads * mamba_d_head is {heads * head}, but mamba_expand * hidden_size is {inner}"
        )
    arguments = {
        "state": whole(config, "mamba_d_state", 256),
        "expand": whole(config, "mamba_expand", 2),
        "head": head,
        "groups": whole(config, "mamba_n_groups", 1),
        "kernel": whole(config, "mamba_d_conv", 4),
        "bias": flag(config, "mamba_proj_bias", False),
        "conv_bias": flag(config, "mamba_conv_bias", True),
        "eps": eps,
        **limits(config),
        "dt_random": False,
        "A_random": False,
        "std": std_of(config),
        "std_all": True,
    }
    return f"mamba2_mixer: {{dim: dim, layers: layers, {written(arguments)}}}"

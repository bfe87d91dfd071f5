"""Falcon-H1 from the config.json of transformers: Mamba-2 and attention side by side, with multipliers everywhere."""

from __future__ import annotations

import math

from seqblocks.checkpoint.families.dense import Decoder, decoder, in_float32, residual
from seqblocks.checkpoint.families.layers import OFFICIAL
from seqblocks.checkpoint.families.mamba import limits
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, scaled
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    multipliers,
    number,
    require,
    scalar,
    std_of,
    whole,
    words,
    written,
)
from seqblocks.errors import UsageError

PARTS = ("z_scale", "x_scale", "B_scale", "C_scale", "dt_scale")  # the order of `ssm_multipliers`


def falcon_h1(config: Config) -> str:
    """Write a Falcon-H1 language model (arXiv:2507.22448)."""
    require(config, hidden_act="silu", mamba_use_mlp=(True, None), attn_layer_indices=(None,))
    if config.get("layers_block_type") is not None:
        words(config, "layers_block_type", ("hybrid",))
    parts, depth = _decoder(config), depth_of(config)
    eps = scalar(parts.eps)
    mix = [f"- rms_norm: {{eps: {eps}, name: norm}}", *_both(_memory(config, parts.eps), _attention(config, parts))]
    network = [f"- rms_norm: {{eps: {eps}, name: norm, as: read}}", *_network(config, parts)]
    model = language(config, "Falcon-H1 language model", ["mamba2"], parts.eps)._replace(
        names=("model.embed_tokens", "model.final_layernorm"),
        before=scaled(number(config, "embedding_multiplier", 1.0), "embedded"),
        after=scaled(number(config, "lm_head_multiplier", 1.0), "scaled"),
    )
    kinds = {"hybrid": f"{residual('mix', mix)}\n{residual('mlp', network)}"}
    return model.text(["hybrid"] * depth, kinds, "\n".join(_names(parts)) + "\n")


def _decoder(config: Config) -> Decoder:
    bias = flag(config, "attention_bias", False)
    parts = decoder(config, 8, eps=1e-5)
    scale = above_0(config, "key_multiplier") / math.sqrt(parts.head)
    return parts._replace(bias=bias, bias_out=bias, bias_network=flag(config, "mlp_bias", False), scale=scale)


def _both(memory: list[str], attention: list[str]) -> list[str]:
    """Return a step whose branches are Mamba-2 and attention."""
    lines = ["- parallel:", "    name: both", "    branches:"]
    for name, steps in (("mamba", memory), ("attention", attention)):
        lines += [f"      - {name}:", *(f"          {step}" for step in steps)]
    return lines


def _scale(config: Config, key: str, name: str) -> list[str]:
    step = scaled(number(config, key, 1.0), name)
    return [step] if step else []


def _memory(config: Config, eps: float) -> list[str]:
    dim, groups = whole(config, "hidden_size"), whole(config, "mamba_n_groups", 1)
    inner = whole(config, "mamba_expand", 2) * dim
    inner = inner if config.get("mamba_d_ssm", 1024) is None else whole(config, "mamba_d_ssm", 1024)
    heads = whole(config, "mamba_n_heads", 128)
    head = inner // heads if config.get("mamba_d_head") in (None, "auto") else whole(config, "mamba_d_head")
    if heads * head != inner:
        raise UsageError(f"config.json: mamba_n_heads * mamba_d_head is {heads * head}, but mamba_d_ssm is {inner}")
    factors = [in_float32(each) for each in multipliers(config, "ssm_multipliers", len(PARTS))]
    normed = flag(config, "mamba_rms_norm", False)
    arguments: dict[str, float | str] = {
        "state": whole(config, "mamba_d_state", 256), "expand": _expansion(inner, dim), "head": head, "groups": groups,
        "kernel": whole(config, "mamba_d_conv", 4), "bias": flag(config, "mamba_proj_bias", False),
        "bias_out": flag(config, "projectors_bias", False), "conv_bias": flag(config, "mamba_conv_bias", True),
        "norm": normed, "gate": "after" if flag(config, "mamba_norm_before_gate", True) else "before", "eps": eps,
        **limits(config), **{name: by for name, by in zip(PARTS, factors, strict=True) if by != 1.0},
        "dt_random": False, "A_random": False, "std": std_of(config), "std_all": True,
    }  # fmt: skip
    mixer = f"- mamba2_mixer: {{dim: dim, layers: layers, {written(arguments)}}}"
    return [*_scale(config, "ssm_in_multiplier", "scaled"), mixer, *_scale(config, "ssm_out_multiplier", "scaled_out")]


def _expansion(inner: int, dim: int) -> float:
    """Return the least factor of dim whose product is not below `inner`."""
    expand = inner / dim
    return expand if math.floor(expand * dim) == inner else math.nextafter(expand, math.inf)


def _attention(config: Config, parts: Decoder) -> list[str]:
    steps = parts.attention_steps(rope(config, parts.head), 0)
    return [
        *_scale(config, "attention_in_multiplier", "scaled"), "- identity: {as: read}", *steps,
        *_scale(config, "attention_out_multiplier", "scaled_out"),
    ]  # fmt: skip


def _network(config: Config, parts: Decoder) -> list[str]:
    """Return the steps of the gated network, whose gate and result are multiplied."""
    gate, down = multipliers(config, "mlp_multipliers", 2)
    return [
        parts.linear(parts.hidden, parts.bias_network, "gate_proj", "from: read, "),
        *[scaled(gate, "scaled")] * (gate != 1.0),
        "- identity: {as: gate}",
        parts.linear(parts.hidden, parts.bias_network, "up_proj", "from: read, "),
        "- gate: {by: gate, activation: silu}",
        parts.linear("dim", parts.bias_network, "down_proj"),
        *[scaled(down, "scaled_out")] * (down != 1.0),
    ]


def _names(parts: Decoder) -> list[str]:
    ours = "layers.{layer}"
    both, network = f"{ours}.mix.both", f"{ours}.mlp"
    return [
        f"{ours}.mix.norm: {OFFICIAL}.input_layernorm",
        f"{both}.mamba.mamba2_mixer: {OFFICIAL}.mamba",
        *(f"{both}.attention.{name}: {OFFICIAL}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        f"{network}.norm: {OFFICIAL}.pre_ff_layernorm",
        *(f"{network}.{name}: {OFFICIAL}.feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ]

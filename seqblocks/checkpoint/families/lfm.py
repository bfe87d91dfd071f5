"""LFM2 from the config.json of transformers: gated short convolutions between layers of attention."""

from __future__ import annotations

from seqblocks.checkpoint.families.dense import Decoder, Names, residual
from seqblocks.checkpoint.families.layers import OFFICIAL, used
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    depth_of,
    flag,
    number,
    numbers,
    scalar,
    std_of,
    whole,
    whole_or,
    words,
)
from seqblocks.errors import UsageError

CONV, ATTENTION = "conv", "full_attention"
NAMES = Names(
    out="out_proj", norms=("q_layernorm", "k_layernorm"), network="feed_forward", gated=("w1", "w3", "w2")
)  # fmt: skip


def lfm2(config: Config) -> str:
    """Write an LFM2 language model (arXiv:2511.23404)."""
    dim, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    eps = number(config, "norm_eps", 1e-5)
    head = whole_or(config, "head_dim", dim // heads)
    parts = Decoder(
        dim, heads, whole_or(config, "num_key_value_heads", 8), head, _hidden(config), eps, std_of(config),
        each_head=True, before=("operator_norm", "ffn_norm"), official=NAMES,
    )  # fmt: skip
    depth = depth_of(config)
    listed = [*range(depth)] if config.get("full_attn_idxs") is None else numbers(config, "full_attn_idxs")
    usual = [ATTENTION if at in listed else CONV for at in range(depth)]
    layers = usual if config.get("layer_types") is None else words(config, "layer_types", (CONV, ATTENTION))
    if len(layers) != depth:
        raise UsageError(f"config.json: layer_types has {len(layers)} entries, but num_hidden_layers is {depth}")
    kinds = {
        CONV: f"{_convolution(config, parts)}\n{parts.network()}",
        ATTENTION: parts.layer(rope(config, head, 1000000.0)),
    }
    names = [line for line in parts.names().splitlines() if ATTENTION in layers or ".attention." not in line]
    if CONV in layers:
        ours, theirs = "layers.{layer}.conv", f"{OFFICIAL}.conv"
        names += [f"{ours}.norm: {OFFICIAL}.operator_norm", f"{ours}.conv: {theirs}.conv"]
        names += [f"{ours}.{name}: {theirs}.{name}" for name in ("in_proj", "out_proj")]
    model = language(config, "LFM2 language model", [], eps, tied=True)
    model = model._replace(names=("model.embed_tokens", "model.embedding_norm"))
    words_of = {CONV: "conv", ATTENTION: "full"}
    kinds = {words_of[kind]: text for kind, text in used(kinds, layers).items()}
    return model.text([words_of[kind] for kind in layers], kinds, "\n".join(names) + "\n")


def _hidden(config: Config) -> int:
    """Return the width of the networks, which the config may describe by a factor and a multiple."""
    hidden = whole(config, "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim")
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), whole(config, "block_multiple_of", 256)
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return hidden
    hidden = int(2 * hidden / 3)
    if factor is not None:
        hidden = -(-int(number(config, "block_ffn_dim_multiplier", 1.0) * hidden) // multiple) * multiple
    if hidden < 1:
        raise UsageError(f"config.json: the networks have {hidden} features")
    return hidden


def _convolution(config: Config, parts: Decoder) -> str:
    bias, kernel = flag(config, "conv_bias", False), whole(config, "conv_L_cache", 3)
    drawn = f'bias: {scalar(bias)}, init: {{weight: "{normal(parts.std)}"{", bias: zeros" if bias else ""}}}'
    return residual("conv", [
        f"- rms_norm: {{gain: plain, eps: {scalar(parts.eps)}, name: norm}}",
        f"- linear: {{features: 3 * dim, {drawn}, name: in_proj, as: [b, c, x]}}",
        "- multiply: {from: x, by: b}",
        f"- causal_conv: {{kernel: {kernel}, activation: none, bias: {scalar(bias)}, name: conv}}",
        "- multiply: {by: c}",
        f"- linear: {{features: dim, {drawn}, name: out_proj}}",
    ])  # fmt: skip

"""LFM2 from the config.json of transformers: gated short convolutions between layers of attention."""

from __future__ import annotations

from seqblocks.checkpoint.families.dense import Decoder, Experts, Names, residual
from seqblocks.checkpoint.families.layers import OFFICIAL, used
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    number,
    numbers,
    require,
    scalar,
    std_of,
    whole,
    whole_or,
    words,
)
from seqblocks.errors import UsageError

CONV, ATTENTION = "conv", "full_attention"
WORDS = {CONV: "conv", ATTENTION: "full"}  # our words for the kinds of layers
NAMES = Names(
    out="out_proj", norms=("q_layernorm", "k_layernorm"), network="feed_forward", gated=("w1", "w3", "w2"),
    experts="feed_forward",
)  # fmt: skip


def lfm2(config: Config) -> str:
    """Write an LFM2 language model (arXiv:2511.23404)."""
    parts, types = _decoder(config, _hidden(config)), _types(config)
    mixers = _mixers(config, parts)
    kinds = {WORDS[kind]: f"{mixers[kind]}\n{parts.network()}" for kind in types}
    return _written(config, "LFM2 language model", parts, [WORDS[kind] for kind in types], kinds, parts.names())


def lfm2_moe(config: Config) -> str:
    """Write an LFM2 language model with experts in all layers but the first ones (arXiv:2511.23404)."""
    require(config, head_dim=(None,))
    parts, types = _decoder(config, whole(config, "intermediate_size", 7168)), _types(config)
    corrected, mixers = flag(config, "use_expert_bias", True), _mixers(config, parts)
    experts = Experts(
        whole(config, "num_experts", 32), whole(config, "num_experts_per_tok", 4),
        whole(config, "moe_intermediate_size", 1792), flag(config, "norm_topk_prob", True),
        number(config, "routed_scaling_factor", 1.0), f", eps: 1e-6, score: sigmoid, corrected: {scalar(corrected)}",
    )  # fmt: skip
    dense = whole(config, "num_dense_layers", 2, least=0)
    layers = [WORDS[kind] + ("_experts" if at >= dense else "") for at, kind in enumerate(types)]
    networks = {False: parts.network(), True: parts.network(experts)}
    kinds = {
        WORDS[kind] + ("_experts" if sparse else ""): f"{mixers[kind]}\n{network}"
        for kind in mixers for sparse, network in networks.items()
    }  # fmt: skip
    names = parts.names(dense > 0, dense < len(layers))
    if corrected and dense < len(layers):
        names += f"layers.{{layer}}.mlp.experts.router.correction: {OFFICIAL}.feed_forward.expert_bias\n"
    return _written(config, "LFM2 language model with experts", parts, layers, kinds, names)


def _decoder(config: Config, hidden: int) -> Decoder:
    dim, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    return Decoder(
        dim, heads, whole_or(config, "num_key_value_heads", 8), whole_or(config, "head_dim", dim // heads), hidden,
        above_0(config, "norm_eps", 1e-5), std_of(config), each_head=True, before=("operator_norm", "ffn_norm"),
        official=NAMES,
    )  # fmt: skip


def _types(config: Config) -> list[str]:
    """Return the kind of each layer's mixer."""
    depth = depth_of(config)
    listed = [*range(depth)] if config.get("full_attn_idxs") is None else numbers(config, "full_attn_idxs")
    usual = [ATTENTION if at in listed else CONV for at in range(depth)]
    types = usual if config.get("layer_types") is None else words(config, "layer_types", (CONV, ATTENTION))
    if len(types) != depth:
        raise UsageError(f"config.json: layer_types has {len(types)} entries, but num_hidden_layers is {depth}")
    return types


def _mixers(config: Config, parts: Decoder) -> dict[str, str]:
    """Return the steps of each kind of mixer."""
    rotary = rope(config, parts.head, 1000000.0)
    return {CONV: _convolution(config, parts), ATTENTION: parts.attention(rotary, 0)}


def _written(
    config: Config, about: str, parts: Decoder, layers: list[str], kinds: dict[str, str], names: str
) -> str:  # fmt: skip
    has = {word: any(layer.startswith(word) for layer in layers) for word in WORDS.values()}
    lines = [line for line in names.splitlines() if has["full"] or ".attention." not in line]
    if has["conv"]:
        ours, theirs = "layers.{layer}.conv", f"{OFFICIAL}.conv"
        lines += [f"{ours}.norm: {OFFICIAL}.operator_norm", f"{ours}.conv: {theirs}.conv"]
        lines += [f"{ours}.{name}: {theirs}.{name}" for name in ("in_proj", "out_proj")]
    tied = flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True))
    model = language(config, about, [], parts.eps)
    model = model._replace(names=("model.embed_tokens", "model.embedding_norm"), tied=tied)
    return model.text(layers, used(kinds, layers), "\n".join(lines) + "\n")


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
        entries = "intermediate_size, block_ffn_dim_multiplier"
        raise UsageError(f"config.json: the networks have {hidden} features ({entries})")
    return hidden


def _convolution(config: Config, parts: Decoder) -> str:
    bias, kernel = flag(config, "conv_bias", False), whole(config, "conv_L_cache", 3)
    drawn = f'bias: {scalar(bias)}, init: {{weight: "{normal(parts.std)}"{", bias: zeros" if bias else ""}}}'
    return residual("conv", [
        f"- rms_norm: {{gain: plain, eps: {scalar(parts.eps)}, name: norm}}",
        f"- linear: {{features: 3 * dim, {drawn}, name: in_proj, as: [b, c, x]}}",
        "- multiply: {from: x, by: b}",
        f"- causal_conv: {{kernel: {kernel}, activation: none, {drawn}, name: conv}}",
        "- multiply: {by: c}",
        f"- linear: {{features: dim, {drawn}, name: out_proj}}",
    ])  # fmt: skip

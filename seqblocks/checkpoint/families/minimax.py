"""MiniMax-Text from the config.json of transformers: lightning attention and attention, experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator

from seqblocks.checkpoint.families.dense import Decoder, Names, decoder
from seqblocks.checkpoint.families.layers import OFFICIAL, TYPES, layer_types, used
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, network_init, normal
from seqblocks.checkpoint.families.values import (
    Config,
    depth_of,
    limited,
    mapping,
    number,
    require,
    scalar,
    whole,
    window_of,
)

WORDS = {TYPES[0]: "lightning", TYPES[1]: "full"}
OURS = "layers.{layer}"
NAMES = Names(gated=("w1", "w3", "w2"))
# Log decays of the heads: slopes as in ALiBi, which shrink with the depth of the layer.
DECAY = "-(2 ** (-8 * (feature + 1) / features)) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)"


def minimax(config: Config) -> str:
    """Write a MiniMax-Text-01 language model (arXiv:2501.08313).

    Each branch starts from the result of the norm before it, not from what the norm reads.
    """
    require(config, hidden_act="silu", router_jitter_noise=(0.0, 0, None))
    for place in (config, mapping(config, "rope_parameters")):  # transformers rotates all features
        require(place, partial_rotary_factor=(1.0, 1, None))
    usual = [TYPES[(at + 1) % 2] for at in range(depth_of(config))]
    types, parts = layer_types(config, usual), decoder(config, 8, eps=1e-5)._replace(official=NAMES)
    kinds = used({word: _layer(config, parts, kind) for kind, word in WORDS.items()}, [WORDS[kind] for kind in types])
    model = language(config, "MiniMax-Text language model", [], parts.eps)
    names = "\n".join(_names(parts, kinds)) + "\n"
    return model.text([WORDS[kind] for kind in types], kinds, names)


def _layer(config: Config, parts: Decoder, kind: str) -> str:
    """Return the steps of a layer as YAML."""
    full = kind == TYPES[1]
    prefix = "full_attn" if full else "linear_attn"
    window = window_of(config)
    mixer = parts.attention_steps(rope(config, parts.head, 1000000.0), window) if full else _lightning(parts)
    count, top = limited(config, "num_local_experts", 8), whole(config, "num_experts_per_tok", 2)
    router, drawn = f'init: {{router.weight: "{normal(parts.std)}"}}', network_init(parts.std)
    network = f"swiglu: {{hidden: {parts.hidden}, init: {drawn}}}"
    return "\n".join([
        _norm(parts, "norm, as: read"),
        *mixer,
        _sum(config, prefix, "read"),
        _norm(parts, "post_norm, as: inner"),
        f"- experts: {{count: {count}, top: {top}, normalize: true, {router}, steps: [{{{network}}}]}}",
        _sum(config, "mlp", "inner"),
    ])  # fmt: skip


def _norm(parts: Decoder, name: str) -> str:
    return f"- rms_norm: {{eps: {scalar(parts.eps)}, name: {name}}}"


def _sum(config: Config, prefix: str, wire: str) -> str:
    """Return the sum of the current wire and of the one before the branch, each times a factor of the config."""
    kept, added = (number(config, f"{prefix}_{name}_factor", 1) for name in ("alpha", "beta"))
    return f'- calc: "{scalar(kept)} * {wire} + {scalar(added)} * x"'


def _lightning(parts: Decoder) -> list[str]:
    """Return the steps of linear attention with a fixed decay per head, whose norm is that of all heads."""
    width = parts.heads * parts.head
    projected = [
        step for name in ("q", "k", "v")
        for step in (parts.linear(width, False, f"linear_{name}", "from: read, "), f"- silu: {{as: {name}}}")
    ]  # fmt: skip
    return [
        *projected,
        f'- constant: {{features: {parts.heads}, learned: false, formula: "{DECAY}", as: decay}}',
        f"- linear_attention: {{q: q, k: k, v: v, decay: decay, heads: {parts.heads}, scale: 1}}",
        "- rms_norm: {eps: 1e-6, name: o_norm, as: o}",
        parts.linear(width, False, "g_proj, as: opening", "from: read, "),
        "- gate: {from: o, by: opening, activation: sigmoid}",
        parts.linear("dim", False, "out_proj"),
    ]


def _names(parts: Decoder, kinds: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the map."""
    yield f"{OURS}.norm: {OFFICIAL}.input_layernorm"
    yield f"{OURS}.post_norm: {OFFICIAL}.post_attention_layernorm"
    yield f"{OURS}.experts.router: {OFFICIAL}.block_sparse_moe.gate"
    for own, theirs in zip(("gate", "up", "down"), NAMES.gated, strict=True):
        place = f"{OFFICIAL}.block_sparse_moe.experts.{{expert}}.{theirs}.weight"
        yield f"{OURS}.experts.{{expert}}.swiglu.{own}_weight: {place}"
    theirs = f"{OFFICIAL}.self_attn"
    if "full" in kinds:
        yield from (f"{OURS}.{name}_proj: {theirs}.{name}_proj" for name in "qkvo")
    if "lightning" in kinds:
        for at, name in enumerate("qkv"):  # of each head in turn
            part = f"start: {at * parts.head}, groups: {parts.heads}"
            yield f"{OURS}.linear_{name}.weight: {{slice: \"{theirs}.qkv_proj.weight\", {part}}}"
        yield f"{OURS}.o_norm: {theirs}.norm"
        yield f"{OURS}.g_proj: {theirs}.output_gate"
        yield f"{OURS}.out_proj: {theirs}.out_proj"

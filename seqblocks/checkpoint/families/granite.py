"""Granite 4 from the config.json of transformers: Mamba-2 and attention, experts and a network for all tokens."""

from __future__ import annotations

from seqblocks.checkpoint.families.dense import decoder, residual
from seqblocks.checkpoint.families.jamba import mamba2_mixer
from seqblocks.checkpoint.families.layers import OFFICIAL, TYPES, used
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, network_init, normal, scaled
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    head_of,
    limited,
    number,
    require,
    scalar,
    std_of,
    whole,
    whole_or,
    words,
)
from seqblocks.errors import UsageError

MEMORY, ATTENTION = TYPES
WORDS = {MEMORY: "memory", ATTENTION: "attention", "mamba": "memory", "attention": "attention"}  # also older names
GATE, UP = 0, 1  # halves of a joined matrix


def granitemoehybrid(config: Config) -> str:
    """Write a Granite 4 language model."""
    require(config, hidden_act="silu", position_embedding_type=("rope", "nope", None), normalization_function="rmsnorm")
    depth, eps = depth_of(config), above_0(config, "rms_norm_eps", 1e-6)
    types = [MEMORY] * depth if config.get("layer_types") is None else words(config, "layer_types", WORDS)
    if len(types) != depth:
        raise UsageError(f"config.json: layer_types has {len(types)} entries, but num_hidden_layers is {depth}")
    layers, network = [WORDS[kind] for kind in types], _network(config, eps)
    mixers = {"memory": _memory(config, eps), "attention": _attention(config)}
    kinds = {word: f"{mixers[word]}\n{network}" for word in dict.fromkeys(layers)}
    model = language(config, "Granite 4 language model", ["mamba2"], eps)
    return model._replace(
        before=scaled(number(config, "embedding_multiplier", 1.0), "embedded"),
        after=scaled(1 / above_0(config, "logits_scaling"), "scaled"),
    ).text(layers, used(kinds, layers), "\n".join(_names(config, layers)) + "\n")


def _branch(config: Config, name: str, eps: float, steps: list[str]) -> str:
    """Return a residual branch with a norm, whose result is multiplied by a factor."""
    factor = scaled(number(config, "residual_multiplier", 1.0), "scaled")
    return residual(name, [f"- rms_norm: {{eps: {scalar(eps)}, name: norm}}", *steps, *[factor] * bool(factor)])


def _memory(config: Config, eps: float) -> str:
    return _branch(config, "memory", eps, [f"- {mamba2_mixer(config, eps)}"])


def _attention(config: Config) -> str:
    head, bias = head_of(config), flag(config, "attention_bias", False)
    parts = decoder(config)._replace(
        bias=bias, bias_out=bias, scale=above_0(config, "attention_multiplier"),
        factor=number(config, "residual_multiplier", 1.0),
    )  # fmt: skip
    turned = config.get("position_embedding_type") == "rope"
    return parts.attention(rope(config, head) if turned else None, 0)


def _network(config: Config, eps: float) -> str:
    std, shared = std_of(config), whole(config, "shared_intermediate_size", 1024)
    for_all = f"hidden: {shared}, init: {network_init(std)}, name: shared"
    if not _experts(config):
        return _branch(config, "mlp", eps, [f"- swiglu: {{{for_all}}}"])
    hidden, top = whole(config, "intermediate_size", 11008), whole_or(config, "num_experts_per_tok", 2)
    sizes = f"count: {_experts(config)}, top: {top}, normalize: true"
    router, network = f'init: {{router.weight: "{normal(std)}"}}', f"hidden: {hidden}, init: {network_init(std)}"
    return _branch(config, "mlp", eps, [
        "- identity: {as: read}",
        f"- swiglu: {{{for_all}, as: for_all}}",
        f"- experts: {{from: read, {sizes}, {router}, steps: [{{swiglu: {{{network}}}}}]}}",
        "- add: {with: for_all}",
    ])  # fmt: skip


def _experts(config: Config) -> int:
    return 8 if config.get("num_local_experts", 8) is None else limited(config, "num_local_experts", 8, least=0)


def _names(config: Config, layers: list[str]) -> list[str]:
    ours, shared = "layers.{layer}", whole(config, "shared_intermediate_size", 1024)
    lines = [f"{ours}.mlp.norm: {OFFICIAL}.post_attention_layernorm"]
    if "memory" in layers:
        lines.append(f"{ours}.memory.norm: {OFFICIAL}.input_layernorm")
        lines.append(f"{ours}.memory.mamba2_mixer: {OFFICIAL}.mamba")
    if "attention" in layers:
        lines += decoder(config).attention_names()
    network, joined = f"{ours}.mlp.shared", f"{OFFICIAL}.shared_mlp"
    lines += [
        f"{network}.gate_weight: {{slice: \"{joined}.input_linear.weight\", start: 0}}",
        f"{network}.up_weight: {{slice: \"{joined}.input_linear.weight\", start: {shared}}}",
        f"{network}.down_weight: {joined}.output_linear.weight",
    ]
    return lines + (list(_expert_names(config)) if _experts(config) else [])


def _expert_names(config: Config) -> list[str]:
    """Return the lines for the experts, whose matrices the file stores as one tensor of three axes."""
    count, theirs, ours = _experts(config), f"{OFFICIAL}.block_sparse_moe", "layers.{layer}.mlp.experts"
    halves = '"expert (half row) column -> (expert half) row column"'
    lines = [f"{ours}.router.weight: {theirs}.router.layer.weight"]
    for at in range(count):
        for name, half in (("gate", GATE), ("up", UP)):
            lines.append(
                f"{ours}.{at}.swiglu.{name}_weight: {{rearrange: \"{theirs}.input_linear.weight\", pattern: {halves}, "
                f"expert: {count}, half: 2, index: {2 * at + half}}}"
            )
        lines.append(
            f"{ours}.{at}.swiglu.down_weight: {{rearrange: \"{theirs}.output_linear.weight\", "
            f'pattern: "expert row column -> expert row column", expert: {count}, index: {at}}}'
        )
    return lines

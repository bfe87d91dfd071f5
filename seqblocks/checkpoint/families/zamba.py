"""Zamba-2 from the config.json of transformers: Mamba-2 layers, some preceded by a shared attention block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from seqblocks.checkpoint.families.layers import used
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    depth_of,
    flag,
    follows,
    number,
    require,
    rotary,
    scalar,
    std_of,
    step_sizes,
    whole,
    whole_or,
    words,
    written,
)
from seqblocks.errors import UsageError

# Our and the official names of a block's parts: the shared ones, then the adapters of each use.
SHARED = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "network_norm": "pre_ff_layernorm",
    "gate_up_proj": "feed_forward.gate_up_proj",
    "down_proj": "feed_forward.down_proj",
}
ADAPTERS = {
    "network": "feed_forward.gate_up_proj_adapter_list",
    "q": "self_attn.linear_q_adapter_list",
    "k": "self_attn.linear_k_adapter_list",
    "v": "self_attn.linear_v_adapter_list",
}
LEGACY = {"mamba": "linear_attention", "mamba2": "linear_attention"}  # older names of a kind of layer


def zamba2(config: Config) -> str:
    """Write a Zamba-2 language model; layers with a shared block are separate kinds, one per block."""
    require(config, hidden_act=("gelu", None), use_long_context=(False, None))
    types, blocks = _types(config), whole(config, "num_mem_blocks", 1)
    hybrids = [at for at, kind in enumerate(types) if kind == "hybrid"]
    follows(config, "hybrid_layer_ids", hybrids, "the hybrid layers of layers_block_type")
    layers = [f"shared{hybrids.index(at) % blocks}" if at in hybrids else "mamba" for at in range(len(types))]
    mixer, block, weights = _mamba2(config), _block(config), normal(std_of(config))
    eps = number(config, "rms_norm_eps", 1e-5)
    norm = f"rms_norm: {{eps: {scalar(eps)}, name: norm}}"
    kinds = {"mamba": f"- residual: {{name: mamba, steps: [{{{norm}}}, {{{mixer}}}]}}"}
    for at in range(min(blocks, len(hybrids))):
        linear = f'linear: {{features: dim, bias: false, init: {{weight: "{weights}"}}, name: linear}}'
        steps = f"{{identity: {{as: h}}}}, {{{block}}}, {{{linear}}}, {{add: {{with: h, name: sum}}}}"
        kinds[f"shared{at}"] = f"- residual: {{name: shared{at}, steps: [{steps}, {{{norm}}}, {{{mixer}}}]}}"
    firsts = {layers[at]: at for at in reversed(hybrids)}
    model = language(config, "Zamba-2 language model", ["mamba2", "zamba2"], eps, tied=True)._replace(
        names=("model.embed_tokens", "model.final_layernorm"),
        before="- identity: {as: embedded}",
        share=f"share: [{', '.join(f'{kind}.block.{part}' for kind in firsts for part in SHARED)}]" if firsts else "",
    )
    names = [*_names(layers, firsts), *_adapters(config, layers, hybrids, firsts)]
    return model.text(layers, used(kinds, layers), "\n".join(names) + "\n")


def _types(config: Config) -> list[str]:
    """Return the kind of each layer."""
    found = words(config, "layers_block_type", ("linear_attention", "hybrid", *LEGACY))
    if len(found) != (depth := depth_of(config)):
        raise UsageError(f"config.json: layers_block_type has {len(found)} entries, but num_hidden_layers is {depth}")
    return [LEGACY.get(kind, kind) for kind in found]


def _mamba2(config: Config) -> str:
    expand, heads = whole(config, "mamba_expand", 2), whole(config, "n_mamba_heads", 8)
    head = expand * whole(config, "hidden_size") // heads
    follows(config, "mamba_headdim", head, "mamba_expand * hidden_size / n_mamba_heads")
    arguments = {
        "state": whole(config, "mamba_d_state", 64),
        "expand": expand,
        "head": head,
        "groups": whole(config, "mamba_ngroups", 1),
        "kernel": whole(config, "mamba_d_conv", 4),
        "bias": flag(config, "add_bias_linear", False),
        "dt_least": number(config, "time_step_min", 0.001),
        "eps": 1e-5,
        **step_sizes(config),
        "A_random": False,
        "std": std_of(config),
        "std_all": True,
    }
    return f"mamba2_mixer: {{dim: dim, layers: layers, {written(arguments)}, name: mixer}}"


def _block(config: Config) -> str:
    heads, width = whole(config, "num_attention_heads"), 2 * whole(config, "hidden_size")
    follows(config, "attention_hidden_size", width, "2 * hidden_size")
    follows(config, "attention_head_dim", width // heads, "2 * hidden_size / num_attention_heads")
    require(config, use_shared_mlp_adapter=True)
    arguments = {
        "heads": heads,
        "kv_heads": whole_or(config, "num_key_value_heads", heads),
        "hidden": whole_or(config, "intermediate_size", 4 * whole(config, "hidden_size")),
        "rank": whole(config, "adapter_rank", 128),
        "adapted": flag(config, "use_shared_attention_adapter", False),
        "rotary": rotary(config)[0] if flag(config, "use_mem_rope", False) else 0,
        "bias": flag(config, "add_bias_linear", False),
        "eps": number(config, "rms_norm_eps", 1e-5),
        "std": std_of(config),
    }
    return f"zamba2_block: {{dim: dim, embedded: embedded, cache: cache, {written(arguments)}, name: block}}"


def _names(layers: Sequence[str], firsts: dict[str, int]) -> Iterator[str]:
    """Yield the lines of the map, except those for adapters."""
    official = "model.layers.{layer}"
    if "mamba" in layers:
        yield f"layers.{{layer}}.mamba.norm: {official}.input_layernorm"
        yield f"layers.{{layer}}.mamba.mixer: {official}.mamba"
    for kind, first in firsts.items():
        ours = f"layers.{{layer}}.{kind}"
        yield f"{ours}.norm: {official}.mamba_decoder.input_layernorm"
        yield f"{ours}.mixer: {official}.mamba_decoder.mamba"
        yield f"{ours}.linear: {official}.linear"
        for part, theirs in SHARED.items():
            yield f"layers.{first}.{kind}.block.{part}: model.layers.{first}.shared_transformer.{theirs}"


def _adapters(config: Config, layers: Sequence[str], hybrids: list[int], firsts: dict[str, int]) -> Iterator[str]:
    """Yield the lines for adapters; the official block contains those of all its uses, numbered by use."""
    attention = flag(config, "use_shared_attention_adapter", False)
    for number_of_use, layer in enumerate(hybrids):
        place = f"model.layers.{firsts[layers[layer]]}.shared_transformer"
        for part, theirs in ADAPTERS.items():
            if part == "network" or attention:
                ours = f"layers.{layer}.{layers[layer]}.block.{part}"
                yield f"{ours}_down: {place}.{theirs}.{number_of_use}.0"
                yield f"{ours}_up: {place}.{theirs}.{number_of_use}.1"

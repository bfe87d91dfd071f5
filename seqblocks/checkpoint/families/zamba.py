"""Zamba and Zamba-2 from the config.json of transformers: Mamba layers, some after a shared attention block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from seqblocks.checkpoint.families.dense import residual
from seqblocks.checkpoint.families.layers import used
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    follows,
    number,
    rank,
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
    eps = above_0(config, "rms_norm_eps", 1e-5)
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
        "eps": above_0(config, "rms_norm_eps", 1e-5),
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


# Our and the official names of the first version's shared block, and of a mixer whose heads are Mambas of their own.
FIRST_SHARED = {
    "input_norm": "input_layernorm", "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj", "o_proj": "self_attn.o_proj", "network_norm": "pre_ff_layernorm",
    "gate_proj": "feed_forward.gate_proj", "up_proj": "feed_forward.up_proj", "down_proj": "feed_forward.down_proj",
}  # fmt: skip
HYBRID = ("linear_attention", "hybrid")


class _Heads(NamedTuple):
    """Sizes of a mixer of several heads. head: channels of each. low: rank of the step sizes."""

    heads: int
    head: int
    state: int
    low: int


def zamba(config: Config) -> str:
    """Write a Zamba language model (arXiv:2405.16712): one attention block with the same weights at several depths.

    Without tied embeddings, transformers would give each layer a block of its own.
    """
    require(config, hidden_act=("gelu", None), hidden_mamba_act=("silu", None), tie_word_embeddings=(True, None))
    kinds_of = [("mamba", "shared")[kind == "hybrid"] for kind in _first_types(config)]
    eps, sizes = above_0(config, "rms_norm_eps", 1e-5), _heads(config)
    norm, mixer = f"- rms_norm: {{eps: {scalar(eps)}, name: norm}}", _mixer(config, sizes)
    steps = {"mamba": [norm, *mixer], "shared": [*_first_block(config, eps), norm, *mixer]}
    kinds = {word: residual(word, steps[word]) for word in dict.fromkeys(kinds_of)}
    names = [line for word in kinds for line in _first_names(config, word, sizes)]
    if "shared" in kinds:
        first = kinds_of.index("shared")
        place = f"model.layers.{first}.shared_transf"
        names += [f"layers.{first}.shared.{own}: {place}.{theirs}" for own, theirs in FIRST_SHARED.items()]
    share = f"share: [{', '.join(f'shared.{part}' for part in FIRST_SHARED)}]" if "shared" in kinds else ""
    return language(config, "Zamba language model", [], eps, tied=True)._replace(
        names=("model.embed_tokens", "model.final_layernorm"), before="- identity: {as: embedded}", share=share
    ).text(kinds_of, kinds, "\n".join(names) + "\n")


def _first_types(config: Config) -> list[str]:
    """Return the kind of each layer."""
    depth = depth_of(config)
    period, offset = whole(config, "attn_layer_period", 6), whole(config, "attn_layer_offset", 4, least=0)
    rest = [HYBRID[at % period == offset] for at in range(depth - 3)]
    usual = [HYBRID[0], HYBRID[0], HYBRID[1], *rest]
    if config.get("layers_block_type") is not None:
        usual = [LEGACY.get(kind, kind) for kind in words(config, "layers_block_type", (*HYBRID, *LEGACY))]
    if len(usual) != depth:
        raise UsageError(f"config.json: layers_block_type has {len(usual)} entries, but num_hidden_layers is {depth}")
    return usual


def _heads(config: Config) -> _Heads:
    dim = whole(config, "hidden_size")
    inner, heads = whole(config, "mamba_expand", 2) * dim, whole(config, "n_mamba_heads", 2)
    if inner % heads:
        raise UsageError(f"config.json: n_mamba_heads is {heads}, which does not divide mamba_expand * hidden_size")
    low = rank(config, "mamba_dt_rank") or -(-dim // 16)
    return _Heads(heads, inner // heads, whole(config, "mamba_d_state", 16), low)


def _linear(features: int | str, std: float, name: str, source: str = "", bias: bool = False) -> str:
    zero = ", bias: zeros" if bias else ""
    drawn = f'bias: {scalar(bias)}, init: {{weight: "{normal(std)}"{zero}}}'
    return f"- linear: {{{source}features: {features}, {drawn}, {name}}}"


def _first_block(config: Config, eps: float) -> list[str]:
    """Return the steps of the shared block and of the map after it, which are added to what the mixer reads."""
    dim, heads, std = whole(config, "hidden_size"), whole(config, "num_attention_heads"), std_of(config)
    follows(config, "attention_hidden_size", 2 * dim, "2 * hidden_size")
    head, hidden = whole_or(config, "attention_head_dim", 2 * dim // heads), whole(config, "intermediate_size", 14848)
    shared = whole_or(config, "num_key_value_heads", heads)
    return [
        "- identity: {as: h}",
        "- concat: {from: [h, embedded]}",
        f"- rms_norm: {{eps: {scalar(eps)}, name: input_norm, as: read}}",
        _linear(heads * head, std, "name: q_proj, as: q"),
        _linear(shared * head, std, "name: k_proj, as: k", "from: read, "),
        _linear(shared * head, std, "name: v_proj, as: v", "from: read, "),
        f"- attention: {{q: q, k: k, v: v, heads: {heads}, kv_heads: {shared}, scale: sqrt(2 / {head}), cache: cache}}",
        _linear("dim", std, "name: o_proj"),
        f"- rms_norm: {{eps: {scalar(eps)}, name: network_norm, as: inner}}",
        _linear(hidden, std, "name: gate_proj, as: opening"),
        _linear(hidden, std, "name: up_proj", "from: inner, "),
        "- gate: {by: opening, activation: gelu}",
        _linear("dim", std, "name: down_proj"),
        _linear("dim", std, "name: linear"),
        "- add: {with: h}",
    ]


def _mixer(config: Config, sizes: _Heads) -> list[str]:
    """Return the steps of a mixer each of whose heads is a Mamba, with common projections at both ends."""
    heads, head, state, low = sizes
    std, bias, spread = std_of(config), flag(config, "mamba_proj_bias", False), low**-0.5
    conv, times = flag(config, "mamba_conv_bias", True), {"dt_min": 0.001, "dt_max": 0.1, "dt_floor": 1e-4}
    least, most, floor = (times | step_sizes(config)).values()
    kernel, of_dt = whole(config, "mamba_d_conv", 4), f"block: {low}, features: {heads * head}, bias: true"
    of_heads = f'from: u, block: {head}, init: {{weight: "{normal(std)}"}}'
    dt = f'weight: "uniform({-spread!r}, {spread!r})", bias: "inverse_softplus({least!r}, {most!r}, {floor!r})"'
    drawn = f'init: {{weight: "{normal(std)}"{", bias: zeros" if conv else ""}}}'
    return [
        "- identity: {as: mixed}",
        _linear(heads * head, std, "name: z_proj, as: z", "from: mixed, ", bias),
        _linear(heads * head, std, "name: x_proj", "from: mixed, ", bias),
        f"- causal_conv: {{kernel: {kernel}, bias: {scalar(conv)}, {drawn}, activation: silu, name: conv1d, as: u}}",
        f"- headwise_linear: {{{of_heads}, features: {heads * state}, name: B_proj, as: B}}",
        f"- headwise_linear: {{{of_heads}, features: {heads * state}, name: C_proj, as: C}}",
        f"- headwise_linear: {{{of_heads}, features: {heads * low}, name: dt_low}}",
        f"- headwise_linear: {{{of_dt}, init: {{{dt}}}, name: dt_proj, as: dt}}",
        f"- ssm: {{from: u, dt: dt, B: B, C: C, z: z, state: {state}, groups: {heads}}}",
        _linear("dim", std, "name: out_proj", "", bias),
    ]


def _first_names(config: Config, word: str, sizes: _Heads) -> Iterator[str]:
    """Yield the lines of the map for one kind of layer, except those for the shared block."""
    heads, head, state, low = sizes
    ours, official = f"layers.{{layer}}.{word}", "model.layers.{layer}"
    if word == "shared":
        yield f"{ours}.linear: {official}.linear"
        official += ".mamba_decoder"
    yield f"{ours}.norm: {official}.input_layernorm"
    theirs = f"{official}.mamba"
    for kind in ("weight", "bias")[: 1 + flag(config, "mamba_proj_bias", False)]:
        for start, name in enumerate(("x", "z")):  # their rows in turn
            part = f"start: {start}, groups: {heads * head}"
            yield f"{ours}.{name}_proj.{kind}: {{slice: \"{theirs}.in_proj.{kind}\", {part}}}"
    for start, name in ((0, "dt_low"), (low, "B_proj"), (low + state, "C_proj")):
        yield f"{ours}.{name}.weight: {{slice: \"{theirs}.x_proj_weight\", start: {start}, axis: 1}}"
    yield f"{ours}.dt_proj.weight: {theirs}.dt_proj_weight"
    vectors = (("dt_proj.bias", "dt_proj_bias", ""), ("ssm.D", "D", ""), ("ssm.A_log", "A_log", f", {state}"))
    for own, name, more in vectors:
        yield f"{ours}.{own}: {{reshape: \"{theirs}.{name}\", shape: [{heads}, {head}{more}]}}"
    yield f"{ours}.conv1d: {theirs}.conv1d"
    yield f"{ours}.out_proj: {theirs}.out_proj"

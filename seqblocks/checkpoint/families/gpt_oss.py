"""gpt-oss from the config.json of transformers: attention with sinks, and clamped experts in every layer."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator

from seqblocks.checkpoint.families.dense import FULL, KINDS, SLIDING, Decoder, decoder, residual
from seqblocks.checkpoint.families.layers import OFFICIAL
from seqblocks.checkpoint.families.rope import rope
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    follows,
    limited,
    require,
    scalar,
    whole,
    words,
)
from seqblocks.errors import UsageError

ANGLES = {  # of configs that say nothing about them
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
PARTS = ("gate", "up")  # rows of the joined matrix in turn
OURS = "layers.{layer}.mlp.experts"


def gpt_oss(config: Config) -> str:
    """Write a gpt-oss language model (arXiv:2508.10925)."""
    require(config, hidden_act="silu")
    parts, experts = _decoder(config), limited(config, "num_local_experts", 128)
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config = ChainMap({"rope_parameters": ANGLES}, config)  # type: ignore[arg-type]
    types, rotary, network = _types(config), rope(config, parts.head, 150000.0), _network(config, parts, experts)
    windows = {kind: whole(config, "sliding_window", 128) if kind == SLIDING else 0 for kind in dict.fromkeys(types)}
    kinds = {KINDS[kind]: f"{parts.attention(rotary, window)}\n{network}" for kind, window in windows.items()}
    names = [
        *parts.attention_names(), f"layers.{{layer}}.mlp.norm: {OFFICIAL}.post_attention_layernorm",
        f"{OURS}.router: {OFFICIAL}.mlp.router", *_expert_names(experts),
    ]  # fmt: skip
    model = language(config, "gpt-oss language model", [], parts.eps)
    return model.text([KINDS[kind] for kind in types], kinds, "\n".join(names) + "\n")


def _decoder(config: Config) -> Decoder:
    bias = flag(config, "attention_bias", True)
    found = decoder(config, 8, 64, 1e-5)._replace(bias=bias, bias_out=bias, sinks=True)
    return found._replace(hidden=whole(config, "intermediate_size", 2880))


def _types(config: Config) -> list[str]:
    """Return the kind of each layer."""
    depth = depth_of(config)
    usual = [(SLIDING, FULL)[at % 2] for at in range(depth)]
    found = usual if config.get("layer_types") is None else words(config, "layer_types", (FULL, SLIDING))
    if len(found) != depth:
        raise UsageError(f"config.json: layer_types has {len(found)} entries, but num_hidden_layers is {depth}")
    return found


def _network(config: Config, parts: Decoder, experts: int) -> str:
    limit, slope = above_0(config, "swiglu_limit", 7.0), above_0(config, "swiglu_alpha", 1.702)
    top, drawn = whole(config, "num_experts_per_tok", 4), normal(parts.std)
    follows(config, "experts_per_token", top, "num_experts_per_tok")
    matrices = ", ".join(f'{name}_weight: "{drawn}", {name}_bias: zeros' for name in (*PARTS, "down"))
    each = f"limit: {scalar(limit)}, slope: {scalar(slope)}, offset: 1, init: {{{matrices}}}"
    router = f'init: {{router.weight: "{drawn}", router.bias: "{drawn}"}}'
    sizes = f"count: {experts}, top: {top}, normalize: true, bias: true"
    return residual("mlp", [
        f"- rms_norm: {{eps: {scalar(parts.eps)}, name: norm}}",
        f"- experts: {{{sizes}, {router}, steps: [{{swiglu: {{hidden: {parts.hidden}, bias: true, {each}}}}}]}}",
    ])  # fmt: skip


def _expert_names(count: int) -> Iterator[str]:
    """Yield the lines for the experts: four tensors of each layer contain the parameters of all, matrices transposed.
    """
    theirs = f"{OFFICIAL}.mlp.experts"
    for at in range(count):
        own = f"{OURS}.{at}.swiglu"
        for half, name in enumerate(PARTS):
            which = f"expert: {count}, half: 2, index: {2 * at + half}"
            matrix = '"expert column (row half) -> (expert half) row column"'
            vector = '"expert (row half) -> (expert half) row"'
            joined = f"{theirs}.gate_up_proj"
            yield f"{own}.{name}_weight: {{rearrange: \"{joined}\", pattern: {matrix}, {which}}}"
            yield f"{own}.{name}_bias: {{rearrange: \"{joined}_bias\", pattern: {vector}, {which}}}"
        which = f"expert: {count}, index: {at}"
        matrix, vector = '"expert column row -> expert row column"', '"expert row -> expert row"'
        yield f"{own}.down_weight: {{rearrange: \"{theirs}.down_proj\", pattern: {matrix}, {which}}}"
        yield f"{own}.down_bias: {{rearrange: \"{theirs}.down_proj_bias\", pattern: {vector}, {which}}}"

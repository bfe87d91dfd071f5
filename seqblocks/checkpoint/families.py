"""Specs from the config.json of models that others publish: one function per family writes the spec as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from seqblocks.errors import UsageError, listing

Config = Mapping[str, Any]


def spec_text(config: Any) -> str:
    """Return a spec, as YAML, of the model that a config.json describes. Raise UsageError where that is not known."""
    if not isinstance(config, dict):
        raise UsageError("config.json is not a mapping")
    kind = config.get("model_type") or ("mamba_ssm" if {"d_model", "n_layer"} <= config.keys() else None)
    if kind not in FAMILIES:
        what = f"config.json is of model_type {kind!r}" if kind else "config.json has no model_type"
        raise UsageError(f"{what}, and seqblocks writes specs of {listing(FAMILIES)}: give a spec of your own")
    return FAMILIES[kind](config)


def _mamba(config: Config) -> str:
    """Write a Mamba language model from a config of transformers."""
    _require(config, hidden_act="silu", use_mambapy=(False, True, None))
    return _mamba_text(
        "mamba",
        dim=_whole(config, "hidden_size"),
        depth=_whole(config, "num_hidden_layers"),
        vocabulary=_whole(config, "vocab_size"),
        state=_whole(config, "state_size", 16),
        expand=_expansion(config),
        kernel=_whole(config, "conv_kernel", 4),
        rank=_rank(config.get("time_step_rank", "auto")),
        bias=_flag(config, "use_bias", False),
        conv_bias=_flag(config, "use_conv_bias", True),
        eps=_number(config, "layer_norm_epsilon", 1e-5),
        tied=_flag(config, "tie_word_embeddings", True),
    )


def _mamba_ssm(config: Config) -> str:
    """Write a Mamba language model from the config of the official package."""
    inner = config.get("ssm_cfg") or {}
    if not isinstance(inner, dict):
        raise UsageError("config.json: ssm_cfg is not a mapping")
    _require(inner, layer=("Mamba1", None))
    _require(config, attn_layer_idx=([], None), d_intermediate=(0, None), rms_norm=(True, None))
    multiple = _whole(config, "pad_vocab_size_multiple", 8)
    return _mamba_text(
        "mamba",
        dim=_whole(config, "d_model"),
        depth=_whole(config, "n_layer"),
        vocabulary=-(-_whole(config, "vocab_size") // multiple) * multiple,
        state=_whole(inner, "d_state", 16),
        expand=_number(inner, "expand", 2),
        kernel=_whole(inner, "d_conv", 4),
        rank=_rank(inner.get("dt_rank", "auto")),
        bias=_flag(inner, "bias", False),
        conv_bias=_flag(inner, "conv_bias", True),
        eps=_number(config, "norm_epsilon", 1e-5),
        tied=_flag(config, "tie_embeddings", True),
    )


def _mamba2(config: Config) -> str:
    """Write a Mamba-2 language model from a config of transformers."""
    _require(config, hidden_act="silu", time_step_limit=([0, math.inf], [0, {"__float__": "Infinity"}], None))
    expand, head = _expansion(config), _whole(config, "head_dim", 64)
    inner, heads = int(expand * _whole(config, "hidden_size")), _whole(config, "num_heads", 128)
    if heads * head != inner:
        raise UsageError(f"config.json: num_heads * head_dim is {heads * head}, and expand * hidden_size is {inner}")
    return _mamba_text(
        "mamba2",
        dim=_whole(config, "hidden_size"),
        depth=_whole(config, "num_hidden_layers"),
        vocabulary=_whole(config, "vocab_size"),
        state=_whole(config, "state_size", 128),
        expand=expand,
        head=head,
        groups=_whole(config, "n_groups", 8),
        kernel=_whole(config, "conv_kernel", 4),
        bias=_flag(config, "use_bias", False),
        conv_bias=_flag(config, "use_conv_bias", True),
        eps=_number(config, "layer_norm_epsilon", 1e-5),
        tied=_flag(config, "tie_word_embeddings", False),
    )


def _mamba_text(
    kind: str, *, dim: int, depth: int, vocabulary: int, eps: float, tied: bool, **block: int | float | bool
) -> str:
    arguments = {**block, "eps": eps}
    return f"""seqblocks: 1
about: {kind} language model, as its config.json says
use: [{kind}]

let: {{dim: {dim}, depth: {depth}, vocabulary: {vocabulary}}}

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim, init: {{weight: "normal(0, 0.02)"}}}}
    - repeat:
        name: layers
        times: depth
        steps:
          - {kind}_block: {{dim: dim, layers: layers, {_written(arguments)}}}
    - rms_norm: {{name: norm_f, eps: {_scalar(eps)}}}
    - unembed: {{bias: false{", tie: embed" if tied else ""}}}

checkpoint:
  embed: backbone.embedding
  layers.{{layer}}.{kind}_block: backbone.layers.{{layer}}
  norm_f: backbone.norm_f
  unembed: lm_head
  layouts: {{hub: {{embed: backbone.embeddings}}}}
"""


def _falcon_mamba(config: Config) -> str:
    """Write a FalconMamba language model: Mamba with norms without gains on dt, B and C."""
    _require(config, hidden_act="silu", use_mambapy=(False, True, None))
    dim, rank = _whole(config, "hidden_size"), _rank(config.get("time_step_rank", "auto"))
    bias = _scalar(_flag(config, "use_bias", False))
    norm = f"gain: none, eps: {_scalar(_number(config, 'mixer_rms_eps', 1e-6))}"
    eps = _scalar(_number(config, "layer_norm_epsilon", 1e-5))
    return f"""seqblocks: 1
about: FalconMamba language model, as its config.json says

let: {{dim: {dim}, depth: {_whole(config, "num_hidden_layers")}, vocabulary: {_whole(config, "vocab_size")}}}

blocks:
  falcon_mamba_block:
    about: Mamba's block with norms on what its scan reads, matching transformers
    args: {{dim: int}}
    let:
      inner: floor({_scalar(_expansion(config))} * dim)
      low: {rank or "ceil(dim / 16)"}
      state: {_whole(config, "state_size", 16)}
    steps:
      - residual:
          steps:
            - rms_norm: {{eps: {eps}, name: norm}}
            - linear: {{features: 2 * inner, bias: {bias}, as: [x, z], name: in_proj}}
            - causal_conv:
                from: x
                kernel: {_whole(config, "conv_kernel", 4)}
                bias: {_scalar(_flag(config, "use_conv_bias", True))}
                activation: silu
                as: u
                name: conv1d
            - linear: {{features: low + 2 * state, bias: false, as: {{t: low, b: state, c: state}}, name: x_proj}}
            - rms_norm: {{from: t, {norm}, as: dt_low}}
            - rms_norm: {{from: b, {norm}, as: B}}
            - rms_norm: {{from: c, {norm}, as: C}}
            - linear: {{from: dt_low, features: inner, as: dt, name: dt_proj, init: {{bias: inverse_softplus}}}}
            - ssm: {{from: u, dt: dt, B: B, C: C, z: z, state: state}}
            - linear: {{features: dim, bias: {bias}, name: out_proj}}
    checkpoint:
      residual: mixer
      residual.norm: norm
      residual.ssm.A_log: mixer.A_log
      residual.ssm.D: mixer.D

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim, init: {{weight: "normal(0, 0.02)"}}}}
    - repeat: {{name: layers, times: depth, steps: [falcon_mamba_block: {{dim: dim}}]}}
    - rms_norm: {{name: norm_f, eps: {eps}}}
    - unembed: {{bias: false{", tie: embed" if _flag(config, "tie_word_embeddings", True) else ""}}}

checkpoint:
  embed: backbone.embeddings
  layers.{{layer}}.falcon_mamba_block: backbone.layers.{{layer}}
  norm_f: backbone.norm_f
  unembed: lm_head
"""


def _xlstm(config: Config) -> str:
    """Write an xLSTM-large language model, whose projections may be fused."""
    arguments = {
        "heads": _whole(config, "num_heads"),
        "qk_factor": _number(config, "qk_dim_factor", 0.5),
        "v_factor": _number(config, "v_dim_factor", 1.0),
        "expand": _number(config, "ffn_proj_factor", 2.667),
        "multiple": _whole(config, "ffn_round_up_to_multiple_of", 64),
        "gate_cap": _number(config, "gate_soft_cap", 15.0),
        "bias": _flag(config, "use_bias", False),
        "eps": _number(config, "norm_eps", 1e-6),
        "cell_eps": _number(config, "eps", 1e-6),
    }
    _require(config, add_out_norm=(True, None), weight_mode=("single", "fused", None))
    dim = _whole(config, "hidden_size" if config.get("hidden_size") else "embedding_dim")
    depth = _whole(config, "num_hidden_layers" if config.get("num_hidden_layers") else "num_blocks")
    return f"""seqblocks: 1
about: xLSTM-large language model, as its config.json says
use: [xlstm]

let: {{dim: {dim}, depth: {depth}, vocabulary: {_whole(config, "vocab_size")}}}

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim}}
    - repeat:
        name: blocks
        times: depth
        steps:
          - xlstm_large_block: {{dim: dim, blocks: layers, {_written(arguments)}}}
    - rms_norm: {{name: norm, eps: {_scalar(arguments["eps"])}}}
    - unembed: {{bias: false{", tie: embed" if _flag(config, "tie_word_embeddings", False) else ""}}}
    - soft_cap: {{cap: {_scalar(_number(config, "output_logit_soft_cap", 30.0))}}}

checkpoint:
  embed: embedding
  blocks.{{layer}}.xlstm_large_block: backbone.blocks.{{layer}}
  norm: backbone.out_norm
  unembed: lm_head
  layouts: {{hub: {{embed: backbone.embeddings}}, fused: {{embed: backbone.embeddings}}}}
"""


FAMILIES: dict[str, Callable[[Config], str]] = {
    "mamba": _mamba,
    "mamba_ssm": _mamba_ssm,
    "mamba2": _mamba2,
    "falcon_mamba": _falcon_mamba,
    "xlstm": _xlstm,
}


# --- values of a config -----------------------------------------------------------------------------------------------


def _require(config: Config, **values: Any) -> None:
    """Raise UsageError unless entries that are there have one of these values: others would be another model."""
    for key, allowed in values.items():
        allowed = allowed if isinstance(allowed, tuple) else (allowed, None)
        if config.get(key) not in allowed:
            expected = repr(next(value for value in allowed if value is not None))
            raise UsageError(f"config.json: {key} is {config[key]!r}, and seqblocks writes specs for {expected} alone")


def _value(config: Config, key: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
    value = config.get(key, default)
    if type(value) not in kinds:
        raise UsageError(f"config.json: {key} must be {what}, not {value!r}")
    return value


def _whole(config: Config, key: str, default: int | None = None) -> int:
    return int(_value(config, key, (int,), "a whole number", default))


def _number(config: Config, key: str, default: float | None = None) -> float:
    return float(_value(config, key, (int, float), "a number", default))


def _flag(config: Config, key: str, default: bool) -> bool:
    return bool(_value(config, key, (bool,), "true or false", default))


def _rank(value: Any) -> int:
    """Return the rank of dt; 0 stands for the usual one, a sixteenth of the width."""
    return 0 if value == "auto" else _whole({"time_step_rank": value}, "time_step_rank")


def _expansion(config: Config) -> float:
    expand = _number(config, "expand", 2)
    inner, dim = config.get("intermediate_size"), _whole(config, "hidden_size")
    if inner is not None and inner != int(expand * dim):
        expected = f"expand * hidden_size is {int(expand * dim)}"
        raise UsageError(f"config.json: intermediate_size is {inner!r}, and {expected}")
    return expand


def _written(arguments: Mapping[str, int | float | bool]) -> str:
    return ", ".join(f"{name}: {_scalar(value)}" for name, value in arguments.items())


def _scalar(value: float) -> str:
    """Return a number or truth value as YAML."""
    return repr(value).lower()

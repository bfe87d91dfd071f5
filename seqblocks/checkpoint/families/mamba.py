"""Mamba, Mamba-2 and FalconMamba language models from the config.json of transformers and of the official package."""

from __future__ import annotations

import math

from seqblocks.checkpoint.families.text import normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    expansion,
    flag,
    initial,
    mapping,
    number,
    rank,
    require,
    scalar,
    std_of,
    step_sizes,
    whole,
    whole_or,
    written,
)
from seqblocks.errors import UsageError

# What `initializer_range` is if a config of transformers has none, for these models only.
RANGE = 0.1


def mamba(config: Config) -> str:
    """Write a Mamba language model from a config of transformers."""
    require(config, hidden_act="silu", use_mambapy=(False, True, None))
    return _mamba_text(
        "mamba",
        dim=whole(config, "hidden_size"),
        depth=depth_of(config),
        vocabulary=whole(config, "vocab_size"),
        state=whole(config, "state_size", 16),
        expand=expansion(config),
        kernel=whole(config, "conv_kernel", 4),
        rank=rank(config, "time_step_rank"),
        bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", True),
        eps=above_0(config, "layer_norm_epsilon", 1e-5),
        tied=flag(config, "tie_word_embeddings", True),
        std=std_of(config, RANGE),
        rescaled=bool(config.get("rescale_prenorm_residual")),
        **_steps(config),
    )


def _steps(
    config: Config, prefix: str = "time_step_", floor: str = "floor", scheme: str = "init_scheme"
) -> dict[str, float]:
    """Return the arguments of a Mamba mixer for its initial step sizes."""
    found = step_sizes(config, prefix, floor)
    if (scale := initial(config, f"{prefix}scale", 1.0)) != 1:
        found["dt_scale"] = scale
    if config.get(f"{prefix}{scheme}") == "constant":
        found["dt_random"] = False
    return found


def mamba_ssm(config: Config) -> str:
    """Write a Mamba or Mamba-2 language model from the config of the official package."""
    inner = mapping(config, "ssm_cfg")
    require(inner, layer=("Mamba1", "Mamba2", None))
    require(config, attn_layer_idx=([], None), d_intermediate=(0, None), rms_norm=(True, None))
    multiple = whole(config, "pad_vocab_size_multiple", 8)
    second = inner.get("layer") == "Mamba2"
    return _mamba_text(
        "mamba2" if second else "mamba",
        dim=whole(config, "d_model"),
        depth=whole(config, "n_layer"),
        vocabulary=-(-whole(config, "vocab_size") // multiple) * multiple,
        state=whole(inner, "d_state", 128 if second else 16),
        expand=number(inner, "expand", 2),
        kernel=whole(inner, "d_conv", 4),
        bias=flag(inner, "bias", False),
        conv_bias=flag(inner, "conv_bias", True),
        eps=above_0(config, "norm_epsilon", 1e-5),
        tied=flag(config, "tie_embeddings", True),
        std=0.0,
        rescaled=True,
        **(_second(inner) if second else _first(inner)),
    )


def _first(inner: Config) -> dict[str, float | str]:
    """Return the arguments that only Mamba has, and those for initial step sizes, from `ssm_cfg`."""
    return {"rank": rank(inner, "dt_rank"), **_steps(inner, "dt_", "init_floor", "init")}


def _second(inner: Config) -> dict[str, float | str]:
    """Return the arguments that only Mamba-2 has, and those for initial step sizes, from `ssm_cfg`."""
    return {
        "head": whole(inner, "headdim", 64),
        "groups": whole(inner, "ngroups", 1),
        "ssm": whole_or(inner, "d_ssm", 0),
        "norm": flag(inner, "rmsnorm", True),
        "gate": "after" if flag(inner, "norm_before_gate", False) else "before",
        "skip_per_feature": flag(inner, "D_has_hdim", False),
        **limits({"time_step_limit": inner.get("dt_limit")}),
        **step_sizes(inner, "dt_", "init_floor"),
    }


def mamba2(config: Config) -> str:
    """Write a Mamba-2 language model from a config of transformers."""
    require(config, hidden_act="silu")
    expand, head = expansion(config), whole(config, "head_dim", 64)
    inner, heads = int(expand * whole(config, "hidden_size")), whole(config, "num_heads", 128)
    if heads * head != inner:
        raise UsageError(f"config.json: num_heads * head_dim is {heads * head}, but expand * hidden_size is {inner}")
    return _mamba_text(
        "mamba2",
        dim=whole(config, "hidden_size"),
        depth=depth_of(config),
        vocabulary=whole(config, "vocab_size"),
        state=whole(config, "state_size", 128),
        expand=expand,
        head=head,
        groups=whole(config, "n_groups", 8),
        kernel=whole(config, "conv_kernel", 4),
        bias=flag(config, "use_bias", False),
        conv_bias=flag(config, "use_conv_bias", True),
        eps=above_0(config, "layer_norm_epsilon", 1e-5),
        tied=flag(config, "tie_word_embeddings", False),
        std=std_of(config, RANGE),
        rescaled=bool(config.get("rescale_prenorm_residual")),
        **limits(config),
        **step_sizes(config),
        A_random=False,
    )


def limits(config: Config) -> dict[str, float]:
    """Return the limits of the step sizes, `dt_least` and `dt_most`, if a config has any."""
    found = config.get("time_step_limit") or [0.0, math.inf]
    ends = [math.inf if end == {"__float__": "Infinity"} else end for end in found] if isinstance(found, list) else []
    if len(ends) != 2 or not all(type(end) in (int, float) and end >= 0 for end in ends) or ends[0] == math.inf:
        raise UsageError(f"config.json: time_step_limit (dt_limit) must be two numbers of at least 0, not {found!r}")
    names = {"dt_least": 0.0, "dt_most": math.inf}
    return {name: end for (name, usual), end in zip(names.items(), ends, strict=True) if end != usual}


def _mamba_text(
    kind: str,
    *,
    dim: int,
    depth: int,
    vocabulary: int,
    eps: float,
    tied: bool,
    rescaled: bool,
    std: float,
    **block: float | str,
) -> str:
    """Return the spec. std: of the initial weights in transformers; 0: those of the official package.

    rescaled: whether the initial output projections are divided by the square root of the number of layers.
    """
    arguments = {**block, "eps": eps, **({"std": std} if std else {})}
    unembedding = normal(std) if std else "fan_in_uniform"
    head = "tie: embed" if tied else f'init: {{weight: "{unembedding}"}}'
    return f"""seqblocks: 1
about: {kind} language model, as its config.json says
use: [{kind}]

let: {{dim: {dim}, depth: {depth}, vocabulary: {vocabulary}}}

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim, init: {{weight: "{normal(std or 0.02)}"}}}}
    - repeat:
        name: layers
        times: depth
        steps:
          - {kind}_block: {{dim: dim, layers: {"layers" if rescaled else 1}, {written(arguments)}}}
    - rms_norm: {{name: norm_f, eps: {scalar(eps)}}}
    - unembed: {{bias: false, {head}}}

checkpoint:
  embed: backbone.embedding
  layers.{{layer}}.{kind}_block: backbone.layers.{{layer}}
  norm_f: backbone.norm_f
  unembed: lm_head
  layouts: {{hub: {{embed: backbone.embeddings}}}}
"""


def falcon_mamba(config: Config) -> str:
    """Write a FalconMamba language model: Mamba with norms (without gains) on dt, B and C."""
    require(config, hidden_act="silu", use_mambapy=(False, True, None))
    dim, low = whole(config, "hidden_size"), rank(config, "time_step_rank")
    inner = whole_or(config, "intermediate_size", int(number(config, "expand", 2) * dim))  # whatever `expand` says
    bias = scalar(flag(config, "use_bias", False))
    norm = f"gain: none, eps: {scalar(number(config, 'mixer_rms_eps', 1e-6))}"
    eps = scalar(above_0(config, "layer_norm_epsilon", 1e-5))
    conv_bias, weights = scalar(flag(config, "use_conv_bias", True)), normal(std_of(config, RANGE))
    residuals = "depth * inner" if config.get("rescale_prenorm_residual") else "inner"
    steps = {"dt_min": 0.001, "dt_max": 0.1, "dt_floor": 1e-4, "dt_scale": 1.0, "dt_random": True, **_steps(config)}
    low_end = "-spread" if steps["dt_random"] else "spread"
    step_bias = ", ".join(scalar(steps[name]) for name in ("dt_min", "dt_max", "dt_floor"))
    head = "tie: embed" if flag(config, "tie_word_embeddings", True) else f'init: {{weight: "{weights}"}}'
    return f"""seqblocks: 1
about: FalconMamba language model, as its config.json says

let: {{dim: {dim}, depth: {depth_of(config)}, vocabulary: {whole(config, "vocab_size")}}}

blocks:
  falcon_mamba_block:
    about: Mamba's block with norms on what its scan reads, matching transformers
    args: {{dim: int}}
    let:
      inner: {inner}
      low: {low or "ceil(dim / 16)"}
      state: {whole(config, "state_size", 16)}
      spread: {scalar(steps["dt_scale"])} / sqrt(low)
    steps:
      - residual:
          steps:
            - rms_norm: {{eps: {eps}, name: norm}}
            - linear:
                features: 2 * inner
                bias: {bias}
                init: {{weight: "{weights}", bias: {"zeros" if bias == "true" else "default"}}}
                as: [x, z]
                name: in_proj
            - causal_conv:
                from: x
                kernel: {whole(config, "conv_kernel", 4)}
                bias: {conv_bias}
                init: {{bias: {"zeros" if conv_bias == "true" else "default"}}}
                activation: silu
                as: u
                name: conv1d
            - linear:
                features: low + 2 * state
                bias: false
                init: {{weight: "{weights}"}}
                as: {{t: low, b: state, c: state}}
                name: x_proj
            - rms_norm: {{from: t, {norm}, as: dt_low}}
            - rms_norm: {{from: b, {norm}, as: B}}
            - rms_norm: {{from: c, {norm}, as: C}}
            - linear:
                from: dt_low
                features: inner
                init: {{weight: "uniform({low_end}, spread)", bias: "inverse_softplus({step_bias})"}}
                as: dt
                name: dt_proj
            - ssm: {{from: u, dt: dt, B: B, C: C, z: z, state: state}}
            - linear:
                features: dim
                bias: {bias}
                init:
                  weight: uniform(-1 / sqrt({residuals}), 1 / sqrt({residuals}))
                  bias: {"zeros" if bias == "true" else "default"}
                name: out_proj
    checkpoint:
      residual: mixer
      residual.norm: norm
      residual.ssm.A_log: mixer.A_log
      residual.ssm.D: mixer.D

model:
  input: {{tokens: vocabulary}}
  steps:
    - embed: {{features: dim, init: {{weight: "{weights}"}}}}
    - repeat: {{name: layers, times: depth, steps: [falcon_mamba_block: {{dim: dim}}]}}
    - rms_norm: {{name: norm_f, eps: {eps}}}
    - unembed: {{bias: false, {head}}}

checkpoint:
  embed: backbone.embeddings
  layers.{{layer}}.falcon_mamba_block: backbone.layers.{{layer}}
  norm_f: backbone.norm_f
  unembed: lm_head
"""

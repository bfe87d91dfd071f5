"""Nemotron-H from the config.json of transformers: each layer is Mamba-2, attention, a network, or experts."""

from __future__ import annotations

from seqblocks.checkpoint.families.dense import residual
from seqblocks.checkpoint.families.layers import used
from seqblocks.checkpoint.families.text import language, normal
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    check_choice,
    flag,
    follows,
    number,
    require,
    scalar,
    shared_heads,
    std_of,
    step_sizes,
    whole,
    whole_or,
    words,
    written,
)
from seqblocks.combinators import MAX_REPEATS
from seqblocks.errors import UsageError

WORDS = {
    "linear_attention": "memory", "full_attention": "attention", "mlp": "network", "moe": "experts",
    "mamba": "memory", "attention": "attention",
}  # fmt: skip
LETTERS = {"M": "memory", "*": "attention", "-": "network", "E": "experts"}  # of `hybrid_override_pattern`
OFFICIAL = "backbone.layers.{layer}"


def nemotron_h(config: Config) -> str:
    """Write a Nemotron-H or Nemotron 3 language model (arXiv:2504.03624), without layers for further tokens.

    Like transformers, it limits step sizes by `time_step_min`, not by `time_step_limit`.
    """
    require(config, mlp_hidden_act="relu2", mamba_hidden_act="silu", attention_bias=False, sliding_window=(None,))
    require(config, hidden_dropout=(0.0, 0, None))
    eps, layers = above_0(config, "layer_norm_epsilon", 1e-5), _layers(config)
    steps = {
        "memory": lambda: [f"- {_memory(config, eps)}"],
        "attention": lambda: [f"- {_attention(config)}"],
        "network": lambda: _network(config, whole(config, "intermediate_size", 21504)),
        "experts": lambda: _experts(config),
    }
    norm = f"rms_norm: {{eps: {scalar(eps)}, name: norm}}"
    kinds = {word: residual(word, [f"- {norm}", *steps[word]()]) for word in dict.fromkeys(layers)}
    model = language(config, "Nemotron-H language model", ["mamba2", "attention"], eps)
    model = model._replace(names=("backbone.embeddings", "backbone.norm_f"))
    return model.text(layers, used(kinds, layers), "\n".join(_names(config, layers)) + "\n")


def _layers(config: Config) -> list[str]:
    """Return the kind of each layer."""
    pattern = config.get("hybrid_override_pattern")
    if config.get("layers_block_type") is not None:
        found = [WORDS[kind] for kind in words(config, "layers_block_type", WORDS)]
    elif pattern is None:
        found = ["memory", "experts", "attention", "network"]
    elif isinstance(pattern, str) and pattern and set(pattern) <= LETTERS.keys():
        found = [LETTERS[letter] for letter in pattern]
    else:
        raise UsageError(f"config.json: hybrid_override_pattern must consist of M, *, - and E, not {pattern!r}")
    if not 0 < len(found) <= MAX_REPEATS:
        raise UsageError(f"config.json: there must be 1 to {MAX_REPEATS} layers, not {len(found)}")
    return found


def _memory(config: Config, eps: float) -> str:
    dim, head = whole(config, "hidden_size"), whole(config, "mamba_head_dim", 64)
    inner = whole(config, "mamba_num_heads", 128) * head
    arguments = {
        "state": whole(config, "ssm_state_size", 128), "ssm": inner, "expand": inner / dim, "head": head,
        "groups": whole(config, "n_groups", 8), "kernel": whole(config, "conv_kernel", 4),
        "bias": flag(config, "use_bias", False), "conv_bias": flag(config, "use_conv_bias", True), "eps": eps,
        "dt_least": number(config, "time_step_min", 0.001), **step_sizes(config), "A_random": False,
        "std": std_of(config),
        "std_all": not flag(config, "rescale_prenorm_residual", True),
    }  # fmt: skip
    return f"mamba2_mixer: {{dim: dim, layers: layers, {written(arguments)}}}"


def _attention(config: Config) -> str:
    heads, head = whole(config, "num_attention_heads", 32), whole_or(config, "head_dim", 128)
    follows(config, "attention_head_dim", head, "head_dim")
    arguments = {
        "heads": heads, "kv_heads": shared_heads(config, heads, absent=8), "head": head, "std": std_of(config)
    }  # fmt: skip
    return f"attention_mixer: {{dim: dim, cache: cache, {written(arguments)}}}"


def _linear(config: Config, features: int | str, name: str, bias: bool, source: str = "") -> str:
    zero = ", bias: zeros" if bias else ""
    init = f'init: {{weight: "{normal(std_of(config))}"{zero}}}'
    return f"- linear: {{{source}features: {features}, bias: {scalar(bias)}, {init}, name: {name}}}"


def _network(config: Config, hidden: int, prefix: str = "", source: str = "") -> list[str]:
    """Return a network of two linear maps. prefix: of their names. source: a key `from`, followed by a comma."""
    bias = flag(config, "mlp_bias", False)
    up = _linear(config, hidden, f"{prefix}up_proj", bias, source)
    return [up, "- squared_relu", _linear(config, "dim", f"{prefix}down_proj", bias)]


def _experts(config: Config) -> list[str]:
    latent = config.get("moe_latent_size")
    width: int | str = "dim" if latent is None else whole(config, "moe_latent_size")
    hidden, groups = whole(config, "moe_intermediate_size", 7688), whole_or(config, "n_group", 1)
    arguments: dict[str, float | str] = {
        "count": whole(config, "n_routed_experts", 8), "top": whole_or(config, "num_experts_per_tok", 2),
        "score": "sigmoid", "corrected": True, "normalize": flag(config, "norm_topk_prob", True), "groups": groups,
        "top_groups": whole_or(config, "topk_group", 1),
    }  # fmt: skip
    check_choice(arguments, "count")
    low = "from: low, " if latent is not None else ""  # the router reads the tokens at full width
    up, down = _linear(config, hidden, "up_proj", False, low), _linear(config, width, "down_proj", False)
    inner = [up, "- squared_relu", down]
    body = ", ".join(f"{{{step[2:]}}}" if ":" in step else step[2:] for step in inner)
    router = f'init: {{router.weight: "{normal(std_of(config))}"}}'
    bias, factor = flag(config, "mlp_bias", False), number(config, "routed_scaling_factor", 1.0)
    shared = whole(config, "moe_shared_expert_intermediate_size", 7688)
    return [
        "- identity: {as: read}",
        *_network(config, shared, "shared_", "from: read, "),
        "- identity: {as: for_all}",
        *[_linear(config, width, "fc1_latent_proj, as: low", bias, "from: read, ")] * (latent is not None),
        f"- experts: {{from: read, {written(arguments)}, {router}, steps: [{body}]}}",
        *[f"- scale: {{by: {scalar(factor)}, name: scaled}}"] * (factor != 1.0),
        *[_linear(config, "dim", "fc2_latent_proj", bias)] * (latent is not None),
        "- add: {with: for_all}",
    ]


def _names(config: Config, layers: list[str]) -> list[str]:
    ours, theirs = "layers.{layer}", f"{OFFICIAL}.mixer"
    lines = [f"{ours}.{word}.norm: {OFFICIAL}.norm" for word in dict.fromkeys(layers)]
    if "memory" in layers:
        lines.append(f"{ours}.memory.mamba2_mixer: {theirs}")
    if "attention" in layers:
        lines.append(f"{ours}.attention.attention_mixer: {theirs}")
    if "network" in layers:
        lines += [f"{ours}.network.{name}: {theirs}.{name}" for name in ("up_proj", "down_proj")]
    if "experts" in layers:
        own = f"{ours}.experts.experts"
        lines += [f"{ours}.experts.shared_{name}: {theirs}.shared_experts.{name}" for name in ("up_proj", "down_proj")]
        lines += [f"{own}.router.weight: {theirs}.gate.weight"]
        lines += [f"{own}.router.correction: {theirs}.gate.e_score_correction_bias"]
        lines += [f"{own}.{{expert}}.{name}: {theirs}.experts.{{expert}}.{name}" for name in ("up_proj", "down_proj")]
        if config.get("moe_latent_size") is not None:
            lines += [f"{ours}.experts.fc{at}_latent_proj: {theirs}.fc{at}_latent_proj" for at in (1, 2)]
    return lines

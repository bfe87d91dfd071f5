"""OLMo hybrid from the config.json of transformers."""

from __future__ import annotations

from seqblocks.checkpoint.families.layers import TYPES, decoder, gated_network, layer_map, layer_types, used
from seqblocks.checkpoint.families.text import language
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    head_of,
    initial,
    mapping,
    require,
    rotary,
    std_of,
    step_sizes,
    whole,
    whole_or,
    written,
)

# In attention layers, transformers saves one norm under a different name than the releases.
LAYOUT = """layouts:
  transformers: {"layers.{layer}.postnorm_layer.token.norm": "model.layers.{layer}.feedforward_layer_norm"}
"""


def olmo_hybrid(config: Config) -> str:
    """Write an OLMo hybrid language model: Gated DeltaNet, and attention followed by norms."""
    eps, depth = above_0(config, "rms_norm_eps", 1e-6), depth_of(config)
    usual = [TYPES[at % 4 == 3] for at in range(depth)]
    types = layer_types(config, usual if TYPES[1] in usual else [*usual[:-1], TYPES[1]])
    layers = ["memory" if kind == TYPES[0] else "attention" for kind in types]
    network = gated_network(config)
    kinds = used(
        {
            "memory": decoder(_memory(config), network, eps),
            "attention": decoder(_attention(config, eps), network, eps, verb="postnorm_layer"),
        },
        layers,
    )
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    names = layer_map(
        kinds, ("attention_layer_norm", "feedforward_layer_norm"), {"gated_deltanet_mixer": "linear_attn"},
        {"swiglu": "mlp"},
    ) + layer_map(kinds, norms, {"attention_mixer": "self_attn"}, {"swiglu": "mlp"}, "postnorm_layer")  # fmt: skip
    model = language(config, "OLMo hybrid language model", ["deltanet", "attention", "hybrids"], eps)
    return model.text(layers, kinds, names + (LAYOUT if "attention" in kinds else ""))


def _memory(config: Config) -> str:
    all_heads = whole(config, "num_attention_heads")
    heads = whole_or(config, "linear_num_key_heads", all_heads)
    head = whole_or(config, "linear_key_head_dim", int(0.75 * whole(config, "hidden_size") / heads))
    arguments = {
        "heads": heads,
        "value_heads": whole_or(config, "linear_num_value_heads", all_heads),
        "head": head,
        "expand_v": whole_or(config, "linear_value_head_dim", 2 * head) / head,
        "kernel": whole(config, "linear_conv_kernel_dim", 4),
        "negative": flag(config, "linear_allow_neg_eigval", True),
        "std": std_of(config),
        **step_sizes(config, "linear_dt_", "init_floor"),
    }
    low, high = initial(config, "linear_a_log_min", 0.0), initial(config, "linear_a_log_max", 16.0)
    if low < high:  # otherwise, the config describes no initial values
        arguments |= {"A_min": low, "A_max": high}
    return f"gated_deltanet_mixer: {{dim: dim, {written(arguments)}}}"


def _attention(config: Config, eps: float) -> str:
    head_of(config)
    require(config, linear_use_gate=True)
    heads, bias = whole(config, "num_attention_heads"), flag(config, "attention_bias", False)
    arguments = {
        "heads": heads,
        "kv_heads": whole_or(config, "num_key_value_heads", heads),
        "rotary": _rotary(config),
        "normed": True,
        "bias": bias,
        "bias_out": bias,
        "eps": eps,
        "std": std_of(config),
    }
    return f"attention_mixer: {{dim: dim, cache: cache, {written(arguments)}}}"


def _rotary(config: Config) -> float:
    """Return the base of rotary positions; 0 if it is null in the config."""
    found = mapping(config, "rope_parameters")
    if found.get("rope_theta", config.get("rope_theta", 10000.0)) is None:
        return 0
    return rotary(config)[0]

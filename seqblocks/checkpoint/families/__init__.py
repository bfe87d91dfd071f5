"""Generate specs from the config.json of published models; one function per family returns the spec as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from seqblocks.checkpoint.families import (
    deepseek,
    dense,
    falcon,
    fla,
    gpt_neox,
    gpt_oss,
    granite,
    griffin,
    jamba,
    kimi,
    lfm,
    mamba,
    minimax,
    nemotron,
    olmo,
    qwen,
    rwkv,
    zamba,
)
from seqblocks.checkpoint.families.unread import check_all_read, check_not_quantized
from seqblocks.checkpoint.families.values import Config, Recorded, mapping, renamed, require
from seqblocks.checkpoint.families.xlstm import xlstm
from seqblocks.errors import UsageError, listing

FAMILIES: dict[str, Callable[[Config], str]] = {
    "mamba": mamba.mamba,
    "mamba_ssm": mamba.mamba_ssm,
    "mamba2": mamba.mamba2,
    "falcon_mamba": mamba.falcon_mamba,
    "xlstm": xlstm,
    "llama": dense.llama,
    "mistral": dense.mistral,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "smollm3": dense.smollm3,
    "olmo2": dense.olmo2,
    "phi3": dense.phi3,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "mixtral": dense.mixtral,
    "qwen3_moe": dense.qwen3_moe,
    "minimax": minimax.minimax,
    "deepseek_v2": deepseek.deepseek_v2,
    "deepseek_v3": deepseek.deepseek_v3,
    "lfm2": lfm.lfm2,
    "lfm2_moe": lfm.lfm2_moe,
    "gpt_neox": gpt_neox.gpt_neox,
    "gpt_oss": gpt_oss.gpt_oss,
    "recurrent_gemma": griffin.recurrent_gemma,
    "qwen3_next": qwen.qwen3_next,
    "qwen3_5_text": qwen.qwen3_5_text,
    "olmo_hybrid": olmo.olmo_hybrid,
    "kimi_linear": kimi.kimi_linear,
    "jamba": jamba.jamba,
    "bamba": jamba.bamba,
    "granitemoehybrid": granite.granitemoehybrid,
    "falcon_h1": falcon.falcon_h1,
    "nemotron_h": nemotron.nemotron_h,
    "zamba": zamba.zamba,
    "zamba2": zamba.zamba2,
    "rwkv": rwkv.rwkv,
    "linear_attn": fla.linear_attention,
    "gla": fla.gla,
    "retnet": fla.retnet,
    "delta_net": fla.delta_net,
    "gated_deltanet": fla.gated_deltanet,
    "gated_deltaproduct": fla.gated_deltaproduct,
    "kda": fla.kda,
    "hgrn2": fla.hgrn2,
    "rwkv7": fla.rwkv7,
}


class Composite(NamedTuple):
    """A model that reads more than text.

    family: of its `text_config`. official: the official name of what that family calls `model`. defaults: entries that
    releases leave out. required: values that entries must have, since the library ignores others.
    """

    family: str
    official: str
    defaults: Mapping[str, Any]
    required: Mapping[str, Any]


COMPOSITE = {
    "qwen3_5": Composite("qwen3_5_text", "model.language_model", {}, {}),
    "gemma3": Composite("gemma3_text", "language_model.model", {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8,
    }, {"final_logit_softcapping": (None,)}),
}  # fmt: skip

# Aliases of entries, from `attribute_map` in the configs of transformers.
ALIASES: dict[str, dict[str, str]] = {
    "recurrent_gemma": {"sliding_window": "attention_window_size"},
    "kimi_linear": {
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "falcon_h1": {"layer_types": "layers_block_type"},
    "nemotron_h": {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    "jamba": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "minimax": {"num_experts": "num_local_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "rwkv": {"max_position_embeddings": "context_length"},
    "zamba": {"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
    "zamba2": {"layer_types": "layers_block_type"},
}


def spec_text(config: Any) -> str:
    """Return a spec, as YAML, of the model in a config.json.

    Raises UsageError if it is not supported, or has entries that nothing reads and that may change the model.
    """
    if not isinstance(config, dict):
        raise UsageError("config.json is not a mapping")
    kind = config.get("model_type") or ("mamba_ssm" if {"d_model", "n_layer"} <= config.keys() else None)
    if isinstance(kind, str) and kind in COMPOSITE:
        return _language_model(config, kind)
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = f"config.json is of model_type {kind!r}" if kind else "config.json has no model_type"
        known = listing(FAMILIES, len(FAMILIES))
        raise UsageError(f"{what}, but seqblocks can only generate specs for {known}: pass a spec")
    check_not_quantized(config)
    entries = Recorded(renamed(config, ALIASES.get(kind, {})))
    try:
        text = FAMILIES[kind](entries)
    except ZeroDivisionError:
        raise UsageError(f"config.json: the sizes do not fit a {kind} model: heads have no features") from None
    check_all_read(entries, kind)
    return text


def _language_model(config: dict[str, Any], kind: str) -> str:
    """Return the spec of the language model in a model that reads more than text."""
    check_not_quantized(config)
    outside = Recorded({key: value for key, value in config.items() if key != "text_config"})
    inside = text_config(outside, mapping(config, "text_config"))
    require(inside, **COMPOSITE[kind].required)
    check_all_read(outside, kind)
    steps, separator, names = spec_text(inside).partition("\ncheckpoint:\n")
    return steps + separator + re.sub(r'(?<=[ "])model\.', f"{COMPOSITE[kind].official}.", names)


def text_config(outside: Config, inside: Config) -> dict[str, Any]:
    """Return the config.json of the language model in a model that reads more than text.

    outside: the config.json of the model. inside: its `text_config`.
    """
    family, _, defaults, _ = COMPOSITE[outside["model_type"]]
    found = {**defaults, **inside, "model_type": family}
    if outside.get("tie_word_embeddings") is not None:  # the entry inside then has no effect
        found["tie_word_embeddings"] = outside["tie_word_embeddings"]
    return found

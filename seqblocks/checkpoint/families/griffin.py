"""RecurrentGemma from the config.json of transformers."""

from __future__ import annotations

import math
import struct

from seqblocks.checkpoint.families.layers import used
from seqblocks.checkpoint.families.text import language
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    head_of,
    initial,
    number,
    require,
    rotary,
    rotated,
    scalar,
    whole,
    whole_or,
    words,
    written,
)

OURS, OFFICIAL = "layers.{layer}.griffin_layer", "model.layers.{layer}"
MIXERS = {"r": "griffin_mixer", "a": "attention_mixer"}  # of each kind of layer


def recurrent_gemma(config: Config) -> str:
    """Write a RecurrentGemma language model."""
    require(config, hidden_activation=("gelu_pytorch_tanh", None))
    require(config, embeddings_scale_by_sqrt_dim=True)
    dim, heads, head = whole(config, "hidden_size"), whole(config, "num_attention_heads"), head_of(config)
    eps, (base, part) = above_0(config, "rms_norm_eps", 1e-6), rotary(config, 0.5)
    depth = depth_of(config)
    width, kernel = whole_or(config, "lru_width", dim), whole(config, "conv1d_width", 4)
    variance = initial(config, "w_init_variance_scale", 0.01)
    std = math.sqrt(variance / kernel)
    common = {"hidden": whole(config, "intermediate_size") // 2, "eps": eps, "layers": depth, "std": std}
    layer = f"griffin_layer: {{dim: dim, {written(common)}, mixer: "
    recurrent = {
        "width": width,
        "heads": heads,
        "kernel": kernel,
        "layers": depth,
        "std_conv": std,
        "std_gates": math.sqrt(variance / (width // heads)),
    }
    attention = {
        "heads": heads,
        "kv_heads": whole_or(config, "num_key_value_heads", heads),
        "window": whole(config, "attention_window_size", 2048),
        "rotary": base,
        "turned": rotated(head, part),
        "bias": flag(config, "attention_bias", False),
        "bias_out": True,
        "std": 1 / math.sqrt(dim),
        "std_out": math.sqrt(2 / (depth * dim)),
    }
    kinds = {
        "r": f"- {layer}[{{griffin_mixer: {{dim: dim, {written(recurrent)}}}}}]}}",
        "a": f"- {layer}[{{attention_mixer: {{dim: dim, {written(attention)}}}}}]}}",
    }
    listed = "_block_types" if config.get("block_types") is None else "block_types"  # the first in the releases
    found = words(config, listed, ("recurrent", "attention")) or ["recurrent"]
    blocks = ["griffin", "attention"]
    model = language(config, "RecurrentGemma language model", blocks, eps, gain="one_plus", tied=True)._replace(
        names=("model.embed_tokens", "model.final_norm"),
        std=std,
        before=f"- scale: {{by: {in_bfloat16(math.sqrt(dim))}, name: embedded}}",
        after=f"- soft_cap: {{cap: {scalar(number(config, 'logits_soft_cap', 30.0))}}}",
    )
    layers = [found[at % len(found)][0] for at in range(depth)]
    kinds = used(kinds, layers)
    names = [f"{OURS}: {OFFICIAL}"]
    names += [f"{OURS}.temporal.mixer.{MIXERS[kind]}: {OFFICIAL}.temporal_block" for kind in kinds]
    return model.text(layers, kinds, "\n".join(names) + "\n")


def in_bfloat16(number: float) -> float:
    """Return a number rounded to bfloat16, ties to even: transformers stores the embedding's scale in bfloat16."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])

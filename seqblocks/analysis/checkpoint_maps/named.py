"""Maps with a name, for parameters that many releases name alike: `{layout: swiglu, at: model.layers.{layer}.mlp}`."""

from __future__ import annotations

_GATED = {f"{name}_{kind}": f"{name}_proj.{kind}" for kind in ("weight", "bias") for name in ("gate", "up", "down")}
_NUMBERED = {
    f"{name}_{kind}": f"{theirs}.{kind}"
    for kind in ("weight", "bias")
    for name, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
_LLAMA = {"token.norm": "input_layernorm", "channel.norm": "post_attention_layernorm"}

# Our names below the key, with those of the release below `at`. The first must exist, the others may be absent.
NAMED: dict[str, dict[str, str]] = {
    "swiglu": _GATED,
    "swiglu_w123": _NUMBERED,
    "gqa": {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"},
    "llama": {
        **_LLAMA,
        "token.mixer.attention_mixer": "self_attn",
        **{f"channel.network.swiglu.{ours}": f"mlp.{theirs}" for ours, theirs in _GATED.items()},
    },
}

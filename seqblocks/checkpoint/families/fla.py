"""Language models of flash-linear-attention, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping

from seqblocks.checkpoint.families.text import Language, language, network_init, swiglu
from seqblocks.checkpoint.families.values import (
    Config,
    above_0,
    depth_of,
    flag,
    number,
    numbers,
    require,
    scalar,
    std_of,
    whole,
    whole_or,
    written,
)
from seqblocks.errors import UsageError

NAMES = ("model.embeddings", "model.norm")
OFFICIAL = "model.layers.{layer}"
LEARNED = ("product_map", "t2r_map", "hedgehog_map")  # feature maps with parameters


def gla(config: Config) -> str:
    """Write a language model of gated linear attention."""
    require(config, clamp_min=(None,), use_gk=True, use_gv=(False, None))
    return _model(config, "GLA", "gla", "gla_mixer", _attention(config, 4, 0.5, 1.0))


def linear_attention(config: Config) -> str:
    """Write a language model of linear attention with feature maps."""
    require(config, tie_feature_map_qk=(False, None), elementwise_affine=True)
    maps = {"elementwise_product": "product_map", "t2r": "t2r_map", "hedgehog": "hedgehog_map", "dpfp": "dpfp_map"}
    maps |= {"elu": "elu_plus_one", "relu": "relu", "identity": "identity"}
    require(config, feature_map=(*maps, None))
    found = maps[config.get("feature_map") or "elementwise_product"]
    arguments = {
        **_sizes(config, 4, 1.0, 1.0),
        "q_sums": flag(config, "norm_q", False),
        "k_sums": flag(config, "norm_k", False),
        "normalize": flag(config, "norm_feature_map", False),
    }
    width = int(whole(config, "hidden_size") * arguments["expand_k"]) // int(arguments["heads"])
    sizes = {"heads": arguments["heads"], "width": width}
    if found in LEARNED:
        sizes["std"] = std_of(config)
    step = f"{{{found}: {{{written(sizes)}}}}}" if found.endswith("_map") else found
    verb = "linear_attention_mixer"
    text = f"{verb}: {{dim: dim, {written(arguments)}, q_map: [{step}], k_map: [{step}]}}"
    names = [
        f"layers.{{layer}}.fla_layer.token.mixer.{verb}.{ours}_map.{found}: {OFFICIAL}.attn.feature_map_{ours}\n"
        for ours in "qk"
        if found in LEARNED
    ]
    return _text(config, "Linear attention", "linear_attention", verb, text, 4, "".join(names))


def retnet(config: Config) -> str:
    """Write a RetNet language model."""
    return _model(config, "RetNet", "retnet", "retention_mixer", _attention(config, 8, 1.0, 2.0), ratio=2)


def _attention(config: Config, heads: int, expand_k: float, expand_v: float) -> dict[str, float]:
    """Return the arguments that GLA and RetNet have in common; reject entries that would change the layer."""
    require(config, feature_map=(None,), use_short_conv=(False, None), use_output_gate=True, elementwise_affine=True)
    return _sizes(config, heads, expand_k, expand_v)


def _sizes(config: Config, heads: int, expand_k: float, expand_v: float) -> dict[str, float]:
    count = whole(config, "num_heads", heads)
    return {
        "heads": count,
        "kv_heads": whole_or(config, "num_kv_heads", count),
        "expand_k": number(config, "expand_k", expand_k),
        "expand_v": number(config, "expand_v", expand_v),
        "eps": _eps(config),
        "std": std_of(config),
    }


def delta_net(config: Config) -> str:
    """Write a DeltaNet language model."""
    activations = {"silu": "silu", "relu": "relu", "elu": "elu_plus_one", "identity": "none"}
    require(config, use_beta=True, use_short_conv=True, qk_norm="l2", use_output_norm=True)
    require(config, qk_activation=(*activations, None))
    arguments: dict[str, float | str] = {
        "heads": whole(config, "num_heads", 16),
        "expand_k": number(config, "expand_k", 1.0),
        "expand_v": number(config, "expand_v", 1.0),
        "kernel": whole(config, "conv_size", 4),
        "activation": activations[config.get("qk_activation") or "silu"],
        "gated": flag(config, "use_gate", False),
        "negative": flag(config, "allow_neg_eigval", False),
        "eps": _eps(config),
        "std": std_of(config),
    }
    return _model(config, "DeltaNet", "deltanet", "deltanet_mixer", arguments)


def gated_deltanet(config: Config) -> str:
    """Write a Gated DeltaNet language model."""
    require(config, use_gate=True, output_gate_activation=("swish", "silu", "sigmoid", None))
    opening = "sigmoid" if config.get("output_gate_activation") == "sigmoid" else "silu"
    arguments = {**_delta(config, 6, 256, 2.0), "opening": opening}
    return _model(config, "Gated DeltaNet", "deltanet", "gated_deltanet_mixer", arguments)


def gated_deltaproduct(config: Config) -> str:
    """Write a DeltaProduct language model, with forgetting or without."""
    require(config, use_output_gate=True, use_short_conv=True)
    arguments = {
        "writes": whole(config, "num_householder", 1),
        "heads": whole(config, "num_heads", 6),
        "head": whole(config, "head_dim", 256),
        "expand_v": number(config, "expand_v", 2.0),
        "kernel": whole(config, "conv_size", 4),
        "decays": flag(config, "use_forget_gate", False),
        "negative": flag(config, "allow_neg_eigval", False),
        "eps": _eps(config),
        "std": std_of(config),
    }
    return _model(config, "Gated DeltaProduct", "deltaproduct", "gated_deltaproduct_mixer", arguments)


def kda(config: Config) -> str:
    """Write a language model of Kimi Delta Attention."""
    bound = config.get("lower_bound")
    arguments = _delta(config, 16, 128, 1.0)
    if bound is not None:
        arguments |= {"decays": "bounded", "bound": number(config, "lower_bound")}
    return _model(config, "KDA", "kda", "kda_mixer", arguments)


def _delta(config: Config, heads: int, head: int, expand_v: float) -> dict[str, float | str]:
    """Return the arguments that Gated DeltaNet and KDA have in common."""
    require(config, use_short_conv=True)
    count = whole(config, "num_heads", heads)
    return {
        "heads": count,
        "value_heads": whole_or(config, "num_v_heads", count),
        "head": whole(config, "head_dim", head),
        "expand_v": number(config, "expand_v", expand_v),
        "kernel": whole(config, "conv_size", 4),
        "negative": flag(config, "allow_neg_eigval", False),
        "eps": _eps(config),
        "std": std_of(config),
    }


def _eps(config: Config) -> float:
    return above_0(config, "norm_eps", 1e-6)


def _hidden(config: Config, ratio: float, share: float = 2 / 3, multiple: int = 256) -> int:
    """Return the hidden width of the networks; if the config has none, a share of the model's width."""
    given = ratio if config.get("hidden_ratio") is None else number(config, "hidden_ratio")
    of_dim = whole(config, "hidden_size") * given * share
    return whole_or(config, "intermediate_size", -(-int(of_dim) // multiple) * multiple)


def _language(config: Config, about: str, use: list[str]) -> Language:
    require(config, attn=(None,), attnres_block_size=(None,))
    model = language(config, f"{about} language model of flash-linear-attention", use, _eps(config))
    return model._replace(names=NAMES)


def _model(
    config: Config, about: str, use: str, verb: str, arguments: Mapping[str, float | str], ratio: float = 4
) -> str:
    """Write a model with one kind of layer."""
    return _text(config, about, use, verb, f"{verb}: {{dim: dim, {written(arguments)}}}", ratio)


def _text(config: Config, about: str, use: str, verb: str, mixer: str, ratio: float, more_names: str = "") -> str:
    require(config, hidden_act=("swish", "silu", None))
    more = f"hidden: {_hidden(config, ratio)}, eps: {scalar(_eps(config))}, std: {scalar(std_of(config))}"
    layer = f"- fla_layer: {{dim: dim, {more}, mixer: [{{{mixer}}}]}}"
    names = f"layers.{{layer}}.fla_layer: {OFFICIAL}\nlayers.{{layer}}.fla_layer.token.mixer.{verb}: {OFFICIAL}.attn\n"
    layers = ["layer"] * depth_of(config)
    return _language(config, about, ["fla", use]).text(layers, {"layer": layer}, names + more_names)


def hgrn2(config: Config) -> str:
    """Write an HGRN2 language model; one parameter holds the lower bounds of the decays of all layers."""
    require(config, hidden_act=("swish", "silu", None), use_short_conv=(False, None), elementwise_affine=True)
    dim, depth = whole(config, "hidden_size"), depth_of(config)
    key = whole_or(config, "expand_ratio", 0) or dim // whole(config, "num_heads")
    norm = f"rms_norm: {{eps: {scalar(_eps(config))}, name: norm}}"
    bounded = flag(config, "use_lower_bound", True)
    least = "select: {from: lower, first: layer * dim, features: dim, as: least}"
    mixer = f"hgrn2_mixer: {{dim: dim, key: {key}, lower: least, std: {scalar(std_of(config))}}}"
    none = "constant: {features: dim, learned: false, value: 0, as: least}"
    network = f"swiglu: {{hidden: {_hidden(config, 4)}, init: {network_init(std_of(config))}}}"
    steps = [
        least if bounded else none,
        f"residual: {{from: input, name: token, steps: [{{{norm}}}, {{{mixer}}}]}}",
        f"residual: {{name: channel, steps: [{{{norm}}}, {{{network}}}]}}",
    ]
    names = [
        f"layers.{{layer}}.token.norm: {OFFICIAL}.attn_norm",
        f"layers.{{layer}}.token.hgrn2_mixer: {OFFICIAL}.attn",
        f"layers.{{layer}}.channel.norm: {OFFICIAL}.mlp_norm",
        swiglu("layers.{layer}.channel.swiglu", f"{OFFICIAL}.mlp"),
    ]
    model = _language(config, "HGRN2", ["hgrn"])
    if bounded:
        decays = f"- lower_decays: {{layers: {depth}, features: dim, as: lower}}"
        model = model._replace(before=f"- identity: {{as: h}}\n{decays}\n- identity: {{from: h, name: tokens}}")
        names.append("lower.weight: model.lower_bounds")
    return model.text(["layer"] * depth, {"layer": "\n".join(f"- {step}" for step in steps)}, "\n".join(names) + "\n")


def rwkv7(config: Config) -> str:
    """Write an RWKV-7 language model; its first layer is written separately, since later ones read its values."""
    require(config, hidden_act=("sqrelu", None), norm_first=True)
    dim, depth = whole(config, "hidden_size"), depth_of(config)
    if set(numbers(config, "value_dim") or [dim]) != {dim}:
        found = config["value_dim"]
        raise UsageError(f"config.json: value_dim is {found!r}, but seqblocks only supports {dim}")
    head = whole_or(config, "head_dim", 0) or dim // whole(config, "num_heads")
    eps = above_0(config, "norm_eps", 1e-5)
    mixer = {
        "head": head,
        "decay_rank": whole(config, "decay_low_rank_dim", 64),
        "erase_rank": whole(config, "a_low_rank_dim", 64),
        "value_rank": whole(config, "v_low_rank_dim", 16),
        "gate_rank": whole(config, "gate_low_rank_dim", 128),
        "eps": eps,
        "key_eps": 1e-6 if flag(config, "fuse_norm", True) else 1e-24,
    }
    norm = f"eps: {scalar(eps)}, bias: {scalar(flag(config, 'norm_bias', True))}"
    hidden = _hidden(config, 4, share=1, multiple=32)
    model = _language(config, "RWKV-7", ["rwkv7"])._replace(
        norm=f"layer_norm: {{name: norm, {norm}}}",
        embedding="uniform(-0.0001, 0.0001)",
        unembedding="orthogonal(0.5 * sqrt(max(1, vocabulary / dim)))",
    )
    return _rwkv7_text(model, depth, norm, written(mixer), hidden)


def _rwkv7_text(model: Language, depth: int, norm: str, mixer: str, hidden: int) -> str:
    channel = f"rwkv7_channel_mixer: {{dim: dim, hidden: {hidden}, layers: {depth}"
    first = f"""
- layer_norm: {{{norm}, name: pre_norm, as: first}}
- layer_norm: {{{norm}, name: attn_norm, as: normed}}
- rwkv7_mixer: {{dim: dim, values: normed, layers: {depth}, {mixer}, name: attn, as: {{mixed: dim, values: dim}}}}
- add: {{from: mixed, with: first}}
- residual:
    name: ffn
    steps: [{{layer_norm: {{{norm}, name: norm}}}}, {{{channel}}}}}]
"""
    layer = f"""
- identity: {{as: h}}
- layer_norm: {{{norm}, name: attn_norm}}
- rwkv7_mixer: {{dim: dim, values: values, layer: layer + 1, layers: {depth}, {mixer}, name: attn}}
- add: {{with: h}}
- residual: {{name: ffn, steps: [{{layer_norm: {{{norm}, name: norm}}}}, {{{channel}, layer: layer + 1}}}}]}}
"""
    names = ["pre_norm: model.layers.0.pre_norm"]
    for ours, official in (("", "0"), ("layers.{layer}.", "{layer + 1}")):
        names += [f"{ours}{part}: model.layers.{official}.{part}" for part in ("attn_norm", "attn")]
        names.append(f"{ours}ffn.norm: model.layers.{official}.ffn_norm")
        names.append(f"{ours}ffn.rwkv7_channel_mixer: model.layers.{official}.ffn")
    kinds = {"layer": layer}
    return model._replace(before=first).text(
        ["layer"] * (depth - 1), kinds, "\n".join(names) + "\n"
    )

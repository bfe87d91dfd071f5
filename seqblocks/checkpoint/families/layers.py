"""Layers of decoders: a token mixer and a network, each in a residual branch, and the official names of their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seqblocks.checkpoint.families.text import network_init, swiglu
from seqblocks.checkpoint.families.values import Config, depth_of, require, scalar, std_of, whole, words
from seqblocks.errors import UsageError

TYPES = ("linear_attention", "full_attention")  # of layers, in configs of transformers
OFFICIAL = "model.layers.{layer}"


def decoder(mixer: str, network: str, eps: float, gain: str = "plain", verb: str = "decoder_layer") -> str:
    """Return the step of a decoder layer as YAML."""
    return f"- {verb}: {{mixer: [{{{mixer}}}], network: [{{{network}}}], gain: {gain}, eps: {scalar(eps)}}}"


def gated_network(config: Config, bias: bool = False) -> str:
    """Return the step of a dense gated network as YAML."""
    require(config, hidden_act="silu")
    more = ", bias: true" if bias else ""
    return f"swiglu: {{hidden: {whole(config, 'intermediate_size')}{more}, init: {network_init(std_of(config))}}}"


def layer_map(
    kinds: Mapping[str, str],
    norms: tuple[str, str],
    mixers: Mapping[str, str],
    networks: Mapping[str, str],
    verb: str = "decoder_layer",
    bias: bool = False,
) -> str:
    """Return the lines of a map. norms, mixers, networks: official names within a layer, by our verbs.

    bias: whether dense networks have biases. Kinds that no layer uses are omitted, since an unused
    entry is an error.
    """
    steps = [text for text in kinds.values() if f"{verb}:" in text]
    ours = f"layers.{{layer}}.{verb}"
    lines = [f"{ours}.token.norm: {OFFICIAL}.{norms[0]}", f"{ours}.channel.norm: {OFFICIAL}.{norms[1]}"]
    for part, found in (("token.mixer", mixers), ("channel.network", networks)):
        for step, official in found.items():
            own, theirs = f"{ours}.{part}.{step}", f"{OFFICIAL}.{official}"
            if not any(f"{part.rpartition('.')[2]}: [{{{step}:" in text for text in steps):
                continue
            lines.append(swiglu(own, theirs, bias) if step == "swiglu" else f"{own}: {theirs}")
            if step == "experts":
                lines.append(swiglu(f"{own}.{{expert}}.swiglu", f"{theirs}.experts.{{expert}}"))
    return "\n".join(lines) + "\n" if steps else ""


def layer_types(config: Config, usual: Sequence[str]) -> list[str]:
    """Return the kind of each layer, as the config lists them or, without a list, the usual ones."""
    found = list(usual) if config.get("layer_types") is None else words(config, "layer_types", TYPES)
    depth = depth_of(config)
    if len(found) != depth:
        raise UsageError(f"config.json: layer_types has {len(found)} entries, but num_hidden_layers is {depth}")
    return found


def used(kinds: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Return the kinds of layer that a model has."""
    return {word: kinds[word] for word in dict.fromkeys(layers)}

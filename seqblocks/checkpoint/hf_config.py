"""Describe a model for transformers: the class that fits a spec, and its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from seqblocks import graph
from seqblocks.analysis.passes import lookahead
from seqblocks.graph import ModelSpec, Node
from seqblocks.types import Wire

MODEL_TYPE = "seqblocks"
ORIGIN = "converted_from"  # the entry of our config.json that stores the config.json that came with the weights
HEADS = ("unembed", "classifier")  # steps that compute scores from features
CAUSAL_LM, IMAGE_CLASSIFICATION, FEATURES = (
    "SeqblocksForCausalLM", "SeqblocksForImageClassification", "SeqblocksModel",
)  # fmt: skip


# Entries of the config of a model with experts: whether a call returns the routers' outputs, and weights of losses.
ROUTERS: dict[str, Any] = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "router_z_loss_coef": 0.0}


def hub_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of a model: its spec with all files in use, and the entries that transformers needs."""
    source = spec.source
    assert source is not None
    return {
        "model_type": MODEL_TYPE,
        "architectures": [architecture(spec)],
        "spec_name": source.name,
        "spec": source.text,
        "overrides": dict(source.overrides),
        "files": dict(source.files),
        "tie_word_embeddings": True,  # transformers then applies the ties of the spec
        **sizes(spec),
        **({ORIGIN: source.origin} if source.origin else {}),
        **(ROUTERS if any(isinstance(node, graph.ExpertsNode) for node in graph.walk(spec.graph)) else {}),
    }


def original(config: Any) -> dict[str, Any] | None:
    """Return the config.json that came with the weights: the given one or, in one of ours, the entry for it."""
    if isinstance(config, dict) and config.get("model_type") == MODEL_TYPE:
        config = config.get(ORIGIN)
    return config if isinstance(config, dict) and config else None


def with_origin(spec: ModelSpec, origin: Mapping[str, Any] | None) -> ModelSpec:
    """Return a spec with the config.json that came with the weights; a spec without text cannot store one."""
    if spec.source is None or origin is None:
        return spec
    return spec._replace(source=spec.source._replace(origin=origin))


def config_text(config: Any) -> str:
    """Return the text of a config.json, as transformers writes it."""
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes that transformers reads in a config: vocabulary, and number of classes."""
    found = {}
    if spec.input.kind == "tokens":
        found["vocab_size"] = spec.input.features
    if image_classification_obstacle(spec) is None:
        assert spec.output
        found["num_labels"] = spec.output.features
    return found


def architecture(spec: ModelSpec) -> str:
    """Return the most specific class that fits a spec; every spec fits the one that returns features."""
    if causal_lm_obstacle(spec) is None:
        return CAUSAL_LM
    return FEATURES if image_classification_obstacle(spec) else IMAGE_CLASSIFICATION


def causal_lm_obstacle(spec: ModelSpec) -> str | None:
    """Return why a spec is not a causal language model, or None if it is one."""
    wire = logits(spec)
    if spec.input.kind != "tokens":
        return f"it reads {spec.input}, but a language model reads token ids (`input: {{tokens: …}}`)"
    if wire is None or wire.kind != "sequence" or wire.features != spec.input.features:
        scores = f"[batch, seq, {spec.input.features}], one score per token of the vocabulary"
        return f"its output is {wire}, but a language model returns {scores} (`unembed`)"
    if graph.takes_frames(spec.graph):
        return "it changes the rate of its tokens, but a language model makes one for each"
    ahead = lookahead.of_outputs(spec).get(logits_name(spec) or "")
    if ahead and ahead.tokens:
        return "its output depends on later tokens"
    return None


def is_causal(spec: ModelSpec) -> bool:
    """Return whether no output depends on later tokens of the input."""
    ahead = lookahead.find(spec)
    return ahead is None or not ahead.tokens


def has_vectors(spec: ModelSpec) -> bool:
    """Return whether an output is a vector for the whole sequence."""
    wires = [spec.types[value] for value in spec.graph.results]
    return any(wire is not None and wire.kind == "vector" and not wire.context for wire in wires)


def image_classification_obstacle(spec: ModelSpec) -> str | None:
    """Return why a spec does not classify images, or None if it does."""
    wire = logits(spec)
    if spec.input.kind != "image" or len(spec.inputs) > 1:
        return f"it reads {spec.input_text}, but an image classifier reads one image (`input: {{image: …}}`)"
    if wire is None or wire.kind != "vector":
        return f"its output is {wire}, but a classifier returns [batch, classes] (`pool`, then `classifier`)"
    return None


def logits_name(spec: ModelSpec) -> str | None:
    """Return the name of the output with the scores: `logits`, or the first. None if outputs have no names."""
    return "logits" if "logits" in spec.outputs else next(iter(spec.outputs), None)


def logits(spec: ModelSpec) -> Wire | None:
    """Return the type of the output with the scores."""
    name = logits_name(spec)
    return spec.output if name is None else spec.outputs[name]


def head(spec: ModelSpec) -> Node | None:
    """Return the step that computes scores from features, or None; the last such step if the output has no name."""
    nodes = [] if spec.outputs else [node for node in spec.graph.nodes if node.verb in HEADS]
    return nodes[-1] if nodes and len(nodes[-1].reads) == 1 else None


def without_head(spec: ModelSpec) -> ModelSpec:
    """Return a spec without its head, whose output is the head's input; without a head, the spec itself."""
    last = head(spec)
    if last is None:
        return spec
    nodes = spec.graph.nodes[: spec.graph.nodes.index(last)]
    return spec._replace(graph=spec.graph._replace(nodes=nodes, result=last.reads[0]))


def embedding(spec: ModelSpec) -> Node | None:
    """Return the step that turns token ids into features, or None if no such step reads the input."""
    return next((node for node in spec.graph.nodes if node.verb == "embed" and node.reads == (spec.graph.input,)), None)

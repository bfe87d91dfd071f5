"""What llama.cpp must know of a model: metadata of a GGUF file, read from the graph and the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.errors import RunError, UsageError
from seqblocks.graph import ExpertsNode, ModelSpec, Node, walk

CONTEXT = 2**20  # of models whose state does not limit the length; llama.cpp requires a number
Value = bool | int | float | str | list[Any]
Metadata = dict[str, Value]


class Found(NamedTuple):
    """A model of transformers: its config.json, and the nodes of its graph by layers.

    shapes: of the tensors of the GGUF file, empty until they are known.
    """

    config: Mapping[str, Any]
    nodes: list[list[Node]]
    outside: list[Node]
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    def ops(self, verb: str, layer: int | None = None) -> list[Any]:
        """Return the ops with a verb in a layer, or in all of them."""
        nodes = self.nodes if layer is None else [self.nodes[layer]]
        return [node.op for each in nodes for node in each if node.verb == verb and node.op is not None]

    def op(self, verb: str, layer: int | None = None) -> Any:
        """Return the first op with a verb, or None."""
        return next(iter(self.ops(verb, layer)), None)

    def shape(self, verb: str, parameter: str, layer: int) -> tuple[int, ...]:
        """Return the shape of a parameter of the first step with a verb in a layer."""
        return next(node.parameters[parameter].shape for node in self.nodes[layer] if node.verb == verb)

    @property
    def experts(self) -> Any:
        """Return the arguments of the experts, or None."""
        nodes = (node for each in self.nodes for node in each)
        return next((node.arguments for node in nodes if isinstance(node, ExpertsNode)), None)

    def size(self, tensor: str, axis: int, layer: int | None = None) -> int:
        """Return the size of an axis of a tensor in a layer, or in the first layer that has it; 0 if there is none."""
        layers = range(len(self.nodes)) if layer is None else (layer,)
        return next((self.shapes[name][axis] for at in layers if (name := f"blk.{at}.{tensor}") in self.shapes), 0)

    def has(self, tensor: str) -> list[bool]:
        """Return for each layer whether it has a tensor."""
        return [f"blk.{at}.{tensor}" in self.shapes for at in range(len(self.nodes))]


def found_in(model: ModelSpec, config: Mapping[str, Any]) -> Found:
    """Return a model with its config.json. Raises RunError if it has no layers, as all families have."""
    layers = next((node for node in model.graph.nodes if node.name == "layers" and node.bodies), None)
    if layers is None:
        raise RunError("its spec is another one than its config.json describes: no step is named `layers`")
    outside = [node for node in model.graph.nodes if node is not layers]
    return Found(config, [list(walk(body)) for body in layers.bodies.values()], outside)


def metadata(found: Found) -> Metadata:
    """Return the metadata that most architectures read, under the names of llama.cpp."""
    vocabulary, dim = found.shapes["token_embd.weight"]
    return {
        "context_length": _context_length(found),
        "embedding_length": dim,
        "block_count": len(found.nodes),
        "vocab_size": vocabulary,
        **_epsilon(found),
        **_networks(found),
        **_attention(found),
        **_positions(found),
        **_states(found),
    }


def _context_length(found: Found) -> int:
    limit = found.config.get("max_position_embeddings") if found.op("rotary") else None
    if limit is None:
        return CONTEXT
    if type(limit) is not int or limit < 1:
        what = "max_position_embeddings must be a whole number of at least 1"
        raise UsageError(f"config.json: {what}, not {limit!r}")
    return min(limit, 2**32 - 1)  # the largest number of its kind


def _epsilon(found: Found) -> Metadata:
    norm: Any = next(node.op for node in found.outside if node.verb in ("rms_norm", "layer_norm"))
    name = {"rms_norm": "layer_norm_rms_epsilon", "layer_norm": "layer_norm_epsilon"}[norm.verb]
    return {f"attention.{name}": float(norm.eps)}


def same(values: Sequence[Any]) -> Any:
    """Return the value that all layers have, or the list."""
    return values[0] if len(set(values)) == 1 else list(values)


def _networks(found: Found) -> Metadata:
    depth = range(len(found.nodes))
    hidden = [
        found.size("ffn_down.weight", 1, at) or found.size("ffn_down_exps.weight", -1, at) for at in depth
    ]  # fmt: skip
    made: Metadata = {"feed_forward_length": same(hidden)}
    if experts := found.experts:
        factor = next((op.by for node in found.nodes for op in _factors(node)), experts.factor)
        made |= {
            "expert_count": experts.count,
            "expert_used_count": experts.top,
            "expert_feed_forward_length": found.size("ffn_down_exps.weight", -1),
            "expert_gating_func": {"softmax": 1, "sigmoid": 2}[experts.score],
            "expert_weights_norm": bool(experts.normalize),
            "expert_weights_scale": float(factor),
            "leading_dense_block_count": found.has("ffn_down_exps.weight").index(True),
        }
    if shared := found.size("ffn_down_shexp.weight", 1):
        made["expert_shared_feed_forward_length"] = shared
    return made


def _factors(nodes: list[Node]) -> Iterator[Any]:
    """Yield the factors of the experts' results: a `scale` right after `experts`."""
    outer = [node for node in nodes if node.verb != "router"]
    for at, node in enumerate(outer):
        if isinstance(node, ExpertsNode):
            rest = (each for each in outer[at + 1 :] if each.verb not in EXPERT_STEPS)
            after = next(rest, None)
            if after is not None and after.verb == "scale":
                yield after.op


EXPERT_STEPS = ("swiglu", "linear", "squared_relu")  # of which the bodies of `experts` consist


def _attention(found: Found) -> Metadata:
    op = found.op("attention")
    if op is None:
        return {"attention.head_count": 0}
    heads = [len(found.ops("attention", at)) * op.shared for at in range(len(found.nodes))]
    head = found.size("attn_output.weight", 1, heads.index(op.shared)) // op.heads
    made: Metadata = {
        "attention.head_count": op.heads,
        "attention.head_count_kv": same(heads),
        "attention.key_length": head,
        "attention.value_length": head,
    }
    windows = [each.window for each in found.ops("attention")]
    if any(windows):
        made["attention.sliding_window"] = max(windows)
    return made


# --- positions -----------------------------------------------------------------------------------------------------


def _positions(found: Found) -> Metadata:
    made: Metadata = {}
    for at in range(len(found.nodes)):
        op, attention = found.op("rotary", at), found.op("attention", at)
        if op is not None and attention is not None:
            suffix = "_swa" if attention.window else ""
            made[f"rope.freq_base{suffix}"] = float(op.base)
            if not suffix or "rope.dimension_count" not in made:
                head = found.size("attn_output.weight", 1, at) // attention.heads
                made["rope.dimension_count"] = op.features or head
            if op.scaling is not None:
                made |= _scaling(op.scaling)
    return made


def _scaling(scaling: Any) -> Metadata:
    """Return how angles are scaled; those of llama3 and longrope have tensors, see `divisors`."""
    made: Metadata = {}
    factor, attention = scaling.factor or 1.0, scaling.attention_factor
    if scaling.type in ("linear", "yarn"):
        made |= {"rope.scaling.type": scaling.type, "rope.scaling.factor": float(factor)}
    if scaling.type == "yarn":
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        made |= {"rope.scaling.original_context_length": scaling.original_length}
        made |= {"rope.scaling.attn_factor": float(attention / usual)} if attention else {}
    if scaling.type == "longrope":
        usual = math.sqrt(1 + math.log(factor) / math.log(scaling.original_length)) if factor > 1 else 1.0
        made |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": scaling.original_length,
            "rope.scaling.attn_factor": float(attention or usual),
        }
    return made


def divisors(scaling: Any, base: float, features: int) -> dict[str, Tensor]:
    """Return the tensors with the divisors of all frequencies that llama.cpp reads for llama3 and longrope."""
    if scaling.type == "longrope":
        pairs = (("long", scaling.long_factor), ("short", scaling.short_factor))
        return {f"rope_factors_{name}.weight": torch.tensor(values) for name, values in pairs}
    if scaling.type != "llama3":
        return {}
    length = scaling.original_length
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    waves = 2 * math.pi * base ** (torch.arange(0, features, 2, dtype=torch.float64) / features)
    share = ((length / waves - low) / (high - low)).clamp(0, 1)  # 1: short waves, which do not change
    return {"rope_freqs.weight": (1 / (share + (1 - share) / scaling.factor)).float()}


def scaling_obstacle(scaling: Any, kinds: str) -> str | None:
    """Return why an architecture that knows some kinds of scaling cannot compute this one, or None."""
    if scaling.type == "linear" and scaling.factor == 1:
        return None
    if scaling.type not in kinds.split():
        return f"its graph has no rope_type {scaling.type!r}"
    if scaling.type == "yarn":
        usual: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
        usual |= {} if "mscale" in kinds.split() else {"mscale": None, "mscale_all_dim": None}
        for name, value in usual.items():
            if getattr(scaling, name) not in (None, value):
                return f"its yarn has {name} {value}, not {getattr(scaling, name)}"
    return None


# --- states --------------------------------------------------------------------------------------------------------


def _states(found: Found) -> Metadata:
    """Return the sizes of Mamba and Mamba-2."""
    if found.op("ssm") is None and found.op("time_step") is None:
        return {}
    inner = found.size("ssm_out.weight", 1)
    made: Metadata = {"ssm.conv_kernel": found.op("causal_conv").kernel, "ssm.inner_size": inner}
    if found.op("ssm"):
        rank = found.size("ssm_dt.weight", 1)
        return made | {"ssm.state_size": found.size("ssm_a", 1), "ssm.time_step_rank": rank}
    groups = found.op("linear_attention").heads
    return made | {
        "ssm.state_size": (found.size("ssm_conv1d.weight", 0) - inner) // (2 * groups),
        "ssm.time_step_rank": found.size("ssm_dt.bias", 0),
        "ssm.group_count": groups,
    }


def check_heads(found: Found) -> None:
    """Raise RunError if layers have attention with different numbers of heads: no release has."""
    if len({(op.heads, op.shared, op.scale, op.soft_cap) for op in found.ops("attention")}) > 1:
        raise RunError("its layers have different kinds of attention")

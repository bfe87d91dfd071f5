"""What a graph costs: bytes, multiply-accumulates, state. Counted from the declarations alone."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.errors import UsageError, listing, visible
from seqblocks.graph import Graph, ModelSpec
from seqblocks.language.vocabulary import did_you_mean

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
DTYPES = tuple(name for name in BYTES if name != "int64")  # that a model may have
SHORT = {"f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16", "half": "float16"}
SHORT |= {"bf16": "bfloat16", "f64": "float64", "fp64": "float64", "double": "float64", "float": "float32"}


def dtype_named(text: str, what: str) -> str:
    """A model's dtype by any of its usual names, or as torch prints it. UsageError, which says `what` is wrong."""
    name = text.removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in DTYPES:
        hint = did_you_mean(name, [*DTYPES, *SHORT]) or f"one of {listing(DTYPES)}"
        raise UsageError(f"{what} {visible(text)} is not a dtype of a model: {hint}")
    return name


def state_bytes(body: Graph, dtype: str) -> int:
    """Bytes of the state of one sequence, for a model of `dtype`."""
    total = 0
    for node in graph.walk(body):
        total += sum(s.numel * BYTES[dtype if s.dtype == "model" else s.dtype] for s in node.state.values())
    return total


def params_bytes(body: Graph, dtype: str) -> int:
    """Bytes of the parameters, tied ones once."""
    every = (item.parameter for item in graph.parameters(body) if item.tied is None)
    return sum(p.numel * BYTES["float32" if p.full_precision else dtype] for p in every)


def macs(body: Graph, tokens: int | None) -> float | None:
    """Multiply-accumulates per token of the sequence; a step behind a pooling is shared by all `tokens`."""
    total = 0.0
    for node in body.nodes:
        here = node_macs(node, tokens)
        if here is None:
            return None
        total += here
    return total


def node_macs(node: graph.Node, tokens: int | None) -> float | None:
    """Of one node, per token."""
    if node.bodies:
        inside = [macs(body, tokens) for body in node.bodies.values()]
        if any(m is None for m in inside):
            return None
        return sum(m for m in inside if m is not None) * max(1, len(node.directions))
    here = node.macs_at(tokens)
    if node.type and node.type.kind == "vector" and here:
        return here / tokens if tokens else None
    return here / node.type.every if node.type else float(here)


def input_macs(body: Graph, tokens: int | None) -> float | None:
    """Multiply-accumulates for one whole input, each step at the number of tokens that it has itself."""
    each = [node_input_macs(node, tokens) for node in body.nodes]
    return None if None in each else sum(m for m in each if m is not None)


def node_input_macs(node: graph.Node, tokens: int | None) -> float | None:
    """Of one node, for one whole input."""
    if node.bodies:
        inside = [input_macs(body, tokens) for body in node.bodies.values()]
        return None if None in inside else sum(m for m in inside if m is not None) * max(1, len(node.directions))
    here = node.macs_at(tokens)
    if not here or not node.type or node.type.kind == "vector":
        return float(here)
    if isinstance(node.type.length, int):
        return float(here * node.type.length)
    return here * tokens / node.type.every if tokens else None


def count_state(body: Graph) -> int:
    return sum(s.numel for node in graph.walk(body) for s in node.state.values())


def tokens_of(model: ModelSpec) -> int | None:
    """Tokens of one input: the longest sequence's length, where it is known."""
    wires = [model.input, *(node.type for node in graph.walk(model.graph))]
    lengths = [w.length for w in wires if w and isinstance(w.length, int)]
    return max(lengths, default=None)

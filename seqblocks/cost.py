"""What a graph costs: bytes, multiply-accumulates, state. Counted from the declarations alone."""

from __future__ import annotations

from collections.abc import Iterator

from seqblocks import graph
from seqblocks.errors import UsageError, listing, visible
from seqblocks.graph import Graph, ModelSpec
from seqblocks.language.vocabulary import did_you_mean
from seqblocks.parameters import State

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
DTYPES = tuple(name for name in BYTES if name != "int64")  # of a model
SHORT = {"f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16", "half": "float16"}
SHORT |= {"bf16": "bfloat16", "f64": "float64", "fp64": "float64", "double": "float64", "float": "float32"}


def dtype_named(text: str, what: str) -> str:
    """Return a model's dtype by any of its usual names, torch's included. `what` begins the message of a UsageError."""
    name = text.removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in DTYPES:
        hint = did_you_mean(name, [*DTYPES, *SHORT]) or f"one of {listing(DTYPES)}"
        raise UsageError(f"{what} {visible(text)} is not a dtype of a model: {hint}")
    return name


def state_bytes(body: Graph, dtype: str) -> int:
    """Return the bytes of the state of one sequence, for a model of `dtype`."""
    return sum(s.numel * BYTES[dtype if s.dtype == "model" else s.dtype] for s in _states(body))


def _states(body: Graph) -> Iterator[State]:
    yield from body.kept.values()
    for node in graph.walk(body):
        yield from node.state.values()


def open_context(body: Graph) -> list[str]:
    """Return the inputs of open length that decide how much a stream keeps of its context."""
    return [*dict.fromkeys(s.length for s in _states(body) if s.length and s.shape[0] == 0)]


def params_bytes(body: Graph, dtype: str) -> int:
    """Return the bytes of the parameters, tied ones once."""
    parameters = (item.parameter for item in graph.parameters(body) if item.tied is None)
    return sum(p.numel * BYTES["float32" if p.full_precision else dtype] for p in parameters)


def macs(body: Graph, tokens: int | None) -> float | None:
    """Return multiply-accumulates per token of the sequence. A step after a pooling is shared by all `tokens`.

    What depends on the context alone is not counted: see `context_macs`.
    """
    return _sum([node_macs(node, tokens) for node in body.nodes])


def node_macs(node: graph.Node, tokens: int | None) -> float | None:
    """Return multiply-accumulates per token of one node; None where they depend on an open number of tokens."""
    if graph.is_context(node):
        return 0.0
    if _reads_open_context(node):
        return None
    if node.bodies:
        return _inside(node, [macs(body, tokens) for body in node.active.values()])
    own = node.macs_at(tokens)
    if node.type and node.type.kind == "vector" and own:
        return own / tokens if tokens else None
    return own / node.type.rate if node.type else float(own)


def _reads_open_context(node: graph.Node) -> bool:
    """Whether a step, which is no part of the context, reads a context of open length."""
    return any(wire.context and isinstance(wire.length, str) for wire in node.wires if wire)


def open_memories(model: ModelSpec) -> list[str]:
    """Return the inputs of open length that decide the cost of a token."""
    nodes = (node for node in graph.streamed(model.graph) if _reads_open_context(node))
    wires = (wire for node in nodes for wire in node.wires if wire and wire.context)
    return [*dict.fromkeys(wire.length.partition("/")[0] for wire in wires if isinstance(wire.length, str))]


def context_macs(body: Graph) -> float | None:
    """Return multiply-accumulates of what depends on the context alone; None where its length is open."""
    return _sum([_context_macs(node) for node in body.nodes])


def _context_macs(node: graph.Node) -> float | None:
    if graph.is_context(node):
        return node_input_macs(node, None)
    return _inside(node, [context_macs(body) for body in node.bodies.values()]) if node.bodies else 0.0


def input_macs(body: Graph, tokens: int | None) -> float | None:
    """Return multiply-accumulates of one whole input, each step at its own number of tokens."""
    return _sum([node_input_macs(node, tokens) for node in body.nodes])


def node_input_macs(node: graph.Node, tokens: int | None) -> float | None:
    """Return multiply-accumulates of one node for one whole input; None where the number of tokens is open."""
    if node.bodies:
        return _inside(node, [input_macs(body, tokens) for body in node.active.values()])
    if _reads_open_context(node) and not graph.is_context(node):
        return None
    own = node.macs_at(tokens)
    if not own or not node.type or node.type.kind == "vector":
        return float(own)
    if isinstance(node.type.length, int):
        return float(own * node.type.length)
    return own * tokens / node.type.rate if tokens and not node.type.context else None


def _inside(node: graph.Node, bodies: list[float | None]) -> float | None:
    total = _sum(bodies)
    return None if total is None else total * max(1, len(node.directions))


def _sum(parts: list[float | None]) -> float | None:
    """Add up; None if a part is unknown."""
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def count_state(body: Graph) -> int:
    """Return the numbers of the state of one sequence."""
    return sum(state.numel for state in _states(body))


def tokens_of(model: ModelSpec) -> int | None:
    """Return the tokens of one input: the longest sequence's length, where it is known."""
    wires = [model.input, *(node.type for node in graph.streamed(model.graph))]
    lengths = [w.length for w in wires if w and isinstance(w.length, int)]
    return max(lengths, default=None)

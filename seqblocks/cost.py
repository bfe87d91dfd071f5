"""Count the cost of a graph (bytes, multiply-accumulates, state) from its declarations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from seqblocks import graph
from seqblocks.errors import UsageError, listing, visible
from seqblocks.graph import ChooseNode, EachNode, Graph, ModelSpec
from seqblocks.state_layout import State
from seqblocks.suggestions import did_you_mean
from seqblocks.types import Rate, names_of

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
DTYPES = tuple(name for name in BYTES if name != "int64")  # of a model
SHORT = {"f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16", "half": "float16"}
SHORT |= {"bf16": "bfloat16", "f64": "float64", "fp64": "float64", "double": "float64", "float": "float32"}


def dtype_named(text: str, what: str) -> str:
    """Return the canonical name of a dtype (`bf16`, `torch.bfloat16`, …). `what` begins the message of a UsageError."""
    name = text.removeprefix("torch.")
    name = SHORT.get(name, name)
    if name not in DTYPES:
        hint = did_you_mean(name, [*DTYPES, *SHORT]) or f"one of {listing(DTYPES)}"
        raise UsageError(f"{what} {visible(text)} is not a supported dtype: {hint}")
    return name


def state_bytes(body: Graph, dtype: str) -> int:
    """Return the size of the state of one sequence in bytes, for a model of `dtype`."""
    return sum(s.numel * item_bytes(s.dtype, dtype) for s in _states(body))


def item_bytes(kind: str, dtype: str) -> int:
    """Return the bytes of a number of a state or parameter; "float32" is float64 in a model of float64."""
    return BYTES[dtype if kind == "model" or (kind == "float32" and dtype == "float64") else kind]


def _states(body: Graph) -> Iterator[State]:
    yield from body.kept.values()
    for node in graph.walk(body):
        yield from node.state.values()


def open_context(body: Graph) -> list[str]:
    """Return the inputs of open length that determine the size of a stream's context."""
    return [*dict.fromkeys(s.length for s in _states(body) if s.length and s.shape[0] == 0)]


def params_bytes(body: Graph, dtype: str) -> int:
    """Return the size of the parameters in bytes, counting tied ones once."""
    parameters = (item.parameter for item in graph.parameters(body) if item.tied is None)
    return sum(p.numel * item_bytes("float32" if p.full_precision else "model", dtype) for p in parameters)


def macs(body: Graph, tokens: Rate | None) -> float | None:
    """Return multiply-accumulates per token of the sequence. The cost of steps after a pooling is divided by `tokens`.

    Steps that depend only on the context are not counted; see `context_macs`.
    """
    return _sum([node_macs(node, tokens) for node in body.nodes])


def node_macs(node: graph.Node, tokens: Rate | None) -> float | None:
    """Return multiply-accumulates per token of one node, or None if they depend on an unknown number of tokens."""
    if graph.is_context(node):
        return 0.0
    if _reads_open_context(node):
        return None
    if isinstance(node, EachNode) and not node.arguments.carries:
        each, size = _each_sequence(node)
        return None if each is None else each / float(size)
    if isinstance(node, ChooseNode):
        share, inner = _chosen(node, tokens)
        return None if share is None else _times(macs(node.bodies[""], inner), share)
    if node.bodies:
        return _inside(node, [macs(body, tokens) for body in node.active.values()])
    own = node.macs_at(tokens)
    if node.type and node.type.kind == "vector" and own:
        return float(own / tokens) if tokens else None
    return float(own / node.type.rate) if node.type else float(own)


def _reads_open_context(node: graph.Node) -> bool:
    """Return whether a step outside the context reads a context of open length."""
    return any(wire.context and isinstance(wire.length, str) for wire in node.wires if wire)


def open_memories(model: ModelSpec) -> list[str]:
    """Return the inputs of open length that determine the cost per token."""
    nodes = (node for node in graph.streamed(model.graph) if _reads_open_context(node))
    wires = (wire for node in nodes for wire in node.wires if wire and wire.context)
    return [*dict.fromkeys(name for wire in wires if wire.length for name in names_of(wire.length))]


def context_macs(body: Graph) -> float | None:
    """Return multiply-accumulates of the steps that depend only on the context, or None if its length is open."""
    return _sum([_context_macs(node) for node in body.nodes])


def _context_macs(node: graph.Node) -> float | None:
    if graph.is_context(node):
        return node_input_macs(node, None)
    return _inside(node, [context_macs(body) for body in node.bodies.values()]) if node.bodies else 0.0


def input_macs(body: Graph, tokens: Rate | None) -> float | None:
    """Return multiply-accumulates of one whole input, counting each step with its own number of tokens."""
    return _sum([node_input_macs(node, tokens) for node in body.nodes])


def node_input_macs(node: graph.Node, tokens: Rate | None) -> float | None:
    """Return multiply-accumulates of one node for one whole input, or None if the number of tokens is unknown."""
    if isinstance(node, EachNode) and not node.arguments.carries:
        each, size = _each_sequence(node)
        wire = node.wires[0]
        length = wire.length * wire.rate if wire and isinstance(wire.length, int) else tokens
        return None if each is None or length is None else each * length / size
    if isinstance(node, ChooseNode):
        return input_macs(node.bodies[""], _chosen(node, tokens)[1])
    if node.bodies:
        return _inside(node, [input_macs(body, tokens) for body in node.active.values()])
    if _reads_open_context(node) and not graph.is_context(node):
        return None
    own = node.macs_at(tokens)
    if not own or not node.type or node.type.kind == "vector":
        return float(own)
    if isinstance(node.type.length, int):
        return float(own * node.type.length)
    return float(own * tokens / node.type.rate) if tokens and not node.type.context else None


def _inside(node: graph.Node, bodies: list[float | None]) -> float | None:
    total = _sum(bodies)
    return None if total is None else total * node.runs


def _each_sequence(node: EachNode) -> tuple[float | None, float]:
    """Return multiply-accumulates of one window, row or frame of an `each`, and its tokens of the model's input."""
    (body,), arguments, wire = node.bodies.values(), node.arguments, node.wires[0]
    assert wire
    rows, columns = wire.grid or (1, 1)
    down, across = arguments.tiles((rows, columns))
    sizes = {"windows": rows * columns / (down * across), "rows": columns, "columns": rows, "frames": arguments.width}
    return input_macs(body, None), float(sizes[arguments.axis] * wire.rate)


def _chosen(node: ChooseNode, tokens: Rate | None) -> tuple[float | None, Rate | None]:
    """Return the share of tokens that a `choose` chooses, and how many tokens of the model's input they stand for.

    None where they are unknown. A threshold may choose all tokens.
    """
    arguments, wire = node.arguments, node.wires[0]
    assert wire
    length = wire.length if isinstance(wire.length, int) else tokens and wire.of_tokens(tokens).length
    if arguments.top is None:
        return 1.0, length * wire.rate if isinstance(length, int) else tokens
    if not isinstance(length, int) or not length:
        return (arguments.top if arguments.top < 1 else None), None
    count = arguments.count(length)
    return count / length, count * wire.rate


def _times(macs: float | None, share: float) -> float | None:
    return None if macs is None else macs * share


def _sum(parts: list[float | None]) -> float | None:
    """Return the sum, or None if a part is unknown."""
    total = 0.0
    for part in parts:
        if part is None:
            return None
        total += part
    return total


def count_state(body: Graph) -> int:
    """Return the number of elements of the state of one sequence."""
    return sum(state.numel for state in _states(body))


def tokens_of(model: ModelSpec) -> int | None:
    """Return the number of tokens of one input, the length of its longest sequence, if known."""
    if isinstance(model.input.length, str):
        return None  # also where some steps make a fixed number of tokens of it
    wires = [model.input, *(node.type for node in graph.streamed(model.graph))]
    lengths = [w.length for w in wires if w and isinstance(w.length, int)]
    return max(lengths, default=None)


def longest(body: Graph, in_stream: bool = False) -> float:
    """Return for how many tokens of a sequence all tables of positions have places. Infinite if there are none.

    in_stream: and all caches of attention have room.
    """
    found = [math.inf]
    for node in graph.walk(body):
        wire = node.wires[0] if isinstance(node, graph.OpNode) and node.wires else None
        if not isinstance(node, graph.OpNode) or wire is None or wire.context or not isinstance(wire.length, str):
            continue
        lanes = len(node.type.lanes) if node.type else 0  # their axes are before that of the tokens
        sizes = [state.shape[lanes] for state in node.state.values() if state.per_token and in_stream]
        if node.verb == "position_embed":
            sizes.append(node.parameters["weight"].shape[1])
        for size in sizes:
            tokens = int(size * node.state_rate)
            before = wire.of_tokens(tokens).length  # with learned tokens before those of the input
            others = before - size if isinstance(before, int) and wire.rate == node.state_rate else 0
            found.append(float(tokens - max(0, others) * node.state_rate))
    return min(found)

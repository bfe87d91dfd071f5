"""What a stream can run: which steps cannot stream, and how many tokens a call takes."""

from __future__ import annotations

from collections.abc import Container, Iterator

from seqblocks.graph.model import ModelSpec
from seqblocks.graph.nodes import EachNode, Graph, Node, is_context, is_prefixed, walk
from seqblocks.types import Rate, Wire, common_rate


def has_prefix(graph: Graph) -> bool:
    """Return whether some step puts tokens before those of the stream."""
    return any(map(is_prefixed, walk(graph)))


def begins(graph: Graph) -> bool:
    """Return whether some steps run once, before the first token of a stream: on the context, or on a prefix."""
    return bool(graph.ports) or any(is_context(node) or is_prefixed(node) for node in walk(graph))


def is_ordered(wire: Wire | None, first: Wire | None, scan: Node) -> bool:
    """Return whether a scan of `first` reorders a value: a sequence, and of a context only one of the same length.

    A context of another length is read as a whole.
    """
    if wire is None or wire.kind not in ("sequence", "tokens"):
        return False
    return wire.context == is_context(scan) or (first is not None and wire.places == first.places)


def streamed(graph: Graph, inside_frames: bool = True) -> Iterator[Node]:
    """Yield each node that depends on a streaming input, outer before inner.

    inside_frames: also those that run on one frame of a sequence, of which a stream takes whole ones.
    """
    for node in graph.nodes:
        if not is_context(node):
            yield node
            if inside_frames or not (isinstance(node, EachNode) and node.arguments.axis == "frames"):
                for body in node.bodies.values():
                    yield from streamed(body, inside_frames)


def stream_obstacle(model: ModelSpec, orders: Container[str] = ("forward",)) -> tuple[str, str] | None:
    """Return the name and span of a step that cannot stream, and why, or None if the model can stream.

    orders: those that a scan may have.
    """
    for node in streamed(model.graph, inside_frames=False):
        if why := node.cannot_stream(orders) or _mixes_lengths(node, model):
            return f"{node.name} ({node.span})", why
    for value in model.graph.results:
        wire = model.types[value]
        if wire and wire.prefix:
            first = "its first token is" if wire.prefix == 1 else f"its first {wire.prefix} tokens are"
            return f"the output {model.labels[value]}", f"{first} not of the stream: `slice: {{first: {wire.prefix}}}`"
    if model.input.kind in ("image", "vector"):
        origin = model.input.origin
        what = "a whole image" if model.input.kind == "image" else "one vector"
        return f"the input ({origin.span})" if origin else "the input", f"it is {what}"
    return None


def _mixes_lengths(node: Node, model: ModelSpec) -> str | None:
    """Return why a step would need all of the stream at once, or a part of the context for each token; else None."""
    for value in node.read_by_token:
        wire = model.types[value]
        if wire and wire.context and wire.places:
            return f"it reads {model.labels[value]} token by token, which is context"
    return _reads_whole(node, model)


def _reads_whole(node: Node, model: ModelSpec) -> str | None:
    """Return why each token of an op's output needs all of the stream; None if it does not."""
    for value in node.whole_inputs:
        wire, label = model.types[value], model.labels[value]
        if wire and not wire.context:
            vector = f"{label}, made of the whole sequence, meets each of its tokens"
            return vector if value in node.vectors else f"each token reads all of {label}"
    return None


def resets_obstacle(model: ModelSpec) -> tuple[str, str] | None:
    """Return the name and span of a step that mixes sequences separated by resets, and why, or None."""
    for node in streamed(model.graph, inside_frames=False):
        if why := node.ignores_resets() or _reads_whole(node, model):
            return f"{node.name} ({node.span})", why
    return None


def frame_size(graph: Graph) -> int:
    """Return the number of input tokens per call of a stream: the least common multiple of 1 and all rates."""
    return common_rate(1, *_rates(graph)).numerator


def takes_frames(graph: Graph) -> bool:
    """Return whether a stream takes frames rather than single tokens, as if the rate of tokens changes."""
    return any(rate != 1 for rate in _rates(graph))


def _rates(graph: Graph) -> Iterator[Rate]:
    """Yield how many input tokens each token, and each frame, of a stream spans."""
    for node in streamed(graph):
        if node.type:
            yield node.type.rate
        if isinstance(node, EachNode) and node.arguments.in_frames and node.wires[0]:
            yield node.wires[0].rate * node.arguments.width

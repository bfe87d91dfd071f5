"""The typed graph of a model, with all numbers, names and shapes resolved.

A graph is a list of nodes in execution order. Values are numbered across the whole model; a node with bodies (a block,
a combinator) may read outer values, its captures. Graphs can be printed and counted without torch.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import field
from functools import partial
from typing import Any, Literal, NamedTuple

from seqblocks import recipes
from seqblocks.errors import Diagnostic, Span, listing, visible
from seqblocks.op import Op
from seqblocks.parameters import Init, Parameter
from seqblocks.record import Record
from seqblocks.roles import joins_tokens
from seqblocks.state_layout import State
from seqblocks.types import Wire


class Entry(Record):
    """One entry of a `checkpoint:` map: our name, and its official alternatives."""

    ours: str
    span: Span
    theirs: tuple[recipes.Recipe, ...]
    node: tuple[Any, ...]  # of each alternative, in the document
    layout: str = ""  # the one that it belongs to; empty for the map itself
    optional: bool = False  # whether it may match nothing, as most entries of a map that has a name


# A direction is a child module, and a torch module has a method `forward`.
DIRECTION_NAMES = {"forward": "fwd", "reverse": "rev"}


def moves_tokens(order: str) -> bool:
    """Return whether an order of a scan is neither that of the sequence nor its reverse."""
    return order.startswith(("columns", "sorted"))


def direction_name(order: str) -> str:
    """Return the namespace of the parameters owned by one order of a scan."""
    return DIRECTION_NAMES.get(order, order)


Source = tuple[int, str]
"""The owner of a shared parameter: how many parts to remove from the end of the name of the use, and what to append."""


def owner_of(own: str, source: Source) -> str:
    """Return the name of a shared parameter from that of the step's own. It begins with ^ if it is outside both."""
    level, name = source
    parts = own.split(".")
    outside = "^" * max(0, level - len(parts))
    return join(*parts[: max(0, len(parts) - level)], outside + name)


# unknown: after a fault
NodeKind = Literal[
    "op", "block", "residual", "scan", "parallel", "repeat", "experts", "choose", "each", "cell", "unknown"
]


class Node(Record):
    """One step.

    inputs: port -> value numbers (several if a port joins wires). outputs: value numbers, several if the result is
    split into `split` widths along the features. `type` is None if it is unknown after a fault.
    """

    kind: NodeKind
    name: str
    verb: str
    span: Span
    inputs: dict[str, tuple[int, ...]]
    outputs: tuple[int, ...]
    type: Wire | None
    split: tuple[int, ...] = ()
    op: Op | None = None
    arguments: Any = None  # a combinator's own model
    parameters: dict[str, Parameter] = field(default_factory=dict)
    state: dict[str, State] = field(default_factory=dict)
    wires: tuple[Wire | None, ...] = ()  # op: the types of what its ports read
    vectors: tuple[int, ...] = ()  # op: vector inputs that are broadcast to the tokens of the others
    kept: bool = False  # whether a stream computes it once and reads its output at each token
    macs: int = 0  # per token of its output, at a length that may be open
    ties: dict[str, str] = field(default_factory=dict)  # parameter -> full name of the one it is
    shared: dict[str, Source] = field(default_factory=dict)  # parameters (relative names) that are another step's
    owner: Node | None = None  # the step whose parameters it shares, or a step around them
    owner_name: str = ""  # of that step or layer, as `share:` names it
    bodies: dict[str, Graph] = field(default_factory=dict)  # by namespace; "" adds none
    exports: dict[int, int] = field(default_factory=dict)  # values of its bodies that later steps read: here -> inside
    checkpoint: tuple[Entry, ...] = ()  # block: its own names -> official ones
    owned: frozenset[str] = frozenset()  # scan: parameters (relative names) that each order owns
    starts: dict[str, Init] = field(default_factory=dict)  # scan: initialisers of owned ones, by `order.name`

    def __repr__(self) -> str:
        return f"<{self.verb}{f' {self.name}' if self.name != self.verb else ''}: {self.type or 'unknown'}>"

    @property
    def directions(self) -> tuple[str, ...]:
        """The namespaces of the orders of a scan with several orders; empty for all other nodes."""
        if self.kind != "scan" or len(self.arguments.orders) < 2:
            return ()
        return tuple(map(direction_name, self.arguments.orders))

    @property
    def active(self) -> dict[str, Graph]:
        """The bodies that compute one token: for experts, the router and the number of experts per token."""
        if self.kind != "experts":
            return self.bodies
        return dict(list(self.bodies.items())[: 1 + self.arguments.top])

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that the node reads: those of its ports in order, then the captures of its bodies."""
        at_ports = tuple([value for values in self.inputs.values() for value in values])
        if not self.bodies:
            return at_ports
        captured = dict.fromkeys(value for body in self.bodies.values() for value in body.captures)
        known = {*at_ports, *(value for body in self.bodies.values() for value in body.exports)}  # of earlier layers
        return (*at_ports, *(value for value in captured if value not in known))

    @property
    def made(self) -> tuple[int, ...]:
        """The values that later steps can read: its outputs, and those of its bodies."""
        return (*self.outputs, *self.exports)

    @property
    def whole_inputs(self) -> tuple[int, ...]:
        """The inputs of an op that each of its tokens reads as a whole: vectors, and sequences of another length."""
        ports = self.op.ports if self.op else ()
        memories = (value for port in ports if port.length for value in self.inputs.get(port.name, ()))
        return (*self.vectors, *memories)

    @property
    def other_rate(self) -> bool:
        """Whether an op reads the tokens of a sequence at another rate than that of its output."""
        if self.op is None or self.type is None or self.type.kind != "sequence":
            return False
        pairs = zip(self.op.ports, self.wires, strict=True)
        return any(port.other_rate and wire is not None and wire.rate != self.type.rate for port, wire in pairs)

    @property
    def kept_exports(self) -> dict[str, int]:
        """The exported values that a stream keeps besides the output, by the part of the state that holds them."""
        parts = {f"wire_{at}": value for at, value in enumerate(self.exports)} if self.kept else {}
        return {part: value for part, value in parts.items() if part in self.state}

    def macs_at(self, tokens: int | None) -> int:
        """Return the multiply-accumulates of an op for one token of its output, with `tokens` in the model's input."""
        if not tokens or self.op is None or self.type is None:
            return self.macs
        return self.op.macs(*(wire and wire.of_tokens(tokens) for wire in self.wires))


class Graph(Record):
    """A body: its input value, its nodes, its result, and its captures."""

    input: int
    nodes: list[Node]
    result: int
    captures: tuple[int, ...] = ()
    exports: tuple[int, ...] = ()  # values that steps outside read, besides the result
    exported: dict[str, int] = field(default_factory=dict)  # a block's `outputs:`, which are among these, by name
    ports: dict[str, int] = field(default_factory=dict)  # of a block, a model, a cell or a `choose`
    outputs: dict[str, int] = field(default_factory=dict)  # a model's, where it names them; the first is the result
    checkpoint: tuple[Entry, ...] = ()  # a block's map, for the arguments that this body was made with
    absent: list[str] = field(default_factory=list)  # the names of steps whose condition is false
    kept: dict[str, State] = field(default_factory=dict)  # a model's further inputs that a stream reads at each token
    like: Graph | None = None  # the body of which this is a copy with other initial values
    carried: dict[str, int] = field(default_factory=dict)  # a cell's: the new value of each state; `ports` has the old
    states: dict[str, State] = field(default_factory=dict)  # a cell's: of one sequence, also where a stream has none

    def __repr__(self) -> str:
        names = listing((node.name for node in self.nodes), 6)
        return f"<Graph of {len(self.nodes)} step{'s' * (len(self.nodes) != 1)}: {names}>"

    def _repr_html_(self) -> str:
        from seqblocks import markup  # only needed in a notebook

        titles = ("step", "verb", "output", "parameters")
        return markup.table(titles, ((n.name, n.verb, str(n.type), f"{count_node(n):,}") for n in self.nodes))

    @property
    def reads(self) -> tuple[int, ...]:
        """The values passed to the body, its input first. The body of a block numbers them separately."""
        return (self.input, *self.ports.values(), *self.captures)

    @property
    def results(self) -> tuple[int, ...]:
        """The values that the body returns: one, except for a model with `outputs:`, for exports, and for a cell."""
        return (*(self.outputs.values() or (self.result,)), *self.exports, *self.carried.values())


class SpecSource(NamedTuple):
    """The text of a spec, its overrides and the files it uses, which `save` stores with the weights.

    origin: the config.json that came with the weights, which `convert` writes again.
    """

    name: str
    text: str
    overrides: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()  # texts: by relative path, bundled files by name
    origin: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"SpecSource({self.name!r}, {len(self.text)} characters)"


class ModelSpec(Record):
    """An analysed spec, as returned by `load_model`, passed to `build_model`, and stored in a model as `model.spec`.

    input, output: the types of the model's wires. graph: its steps. types, labels: of each value, by number. source:
    the text of the spec. inputs, outputs: all of them by name, if the spec has `inputs:` or `outputs:`; `input` and
    `output` are then the first ones.
    """

    name: str
    input: Wire
    graph: Graph
    types: dict[int, Wire | None]
    labels: dict[int, str]
    expect: Any = None
    checkpoint: tuple[Entry, ...] = ()
    overridden: tuple[str, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()  # those of its file
    notes: tuple[str, ...] = ()  # remarks on overrides that repeat what the spec says
    source: SpecSource | None = None
    inputs: dict[str, Wire] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<ModelSpec {self.title}>"

    def _repr_html_(self) -> str:
        from seqblocks import markup  # only needed in a notebook

        return markup.titled(self.title, self.graph._repr_html_())

    @property
    def title(self) -> str:
        """The model in one line: its name, input, output and number of parameters."""
        return f"{visible(self.name)}: {self.input_text} -> {self.output_text}, {count(self.graph):,} parameters"

    @property
    def output(self) -> Wire | None:
        return self.types[self.graph.result]

    @property
    def outputs(self) -> dict[str, Wire | None]:
        return {name: self.types[value] for name, value in self.graph.outputs.items()}

    @property
    def input_text(self) -> str:
        """The input as text, or all inputs with their names."""
        return ", ".join(f"{name} {wire}" for name, wire in self.inputs.items()) or str(self.input)

    @property
    def output_text(self) -> str:
        return ", ".join(f"{name} {wire}" for name, wire in self.outputs.items()) or str(self.output)


class Named(Record):
    """A parameter with its full name. `tied`: the name of the parameter that it is tied to or shared with, if any.

    shared: whether it is read from that parameter, so that state_dict has no entry with this name.
    """

    name: str
    parameter: Parameter
    node: Node
    tied: str | None = None
    shared: bool = False


def join(*parts: str) -> str:
    """Join the non-empty parts of a dotted name."""
    return ".".join(p for p in parts if p)


def parameters(graph: Graph, prefix: str = "", shared: bool = False) -> Iterator[Named]:
    """Yield each parameter of a graph by its state_dict name, tied ones included.

    shared: also those that a step shares with another, by the names that they would have.
    """
    return (item for item in _inside(graph, prefix) if shared or not item.shared)


def buffers(graph: Graph, prefix: str = "") -> Iterator[tuple[str, State]]:
    """Yield each buffer of a graph, by its state_dict name: what is saved besides parameters."""
    for node in graph.nodes:
        name = join(prefix, node.name)
        for own, buffer in (node.op.buffers(*node.wires) if node.op else {}).items():
            yield join(name, own), buffer
        for label, body in node.bodies.items():
            # if each direction is a module, it has buffers of its own; otherwise they are shared
            separate = bool(node.directions) and _is_separate(node, list(_inside(body, name)), name)
            for direction in node.directions if separate else [""]:
                yield from buffers(body, join(name, direction, label))


def node_parameters(node: Node, name: str, shared: bool = False, active: bool = False) -> Iterator[Named]:
    """Yield each parameter of a node whose namespace is `name`; see `parameters`. active: those that a token uses."""
    return (item for item in _of_node(node, name, active) if shared or not item.shared)


def _inside(graph: Graph, prefix: str, active: bool = False) -> Iterator[Named]:
    for node in graph.nodes:
        yield from _of_node(node, join(prefix, node.name), active)


def _of_node(node: Node, name: str, active: bool) -> Iterator[Named]:
    found = _by_direction(node, name, active) if node.directions else _declared(node, name, active)
    return map(partial(_from_owner, node, name), found) if node.shared else found


def _declared(node: Node, name: str, active: bool) -> Iterator[Named]:
    for own, parameter in node.parameters.items():
        yield Named(join(name, own), parameter, node, node.ties.get(own))
    for label, body in (node.active if active else node.bodies).items():
        yield from _inside(body, join(name, label), active)


def _by_direction(node: Node, name: str, active: bool) -> Iterator[Named]:
    """Yield the parameters of a scan that has several orders: those that all orders share, then those of each."""
    (body,) = node.bodies.values()
    inside = list(_inside(body, name, active))
    of_each = set(directed(node, inside, name))
    for item in inside:
        if item.name not in of_each:
            yield item
    for direction in node.directions:
        for item in inside:
            if item.name in of_each:
                yield _in_direction(node, name, direction, item)


def directed(node: Node, inside: list[Named], name: str = "") -> list[str]:
    """Return the names in `inside`, the parameters of a scan's steps, that are another parameter in each direction.

    Those are the owned ones, and the shared ones that owned ones stand for, or all where each direction is a module.
    """
    separate = _is_separate(node, inside, name)
    return [
        item.name for item in inside
        if _within(name, item.name) in node.owned
        or (item.shared and (separate or _within(name, item.tied or "") in node.owned))
    ]  # fmt: skip


def _is_separate(node: Node, inside: list[Named], name: str) -> bool:
    """Return whether a scan owns all parameters of its steps, so that each direction is a module."""
    return bool(node.owned) and node.owned == {_within(name, item.name) for item in inside if not item.shared}


def _in_direction(node: Node, name: str, direction: str, item: Named) -> Named:
    own = join(direction, _within(name, item.name))
    parameter, tied = item.parameter, item.tied
    if own in node.starts:
        parameter = parameter._replace(init=node.starts[own])
    if tied and _within(name, tied) in node.owned:
        tied = join(name, direction, _within(name, tied))
    return item._replace(name=join(name, own), parameter=parameter, tied=tied)


def _from_owner(node: Node, name: str, item: Named) -> Named:
    """Return a parameter of a node as the one that the node shares in its place, if it does."""
    if source := node.shared.get(_within(name, item.name)):
        return item._replace(tied=owner_of(item.name, source), shared=True)
    if item.tied and (source := node.shared.get(_within(name, item.tied))):
        return item._replace(tied=owner_of(item.tied, source))
    return item


def _within(prefix: str, name: str) -> str:
    """Return a full name as it is inside `prefix`; empty where it is elsewhere."""
    return name[len(prefix) + 1 :] if prefix and name.startswith(f"{prefix}.") else "" if prefix else name


def count(graph: Graph, known: dict[int, int] | None = None, active: bool = False) -> int:
    """Return the number of parameters of a graph, counting tied and shared ones once.

    known: cached counts of bodies used by several layers. active: count only the experts selected per token.
    """
    known = {} if known is None else known
    if graph.like:
        return count(graph.like, known, active)
    if id(graph) not in known:
        known[id(graph)] = sum(count_node(node, known, active) for node in graph.nodes)
    return known[id(graph)]


def count_node(node: Node, known: dict[int, int] | None = None, active: bool = False) -> int:
    """Return the number of parameters of a node, counting tied and shared ones once."""
    if node.owned or node.shared:
        return sum(item.parameter.numel for item in node_parameters(node, "", active=active) if item.tied is None)
    known = {} if known is None else known
    own = sum(p.numel for name, p in node.parameters.items() if name not in node.ties)
    return own + sum(count(body, known, active) for body in (node.active if active else node.bodies).values())


def walk(graph: Graph) -> Iterator[Node]:
    """Yield each node, outer before inner."""
    for node in graph.nodes:
        yield node
        for body in node.bodies.values():
            yield from walk(body)


def walk_named(body: Graph, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield each node with its path in the names of the state_dict, outer before inner."""
    for node in body.nodes:
        own = join(path, node.name)
        yield own, node
        for label, inner in node.bodies.items():
            yield from walk_named(inner, join(own, label))


def bodies(graph: Graph) -> Iterator[Graph]:
    """Yield a graph and the bodies inside it, each once, even if several layers share it."""
    found = {id(graph): graph}
    waiting = [graph]
    while waiting:
        each = waiting.pop()
        yield each
        new = {id(body): body for node in each.nodes for body in node.bodies.values() if id(body) not in found}
        found |= new
        waiting += new.values()


def spent_after_layers(node: Node) -> list[list[int]]:
    """Return for each layer of a repeat the values that no later layer reads, and no step after the repeat."""
    last: dict[int, int] = {}
    for at, body in enumerate(node.bodies.values()):
        last |= dict.fromkeys((*body.captures, *body.exports), at)
    spent: list[list[int]] = [[] for _ in node.bodies]
    for value, at in last.items():
        if value not in node.exports:
            spent[at].append(value)
    return spent


def is_context(node: Node) -> bool:
    """Return whether a step depends on no streaming input, so that a stream runs it once."""
    return node.type is not None and node.type.context


def is_prefixed(node: Node) -> bool:
    """Return whether the output of a step has tokens before those of the stream, which a stream computes once."""
    return node.type is not None and node.type.prefix > 0


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
            if inside_frames or not (node.kind == "each" and node.arguments.axis == "frames"):
                for body in node.bodies.values():
                    yield from streamed(body, inside_frames)


def stream_obstacle(model: ModelSpec, orders: Container[str] = ("forward",)) -> tuple[str, str] | None:
    """Return the name and span of a step that cannot stream, and why, or None if the model can stream.

    orders: those that a scan may have.
    """
    for node in streamed(model.graph, inside_frames=False):
        why = (node.op.cannot_stream(*node.wires) if node.op else None) or _mixes_lengths(node, model)
        if node.kind == "each" and node.arguments.on_grid:
            why = f"it reads the {node.arguments.axis} of a whole image"
        if node.kind == "choose" and not node.arguments.is_causal:
            why = "it chooses tokens by the scores of the whole sequence: streams need a threshold, `above:`"
        if node.kind == "scan" and any(order not in orders for order in node.arguments.orders):
            why = f"it reads the sequence in the order {' and '.join(node.arguments.orders)}"
        if why:
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


def reads_whole(node: Node, types: Mapping[int, Wire | None]) -> list[bool]:
    """Return for each wire from outside that the steps of an `each` read whether each sequence reads all of it."""
    (body,) = node.bodies.values()
    pairs = [(types[inside], types[value]) for value, inside in zip(node.reads[1:], body.ports.values(), strict=True)]
    return [bool(a and b and a._replace(lanes=()) == b._replace(lanes=())) for a, b in pairs]


def is_prefix_join(node: Node) -> bool:
    """Return whether a step joins the tokens of a stream to others before them, which it reads only once."""
    return node.op is not None and joins_tokens(node.op) and is_prefixed(node)


def _mixes_lengths(node: Node, model: ModelSpec) -> str | None:
    """Return why a step would need all of the stream at once, or a part of the context for each token; else None."""
    if node.op:
        ports = {port.name for port in node.op.ports if not port.length}
        values = [value for port in node.inputs.keys() & ports for value in node.inputs[port]]
        values = values[-1:] if is_prefix_join(node) else values
    else:
        values = [body.result for body in node.bodies.values()][-1 if node.kind == "repeat" else 0 :]
        values += node.inputs["x"] if node.kind in ("residual", "scan") else ()
    for value in values:
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
        why = (node.op.ignores_resets(*node.wires) if node.op else None) or _reads_whole(node, model)
        if node.kind == "each" and node.arguments.axis != "features":
            why = f"a sequence may begin in the middle of its {node.arguments.axis}"
        if node.kind == "scan" and (others := [order for order in node.arguments.orders if moves_tokens(order)]):
            why = f"it reads the sequence in the order {others[0]}"
        if why:
            return f"{node.name} ({node.span})", why
    return None


def is_exact(body: Graph) -> bool:
    """Return whether some steps return float32 in a 16-bit model, or read a state in float32."""
    return any(node.kind == "cell" or (node.op and node.op.exact) for node in walk(body))


def frame_size(graph: Graph) -> int:
    """Return the number of input tokens per call of a stream: the least common multiple of all rates."""
    nodes = list(streamed(graph))
    frames = (node.wires[0].rate * node.arguments.width for node in nodes if node.kind == "each"
              and node.arguments.in_frames and node.wires[0])
    return math.lcm(*(node.type.rate for node in nodes if node.type), *frames)

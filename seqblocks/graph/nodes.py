"""Nodes and bodies: a class of nodes for ops, for blocks and for each combinator."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from seqblocks import recipes
from seqblocks.errors import Span, listing
from seqblocks.op import Op
from seqblocks.parameters import Init, Parameter
from seqblocks.record import Record
from seqblocks.roles import joins_tokens
from seqblocks.state_layout import State
from seqblocks.types import Rate, Wire, has_same_tokens

if TYPE_CHECKING:  # a combinator is imported when a spec uses it
    from seqblocks.combinators.cell import Cell
    from seqblocks.combinators.choose import Choose
    from seqblocks.combinators.each import Each
    from seqblocks.combinators.experts import Experts
    from seqblocks.combinators.parallel import Parallel
    from seqblocks.combinators.repeat import Repeat
    from seqblocks.combinators.residual import Residual
    from seqblocks.combinators.scan import Scan


class Entry(Record):
    """One entry of a `checkpoint:` map: our name, and its official alternatives."""

    ours: str
    span: Span
    theirs: tuple[recipes.Recipe, ...]
    node: tuple[Any, ...]  # of each alternative, in the document
    layout: str = ""  # the one that it belongs to; empty for the map itself
    optional: bool = False  # whether it may match nothing, as most entries of a map that has a name


# A direction is a child module, and a torch module has a method `forward`.
SHARED = "shared"  # the label of the steps of `experts` that run for all tokens
DIRECTION_NAMES = {"forward": "fwd", "reverse": "rev"}


def moves_tokens(order: str) -> bool:
    """Return whether an order of a scan is neither that of the sequence nor its reverse."""
    return order.startswith(("columns", "sorted"))


def direction_name(order: str) -> str:
    """Return the namespace of the parameters owned by one order of a scan."""
    return DIRECTION_NAMES.get(order, order)


Source = tuple[int, str]
"""The owner of a shared parameter: how many parts to remove from the end of the name of the use, and what to append."""


class Node(Record):
    """One step, of a class of its own for ops, blocks and each combinator.

    inputs: port -> value numbers (several if a port joins wires). outputs: value numbers, several if the result is
    split into `split` widths along the features. `type` is None if it is unknown after a fault.
    """

    name: str
    verb: str
    span: Span
    inputs: dict[str, tuple[int, ...]]
    outputs: tuple[int, ...]
    type: Wire | None
    split: tuple[int, ...] = ()
    parameters: dict[str, Parameter] = field(default_factory=dict)
    state: dict[str, State] = field(default_factory=dict)
    kept: bool = False  # whether a stream computes it once and reads its output at each token
    ties: dict[str, str] = field(default_factory=dict)  # parameter -> full name of the one it is
    shared: dict[str, Source] = field(default_factory=dict)  # parameters (relative names) that are another step's
    owner: Node | None = None  # the step whose parameters it shares, or a step around them
    owner_name: str = ""  # of that step or layer, as `share:` names it
    bodies: dict[str, Graph] = field(default_factory=dict)  # by namespace; "" adds none
    exports: dict[int, int] = field(default_factory=dict)  # values of its bodies that later steps read: here -> inside

    kind = ""  # the name of the class in data: a verb, "op", "block" or "unknown"

    def __repr__(self) -> str:
        return f"<{self.verb}{f' {self.name}' if self.name != self.verb else ''}: {self.type or 'unknown'}>"

    # --- what only some classes have ----------------------------------------------------------------------------------

    @property
    def op(self) -> Op | None:
        return None

    @property
    def wires(self) -> tuple[Wire | None, ...]:
        """The types of what an op, an `each` or a `choose` reads."""
        return ()

    @property
    def vectors(self) -> tuple[int, ...]:
        return ()

    @property
    def whole_inputs(self) -> tuple[int, ...]:
        """The inputs of an op that each of its tokens reads as a whole: vectors, and sequences of another length."""
        return ()

    @property
    def macs(self) -> int:
        return 0

    def macs_at(self, tokens: Rate | None) -> int:
        """Return the multiply-accumulates of an op for one token of its output, with `tokens` in the model's input."""
        return self.macs

    @property
    def directions(self) -> tuple[str, ...]:
        """The namespaces of the orders of a scan with several orders; empty for all other nodes."""
        return ()

    # --- bodies -------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> dict[str, Graph]:
        """The bodies that compute one token."""
        return self.bodies

    @property
    def runs(self) -> int:
        """How often the bodies run for the tokens of one sequence."""
        return 1

    # --- values -------------------------------------------------------------------------------------------------------

    @property
    def at_ports(self) -> tuple[int, ...]:
        """The values that the ports read, in order."""
        return tuple([value for values in self.inputs.values() for value in values])

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that the node reads: those of its ports in order, then the captures of its bodies."""
        at_ports = self.at_ports
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
    def read_by_token(self) -> list[int]:
        """The values of which each token of the output needs one token."""
        return [body.result for body in self.bodies.values()]

    @property
    def kept_exports(self) -> dict[str, int]:
        """The exported values that a stream keeps besides the output, by the part of the state that holds them."""
        parts = {f"wire_{at}": value for at, value in enumerate(self.exports)} if self.kept else {}
        return {part: value for part, value in parts.items() if part in self.state}

    # --- order --------------------------------------------------------------------------------------------------------

    def cannot_stream(self, orders: Container[str] = ("forward",)) -> str | None:
        """Return why the node, apart from its bodies, cannot run token by token; else None.

        orders: those that a scan may have.
        """
        return None

    def ignores_resets(self) -> str | None:
        """Return why the node, apart from its bodies, mixes sequences that are separated by resets; else None."""
        return None


class UnknownNode(Node):
    """A step after a fault in it."""

    kind = "unknown"


class PrimitiveNode(Node):
    """A primitive, of which only this is known if its arguments are not.

    wires: the types of what its ports read. vectors: inputs broadcast to the tokens of the others.
    """

    kind = "op"
    wires: tuple[Wire | None, ...] = ()
    vectors: tuple[int, ...] = ()


class OpNode(PrimitiveNode):
    """A primitive with its arguments. macs: per token of its output, at a length that may be open."""

    op: Op = field(kw_only=True)
    macs: int = 0

    @property
    def whole_inputs(self) -> tuple[int, ...]:
        memories = (value for port in self.op.ports if port.length for value in self.inputs.get(port.name, ()))
        return (*self.vectors, *memories)

    @property
    def other_rate(self) -> bool:
        """Whether it reads the tokens of a sequence at another rate than that of its output."""
        if self.type is None or self.type.kind != "sequence":
            return False
        pairs = zip(self.op.ports, self.wires, strict=True)
        return any(port.other_rate and wire is not None and wire.rate != self.type.rate for port, wire in pairs)

    @property
    def state_rate(self) -> Rate:
        """Tokens of the model's input per token that its state keeps: per key, where keys have another rate."""
        pairs = zip(self.op.ports, self.wires, strict=True)
        wires = [wire for port, wire in pairs if port.other_rate and wire] or [wire for wire in self.wires[:1] if wire]
        return wires[0].rate if wires else 1

    @property
    def read_by_token(self) -> list[int]:
        ports = {port.name for port in self.op.ports if not port.length}
        values = [value for port in self.inputs.keys() & ports for value in self.inputs[port]]
        return values[-1:] if is_prefix_join(self) else values

    def macs_at(self, tokens: Rate | None) -> int:
        if not tokens or self.type is None:
            return self.macs
        return self.op.macs(*(wire and wire.of_tokens(tokens) for wire in self.wires))

    def cannot_stream(self, orders: Container[str] = ("forward",)) -> str | None:
        return self.op.cannot_stream(*self.wires)

    def ignores_resets(self) -> str | None:
        return self.op.ignores_resets(*self.wires)


class SeparateNode(Node):
    """A step whose body numbers its inputs separately."""

    @property
    def links(self) -> list[tuple[int, int]]:
        """The values at the ports, each with its number in the body; without ports that the body does not read."""
        (body,) = self.bodies.values()
        inside = {"x": body.input, **body.ports}
        return [(value, inside[port]) for port, (value,) in self.inputs.items() if port in inside]


class BlockNode(SeparateNode):
    """A block. checkpoint: its own names -> official ones."""

    kind = "block"
    checkpoint: tuple[Entry, ...] = ()


class ResidualNode(Node):
    kind = "residual"
    arguments: Residual = field(kw_only=True)

    @property
    def read_by_token(self) -> list[int]:
        return [*super().read_by_token, *self.inputs["x"]]


class ScanNode(Node):
    """A scan. owned: parameters (relative names) of which each order has its own.

    starts: initialisers of these, by `order.name`.
    """

    kind = "scan"
    arguments: Scan = field(kw_only=True)
    owned: frozenset[str] = frozenset()
    starts: dict[str, Init] = field(default_factory=dict)

    @property
    def is_forward(self) -> bool:
        return self.arguments.orders == ("forward",)

    @property
    def orders(self) -> str:
        """The orders for a message."""
        return " and ".join(self.arguments.orders)

    @property
    def directions(self) -> tuple[str, ...]:
        orders = self.arguments.orders
        return tuple(map(direction_name, orders)) if len(orders) > 1 else ()

    @property
    def runs(self) -> int:
        return len(self.arguments.orders)

    @property
    def read_by_token(self) -> list[int]:
        return [*super().read_by_token, *self.inputs["x"]]

    def cannot_stream(self, orders: Container[str] = ("forward",)) -> str | None:
        streams = all(order in orders for order in self.arguments.orders)
        return None if streams else f"it reads the sequence in the order {self.orders}"

    def ignores_resets(self) -> str | None:
        moving = [order for order in self.arguments.orders if moves_tokens(order)]
        return f"it reads the sequence in the order {moving[0]}" if moving else None


class ParallelNode(Node):
    kind = "parallel"
    arguments: Parallel = field(kw_only=True)


class RepeatNode(Node):
    kind = "repeat"
    arguments: Repeat = field(kw_only=True)

    @property
    def read_by_token(self) -> list[int]:
        return super().read_by_token[-1:]

    def spent_after_layers(self) -> list[list[int]]:
        """Return for each layer the values that no later layer reads, and no step after the repeat."""
        last: dict[int, int] = {}
        for at, body in enumerate(self.bodies.values()):
            last |= dict.fromkeys((*body.captures, *body.exports), at)
        spent: list[list[int]] = [[] for _ in self.bodies]
        for value, at in last.items():
            if value not in self.exports:
                spent[at].append(value)
        return spent


class ExpertsNode(Node):
    """Experts; the body "" has the router as its only step."""

    kind = "experts"
    arguments: Experts = field(kw_only=True)

    @property
    def active(self) -> dict[str, Graph]:
        """The router, the number of experts per token, and the steps for all tokens."""
        shared = {SHARED: self.bodies[SHARED]} if SHARED in self.bodies else {}
        return dict(list(self.bodies.items())[: 1 + self.arguments.top]) | shared


class ChooseNode(SeparateNode):
    kind = "choose"
    arguments: Choose = field(kw_only=True)
    wires: tuple[Wire | None, ...] = ()

    def reads_whole(self, types: Mapping[int, Wire | None]) -> list[bool]:
        """Return for each wire from outside that the steps read whether they read all of it, a context."""
        outside, x = (types[value] for value, _ in self.links[1:]), self.wires[0]
        return [bool(wire and x and not has_same_tokens(wire, x)) for wire in outside]

    def cannot_stream(self, orders: Container[str] = ("forward",)) -> str | None:
        if self.arguments.is_causal:
            return None
        return "it chooses tokens by the scores of the whole sequence: streams need a threshold, `above:`"


class EachNode(SeparateNode):
    kind = "each"
    arguments: Each = field(kw_only=True)
    wires: tuple[Wire | None, ...] = ()

    @property
    def runs(self) -> int:
        """How many sequences with states it makes of one."""
        arguments, wire = self.arguments, self.wires[0]
        features = wire.features if wire else 1
        return int(features // arguments.width if arguments.axis == "features" else arguments.width)

    def reads_whole(self, types: Mapping[int, Wire | None]) -> list[bool]:
        """Return for each wire from outside that the steps read whether each sequence reads all of it."""
        outside = (types[value] for value, _ in self.links[1:])
        return [self.arguments.axis == "features" or bool(wire and wire.context) for wire in outside]

    def cannot_stream(self, orders: Container[str] = ("forward",)) -> str | None:
        return f"it reads the {self.arguments.axis} of a whole image" if self.arguments.on_grid else None

    def ignores_resets(self) -> str | None:
        axis = self.arguments.axis
        return f"a sequence may begin in the middle of its {axis}" if axis != "features" else None


class CellNode(Node):
    kind = "cell"
    arguments: Cell = field(kw_only=True)


class Graph(Record):
    """A body: its input value, its nodes, its result, and its captures."""

    input: int
    nodes: list[Node]
    result: int
    captures: tuple[int, ...] = ()
    exports: tuple[int, ...] = ()  # values that steps outside read, besides the result
    exported: dict[str, int] = field(default_factory=dict)  # a block's `outputs:`, which are among these, by name
    ports: dict[str, int] = field(default_factory=dict)  # of a block, a model, a cell, a `choose` or an `each`
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
        from seqblocks.graph.names import count_node

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


def join(*parts: str) -> str:
    """Join the non-empty parts of a dotted name."""
    return ".".join(filter(None, parts))


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


def spent_values(body: Graph, reads: list[tuple[int, ...]]) -> list[list[int]]:
    """Return for each node the values that no later node reads."""
    last: dict[int, int] = {}
    for at, (node, values) in enumerate(zip(body.nodes, reads, strict=True)):
        last |= dict.fromkeys((*values, *node.made), at)
    for value in body.results:
        last.pop(value, None)
    spent: list[list[int]] = [[] for _ in body.nodes]
    for value, at in last.items():
        spent[at].append(value)
    return spent


def is_context(node: Node) -> bool:
    """Return whether a step depends on no streaming input, so that a stream runs it once."""
    return node.type is not None and node.type.context


def is_prefixed(node: Node) -> bool:
    """Return whether the output of a step has tokens before those of the stream, which a stream computes once."""
    return node.type is not None and node.type.prefix > 0


def is_prefix_join(node: Node) -> bool:
    """Return whether a step joins the tokens of a stream to others before them, which it reads only once."""
    return node.op is not None and joins_tokens(node.op) and is_prefixed(node)


def is_reversible(body: Graph) -> bool:
    """Return whether all steps support reverse order."""
    return all(
        not isinstance(node, ScanNode | ChooseNode | EachNode | CellNode)
        and (node.op is None or (node.op.reads == "token" and not node.state) or node.op.reversible)
        for node in walk(body)
    )


def is_exact(body: Graph) -> bool:
    """Return whether some steps return float32 in a 16-bit model, or read a state in float32."""
    return any(isinstance(node, CellNode) or (node.op and node.op.exact) for node in walk(body))

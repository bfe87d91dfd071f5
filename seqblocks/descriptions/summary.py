"""Summarise a model as plain data: parameters, cost and state of each step.

MACs are multiply-accumulates, per token and per input; FLOPs are twice that. One input is an image, a sequence that is
reduced to a vector, or a token (`Summary.counted_per`). State is counted per sequence, in the dtype in which it is
stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from seqblocks import graph
from seqblocks.analysis.passes import lookahead
from seqblocks.cost import (
    context_macs,
    count_state,
    dtype_named,
    input_macs,
    macs,
    node_input_macs,
    node_macs,
    open_context,
    open_memories,
    params_bytes,
    state_bytes,
    tokens_of,
)
from seqblocks.descriptions.layer_wires import LayerWire, layer_wires
from seqblocks.errors import UsageError, listing
from seqblocks.graph import Graph, ModelSpec, Node
from seqblocks.types import Rate, Wire


@dataclass(slots=True, repr=False)
class Row:
    """One row of a summary. `names`: the namespaces of its steps, several if equal layers are merged."""

    names: list[str]
    verb: str
    kind: str
    input: str
    output: str
    params: int
    macs: float | None  # per token; None: unknown
    state: int  # elements per sequence
    input_macs: float | None = None  # for one whole input; None: unknown
    rate: Rate = 1  # tokens of the model's input for each token of the output
    lookahead: int | str | None = None  # of the output (see `lookahead.find`); None: the output is not a sequence
    tied: dict[str, str] = field(default_factory=dict)
    shares: str = ""  # the step or the layer whose parameters it shares
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    node: Node | None = None  # of the first of its steps; None: a layer, a branch or a direction
    body: Graph | None = None  # of the first of these
    from_layers: list[str] = field(default_factory=list)  # the wires of other layers that its steps read

    @property
    def remarks(self) -> list[str]:
        """The notes, and the wires of other layers."""
        return [*self.notes, f"reads {listing(self.from_layers, 3)}"] if self.from_layers else self.notes

    def as_data(self) -> dict[str, Any]:
        return self._without() | {"notes": self.remarks, "steps": [row.as_data() for row in self.rows]}

    def _without(self, *hidden: str) -> dict[str, Any]:
        """Return the fields that JSON can hold, without some."""
        hidden = ("rows", "node", "body", "from_layers", *hidden)
        out = {key: getattr(self, key) for key in self.__slots__ if key not in hidden}
        return out | {"rate": self.rate if isinstance(self.rate, int) else float(self.rate)}

    def __repr__(self) -> str:
        return f"<Row {', '.join(self.names)}: {self.verb or self.kind}, {self.output}, {self.params:,} parameters>"

    def inside(self, path: str, depth: int) -> Iterator[dict[str, Any]]:
        """Yield the row and the rows below it without nesting, `step` being the path of the step."""
        step = graph.join(path, ", ".join(self.names))
        own = self._without("names", "tied", "notes")
        yield {"step": step, "depth": depth} | own | {"notes": ", ".join(self.remarks)}
        for row in self.rows:
            yield from row.inside(step, depth + 1)


@dataclass(slots=True, repr=False)
class Summary:
    """All figures of a model. `print` and notebooks show them as a table, with a row for each step."""

    name: str
    input: str
    output: str
    params: int
    active_params: int  # parameters used per token, counting only the selected experts
    params_bytes: int
    macs_per_token: float | None
    tokens: int | None
    state: int
    state_bytes: int
    dtype: str
    rows: list[Row]
    streams: str | None  # why it cannot stream, or None
    frame_size: int  # number of tokens per call of a stream
    lookahead: int | str | None = None  # later tokens that an output may depend on, or "all" (see `lookahead.find`)
    lookaheads: dict[str, int | str] = field(default_factory=dict)  # of each output that is a sequence, by its name
    future: str | None = None  # the step that introduces the lookahead
    latency: int | None = None  # samples that must arrive after a sample before its output (see `lookahead.latency`)
    latency_ms: float | None = None
    sample_rate: float | None = None  # of the input, in Hz
    input_macs: float | None = None  # of one whole input; None: unknown
    counted_per: str = "token"  # unit of the costs: token, sequence, image or input
    notes: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # by name, where the spec names them
    outputs: dict[str, str] = field(default_factory=dict)
    open_memories: list[str] = field(default_factory=list)  # inputs of open length that decide the cost of a token
    context_macs: float | None = 0  # of the steps that depend only on inputs that do not stream; None: unknown

    def __repr__(self) -> str:
        return f"<Summary of {self.name}: {self.input} -> {self.output}, {self.params:,} parameters>"

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        from seqblocks.descriptions import table  # which needs rich

        return table.html(self)

    def table(self, width: int | None = None, batch: int = 1) -> str:
        """Return the table of steps and the totals that `seqblocks build --summary` prints.

        width: in columns, by default that of the terminal. batch: also count the cost and state of so many sequences.
        """
        from seqblocks.descriptions import table  # which needs rich

        return table.text(self, width, batch)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dict for each row of the table, outer steps first: `pandas.DataFrame(summary.to_dict())`."""
        return [each for row in self.rows for each in row.inside("", 0)]

    @property
    def flops_per_token(self) -> float | None:
        return None if self.macs_per_token is None else 2 * self.macs_per_token

    def as_data(self) -> dict[str, Any]:
        out = {key: getattr(self, key) for key in self.__slots__ if key != "rows"}
        return out | {"flops_per_token": self.flops_per_token, "steps": [row.as_data() for row in self.rows]}


def summarise(model: Any, dtype: str = "float32", length: int | None = None, depth: int | None = None) -> Summary:
    """Return the summary of a checked model (`load_model`) or a built one (`build`).

    length: sequence length, if the spec does not fix it. depth: maximum depth of nested steps. Raises UsageError for
    anything that is not a model, a dtype that is none, or a length that contradicts the spec.
    """
    spec = model if isinstance(model, ModelSpec) else getattr(model, "spec", None)
    if not isinstance(spec, ModelSpec):
        raise UsageError(f"summarise takes a model, not {type(model).__name__}: use load_model(spec) for a spec")
    tokens, dtype = _tokens(spec, length), dtype_named(str(dtype), "dtype")
    obstacle = graph.stream_obstacle(spec)
    ahead, future = _lookahead(spec)
    ahead_of_steps = {path: lookahead.shown(each.tokens) for path, each in lookahead.by_step(spec).items()}
    wires = layer_wires(spec.graph, spec.labels)
    return Summary(
        name=spec.name,
        input=spec.input_text,
        output=spec.output_text,
        inputs={name: str(wire) for name, wire in spec.inputs.items()},
        outputs={name: str(wire) for name, wire in spec.outputs.items()},
        params=graph.count(spec.graph),
        active_params=graph.count(spec.graph, active=True),
        params_bytes=params_bytes(spec.graph, dtype),
        macs_per_token=macs(spec.graph, tokens),
        tokens=tokens,
        state=count_state(spec.graph),
        state_bytes=state_bytes(spec.graph, dtype),
        dtype=dtype,
        rows=list(_rows(_Table(spec.types, tokens, ahead_of_steps, exports=wires), spec.graph, depth)),
        streams=": ".join(obstacle) if obstacle else None,
        frame_size=graph.frame_size(spec.graph),
        lookahead=ahead,
        lookaheads={name: lookahead.shown(each.tokens) for name, each in lookahead.of_outputs(spec).items() if name},
        future=future,
        latency=lookahead.latency(spec),
        latency_ms=lookahead.latency_ms(spec),
        sample_rate=spec.input.sample_rate,
        input_macs=input_macs(spec.graph, tokens),
        open_memories=open_memories(spec),
        context_macs=context_macs(spec.graph) if spec.graph.ports else 0,
        counted_per=_counted_per(spec, tokens),
        notes=_remarks(spec),
    )


def _tokens(model: ModelSpec, length: int | None) -> int | None:
    """Return the number of tokens of one input, from the spec or `length`; None if unknown."""
    fixed, size = tokens_of(model), graph.frame_size(model.graph)
    if length and fixed and length != fixed:
        raise UsageError(f"the spec fixes the input at {fixed:,} tokens; a length is only for specs that do not")
    if length and length % size:
        raise UsageError(f"the model takes a multiple of {size} tokens, not {length:,}")
    return fixed or length


def _lookahead(model: ModelSpec) -> tuple[int | str | None, str | None]:
    ahead = lookahead.find(model)
    if ahead is None:
        return None, None
    entered = ahead.first and f"{ahead.first[0]} ({ahead.first[1].span})"
    return lookahead.shown(ahead.tokens), entered


def _counted_per(model: ModelSpec, tokens: int | None) -> str:
    """Return the unit of the costs: a token, or a whole sequence or image if the model returns one vector for it."""
    if model.input.kind == "vector":
        return "input"
    if tokens and model.input.kind == "image":
        return "image"
    return "sequence" if tokens and model.output and model.output.kind == "vector" else "token"


def _remarks(model: ModelSpec) -> list[str]:
    remarks = [
        f"the state grows with the length of {name}, which the spec does not fix; this part is not counted"
        for name in open_context(model.graph)
    ]
    if not (model.overridden and model.expect):
        return remarks
    return [*remarks, f"expect: not checked, because the spec is overridden by {', '.join(model.overridden)}"]


# --- the table: one row per step ------------------------------------------------------------------------------------


Tree = Mapping[str, Any]  # names, as tuples of their parts


class _Table(NamedTuple):
    """Data for the rows of a body: the types of the values, and the number of tokens of one input, if known.

    ahead: the lookahead of each step, by its path. path: of the body. shared: the parameters in the body that an
    enclosing step shares with another, by relative name. exports: the values of layers that other steps read.
    """

    types: Mapping[int, Wire | None]
    tokens: int | None
    ahead: dict[str, int | str]
    path: str = ""
    shared: Tree = MappingProxyType({})
    exports: Mapping[int, LayerWire] = MappingProxyType({})

    def inside(self, label: str) -> _Table:
        """Return the table of the contents of a name."""
        shared = self.shared.get(label, {}) if self.shared and label else self.shared
        return self._replace(path=graph.join(self.path, label), shared=shared)

    def in_direction(self, node: graph.ScanNode, name: str) -> _Table:
        """Return the table of one direction of a scan, with its own and the common parameters."""
        if not self.shared:
            return self
        common = {part: tree for part, tree in self.shared.items() if part not in node.directions}
        return self._replace(shared={**common, **self.shared.get(name, {})})

    def with_shared(self, names: Iterable[str]) -> _Table:
        """Return the table with further shared parameters."""
        return self._replace(shared=_tree(names, self.shared))

    def count(self, items: Iterable[graph.Named]) -> int:
        """Return the number of elements of the parameters owned here."""
        return sum(item.parameter.numel for item in items if not (item.tied or _holds(self.shared, item.name)))


def _tree(names: Iterable[str], more: Tree) -> dict[str, Any]:
    root = {part: _tree((), tree) for part, tree in more.items()}
    for name in names:
        at = root
        for part in name.split("."):
            at = at.setdefault(part, {})
    return root


def _holds(tree: Tree, name: str) -> bool:
    for part in name.split("."):
        if part not in tree:
            return False
        tree = tree[part]
    return True


def rows_of(body: Graph, types: Mapping[int, Wire | None]) -> list[Row]:
    """Return the rows of a body, also of one with unknown steps, without their lookahead."""
    return list(_rows(_Table(types, None, {}), body, None))


def _rows(table: _Table, body: Graph, depth: int | None) -> Iterator[Row]:
    """Yield a row for each step of a body, with `depth` levels (None: all)."""
    for node in body.nodes:
        below = table.inside(node.name)
        below = below.with_shared(node.shared) if node.shared else below
        row = Row(
            names=[node.name],
            verb=node.verb,
            kind=node.kind,
            input=_first_input(table, node),
            output=str(node.type),
            params=below.count(graph.node_parameters(node, "")) if below.shared else graph.count_node(node),
            macs=node_macs(node, table.tokens),
            state=sum(s.numel for s in node.state.values()) + sum(count_state(b) for b in node.bodies.values()),
            input_macs=node_input_macs(node, table.tokens),
            rate=node.type.rate if node.type else 1,
            lookahead=table.ahead.get(below.path),
            tied=dict(node.ties),
            shares=node.owner_name,
            notes=_notes(node),
            from_layers=_from_layers(below, node),
            node=node,
        )
        if table.shared and below.shared and not row.params:
            row.notes.append("shared")
        if depth is None or depth > 1:
            row.rows = _inside(below, node, None if depth is None else depth - 1)
        yield row


def _inside(table: _Table, node: Node, depth: int | None) -> list[Row]:
    if isinstance(node, graph.ScanNode) and node.directions:
        return _directions(table, node, depth)
    if list(node.bodies) == [""]:
        return list(_rows(table, node.bodies[""], depth))
    if isinstance(node, graph.ExpertsNode):
        kinds = {label: "branch" if label == graph.SHARED else "expert" for label in node.bodies if label}
        each = _collapsed(
            _whole(table.inside(label), node.bodies[label], [label], kind, depth) for label, kind in kinds.items()
        )
        return [*_rows(table, node.bodies[""], depth), *each]
    if not isinstance(node, graph.RepeatNode):
        return [_whole(table.inside(label), body, [label], "branch", depth) for label, body in node.bodies.items()]
    firsts = _first_layers(node)
    layers = (_whole(table.inside(label), body, [label], "layer", depth) for label, body in node.bodies.items())
    return _collapsed(_with_owner(row, firsts.get(row.names[0], "")) for row in layers)


def _with_owner(row: Row, first: str) -> Row:
    """Return the row of a layer with a note on the layer whose parameters it uses, if any."""
    if first:
        row.shares = first
        row.notes = [f"{'some ' if row.params else ''}parameters of {first}"]
    return row


def _first_layers(node: Node) -> dict[str, str]:
    """Return, by label, the layer whose parameters a layer uses; layers with their own parameters are omitted."""
    if node.owner:
        return {}
    inside = ((key, name) for key, (level, name) in node.shared.items() if level == key.count(".") + 1)
    return {key.partition(".")[0]: name.partition(".")[0] for key, name in inside}


def _collapsed(layers: Iterable[Row]) -> list[Row]:
    """Merge layers with equal rows."""
    groups: list[Row] = []
    for layer in layers:
        same = next((group for group in groups if _alike(group, layer)), None)
        if same:
            same.names += layer.names
            _add_wires(same, layer)
        else:
            groups.append(layer)
    return groups


def _add_wires(row: Row, like: Row) -> None:
    """Add the wires that the steps of an equal layer read to those of a row."""
    row.from_layers = list(dict.fromkeys((*row.from_layers, *like.from_layers)))
    for inner, other in zip(row.rows, like.rows, strict=True):
        _add_wires(inner, other)


def _directions(table: _Table, node: graph.ScanNode, depth: int | None) -> list[Row]:
    """Return the rows of the orders of a scan: one if each owns everything, else one each, shared parameters first."""
    (body,) = node.bodies.values()
    inside = list(graph.parameters(body))
    if len(node.owned) == len(inside):
        table = table.in_direction(node, node.directions[0])
        return [_whole(table, body, list(node.directions), "direction", depth)]
    first = _whole(table.in_direction(node, node.directions[0]), body, [node.directions[0]], "direction", depth)
    own = [item for item in inside if item.name in node.owned]
    owned = {other: table.in_direction(node, other).count(own) for other in node.directions[1:]}
    return [first, *(replace(first, names=[name], params=count, state=0, rows=[]) for name, count in owned.items())]


def _whole(table: _Table, body: Graph, names: list[str], kind: str, depth: int | None) -> Row:
    """Return the row of a body, with the rows of its steps as children."""
    result = table.types[body.result]
    last = next((node.name for node in body.nodes if body.result in node.outputs), "")
    return Row(
        names=names,
        verb="",
        kind=kind,
        input=str(table.types[body.input]),
        output=str(table.types[body.result]),
        params=table.count(graph.parameters(body)) if table.shared else graph.count(body),
        macs=macs(body, table.tokens),
        state=count_state(body),
        input_macs=input_macs(body, table.tokens),
        rate=result.rate if result else 1,
        lookahead=table.ahead.get(graph.join(table.path, last)) if last else None,
        rows=list(_rows(table, body, depth)),
        body=body,
    )


def _alike(a: Row, b: Row) -> bool:
    """Return whether two layers have equal rows; drop rates and similar arguments may differ."""
    facts = ("verb", "kind", "input", "output", "params", "macs", "state", "rate", "lookahead", "shares")
    return all(getattr(a, f) == getattr(b, f) for f in facts) and _children_alike(a.rows, b.rows)


def _children_alike(a: list[Row], b: list[Row]) -> bool:
    return len(a) == len(b) and all(
        x.names == y.names and x.notes == y.notes and _alike(x, y) for x, y in zip(a, b, strict=True)
    )


def _first_input(table: _Table, node: Node) -> str:
    wires = [table.types[value] for value in node.at_ports]
    return str(wires[0]) if wires and wires[0] else ""


def _from_layers(table: _Table, node: Node) -> list[str]:
    """Return the wires of other layers that a step reads."""
    if not table.exports:
        return []
    read = [table.exports[value] for value in node.at_ports if value in table.exports]
    return list(dict.fromkeys(name for wire in read if (name := wire.seen_from(table.path))))


def _choice(top: float | None, above: float | None) -> str:
    """Return in words which tokens a `choose` chooses."""
    threshold = "" if above is None else f"tokens above {above:g}"
    if top is None:
        return threshold
    best = f"best {top:.4g} of the tokens" if top < 1 else f"best {top:g} token{'s' * (top > 1)}"
    return f"{best} in training, else {threshold}" if threshold else best


def _notes(node: Node) -> list[str]:
    notes: list[str] = []
    if isinstance(node, graph.ScanNode):
        notes += _scan_notes(node)
    if isinstance(node, graph.ExpertsNode):
        top, count = node.arguments.top, node.arguments.count
        notes.append(f"{top} of {count} per token: {graph.count_node(node, active=True):,} active")
    if isinstance(node, graph.ParallelNode):
        notes.append(node.arguments.merge)
    if isinstance(node, graph.ChooseNode):
        notes.append(_choice(node.arguments.top, node.arguments.above))
    if isinstance(node, graph.CellNode):
        states = [*node.bodies[""].carried]
        notes.append(f"state{'s' * (len(states) > 1)} {listing(states)}")
    if node.owner:
        notes.append(f"parameters of {node.owner_name}")
    if graph.is_context(node):
        notes.append("once, kept" if node.kept else "once")
    return notes + [f"{name} tied to {target}" for name, target in node.ties.items()]


def _scan_notes(node: graph.ScanNode) -> list[str]:
    """Return notes on the orders of a scan and, for several, on owned parameters and the merging of results."""
    orders = node.arguments.orders
    notes = [] if node.is_forward else [" + ".join(orders)]
    if len(orders) == 1:
        return notes
    shared = sum(1 for _ in graph.parameters(node.bodies[""])) - len(node.owned)
    if not shared:
        ownership = "all owned"
    else:
        ownership = f"{len(node.owned)} owned, {shared} shared" if node.owned else "all shared"
    return [*notes, ownership, node.arguments.merge]

"""Tables as plain data: what a model costs, step by step.

MACs are multiply-accumulates, per token and per input; FLOPs are twice that. One input is an image, a sequence that
becomes a vector, or a token (`Summary.counted_per`). State is counted per sequence, in the dtype it is stored in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from seqblocks import graph
from seqblocks.analysis import lookahead
from seqblocks.cost import (
    count_state,
    input_macs,
    macs,
    node_input_macs,
    node_macs,
    params_bytes,
    state_bytes,
    tokens_of,
)
from seqblocks.errors import UsageError
from seqblocks.graph import Graph, ModelSpec


@dataclass(slots=True)
class Row:
    """One line of a summary. `names`: the namespaces of its steps, several where equal layers are collapsed."""

    names: list[str]
    verb: str
    kind: str
    input: str
    output: str
    params: int
    macs: float | None  # per token; None: unknown
    state: int  # numbers per sequence
    input_macs: float | None = None  # for one whole input; None: unknown
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        facts = ("names", "verb", "kind", "input", "output", "params", "macs", "input_macs", "state")
        out = {key: getattr(self, key) for key in facts}
        return out | {"tied": self.tied, "notes": self.notes, "steps": [row.as_data() for row in self.rows]}


@dataclass(slots=True)
class Summary:
    """All of a model's figures."""

    name: str
    input: str
    output: str
    params: int
    params_bytes: int
    macs_per_token: float | None
    tokens: int | None
    state: int
    state_bytes: int
    dtype: str
    rows: list[Row]
    streams: str | None  # why it cannot, or None
    frame_size: int  # how many tokens a stream takes at once
    lookahead: int | str | None = None  # later tokens that an output may depend on, or "all" (see `lookahead.find`)
    future: str | None = None  # the step where they enter
    input_macs: float | None = None  # of one whole input; None: unknown
    counted_per: str = "token"  # what a person counts costs by: token, sequence or image
    notes: list[str] = field(default_factory=list)

    @property
    def flops_per_token(self) -> float | None:
        return None if self.macs_per_token is None else 2 * self.macs_per_token

    def as_data(self) -> dict[str, Any]:
        out = {key: getattr(self, key) for key in self.__slots__ if key != "rows"}
        return out | {"flops_per_token": self.flops_per_token, "steps": [row.as_data() for row in self.rows]}


def summarise(model: Any, dtype: str = "float32", length: int | None = None, depth: int | None = None) -> Summary:
    """Return the summary of a checked model (`load_model`) or a built one (`build`).

    `length` is used where the spec leaves the sequence length open, `depth` limits the levels of steps. Raises
    UsageError for anything that is not a model.
    """
    model = getattr(model, "spec", model) if not isinstance(model, ModelSpec) else model
    if not isinstance(model, ModelSpec):
        raise UsageError(f"summarise wants a model, not {type(model).__name__}: load_model(spec) makes one of a spec")
    fixed, size = tokens_of(model), graph.frame_size(model.graph)
    if length and fixed and length != fixed:
        raise UsageError(f"an input has {fixed:,} tokens, says the spec; a length is for one that leaves that open")
    if length and length % size:
        raise UsageError(f"the model takes a multiple of {size} tokens, not {length:,}")
    tokens = fixed or length
    obstacle = graph.stream_obstacle(model)
    streams = ": ".join(obstacle) if obstacle else None
    rows = list(_rows(model, model.graph, tokens, depth, ""))
    notes = []
    if model.overridden and model.expect:
        notes.append(f"expect: not checked, since the spec is changed by {', '.join(model.overridden)}")
    return Summary(
        model.name,
        str(model.input),
        str(model.output),
        graph.count(model.graph),
        params_bytes(model.graph, dtype),
        macs(model.graph, tokens),
        tokens,
        count_state(model.graph),
        state_bytes(model.graph, dtype),
        dtype,
        rows,
        streams,
        graph.frame_size(model.graph),
        *_lookahead(model),
        input_macs(model.graph, tokens),
        _counted_per(model, tokens),
        notes,
    )


def _lookahead(model: ModelSpec) -> tuple[int | str | None, str | None]:
    ahead = lookahead.find(model)
    if ahead is None:
        return None, None
    entered = ahead.first and f"{ahead.first[0]} ({ahead.first[1].span})"
    return lookahead.shown(ahead.tokens), entered


def _counted_per(model: ModelSpec, tokens: int | None) -> str:
    """Return what costs are counted by: a classifier has one answer for all tokens, and an image hides its tokens."""
    if tokens and model.input.kind == "image":
        return "image"
    return "sequence" if tokens and model.output and model.output.kind == "vector" else "token"


def _rows(model: ModelSpec, body: Graph, tokens: int | None, depth: int | None, path: str) -> Iterator[Row]:
    for node in body.nodes:
        name = graph.join(path, node.name)
        row = Row(
            [node.name],
            node.verb,
            node.kind,
            _shown(model, node),
            str(node.type),
            graph.count_node(node),
            node_macs(node, tokens),
            sum(s.numel for s in node.state.values()) + sum(count_state(b) for b in node.bodies.values()),
            node_input_macs(node, tokens),
            dict(node.ties),
            _notes(node),
        )
        if depth is None or depth > 1:
            inner = None if depth is None else depth - 1
            row.rows = _inside(model, node, tokens, inner, name)
        yield row


def _inside(model: ModelSpec, node: graph.Node, tokens: int | None, depth: int | None, name: str) -> list[Row]:
    if node.directions:
        return _directions(model, node, tokens, depth, name)
    if list(node.bodies) == [""]:
        return list(_rows(model, node.bodies[""], tokens, depth, name))
    groups: list[Row] = []
    for label, body in node.bodies.items():
        kind = "layer" if node.kind == "repeat" else "branch"
        row = _whole(model, body, [label], kind, tokens, depth, graph.join(name, label))
        same = next((g for g in groups if node.kind == "repeat" and _alike(g, row)), None)
        if same:
            same.names.append(label)
        else:
            groups.append(row)
    return groups


def _directions(model: ModelSpec, node: graph.Node, tokens: int | None, depth: int | None, name: str) -> list[Row]:
    """Return the orders of a scan: one line if each owns everything, else one each, shared parameters in the first."""
    (body,) = node.bodies.values()
    inside = list(graph.parameters(body))
    owns_all = len(node.owned) == len(inside)
    owned = sum(item.parameter.numel for item in inside if item.name in node.owned and item.tied is None)
    names = list(node.directions) if owns_all else [node.directions[0]]
    first = _whole(model, body, names, "direction", tokens, depth, name)
    others = [] if owns_all else node.directions[1:]
    return [first, *(replace(first, names=[other], params=owned, state=0, rows=[]) for other in others)]


def _whole(
    model: ModelSpec, body: graph.Graph, names: list[str], kind: str, tokens: int | None, depth: int | None, name: str
) -> Row:
    """Return a body as one line, with the lines of its steps below."""
    return Row(
        names,
        "",
        kind,
        str(model.types[body.input]),
        str(model.types[body.result]),
        graph.count(body),
        macs(body, tokens),
        count_state(body),
        input_macs(body, tokens),
        rows=list(_rows(model, body, tokens, depth, name)),
    )


def _alike(a: Row, b: Row) -> bool:
    """Whether two layers would print the same; drop rates and the like may differ."""
    facts = ("verb", "kind", "input", "output", "params", "macs", "state")
    return all(getattr(a, f) == getattr(b, f) for f in facts) and _children_alike(a.rows, b.rows)


def _children_alike(a: list[Row], b: list[Row]) -> bool:
    return len(a) == len(b) and all(
        x.names == y.names and x.notes == y.notes and _alike(x, y) for x, y in zip(a, b, strict=True)
    )


def _shown(model: ModelSpec, node: graph.Node) -> str:
    wires = [model.types[v] for values in node.inputs.values() for v in values]
    first = wires[0] if wires else None
    return str(first) if first else ""


def _notes(node: graph.Node) -> list[str]:
    notes = []
    if node.kind == "scan":
        orders = node.arguments.orders
        if orders != ("forward",):
            notes.append(" + ".join(orders))
        if len(orders) > 1:
            body = node.bodies[""]
            total = sum(1 for _ in graph.parameters(body))
            shared = total - len(node.owned)
            notes.append(
                "all owned"
                if not shared
                else "all shared"
                if not node.owned
                else f"{len(node.owned)} owned, {shared} shared"
            )
            notes.append(node.arguments.merge)
    if node.kind == "parallel":
        notes.append(node.arguments.merge)
    notes += [f"{name} tied to {target}" for name, target in node.ties.items()]
    return notes

"""Counts and tables as plain data: what a model costs, step by step, and whether it meets its `expect:`.

MACs are multiply-accumulates of one token (of one whole input behind a pooling); FLOPs are twice that. State is counted
per sequence, in the dtype it is kept in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from seqblocks import graph
from seqblocks.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.errors import Diagnostic, ExpectationError, Fault, Report, SpecError
from seqblocks.expressions import UNKNOWN
from seqblocks.graph import Graph, Model
from seqblocks.lower import Frame, Shared
from seqblocks.spec import SpecFile
from seqblocks.types import Wire

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


@dataclass(slots=True)
class Row:
    """One line of a summary. `names` are the namespaces it stands for (several where repeats are collapsed)."""

    names: list[str]
    verb: str
    kind: str
    input: str
    output: str
    params: int
    macs: float | None  # per token; None: unknown
    state: int  # numbers per sequence
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        out = {
            key: getattr(self, key) for key in ("names", "verb", "kind", "input", "output", "params", "macs", "state")
        }
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
    notes: list[str] = field(default_factory=list)

    @property
    def flops_per_token(self) -> float | None:
        return None if self.macs_per_token is None else 2 * self.macs_per_token

    def as_data(self) -> dict[str, Any]:
        out = {key: getattr(self, key) for key in self.__slots__ if key != "rows"}
        return out | {"flops_per_token": self.flops_per_token, "steps": [row.as_data() for row in self.rows]}


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
    if node.type and node.type.kind == "vector" and node.macs:
        return node.macs / tokens if tokens else None
    return float(node.macs)


def count_state(body: Graph) -> int:
    return sum(s.numel for node in graph.walk(body) for s in node.state.values())


def tokens_of(model: Model) -> int | None:
    """Tokens of one input: the longest sequence's length, where it is known."""
    wires = [model.input, *(node.type for node in graph.walk(model.graph))]
    lengths = [w.length for w in wires if w and isinstance(w.length, int)]
    return max(lengths, default=None)


def summarise(model: Model, dtype: str = "float32", length: int | None = None, depth: int | None = None) -> Summary:
    """The summary of a model: `length` stands in for an open sequence length, `depth` cuts the tree."""
    tokens = tokens_of(model) or length
    obstacle = graph.stream_obstacle(model.graph)
    streams = f"{obstacle[0].name} ({obstacle[0].span}): {obstacle[1]}" if obstacle else None
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
        notes,
    )


def _rows(model: Model, body: Graph, tokens: int | None, depth: int | None, path: str) -> Iterator[Row]:
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
            dict(node.ties),
            _notes(node),
        )
        if depth is None or depth > 1:
            inner = None if depth is None else depth - 1
            row.rows = _inside(model, node, tokens, inner, name)
        yield row


def _inside(model: Model, node: graph.Node, tokens: int | None, depth: int | None, name: str) -> list[Row]:
    if list(node.bodies) == [""]:
        return list(_rows(model, node.bodies[""], tokens, depth, name))
    groups: list[Row] = []
    for label, body in node.bodies.items():
        rows = list(_rows(model, body, tokens, depth, graph.join(name, label)))
        row = Row(
            [label],
            "",
            "layer" if node.kind == "repeat" else "branch",
            str(model.types[body.input]),
            str(model.types[body.result]),
            graph.count(body),
            macs(body, tokens),
            count_state(body),
            rows=rows,
        )
        same = next((g for g in groups if node.kind == "repeat" and _alike(g, row)), None)
        if same:
            same.names.append(label)
        else:
            groups.append(row)
    return groups


def _alike(a: Row, b: Row) -> bool:
    """Whether two layers would print the same (drop rates and the like aside)."""
    facts = ("verb", "kind", "input", "output", "params", "macs", "state")
    return all(getattr(a, f) == getattr(b, f) for f in facts) and _children_alike(a.rows, b.rows)


def _children_alike(a: list[Row], b: list[Row]) -> bool:
    return len(a) == len(b) and all(
        x.names == y.names and x.notes == y.notes and _alike(x, y) for x, y in zip(a, b, strict=True)
    )


def _shown(model: Model, node: graph.Node) -> str:
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


# --- expect -------------------------------------------------------------------------------------------------------------


def check_expectations(model: Model, file: SpecFile) -> None:
    """Raises ExpectationError (E701 params, E702 state_bytes, E703 flops_per_token, E704 output) or SpecError."""
    expect = file.expect
    if expect is None or model.overridden:
        return
    malformed, broken = Report(), Report()
    frame = Frame.top(Shared(malformed), file)
    tolerance = _number(frame, expect, "tolerance", 0.0)
    summary = summarise(model)
    largest = sorted(summary.rows, key=lambda r: -r.params)[:3]
    parts = "largest parts: " + ", ".join(f"{r.names[0]} {r.params:,}" for r in largest)
    figures: tuple[tuple[str, str, float | None, str | None], ...] = (
        ("params", "E701", summary.params, parts),
        ("state_bytes", "E702", summary.state_bytes, None),
        ("flops_per_token", "E703", summary.flops_per_token, None),
    )
    for key, code, found, hint in figures:
        wanted = _number(frame, expect, key, None)
        if wanted is None or wanted is UNKNOWN or tolerance is UNKNOWN:
            continue
        if found is None or abs(found - wanted) > tolerance * abs(wanted):
            shown = (
                "unknown: the sequence length is open" if found is None else f"{found:,.10g} ({found - wanted:+,.10g})"
            )
            span = expect.entries[key][1].span
            broken.add(
                Diagnostic(
                    code, f"the spec does not have the {key} it expects", span, f"{wanted:,.10g}", shown, (), hint
                )
            )
    _check_output(frame, expect.get("output"), model.output, broken)
    malformed.raise_if_any()
    if broken:
        raise ExpectationError(broken.diagnostics, broken.dropped)


def _number(frame: Frame, expect: Mapping, key: str, default: float | None) -> Any:
    node = expect.get(key)
    return default if node is None else frame.number(node)


def _check_output(frame: Frame, node: Node | None, wire: Wire | None, broken: Report) -> None:
    if node is None or wire is None:
        return
    if not isinstance(node, Sequence) or not all(isinstance(i, Scalar) for i in node.items):
        hint = "output: [batch, 1000]"
        frame.fault(Fault("E203", "the output is a list of axes", found=kind_of(node), hint=hint), node.span)
        return
    axes = [i.value if i.text in map(str, wire.axes) else frame.number(i) for i in node.items if isinstance(i, Scalar)]
    if UNKNOWN not in axes and tuple(axes) != wire.axes:
        message = "the spec does not have the output it expects"
        broken.add(Diagnostic("E704", message, node.span, str(axes).replace("'", ""), str(wire)))


__all__ = ["Row", "SpecError", "Summary", "check_expectations", "summarise"]

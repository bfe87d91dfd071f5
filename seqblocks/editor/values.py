"""Values of names and types of wires, as far as a spec without a run determines them."""

from __future__ import annotations

from collections.abc import Mapping as Table
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.references import Reference
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot, touches
from seqblocks.editor.steps import items_of_lists
from seqblocks.errors import Fault, Span
from seqblocks.language.document import Mapping, Scalar
from seqblocks.language.expressions import UNKNOWN, has_syntax, parse


def type_of_wire(opened: Opened, found: Reference) -> str | None:
    """Return the type of a wire as text; that of its first layer, if it differs. None if it is unknown."""
    model, body = opened.known.analysis.model, opened.known.analysis.lowered.body
    if found.definition is None:
        return str(model.input) if model and found.name == "input" else None
    if body is None or opened.root is None or not opened.is_own(found.definition):
        return None
    maker = _maker(opened, found.definition)
    for node in graph.walk(body) if maker else ():
        if node.span == maker:
            return _type(model, node, found.name)
    return None


def _type(model: graph.ModelSpec | None, node: graph.Node, name: str) -> str | None:
    if model:
        for value in node.outputs:
            if model.labels.get(value) == name and (wire := model.types.get(value)):
                return str(wire)
    return str(node.type) if node.type and len(node.outputs) < 2 else None


def _maker(opened: Opened, definition: Span) -> Span | None:
    """Return the verb of the innermost step around the definition of a wire."""
    assert opened.root is not None
    spot = Spot(definition.line, definition.column)
    around = [step for step in items_of_lists(opened.root) if touches(step.node.span, spot)]
    return around[-1].span if around else None


def value_of(opened: Opened, found: Reference | str) -> Any:
    """Return the value of a name of the file's `let:`, or of an expression of such names; None if it has none."""
    file = opened.known.analysis.file
    let = file.let if file else None
    if let is None:
        return None
    if isinstance(found, str):
        return _evaluated(found, _Let(let))
    entry = let.entries.get(found.name)
    value = _Let(let)[found.name] if entry and entry[0] == found.definition else UNKNOWN
    return None if value is UNKNOWN else value


def _evaluated(text: str, names: Table[str, Any]) -> Any:
    if not (has_syntax(text) or text in names):
        return None
    try:
        value = parse(text).evaluate(names)
    except (Fault, RecursionError):
        return None
    return None if value is UNKNOWN else value


class _Let(dict[str, Any]):
    """The values of `let:`, computed when they are asked for; one that depends on itself is unknown."""

    def __init__(self, let: Mapping) -> None:
        super().__init__()
        self.let, self.open = let, set[str]()

    def __contains__(self, name: object) -> bool:
        return name in self.let.entries

    def __missing__(self, name: str) -> Any:
        node = self.let.get(name)
        if node is None:
            raise KeyError(name)
        if not isinstance(node, Scalar) or name in self.open:
            return UNKNOWN
        self.open.add(name)
        text = node.value if isinstance(node.value, str) else None
        value = node.value if text is None else _evaluated(text, self)
        self.open.discard(name)
        self[name] = UNKNOWN if value is None else value
        return self[name]

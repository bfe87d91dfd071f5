"""Wires: what a step reads, what it gives out, and under which name it is kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, islice, pairwise
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope import Names, Scope, Step
from seqblocks.errors import Fault, Note, Report, Span, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import SpecFile
from seqblocks.language.vocabulary import did_you_mean, hidden
from seqblocks.op import Port, builtin_verbs, fields_of, find_primitive, ids_are_no_numbers
from seqblocks.types import Origin, Wire, show_axes


@dataclass(slots=True, eq=False, repr=False)
class Shared:
    """What one run of the lowering shares: the report, the values, how many steps there have been."""

    report: Report
    types: dict[int, Wire | None] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    steps: int = 0
    effort: int = 0  # spent on reading arguments, see `scope.effort`
    deepest: int = 0  # the most bodies that were open at once
    full: bool = False  # whether there were too many of either
    step_cache: dict[int, Step | None] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # blocks that were called
    unread: dict[int, bool] = field(default_factory=dict)  # nodes of `let:` and of defaults: whether nobody has asked
    bodies: dict[Any, tuple[graph.Graph, int, int]] = field(default_factory=dict)  # of blocks, by arguments and wires
    tops: dict[int, Names] = field(default_factory=dict)  # `let:` of each file
    makers: dict[int, Origin] = field(default_factory=dict)  # the step that gave a value out
    maps: dict[int, tuple[graph.Entry, ...]] = field(default_factory=dict)  # of blocks
    checks: list[tuple[Any, ...]] = field(default_factory=list)  # maps to hold against the bodies that they are of
    lowered: list[tuple[Any, graph.Graph]] = field(default_factory=list)  # bodies of blocks and of the model, by frame
    overridden: bool = False  # whether values were given from outside
    ties: int = 0
    input_kind: str = ""  # of the model, for arguments that inherit from it
    input_features: int = 0
    efforts: dict[int, int] = field(default_factory=dict)  # of calling each block
    named: dict[int, tuple[graph.Node, dict[str, graph.Named]]] = field(default_factory=dict)  # parameters of nodes

    def parameters_of(self, node: graph.Node) -> dict[str, graph.Named]:
        """The parameters of a node by their names in it; listed once, however many ties look one up."""
        if id(node) not in self.named:
            self.named[id(node)] = node, {item.name: item for item in graph.node_parameters(node, "")}
        return self.named[id(node)][1]


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Wiring(Scope):
    """A scope with the wires in sight, the nodes so far, and the path of namespaces that leads here."""

    shared: Shared
    home: SpecFile
    wires: dict[str, int] = field(default_factory=dict)
    vague: bool = False  # whether there are wires that could not be read
    path: tuple[str, ...] = ()
    here: str = ""  # what the step at hand is called
    coming: frozenset[str] = frozenset()  # wires that a later step of this body names
    giving: frozenset[str] = frozenset()  # wires that the step at hand will give out
    called: dict[str, int] = field(default_factory=dict)  # what steps of this body are called: the last number offered
    outer: Wiring | None = None  # the body around
    nodes: dict[str, graph.Node] = field(default_factory=dict)

    @property
    def types(self) -> dict[int, Wire | None]:
        return self.shared.types

    def value(self, type: Wire | None, label: str) -> int:
        """A new value."""
        number = len(self.shared.types)
        self.shared.types[number] = type
        self.shared.labels[number] = label
        return number

    def node(
        self, step: Step, kind: graph.NodeKind, inputs: dict[str, tuple[int, ...]], type: Wire | None, **more: Any
    ) -> graph.Node:
        """A node for `step`, with its namespace and its output values."""
        origin = Origin(step.verb, step.span)
        type = type.made_by(origin) if type else None
        name = self._namespace(step)
        outputs, split, labels = self._outputs(step, type)
        values = tuple(self.value(wire, label) for wire, label in zip(outputs, labels, strict=True))
        made = graph.Node(kind, name, step.verb, step.span, inputs, values, type, split, **more)
        self.shared.makers |= dict.fromkeys(values, origin)
        for label, number in zip(labels, values, strict=True):
            if label != step.verb and label not in self.wires:
                self.wires[label] = number
        self.nodes.setdefault(name, made)
        return made

    def _namespace(self, step: Step) -> str:
        name, span = namespace_of(step)
        given = step.common.get("name")
        if given and not isinstance(given[1], Scalar):
            self.fault(Fault("E203", "name is a word", found=kind_of(given[1])), given[1].span)
        elif given and not self.is_name(name, span):
            return f"{step.verb}@{span.line}"
        clash = self.nodes.get(name)
        if clash:
            self.fault(
                Fault(
                    "E304",
                    f"two steps here would both be called {quote(name)}",
                    hint=f"{self._other_name(step, name)}: parameters are stored under it",
                    notes=[Note("the other one stands here", clash.span)],
                ),
                step.alias or span,
            )
            return f"{name}@{span.line}:{span.column}"
        return name

    def _other_name(self, step: Step, name: str) -> str:
        """What to write so that a step has a name of its own, which no step here has yet."""
        number = next(each for each in count(self.called.get(name, 1) + 1) if f"{name}_{each}" not in self.called)
        self.called[name] = number  # a third one is told another
        other = f"name: {name}_{number}"
        if step.alias:
            return f"an alias repeats the name too: write the step out, with `{other}`"
        if "name" in step.common:
            return f"say `{other}`"
        return f"add `{other}`" if step.fields or step.common else f"write `{step.verb}: {{{other}}}`"

    def _outputs(self, step: Step, type: Wire | None) -> tuple[list[Wire | None], tuple[int, ...], list[str]]:
        """Types, split widths and labels of what the step gives out (`as:`)."""
        entry = step.common.get("as")
        if entry is None:
            return [type], (), [step.verb]
        node = entry[1]
        origin = Origin(step.verb, step.span)
        if type and type.kind == "tokens" and isinstance(node, Sequence | Mapping):
            self.fault(ids_are_no_numbers(type, "split", "the result"), node.span)
            type = None
        match node:
            case Scalar(value=str(name)):
                self._define(name, node.span)
                return [type], (), [name]
            case Sequence(items=items) if len(items) > 1 and all(isinstance(i, Scalar) for i in items):
                labels, parts = [], set[str]()
                for item in items:
                    assert isinstance(item, Scalar)
                    if item.text in parts:
                        self.fault(Fault("E305", f"two parts are called {quote(item.text)}"), item.span)
                    parts.add(item.text)
                    labels.append(self._define(item.text, item.span))
                if type is None:
                    return [None] * len(labels), (), labels
                width, rest = divmod(type.features, len(labels))
                if rest:
                    message = f"{type.features} features cannot be split into {len(labels)} equal parts"
                    each = ", ".join(f"{name}: {width + (at < rest)}" for at, name in enumerate(labels))
                    hint = f"give the widths: as: {{{each}}}"
                    self.fault(Fault("E405", message, hint=hint), node.span)
                    return [None] * len(labels), (), labels
                widths: list[Any] = [width] * len(labels)
            case Mapping(entries=entries) if entries:
                labels = [self._define(key, span) for key, span, _ in node]
                self.comma_trap(node)
                widths = [self.number(value, whole=True) for _, _, value in node]
                if type is None or any(w is UNKNOWN for w in widths):
                    return [None] * len(labels), (), labels
                if sum(widths) != type.features or min(widths) < 1:
                    note = type.whence("the result")
                    self.fault(
                        Fault(
                            "E405",
                            "the widths must add up to the features there are"
                            if sum(widths) != type.features
                            else "every part has at least one feature",
                            expected=str(type.features) if sum(widths) != type.features else "1 or more each",
                            found=f"{' + '.join(map(str, widths))} = {sum(widths)}",
                            notes=[note] if note else [],
                        ),
                        node.span,
                    )
                    return [None] * len(labels), (), labels
            case _:
                expected = "a name, a list of names (equal parts), or a mapping name: width"
                self.fault(Fault("E203", "as names what comes out", expected=expected, found=kind_of(node)), node.span)
                self.vague = True
                return [None], (), [step.verb]
        return [type.with_features(w).made_by(origin) for w in widths], tuple(widths), labels

    def look_for_as(self, step: Step, words: Iterable[str]) -> None:
        """Tell of no wire that is not there where one may stand under a misspelt `as`."""
        self.vague |= hidden({**step.fields, **step.common}, "as", words)

    def _define(self, name: str, span: Span) -> str:
        if not self.is_name(name, span):
            self.vague = True
        elif name in self.wires:
            maker = self.shared.makers.get(self.wires[name])
            notes = [Note("it is made here", maker.span)] if maker else []
            self.fault(Fault("E305", f"a wire called {quote(name)} exists already", notes=notes), span)
        return name

    # --- what a step reads

    def wire(self, node: Node, step: Step | None = None) -> int | None:
        """The value a wire name stands for; None after a fault."""
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            self.fault(Fault("E203", "the name of a wire is needed here", found=kind_of(node)), node.span)
            return None
        number = self.wires.get(node.value)
        if number is None and not self.vague:
            self.fault(self._no_wire(node.value, step), node.span)
        return number

    def _no_wire(self, name: str, step: Step | None) -> Fault:
        hint = None
        if name in builtin_verbs() or name in self.home.visible:
            hint = f"'{name}' is a verb: name what it makes, `- {name}: {{as: a}}`, and read `a`"
            op = find_primitive(step.verb) if step else None
            kind = fields_of(op).get("activation") if op else None
            if step and kind and name in kind.choices:
                fields = step.fields.items()
                key = next(key for key, (_, node) in fields if isinstance(node, Scalar) and node.text == name)
                hint = f"an activation has a key of its own: `{step.verb}: {{{key}: …, activation: {name}}}`"
        if name in self.giving:
            hint = "it is what this step gives out, and a step reads only what stands above it"
        elif name in self.coming:
            hint = "it is named further down, and a step reads only what stands above it"
        known = [other for other in islice(self.wires, 14) if other != "input"]
        return Fault(
            "E302",
            f"there is no wire {quote(name)} at this point",
            expected=f"input, or one of {listing(known)}" if known else "input (no step above is named)",
            hint=hint or (lambda: did_you_mean(name, self.wires) or "name an earlier step's output with `as:`"),
        )

    def main(self, step: Step, previous: int, maker: graph.Node | None, key: str, joins: bool) -> tuple[int, ...]:
        """What a main port reads: `from:`, the port by name, or the previous step."""
        entry = step.common.get("from")
        by_name = step.fields.get(key) if key else None
        if entry and by_name:
            raise Fault("E210", f"the input is given twice: as `from` and as `{key}`", at=key)
        entry = entry or by_name
        if entry is None:
            if maker and len(maker.outputs) > 1:
                labels = listing(self.shared.labels[v] for v in maker.outputs)
                raise Fault(
                    "E313",
                    f"the step above gives out {len(maker.outputs)} wires; say which one this step reads",
                    expected=f"from: one of {labels}",
                )
            return (previous,)
        return self.read(entry[1], joins)

    def read(self, node: Node, joins: bool, step: Step | None = None) -> tuple[int, ...]:
        if not isinstance(node, Sequence):
            found = self.wire(node, step)
            return (self.value(None, "?"),) if found is None else (found,)
        if not joins:
            wires = listing(item.text for item in node.items if isinstance(item, Scalar))
            hint = f"`linear` joins wires: `linear: {{from: [{wires}], features: …}}` above, and read what it gives out"
            fault = Fault("E410", "this input takes one wire, not a list", hint=hint)
            self.fault(fault, node.span)
            return (self.value(None, "?"),)
        found_all = [self.wire(item) for item in node.items]
        if not found_all or None in found_all:
            if not found_all:
                self.fault(Fault("E411", "the list of wires is empty"), node.span)
            return (self.value(None, "?"),)
        return tuple(v for v in found_all if v is not None)

    def joined(self, step: Step, port: Port, values: tuple[int, ...] | None) -> Wire | None:
        """The type that arrives at a port; None while unknown (or absent). Checks the kind."""
        if values is None:
            return None
        types = [self.types[v] for v in values]
        known = [t for t in types if t is not None]
        for value, wire in zip(values, types, strict=True):
            if wire and wire.kind not in port.kinds:
                maker = self.shared.makers.get(value)
                made = f"made by {maker.verb}" if maker else "the model's input"
                span = maker.span if maker else wire.origin.span if wire.origin else None
                note = Note(f"`{self.shared.labels[value]}` is {wire}: {made}", span)
                self.fault(
                    Fault(
                        "E403",
                        f"{step.verb} cannot read {_a(wire.kind)}",
                        at=port.name if port.name in step.fields else "from",
                        expected=" or ".join(_a(k) for k in port.kinds),
                        found=f"{wire}",
                        notes=[note],
                        hint=_KIND_HINTS.get((wire.kind, port.kinds[0])),
                    ),
                    step,
                )
                return None
        if len(known) < len(types):
            return None
        if len(known) > 1 and known[0].kind == "tokens":
            self.fault(ids_are_no_numbers(known[0], "joined", self.shared.labels[values[0]]), step)
            return None
        if len({(t.kind, t.places) for t in known}) > 1:
            found = listing(f"{self.shared.labels[v]} {t}" for v, t in zip(values, known, strict=True))
            self.fault(Fault("E406", "joined wires must agree in everything but features", found=found), step)
            return None
        return known[0].with_features(sum(t.features for t in known)) if len(known) > 1 else known[0]

    def agreed(self, step: Step, wires: dict[str, Wire]) -> bool:
        """Whether the inputs of one step, by port, are of one kind and have as many tokens; a fault if not."""
        for (first, like), (name, wire) in pairwise(wires.items()):
            if (wire.kind, wire.places) != (like.kind, like.places):
                size = "the size of" if like.kind == "image" else "as many tokens as"
                same = f" of {size} {first}" if like.places else ""
                fault = Fault(
                    "E406",
                    f"{name} must be {_a(like.kind)}{same}",
                    at=name if name in step.fields else None,
                    expected=show_axes(like.with_features(wire.features).axes),
                    found=f"{wire}",
                )
                self.fault(fault, step)
                return False
        return True

    def lost(self, step: Step | None) -> int:
        """An unknown value in place of a faulty step's result; its names are defined so that uses stay silent."""
        value = self.value(None, "?")
        for name in named(step) if step else ():
            self.wires.setdefault(name, value)
        return value


def namespace_of(step: Step) -> tuple[str, Span]:
    """What a step is called, be it right or not: its `name:`, else its single `as:`, else its verb; and where."""
    for key in ("name", "as"):
        entry = step.common.get(key)
        if entry and isinstance(entry[1], Scalar):
            return entry[1].text, entry[1].span
    return step.verb, step.span


def named(step: Step) -> list[str]:
    """The wires that a step's `as:` names."""
    entry = step.common.get("as")
    match entry[1] if entry else None:
        case Scalar(text=name):
            return [name]
        case Sequence(items=items):
            return [item.text for item in items if isinstance(item, Scalar)]
        case Mapping(entries=entries):
            return list(entries)
    return []


def captures(body: graph.Graph, first: int, own: set[int]) -> tuple[int, ...]:
    """Values that a body reads and does not make: everything numbered before its first value."""
    made = set(own)
    seen: dict[int, None] = {}
    for node in body.nodes:
        wanted = [v for values in node.inputs.values() for v in values]
        wanted += [v for inner in node.bodies.values() for v in inner.captures]
        seen |= dict.fromkeys(v for v in wanted if v < first and v not in made)
        made.update(node.outputs)
    if body.result < first and body.result not in made:
        seen[body.result] = None
    return tuple(seen)


def _a(kind: str) -> str:
    return {"image": "an image", "tokens": "token numbers", "sequence": "a sequence", "vector": "a vector"}[kind]


_KIND_HINTS = {
    ("image", "sequence"): "cut the image into tokens first, with patch_embed",
    ("tokens", "sequence"): "look the tokens up first, with embed",
    ("sequence", "vector"): "pool the sequence first, with pool",
    ("vector", "sequence"): "the sequence was pooled before; move this step above the pooling",
    **dict.fromkeys(
        (("sequence", "tokens"), ("vector", "tokens"), ("image", "tokens")),
        "only `input: {tokens: vocabulary}` gives token numbers: leave this step out where the input has features",
    ),
    **dict.fromkeys(
        (("sequence", "image"), ("vector", "image"), ("tokens", "image")),
        "only `input: {image: {size: 224, channels: 3}}` gives an image, and to_image makes one of its tokens",
    ),
    ("tokens", "vector"): "look the tokens up with embed and pool them with pool first",
}

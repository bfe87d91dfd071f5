"""Typed spec -> graph: numbers are computed, names are resolved, shapes are proved.

One walk does it all. A step that is at fault yields a value of unknown type, which silences whatever depends on it, so
that a file's independent faults are all found in one run. Blocks that nothing uses are walked too, with UNKNOWN for
arguments without a default.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from seqblocks import graph
from seqblocks.combinators import COMBINATORS, Combinator
from seqblocks.document import Mapping, Node, Scalar, Sequence, kind_of, plain
from seqblocks.errors import Fault, Note, Report, Span, did_you_mean, listing, quote
from seqblocks.expressions import UNKNOWN
from seqblocks.inputs import read_input
from seqblocks.op import PRIMITIVES, FieldKind, Op, Port, builtin_verbs, fields_of, find_primitive, load_plugins
from seqblocks.ownership import initialised, ties
from seqblocks.scope import Names, Scope, Step
from seqblocks.spec import STEP_KEYS, Block, SpecFile, bundled
from seqblocks.types import Origin, Wire

MAX_STEPS = 50_000


@dataclass(slots=True, eq=False, repr=False)
class Shared:
    """What one run of the lowering shares: the report, the values, how many steps there have been."""

    report: Report
    types: dict[int, Wire | None] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    steps: int = 0
    step_cache: dict[int, Step | None] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # blocks that were called
    bodies: dict[Any, tuple[graph.Graph, int]] = field(default_factory=dict)  # of blocks, by arguments and wires
    tops: dict[int, Names] = field(default_factory=dict)  # `let:` of each file
    makers: dict[int, Origin] = field(default_factory=dict)  # the step that gave a value out
    ties: int = 0
    input_kind: str = ""  # of the model, for arguments that inherit from it
    input_features: int = 0


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Frame(Scope):
    """Where the walk stands: a scope, the file, the wires in sight, the path of namespaces, the body around."""

    shared: Shared
    home: SpecFile
    wires: dict[str, int] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    callers: tuple[Block, ...] = ()  # the blocks that are open
    coming: frozenset[str] = frozenset()  # wires that a later step of this body names
    outer: Frame | None = None
    nodes: dict[str, graph.Node] = field(default_factory=dict)

    @classmethod
    def top(cls, shared: Shared, home: SpecFile) -> Frame:
        """The outermost scope of a file: its own `let:`."""
        if id(home) in shared.tops:
            return cls(report=shared.report, names=shared.tops[id(home)], shared=shared, home=home)
        shared.tops[id(home)] = Names()
        frame = cls(report=shared.report, names=shared.tops[id(home)], shared=shared, home=home)
        frame.let(home.let)
        return frame

    @property
    def types(self) -> dict[int, Wire | None]:
        return self.shared.types

    # --- values -----------------------------------------------------------------------------------------------------

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
        name, span = step.verb, step.span
        for key in ("as", "name"):
            entry = step.common.get(key)
            if entry and isinstance(entry[1], Scalar) and isinstance(entry[1].value, str):
                name, span = entry[1].value, entry[1].span
        if "name" in step.common and not self.is_name(name, span):
            return f"{step.verb}@{span.line}"
        clash = self.nodes.get(name)
        if clash:
            self.fault(
                Fault(
                    "E304",
                    f"two steps here would both be called {quote(name)}",
                    hint="give one of them a `name:`: parameters are stored under it",
                    notes=[Note("the other one stands here", clash.span)],
                ),
                span,
            )
            return f"{name}@{span.line}:{span.column}"
        return name

    def _outputs(self, step: Step, type: Wire | None) -> tuple[list[Wire | None], tuple[int, ...], list[str]]:
        """Types, split widths and labels of what the step gives out (`as:`)."""
        entry = step.common.get("as")
        if entry is None:
            return [type], (), [step.verb]
        node = entry[1]
        origin = Origin(step.verb, step.span)
        match node:
            case Scalar(value=str(name)):
                self._define(name, node.span)
                return [type], (), [name]
            case Sequence(items=items) if len(items) > 1 and all(isinstance(i, Scalar) for i in items):
                labels = [self._define(i.text, i.span) for i in items if isinstance(i, Scalar)]
                if type is None:
                    return [None] * len(labels), (), labels
                width, rest = divmod(type.features, len(labels))
                if rest:
                    message = f"{type.features} features cannot be split into {len(labels)} equal parts"
                    hint = "give the widths: as: {a: 128, b: 64}"
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
                            "the widths must add up to the features there are",
                            expected=str(type.features),
                            found=f"{' + '.join(map(str, widths))} = {sum(widths)}",
                            notes=[note] if note else [],
                        ),
                        node.span,
                    )
                    return [None] * len(labels), (), labels
            case _:
                expected = "a name, a list of names (equal parts), or a mapping name: width"
                self.fault(Fault("E203", "as names what comes out", expected=expected, found=kind_of(node)), node.span)
                return [None], (), [step.verb]
        return [type.with_features(w).made_by(origin) for w in widths], tuple(widths), labels

    def _define(self, name: str, span: Span) -> str:
        if self.is_name(name, span) and name in self.wires:
            maker = self.shared.makers.get(self.wires[name])
            notes = [Note("it is made here", maker.span)] if maker else []
            self.fault(Fault("E305", f"a wire called {quote(name)} exists already", notes=notes), span)
        return name

    # --- steps ------------------------------------------------------------------------------------------------------

    def body(
        self, steps: Node | None, x: int, path: Iterable[str] = (), names: dict[str, Any] | None = None
    ) -> graph.Graph:
        """Lower a list of steps that are given value `x`; wires of this frame stay visible."""
        inner = replace(
            self,
            names=Names(self.names, names) if names else self.names,
            wires={**self.wires, "input": x},
            path=(*self.path, *(p for p in path if p)),
            outer=self,
            nodes={},
        )
        return inner.lower_steps(steps, x)

    def lower_steps(self, steps: Node | None, x: int, ports: dict[str, int] | None = None) -> graph.Graph:
        """Lower a body in this very frame."""
        first = len(self.shared.types)
        out = graph.Graph(x, [], x, ports=ports or {})
        if not isinstance(steps, Sequence):
            if steps is not None:
                self.fault(Fault("E203", "steps must be a list", found=kind_of(steps), hint="- silu"), steps.span)
            out.result = self.value(None, "?")
            return out
        current: graph.Node | None = None
        read = [self.step(item) for item in steps.items]
        self.coming = frozenset(name for step in read if step for name in _named(step))
        for step in read:
            made = self.lower_step(step, out.result, current) if step else None
            if made is None:
                out.result, current = self._lost(step), None
                continue
            out.nodes.append(made)
            out.result, current = made.outputs[0], made
        if current and len(current.outputs) > 1:
            message = f"the last step gives out {len(current.outputs)} wires, and what leaves must be one"
            self.fault(Fault("E313", message), current.span)
            out.result = self.value(None, "?")
        out.captures = _captures(out, first, {x, *(ports or {}).values()})
        return out

    def _lost(self, step: Step | None) -> int:
        """An unknown value in place of a faulty step's result; its names are defined so that uses stay silent."""
        value = self.value(None, "?")
        for name in _named(step) if step else ():
            self.wires.setdefault(name, value)
        return value

    def step(self, item: Node) -> Step | None:
        """A document node as a step; read once however often its body is lowered."""
        cache = self.shared.step_cache
        if id(item) not in cache:
            cache[id(item)] = self.read_step(item, self.is_verb)
        return cache[id(item)]

    def is_verb(self, word: str) -> bool:
        return word in COMBINATORS or word in self.home.visible or find_primitive(word) is not None

    def lower_step(self, step: Step, previous: int, maker: graph.Node | None) -> graph.Node | None:
        """The node of a step whose predecessor gave value `previous`; None after a fault."""
        self.shared.steps += 1
        if self.shared.steps > MAX_STEPS:
            if self.shared.steps == MAX_STEPS + 1:
                self.fault(Fault("E104", "the model has too many steps", expected=f"at most {MAX_STEPS:,}"), step.span)
            return None
        try:
            if step.verb in COMBINATORS:
                return self._combinator(step, COMBINATORS[step.verb], previous, maker)
            block = self.home.visible.get(step.verb)
            if block:
                return self._block(step, block, previous, maker)
            op = find_primitive(step.verb)
            if op:
                return self._op(step, op, previous, maker)
            verbs = [*COMBINATORS, *self.home.visible, *builtin_verbs(), *PRIMITIVES]
            failed = tuple(Note(text) for text in load_plugins())
            raise Fault(
                "E301",
                f"there is no verb {quote(step.verb)}",
                hint=_offered(step.verb) or did_you_mean(step.verb, verbs) or "`seqblocks ops` lists the verbs",
                notes=failed,
            )
        except Fault as fault:
            self.fault(fault, step)
            return None

    def wire(self, node: Node) -> int | None:
        """The value a wire name stands for; None after a fault."""
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            self.fault(Fault("E203", "the name of a wire is needed here", found=kind_of(node)), node.span)
            return None
        number = self.wires.get(node.value)
        if number is None:
            names = [name for name in self.wires if name != "input"]
            hint = did_you_mean(node.value, self.wires) or "name an earlier step's output with `as:`"
            if node.value in self.coming:
                hint = "it is named further down, and a step reads only what stands above it"
            self.fault(
                Fault(
                    "E302",
                    f"there is no wire {quote(node.value)} at this point",
                    expected=f"input, or one of {listing(names)}" if names else "input (no step above is named)",
                    hint=hint,
                ),
                node.span,
            )
        return number

    def _main(self, step: Step, previous: int, maker: graph.Node | None, key: str, joins: bool) -> tuple[int, ...]:
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
        return self._wires(entry[1], joins)

    def _wires(self, node: Node, joins: bool) -> tuple[int, ...]:
        if not isinstance(node, Sequence):
            found = self.wire(node)
            return (self.value(None, "?"),) if found is None else (found,)
        if not joins:
            fault = Fault(
                "E410", "this input takes one wire, not a list", hint="join with `parallel` and merge: concat"
            )
            self.fault(fault, node.span)
            return (self.value(None, "?"),)
        found_all = [self.wire(item) for item in node.items]
        if not found_all or None in found_all:
            if not found_all:
                self.fault(Fault("E411", "the list of wires is empty"), node.span)
            return (self.value(None, "?"),)
        return tuple(v for v in found_all if v is not None)

    # --- primitives ---------------------------------------------------------------------------------------------------

    def _op(self, step: Step, cls: type[Op], previous: int, maker: graph.Node | None) -> graph.Node:
        inputs: dict[str, tuple[int, ...]] = {}
        for port in cls.ports:
            if port.main:
                inputs[port.name] = self._main(step, previous, maker, port.name, port.joins)
            elif port.name in step.fields:
                inputs[port.name] = self._wires(step.fields[port.name][1], port.joins)
            elif not port.optional:
                hint = f"{port.name}: {port.name}" if port.name in self.wires else f"{port.name}: the wire to read"
                self.fault(Fault("E411", f"{step.verb} needs its input {quote(port.name)}", hint=hint), step.span)
                inputs[port.name] = (self.value(None, "?"),)
        if "from" in step.common and not any(port.main for port in cls.ports):
            names = listing(port.name for port in cls.ports)
            fault = Fault("E201", f"{step.verb} has no `from`: its inputs have names", expected=names)
            self.fault(fault, step.key_span("from"))
        ports = {port.name for port in cls.ports}
        arguments = self._arguments(step, cls, skip=ports)
        wires = [self._joined(step, port, inputs.get(port.name)) for port in cls.ports]
        type, parameters, state, macs = None, {}, {}, 0
        present = [w for w, port in zip(wires, cls.ports, strict=True) if port.name in inputs]
        if arguments is not None and all(present):
            type = arguments.shape(*wires)
            parameters = arguments.parameters(*wires)
            state = arguments.state(*wires)
            macs = arguments.macs(*wires)
        parameters = initialised(self, step, parameters, known=arguments is not None)
        tied = ties(self, step, parameters)
        self.shared.ties += len(tied)
        return self.node(
            step, "op", inputs, type, op=arguments, parameters=parameters, state=state, macs=macs, ties=tied
        )

    def _joined(self, step: Step, port: Port, values: tuple[int, ...] | None) -> Wire | None:
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
        if len({(t.kind, t.length) for t in known}) > 1:
            found = listing(f"{self.shared.labels[v]} {t}" for v, t in zip(values, known, strict=True))
            self.fault(Fault("E406", "joined wires must agree in everything but features", found=found), step)
            return None
        return known[0].with_features(sum(t.features for t in known)) if len(known) > 1 else known[0]

    def _arguments(self, step: Step, cls: type[BaseModel], skip: Iterable[str] = ()) -> Any:
        """The validated argument model; None after a fault or while a value is UNKNOWN."""
        fields = fields_of(cls)
        skip = set(skip)
        values: dict[str, Any] = {}
        sound = True
        unknown_keys = []
        for key, (span, node) in step.fields.items():
            if key in fields:
                kind = fields[key]
                value = self.argument(node, kind)
                values[key] = plain(node) if value is node and issubclass(cls, Op) else value
            elif key not in skip:
                unknown_keys.append(key)
                words = [*fields, *skip, *STEP_KEYS]
                fault = Fault(
                    "E201",
                    f"unknown key {quote(key)} in {step.verb}",
                    expected=f"one of {listing(words, 16)}",
                    hint=did_you_mean(key, words),
                )
                self.fault(fault, span)
                sound = False
        for key, info in cls.model_fields.items():
            extra = info.json_schema_extra
            if isinstance(extra, dict) and extra.get("inherit") == self.shared.input_kind and key not in values:
                values[key] = self.shared.input_features
        if any(v is UNKNOWN or (isinstance(v, list) and UNKNOWN in v) for v in values.values()):
            return None
        try:
            made = cls.model_validate(values)
        except ValidationError as error:
            for item in error.errors():
                # a misspelt key also leaves its true name missing; the misspelling is the thing to tell
                if not (item["type"] == "missing" and unknown_keys):
                    self._invalid(step, cls, item)
            return None
        return made if sound else None

    def _invalid(self, step: Step, cls: type[BaseModel], item: Any) -> None:
        key = str(item["loc"][0]) if item["loc"] else None
        if item["type"] == "missing":
            info = cls.model_fields.get(key or "")
            about = info.description if info else None
            hint = f"{key}: {about}"
            self.fault(Fault("E202", f"{step.verb} needs {quote(key or '?')}", hint=hint), step.span)
            return
        message = item["msg"][0].lower() + item["msg"][1:]
        code = "E203" if "type" in item["type"] or "parsing" in item["type"] else "E209"
        message = message.removeprefix("input should be ").removeprefix("value error, ")
        found = str(item["input"])
        self.fault(Fault(code, f"{key} of {step.verb} must be {message}", at=key, found=found[:60]), step)

    # --- combinators and blocks ------------------------------------------------------------------------------------

    def _combinator(
        self, step: Step, cls: type[Combinator], previous: int, maker: graph.Node | None
    ) -> graph.Node | None:
        for key in ("init", "tie"):
            if key in step.common:
                self.fault(Fault("E201", f"{step.verb} has no parameters of its own to {key}"), step.key_span(key))
        (x,) = self._main(step, previous, maker, "", joins=False)
        wire = self.types[x]
        if wire and wire.kind not in cls.main_kinds:
            self._joined(step, Port("from", kinds=("sequence",)), (x,))
            x = self.value(None, "?")
        fields = fields_of(cls)
        extra = {}
        if cls.open_keys:
            extra = {k: e for k, e in step.fields.items() if k not in fields}
            step = replace(step, fields={k: e for k, e in step.fields.items() if k in fields})
        made = self._arguments(step, cls)
        if made is None:
            self._walk_lost(step, cls, x, extra)
            return None
        step = replace(step, fields={**step.fields, **extra})
        node: graph.Node | None = made.lower(self, step, x)
        return node

    def _walk_lost(self, step: Step, cls: type[Combinator], x: int, extra: dict[str, tuple[Span, Node]]) -> None:
        """Look for independent faults in the bodies of a combinator whose own arguments are at fault."""
        wire = self.value(None, "?")
        names = {"layer": UNKNOWN, "layers": UNKNOWN} if step.verb == "repeat" else None
        for key in ("steps", *extra):
            entry = step.fields.get(key) or extra.get(key)
            if entry and isinstance(entry[1], Sequence):
                self.body(entry[1], wire, names=names)

    def _block(self, step: Step, block: Block, previous: int, maker: graph.Node | None) -> graph.Node:
        for key in ("init", "tie"):
            if key in step.common:
                hint = "make it an argument of the block"
                self.fault(Fault("E201", f"a block's parameters cannot be given {key}", hint=hint), step.key_span(key))
        if block in self.callers:
            names = [b.name for b in self.callers]
            ring = " -> ".join([*names[names.index(block.name) :], block.name])
            raise Fault("E308", f"block {quote(block.name)} uses itself: {ring}")
        self.shared.used.add(id(block))
        (x,) = self._main(step, previous, maker, "", joins=False)
        values, ports = self._block_arguments(step, block)
        inputs: dict[str, tuple[int, ...]] = {name: (value,) for name, value in {"x": x, **ports}.items()}
        body, result = self.call(
            block, x, values, ports, self._namespace_of(step), Note(f"in block {block.name}, used", step.span)
        )
        return self.node(step, "block", inputs, result, bodies={"": body}, checkpoint=block.checkpoint)

    def _namespace_of(self, step: Step) -> str:
        for key in ("name", "as"):
            entry = step.common.get(key)
            if entry and isinstance(entry[1], Scalar):
                return entry[1].text
        return step.verb

    def call(
        self, block: Block, x: int, values: dict[str, Any], ports: dict[str, int], graph_path: str, came: Note
    ) -> tuple[graph.Graph, Wire | None]:
        """A block's body for one set of arguments: lowered once, however many layers call it so."""
        shared = self.shared
        key = (id(block), repr(values), *(self.types[v] for v in (x, *ports.values())))
        if key in shared.bodies:
            body, steps = shared.bodies[key]
            shared.steps += steps
            return body, self.types[body.result]
        entered = self.value(self.types[x], "input")
        inside = {name: self.value(self.types[v], name) for name, v in ports.items()}
        inner = replace(
            Frame.top(shared, block.home),
            wires={"input": entered, **inside},
            path=(*self.path, graph_path),
            trail=(*self.trail, came),
            callers=(*self.callers, block),
        )
        inner.names = Names(inner.names, values)
        inner.let(block.let)
        inner.names.settle()
        before = (shared.steps, shared.ties)
        body = inner.lower_steps(block.steps, entered, inside)
        if not shared.report and shared.ties == before[1]:  # a tie holds the names of the layer it was made for
            shared.bodies[key] = (body, shared.steps - before[0])
        return body, self.types[body.result]

    def _block_arguments(self, step: Step, block: Block) -> tuple[dict[str, Any], dict[str, int]]:
        values: dict[str, Any] = {}
        ports: dict[str, int] = {}
        misspelt = False
        for key, (span, _) in step.fields.items():
            if key not in block.args:
                misspelt = True
                words = [*block.args, "from", "as", "name"]
                fault = Fault(
                    "E201",
                    f"block {block.name} has no argument {quote(key)}",
                    expected=f"one of {listing(words, 16)}",
                    hint=did_you_mean(key, words),
                    notes=[Note("the block is defined here", block.span)],
                )
                self.fault(fault, span)
        for name, argument in block.args.items():
            entry = step.fields.get(name)
            if argument.type == "wire":
                if entry:
                    (ports[name],) = self._wires(entry[1], joins=False)
                else:
                    self.fault(Fault("E411", f"block {block.name} needs its input {quote(name)}"), step.span)
                    ports[name] = self.value(None, "?")
            elif entry:
                values[name] = self._block_argument(entry[1], argument.type)
            elif argument.default is not None:
                values[name] = default_value(argument.default)
            else:
                values[name] = UNKNOWN
                if not misspelt:
                    fault = Fault(
                        "E202",
                        f"block {block.name} needs {quote(name)}",
                        expected=f"{name}: {argument.type}",
                        notes=[Note("the argument is declared here", argument.span)],
                    )
                    self.fault(fault, step.span)
        return values, ports

    def _block_argument(self, node: Node, type: str) -> Any:
        if type == "word":
            return self.argument(node, FieldKind("words"))
        if type == "any":
            return self.free_value(node)
        kind = FieldKind("flag") if type == "bool" else FieldKind("number", whole=type == "int")
        return self.argument(node, kind)


def default_value(node: Node) -> Any:
    """A block argument's default: plain data, never an expression (it would have no scope)."""
    return plain(node)


def _named(step: Step) -> list[str]:
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


def _captures(body: graph.Graph, first: int, own: set[int]) -> tuple[int, ...]:
    """Values that a body reads and does not make: everything numbered before its first value."""
    made = set(own)
    seen: list[int] = []
    for node in body.nodes:
        wanted = [v for values in node.inputs.values() for v in values]
        wanted += [v for inner in node.bodies.values() for v in inner.captures]
        seen += [v for v in wanted if v < first and v not in made and v not in seen]
        made.update(node.outputs)
    if body.result < first and body.result not in made:
        seen.append(body.result)
    return tuple(seen)


def _offered(verb: str) -> str | None:
    """Which bundled file defines a block of this name."""
    for name, path in bundled().items():
        if path.parent.name == "blocks" and f"\n  {verb}:\n" in path.read_text(encoding="utf-8"):
            return f"`use: [{name}]` brings it in"
    return None


def _a(kind: str) -> str:
    return {"image": "an image", "tokens": "token numbers", "sequence": "a sequence", "vector": "a vector"}[kind]


_KIND_HINTS = {
    ("image", "sequence"): "cut the image into tokens first, with patch_embed",
    ("tokens", "sequence"): "look the tokens up first, with embed",
    ("sequence", "vector"): "pool the sequence first, with pool",
    ("vector", "sequence"): "the sequence was pooled before; move this step above the pooling",
}


# --- a whole file --------------------------------------------------------------------------------------------------


def lower_file(file: SpecFile, report: Report, name: str, overridden: tuple[str, ...] = ()) -> graph.Model | None:
    """The graph of a file's model, and a check of every block in it. None if there is no sound model."""
    shared = Shared(report)
    frame = Frame.top(shared, file)
    frame.names.settle()
    model = _lower_model(frame, file, name, overridden) if file.model else None
    for block in file.blocks.values():
        if id(block) not in shared.used:
            _check_unused(frame, block)
    return None if report else model


def _lower_model(frame: Frame, file: SpecFile, name: str, overridden: tuple[str, ...]) -> graph.Model | None:
    assert file.model is not None
    wire = read_input(frame, file.model.get("input"), file.model_span)
    steps = file.model.get("steps")
    if steps is None:
        frame.fault(Fault("E202", "the model has no steps"), file.model_span)
    x = frame.value(wire, "input")
    frame.wires["input"] = x
    if wire:
        frame.shared.input_kind, frame.shared.input_features = wire.kind, wire.features
    body = frame.lower_steps(steps, x)
    body.captures = ()
    if frame.report or wire is None:
        return None
    types, labels = frame.shared.types, frame.shared.labels
    return graph.Model(name, wire, body, types, labels, file.expect, file.checkpoint, overridden)


def _check_unused(frame: Frame, block: Block) -> None:
    lost = Frame.top(frame.shared, frame.home)
    x = lost.value(None, "input")
    values: dict[str, Any] = {}
    ports: dict[str, int] = {}
    for name, argument in block.args.items():
        if argument.type == "wire":
            ports[name] = lost.value(None, name)
        else:
            values[name] = UNKNOWN if argument.default is None else default_value(argument.default)
    lost.call(block, x, values, ports, block.name, Note(f"in block {block.name}, which nothing uses", block.span))

"""Typed spec -> graph: numbers are computed, names are resolved, shapes are proved.

One walk does it all. A step that is at fault yields a value of unknown type, which silences whatever depends on it, so
that a file's independent faults are all found in one run. Blocks that nothing uses are walked too, with UNKNOWN for
arguments without a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

from seqblocks import expressions, graph
from seqblocks.combinators import COMBINATORS, Combinator
from seqblocks.document import Mapping, Node, Scalar, Sequence, kind_of, plain
from seqblocks.errors import Diagnostic, Fault, Note, Report, Span, did_you_mean, listing, quote
from seqblocks.expressions import UNKNOWN
from seqblocks.op import PRIMITIVES, FieldKind, Op, Port, fields_of, find_primitive, load_plugins
from seqblocks.parameters import Init, Parameter, read_init
from seqblocks.spec import STEP_KEYS, Block, Reader, SpecFile
from seqblocks.types import Origin, Wire

# A step's name becomes an attribute of a torch module; these are taken there, or are methods of a built model.
RESERVED_NAMES = frozenset(
    """forward reverse rows rows_reverse columns columns_reverse train eval float double half bfloat16 type to cuda cpu
    xpu ipu mtia apply call modules children parameters buffers state_dict load_state_dict register_buffer step
    register_parameter register_module add_module get_parameter get_submodule get_buffer extra_repr requires_grad_
    zero_grad share_memory compile training dump_patches named_parameters named_modules named_children named_buffers
    get_extra_state set_extra_state set_submodule to_empty init_state parameter_groups reset_parameters graph input
    T_destination call_super_init""".split()
)  # fmt: skip
MAX_STEPS = 50_000


class Names(MappingABC[str, Any]):
    """Numbers and words by name. `let` entries are computed when first asked for, so their order does not matter."""

    def __init__(self, outer: MappingABC[str, Any] | None = None, values: dict[str, Any] | None = None) -> None:
        self.outer: MappingABC[str, Any] = outer if outer is not None else {}
        self.values: dict[str, Any] = values or {}
        self.pending: dict[str, Callable[[], Any]] = {}

    def __getitem__(self, name: str) -> Any:
        if name in self.pending:
            compute = self.pending.pop(name)
            self.values[name] = UNKNOWN  # what a cycle sees; the thunk tells it
            self.values[name] = compute()
        return self.values[name] if name in self.values else self.outer[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values or name in self.pending or name in self.outer

    def __iter__(self) -> Iterator[str]:
        return iter({**self.values, **self.pending, **dict.fromkeys(self.outer)})

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(slots=True)
class Step:
    """One step, its keys sorted: what every verb has, and the verb's own."""

    verb: str
    span: Span  # of the verb
    fields: dict[str, tuple[Span, Node]]
    common: dict[str, tuple[Span, Node]]

    def key_span(self, key: str) -> Span:
        entry = self.fields.get(key) or self.common.get(key)
        return entry[0] if entry else self.span

    def value_span(self, key: str | None) -> Span:
        entry = (self.fields.get(key) or self.common.get(key)) if key else None
        return entry[1].span if entry else self.span


@dataclass(slots=True)
class Shared:
    """What one run of the lowering shares: the report, the values, how many steps there have been."""

    report: Report
    types: dict[int, Wire | None] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    steps: int = 0
    step_cache: dict[int, Step | None] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)  # blocks that were called
    input_kind: str = ""  # of the model, for arguments that inherit from it
    input_features: int = 0


@dataclass(slots=True)
class Frame:
    """Where the walk stands: the file, the names and wires in scope, the path of namespaces, the trail of blocks."""

    shared: Shared
    home: SpecFile
    names: Names
    wires: dict[str, int]
    path: tuple[str, ...] = ()
    trail: tuple[tuple[str, Span], ...] = ()
    outer: Frame | None = None
    nodes: dict[str, graph.Node] = field(default_factory=dict)

    @property
    def types(self) -> dict[int, Wire | None]:
        return self.shared.types

    # --- faults -----------------------------------------------------------------------------------------------------

    def fault(self, fault: Fault, where: Step | Span | None) -> None:
        """Report a fault: at the argument it names, with the trail of blocks."""
        span = where.value_span(fault.at) if isinstance(where, Step) else where
        notes = [Note(f"in block {name}, used", at) for name, at in reversed(self.trail)]
        self.shared.report.add(fault.dress(span, notes))

    def is_name(self, name: str, span: Span) -> bool:
        """Whether `name` may be a namespace; told if not."""
        if name in RESERVED_NAMES:
            self.fault(Fault("E311", f"{quote(name)} is reserved: a torch module has it already"), span)
            return False
        return Reader(self.shared.report).is_name(name, span)

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
                self._comma_trap(node)
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
        if name == "input":
            self.fault(Fault("E311", "'input' is what the steps were given", hint="choose another name"), span)
        elif Reader(self.shared.report).is_name(name, span) and name in self.wires:
            self.fault(Fault("E305", f"a wire called {quote(name)} exists already"), span)
        return name

    # --- arguments --------------------------------------------------------------------------------------------------

    def number(self, node: Node, whole: bool = False, optional: bool = False) -> Any:
        """A number or an expression's value; UNKNOWN after a fault."""
        value = self._number(node, optional)
        if whole and isinstance(value, float):
            if value == int(value):
                return int(value)
            hint = "use ceil(…), floor(…) or // for a whole number"
            self.fault(Fault("E503", "a whole number is needed here", found=f"{value:g}", hint=hint), node.span)
            return UNKNOWN
        return value

    def _number(self, node: Node, optional: bool) -> Any:
        match node:
            case Scalar(value=None) if optional:
                return None
            case Scalar(value=bool()):
                pass
            case Scalar(value=int() | float() as value):
                return value
            case Scalar(value=str(text)):
                value = self.evaluate(text, node)
                if isinstance(value, str) or value is None or isinstance(value, list | bool):
                    if value is None and optional:
                        return None
                    found = f"{quote(text)}, which is {quote(str(value))}"
                    self.fault(Fault("E203", "a number is needed here", found=found), node.span)
                    return UNKNOWN
                return value
        self.fault(Fault("E203", "a number or an expression is needed here", found=kind_of(node)), node.span)
        return UNKNOWN

    def evaluate(self, text: str, node: Scalar) -> Any:
        """An expression's value in this scope; UNKNOWN after a fault. A bare name may stand for any kind of value."""
        try:
            if text.isidentifier() and text in self.names:
                return self.names[text]
            return expressions.parse(text).evaluate(self.names)
        except expressions.NameFault as fault:
            self.fault(fault, node.span.within(node.offset + fault.offset, len(fault.name)))
        except Fault as fault:
            self.fault(fault, node.span)
        return UNKNOWN

    def argument(self, node: Node, kind: FieldKind) -> Any:
        """The value of an argument whose field is of `kind`; UNKNOWN after a fault."""
        match kind.kind:
            case "number":
                return self.number(node, kind.whole, kind.optional)
            case "flag":
                return self._flag(node, kind)
            case "word":
                return self.word(node, kind)
            case "words":
                if isinstance(node, Sequence):
                    items = [self.word(item, kind) for item in node.items]
                    return UNKNOWN if any(i is UNKNOWN for i in items) else items
                return self.word(node, kind)
        return node

    def _flag(self, node: Node, kind: FieldKind) -> Any:
        if isinstance(node, Scalar):
            if isinstance(node.value, bool) or (node.value is None and kind.optional):
                return node.value
            if isinstance(node.value, str):
                value = self.evaluate(node.text, node)
                if isinstance(value, bool) or value is UNKNOWN:
                    return value
        self.fault(Fault("E203", "true or false is needed here", found=kind_of(node)), node.span)
        return UNKNOWN

    def word(self, node: Node, kind: FieldKind) -> Any:
        """A legal word, or what a name of this scope stands for."""
        if not isinstance(node, Scalar) or (node.value is None and not kind.optional):
            self.fault(Fault("E203", "a word is needed here", expected=_choices(kind), found=kind_of(node)), node.span)
            return UNKNOWN
        if node.value is None:
            return None
        text = node.text
        if text in kind.choices:
            return text
        if text in self.names:
            value = self.names[text]
            if value is None and kind.optional:
                return None
            if value is UNKNOWN or not kind.choices or value in kind.choices:
                return value
            if isinstance(value, list) and kind.kind == "words":
                return value
            found = f"{quote(text)}, which is {quote(str(value))}"
            self.fault(Fault("E208", "not a legal word here", expected=_choices(kind), found=found), node.span)
            return UNKNOWN
        if not kind.choices and isinstance(node.value, str):
            return text
        self.fault(
            Fault(
                "E208",
                f"{quote(text)} is not a legal word here",
                expected=_choices(kind),
                hint=did_you_mean(text, [*kind.choices, *self.names]),
            ),
            node.span,
        )
        return UNKNOWN

    def _comma_trap(self, node: Mapping) -> frozenset[str]:
        """Keys that are the torn halves of a call with a comma inside { }; told once, as what it is."""
        torn: set[str] = set()
        keys = list(node)
        for at, (key, _, value) in enumerate(keys):
            if not isinstance(value, Scalar) or value.text.count("(") <= value.text.count(")"):
                continue
            pieces = [value.text]
            for other, _, empty in keys[at + 1 :]:
                if not (isinstance(empty, Scalar) and empty.value is None):
                    break
                pieces.append(other)
                if ")" in other:
                    break
            if len(pieces) > 1:
                text = ", ".join(pieces)
                message = f"the comma in {quote(text)} ends the value: inside braces, quote a call that has a comma"
                self.fault(Fault("E110", message, hint=f'{key}: "{text}"'), value.span)
                torn |= {key, *pieces[1:]}
        return frozenset(torn)

    def let(self, node: Mapping | None) -> None:
        """Add `let:` entries to the names of this frame."""
        if node is None:
            return
        torn = self._comma_trap(node)
        reader = Reader(self.shared.report)
        open_now: list[str] = []
        for key, span, value in node:
            if key in torn:
                self.names.values[key] = UNKNOWN
            elif reader.is_name(key, span):
                self.names.pending[key] = self._thunk(key, span, value, open_now)

    def _thunk(self, key: str, span: Span, node: Node, open_now: list[str]) -> Callable[[], Any]:
        def compute() -> Any:
            open_now.append(key)
            try:
                cycle = _cycle(node, open_now)
                if cycle:
                    ring = " -> ".join([*open_now[open_now.index(cycle) :], cycle])
                    self.fault(Fault("E505", f"let entries need each other: {ring}"), span)
                    return UNKNOWN
                return self.free_value(node)
            finally:
                open_now.pop()

        return compute

    def free_value(self, node: Node) -> Any:
        """The value of something whose type nobody declares (`let`, a default): number, word, flag, list."""
        if isinstance(node, Sequence):
            return [self.free_value(item) for item in node.items]
        if isinstance(node, Mapping):
            return plain(node)
        assert isinstance(node, Scalar)
        if not isinstance(node.value, str):
            return node.value
        text = node.value
        if text.isidentifier() and text not in self.names:
            return text  # a word
        return self.evaluate(text, node)

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
        for item in steps.items:
            step = self.step(item)
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
        node = step.common["as"][1] if step and "as" in step.common else None
        match node:
            case Scalar(value=str(name)):
                self.wires.setdefault(name, value)
            case Sequence(items=items):
                for item in items:
                    if isinstance(item, Scalar):
                        self.wires.setdefault(item.text, value)
            case Mapping():
                for key, _, _ in node:
                    self.wires.setdefault(key, value)
        return value

    def step(self, item: Node) -> Step | None:
        """A document node as a step; read once however often its body is lowered."""
        cache = self.shared.step_cache
        if id(item) not in cache:
            cache[id(item)] = self._read_step(item)
        return cache[id(item)]

    def _read_step(self, item: Node) -> Step | None:
        match item:
            case Scalar(value=str(verb)):
                return Step(verb, item.span, {}, {})
            case Mapping(entries=entries) if len(entries) == 1:
                ((verb, span, node),) = list(item)
            case Mapping(entries=entries) if entries:
                verb, span, node = next(iter(item))
                others = [key for key in entries if key != verb]
                hint = f"indent {listing(others)} below `{verb}:`" if self.is_verb(verb) else "one verb a step"
                message = f"a step is one verb with its arguments, not {len(entries)} keys"
                self.fault(Fault("E204", message, found=listing(entries), hint=hint), entries[others[0]][0])
                return None
            case _:
                self.fault(Fault("E204", "a step is a verb, or `verb: {arguments}`", found=kind_of(item)), item.span)
                return None
        if isinstance(node, Scalar) and node.value is None:
            return Step(verb, span, {}, {})
        if not isinstance(node, Mapping):
            message = f"the arguments of {quote(verb)} must be a mapping"
            self.fault(Fault("E203", message, found=kind_of(node), hint=f"{verb}: {{name: value}}"), node.span)
            return None
        torn = self._comma_trap(node)
        if torn:
            return None
        fields = {key: (s, n) for key, s, n in node if key not in STEP_KEYS}
        return Step(verb, span, fields, {key: (s, n) for key, s, n in node if key in STEP_KEYS})

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
            verbs = [*COMBINATORS, *self.home.visible, *PRIMITIVES]
            failed = tuple(Note(text) for text in load_plugins())
            raise Fault(
                "E301",
                f"there is no verb {quote(step.verb)}",
                hint=did_you_mean(step.verb, verbs) or "`seqblocks ops` lists the verbs; blocks come in with `use:`",
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
            self.fault(
                Fault(
                    "E302",
                    f"there is no wire {quote(node.value)} at this point",
                    expected=f"input, or one of {listing(names)}" if names else "input (no step above is named)",
                    hint=did_you_mean(node.value, self.wires) or "name an earlier step's output with `as:`",
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
            fault = Fault("E410", "this input takes one wire, not a list", hint="join with `parallel` and merge: concat")
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
        parameters = self._initialised(step, parameters, known=arguments is not None)
        ties = self._ties(step, parameters)
        return self.node(
            step, "op", inputs, type, op=arguments, parameters=parameters, state=state, macs=macs, ties=ties
        )

    def _joined(self, step: Step, port: Port, values: tuple[int, ...] | None) -> Wire | None:
        """The type that arrives at a port; None while unknown (or absent). Checks the kind."""
        if values is None:
            return None
        types = [self.types[v] for v in values]
        known = [t for t in types if t is not None]
        for value, wire in zip(values, types, strict=True):
            if wire and wire.kind not in port.kinds:
                note = wire.whence(f"`{self.shared.labels[value]}`")
                self.fault(
                    Fault(
                        "E403",
                        f"{step.verb} cannot read {_a(wire.kind)}",
                        at=port.name if port.name in step.fields else "from",
                        expected=" or ".join(_a(k) for k in port.kinds),
                        found=f"{wire}",
                        notes=[note] if note else [],
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

    def _initialised(self, step: Step, parameters: dict[str, Parameter], known: bool) -> dict[str, Parameter]:
        """The parameters with the initialisers that `init:` gives."""
        entry = step.common.get("init")
        if entry is None:
            return parameters
        node = entry[1]
        if not isinstance(node, Mapping):
            hint = "init: {weight: zeros}"
            self.fault(Fault("E203", "init is a mapping of parameter: initialiser", found=kind_of(node), hint=hint), node.span)
            return parameters
        torn = self._comma_trap(node)
        out = dict(parameters)
        for key, span, value in node:
            if key in torn:
                continue
            init = self._init(value)
            if key in out and init:
                out[key] = replace(out[key], init=init)
            elif known and parameters and key not in out:
                self._no_parameter(step, key, span, parameters)
        return out

    def _init(self, node: Node) -> Init | None:
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            expected = "a name such as zeros, or name(numbers)"
            self.fault(Fault("E408", "not an initialiser", expected=expected, found=kind_of(node)), node.span)
            return None
        try:
            return read_init(node.value, self.names)
        except Fault as fault:
            self.fault(fault, node.span)
            return None

    def _no_parameter(self, step: Step, key: str, span: Span, parameters: dict[str, Parameter]) -> None:
        fault = Fault(
            "E201",
            f"{step.verb} has no parameter {quote(key)} as it is used here",
            expected=f"one of {listing(parameters)}",
            hint=did_you_mean(key, parameters),
        )
        self.fault(fault, span)

    # --- tied parameters ----------------------------------------------------------------------------------------------

    def _ties(self, step: Step, parameters: dict[str, Parameter]) -> dict[str, str]:
        """`tie: embed` ties every parameter to the like-named one there; `tie: {weight: embed.weight}` names them."""
        entry = step.common.get("tie")
        if entry is None or not parameters:
            return {}
        node = entry[1]
        pairs: list[tuple[str, str, Span]] = []
        if isinstance(node, Mapping):
            for key, span, value in node:
                if key not in parameters:
                    self._no_parameter(step, key, span, parameters)
                elif isinstance(value, Scalar) and isinstance(value.value, str):
                    pairs.append((key, value.value, value.span))
                else:
                    fault = Fault("E203", "tie names a parameter, step.parameter", found=kind_of(value))
                    self.fault(fault, value.span)
        elif isinstance(node, Scalar) and isinstance(node.value, str):
            pairs = [(key, f"{node.value}.{key}", node.span) for key in parameters]
        else:
            fault = Fault("E203", "tie names a step, or maps parameters to step.parameter", found=kind_of(node))
            self.fault(fault, node.span)
        ties = {}
        for key, target, span in pairs:
            try:
                name, theirs = self._tie_target(target)
            except Fault as fault:
                self.fault(fault, span)
                continue
            if theirs.shape != parameters[key].shape:
                fault = Fault(
                    "E409",
                    f"{step.verb}.{key} cannot be {target}: their shapes differ",
                    expected=f"{list(parameters[key].shape)}",
                    found=f"{list(theirs.shape)}",
                )
                self.fault(fault, span)
            else:
                ties[key] = name
        return ties

    def _tie_target(self, target: str) -> tuple[str, Parameter]:
        """A tie's target by full name, and its declaration: looked up here, then in the bodies around."""
        first = target.split(".")[0]
        frame: Frame | None = self
        known: list[str] = []
        while frame:
            known += [name for name in frame.nodes if name not in known]
            node = frame.nodes.get(first)
            if node:
                for item in graph.node_parameters(node, first):
                    if item.name == target:
                        return item.tied or graph.join(*frame.path, item.name), item.parameter
                names = [item.name for item in graph.node_parameters(node, first)]
                raise Fault(
                    "E312",
                    f"there is no parameter {quote(target)}",
                    expected=f"one of {listing(names)}" if names else f"{first} has no parameters",
                    hint=did_you_mean(target, names),
                )
            frame = frame.outer
        hint = did_you_mean(first, known) or "tie to a step that stands above"
        raise Fault("E312", f"there is no step {quote(first)} to tie to", hint=hint)

    # --- combinators and blocks -----------------------------------------------------------------------------------------

    def _combinator(self, step: Step, cls: type[Combinator], previous: int, maker: graph.Node | None) -> graph.Node | None:
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
        if "words" in cls.holds:
            extra = {k: e for k, e in step.fields.items() if k not in fields}
            step = replace(step, fields={k: e for k, e in step.fields.items() if k in fields})
        made = self._arguments(step, cls)
        if made is None:
            self._walk_lost(step, cls, x, extra)
            return None
        if "words" in cls.holds:
            made = made.model_copy(update={"words": {k: n for k, (_, n) in extra.items()}})
            step = replace(step, fields={**step.fields, **extra})
        return made.lower(self, step, x)

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
        if any(name == block.name for name, _ in self.trail):
            ring = " -> ".join([*(name for name, _ in self.trail), block.name])
            raise Fault("E308", f"block {quote(block.name)} uses itself: {ring}")
        self.shared.used.add(id(block))
        (x,) = self._main(step, previous, maker, "", joins=False)
        values, ports = self._block_arguments(step, block)
        inputs = {"x": (x,)} | {name: (value,) for name, value in ports.items()}
        body, result = self.call(block, x, values, ports, graph_path=self._namespace_of(step), at=step.span)
        return self.node(step, "block", inputs, result, bodies={"": body})

    def _namespace_of(self, step: Step) -> str:
        for key in ("name", "as"):
            entry = step.common.get(key)
            if entry and isinstance(entry[1], Scalar):
                return entry[1].text
        return step.verb

    def call(
        self, block: Block, x: int, values: dict[str, Any], ports: dict[str, int], graph_path: str, at: Span
    ) -> tuple[graph.Graph, Wire | None]:
        """Lower a block's body for one set of arguments."""
        top = Frame(self.shared, block.home, Names(), {})
        top.let(block.home.let)
        inner = Frame(
            self.shared,
            block.home,
            Names(top.names, values),
            {"input": x, **ports},
            (*self.path, graph_path),
            (*self.trail, (block.name, at)),
            None,
        )
        inner.let(block.let)
        _settle(inner.names)
        body = inner.lower_steps(block.steps, x, ports)
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


def _settle(names: Names) -> None:
    """Compute every `let` entry, so that a fault in one that nobody uses is told too."""
    for name in list(names.pending):
        names[name]


def _cycle(node: Node, open_now: list[str]) -> str | None:
    """A name of an open `let` entry that this one needs."""
    if isinstance(node, Scalar) and isinstance(node.value, str):
        try:
            needed = {name for name, _ in expressions.parse(node.value).names}
        except Fault:
            return None
        return next((name for name in open_now if name in needed), None)
    return None


def _captures(body: graph.Graph, first: int, own: set[int]) -> tuple[int, ...]:
    """Values that a body reads and does not make: everything numbered before its first value."""
    made = set(own)
    seen: list[int] = []
    for node in body.nodes:
        wanted = [v for values in node.inputs.values() for v in values]
        wanted += [v for inner in node.bodies.values() for v in inner.captures]
        wanted += [inner.result for inner in node.bodies.values()]
        seen += [v for v in wanted if v < first and v not in made and v not in seen]
        made.update(node.outputs)
    if body.result < first and body.result not in made:
        seen.append(body.result)
    return tuple(seen)


def _choices(kind: FieldKind) -> str:
    return f"one of {listing(kind.choices)}" if kind.choices else "a word"


def _a(kind: str) -> str:
    return {"image": "an image", "tokens": "token numbers", "sequence": "a sequence", "vector": "a vector"}[kind]


_KIND_HINTS = {
    ("image", "sequence"): "cut the image into tokens first, with patch_embed",
    ("tokens", "sequence"): "look the tokens up first, with embed",
    ("sequence", "vector"): "pool the sequence first, with pool",
    ("vector", "sequence"): "the sequence was pooled before; move this step above the pooling",
}


# --- a whole file -------------------------------------------------------------------------------------------------------


def lower_file(file: SpecFile, report: Report, name: str, overridden: tuple[str, ...] = ()) -> graph.Model | None:
    """The graph of a file's model, and a check of every block in it. None if there is no sound model."""
    shared = Shared(report)
    frame = Frame(shared, file, Names(), {})
    frame.let(file.let)
    _settle(frame.names)
    model = _lower_model(frame, file, name, overridden) if file.model else None
    for block in file.blocks.values():
        if id(block) not in shared.used:
            _check_unused(frame, block)
    return None if report else model


def _lower_model(frame: Frame, file: SpecFile, name: str, overridden: tuple[str, ...]) -> graph.Model | None:
    assert file.model is not None
    wire = _input(frame, file.model.get("input"), file.model_span)
    steps = file.model.get("steps")
    if steps is None:
        frame.fault(Fault("E202", "the model has no steps"), file.model_span)
    x = frame.value(wire, "input")
    frame.wires["input"] = x
    if wire:
        frame.shared.input_kind, frame.shared.input_features = wire.kind, wire.features
    body = frame.lower_steps(steps, x)
    body.captures = ()
    if frame.shared.report or wire is None:
        return None
    types, labels = frame.shared.types, frame.shared.labels
    return graph.Model(name, wire, body, types, labels, file.expect, file.checkpoint, overridden)


def _check_unused(frame: Frame, block: Block) -> None:
    lost = Frame(frame.shared, frame.home, Names(), {})
    x = lost.value(None, "input")
    values: dict[str, Any] = {}
    ports: dict[str, int] = {}
    for name, argument in block.args.items():
        if argument.type == "wire":
            ports[name] = lost.value(None, name)
        else:
            values[name] = UNKNOWN if argument.default is None else default_value(argument.default)
    lost.call(block, x, values, ports, block.name, block.span)


def _input(frame: Frame, node: Node | None, span: Span | None) -> Wire | None:
    """`input: {tokens: 50304}`, `{features: 384}`, `{image: {size: 224, channels: 3}}`."""
    expected = "{tokens: vocabulary}, {features: width} or {image: {size: 224, channels: 3}}"
    if not isinstance(node, Mapping):
        frame.fault(
            Fault("E202" if node is None else "E203", "the model must say what its input is", expected=expected),
            node.span if node else span,
        )
        return None
    kinds = [key for key in ("tokens", "features", "image") if key in node.entries]
    allowed = {"tokens": ("tokens", "length"), "features": ("features", "length", "grid"), "image": ("image",)}
    words = allowed[kinds[0]] if kinds else (*allowed, "length", "grid")
    Reader(frame.shared.report).known_keys(node, words, "input")
    if len(kinds) != 1:
        if not any(key not in words for key in node.entries):
            frame.fault(Fault("E202", "the input is of one kind", expected=expected), node.span)
        return None
    kind = kinds[0]
    if kind == "image":
        return _image(frame, node.entries["image"][1])
    features = _positive(frame, node.get(kind))
    length = _positive(frame, node.get("length")) if "length" in node.entries else None
    grid = _grid(frame, node.get("grid")) if "grid" in node.entries else None
    if features is UNKNOWN or length is UNKNOWN or grid is UNKNOWN:
        return None
    if grid and length and length != grid[0] * grid[1]:
        frame.fault(Fault("E412", "length must be rows times columns", found=f"{length}, {grid[0]} x {grid[1]}"), node.span)
    if grid:
        length = grid[0] * grid[1]
    origin = Origin("input", node.span)
    return Wire("tokens" if kind == "tokens" else "sequence", features, length or "seq", grid, origin)


def _image(frame: Frame, node: Node) -> Wire | None:
    if not isinstance(node, Mapping):
        frame.fault(Fault("E203", "an image is {size: 224, channels: 3}", found=kind_of(node)), node.span)
        return None
    Reader(frame.shared.report).known_keys(node, ("size", "channels"), "image")
    if "size" not in node.entries:
        frame.fault(Fault("E202", "an image needs its size", hint="size: 224, or size: [height, width]"), node.span)
        return None
    size = _grid(frame, node.get("size"))
    channels = _positive(frame, node.get("channels")) if "channels" in node.entries else 3
    if size is UNKNOWN or channels is UNKNOWN:
        return None
    return Wire("image", channels, None, size, Origin("input", node.span))


def _positive(frame: Frame, node: Node | None) -> Any:
    assert node is not None
    value = frame.number(node, whole=True)
    if value is not UNKNOWN and not 1 <= value <= 10**9:
        frame.fault(Fault("E209", "a positive number is needed here", found=str(value)), node.span)
        return UNKNOWN
    return value


def _grid(frame: Frame, node: Node | None) -> Any:
    """`224` or `[rows, columns]`."""
    if isinstance(node, Sequence):
        if len(node.items) != 2:
            frame.fault(Fault("E203", "two numbers: [rows, columns]", found=f"{len(node.items)} of them"), node.span)
            return UNKNOWN
        pair = [_positive(frame, item) for item in node.items]
        return UNKNOWN if UNKNOWN in pair else tuple(pair)
    value = _positive(frame, node)
    return UNKNOWN if value is UNKNOWN else (value, value)


@lru_cache(maxsize=1)
def verbs() -> tuple[str, ...]:
    """Every built-in and plugged-in verb."""
    find_primitive("")
    return (*COMBINATORS, *sorted(PRIMITIVES))


__all__ = ["Frame", "Names", "Shared", "Step", "lower_file", "verbs"]
_ = Diagnostic

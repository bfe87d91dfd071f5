"""Steps -> nodes: a primitive, a combinator or a block, with its arguments, its inputs and its type.

A step that is at fault yields a value of unknown type, and a number or word that is at fault is UNKNOWN from there on
(`Names.spoil`). Whatever depends on either reports nothing: one run finds all independent faults of a file, each once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from seqblocks import graph
from seqblocks.analysis.maps import has_sizes, read_map
from seqblocks.analysis.ownership import initialised, ties
from seqblocks.analysis.scope import Keys, Names, Step, Values, effort
from seqblocks.analysis.wiring import Shared, Wiring, captures, named, namespace_of
from seqblocks.combinators import COMBINATORS, Combinator
from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of, plain
from seqblocks.language.expressions import MAX_MAGNITUDE, UNKNOWN
from seqblocks.language.spec import FILE_KEYS, STEP_KEYS, Argument, Block, SpecFile, bundled, misread
from seqblocks.language.vocabulary import hidden, instead_of, key_hint, nearest
from seqblocks.op import (
    PRIMITIVES,
    FieldKind,
    Op,
    Port,
    builtin_verbs,
    check_declared,
    field_infos,
    fields_of,
    find_primitive,
    load_plugins,
)
from seqblocks.parameters import Parameter, State
from seqblocks.types import Wire

MAX_STEPS = 50_000
MAX_STATE = 10**12  # numbers that a step may carry of one sequence
MAX_EFFORT = 600_000  # in all layers, see `scope.effort`
MAX_NESTING = 64  # bodies in bodies: torch's calls nest as deeply, and Python bounds them
NO_VERB = "`seqblocks ops` lists the verbs; a primitive of your own must be imported first (--import my_ops.py)"


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Frame(Wiring):
    """Where the walk stands."""

    callers: tuple[Block, ...] = ()  # the blocks that are open
    depth: int = 0  # how many bodies are open

    @classmethod
    def top(cls, shared: Shared, home: SpecFile) -> Frame:
        """The outermost scope of a file: its own `let:`."""
        if id(home) in shared.tops:
            return cls(report=shared.report, names=shared.tops[id(home)], shared=shared, home=home)
        shared.tops[id(home)] = Names()
        frame = cls(report=shared.report, names=shared.tops[id(home)], shared=shared, home=home)
        frame.let(home.let)
        frame.names.vague |= misread(home.root, "let") or hidden(home.root.entries, "let", FILE_KEYS)
        return frame

    def settle(self, let: Mapping | None) -> None:
        """Behind all steps of a scope: note what none of them has asked for, and compute it all the same."""
        for key, _, node in let or ():
            idle = key in self.names.pending
            self.shared.unread[id(node)] = self.shared.unread.get(id(node), True) and idle
        self.names.settle()

    # --- steps ------------------------------------------------------------------------------------------------------

    def body(
        self, steps: Node | None, x: int, path: Iterable[str] = (), names: dict[str, Any] | None = None
    ) -> graph.Graph:
        """Lower a list of steps that are given value `x`; wires of this frame stay visible."""
        self.spend(4 + len(self.wires) // 512)  # a body without steps costs too
        inner = replace(
            self,
            names=Names(self.names, names) if names else self.names,
            wires={**self.wires, "input": x},
            path=(*self.path, self.here, *(p for p in path if p)),
            outer=self,
            nodes={},
            depth=self.depth + 1,
        )
        return inner.lower_steps(steps, x)

    def lower_steps(self, steps: Node | None, x: int, ports: dict[str, int] | None = None) -> graph.Graph:
        """Lower a body in this very frame."""
        first = len(self.shared.types)
        out = graph.Graph(x, [], x, ports=ports or {})
        if self.shared.full or not isinstance(steps, Sequence):
            if steps is not None and not self.shared.full:
                hint = "- silu"
                if isinstance(steps, Mapping) and steps.entries:
                    hint = f"each step is an item of a list: put '- ' before {listing(steps.entries)}"
                self.fault(Fault("E203", "steps must be a list", found=kind_of(steps), hint=hint), steps.span)
            out.result = self.value(None, "?")
            return out
        current: graph.Node | None = None
        read = [self.step(item) for item in steps.items]
        wires = [named(step) if step else [] for step in read]
        names = [namespace_of(step)[0] if step else "" for step in read]
        self.coming = frozenset(chain.from_iterable(wires))
        self.called = dict.fromkeys(filter(None, names), 1)
        around = self.giving
        for step, self.here, giving in zip(read, names, wires, strict=True):
            self.giving = around.union(giving) if giving else around
            made = self.lower_step(step, out.result, current) if step else None
            if made is None:
                out.result, current, out.lost = self.lost(step), None, True
                continue
            out.nodes.append(made)
            out.result, current = made.outputs[0], made
        if current and len(current.outputs) > 1:
            message = f"the last step gives out {len(current.outputs)} wires, and what leaves must be one"
            self.fault(Fault("E313", message), current.span)
            out.result = self.value(None, "?")
        out.captures = captures(out, first, {x, *(ports or {}).values()})
        return out

    def step(self, item: Node) -> Step | None:
        """A document node as a step; read once however often its body is lowered."""
        cache = self.shared.step_cache
        if id(item) not in cache:
            cache[id(item)] = self.read_step(item, self.keys)
            if found := cache[id(item)]:
                found.effort = _effort(found)
        return cache[id(item)]

    def keys(self, verb: str) -> Keys | None:
        """What a verb takes; None if there is no such verb."""
        combinator, block = COMBINATORS.get(verb), self.home.visible.get(verb)
        if combinator:
            return Keys(combinator.holds[0], (), (*fields_of(combinator), *STEP_KEYS))
        if block:
            required = (name for name, argument in block.args.items() if argument.default is None)
            return Keys(None, tuple(required), (*block.args, "from", "as", "name"))
        op = find_primitive(verb)
        if op is None:
            return None
        ports = (port.name for port in op.ports if not (port.main or port.optional))
        required = (key for key, info in field_infos(op).items() if info.is_required())
        every = (*(port.name for port in op.ports if not port.main), *field_infos(op))
        return Keys(None, (*ports, *required), (*every, *STEP_KEYS) if every else ())

    def lower_step(self, step: Step, previous: int, maker: graph.Node | None) -> graph.Node | None:
        """The node of a step whose predecessor gave value `previous`; None after a fault."""
        if step.torn or self.shared.full:
            return None
        try:
            self.grow(1)
            self.spend(step.effort)
            if step.verb in COMBINATORS:
                return self._combinator(step, COMBINATORS[step.verb], previous, maker)
            block = self.home.visible.get(step.verb)
            if block:
                return self._block(step, block, previous, maker)
            op = find_primitive(step.verb)
            if op:
                return self._op(step, op, previous, maker)
            if self.home.lacks or step.verb in self.home.lost:  # that it could not be read, is told
                return None
            failed = tuple(Note(text) for text in load_plugins())
            message = f"there is no verb {quote(step.verb)}"
            raise Fault("E301", message, hint=lambda: self._verb_hint(step), notes=failed)
        except Fault as fault:
            self.fault(fault, step)
            return None

    def _verb_hint(self, step: Step) -> str:
        """What may be meant by an unknown verb."""
        verbs = [*COMBINATORS, *builtin_verbs(), *PRIMITIVES, *self.home.visible]
        offered = _offered(step.verb, self.home.visible) or instead_of(step.verb) or key_hint(step.verb, verbs)
        return offered or _near_bundled(step.verb) or NO_VERB

    def initialised(self, step: Step, parameters: dict[str, Parameter], known: bool) -> dict[str, Parameter]:
        """The parameters with the initialisers that the step's `init:` gives; `known`: there are no others."""
        return initialised(self, step, parameters, known)

    def grow(self, steps: int, height: int = 0) -> None:
        """Count so many steps more, nested in `height` bodies of their own.

        Raises Fault (E104) at those that are too many, behind which nothing is lowered.
        """
        shared = self.shared
        if shared.full:  # which is reported
            return
        shared.steps += steps
        shared.deepest = max(shared.deepest, self.depth + height)
        shared.full = shared.steps > MAX_STEPS or shared.deepest > MAX_NESTING
        if shared.deepest > MAX_NESTING:
            raise Fault("E104", "steps are nested too deeply", expected=f"at most {MAX_NESTING} in one another")
        if shared.full:
            raise Fault("E104", "the model has too many steps", expected=f"at most {MAX_STEPS:,}")

    def spend(self, effort: int) -> None:
        """Count the reading of arguments. Raises Fault (E104) as `grow` does."""
        self.shared.effort += effort
        if self.shared.full:  # which is reported
            return
        if self.shared.effort > MAX_EFFORT:
            self.shared.full = True
            raise Fault("E104", "the layers of the model have too many arguments", expected=f"at most {MAX_EFFORT:,}")

    # --- primitives ---------------------------------------------------------------------------------------------------

    def _op(self, step: Step, cls: type[Op], previous: int, maker: graph.Node | None) -> graph.Node:
        inputs: dict[str, tuple[int, ...]] = {}
        for port in cls.ports:
            if port.main:
                inputs[port.name] = self.main(step, previous, maker, port.name, port.joins)
            elif port.name in step.fields:
                inputs[port.name] = self.read(step.fields[port.name][1], port.joins, step)
            elif not port.optional:
                words = [*(each.name for each in cls.ports), *fields_of(cls), *STEP_KEYS]
                if not hidden(step.fields, port.name, words):
                    self.fault(self._no_input(step, cls, port), step.span)
                inputs[port.name] = (self.value(None, "?"),)
        if "from" in step.common and not any(port.main for port in cls.ports):
            names = listing(port.name for port in cls.ports)
            fault = Fault("E201", f"{step.verb} has no `from`: its inputs have names", expected=names)
            self.fault(fault, step.key_span("from"))
        ports = [port.name for port in cls.ports]
        arguments = self._arguments(step, cls, skip=ports)
        wires = [self.joined(step, port, inputs.get(port.name)) for port in cls.ports]
        type, parameters, state, macs, calls = None, {}, {}, 0, None
        present = [w for w, port in zip(wires, cls.ports, strict=True) if port.name in inputs]
        agreed = self.agreed(step, {port.name: w for port, w in zip(cls.ports, wires, strict=True) if w})
        if arguments is not None and agreed and all(present):
            type = self._shape(arguments, cls.ports, wires)
            parameters = arguments.parameters(*wires)
            state = arguments.state(*wires)
            macs = arguments.macs(*wires)
            if not cls.builtin:
                check_declared(cls, type, parameters, state, macs)
            self._bounded(step, parameters, state)
            calls = arguments.calls(*wires)
        if type and not parameters:
            self._owns_no_parameters(step, "init", "tie")
        parameters = self.initialised(step, parameters, known=arguments is not None)
        tied = ties(self, step, parameters)
        self.shared.ties += len(tied)
        return self.node(
            step, "op", inputs, type, op=arguments, parameters=parameters, state=state, macs=macs, calls=calls,
            ties=tied, wires=tuple(wires),
        )

    def _owns_no_parameters(self, step: Step, *keys: str) -> None:
        """Report keys that are for parameters, of a step that has none of its own (E201)."""
        for key in keys:
            if key in step.common:
                self.fault(Fault("E201", f"{step.verb} has no parameters of its own to {key}"), step.key_span(key))

    @staticmethod
    def _bounded(step: Step, parameters: dict[str, Parameter], state: dict[str, State]) -> None:
        """Raises Fault (E504) for a parameter or a state that no machine holds."""
        for name, parameter in parameters.items():
            if parameter.numel > MAX_MAGNITUDE:
                message = f"{name} of {step.verb} is too large: {parameter.numel:.0e} numbers"
                raise Fault("E504", message, expected="at most 10^18")
        for name, held in state.items():
            if held.numel > MAX_STATE:
                message = f"the state {name} of {step.verb} is too large: {held.numel:.0e} numbers a sequence"
                raise Fault("E504", message, expected="at most 10^12")

    def _no_input(self, step: Step, cls: type[Op], port: Port) -> Fault:
        wanted = [each.name for each in cls.ports if not (each.main or each.optional)]
        if len(wanted) == 1 or any(name in step.fields for name in wanted):
            hint = f"{port.name}: {port.name}" if port.name in self.wires else f"{port.name}: the wire to read"
            return Fault("E411", f"{step.verb} needs its input {quote(port.name)}", hint=hint)

        def layer() -> str:
            use = _files_of_blocks().get(f"{step.verb}_layer")
            named = f"name the wires: {step.verb}: {{{', '.join(f'{name}: …' for name in wanted)}}}"
            return f"`{step.verb}_layer` (`use: [{use}]`) makes them from one wire; or {named}" if use else named

        return Fault("E411", f"{step.verb} needs its inputs {listing(wanted)}", hint=layer)

    @staticmethod
    def _shape(op: Op, ports: tuple[Port, ...], wires: list[Wire | None]) -> Wire:
        """The op's output; a fault says where each width that it saw came from."""
        try:
            return op.shape(*wires)
        except Fault as fault:
            if not fault.notes:
                names = ["the input" if port.main else f"`{port.name}`" for port in ports]
                seen = (w.whence(name) for w, name in zip(wires, names, strict=True) if w)
                fault.notes = tuple(note for note in seen if note)[:3]
            raise

    def _arguments(self, step: Step, cls: type[BaseModel], skip: Iterable[str] = ()) -> Any:
        """The validated argument model; None after a fault or while a value is UNKNOWN."""
        fields = fields_of(cls)
        skip = list(skip)  # in the order of the ports, as messages list them
        values: dict[str, Any] = {}
        sound = True
        unknown_keys = []
        for key, (span, node) in step.fields.items():
            if key in fields:
                kind = fields[key]
                value = self.argument(node, kind)
                values[key] = plain(node) if value is node and issubclass(cls, Op) else value
            elif key not in skip and issubclass(cls, Op) and cls.open_keys:
                values[key] = self.number(node, whole=True)
            elif key not in skip:
                unknown_keys.append(key)
                words = [*fields, *skip, *STEP_KEYS]
                fault = Fault(
                    "E201",
                    f"unknown key {quote(key)} in {step.verb}",
                    expected=f"one of {listing(words, 16)}",
                    hint=partial(key_hint, key, words),
                )
                self.fault(fault, span)
                sound = False
        if unknown_keys:
            self.look_for_as(step, words)
        for key, info in field_infos(cls).items():
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
            info = field_infos(cls).get(key or "")
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
        self._owns_no_parameters(step, *(("tie",) if cls.takes_init else ("init", "tie")))
        (x,) = self.main(step, previous, maker, "", joins=False)
        wire = self.types[x]
        if wire and wire.kind not in cls.main_kinds:
            self.joined(step, Port("from", kinds=("sequence",)), (x,))
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
        return LOWERINGS[cls](self, step, made, x)

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
                what = f"`{key}` is for the parameters of one primitive, and {step.verb} is a block"
                hint = f"write `{key}` at a step inside the block"
                if key == "tie":
                    hint += "; whole blocks cannot share their parameters"
                self.fault(Fault("E201", what, hint=hint), step.key_span(key))
        if block in self.callers:
            names = [b.name for b in self.callers]
            ring = " -> ".join([*names[names.index(block.name) :], block.name])
            raise Fault("E308", f"block {quote(block.name)} uses itself: {ring}")
        self.shared.used.add(id(block))
        (x,) = self.main(step, previous, maker, "", joins=False)
        values, ports, written = self._block_arguments(step, block)
        inputs: dict[str, tuple[int, ...]] = {name: (value,) for name, value in {"x": x, **ports}.items()}
        body, result = self.call(
            block, x, values, ports, namespace_of(step)[0], Note(f"in block {block.name}, used", step.span), written
        )
        return self.node(step, "block", inputs, result, bodies={"": body}, checkpoint=body.checkpoint)

    def call(
        self, block: Block, x: int, values: dict[str, Any], ports: dict[str, int], graph_path: str, came: Note,
        written: dict[str, tuple[Node, Names]] | None = None,
    ) -> tuple[graph.Graph, Wire | None]:
        """A block's body for one set of arguments: lowered once, however many layers call it so."""
        shared = self.shared
        if id(block) not in shared.efforts:
            tables = [(5, block.let), (2, block.checkpoint)]
            costs = [times * effort(table) for times, table in tables if table]
            shared.efforts[id(block)] = len(block.args) + sum(costs)
        self.spend(shared.efforts[id(block)] + sum(map(_size, values.values())))
        key = (id(block), repr(values), *(self.types[v] for v in (x, *ports.values())))
        if key in shared.bodies:
            body, steps, height = shared.bodies[key]
            self.grow(steps, height)
            return body, self.types[body.result]
        self.spend(20)
        entered = self.value(self.types[x], "input")
        inside = {name: self.value(self.types[v], name) for name, v in ports.items()}
        inner = replace(
            Frame.top(shared, block.home),
            wires={"input": entered, **inside},
            path=(*self.path, graph_path),
            trail=(*self.trail, came),
            callers=(*self.callers, block),
            depth=self.depth + 1,
        )
        inner.names = Names(inner.names, values)
        inner.names.written = written or {}
        inner.names.of_block = True
        inner.let(block.let)
        steps, ties, deepest = shared.steps, shared.ties, shared.deepest
        shared.deepest = inner.depth
        body = inner.lower_steps(block.steps, entered, inside)
        inner.settle(block.let)
        if id(block) not in shared.maps or has_sizes(shared.maps[id(block)]):
            shared.maps[id(block)] = read_map(inner, block.checkpoint)
        body.checkpoint = shared.maps[id(block)]
        if not shared.report:
            shared.lowered.append((inner, body))
        if not shared.report and self.types[x]:  # nobody knows what a block that nothing uses will hold
            shared.checks.append((inner, body.checkpoint, body, bool(block.args) or shared.overridden))
        if not shared.report and shared.ties == ties:  # a tie holds the names of the layer it was made for
            shared.bodies[key] = (body, shared.steps - steps, shared.deepest - self.depth)
        shared.deepest = max(shared.deepest, deepest)
        return body, self.types[body.result]

    def _block_arguments(
        self, step: Step, block: Block
    ) -> tuple[dict[str, Any], dict[str, int], dict[str, tuple[Node, Names]]]:
        """Values and wires by the names of the arguments, and where each value was written."""
        values: dict[str, Any] = {}
        written: dict[str, tuple[Node, Names]] = {}
        ports: dict[str, int] = {}
        misspelt = False
        words = [*block.args, "from", "as", "name"]
        for key, (span, _) in step.fields.items():
            if key not in block.args:
                misspelt = True
                fault = Fault(
                    "E201",
                    f"block {block.name} has no argument {quote(key)}",
                    expected=f"one of {listing(words, 16)}",
                    hint=partial(key_hint, key, words),
                    notes=[Note("the block is defined here", block.span)],
                )
                self.fault(fault, span)
        if misspelt:
            self.look_for_as(step, words)
        for name, argument in block.args.items():
            entry = step.fields.get(name)
            if argument.type == "wire":
                if entry:
                    (ports[name],) = self.read(entry[1], joins=False)
                else:
                    if not misspelt:
                        self.fault(Fault("E411", f"block {block.name} needs its input {quote(name)}"), step.span)
                    ports[name] = self.value(None, "?")
            elif entry:
                values[name] = self._block_argument(entry[1], block, argument)
                written[name] = (entry[1], self.names)
            elif argument.default is not None:
                values[name] = default_value(argument)
                self.shared.unread[id(argument.default)] = False
                written[name] = (argument.default, Names())
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
        return values, ports, written

    def _block_argument(self, node: Node, block: Block, argument: Argument) -> Any:
        type = argument.type
        if type == "word":
            if isinstance(node, Scalar) and isinstance(node.value, int | float):  # its default may be misspelt
                fault = Fault(
                    "E208",
                    f"block {block.name} takes a word as {quote(argument.name)}",
                    found=kind_of(node),
                    notes=[Note("the argument is declared here", argument.span)],
                    hint=f"`{argument.name}: int`, float or bool in `args:` says that it is no word",
                )
                self.fault(fault, node.span)
                return UNKNOWN
            return self.argument(node, FieldKind("words"))
        if type == "any":
            return self.free_value(node)
        kind = FieldKind("flag") if type == "bool" else FieldKind("number", whole=type == "int")
        return self.argument(node, kind)


# --- combinators ----------------------------------------------------------------------------------------------------

Lowering = Callable[[Frame, Step, Any, int], graph.Node | None]
LOWERINGS: dict[type[Combinator], Lowering] = {}
L = TypeVar("L", bound=Lowering)


def lowers(combinator: type[Combinator]) -> Callable[[L], L]:
    """Register the function that makes the node of a combinator.

    It is called with the frame, the step, the step's arguments and the value that the step reads; it raises Fault, or
    returns None after a fault that it has reported.
    """

    def register(function: L) -> L:
        LOWERINGS[combinator] = function
        return function

    return register


# --- what reading a step costs ----------------------------------------------------------------------------------------


def _size(value: Any) -> int:
    """What looking at a value costs, in the units of `effort`."""
    return value.size if isinstance(value, Values) else len(value) // 16 if isinstance(value, str) else 0


def _effort(step: Step) -> int:
    """What reading the arguments of a step costs each time; the steps in it count by themselves."""
    cls = COMBINATORS.get(step.verb)
    held = cls.holds if cls else ()
    known = fields_of(cls) if cls and cls.open_keys else {}
    total = 1
    for key, (_, node) in (*step.fields.items(), *step.common.items()):
        steps = key in held or (known and key not in known and key not in STEP_KEYS)
        total += 1 + (len(node.items) if isinstance(node, Sequence) else 0) if steps else effort(node)
    return total


def default_value(argument: Argument) -> Any:
    """A block argument's default: plain data, never an expression (it would have no scope)."""
    assert argument.default is not None
    return plain(argument.default) if argument.sound else UNKNOWN


@lru_cache(maxsize=1)
def _files_of_blocks() -> dict[str, str]:
    """The bundled blocks, and the file of each."""
    paths = {name: path for name, path in bundled().items() if path.parent.name == "blocks"}
    texts = ((name, path.read_text(encoding="utf-8")) for name, path in paths.items())
    return {block: name for name, text in texts for block in re.findall(r"^  (\w+):$", text, re.MULTILINE)}


def _near_bundled(verb: str) -> str | None:
    """The bundled block that is meant."""
    files = _files_of_blocks()
    meant = nearest(verb, files)
    return meant and f"did you mean '{meant}'? `use: [{files[meant]}]` brings it in"


def _offered(verb: str, visible: Container[str]) -> str | None:
    """What a bundled file of this name, or with a block of this name, offers."""
    files = _files_of_blocks()
    if verb in files:
        return f"`use: [{files[verb]}]` brings it in"
    path = bundled().get(verb)
    if path is None:
        return None
    if path.parent.name == "models":
        return f"{verb} is a whole model: `seqblocks build {verb}`"
    blocks = [block for block, file in files.items() if file == verb]
    there = "is in use, and its blocks are" if all(block in visible for block in blocks) else "brings in"
    return f"`use: [{verb}]` {there} {listing(blocks)}"

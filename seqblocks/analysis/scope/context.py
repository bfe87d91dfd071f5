"""The context of the analysis: the names and wires visible at one place of a spec, and how faults are reported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.named_values import Names, names_in, names_inside, shown_value
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.step import Step
from seqblocks.errors import Fault, Note, Span
from seqblocks.language.arguments import DEPTH, Argument
from seqblocks.language.document import Node, Scalar, Sequence
from seqblocks.language.expressions import UNKNOWN, parse
from seqblocks.language.spec import Block, SpecFile
from seqblocks.record import Record

MAX_WRITTEN = 4  # notes on where a value was written
MAX_TRAIL = 8  # notes on the blocks that led to a fault
MAX_SOURCES = 16  # values through which a faulty value is traced back
OF_EXPRESSIONS = "E50"  # codes of expressions without a valid value


class Body(Record):
    """A list of steps that is being lowered.

    It is incomplete if the wires defined by some step could not be read. Any wire that it lacks is then UNKNOWN.
    """

    wires: dict[str, int]  # by name, including those of enclosing bodies
    path: tuple[str, ...] = ()  # of namespaces
    outer: Body | None = None
    incomplete: bool = False
    steps: list[Step] = field(default_factory=list)
    current: Step | None = None
    last: graph.Node | None = None  # the previous step
    value: int = -1  # default input of the current step
    nodes: dict[str, graph.Node] = field(default_factory=dict)  # so far, by namespace
    conditions: dict[int, Any] = field(default_factory=dict)  # by the id of a step that has one
    named: dict[str, Step] = field(default_factory=dict)  # its steps by name, filled on first use
    numbers: dict[str, int] = field(default_factory=dict)  # by step name: the last number that a hint appended to it
    states: dict[str, int] = field(default_factory=dict)  # of a cell: the values after the previous token
    formulas: Any = None  # what the formulas of one step share, see `steps/calc.py`
    inner: list[Body] = field(default_factory=list)  # the lists of steps of its combinators, so far
    layers: dict[str, Layers] = field(default_factory=dict)  # that can be read here, by the word for them
    hidden: dict[str, int] | None = None  # by name, wires that the steps of an `each` or a `choose` may not read
    place: Body | None = None  # for the steps of an argument: the body in which they are written

    def may_set(self, name: str) -> bool:
        """Return whether a wire is a state of this cell that no step has set yet."""
        return name in self.states and self.wires.get(name) == self.states[name]

    def set_wire(self, name: str, value: int) -> None:
        """Define a wire, unless there is one with this name, or set a state."""
        if name not in self.wires or self.may_set(name):
            self.wires[name] = value


class Layers(Record):
    """The layers of a repeat whose wires can be read: those above the current one, or all after the repeat."""

    count: int  # of all layers
    input: int  # the value that the first one reads
    scopes: list[Body] = field(default_factory=list)  # of the finished ones, with the names of their wires
    bodies: list[graph.Graph] = field(default_factory=list)  # likewise
    node: graph.Node | None = None  # of the repeat, once it is finished
    place: Span | None = None  # the name of the repeat
    missed: dict[str, Any] = field(default_factory=dict)  # wires for which a default was read, with the place


class Passed(Record):
    """Steps passed as an argument to a block, with the context in which they are written. None if UNKNOWN."""

    declared: Argument
    steps: Sequence | None = None
    place: Context | None = None
    key: int = 0  # equal for steps with equal text and meaning; 0: unknown
    used: bool = False


class Context(Record):
    """A place in a spec: the names visible there, and the blocks through which the analysis reached it."""

    run: Run
    file: SpecFile
    names: Names
    body: Body
    trail: tuple[Note, ...] = ()  # the enclosing blocks, as notes
    callers: tuple[Block, ...] = ()  # likewise
    depth: int = 0  # number of enclosing bodies
    passed: dict[str, Passed] = field(default_factory=dict)  # the arguments of the block that are steps
    layers: Any = None  # the value of `depth`, the product of the layers of all enclosing repeats; None: not in a step

    def scope(self, text: str) -> Names:
        """Return the names in scope for an expression, with `depth` if the expression may use it."""
        if DEPTH not in text or self.layers is None or DEPTH in self.names:
            return self.names
        return Names(self.names, {DEPTH: self.read_depth()})

    def refer(self, text: str, node: Scalar, names: Iterable[tuple[str, int]] | None = None) -> None:
        """Note that an expression reads its names. names: with their offsets, if they are known."""
        if self.run.references is None:
            return
        if names is None:
            names = [(text, 0)] if text.isidentifier() else parse(text).names
        for name, offset in names:
            if name in self.names and not self.names.is_of_layer(name) and (place := self._definition(name)):
                self.run.references.add("name", name, node.part(offset, len(name)), place)

    def _definition(self, name: str) -> Span | None:
        """Return where a name of `let:` or `args:` is defined."""
        block = self.callers[-1] if self.callers else None
        for table in (block and block.let, self.file.let if block is None or name not in block.args else None):
            if table and name in table.entries:
                return table.entries[name][0]
        return block.args[name].span if block and name in block.args else None

    def read_depth(self) -> Any:
        """Return the value of `depth`, and note that the enclosing bodies depend on it."""
        self.run.reads_depth = True
        return self.layers

    def report(self, fault: Fault, where: Step | Node | Span | None) -> None:
        """Report a fault at the argument that it names, with notes on the origin of its value and the enclosing blocks.

        A fault in a bundled block is reported at the line of the user's own files that led to it.
        """
        node: Node | None = None
        span: Span | None
        if isinstance(where, Step):
            node = where.value(fault.at)
            entry = _entry(node, fault.entry)
            span = entry.span if entry else where.value_span(fault.at)
        elif isinstance(where, Node):
            node, span = where, where.span
        else:
            span = where
        inner = span if span and span.source.bundled else None
        own = _own_line(self, inner, node) if inner else span
        written, used = _origins(self, node)
        values = [*written, *used]
        if inner and not written and fault.code.startswith(OF_EXPRESSIONS):  # the user cannot change a bundled one
            fault = fault.copy()
            fault.hint = None
        causes = values if written else [own, *used]
        report = self.run.warnings if fault.severity == "warning" else self.run.report
        report.fault(fault, own, lambda: _notes(self, node, own, inner), causes, values if inner else ())


def _entry(node: Node | None, text: str | None) -> Node | None:
    """Return the entry of a list that is written as `text`, or the last one of several; None if there is none."""
    entries = node.items if isinstance(node, Sequence) and text is not None else []
    return next((each for each in reversed(entries) if isinstance(each, Scalar) and each.text == text), None)


def _own_line(ctx: Context, inner: Span, node: Node | None) -> Span:
    """Return the innermost place in the user's own files that led to a line of a bundled block.

    It is the argument with the faulty value, if known, else the step that uses the block.
    """
    for source, _ in _passed_on(ctx.names, node):
        if not source.span.source.bundled:
            if source.span.source.is_override:
                break
            return source.span
    steps = (note.span for note in reversed(ctx.trail) if note.span)
    return next((span for span in steps if not span.source.bundled), inner)


def _passed_on(names: Names, node: Node | None) -> Iterator[tuple[Node, Names]]:
    """Yield the nodes through which a value is passed on unchanged (`heads: heads`), with the names in scope."""
    seen: set[int] = set()
    while isinstance(node, Scalar) and isinstance(node.value, str) and id(node) not in seen:
        seen.add(id(node))
        found = names.source(node.text)
        if found is None:
            return
        node, names = found
        yield node, names


def _origins(ctx: Context, node: Node | None) -> tuple[list[Span], list[Span]]:
    """Return where the user wrote a value, if it is passed on unchanged, and the values that it is computed from."""
    passed_on = list(_passed_on(ctx.names, node))
    written = [source.span for source, _ in passed_on if not source.span.source.bundled]
    last, names = passed_on[-1] if passed_on else (node, ctx.names)
    used = _sources(last, names) if last else []
    return written[-1:], [node.span for _, node, _ in used if not node.span.source.bundled]


def _sources(node: Node, names: Names) -> list[tuple[str, Node, Names]]:
    """Return the named values that a value depends on, nearest first: the name, its node, the names in scope."""
    found: list[tuple[str, Node, Names]] = []
    seen: set[int] = set()
    waiting = [(name, names) for name in names_inside(node)]
    while waiting and len(found) < MAX_SOURCES:
        name, scope = waiting.pop(0)
        source = scope.source(name)
        if source is None or id(source[0]) in seen:
            continue
        seen.add(id(source[0]))
        found.append((name, source[0], scope))
        if isinstance(source[0], Scalar) and isinstance(source[0].value, str):
            waiting += [(other, source[1]) for other in names_in(source[0].value)]
    return found


def _notes(ctx: Context, node: Node | None, own: Span | None, inner: Span | None) -> list[Note]:
    """Return notes on where the faulty value was written, the line of a bundled block, and the enclosing blocks."""
    trail = tuple(note for note in ctx.trail[::-1] if not inner or note.span != own)
    if len(trail) > MAX_TRAIL:
        between = Note(f"… and {len(trail) - MAX_TRAIL + 1} blocks in between")
        trail = (*trail[: MAX_TRAIL // 2], between, *trail[1 - MAX_TRAIL // 2 :])
    notes = _written(ctx, node)[:MAX_WRITTEN] if node else []
    if inner and inner != own:
        line = inner.source.line(inner.line).strip()
        notes.append(Note(f"the line of the bundled block: `{line[:100]}{'…' if len(line) > 100 else ''}`", inner))
    return [*notes, *trail]


def _written(ctx: Context, node: Node) -> list[Note]:
    """Return a note for each named value that a value depends on, except those that a bundled block passes on."""
    notes = []
    for name, source, names in _sources(node, ctx.names):
        value = names[name]
        bare = isinstance(source, Scalar) and isinstance(source.value, str) and source.value.isidentifier()
        if value is UNKNOWN or (bare and source.span.source.bundled):
            continue
        text = f"`{name}` is {shown_value(value)}"
        is_override = source.span.source.is_override  # not a place in a file
        notes.append(Note(f"{text}: {source.span.source.name}") if is_override else Note(text, source.span))
    return notes

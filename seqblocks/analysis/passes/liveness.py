"""Find parameters that would be counted and stored but never trained, because the output of their step is unused.

A step is idle if no used value is computed from its output (E315), or if every path to the result passes through a step
with constant output, which blocks the gradient (W902).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from seqblocks import graph
from seqblocks.errors import Fault, Note, listing, quote
from seqblocks.graph import Graph, Node
from seqblocks.op import PRIMITIVES, Op
from seqblocks.record import Record
from seqblocks.types import Wire

WIDTH = 720_720  # a width that most small numbers divide


class Idle(Record):
    """The idle steps of a body: steps with parameters that reach no used value, and unused parts of other steps."""

    steps: list[Node]
    parts: list[tuple[Node, tuple[int, ...]]]  # a step with parameters, and its unused output values
    used: frozenset[int] = frozenset()  # values that the result of the body depends on


def find_idle(bodies: Iterable[tuple[Graph, str]], by_gradient: bool = False) -> list[Idle]:
    """Return the idle steps of each body, including nested ones.

    bodies: those of the model and of blocks, each with the path of its names. The body of a block is analysed
    separately, as many steps may share it. In a chain of idle steps only the last one is listed. A step is not idle
    if a used step ties or shares its parameters. Bodies with steps that could not be lowered are skipped.
    by_gradient: count values as used only if a gradient flows through them.
    """
    whole = [(body, path) for body, path in bodies]
    nothing = Idle([], [])
    complete: dict[int, bool] = {}
    found = _Liveness(frozenset(), by_gradient)
    idle = [found.body(body) if _is_complete(body, complete) else nothing for body, _ in whole]
    if any(each.steps for each in idle) and (kept := _tied_to(whole, found.used)):
        found = _Liveness(kept, by_gradient)
        idle = [found.body(body) if _is_complete(body, complete) else nothing for body, _ in whole]
    return idle


def unused(node: Node, body: Graph) -> Fault:
    """Return the fault of an idle step."""
    what = "it" if len(node.outputs) == 1 else "one of its parts"
    listed = f"list {what} in `outputs:`, " if body.outputs and node in body.nodes else ""
    message = f"the output of {_shown(node)} is unused: {_owned(node)} would never be trained"
    hint = f"{listed}read {what} in a later step, by `from:` or a port, or remove the step"
    return Fault("E315", message, hint=hint)


def unused_parts(node: Node, names: list[str]) -> Fault:
    """Return the fault of a step with unused outputs."""
    parts, them = ("a part", "it") if len(names) == 1 else ("parts", "them")
    listed = f"{listing(f'`{name}`' for name in names)}, {parts} of {_shown(node)}"
    message = f"nothing uses {listed}: the parameters that compute {them} would never be trained"
    hint = f"read {them} in a later step, by `from:` or a port, or reduce the width of the step"
    return Fault("W902", message, hint=hint)


def without_gradient(node: Node, body: Graph) -> Fault:
    """Return the fault of a step that receives no gradient because of a constant output after it."""
    message = f"{_shown(node)} receives no gradient: {_owned(node)} would never be trained"
    for each in graph.walk(body):
        if isinstance(each, graph.ChooseNode) and each.inputs["by"][0] in node.outputs:
            notes = [Note(f"{_shown(each)} reads it as scores, and a choice has no gradient", each.span)]
            return Fault("W902", message, notes=notes, hint="multiply by it in the steps there: `calc: r * y`")
    constant, notes = _constant_after(node, body), []
    if constant and constant.type:
        value = f"{constant.type.facts.low:g}"
        notes = [Note(f"the output of {_shown(constant)} is always {value}", constant.span)]
    return Fault("W902", message, notes=notes, hint="remove the step, or make that output depend on its input")


def _owned(node: Node) -> str:
    parameters = graph.count_node(node)
    return f"its {parameters:,} parameters" if parameters > 1 else "its parameter" if parameters else "its parameters"


def _shown(node: Node) -> str:
    return node.verb if node.name == node.verb else f"{node.verb} {quote(node.name)}"


def _constant_after(node: Node, body: Graph) -> Node | None:
    """Return the first step with constant output among those that depend on the output of a step."""
    reached = set(node.outputs)
    in_order = sorted(
        graph.walk(body), key=lambda each: each.outputs[0]
    )  # inputs of a step have lower numbers than its outputs
    for each in in_order:
        if not reached.isdisjoint((*each.reads, *(inner.result for inner in each.bodies.values()))):
            if each.type and each.type.facts.is_constant:
                return each
            reached.update(each.outputs)
    return None


def _is_constant(node: Node) -> bool:
    return isinstance(node, graph.OpNode) and node.type is not None and node.type.facts.is_constant


class _Liveness:
    """A backward walk over bodies; each is visited once. `kept`: ids of steps whose parameters a used step shares.

    A step precedes those that share its parameters, so the backward walk visits it after them.
    """

    def __init__(self, kept: frozenset[int], by_gradient: bool) -> None:
        self.kept, self.by_gradient = set(kept), by_gradient
        self.used: list[Node] = []
        self._known: dict[int, Idle] = {}

    def body(self, body: Graph, later: Collection[int] | None = None) -> Idle:
        """Return what is idle in a body. later: the values that steps after it read; None: all that it exports."""
        later = body.exports if later is None else later
        if body.like:
            idle = self.body(body.like, later)
            if not (idle.steps or idle.parts):
                return idle
        if id(body) not in self._known:
            self._known[id(body)] = self._walk(body, later)
        return self._known[id(body)]

    def _walk(self, body: Graph, later: Collection[int]) -> Idle:
        live = _results(body, later)
        waiting: set[int] = set()  # inputs of idle steps, idle only because of these
        idle = Idle([], [])
        for node in reversed(body.nodes):
            if not (live.isdisjoint(node.made) or (self.by_gradient and _is_constant(node))):
                self.used.append(node)
                if node.owner:
                    self._mark_kept(node.owner)
                read = live.intersection(node.outputs)
                if read and len(read) < len(node.outputs) and _may_own(node) and not self._is_kept(node):
                    idle.parts.append((node, tuple(value for value in node.outputs if value not in live)))
                live |= self._reads(node, idle, live)
            elif not waiting.isdisjoint(node.made):
                waiting.update(node.reads)
            elif _may_own(node) and not self._is_kept(node):
                idle.steps.append(node)
                waiting.update(node.reads)
        return idle._replace(used=frozenset(live))

    def _mark_kept(self, owner: Node) -> None:
        """Mark a step whose parameters a used step shares, and the steps whose parameters it shares inside."""
        if id(owner) not in self.kept:
            self.kept.add(id(owner))
            self.kept.update(id(each.owner) for each in _with_inner(owner) if each.owner)
            if self.by_gradient:  # a step inside may be blocked where it is owned, and trained where it is shared
                self.kept.update(id(each) for each in _with_inner(owner))

    def _is_kept(self, node: Node) -> bool:
        """Return whether a used step shares the parameters of this one, or of a step inside it."""
        return any(id(each) in self.kept for each in _with_inner(node))

    def _reads(self, node: Node, idle: Idle, later: Collection[int]) -> set[int]:
        """Return the outer values that a used step needs; add the idle steps inside it to `idle`.

        later: the values that steps after it read.
        """
        if isinstance(node, graph.PrimitiveNode):
            sizes = {port.name for port in (node.op.ports if node.op else ()) if port.size_only}
            return {v for port, each in node.inputs.items() if port not in sizes for v in each}
        if isinstance(node, graph.RepeatNode):
            return self._layers(node, idle, later)
        if isinstance(node, graph.SeparateNode):
            inside = self.body(node.bodies[""])
            found = {value for value, number in node.links if number in inside.used}
            if isinstance(node, graph.BlockNode):
                return found
            _add(idle, inside)
            if isinstance(node, graph.ChooseNode):
                found.update(node.inputs["x"])
                found.update(() if self.by_gradient else node.inputs["by"])  # the choice has no gradient
            return found
        read = {*node.at_ports} if isinstance(node, graph.ResidualNode) else set[int]()
        for body in node.bodies.values():
            inside = self.body(body, later)
            read |= inside.used
            _add(idle, inside)
        return read

    def _layers(self, node: Node, idle: Idle, later: Collection[int]) -> set[int]:
        read: set[int] = set()
        is_read = any(value in later for value in node.outputs)  # whether anything reads the output of the layer
        for body in reversed(node.bodies.values()):
            if not is_read and not any(value in read or value in later for value in body.exports):
                owners = (each for each in reversed(body.nodes) if _may_own(each) and not node.shared)
                idle.steps.extend(next(([each] for each in owners), []))
                continue
            inside = self.body(body, {*later, *read})
            read.update(inside.used.intersection(body.captures))
            _add(idle, inside)
            is_read = body.input in inside.used
        return read | set(node.inputs["x"]) if is_read else read


def _results(body: Graph, later: Collection[int]) -> set[int]:
    """Return the values that a body returns and that are used: states only if its output depends on them.

    later: values that steps outside read.
    """
    live = {body.result, *body.outputs.values(), *(value for value in body.exports if value in later)}
    if not body.carried:
        return live
    results, found = set(live), 0
    while found < len(live):
        found = len(live)
        live |= {body.carried[name] for name, value in body.ports.items() if value in live}
        for node in reversed(body.nodes):
            if not live.isdisjoint(node.made):
                live.update(node.reads)
    return results | {value for value in body.carried.values() if value in live}


def _add(idle: Idle, more: Idle) -> None:
    idle.steps.extend(more.steps)
    idle.parts.extend(more.parts)


def _tied_to(bodies: list[tuple[Graph, str]], used: list[Node]) -> frozenset[int]:
    """Return the ids of steps whose parameters are tied to those of a used step."""
    targets = {target for node in used for target in node.ties.values()}
    if not targets:
        return frozenset()
    named = (item for body, path in bodies for item in graph.parameters(body, path))
    return frozenset(id(item.node) for item in named if item.name in targets)


def _is_complete(body: Graph, known: dict[int, bool]) -> bool:
    """Return whether all steps could be lowered. known: the results for other bodies."""
    if body.like:
        return True
    if id(body) not in known:
        inside = all(_is_complete(inner, known) for node in body.nodes for inner in node.bodies.values())
        known[id(body)] = inside and not any(isinstance(node, graph.UnknownNode) for node in body.nodes)
    return known[id(body)]


def _with_inner(node: Node) -> Iterator[Node]:
    yield node
    for body in node.bodies.values():
        yield from graph.walk(body)


def _may_own(node: Node) -> bool:
    """Return whether a step may own parameters. If its widths are unknown, try it on wide wires.

    Widths are unknown in unused blocks.
    """
    if node.owner:
        return False
    if any(name not in node.ties for name, parameter in node.parameters.items() if parameter.trained):
        return True
    if not isinstance(node, graph.PrimitiveNode):
        return any(_may_own(inner) for body in node.bodies.values() for inner in body.nodes)
    if node.op is None:  # its arguments are unknown too
        return PRIMITIVES[node.verb].parameters is not Op.parameters
    if node.type is not None or type(node.op).parameters is Op.parameters:
        return False
    wires = [Wire(port.kinds[0], WIDTH, 1, (1, 1)) if port.name in node.inputs else None for port in node.op.ports]
    try:
        return bool(node.op.parameters(*wires))
    except Fault:
        return True

"""Steps whose output nothing uses: their parameters would be counted, stored and never trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from seqblocks import graph
from seqblocks.errors import Fault, quote
from seqblocks.graph import Graph, Node
from seqblocks.op import PRIMITIVES, Op
from seqblocks.types import Wire

WIDE = 720_720  # a width that nearly every small number divides


def idle_steps(bodies: Iterable[tuple[Graph, str]]) -> list[list[Node]]:
    """Of each body: the steps with parameters that reach neither its result nor a used value.

    bodies: a model's, and those of blocks, each with the path of its names; a block's body is looked at by itself, as
    it serves many steps. Of idle steps that read one another only the last is listed, which the others wait for. A
    step is not idle if a used one ties parameters to its own. Bodies with steps that could not be lowered are left out.
    """
    whole = [(body, path) for body, path in bodies]
    found = _Liveness(frozenset())
    idle = [found.body(body).idle if _complete(body) else () for body, _ in whole]
    if any(idle) and (kept := _tied_to(whole, found.used)):
        found = _Liveness(kept)
        idle = [found.body(body).idle if _complete(body) else () for body, _ in whole]
    return [list(steps) for steps in idle]


def fault_of(node: Node) -> Fault:
    """What to say of an idle step."""
    count = graph.count_node(node)
    owned = f"its {count:,} parameters" if count > 1 else "its parameter" if count else "its parameters"
    who = node.verb if node.name == node.verb else f"{node.verb} {quote(node.name)}"
    what = "it" if len(node.outputs) == 1 else "one of its parts"
    return Fault(
        "E315",
        f"nothing uses the output of {who}: {owned} would never be trained",
        hint=f"read {what} in a later step, by `from:` or a port, or remove the step",
    )


class _Used(NamedTuple):
    """Of a body: the values that its result depends on, and its idle steps."""

    values: frozenset[int]
    idle: tuple[Node, ...]


class _Liveness:
    """One walk backwards over bodies; each is looked at once. `kept`: steps, by id, that a tie keeps in use.

    A step is above those that share its parameters, so the walk meets it after them.
    """

    def __init__(self, kept: frozenset[int]) -> None:
        self.kept = set(kept)
        self.used: list[Node] = []
        self._known: dict[int, _Used] = {}

    def body(self, body: Graph) -> _Used:
        if id(body) not in self._known:
            self._known[id(body)] = self._walk(body)
        return self._known[id(body)]

    def _walk(self, body: Graph) -> _Used:
        live = {body.result}
        waiting: set[int] = set()  # what idle steps read: it is idle because they are
        idle: list[Node] = []
        for node in reversed(body.nodes):
            if not live.isdisjoint(node.outputs):
                self.used.append(node)
                if node.owner:
                    self.kept.add(id(node.owner))
                live |= self._reads(node, idle)
            elif not waiting.isdisjoint(node.outputs):
                waiting.update(node.reads)
            elif _may_own(node) and not any(id(each) in self.kept for each in _with_inner(node)):
                idle.append(node)
                waiting.update(node.reads)
        return _Used(frozenset(live), tuple(idle))

    def _reads(self, node: Node, idle: list[Node]) -> set[int]:
        """The values around a used step that it needs; adds what is idle inside it to `idle`."""
        if node.kind == "op":
            sizes = {port.name for port in (node.op.ports if node.op else ()) if port.size_only}
            return {v for port, each in node.inputs.items() if port not in sizes for v in each}
        values = {v for each in node.inputs.values() for v in each}
        if node.kind == "block":
            body = node.bodies[""]
            ports = {"x": body.input, **body.ports}
            inside = self.body(body).values
            return {v for port, each in node.inputs.items() for v in each if ports[port] in inside}
        if node.kind == "repeat":
            return self._layers(node, idle)
        read = values if node.kind == "residual" else set()
        for body in node.bodies.values():
            used = self.body(body)
            read |= used.values
            idle += used.idle
        return read

    def _layers(self, node: Node, idle: list[Node]) -> set[int]:
        read: set[int] = set()
        wanted = True  # whether the layer that follows reads what this one makes
        for body in reversed(node.bodies.values()):
            if not wanted:
                owners = (each for each in reversed(body.nodes) if _may_own(each) and not node.shared)
                idle += next(([each] for each in owners), [])
                continue
            used = self.body(body)
            read |= used.values - {body.input}
            idle += used.idle
            wanted = body.input in used.values
        return read | set(node.inputs["x"]) if wanted else read


def _tied_to(bodies: list[tuple[Graph, str]], used: list[Node]) -> frozenset[int]:
    """The steps, by id, whose parameters are those of a used step too."""
    targets = {target for node in used for target in node.ties.values()}
    if not targets:
        return frozenset()
    named = (item for body, path in bodies for item in graph.parameters(body, path))
    return frozenset(id(item.node) for item in named if item.name in targets)


def _complete(body: Graph) -> bool:
    return all(node.kind != "unknown" for node in graph.walk(body))


def _with_inner(node: Node) -> Iterator[Node]:
    yield node
    for body in node.bodies.values():
        yield from graph.walk(body)


def _may_own(node: Node) -> bool:
    """Whether a step has parameters that are not another's; where its widths are not known, it is tried on wide wires.

    Widths are unknown in a block that nothing uses.
    """
    if node.owner:
        return False
    if any(name not in node.ties for name in node.parameters):
        return True
    if node.kind != "op":
        return any(_may_own(inner) for body in node.bodies.values() for inner in body.nodes)
    if node.op is None:  # its arguments are not known either
        return PRIMITIVES[node.verb].parameters is not Op.parameters
    if node.type is not None or type(node.op).parameters is Op.parameters:
        return False
    wires = [Wire(port.kinds[0], WIDE, 1, (1, 1)) if port.name in node.inputs else None for port in node.op.ports]
    try:
        return bool(node.op.parameters(*wires))
    except Fault:
        return True

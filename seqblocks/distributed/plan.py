"""Derive a tensor-parallel plan from the graph: which steps are split over ranks, and what the ranks exchange.

docs/decisions/0039-tensor-parallelism-is-a-rewritten-graph.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from seqblocks import graph
from seqblocks.analysis.steps.combinators.cell import stages_of
from seqblocks.errors import Fault, UsageError
from seqblocks.graph import Graph, ModelSpec, Node, OpNode
from seqblocks.op import Op
from seqblocks.parameters import Parameter
from seqblocks.roles import Split, splits
from seqblocks.runtime.shards import Sharding
from seqblocks.state_layout import State, in_lanes, kept_state
from seqblocks.types import Wire


class Exchange(NamedTuple):
    """The communication between ranks before and after an op.

    enter: the operation on each input: `slice`, `gather`, or `copy` (which sums gradients). leave: the operation on the
    output: `sum`, `gather` or none. copied: replicated parameters, whose gradients are summed; added: those of them
    that are terms of a sum, to which each rank adds its share.
    """

    enter: tuple[tuple[str, ...], ...]
    leave: str
    axis: int
    copied: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


class Plan(NamedTuple):
    """A tensor-parallel plan: the spec of one rank, the split of parameters, and the communication of each op."""

    ranks: int
    whole: ModelSpec
    part: ModelSpec
    shardings: dict[str, Sharding]
    exchanges: dict[int, Exchange]
    steps: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        width = max(len(path) for path, _ in self.steps)
        return "\n".join(f"{path:{width}}  {what}" for path, what in self.steps)


def tensor_plan(spec: ModelSpec, ranks: int) -> Plan:
    """Return how the steps of a model are split over a number of ranks.

    A step is split as its op declares (`roles.splits`). Each rank computes the whole step if the op declares no split,
    or if the result would only be gathered again. Raises UsageError with the mixers whose heads or groups cannot be
    divided evenly, or if no step can be split.
    """
    if not isinstance(spec, ModelSpec):
        raise UsageError(f"tensor_plan needs a spec from load_model, or model.spec, not {type(spec).__name__}")
    if type(ranks) is not int or ranks < 1:
        raise UsageError(f"ranks must be a whole number of at least 1, not {ranks!r}")
    planner = _Planner(spec, ranks)
    while planner.changed:
        plan = planner.run()
    if planner.refused:
        raise UsageError(f"the model cannot be split over {ranks} ranks: {'; '.join(dict.fromkeys(planner.refused))}")
    if not plan.shardings:
        raise UsageError(f"no step of {spec.name} can be split over {ranks} ranks")
    return plan


class _Planner:
    """Repeats planning, with more values and steps required whole, until the plan is consistent."""

    def __init__(self, spec: ModelSpec, ranks: int) -> None:
        self.spec, self.ranks = spec, ranks
        self.changed = True
        self.whole: set[int] = set()  # values that must be whole
        self.undivided: set[int] = set(_tied(spec.graph))  # nodes that must not be split, by id
        self.refused: list[str] = []

    def run(self) -> Plan:
        self.parts: dict[int, bool] = dict.fromkeys(self.spec.graph.reads, False)  # by value: are there parts
        self.origins: dict[int, frozenset[int]] = {}  # by value: the nodes that split its features first
        self.starts: set[int] = set()
        self.used: set[int] = set()  # starts whose parts a sum combines
        self.types = dict(self.spec.types)
        self.shardings: dict[int, dict[str, Sharding]] = {}
        self.exchanges: dict[int, Exchange] = {}
        self.original: dict[int, Node] = {}
        self.done: dict[int, Graph] = {}
        self.steps: dict[str, str] = {}
        before = len(self.whole), len(self.undivided)
        local = self._body(self.spec.graph, "")
        self._need_whole(*self.spec.graph.results)
        shardings = {item.name: sharding for item, sharding in self._sharded_parameters(local) if not item.shared}
        self.undivided |= self.starts - self.used
        self.changed = before != (len(self.whole), len(self.undivided))
        spec = self.spec._replace(graph=local, types=self.types)
        return Plan(self.ranks, self.spec, spec, shardings, self.exchanges, tuple(self.steps.items()))

    def _sharded_parameters(self, local: Graph) -> Iterator[tuple[graph.Named, Sharding]]:
        """Yield each parameter that is sharded. A parameter that is shared but sharded differently must stay whole."""
        found = {item.name: item for item in graph.parameters(local, shared=True)}
        for item in found.values():
            sharding = self._sharding_of(item)
            owner = found[item.tied] if item.shared and item.tied else None
            if owner and sharding != self._sharding_of(owner):
                self.undivided |= {id(self.original[id(each.node)]) for each in (item, owner)}
            if sharding:
                yield item, sharding

    def _sharding_of(self, item: graph.Named) -> Sharding | None:
        return self.shardings.get(id(item.node), {}).get(item.name.rpartition(".")[2])

    def _need_whole(self, *values: int) -> None:
        self.whole |= {value for value in values if self.parts.get(value)}

    def _note_whole(self, *values: int) -> None:
        """Take values as whole on every rank."""
        for value in values:
            self.parts[value], self.types[value], self.origins[value] = False, self.spec.types[value], frozenset()

    def _pass(self, outer: int, inner: int) -> None:
        """Give a body's input the layout of its argument."""
        is_part = self.parts[outer]
        if inner in self.whole:  # a step of the body needs it whole
            self._need_whole(outer)
        if self.parts.setdefault(inner, is_part) != is_part:  # the same body is called with two layouts
            self._need_whole(outer, inner)
            self.parts[inner] = self.parts[inner] and is_part
        self.origins[inner] = self.origins.get(outer, frozenset())
        if is_part and outer != inner:
            self.types[inner] = self.types[outer]

    def _body(self, body: Graph, path: str) -> Graph:
        if id(body) not in self.done:
            nodes = [self._node(n, graph.join(path, n.name)) for n in body.nodes]
            self.done[id(body)] = body._replace(nodes=nodes, like=None)
        return self.done[id(body)]

    def _node(self, node: Node, path: str) -> Node:
        made = self._op(node, path) if isinstance(node, OpNode) else self._combinator(node, path)
        self.original[id(made)] = node
        return made

    def _combinator(self, node: Node, path: str) -> Node:
        is_separate = not isinstance(node, graph.BlockNode | graph.ResidualNode | graph.ScanNode)
        if is_separate or any(value in self.whole for value in node.outputs):
            self.whole |= {body.result for body in node.bodies.values()}
        if is_separate:
            self._need_whole(*node.reads)
            for body in node.bodies.values():
                self.whole |= {*body.carried.values()}
                self._note_whole(*body.ports.values())  # the states of a cell
        self.whole |= {value for body in node.bodies.values() for value in body.exports}
        if not node.bodies:  # a repeat without layers
            self._note_outputs(node, False, frozenset())
            return node
        for body in node.bodies.values():
            outer = (node.reads[0], *body.captures) if is_separate else node.reads
            for value, inner in zip(outer, (body.input, *body.captures) if is_separate else body.reads, strict=True):
                if value in self.parts:  # otherwise an earlier layer exports it, which is planned below, and whole
                    self._pass(value, inner)
        scanned = self._scanned(node)
        self.undivided |= {*map(id, scanned)}
        bodies = {label: self._body(body, graph.join(path, label)) for label, body in node.bodies.items()}
        self._need_whole(*(value for each in scanned for value in each.reads))
        result = next(reversed(node.bodies.values())).result
        self._check_result(node, result)
        is_part = self.parts[result] and not is_separate
        self._note_outputs(node, is_part, self.origins.get(result, frozenset()))
        self._note_whole(*node.exports)
        return node._replace(bodies=bodies, type=self._local(node.type, is_part))

    def _scanned(self, node: Node) -> list[Node]:
        """Return the formulas of a cell that a scan computes. It does not call these steps, so they cannot exchange."""
        if not isinstance(node, graph.CellNode):
            return []
        stages = stages_of(node.bodies[""], self.spec.types)
        return stages.loop if stages.groups else []

    def _check_result(self, node: Node, result: int) -> None:
        joined = isinstance(node, graph.ScanNode) and bool(node.directions) and node.arguments.merge == "concat"
        if node.split or joined:
            self._need_whole(result)
        if isinstance(node, graph.ResidualNode) and self.parts[node.reads[0]] != self.parts[result]:
            self._need_whole(node.reads[0], result)

    def _local(self, wire: Wire | None, is_part: bool) -> Wire | None:
        return wire.with_features(wire.features // self.ranks) if wire and is_part else wire

    def _note_outputs(self, node: Node, is_part: bool, origins: frozenset[int]) -> None:
        for value in node.outputs:
            self.parts[value] = is_part
            self.types[value] = self._local(self.spec.types[value], is_part)
            self.origins[value] = origins if is_part else frozenset()

    # --- ops ----------------------------------------------------------------------------------------------------------

    def _op(self, node: OpNode, path: str) -> Node:
        split = self._choose(node, path)
        if split is None:
            return self._undivided(node, path)
        read = frozenset(each for value in node.reads for each in self.origins.get(value, ()))
        if split.sums:
            self.used |= read
        elif not split.parts:
            self.starts.add(id(node))
            read = frozenset([id(node)])
        gathers = not split.sums and any(value in self.whole for value in node.outputs)
        is_part = not split.sums and not gathers
        op = split.op.model_copy()
        pairs = zip(node.op.ports, node.wires, strict=True)
        wires = [self._local(wire, port.name in split.parts) for port, wire in pairs]
        self._check_declaration(node, split, wires, path)
        self._note_outputs(node, is_part, read)
        self.exchanges[id(op)] = self._exchange(node, split, "sum" if split.sums else "gather" if gathers else "")
        self.steps[path] = _words(node, split, gathers)
        made = node._replace(
            op=op, wires=tuple(wires), type=self._local(node.type, is_part),
            state=self._state(node, op, wires, is_part),
            split=tuple(width // self.ranks for width in node.split) if is_part else node.split,
            parameters=self._shard_parameters(node, split),
        )  # fmt: skip
        self.shardings[id(made)] = self._shardings(node, split)
        return made

    def _state(self, node: Node, op: Op, wires: list[Wire | None], is_part: bool) -> dict[str, State]:
        """Return the state of a step on one rank: for its part of the op, or its part of a context's value."""
        if not node.kept:
            lanes = node.type.lanes if node.type else ()
            return in_lanes(op.state(*wires), lanes) if node.state else {}  # a context is read whole, without a state
        wire = self._local(node.type, is_part)
        assert wire
        return {"output": kept_state(wire)}

    def _undivided(self, node: OpNode, path: str) -> Node:
        """Return a step that each rank computes whole, with its inputs gathered."""
        self._note_outputs(node, False, frozenset())
        if not any(self.parts[value] for value in node.reads):
            return node
        op = node.op.model_copy()
        enter = tuple(("gather",) if self.parts[value] else () for value in node.reads)
        self.exchanges[id(op)] = Exchange(enter, "", _axis(node))
        self.steps[path] = "whole on each rank, its inputs gathered"
        return node._replace(op=op)

    def _choose(self, node: OpNode, path: str) -> Split | None:
        """Return the split of a step that communicates the fewest values per token, or None to compute it whole."""
        reads_parts = any(self.parts[value] for value in node.reads)
        if node.type is None or id(node) in self.undivided or any(w is None for w in node.wires[:1]):
            return None
        if node.op.buffers(*node.wires):  # a rank has them as a whole
            return None
        try:
            found = [split for split in splits(node.op, self.ranks, node.wires) if self._fits(node, split)]
        except Fault as fault:
            if reads_parts and node.op.reads != "token":
                self.refused.append(f"{path} ({node.span}): {fault.message}")
            return None
        if not reads_parts:
            return next((split for split in found if not split.parts), None)
        whole = self._width(value for value in node.reads if self.parts[value])
        best = min(found, key=lambda split: self._communicated(node, split), default=None)
        return best if best and self._communicated(node, best) <= whole else None

    def _fits(self, node: Node, split: Split) -> bool:
        """Return whether all widths divide evenly and no tied parameter is cut."""
        assert node.type
        read = {port: [self.spec.types[v] for v in node.inputs.get(port, ())] for port in split.parts}
        if any(wire is None or wire.features % self.ranks for wires in read.values() for wire in wires):
            return False
        if any(name in node.ties for name in split.cuts):
            return False
        if split.sums:
            return True
        if any(len(wires) > 1 for wires in read.values()):
            return False  # a part would combine parts of each joined wire
        if node.split and (split.parts or any(value in self.whole for value in node.outputs)):
            return False
        return not any(width % self.ranks for width in node.split or (node.type.features,))

    def _communicated(self, node: Node, split: Split) -> int:
        assert node.type
        is_exchanged = split.sums or any(value in self.whole for value in node.outputs)
        whole = (v for port, values in node.inputs.items() if port not in split.parts for v in values if self.parts[v])
        return self._width(whole) + (node.type.features if is_exchanged else 0)

    def _width(self, values: Iterable[int]) -> int:
        wires = (self.spec.types[value] for value in values)
        return sum(wire.features for wire in wires if wire)

    def _exchange(self, node: Node, split: Split, leave: str) -> Exchange:
        enter: list[tuple[str, ...]] = []
        for port, values in node.inputs.items():
            for value in values:
                if port in split.parts:
                    enter.append(() if self.parts[value] else ("slice",))
                else:
                    enter.append(("gather", "copy") if self.parts[value] else ("copy",))
        copied = tuple(name for name in node.parameters if name not in split.cuts)
        return Exchange(tuple(enter), leave, _axis(node), copied, tuple(n for n in copied if n in split.added))

    def _shardings(self, node: Node, split: Split) -> dict[str, Sharding]:
        widths = self._sections(node, split)
        found = {}
        for name, axis in split.cuts.items():
            if name in node.parameters:
                size = node.parameters[name].shape[axis]
                found[name] = Sharding(axis, tuple(width * size // sum(widths) for width in widths))
        return found

    def _sections(self, node: Node, split: Split) -> tuple[int, ...]:
        """Return the widths of the wires joined in an op's input or output; each wire is sharded separately."""
        if not split.parts:
            return node.split if node.split and not split.sums else (1,)
        joined = [values for port, values in node.inputs.items() if port in split.parts and len(values) > 1]
        wires = [self.spec.types[value] for value in joined[0]] if joined else []
        return tuple(wire.features for wire in wires if wire) or (1,)

    def _shard_parameters(self, node: Node, split: Split) -> dict[str, Parameter]:
        made = dict(node.parameters)
        for name, sharding in self._shardings(node, split).items():
            shape = list(made[name].shape)
            shape[sharding.axis] //= self.ranks
            made[name] = made[name]._replace(shape=tuple(shape))
        return made

    def _check_declaration(self, node: Node, split: Split, wires: list[Wire | None], path: str) -> None:
        """Check that an op's part has the shapes that its split declares."""
        assert node.type
        found = {name: tuple(p.shape) for name, p in split.op.parameters(*wires).items()}
        expected = {name: tuple(p.shape) for name, p in self._shard_parameters(node, split).items()}
        width = node.type.features // (1 if split.sums else self.ranks)
        if found != expected or split.op.shape(*wires).features != width:
            what = f"declares a split over {self.ranks} ranks that does not fit its shapes"
            raise UsageError(f"{path} ({node.span}): {node.verb} {what}")


def _tied(body: Graph) -> Iterator[int]:
    """Yield the ids of nodes with a parameter tied to another node's."""
    found = {item.name: item for item in graph.parameters(body, shared=True)}
    for item in found.values():
        if item.tied and not item.shared:
            yield from (id(item.node), id(found[item.tied].node))


def _axis(node: Node) -> int:
    return node.type.feature_axis if node.type and node.type.kind != "tokens" else -1


def _words(node: OpNode, split: Split, gathers: bool) -> str:
    """Return a description of how a step is split."""
    if split.sums:
        return "columns, outputs summed" if split.parts else "hidden features, outputs summed"
    what = _counted(node, split) if split.parts else "rows"
    return f"{what}, output gathered" if gathers else what


def _counted(node: OpNode, split: Split) -> str:
    """Return the names of what is divided: the arguments that count it, or features."""
    before, after = node.op.model_dump(), split.op.model_dump()
    changed = [name for name in before if before[name] != after[name] and name != "features"]
    return " and ".join(changed) or "features"



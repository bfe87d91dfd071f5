"""How a cell is computed: which of its steps run token by token, and whether an associative scan replaces the loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from seqblocks.graph import Graph, Node
from seqblocks.ops.calc import Calc, computed, program_of
from seqblocks.types import Wire

STARTED = "started"  # the part of a state that counts whether a token came before, if a start is learned
GROUP_MAX_STATES = 3  # states that read each other: combining two tokens takes as many products as the cube of this
KEPT_MAX_TOKENS = 64  # tokens of a loop that are kept for the backward pass: the memory of 4,096 tokens in parts of 64

Groups = tuple[tuple[str, ...], ...]


class Parts(NamedTuple):
    """The steps of a cell: those on all tokens before the loop, those in the loop, and those on all tokens after it.

    groups: the states that read each other, if all states are set by linear formulas; the loop is then a scan, and
    `from_states` are the steps that compute the output from the states of all tokens.
    into_loop, out_of_loop: the values that the loop reads from outside, and those that later steps read of it.
    """

    before: list[Node]
    loop: list[Node]
    after: list[Node]
    groups: Groups | None
    from_states: list[Node]
    into_loop: list[int]
    out_of_loop: list[int]

    def chunk(self, tokens: int, given: int | None) -> int:
        """Return the tokens of a part that is computed again in the backward pass. given: the argument `chunk`."""
        if given is not None:
            return given or tokens
        return tokens if self.groups or tokens <= KEPT_MAX_TOKENS else math.isqrt(tokens - 1) + 1


def parts_of(body: Graph, types: Mapping[int, Wire | None]) -> Parts:
    """Divide the steps of a cell."""
    states = {*body.ports.values()}
    reading = set(states)
    for node in body.nodes:
        if not reading.isdisjoint(node.reads):
            reading.update(node.made)
    needed = {*body.carried.values()}
    for node in reversed(body.nodes):
        if not needed.isdisjoint(node.made):
            needed.update(node.reads)
    dependent = [node for node in body.nodes if not reading.isdisjoint(node.made)]
    loop = [node for node in dependent if not needed.isdisjoint(node.made)]
    after = [node for node in dependent if needed.isdisjoint(node.made)]
    made = {value for node in loop for value in node.made} | states
    read = {value for node in loop for value in node.reads} | {*body.carried.values()}
    later = {value for node in after for value in node.reads} | {body.result}
    return Parts(
        [node for node in body.nodes if reading.isdisjoint(node.made)], loop, after,
        _groups(body, loop, types), _from_states(body, dependent), sorted(read - made), sorted(later & made),
    )  # fmt: skip


def _from_states(body: Graph, dependent: Sequence[Node]) -> list[Node]:
    """Return the steps that compute the output, if all old and new states are known."""
    known, wanted = {*body.carried.values(), *body.ports.values()}, {body.result}
    found: list[Node] = []
    for node in reversed(dependent):
        if not (wanted - known).isdisjoint(node.made):
            wanted.update(node.reads)
            found.insert(0, node)
    return found


# --- linear formulas --------------------------------------------------------------------------------------------------


class NotLinear(Exception):
    """Raised where a formula is not linear in the states."""


def _groups(body: Graph, loop: Sequence[Node], types: Mapping[int, Wire | None]) -> Groups | None:
    """Return the states that read each other, or None if they are not set by linear formulas."""
    reads: dict[int, frozenset[str]] = {value: frozenset([name]) for name, value in body.ports.items()}
    try:
        for node in loop:
            if not isinstance(node.op, Calc) or node.split:
                return None
            given = {name: reads.get(value, frozenset()) for name, (value,) in node.inputs.items()}
            given |= dict.fromkeys(node.op.learned, frozenset())
            reads[node.outputs[0]] = computed(program_of(node.op.formula), given, _states_in)
    except NotLinear:
        return None
    groups = _joined({name: reads.get(value, frozenset()) for name, value in body.carried.items()})
    widths = {name: wire and wire.features for name, wire in ((name, types[v]) for name, v in body.ports.items())}
    small = all(len(group) <= GROUP_MAX_STATES and len({widths[name] for name in group}) == 1 for group in groups)
    return groups if small else None


def _states_in(name: str, *parts: Any) -> frozenset[str]:
    """Return the states that a part of a formula reads. Raises NotLinear."""
    read = [part if isinstance(part, frozenset) else frozenset[str]() for part in parts]
    if not any(read):
        return frozenset()
    if name in ("+", "-") or (name == "*" and not (read[0] and read[1])) or (name == "/" and not read[1]):
        return frozenset[str]().union(*read)
    raise NotLinear


def _joined(reads: Mapping[str, Iterable[str]]) -> Groups:
    """Return the states in groups: each with those that it reads, and that read it."""
    group = {name: {name} for name in reads}
    for name, others in reads.items():
        for other in others:
            if group[name] is not group[other]:
                group[name] |= group[other]
                group |= dict.fromkeys(group[other], group[name])
    return tuple(dict.fromkeys(tuple(sorted(each)) for each in group.values()))

"""The shared data of one analysis: its report, values, limits and caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.named_values import Names
from seqblocks.analysis.scope.references import References
from seqblocks.analysis.scope.step import Step
from seqblocks.errors import Report
from seqblocks.types import Origin, Wire


class Run:
    """One analysis of a file and the files it uses.

    This is not a dataclass, because defining one with so many fields would slow down `check`.
    """

    def __init__(self, report: Report, warnings: Report | None = None) -> None:
        self.report = report
        self.warnings = Report() if warnings is None else warnings
        self.types: dict[int, Wire | None] = {}  # type of each value; None is UNKNOWN
        self.labels: dict[int, str] = {}
        self.makers: dict[int, Origin] = {}  # the step that computes a value

        self.references: References | None = None  # None: not collected
        self.is_trial = False  # whether what happens is forgotten, see `trial`

        # limits
        self.steps = 0
        self.effort = 0  # effort spent on reading arguments, see `values.effort`
        self.deepest = 0  # maximum depth of nested bodies
        self.full = False  # whether a limit was exceeded; nothing is lowered after that

        # caches, by the id of a document node or of a block
        self.step_cache: dict[Any, Step] = {}
        self.top_names: dict[int, Names] = {}  # `let:` of each file
        self.bodies: dict[Any, tuple[graph.Graph, int, int]] = {}  # of blocks, by arguments and wires
        self.words: dict[int, frozenset[str]] = {}  # in steps that are arguments
        self.passed_keys: dict[Any, int] = {}  # of such steps, by what they depend on
        self.maps: dict[int, tuple[graph.Entry, ...]] = {}
        self.efforts: dict[int, int] = {}  # of calling each block
        self.node_parameters: dict[int, tuple[graph.Node, dict[str, graph.Named]]] = {}
        self.known: dict[int, tuple[graph.Node, bool]] = {}
        self.originals: dict[int, dict[Any, Any]] = {}  # bodies to copy, by block, see `copies.py`
        self.faulty: dict[int, dict[Any, Any]] = {}  # the same with faults
        self.alone: dict[int, graph.Graph] = {}  # bodies that may be part of one to copy
        self.by_depth: set[int] = set()  # blocks, and steps that are arguments, whose bodies depend on `depth`
        self.reads_depth = False  # whether the body that is being lowered does
        self.free: dict[int, Any] = {}  # what only initial values depend on, by block

        # for checks after lowering
        self.map_checks: list[tuple[Any, ...]] = []  # arguments of `check_map`
        self.init_rules: dict[int, Any] = {}  # those written for a body, by its id, see `init_rules.py`
        self.mapped: set[int] = set()  # blocks whose maps are in there
        self.lowered: list[tuple[Any, graph.Graph]] = []  # the context and the body
        self.used: set[int] = set()  # blocks that were called
        self.unread: dict[int, bool] = {}  # by nodes of `let:` and of defaults: whether the value is unused
        self.overridden = False  # whether there are overrides
        self.ties = 0
        self.has_constants = False  # whether some step has a constant output, or only chooses by an input
        self.may_look_ahead = False  # whether some step may read later tokens

        # the model's input, from which arguments may inherit
        self.input_kind = ""
        self.input_features = 0
        self.has_context = False  # whether there are inputs that do not stream

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Forget all that happens inside, except references."""
        assert self.references is not None
        kept = {key: copy(value) for key, value in vars(self).items() if isinstance(value, dict | set | list)}
        before = {**vars(self), **kept}
        names = [(each, {**each.known}, {**each.pending}) for each in self.top_names.values()]
        places = {**self.references.places}
        self.report, self.warnings, self.is_trial = Report(), Report(), True
        try:
            yield
        finally:
            vars(self).update(before)
            self.references.places = places
            for each, known, pending in names:
                each.known, each.pending = known, pending

    def value(self, wire: Wire | None, label: str) -> int:
        """Add a value and return its number."""
        number = len(self.types)
        self.types[number] = wire
        self.labels[number] = label
        return number

    def unknown(self) -> int:
        """Add a value of unknown type and return its number."""
        return self.value(None, "?")

    def parameters_of(self, node: graph.Node, name: str) -> dict[str, graph.Named]:
        """Return the parameters of the node with this full name, including tied and shared ones, by relative name."""
        if id(node) not in self.node_parameters:
            found = graph.node_parameters(node, name, shared=True)
            self.node_parameters[id(node)] = node, {item.name[len(name) + 1 :]: item for item in found}
        return self.node_parameters[id(node)][1]

    def is_known(self, node: graph.Node) -> bool:
        """Return whether all parameters of a step are known, which requires known types of all steps inside it."""
        if id(node) not in self.known:
            self.known[id(node)] = node, all(inner.type for inner in graph.walk(graph.Graph(0, [node], 0)))
        return self.known[id(node)][1]

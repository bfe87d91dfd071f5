"""What one analysis shares: its report, its values, its limits, and what need not be done twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from seqblocks import graph
from seqblocks.analysis.names import Names
from seqblocks.analysis.step import Step
from seqblocks.errors import Report
from seqblocks.types import Origin, Wire


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """One analysis of a file and the files it uses."""

    report: Report
    warnings: Report = field(default_factory=Report)
    types: dict[int, Wire | None] = field(default_factory=dict)  # of every value; None is UNKNOWN
    labels: dict[int, str] = field(default_factory=dict)
    makers: dict[int, Origin] = field(default_factory=dict)  # the step that made a value

    # limits
    steps: int = 0
    effort: int = 0  # spent on reading arguments, see `values.effort`
    deepest: int = 0  # the most bodies that were open at once
    full: bool = False  # whether a limit was exceeded, after which nothing is lowered

    # caches, by the id of a document node or of a block
    step_cache: dict[Any, Step] = field(default_factory=dict)
    top_names: dict[int, Names] = field(default_factory=dict)  # `let:` of each file
    bodies: dict[Any, tuple[graph.Graph, int, int]] = field(default_factory=dict)  # of blocks, by arguments and wires
    words: dict[int, frozenset[str]] = field(default_factory=dict)  # in steps that are arguments
    passed_keys: dict[Any, int] = field(default_factory=dict)  # of such steps, by what they depend on
    maps: dict[int, tuple[graph.Entry, ...]] = field(default_factory=dict)
    efforts: dict[int, int] = field(default_factory=dict)  # of calling each block
    node_parameters: dict[int, tuple[graph.Node, dict[str, graph.Named]]] = field(default_factory=dict)
    known: dict[int, tuple[graph.Node, bool]] = field(default_factory=dict)

    # for the checks that follow once all is lowered
    map_checks: list[tuple[Any, ...]] = field(default_factory=list)  # arguments of `check_map`
    lowered: list[tuple[Any, graph.Graph]] = field(default_factory=list)  # the context and the body
    used: set[int] = field(default_factory=set)  # blocks that were called
    unread: dict[int, bool] = field(default_factory=dict)  # by nodes of `let:` and of defaults: whether it has no use
    overridden: bool = False  # whether values were given from outside
    ties: int = 0
    has_constants: bool = False  # whether a step's output is constant
    may_look_ahead: bool = False  # whether a step may read later tokens

    # the model's input, for arguments that inherit from it
    input_kind: str = ""
    input_features: int = 0
    has_context: bool = False  # whether it has inputs that do not stream

    def value(self, type: Wire | None, label: str) -> int:
        """Return the number of a new value."""
        number = len(self.types)
        self.types[number] = type
        self.labels[number] = label
        return number

    def unknown(self) -> int:
        """Return the number of a new value of unknown type."""
        return self.value(None, "?")

    def parameters_of(self, node: graph.Node, name: str) -> dict[str, graph.Named]:
        """Return the parameters of a node of this full name, tied and shared ones too, by their names in it."""
        if id(node) not in self.node_parameters:
            found = graph.node_parameters(node, name, shared=True)
            self.node_parameters[id(node)] = node, {item.name[len(name) + 1 :]: item for item in found}
        return self.node_parameters[id(node)][1]

    def is_known(self, node: graph.Node) -> bool:
        """Whether all parameters of a step are known: a type that is UNKNOWN, of it or inside it, may lack some."""
        if id(node) not in self.known:
            self.known[id(node)] = node, all(inner.type for inner in graph.walk(graph.Graph(0, [node], 0)))
        return self.known[id(node)][1]

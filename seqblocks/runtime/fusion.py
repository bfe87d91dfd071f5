"""Neighbouring steps that one kernel computes together, found once when a body is built.

A rule names verbs in a row. Where a body has such steps, each reading what the one before made as its main input, and
nobody else reads that, they run as one call. Modules, parameter names, states and results stay what they are: the steps
are still there, and whoever hooks one of them gets them run one by one.

The first of them may be a block that ends in such a step: xLSTM's cell ends in the norm that its layer's skip and gate
follow.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from seqblocks.graph import Graph, Node
from seqblocks.ops.gate import Gate
from seqblocks.ops.norm import HeadNorm
from seqblocks.types import Wire

Part = tuple[Any, dict[str, Any], list[Any]]  # a step's op, parameters and inputs


class Fused(NamedTuple):
    """Steps that run as one: `nodes` in order, and the call."""

    nodes: list[Node]
    run: Callable[[list[Part]], Tensor]

    def facts(self) -> dict[str, Any]:
        """What the steps behind the first add to the facts of its kernel (see dispatch)."""
        ops = {node.verb: node.op for node in self.nodes}
        gate: Any = ops.get("gate")
        return {"skip": "learnable_skip" in ops, "gate": gate.activation if gate else None}


def _norm_skip_gate(parts: list[Part]) -> Tensor:
    from seqblocks.kernels import head_norm

    (norm, p, (x,)), *behind = parts
    more: dict[str, Any] = {}
    for op, own, inputs in behind:
        if op.verb == "gate":
            more |= {"gate": inputs[1], "activation": op.activation}
        else:
            more |= {"skip": inputs[1], "skip_weight": own["weight"]}
    return head_norm(x, norm.heads, norm.effective_gain(p), norm.effective_bias(p), norm.eps, **more)


# the longest first: of two rules that fit, the first is taken
RULES: list[tuple[tuple[str, ...], Callable[..., Tensor]]] = [
    (("head_norm", "learnable_skip", "gate"), _norm_skip_gate),
    (("head_norm", "learnable_skip"), _norm_skip_gate),
    (("head_norm", "gate"), _norm_skip_gate),
]


# what every form of the kernel can do
ACTIVATIONS = ("none", "silu", "sigmoid")
WIDTH = 4096  # of a head


def last(node: Node) -> Node:
    """The step that makes what a node gives: of a block, its last one."""
    while node.kind == "block":
        body = node.bodies[""]
        inner = body.nodes[-1] if body.nodes else None
        if inner is None or inner.split or inner.outputs[0] != body.result:
            return node
        node = inner
    return node


def find(body: Graph, types: dict[int, Wire | None]) -> dict[int, Fused]:
    """By the place of its first node in the body: what runs as one."""
    readers: dict[int, int] = {body.result: 1}
    for node in body.nodes:
        inside = (value for inner in node.bodies.values() for value in inner.captures)
        for value in (*(v for values in node.inputs.values() for v in values), *inside):
            readers[value] = readers.get(value, 0) + 1
    found: dict[int, Fused] = {}
    taken = 0
    for at in range(len(body.nodes)):
        for verbs, run in RULES:
            nodes = body.nodes[at : at + len(verbs)]
            inner = [*map(last, nodes[:1]), *nodes[1:]]
            if at >= taken and tuple(node.verb for node in inner) == verbs and _chain(nodes, inner, readers, types):
                found[at] = Fused(nodes, run)
                taken = at + len(nodes)
                break
    return found


def _chain(nodes: list[Node], inner: list[Node], readers: dict[int, int], types: dict[int, Wire | None]) -> bool:
    """Each is an op on one wire a port, its main input is what the one before made, and nobody else reads that.

    What else they read has a number for each of the main input's: a gate may also be one vector for all tokens.
    """
    inside = {value for node in nodes for value in node.outputs}
    read = [types[v] for node in inner for values in node.inputs.values() for v in values if v not in inside]
    if len({wire and (wire.kind, wire.features) for wire in read}) > 1 or nodes[0].split:
        return False
    for at, node in enumerate(inner):
        if node.kind != "op" or any(len(values) != 1 for values in node.inputs.values()):
            return False
        if node.split and at + 1 < len(inner):
            return False
        if isinstance(node.op, Gate) and node.op.activation not in ACTIVATIONS:
            return False
        if isinstance(node.op, HeadNorm) and (node.type is None or node.type.features > WIDTH * node.op.heads):
            return False
    for before, node in pairwise(nodes):
        made = before.outputs[0]
        main = next(iter(node.inputs.values()))
        if main != (made,) or readers.get(made) != 1:
            return False
    return True

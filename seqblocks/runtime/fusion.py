"""Find consecutive steps that one kernel can compute together, when a body is built.

A rule names verbs. It applies to consecutive steps if the main input of each is the output of the previous one, which
nothing else reads. Modules, parameter names, states and results are unchanged. The first step may also be a block that
ends in such a step; for example, the cell block of xLSTM ends in a norm, followed by the skip and gate of its layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from seqblocks.graph import BlockNode, Graph, Node, OpNode
from seqblocks.ops.gate import Gate
from seqblocks.ops.head_norm import HeadNorm
from seqblocks.ops.learnable_skip import LearnableSkip
from seqblocks.types import Wire

FusedStep = tuple[Any, dict[str, Any], list[Any]]  # a step's op, parameters and inputs
Run = Callable[[list[FusedStep]], Tensor]


class Fused(NamedTuple):
    """Consecutive steps that one call computes."""

    nodes: list[Node]
    run: Run

    def facts(self) -> dict[str, Any]:
        """Return facts about the later steps, for choosing the kernel of the first one."""
        ops = {node.verb: node.op for node in self.nodes}
        gate: Any = ops.get("gate")
        return {"skip": "learnable_skip" in ops, "gate": gate.activation if gate else None}


class Following(NamedTuple):
    """Steps that are computed together with the step before them, and the function that does so."""

    run: Run
    parts: list[FusedStep]


def _norm_skip_gate(parts: list[FusedStep]) -> Tensor:
    from seqblocks.kernels import head_norm

    (norm, p, (x,)), *others = parts
    more: dict[str, Any] = {}
    for op, own, inputs in others:
        if op.verb == "gate":
            more |= {"gate": inputs[1], "activation": op.activation}
        else:
            more |= {"skip": inputs[1], "skip_weight": own["weight"]}
    return head_norm(x, **norm.kernel_arguments(p), **more)


# Longest rules first, because the first matching rule applies.
RULES: list[tuple[tuple[str, ...], Run]] = [
    (("head_norm", "learnable_skip", "gate"), _norm_skip_gate),
    (("head_norm", "learnable_skip"), _norm_skip_gate),
    (("head_norm", "gate"), _norm_skip_gate),
]

RULE_MAX_STEPS = max(len(verbs) for verbs, _ in RULES)

# Limits of all implementations of the kernel.
ACTIVATIONS = ("none", "silu", "sigmoid")
MAX_HEAD = 4096  # features


def last(node: Node) -> Node:
    """Return the op that computes a block's result if it is the block's last step, else the node itself."""
    while isinstance(node, BlockNode) and not node.exports:
        body = node.bodies[""]
        inner = body.nodes[-1] if body.nodes else None
        if inner is None or inner.split or inner.outputs[0] != body.result:
            return node
        node = inner
    return node


def find(body: Graph, types: dict[int, Wire | None]) -> dict[int, Fused]:
    """Return groups of steps of a body that run as one, by the index of their first step."""
    readers = Counter([*body.results, *(value for node in body.nodes for value in node.reads)])
    found: dict[int, Fused] = {}
    end = 0
    for at in range(len(body.nodes)):
        if at >= end and (fused := _from(body.nodes[at : at + RULE_MAX_STEPS], readers, types)):
            found[at] = fused
            end = at + len(fused.nodes)
    return found


def _from(nodes: list[Node], readers: Counter[int], types: dict[int, Wire | None]) -> Fused | None:
    """Return the steps from the first of these nodes that run as one by the first matching rule, or None."""
    verbs = [node.verb for node in nodes]
    for (first, *others), run in RULES:
        some = nodes[: len(others) + 1]
        if others == verbs[1 : len(others) + 1] and last(nodes[0]).verb == first:
            ops = [last(nodes[0]), *some[1:]]
            if _can_fuse(some, ops, readers, types):
                return Fused(some, run)
    return None


def _can_fuse(nodes: list[Node], ops: list[Node], readers: Counter[int], types: dict[int, Wire | None]) -> bool:
    """Return whether the nodes, whose last steps are `ops`, form a chain that the kernel can compute."""
    if nodes[0].split or any(node.split for node in ops[:-1]):
        return False
    if not all(_is_supported(node) for node in ops):
        return False
    for before, node in pairwise(nodes):
        made = before.outputs[0]
        main = next(iter(node.inputs.values()))
        if main != (made,) or readers[made] != 1:
            return False
    return _read_alike(nodes, ops, types)


def _is_supported(node: Node) -> bool:
    """Return whether a node is an op with one wire per port and within the limits of the kernel."""
    if not isinstance(node, OpNode) or any(len(values) != 1 for values in node.inputs.values()):
        return False
    if isinstance(node.op, Gate):
        return node.op.activation in ACTIVATIONS and not node.op.heads
    if isinstance(node.op, LearnableSkip):
        return not node.op.heads
    if isinstance(node.op, HeadNorm):
        return node.type is not None and node.type.features <= MAX_HEAD * node.op.heads
    return True


def _read_alike(nodes: list[Node], ops: list[Node], types: dict[int, Wire | None]) -> bool:
    """Return whether all other inputs have the shape of the main one, and a stream runs all steps equally often."""
    inside = {value for node in nodes for value in node.outputs}
    wires = [types[value] for node in ops for value in node.reads if value not in inside]
    return len({wire and (wire.kind, wire.features, wire.context) for wire in wires}) <= 1

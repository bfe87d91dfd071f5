"""The sum of a residual and the norm that follows it, in one kernel on a device.

A residual ends with x + y. In most models its reader, the next residual or the final norm, begins with a norm. Such
pairs of steps are found when a body is built. On a device, the residual then returns a `Sum` whose addition is
deferred, and the norm performs it. Hooked, replaced or checkpointed modules receive the computed sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.graph import BlockNode, Graph, Node, RepeatNode, ResidualNode, is_context
from seqblocks.kernels.dispatch import saves_launches
from seqblocks.ops.norm import Norm
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import StepModule, call_child, is_hooked
from seqblocks.state import States


class Sum:
    """A deferred sum x + added, computed by `total` or `normed`."""

    __slots__ = ("_total", "added", "x")

    def __init__(self, x: Tensor, added: Tensor) -> None:
        self.x, self.added = x, added
        self._total: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, self.added.dtype)

    def normed(self, norm: Norm, p: dict[str, Any]) -> Tensor:
        """Return the norm of the sum, and store the sum, which the same kernel computes."""
        y: Tensor
        y, self._total = norm.of_sum(p, self.x, self.added)
        return y

    def total(self) -> Tensor:
        if self._total is None:
            self._total = self.x + self.added
        return self._total


def added_up(x: Any) -> Any:
    """Return the value of a `Sum`, or x itself if it is a tensor."""
    return x.total() if isinstance(x, Sum) else x


def has_fused_norm(values: dict[int, Any], call: Call) -> bool:
    """Return whether a call runs on a device with a fused kernel for sum and norm."""
    if call.phase or call.relay or not saves_launches(next(iter(values.values()))):
        return False
    return not nn.modules.module._has_any_global_hook()


class Ends:
    """The steps of a body that accept or return a `Sum`.

    leaves: by step name, whether the step may return a sum, because its only reader begins with a norm; False for
    steps that only accept one. last: the step that computes the body's result, if that may be a sum. input: whether
    the body's first input may be a sum.
    """

    def __init__(self, body: Graph, fused: set[str]) -> None:
        readers = Counter([*body.results, *(value for node in body.nodes for value in node.reads)])
        nodes = [node for node in body.nodes if not (node.split or node.name in fused or is_context(node))]
        takers = {node.reads[0]: node for node in nodes if _takes(node) and readers[node.reads[0]] == 1}
        makers = {node.outputs[0]: node for node in nodes if _makes(node)}
        self.leaves = {node.name: False for node in takers.values()}
        self.leaves |= {node.name: value in takers for value, node in makers.items()}
        self.input = body.input in takers
        final = makers.get(body.result) if readers[body.result] == 1 and not body.outputs else None
        self.last = final.name if final else None


def _takes(node: Node) -> bool:
    """Return whether a step begins with a norm of its first input and uses it nowhere else but in a residual's sum."""
    if isinstance(node.op, Norm):
        return node.op.adds_before and len(node.reads) == 1
    if not isinstance(node, ResidualNode | BlockNode | RepeatNode):
        return False
    body = next(iter(node.bodies.values()), None)
    return body is not None and body_takes(body)


def body_takes(body: Graph) -> bool:
    reading = [node for node in body.nodes if body.input in node.reads]
    if len(reading) != 1 or body.input in body.results or reading[0].reads.count(body.input) != 1:
        return False
    return reading[0].reads[0] == body.input and not is_context(reading[0]) and _takes(reading[0])


def _makes(node: Node) -> bool:
    """Return whether a step's result is the sum of a residual."""
    if isinstance(node, ResidualNode):
        return True
    bodies = [*node.bodies.values()] if isinstance(node, BlockNode | RepeatNode) else []
    return bool(bodies) and _body_makes(bodies[-1])


def _body_makes(body: Graph) -> bool:
    last = next((node for node in body.nodes if body.result in node.outputs), None)
    return last is not None and not last.split and not body.outputs and _makes(last)


def call_open(
    child: nn.Module | None, inputs: Sequence[Any], call: Call, name: str, node: Node | None, leaves: bool
) -> tuple[Any, States]:
    """Call a child whose first input may be a `Sum`. leaves: its result may be one too."""
    run = getattr(child, "_forward_open", None)
    if run is not None and isinstance(child, StepModule) and not is_hooked(child):
        done: tuple[Any, States] = run(inputs, call, leaves)
        return done
    return call_child(child, [added_up(inputs[0]), *inputs[1:]], call, name, node)

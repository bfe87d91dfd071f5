"""The module of a parallel, and merging of several results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.graph import ParallelNode
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place, StepModule, call_child, makes, take_exports
from seqblocks.state import States


@makes(ParallelNode)
class Parallel(StepModule):
    """Run branches that read the same input, and merge their results."""

    def __init__(self, node: ParallelNode, place: Place) -> None:
        super().__init__()
        self._reads, self._merge = node.reads, node.arguments.merge
        several = len(node.bodies) > 1  # token ids, which have no features to join along, pass through one branch
        self._axis = node.type.feature_axis if several and node.type else -1
        self._captures = {label: body.captures for label, body in node.bodies.items()}
        self._exports = {label: {value: value for value in body.exports} for label, body in node.bodies.items()}
        for label, body in node.bodies.items():
            self._modules[label] = Body(body, place.inside(label), "steps")

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        values = dict(zip(self._reads, tensors, strict=True))
        results, states = [], {}
        exports: dict[int, Any] = {}
        for label, captures in self._captures.items():
            inputs = [tensors[0], *(values[v] for v in captures)]
            inner = call.into(label)
            y, state = call_child(self._modules[label], inputs, inner, label)
            results.append(y)
            if self._exports[label]:
                exports |= take_exports(inner, self._exports[label], label)
            if state:
                states[label] = state
        call.exports = exports or None
        not_yet = call.phase == "context" and None in results
        return results[0] if not_yet else merged(results, self._merge, self._axis), states

    def _get_name(self) -> str:
        return "parallel"

    def extra_repr(self) -> str:
        return f"merge={self._merge}"


def merged(results: list[Tensor], how: str, axis: int = -1) -> Tensor:
    """Return the sum, mean, product or concat of results, the latter along `axis`."""
    if len(results) == 1:
        return results[0]
    if how == "concat":
        return torch.cat(results, axis)
    total = results[0]
    for y in results[1:]:
        total = total * y if how == "product" else total + y
    return total / len(results) if how == "mean" else total

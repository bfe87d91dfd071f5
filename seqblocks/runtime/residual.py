"""The module of a residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from seqblocks.graph import ResidualNode
from seqblocks.ops.dropout import drop_samples
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place, makes
from seqblocks.runtime.residual_sums import Sum, added_up
from seqblocks.state import States


@makes(ResidualNode)
class Residual(Body):
    """Compute x + steps(x). With `drop_path`, random samples skip the steps in training."""

    def __init__(self, node: ResidualNode, place: Place) -> None:
        super().__init__(node.bodies[""], place, node.verb)
        self._drop_path: float = node.arguments.drop_path
        self._draws = self._drop_path > 0
        self._drops_samples = f"{node.name} ({node.span})" if self._draws else ""

    def _forward_open(self, inputs: Sequence[Any], call: Call, leaves: bool) -> tuple[Any, States]:
        y, states = super()._forward_open(inputs, call, False)
        if self._draws and self.training:
            y = drop_samples(y, self._drop_path)
        x = added_up(inputs[0])
        return (Sum(x, y) if leaves else x + y), states

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        y, states = super()._compute(*tensors, call=call)
        if call.phase == "context" and any(each is None for each in (y, tensors[0])):
            return y, states
        if self._draws and self.training:
            y = drop_samples(y, self._drop_path)
        return tensors[0] + y, states

    def extra_repr(self) -> str:
        return f"drop_path={self._drop_path:g}" if self._drop_path else ""

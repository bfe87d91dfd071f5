"""The module of a primitive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.errors import RunError, UsageError
from seqblocks.graph import Node
from seqblocks.kernels import dispatch, products
from seqblocks.op import Op
from seqblocks.ops.norm import Norm
from seqblocks.runtime.call import Call, Carrying
from seqblocks.runtime.fusion import Following, Part
from seqblocks.runtime.modules import (
    Place,
    StepModule,
    broadcast,
    gridded,
    joining_axis,
    present,
    vectors_of,
)
from seqblocks.runtime.owner import Owner
from seqblocks.runtime.residual_sums import Sum, added_up
from seqblocks.state import States, compact


class Primitive(StepModule, Owner):
    """Hold the parameters that an op declares, and call the op."""

    def __init__(self, node: Node, place: Place) -> None:
        nn.Module.__init__(self)  # a subclass may have a class of torch among its bases
        assert node.op is not None
        self.op = node.op
        self._draws = node.op.random or not node.op.builtin  # plug-ins may, without saying so
        self._drops_samples = f"{node.name} ({node.span})" if node.op.drops_samples() else ""
        self._stateful = type(node.op).state is not Op.state  # a stateful op returns (output, state)
        self._sizes = [len(node.inputs.get(port.name, ())) for port in node.op.ports]
        self._axis = joining_axis(node) if max(self._sizes, default=0) > 1 else -1
        self._vectors = vectors_of(node)
        self._joins_prefix = graph.is_prefix_join(node)
        rate = node.wires[0].rate if node.wires and node.wires[0] else 1
        self._carrying = Carrying(place.path, node.op, node.state, rate) if node.state else None
        self._gridded = gridded(node, place)
        wires = [wire for wire in node.wires if wire]
        self._sized_input = wires[0] if wires and node.op.turns_length_into_width(*wires) else None
        self._converts_to = _plain_parameter(node) if place.exact and not node.op.mixed else None
        self._declare(node, place)
        self._kept = node.op.buffers(*node.wires)
        for name, buffer in self._kept.items():
            kind = None if buffer.dtype == "model" else getattr(torch, buffer.dtype)
            self.register_buffer(name, torch.full(buffer.shape, buffer.fill, dtype=kind))

    def reset_buffers(self) -> None:
        """Give all buffers their initial values."""
        for name, buffer in self._kept.items():
            getattr(self, name).fill_(buffer.fill)

    def parameters_by_name(self, call: Call) -> dict[str, Any]:
        """Return the op's parameters and buffers; see `Owner.parameters_by_name`."""
        found = super().parameters_by_name(call)
        return found | self._buffers if self._kept else found

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        parameters, inputs = self._arguments(tensors, call)
        if self._draws or self._kept:
            call = call.in_mode(self.training)
        if call.relay and self._carrying:
            return call.relay.run(self._carrying, parameters, call, inputs), {}
        y, state = self.checked(self.op.forward(parameters, call, *inputs), call)
        if self._sized_input:
            self._check_width(y, inputs[0])
        return y, state

    def _check_width(self, y: Tensor, x: Tensor) -> None:
        """Raise RunError if the input x has another length, or other rows and columns, than its type."""
        assert self._type
        width, expected = y.shape[1 if self._type.kind == "image" else -1], self._type.features
        if width != expected:
            raise RunError(
                f"{self._path} makes {width} features of {list(x.shape)}, not {expected}: they follow from the size of "
                f"its input, which must be {self._sized_input}"
            )

    def forward_split(self, tensors: Sequence[Tensor], call: Call, sizes: Sequence[int]) -> list[Tensor]:
        """Return the output of an op that may be a matrix, split along the features into parts of these sizes."""
        parameters, (x,) = self._arguments(tuple(tensors), call)
        if products.has_costly_split(x, [*parameters.values()], sizes):
            weight, bias, *blocks = self.op.matrix(parameters) or (None, None)
            if weight is not None and weight.dtype == x.dtype and not blocks:
                return products.split_linear(x, weight, bias, sizes)
        return [*self.op.forward(parameters, call, x).split_with_sizes(sizes, -1)]

    def _arguments(self, tensors: tuple[Tensor, ...], call: Call) -> tuple[dict[str, Any], list[Any]]:
        """Return the parameters by name, and one input per port."""
        if self._gridded and call.grid:
            call.grid.step = self._gridded
        parameters = self.parameters_by_name(call)
        if self._converts_to is not None:
            kind = parameters[self._converts_to].dtype
            tensors = tuple(x if x is None else narrowed(x, kind) for x in tensors)
        return parameters, self._at_ports(tensors, call)

    @property
    def takes_plain_tokens(self) -> bool:
        """Return whether tokens can run with nothing but their state: the op reads no grid."""
        return self._gridded is None and self._reduction is None

    def checked(self, out: Any, call: Call) -> tuple[Tensor, States]:
        """Split the result of the op's `forward` into output and state. Raises UsageError if it has none."""
        if not self._stateful:
            return out, {}
        if not isinstance(out, tuple) or len(out) != 2:
            what, found = f"{type(self.op).__module__}.{type(self.op).__qualname__}.forward", type(out).__name__
            raise UsageError(f"{what} must return (output, state), as the op declares a state, not {found}")
        y, state = out
        if call.return_state and isinstance(state, dict):
            state = {name: compact(x) for name, x in state.items()}
        return y, state

    def _at_ports(self, tensors: tuple[Tensor, ...], call: Call) -> list[Any]:
        """Return one input per port: several wires are joined, a port without wires gets None."""
        if len(tensors) < sum(self._sizes):  # they are joined already
            given = iter(tensors)
            return [next(given) if size else None for size in self._sizes]
        inputs: list[Any] = []
        at = 0
        if self._vectors:
            tensors = tuple(broadcast(tensors, self._vectors))
        for size in self._sizes:
            part = tensors[at : at + size]
            inputs.append(None if not part else part[0] if size == 1 else self._one_input(part, call))
            at += size
        return inputs

    def _one_input(self, part: Sequence[Any], call: Call) -> Tensor:
        """Join the wires of a port."""
        part = present(part, call) if self._joins_prefix else part
        return part[0] if len(part) == 1 else torch.cat([*part], self._axis)

    def _forward_open(self, inputs: Sequence[Any], call: Call, leaves: bool) -> tuple[Tensor, States]:
        """Compute the norm of a deferred sum."""
        x = inputs[0]
        if isinstance(x, Sum) and isinstance(self.op, Norm) and dispatch.saves_launches(x.x):
            parameters = self.parameters_by_name(call)
            if self._converts_to is None or x.dtype.itemsize <= parameters[self._converts_to].dtype.itemsize:
                return x.normed(self.op, parameters), {}
        return self._compute(added_up(x), *inputs[1:], call=call)

    def _forward_with(self, tensors: list[Tensor], call: Call, following: Following) -> tuple[Tensor, States]:
        """Compute this step and the following ones by one kernel."""
        first: Part = (self.op, self.parameters_by_name(call), tensors)
        return following.run([first, *following.parts]), {}

    def _get_name(self) -> str:
        return self.op.verb

    def extra_repr(self) -> str:
        given = [f"{k}={v}" for k, v in self.op.model_dump(exclude_defaults=True).items()]
        return ", ".join([*given, f"out={self._type}"])


def _plain_parameter(node: Node) -> str | None:
    """Return the name of a parameter that has the dtype of the model, or None."""
    return next((name for name, parameter in node.parameters.items() if not parameter.full_precision), None)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the output of an op with `exact` to the model's dtype if that has 16 bits; else return it unchanged."""
    return x.to(dtype) if dtype.itemsize <= 2 < x.dtype.itemsize and x.is_floating_point() else x

"""The module of a primitive.

It is a `Primitive`. A linear map is exactly torch's `nn.Linear` instead (`seqblocks/runtime/torch_modules.py`), which
has what `Primitive.__init__` sets, such as its op, but none of the methods. So what both need is a function here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.errors import RunError, UsageError
from seqblocks.graph import Node, OpNode
from seqblocks.kernels import dispatch, products
from seqblocks.kernels.dispatch.custom_op import is_seen
from seqblocks.op import Op
from seqblocks.ops.norm import Norm
from seqblocks.roles import drops_samples, turns_length_into_width
from seqblocks.runtime.call import Call, Carrying
from seqblocks.runtime.fusion import Following, FusedStep
from seqblocks.runtime.modules import (
    Place,
    StepModule,
    broadcast,
    gridded,
    is_linear,
    joining_axis,
    narrowed,
    present,
    vectors_of,
)
from seqblocks.runtime.owner import Owner
from seqblocks.runtime.residual_sums import Sum, added_up
from seqblocks.state import States, compact

SPLIT_MIN_ELEMENTS = 1 << 19  # smaller outputs of a map are split after one product


class Primitive(StepModule, Owner):
    """Hold the parameters that an op declares, and call the op."""

    def __init__(self, node: OpNode, place: Place) -> None:
        nn.Module.__init__(self)  # a subclass may have a class of torch among its bases
        self.op = node.op
        self._draws = node.op.random or not node.op.builtin  # plug-ins may, without saying so
        self._drops_samples = f"{node.name} ({node.span})" if drops_samples(node.op) else ""
        self._stateful = type(node.op).state is not Op.state  # a stateful op returns (output, state)
        self._sizes = [len(node.inputs.get(port.name, ())) for port in node.op.ports]
        self._axis = joining_axis(node) if max(self._sizes, default=0) > 1 else -1
        self._vectors = vectors_of(node)
        self._joins_prefix = graph.is_prefix_join(node)
        self._carrying = Carrying(place.path, node.op, node.state, node.state_rate) if node.state else None
        self._gridded = gridded(node, place)
        wires = [wire for wire in node.wires if wire]
        self._sized_input = wires[0] if wires and turns_length_into_width(node.op, wires) else None
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
        parameters, inputs = _arguments(self, tensors, call)
        if self._draws or self._kept:
            call = call.in_mode(self.training)
        if call.relay and self._carrying:
            return call.relay.run(self._carrying, parameters, call, inputs), {}
        y, state = checked(self, self.op.forward(parameters, call, *inputs), call)
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
        first: FusedStep = (self.op, self.parameters_by_name(call), tensors)
        return following.run([first, *following.parts]), {}

    def _get_name(self) -> str:
        return self.op.verb

    def extra_repr(self) -> str:
        given = [f"{k}={v}" for k, v in self.op.model_dump(exclude_defaults=True).items()]
        return ", ".join([*given, f"out={self._type}"])


def is_primitive(module: nn.Module | None) -> TypeGuard[Primitive]:
    """Return whether a module is that of a primitive, so that it has the attributes, but not always the methods."""
    return isinstance(module, Primitive) or is_linear(module)


def parameters_of(step: nn.Module, call: Call) -> dict[str, Any]:
    """Return the parameters of a primitive or a cell by name."""
    if isinstance(step, Owner):
        return step.parameters_by_name(call)
    return {name: getattr(step, name) for name in step._own}  # type: ignore[union-attr]


def takes_plain_tokens(step: Any) -> bool:
    """Return whether tokens of a primitive can run with nothing but their state: the op reads no grid."""
    return step._gridded is None and (is_linear(step) or step._reduction is None)


def checked(step: Any, out: Any, call: Call) -> tuple[Tensor, States]:
    """Split the result of an op's `forward` into output and state. Raises UsageError if it has none."""
    if not step._stateful:
        return out, {}
    if not isinstance(out, tuple) or len(out) != 2:
        what, found = f"{type(step.op).__module__}.{type(step.op).__qualname__}.forward", type(out).__name__
        raise UsageError(f"{what} must return (output, state), as the op declares a state, not {found}")
    y, state = out
    if call.return_state and isinstance(state, dict):
        state = {name: compact(x) for name, x in state.items()}
    return y, state


def compute(step: Any, tensors: Sequence[Tensor], call: Call, sizes: Sequence[int] | None) -> Tensor | list[Tensor]:
    """Return the output of a map without calling its module, which has no hooks.

    sizes: if given, the output is split along the features into parts of these sizes.
    """
    parameters, (x,) = _arguments(step, tuple(tensors), call)
    if not sizes:
        y: Tensor = step.op.forward(parameters, call, x)
        return y
    if _is_costly_split(x, [*parameters.values()], sizes):
        weight, bias, *blocks = step.op.matrix(parameters) or (None, None)
        if weight is not None and weight.dtype == x.dtype and not blocks:
            return split_linear(x, weight, bias, sizes)
    return [*step.op.forward(parameters, call, x).split_with_sizes(sizes, -1)]


def split_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> list[Tensor]:
    """Return `linear(x, weight, bias)` as separate products, one for each part of the output features."""
    biases: Iterable[Tensor | None] = repeat(None) if bias is None else bias.split_with_sizes(sizes)
    return [products.linear(x, rows, part) for rows, part in zip(weight.split_with_sizes(sizes), biases, strict=False)]


def _is_costly_split(x: Tensor, parameters: Sequence[Tensor], sizes: Sequence[int]) -> bool:
    """Return whether a product of x and a matrix made of parameters takes less time as one product for each part.

    In a backward pass, one product needs the gradients of its parts concatenated. Separate products need their
    gradients of x added, which takes less time if each part is at least as wide as x. In 16 bits, the sum would be
    rounded more often.
    """
    if x.dtype not in (torch.float32, torch.float64):
        return False
    if not x.is_cpu or x.numel() * sum(sizes) < SPLIT_MIN_ELEMENTS * x.shape[-1] or min(sizes) < x.shape[-1]:
        return False
    inputs = (x, *parameters)
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in inputs):
        return False
    return not (torch.compiler.is_compiling() or is_seen(inputs) or torch.is_autocast_enabled("cpu"))


def bound(step: Any, call: Call) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function of the inputs of a step without state or hooks, which reads its parameters only once."""
    parameters, own = parameters_of(step, call), call.in_mode(step.training)
    kind = None if step._converts_to is None else parameters[step._converts_to].dtype

    def run(tensors: Sequence[Tensor]) -> Tensor:
        given = tuple(tensors) if kind is None else tuple(narrowed(x, kind) for x in tensors)
        y: Tensor = step.op.forward(parameters, own, *_at_ports(step, given, own))
        return y

    return run


def _arguments(step: Any, tensors: tuple[Tensor, ...], call: Call) -> tuple[dict[str, Any], list[Any]]:
    """Return the parameters by name, and one input per port."""
    if step._gridded and call.grid:
        call.grid.step = step._gridded
    parameters = parameters_of(step, call)
    if step._converts_to is not None:
        kind = parameters[step._converts_to].dtype
        tensors = tuple(x if x is None else narrowed(x, kind) for x in tensors)
    return parameters, _at_ports(step, tensors, call)


def _at_ports(step: Any, tensors: tuple[Tensor, ...], call: Call) -> list[Any]:
    """Return one input per port: several wires are joined, a port without wires gets None."""
    if len(tensors) < sum(step._sizes):  # they are joined already
        given = iter(tensors)
        return [next(given) if size else None for size in step._sizes]
    inputs: list[Any] = []
    at = 0
    if step._vectors:
        tensors = tuple(broadcast(tensors, step._vectors))
    for size in step._sizes:
        part = tensors[at : at + size]
        inputs.append(None if not part else part[0] if size == 1 else _one_input(step, part, call))
        at += size
    return inputs


def _one_input(step: Any, part: Sequence[Any], call: Call) -> Tensor:
    """Join the wires of a port."""
    part = present(part, call) if step._joins_prefix else part
    return part[0] if len(part) == 1 else torch.cat([*part], step._axis)


def _plain_parameter(node: Node) -> str | None:
    """Return the name of a parameter that has the dtype of the model, or None."""
    return next((name for name, parameter in node.parameters.items() if not parameter.full_precision), None)



"""The module of a repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqblocks.graph import RepeatNode
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place, StepModule, call_child, makes, take_exports
from seqblocks.runtime.residual_sums import added_up, body_takes, call_open
from seqblocks.state import States


class Layer(NamedTuple):
    """What a layer reads besides the output of the layer before it, and what later layers or steps read from it.

    spent: the values that no later layer reads, and no step after the repeat.
    """

    captures: tuple[int, ...]
    exports: tuple[int, ...]
    spent: tuple[int, ...]

    def store(self, exports: Sequence[Any], values: dict[int, Any]) -> None:
        """Add the values that the layer exports, and delete those that are not read again."""
        values.update(zip(self.exports, exports, strict=True))
        for value in self.spent:
            values.pop(value, None)


def _layers(node: RepeatNode) -> list[Layer]:
    bodies = zip(node.bodies.values(), node.spent_after_layers(), strict=True)
    return [Layer(body.captures, body.exports, tuple(spent)) for body, spent in bodies]


def _taken(layer: Layer, call: Call, label: str) -> list[Any]:
    """Return the values that a layer, which was just called, exports."""
    exports = {value: value for value in layer.exports}
    return [*take_exports(call, exports, f"layer {label}").values()] if exports else []


@makes(RepeatNode)
class Repeat(StepModule):
    """Consecutive layers, indexed like an nn.ModuleList: `model.blocks[0]`."""

    _checkpointing: Callable[..., Any] | None = None  # calls the layers while gradients are recorded
    _checkpoint_stride = 1

    def __init__(self, node: RepeatNode, place: Place) -> None:
        super().__init__()
        self._reads = node.reads
        bodies = [*node.bodies.items()]
        self._layers = {label: layer for (label, _), layer in zip(bodies, _layers(node), strict=True)}
        self._open_after = {label: body_takes(after) for (label, _), (_, after) in pairwise(bodies)}
        self._exports = tuple(node.exports)
        for label, body in bodies:
            self._modules[label] = Body(body, place.inside(label), "steps")

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        values = dict(zip(self._reads, tensors, strict=True))
        x, states = tensors[0], {}
        for at, (label, layer) in enumerate(self._layers.items()):
            inputs = [x, *(values[v] for v in layer.captures)]
            if self._checkpointing and at % self._checkpoint_stride == 0 and torch.is_grad_enabled():
                x, state, *exports = self._checkpointing(self._call_layer, label, call, *inputs)
            else:
                x, state, *exports = self._call_layer(label, call, *inputs)
            layer.store(exports, values)
            if state:
                states[label] = state
        self._export(values, call)
        return x, states

    def _forward_open(self, inputs: Sequence[Any], call: Call, leaves: bool) -> tuple[Any, States]:
        if self._checkpointing and torch.is_grad_enabled():
            return self._compute(added_up(inputs[0]), *inputs[1:], call=call)
        values, x, states = dict(zip(self._reads, inputs, strict=True)), inputs[0], {}
        last = next(reversed(self._layers), None)
        for label, layer in self._layers.items():
            given, inner = [x, *(values[v] for v in layer.captures)], call.into(label)
            ending = leaves if label == last else self._open_after[label]
            x, state = call_open(self._modules[label], given, inner, label, None, ending)
            layer.store(_taken(layer, inner, label), values)
            if state:
                states[label] = state
        self._export(values, call)
        return x, states

    def _call_layer(self, label: str, call: Call, *inputs: Tensor) -> tuple[Any, ...]:
        """Return the output of a layer, its states, and the values that later layers or steps read.

        These are results too, so that a function that calls the layer sees the gradients of all.
        """
        inner = call.into(label)
        y, states = call_child(self._modules[label], inputs, inner, label)
        return y, states, *_taken(self._layers[label], inner, label)

    def _export(self, values: Mapping[int, Any], call: Call) -> None:
        if self._exports:
            call.exports = {value: values[value] for value in self._exports}

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return iter(self._modules.values())

    def __getitem__(self, index: int | slice) -> Any:
        """Return a layer, or a list of layers for a slice."""
        return list(self._modules.values())[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Replace a layer by a wrapper that passes on its arguments, or by a module that maps x."""
        self.register_module(list(self._modules)[index], layer)

    def __repr__(self) -> str:
        """Return a listing that shows equal layers once."""
        groups: dict[str, list[str]] = {}
        for label, layer in self._modules.items():
            groups.setdefault(repr(layer), []).append(label)
        lines: list[str] = []
        for text, labels in groups.items():
            head = f"({', '.join(_abridged(labels))})" + (f": {len(labels)} x" if len(labels) > 1 else ":")
            lines += f"{head} {text}".splitlines()
        return "\n".join(["repeat(", *("  " + line for line in lines), ")"])


def _abridged(labels: list[str]) -> list[str]:
    return labels if len(labels) < 5 else [*labels[:2], "…", labels[-1]]


def checkpoint_layers(model: nn.Module, function: Callable[..., Any] | None, stride: int = 1) -> int:
    """Recompute the activations of layers in the backward pass. Returns the number of outermost repeats.

    function: such as torch.utils.checkpoint.checkpoint; it calls each layer of the outermost repeats, or every second
    one with a stride of 2. None disables checkpointing. Names of modules and parameters do not change.
    """
    found = outer_repeats(model)
    for module in found:
        module._checkpointing, module._checkpoint_stride = function, stride
    return len(found)


def outer_repeats(model: nn.Module) -> list[Repeat]:
    """Return the outermost repeats of a model, in order."""
    repeats = [module for module in model.modules() if isinstance(module, Repeat)]
    inner = {id(each) for module in repeats for each in module.modules() if each is not module}
    return [module for module in repeats if id(module) not in inner]


def has_checkpointed_layers(model: nn.Module) -> bool:
    """Return whether `checkpoint_layers` is enabled for the model."""
    return any(isinstance(module, Repeat) and module._checkpointing for module in model.modules())

"""The module of a repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.graph import Node
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place, StepModule, call_child, makes
from seqblocks.runtime.residual_sums import added_up, body_takes, call_open
from seqblocks.state import States


@makes("repeat")
class Repeat(StepModule):
    """Consecutive layers, indexed like an nn.ModuleList: `model.blocks[0]`."""

    _checkpointing: Callable[..., Any] | None = None  # calls the layers while gradients are recorded
    _checkpoint_stride = 1

    def __init__(self, node: Node, place: Place) -> None:
        super().__init__()
        self._reads = node.reads
        self._captures = {label: body.captures for label, body in node.bodies.items()}
        bodies = [*node.bodies.items()]
        self._open_after = {label: body_takes(after) for (label, _), (_, after) in pairwise(bodies)}
        for label, body in bodies:
            self._modules[label] = Body(body, place.inside(label), "steps")

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        values = dict(zip(self._reads, tensors, strict=True))
        x, states = tensors[0], {}
        for at, (label, captures) in enumerate(self._captures.items()):
            inputs = [x, *(values[v] for v in captures)]
            if self._checkpointing and at % self._checkpoint_stride == 0 and torch.is_grad_enabled():
                x, state = self._checkpointing(self._call_layer, label, call, *inputs)
            else:
                x, state = self._call_layer(label, call, *inputs)
            if state:
                states[label] = state
        return x, states

    def _forward_open(self, inputs: Sequence[Any], call: Call, leaves: bool) -> tuple[Any, States]:
        if self._checkpointing and torch.is_grad_enabled():
            return self._compute(added_up(inputs[0]), *inputs[1:], call=call)
        values, x, states = dict(zip(self._reads, inputs, strict=True)), inputs[0], {}
        last = next(reversed(self._captures), None)
        for label, captures in self._captures.items():
            given = [x, *(values[v] for v in captures)]
            ending = leaves if label == last else self._open_after[label]
            x, state = call_open(self._modules[label], given, call.into(label), label, None, ending)
            if state:
                states[label] = state
        return x, states

    def _call_layer(self, label: str, call: Call, *inputs: Tensor) -> tuple[Tensor, States]:
        return call_child(self._modules[label], inputs, call.into(label), label)

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

"""The module of a repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqblocks.graph import Node
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.step import Place, StepModule, call_child, makes
from seqblocks.state import States


@makes("repeat")
class Repeat(StepModule):
    """Layers in a row, by index as in an nn.ModuleList: `model.blocks[0]`.

    checkpointing: a function such as torch.utils.checkpoint.checkpoint, by which layers are called while gradients are
    recorded, so that activations are computed again in the backward pass; `checkpoint_every`: for every so many layers.
    """

    checkpointing: Callable[..., Any] | None = None
    checkpoint_every = 1

    def __init__(self, node: Node, place: Place) -> None:
        super().__init__()
        self._reads = node.reads
        self._captures = {label: body.captures for label, body in node.bodies.items()}
        for label, body in node.bodies.items():
            self._modules[label] = Body(body, place.inside(label), "steps")

    def forward(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        values = dict(zip(self._reads, tensors, strict=True))
        x, states = tensors[0], {}
        for at, (label, captures) in enumerate(self._captures.items()):
            inputs = [x, *(values[v] for v in captures)]
            if self.checkpointing and at % self.checkpoint_every == 0 and torch.is_grad_enabled():
                x, state = self.checkpointing(self._call_layer, label, call, *inputs)
            else:
                x, state = self._call_layer(label, call, *inputs)
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
        """Return a layer, or the list of those of a slice."""
        return list(self._modules.values())[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Replace a layer: by a wrapper that passes on its arguments, or by a module that maps x."""
        self.register_module(list(self._modules)[index], layer)

    def __repr__(self) -> str:
        """List layers that are alike once."""
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

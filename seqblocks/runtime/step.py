"""What the modules of all nodes have in common: how they are made and called.

A module is called with the values that its node reads, in the order of `Node.reads`, and with the Call; it returns
(output, states). Whatever a user puts in place of a step is called as an ordinary module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.errors import RunError
from seqblocks.graph import Node, is_context
from seqblocks.kernels.dispatch.compiled import constant
from seqblocks.runtime.call import NO_VALUE, Call, Gridded
from seqblocks.runtime.grids import has_grid
from seqblocks.state import States
from seqblocks.types import Wire


class StepModule(nn.Module):
    """Base of the modules of nodes and bodies: `forward(*tensors, call=call)` returns (output, states)."""

    _type: Wire | None = None  # of the output, as the analysis has it


class Place(NamedTuple):
    """Where a module is made: the types of all values, its path in the model, parameters held by another module.

    sources: the first values of the grids of others (`grid_sources`).
    """

    types: dict[int, Wire | None]
    sources: Mapping[int, int]
    path: str = ""
    held_elsewhere: frozenset[str] = frozenset()
    streams: bool = False  # whether the model has context, and the module reads more than that
    exact: bool = False  # whether some steps of the model return float32 where it has 16 bits

    def at(self, node: Node) -> Place:
        """Return the place of a node of this body."""
        streams = self.streams and not is_context(node)
        return self._replace(path=graph.join(self.path, node.name), streams=streams)

    def inside(self, label: str) -> Place:
        """Return the place of a body of this node."""
        return self._replace(path=graph.join(self.path, label))


Maker = Callable[[Node, Place], StepModule]
M = TypeVar("M", bound=Maker)

MAKERS: dict[str, Maker] = {}


def makes(kind: graph.NodeKind) -> Callable[[M], M]:
    """Register what makes the module of a node of this kind."""

    def register(maker: M) -> M:
        MAKERS[kind] = maker
        return maker

    return register


def make(node: Node, place: Place) -> StepModule:
    """Return the module of a node."""
    module = MAKERS[node.kind](node, place)
    module._type = node.type
    return module


def gridded(node: Node, place: Place) -> Gridded | None:
    """Return which rows and columns a step reads and makes, or None."""
    made = node.outputs[0] if node.op and node.op.makes_grid() else None
    read = next((value for value in node.reads if has_grid(place.types[value])), None)
    if read is None:
        return None if made is None else Gridded(None, NO_VALUE, made)
    wire = place.types[read]
    assert wire
    return Gridded(wire.grid, place.sources.get(read, NO_VALUE), made)


def call_child(
    child: nn.Module | None, tensors: Sequence[Tensor], call: Call, name: str, node: Node | None = None
) -> tuple[Tensor, States]:
    """Call a child: one of our modules, a wrapper of one, or a user's replacement. `node` is None for layers.

    RunError where the call carries state and a replacement cannot.
    """
    if call.phase == "context" and child is not None and not _takes_call(type(child)):
        return None, {}  # type: ignore[return-value]  # a replacement computes nothing of the context
    if isinstance(child, StepModule):
        done: tuple[Tensor, States] = child(*tensors, call=call)
        return done
    assert child is not None
    if _takes_call(type(child)):
        y = child(*tensors, call=call)
        if isinstance(y, tuple):
            return y
    else:
        y = child(*_inputs(tensors, node))
    if (call.streaming or call.relay) and not (node is not None and node.op is not None and node.op.reads == "token"):
        raise RunError(f"{name}: the {type(child).__name__} that replaces it carries no state")
    return y, {}


@constant
def _takes_call(kind: type[nn.Module]) -> bool:
    """Whether a module passes on what it is called with, as wrappers do, and what torch.compile returns."""
    if kind.forward is nn.Module.forward:
        return True
    parameters = inspect.signature(kind.forward).parameters
    return "call" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _inputs(tensors: Sequence[Tensor], node: Node | None) -> Sequence[Tensor]:
    """The arguments of a replacement: of an op its inputs, each joined; of a block all; of a layer the first."""
    if node is None:
        return tensors[:1]
    if node.op is None:
        return tensors
    vectors = vectors_of(node)
    rest = iter(broadcast(tensors, vectors) if vectors else tensors)
    ports = [[next(rest) for _ in values] for values in node.inputs.values()]
    return [part[0] if len(part) == 1 else torch.cat(part, joining_axis(node)) for part in ports if part]


def joining_axis(node: Node) -> int:
    """Return the axis along which an op's inputs are joined: the one of the features."""
    assert node.op is not None
    joined = (w for w, port in zip(node.wires, node.op.ports, strict=True) if len(node.inputs.get(port.name, ())) > 1)
    return next((wire.feature_axis for wire in joined if wire), -1)


class Vectors(NamedTuple):
    """Which of an op's inputs are vectors that meet each token of the others, and one of those others."""

    places: tuple[int, ...]
    longer: int


def vectors_of(node: Node) -> Vectors | None:
    """Return the vectors that meet each token of an op's other inputs, by their places among all; None without any."""
    if not node.vectors:
        return None
    assert node.op is not None
    words = {port.name: port.length for port in node.op.ports}
    read = [(value, words[port]) for port, values in node.inputs.items() for value in values]
    longer = next(at for at, (value, word) in enumerate(read) if value not in node.vectors and not word)
    return Vectors(tuple(at for at, (value, _) in enumerate(read) if value in node.vectors), longer)


def broadcast(tensors: Sequence[Tensor], vectors: Vectors) -> list[Tensor]:
    """Return an op's inputs, each vector [batch, features] expanded to the tokens or the image that it meets."""
    wide = list(tensors)
    longer = tensors[vectors.longer]
    for at in vectors.places:
        if longer.ndim == 4:
            wide[at] = tensors[at][:, :, None, None].expand(-1, -1, *longer.shape[2:])
        else:
            wide[at] = tensors[at].unsqueeze(1).expand(-1, longer.shape[1], -1)
    return wide


def is_hooked(module: nn.Module) -> bool:
    """Whether hooks observe what a module is called with or returns, or its `forward` was replaced."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or "forward" in module.__dict__
    )

"""The interface of an exported graph: names, shapes and dtypes of inputs and outputs, and the initial state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from seqblocks._version import __version__
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import begins, has_prefix, stream_obstacle
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.state import States, declared, dtype_of
from seqblocks.state_layout import State
from seqblocks.types import Size, Wire

GRAPHS = {
    "forward": "the whole sequence",
    "step": "one token (or one frame) of a stream: the state is an input and an output",
    "chunk": "some tokens of a stream: the state is an input and an output",
    "context": "the state of a stream before its first token, from the inputs that do not stream",
}
FORMAT = 1
KEY = "seqblocks"  # the key in the metadata of a file
BATCH = "batch"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Port(NamedTuple):
    """An input or output tensor. shape: numbers, or names and expressions for open sizes."""

    name: str
    shape: tuple[Size, ...]
    dtype: str


class Part(NamedTuple):
    """A tensor of the state. Pass `output` of a call as `input` of the next.

    initial: the value of all elements before the first token, or None if the graph `context` computes it.
    """

    input: str
    output: str
    shape: tuple[Size, ...]
    dtype: str
    initial: float | None


@dataclass(frozen=True)
class Contract:
    """The interface of a graph. inputs, outputs: without the state, which comes after them in an ONNX graph.

    frame: number of tokens per call of a stream; sequence lengths must be multiples of it. limits: maximum values of
    open sizes, by name; onnxruntime does not check them.
    """

    model: str
    graph: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    state: tuple[Part, ...] = ()
    frame: int = 1
    limits: dict[str, int] = field(default_factory=dict)
    version: str = __version__
    format: int = FORMAT

    @property
    def carried(self) -> tuple[Part, ...]:
        """The parts of the state that are inputs; empty if the graph computes the initial state."""
        return () if self.graph == "context" else self.state

    @property
    def input_names(self) -> list[str]:
        """The names of all inputs, in the order of the graph."""
        return [port.name for port in self.inputs] + [part.input for part in self.carried]

    @property
    def input_shapes(self) -> list[tuple[Size, ...]]:
        """The shapes of all inputs, in the order of the graph."""
        return [port.shape for port in self.inputs] + [part.shape for part in self.carried]

    @property
    def output_names(self) -> list[str]:
        """The names of all outputs, in the order of the graph."""
        own = [port.name for port in self.outputs]
        return own + [part.input if self.graph == "context" else part.output for part in self.state]

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of all outputs."""
        return {port.dtype for port in self.outputs} | {part.dtype for part in self.state}

    def as_data(self) -> dict[str, Any]:
        """Return the contract as data for JSON."""
        data = asdict(self)
        for key in ("inputs", "outputs", "state"):
            data[key] = [item._asdict() for item in data[key]]
        return data

    def as_json(self) -> str:
        """Return the contract as one line of JSON, stored in the metadata of a file under the key `seqblocks`."""
        return json.dumps(self.as_data())


def interface(model: SequenceModel, graph: str, sizes: dict[str, int]) -> Contract:
    """Return the contract of a graph, whose outputs have no shapes yet.

    sizes: the fixed sizes, by name (batch, seq, …). Raises UsageError for an unknown graph, RunError if the model
    cannot stream.
    """
    _check_graph(model, graph)
    wires = model.spec.inputs or {"input": model.spec.input}
    first, *others = wires.items()
    kind = _dtype(model)
    chosen = dict(others) if graph == "context" else dict(wires) if graph == "forward" else dict([first])
    axes = {name: _axes(model, wire, graph) for name, wire in chosen.items()}
    inputs = [
        Port(name, _fixed(axes[name], sizes), "int64" if wire.kind == "tokens" else _name(kind))
        for name, wire in chosen.items()
    ]
    found = {} if graph == "context" else dict(model.spec.outputs) or {"output": model.spec.output}
    outputs = [Port(name, (), _name(kind)) for name in found]
    state = () if graph == "forward" else tuple(_parts(declared(model.graph), kind, sizes))
    return Contract(model.spec.name, graph, tuple(inputs), tuple(outputs), state, model.frame_size)


def _check_graph(model: SequenceModel, graph: str) -> None:
    if not isinstance(graph, str) or graph not in GRAPHS:
        raise UsageError(f"there is no graph {graph!r}; use {listing(GRAPHS)}")
    obstacle = stream_obstacle(model.spec) if graph != "forward" else None
    if obstacle:
        raise RunError(f"{' cannot stream: '.join(obstacle)}. Export its graph `forward`")
    if graph != "forward" and (has_prefix(model.graph) or (begins(model.graph) and not model.graph.ports)):
        what = f"a stream of {model.spec.name} begins with learned tokens, which an exported graph cannot read first"
        raise RunError(f"{what}. Export its graph `forward`")
    if graph == "context" and not model.graph.ports:
        what = f"{model.spec.name} has no graph `context`: its only input is the one that streams"
        raise UsageError(f"{what}. Fill its first state as the contract of `step` describes")


def _axes(model: SequenceModel, wire: Wire, graph: str) -> tuple[Size, ...]:
    """Return the axes of an input. The graph `step` reads one token, or one frame, of the streaming input."""
    axes = wire.axes
    if graph == "step" and wire.kind in ("tokens", "sequence"):
        return (*axes[:1], *([model.frame_size] if model.takes_frames else []), *axes[2:])
    if graph == "chunk" and isinstance(wire.length, int):
        return (*axes[:1], "seq", *axes[2:])
    return axes


def _fixed(axes: tuple[Size, ...], sizes: dict[str, int]) -> tuple[Size, ...]:
    return tuple(sizes.get(axis, axis) if isinstance(axis, str) else axis for axis in axes)


def _parts(tree: States, kind: torch.dtype, sizes: dict[str, int], path: str = "") -> Iterator[Part]:
    for name, item in tree.items():
        if isinstance(item, State):
            shape: tuple[Size, ...] = (BATCH, *item.shape)
            if item.length:  # the first axis is the length of a context, which is open
                shape = (BATCH, item.length, *item.shape[1:])
            initial = None if item.context else item.fill
            dtype = _name(dtype_of(item, kind))
            yield Part(f"state{path}.{name}", f"next_state{path}.{name}", _fixed(shape, sizes), dtype, initial)
        else:
            yield from _parts(item, kind, sizes, f"{path}.{name}")


def _dtype(model: SequenceModel) -> torch.dtype:
    """Return the dtype that the model was built in. Some parameters of a half-precision model are float32."""
    kinds = [x.dtype for x in (*model.parameters(), *model.buffers()) if x.is_floating_point()]
    return max(kinds, key=FLOATS.index, default=torch.float32)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Trace a graph of a model as a torch.export program that uses only torch's own operators.

The reference implementations of the kernels are traced: a recurrence becomes one `scan`, which works for any length.
The program has the model's signature (`forward(x)`, `step(x, state)`), with nested dicts as states.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from seqblocks.errors import RunError, SeqblocksError, UnavailableError, UsageError
from seqblocks.export.contract import BATCH, Contract, Port, interface
from seqblocks.kernels import dispatch
from seqblocks.model.random_inputs import random_context, random_input
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.shards import is_sharded
from seqblocks.state import States, declared
from seqblocks.types import Size

EXAMPLE = 3  # sequences of an example if the batch size is open
FRAMES = 8  # frames of an example if the length is open
MAX_LENGTH = 10**9  # sequences or tokens


class Exported(NamedTuple):
    """A program and its interface."""

    program: ExportedProgram
    contract: Contract


class Graph(nn.Module):
    """A module that calls a model as one of its graphs does."""

    def __init__(self, model: SequenceModel, graph: str) -> None:
        super().__init__()
        self.model, self.graph = model, graph

    def forward(self, x: Any, state: States | None = None) -> Any:
        """Run the graph. x: the input, or named inputs for `forward` and `context` if the spec names them."""
        if self.graph == "context":
            return self.model.init_state(next(iter(x.values())).shape[0], **x)
        if self.graph == "forward":
            return self.model(**x) if isinstance(x, dict) else self.model(x)
        if self.graph == "step":
            y, new = self.model.step(x, state)
        else:
            y, new = self.model(x, state=state, return_state=True)
        return y, ordered(declared(self.model.graph), new)


def ordered(declarations: States, state: States) -> States:
    """Return a state in the order of its declarations, as in the contract."""
    return {
        name: ordered(item, state[name]) if isinstance(item, dict) else state[name]
        for name, item in declarations.items()
    }


def trace(
    model: SequenceModel, graph: str = "forward", *, batch: int | None = None, length: int | None = None
) -> Exported:
    """Return a graph of a model, see GRAPHS, as a program of torch.export with its contract.

    It uses only torch's own operators, so it can be saved and runs without seqblocks.

    batch, length: fixed numbers of sequences and tokens per call; by default, any number. A length fixed by the spec
    stays fixed. The model is traced in eval mode, without gradients.

    Raises RunError if the model cannot stream or a step, which is named, cannot be traced; UsageError for invalid
    arguments, UnavailableError for a call that does not fit in memory.
    """
    program, contract = captured(model, graph, batch, length)
    with quiet():
        return Exported(program.run_decompositions({}), contract)  # decomposes autocast contexts


def captured(model: SequenceModel, graph: str, batch: int | None, length: int | None) -> Exported:
    """Trace like `trace`, but do not decompose composite operators."""
    contract = interface(_checked(model), graph, _sizes(model, graph, batch, length))
    _check_memory(contract)
    with explained_memory():
        arguments = example(model, contract)
    axes = _open_axes(contract, arguments)
    with evaluating(model), quiet():
        try:
            program = torch.export.export(Graph(model, graph), arguments, dynamic_shapes=axes, strict=False)
        except SeqblocksError:
            raise
        except Exception as error:
            raise RunError(_explained(model, graph, error)) from error
    return Exported(program, _with_shapes(contract, program))


@contextlib.contextmanager
def evaluating(model: SequenceModel, backend: str = "reference") -> Iterator[None]:
    """Run the model in eval mode, without gradients, and with this backend inside the context."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), dispatch.use_backend(backend):
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def explained_memory() -> Iterator[None]:
    """Convert torch's errors for a lack of memory to UnavailableError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise UnavailableError("a call of this size needs more memory: pass a smaller batch or length") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's exporters and disable gradients inside the context."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch._export", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def example(model: SequenceModel, contract: Contract, batch: int = 0, frames: int = FRAMES, seed: int = 0) -> Any:
    """Return example arguments of a graph: inputs (x, or by name), and a state if the graph takes one.

    batch, frames: sizes to use where the contract leaves them open.
    """
    first = next(iter(contract.inputs), None)
    sizes = [port.shape[0] for port in contract.inputs if isinstance(port.shape[0], int)]
    batch = sizes[0] if sizes else batch or EXAMPLE
    tokens = model.frame_size * (1 if contract.graph == "step" else frames)
    if first and contract.graph != "step" and len(first.shape) > 1 and isinstance(first.shape[1], int):
        tokens = first.shape[1]
    context = {name: x.detach() for name, x in random_context(model, batch, seed, tokens).items()}
    if contract.graph == "context":
        return (context,)
    assert first is not None
    x = random_input(model, batch, tokens, seed).detach()
    if contract.graph == "forward":
        return ({first.name: x} | context,) if model.spec.inputs else (x,)
    if contract.graph == "step" and not model.takes_frames:
        x = x.squeeze(1)
    with torch.no_grad():
        state = ordered(declared(model.graph), model.init_state(batch, **context))
    return x, state


def _checked(model: Any) -> SequenceModel:
    if not isinstance(model, SequenceModel):
        raise UsageError(f"export needs a model from seqblocks.build, not {type(model).__name__}")
    if model.tensor_shards or any(is_sharded(p) for p in model.parameters()):
        raise UsageError("the model is split over several ranks: save it, and export the result of seqblocks.load")
    if model.some_tensor().is_meta:
        raise UsageError("the model is on the meta device, which holds no weights: build it on the CPU")
    return model


def _sizes(model: SequenceModel, graph: str, batch: int | None, length: int | None) -> dict[str, int]:
    """Return the sizes that the caller fixes, by their names in the spec."""
    for name, size in (("batch", batch), ("length", length)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_LENGTH):
            raise UsageError(f"{name} must be a whole number of at least 1 and at most 10^9, or None, not {size!r}")
    sizes = {} if batch is None else {BATCH: batch}
    if length is None:
        return sizes
    wire = model.spec.input
    if graph in ("step", "context") or wire.kind in ("image", "vector"):
        raise UsageError("`length` applies only to the graphs `forward` and `chunk`, with an input of tokens")
    if graph == "forward" and isinstance(wire.length, int) and wire.length != length:
        raise UsageError(f"the spec fixes the length at {wire.length}; it cannot be {length}")
    if length % model.frame_size:
        raise UsageError(f"the model streams {model.frame_size} tokens at a time, not a length of {length}")
    return {**sizes, wire.length if isinstance(wire.length, str) else "seq": length}


def _check_memory(contract: Contract) -> None:
    """Raise UnavailableError if the inputs of a call do not fit in memory, before the machine starts to swap."""
    if not hasattr(os, "sysconf"):
        return
    kinds = [port.dtype for port in contract.inputs] + [part.dtype for part in contract.carried]
    shapes = [[size if isinstance(size, int) else FRAMES for size in shape] for shape in contract.input_shapes]
    need = sum(math.prod(shape) * getattr(torch, kind).itemsize for shape, kind in zip(shapes, kinds, strict=True))
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > have:
        what = f"the inputs of one call take {need / 1e9:,.0f} GB and this machine has {have / 1e9:,.0f} GB"
        raise UnavailableError(f"{what}: pass a smaller batch or length")


def _open_axes(contract: Contract, arguments: Any) -> Any:
    """Return which axes of a call's arguments are open, in the structure of the arguments."""
    _, spec = pytree.tree_flatten(arguments)
    shapes = contract.input_shapes
    axes = [{at: Dim.DYNAMIC for at, size in enumerate(shape) if isinstance(size, str)} for shape in shapes]
    return pytree.tree_unflatten(axes, spec)


def _explained(model: SequenceModel, graph: str, error: Exception) -> str:
    """Return a message for an exception of torch's exporter."""
    where = place_in_trace(model, error) or "the model"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    fixed = re.search(r"marked (L\S+) as dynamic but your code specialized it to be a constant \((\d+)\)", str(error))
    if fixed:
        lines = [f"a step fixes {fixed[1].removeprefix('L')} at {fixed[2]}: pass `length` or `batch`"]
    return f"{where} cannot be exported (graph {graph}): {lines[0]}"


def place_in_trace(model: SequenceModel, error: BaseException | None) -> str | None:
    """Return the path of the innermost step that was running when an error was raised, or None."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found = None
    while error is not None:
        at = error.__traceback__
        while at is not None:
            found = names.get(id(at.tb_frame.f_locals.get("self")), found)
            at = at.tb_next
        error = error.__cause__
    return found


def _with_shapes(contract: Contract, program: ExportedProgram) -> Contract:
    """Fill in the traced shapes; each open size is named after the first input that has it."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    ins = [values[name] for name in program.graph_signature.user_inputs]
    outs = [values[name] for name in program.graph_signature.user_outputs]
    names: dict[str, str] = {}
    for given, x in zip(contract.input_shapes, ins, strict=True):
        for size, found in zip(given, x.shape, strict=True):
            if isinstance(size, str):
                names.setdefault(str(found), size)

    def shape(x: Tensor) -> tuple[Size, ...]:
        return tuple(size if isinstance(size, int) else _renamed(size, names) for size in x.shape)

    inputs = [Port(port.name, shape(x), port.dtype) for port, x in zip(contract.inputs, ins, strict=False)]
    outputs = [
        Port(port.name, shape(x), str(x.dtype).removeprefix("torch."))
        for port, x in zip(contract.outputs, outs, strict=False)
    ]
    ranges = {names.get(str(symbol)): found.upper for symbol, found in program.range_constraints.items()}
    limits = {name: int(most) for name, most in ranges.items() if name and most.is_Integer}
    return replace(contract, inputs=tuple(inputs), outputs=tuple(outputs), limits=limits)


def _renamed(size: torch.SymInt, names: dict[str, str]) -> str:
    """Return a size derived from input sizes, as an expression of their names."""
    return re.sub(r"[a-z]+\d+", lambda found: names.get(found[0], found[0]), str(size))

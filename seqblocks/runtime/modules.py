"""Base of the modules of all nodes: how they are built and called.

A module takes the values that its node reads, in the order of `Node.reads`, and returns its output. Within a model it
is also passed the Call, into which it puts its states. A user's replacement for a step is called as an ordinary module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.errors import RunError
from seqblocks.graph import Node, OpNode, is_context, is_prefix_join
from seqblocks.kernels.dispatch.compiled import constant
from seqblocks.roles import joins_tokens, makes_grid
from seqblocks.runtime.call import NO_VALUE, Call, Grid, Gridded
from seqblocks.runtime.grids import has_grid
from seqblocks.state import States
from seqblocks.types import Wire


class Assignments:
    """What identifies the latest assignment to `op`, `forward` or the class of a module: a new object for each."""

    latest = object()


class StepModule(nn.Module):
    """Base of the modules of nodes and bodies.

    `forward(*tensors)` returns the output, also without a Call: then the step begins with no state, and its tokens are
    one sequence. Subclasses define `_compute(*tensors, call=call)`, which returns (output, states).
    """

    _type: Wire | None = None  # type of the output, from the analysis
    _draws = False  # whether it draws random numbers while it is in training mode, which may differ from the model's
    _drops_samples = ""  # if it drops whole samples then: the name and position of its step
    _arity = 1  # number of tensors that it reads
    _takes_wires = False  # whether it takes the wires of a port one by one, not joined

    def forward(self, *tensors: Tensor, call: Call | None = None, **others: Any) -> Any:
        if call is None or others:
            call = alone(self, tensors, others)
        y, call.made = self._compute(*tensors, call=call)
        return y

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Any, States]:
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("op", "forward", "__class__"):
            Assignments.latest = object()


class Place(NamedTuple):
    """The context in which a module is built: types of all values, path in the model, parameters in other modules.

    sources: for each value with a grid, the value that the grid comes from (`grid_sources`).
    """

    types: dict[int, Wire | None]
    sources: Mapping[int, int]
    path: str = ""
    held_elsewhere: frozenset[str] = frozenset()
    streams: bool = False  # whether the model has context, and the module reads more than the context
    exact: bool = False  # whether some steps of a 16-bit model return float32

    def at(self, node: Node) -> Place:
        """Return the place of a node of this body."""
        streams = self.streams and not is_context(node)
        return self._replace(path=graph.join(self.path, node.name), streams=streams)

    def inside(self, label: str) -> Place:
        """Return the place of a body of this node."""
        return self._replace(path=graph.join(self.path, label))


Maker = Callable[[Any, Place], StepModule]
M = TypeVar("M", bound=Maker)

MAKERS: dict[type[Node], Maker] = {}


def makes(cls: type[Node]) -> Callable[[M], M]:
    """Register a function that builds the module of a node of this class."""

    def register(maker: M) -> M:
        MAKERS[cls] = maker
        return maker

    return register


def make(node: Node, place: Place) -> StepModule:
    """Build the module of a node."""
    module = MAKERS[type(node)](node, place)
    module._type = node.type
    module._arity = len(node.reads) if node.op is None else sum(map(bool, node.inputs.values()))
    return module


def gridded(node: Node, place: Place) -> Gridded | None:
    """Return how a step uses rows and columns of tokens, or None if it does not."""
    made = node.outputs[0] if node.op and makes_grid(node.op) else None
    read = next((value for value in node.reads if has_grid(place.types[value])), None)
    if read is None:
        return None if made is None else Gridded(None, NO_VALUE, made)
    wire = place.types[read]
    assert wire
    return Gridded(wire.grid, place.sources.get(read, NO_VALUE), made)


def call_child(
    child: nn.Module | None, tensors: Sequence[Tensor], call: Call, name: str, node: Node | None = None
) -> tuple[Tensor, States]:
    """Call a child: a module of a node, a wrapper of one, or a user's replacement. `node` is None for layers.

    Raises RunError if the call carries state and a replacement does not support it.
    """
    assert child is not None
    takes_call = isinstance(child, StepModule) or _takes_call(child)
    if call.phase == "context" and not takes_call and any(x is None for x in tensors):
        return None, {}  # type: ignore[return-value]  # replacements run there only on a prefix
    call.made = cast("States | None", None)  # the child sets it
    joins = node is not None and node.op is not None and len(tensors) > len(node.inputs)
    if not takes_call or (joins and not getattr(child, "_takes_wires", False)):
        tensors = _inputs(tensors, node, call)  # wires that are joined are one tensor for the module
    if not takes_call:
        tensors = _for_linear(child, tensors)
    y: Any = child(*tensors, call=call) if takes_call else _replaced(child, tensors)
    if call.made is not None or is_linear(child):
        if not isinstance(y, Tensor) and call.phase != "context":
            raise RunError(f"{name}: a hook or a wrapper returned {type(y).__name__}, and a step returns a tensor")
        return y, call.made or {}
    if takes_call and isinstance(y, tuple):  # a replacement with states of its own
        return y
    if (call.streaming or call.relay) and not (node is not None and node.op is not None and node.op.reads == "token"):
        raise RunError(f"{name}: the {type(child).__name__} that replaces it carries no state")
    return y, {}


def _replaced(child: nn.Module, tensors: Sequence[Any]) -> Any:
    """Call a module that takes no Call. torch puts SyncBatchNorm in the place of `batch_norm`, with features second."""
    if isinstance(child, nn.SyncBatchNorm) and tensors[0].dim() == 3:
        return child(tensors[0].mT).mT
    return child(*tensors)


def take_exports(call: Call, exports: Mapping[int, int], name: str) -> dict[int, Any]:
    """Return the values of the child that was just called which later steps read, by their numbers here.

    exports: those numbers, with the ones inside the child. Raises RunError if a replacement does not make them.
    """
    made, call.exports = call.exports, None
    if made is None:
        if call.phase == "context":  # replacements run there only on a prefix
            return dict.fromkeys(exports)
        raise RunError(f"{name}: the module that replaces it does not make the wires that later steps read from it")
    return {here: made[inside] for here, inside in exports.items()}


def alone(module: StepModule, tensors: Sequence[Any], others: Mapping[str, Any]) -> Call:
    """Return the call of a step that a user calls by itself. Raises RunError for arguments that it does not take."""
    name = module._get_name()
    if others:
        raise RunError(f"{name} takes the tensors that its step reads, by position, and no {next(iter(others))!r}")
    if len(tensors) != module._arity or not all(isinstance(x, Tensor) for x in tensors):
        found = ", ".join(type(x).__name__ for x in tensors) or "nothing"
        count = f"{module._arity} tensor{'s' if module._arity != 1 else ''}"
        raise RunError(f"{name} takes {count}, what its step reads, not {found}")
    steps = (getattr(each, "_gridded", None) for each in module.modules())
    size = next((step.expected for step in steps if step and step.expected), None)
    return Call(module.training, grid=Grid(size))


def _takes_call(child: nn.Module) -> bool:
    """Return whether a module passes on its arguments, like wrappers and the result of torch.compile.

    Those of a step that is torch's `nn.Linear` do so too, but it takes no Call.
    """
    return not is_linear(child) and _passes_arguments(type(child).forward) and not is_linear(_first_step(child))


@constant
def _passes_arguments(forward: Callable[..., Any]) -> bool:
    return _has_argument_for_call(forward)


@cache
def _has_argument_for_call(forward: Callable[..., Any]) -> bool:
    if forward is nn.Module.forward:
        return True
    parameters = inspect.signature(forward).parameters
    return "call" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _first_step(child: nn.Module) -> nn.Module | None:
    """Return the step that a module is or wraps."""
    return next((each for each in child.modules() if isinstance(each, StepModule) or is_linear(each)), None)


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is a step that is exactly torch's `nn.Linear`."""
    return type(module) is nn.Linear and "op" in module.__dict__


def _for_linear(child: nn.Module, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs of a child, in the model's dtype if it is or wraps torch's `nn.Linear` in a 16-bit model."""
    if all(x is None or x.dtype.itemsize <= 2 for x in tensors):
        return tensors
    step = child if is_linear(child) else _first_step(child)
    name: Any = step._converts_to if step is not None and is_linear(step) else None
    if name is None:
        return tensors
    kind = getattr(step, name).dtype
    return [x if x is None else narrowed(x, kind) for x in tensors]


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the output of an op with `exact` to the model's dtype if that has 16 bits; else return it unchanged."""
    return x.to(dtype) if dtype.itemsize <= 2 < x.dtype.itemsize and x.is_floating_point() else x


def _inputs(tensors: Sequence[Tensor], node: Node | None, call: Call) -> Sequence[Tensor]:
    """Return the arguments of a replacement: an op's inputs, each joined; all inputs of a block; a layer's first."""
    if node is None:
        return tensors[:1]
    if not isinstance(node, OpNode):
        return tensors
    vectors = vectors_of(node)
    rest = iter(broadcast(tensors, vectors) if vectors else tensors)
    ports = [[next(rest) for _ in values] for values in node.inputs.values()]
    if is_prefix_join(node):
        ports = [present(part, call) for part in ports]
    return [part[0] if len(part) == 1 else torch.cat(part, joining_axis(node)) for part in ports if part]


def present(part: Sequence[Any], call: Call) -> list[Tensor]:
    """Return the wires to join at present: a stream reads those before its own tokens first, and only once."""
    return [*part[-1:]] if call.phase == "stream" else [x for x in part if x is not None]


def joining_axis(node: OpNode) -> int:
    """Return the axis along which an op's inputs are joined, that of the features or of the tokens."""
    if joins_tokens(node.op):
        return 1
    joined = (w for w, port in zip(node.wires, node.op.ports, strict=True) if len(node.inputs.get(port.name, ())) > 1)
    return next((wire.feature_axis for wire in joined if wire), -1)


class Vectors(NamedTuple):
    """Indices of an op's inputs that are vectors, applied to each token of the others, and of one of the others."""

    places: tuple[int, ...]
    longer: int


def vectors_of(node: OpNode) -> Vectors | None:
    """Return the indices of vectors that apply to each token of an op's other inputs, or None if there are none."""
    if not node.vectors:
        return None
    words = {port.name: port.length for port in node.op.ports}
    read = [(value, words[port]) for port, values in node.inputs.items() for value in values]
    longer = next(at for at, (value, word) in enumerate(read) if value not in node.vectors and not word)
    return Vectors(tuple(at for at, (value, _) in enumerate(read) if value in node.vectors), longer)


def broadcast(tensors: Sequence[Tensor], vectors: Vectors) -> list[Tensor]:
    """Return an op's inputs, with each vector [batch, features] expanded to the tokens or image it applies to."""
    wide = list(tensors)
    longer = tensors[vectors.longer]
    for at in vectors.places:
        if longer.ndim == 4:
            wide[at] = tensors[at][:, :, None, None].expand(-1, -1, *longer.shape[2:])
        else:
            wide[at] = tensors[at].unsqueeze(1).expand(-1, longer.shape[1], -1)
    return wide


def type_of(step: StepModule) -> Wire | None:
    """Return the type of a step's output, from the analysis."""
    return step._type


def may_draw(module: nn.Module) -> bool:
    """Return whether a module draws random numbers while it is in training mode."""
    return getattr(module, "_draws", False)


def draws_now(module: nn.Module) -> bool:
    """Return whether some step within a module draws random numbers in its present mode."""
    return any(each.training and may_draw(each) for each in module.modules())


def drops_samples_now(module: nn.Module) -> str:
    """Return the name and position of a step within a module that drops whole samples in its present mode, or ""."""
    found = (getattr(each, "_drops_samples", "") for each in module.modules() if each.training)
    return next(filter(None, found), "")


def take_modes(module: nn.Module, source: nn.Module) -> None:
    """Set the training mode of a module and of all within it to that of the one with the same name in another."""
    modes = {name: each.training for name, each in source.named_modules()}
    for name, each in module.named_modules():
        each.training = modes.get(name, source.training)


def take_buffers(module: nn.Module, source: nn.Module, shared: bool) -> None:
    """Give the steps of a module the buffers of those with the same names in another, or copies of them."""
    for name, _ in list(module.named_buffers()):
        path, _, leaf = name.rpartition(".")
        buffer = source.get_buffer(name)
        module.get_submodule(path).register_buffer(leaf, buffer if shared else buffer.clone())


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks on its calls or a replaced `forward`."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        or "forward" in module.__dict__
    )

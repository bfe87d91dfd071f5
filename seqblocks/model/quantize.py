"""Models with matrices in 8 bits, for inference: a quarter of the memory to read for each token."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from seqblocks import graph
from seqblocks.errors import UsageError, user_stacklevel
from seqblocks.graph import Graph, Named, RepeatNode, SeparateNode
from seqblocks.kernels.int8 import Int8Matrix
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.primitive import is_primitive
from seqblocks.runtime.torch_modules import as_primitive

MIN_ELEMENTS = 1 << 18  # elements: rounding the input takes longer than reading the rest of a smaller matrix


def quantize(model: SequenceModel, kind: str = "int8", *, smallest: int = MIN_ELEMENTS) -> SequenceModel:
    """Return a copy of a model whose large matrices are stored in 8 bits, in evaluation mode.

    Each row of a matrix has a scale of its own, in the dtype of the matrix, and so has each token that it multiplies,
    which is rounded to 8 bits; their integers are multiplied exactly. All other computation, all states and all inputs
    and outputs keep their dtypes. Quantized are the matrices of linear maps, embeddings and feed-forward networks with
    at least `smallest` elements, except those that compute gates and decays. What remains is a copy too.

    The model cannot be trained. `stream`, `step`, `generate`, `save` and `load` work as before.

    Warns (UserWarning) if no matrix is that large, so that nothing is quantized.

    Raises UsageError for another kind, a model that is not from `build`, or one that is spread over devices.
    """
    if kind != "int8":
        raise UsageError(f'kind must be "int8", not {kind!r}')
    if not isinstance(model, SequenceModel):
        raise UsageError(f"quantize needs a model from seqblocks.build, not {type(model).__name__}")
    if model.tensor_shards:
        raise UsageError("a model that is spread over devices cannot be quantized: quantize it before")
    sizes = {name: weight.numel() for name, weight in _matrices(model)}
    names = [name for name, size in sizes.items() if size >= smallest]
    if not names:
        warnings.warn(_nothing(sizes, smallest), stacklevel=user_stacklevel())
    weights = {name: model.get_parameter(name) for name in names}
    kept = {id(weight): weight for weight in weights.values()}
    with torch.inference_mode(False):  # as in `made`
        made = {at: Int8Matrix.of(weight) for at, weight in kept.items()}
        found = copy.deepcopy(model, dict(kept))  # without copies of what is replaced
    for name, weight in weights.items():
        put(found, name, made[id(weight)])
    return found.eval().requires_grad_(False)


def _nothing(sizes: dict[str, int], smallest: int) -> str:
    """Return what a warning says if nothing is quantized."""
    if not sizes:
        return "quantize changes nothing: the model has no matrix that can be stored in 8 bits"
    largest = max(sizes.values())
    return (
        f"quantize changes nothing: no matrix has {smallest:,} elements, the largest that can be stored in 8 bits has "
        f"{largest:,}; smallest={largest} stores that one, though a small matrix in 8 bits may take longer"
    )


def put(model: nn.Module, name: str, matrix: Int8Matrix) -> None:
    """Put a matrix in the place of a parameter."""
    path, _, leaf = name.rpartition(".")
    holder = as_primitive(model.get_submodule(path))
    holder._parameters.pop(leaf)
    holder.add_module(leaf, matrix)


def quantized(model: nn.Module) -> dict[str, Int8Matrix]:
    """Return the matrices of a model that are stored in 8 bits, by the name of their parameter."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: each for name, each in modules if isinstance(each, Int8Matrix)}


def check_not_quantized(model: nn.Module, function: str) -> None:
    """Raise UsageError for a model with matrices in 8 bits, which a function does not take."""
    if quantized(model):
        raise UsageError(f"{function} takes no model with matrices in 8 bits: pass the model before `quantize`")


def _matrices(model: SequenceModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices that may be quantized, as the ops declare that use them, also by `tie:` and `share:`."""
    exact: set[int] = set()
    _follow_gates(model.graph, set(), exact)
    items = list(graph.parameters(model.graph, shared=True))
    kept = {item.tied or item.name for item in items if id(item.node) in exact or not _is_matrix(item)}
    modules = dict(model.named_modules(remove_duplicate=False))
    for item in items:
        path, _, leaf = item.name.rpartition(".")
        module = modules.get(path)
        if (item.tied or item.name) in kept or not is_primitive(module) or leaf not in module.op.matrix_names:
            continue
        if isinstance(weight := module._parameters.get(leaf), nn.Parameter):
            yield item.name, weight


def _is_matrix(item: Named) -> bool:
    return item.node.op is not None and item.name.rpartition(".")[2] in item.node.op.matrix_names


def _follow_gates(body: Graph, values: set[int], exact: set[int]) -> None:
    """Add the nodes of a body that compute a gate or a decay to `exact`, by identity.

    values: those that do, to which more are added. They are followed back through steps without matrices, and into and
    out of bodies.
    """
    for node in reversed(body.nodes):
        is_exact = not values.isdisjoint(node.outputs)
        if node.op:
            if is_exact:
                exact.add(id(node))
            passes = is_exact and not node.op.matrix_names and not node.state
            ports = (port for port in node.op.ports if port.gate or (passes and not port.size_only))
            values.update(value for port in ports for value in node.inputs.get(port.name, ()))
        values.update(inside for value, inside in node.exports.items() if value in values)
        for inner in reversed(node.bodies.values()):
            values.update({inner.result} if is_exact else ())
            _follow_gates(inner, values, exact)
            if isinstance(node, RepeatNode):  # the result of the layer before it
                is_exact = inner.input in values
            passed = node.links if isinstance(node, SeparateNode) else zip(node.reads[:1], [inner.input], strict=False)
            values.update(value for value, inside in passed if inside in values)

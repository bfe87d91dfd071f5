"""Write a model as a GGUF file, which llama.cpp runs.

llama.cpp computes a fixed graph for each architecture. A model fits one of them if it computes the same as the spec
that `seqblocks.checkpoint.families` writes for the sizes of the model. Names, shapes and metadata are those that
`src/models/mamba.cpp` and `src/models/mamba2.cpp` of ggml-org/llama.cpp read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.analysis import check
from seqblocks.checkpoint.families import spec_text
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.errors import RunError, UnavailableError, UsageError, listing
from seqblocks.graph import BlockNode, Graph, ModelSpec, Node, OpNode, RepeatNode, ResidualNode, join

TYPES = ("f32", "f16", "q8_0")
ELEMENTS = {"F32": torch.float32, "F16": torch.float16, "Q8_0": torch.uint8}  # of the arrays that gguf writes
BLOCK = 32  # consecutive values of a row that share a scale in q8_0
CONTEXT = 2**20  # the state does not limit the length; llama.cpp requires a number
ARCHITECTURES = "mamba and mamba2"


class GGUFSummary(NamedTuple):
    """What a GGUF file contains: its architecture, the number of its tensors, and its size in bytes."""

    architecture: str
    tensors: int
    bytes: int


def gguf() -> Any:
    """Return the package gguf. Raises UnavailableError if it is not installed."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise UnavailableError("GGUF files need an extra: pip install 'seqblocks[gguf]'") from None
    return gguf


def write_gguf(model: ModelSpec, ours: Weights, target: Path, kind: str = "f32") -> GGUFSummary:
    """Write a model as a GGUF file without a tokenizer. One tensor at a time is in memory.

    ours: the weights under the names of the spec. kind: the type of matrices: f32, f16 or q8_0. Vectors, convolutions
    and decays are always float32; in q8_0, matrices whose rows are not divisible into blocks of 32 values are f16.

    Raises RunError with the reason if llama.cpp has no architecture for the model; UsageError for invalid arguments;
    UnavailableError without the package gguf.
    """
    if kind not in TYPES:
        raise UsageError(f"there is no type {kind!r}; use {listing(TYPES)}")
    library = gguf()
    tensors, metadata, architecture = _described(model, ours)
    if target.exists():
        raise UsageError(f"{target} exists; use a new name")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        _write(library, partial, architecture, metadata, tensors, kind)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return GGUFSummary(architecture, len(tensors), target.stat().st_size)


def _write(
    library: Any, path: Path, architecture: str, metadata: Mapping[str, int | float | str], tensors: _Tensors, kind: str
) -> None:
    writer = library.GGUFWriter(path, architecture)
    writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[kind])  # LLAMA_FTYPE of llama.h
    for key, value in metadata.items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name, value)
    stored: dict[str, Any] = {}
    for name, (shape, _) in tensors.items():
        stored[name] = library.GGMLQuantizationType[_type_of(name, shape, kind).upper()]
        if stored[name] == library.GGMLQuantizationType.Q8_0:
            shape = library.quant_shape_to_byte_shape(shape, stored[name])
        elements = torch.empty(0, dtype=ELEMENTS[stored[name].name])
        size = math.prod(shape) * elements.itemsize
        writer.add_tensor_info(name, shape, elements.numpy().dtype, size, raw_dtype=stored[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, (_, make) in tensors.items():
            writer.write_tensor_data(library.quants.quantize(make().contiguous().numpy(), stored[name]))
    finally:
        writer.close()


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type in which a tensor is stored."""
    if len(shape) == 1 or not name.endswith(".weight") or "norm" in name or "conv1d" in name:
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % BLOCK else kind


# --- what a model computes ---------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """A step of a model, with the blocks around it resolved.

    inputs, outputs: numbers of values, in the order in which they are computed. parameters: their full names.
    """

    name: str
    verb: str
    node: Node
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[int, ...]
    parameters: dict[str, str]


class _Walk:
    """List the steps of a model, with values numbered in the order of execution."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.count = 0

    def body(self, body: Graph, values: dict[int, int], prefix: str) -> int:
        """Add the steps of a body and return its result. values: the numbers of the values that it reads."""
        for node in body.nodes:
            name = join(prefix, node.name)
            inputs = tuple((port, tuple(values[at] for at in read)) for port, read in node.inputs.items())
            values.update(zip(node.outputs, self._outputs(node, inputs, values, name), strict=True))
        return values[body.result]

    def _outputs(self, node: Node, inputs: Any, values: dict[int, int], name: str) -> tuple[int, ...]:
        if node.shared or node.owner:
            raise RunError(f"{name} ({node.span}) shares the parameters of another step")
        if isinstance(node, OpNode):
            return self._add(node, inputs, name, len(node.outputs))
        if not isinstance(node, BlockNode | ResidualNode | RepeatNode):
            raise RunError(f"{name} ({node.span}) is a `{node.verb}`")
        (at,) = dict(inputs)["x"]
        if isinstance(node, BlockNode):
            return (self.body(node.bodies[""], {inside: values[value] for value, inside in node.links}, name),)
        if isinstance(node, ResidualNode):
            (inner,) = node.bodies.values()
            result = self.body(inner, values | {inner.input: at}, name)
            return self._add(node, (("x", (at, result)),), name, 1)
        for label, inner in node.bodies.items():
            at = self.body(inner, values | {inner.input: at}, join(name, label))
        return (at,)

    def _add(self, node: Node, inputs: Any, name: str, count: int) -> tuple[int, ...]:
        outputs = tuple(range(self.count + 1, self.count + 1 + count))
        self.count += count
        parameters = {own: join(name, own) for own in node.parameters}
        self.steps.append(_Step(name, _verb(node), node, inputs, outputs, parameters))
        return outputs


def _verb(node: Node) -> str:
    return node.op.verb if node.op else node.kind


def _steps(model: ModelSpec) -> list[_Step]:
    """Return the steps of a model. Raises RunError for a step that no architecture has."""
    if len(model.inputs) > 1 or len(model.graph.results) > 1 or model.input.kind != "tokens":
        raise RunError("it is not a language model with one input of tokens and one output of logits")
    walk = _Walk()
    walk.body(model.graph, {model.graph.input: 0}, "")
    return walk.steps


def _difference(ours: list[_Step], theirs: list[_Step]) -> str | None:
    """Return where two models compute different functions, or None."""
    for mine, other in zip(ours, theirs, strict=True):
        where = f"{mine.name} ({mine.node.span})"
        if mine.node.op is not None and mine.node.op != other.node.op:
            pairs = [(name, value, getattr(other.node.op, name)) for name, value in mine.node.op]
            changed = [f"{name} is {value}, not {usual}" for name, value, usual in pairs if value != usual]
            return f"{where}: {listing(changed)}"
        if mine.node.split != other.node.split:
            return f"{where}: its output is split into {list(mine.node.split)}, not {list(other.node.split)}"
        if (mine.inputs, mine.outputs) != (other.inputs, other.outputs):
            return f"{where} reads other values"
    return None


# --- architectures -----------------------------------------------------------------------------------------------


_Tensors = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]


class _Sizes(NamedTuple):
    """The sizes of a model: the config.json of transformers that describes it, and the metadata of llama.cpp."""

    config: dict[str, Any]
    metadata: dict[str, int]
    groups: int = 1


class _Architecture(NamedTuple):
    """An architecture of llama.cpp.

    layer: the verbs of a layer, each with the names of its tensors. sizes: reads the steps of the first layer.
    """

    name: str
    layer: tuple[tuple[str, dict[str, str]], ...]
    sizes: Callable[[list[_Step]], _Sizes]


def _mamba(layer: list[_Step]) -> _Sizes:
    op: Any = layer[5].node.op
    inner, rank = layer[4].node.parameters["weight"].shape
    kernel = _kernel(layer)
    return _Sizes(
        {"state_size": op.state_size, "conv_kernel": kernel, "time_step_rank": rank},
        {
            "ssm.inner_size": inner,
            "ssm.state_size": op.state_size,
            "ssm.conv_kernel": kernel,
            "ssm.time_step_rank": rank,
        },
    )


def _mamba2(layer: list[_Step]) -> _Sizes:
    op: Any = layer[6].node.op
    inner = layer[9].node.parameters["weight"].shape[1]
    heads, groups, kernel = layer[3].node.parameters["bias"].shape[0], op.heads, _kernel(layer)
    state = (layer[2].node.parameters["weight"].shape[0] - inner) // (2 * groups)
    sizes = {"state_size": state, "n_groups": groups, "num_heads": heads, "head_dim": inner // heads}
    metadata = {
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.conv_kernel": kernel,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
    }
    dim = layer[9].node.parameters["weight"].shape[0]
    return _Sizes({**sizes, "conv_kernel": kernel, "expand": inner / dim}, metadata, groups)


def _kernel(layer: list[_Step]) -> int:
    return layer[2].node.parameters["weight"].shape[-1]


CONV = {"weight": "ssm_conv1d.weight", "bias": "ssm_conv1d.bias"}
KNOWN = (
    _Architecture(
        "mamba",
        (
            ("rms_norm", {"weight": "attn_norm.weight"}),
            ("linear", {"weight": "ssm_in.weight"}),
            ("causal_conv", CONV),
            ("linear", {"weight": "ssm_x.weight"}),
            ("linear", {"weight": "ssm_dt.weight", "bias": "ssm_dt.bias"}),
            ("ssm", {"A_log": "ssm_a", "D": "ssm_d"}),
            ("linear", {"weight": "ssm_out.weight"}),
            ("residual", {}),
        ),
        _mamba,
    ),
    _Architecture(
        "mamba2",
        (
            ("rms_norm", {"weight": "attn_norm.weight"}),
            ("linear", {"weight": "ssm_in.weight"}),
            ("causal_conv", CONV),
            ("time_step", {"bias": "ssm_dt.bias"}),
            ("log_decay", {"A_log": "ssm_a"}),
            ("gate", {}),
            ("linear_attention", {}),
            ("learnable_skip", {"weight": "ssm_d"}),
            ("rms_norm", {"weight": "ssm_norm.weight"}),
            ("linear", {"weight": "ssm_out.weight"}),
            ("residual", {}),
        ),
        _mamba2,
    ),
)


def _described(model: ModelSpec, ours: Weights) -> tuple[_Tensors, dict[str, int | float | str], str]:
    """Return the tensors of a GGUF file with their shapes, its metadata, and its architecture.

    Raises RunError with the reason if llama.cpp has none for the model.
    """
    try:
        steps = _steps(model)
        architecture, depth = _architecture(steps)
        sizes, canonical = _canonical(architecture, steps, depth)
        if reason := _difference(steps, canonical):
            raise RunError(f"llama.cpp's {architecture.name} computes something else. {reason}")
        tensors = dict(_tensors(architecture, steps, ours, sizes.groups))
    except RunError as error:
        what = f"llama.cpp cannot run this model, so no GGUF file is written (known: {ARCHITECTURES}): {error}"
        raise RunError(what) from error
    features, eps = steps[0].node.parameters["weight"].shape[1], _eps(steps)
    metadata: dict[str, int | float | str] = {
        "context_length": CONTEXT,
        "embedding_length": features,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": depth,
        **sizes.metadata,
        "attention.layer_norm_rms_epsilon": eps,
        "vocab_size": model.input.features or 0,
        "tokenizer.ggml.model": "no_vocab",
    }
    return tensors, metadata, architecture.name


def _architecture(steps: list[_Step]) -> tuple[_Architecture, int]:
    """Return the architecture whose steps have the verbs of a model, and the number of its layers."""
    verbs = [step.verb for step in steps]
    for architecture in KNOWN:
        layer = [verb for verb, _ in architecture.layer]
        depth, rest = divmod(len(verbs) - 3, len(layer))
        if rest == 0 and depth > 0 and verbs == ["embed", *layer * depth, "rms_norm", "unembed"]:
            return architecture, depth
    raise RunError(f"no architecture has its steps, which are {listing(dict.fromkeys(verbs))}")


def _canonical(architecture: _Architecture, steps: list[_Step], depth: int) -> tuple[_Sizes, list[_Step]]:
    """Return the sizes of a model, and the steps of the model with these sizes that llama.cpp computes."""
    sizes = architecture.sizes(steps[1 : 1 + len(architecture.layer)])
    vocabulary, features = steps[0].node.parameters["weight"].shape
    if architecture.name == "mamba" and sizes.metadata["ssm.inner_size"] != 2 * features:
        raise RunError(f"llama.cpp's mamba has {2 * features} inner features at width {features}")
    config = {
        "model_type": architecture.name,
        "hidden_size": features,
        "num_hidden_layers": depth,
        "vocab_size": vocabulary,
        "layer_norm_epsilon": _eps(steps),
        "tie_word_embeddings": bool(steps[-1].node.ties),
        **sizes.config,
    }
    try:
        return sizes, _steps(check.require_model(*check.load_text(spec_text(config), f"<{architecture.name}>")))
    except UsageError as error:
        raise RunError(str(error)) from error


def _eps(steps: list[_Step]) -> float:
    op: Any = steps[1].node.op
    return float(op.eps)


def _tensors(
    architecture: _Architecture, steps: list[_Step], ours: Weights, groups: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], Callable[[], Tensor]]]]:
    """Yield the name, the shape and a function for the values of each tensor."""
    names: list[tuple[str, str]] = [(steps[0].parameters["weight"], "token_embd.weight")]
    size = len(architecture.layer)
    for at, step in enumerate(steps[1:-2]):
        layer, position = divmod(at, size)
        tensors = architecture.layer[position][1]
        names += [(own, f"blk.{layer}.{tensors[key]}") for key, own in step.parameters.items()]
    names.append((steps[-2].parameters["weight"], "output_norm.weight"))
    output = steps[-1]
    if not output.node.ties:
        names.append((output.parameters["weight"], "output.weight"))
    elif set(output.node.ties.values()) != {steps[0].parameters["weight"]}:
        raise RunError(f"{output.name} is tied to {listing(output.node.ties.values())}, not to the embedding")
    for own, name in names:
        if own not in ours.headers:
            raise RunError(f"{own} is tied to another parameter")
        change = _changed(name, architecture.name == "mamba2", groups)
        shape = tuple(change(torch.empty(ours.headers[own].shape, device="meta")).shape)
        yield name, (shape, lambda own=own, change=change: change(ours.read(own).float()))  # type: ignore[misc]


def _changed(name: str, second: bool, groups: int) -> Callable[[Tensor], Tensor]:
    """Return the function that computes a tensor of llama.cpp from our parameter."""
    if name.endswith("ssm_conv1d.weight"):
        return lambda x: x.squeeze(1)
    if name.endswith("ssm_a"):
        return lambda x: -torch.exp(x[:, None] if second else x)
    if second and name.endswith("ssm_d"):
        return lambda x: x[:, None]
    if name.endswith("ssm_norm.weight"):
        return lambda x: x.reshape(groups, -1)
    return lambda x: x

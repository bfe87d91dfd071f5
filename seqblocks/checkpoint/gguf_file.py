"""Write a model as a GGUF file, which llama.cpp runs.

llama.cpp computes a fixed graph for each architecture. A model fits one of them if it computes the same as the spec
that `seqblocks.checkpoint.families` writes for the sizes of the model. `gguf_families` lists the architectures.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.analysis import check
from seqblocks.checkpoint.families import spec_text
from seqblocks.checkpoint.gguf_families import KNOWN, ORDER, Architecture, Rows, Sizes, reason
from seqblocks.checkpoint.gguf_found import CONTEXT, Metadata
from seqblocks.checkpoint.gguf_hub import described, known
from seqblocks.checkpoint.gguf_steps import Step, difference, steps_of
from seqblocks.checkpoint.gguf_table import FAMILIES
from seqblocks.checkpoint.gguf_tokenizer import add_vocabulary, read_vocabulary
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.errors import RunError, UnavailableError, UsageError, listing, unwritable
from seqblocks.graph import ModelSpec

TYPES = ("f32", "f16", "q8_0")
ELEMENTS = {"F32": torch.float32, "F16": torch.float16, "Q8_0": torch.uint8}  # of the arrays that gguf writes
MAX_MAGNITUDE = {"F16": 65504.0, "Q8_0": 127 * 65504.0}  # scales of blocks are float16
BLOCK = 32  # consecutive values of a row that share a scale in q8_0
# Tensors that are not factors of a matrix product, or that llama.cpp never stores in fewer bits: routers, and the
# matrices of low rank of RWKV, which determine its decays.
EXACT = re.compile(r"norm|conv1d|lerp|first|shortconv\.conv|ffn_gate_inp|time_mix_(decay_)?[wavg][012]")
_Tensors = dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]]


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


def write_gguf(
    model: ModelSpec, ours: Weights, target: Path, kind: str, official: Callable[[str], Weights],
    tokenizer: Path | None = None,
) -> GGUFSummary:  # fmt: skip
    """Write a model as a GGUF file. One tensor at a time is in memory.

    ours: the weights under the names of the spec. kind: the type of matrices: f32, f16 or q8_0. Vectors, convolutions
    and decays are always float32; in q8_0, matrices whose rows are not divisible into blocks of 32 values are f16.
    official: returns the weights in a layout of the spec. tokenizer: the folder of one, or None for a file without.

    Raises RunError with the reason if llama.cpp cannot run the model or the tokenizer; UsageError for invalid
    arguments; UnavailableError without the package gguf.
    """
    if kind not in TYPES:
        raise UsageError(f"there is no type {kind!r}; use {listing(TYPES)}")
    library = gguf()
    try:
        found = described(library, model, official) if known(model) else _described(model, ours)
    except RunError as error:
        names = listing([*(each.name for each in KNOWN), *FAMILIES], 40)
        what = f"llama.cpp cannot run this model, so no GGUF file is written (known: {names}): {error}"
        raise RunError(what) from error
    tensors, metadata, architecture = found
    size = tensors["token_embd.weight"][0][0]
    vocabulary = read_vocabulary(library, tokenizer, size) if tokenizer else None
    if target.exists():
        raise UsageError(f"{target} exists; use a new name")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
    except OSError as error:
        raise unwritable(target, error) from None
    try:
        writer = _begun(library, partial, architecture, metadata, kind)
        if vocabulary:
            add_vocabulary(writer, vocabulary)
        else:
            writer.add_tokenizer_model("no_vocab")
        _write(library, writer, tensors, kind)
        os.replace(partial, target)
    except OSError as error:  # NumPy gives no number for a full disk
        code = error.errno or errno.ENOSPC
        raise OSError(code, os.strerror(code), str(target)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return GGUFSummary(architecture, len(tensors), target.stat().st_size)


def _begun(library: Any, path: Path, architecture: str, metadata: Metadata, kind: str) -> Any:
    """Return the writer of a file with metadata."""
    writer = library.GGUFWriter(path, architecture)
    writer.add_file_type({"f32": 0, "f16": 1, "q8_0": 7}[kind])  # LLAMA_FTYPE of llama.h
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(f"{architecture}.{key}", value)
    return writer


def _write(library: Any, writer: Any, tensors: _Tensors, kind: str) -> None:
    """Write the metadata and the tensors of a file."""
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
            values = make().contiguous()
            _check_range(name, values, stored[name].name)
            writer.write_tensor_data(library.quants.quantize(values.numpy(), stored[name]))
    finally:
        writer.close()


def _check_range(name: str, values: Tensor, kind: str) -> None:
    """Raise RunError if a type cannot hold the values of a tensor."""
    if kind in MAX_MAGNITUDE and values.numel() and not (largest := float(values.abs().max())) <= MAX_MAGNITUDE[kind]:
        what = f"{name} has values up to {largest:g}, and {kind.lower()} holds up to {MAX_MAGNITUDE[kind]:g}"
        raise RunError(f"{what}: use f32")


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type in which a tensor is stored."""
    if len(shape) == 1 or not name.endswith(".weight") or EXACT.search(name):
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % BLOCK else kind


# --- what a file contains ------------------------------------------------------------------------------------------


def _described(model: ModelSpec, ours: Weights) -> tuple[_Tensors, Metadata, str]:
    """Return the tensors of a GGUF file with their shapes, its metadata, and its architecture.

    Raises RunError with the reason if llama.cpp has none for the model.
    """
    architecture, steps, depth = _architecture(model)
    sizes, canonical = _canonical(architecture, steps, depth)
    if changed := difference(steps, canonical):
        raise RunError(f"llama.cpp's {architecture.name} computes something else. {changed}")
    tensors = dict(_tensors(architecture, steps, ours, sizes.groups))
    metadata: Metadata = {
        "context_length": CONTEXT,
        "embedding_length": _features(steps),
        "attention.head_count": 0,
        "block_count": depth,
        **sizes.metadata,
        architecture.epsilon: _eps(steps),
        "vocab_size": model.input.features or 0,
    }
    return tensors, metadata, architecture.name


def _architecture(model: ModelSpec) -> tuple[Architecture, list[Step], int]:
    """Return the architecture whose steps have the verbs of a model, its steps, and the number of its layers."""
    try:
        steps = steps_of(model)
    except RunError as error:
        why = reason(model)
        raise RunError(f"{error}. {why}" if why else str(error)) from error
    verbs = [step.verb for step in steps]
    for architecture in KNOWN:
        first, layer, last = ([verb for verb, _ in rows] for rows in architecture[1:4])
        depth, rest = divmod(len(verbs) - len(first) - len(last), len(layer))
        if rest == 0 and depth > 0 and verbs == [*first, *layer * depth, *last]:
            return architecture, steps, depth + architecture.earlier
    why = reason(model)
    what = f"no architecture has its steps, which are {listing(dict.fromkeys(verbs))}"
    raise RunError(f"{what}. {why}" if why else what)


def _canonical(architecture: Architecture, steps: list[Step], depth: int) -> tuple[Sizes, list[Step]]:
    """Return the sizes of a model, and the steps of the model with these sizes that llama.cpp computes."""
    begin, size = len(architecture.first), len(architecture.layer)
    sizes = architecture.sizes(steps[begin : begin + size], _features(steps))
    config = {
        "model_type": architecture.name,
        "hidden_size": _features(steps),
        "num_hidden_layers": depth,
        "vocab_size": steps[0].node.parameters["weight"].shape[0],
        "tie_word_embeddings": bool(steps[-1].node.ties),
        **({"layer_norm_epsilon": _eps(steps)} if "norm_eps" not in sizes.config else {}),
        **sizes.config,
    }
    try:
        text = _formatted(sizes.text, steps, config) if sizes.text else spec_text(config)
        return sizes, steps_of(check.require_model(*check.load_text(text, f"<{architecture.name}>")))
    except UsageError as error:
        raise RunError(str(error)) from error


def _formatted(text: str, steps: list[Step], config: Mapping[str, Any]) -> str:
    return text.format(
        **config,
        dim=config["hidden_size"],
        depth=config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        eps=_eps(steps),
        tie=", tie: embed" if config["tie_word_embeddings"] else "",
    )


def _features(steps: list[Step]) -> int:
    return steps[0].node.parameters["weight"].shape[1]


def _eps(steps: list[Step]) -> float:
    op: Any = steps[1].node.op
    return float(op.eps)


def _named(architecture: Architecture, steps: list[Step]) -> Iterator[tuple[str, str]]:
    """Yield each parameter with the tensor of llama.cpp that it is, or is a part of."""
    first, layer, last = architecture[1:4]
    rows: Rows = first
    for at in range((len(steps) - len(first) - len(last)) // len(layer)):
        prefix = f"blk.{at + architecture.earlier}."
        rows += tuple((verb, {own: prefix + name for own, name in tensors.items()}) for verb, tensors in layer)
    for step, (_, tensors) in zip(steps, rows + last, strict=True):
        for own, full in step.parameters.items():
            if step is not steps[-1] or own not in step.node.ties:
                yield full, tensors[own]


def _tensors(
    architecture: Architecture, steps: list[Step], ours: Weights, groups: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], Callable[[], Tensor]]]]:
    """Yield the name, the shape and a function for the values of each tensor."""
    parts: dict[str, list[str]] = {}
    for own, name in _named(architecture, steps):
        parts.setdefault(name, []).append(own)
        if own not in ours.headers:
            raise RunError(f"{own} is tied to another parameter")
    output = steps[-1]
    if output.node.ties and set(output.node.ties.values()) != {steps[0].parameters["weight"]}:
        raise RunError(f"{output.name} is tied to {listing(output.node.ties.values())}, not to the embedding")
    parts |= {name: parts[source] for name, source in architecture.copies.items() if name not in parts}
    for name, names in parts.items():
        change = _changed(name, architecture.name, groups)
        empty = [torch.empty(ours.headers[own].shape, device="meta") for own in names]

        def make(names: list[str] = names, change: Callable[[Tensor], Tensor] = change) -> Tensor:
            return change(_joined([ours.read(own).float() for own in names]))

        yield name, (tuple(change(_joined(empty)).shape), make)


def _joined(parts: list[Tensor]) -> Tensor:
    """Stack what is one tensor in llama.cpp."""
    return parts[0] if len(parts) == 1 else torch.stack(parts)


def _changed(name: str, architecture: str, groups: int) -> Callable[[Tensor], Tensor]:
    """Return the function that computes a tensor of llama.cpp from our parameter, or our stacked parameters."""
    second = architecture == "mamba2"
    if name.endswith("time_mix_lerp_fused.weight"):
        return lambda x: x[:, None, None]
    if architecture == "rwkv6" and name.endswith("time_mix_w1.weight"):
        return lambda x: x.unflatten(0, (5, -1))[list(ORDER)].flatten(0, 1)
    if architecture == "rwkv6" and name.endswith("time_mix_w2.weight"):
        return lambda x: x[list(ORDER)]
    if name.endswith("ssm_conv1d.weight"):
        return lambda x: x.squeeze(1)
    if name.endswith("ssm_a"):
        return lambda x: -torch.exp(x[:, None] if second else x)
    if second and name.endswith("ssm_d"):
        return lambda x: x[:, None]
    if name.endswith("ssm_norm.weight"):
        return lambda x: x.reshape(groups, -1)
    return lambda x: x

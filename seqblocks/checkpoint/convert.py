"""Convert weights to other layouts, by applying the recipes of a `checkpoint:` map in reverse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.analysis.checkpoint_maps.translation import OURS, Translator, layouts
from seqblocks.checkpoint import writing
from seqblocks.checkpoint.folder import CONFIG, as_path, checked_size, dtype_of, read_model, write_model, write_weights
from seqblocks.checkpoint.gguf_file import GGUFSummary, write_gguf
from seqblocks.checkpoint.hf_config import config_text, with_origin
from seqblocks.checkpoint.official import tied_together
from seqblocks.checkpoint.pretrained import config_file, origin_of, own_config, spec_of, under_our_names
from seqblocks.checkpoint.record import RECORD, safetensors
from seqblocks.checkpoint.weight_files import Weights, weights_in
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec
from seqblocks.recipes import Extent, Name, Recipe, Shape

COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128, torch.float16: torch.complex32}


class _Slice(NamedTuple):
    """The part of an official tensor that one of our parameters provides."""

    name: str
    recipe: Recipe
    at: int  # the index of the official tensor in the recipe
    extent: Extent


def convert(
    path: str | os.PathLike[str],
    to: str,
    out: str | os.PathLike[str],
    *,
    spec: Any = None,
    set: Mapping[str, Any] | None = None,
    shard_size: int | str = "5GB",
) -> Weights:
    """Convert the weights in a folder or file to another layout, in a new folder. Returns a summary of the files.

    path: a folder written by `save`, or weights in another layout (see `from_pretrained`, also for `spec` and `set`);
    an existing `config.json` is copied, or stored as an entry of the new one. to: a layout of the spec, such as
    official or hub, or seqblocks for a folder that `load` reads. Values and dtypes are preserved exactly. A tied
    parameter is written once. At most one shard and one parameter are in memory.

    Raises RunError if the weights do not fit the spec, or if a recipe cannot be reversed because it does not determine
    the shape of an official tensor or leaves gaps in one; UsageError for invalid arguments; OSError for disk errors.
    """
    place, limit = as_path(path), checked_size(shard_size)
    safetensors()
    model, ours = _source(place, spec, set)
    if to not in (known := [OURS, *layouts(model)]):
        raise UsageError(f"there is no layout {to!r}; use {listing(known)}")
    target = writing.target_of(as_path(out), replace=False)
    found = ours if to == OURS else official_weights(model, ours, to)

    def work(folder: Path) -> None:
        if to == OURS and model.source is not None:
            write_model(folder, model, found, graph_ties(model), limit)
        else:
            write_weights(folder, found, limit)
            _write_config(place, folder / CONFIG, dtype_of(found))

    writing.write(target, work)
    return found


def to_gguf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str = "f32",
    tokenizer: str | os.PathLike[str] | None = None,
    spec: Any = None,
    set: Mapping[str, Any] | None = None,
) -> GGUFSummary:
    """Write weights as a GGUF file for llama.cpp. Returns a summary of the file.

    path, spec, set: as in `convert`. out: the file, which must not exist; folders above it are created. dtype: of the
    matrices, f32, f16 or q8_0; vectors, convolutions and decays are always float32. In q8_0, matrices whose rows are
    not divisible into blocks of 32 values are f16. tokenizer: a folder with a tokenizer.json; by default, the file has
    no tokenizer.

    Raises RunError with the reason if llama.cpp cannot run the model or the tokenizer; UsageError for invalid
    arguments; UnavailableError without the package gguf; OSError for disk errors.
    """
    model, ours = _source(as_path(path), spec, set)
    vocabulary = None if tokenizer is None else as_path(tokenizer)
    return write_gguf(
        model, ours, as_path(out), dtype, lambda layout: official_weights(model, ours, layout), vocabulary
    )


def _write_config(place: Path, target: Path, dtype: str) -> None:
    """Copy the config.json that came with the weights, or write the one that our config.json stores.

    If it gives a dtype, it is that of the weights: transformers converts them to it.
    """
    if (config := origin_of(place)) is None:
        return
    changed = {key: dtype for key in ("dtype", "torch_dtype") if config.get(key) not in (None, dtype)}
    if own_config(place) is None and not changed:
        shutil.copyfile(config_file(place), target)
    else:
        target.write_text(config_text(config | changed), encoding="utf-8")


def _source(place: Path, spec: Any, set: Mapping[str, Any] | None) -> tuple[ModelSpec, Weights]:
    """Return a spec and weights under our names."""
    if (place / RECORD).exists():
        if spec is not None:
            raise UsageError(f"{place} contains its own spec: do not pass another one")
        return read_model(place, place, set)
    weights = weights_in(place)
    model = with_origin(spec_of(place, spec, weights, set), origin_of(place))
    return model, under_our_names(place, model, weights)[0]


def graph_ties(model: ModelSpec) -> dict[str, str]:
    """Return the name of each tied parameter, with the name of the parameter that it is tied to."""
    return {item.name: item.tied for item in graph.parameters(model.graph) if item.tied}


def official_weights(model: ModelSpec, ours: Weights, layout: str) -> Weights:
    """Return our weights in another layout, computed when they are read. Raises RunError if that is impossible."""
    faults: list[str] = []
    headers: dict[str, Tensor] = {}
    slices = _slices(model, layout, faults)
    for official, some in slices.items():
        try:
            headers[official] = _header(official, some, ours.headers)
        except RunError as error:
            faults.append(str(error))
    if faults:
        count = f"and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise RunError("\n".join(filter(None, [*faults[:10], count])))
    return Weights(headers, lambda official: _assembled(slices[official], headers[official], ours), True, ours.source)


def _slices(model: ModelSpec, layout: str, faults: list[str]) -> dict[str, list[_Slice]]:
    """Return the slices of every official tensor. A parameter with alternatives is written by the first."""
    translator = Translator(layout)
    found: dict[str, list[_Slice]] = {}
    for name, items in tied_together(model).items():
        shape = next(item.parameter.shape for item in items if item.name == name)
        recipe = translator.official(model, name)[0]
        try:
            extents = recipe.extents(name, shape)
        except RunError as error:
            faults.append(f"{name} cannot be written: {error}")
            continue
        for at, (official, extent) in enumerate(zip(recipe.names, extents, strict=True)):
            found.setdefault(official, []).append(_Slice(name, recipe, at, extent))
    return found


def _header(official: str, slices: list[_Slice], headers: Mapping[str, Any]) -> Tensor:
    """Return the shape and dtype of an official tensor (on meta). Raises RunError if its slices do not form one."""
    kinds = dict.fromkeys(headers[each.name].dtype for each in slices)
    names = listing([each.name for each in slices], 4)
    if len(kinds) > 1:
        raise RunError(f"{official} combines {names}, whose dtypes differ: {listing(kinds)}")
    (kind,) = kinds
    if slices[0].extent.complex:
        if kind not in COMPLEX:
            raise RunError(f"{official} is complex, but torch has no complex dtype for {kind}: convert float32 weights")
        kind = COMPLEX[kind]
    if reason := next(_misfits(slices), None):
        raise RunError(f"{official} cannot be written from {names}: {reason}")
    return torch.empty(_shape(slices), dtype=kind, device="meta")


def _shape(slices: list[_Slice]) -> Shape:
    """Return the largest shape that a slice requires; shapes differ only where slices end at different places."""
    return max(each.extent.shape for each in slices)


def _misfits(slices: list[_Slice]) -> Iterator[str]:
    """Yield the reasons why slices do not form one tensor."""
    shares = [each.extent.share for each in slices if each.extent.share]
    shares.sort(key=lambda share: (share.start, share.stop))
    if len(shares) < len(slices):
        if len(slices) > 1:
            yield "one of them is the whole tensor"
        return
    if len({len(each.extent.shape) for each in slices}) > 1:
        yield "they require different numbers of axes"
        return
    if len({share.cut for share in shares}) > 1:
        yield "they divide it differently"
        return
    end = 0
    for share in shares:
        if share.start != end:
            yield f"they {'overlap' if share.start < end else 'leave a gap'} at {min(end, share.start)}"
        end = share.stop
    if shares[0].whole not in (None, end):
        yield f"they end at {end} of {shares[0].whole}"
    whole = _shape(slices)
    axis = shares[0].cut[1] if shares[0].cut[0] == "slice" else None
    for each in slices:
        shape = each.extent.shape
        if any(size != expected for at, (size, expected) in enumerate(zip(shape, whole, strict=True)) if at != axis):
            yield f"{each.name} requires {list(shape)}, but another requires {list(whole)}"


def _assembled(slices: list[_Slice], header: Tensor, ours: Weights) -> Tensor:
    """Return an official tensor, computed from its slices."""
    if len(slices) == 1 and isinstance(slices[0].recipe, Name):
        return ours.read(slices[0].name)
    out = torch.empty(header.shape, dtype=header.dtype, device="cpu")
    for name, recipe, at, _ in slices:
        recipe.put(name, ours.read(name), at, out)
    return out

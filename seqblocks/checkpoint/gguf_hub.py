"""Describe a GGUF file of a model with a config.json of transformers, whose tensors llama.cpp names differently.

A model is refused if its config.json describes other steps than the entries do that the graph of llama.cpp computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.checkpoint.families import ALIASES, COMPOSITE, spec_text, text_config
from seqblocks.checkpoint.families.values import renamed
from seqblocks.checkpoint.gguf_changes import Change
from seqblocks.checkpoint.gguf_found import (
    Found,
    Metadata,
    check_heads,
    divisors,
    found_in,
    metadata,
    scaling_obstacle,
)
from seqblocks.checkpoint.gguf_table import COMMON, FAMILIES, Family
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec

EXPERT_PARTS = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down",
}  # fmt: skip
Described = tuple[dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]], Metadata, str]
"""The tensors of a file with their shapes and functions for their values, its metadata, and its architecture."""


class Source(NamedTuple):
    """An official tensor that becomes a tensor of llama.cpp, or one of those stacked in it (`at`, by their numbers)."""

    source: str
    change: Change | None
    at: int = -1


def known(model: ModelSpec) -> bool:
    """Return whether a model came with a config.json of a family in the table."""
    kind = model.source and model.source.origin and model.source.origin.get("model_type")
    return kind in FAMILIES or (kind in COMPOSITE and COMPOSITE[kind].family in FAMILIES)


def described(library: Any, model: ModelSpec, official: Callable[[str], Weights]) -> Described:
    """Return the contents of a GGUF file of a known model.

    official: returns the weights in a layout. Raises RunError with the reason if llama.cpp computes another model.
    """
    origin: Any = model.source and model.source.origin
    inner = text_config(origin, origin["text_config"]) if origin["model_type"] in COMPOSITE else origin
    config = renamed(inner, ALIASES.get(inner["model_type"], {}))
    found = found_in(model, config)
    entry = FAMILIES[inner["model_type"]]
    family = entry if isinstance(entry, Family) else entry(found)
    _check_computed(model, family, config)
    check_heads(found)
    weights = official(family.layout)
    parts = _parts(library, family, found, weights, _prefix(origin["model_type"]))
    made: dict[str, tuple[tuple[int, ...], Callable[[], Tensor]]] = {}
    for name, some in parts.items():
        make = partial(_value, family, found, name, some)
        shape = make(lambda source: torch.empty(weights.headers[source].shape, device="meta")).shape
        made[name] = (tuple(shape), partial(make, lambda source: weights.read(source).float()))
    for op in found.ops("rotary"):
        if op.scaling is not None:
            head = found.config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            extra = divisors(op.scaling, op.base, op.features or head)
            made |= {name: (tuple(x.shape), partial(torch.clone, x)) for name, x in extra.items()}
    found = found._replace(shapes={name: shape for name, (shape, _) in made.items()})
    for why in _reasons(family, found):
        raise RunError(f"llama.cpp's {family.name}: {why}")
    return made, metadata(found) | family.more(found), family.name


def _check_computed(model: ModelSpec, family: Family, config: Mapping[str, Any]) -> None:
    """Raise RunError unless the entries that llama.cpp computes describe the whole model."""
    source = model.source
    assert source is not None
    changed = [name for name, _ in source.overrides if name != "cache"]
    if changed:
        raise RunError(f"{listing(changed)} of its spec has another value than its config.json says")
    read = {*COMMON.split(), *family.computes.split()}
    known = {key: value for key, value in config.items() if key in read} | dict(family.fixed)
    assert source.origin is not None
    text = partial(_text, source.origin["model_type"])
    texts = [text(known), text(known | {"tie_word_embeddings": False})]  # `spec_of` unties heads that differ
    if source.text in texts:
        return
    others = [(key, value) for key, value in config.items() if key not in read]
    wrong = [f"{key} is {value!r}" for key, value in others if text(known | {key: value}) != texts[0]]
    wrong = wrong or [f"{key} is not {value!r}" for key, value in family.fixed.items() if config.get(key, ...) != value]
    raise RunError(f"llama.cpp's {family.name} computes another model: {listing(wrong) or 'the spec differs'}")


def _text(kind: str, config: Mapping[str, Any]) -> str:
    """Return the spec of a config.json, empty if there is none. kind: its model_type, which may read more than text."""
    given = {"model_type": kind, "text_config": dict(config)} if kind in COMPOSITE else dict(config)
    try:
        return spec_text(given)
    except UsageError:
        return ""


def _prefix(kind: str) -> str:
    """Return what official names of the model start with."""
    return COMPOSITE[kind].official if kind in COMPOSITE else "model"


def _reasons(family: Family, found: Found) -> Iterator[str]:
    for op in found.ops("rotary"):
        if op.scaling is not None and not _is_released(family, op.scaling):
            yield from filter(None, [scaling_obstacle(op.scaling, family.scaling)])
        if op.features is not None and "partial_rotary_factor" not in family.computes:
            yield f"it rotates all features, not {op.features}"
    yield from family.refuse(found)


def _is_released(family: Family, scaling: Any) -> bool:
    """Return whether the positions are scaled as in all releases of a family that llama.cpp only approximates."""
    pairs = family.released.items()
    return bool(pairs) and all(getattr(scaling, name) == value for name, value in pairs)


def _parts(
    library: Any, family: Family, found: Found, weights: Weights, prefix: str
) -> dict[str, list[Source]]:  # fmt: skip
    """Return the tensors of llama.cpp with the official tensors that they are made of."""
    known = family.names or family.name
    architecture = next(key for key, name in library.MODEL_ARCH_NAMES.items() if name == known)
    names = library.TensorNameMap(architecture, len(found.nodes))
    made: dict[str, list[Source]] = {}
    for official in weights.headers:
        for name, part in _targets(names, family, re.sub(rf"^{re.escape(prefix)}\.", "model.", official)):
            made.setdefault(name, []).append(part._replace(source=official))
    if family.head and "output.weight" not in made:
        made["output.weight"] = made["token_embd.weight"]
    return {name: sorted(some, key=lambda part: part.at) for name, some in made.items()}


def _targets(names: Any, family: Family, official: str) -> Iterator[tuple[str, Source]]:
    if match := re.search(r"\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight$", official):
        layer, at, part = match.groups()
        yield f"blk.{layer}.ffn_{EXPERT_PARTS[part]}_exps.weight", Source(official, None, int(at))
        return
    matching = (entry for entry in family.pieces if re.search(entry[0], official))
    pattern, pieces = next(matching, ("^", (("", None),)))
    for new, change in pieces:
        name = re.sub(pattern, new, official)
        found = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise RunError(f"llama.cpp's {family.name} has no tensor for {official}")
        yield found, Source(official, change)


def _value(family: Family, found: Found, name: str, parts: list[Source], read: Callable[[str], Tensor]) -> Tensor:
    """Return a tensor of llama.cpp. read: returns an official tensor."""
    match = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
    layer, short = (int(match[1]), match[2]) if match else (0, name)
    each = [part.change(x, found, layer) if part.change else x for part in parts for x in (read(part.source),)]
    result = torch.stack(each) if parts[0].at >= 0 else each[0]
    for pattern, change in family.changes:
        if re.fullmatch(pattern, short):
            result = change(result, found, layer)
    return result

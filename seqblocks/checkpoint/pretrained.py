"""Build a model from published weights: a folder from the Hub, a file written by torch, or a folder of seqblocks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.analysis.checkpoint_maps.translation import OURS
from seqblocks.checkpoint.families import spec_text
from seqblocks.checkpoint.folder import CONFIG, as_path, check_not_quantized, config_spec, load
from seqblocks.checkpoint.hf_config import MODEL_TYPE, original, with_origin
from seqblocks.checkpoint.official import LeftOut, has_official_names, translated
from seqblocks.checkpoint.record import RECORD
from seqblocks.checkpoint.weight_files import Weights, read_json, weights_in
from seqblocks.checkpoint.weights import check_fit, fill
from seqblocks.errors import PartialWarning, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.model.builder import build_model
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime.arguments import checked_device
from seqblocks.runtime.initialise import draw

HEAD, EMBEDDINGS = "lm_head.weight", ("embeddings.weight", "embedding.weight", "embed_tokens.weight")


@check.names_overrides
def from_pretrained(
    path: str | os.PathLike[str],
    spec: str | os.PathLike[str] | ModelSpec | None = None,
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str | None = None,
    partial: bool = False,
    seed: int = 0,
    allow_use: check.Folders = (),
) -> SequenceModel:
    """Return a model with the weights of a folder or file written by other software.

    path: a folder with `model.safetensors` or `pytorch_model.bin` (or shards of either with their index), or one such
    file. spec: a path, the name of a bundled spec, or what `load_model` returns; its `checkpoint:` map
    names the tensors. None uses the spec that `save` or `save_pretrained` (`seqblocks.hf`) stored, or generates one
    from `config.json`. dtype: of all parameters; by default, each has the dtype of the file. set, allow_use: as in
    `build`.

    partial: tensors that do not fit are skipped with a PartialWarning; their parameters are initialised with `seed`,
    and position embeddings of an image are interpolated to its grid. Tensors are read one at a time, so that only the
    model and the tensors of one parameter are in memory.

    Raises RunError with all tensors that are missing, unused or of another shape, unless `partial`; UsageError for
    invalid files or arguments.
    """
    place, device = as_path(path), checked_device(device)
    if spec is None and (place / RECORD).exists():
        return load(place, set=set, device=device, dtype=dtype)
    weights = weights_in(place)
    found = with_origin(spec_of(place, spec, weights, set, allow_use), origin_of(place))
    ours, left_out = under_our_names(place, found, weights, partial)
    model = _model(found, ours, left_out, device, dtype, seed)
    if any(left_out):
        warnings.warn(PartialWarning(f"{path} was loaded in part\n{left_out}"), stacklevel=2)
    return model


def config_file(place: Path) -> Path:
    """Return the path of the config.json in a folder, or next to a file."""
    return (place if place.is_dir() else place.parent) / CONFIG


def origin_of(place: Path) -> dict[str, Any] | None:
    """Return the config.json that came with weights, if there is one."""
    file = config_file(place)
    return original(read_json(file)) if file.is_file() else None


def own_config(place: Path) -> dict[str, Any] | None:
    """Return the config.json of weights if it contains a spec, as `save` and `save_pretrained` write it, else None."""
    file = config_file(place)
    config = read_json(file) if file.is_file() else None
    return config if isinstance(config, dict) and config.get("model_type") == MODEL_TYPE else None


def under_our_names(place: Path, spec: ModelSpec, weights: Weights, partial: bool = False) -> tuple[Weights, LeftOut]:
    """Return weights under the names of a spec, and those that were left out.

    Weights that `save` or `save_pretrained` wrote have these names already; a `checkpoint:` map does not apply to them.
    Official weights may have been put next to their config.json. Raises RunError unless they fit, or `partial`.
    """
    check_not_quantized(place, weights.headers)
    if own_config(place) is None or has_official_names(spec, weights):
        return translated(spec, weights, partial)
    tied = {item.name for item in graph.parameters(spec.graph) if item.tied}
    ours = weights._replace(headers={name: x for name, x in weights.headers.items() if name not in tied})
    if partial:
        return translated(spec, ours, partial, OURS)
    check_fit(spec, ours.headers)
    return ours, LeftOut({}, [], {})


def spec_of(
    place: Path, spec: Any, weights: Weights, set: Mapping[str, Any] | None = None, allow_use: check.Folders = ()
) -> ModelSpec:
    """Return the given spec, the one in the config.json of the weights, or one generated from that config.json."""
    if isinstance(spec, ModelSpec):
        return spec
    if spec is not None:
        return check.load_model(spec, set, allow_use)
    if config := own_config(place):
        return config_spec(config, set)
    file = config_file(place)
    if not file.exists():
        raise UsageError(f"{place} has no {CONFIG} that describes the model. Pass its spec")
    config = read_json(file)
    if isinstance(config, dict) and _head_differs(weights):
        config = {**config, "tie_word_embeddings": False}
    return check.require_model(*check.load_text(spec_text(config), f"<{CONFIG} of {place.name}>", set=set))


def _head_differs(weights: Weights) -> bool:
    """Return whether the weights contain a head with other values than the embedding.

    transformers then ignores `tie_word_embeddings`. Some of its classes never tie the two.
    """
    embedding = next((name for name in weights.headers if name.endswith(EMBEDDINGS)), None)
    if embedding is None or HEAD not in weights.headers:
        return False
    return not torch.equal(weights.read(HEAD), weights.read(embedding))


def _model(spec: ModelSpec, ours: Weights, left_out: LeftOut, device: Any, dtype: Any, seed: int) -> SequenceModel:
    """Allocate a model and fill it; parameters that were left out are initialised with `seed`."""
    model = build_model(spec, device="meta", dtype=torch.float32 if dtype is None else dtype)
    declared = {item.name: item.parameter for item in graph.parameters(spec.graph)}
    if dtype is None:
        usual = min((header.dtype for header in ours.headers.values()), key=lambda kind: kind.itemsize, default=None)
        for name, parameter in model.named_parameters():
            kind = ours.headers[name].dtype if name in ours.headers else usual or torch.float32
            full = declared[name].full_precision and kind.itemsize < 4
            parameter.data = parameter.data.to(torch.float32 if full else kind)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name in left_out.missing:
            draw(model.get_parameter(name), name, declared[name], seed)
    fill(model, ours.headers, ours.read)
    return model

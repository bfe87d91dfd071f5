"""Saving and restoring models, and reading official checkpoints through a spec's own `checkpoint:` map."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.analysis.maps import SEVERAL, official_name
from seqblocks.errors import RunError, UnavailableError, UsageError, did_you_mean, listing
from seqblocks.runtime.builder import build_model
from seqblocks.runtime.model import SequenceModel, checked_device

FORMAT = 1

# --- our own files --------------------------------------------------------------------------------------------------


def save(model: SequenceModel, path: str | os.PathLike[str]) -> None:
    """Write weights and spec to one file, so that `restore(path)` needs nothing else.

    `.safetensors` writes that format (needs the `safetensors` extra); any other ending what torch.save makes. A tied
    parameter is written once. The file appears only when it is complete.

    RunError where the weights are no longer what the spec says (replaced or parametrized steps, ties that are broken),
    are shared out over devices, or are on meta; UsageError where the arguments are at fault.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"save writes what build made, not {type(model).__name__}")
    recipe = model.graph.recipe
    if recipe is None:
        raise UsageError("the model does not know the text it was made from, so it cannot be saved with it")
    held = _held(model)
    for item in graph.parameters(model.graph.graph):
        if item.tied and not _same(held[item.name], held[item.tied]):
            what = f"{item.name} is tied to {item.tied} in the spec, and they are two parameters with other values"
            raise RunError(f"{what}: model.tie() ties them again, to the values of {item.tied}")
    tied = {item.name for item in graph.parameters(model.graph.graph) if item.tied}
    tensors = {name: t.detach().contiguous() for name, t in held.items() if name not in tied}
    about = {
        "format": FORMAT,
        "name": recipe.name,
        "text": recipe.text,
        "overrides": dict(recipe.overrides),
        "files": dict(recipe.files),
    }
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{target} is a folder, and save writes one file")
    if target.suffix == ".safetensors":
        data = _safetensors().torch.save(tensors, {"seqblocks": json.dumps(about)})
        _write(target, lambda file: file.write(data))
    else:
        _write(target, lambda file: torch.save({"seqblocks": about, "tensors": tensors}, file))


def restore(
    path: str | os.PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    device: Any = "cpu",
    dtype: torch.dtype | str | None = None,
) -> SequenceModel:
    """The model that `save` wrote: each parameter in the dtype it had, or the model in the one that is asked for.

    `set` overrides values of its spec, over those it was built with: what owns no weights, such as dropout, drop_path
    or the window of attention. RunError where the weights no longer fit, UsageError where the file is at fault.
    """
    device = checked_device(device)
    about, tensors = _read(Path(path))
    if about.get("format") != FORMAT:
        raise UsageError(f"{os.fspath(path)} was written by another version (format {about.get('format')})")
    check.checked_overrides(set)
    given = set or {}  # applied last: what the model was built with may say the same by another name
    overrides = {key: check.yaml(text) for key, text in about["overrides"].items() if key not in given}
    file, found = check.prove(about["text"], about["name"], set={**overrides, **given}, files=about["files"])
    if found is not None:
        check.warn_of_idle(found, given)  # of the others it was told when it was built
    model = build_model(check.require_model(file, found), device="meta", dtype=dtype or torch.float32)
    if dtype is None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in tensors:  # or it is tied, or missing, which is told below
                parameter.data = parameter.data.to(tensors[name].dtype)
    model = model.to_empty(device=device)
    _copy(model, tensors)
    return model


def _write(target: Path, write: Callable[[Any], Any]) -> None:
    """Write beside the target, then rename: a full disk or an interrupt leaves the old file as it was."""
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")
    handle, name = tempfile.mkstemp(dir=target.parent or Path(), prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            with _safetensors().safe_open(str(path), framework="pt") as file:
                about = json.loads((file.metadata() or {})["seqblocks"])
                return about, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        data = torch.load(path, map_location="cpu", weights_only=True)
        return data["seqblocks"], data["tensors"]
    except UnavailableError:
        raise
    except Exception as error:
        # torch's own words are of its file format; what counts is that this is none of ours, or not all of it
        what = f"{path} was not written by seqblocks.checkpoint.save, or not to its end"
        raise UsageError(f"{what} ({type(error).__name__})") from None


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ModuleNotFoundError:
        raise UnavailableError("this file format needs an extra: pip install 'seqblocks[safetensors]'") from None
    return safetensors


def _held(model: SequenceModel, more: bool = False) -> dict[str, Tensor]:
    """A model's own tensors by the names of its spec: RunError unless they are these, plain and with numbers.

    `more`: it may have others beside them.
    """
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    wanted = {item.name: item.parameter.shape for item in graph.parameters(model.graph.graph)}
    if more:
        tensors = {name: tensors[name] for name in wanted if name in tensors}
    told = _unlike(tensors, wanted)
    if told:
        how = "merge or remove parametrizations, pruning masks and adapters, and put its own steps back"
        raise RunError(f"the model is no longer what its spec says: {told}. First {how}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(wanted[name]):
            what = f"{name} is {list(tensor.shape)}, and {list(wanted[name])} there"
            raise RunError(f"the model is no longer what its spec says: {what}")
        if type(tensor.detach()) is not Tensor:
            what = f"{name} is a {type(tensor).__name__}, and its numbers may be elsewhere too"
            raise RunError(f"{what}: gather the weights into plain tensors of a model of one device")
        if tensor.is_meta:
            raise RunError(f"{name} is on meta, where no numbers are: model.to_empty(device='cpu') makes room")
    return tensors


def _unlike(names: Iterable[str], wanted: Iterable[str]) -> str:
    """What is missing among names, and what is too much."""
    names, wanted = dict.fromkeys(names), dict.fromkeys(wanted)
    missing = [name for name in wanted if name not in names]
    spare = [name for name in names if name not in wanted]
    return "; ".join(
        f"{len(found)} {'is' if len(found) == 1 else 'are'} {what} ({listing(found, 4)})"
        for what, found in (("missing", missing), ("not known here", spare)) if found
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tied names hold the same: one parameter, or one that is equal."""
    return a is b or (a.shape == b.shape and bool((a.detach().to(b.device) == b.detach()).all()))


@torch.no_grad()
def _copy(model: SequenceModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy all weights into a model, or, with a RunError, none."""
    wanted = {item.name: item.parameter.shape for item in graph.parameters(model.graph.graph) if not item.tied}
    told = _unlike(tensors, wanted)
    if told:
        raise RunError(f"the weights are not this model's: {told}")
    held = model.state_dict(keep_vars=True)  # whose names are the spec's also where a wrapper stands between
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != tuple(shape):
            sizes = f"{list(tensors[name].shape)}, and {list(shape)} here"
            raise RunError(f"the weights are not this model's: {name} is {sizes}")
        if tensors[name].is_complex() and not held[name].is_complex():
            raise RunError(f"the weights for {name} are complex, and it is real: {{real: …}} or {{imag: …}} is a part")
    for name in wanted:
        held[name].copy_(tensors[name])
    if any(item.tied and held[item.name] is not held[item.tied] for item in graph.parameters(model.graph.graph)):
        model.tie()  # to_empty and load_state_dict part them


# --- official checkpoints -------------------------------------------------------------------------------------------


def load_official(model: SequenceModel, tensors: Any) -> None:
    """Load an official state dict through the spec's `checkpoint:` maps. Every tensor must find its place.

    Raises RunError naming what is missing, left over or of another shape, and then nothing is loaded; also where the
    model is on meta, in pieces, or no longer what its spec says. UsageError where the arguments are at fault.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"load_official fills what build made, not {type(model).__name__}")
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise UsageError(f"load_official wants the official state dict (torch.load or safetensors read it), not {kind}")
    if not any(isinstance(value, Tensor) for value in tensors.values()):
        for key, value in tensors.items():
            if isinstance(value, Mapping) and any(isinstance(inner, Tensor) for inner in value.values()):
                raise UsageError(f"the weights are one level down: load_official(model, tensors[{key!r}])")
    _held(model, more=True)
    out: dict[str, Tensor] = {}
    used: set[str] = set()
    ties: dict[str, list[graph.Named]] = {}
    for item in graph.parameters(model.graph.graph):
        ties.setdefault(item.tied or item.name, []).append(item)
    for name, items in ties.items():
        sources = {item.name: official_name(model.graph, item.name) for item in items}
        there = [own for own in sources if all(official in tensors for official in _officials(sources[own]))]
        for own in there or [name]:  # a file may hold what is tied once, by any of its names, or several times
            made = _assembled(own, sources[own], items[0].parameter.shape, tensors, used)
            if not _same(made, out.setdefault(name, made)):
                raise RunError(f"{own} is tied to {name}, and the official weights have another for it")
    spare = [name for name in tensors if name not in used]
    if spare:
        raise RunError(f"the official weights hold more than the spec maps: {listing(spare)}")
    _copy(model, out)


def _prefixed(official: str, names: list[str]) -> str | None:
    """What to do where all names have something before them, as wrappers of models leave it."""
    for prefix in dict.fromkeys(name.removesuffix(official) for name in names if name.endswith(f".{official}")):
        if all(name.startswith(prefix) for name in names):
            return f"All names there begin with '{prefix}': take it off, name.removeprefix('{prefix}')"
    return None


def _officials(source: Any) -> list[str]:
    """The official tensors of what `official_name` gives."""
    if isinstance(source, str):
        return [source]
    kind = next(iter(source))
    return list(source[kind]) if kind in SEVERAL else [source[kind]]


def _assembled(
    name: str, source: Any, shape: tuple[int, ...], tensors: Mapping[str, Tensor], used: set[str]
) -> Tensor:
    def take(official: str) -> Tensor:
        if official not in tensors:
            names = [name for name in tensors if isinstance(name, str)]
            hint = _prefixed(official, names) or did_you_mean(official, names) or ""
            raise RunError(f"the official weights have no {official}, which {name} is made from. {hint}".strip())
        if not isinstance(tensors[official], Tensor):
            raise RunError(f"{official} of the official weights is no tensor, but {type(tensors[official]).__name__}")
        if tensors[official].is_meta:
            raise RunError(f"{official} of the official weights is on meta, where no numbers are")
        used.add(official)
        return tensors[official]

    if isinstance(source, str):
        return take(source)
    kind, axis = next(iter(source)), source.get("axis", 0)
    parts = [take(official) for official in _officials(source)]
    try:
        return _made(name, kind, axis, source, shape, parts)
    except (RuntimeError, IndexError) as error:
        sizes = listing(list(part.shape) for part in parts)
        raise RunError(f"{name} {list(shape)} cannot be the {kind} of {sizes}: {error}") from error


def _made(
    name: str, kind: str, axis: int, source: dict[str, Any], shape: tuple[int, ...], parts: list[Tensor]
) -> Tensor:
    """What a recipe makes of official tensors."""
    official, whole = source[kind], parts[0]
    match kind:
        case "concat":
            return torch.cat(parts, axis)
        case "stack":
            return torch.stack(parts, axis)
        case "split":
            parts_in_all = source["parts"]
            stacked = (*shape[:axis], parts_in_all, *shape[axis:])
            joined = tuple(size * parts_in_all if at == axis else size for at, size in enumerate(shape))
            flat = (math.prod(stacked),)
            _shaped(name, official, whole, [joined, stacked, flat] if axis < len(shape) else [stacked, flat])
            return whole.reshape(stacked).select(axis, source["part"])
        case "slice":
            start, length = source.get("start", 0), shape[axis]
            _must(start + length <= whole.shape[axis], name, official, whole, f"to have {length} from {start}")
            return whole.narrow(axis, start, length)
        case "real" | "imag":
            _must(whole.is_complex(), name, official, whole, "to be complex")
            return torch.view_as_real(whole).select(-1, int(kind == "imag"))
        case "transpose":
            swapped = whole.transpose(-1, -2)
            _must(len(shape) > 1, name, official, whole, "to have one axis, which needs no transpose")
            last = min(swapped.ndim, len(shape)) - 1  # from there on the axes of ours may be one in the release
            *before, a, b = (*shape[:last], math.prod(shape[last:]))
            _shaped(name, official, whole, [(*before, b, a)])
            return swapped.reshape(shape)
        case _:
            wanted = f"to hold {' x '.join(map(str, shape))} numbers"
            _must(whole.numel() == math.prod(shape), name, official, whole, wanted)
            return whole.reshape(shape)


def _must(holds: bool, name: str, official: str, tensor: Tensor, wanted: str) -> None:
    if not holds:
        found = f"is {list(tensor.shape)} of {tensor.dtype}"
        raise RunError(f"for {name} the official {official} ought {wanted}, and {found}")


def _shaped(name: str, official: str, tensor: Tensor, shapes: list[tuple[int, ...]]) -> None:
    """One of these shapes: another of as many numbers would be read in a wrong order. Only `reshape` reshapes."""
    wanted = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
    _must(tuple(tensor.shape) in shapes, name, official, tensor, f"to be {wanted}")

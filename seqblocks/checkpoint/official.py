"""Loading official weights through the `checkpoint:` maps of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any

from torch import Tensor

from seqblocks import graph
from seqblocks.analysis.translation import Translator
from seqblocks.checkpoint.weights import are_equal, check_writable, copy_weights, unusable
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec, Named
from seqblocks.recipes import Name, Recipe
from seqblocks.runtime.model import SequenceModel

Tensors = Mapping[str, Tensor]


def load_official(model: SequenceModel, tensors: Any) -> None:
    """Load an official state dict through the spec's `checkpoint:` maps. All of its tensors must be used.

    Raises RunError naming what is missing, left over, of another shape or of another kind (integers, 8-bit floats,
    sparse, quantised), and then nothing is loaded; also where the model is on meta, in pieces, or no longer what its
    spec says. UsageError where the arguments are at fault.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"load_official fills what build made, not {type(model).__name__}")
    _check_argument(tensors)
    check_writable(model)
    copy_weights(model, parameters_from(model.spec, tensors))


def _check_argument(tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise UsageError(f"load_official needs the official state dict (torch.load or safetensors read it), not {kind}")
    if not any(isinstance(value, Tensor) for value in tensors.values()):
        for key, value in tensors.items():
            if isinstance(value, Mapping) and any(isinstance(inner, Tensor) for inner in value.values()):
                raise UsageError(f"the weights are one level down: load_official(model, tensors[{key!r}])")


def parameters_from(spec: ModelSpec, tensors: Tensors) -> dict[str, Tensor]:
    """Return our parameters, made from official tensors. Raise RunError for missing ones and for unused ones."""
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, pairs in _recipes(spec, tensors).items():
        for item, recipe in pairs:  # a file may hold a tied or shared parameter once, under any of its names, or often
            tensor = _follow(recipe, item, tensors)
            used.update(recipe.names)
            if not are_equal(tensor, made.setdefault(name, tensor)):
                how = "shares the parameter" if item.shared else "is tied to"
                raise RunError(f"{item.name} {how} {name}, and the official weights have another for it")
    spare = [name for name in tensors if name not in used]
    if spare:
        raise RunError(f"the official weights hold more than the spec maps: {listing(spare)}")
    return made


def _recipes(spec: ModelSpec, tensors: Tensors) -> dict[str, list[tuple[Named, Recipe]]]:
    """Return what each parameter is made from: the first of its alternatives that the file holds.

    By the name of the parameter, those tied to it included where the file has them. Raise RunError if there is none.
    """
    found: dict[str, list[tuple[Named, Recipe]]] = {}
    missing: list[tuple[Named, list[Recipe]]] = []
    translator = Translator()
    for name, items in _tied_together(spec).items():
        alternatives = [(item, translator.official(spec, item.name)) for item in items]
        chosen = [(item, next((each for each in some if _is_held(each, tensors)), None)) for item, some in alternatives]
        found[name] = [(item, recipe) for item, recipe in chosen if recipe is not None]
        if not found[name]:
            missing.append(alternatives[0])
    if missing:
        used = {official for pairs in found.values() for _, recipe in pairs for official in recipe.names}
        raise RunError(_missing_message(*missing[0], tensors, used, len(missing) - 1))
    return found


def _tied_together(spec: ModelSpec) -> dict[str, list[Named]]:
    """Return all parameters by the name of the one that they are tied to or shared with, or their own."""
    groups: dict[str, list[Named]] = {}
    for item in graph.parameters(spec.graph, shared=True):
        groups.setdefault(item.tied or item.name, []).append(item)
    return groups


def _is_held(recipe: Recipe, tensors: Tensors) -> bool:
    return all(official in tensors for official in recipe.names)


def _follow(recipe: Recipe, item: Named, tensors: Tensors) -> Tensor:
    """Return a parameter, made as its recipe says. Raise RunError where the official tensors do not fit."""
    parts = [tensors[official] for official in recipe.names]
    for official, part in zip(recipe.names, parts, strict=True):
        if reason := unusable(part, complex_too=True):
            raise RunError(f"{official} of the official weights {reason}")
    try:
        made: Tensor = recipe.make(item.name, item.parameter.shape, *parts)
    except (RuntimeError, IndexError) as error:
        sizes = listing(list(part.shape) for part in parts)
        what = f"{item.name} {list(item.parameter.shape)} cannot be the {recipe.kind} of {sizes}"
        raise RunError(f"{what}: {error}") from error
    return made


# --- hints for missing tensors --------------------------------------------------------------------------------------


def _missing_message(item: Named, recipes: list[Recipe], tensors: Tensors, used: set[str], more: int) -> str:
    """What to report about a parameter whose official tensors are absent, with a hint to the likely ones."""
    absent = [next(name for name in recipe.names if name not in tensors) for recipe in recipes]
    text = f"the official weights have no {' or '.join(dict.fromkeys(absent))}, which {item.name} is made from"
    if more:
        text += f" ({more} more {'parameter misses its' if more == 1 else 'parameters miss their'} tensors)"
    names = [name for name in tensors if isinstance(name, str)]
    hint = next(filter(None, (_prefix_hint(official, names) for official in absent)), None)
    if hint is None:
        shape = item.parameter.shape if isinstance(recipes[0], Name) else None
        free = {name: None if unusable(tensors[name]) else tensors[name].shape for name in names if name not in used}
        likely = next(filter(None, (_likely(official, shape, free) for official in absent)), None)
        hint = f"Did you mean {likely}?{_entry_hint(item.name, likely)}" if likely else ""
    return f"{text}. {hint}".strip()


def _likely(official: str, shape: tuple[int, ...] | None, free: Mapping[str, Any]) -> str | None:
    """The unused tensor that an absent name most likely means: of the same layer, with a similar name or its shape."""
    numbers = _numbers(official)
    free = {name: size for name, size in free.items() if _numbers(name) == numbers}
    fits = {name: shape is not None and size is not None and tuple(size) == shape for name, size in free.items()}
    only_one_fits = sum(fits.values()) == 1
    best: tuple[tuple[bool, int, float], str | None] = ((False, 0, 0.0), None)
    for name in free:
        likeness = SequenceMatcher(None, official, name).ratio()
        ends = _common_end(official, name)
        if (fits[name] and (ends or likeness > 0.4 or only_one_fits)) or ends > 1 or likeness >= 0.65:
            best = max(best, ((fits[name], ends, likeness), name), key=lambda pair: pair[0])
    return best[1]


def _numbers(name: str) -> list[str]:
    return [part for part in name.split(".") if part.isdecimal()]


def _common_end(a: str, b: str) -> int:
    """How many parts at the end of two dotted names agree; 1 where one is the end of the other."""
    pairs = zip(reversed(a.split(".")), reversed(b.split(".")), strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), 1)


def _entry_hint(ours: str, official: str) -> str:
    """The entry of a map that reads an official tensor; none for layers, which have a pattern."""
    if any(part.isdecimal() for part in ours.split(".")):
        return ""
    while "." in ours and "." in official and ours.rpartition(".")[2] == official.rpartition(".")[2]:
        ours, official = ours.rpartition(".")[0], official.rpartition(".")[0]
    return f" In `checkpoint:` that is `{ours}: {official}`"


def _prefix_hint(official: str, names: list[str]) -> str | None:
    """What to do where all names have a common prefix, as wrappers of models add it."""
    for prefix in dict.fromkeys(name.removesuffix(official) for name in names if name.endswith(f".{official}")):
        if all(name.startswith(prefix) for name in names):
            return f"All names there begin with '{prefix}': take it off, name.removeprefix('{prefix}')"
    return None

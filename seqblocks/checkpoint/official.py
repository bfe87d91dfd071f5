"""Load weights in other layouts through the `checkpoint:` maps of a spec, and detect their layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.analysis.checkpoint_maps.translation import OURS, Translator, layouts
from seqblocks.checkpoint.weight_files import Weights
from seqblocks.checkpoint.weights import are_equal, check_writable, copy_weights, misfit, unusable
from seqblocks.errors import RunError, UsageError, listing
from seqblocks.graph import ModelSpec, Named
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.ops.positions import resized_grid
from seqblocks.recipes import Name, Recipe, Shape

MAX_LINES = 20  # of one error
Pairs = list[tuple[Named, Recipe]]

# Buffers that releases contain although configurations determine them: rotary frequencies (Llama 2, Pythia), the decays
# of MiniMax, the indices and masks of shifted windows (Swin), and the causal mask of GPT-NeoX, a boolean matrix
# [1, 1, length, length], with the number for "masked".
_DETERMINED = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.inv_freq|attention\.masked_bias|relative_position_index|attn_mask"
    r"|self_attn\.(?:slope_rate|query_decay|key_decay|diagonal_decay)|(?P<mask>attention\.bias))"
)


class LeftOut(NamedTuple):
    """The weights that did not fit when loading with `partial=True`."""

    missing: dict[str, str]  # parameters that stay at their initial values, and why
    left_over: list[str]  # official tensors that were not read
    resampled: dict[str, Shape]  # position embeddings of images, and the grids that they were interpolated from

    def __str__(self) -> str:
        resized = [f"{name} is interpolated from {list(shape)}" for name, shape in self.resampled.items()]
        kept = [f"{name} stays at its initial values: {why}" for name, why in self.missing.items()]
        spare = [f"not read: {listing(self.left_over, MAX_LINES)}"] if self.left_over else []
        more = [f"and {len(kept) - MAX_LINES} more"] if len(kept) > MAX_LINES else []
        return "\n".join([*resized, *kept[:MAX_LINES], *more, *spare])


def load_official(model: SequenceModel, tensors: Any, *, partial: bool = False) -> LeftOut:
    """Load an official state dict through the spec's `checkpoint:` maps; its layout is detected from its names.

    All tensors must be used, except rotary frequencies, causal masks and fixed decays. With `partial`, tensors that do
    not fit are skipped: parameters keep their current values, and position embeddings of an image are interpolated to
    its grid. Returns what was skipped.

    Raises RunError with all tensors that are missing, unused, of another shape or of an unsupported kind (integers,
    8-bit floats, sparse, quantised), without loading anything; also if the model is on the meta device, split, or no
    longer matches its spec. Raises UsageError for invalid arguments.
    """
    if not isinstance(model, SequenceModel):
        raise UsageError(f"load_official needs a model from seqblocks.build, not {type(model).__name__}")
    _check_argument(tensors)
    check_writable(model)
    ours, left_out = translated(model.whole_spec, Weights(tensors, tensors.__getitem__), partial)
    copy_weights(model, ours)
    return left_out


def _check_argument(tensors: Any) -> None:
    if not isinstance(tensors, Mapping):
        kind = type(tensors).__name__
        raise UsageError(f"load_official needs an official state dict (from torch.load or safetensors), not {kind}")
    if not any(isinstance(value, Tensor) for value in tensors.values()):
        for key, value in tensors.items():
            if isinstance(value, Mapping) and any(isinstance(inner, Tensor) for inner in value.values()):
                raise UsageError(f"the weights are nested: use load_official(model, tensors[{key!r}])")


def translated(
    spec: ModelSpec, weights: Weights, partial: bool = False, layout: str | None = None
) -> tuple[Weights, LeftOut]:
    """Return official weights under our names, computed when they are read, and the weights that were left out.

    layout: that of the weights; None detects it among the layouts of the spec and its own names. Names, shapes and
    dtypes are compared before anything is read. Raises RunError with everything that does not fit; with `partial`, that
    is left out instead. Reading raises RunError if two tensors of one tied parameter differ.
    """
    candidates = [*layouts(spec), OURS] if layout is None else [layout]
    choice = _nearest([_choice(spec, each, weights.headers) for each in candidates], weights)
    headers: dict[str, Tensor] = {}
    left_out = LeftOut(_missing(choice, weights, partial), choice.spare, {})
    for name, pairs in choice.found.items():
        try:
            headers[name] = _header(pairs, weights, left_out.resampled if partial else None)
        except RunError as error:
            left_out.missing[name] = str(error)
    if not partial:
        _raise_if_any(left_out)

    def read(name: str) -> Tensor:
        made = _read(name, choice.found[name], weights)
        if name not in left_out.resampled:
            return made
        _, rows, columns, _ = headers[name].shape
        resized: Tensor = resized_grid(made, (rows, columns))
        return resized

    return Weights(headers, read, True, weights.source), left_out


def has_official_names(spec: ModelSpec, weights: Weights) -> bool:
    """Return whether the names of weights are exactly those of an official layout, and not those of the spec."""

    def fits(layout: str) -> bool:
        return not any(_distance(_choice(spec, layout, weights.headers)))

    return not fits(OURS) and any(map(fits, layouts(spec)))


class _Choice(NamedTuple):
    """How a layout fits a file.

    found: the recipes of each parameter, and of those tied to it if the file contains them. missing: parameters without
    tensors, with all their recipes. spare: unused tensors.
    """

    layout: str
    found: dict[str, Pairs]
    missing: list[tuple[Named, list[Recipe]]]
    spare: list[str]


def _distance(choice: _Choice) -> tuple[int, int]:
    return len(choice.missing), len(choice.spare)


def _nearest(choices: list[_Choice], weights: Weights) -> _Choice:
    """Return the layout whose names fit best; among equals, the first whose shapes fit."""
    least = min(map(_distance, choices))
    best = [choice for choice in choices if _distance(choice) == least]
    return next((choice for choice in best if len(best) > 1 and _fits(choice, weights)), best[0])


def _fits(choice: _Choice, weights: Weights) -> bool:
    try:
        return all(_header(pairs, weights, {}) is not None for pairs in choice.found.values())
    except RunError:
        return False


def _choice(spec: ModelSpec, layout: str, headers: Mapping[str, Any]) -> _Choice:
    """Return, for one layout, the first recipe of each parameter whose tensors the file contains."""
    found: dict[str, Pairs] = {}
    missing: list[tuple[Named, list[Recipe]]] = []
    translator = Translator(layout)
    for name, items in tied_together(spec).items():
        alternatives = [(item, translator.official(spec, item.name)) for item in items]
        chosen = [(item, next((x for x in recipes if _is_found(x, headers)), None)) for item, recipes in alternatives]
        pairs = [(item, recipe) for item, recipe in chosen if recipe is not None]
        if pairs:
            found[name] = pairs
        else:
            missing.append(alternatives[0])
    used = {official for pairs in found.values() for _, recipe in pairs for official in recipe.names}
    spare = [name for name, header in headers.items() if name not in used and not _is_determined(name, header)]
    return _Choice(layout, found, missing, spare)


def _is_determined(name: Any, header: Any) -> bool:
    """Return whether a tensor that no parameter needs is a buffer that the configuration determines."""
    if not isinstance(name, str) or not isinstance(header, Tensor):
        return False
    is_mask = header.dim() == 4 and header.shape[:2] == (1, 1) and header.dtype in (torch.bool, torch.uint8)
    found = _DETERMINED.fullmatch(name)
    return found is not None and (is_mask or not found["mask"])


def tied_together(spec: ModelSpec) -> dict[str, list[Named]]:
    """Return all parameters, grouped by the name of the parameter that they are tied to or shared with."""
    groups: dict[str, list[Named]] = {}
    for item in graph.parameters(spec.graph, shared=True):
        groups.setdefault(item.tied or item.name, []).append(item)
    return groups


def _is_found(recipe: Recipe, headers: Mapping[str, Any]) -> bool:
    return all(official in headers for official in recipe.names)


def _header(pairs: Pairs, weights: Weights, resampled: dict[str, Shape] | None) -> Tensor:
    """Return the shape and dtype (on meta) of a parameter computed from official tensors.

    resampled: filled with position embeddings of images that have another grid; None if these are errors.
    Raises RunError if the official tensors do not fit.
    """
    computed, headers = [], weights.headers
    for item, recipe in pairs:
        for official in recipe.names:
            if reason := unusable(headers[official], complex_too=True, on_meta=weights.lazy):
                raise RunError(f"{official} of the official weights {reason}")
        known = [headers[official] for official in recipe.names]
        parts = [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in known]
        computed.append(_follow(recipe, item, parts))
        if resampled is not None and _is_other_grid(item, computed[-1]):
            resampled[item.name] = tuple(computed[-1].shape)
            computed[-1] = computed[-1].new_empty(item.parameter.shape)
        if reason := misfit(item, computed[-1]):
            raise RunError(reason)
    return computed[0]


def _is_other_grid(item: Named, found: Tensor) -> bool:
    """Return whether a tensor has position embeddings [1, rows, columns, features] of an image with another grid."""
    shape = item.parameter.shape
    grid = item.node.verb == "position_embed" and len(shape) == found.ndim == 4
    return grid and found.shape != shape and (found.shape[0], found.shape[3]) == (shape[0], shape[3])


def _follow(recipe: Recipe, item: Named, parts: list[Tensor]) -> Tensor:
    """Return a parameter computed by its recipe. Raises RunError if the official tensors do not fit."""
    try:
        computed: Tensor = recipe.make(item.name, item.parameter.shape, *parts)
    except (RuntimeError, IndexError) as error:
        sizes = listing(list(part.shape) for part in parts)
        what = f"{item.name} {list(item.parameter.shape)} cannot be the {recipe.kind} of {sizes}"
        raise RunError(f"{what}: {error}") from error
    return computed


def _read(name: str, pairs: Pairs, weights: Weights) -> Tensor:
    """Return a parameter. A file may contain a tied or shared one once, under any of its names, or several times.

    Raises RunError if several copies differ.
    """
    (first, recipe), *others = pairs
    made = _follow(recipe, first, [weights.read(official) for official in recipe.names])
    for item, recipe in others:
        if not are_equal(_follow(recipe, item, [weights.read(official) for official in recipe.names]), made):
            how = "shares the parameter" if item.shared else "is tied to"
            raise RunError(f"{item.name} {how} {name}, but the official weights contain different values for it")
    return made


# --- one error for everything that does not fit ----------------------------------------------------------------------


def _missing(choice: _Choice, weights: Weights, partial: bool) -> dict[str, str]:
    """Return the parameters without official tensors, with a message for each."""
    headers = weights.headers
    names = [name for name in headers if isinstance(name, str)]
    spare = [name for name in choice.spare if isinstance(name, str)]
    free = {name: None if unusable(headers[name], on_meta=True) else headers[name].shape for name in spare}
    out: dict[str, str] = {}
    for item, recipes in choice.missing:
        absent = [next(name for name in recipe.names if name not in headers) for recipe in recipes]
        text = f"the official weights have no {' or '.join(dict.fromkeys(absent))}, needed for {item.name}"
        if choice.layout == OURS:
            text = f"the weights have no {item.name}"
        prefix = next(filter(None, (_prefix_hint(official, names) for official in absent)), None)
        if prefix and not partial:
            more = _count_others(len(choice.missing) - 1)
            raise RunError(f"{text}{more}. {prefix}")
        shape = item.parameter.shape if isinstance(recipes[0], Name) else None
        likely = next(filter(None, (_best_guess(official, shape, free) for official in absent)), None)
        entry = _entry_hint(item.name, likely) if likely and choice.layout != OURS else ""
        hint = f" Did you mean {likely}?{entry}" if likely else ""
        out[item.tied or item.name] = f"{text}.{hint}"
    return out


def _count_others(count: int) -> str:
    if not count:
        return ""
    return f" ({count} more {'parameter misses its' if count == 1 else 'parameters miss their'} tensors)"


def _raise_if_any(left_out: LeftOut) -> None:
    """Raise one RunError with everything that does not fit. Tensors named in a hint are not listed again."""
    texts = list(left_out.missing.values())
    hints = {match[1] for text in texts if (match := re.search(r"Did you mean (\S+)\?", text))}
    spare = [name for name in left_out.left_over if name not in hints]
    lines = list(_grouped(texts))
    if spare:
        lines.append(f"the official weights contain tensors that the spec does not map: {listing(_patterns(spare))}")
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 : -1] = [f"and {len(lines) - MAX_LINES} more of this kind"]
    if lines:
        raise RunError("\n".join(lines))


def _grouped(texts: list[str]) -> Iterator[str]:
    """Yield messages; those that differ only in numbers are yielded once."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(re.sub(r"\.\d+(?=\.)", ".#", text), []).append(text)
    for first, *others in groups.values():
        yield first + (f" (and {len(others)} more like it in other layers)" if others else "")


def _patterns(names: list[str]) -> list[str]:
    """Return names, with those that differ only in the number of their layer merged: `layers.{0-23}.norm`."""
    groups: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.)", str(name))
        key = f"{name[: match.start()]}\0{name[match.end() :]}" if match else str(name)
        groups.setdefault(key, []).append(int(match[0]) if match else 0)
    shown = {key: f"{{{min(at)}-{max(at)}}}" if len(at) > 1 else str(at[0]) for key, at in groups.items()}
    return [key.replace("\0", shown[key]) for key in groups]


def _best_guess(official: str, shape: tuple[int, ...] | None, free: Mapping[str, Any]) -> str | None:
    """Return the unused tensor most likely meant by a missing name: same layer, and a similar name or equal shape."""
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
    """Return how many parts at the end of two dotted names agree; 1 if one name is the end of the other."""
    pairs = zip(reversed(a.split(".")), reversed(b.split(".")), strict=False)
    return next((at for at, (x, y) in enumerate(pairs) if x != y), 1)


def _entry_hint(ours: str, official: str) -> str:
    """Return a hint with the map entry that reads an official tensor; empty for layers, which need a pattern."""
    if any(part.isdecimal() for part in ours.split(".")):
        return ""
    while "." in ours and "." in official and ours.rpartition(".")[2] == official.rpartition(".")[2]:
        ours, official = ours.rpartition(".")[0], official.rpartition(".")[0]
    return f" In `checkpoint:`, write `{ours}: {official}`"


def _prefix_hint(official: str, names: list[str]) -> str | None:
    """Return a hint if all names have a common prefix, as wrappers of models add one."""
    for prefix in dict.fromkeys(name.removesuffix(official) for name in names if name.endswith(f".{official}")):
        if all(name.startswith(prefix) for name in names):
            return f"All names in the weights begin with '{prefix}': remove it with name.removeprefix('{prefix}')"
    return None

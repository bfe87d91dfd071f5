"""Faults of wires: names that do not exist, kinds, widths and lengths that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.suggestions import did_you_mean
from seqblocks.types import Wire, divisors_near, show_axes

Hint = Callable[[], str | None]

# ------------------------------------------------------------------------------
# Names


def given_twice(port: str) -> Fault:
    return Fault("E210", f"the input is given twice: as `from` and as `{port}`", at=port)


def several_outputs(names: Sequence[str]) -> Fault:
    message = f"the step above has {len(names)} outputs: select one with `from`"
    return Fault("E313", message, expected=f"from: one of {listing(names)}")


def empty_list() -> Fault:
    return Fault("E411", "the list of wires is empty")


def one_wire_only(names: Iterable[str]) -> Fault:
    hint = f"join them in a step above, `linear: {{from: [{listing(names)}], features: …}}`, and read its output"
    return Fault("E410", "this input takes a single wire, not a list", hint=hint)


def not_a_name(found: str) -> Fault:
    return Fault("E203", "expected the name of a wire", found=found)


def no_wire(name: str, known: Sequence[str], hint: Hint) -> Fault:
    """known: the names of wires at this point, except the input."""
    expected = f"input, or one of {listing(known)}" if known else "input (no step above defines a wire)"
    return Fault("E302", f"there is no wire {quote(name)} at this point", expected=expected, hint=hint)


def wire_outside_argument(name: str, definition: Span | None) -> Fault:
    """Describe a wire that is read by the steps of an argument, but visible only where these are written."""
    notes = [Note(f"`{name}` is defined here, outside these steps", definition)] if definition else []
    hint = "the block passes in `input`; pass other wires to a block as arguments of type `wire`"
    expected = "a wire defined by these steps, or `input`, which the block passes in"
    return Fault("E302", f"there is no wire {quote(name)} at this point", expected=expected, notes=notes, hint=hint)


# Hints for `no_wire`
OWN_OUTPUT = "it is an output of this step; a step can only read outputs of steps above it"
DEFINED_BELOW = "it is defined below; a step can only read outputs of steps above it"


def name_of_step(name: str, wires: Sequence[str], span: Span) -> str:
    how = f"its step defines {' and '.join(map(quote, wires))}" if wires else f"add `as: {name}` to its step"
    return f"`name:` does not define a wire: {how} ({span})"


def similar(name: str, wires: Iterable[str]) -> str:
    return did_you_mean(name, wires) or "name an earlier step's output with `as:`"


def activation_as_wire(name: str, verb: str, key: str) -> str:
    return f"set the activation with its own key: `{verb}: {{{key}: …, activation: {name}}}`"


def verb_as_wire(name: str) -> str:
    return f"'{name}' is a verb: name its output, `- {name}: {{as: a}}`, and read `a`"


# ------------------------------------------------------------------------------
# Types


def wrong_kind(verb: str, at: str, kinds: Sequence[str], wire: Wire, made: Note) -> Fault:
    """kinds: those that the port reads."""
    return Fault(
        "E403", f"{verb} cannot read {_a(wire.kind)}", at=at, expected=" or ".join(map(_a, kinds)), found=f"{wire}",
        notes=[made], hint=_KIND_HINTS.get((wire.kind, kinds[0])),
    )  # fmt: skip


def made_by(label: str, wire: Wire, verb: str, span: Span | None) -> Note:
    """verb: of the step that outputs the wire, "" for an input of the model."""
    made = f"made by {verb}" if verb else "the model's input"
    return Note(f"`{label}` is {wire}: {made}", span)


def ids_have_no_features(wire: Wire, done: str, name: str) -> Fault:
    """Describe an attempt to split, join or add token ids. done: "split"."""
    note = wire.origin_note(name)
    return Fault(
        "E403",
        f"token ids cannot be {done}",
        expected="features, such as the output of embed",
        found=f"{wire}",
        notes=[note] if note else [],
        hint="embed the tokens first, with embed",
    )


def joined_of_different_shapes(wires: Iterable[tuple[str, Wire]]) -> Fault:
    found = listing(f"{label} {wire}" for label, wire in wires)
    return Fault("E406", "joined wires must have the same shape except for their features", found=found)


def different_length(verb: str, name: str, at: str | None, wire: Wire, first: str, like: Wire) -> Fault:
    """Describe input `name` of a verb, which is not as long as input `first`, `like`."""
    hint = None
    if verb == "attention" and wire.kind == like.kind == "sequence":
        hint = "use cross_attention for keys and values of another length: each token reads all of them"
    elif wire.context != like.context:
        hint = "combine inputs of different lengths with cross_attention, or pool one of them into a vector"
    size = "the size of" if like.kind == "image" else "as many tokens as"
    return Fault(
        "E406",
        f"{name} must be {_a(like.kind)}{f' of {size} {first}' if like.places else ''}",
        at=at,
        expected=show_axes(like.with_features(wire.features).axes),
        found=f"{wire}",
        hint=hint,
    )


def _a(kind: str) -> str:
    return {"image": "an image", "tokens": "token ids", "sequence": "a sequence", "vector": "a vector"}[kind]


_KIND_HINTS = {
    ("image", "sequence"): "turn the image into tokens first, with patch_embed",
    ("tokens", "sequence"): "embed the tokens first, with embed",
    ("sequence", "vector"): "pool the sequence first, with pool",
    ("vector", "sequence"): "the sequence was pooled above; move this step above the pooling",
    **dict.fromkeys(
        (("sequence", "tokens"), ("vector", "tokens"), ("image", "tokens")),
        "only `input: {tokens: vocabulary}` provides token ids; remove this step if the input has features",
    ),
    **dict.fromkeys(
        (("sequence", "image"), ("vector", "image"), ("tokens", "image")),
        "only `input: {image: {size: 224, channels: 3}}` and to_image provide an image",
    ),
    ("tokens", "vector"): "embed the tokens with embed and pool them with pool first",
}

# ------------------------------------------------------------------------------
# Widths and axes


def does_not_divide(value: int, width: int, what: str, of: str, at: str) -> Fault:
    message = f"{what} ({value}) must divide {of} ({width})"
    return Fault("E401", message, at=at, hint=lambda: divisors_near(width, value))


def wrong_width(name: str, wire: Wire, width: int, because: str) -> Fault:
    note = wire.origin_note(f"`{name}`")
    return Fault(
        "E402",
        f"'{name}' must have {width} features",
        at=name,
        expected=f"{width} ({because})",
        found=f"{wire.features}",
        notes=[note] if note else [],
    )


def no_grid(who: str, wire: Wire, at: str | None, instead: str, entry: str | None = None) -> Fault:
    """instead: a verb or word that needs no grid, or ""."""
    source = "an input that is an image or has a `grid: [rows, columns]` (after class_token there is none)"
    return Fault(
        "E407",
        f"{who} needs the tokens of an image",
        at=at,
        entry=entry,
        found=f"{wire} without rows and columns",
        hint=f"use {instead}, or {source}" if instead else f"start from {source}",
    )

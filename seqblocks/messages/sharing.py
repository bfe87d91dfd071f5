"""Faults of `share:`, by which a step uses the parameters of another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.combinators import name_the_owner
from seqblocks.messages.suggestions import did_you_mean, is_renamed

# ------------------------------------------------------------------------------
# The step that shares


def not_a_name(found: str) -> Fault:
    return Fault("E203", "share must be the name of a step", found=found, hint="share: attention")


def nothing_left(key: str) -> Fault:
    """key: `init` or `tie`, in a step whose parameters belong to another one."""
    hint = f"move `{key}` to the step that owns the parameters, or remove `share`"
    return Fault("E322", f"a step with `share` has no parameters to {key}", hint=hint)


def none_of_its_own(verb: str) -> Fault:
    return Fault("E201", f"{verb} has no parameters of its own to share", at="share")


def with_itself(step: str, around: str | None, renamed: Sequence[str]) -> Fault:
    """around: the step that contains this one, if that is named; renamed: the names of others with that verb."""
    hint = is_renamed(step, renamed) if renamed else "name a step above"
    what = "itself" if around is None else f"{quote(around)}, which contains it"
    return Fault("E320", f"{step} cannot share parameters with {what}", at="share", hint=hint)


# ------------------------------------------------------------------------------
# The owner


def no_parameters(owner: str, span: Span) -> Fault:
    return Fault("E320", f"{owner} has no parameters to share", at="share", notes=[_is_here(owner, span)])


def names_a_parameter(path: str) -> Fault:
    hint = f"tie: {{{path.rpartition('.')[2]}: {path}}}"
    return Fault("E320", f"share must name a step, and {path} is a parameter", at="share", hint=hint)


def no_step_inside(path: str, paths: Sequence[str]) -> Fault:
    """paths: those of the steps with parameters, inside the named step."""
    return Fault(
        "E312",
        f"there is no step {quote(path)} with parameters",
        at="share",
        expected=f"one of {listing(paths)}" if paths else None,
        hint=lambda: did_you_mean(path, paths),
    )


def left_out(owner: str, step: str, span: Span) -> Fault:
    """span: of the owner, whose `when` is false."""
    message = f"{quote(owner)} is left out, so its parameters cannot be shared"
    hint = f"give {step} the same `when`, or share with a step that is present"
    return Fault("E320", message, at="share", hint=hint, notes=[Note("its condition is false", span)])


def below(owner: str, step: str, span: Span) -> Fault:
    notes, hint = [_is_here(owner, span)], "move `share` to the second of the two steps"
    return Fault("E320", f"{quote(owner)} is below {step}", at="share", hint=hint, notes=notes)


def no_step(
    name: str, known: Callable[[], Sequence[str]], renamed: Callable[[], Sequence[str]], in_block: bool
) -> Fault:
    """known: returns the names that `share:` can take; renamed: those of the steps whose verb is `name`."""

    def hint() -> str:
        if names := renamed():
            return is_renamed(name, names)
        inside = "steps of a block can only share with steps of the same block"
        return did_you_mean(name, known()) or (inside if in_block else "name a step above this one")

    return Fault("E312", f"there is no step {quote(name)} to share with", at="share", hint=hint)


def not_in_layers(name: str, known: Sequence[str], steps: Sequence[str], owner: str | None) -> Fault:
    """known: the parameters of the layers; steps: those that contain them; owner: of `name`, if a layer shares it."""
    return Fault(
        "E312",
        f"no layer of this repeat has a parameter {quote(name)}",
        at="share",
        entry=name,
        expected=f"one of {listing(known)}" if known else "the layers have no parameters",
        hint=name_the_owner(name, owner) if owner else lambda: did_you_mean(name, [*known, *steps]),
    )


def _is_here(name: str, span: Span) -> Note:
    return Note(f"{name} is here", span)


# ------------------------------------------------------------------------------
# Declarations

MAX_DIFFERENCES = 3  # number of parameters listed in a message


class Declarations(NamedTuple):
    """The parameters of one of two steps, or layers, that differ."""

    label: str
    span: Span
    parameters: Mapping[str, tuple[tuple[int, ...], bool, Span] | None]
    """By name: the shape, whether it is kept in float32, where it is declared; None if there is none."""

    def listed(self) -> str:
        return listing(self._declared(name) for name in [*self.parameters][:MAX_DIFFERENCES])

    def _declared(self, name: str) -> str:
        declared = self.parameters[name]
        if declared is None:
            return f"no {name}"
        shape, full_precision, _ = declared
        return f"{name} {list(shape)}{' in float32' if full_precision else ''}"


def declarations_differ(names: Sequence[str], sharing: Declarations, owner: Declarations) -> Fault:
    """names: the parameters that differ; sharing: those of the step that has `share:`."""
    more = len(names) - MAX_DIFFERENCES
    also = f" ({more} more differ)" if more > 0 else ""
    places = {owner.span: _is_here(owner.label, owner.span), sharing.span: None}
    for side in (owner, sharing):
        if declared := side.parameters[names[0]]:
            span = declared[2]
            places.setdefault(span, Note(f"the {names[0]} of {side.label} is declared here", span))
    return Fault(
        "E321",
        f"{sharing.label} cannot share the parameters of {owner.label}: their declarations differ",
        at="share",
        expected=f"{owner.listed()}, as in {owner.label}",
        found=f"{sharing.listed()}{also}",
        notes=[note for note in places.values() if note],
    )


def already_shared(key: str, step: str, owner: str, other: str, span: Span) -> Fault:
    """Describe a parameter inside a step that has an owner, and would get another one. span: where it is declared."""
    message = f"{key} of {step} is already shared with {owner}, and cannot be shared with {other}"
    notes = [Note("the step with the parameter is here", span)]
    return Fault("E322", message, at="share", notes=notes, hint="remove one `share` or `tie`")

"""Faults and warnings of what has no effect, or another effect than intended: idle steps, overrides, lookahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote


def idle_step(verb: str, name: str, parameters: int, parts: int, of_model: bool) -> Fault:
    """parts: the number of its outputs; of_model: whether `outputs:` could list them."""
    what = "it" if parts == 1 else "one of its parts"
    listed = f"list {what} in `outputs:`, " if of_model else ""
    return Fault(
        "E315",
        f"the output of {_shown(verb, name)} is unused: {_owned(parameters)} would never be trained",
        hint=f"{listed}read {what} in a later step, by `from:` or a port, or remove the step",
    )


def idle_parts(verb: str, name: str, parts: Sequence[str]) -> Fault:
    listed = f"{listing(f'`{part}`' for part in parts)}, {'a part' if len(parts) == 1 else 'parts'}"
    them = "it" if len(parts) == 1 else "them"
    message = f"nothing uses {listed} of {_shown(verb, name)}"
    return Fault(
        "W902",
        f"{message}: the parameters that compute {them} would never be trained",
        hint=f"read {them} in a later step, by `from:` or a port, or reduce the width of the step",
    )


def without_gradient(verb: str, name: str, parameters: int, constant: Note | None) -> Fault:
    """constant: the step with a constant output that blocks the gradient."""
    message = f"{_shown(verb, name)} receives no gradient: {_owned(parameters)} would never be trained"
    hint = "remove the step, or make that output depend on its input"
    return Fault("W902", message, notes=[constant] if constant else [], hint=hint)


def constant_output(verb: str, name: str, value: float, span: Span) -> Note:
    return Note(f"the output of {_shown(verb, name)} is always {value:g}", span)


def _shown(verb: str, name: str) -> str:
    return verb if name == verb else f"{verb} {quote(name)}"


def _owned(parameters: int) -> str:
    return f"its {parameters:,} parameters" if parameters > 1 else "its parameter" if parameters else "its parameters"


def override(shown: str) -> Fault:
    hint = "check its name: `seqblocks show SPEC --stage spec` lists the names and the arguments of the steps"
    return Fault("W901", f"the override {shown} has no effect: no step uses it", hint=hint)


def not_causal(outputs: Mapping[str, int | str], inside: tuple[str, Span] | None) -> Fault:
    """Describe a model that predicts tokens which it sees.

    outputs: the lookahead of each output, as `expect:` takes it, by its name, "" if it has none; inside: the step of a
    bundled block that introduces the lookahead.
    """
    names = {name: f"`{name}`" if name else "an output" for name in outputs}
    if len(set(outputs.values())) == 1 < len(names):
        depend = f"{listing(names.values())} depend on {_later_tokens(*{*outputs.values()})}"
    else:
        depend = listing(f"{names[name]} depends on {_later_tokens(ahead)}" for name, ahead in outputs.items())
    by_name = ", ".join(f"{name}: {ahead}" for name, ahead in outputs.items())
    declared = outputs.get("", f"{{{by_name}}}")
    declaration = f"`expect: {{lookahead: {declared}}}`"
    return Fault(
        "W903",
        f"the model predicts tokens but is not causal: from here on, {depend}",
        notes=[Note(f"the lookahead is introduced by {inside[0]}", inside[1])] if inside else [],
        hint=f"if that is intended, as in a masked language model, declare it: {declaration}",
    )


def _later_tokens(ahead: int | str) -> str:
    return f"{ahead} later token{'s' if ahead != 1 else ''}" if isinstance(ahead, int) else "the whole sequence"

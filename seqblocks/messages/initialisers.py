"""Faults of `init:` and `tie:`, which apply to the parameters of a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.suggestions import did_you_mean, instead_of, is_renamed, key_hint

# ------------------------------------------------------------------------------
# The parameters of a step


def no_parameters(verb: str, key: str) -> Fault:
    """key: `init` or `tie`."""
    return Fault("E201", f"{verb} has no parameters of its own to {key}")


def no_parameter(verb: str, key: str, parameters: Iterable[str], possible: Collection[str]) -> Fault:
    """possible: those that the key may be a misspelling of, which are more with other arguments."""
    message = f"{verb} has no parameter {quote(key)} with these arguments"
    return Fault("E201", message, expected=f"one of {listing(parameters)}", hint=lambda: key_hint(key, possible))


# ------------------------------------------------------------------------------
# init:


def not_a_mapping(parameter: str, found: str, text: str | None, fault: Fault | None) -> Fault:
    """parameter: for an example; text: a valid initialiser in the place of the mapping; fault: of an invalid one."""
    notes = []
    if fault:
        notes = [Note(f"{fault.message}: {fault.hint}" if isinstance(fault.hint, str) else fault.message)]
    hint = f'init: {{{parameter}: "{text or "zeros"}"}}'
    return Fault("E203", "init must be a mapping of parameter: initialiser", found=found, hint=hint, notes=notes)


def not_text(found: str) -> Fault:
    return Fault("E408", "invalid initialiser", expected="a name such as zeros, or name(numbers)", found=found)


def not_an_initialiser(text: str) -> Fault:
    return Fault("E408", f"{quote(text)} is not an initialiser", expected="a name, or name(numbers)")


def unknown(name: str, known: Sequence[str]) -> Fault:
    return Fault(
        "E408",
        f"there is no initialiser {quote(name)}",
        expected=f"one of {listing(known, 21)}",
        hint=did_you_mean(name, known) or instead_of(name),
    )


def too_long(most: int) -> Fault:
    return Fault("E504", "the initialiser is too long", expected=f"at most {most} characters")


def does_not_know(name: str, number: str, numbers: Mapping[str, float | None]) -> Fault:
    """numbers: those of the initialiser, with their defaults."""
    return Fault("E408", f"{name} does not know {quote(number)}", expected=_signature(name, numbers))


def does_not_take(name: str, count: int, numbers: Mapping[str, float | None]) -> Fault:
    message = f"{name} does not take {count} number{'s' if count != 1 else ''}"
    return Fault("E408", message, expected=_signature(name, numbers))


def _signature(name: str, numbers: Mapping[str, float | None]) -> str:
    written = (key if default is None else f"{key}={default:g}" for key, default in numbers.items())
    return f"{name}({', '.join(written)})"


def number_out_of_range(name: str, key: str, found: float, smallest: float, largest: float) -> Fault:
    expected = f"0, or a number between {smallest:g} and {largest:g} in magnitude"
    return Fault("E209", f"{quote(key)} of {name} is out of range", expected=expected, found=f"{found:g}")


def law_is_broken(text: str, law: str, values: Mapping[str, float]) -> Fault:
    """law: the condition that the numbers do not fulfil."""
    found = ", ".join(f"{key}: {value:g}" for key, value in values.items())
    return Fault("E209", f"the arguments of {quote(text)} are out of range", expected=law, found=found)


# ------------------------------------------------------------------------------
# tie:


def not_a_tie(found: str) -> Fault:
    return Fault("E203", "tie must be the name of a step, or map parameters to step.parameter", found=found)


def not_a_target(found: str) -> Fault:
    return Fault("E203", "tie must name a parameter, as step.parameter", found=found)


def shapes_differ(verb: str, parameter: str, target: str, ours: Sequence[int], theirs: Sequence[int]) -> Fault:
    message = f"{verb}.{parameter} cannot be tied to {target}: their shapes differ"
    return Fault("E409", message, expected=f"{list(ours)}", found=f"{list(theirs)}")


def tied_and_initialised(parameter: str, target: str) -> Fault:
    message = f"{parameter} is tied to {target}, so it has no initial values of its own"
    return Fault("E322", message, hint="move the initialiser to that step, or remove the tie")


def left_out(name: str, span: Span) -> Fault:
    """span: of the step, whose `when` is false."""
    message, hint = f"{quote(name)} is left out, so it has no parameters to tie to", "tie to a step that is present"
    return Fault("E312", message, hint=hint, notes=[Note("its condition is false", span)])


def no_step(name: str, known: Callable[[], Iterable[str]], renamed: Callable[[], Sequence[str]]) -> Fault:
    """known: returns the names of the steps above; renamed: of those whose verb is `name`."""

    def hint() -> str:
        if name == "model":
            return "leave out `model.`: names begin at this list of steps, or at an enclosing one"
        if names := renamed():
            return is_renamed(name, names)
        return did_you_mean(name, dict.fromkeys(known())) or "tie to a step above this one"

    return Fault("E312", f"there is no step {quote(name)} to tie to", hint=hint)


def no_target(ours: str, target: str, names: Sequence[str], of_step: bool) -> Fault:
    """names: the parameters of the step; of_step: whether `tie:` names a step, not a parameter."""
    first = target.partition(".")[0]
    written = target.rpartition(".")[0] if of_step else target

    def hint() -> str | None:
        if of_step and written in names:
            return f"tie: {{{ours}: {written}}}"
        known = dict.fromkeys(name.rpartition(".")[0] if of_step else name for name in names)
        return did_you_mean(written, [name for name in known if name != written])

    expected = f"one of {listing(names)}" if names else f"{first} has no parameters"
    return Fault("E312", f"there is no parameter {quote(target)}", expected=expected, hint=hint)


def no_bias_to_tie(step: str) -> str:
    """Return the hint for a tie to a step that has a weight only."""
    return f"set `bias: false`, or tie only the weight: `tie: {{weight: {step}.weight}}`"

"""Faults of steps: how they are written, their verbs and keys, names and outputs, conditions, inputs, limits."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.suggestions import instead_of, key_hint, missing_colon, nearest, why_needless
from seqblocks.types import Wire

# ------------------------------------------------------------------------------
# How a step is written


def not_a_list(found: str, keys: Iterable[str], is_empty: bool) -> Fault:
    """keys: of a mapping in the place of the list; is_empty: whether nothing is there."""
    hint = "indent its items at least as far as the key: `- silu`" if is_empty else "- silu"
    if keys:
        hint = f"each step is an item of a list: put '- ' before {listing(keys)}"
    return Fault("E203", "steps must be a list", found=found, hint=hint)


def not_a_step(found: str) -> Fault:
    return Fault("E204", "a step is a verb, or `verb: {arguments}`", found=found)


def several_keys(keys: Sequence[str], hint: str) -> Fault:
    """hint: from one of the functions below."""
    message = f"a step is one verb with its arguments, not {len(keys)} keys"
    return Fault("E204", message, found=listing(keys), hint=hint)


ONE_VERB = "one verb per step"


def separate_steps(verbs: Iterable[str]) -> str:
    return f"put '- ' before {listing(verbs)}: this is a separate step"


def argument_twice(verb: str, shown: str, key: str) -> str:
    """Return the hint for a short form, `verb: shown`, whose argument is also given next to it."""
    return f"`{verb}: {shown}` sets {key}: remove one of the two"


def long_form(verb: str, arguments: Iterable[tuple[str, str]]) -> str:
    """arguments: keys, and their values as shown."""
    return f"{verb}: {{{', '.join(f'{key}: {shown}' for key, shown in arguments)}}}"


def keys_outside(verb: str, keys: Iterable[str], has_braces: bool) -> str:
    shown = listing(keys)
    return f"move {shown} into the braces after `{verb}:`" if has_braces else f"indent {shown} below `{verb}:`"


def no_arguments(verb: str, found: str, hint: str) -> Fault:
    """Describe a value that cannot be the arguments of a step. hint: from one of the functions below."""
    return Fault("E203", f"the arguments of {quote(verb)} must be a mapping", found=found, hint=hint)


def takes_none(verb: str) -> str:
    return f"remove the value: `{verb}` has no arguments"


def takes_steps(verb: str, shown: str) -> str:
    return f"{verb}: [{shown}]"


def takes_named(verb: str, keys: Iterable[str]) -> str:
    return f"name the argument: {verb} takes {listing(keys)}"


# ------------------------------------------------------------------------------
# Verbs


def verb_with_argument(text: str) -> Fault:
    """Describe `- embed {features: 64}`, without the colon."""
    return Fault("E301", f"there is no verb {quote(text)}", hint=missing_colon(text))


def no_verb(verb: str, hint: Callable[[], str | None], failed: Iterable[str]) -> Fault:
    """hint: returns one of those below; failed: why plug-ins could not be imported."""
    return Fault("E301", f"there is no verb {quote(verb)}", hint=hint, notes=[Note(text) for text in failed])


ARGUMENT_IN_DEFAULT = (
    "default steps can use numbers and words among the arguments, but cannot run arguments of type `steps`"
)


def argument_is_no_steps(name: str) -> str:
    return f"to run an argument, declare it as `{name}: steps`, or with a list of steps as its default"


def block_of_file(file: str) -> str:
    return f"add `use: [{file}]`"


def complete_model(name: str) -> str:
    return f"{name} is a complete model: `seqblocks build {name}`"


def file_of_blocks(file: str, blocks: Iterable[str], in_use: bool) -> str:
    return f"`use: [{file}]` {'is in use, and its blocks are' if in_use else 'brings in'} {listing(blocks)}"


def similar_verb(verb: str, known: Sequence[str], bundled: dict[str, str]) -> str:
    """bundled: the bundled blocks, each with the name of its file."""
    if found := instead_of(verb) or key_hint(verb, known):
        return found
    if block := nearest(verb, bundled):
        return f"did you mean '{block}'? add `use: [{bundled[block]}]`"
    return "`seqblocks ops` lists the verbs; your own primitives must be imported first (--import my_ops.py)"


# ------------------------------------------------------------------------------
# Keys


def unknown_key(verb: str, key: str, known: Sequence[str]) -> Fault:
    fault = _unknown(f"unknown key {quote(key)} in {verb}", key, known)
    fault.hint = lambda: why_needless(key) or key_hint(key, known)
    return fault


def unknown_key_of_argument(verb: str, key: str, known: Sequence[str], declared: Span) -> Fault:
    """Describe a key of a step whose verb is an argument of type `steps`."""
    message = f"{verb} runs the steps passed to the block, and does not take {quote(key)}"
    return _unknown(message, key, known, Note("the argument is declared here", declared))


def unknown_key_of_block(verb: str, key: str, known: Sequence[str], defined: Span) -> Fault:
    message = f"block {verb} has no argument {quote(key)}"
    return _unknown(message, key, known, Note("the block is defined here", defined))


def _unknown(message: str, key: str, known: Sequence[str], *notes: Note) -> Fault:
    expected = f"one of {listing(known, 16)}"
    return Fault("E201", message, expected=expected, hint=lambda: key_hint(key, known), notes=notes)


# ------------------------------------------------------------------------------
# Names


def named_input() -> Fault:
    return Fault("E311", "'input' is the name of the input of the steps", hint="choose another name")


def reserved_name(name: str) -> Fault:
    message = f"{quote(name)} is reserved: built models have an attribute of that name"
    hint = f"choose another name, such as {quote((name.strip('_0123456789') or 'a') + '_step')}"
    return Fault("E311", message, hint=hint)


def name_is_no_word(found: str) -> Fault:
    return Fault("E203", "name must be a word", found=found)


def name_twice(name: str, other: Span, hint: str) -> Fault:
    """hint: from one of the functions below."""
    hint = f"{hint}: parameters are stored under the name of their step"
    notes = [Note("the other step is here", other)]
    return Fault("E304", f"two steps here have the name {quote(name)}", hint=hint, notes=notes)


def name_alias(name: str) -> str:
    return f"an alias repeats the name too: write out the step, with `name: {name}`"


def rename(name: str) -> str:
    return f"write `name: {name}`"


def add_name(name: str) -> str:
    return f"add `name: {name}`"


def write_with_name(verb: str, name: str) -> str:
    return f"write `{verb}: {{name: {name}}}`"


# ------------------------------------------------------------------------------
# Outputs


def not_outputs(found: str) -> Fault:
    expected = "a name, a list of names (equal parts), or a mapping name: width"
    return Fault("E203", "`as` must name the outputs", expected=expected, found=found)


def part_twice(name: str) -> Fault:
    return Fault("E305", f"two parts are named {quote(name)}")


def wire_twice(name: str, other: Span | None) -> Fault:
    notes = [Note("it is defined here", other)] if other else []
    return Fault("E305", f"there is already a wire {quote(name)}", notes=notes)


def no_equal_parts(features: int, names: Sequence[str]) -> Fault:
    width, rest = divmod(features, len(names))
    each = ", ".join(f"{name}: {width + (at < rest)}" for at, name in enumerate(names))
    message = f"{features} features cannot be split into {len(names)} equal parts"
    return Fault("E405", message, hint=f"specify the widths: as: {{{each}}}")


def widths_do_not_add_up(widths: Sequence[int], wire: Wire) -> Fault:
    return _widths(widths, wire, "the widths must add up to the number of features", str(wire.features))


def empty_part(widths: Sequence[int], wire: Wire) -> Fault:
    return _widths(widths, wire, "each part needs at least one feature", "1 or more each")


def _widths(widths: Sequence[int], wire: Wire, message: str, expected: str) -> Fault:
    note = wire.origin_note("the result")
    found = f"{' + '.join(map(str, widths))} = {sum(widths)}"
    return Fault("E405", message, expected=expected, found=found, notes=[note] if note else [])


def last_has_several(outputs: int) -> Fault:
    return Fault("E313", f"the last step has {outputs} outputs, but must have one")


# ------------------------------------------------------------------------------
# Conditions


def condition_with_parts() -> Fault:
    hint = "split its output in a separate step: - identity: {as: [a, b]}"
    return Fault("E316", "a step with a condition cannot split its output", hint=hint)


def condition_with_wires() -> Fault:
    hint = "join them in a separate step above, and read its output"
    return Fault("E316", "a step with a condition must read a single wire", at="from", hint=hint)


# ------------------------------------------------------------------------------
# Inputs


def no_from(verb: str, ports: Iterable[str]) -> Fault:
    return Fault("E201", f"{verb} has no `from`: its inputs have names", expected=listing(ports))


def missing_input(verb: str, port: str, wires: Container[str]) -> Fault:
    """wires: those that could be read."""
    hint = f"{port}: {port}" if port in wires else f"add `{port}: WIRE`, the name of the wire to read"
    return Fault("E411", f"{verb} needs its input {quote(port)}", hint=hint)


def missing_inputs(verb: str, ports: Sequence[str], file: Callable[[], str | None]) -> Fault:
    """file: returns the bundled file of a block that computes the inputs, or None."""

    def hint() -> str:
        names = f"name the wires: {verb}: {{{', '.join(f'{port}: …' for port in ports)}}}"
        use = file()
        return f"`{verb}_layer` (`use: [{use}]`) computes them from one wire; or {names}" if use else names

    return Fault("E411", f"{verb} needs its inputs {listing(ports)}", hint=hint)


# ------------------------------------------------------------------------------
# Limits


def parameter_too_large(verb: str, name: str, numbers: int) -> Fault:
    return Fault("E504", f"{name} of {verb} is too large: {numbers:.0e} numbers", expected="at most 10^18")


def state_too_large(verb: str, name: str, numbers: int) -> Fault:
    message = f"the state {name} of {verb} is too large: {numbers:.0e} numbers per sequence"
    return Fault("E504", message, expected="at most 10^12")


def too_deep(most: int) -> Fault:
    return Fault("E104", "steps are nested too deeply", expected=f"at most {most} levels")


def too_many(most: int) -> Fault:
    return Fault("E104", "the model has too many steps", expected=f"at most {most:,}")


def too_long_to_analyse() -> Fault:
    hint = "use fewer layers or shorter expressions"
    return Fault("E104", "the model's layers take too long to analyse", hint=hint)


def ranks_do_not_divide(what: str, count: int, ranks: int) -> Fault:
    return Fault("E401", f"{what} {count} cannot be split evenly over {ranks} ranks", at=what)

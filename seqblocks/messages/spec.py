"""Faults of the sections of a file: its keys, `use:`, `needs:`, blocks and their arguments, overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.suggestions import did_you_mean, is_renamed, key_hint, missing_colon

# ------------------------------------------------------------------------------
# Keys and names


def unknown_key(key: str, section: str, known: Sequence[str], place: str | None) -> Fault:
    """place: where the key belongs ("into `model:`"), if it exists elsewhere in a spec."""
    return Fault(
        "E201",
        f"unknown key {quote(key)} in {section}",
        expected=f"one of {listing(known)}",
        hint=f"move `{key}:` {place}" if place else lambda: key_hint(key, known),
    )


def reserved_word(name: str) -> Fault:
    return Fault("E311", f"{quote(name)} is a reserved word in expressions", hint="choose another name")


def not_a_name(name: str, is_key: bool) -> Fault:
    """is_key: whether a colon could be missing in it."""
    expected = "letters, digits and _, not beginning with a digit"
    hint = missing_colon(name) if is_key else None
    return Fault("E207", f"{quote(name)} is not a valid name", expected=expected, hint=hint)


_EXAMPLES = {
    "args": "{dim: int, heads: 4}", "blocks": "{mine: {steps: […]}}", "checkpoint": "{head: classifier}",
    "expect": "{params: 1_000}", "let": "{dim: 64}",
    "model": "{input: {tokens: 256}, steps: […]}",
}  # fmt: skip


def not_a_mapping(key: str, found: str, text: str | None) -> Fault:
    """text: the scalar that is written there, if it is one."""
    hint = missing_colon(text) if text is not None else None
    return Fault("E203", f"{key} must be a mapping", found=found, hint=hint or f"{key}: {_EXAMPLES[key]}")


def not_text(key: str, found: str) -> Fault:
    return Fault("E203", f"{key} must be text", found=found)


# ------------------------------------------------------------------------------
# The file


def not_a_spec(found: str, text: str | None, keys: Iterable[str], version: int) -> Fault:
    """text: the scalar that the file contains, if it is one; keys: those of a spec."""
    hint = missing_colon(text, keys) if text is not None else None
    return Fault("E203", "a spec must be a mapping", found=found, hint=hint or f"begin with `seqblocks: {version}`")


def no_version(version: int) -> Fault:
    message = "the spec does not declare its language version"
    return Fault("E205", message, hint=f"begin with `seqblocks: {version}`")


def unknown_version(found: str, version: int) -> Fault:
    return Fault("E205", "unknown version of the language", expected=str(version), found=found)


def defines_nothing() -> Fault:
    return Fault("E206", "the file defines nothing", hint="add a `model:` or `blocks:`")


def no_model(block: str, arguments: Iterable[str]) -> Fault:
    """arguments: those that the block needs."""
    given = ", ".join(f"{name}: …" for name in arguments)
    hint = f"model: {{input: {{features: 384}}, steps: [{block}: {{{given}}}]}}"
    return Fault("E206", "the file defines blocks but no model", hint=hint)


def no_steps() -> Fault:
    return Fault("E202", "the model has no steps")


def too_large(shown: str, most: int) -> Fault:
    return Fault("E104", f"{shown} is too large for a spec", expected=f"at most {most:,} bytes")


def cannot_be_read(shown: str, reason: str, hint: str | None = None) -> Fault:
    return Fault("E803", f"{quote(shown)} cannot be read: {reason}", hint=hint)


def not_a_regular_file(shown: str) -> Fault:
    return cannot_be_read(shown, "it is not a regular file")


def no_such_path(shown: str, reason: str, name: str, others: Iterable[str]) -> Fault:
    """name: of the file; others: in the same folder."""
    return cannot_be_read(shown, reason, did_you_mean(name, others))


def is_folder(shown: str, reason: str, spec: str | None) -> Fault:
    """spec: the path of the spec in the folder, if there is only one."""
    return cannot_be_read(shown, reason, f"this is a folder; its spec is {quote(spec)}" if spec else None)


def no_bundled_spec(name: str, known: Iterable[str], file: str | None) -> Fault:
    """file: an existing file with that name and an ending."""
    hint = did_you_mean(name, known) or "`seqblocks list` shows the bundled specs; files end in .yaml"
    return Fault("E803", f"there is no bundled spec {quote(name)}", hint=f"did you mean '{file}'?" if file else hint)


# ------------------------------------------------------------------------------
# needs:


def needs_no_list(found: str) -> Fault:
    return Fault("E203", "needs must be a list", found=found, hint="needs: [my_ops]")


def not_a_module(found: str, file: str | None) -> Fault:
    """file: the name of the file without .py, if one is given."""
    hint = f"needs: [{file}]" if file else None
    return Fault("E203", "needs takes module names", expected="a name such as my_ops", found=found, hint=hint)


def missing_plugin(name: str, file: Callable[[], str | None]) -> Fault:
    """file: returns the path of a file with its name, or None."""

    def hint() -> str:
        if found := file():
            return f"if you trust it: `--import {found}`, in Python `import {name}`"
        return f"install the package that contains it, then import it: `--import {name}`, in Python `import {name}`"

    return Fault("E329", f"the spec needs the plug-in {quote(name)}, which was not imported", hint=hint)


# ------------------------------------------------------------------------------
# use:


def use_is_no_list(found: str, name: str | None) -> Fault:
    """name: the word that is written there, if it is one."""
    return Fault("E203", "use must be a list", found=found, hint=f"use: [{name or 'vil'}]")


def not_a_file(found: str) -> Fault:
    return Fault("E203", "use takes names of bundled specs and paths", found=found)


def files_in_a_ring(files: Iterable[str]) -> Fault:
    message = f"the files use each other: {' -> '.join(files)}"
    return Fault("E307", message, hint="move the shared blocks to a third file")


def nothing_bundled(name: str, known: Sequence[str]) -> Fault:
    return Fault(
        "E306",
        f"there is no bundled spec {quote(name)}",
        expected=f"one of {listing(known)}",
        hint=lambda: did_you_mean(name, known) or "to use a file, write its path: ./blocks.yaml",
    )


def use_too_deep(most: int) -> Fault:
    return Fault("E104", "`use` is nested too deeply", expected=f"at most {most} levels")


def used_files_too_large(most: int) -> Fault:
    return Fault("E104", "the used files are too large", expected=f"at most {most:,} nodes in total")


def not_provided(name: str) -> Fault:
    return Fault("E306", f"there is no file {quote(name)} among the files provided with the spec")


def other_extension(name: str, is_link: bool, endings: Iterable[str]) -> Fault:
    """is_link: whether only the file that `name` links to has another extension."""
    what = "links to a file with another extension" if is_link else "has another extension"
    expected = f"a file that ends in {' or '.join(endings)}"
    return Fault("E804", f"`use` may not read {quote(name)}: it {what}", expected=expected)


def outside_the_folders(name: str) -> Fault:
    message = f"`use` may not read {quote(name)}: it is outside the allowed folders"
    hint = "if you trust the spec, allow the folder: `--allow-use DIR`, in Python `allow_use=`"
    return Fault("E804", message, expected="a file below the folder of the spec", hint=hint)


def no_file(name: str, path: str, file: str, others: Callable[[], Iterable[str]]) -> Fault:
    """path: as read; file: its last part; others: returns the files in its folder."""
    return Fault(
        "E306",
        f"there is no file {quote(name)}",
        found=f"no such file: {path}",
        hint=lambda: did_you_mean(file, others()),
    )


# ------------------------------------------------------------------------------
# Blocks


def block_without_steps(name: str) -> Fault:
    return Fault("E202", f"block {name} has no steps")


def block_is_no_mapping(name: str, found: str) -> Fault:
    return Fault("E203", f"block {name} must be a mapping", found=found, hint="steps: […]")


def block_of_two_files(name: str, first: Span, second: Span) -> Fault:
    notes = [Note("defined here", first), Note("and here", second)]
    return Fault("E309", f"block {quote(name)} is defined in two of the used files", notes=notes)


def named_like_builtin(name: str) -> Fault:
    return Fault("E309", f"{quote(name)} is a built-in verb", hint="give the block another name")


def block_again(name: str, other: Span) -> Fault:
    notes = [Note("the other one is here", other)]
    return Fault("E309", f"block {quote(name)} is already defined", hint="give the block another name", notes=notes)


def let_is_argument(name: str, argument: Span) -> Fault:
    return Fault(
        "E309",
        f"{quote(name)} is already an argument of the block",
        notes=[Note("the argument is declared here", argument)],
        hint="give the value another name, or remove the argument",
    )


# ------------------------------------------------------------------------------
# Arguments of blocks


def argument_is_step_key(name: str) -> Fault:
    return Fault("E311", f"{quote(name)} is a reserved key of every step", hint="give the argument another name")


def not_an_argument_type(word: str, types: Iterable[str], meant: str) -> Fault:
    expected = f"one of {listing(types)}, or a default value"
    return Fault("E208", f"{quote(word)} is not an argument type", expected=expected, hint=f"did you mean '{meant}'?")


def default_is_expression(name: str, text: str) -> Fault:
    message = f"a default must be a value, but {quote(text)} is an expression"
    hint = f"compute it in `let:` of the block, for example `let: {{{name}: {text}}}`"
    return Fault("E203", message, hint=hint)


def steps_named_like_verb(name: str, block: Span | None) -> Fault:
    """block: with that name; None if the verb is built in."""
    what = "a block" if block else "a built-in verb"
    message = f"an argument of type `steps` becomes a verb, but {quote(name)} is already {what}"
    notes = [Note("the block is here", block)] if block else []
    return Fault("E309", message, notes=notes, hint="give the argument another name")


def steps_never_run(block: str, name: str) -> Fault:
    message = f"block {block} never runs the steps of its argument {quote(name)}"
    return Fault("E323", message, hint=f"add the step `- {name}`, or remove the argument")


# ------------------------------------------------------------------------------
# Overrides


def override_of_steps(key: str, block: str, path: str, found: str) -> Fault:
    message = f"{quote(key)} of block {block} is steps, and only steps can replace them"
    return Fault("E203", message, found=found, hint=f"{path}=[layer_norm, silu]")


def override_without_value(option: str | None) -> Fault:
    """option: as written on a command line."""
    hint = f"{option.rstrip()}…" if option else "pass a number, a word or a list"
    return Fault("E310", "the override has no value", hint=hint)


def several_overrides(path: str, first: str, others: str) -> Fault:
    return Fault("E310", "an override sets one value", hint=f"--set {path}={first} --set {others}")


def override_is_null() -> Fault:
    return Fault("E310", "an override cannot be null", hint="remove the override to use the default")


def no_such_part(part: str, where: str, known: Sequence[str], hint: str) -> Fault:
    """Describe a part of an override's path. where: the path before it, "" at the beginning; hint: one of those below.
    """
    expected = f"one of {listing(known)}" if known else None
    return Fault("E310", f"there is no {quote(part)} in {where or 'the spec'}", expected=expected, hint=hint)


# Hints for `no_such_part`
NOT_THERE = "an override replaces a value of the spec or sets an argument of a step"
WORD_NOT_NUMBER = "in a path through a pattern, use the word instead of the layer number"
USED = "defaults in a file imported with `use:` cannot be overridden: set the argument where the block is used"


def similar_part(part: str, known: Iterable[str], renamed: Sequence[str]) -> str | None:
    """renamed: the names of the steps whose verb is `part`."""
    return is_renamed(part, renamed) if renamed else did_you_mean(part, known)


def whole_path(path: str) -> str:
    return f"did you mean '{path}'?"

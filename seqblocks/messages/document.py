"""Faults of the YAML dialect: encoding, limits, keys. Those of text that is not YAML are in `yaml_syntax.py`."""

from __future__ import annotations

from collections.abc import Sequence

from seqblocks.errors import Fault, Note, Span, quote


def not_utf8(byte: int) -> Fault:
    return Fault("E103", f"byte 0x{byte:02x} is not UTF-8", hint="save the file as UTF-8")


def empty() -> Fault:
    return Fault("E108", "the spec is empty", hint="begin with `seqblocks: 1`")


def second_document() -> Fault:
    return Fault(
        "E105",
        "a second YAML document begins here",
        expected="one document per file",
        hint="move it to its own file and import it with `use:`",
    )


def yaml_1_1() -> Fault:
    hint = "remove the line: in YAML 1.2, `yes`, `no`, `on` and `off` are words, `1:30` is one too, and `010` is 10"
    return Fault("W906", "the file declares YAML 1.1, but is read as YAML 1.2", hint=hint)


# ------------------------------------------------------------------------------
# Limits


def too_many_characters(found: int, most: int) -> Fault:
    return Fault("E104", f"the text has {found:,} characters", expected=f"at most {most:,}")


def too_deep(most: int) -> Fault:
    return Fault("E104", "nested too deeply", expected=f"at most {most} levels")


def too_large(most: int, has_anchors: bool) -> Fault:
    message = "the document is too large" + (" after alias expansion" if has_anchors else "")
    return Fault("E104", message, expected=f"at most {most:,} nodes")


# ------------------------------------------------------------------------------
# What the dialect leaves out


def tag(written: str) -> Fault:
    return Fault("E106", f"YAML tags are not allowed: {quote(written)}", hint="remove the tag")


def merge_key() -> Fault:
    return Fault("E107", "merge keys are not allowed", hint="write out the keys")


def key_is_no_word(found: str) -> Fault:
    return Fault("E112", "a key must be a word", found=found)


def key_twice(key: str, first: Span) -> Fault:
    notes = [Note("the first one is here", first)]
    return Fault("E102", f"key {quote(key)} appears twice", notes=notes, hint="keep one of them")


def alias_of_itself(name: str) -> Fault:
    return Fault("E101", f"alias '*{name}' refers to itself")


def alias_without_anchor(name: str) -> Fault:
    return Fault("E101", f"alias '*{name}' has no anchor above it")


# ------------------------------------------------------------------------------
# Commas inside braces


def call_in_braces(key: str, pieces: Sequence[str]) -> Fault:
    """pieces: the value and the keys into which its commas split a call."""
    text = ", ".join(pieces)
    message = f"the comma in {quote(text)} ends the value: inside braces, quote a call with several arguments"
    return Fault("E110", message, hint=f'{key}: "{text}"')


def number_in_braces(key: str, pieces: Sequence[str]) -> Fault:
    """pieces: the value and the keys into which its commas split a number."""
    return Fault("E110", f"the comma in {','.join(pieces)} ends the value", hint=f"{key}: {''.join(pieces)}")

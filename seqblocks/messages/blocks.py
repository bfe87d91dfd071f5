"""Faults of the use of blocks: their arguments, and the steps passed to them."""

from __future__ import annotations

from collections.abc import Iterable

from seqblocks.errors import Fault, Note, Span, quote


def uses_itself(name: str, ring: Iterable[str]) -> Fault:
    return Fault("E308", f"block {quote(name)} uses itself: {' -> '.join(ring)}")


def no_primitive(verb: str, key: str, is_block: bool) -> Fault:
    """Describe `init` or `tie` on a block, or on a step that runs an argument of type `steps`."""
    what = "is a block" if is_block else "stands for several steps"
    hint = f"move `{key}` to a step inside"
    if key == "tie":
        hint += "; to share all parameters, use `share: STEP`"
    message = f"`{key}` applies to the parameters of a primitive, but {verb} {what}"
    return Fault("E201", message, hint=hint)


def missing_wire(block: str, argument: str) -> Fault:
    return Fault("E411", f"block {block} needs its input {quote(argument)}")


def missing_argument(block: str, argument: str, type_: str, declared: Span) -> Fault:
    message = f"block {block} needs {quote(argument)}"
    return Fault("E202", message, expected=f"{argument}: {type_}", notes=[_declared(declared)])


def not_a_word(block: str, argument: str, found: str, declared: Span) -> Fault:
    return Fault(
        "E208",
        f"argument {quote(argument)} of block {block} must be a word",
        found=found,
        notes=[_declared(declared)],
        # the default may be a misspelt type
        hint=f"`{argument}: int`, float or bool in `args:` declares another type",
    )


def not_steps(block: str, argument: str, found: str, word: str | None, declared: Span) -> Fault:
    """word: the word that is written there, if it is one."""
    return Fault(
        "E203",
        f"{quote(argument)} of block {block} must be a list of steps",
        found=found,
        notes=[_declared(declared)],
        hint=f"{argument}: [{word or 'layer_norm, silu'}]",
    )


def _declared(span: Span) -> Note:
    return Note("the argument is declared here", span)


# ------------------------------------------------------------------------------
# Notes on faults inside blocks


def in_between(blocks: int) -> Note:
    return Note(f"… and {blocks} blocks in between")


def line_of_bundled(span: Span) -> Note:
    line = span.source.line(span.line).strip()
    return Note(f"the line of the bundled block: `{line[:100]}{'…' if len(line) > 100 else ''}`", span)

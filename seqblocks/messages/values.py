"""Faults of arguments: missing, of the wrong type, out of range, not allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.suggestions import did_you_mean

# ------------------------------------------------------------------------------
# Arguments as a whole


def missing(verb: str, key: str, description: str | None) -> Fault:
    return Fault("E202", f"{verb} needs {quote(key)}", hint=f"{key}: {description}")


def invalid(verb: str, key: str | None, error: str, kind: str, found: str) -> Fault:
    """Describe a validation error of pydantic. error: its message; kind: its type."""
    message = error[0].lower() + error[1:]
    message = message.removeprefix("input should be ").removeprefix("value error, ")
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    code = "E203" if "type" in kind or "parsing" in kind else "E209"
    named = quote(key) if key else "an argument"
    return Fault(code, f"{named} of {verb} must be {message}", at=key, found=found)


# ------------------------------------------------------------------------------
# Numbers


def not_a_number(found: str) -> Fault:
    return Fault("E203", "expected a number or an expression", found=found)


def value_is_no_number(text: str, shown: str, word: str, names: Iterable[str]) -> Fault:
    """Describe an expression whose value is not a number. word: its value, if that may be a misspelt name."""
    found = f"{quote(text)}, which is {shown}"
    return Fault("E203", "expected a number", found=found, hint=(lambda: did_you_mean(word, names)) if word else None)


def not_finite(found: float) -> Fault:
    return Fault("E203", "expected a finite number", found=f"{found:g}")


def too_large() -> Fault:
    return Fault("E504", "the number is too large", expected="at most 10^18")


def not_whole(found: float) -> Fault:
    hint = "use ceil(…), floor(…) or // to get a whole number"
    return Fault("E503", "expected a whole number", found=f"{found:g}", hint=hint)


def not_positive(found: int) -> Fault:
    return Fault("E209", "expected a positive number", found=str(found))


# ------------------------------------------------------------------------------
# Booleans

_TRUTHS = {**dict.fromkeys(("yes", "on", "y"), "true"), **dict.fromkeys(("no", "off", "n"), "false")}


def not_a_flag(found: str) -> Fault:
    return Fault("E203", "true or false is needed here", found=found)


def flag_as_text(text: str, found: str, is_block: bool) -> Fault:
    """Describe a text that means true or false: in quotes, in other letters, or a word of YAML 1.1.

    is_block: whether it follows a `|` or `>`, in lines of its own.
    """
    word = text.lower()
    if is_block:
        found, hint = "a block of text", f"write {_TRUTHS.get(word, word)} on the line of its key"
    elif text in (word, word.upper(), word.title()) and word in ("true", "false"):
        found, hint = "text in quotes", f"remove the quotes: {word}"
    else:
        hint = f"YAML 1.2 has only true and false: write {_TRUTHS.get(word, word)}"
    return Fault("E203", "true or false is needed here", found=found, hint=hint)


# ------------------------------------------------------------------------------
# Words

_BOTH_DIRECTIONS = ("bidirectional", "bidirection", "bidir", "bi", "both")


def not_a_word(choices: Sequence[str], is_open: bool, found: str) -> Fault:
    """choices: the allowed words, if there are only some; is_open: whether names are allowed too."""
    return Fault("E203", "expected a word", expected=_words(choices, is_open), found=found)


def word_not_allowed(word: str, choices: Sequence[str], is_open: bool, names: Collection[str]) -> Fault:
    """names: those in scope."""
    expected = _words(choices, is_open)
    return Fault(
        "E208", f"{quote(word)} is not allowed here", expected=expected, hint=lambda: _near(word, choices, names)
    )


def value_not_allowed(name: str, shown: str, word: str | None, choices: Sequence[str], is_open: bool) -> Fault:
    """Describe the value of a name. word: the value, if it is a word."""
    message = f"{shown} is not an allowed value of {name}"
    hint = None if word is None else lambda: _near(word, choices)
    return Fault("E208", message, expected=_words(choices, is_open), hint=hint)


def _near(word: str, choices: Sequence[str], names: Iterable[str] = ()) -> str | None:
    if word.lower() in _BOTH_DIRECTIONS and "reverse" in choices:
        return "use [forward, reverse] for both directions"
    return did_you_mean(word, [*choices, *names])


def _words(choices: Sequence[str], is_open: bool) -> str:
    return f"one of {listing(choices)}{', or a name' if is_open else ''}" if choices else "a word"


# ------------------------------------------------------------------------------
# Expressions and lists


def unknown_word(fault: Fault, word: str, instead: Sequence[str], names: Collection[str]) -> None:
    """Change the fault of an unknown name, where the words `instead` are allowed too."""
    fault.expected = lambda: f"one of {listing([*instead, *sorted(names)])}"
    fault.hint = lambda: did_you_mean(word, [*instead, *names])


def steps_in_expression(name: str) -> str:
    """Return the hint for an unknown name in an expression, which is an argument of type `steps`."""
    return f"it is an argument of type `steps`, which is used as a verb: `- {name}`"


NO_DEPTH = "`depth` is the number of layers around a step: define your own in `let:` to use it here"


def may_be_depth(fault: Fault, name: str) -> None:
    """Let the fault of an unknown name suggest `depth`, if no name in scope is close."""
    hint = fault.hint
    fault.hint = lambda: (hint() if callable(hint) else hint) or did_you_mean(name, ["depth"])


def list_too_large(values: int, depth: int) -> Fault:
    """values, depth: the limits."""
    expected = f"at most {values:,} values, nested at most {depth} deep"
    return Fault("E104", "the list is too large", expected=expected)


def circular(names: Iterable[str]) -> Fault:
    return Fault("E505", f"circular definition in let: {' -> '.join(names)}")


def written(name: str, shown: str, span: Span) -> Note:
    """Return a note on a named value that a faulty one was computed from."""
    if span.source.is_override:  # not a place in a file
        return Note(f"`{name}` is {shown}: {span.source.name}")
    return Note(f"`{name}` is {shown}", span)

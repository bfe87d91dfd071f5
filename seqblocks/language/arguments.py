"""Read the arguments that a block declares: their types, defaults and bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container
from collections.abc import Mapping as Table

from seqblocks.errors import Fault, Report, Span, Suggestion, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import has_syntax, parse
from seqblocks.language.keys import is_name, known_keys, text_of
from seqblocks.record import Record

DEPTH = "depth"  # in a step and in a default: the number of layers of the enclosing `repeat`s, multiplied
ARGUMENT_TYPES = ("int", "float", "bool", "word", "wire", "steps")
ARGUMENT_KEYS = ("type", "default", "about", "at_least", "at_most")  # of the long form of an argument
_TYPES_ELSEWHERE = {  # not in vocabulary.yaml, which is slow to read and not needed for a valid spec
    "integer": "int", "double": "float", "boolean": "bool", "str": "word", "string": "word", "tensor": "wire",
    **dict.fromkeys(("layers", "modules", "body", "network"), "steps"),
}  # fmt: skip
STEP_KEYS = ("from", "as", "name", "init", "tie", "share", "when")


class Argument(Record):
    """An argument of a block: its type, and its default node unless it is required."""

    name: str
    type: str  # one of ARGUMENT_TYPES, or "any" if the default is a list, a mapping or empty
    span: Span
    default: Node | None
    is_valid: bool = True  # whether the default can be used
    by_depth: bool = False  # whether the default is an expression of `depth` or of earlier arguments
    about: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def meaning(self) -> str:
        """Return its `about`, or the comment in its line if that has no other argument, and its bounds."""
        line = self.span.source.line(self.span.line)
        comment = re.fullmatch(rf"\s*{re.escape(self.name)}: [^#{{]*#\s*(.*)", line)
        return "; ".join(filter(None, [self.about or (comment[1] if comment else ""), self.bounds()]))

    def bounds(self) -> str:
        """Return the bounds of its values, for a reader: "", "at least 1", "1 to 8"."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            return f"{low:.10g} to {high:.10g}"
        return f"at least {low:.10g}" if low is not None else f"at most {high:.10g}" if high is not None else ""


def read_argument(report: Report, name: str, span: Span, node: Node) -> Argument | None:
    """Read an argument in its short or long form; None if its name is not valid."""
    if name in STEP_KEYS:
        message = f"{quote(name)} is a reserved key of every step"
        report.fault(Fault("E311", message, hint="give the argument another name"), span)
        return None
    if not is_name(report, name, span, key=True):
        return None
    if isinstance(node, Mapping) and ("type" in node.entries or "default" in node.entries):
        return _long_argument(report, name, span, node)
    if not isinstance(node, Scalar) or node.value is None:
        return Argument(name, "any", span, node)
    return _short_argument(report, name, span, node)


def _long_argument(report: Report, name: str, span: Span, node: Mapping) -> Argument | None:
    """Read `{type: int, default: 4, about: "…", at_least: 1, at_most: 8}`."""
    known_keys(report, node, ARGUMENT_KEYS, f"argument {name}")
    default, kind = node.get("default"), node.get("type")
    found = Argument(name, "any", span, default)
    if isinstance(default, Scalar) and default.value is not None:
        found = _short_argument(report, name, span, default)
        found.default = default  # also a word that is the name of a type
        if kind is None and found.type in ("wire", "steps") and default.value == found.type:
            message = f"the default of {quote(name)} is the name of a type"
            report.fault(Fault("E208", message, hint=f"write `type: {found.type}`"), default.span)
    if kind is not None:
        declared = _short_argument(report, name, span, kind) if isinstance(kind, Scalar) else found
        if not isinstance(kind, Scalar) or declared.default is not None:
            expected = f"one of {listing(ARGUMENT_TYPES)}"
            report.fault(Fault("E208", "this is not an argument type", expected=expected), kind.span)
            return found
        if default is not None and not _suits(found, declared.type):
            message = f"the default of {quote(name)} is not of its type"
            report.fault(Fault("E208", message, expected=declared.type, found=kind_of(default)), default.span)
            found.is_valid = False
        found.type = declared.type
    found.about = text_of(report, node, "about")
    return found


def _short_argument(report: Report, name: str, span: Span, node: Scalar) -> Argument:
    match node.value:
        case str() if node.value in ARGUMENT_TYPES:
            return Argument(name, node.value, span, None)
        case str() if suggestion := _nearest_type(node.value):
            message = f"{quote(node.value)} is not an argument type"
            expected = f"one of {listing(ARGUMENT_TYPES)}, or a default value"
            hint = Suggestion.of(f"did you mean '{suggestion}'?", node.text, suggestion)
            fault = Fault("E208", message, expected=expected, hint=hint)
            report.fault(fault, node.span)
            return Argument(name, suggestion, span, None)
        case str() if _is_by_depth(node.value):
            return Argument(name, "int" if node.value == DEPTH else "float", span, node, by_depth=True)
        case bool():
            return Argument(name, "bool", span, node)
        case int():
            return Argument(name, "int", span, node)
        case float():
            return Argument(name, "float", span, node)
    return Argument(name, "word", span, node)


def read_bound(report: Report, node: Mapping, key: str, argument: Argument) -> float | None:
    """Read `at_least` or `at_most` of an argument that has a type."""
    bound = node.get(key)
    if bound is None:
        return None
    value = bound.value if isinstance(bound, Scalar) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        report.fault(Fault("E203", f"{key} must be a number", found=kind_of(bound)), bound.span)
        return None
    if argument.type not in ("int", "float"):
        message = f"{key} is for numbers, but {quote(argument.name)} is of type {argument.type}"
        report.fault(Fault("E208", message), bound.span)
        return None
    return value


def plain_default(
    report: Report,
    argument: Argument,
    names: Collection[str],
    earlier: Table[str, Argument],
    arguments: Container[str],
) -> None:
    """Note a default that is an expression of earlier arguments, and report one of other names in the block."""
    node = argument.default
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return
    if node.value in earlier and argument.type in ("word", earlier[node.value].type):
        argument.type, argument.by_depth = earlier[node.value].type, True
        return
    if node.value.isidentifier() or not has_syntax(node.value):
        return
    try:
        needed = {name for name, _ in parse(node.value).names}
    except Fault:  # not an expression, so a plain word
        return
    is_typed = argument.type in ("int", "float", "bool")
    if (needed or is_typed) and needed <= {*earlier, DEPTH}:
        argument.type, argument.by_depth = argument.type if is_typed else "float", True
    elif needed.intersection(names) and needed <= {*names, DEPTH}:
        later = next(name for name in sorted(needed) if name not in earlier and name != DEPTH)
        hint = f"move `{later}` before it" if later in arguments else f"compute `{argument.name}` in `let:` too"
        message = f"a default may use earlier arguments and `depth`, but {quote(later)} is neither"
        report.fault(Fault("E203", message, hint=hint), node.span)
        argument.is_valid = False


def typed_default(report: Report, argument: Argument) -> None:
    """Report a word that is the default of a number or a flag."""
    node, numbers = argument.default, ("int", "float", "bool")
    if argument.by_depth or not argument.is_valid or argument.type not in numbers:
        return
    if isinstance(node, Scalar) and isinstance(node.value, str):
        message = f"the default of {quote(argument.name)} is not of its type"
        report.fault(Fault("E208", message, expected=argument.type, found=quote(node.value)), node.span)
        argument.is_valid = False


def _suits(default: Argument, kind: str) -> bool:
    """Return whether a default, read as a value by itself, may be one of a type. A text may be an expression."""
    node = default.default
    if kind == "steps":
        return isinstance(node, Sequence)
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return kind != "wire"
    return kind == default.type or (kind, default.type) == ("float", "int")


def _is_by_depth(text: str) -> bool:
    """Return whether a default is an expression whose only name is `depth`."""
    if DEPTH not in text or not has_syntax(text):
        return False
    try:
        return {name for name, _ in parse(text).names} == {DEPTH}
    except Fault:
        return False


def _nearest_type(word: str) -> str | None:
    """Return the argument type that corresponds to a name from another language, such as `str`."""
    word = word.lower()
    return word if word in ARGUMENT_TYPES else _TYPES_ELSEWHERE.get(word)

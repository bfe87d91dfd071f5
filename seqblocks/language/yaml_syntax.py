"""Faults of text that is not YAML: what the parser reports, and what the author probably meant."""

from __future__ import annotations

import re
from typing import Any

import yaml

from seqblocks.errors import Diagnostic, Note, Source, Span, quote

NEAR = 200  # number of characters before an error that hints examine
_LIBYAML = (  # (problem of PyYAML, its context, problem of libyaml), which reads where it is installed
    (r"expected (',' or '.'), but got .*", "", r"did not find expected \1"),
    (r"expected <block end>, but found .*", "block mapping", "did not find expected key"),
    (r"expected <block end>, but found .*", "block collection", "did not find expected '-' indicator"),
    (r"expected the node content, but found .*", "", "did not find expected node content"),
    (r"expected '<document start>', but found .*", "", "did not find expected <document start>"),
    (r"expected (alphabetic or numeric character), but found .*", "", r"did not find expected \1"),
    (r"expected (chomping|a comment).*, but found .*", "block scalar", "did not find expected comment or line break"),
    (r"found character .* that cannot start any token", "", "found character that cannot start any token"),
    (r"mapping values are not allowed here", "", "mapping values are not allowed in this context"),
    (r"sequence entries are not allowed here", "", "block sequence entries are not allowed in this context"),
)
_NO_COLON = ("could not find expected ':'", "mapping values are not allowed in this context")  # how the words begin
_SPACES = "[\u00a0\u2000-\u200b\u202f\u3000\ufeff]"  # characters that look like a space, or like nothing
_PRINTABLE = "[\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


def not_yaml(error: yaml.YAMLError, source: Source, unclosed: tuple[str, Span] | None) -> Diagnostic:
    """Return the diagnostic of an error of the parser. unclosed: the innermost bracket that is open, and its place."""
    mark: Any = getattr(error, "problem_mark", None)
    problem = _problem(error)
    if isinstance(error, yaml.reader.ReaderError):
        return _unreadable(error, source)
    if mark is None:
        return Diagnostic("E101", f"not YAML: {problem}", source.character_at(1, 1))
    span = source.character_at(mark.line + 1, mark.column + 1)
    if "quoted scalar" in (getattr(error, "context", None) or "") and error.context_mark:  # type: ignore[attr-defined]
        return _invalid_escape(problem, span) or _open_quote(error.context_mark, source)  # type: ignore[attr-defined]
    if unclosed is None and problem.startswith(_NO_COLON):
        if missing := _missing_colon(source, span.line):
            return missing
        hint = _two_keys(source.line(span.line)) or _slip(source, span.line)
    else:
        hint = _slip(source, span.line)
    hint = _hint_here(span, unclosed) or hint
    notes = (Note(f"the '{unclosed[0]}' that is not closed is here", unclosed[1]),) if unclosed else ()
    return Diagnostic("E101", f"not YAML: {problem}", _inside(span), notes=notes, hint=hint)


def _problem(error: yaml.YAMLError) -> str:
    """Return the problem in the words of libyaml, so that messages are the same where Python itself reads YAML."""
    problem, context = getattr(error, "problem", None), getattr(error, "context", None) or ""
    if not problem:
        return str(error).splitlines()[0]
    for pattern, place, words in _LIBYAML:
        if place in context and (match := re.fullmatch(pattern, problem, re.DOTALL)):
            return match.expand(words)
    return str(problem)


def _inside(span: Span) -> Span:
    """Return the place of an error, or the last character of the text if that ends before this line."""
    source = span.source
    if span.line <= len(source.lines):
        return span
    text = source.text.rstrip()
    return source.character(len(text) - 1) if text else source.character_at(1, 1)


def _hint_here(span: Span, unclosed: tuple[str, Span] | None) -> str | None:
    """Return a hint from the text around an error."""
    text, column = span.source.line(span.line), span.column
    if "\t" in text[: column]:
        return "indent with spaces: YAML does not allow tabs"
    inside = text[unclosed[1].column : column - 1] if unclosed and unclosed[1].line == span.line else ""
    hint = _hole(text, column) or _index(text, column) or _character(text, column)
    hint = hint or _comma(inside[-NEAR:], text[column - 1 :])
    if unclosed and not hint:
        return f"is a '{'}' if unclosed[0] == '{' else ']'}' missing?"
    return hint


def _index(text: str, column: int) -> str | None:
    """Return a hint for an index without quotes in braces: `{features: widths[1]}`."""
    near = text[max(0, column - 1 - NEAR) : column - 1]  # the search is quadratic in long words
    name, index = re.search(r"\w+$", near), re.match(r"\[[^\[\]{}]*\]", text[column - 1 :])
    return f'inside braces, quote an expression with an index: "{name[0]}{index[0]}"' if name and index else None


def _unreadable(error: yaml.reader.ReaderError, source: Source) -> Diagnostic:
    text = source.text
    at = next((i for i, c in enumerate(text) if not re.match(_PRINTABLE, c)), 0)
    if not text:
        return Diagnostic("E101", f"not YAML: {error.reason}", source.character(at))
    hint = "save the file as UTF-8" if text[at] == "\0" else "remove or escape it"
    message = f"character U+{ord(text[at]):04X} is not allowed in YAML"
    return Diagnostic("E109", message, source.character(at), hint=hint)


# ------------------------------------------------------------------------------
# Quotes


def _open_quote(mark: Any, source: Source) -> Diagnostic:
    span = source.character_at(mark.line + 1, mark.column + 1)
    return Diagnostic("E101", "invalid YAML: the quote that opens here is not closed", span)


def _invalid_escape(problem: str, span: Span) -> Diagnostic | None:
    """Return the diagnostic of an invalid escape in double quotes, or None for another problem."""
    text = span.source.line(span.line)
    start = text.rfind("\\", 0, span.column)  # the problem is at the backslash or just after it
    escape = re.match(r"\\([xuU][0-9a-fA-F]*|.)", text[start:]) if start >= 0 else None
    if escape is None or not re.search("escape|hexa?decimal", problem):
        return None
    at = Span(span.source, span.line, start + 1, span.line, start + 1 + len(escape[0]))
    hint = "use single quotes, in which a backslash is an ordinary character, or write it twice"
    return Diagnostic("E101", f"invalid YAML: {quote(escape[0])} is not an escape in double quotes", at, hint=hint)


# ------------------------------------------------------------------------------
# Colons


def _missing_colon(source: Source, line: int) -> Diagnostic | None:
    """Return the diagnostic of a key without a colon, or without a space after it; None if there is none."""
    found = _word_without_colon(source, line)
    if found is None:
        return None
    number, start, word = found
    rest = _bare(source.line(number))[start - 1 + len(word) :]
    what = f"a space is missing after {quote(word + ':')}" if rest.startswith(":") else None
    what = what or f"a colon is missing after {quote(word)}"
    span = Span(source, number, start, number, start + len(word))
    fixed = f"{word}: {rest.removeprefix(':').strip()}".rstrip()
    return Diagnostic("E101", f"not YAML: {what}", span, hint=fixed)


def _word_without_colon(source: Source, line: int) -> tuple[int, int, str] | None:
    """Return (line, column, word) of the word after which a colon is probably missing, here or just above."""
    numbers = [n for n in range(line, 0, -1) if _bare(source.line(n))][:4]
    for at, number in enumerate(numbers):
        text = _bare(source.line(number))
        before = _bare(source.line(numbers[at + 1])) if at + 1 < len(numbers) else ""
        below = _bare(source.line(numbers[at - 1])) if at else ""
        word = re.match(r"(\s*(?:- +)?)([A-Za-z_]\w*)(?=\s|$|:\S)", text)
        if not word or re.search(r":(\s|$)", text):
            continue
        if before and _indent(before) < _indent(text) and not re.search(r":$|^\s*- ", before):
            continue  # this line continues the text of the line above
        if text.lstrip().startswith("- ") and _indent(below) <= _indent(text):
            continue  # a step without arguments
        return number, len(word[1]) + 1, word[2]
    return None


def _two_keys(line: str) -> str | None:
    """Return a hint if a key and value appear where another key's value is expected: `- embed: features: 64`."""
    match = re.match(r"\s*(?:- +)?(\w+): +(\w+): +([^#]*[^#\s])", line)
    if not match:
        return None
    key, text = match[1], f"{match[2]}: {match[3]}"
    if key == "about":
        return f'quote text that contains a colon: `{key}: "{text}"`'
    if text.count("}") > text.count("{"):
        return f"a '{{' is missing: `{key}: {{{text}`"
    return f"write a mapping in one line with braces: `{key}: {{{text}}}`"


# ------------------------------------------------------------------------------
# Lines


def _slip(source: Source, line: int) -> str | None:
    """Return a hint for a block that ends too early, based on this line and the lines above it."""
    current = source.line(line)
    above: list[tuple[int, str]] = []  # with decreasing indentation, nearest first
    for number in range(line - 1, 0, -1):
        text = source.line(number)
        if text.strip() and (not above or _indent(text) < _indent(above[-1][1])):
            above.append((number, text))
    for number, text in [(line, current), *above[:1]]:
        if found := re.match(rf"[ -]*(?:[\w.]+:? *)?({_SPACES})", text):  # not in texts or comments
            return f"line {number} contains U+{ord(found[1]):04X} instead of a space: replace it"
        if re.match(r"\s*-[^\s-]", text):
            return f"a space is missing after the '-' in line {number}"
    key = re.fullmatch(r"(\s*(?:- +)?)([\w.]+):", _bare(above[0][1])) if above else None
    if key and current.lstrip().startswith("- ") and _indent(current) < len(key[1]):
        return f"indent the items of `{key[2]}:` by {len(key[1]) + 2} spaces"
    same = next(((number, text) for number, text in above if _indent(text) == _indent(current)), None)
    if same and current.lstrip().startswith("- ") and not same[1].lstrip().startswith("-"):
        return f"line {same[0]} is among the items of a list: add '- ' in front"
    if same and current.strip() and not current.lstrip().startswith("-") and same[1].lstrip().startswith("- "):
        return f"line {same[0]} is an item of a list: add '- ' in front of this line, or remove it there"
    if not same and above and current.strip():
        known = " or ".join(str(n) for n in sorted({_indent(text) for _, text in above[:2]}, reverse=True))
        count = f"{_indent(current)} space{'s' if _indent(current) != 1 else ''}"
        return f"this line is indented by {count}, the lines above by {known}"
    return None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _bare(line: str) -> str:
    """Strip the comment from a line."""
    return re.sub(r"(^|\s)#.*", "", line).rstrip()


# ------------------------------------------------------------------------------
# Characters


def _character(line: str, column: int) -> str | None:
    """Return a hint for an unexpected character, based on the character alone."""
    at, before = line[column - 1 : column], line[: column - 1]
    name = re.match(r"\{ *(\w+) *\}", line[column - 1 :])
    if before.endswith("$") and name:
        return f"write the name without braces: `{name[1]}`"
    if line.startswith("%YAML"):
        return "remove the line: specs are YAML 1.2"
    if at and at in "%@`":
        return f"a value cannot begin with '{at}': remove it, or quote the value"
    for left, right in ("{}", "[]"):
        if at == right and before.count(right) >= before.count(left):
            return f"remove the extra '{right}', or add the missing '{left}'"
    return None


def _hole(line: str, column: int) -> str | None:
    """Return a hint for an official name with an index in braces, `blocks.{layer}.w`, that is not in quotes."""
    for name in re.finditer(r"(?<![\w.$])[\w.]*(\{[^{},:]+\})[\w.{}]*", line):
        if name.start() < column - 1 <= name.end() and name[0] != name[1]:
            bare = name[0]
            while bare.count("}") > bare.count("{") and bare.endswith("}"):
                bare = bare[:-1]
            return f'quote names with {name[1]}: "{bare}"'
    return None


def _comma(inside: str, rest: str) -> str | None:
    """Return a hint for a missing comma between a value and the next key in braces: `{features: 8 bias: false}`."""
    match = re.search(r"[:,][^:,;]*[^\s:,;](;?) *(?<=[\s;])(\w+)$", inside)
    if not match or not rest.startswith(":"):
        return None
    return f"use ',' instead of ';' before `{match[2]}`" if match[1] else f"a ',' is missing before `{match[2]}`"

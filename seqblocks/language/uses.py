"""Add a file to the list `use:` of a spec, as an edit of its text."""

from __future__ import annotations

from seqblocks.errors import Span
from seqblocks.language.document import Mapping, Sequence


def added(root: Mapping, file: str) -> tuple[Span, str] | None:
    """Return where to write what so that a document uses a bundled file; None if there is no place for it."""
    use, first = root.get("use"), root.entries.get("seqblocks")
    if isinstance(use, Sequence) and not use.items:
        return use.span, f"[{file}]"
    if isinstance(use, Sequence):
        last = use.items[-1].span
        written = last.source.line(last.line)
        is_block = written.lstrip().startswith("- ")
        text = f"\n{written[: len(written) - len(written.lstrip())]}- {file}" if is_block else f", {file}"
        return _at(last, last.end_line, last.end_column), text
    if use is not None or first is None:
        return None
    last = first[1].span
    if root.span.source.line(root.span.line)[root.span.column - 1 :].startswith("{"):
        return _at(last, last.end_line, last.end_column), f", use: [{file}]"
    return _at(last, last.end_line, len(last.source.line(last.end_line)) + 1), f"\nuse: [{file}]"


def _at(span: Span, line: int, column: int) -> Span:
    return Span(span.source, line, column, line, column)

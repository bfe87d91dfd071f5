"""Edits of a text: what to write in which ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from seqblocks.editor.positions import Spot, lines_of
from seqblocks.errors import Span


class Edit(NamedTuple):
    """The text to write in a range, which may be empty."""

    span: Span
    text: str


def applied(text: str, edits: Iterable[Edit]) -> str:
    """Return a text after edits whose ranges do not overlap."""
    lines = lines_of(text, "utf-32")
    for span, new in sorted(edits, key=lambda edit: edit.span[1:], reverse=True):
        start = lines.offset_of(Spot(span.line, span.column))
        text = text[:start] + new + text[lines.offset_of(Spot(span.end_line, span.end_column)) :]
    return text


def inserted(span: Span, text: str) -> Edit:
    """Return the edit that writes a text before a span."""
    return Edit(span._replace(end_line=span.line, end_column=span.column), text)

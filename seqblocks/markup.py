"""Tables in HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from seqblocks.errors import visible


def table(titles: Iterable[str], rows: Iterable[Iterable[str]], numbers: Iterable[str] = ("parameters",)) -> str:
    """Return a table. numbers: the titles of the columns that are aligned on the right."""
    titles, right = list(titles), set(numbers)
    sides = [f'style="text-align: {"right" if title in right else "left"}; white-space: pre"' for title in titles]
    out = [_row("th", titles, sides), *(_row("td", cells, sides) for cells in rows)]
    return f"<table>{''.join(out)}</table>"


def titled(title: str, content: str) -> str:
    """Return content below a line of bold text."""
    return f"<b>{text(title)}</b>{content}"


def lines(entries: Iterable[tuple[str, str]]) -> str:
    """Return a line for each label and its value."""
    return "<br>".join(f"<b>{text(label)}</b> {text(value)}" for label, value in entries)


def _row(tag: str, cells: Iterable[str], sides: list[str]) -> str:
    made = (f"<{tag} {side}>{text(cell)}</{tag}>" for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{''.join(made)}</tr>"


def text(value: str, lines: bool = False) -> str:
    """Return text as HTML, with control characters made visible; `lines`: except for the ends of lines."""
    if lines:
        return "\n".join(map(text, value.splitlines()))
    return escape(visible(value))

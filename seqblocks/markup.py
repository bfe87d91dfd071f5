"""Tables in HTML, for notebooks, and pages that load nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from seqblocks.errors import visible

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")  # of curves
STYLE = (
    ":root{color-scheme:light dark}body{font:14px/1.5 system-ui,sans-serif;max-width:72em;margin:2em auto;"
    "padding:0 1em;color:light-dark(#1f2328,#d1d7e0);background:light-dark(#fff,#0d1117)}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid light-dark(#d0d7de,#3d444d)}"
    "figure{margin:1em 0;overflow-x:auto}h1,h2,h3,p{overflow-wrap:anywhere}"
)


def page(title: str, body: str, style: str = "") -> str:
    """Return a page that follows the reader's choice of light or dark. body: HTML. A browser loads nothing for it."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


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

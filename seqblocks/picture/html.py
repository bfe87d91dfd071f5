"""A drawing as one HTML file: boxes that fold, beside the text of the spec. It loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from seqblocks.errors import Source, visible
from seqblocks.picture.boxes import Box, lanes

OPEN = 40  # boxes: larger drawings begin with the layers folded


def html(boxes: Sequence[Box], title: str, totals: Sequence[str], sources: Sequence[Source]) -> str:
    """Return a page with the boxes, and the texts in which their steps are written."""
    style, script = (files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    page = _Page(boxes, sources)
    return "\n".join(
        [
            "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>", f"<style>{style}</style>", "</head>", "<body>", "<header>",
            f"<h1>{_text(title)}</h1>", *(f"<p>{_text(line)}</p>" for line in totals),
            '<nav><input id="search" type="search" placeholder="search ( / )" aria-label="search">',
            '<button id="expand">expand all (e)</button> <button id="fold">fold all (f)</button>',
            '<span id="count" role="status"></span></nav>', "</header>", "<main>",
            '<section id="picture">', *page.list(boxes, ""), "</section>", '<section id="texts">', *page.texts(),
            "</section>", "</main>", f"<script>{script}</script>", "</body>", "</html>", "",
        ]
    )  # fmt: skip


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


class _Page:
    def __init__(self, boxes: Sequence[Box], sources: Sequence[Source]) -> None:
        self.sources = {source.name: (number, source) for number, source in enumerate(sources)}
        everything = [box for each in boxes for box in each.inside()]
        self.open = len(everything) <= OPEN

    def list(self, boxes: Sequence[Box], around: str) -> Iterator[str]:
        """Yield boxes below one another, with their wires for the script."""
        wires = json.dumps([(maker, reader, lane) for maker, reader, lane, _ in lanes(boxes)], separators=(",", ":"))
        yield f'<div class="list" data-wires="{_text(wires)}">' if wires != "[]" else '<div class="list">'
        for box in boxes:
            yield from self.box(box, around)
        yield "</div>"

    def box(self, box: Box, around: str) -> Iterator[str]:
        name = box.path.removeprefix(f"{around}.") if around else box.path
        kind = f"{box.kind} faulty" if box.problems else box.kind
        data = f'data-name="{_text(name)}"'  # the script adds the path
        if box.span and box.span.source.name in self.sources:
            data += f' data-at="{self.line(box.span.source.name, box.span.line)}"'
        if not box.boxes:
            yield f'<div class="leaf {kind}" {data}>{self.head(box)}</div>'
            return
        is_open = " open" if self.open or box.kind in ("repeat", "layer") else ""
        yield f'<details class="box {kind}" {data}{is_open}><summary>{self.head(box)}</summary>'
        if box.side_by_side:
            yield '<div class="row">'
            for each in box.boxes:
                yield from self.box(each, box.path)
            yield "</div>"
        else:
            yield from self.list(box.boxes, box.path)
        yield "</details>"

    def head(self, box: Box) -> str:
        share = f'<progress value="{box.params}"></progress>'  # of the largest number, which the script finds
        parts = [f"<b>{_text(box.title)}</b>", share if box.params else "", f"<small>{_text(box.facts)}</small>"]
        if len(box.reads) > 1:
            reads = ", ".join(f"{read.port} ← {read.label} {read.type}" for read in box.reads)
            parts.append(f'<div class="reads">{_text(reads)}</div>')
        parts += (f'<div class="problem">{_text(problem)}</div>' for problem in box.problems)
        return " ".join(filter(None, parts))

    def texts(self) -> Iterator[str]:
        for _, source in self.sources.values():
            lines = (
                f'<a id="{self.line(source.name, at)}" href="#">{_text(line)}</a>'
                for at, line in enumerate(source.lines, 1)
            )
            yield f"<h2>{_text(source.name)}</h2><pre>{''.join(lines)}</pre>"

    def line(self, name: str, number: int) -> str:
        """Return the id of a line in the page."""
        return f"{self.sources[name][0]}-{number}"


def _text(text: str) -> str:
    return escape(visible(text))

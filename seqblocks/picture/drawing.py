"""Drawings of specs and models: what `seqblocks.draw` returns."""

from __future__ import annotations

import os
from html import escape
from typing import Any

from seqblocks import graph
from seqblocks.analysis.analyse import Analysis, analyse_text
from seqblocks.cost import count_state
from seqblocks.errors import Source, UsageError
from seqblocks.graph import Graph, ModelSpec
from seqblocks.language.spec_files import locate
from seqblocks.picture.boxes import Box, boxes_of


class Drawing:
    """A picture of a model, which notebooks show.

    svg(), html(), mermaid() and dot() return its text in these formats. boxes: what it shows, outermost first.
    """

    def __init__(self, title: str, totals: list[str], boxes: list[Box], sources: list[Source]) -> None:
        self.title, self.totals, self.boxes, self.sources = title, totals, boxes, sources

    def __repr__(self) -> str:
        return f"<Drawing of {self.title}: {sum(1 for each in self.boxes for _ in each.inside())} boxes>"

    def svg(self) -> str:
        """Return a picture without a script."""
        from seqblocks.picture.svg import svg

        return svg(self.boxes, self.title, self.totals)

    def html(self) -> str:
        """Return a page with boxes that fold, a search, and the text of the spec beside them. It loads nothing."""
        from seqblocks.picture.html import html

        return html(self.boxes, self.title, self.totals, self.sources)

    def mermaid(self) -> str:
        """Return a flowchart for Mermaid."""
        from seqblocks.picture.markup import mermaid

        return mermaid(self.boxes, self.title)

    def dot(self) -> str:
        """Return a digraph for Graphviz."""
        from seqblocks.picture.markup import dot

        return dot(self.boxes, self.title)

    def _repr_html_(self) -> str:
        frame = 'sandbox="allow-scripts" width="100%" height="600" frameborder="0"'
        return f'<iframe srcdoc="{escape(self.html())}" {frame}></iframe>'


def draw(what: Any, *, depth: int | None = None, set: dict[str, Any] | None = None) -> Drawing:
    """Draw a spec (a path, or the name of a bundled one), a `ModelSpec`, a built model, or an `Analysis`.

    depth: levels of boxes, by default all. set: overrides of a spec that is named. A spec with faults is drawn as far
    as it is known, with the faults at their steps. torch is not needed. Raises UsageError for anything else.
    """
    if depth is not None and depth < 1:
        raise UsageError(f"depth must be at least 1, not {depth}")
    if isinstance(what, str | os.PathLike):
        text, name, base = locate(what)
        return drawing_of(analyse_text(text, name, base, set), depth)
    if set:
        raise UsageError("set overrides values of a spec that is given by its path or name")
    if isinstance(what, Analysis):
        return drawing_of(what, depth)
    model = what if isinstance(what, ModelSpec) else getattr(what, "spec", None)
    if not isinstance(model, ModelSpec):
        raise UsageError(f"draw takes a spec or a model, not {type(what).__name__}")
    return _drawing(model.name, model.graph, model, depth, [])


def drawing_of(found: Analysis, depth: int | None = None) -> Drawing:
    """Draw what is known of an analysed spec. Raises UsageError if that is nothing, or only blocks."""
    body = found.lowered.body
    if body is None:
        if not found.ok:
            raise found.error()
        raise UsageError("the file defines blocks but no model, so there is nothing to draw")
    name = found.model.name if found.model else found.file.source.name if found.file else "spec"
    return _drawing(name, body, found.model, depth, [each for each in found.diagnostics if each.span])


def _drawing(name: str, body: Graph, model: ModelSpec | None, depth: int | None, problems: list[Any]) -> Drawing:
    boxes = boxes_of(body, model, depth, problems)
    errors = [each for each in problems if each.severity == "error"]
    totals = [f"{len(errors)} error{'s' * (len(errors) != 1)}"] if errors else _totals(body, model)
    spans = [box.span for each in boxes for box in each.inside() if box.span]
    sources = {span.source.name: span.source for span in spans}
    return Drawing(name, totals, boxes, sorted(sources.values(), key=lambda source: source.bundled))


def _totals(body: Graph, model: ModelSpec | None) -> list[str]:
    types = f"{model.input_text} -> {model.output_text}" if model else ""
    state = count_state(body)
    counts = f"{graph.count(body):,} parameters" + (f", state of {state:,} elements per sequence" if state else "")
    return [*filter(None, [types]), counts]

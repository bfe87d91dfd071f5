"""Totals of the model, to show above it."""

from __future__ import annotations

from typing import NamedTuple

from seqblocks import graph
from seqblocks.cost import count_state
from seqblocks.editor.opened import Opened
from seqblocks.errors import Span


class Lens(NamedTuple):
    """A line of text above a range."""

    span: Span
    text: str


def lenses(opened: Opened) -> list[Lens]:
    """Return the totals of the model, or nothing if it has faults: they would be those of a part."""
    analysis = opened.analysis
    model, file = analysis.model, analysis.file
    if not model or not file or not file.model_span or not analysis.ok:
        return []
    state = count_state(model.graph)
    parts = [f"{model.input_text} → {model.output_text}", f"{graph.count(model.graph):,} parameters"]
    parts += [f"state of {state:,} elements per sequence"] if state else []
    return [Lens(file.model_span, " · ".join(parts))]

"""Sort the diagnostics of a spec by the files in which an editor shows them."""

from __future__ import annotations

from seqblocks.editor.opened import Opened
from seqblocks.errors import Diagnostic, Span


def by_file(opened: Opened) -> dict[str, list[tuple[Span, Diagnostic]]]:
    """Return the diagnostics by the names of their files; the file itself has an entry in any case.

    A diagnostic without a place, or in a bundled file, which the user cannot change, is shown at the top of the spec.
    """
    found: dict[str, list[tuple[Span, Diagnostic]]] = {opened.name: []}
    top = opened.source.character_at(1, 1)
    for each in opened.analysis.diagnostics:
        span = each.span if each.span and each.span.source.kind in ("own", "text") else top
        found.setdefault(span.source.name, []).append((span, each))
    return found


def message(diagnostic: Diagnostic) -> str:
    """Return the text of a diagnostic, with what was expected and found, its notes without places, and its hint."""
    lines = [diagnostic.message]
    remarks = [("expected", diagnostic.expected), ("found", diagnostic.found)]
    remarks += [("note", note.text) for note in diagnostic.notes if note.span is None]
    remarks += [("hint", diagnostic.hint)]
    return "\n".join([*lines, *(f"{label}: {text}" for label, text in remarks if text)])

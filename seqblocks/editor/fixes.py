"""Quick fixes: edits that remove a fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from seqblocks.editor import fillings
from seqblocks.editor.edits import Edit
from seqblocks.editor.naming import with_name
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot, touches
from seqblocks.editor.steps import Written, as_step, trail, walk
from seqblocks.errors import Diagnostic
from seqblocks.language.document import Scalar

_NUMBER = re.compile(r"([\d,]+)( \([+-][\d,]+\))?")  # with its difference from what is expected


class QuickFix(NamedTuple):
    """An edit that removes a diagnostic, and its title."""

    title: str
    edits: list[Edit]
    diagnostic: Diagnostic


def fixes(opened: Opened, first: Spot, last: Spot) -> list[QuickFix]:
    """Return the fixes of the faults that touch a range of the text."""
    found: list[QuickFix] = []
    for each in opened.analysis.diagnostics:
        span = each.span
        if span and opened.is_own(span) and first <= Spot(span.end_line, span.end_column) and _start(each) <= last:
            found += _of(opened, each)
    return found


def _start(each: Diagnostic) -> Spot:
    assert each.span
    return Spot(each.span.line, each.span.column)


def _of(opened: Opened, each: Diagnostic) -> Iterator[QuickFix]:
    if each.fix and each.fix.span and each.fix.span.source.kind in ("own", "text"):
        edit = Edit(each.fix.span, each.fix.text)
        if edit.span.text == edit.text:  # the word is right, but something else is missing
            yield QuickFix((each.hint or "").replace("add", "Add", 1), [Edit(*other) for other in each.fix.more], each)
        else:
            edits = [edit, *(Edit(*other) for other in each.fix.more)]
            yield QuickFix(f"Change '{edit.span.text}' to '{edit.text}'", edits, each)
    elif each.code in ("E202", "E411") and " needs " in each.message:
        yield from (QuickFix(title, edits, each) for title, edits in fillings.missing(opened, each))
    elif each.code == "E209":
        yield from (QuickFix(title, edits, each) for title, edits in fillings.out_of_range(opened, each))
    elif each.code == "E304":
        yield from _name(opened, each)
    elif each.code.startswith("E7"):
        yield from _expectation(opened, each)


def _name(opened: Opened, each: Diagnostic) -> Iterator[QuickFix]:
    """Yield the fix of a step whose name another one has already."""
    step = next((step for step in _steps(opened) if step.span == each.span), None)
    if step and step.get("name") is None and (edit := with_name(opened, step, name := _free(opened, step), step.verb)):
        yield QuickFix(f"Add `name: {name}`", [edit], each)


def _steps(opened: Opened) -> Iterator[Written]:
    return filter(None, map(as_step, walk(opened.root))) if opened.root else iter(())


def _free(opened: Opened, step: Written) -> str:
    """Return a name that no step of the file has: the verb with a number."""
    taken = {step.verb for step in _steps(opened)}
    named = (step.get(key) for step in _steps(opened) for key in ("name", "as"))
    taken |= {node.text for node in named if isinstance(node, Scalar)}
    return next(name for number in range(2, len(taken) + 3) if (name := f"{step.verb}_{number}") not in taken)


def _expectation(opened: Opened, each: Diagnostic) -> Iterator[QuickFix]:
    """Yield the fix of a number in `expect:` that is not that of the model."""
    found, expected = _NUMBER.fullmatch(each.found or ""), _NUMBER.fullmatch(each.expected or "")
    if opened.root is None or not (found and expected):
        return
    last = trail(opened.root, _start(each))[-1]
    if isinstance(last.node, Scalar) and not last.on_key and touches(last.node.span, _start(each)):
        edit = Edit(last.node.span, found[1].replace(",", "_"))
        yield QuickFix(f"Set `{last.key}` to {found[1]}", [edit], each)

"""The shape and the counts of each step, to show at the end of its line."""

from __future__ import annotations

from typing import NamedTuple

from seqblocks.analysis.step_list import LocatedStep
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot


class Hint(NamedTuple):
    """A text to show at a position, and a longer one."""

    spot: Spot
    text: str
    more: str


def hints(opened: Opened, first: int = 1, last: int | None = None) -> list[Hint]:
    """Return the hints of the steps in some lines. Steps whose type is unknown after a fault have none.

    A line with several steps shows its first one, and lists the others in the longer text.
    """
    by_line: dict[int, list[LocatedStep]] = {}
    for step in opened.steps:
        span = opened.now(step.span) if opened.is_own(step.span) else None
        if span and step.type and span.line >= first and (last is None or span.line <= last):
            by_line.setdefault(span.line, []).append(step)
    found = []
    for line, steps in sorted(by_line.items()):
        steps.sort(key=lambda step: step.span.column)
        column = len(opened.source.line(line).rstrip()) + 1
        more = "\n\n".join(f"{step.verb}: {facts(step, everything=True)}" for step in steps)
        found.append(Hint(Spot(line, column), facts(steps[0]), more))
    return found


def facts(step: LocatedStep, everything: bool = False) -> str:
    """Return shape and counts of a step in one line. everything: also the cost and the state, which are often long."""
    parts = [step.type or "unknown"]
    if step.params:
        parts.append(f"{step.params:,} parameter{'s' * (step.params != 1)}")
    if everything and step.macs:
        parts.append(f"{step.macs:,.0f} multiply-accumulates per token")
    if everything and step.state:
        parts.append(f"a state of {step.state:,} numbers")
    times = f" × {step.times}" if step.times > 1 else ""
    return " · ".join(parts) + times + (" (they differ)" if step.varies else "")

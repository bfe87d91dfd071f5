"""The shape and the counts of each step, to show at the end of its line."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from seqblocks.analysis.step_list import LocatedStep
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot

PARTS = ("shapes", "params", "macs", "state")  # what a hint can show
SHOWN = ("shapes", "params")  # what it shows by default; the others are often long


class Hint(NamedTuple):
    """A text to show at a position, and a longer one."""

    spot: Spot
    text: str
    more: str


def hints(opened: Opened, first: int = 1, last: int | None = None, shown: Collection[str] = SHOWN) -> list[Hint]:
    """Return the hints of the steps in some lines. Steps whose type is unknown after a fault have none.

    shown: some of PARTS; steps without any of them have no hint.

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
        more = "\n\n".join(f"{step.verb}: {facts(step, PARTS)}" for step in steps)
        if text := facts(steps[0], shown):
            found.append(Hint(Spot(line, column), text, more))
    return found


def facts(step: LocatedStep, shown: Collection[str] = SHOWN) -> str:
    """Return shape and counts of a step in one line. shown: some of PARTS."""
    parts = [step.type or "unknown"] if "shapes" in shown else []
    if step.params and "params" in shown:
        parts.append(f"{step.params:,} parameter{'s' * (step.params != 1)}")
    if step.macs and "macs" in shown:
        parts.append(f"{step.macs:,.0f} multiply-accumulates per token")
    if step.state and "state" in shown:
        parts.append(f"a state of {step.state:,} elements")
    times = f" × {step.times}" if step.times > 1 else ""
    return " · ".join(parts) + times + (" (they differ)" if step.varies else "") if parts else ""

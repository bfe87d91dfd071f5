"""Checks of widths and axes that many steps share: `shape` in `seqblocks/ops/VERB.py` has those of one verb.

They raise a Fault, which the analysis reports at the step.
"""

from __future__ import annotations

from seqblocks.errors import Fault
from seqblocks.types import Wire, divisors_near


def must_divide(value: int, width: int, what: str, of: str, at: str | None = None) -> int:
    """Return width / value. Raises Fault E401 with possible values."""
    if value <= 0 or width % value:
        message = f"{what} ({value}) must divide {of} ({width})"
        raise Fault("E401", message, at=at or what, hint=lambda: divisors_near(width, value))
    return width // value


def must_have_grid(
    x: Wire, who: str, at: str | None = None, instead: str = "", entry: str | None = None
) -> None:
    """Raise Fault E407 unless the tokens of `x` are those of an image. instead: a verb or word that needs none."""
    if x.grid is not None:
        return
    source = "an input that is an image or has a `grid: [rows, columns]` (after class_token there is none)"
    hint = f"use {instead}, or {source}" if instead else f"start from {source}"
    if x.origin and x.origin.verb == "choose":
        hint = "the chosen tokens are a sequence without rows and columns: move the step before `choose`"
    raise Fault(
        "E407",
        f"{who} needs the tokens of an image",
        at=at,
        entry=entry,
        found=f"{x} without rows and columns",
        hint=hint,
    )


def must_match(name: str, found: Wire, width: int, because: str) -> None:
    """Raise Fault E402 unless port `name` has `width` features."""
    if found.features == width:
        return
    note = found.origin_note(f"`{name}`")
    raise Fault(
        "E402",
        f"'{name}' must have {width} features",
        at=name,
        expected=f"{width} ({because})",
        found=f"{found.features}",
        notes=[note] if note else [],
    )


def ids_have_no_features(wire: Wire, done: str, name: str) -> Fault:
    """Return Fault E403 of an attempt to split, join or add token ids. done: "split", for instance."""
    note = wire.origin_note(name)
    return Fault(
        "E403",
        f"token ids cannot be {done}",
        expected="features, such as the output of embed",
        found=f"{wire}",
        notes=[note] if note else [],
        hint="embed the tokens first, with embed",
    )

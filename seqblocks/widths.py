"""Checks of widths and axes that many steps share. They raise a Fault, which the analysis reports at the step."""

from __future__ import annotations

from seqblocks import messages
from seqblocks.types import Wire


def must_divide(value: int, width: int, what: str, of: str, at: str | None = None) -> int:
    """Return width / value. Raises Fault E401 with possible values."""
    if value <= 0 or width % value:
        raise messages.wires.does_not_divide(value, width, what, of, at or what)
    return width // value


def must_have_grid(
    x: Wire, who: str, at: str | None = None, instead: str = "", entry: str | None = None
) -> None:
    """Raise Fault E407 unless the tokens of `x` are those of an image. instead: a verb or word that needs none."""
    if x.grid is None:
        raise messages.wires.no_grid(who, x, at, instead, entry)


def must_match(name: str, found: Wire, width: int, because: str) -> None:
    """Raise Fault E402 unless port `name` has `width` features."""
    if found.features != width:
        raise messages.wires.wrong_width(name, found, width, because)

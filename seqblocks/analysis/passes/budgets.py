"""Read a figure of `expect:`: a value that a model must have, or limits, with units.

`1.3M`, `"<= 20 kB"`, `{at_most: 1.3M, at_least: 1M}`, `{about: 130M, tolerance: 0.01}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping as Table
from typing import Any

from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.values import number
from seqblocks.errors import Fault, Span, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.keys import known_keys
from seqblocks.language.spec import BUDGET_KEYS
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

COUNTS = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}  # as in "a model of 7B parameters"
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
TIMES = {"us": 1e-3, "ms": 1.0, "s": 1e3}
ROUNDING = 1e-9  # relative deviation of a figure that is not whole, as `written` shows it
_WITH_UNIT = r"(?P<value>\d[\d_]*(\.\d+)?([eE][+-]?\d+)?)\s*(?P<unit>[A-Za-z%]+)"  # compiled on first use


def written(figure: float) -> str:
    """Return a figure for a message: with all its digits if it is whole, else with at least ten."""
    if float(figure).is_integer():
        return f"{int(figure):,}"
    return f"{figure:,.10g}" if abs(figure) < 1e9 else f"{figure:,.1f}"


class Limit(Record):
    """What one entry demands of a figure. kind: one of BUDGET_KEYS without the last."""

    kind: str
    value: float
    tolerance: float
    span: Span

    def allows(self, found: float) -> bool:
        # a figure that is not whole, such as one per token after a merge, cannot be written with all its digits
        allowed = self.tolerance if float(found).is_integer() else max(self.tolerance, ROUNDING)
        room = allowed * abs(self.value)
        if self.kind == "about":
            return abs(found - self.value) <= room
        return found <= self.value + room if self.kind == "at_most" else found >= self.value - room

    def __str__(self) -> str:
        return f"{'' if self.kind == 'about' else self.kind.replace('_', ' ') + ' '}{written(self.value)}"

    def deviation(self, found: float) -> str:
        """Return by how much a figure misses it, for a message."""
        off = ("+" if found >= self.value else "") + written(found - self.value)
        if self.kind == "about" or not self.value:
            return off
        return f"{off}, {100 * (found - self.value) / abs(self.value):+.3g} %"


def tolerance(ctx: Context, holder: Mapping, default: float = 0.0) -> Any:
    """Return the relative deviation that a mapping allows, or UNKNOWN, with a fault, if it is none."""
    node = holder.get("tolerance")
    if node is None:
        return default
    found = _quantity(ctx, node, {"%": 0.01}) if isinstance(node, Scalar) else number(ctx, node)
    if found is UNKNOWN or 0 <= found < 1:
        return found
    message, hint = "the tolerance must be a relative deviation", "0.01 accepts a deviation of one percent"
    ctx.report(Fault("E209", message, expected="0 or more, below 1", found=f"{found:g}", hint=hint), node.span)
    return UNKNOWN


def limits(ctx: Context, node: Node, allowed: Any, units: Table[str, float]) -> list[Limit] | None:
    """Return what an entry demands, or None, with a fault, if it is invalid. allowed: the tolerance of all entries."""
    if isinstance(node, Mapping):
        return _of_mapping(ctx, node, allowed, units)
    found = _limit(ctx, node, "about", allowed, units)
    return None if found is None else [found]


def _of_mapping(ctx: Context, node: Mapping, allowed: Any, units: Table[str, float]) -> list[Limit] | None:
    known_keys(ctx.run.report, node, BUDGET_KEYS, "a limit")
    own = tolerance(ctx, node, allowed)
    found = [_limit(ctx, value, key, own, units) for key, _, value in node if key in BUDGET_KEYS[:3]]
    if not found and not node.incomplete:
        hint = "{at_most: 1.3M}"
        ctx.report(Fault("E202", f"a limit needs one of {listing(BUDGET_KEYS[:3])}", hint=hint), node.span)
    known = [limit for limit in found if limit]
    by_kind = {limit.kind: limit for limit in known}
    low, high = by_kind.get("at_least"), by_kind.get("at_most")
    if low and high and low.value > high.value:
        message = f"at_least ({written(low.value)}) is larger than at_most ({written(high.value)})"
        ctx.report(Fault("E209", message, hint="exchange the two"), low.span)
        return None
    return known if len(known) == len(found) and found and own is not UNKNOWN else None


def _limit(ctx: Context, node: Node, kind: str, allowed: Any, units: Table[str, float]) -> Limit | None:
    text = node.value if isinstance(node, Scalar) and isinstance(node.value, str) else ""
    sign, rest = _parted(text)
    if sign and kind != "about":
        hint = f"{kind}: {rest}"
        ctx.report(Fault("E203", f"{kind} is a quantity, without {sign}", found=quote(text), hint=hint), node.span)
        return None
    if sign:
        kind = "at_most" if sign == "<=" else "at_least"
    value = _quantity(ctx, node, units)
    if value is UNKNOWN or allowed is UNKNOWN:
        return None
    return Limit(kind, value, allowed, node.span)


def _parted(text: str) -> tuple[str, str]:
    """Return the sign of a limit, or "", and what follows it."""
    text = text.strip()
    return (text[:2], text[2:].strip()) if text.startswith(("<=", ">=")) else ("", text)


def _quantity(ctx: Context, node: Node, units: Table[str, float]) -> Any:
    """Return the value of a number with a unit, a number, or an expression, after a sign if there is one."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return number(ctx, node)
    plain = without_sign(node, node.value)
    if not plain.text[-1:].isdecimal() and (given := re.fullmatch(_WITH_UNIT, plain.text)):
        return _with_unit(ctx, node, given["value"], given["unit"], units)
    return number(ctx, plain)


def without_sign(node: Scalar, text: str) -> Scalar:
    """Return a quantity without the sign of a limit before it."""
    _, rest = _parted(text)
    return Scalar(node.part(text.find(rest), len(rest)), node.size, node.depth, rest, rest)


def _with_unit(ctx: Context, node: Scalar, value: str, unit: str, units: Table[str, float]) -> Any:
    if unit in units:
        found = float(value.replace("_", "")) * units[unit]  # 4.1 * 1e6 is not quite whole
        whole = round(found) if math.isfinite(found) and math.isclose(found, round(found), rel_tol=1e-15) else found
        return number(ctx, Scalar(node.span, node.size, node.depth, whole, node.text))
    at = node.value.rfind(unit) if isinstance(node.value, str) else 0
    message = f"there is no unit {quote(unit)} here"
    fault = Fault("E203", message, expected=f"one of {listing(units)}", hint=lambda: did_you_mean(unit, units))
    ctx.report(fault, node.part(at, len(unit)))
    return UNKNOWN

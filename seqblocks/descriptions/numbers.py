"""Format numbers for people: with separators, with prefixes, as bytes."""

from __future__ import annotations


def count(value: float) -> str:
    """Format a number with separators: 1,234,567."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def short(value: float, unit: str = "") -> str:
    """Format a number to three digits with a prefix: 1.23 M, 1.23 MMACs, 980 MACs."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # the limit at which three-digit rounding gives 1.00 of this unit
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def bytes_of(value: float) -> str:
    """Format a number of bytes: 24.4 MB."""
    return short(value, "B") if value >= 1000 else f"{value:.0f} B"

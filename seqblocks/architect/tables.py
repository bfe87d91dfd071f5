"""Write rows of text as an aligned table, as Markdown or as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from seqblocks.errors import visible

Row = Sequence[str]


def aligned(header: Row, rows: Iterable[Row], left: int = 1) -> str:
    """Return an aligned table. The first `left` columns are text; the others are numbers, aligned on the right."""
    lines = [[visible(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, cells)) for cells in zip_longest(*lines, fillvalue="")]
    pad = [str.ljust if column < left else str.rjust for column in range(len(widths))]
    shown = ["  ".join(pad[at](cell, widths[at]) for at, cell in enumerate(row)).rstrip() for row in lines]
    return "\n".join([shown[0], "─" * (sum(widths) + 2 * (len(widths) - 1)), *shown[1:]])


def markdown(header: Row, rows: Iterable[Row], left: int = 1) -> str:
    """Return a table of GitHub's Markdown."""
    rule = [":--" if column < left else "--:" for column in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (_escaped(header), rule, *map(_escaped, rows)))


def _escaped(row: Row) -> list[str]:
    return [visible(cell).replace("\\", "\\\\").replace("|", "\\|") for cell in row]


def csv(header: Row, rows: Iterable[Sequence[object]]) -> str:
    """Return comma-separated values with a header; None is an empty cell."""
    import csv as library
    import io

    out = io.StringIO()
    write = library.writer(out, lineterminator="\n")
    write.writerow(header)
    write.writerows(rows)
    return out.getvalue().removesuffix("\n")

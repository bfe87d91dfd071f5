"""The differences of two designs as one HTML page, which loads nothing and needs no script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from seqblocks import markup
from seqblocks.architect.changes import Change
from seqblocks.architect.diff import Difference, change_line
from seqblocks.errors import UsageError
from seqblocks.markup import text
from seqblocks.picture.boxes import Box
from seqblocks.picture.drawing import drawing_of

STYLE = (
    ".faint{color:light-dark(#57606a,#9198a1)}ul{padding:0;list-style:none}li{margin:4px 0;padding:2px 8px;"
    "border-left:4px solid light-dark(#d0d7de,#3d444d)}.added{background:light-dark(#dafbe1,#12261e)}"
    ".removed,.fault{background:light-dark(#ffebe9,#25171c)}.moved,.renamed{background:light-dark(#ddf4ff,#121d2f)}"
    ".changed{background:light-dark(#fff8c5,#272115)}"
    ".pair{display:grid;grid-template-columns:1fr 1fr;gap:1em}.pair figure{overflow:auto;max-height:90vh}"
    "svg .added,svg .removed,svg .moved,svg .renamed,svg .changed{stroke-width:3}svg .added{stroke:#1a7f37}"
    "svg .removed{stroke:#cf222e}svg .moved,svg .renamed{stroke:#0969da}svg .changed{stroke:#bf8700}"
)
KINDS = ("removed", "added", "moved", "renamed", "changed")  # if several hold for a box, it gets the first
NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def page(found: Difference) -> str:
    """Return the page, with all that the text of a difference has."""
    first, second = found.labels
    parts = [f"<h1>{text(second)} beside {text(first)}</h1>"]
    if not found:
        parts.append(f"<p>{text(str(found))}</p>")
    parts += [_list((line, "fault") for line in found.fault_lines())] if any(found.faults) else []
    parts += _table("Figures", *found.fact_table())
    if found.structure:
        parts += ["<h2>Steps</h2>", _list((change_line(each), each.kind) for each in found.structure)]
    parts += _weights(found)
    parts += _pictures(found)
    parts += _table("Values of tensors", *found.tensor_table())
    return markup.page(f"{second} beside {first}", "\n".join(parts), STYLE)


def _pictures(found: Difference) -> Iterator[str]:
    """Yield both designs side by side, with a coloured frame around what differs."""
    if not found.structure:
        return
    figures = []
    for side, analysis in enumerate(found.analyses):
        try:
            drawing = drawing_of(analysis)
        except UsageError:  # nothing is known of it
            return
        _mark(drawing.boxes, [], [(_parts(each, side), each.kind) for each in found.structure if _is_in(each, side)])
        drawing.title = found.labels[side]
        figures.append(f"<figure>{drawing.svg()}</figure>")
    yield "<h2>Pictures</h2><p>Green: added; red: removed; blue: moved or renamed; yellow: changed.</p>"
    yield f'<div class="pair">{"".join(figures)}</div>'


def _is_in(change: Change, side: int) -> bool:
    return change.kind != ("added", "removed")[side]


def _parts(change: Change, side: int) -> list[set[str]]:
    """Return the names that each part of the path of a changed step has in A (side 0) or in B."""
    parts = [_numbers(part) if NUMBERS.fullmatch(part) else {part} for part in change.path.split(".")]
    if change.kind == "renamed" and not side:
        parts[-1] = {change.details[0][1]}
    return parts


def _numbers(part: str) -> set[str]:
    """Return the layers of `0-3,5`."""
    ends = ([int(number) for number in each.split("-")] for each in part.split(","))
    return {str(number) for bounds in ends for number in range(bounds[0], bounds[-1] + 1)}


def _mark(boxes: list[Box], around: list[set[str]], marks: list[tuple[list[set[str]], str]]) -> None:
    for box in boxes:
        own = [*around, {*box.names}]
        kinds = {kind for parts, kind in marks if len(parts) == len(own) and all(map(set.intersection, parts, own))}
        box.mark = next((kind for kind in KINDS if kind in kinds), "")
        _mark(box.boxes, own, marks)


def _weights(found: Difference) -> Iterator[str]:
    heading, *lines = found.weight_lines() or [""]
    if heading:
        kinds = {"+": "added", "-": "removed"}
        yield f"<h2>{text(heading[0].upper() + heading[1:])}</h2>"
        yield _list((line.strip(), kinds.get(line.strip()[0], "")) for line in lines)


def _table(title: str, header: list[str], rows: list[list[str]]) -> Iterator[str]:
    if rows:
        yield f"<h2>{text(title)}</h2>"
        yield f"<figure>{markup.table(header, rows, header[1:])}</figure>"


def _list(lines: Iterable[tuple[str, str]]) -> str:
    """Return a list of lines, each with its class."""
    return "<ul>" + "".join(f'<li class="{kind}">{text(line)}</li>' for line, kind in lines) + "</ul>"

"""The differences of two designs as one HTML page, which loads nothing and needs no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from seqblocks import markup
from seqblocks.architect.diff import Difference, change_line
from seqblocks.markup import text

STYLE = (
    ".faint{color:light-dark(#57606a,#9198a1)}ul{padding:0;list-style:none}li{margin:4px 0;padding:2px 8px;"
    "border-left:4px solid light-dark(#d0d7de,#3d444d)}.added{background:light-dark(#dafbe1,#12261e)}"
    ".removed,.fault{background:light-dark(#ffebe9,#25171c)}.moved,.renamed{background:light-dark(#ddf4ff,#121d2f)}"
    ".changed{background:light-dark(#fff8c5,#272115)}"
)


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
    parts += _table("Values of tensors", *found.tensor_table())
    return markup.page(f"{second} beside {first}", "\n".join(parts), STYLE)


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

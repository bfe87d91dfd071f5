"""A drawing as SVG: text and rectangles, without a script, so that papers and pages can contain it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from seqblocks.errors import visible
from seqblocks.picture.boxes import START, Box, follows, lanes

LETTER = 7.4  # width of a letter of 12 pixels in any monospaced font: they are at most 0.61 wide
SMALL_LETTER = 6.2  # of one of 10 pixels
HEAD, FACTS = 18, 14  # heights of the lines of a box
GAP = 14  # between boxes, for the arrows
PAD = 10
LANE = 7
MAX_LETTERS = 96  # letters of a line; longer texts have several
MAX_LINES = 12  # of one text; the rest of a longer one is only in the tooltip

STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.facts { font-size: 10px; fill: #57606a }
rect { fill: #f6f8fa; stroke: #d0d7de }
.repeat, .scan, .parallel, .experts, .residual { fill: #ffffff }
.layer, .branch, .expert, .direction { fill: #ffffff; stroke-dasharray: 4 2 }
.block { fill: #f1f8ff; stroke: #9ecbff }
.faulty { stroke: #cf222e; stroke-width: 2 }
.problem { font-size: 10px; fill: #cf222e }
path { fill: none; stroke: #57606a }
.end { fill: #57606a; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .facts { fill: #9198a1 }
  rect { fill: #151b23; stroke: #3d444d }
  .repeat, .scan, .parallel, .experts, .residual, .layer, .branch, .expert, .direction { fill: #0d1117 }
  .block { fill: #121d2f; stroke: #1f6feb }
  path { stroke: #9198a1 } .end { fill: #9198a1 }
}
"""


@dataclass
class Placed:
    """A box with its place; the places of the boxes in it are absolute too."""

    box: Box
    lines: list[tuple[str, str]]  # class and text
    width: float
    height: float
    inner: list[Placed] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0

    def move(self, x: float, y: float) -> None:
        """Place the box, and those in it below its lines."""
        self.x, self.y = x, y
        top = y + _lines_height(self.lines) + GAP
        left = x + PAD + gutter(self.box.boxes)
        for each in self.inner:
            each.move(left, top)
            if self.box.side_by_side:
                left += each.width + GAP
            else:
                top += each.height + GAP


def gutter(boxes: Sequence[Box]) -> float:
    """Return the width left of a list for the wires that skip boxes."""
    return LANE * (1 + max((lane for _, _, lane, _ in lanes(boxes)), default=-1))


def place(boxes: Sequence[Box]) -> list[Placed]:
    """Return the boxes of a list with their sizes. Boxes below one another are equally wide."""
    found = [_sized(box) for box in boxes]
    width = max((each.width for each in found), default=0.0)
    for each in found:
        _widen(each, width)
    return found


def _sized(box: Box) -> Placed:
    texts = [("name", box.title), ("facts", box.facts), ("facts", _from_afar(box))]
    texts += [("problem", problem) for problem in box.problems]
    lines = [(kind, line) for kind, text in texts if text for line in _lines(text)]
    width = max(len(text) * (LETTER if kind == "name" else SMALL_LETTER) for kind, text in lines) + 2 * PAD
    height = _lines_height(lines)
    if not box.boxes:
        return Placed(box, lines, width, height)
    inner = [_sized(each) for each in box.boxes] if box.side_by_side else place(box.boxes)
    if box.side_by_side:
        wide = sum(each.width for each in inner) + GAP * (len(inner) - 1)
        height += max(each.height for each in inner) + 2 * GAP
    else:
        wide = inner[0].width
        height += sum(each.height + GAP for each in inner) + GAP
    margins = 2 * PAD + gutter(box.boxes)
    width = max(width, wide + margins)
    for each in [] if box.side_by_side else inner:
        _widen(each, width - margins)
    return Placed(box, lines, width, height, inner)


def _widen(placed: Placed, width: float) -> None:
    grown, placed.width = width - placed.width, width
    if grown > 0 and not placed.box.side_by_side:
        for each in placed.inner:
            _widen(each, width - 2 * PAD - gutter(placed.box.boxes))


def _lines_height(lines: Sequence[tuple[str, str]]) -> float:
    return 6.0 + HEAD + FACTS * (len(lines) - 1)


def _from_afar(box: Box) -> str:
    """Return the ports that read more than the previous box, with the wires that they read."""
    plain = len(box.reads) == 1 and box.reads[0].maker is not None
    return "" if plain else ", ".join(f"{read.port} ← {read.label}" for read in box.reads)


def _lines(text: str) -> list[str]:
    """Return a text in lines."""
    text = visible(text)
    if len(text) <= MAX_LETTERS:
        return [text]
    lines = textwrap.wrap(text, MAX_LETTERS, max_lines=MAX_LINES, placeholder=" …")
    return lines or [""]


def svg(boxes: Sequence[Box], title: str, totals: Sequence[str] = ()) -> str:
    """Return the picture of a list of boxes below a title and lines of totals."""
    head = [("name", line) for line in _lines(title)]
    head += [("facts", line) for text in totals for line in _lines(text)]
    placed, top = place(boxes), PAD + _lines_height(head) + GAP
    spans = (box.span for box in boxes if box.span and not box.span.source.is_override)
    own = next((span.source.name for span in spans), "")  # the file with the model
    left = PAD + gutter(boxes)
    for each in placed:
        each.move(left, top)
        top += each.height + GAP
    wide = max((len(text) * (LETTER if kind == "name" else SMALL_LETTER) for kind, text in head), default=0.0)
    width = max([left + each.width + PAD for each in placed] + [wide + 2 * PAD])
    size = f'width="{width:.0f}" height="{top:.0f}" viewBox="0 0 {width:.0f} {top:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{_escaped(title)}">',
        f"<style>{STYLE}</style>",
        *_texts(head, PAD, PAD),
        *_list(placed, boxes, PAD + _lines_height(head), own),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _list(placed: Sequence[Placed], boxes: Sequence[Box], top: float, own: str) -> Iterator[str]:
    """Yield the boxes of a list, the arrows between them, and the wires left of them.

    top: of the list. own: the name of the file whose lines the boxes refer to.
    """
    for each in placed:
        yield from _box(each, own)
    if not placed:
        return
    middle = placed[0].x + placed[0].width / 2
    for upper, lower, reads in zip([None, *placed], placed, [True, *follows(boxes)], strict=False):
        if reads:
            yield _arrow(middle, upper.y + upper.height if upper else top, lower.y)
    for maker, reader, lane, read in lanes(boxes):
        x = placed[0].x - LANE * (lane + 1)
        start = top + GAP / 3 if maker == START else placed[maker].y + placed[maker].height - 6
        first = middle if maker == START else placed[0].x
        end = placed[reader].y + HEAD / 2
        line = f"M{first:.1f} {start:.1f}H{x:.1f}V{end:.1f}H{placed[0].x - 3:.1f}"
        yield f'<path d="{line}"><title>{_escaped(f"{read.label} {read.type}")}</title></path>'
        yield _tip(placed[0].x, end, 0)


def _arrow(x: float, top: float, end: float) -> str:
    return f'<path d="M{x:.1f} {top:.1f}V{end - 4:.1f}"/>{_tip(x, end, 90)}'


def _tip(x: float, y: float, turned: int) -> str:
    points = f"M{x:.1f} {y:.1f}l-3 -5h6z" if turned else f"M{x:.1f} {y:.1f}l-5 -3v6z"
    return f'<path class="end" d="{points}"/>'


def _box(placed: Placed, own: str) -> Iterator[str]:
    box = placed.box
    kinds = " ".join(filter(None, [box.kind, "faulty" if box.problems else "", box.mark]))
    place = f'x="{placed.x:.1f}" y="{placed.y:.1f}" width="{placed.width:.1f}" height="{placed.height:.1f}"'
    where = f"{box.path}, {box.span}" if box.span else box.path
    line = f' data-line="{box.span.line}"' if box.span and box.span.source.name == own else ""
    yield f'<g{line} aria-label="{_escaped(f"{box.title}: {box.facts}")}"><title>{_escaped(where)}</title>'
    yield f'<rect class="{kinds}" {place} rx="4"/>'
    yield from _texts(placed.lines, placed.x + PAD, placed.y)
    top = placed.y + _lines_height(placed.lines)
    if box.side_by_side:
        for each in placed.inner:
            yield from _box(each, own)
    else:
        yield from _list(placed.inner, box.boxes, top, own)
    yield "</g>"


def _texts(lines: Sequence[tuple[str, str]], x: float, y: float) -> Iterator[str]:
    for at, (kind, text) in enumerate(lines):
        base = y + HEAD - 2 if not at else y + HEAD + FACTS * at - 2
        yield f'<text class="{kind}" x="{x:.1f}" y="{base:.1f}" xml:space="preserve">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    return escape(visible(text))

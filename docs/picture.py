"""Draw docs/hybrid.svg: a bundled hybrid spec next to the model that it describes.

    python docs/picture.py            write the picture
    python docs/picture.py --check    exit with 1 if the committed picture is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import seqblocks
from seqblocks import graph
from seqblocks.graph import Graph, Node

HERE = Path(__file__).resolve().parent
SPEC = HERE.parent / "specs" / "models" / "hybrid_small.yaml"
TARGET = HERE / "hybrid.svg"

LINE, CODE_WIDTH, GAP, BOX_WIDTH, BOX_HEIGHT, MARGIN = 17, 550, 30, 440, 30, 20
INK, FAINT, PAPER = "#1f2328", "#656d76", "#ffffff"
COLOURS = {"mlstm_block": "#dbeafe", "mamba_block": "#dcfce7", "attention_layer": "#fef3c7", "swiglu_layer": "#f3e8ff"}
PLAIN_COLOUR = "#f1f3f5"

COLUMNS = (170, 75, 0)  # from the right edge of a box to the ends of shape, parameters and state

Box = tuple[str, tuple[str, ...], str, int]  # name, facts, colour, indent


def boxes(body: Graph, indent: int = 0) -> Iterator[Box]:
    """Yield one box per step in the order in which they run, also for the steps in the layers of a `repeat`."""
    for node in body.nodes:
        if node.kind == "repeat":
            for label, layer in node.bodies.items():
                yield f"{node.name}.{label}", (), PAPER, indent
                yield from boxes(layer, indent + 1)
        else:
            yield node.name, facts(node), COLOURS.get(node.verb, PLAIN_COLOUR), indent


def facts(node: Node) -> tuple[str, ...]:
    """Return output shape, parameters and state of a step."""
    inside = [node, *(inner for body in node.bodies.values() for inner in graph.walk(body))]
    state = sum(declared.numel for each in inside for declared in each.state.values())
    count = graph.count_node(node)
    return str(node.type), f"{count:,}" if count else "tied", f"{state:,}" if state else "-"


def text(x: float, y: float, content: str, colour: str = INK, anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style} xml:space="preserve">{escape(content)}</text>'


def code_panel(lines: list[str]) -> Iterator[str]:
    for at, line in enumerate(lines):
        bare, mark, comment = line.partition(" # ")
        y = MARGIN + LINE * (at + 1)
        yield text(MARGIN, y, bare)
        if mark:
            yield text(MARGIN + 7.25 * len(bare), y, mark + comment, FAINT)


def row(right: float, y: float, facts: tuple[str, ...]) -> Iterator[str]:
    for fact, offset in zip(facts, COLUMNS, strict=True):
        yield text(right - 10 - offset, y, fact, FAINT, "end")


def model_panel(found: list[Box], left: float, total: str) -> Iterator[str]:
    y = float(MARGIN)
    yield from row(left + BOX_WIDTH, y + 12, ("shape", "parameters", "state"))
    y += BOX_HEIGHT - 8
    for name, right, colour, indent in found:
        x, width = left + 16 * indent, BOX_WIDTH - 16 * indent
        if right:
            yield f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX_HEIGHT - 6}" rx="5" fill="{colour}"/>'
            yield text(x + 10, y + 16, name, weight="bold")
            yield from row(x + width, y + 16, right)
        else:
            yield text(x, y + 18, name, FAINT)
        y += BOX_HEIGHT
    yield text(left + BOX_WIDTH, y + 14, total, INK, "end", "bold")


def picture() -> str:
    """Return the SVG as text."""
    model = seqblocks.load_model(SPEC)
    summary = seqblocks.summarise(model)
    lines = [line for line in SPEC.read_text("utf-8").rstrip().split("\n") if not line.startswith("about:")]
    found = list(boxes(model.graph))
    height = 2 * MARGIN + max(LINE * len(lines), BOX_HEIGHT * (len(found) + 1))
    left = MARGIN + CODE_WIDTH + GAP
    width = left + BOX_WIDTH + MARGIN
    total = f"{summary.params:,} parameters, {summary.state:,} state numbers a sequence"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    about = "A hybrid language model as a seqblocks spec, and the steps of the model built from it"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}"',
        ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}" stroke="#d0d7de"/>',
        *code_panel(lines),
        f'<path d="M{left - GAP / 2:g} {MARGIN}V{height - MARGIN}" stroke="#d0d7de"/>',
        *model_panel(found, left, total),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(arguments: list[str]) -> int:
    if "--check" in arguments:
        return int(not TARGET.exists() or TARGET.read_text("utf-8") != picture())
    TARGET.write_text(picture(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

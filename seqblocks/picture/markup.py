"""A drawing in the languages of Mermaid and of Graphviz, which lay it out themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from seqblocks.errors import visible
from seqblocks.picture.boxes import START, Box

Edges = list[tuple[Box | None, Box, str]]  # from a box, or the model's input, to another; the label


def mermaid(boxes: Sequence[Box], title: str) -> str:
    """Return a flowchart of Mermaid: boxes in boxes are subgraphs."""
    names = _Names(boxes)

    def lines(boxes: Sequence[Box], pad: str) -> Iterator[str]:
        for box in boxes:
            if box.boxes:
                yield f"{pad}subgraph {names[box]}[{_mermaid_text(box)}]"
                yield from lines(box.boxes, pad + "  ")
                yield f"{pad}end"
            else:
                yield f"{pad}{names[box]}[{_mermaid_text(box)}]"

    edges = (
        f"  {names[maker] if maker else 'input'} -->{f'|{_mermaid_quoted(label)}|' if label else ''} {names[reader]}"
        for maker, reader, label in names.edges
    )
    head = ["---", f"title: {_mermaid_quoted(title)}", "---", "flowchart TD", "  input([input])"]
    return "\n".join([*head, *lines(boxes, "  "), *edges]) + "\n"


def _mermaid_text(box: Box) -> str:
    return _mermaid_quoted("\n".join(filter(None, [box.title, box.facts, *box.problems])))


def _mermaid_quoted(text: str) -> str:
    lines = (visible(line).replace("&", "#amp;").replace('"', "#quot;") for line in text.split("\n"))
    return f'"{"<br>".join(line.replace("<", "#lt;").replace(">", "#gt;") for line in lines)}"'


def dot(boxes: Sequence[Box], title: str) -> str:
    """Return a digraph of Graphviz: boxes in boxes are clusters."""
    names = _Names(boxes)

    def lines(boxes: Sequence[Box], pad: str) -> Iterator[str]:
        for box in boxes:
            if box.boxes:
                yield f"{pad}subgraph cluster_{names[box]} {{"
                yield f"{pad}  label={_dot_text(box)}; style=rounded"
                yield from lines(box.boxes, pad + "  ")
                yield f"{pad}}}"
            else:
                yield f"{pad}{names[box]} [label={_dot_text(box)}]"

    def edge(maker: Box | None, reader: Box, label: str) -> str:
        start = _end(maker, lambda boxes: boxes[-1]) if maker else None
        end = _end(reader, lambda boxes: boxes[0])
        options = [f"label={_dot_quoted(label)}"] if label else []
        options += [f"ltail=cluster_{names[maker]}"] if maker and maker.boxes else []
        options += [f"lhead=cluster_{names[reader]}"] if reader.boxes else []
        after = f" [{', '.join(options)}]" if options else ""
        return f"  {names[start] if start else 'input'} -> {names[end]}{after}"

    head = [
        "digraph {", f"  label={_dot_quoted(title)}; labelloc=t; compound=true; rankdir=TB; fontname=monospace",
        "  node [shape=box, style=rounded, fontname=monospace]; edge [fontname=monospace, fontsize=10]", "  input",
    ]  # fmt: skip
    return "\n".join([*head, *lines(boxes, "  "), *(edge(*each) for each in names.edges), "}"]) + "\n"


def _end(box: Box, choose: Callable[[list[Box]], Box]) -> Box:
    """Return the box without others in it that stands for a cluster at the end of an edge."""
    while box.boxes:
        box = choose(box.boxes)
    return box


def _dot_text(box: Box) -> str:
    return _dot_quoted("\n".join(filter(None, [box.title, box.facts, *box.problems])))


def _dot_quoted(text: str) -> str:
    lines = (visible(line).replace("\\", "\\\\").replace('"', '\\"') for line in text.split("\n"))
    return '"' + "\\n".join(lines) + '"'


class _Names:
    """Names of boxes, and the edges between them."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.known: dict[int, str] = {}
        self.edges: Edges = []
        for box in (box for each in boxes for box in each.inside()):
            self.known[id(box)] = f"n{len(self.known)}"
        self._list(boxes, None, is_model=True)

    def __getitem__(self, box: Box) -> str:
        return self.known[id(box)]

    def _list(self, boxes: Sequence[Box], around: Box | None, is_model: bool = False) -> None:
        """Add the edges in a list. What reads the input of an inner list is fed by the box around it."""
        for at, box in enumerate(boxes):
            if not box.reads and at and not (around and around.side_by_side):  # layers follow one another
                self.edges.append((boxes[at - 1], box, ""))
            if not box.reads and not at and is_model:
                self.edges.append((None, box, ""))
            for read in box.reads:
                label = read.type if len(box.reads) == 1 else f"{read.port}: {read.type}"
                if read.maker == START or (read.maker is None and is_model):
                    if is_model:
                        self.edges.append((None, box, label))
                elif read.maker is not None:
                    self.edges.append((boxes[read.maker], box, label))
            self._list(box.boxes, box)

"""The outline of a spec: its names, its blocks and its model, with their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from seqblocks.editor.hints import facts
from seqblocks.editor.opened import Opened
from seqblocks.editor.steps import as_step
from seqblocks.errors import Span
from seqblocks.language.document import Mapping, Node, Scalar, Sequence

Kind = Literal["section", "name", "block", "argument", "step"]
_SECTIONS = ("use", "let", "blocks", "model", "expect")


class Symbol(NamedTuple):
    """An entry of the outline. span: of all of it. own: of its name."""

    name: str
    detail: str
    kind: Kind
    span: Span
    own: Span
    children: list[Symbol]


def symbols(opened: Opened) -> list[Symbol]:
    """Return the outline of a file."""
    outline = _Outline(opened)
    sections = ((key, span, node) for key, span, node in opened.root or () if key in _SECTIONS)
    return [each for key, span, node in sections if (each := outline.section(key, span, node))]


def _within(span: Span, around: Span) -> bool:
    begins = (around.line, around.column) <= (span.line, span.column)
    return begins and (span.end_line, span.end_column) <= (around.end_line, around.end_column)


class _Outline:
    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.located = {step.span: step for step in opened.steps}

    def made(
        self, name: str, detail: str, kind: Kind, key: Span, node: Node | None, inner: Iterable[Symbol | None]
    ) -> Symbol | None:
        own = self.opened.now(key)
        if own is None:
            return None
        end = self.opened.now(node.span) if node else own
        whole = own._replace(end_line=end.end_line, end_column=end.end_column) if end else own
        if (whole.end_line, whole.end_column) < (own.end_line, own.end_column):  # an alias lies elsewhere
            whole = own
        inside = [each for each in inner if each and _within(each.span, whole)]  # what an alias repeats is elsewhere
        return Symbol(name, detail, kind, whole, own, inside)

    def section(self, key: str, span: Span, node: Node) -> Symbol | None:
        inner: Iterator[Symbol | None]
        if key == "blocks":
            inner = self.blocks(node)
        elif key == "model":
            inner = self.steps(node)
        else:
            inner = self.names(node)
        return self.made(key, "", "section", span, node, inner)

    def names(self, node: Node | None, kind: Kind = "name") -> Iterator[Symbol | None]:
        if isinstance(node, Mapping):
            for key, span, value in node:
                yield self.made(key, value.text if isinstance(value, Scalar) else "", kind, span, value, ())

    def blocks(self, node: Node) -> Iterator[Symbol | None]:
        for key, span, value in node if isinstance(node, Mapping) else ():
            own = value if isinstance(value, Mapping) else None
            parts = [self.names(own.get("args"), "argument"), self.names(own.get("let"))] if own else []
            body = own.get("steps") if own else None
            parts += [self.steps(body)] if body else []
            yield self.made(key, "", "block", span, value, (each for part in parts for each in part))

    def steps(self, node: Node) -> Iterator[Symbol | None]:
        """Yield the steps below a node, the outermost ones."""
        match node:
            case Mapping():
                for _, _, value in node:
                    yield from self.steps(value)
            case Sequence():
                for item in node.items:
                    yield from self.step(item)

    def step(self, item: Node) -> Iterator[Symbol | None]:
        found = as_step(item)
        if found is None or found.span not in self.opened.own_references:
            yield from self.steps(item)
            return
        name = found.get("name")
        located = self.located.get(found.span)
        title = f"{name.text} ({found.verb})" if isinstance(name, Scalar) else found.verb
        inner = self.steps(found.arguments) if found.arguments else iter(())
        yield self.made(title, facts(located) if located else "", "step", found.span, found.arguments, inner)

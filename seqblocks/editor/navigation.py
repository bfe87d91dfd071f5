"""Find where a wire, a name or a block is defined, and where it is read."""

from __future__ import annotations

from collections.abc import Iterator

from seqblocks.analysis.scope.references import Reference
from seqblocks.editor.calls import block_of, key_at
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot, touches
from seqblocks.errors import Source, Span
from seqblocks.language.document import Scalar, Sequence
from seqblocks.language.spec_files import bundled, looks_like_path


def definition(opened: Opened, spot: Spot) -> Span | None:
    """Return the definition of what is at a position: a place in this file, in another one, or the start of a file."""
    known = opened.before(spot)
    if known is None:
        return None
    found = opened.reference_at(known)
    if found:
        return opened.now(found.definition) if found.definition else None
    if call := key_at(opened, known):
        block, key = block_of(opened, call[0]), call[1].key or ""
        return opened.now(block.args[key].span) if block and key in block.args else None
    return next((file for span, file in used_files(opened) if touches(span, known)), None)


def used_files(opened: Opened) -> Iterator[tuple[Span, Span]]:
    """Yield the places of the entries of `use:` in the known text, and the start of the file of each."""
    use = opened.root.get("use") if opened.root else None
    for item in use.items if isinstance(use, Sequence) else ():
        if not isinstance(item, Scalar) or not isinstance(item.value, str):
            continue
        if item.value in bundled():
            yield item.span, Source.of(f"<bundled {item.value}>", "", "bundled").character_at(1, 1)
        elif opened.path and looks_like_path(item.value):
            yield item.span, Source.of(str(opened.path.parent / item.value), "").character_at(1, 1)


def links(opened: Opened) -> list[tuple[Span, Span]]:
    """Return the entries of `use:` as they are now, each with the start of its file."""
    return [(now, file) for span, file in used_files(opened) if (now := opened.now(span))]


def same(opened: Opened, spot: Spot) -> list[Reference]:
    """Return all references to what is at a position of the known text: a reference or a definition."""
    references = opened.known.analysis.references
    found = opened.reference_at(spot)
    if found is None:
        defined = (each.definition for each in references if each.definition)
        place = next((each for each in defined if opened.is_own(each) and touches(each, spot)), None)
        return [each for each in references if place and each.definition == place]
    if found.definition is None:
        wanted = (found.kind, found.name, None)
        same = [each for each in references if (each.kind, each.name, each.definition) == wanted]
    else:
        same = [each for each in references if each.definition == found.definition]
    return same + [each for each in references if each.kind == "step" and each.definition == found.span]


def references(opened: Opened, spot: Spot, with_definition: bool = True) -> list[Span]:
    """Return the places where what is at a position is read, and the one where it is defined."""
    known = opened.before(spot)
    found = same(opened, known) if known else []
    places = [each.span for each in found]
    if with_definition and found and found[0].definition:
        places = [found[0].definition, *places]
    return opened.now_all(each for each in places if each.source.kind != "bundled")


def occurrences(opened: Opened, spot: Spot) -> list[Span]:
    """Return the places in this file, for an editor to highlight."""
    return [each for each in references(opened, spot) if opened.is_own(each)]

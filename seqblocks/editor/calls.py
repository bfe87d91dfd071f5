"""Find the step around a key of its arguments, and the block that a step calls."""

from __future__ import annotations

from seqblocks.analysis.scope.references import Reference
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.steps import PathEntry, trail
from seqblocks.language.spec import Block


def key_at(opened: Opened, spot: Spot) -> tuple[Reference, PathEntry] | None:
    """Return the verb of the step and the key at a position of the known text, if it is a key of its arguments."""
    path = trail(opened.root, spot) if opened.root else []
    if len(path) < 3 or not path[-1].on_key or path[-2].key_span is None:
        return None
    step = opened.own_references.get(path[-2].key_span)
    return (step, path[-1]) if step else None


def block_of(opened: Opened, step: Reference) -> Block | None:
    """Return the block that a verb names, or None if it is another verb, or steps passed to a block."""
    file = opened.known.analysis.file
    block = file.visible.get(step.name) if file else None
    return block if block and block.span == step.definition else None

"""How the steps of a model compute a frame: the tokens of each sequence that one call of `step` takes.

A step that treats each token by itself computes them as rows, as it does those of several sequences. One with a state
has a function for several tokens, or computes them one after another, or runs its `forward` on them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from seqblocks.graph import Graph, Node, frame_size
from seqblocks.runtime.reading import MOST_ROWS, MOST_TOKENS, has_tokens
from seqblocks.runtime.source import How
from seqblocks.types import Wire

MOST_IN_ORDER = 8  # More tokens of a frame take longer one after another than as a sequence.
MOST_ROWS_OF_FRAMES = 2048  # The modules take less time for more rows, if they belong to several sequences.


class Frames:
    """The frames of a model. size: input tokens of a frame; most_batch: sequences up to which plans are fast."""

    def __init__(self, graph: Graph, types: Mapping[int, Wire | None]) -> None:
        self.size = frame_size(graph)
        self.most_batch: float = max(MOST_ROWS_OF_FRAMES // self.size, 1) if self else math.inf
        self._types = types

    def __bool__(self) -> bool:
        """Return whether a frame has several tokens."""
        return self.size > 1

    @contextlib.contextmanager
    def as_rows(self) -> Iterator[None]:
        """Treat tokens as rows whose order is unknown, as within an expert."""
        size, self.size = self.size, 1
        try:
            yield
        finally:
            self.size = size

    def tokens(self, node: Node) -> set[int]:
        """Return the numbers of tokens that a node reads and makes for each frame; 0 if it makes no tokens."""
        wires = [wire for value in node.reads if has_tokens(wire := self._types[value])]
        return {self.size // wire.rate if has_tokens(wire) else 0 for wire in (*wires, node.type) if wire}

    def repeats_vectors(self, node: Node) -> int:
        """Return how often the vectors of a node are repeated, as rows of tokens do not broadcast, or 0 for not."""
        many = max(self.tokens(node), default=1)
        return many if self and many > 1 and node.vectors else 0

    def runs_by_token(self, node: Node) -> bool:
        """Return whether a function of one token can compute all tokens of a frame in little time."""
        assert node.op is not None
        tokens = self.tokens(node)
        if not self or tokens == {1}:
            return True
        windows = any(state.per_token or state.dtype == "model" for state in node.state.values())  # others hold sums
        whole = any(not has_tokens(self._types[value]) and value not in node.vectors for value in node.reads)
        if len(tokens) > 1 or windows or whole or (node.state and max(tokens, default=1) > MOST_IN_ORDER):
            return False
        return bool(node.state) or node.op.reads == "token"

    def has_fast_several(self, node: Node, run: Callable[..., Any] | None) -> bool:
        """Return whether a function has an attribute `several` that is fast for the tokens of a frame."""
        several = getattr(run, "several", None)
        many = bool(node.state) and max(self.tokens(node)) > MOST_TOKENS
        return several is not None and (not many or hasattr(several, "any_length"))

    def how(self, node: Node, has_several: bool) -> How | None:
        """Return how a function is called for the tokens of a frame, None if a frame has one token."""
        if not self:
            return None
        if self.tokens(node) == {1} or (not node.state and self.runs_by_token(node)):
            return "rows"
        if has_several:
            return "sequences"
        self.limit_batch(node)
        return "tokens"

    def limit_batch(self, node: Node) -> None:
        """Note that the tokens of a frame are computed one after another."""
        many = max(self.tokens(node))
        if self and many > 1:
            self.most_batch = min(self.most_batch, MOST_ROWS // many)

"""Long sequences in chunks: all steps of a body run on some tokens, then on the next, and states carry over.

On a CPU without gradients. The operating system provides memory for each tensor above 32 MB afresh and clears it, which
takes as long as most elementwise operations. Tensors of a chunk are smaller, so that their memory is reused, and a body
needs the memory of one chunk besides its input and output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seqblocks.graph import BlockNode, Graph, Node, walk
from seqblocks.kernels.dispatch.custom_op import is_seen
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place
from seqblocks.state import States
from seqblocks.types import Wire

REUSED_BYTES = 1 << 25  # of a tensor that malloc reuses: the largest M_MMAP_THRESHOLD that glibc chooses by itself
CHUNK_MULTIPLE = 64  # a chunk has a multiple of this many tokens, as kernels process this many at a time
MIN_MULTIPLES = 4  # Up to this many times CHUNK_MULTIPLE, operations take longer in chunks than memory for all tokens.
MIN_STATES = 8  # a chunk has at least this many times the elements of the states, which each chunk reads and writes


class Chunks:
    """How a body runs in chunks.

    widest: features of the widest value. states: elements in all states of a sequence. draws: whether some step may
    draw random numbers in training mode.
    """

    def __init__(self, widest: int, states: int, draws: bool) -> None:
        self._widest, self._states, self.draws = widest, states, draws

    def size(self, x: Tensor, call: Call) -> int:
        """Return the number of tokens of a chunk of x [batch, seq, ...], or 0 to run all tokens at once."""
        if torch.is_grad_enabled() or x.dim() < 2 or not x.is_cpu:
            return 0
        itemsize = x.element_size() if x.is_floating_point() else torch.get_default_dtype().itemsize
        per_token, tokens = x.shape[0] * self._widest * itemsize, x.shape[1]
        if per_token * tokens <= REUSED_BYTES or not self._is_plain(call) or is_seen((x,)):
            return 0
        count = math.ceil(per_token * tokens / (REUSED_BYTES * 3 // 4))
        size = math.ceil(tokens / count / CHUNK_MULTIPLE) * CHUNK_MULTIPLE
        return 0 if size < MIN_MULTIPLES * CHUNK_MULTIPLE or size * self._widest < MIN_STATES * self._states else size

    def _is_plain(self, call: Call) -> bool:
        """Return whether a call runs all steps of the body from left to right, on this process only."""
        special = call.reverse or call.phase or call.relay or call.last_only or call.routed is not None
        return not special and (call.grid is None or call.grid.size is None)


def find(body: Graph, place: Place) -> Chunks | None:
    """Return how a body runs in chunks; None if it cannot: if its steps do more than compute tokens and carry states.

    All steps must be primitives, or blocks of primitives, that can stream, with states of a fixed size, for sequences
    of one rate.
    """
    if place.streams or body.outputs or body.exports or len(body.reads) != 1 or not body.nodes:
        return None
    nodes = [node for node in walk(body) if not isinstance(node, BlockNode)]
    wires = [place.types[body.input], *(node.type for node in nodes)]
    known = [wire for wire in wires if wire]
    if len(known) < len(wires) or not all(_is_sequence(wire, known[0]) for wire in known):
        return None
    if not all(_carries(node) for node in nodes):
        return None
    states = sum(state.numel for node in nodes for state in node.state.values())
    return Chunks(max(wire.features for wire in known), states, any(_draws(node) for node in nodes))


def run(
    x: Tensor, size: int, call: Call, function: Callable[[Tensor, Call], tuple[Tensor, States]]
) -> tuple[Any, States]:
    """Return the output and the states of function(x, call), called for `size` tokens at a time."""
    out, states = None, call.state
    for a in range(0, x.shape[1], size):
        b = min(a + size, x.shape[1])
        resets = None if call.resets is None else call.resets[:, a:b]
        inner = Call(call.training, states, True, resets, streaming=True, directed=call.directed)
        y, states = function(x[:, a:b], inner)
        if out is None:
            out = y.new_empty(y.shape[0], x.shape[1], *y.shape[2:])
        out[:, a:b] = y
    return out, states if call.return_state and states else {}


def _is_sequence(wire: Wire, first: Wire) -> bool:
    return wire.kind in ("sequence", "tokens") and wire.grid is None and not wire.context and wire.rate == first.rate


def _carries(node: Node) -> bool:
    """Return whether a node is a primitive that streams with a state of a fixed size."""
    if node.op is None or node.op.cannot_stream(*node.wires) or node.vectors or node.kept:
        return False
    if node.op.reads == "token" or not node.state:
        return node.op.reads == "token" and not node.state
    return not any(state.per_token or state.context or state.length for state in node.state.values())


def _draws(node: Node) -> bool:
    """Return whether a primitive may draw random numbers in training mode; for a user's primitive it is unknown."""
    return node.op is None or node.op.random or not node.op.builtin

"""The module of a `choose`: it runs its steps on the chosen tokens, and puts the results in their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks import graph
from seqblocks.errors import RunError
from seqblocks.graph import ChooseNode, Node
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch.compiled import batched
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place, makes
from seqblocks.state import States, declared, map_state, new_state, reset, smallest_dtype
from seqblocks.state_layout import State


class Rows(NamedTuple):
    """Sequences of a batch with equally many chosen tokens.

    rows: their numbers, None for all; places [rows, count]: of the chosen tokens among those of all sequences. chosen
    [rows * count, 1]: whether these are chosen, None if all are.
    """

    rows: Tensor | None
    places: Tensor
    chosen: Tensor | None = None


@makes(ChooseNode)
class Choose(Body):
    """Run the steps on the chosen tokens of each sequence."""

    def __init__(self, node: ChooseNode, place: Place) -> None:
        body = node.bodies[""]
        super().__init__(body, place._replace(streams=False), node.verb)
        self._arguments, self._path = node.arguments, place.path
        wire = node.wires[0]
        self._states = _without_lanes(declared(body), len(wire.lanes) if wire else 0)
        self._whole = (False, *node.reads_whole(place.types))
        contexts = frozenset[int]()
        if wire and not wire.context:
            contexts = frozenset(value for value, each in place.types.items() if each and each.context)
        self._by_tokens = not any(_reads_whole(each, contexts) for each in graph.walk(body))

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        if any(x is None for x in tensors):  # in the first phase of a stream with context
            return None, {}  # type: ignore[return-value]
        x, by, *others = tensors
        if call.relay:
            raise RunError(f"{self._path}: choose needs all tokens of a sequence on one device")
        inputs, scores, top = [x, *others], by.squeeze(-1), self._arguments.top
        above = self._arguments.above
        best = top is not None and (above is None or (call.training and not call.streaming))
        if best and call.resets is None:
            return self._on_rows([self._best(scores)], inputs, call)
        chosen = self._best_of_each(scores, call.resets) if best or above is None else scores > above
        if not best and self._needs_all(chosen):
            return self._in_order(inputs, chosen, call)
        pads = torch.compiler.is_compiling() and self._by_tokens and not (call.training or call.return_state)
        return self._on_rows([_padded(chosen)] if pads else self._rows(chosen), inputs, call)

    # --- the choice ---------------------------------------------------------------------------------------------------

    def _best(self, scores: Tensor) -> Rows:
        """Return the tokens with the highest scores [batch, seq]."""
        batch, tokens = scores.shape
        above, below = self._arguments.share
        count = torch.sym_max(tokens * above // below, 1) if above else int(self._arguments.top or 1)
        order = scores.detach().sort(dim=1, descending=True, stable=True).indices
        places = order[:, :count].sort(1).values
        return Rows(None, places + tokens * torch.arange(batch, device=places.device).unsqueeze(1))

    def _best_of_each(self, scores: Tensor, resets: Tensor | None) -> Tensor:
        """Return whether each token is chosen, if several sequences are packed: the best ones of each of them."""
        assert resets is not None
        part = resets.cumsum(1)
        order = scores.detach().sort(dim=1, descending=True, stable=True).indices
        order = order.gather(1, part.gather(1, order).sort(dim=1, stable=True).indices)  # by part, then by score
        sizes = torch.zeros(part.shape[0], part.shape[1] + 1, dtype=torch.int64, device=part.device)
        sizes = sizes.scatter_add(1, part, torch.ones_like(part))
        above, below = self._arguments.share
        most = (sizes * above // below).clamp(min=1) if above else torch.full_like(sizes, int(self._arguments.top or 1))
        own = part.gather(1, order)
        rank = torch.arange(part.shape[1], device=part.device) - (sizes.cumsum(1) - sizes).gather(1, own)
        return torch.zeros_like(resets).scatter(1, order, rank < most.gather(1, own))

    def _rows(self, chosen: Tensor) -> list[Rows]:
        """Return the sequences of a batch by the number of their chosen tokens [batch, seq], if that is not 0."""
        batch = len(chosen)
        counts: list[int] = chosen.sum(1).tolist()
        places = chosen.flatten().nonzero().squeeze(1)
        sizes = sorted({*counts} - {0})
        if not sizes:  # in training, parameters still get a gradient, of zeros
            return [Rows(None, places.view(batch, 0))] if batch and torch.is_grad_enabled() else []
        if len(sizes) == 1 and 0 not in counts:
            return [Rows(None, places.view(batch, -1))]
        parts, found = places.split(counts), []
        for size in sizes:
            rows = [at for at, count in enumerate(counts) if count == size]
            index = torch.tensor(rows, device=chosen.device)
            found.append(Rows(index, torch.stack([parts[at] for at in rows])))
        return found

    # --- running the steps --------------------------------------------------------------------------------------------

    def _on_rows(self, groups: Sequence[Rows], inputs: list[Tensor], call: Call) -> tuple[Tensor, States]:
        """Run the steps on the chosen tokens, for all sequences with equally many of them at once."""
        x = inputs[0]
        flat = [each if whole else each.flatten(0, 1) for each, whole in zip(inputs, self._whole, strict=True)]
        before = self._before(x, call) if call.streaming and (call.state or call.return_state) else {}
        part = None if call.resets is None or not x.shape[1] else call.resets.cumsum(1)
        results, after = [], before
        if part is not None and call.return_state:  # of sequences without a chosen token
            after = reset(self._states, before, part[:, -1] > 0)
        for rows, places, chosen in groups:
            state = before if rows is None else map_state(lambda s: s.index_select(0, rows), before)  # noqa: B023
            first, pending = (None, None) if part is None else _resets(part, rows, places)
            inner = self._inner(call, state if call.state else None, first)
            index = places.flatten()
            given = [
                _of_rows(each, rows) if whole else each.index_select(0, index).unflatten(0, places.shape)
                for each, whole in zip(flat, self._whole, strict=True)
            ]
            y, made = super()._compute(*given, call=inner)
            new = y.to(x.dtype).flatten(0, 1)
            results.append(new if chosen is None else torch.where(chosen, new, flat[0].index_select(0, index)))
            if not call.return_state or not places.shape[1]:
                continue
            made = made if pending is None else reset(self._states, made, pending)
            after = made if rows is None else _with_rows(after, rows, made)
        if not results:  # or there are no tokens
            return x.clone(), after if call.return_state else {}
        at = [group.places.flatten() for group in groups]
        index, new = (each[0] if len(each) == 1 else torch.cat(each) for each in (at, results))
        y = flat[0].scatter(0, index.unsqueeze(1).expand_as(new), new)  # index_copy would keep `new` for its gradient
        return y.unflatten(0, x.shape[:2]), after if call.return_state else {}

    def _inner(self, call: Call, state: States | None, resets: Tensor | None) -> Call:
        return Call(call.training, state, call.return_state, resets, streaming=call.streaming, directed=call.directed,
                    routed=call.routed)

    def _before(self, x: Tensor, call: Call) -> States:
        """Return the states before the first token of a call."""
        if call.state:
            return call.state
        return new_state(self._states, x.shape[0], x.device, smallest_dtype(self.parameters()) or x.dtype)

    # --- where the number of chosen tokens cannot be known ------------------------------------------------------------

    def _needs_all(self, chosen: Tensor) -> bool:
        """Return whether no sizes may depend on values, or whether the definition is asked for: a loop over tokens."""
        if not self._by_tokens:
            return False
        recorded = chosen.is_cuda and torch.cuda.is_current_stream_capturing()
        one = torch.compiler.is_compiling() and chosen.shape[1] == 1
        exported = torch.compiler.is_exporting() or chosen.is_meta
        return exported or one or recorded or batched(chosen) or dispatch.requested() == "reference"

    def _in_order(self, inputs: list[Tensor], chosen: Tensor, call: Call) -> tuple[Tensor, States]:
        """Run the steps on all tokens one by one, and keep the outputs and the states of the chosen ones."""
        x = inputs[0]
        if not isinstance(x.shape[1], int):
            raise RunError(
                f"{self._path}: choose with `above` can only be exported for a fixed number of tokens, such as a "
                "stream's step"
            )
        state, results = self._before(x, call), [x[:, :0]]
        for t in range(x.shape[1]):
            if call.resets is not None:
                state = reset(self._states, state, call.resets[:, t])
            inner = Call(call.training, state, True, streaming=True, directed=call.directed, routed=call.routed)
            given = (each if whole else each[:, t : t + 1] for each, whole in zip(inputs, self._whole, strict=True))
            y, made = super()._compute(*given, call=inner)
            takes = chosen[:, t]
            results.append(torch.where(takes[:, None, None], y.to(x.dtype), x[:, t : t + 1]))
            state = _where(takes, made, state)
        return torch.cat(results, 1), state if call.return_state else {}

    def extra_repr(self) -> str:
        given = {"top": self._arguments.top, "above": self._arguments.above}
        return ", ".join(f"{name}={value:g}" for name, value in given.items() if value is not None)


def _padded(chosen: Tensor) -> Rows:
    """Return all tokens of each sequence: first the chosen ones, then the others, which no chosen one reads.

    Compiled code whose sizes depend on the choice would be split here, and compiled anew for many batches.
    """
    order = (~chosen).to(torch.uint8).sort(dim=1, stable=True).indices
    first = chosen.shape[1] * torch.arange(chosen.shape[0], device=chosen.device).unsqueeze(1)
    return Rows(None, order + first, chosen.gather(1, order).flatten().unsqueeze(1))


def _without_lanes(states: States, count: int) -> States:
    """Return declarations without the axes that an enclosing `each` folds into the batch."""
    return {
        key: item._replace(shape=item.shape[count:]) if isinstance(item, State) else _without_lanes(item, count)
        for key, item in states.items()
    }


def _reads_whole(node: Node, contexts: frozenset[int]) -> bool:
    """Return whether a step reads all of the chosen tokens at once. contexts: values that do not depend on them."""
    return bool(node.cannot_stream() or not contexts.issuperset(node.whole_inputs))


def _resets(part: Tensor, rows: Tensor | None, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether each chosen token is the first chosen one since a reset, and whether one comes after the last.

    part [batch, seq]: the number of resets so far.
    """
    at = part.flatten()[places]
    last = part[:, -1] if rows is None else part[rows, -1]
    before = torch.cat([torch.zeros_like(at[:, :1]), at], 1) if at.shape[1] else torch.zeros_like(last).unsqueeze(1)
    return at != before[:, :-1], last != before[:, -1]


def _of_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _with_rows(state: States, rows: Tensor, new: States) -> States:
    """Return a state with other values for some sequences."""
    return _both(lambda old, made: old.to(made.dtype).index_copy(0, rows, made), state, new)


def _where(takes: Tensor, new: States, state: States) -> States:
    """Return the new state of the sequences of which `takes` [batch] is true, else the old one."""
    return _both(lambda old, made: torch.where(takes.view(-1, *[1] * (made.dim() - 1)), made, old), state, new)


def _both(function: Any, old: States, new: States) -> States:
    return {
        key: _both(function, old[key], item) if isinstance(item, dict) else function(old[key], item)
        for key, item in new.items()
    }

"""Pass states between ranks that hold consecutive parts of a sequence, and pass their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from seqblocks.op import Op
from seqblocks.roles import transition
from seqblocks.runtime.call import Call, Carrying
from seqblocks.state import States, dtype_of
from seqblocks.state_layout import State


class Kind(NamedTuple):
    """Shape and dtype of a tensor that is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Link:
    """Messages between the ranks of a group. Sending does not block, receiving does. Counts the messages sent."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.messages = self.bytes = 0
        self._pending: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Iterable[Tensor], to: int) -> None:
        """Send tensors as one message. Empty tensors are not sent."""
        message = torch.cat([_as_bytes(x) for x in tensors])
        if not message.numel():
            return
        self._pending = [each for each in self._pending if not each[0].is_completed()]
        work = distributed.isend(message, self._global(to), group=self.group)
        self._pending.append((work, message))
        self.messages, self.bytes = self.messages + 1, self.bytes + message.numel()

    def receive(self, kinds: list[Kind], source: int, device: torch.device) -> list[Tensor]:
        """Return the tensors that another rank sent, each in its own memory."""
        sizes = [_bytes_of(kind) for kind in kinds]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if message.numel():
            distributed.recv(message, self._global(source), group=self.group)
        parts = message.split(sizes)
        return [part.clone().view(kind.dtype).view(kind.shape) for part, kind in zip(parts, kinds, strict=True)]

    def wait(self) -> None:
        """Wait until all sent messages have arrived."""
        for work, _ in self._pending:
            work.wait()
        self._pending = []

    def _global(self, rank: int) -> int:
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)


def _as_bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _bytes_of(kind: Kind) -> int:
    count = kind.dtype.itemsize
    for size in kind.shape:
        count *= size
    return count


class SequenceShard(NamedTuple):
    """A rank's shard of a call, in one direction of a scan.

    earlier, later: the ranks before and after this one in the direction of the scan, None at an end. before, after: the
    total number of input tokens on all earlier and all later ranks. begins, next_begins [batch]: whether a sequence
    begins with the first token, and with the token after the shard; None without resets. tracked: whether gradients are
    sent back. summaries: whether steps summarise their tokens if they can.
    """

    link: Link
    batch: int
    device: torch.device
    earlier: int | None
    later: int | None
    before: int
    after: int
    begins: Tensor | None
    next_begins: Tensor | None
    tracked: bool
    summaries: bool

    def reversed(self) -> SequenceShard:
        """Return the shard as seen from the other end."""
        begins = None if self.earlier is None else self.begins
        return self._replace(
            earlier=self.later, later=self.earlier, before=self.after, after=self.before, begins=self.next_begins,
            next_begins=begins,
        )  # fmt: skip


class Relay:
    """Receives and sends the states of one call.

    Each step's state is received and sent once per direction, even if activation checkpointing recomputes the step.
    """

    def __init__(self, shard: SequenceShard) -> None:
        self.shard = shard
        self.next_begins = shard.next_begins
        self._received: dict[str, list[Tensor]] = {}
        self._sent: set[str] = set()
        self._reversed: Relay | None = None

    def reversed(self) -> Relay:
        """Return the relay of a scan from the other end of the sequence."""
        if self._reversed is None:
            self._reversed = Relay(self.shard.reversed())
            self._reversed._reversed = self
        return self._reversed

    def run(self, step: Carrying, p: dict[str, Any], call: Call, inputs: list[Any]) -> Tensor:
        """Return a step's output; see `seqblocks.runtime.call.Relay`."""
        move = self._transition(step.op, p, call, inputs)
        state, inputs = self._before(step, inputs)
        if move is None:
            has_later = self.shard.later is not None
            y, after = step.op.forward(p, replace(call, state=state, return_state=has_later), *inputs)
            return self._send_state(step, after, [y], inputs)[0] if has_later else y
        if self.shard.later is not None:
            after = move(self._initial(step, inputs) if state is None else state)
            inputs = self._send_state(step, after, inputs, inputs)
        y, _ = step.op.forward(p, replace(call, state=state), *inputs)
        return y

    def _transition(
        self, op: Op, p: dict[str, Any], call: Call, inputs: list[Any]
    ) -> Callable[[States], States] | None:
        if not inputs[0].shape[1]:  # without tokens, the state is passed on unchanged
            return lambda state: state
        if op.summary_cost and not self.shard.summaries:
            return None
        if call.reverse:  # the same tokens from the other end
            inputs = [x if x is None else x.flip(1) for x in inputs]
            call = replace(call, reverse=False, resets=None if call.resets is None else call.resets.flip(1))
        return transition(op, p, call, inputs)

    def _kinds(self, step: Carrying, inputs: list[Any], before: int) -> list[Kind]:
        """Return the kinds of a step's state tensors. Tensors in the model's dtype have the dtype of the inputs."""
        dtype = torch.float32
        floats = [x.dtype for x in inputs if x is not None and x.is_floating_point()]
        for at, each in enumerate(floats):
            dtype = torch.promote_types(dtype, each) if at else each
        return [Kind((self.shard.batch, *_sizes(state, int(before // step.rate))), dtype_of(state, dtype))
                for state in step.state.values()]  # fmt: skip

    def _initial(self, step: Carrying, inputs: list[Any]) -> States:
        kinds = self._kinds(step, inputs, 0)
        return {
            name: torch.full(kind.shape, state.fill, dtype=kind.dtype, device=self.shard.device)
            for (name, state), kind in zip(step.state.items(), kinds, strict=True)
        }

    def _before(self, step: Carrying, inputs: list[Any]) -> tuple[States | None, list[Any]]:
        """Return the earlier rank's state (None on the first rank) and the inputs, connected to its gradient."""
        if self.shard.earlier is None:
            return None, inputs
        kinds = self._kinds(step, inputs, self.shard.before)
        if step.path not in self._received:
            self._received[step.path] = self.shard.link.receive(kinds, self.shard.earlier, self.shard.device)
        state = [x.detach() for x in self._received[step.path]]
        if self.shard.tracked:
            state, inputs = _joined(_Received, self.shard, state, inputs)
        return dict(zip(step.state, state, strict=True)), inputs

    def _send_state(self, step: Carrying, after: States, carriers: list[Any], inputs: list[Any]) -> list[Any]:
        """Send a state to the later rank. Return the tensors through which its gradient arrives."""
        kinds = self._kinds(step, inputs, self.shard.before)
        state = [after[name].to(kind.dtype) for name, kind in zip(step.state, kinds, strict=True)]
        if step.path not in self._sent:
            self._sent.add(step.path)
            assert self.shard.later is not None
            self.shard.link.send(state, self.shard.later)
        return _joined(_Sent, self.shard, state, carriers)[1] if self.shard.tracked else carriers


def _sizes(state: State, tokens: int) -> tuple[int, ...]:
    return (tokens, *state.shape[1:]) if state.per_token else state.shape


def _joined(
    function: type[_Received] | type[_Sent], shard: SequenceShard, state: list[Tensor], tensors: list[Any]
) -> tuple[list[Tensor], list[Any]]:
    """Pass a state and a step's inputs or outputs through one autograd node.

    Every backward pass through the step then reaches the node, even if the step ignores its state; otherwise the
    neighbouring rank would wait forever. Integer tensors and absent inputs bypass the node.
    """
    floats = [at for at, x in enumerate(tensors) if x is not None and x.is_floating_point()]
    exact = [at for at, x in enumerate(state) if x.is_floating_point()]
    if not exact:
        return state, tensors
    anchor = torch.empty(0, device=shard.device, requires_grad=True)
    passed = function.apply(shard, len(exact), anchor, *(state[at] for at in exact), *(tensors[at] for at in floats))
    states, others = list(state), list(tensors)
    for at, x in zip(exact, passed[: len(exact)], strict=True):
        states[at] = x
    for at, x in zip(floats, passed[len(exact) :], strict=True):
        others[at] = x
    return states, others


# torch has no point-to-point communication with gradients.
class _Received(torch.autograd.Function):
    """Identity in the forward pass; the backward pass sends the state's gradients to the rank that sent the state."""

    @staticmethod
    def forward(ctx: Any, shard: SequenceShard, count: int, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.count = shard, count
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.count:
            ctx.shard.link.send(gradients[: ctx.count], ctx.shard.earlier)
        return None, None, None, *[None] * ctx.count, *gradients[ctx.count :]


class _Sent(torch.autograd.Function):
    """Identity in the forward pass; the backward pass receives the gradients of the state that was sent."""

    @staticmethod
    def forward(ctx: Any, shard: SequenceShard, count: int, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shard, ctx.kinds = shard, [Kind(tuple(x.shape), x.dtype) for x in tensors[:count]]
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.kinds)
        states = ctx.shard.link.receive(ctx.kinds, ctx.shard.later, ctx.shard.device) if count else []
        return None, None, None, *states, *gradients[count:]

"""Sequence parallelism: each rank of a process group processes one part of a long sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from seqblocks import graph
from seqblocks.distributed.relay import Kind, Link, Relay, SequenceShard
from seqblocks.errors import RunError, UsageError
from seqblocks.graph import ModelSpec
from seqblocks.kernels.positions import packed_resets
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.runtime import arguments
from seqblocks.runtime.agreement import check_inputs, check_weights
from seqblocks.runtime.modules import drops_samples_now
from seqblocks.runtime.shards import groups_of, local

ORDERS = ("forward", "reverse")  # of scans
BUCKET = 2**25  # gradient elements that are summed in one message


def sequence_parallel(model: nn.Module, group: Any = None, *, summaries: bool | None = None) -> SequenceParallel:
    """Return a callable that runs a model on a sequence split over the ranks of a group, in the order of the ranks.

    model: as `build` returns it, the same on all ranks, or wrapped by DDP or fully_shard. group: a process group or a
    mesh of one dimension; by default all ranks. summaries: whether steps such as `ssm` summarise the effect of
    their tokens on any state while they wait for the previous rank's state, at some extra cost; by default, if there
    are more ranks than such steps (docs/sequence_parallel.md).
    Raises RunError if a step needs the whole sequence at once, UsageError for invalid arguments.
    """
    if not distributed.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    inner = next((module for module in model.modules() if isinstance(module, SequenceModel)), None)
    if inner is None:
        raise UsageError(f"sequence_parallel needs a model from seqblocks.build, not {type(model).__name__}")
    if obstacle := graph.stream_obstacle(inner.spec, ORDERS):
        raise RunError(" cannot run on a part of a sequence: ".join(obstacle))
    if graph.has_prefix(inner.spec.graph):
        raise RunError("the model puts tokens before the sequence, which only the first part of a sequence may do")
    if name := _carrying_each(inner.spec):
        raise RunError(f"{name} carries the states of several sequences, which ranks do not hand on")
    if name := _choosing(inner.spec):
        raise RunError(f"{name} chooses tokens of a sequence, of which ranks have unequal numbers")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(f"the mesh has {group.ndim} dimensions, but a sequence is split along one")
        group = group.get_group()
    if inner.tensor_shards and inner.tensor_shards.are_in(group):
        raise UsageError(
            "ranks of the group hold different parts of the model (tensor_parallel), but each must hold the same: pass "
            'an axis of the mesh with other ranks, such as mesh["sequence"]'
        )
    check_weights(inner, [group])
    return SequenceParallel(model, inner, Link(group), summaries)


class SequenceParallel:
    """Runs a model on this rank's part of a sequence; outputs and gradients are those of the whole sequence.

        parallel = sequence_parallel(model)
        logits = parallel(parallel.part(tokens))
        losses = cross_entropy(logits.mT, parallel.part(targets), reduction="none")
        parallel.mean(losses).backward()
        parallel.sum_gradients()

    All ranks must make the same calls in the same order, and each must call backward. rank, size: of the group.
    """

    def __init__(self, model: nn.Module, inner: SequenceModel, link: Link, summaries: bool | None) -> None:
        self.model = model
        self._inner, self._link = inner, link
        self.rank, self.size = link.rank, link.size
        self._turns = any(order == "reverse" for order in _orders(inner.spec))
        self._summaries = _are_worthwhile(inner.spec, link.size) if summaries is None else summaries

    def __call__(
        self, x: Tensor | None = None, *, resets: Tensor | None = None, cu_seqlens: Tensor | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Return the output for this rank's tokens.

        x [batch, tokens, features] (or token ids [batch, tokens]): this rank's part, whose length may differ
        between ranks. resets [batch, tokens]: of this part. cu_seqlens: of the whole sequence. inputs: the inputs that
        do not stream, whole. If the output is a vector for the whole sequence, only the last rank's is valid; see
        `last`. Raises RunError if the calls of the ranks do not match.
        """
        spec = self._inner.spec
        if inputs or x is None:
            x, inputs = arguments.named_input(spec.inputs, x, inputs)
        arguments.check_input(spec.input, x, "the model", ["batch", "seq"])
        self._check(x)
        arguments.check_marks(x, resets, cu_seqlens, ["batch", "seq"])
        leaves = (x, *inputs.values(), *self.model.parameters())  # a frozen model may follow a trained encoder
        tracked = torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves)
        shard = self._agree(x, tracked, 2 * (cu_seqlens is not None) + (resets is not None))
        if inputs or cu_seqlens is not None:
            check_inputs(self._link.group, {**inputs, "cu_seqlens": cu_seqlens})
        if cu_seqlens is not None:
            whole = packed_resets(cu_seqlens, self._total(x.shape[1], x.device), x.device)
            resets = whole[:, shard.before : shard.before + x.shape[1]]
        if self._turns:
            shard = self._look_ahead(shard, x.shape[1], resets)
        self._inner.sequence_relay = Relay(shard)
        try:
            y = self.model(x, resets=resets, **inputs)
        finally:
            self._inner.sequence_relay = None
        if not shard.tracked:
            self._link.wait()
        return y

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of a whole sequence, along the axis of the tokens: tokens, targets, resets.

        The lengths of the parts differ by at most one token (or one frame of tokens).
        """
        frame = self._inner.frame_size
        frames = -(-x.shape[dim] // frame)
        first, last = (min(frame * (at * frames // self.size), x.shape[dim]) for at in (self.rank, self.rank + 1))
        return x.narrow(dim, first, last - first)

    def mean(self, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean of the losses of all ranks, the same on each rank.

        losses: of this rank's tokens, any shape. weights: of the losses, the same shape; 0 excludes a loss.
        The gradient covers this rank's losses; `sum_gradients` adds those of all ranks.
        """
        dtype = torch.promote_types(losses.dtype, torch.float32)  # a sum in 16 bits cannot count more than 2048 tokens
        weighted = losses if weights is None else losses * weights
        count = losses.numel() if weights is None else weights.sum(dtype=dtype)
        own = weighted.sum(dtype=dtype)
        total = torch.stack([own.detach(), torch.as_tensor(count, dtype=own.dtype, device=own.device)])
        self._all_reduce(total)
        mean = own / total[1]
        return (mean + (total[0] / total[1] - mean).detach()).to(losses.dtype)

    def last(self, y: Tensor) -> Tensor:
        """Return the last rank's value on all ranks: a vector for the whole sequence.

        Every rank may compute a loss from it, but only the gradient on the last rank is used.
        """
        value = y.detach().clone(memory_format=torch.contiguous_format)
        distributed.broadcast(value, self._link._global(self.size - 1), group=self._link.group)
        self._link.wait()
        counted = y if self.rank == self.size - 1 else y * 0
        return counted + (value - counted).detach()

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Add the gradients of all ranks, so that each has those of the whole sequence.

        Do not use it for a model wrapped by DDP or FSDP over the same ranks: these already average gradients. For FSDP
        it raises UsageError. Parameters may be sharded over other ranks.
        """
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not parameters:
            return
        self._check_shards(parameters)
        device = parameters[0].device
        used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
        self._all_reduce(used)
        found = [p for p, count in zip(parameters, used.tolist(), strict=True) if count]
        for p in found:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for bucket in _buckets(found):
            gradients = [local(p.grad) for p in bucket if p.grad is not None]
            flat = torch.cat([g.flatten() for g in gradients])
            self._all_reduce(flat)
            for g, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                g.copy_(total.view_as(g))

    def _check_shards(self, parameters: list[nn.Parameter]) -> None:
        """Raise UsageError if parameters are sharded over these ranks, whose gradients FSDP has reduced."""
        own = {*distributed.get_process_group_ranks(self._link.group)}
        for group in groups_of(parameters, None):
            if len(own.intersection(distributed.get_process_group_ranks(group))) > 1:
                raise UsageError(
                    "the gradients of these ranks are reduced already: leave out sum_gradients, "
                    "and multiply the loss by parallel.size"
                )

    def _all_reduce(self, x: Tensor) -> None:
        distributed.all_reduce(x, group=self._link.group)
        self._link.wait()

    def _check(self, x: Tensor) -> None:
        frame = self._inner.frame_size
        if x.shape[1] % frame:
            raise RunError(f"a part of a sequence must contain whole frames of {frame} tokens, not {x.shape[1]} tokens")
        if name := drops_samples_now(self._inner):
            raise RunError(
                f"{name} drops whole samples at random, but each rank would drop different ones: "
                "set its probability to 0, or call model.eval()"
            )

    def _total(self, tokens: int, device: torch.device) -> int:
        """Return the number of tokens on all ranks."""
        total = torch.tensor(tokens, device=device)
        self._all_reduce(total)
        return int(total)

    def _agree(self, x: Tensor, tracked: bool, marked: int) -> SequenceShard:
        """Receive the number of tokens before this part from the earlier rank. Raises RunError if the calls differ."""
        link = self._link
        earlier = self.rank - 1 if self.rank else None
        later = self.rank + 1 if self.rank + 1 < self.size else None
        before, found = 0, (x.shape[0], int(tracked), marked)
        if earlier is not None:
            (head,) = link.receive([Kind((4,), torch.int64)], earlier, x.device)
            before, *other = head.tolist()
            names = ("sequences in the batch", "gradients needed (0 or 1)", "marks (1: resets, 2: cu_seqlens)")
            for name, own, there in zip(names, found, other, strict=True):
                if own != there:
                    raise RunError(f"{name}: {own} on rank {self.rank}, but {there} on rank {earlier}")
        if later is not None:
            link.send([torch.tensor([before + x.shape[1], *found], device=x.device)], later)
        return SequenceShard(
            link, x.shape[0], x.device, earlier, later, before, 0, None, None, tracked, self._summaries
        )  # fmt: skip

    def _look_ahead(self, shard: SequenceShard, tokens: int, resets: Tensor | None) -> SequenceShard:
        """Receive from the later rank how many tokens come after this part, and whether a sequence begins there."""
        after = 0
        next_begins = first = None if resets is None else torch.zeros_like(resets[:, :1])
        if shard.later is not None:
            kinds = [Kind((1,), torch.int64)] + ([] if resets is None else [Kind((shard.batch, 1), torch.bool)])
            count, *marks = shard.link.receive(kinds, shard.later, shard.device)
            after, next_begins = int(count), marks[0] if marks else None
        if resets is not None:
            first = resets[:, :1] if tokens else next_begins
        if shard.earlier is not None:
            count = torch.tensor([after + tokens], device=shard.device)
            shard.link.send([count] if first is None else [count, first], shard.earlier)
        begins, next_begins = (None if x is None else x.squeeze(1) for x in (first, next_begins))
        return shard._replace(after=after, begins=begins, next_begins=next_begins)


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters by dtype, in groups of a limited size."""
    buckets: list[list[nn.Parameter]] = []
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        size = BUCKET
        for p in (p for p in parameters if p.dtype == dtype):
            if size + p.numel() > BUCKET:
                buckets.append([])
                size = 0
            buckets[-1].append(p)
            size += p.numel()
    return buckets


def _carrying_each(spec: ModelSpec) -> str:
    """Return the name and the place of an `each` whose steps carry states, or "" if there is none."""
    nodes = (node for node in graph.streamed(spec.graph) if isinstance(node, graph.EachNode) and node.arguments.carries)
    return next((f"{node.name} ({node.span})" for node in nodes), "")


def _choosing(spec: ModelSpec) -> str:
    """Return the name and the place of a `choose`, or "" if there is none."""
    nodes = (node for node in graph.streamed(spec.graph) if isinstance(node, graph.ChooseNode))
    return next((f"{node.name} ({node.span})" for node in nodes), "")


def _orders(spec: ModelSpec) -> list[str]:
    """Return the orders of all scans."""
    scans = (node for node in graph.streamed(spec.graph) if isinstance(node, graph.ScanNode))
    return [order for node in scans for order in node.arguments.orders]


def _are_worthwhile(spec: ModelSpec, ranks: int) -> bool:
    """Return whether summaries cost less than the time that the last rank waits without them.

    Without summaries, the last rank waits until all earlier ranks have run the first step; then the ranks work in
    parallel, each on a different step. With scans in both directions, ranks wait in every step.
    """
    costs = [node.op.summary_cost for node in graph.streamed(spec.graph) if node.op]
    waits = ranks - 1
    if len(set(_orders(spec))) > 1:
        waits *= sum(cost > 0 for cost in costs)
    return waits > sum(costs)

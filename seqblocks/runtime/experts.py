"""The module of `experts`: routing, the tokens of each expert, and load-balancing losses."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.errors import RunError
from seqblocks.graph import SHARED, ExpertsNode
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch.compiled import batched
from seqblocks.runtime.body import Body
from seqblocks.runtime.call import Call
from seqblocks.runtime.modules import Place, StepModule, call_child, make, makes
from seqblocks.runtime.primitive import Primitive
from seqblocks.state import States

TINY = 1e-20  # added to the sum of scores, which may be 0 for sigmoid scores


class Routed(NamedTuple):
    """A router's result for some tokens: outputs and scores [tokens, experts], and chosen experts [tokens, top]."""

    logits: Tensor
    scores: Tensor
    chosen: Tensor


@makes(ExpertsNode)
class Experts(StepModule):
    """A router and numbered experts. Each expert computes only the tokens routed to it."""

    def __init__(self, node: ExpertsNode, place: Place) -> None:
        super().__init__()
        self._arguments, self._path, self._reads = node.arguments, place.path, node.reads
        router, *_ = node.bodies[""].nodes
        self._modules["router"] = make(router, place.at(router))
        self.labels = [label for label in node.bodies if label not in ("", SHARED)]
        self._captures = node.bodies["0"].captures
        self._captures_of_shared = node.bodies[SHARED].captures if SHARED in node.bodies else None
        for label in node.bodies:
            if not label:
                continue
            self._modules[label] = Body(node.bodies[label], place.inside(label), "steps")

    def _compute(self, *tensors: Tensor, call: Call) -> tuple[Tensor, States]:
        x, values = tensors[0], dict(zip(self._reads, tensors, strict=True))
        inner = Call(call.training, directed=call.directed, phase=call.phase, routed=call.routed)
        logits = call_child(self._modules["router"], [x], inner, "router")[0].flatten(0, -2)
        scores, weights, chosen = self.route(logits, call)
        if call.routed is not None:
            call.routed.setdefault(self._path, []).append(Routed(logits, scores, chosen))
        chosen = self.within_capacity(chosen, call)
        flat = [each.flatten(0, -2) for each in (x, *(values[v] for v in self._captures))]
        # These cases do not support sizes that depend on values.
        exported = torch.compiler.is_exporting() and dispatch.requested() == "reference"
        whole = x.is_meta or exported or batched(chosen)
        if whole:
            y = self._on_all(flat, weights, chosen, inner, x.ndim)
        else:
            each = call.training or inner.compiling or self.needs_each
            experts = [partial(self._expert, label, call=inner, axes=x.ndim) for label in self.labels]
            y = on_routed(experts, flat, weights, chosen, each, self._arguments.capacity is not None)
        y = y.unflatten(0, x.shape[:-1])
        if self._captures_of_shared is None:
            return y, {}
        read = [x, *(values[v] for v in self._captures_of_shared)]
        return y + call_child(self._modules[SHARED], read, inner, SHARED)[0], {}

    @property
    def needs_each(self) -> bool:
        """Whether experts without tokens must be called too.

        With gradients, so that each gets one, which may be 0: a wrapper that averages gradients over ranks expects the
        same ones on each. If experts are sharded one by one, because all ranks together gather the weights of each.
        """
        if torch.is_grad_enabled():
            return True
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        wrappers = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
        expert = self._modules[self.labels[0]]
        assert expert is not None
        return bool(wrappers) and any(isinstance(module, wrappers) for module in expert.modules())

    def route(self, logits: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores of all experts, and the weights and indices [tokens, top] of the chosen ones."""
        scores = logits.softmax(-1) if self._arguments.score == "softmax" else logits.sigmoid()
        weights, chosen = self._choose(scores, call)
        if self._arguments.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + self._arguments.eps)
        factor = self._arguments.factor
        return scores, weights if factor == 1.0 else factor * weights, chosen

    def within_capacity(self, chosen: Tensor, call: Call) -> Tensor:
        """Return the chosen experts [tokens, top], with the number of experts in place of those that are full."""
        limit = self._arguments.capacity
        if limit is None or not call.training or call.streaming:
            return chosen
        count, (tokens, top) = len(self.labels), chosen.shape
        most = math.ceil(limit * tokens * top / count)
        by_rank = chosen.t().flatten()  # first choices before second ones
        sent = by_rank.unsqueeze(-1) == torch.arange(count, device=chosen.device)
        place = (sent.cumsum(0) * sent).sum(-1)
        return by_rank.masked_fill(place > most, count).unflatten(0, (top, tokens)).t()

    @property
    def _router(self) -> Primitive:
        """Return the router, also if a module wraps it. Raises RunError if another module replaces it."""
        router = self._modules["router"]
        assert router is not None
        found = next((each for each in router.modules() if isinstance(each, Primitive)), None)
        if found is None:
            name = f"{self._path}.router"
            raise RunError(f"{name}: the {type(router).__name__} that replaces it has no correction of the scores")
        return found

    def _choose(self, scores: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return scores and indices [tokens, top] of the chosen experts. Ties go to the first expert."""
        if not self._arguments.corrected:
            best = self._grouped(scores).sort(dim=-1, descending=True, stable=True)
            return best.values[:, : self._arguments.top], best.indices[:, : self._arguments.top]
        correction: Tensor = self._router.parameters_by_name(call)["correction"].to(scores.dtype)
        ranked = self._grouped(scores + correction).sort(dim=-1, descending=True, stable=True)
        chosen = ranked.indices[:, : self._arguments.top]
        return scores.gather(-1, chosen) + 0 * correction.sum(), chosen  # so that the gradient is 0, not None

    def _grouped(self, scores: Tensor) -> Tensor:
        """Return scores [tokens, experts] with -inf for experts that are not in the best groups of a token."""
        groups, top = self._arguments.groups, self._arguments.top_groups
        if top == groups:
            return scores
        parts = scores.unflatten(-1, (groups, -1))
        few = min(2, parts.shape[-1]) if self._arguments.corrected else 1
        best = parts.detach().topk(few, -1).values.sum(-1).sort(dim=-1, descending=True, stable=True)
        allowed = torch.zeros_like(best.values, dtype=torch.bool).scatter(-1, best.indices[:, :top], True)
        return parts.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)

    def _on_all(self, flat: list[Tensor], weights: Tensor, chosen: Tensor, call: Call, axes: int) -> Tensor:
        """Compute each expert on all tokens, so that no sizes depend on values."""
        total: Any = 0
        for at, label in enumerate(self.labels):
            y = self._expert(label, *flat, call=call, axes=axes)
            sent = chosen == at
            total = total + torch.where(sent.any(-1, keepdim=True), y * (weights * sent).sum(-1, keepdim=True), 0)
        return total.to(y.dtype)

    def _expert(self, label: str, *tokens: Tensor, call: Call, axes: int) -> Tensor:
        """Return an expert's output for tokens [count, features], passed as one sequence if the input is sequences."""
        if axes == 2:
            return call_child(self._modules[label], tokens, call, label)[0]
        y, _ = call_child(self._modules[label], [each.unsqueeze(0) for each in tokens], call, label)
        return y.squeeze(0)

    def _get_name(self) -> str:
        return "experts"

    def extra_repr(self) -> str:
        return f"count={self._arguments.count}, top={self._arguments.top}"


def on_routed(
    experts: Sequence[Callable[..., Tensor]], flat: list[Tensor], weights: Tensor, chosen: Tensor, each: bool,
    limited: bool = False,
) -> Tensor:
    """Return weighted sums [tokens, …] of the chosen experts' outputs. Each expert is called at most once.

    The tokens are sorted by expert, so that sums do not depend on the order of threads. each: also call experts that
    have no tokens. limited: whether there may be choices of the number after the last expert, which add 0.
    """
    top, count = chosen.shape[1], len(experts)
    order = chosen.flatten().argsort(stable=True)
    sizes = torch.nn.functional.one_hot(chosen, count + limited).sum((0, 1)).tolist()
    used = [at for at in range(count) if each or not order.numel() or sizes[at]]
    results = _results(experts, flat, order, sizes, top, used)
    if limited:
        results.append(results[0].new_zeros(sizes[count], *results[0].shape[1:]))
    joined = torch.cat(results)
    results.clear()  # so that memory is freed that no derivative needs
    y = joined[order.argsort()].unflatten(0, chosen.shape)
    del joined
    return (y * weights.unsqueeze(-1)).sum(1).to(y.dtype)


def _results(
    experts: Sequence[Callable[..., Tensor]], flat: list[Tensor], order: Tensor, sizes: list[int], top: int,
    used: list[int],
) -> list[Tensor]:
    """Return the outputs of these experts for the tokens that they are sent."""
    sent = [x.repeat_interleave(top, 0)[order].split(sizes) for x in flat]
    return [experts[at](*(x[at] for x in sent)) for at in used]


def balance(routed: list[Routed], real: Tensor | None = None) -> Tensor:
    """Return C sum_i f_i P_i over C experts: 1 if all are used equally, C if all tokens go to one expert.

    f_i is the fraction of choices of expert i, P_i the mean of its scores, normalised per token. 0 without tokens.
    real [tokens] (bool): the tokens that count; by default all.
    Source: Switch Transformers (arXiv:2101.03961), eq. 4-6, for several experts a token.
    """
    scores = torch.cat([each.scores for each in routed])
    chosen = torch.cat([each.chosen for each in routed])
    count, top = scores.shape[1], chosen.shape[1]
    shares = _counted(scores / (scores.sum(-1, keepdim=True) + TINY), real)
    used = _counted(torch.nn.functional.one_hot(chosen, count).sum(1), real)
    tokens = _tokens(scores, real)
    return count * (used.sum(0) / (tokens * top) * shares.sum(0)).sum() / tokens


def router_z(routed: list[Routed], real: Tensor | None = None) -> Tensor:
    """Return the mean of log(sum_i exp(logit_i))^2, which keeps the router's outputs small (arXiv:2202.08906).

    real [tokens] (bool): the tokens that count; by default all.
    """
    logits = torch.cat([each.logits for each in routed])
    return _counted(logits.logsumexp(-1, keepdim=True).square(), real).sum() / _tokens(logits, real)


def _counted(x: Tensor, real: Tensor | None) -> Tensor:
    """Return x [tokens, features] with zeros for the tokens that do not count."""
    return x if real is None else x.masked_fill(~real.unsqueeze(-1), 0)


def _tokens(x: Tensor, real: Tensor | None) -> Any:
    """Return the number of tokens that count, but at least 1."""
    return max(len(x), 1) if real is None else real.sum().clamp(min=1)


LOSSES = {"balance": balance, "router_z": router_z}

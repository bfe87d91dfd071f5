"""How scores of attention become weights: scale, soft cap, linear biases, sinks.

H query heads, S queries, T keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.dispatch.compiled import watched
from seqblocks.kernels.numerics import SLOW_KINDS, autocast_dtype, without_autocast

NOTHING = -1e30  # log of the sum of no exponentials: finite, so that differences of two are no NaN


class Scores(NamedTuple):
    """The function from products of queries and keys to weights.

    scale: factor of the products. soft_cap: limit of the scores (Gemma 2, arXiv:2408.00118). slopes [H]: subtracted
    from the scores for each token of distance (ALiBi, arXiv:2108.12409). sinks [H]: score of a further key whose value
    is 0 (gpt-oss, arXiv:2508.10925). bias [H, S, T] or [H, B, S, T]: added to the scores. logsumexp: whether outputs
    have the log of the sum of exponentials as a further feature.
    """

    scale: float
    soft_cap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None
    logsumexp: bool = False

    @property
    def plain(self) -> bool:
        """Whether only the weights are needed, and are the softmax of the scaled products."""
        given = (self.soft_cap, self.slopes, self.sinks, self.bias)
        return not self.logsumexp and all(each is None for each in given)

    def width(self, v: Tensor) -> int:
        """Return the features of a head of the output."""
        return v.shape[-1] + self.logsumexp

    def nothing(self, q: Tensor, v: Tensor) -> Tensor:
        """Return the output of a call without queries or sequences, [B, S, H, DV]."""
        kind = torch.promote_types(v.dtype, torch.float32) if self.logsumexp else v.dtype
        return v.new_zeros(*q.shape[:3], self.width(v), dtype=kind)

    def capped(self, scores: Tensor) -> Tensor:
        """Return scaled scores of any shape after the soft cap."""
        return scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)

    def with_heads(self, *shape: int) -> Scores:
        """Return the same for scores whose heads have this shape, [*shape, S, T]."""
        slopes, sinks = (None if x is None else x.view(shape) for x in (self.slopes, self.sinks))
        bias = self.bias if self.bias is None or self.bias.dim() == 4 else self.bias.view(*shape, *self.bias.shape[1:])
        return self._replace(slopes=slopes, sinks=sinks, bias=bias)

    def of(self, a: int, b: int) -> Scores:
        """Return the same for the queries from a to b."""
        return self if self.bias is None else self._replace(bias=self.bias[..., a:b, :])

    def weights(self, scores: Tensor, seen: Tensor, distance: Tensor | None) -> Tensor:
        """Return the weights of scaled scores [B, H, S, T], of the same shape.

        seen, distance, of shapes that can be expanded to it: whether a query sees a key, and the number of tokens
        between them, which only slopes need.
        """
        return self.of_visible(self.visible(scores, seen, distance))

    def visible(self, scores: Tensor, seen: Tensor, distance: Tensor | None) -> Tensor:
        """Return what the softmax reads: -inf for keys that are not seen."""
        scores = self.capped(scores)
        if self.slopes is not None and distance is not None:
            scores = scores - self.slopes.to(scores.dtype)[..., None, None] * distance.to(scores.dtype)
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        return scores.masked_fill(~seen, -torch.inf)

    def of_visible(self, scores: Tensor) -> Tensor:
        """Return the weights of what `visible` returned."""
        if self.sinks is None:
            return torch.softmax(scores, -1)
        sink = self.sinks.to(scores.dtype)[..., None, None]
        if scores.shape[-1] == 0:  # nothing has a maximum
            return scores * sink
        most = torch.maximum(scores.amax(-1, keepdim=True), sink).detach()  # any number gives the same weights
        odds = torch.exp(scores - most)
        return odds / (odds.sum(-1, keepdim=True) + torch.exp(sink - most))

    def with_logsumexp(self, scores: Tensor, values: Tensor, none: Tensor | None = None) -> Tensor:
        """Return weighted values [..., S, DV] and the log of the sum of exponentials, [..., S, DV + 1] in one tensor.

        scores [..., S, T]: as returned by `visible`, in the dtype of the result. none [..., S, 1]: which queries see no
        key; their scores are any finite numbers. A sink counts as an exponential.
        """
        total, sink = scores.logsumexp(-1, keepdim=True), None
        if self.sinks is not None:
            sink = self.sinks.to(scores.dtype)[..., None, None]
            total = torch.logaddexp(total, sink)
        y = product(torch.exp(scores - total).to(values.dtype), values, rounds=True).to(scores.dtype)
        if none is not None:
            y = y.masked_fill(none, 0.0)
            total = total.masked_fill(none, NOTHING) if sink is None else torch.where(none, sink, total)
        return torch.cat([y, total], -1)


def product(a: Tensor, b: Tensor, rounds: bool = False) -> Tensor:
    """Return a @ b, for 16 bits on a CPU as float32: rounded scores would change weights by more than their rounding.

    rounds: whether the caller rounds the result, so that it is float32 only where that is faster.
    """
    kind = autocast_dtype(a.device.type)
    if kind is not None and a.dtype is torch.float32:
        a, b = a.to(kind), b.to(kind)
    kinds = SLOW_KINDS if rounds else (torch.bfloat16, torch.float16)
    if not a.is_cpu or a.dtype != b.dtype or a.dtype not in kinds:
        return a @ b
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad) and not watched():
        y: Tensor = _Product.apply(a, b)
        return y
    with without_autocast("cpu"):
        return a.float() @ b.float()


class _Product(torch.autograd.Function):
    """a @ b in float32 for operands of 16 bits, which are kept as they are."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with without_autocast("cpu"):
            return a.float() @ b.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        kind = torch.float32 if a.dtype in SLOW_KINDS else a.dtype
        grad = grad.to(kind)
        for_a, for_b = ctx.needs_input_grad
        with without_autocast("cpu"):
            return (
                (grad @ b.to(kind).mT).to(b.dtype) if for_a else None,
                (a.to(kind).mT @ grad).to(a.dtype) if for_b else None,
            )


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """Return ALiBi's slopes [H], float64: 2^(-8 / H), 2^(-16 / H), … (arXiv:2108.12409).

    If H is not a power of two, the slopes of the power below it are followed by every other slope of the power above.
    """
    below = 1 << (heads.bit_length() - 1)

    def slopes(count: int) -> Tensor:
        return 2.0 ** (-8 / count * torch.arange(1, count + 1, dtype=torch.float64, device=device))

    return torch.cat([slopes(below), slopes(2 * below)[: 2 * (heads - below) : 2]])

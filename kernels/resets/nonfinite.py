"""NaN and infinities stay within the sequence that they are in.

Chunkwise implementations multiply tokens of other sequences by zero, and 0 * NaN is NaN; so does autograd, going back
through a token whose result is not used. Here tokens that are not finite are replaced by zeros before anything is
computed, and what depends on them is NaN afterwards.

B batch, S sequence, H heads. A token is one of a head; "before" is in the order of the scan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.resets.tokens import along


def suspected(*tensors: Tensor | None) -> bool:
    """Whether some number may not be finite. True on other devices than a CPU, which would have to be waited for, and
    in compiled code."""
    given = [x for x in tensors if x is not None]
    if given[0].device.type != "cpu" or torch.compiler.is_compiling():
        return True
    return not all(math.isfinite(x.sum().item()) for x in given)  # a sum that overflows only costs time


class Found(NamedTuple):
    """Where inputs are not finite, and which outputs depend on those."""

    tokens: Tensor  # [B, S, H]
    state: Tensor  # [B, H]: the initial one
    outputs: Tensor  # [B, S, H]
    last: Tensor  # [B, H]: the last state
    resets: Tensor  # [B, S]
    reverse: bool

    def clean(self, *inputs: Tensor) -> list[Tensor]:
        """Inputs [B, S, H, ...] with zeros for tokens that are not finite."""
        return [torch.where(along(self.tokens, x), 0.0, x) for x in inputs]

    def clean_state(self, *state: Tensor | None) -> list[Any]:
        """The same for C, n, m [B, H, ...]."""
        return [None if x is None else torch.where(along(self.state, x), 0.0, x) for x in state]

    def mark(self, h: Tensor, *last: Tensor) -> None:
        """Fill what depends on such inputs with NaN, in place."""
        h.masked_fill_(along(self.outputs, h), torch.nan)
        for x in last:
            if x.numel():
                x.masked_fill_(along(self.last, x), torch.nan)

    def clean_outputs(self, h: Tensor | None, *last: Tensor | None) -> list[Any]:
        """Outputs, or their gradients, with zeros where an output depends on such inputs or they are not finite."""
        ends = self.last
        for x in last:
            ends = ends if x is None else ends | _any(~x.isfinite(), 2)
        if h is not None:
            h = torch.where(along(self.outputs | _not_finite(h), h), 0.0, h)
        return [h, *(None if x is None else torch.where(along(ends, x), 0.0, x) for x in last)]

    def without_gradient(self, dh: Tensor | None, *dlast: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens [B, S, H] and initial states [B, H] without a gradient: an output that depends on them has one that is
        not finite, or is itself not finite and has one that is not zero."""
        tokens = torch.zeros_like(self.tokens)
        if dh is not None:
            tokens = _not_finite(dh) | (self.outputs & _any(dh != 0, 3))
        last = torch.zeros_like(self.last)
        for x in dlast:
            if x is not None:
                last = last | _any(~x.isfinite(), 2) | (self.last & _any(x != 0, 2))
        ends = torch.zeros_like(self.resets)  # of sequences: where a scan from the other end begins anew
        if self.reverse:
            ends[:, 1:] = self.resets[:, :-1]
        else:
            ends[:, :-1] = self.resets[:, 1:]
        found = _reached(tokens, last, ends, not self.reverse)
        first = slice(-1, None) if self.reverse else slice(0, 1)
        return found, (found[:, first] & ~self.resets[:, first, None]).squeeze(1)


def fill(grads: Sequence[Tensor], tokens: Tensor, states: Tensor) -> None:
    """NaN, in place, into the gradients of q, k, v, i, f and of C, n, m, as `Found.without_gradient` says."""
    for at, x in enumerate(grads):
        if x.numel():
            x.masked_fill_(along(tokens if at < 5 else states, x), torch.nan)


def find(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: tuple[Tensor | None, ...], resets: Tensor,
    reverse: bool,
) -> Found:
    """Look at all inputs. A gate that is closed (i or f at -inf) or open (f at inf) is no fault."""
    tokens = _not_finite(q) | _not_finite(k) | _not_finite(v) | i.isnan() | (i == torch.inf) | f.isnan()
    first = torch.zeros_like(tokens[:, 0])
    for x in state:
        if x is not None:
            first = first | _any(~x.isfinite(), 2)
    return found_at(tokens, first, resets.bool(), reverse)


def found_at(tokens: Tensor, first: Tensor, resets: Tensor, reverse: bool) -> Found:
    """Of tokens [B, S, H] and initial states [B, H] that are known not to be finite."""
    outputs = _reached(tokens, first, resets, reverse)
    return Found(tokens, first, outputs, outputs[:, 0 if reverse else -1], resets, reverse)


def _reached(tokens: Tensor, first: Tensor, resets: Tensor, reverse: bool) -> Tensor:
    """Tokens [B, S, H] that have one of `tokens` before them, or are one, in the same sequence; `first` [B, H] comes
    before the first token."""
    if reverse:
        return _reached(tokens.flip(1), first, resets.flip(1), False).flip(1)
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).view(1, -1, 1)
    latest = torch.where(tokens, place, -1).cummax(1).values
    latest = torch.maximum(latest, torch.where(first, 0, -1).unsqueeze(1))
    return latest >= torch.where(resets.unsqueeze(-1), place, 0).cummax(1).values


def _not_finite(x: Tensor) -> Tensor:
    """[B, S, H, D] -> [B, S, H]"""
    return _any(~x.isfinite(), 3)


def _any(x: Tensor, axes: int) -> Tensor:
    """Over all but the first `axes`."""
    return x.flatten(axes).any(-1) if x.dim() > axes else x


class _Mark(torch.autograd.Function):
    """NaN where `mask` is true, without a gradient where that of the result is zero, and with NaN where it is not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, torch.nan, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask & (grad == 0), 0.0, torch.where(mask, torch.nan, grad)), None


class _MarkForward(_Mark):
    """With a derivative in forward mode too, which compilers do not take."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, torch.nan, tangent)


def marked(found: Found, h: Tensor, last: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """As `Found.mark`, for autograd: h and the last state, new tensors."""
    mark = _Mark.apply if torch.compiler.is_compiling() else _MarkForward.apply
    out: Tensor = mark(h, along(found.outputs, h))
    return out, [mark(x, along(found.last, x)) for x in last]

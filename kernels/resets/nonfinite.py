"""Keep NaN and infinities within the sequence that contains them.

Chunkwise implementations multiply tokens of other sequences by zero, and 0 * NaN is NaN. Autograd does the same in the
backward pass of tokens whose results are unused. The functions here replace nonfinite tokens by zeros before the
computation and set everything that depends on them to NaN afterwards.

B batch, S sequence, H heads. Tokens are counted per head; "before" means earlier in scan order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels.dispatch.compiled import batched
from seqblocks.kernels.resets.tokens import along


def suspected(*tensors: Tensor | None) -> bool:
    """Return whether some value may be nonfinite. Always true in compiled code and in torch.func.vmap, where values
    cannot be read, and on devices other than the CPU, where reading one would synchronise."""
    given = [x for x in tensors if x is not None]
    if given[0].device.type != "cpu" or torch.compiler.is_compiling() or any(batched(x) for x in given):
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
        """Return inputs [B, S, H, ...] with zeros for nonfinite tokens."""
        return [torch.where(along(self.tokens, x), 0.0, x) for x in inputs]

    def clean_state(self, *state: Tensor | None) -> list[Any]:
        """Return C, n, m [B, H, ...] with zeros for nonfinite initial states."""
        return [None if x is None else torch.where(along(self.state, x), 0.0, x) for x in state]

    def mark(self, h: Tensor, *last: Tensor) -> None:
        """Fill the outputs that depend on nonfinite inputs with NaN, in place."""
        h.masked_fill_(along(self.outputs, h), torch.nan)
        for x in last:
            if x.numel():
                x.masked_fill_(along(self.last, x), torch.nan)

    def clean_outputs(self, h: Tensor | None, *last: Tensor | None) -> list[Any]:
        """Return outputs, or their gradients, with zeros where they are nonfinite or depend on nonfinite inputs."""
        ends = self.last
        for x in last:
            ends = ends if x is None else ends | _any(~x.isfinite(), 2)
        if h is not None:
            h = torch.where(along(self.outputs | _not_finite(h), h), 0.0, h)
        return [h, *(None if x is None else torch.where(along(ends, x), 0.0, x) for x in last)]

    def without_gradient(self, dh: Tensor | None, *dlast: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return masks of tokens [B, S, H] and initial states [B, H] whose gradient is undefined.

        These are the ones that affect an output whose gradient is nonfinite, or a nonfinite output whose gradient is
        not zero.
        """
        tokens = torch.zeros_like(self.tokens)
        if dh is not None:
            tokens = _not_finite(dh) | (self.outputs & _any(dh != 0, 3))
        last = torch.zeros_like(self.last)
        for x in dlast:
            if x is not None:
                last = last | _any(~x.isfinite(), 2) | (self.last & _any(x != 0, 2))
        ends = torch.zeros_like(self.resets)  # ends of sequences, the resets of the opposite scan
        if self.reverse:
            ends[:, 1:] = self.resets[:, :-1]
        else:
            ends[:, :-1] = self.resets[:, 1:]
        found = _reached(tokens, last, ends, not self.reverse)
        first = slice(-1, None) if self.reverse else slice(0, 1)
        return found, (found[:, first] & ~self.resets[:, first, None]).squeeze(1)


def fill(grads: Sequence[Tensor], tokens: Tensor, states: Tensor) -> None:
    """Fill gradients of q, k, v, i, f and of C, n, m with NaN, in place, where `Found.without_gradient` is true."""
    for at, x in enumerate(grads):
        if x.numel():
            x.masked_fill_(along(tokens if at < 5 else states, x), torch.nan)


def find(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: tuple[Tensor | None, ...], resets: Tensor,
    reverse: bool,
) -> Found:
    """Find the nonfinite inputs. A closed gate (i or f of -inf) or an open one (f of inf) does not count."""
    tokens = _not_finite(q) | _not_finite(k) | _not_finite(v) | i.isnan() | (i == torch.inf) | f.isnan()
    first = torch.zeros_like(tokens[:, 0])
    for x in state:
        if x is not None:
            first = first | _any(~x.isfinite(), 2)
    return found_at(tokens, first, resets.bool(), reverse)


def found_at(tokens: Tensor, first: Tensor, resets: Tensor, reverse: bool) -> Found:
    """Return `Found` for nonfinite tokens [B, S, H] and initial states [B, H]."""
    outputs = _reached(tokens, first, resets, reverse)
    return Found(tokens, first, outputs, outputs[:, 0 if reverse else -1], resets, reverse)


def _reached(tokens: Tensor, first: Tensor, resets: Tensor, reverse: bool) -> Tensor:
    """Return the tokens [B, S, H] that are in `tokens` or follow one of them in the same sequence.

    first [B, H]: whether the initial state counts as a token before the first one.
    """
    if reverse:
        return _reached(tokens.flip(1), first, resets.flip(1), False).flip(1)
    place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).view(1, -1, 1)
    latest = torch.where(tokens, place, -1).cummax(1).values
    latest = torch.maximum(latest, torch.where(first, 0, -1).unsqueeze(1))
    return latest >= torch.where(resets.unsqueeze(-1), place, 0).cummax(1).values


def _not_finite(x: Tensor) -> Tensor:
    """Return whether any feature is nonfinite: [B, S, H, D] -> [B, S, H]."""
    return _any(~x.isfinite(), 3)


def _any(x: Tensor, axes: int) -> Tensor:
    """Reduce all but the first `axes` axes with `any`."""
    return x.flatten(axes).any(-1) if x.dim() > axes else x


class _Mark(torch.autograd.Function):
    """Set x to NaN where `mask` is true; the gradient there is NaN, or zero where that of the result is zero."""

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
    """`_Mark` with a forward-mode derivative, which compilers do not support."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, torch.nan, tangent)


def marked(found: Found, h: Tensor, last: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """Return new tensors h and last state, marked as by `Found.mark`, for autograd."""
    mark = _Mark.apply if torch.compiler.is_compiling() else _MarkForward.apply
    out: Tensor = mark(h, along(found.outputs, h))
    return out, [mark(x, along(found.last, x)) for x in last]

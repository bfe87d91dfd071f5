"""Gradients of exactly zero for dead tokens, in functions that autograd differentiates.

Only in eager reverse mode, for derivatives of any order. Tracing and transforms (torch.compile, torch.export,
torch.func, forward mode) use the unmodified function, whose values are right and whose gradients are NaN where a dead
token is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqblocks.kernels.dispatch.compiled import watched
from seqblocks.kernels.resets.tokens import along, dead_at_start, dead_tokens, finite

TOKENS, STATE, SHARED = "tokens", "state", "shared"  # tensors [B, S, ...], [B, ...], and parameters
Function = Callable[..., tuple[Tensor, ...]]


def contained(
    function: Function, tensors: Sequence[Tensor | None], kinds: Sequence[str], resets: Tensor | None, reverse: bool,
    unread: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Call function(*tensors), with gradients of exactly zero for dead tokens, whatever their values.

    function: maps tensors to (y [B, S, ...], states [B, ...], ...) and has no parameters of its own. kinds: TOKENS,
    STATE or SHARED for each tensor. unread: the tensor, if any, that affects y at later tokens only; all others must
    make y nonfinite where they are nonfinite. Supports derivatives of any order.
    """
    if resets is None or not resets.numel() or not _recorded(tensors):
        return function(*tensors)
    if tensors[0] is not None and tensors[0].device.type == "cpu":
        out = function(*tensors)
        if finite(out[0], *(() if unread is None else (unread,))):
            return out
    contained_out: tuple[Tensor, ...] = _Contained.apply(function, kinds, resets, reverse, *tensors)
    return contained_out


def _recorded(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether autograd, and no other transform, records operations on these tensors."""
    if watched() or not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in tensors)


class _Contained(torch.autograd.Function):
    """Store the function's graph, and rebuild it with zeros for dead tokens if one of them is not finite."""

    @staticmethod
    def forward(
        ctx: Any, function: Function, kinds: Sequence[str], resets: Tensor, reverse: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        inner = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            out = function(*inner)
        ctx.function, ctx.kinds, ctx.reverse, ctx.graph = function, kinds, reverse, (inner, out)
        ctx.save_for_backward(resets, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        resets, *tensors = ctx.saved_tensors
        leaves, out = ctx.graph
        again = torch.is_grad_enabled()  # the derivative will itself be differentiated
        dead = dead_tokens(grads[:1], grads[1:], resets, ctx.reverse)
        if again or _poisoned(dead, [out[0], *_of(tensors, ctx.kinds, TOKENS)], _of(tensors, ctx.kinds, STATE)):
            if not again:
                leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in tensors]
            else:
                leaves = tensors
            with torch.enable_grad():
                out = ctx.function(*_cleaned(leaves, ctx.kinds, dead, ctx.reverse))
        needed = [x for x in leaves if x is not None and x.requires_grad]
        pairs = [(x, g) for x, g in zip(out, grads, strict=True) if g is not None and x.requires_grad]
        if not pairs:
            return (None,) * (4 + len(tensors))
        outputs, given = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(outputs, needed, given, retain_graph=True, create_graph=again, allow_unused=True)
        )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.graph = None
        return None, None, None, None, *(next(found) if x is not None and x.requires_grad else None for x in leaves)


def _of(tensors: Sequence[Tensor | None], kinds: Sequence[str], selected: str) -> list[Tensor]:
    return [x for x, kind in zip(tensors, kinds, strict=True) if x is not None and kind == selected]


def _poisoned(dead: Tensor, tokens: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
    """Return whether any value of a dead token is not finite."""
    if dead.is_meta or (dead.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    if not dead.any():
        return False
    return not all(
        x.reshape(*dead.shape, -1)[dead].isfinite().all() for x in tokens
    ) or not all(x.isfinite().all() for x in states)


def _cleaned(
    tensors: Sequence[Tensor | None], kinds: Sequence[str], dead: Tensor, reverse: bool
) -> list[Tensor | None]:
    """Replace dead tokens, and the states that they read, by zeros."""
    first = dead_at_start(dead, reverse)
    return [
        x if x is None or kind == SHARED
        else x.masked_fill(along(dead, x), 0.0) if kind == TOKENS
        else x.masked_fill(along(first, x), 0.0)
        for x, kind in zip(tensors, kinds, strict=True)
    ]  # fmt: skip


def gated(
    run: Callable[[Gate], tuple[Any, Any]], tokens: Sequence[Any], states: Sequence[Any], resets: Tensor | None,
    reverse: bool,
) -> tuple[Any, Any]:
    """Call run(gate), with a gate that is active if autograd records these tensors and values may be nonfinite."""
    states = [x for x in states if isinstance(x, Tensor)]
    given = [*(x for x in tokens if isinstance(x, Tensor)), *states]
    if resets is None or not resets.numel() or not _recorded(given):
        return run(Gate(resets, reverse, False))
    if resets.device.type == "cpu":
        out = run(Gate(resets, reverse, False))
        found = [x for x in pytree.tree_leaves(out[0]) if isinstance(x, Tensor) and x.is_floating_point()]
        if finite(*found, *states):
            return out
    return run(Gate(resets, reverse, True))


class Gate:
    """Zero gradients of dead tokens for functions that may have parameters of their own, unlike `contained`.

    Inputs pass through `closed` and get no gradient at dead tokens. Results pass through `watched`, which finds the
    dead tokens. The function's own parameters are applied to every token, so their gradients are nonfinite where a
    dead token's are.
    """

    def __init__(self, resets: Tensor | None, reverse: bool, active: bool) -> None:
        self.resets, self.reverse, self.active = resets, reverse, active
        self.dead: Tensor | None = None

    def closed(self, tree: Any, state: bool = False) -> Any:
        """Return the tree of inputs [B, S, ...] (with `state`: [B, ...]), whose gradients are masked."""
        if not self.active or tree is None:
            return tree
        assert self.resets is not None
        axes = 1 if state else 2

        def close(x: Tensor) -> Tensor:
            belongs = x.requires_grad and x.shape[:axes] == self.resets.shape[:axes]  # type: ignore[union-attr]
            closed: Tensor = _Closed.apply(x, self, state) if belongs else x
            return closed

        return pytree.tree_map_only(Tensor, close, tree)

    def watched(self, tree: Any, states: Any = None) -> tuple[Any, Any]:
        """Return the trees of results [B, S, ...] and of last states [B, ...], and observe their gradients.

        All results must pass through here.
        """
        if not self.active:
            return tree, states
        leaves, spec = pytree.tree_flatten((tree, states))
        count = len(pytree.tree_leaves(tree))
        both: tuple[Any, Any] = pytree.tree_unflatten(list(_Watched.apply(self, count, *leaves)), spec)
        return both


class _Closed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Gate, state: bool) -> Tensor:
        ctx.gate, ctx.state = gate, state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dead, (grad,) = ctx.gate.dead, grads
        mask = dead_at_start(dead, ctx.gate.reverse) if ctx.state else dead
        return grad.masked_fill(along(mask, grad), 0.0), None, None


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gate, ctx.count = gate, count
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        gate = ctx.gate
        gate.dead = dead_tokens(grads[: ctx.count], grads[ctx.count :], gate.resets, gate.reverse)
        return None, None, *grads

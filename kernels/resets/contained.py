"""Gradients of exactly zero for dead tokens, in functions that autograd differentiates.

Only in eager reverse mode, of any order: what traces or transforms (torch.compile, torch.export, torch.func, forward
mode) gets the bare function, whose values are right, and whose gradients are NaN where a dead token is not finite.
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
    """function(*tensors), with gradients of exactly zero for dead tokens, whatever is in them.

    function: tensors to (y [B, S, ...], states [B, ...], ...), without parameters of its own. kinds: TOKENS, STATE or
    SHARED, of each tensor. unread: the one of them, if there is one, that only later tokens' y depends on; all others
    show in y if they are not finite. Derivatives of any order.
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
    """Whether autograd, and it alone, records what becomes of these."""
    if watched() or not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in tensors)


class _Contained(torch.autograd.Function):
    """The function's own graph, kept inside. It is made again, with zeros for dead tokens, where one is not finite."""

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
        again = torch.is_grad_enabled()  # the derivative will be differentiated
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


def _of(tensors: Sequence[Tensor | None], kinds: Sequence[str], wanted: str) -> list[Tensor]:
    return [x for x, kind in zip(tensors, kinds, strict=True) if x is not None and kind == wanted]


def _poisoned(dead: Tensor, tokens: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
    """Whether anything of a dead token is not finite."""
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
    """Zeros for dead tokens, and for the states that they read."""
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
    """run(gate), with a gate that does something if autograd records what becomes of these and it is needed."""
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
    """The same for functions that may have parameters of their own, which `contained` would not find.

    What enters through `closed` gets no gradient at dead tokens; which these are is seen where results leave, through
    `watched`. Parameters that such a function reads meet every token, so theirs is not finite if a dead token's is not.
    """

    def __init__(self, resets: Tensor | None, reverse: bool, active: bool) -> None:
        self.resets, self.reverse, self.active = resets, reverse, active
        self.dead: Tensor | None = None

    def closed(self, tree: Any, state: bool = False) -> Any:
        """The tree of tensors [B, S, ...] (state: [B, ...])."""
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
        """The trees of results [B, S, ...] and of states after the last token [B, ...]: all that leaves."""
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

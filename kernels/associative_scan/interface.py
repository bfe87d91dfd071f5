"""A scan over any associative operator, and the memoroid built on it (arXiv:2402.09900).

B batch, S sequence. Given one element per token and an operator `combine(earlier, later)` with
combine(combine(a, b), c) = combine(a, combine(b, c)), the state after token t combines the initial carry and the
elements up to t. A memoroid has four parts: a function that computes the elements, the operator, the initial carry, and
the read-out. These are enough to run it in parallel, to stream it, and to restart sequences within a batch.

A reset is part of the operator: with r[t] true where token t is the first of a new sequence,

    (a, ra) + (b, rb) = (b if rb else combine(a, b), ra or rb)

which is associative if combine is, and needs no identity element.

Memory: all S states are stored. Measured on an mLSTM with 4 heads of width 64 and 2,048 tokens in float32, whose
elements take 4 H (D^2 + D + 2) bytes a token, 130 MB in total: the forward pass takes 5.6 times that, and 7.9 times
with gradients, while the chunkwise `mlstm` takes 10 and 23 MB. Use the associative scan to define or test an algebra,
and for small states; train on long sequences with a chunkwise kernel where one exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqblocks.kernels import dispatch
from seqblocks.kernels.positions import check_resets
from seqblocks.kernels.resets import Gate, along, gated

__all__ = ["Memoroid", "associative_scan"]

Tree = Any  # a tensor, or a tuple, named tuple, list or dict of trees
Combine = Callable[[Tree, Tree], Tree]

dispatch.load_implementations("associative_scan")

# Operators whose scan, of leaves and resets, is also registered as a torch op, so that compiled code fits any length.
as_an_op: dict[Combine, Callable[[list[Tensor], Tensor | None], list[Tensor]]] = {}


class Memoroid(NamedTuple):
    """A recurrent cell defined by an associative operator. Call it like any recurrent cell.

    elements(x) -> tree of [B, S, ...]; combine(earlier, later) -> tree; read(states, x) -> y [B, S, ...];
    initial(B) -> tree of [B, ...], the carry before the first token, or None for no carry.
    """

    elements: Callable[[Any], Tree]
    combine: Combine
    read: Callable[[Tree, Any], Any]
    initial: Callable[[int], Tree] | None = None

    def __call__(
        self, x: Any, *, state: Tree | None = None, return_state: bool = False, resets: Tensor | None = None,
        reverse: bool = False, backend: str | None = None,
    ) -> Any:
        """Return y, and with return_state the carry after the last token: a tree of [B, ...] to pass as `state`.

        x: the input of `elements` and `read`. Resets drop the carry, including the initial one.
        """
        y, last = gated(
            lambda gate: self._run(x, state, resets, reverse, backend, gate),
            pytree.tree_leaves(x), pytree.tree_leaves(state), resets, reverse,
        )  # fmt: skip
        return (y, last) if return_state else y

    def _run(
        self, x: Any, state: Tree | None, resets: Tensor | None, reverse: bool, backend: str | None, gate: Gate
    ) -> tuple[Any, Tree]:
        x, state = gate.closed(x), gate.closed(state, state=True)
        elements = self.elements(x)
        if state is None and self.initial is not None:
            state = self.initial(pytree.tree_leaves(elements)[0].shape[0])
        states, last = associative_scan(
            self.combine, elements, initial=state, resets=resets, reverse=reverse, backend=backend
        )
        return gate.watched(self.read(gate.closed(states), x), last)


def associative_scan(
    combine: Combine, elements: Tree, *,
    initial: Tree | None = None,
    resets: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> tuple[Tree, Tree]:
    """Scan elements with an associative operator.

    elements: a tree (tensor, tuple, named tuple, list, dict) of tensors [B, S, ...], S >= 1. combine takes and returns
    such trees, with the same trailing axes and any S. initial: a tree of [B, ...], combined before the first element.
    resets [B, S] bool: true where a token is the first of a new sequence, in scan order; everything before it,
    including the initial carry, is dropped. reverse: scan from right to left.

    Returns all states, a tree like `elements`, and the state after the last token, a tree like `initial`. Derivatives
    exist to the order that `combine` supports. Raises ValueError for shapes that do not fit, BackendError (see
    dispatch). torch.compile recompiles for each S, except with the mLSTM's operator (mlstm/memoroid.py), whose compiled
    scan has first derivatives only.
    """
    leaves, spec = pytree.tree_flatten(elements)
    _check(leaves, spec, initial, resets)
    inputs = {f"elements[{at}]": leaf for at, leaf in enumerate(leaves)}
    run = dispatch.choose(
        "associative_scan", backend, {**inputs, "resets": resets}, may_be_complex=inputs, dtype=leaves[0].dtype,
        resets=resets is not None,
    )

    carried = [] if initial is None else pytree.tree_leaves(initial)
    pairs = enumerate(zip(carried, leaves, strict=False))
    dispatch.check_real("associative_scan", {f"initial[{at}]": x for at, (x, leaf) in pairs if not leaf.is_complex()})

    def scan(gate: Gate) -> tuple[Any, Any]:
        given = gate.closed(leaves), gate.closed(carried, state=True)
        return gate.watched(*_scanned(run, combine, spec, *given, resets, reverse, gate.active))

    found, last = gated(scan, leaves, carried, resets, reverse)
    return pytree.tree_unflatten(found, spec), pytree.tree_unflatten(last, spec)


def _scanned(
    run: Callable[..., list[Tensor]], combine: Combine, spec: Any, leaves: list[Tensor], initial: list[Tensor],
    resets: Tensor | None, reverse: bool, differentiated: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the leaves of all states and of the last state."""
    order: Callable[[Tensor], Tensor] = (lambda t: t.flip(1)) if reverse else (lambda t: t)
    leaves = [order(leaf) for leaf in leaves]
    marks = None if resets is None else order(resets.bool())
    if initial:
        first = [leaf.unsqueeze(1) for leaf in initial]
        leaves = [torch.cat([a.to(b.dtype), b], 1) for a, b in zip(first, leaves, strict=True)]
        marks = None if marks is None else torch.cat([torch.zeros_like(marks[:, :1]), marks], 1)
    by_torch = run is dispatch.implementation("associative_scan", "torch").run
    if torch.compiler.is_compiling() and combine in as_an_op and by_torch:
        found = as_an_op[combine](leaves, marks)
    else:
        lifted = _lifted(combine, spec, differentiated)
        found = run(lifted, leaves if marks is None else [*leaves, marks])[: len(leaves)]
    last = [leaf[:, -1].clone() for leaf in found]  # a view would keep all states alive
    if initial:
        found = [leaf[:, 1:] for leaf in found]
    return [order(leaf) for leaf in found], last


def _lifted(
    combine: Combine, spec: Any, differentiated: bool = False
) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
    """Return the operator on lists of leaves, whose last leaf marks the resets if there are any.

    differentiated: values that a reset drops are not passed to the operator, whose derivative there might be NaN.
    """

    def lifted(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
        count = spec.num_leaves
        if len(a) > count and differentiated:
            a = [*(torch.where(along(b[count], y), y, x) for x, y in zip(a[:count], b, strict=False)), a[count]]
        both = combine(pytree.tree_unflatten(a[:count], spec), pytree.tree_unflatten(b[:count], spec))
        out, given = pytree.tree_flatten(both)
        if given != spec or not all(isinstance(leaf, Tensor) for leaf in out):
            raise ValueError(
                f"associative_scan expects combine to return a tree like the elements, {_shapes(a[:count], spec)}; "
                f"got {_shapes(out, given)}"
            )
        if len(a) == count:
            return out
        new = b[count]
        kept = [torch.where(along(new, y), x, y) for x, y in zip(b, out, strict=False)]
        return [*kept, a[count] | new]

    return lifted


def _shapes(leaves: list[Any], spec: Any) -> Any:
    """Return a tree with shapes in place of tensors, for messages."""
    return pytree.tree_unflatten([list(x.shape) if isinstance(x, Tensor) else x for x in leaves], spec)


def _check(leaves: list[Tensor], spec: Any, initial: Tree | None, resets: Tensor | None) -> None:
    if not leaves or any(leaf.dim() < 2 or leaf.shape[:2] != leaves[0].shape[:2] for leaf in leaves):
        raise ValueError(
            f"associative_scan expects elements [B, S, ...] of one B and S; got {[list(x.shape) for x in leaves]}"
        )
    batch, S = leaves[0].shape[:2]
    if S == 0:
        raise ValueError("associative_scan expects at least one element")
    if initial is not None:
        given, other = pytree.tree_flatten(initial)
        shapes = [(batch, *leaf.shape[2:]) for leaf in leaves]
        if other != spec or [tuple(getattr(x, "shape", ())) for x in given] != shapes:
            raise ValueError(
                f"associative_scan expects an initial carry like one element, "
                f"{pytree.tree_unflatten([list(s) for s in shapes], spec)}; got {_shapes(given, other)}"
            )
    check_resets("associative_scan", resets, (batch, S))

"""Kernel launches and torch ops: one op for the rule add with a decay per head, which uses the mLSTM's kernels, and one
for everything else."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.linear_attention.triton import backward, forward, sizes
from seqblocks.kernels.mlstm.triton import launch as mlstm
from seqblocks.kernels.mlstm.triton.sizes import CHUNK_MAX_TOKENS
from seqblocks.kernels.numerics import filled, no_second_derivative
from seqblocks.kernels.resets import nonfinite_triton as nonfinite
from seqblocks.kernels.triton_common import ceil_div, tl, token_strides

Maybe = Tensor | None
DIVISORS = 5  # index of the plane DEN in the mLSTM's gates


def _laid_out(lines: tuple[Maybe, ...], whole: tuple[Maybe, ...]) -> list[Any]:
    """Lay tensors out for the kernels: contiguous rows with short strides for `lines`, contiguous for `whole`."""
    rows = [None if x is None else common.near(x, CHUNK_MAX_TOKENS) for x in lines]
    return rows + [None if x is None else x.contiguous() for x in whole]


def _if(given: Maybe, x: Tensor) -> Maybe:
    """Return x unless `given` is None."""
    return None if given is None else x


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """Sum gradients per head of values to the gradient of q or k [B, S, H, K]."""
    if x.shape[2] != like.shape[2]:
        x = x.unflatten(2, (like.shape[2], -1)).sum(3)
    return x.to(like.dtype)


def _last(k: Tensor, v: Tensor) -> Tensor:
    return v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)


def _for_value_heads(x: Tensor, v: Tensor) -> Tensor:
    """Return an empty tensor for gradients of q or k per head of values, in float32 if they are to be summed."""
    return x.new_empty(*v.shape[:3], x.shape[3], dtype=x.dtype if v.shape[2] == x.shape[2] else torch.float32)


# ------------------------------------------------------------------------------
# A decay per head, or none


@custom_op("seqblocks::linear_attention_triton")
def per_head(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, state: Maybe, resets: Maybe, reverse: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y and the last state, and for the backward pass gates, segments, states per chunk and faults."""
    q, k, v, state = _laid_out((q, k, v), (state,))
    results = _per_head_fake(q, k, v, decay, state, resets, reverse, scale)
    y, last, planes, segments, C, faults = results
    planes[DIVISORS].zero_()  # no kernel writes this plane, and an op must return the same values every time
    plan = mlstm.Plan(q, k, v, reverse, scale=scale)
    marks = segments if resets is not None else None
    plan.forward(
        q, k, v, None, decay, (state, None, None), resets, y, (last, None, None), planes, marks, C, None, faults, 0.0,
        False,
    )
    return results


@per_head.register_fake
def _per_head_fake(q, k, v, decay, state, resets, reverse, scale):  # type: ignore[no-untyped-def]
    plan = mlstm.Plan(q, k, v, reverse, scale=scale)
    planes, C = plan.workspaces(q)
    return v.new_empty(v.shape), _last(k, v), planes, plan.segments(q, resets), C, nonfinite.empty(v, resets)


@custom_op("seqblocks::linear_attention_triton_backward", outputs=5)
def per_head_backward(
    dy: Tensor, dlast: Maybe, q: Tensor, k: Tensor, v: Tensor, decay: Maybe, state: Maybe,
    y: Tensor, last: Tensor, planes: Tensor, segments: Tensor, C: Tensor, faults: Tensor, reverse: bool, scale: float,
) -> list[Tensor]:
    """Return gradients of q, k, v, decay and the state; an absent decay has an empty one."""
    dy, q, k, v, dlast = _laid_out((dy, q, k, v), (dlast,))
    results = _per_head_backward_fake(dy, dlast, q, k, v, decay, state, *(None,) * 8)
    dq, dk = _for_value_heads(q, v), _for_value_heads(k, v)
    plan = mlstm.Plan(q, k, v, reverse, scale=scale)
    plan.backward(
        dy, (dlast, None, None), q, k, v, None, decay, y, (last, None, None), planes,
        segments if faults.numel() else None, C, None, faults,
        (dq, dk, results[2], None, _if(decay, results[3]), _if(state, results[4]), None, None), 0.0, False,
    )
    results[0], results[1] = _summed(dq, q), _summed(dk, k)
    return results


@per_head_backward.register_fake
def _per_head_backward_fake(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, v, decay, state, y, last, planes, segments, C, faults, reverse, scale
):
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, decay, state)]


def _save_per_head(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, _, ctx.reverse, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])


def _differentiate_per_head(ctx, dy, dlast, *_):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    grads = per_head_backward(filled(dy, saved[5]), dlast, *saved, ctx.reverse, ctx.scale)
    return *(None if x is None else g for x, g in zip(saved[:5], grads, strict=True)), None, None, None


per_head.register_autograd(_differentiate_per_head, setup_context=_save_per_head)
per_head_backward.register_autograd(no_second_derivative("linear_attention", "Triton"))


# ------------------------------------------------------------------------------
# Delta rules, decays per key, a bonus


class _Sums(NamedTuple):
    """Sums of decays, all None without decays and resets: see tensors.py."""

    since: Maybe
    until: Maybe
    blocks: Maybe
    through: Maybe


class _Pairs(NamedTuple):
    """What depends on pairs of tokens of a chunk, and is kept for the backward pass.

    weights [N, T, L], and of a delta rule: between_keys [N, T, L], the weights A between keys (None if there is no
    backward pass); solved [N, T, L], the inverse (I + A Diag(beta))^-1; of_state [N, T, K], its product with the keys.
    """

    weights: Tensor
    between_keys: Maybe
    solved: Maybe
    of_state: Maybe

    def as_outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return them as outputs of an op, which cannot be None."""
        weights, *of_delta = self
        a, b, c = (weights.new_empty(0) if x is None else x for x in of_delta)
        return weights, a, b, c


class _Chunks:
    """Grids, arguments and workspaces that the launches share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, bonus: Maybe, resets: Maybe, reverse: bool,
        scale: float,
    ) -> None:
        B, self.S, heads, self.K = q.shape
        self.H, self.V = v.shape[2:]
        self.given = (q, k, v, decay, beta, bonus)
        self.inputs = nonfinite.Inputs(q, k, v, decay, beta, nonfinite.BELOW_INF, nonfinite.FINITE)
        self.found = nonfinite.Found()
        self.N, self.scale = B * self.H, scale
        self.per_key = decay is not None and decay.dim() == 4 and self.K > 1
        self.narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v))
        exact = self.narrow or all(x.dtype == torch.float32 for x in (q, k, v))
        self.dtype = torch.bfloat16 if self.narrow else torch.float32
        self.L = sizes.chunk(self.narrow, beta is not None, self.K)
        self.chunks = ceil_div(self.S, self.L)
        self.places = self.chunks * self.L
        self.W = self.K if self.per_key else 1
        self.decayed = decay is not None or resets is not None
        self.of_sums = {"W": self.W, "REVERSE": reverse, "L": self.L}
        dot = {"DOT": tl.bfloat16 if self.narrow else tl.float32, "PRECISION": "ieee" if exact else "tf32"}
        self.of_dots = {"GROUP": self.H // max(1, heads), "REVERSE": reverse, **dot, "L": self.L}
        # sums over all keys in float32 exceed the registers, except on tensor cores as three tf32 products
        split = exact and not self.narrow and common.arch(q).startswith("sm_")
        self.of_walks = self.of_dots | ({"PRECISION": "tf32x3"} if split else {})

    def size(self, kernel: str) -> dict[str, int]:
        delta = self.given[4] is not None
        arch = common.arch(self.given[0])
        return sizes.tiles(kernel, self.K, self.V, self.per_key, delta, self.narrow, arch)

    def tiles(self, size: dict[str, int]) -> tuple[int, int]:
        """Return the number of blocks of keys and of values."""
        return ceil_div(self.K, size.get("BK", self.K)), ceil_div(self.V, size.get("BV", self.V))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.given[2].new_empty(shape, dtype=dtype or self.dtype)

    def results(self, resets: Maybe) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return empty tensors for y, the last state, states per chunk, a delta rule's v - S'^T k, and faults."""
        _, k, v, _, beta, _ = self.given
        assert k is not None
        assert v is not None
        C = self.empty(self.N, self.chunks * self.K * self.V)
        errors = self.empty(self.N, self.places * self.V if beta is not None else 0)
        return v.new_empty(v.shape), _last(k, v), C, errors, nonfinite.empty(v, resets)

    def pair_tensors(self, keep: bool) -> _Pairs:
        """Return empty tensors for what `prepare` computes. keep: whether a backward pass will read them."""
        N, T, delta = self.N, self.places, self.given[4] is not None
        square = (N, T, self.L)
        return _Pairs(
            self.empty(*square), self.empty(*square) if delta and keep else None,
            self.empty(*square) if delta else None, self.empty(N, T, self.K) if delta else None,
        )

    def sums(self) -> _Sums:
        """Compute sums of decays."""
        decay, bonus = self.given[3], self.given[5]
        if not self.decayed:
            return _Sums(None, None, None, None)
        N, T, W, wide, found = self.N, self.places, self.W, torch.float32, self.found
        since, until = (self.empty(N, T, W, dtype=wide) for _ in range(2))
        sums = _Sums(
            since, until, self.empty(3, N, T // 16, W, dtype=wide), self.empty(N, self.chunks, W, dtype=wide))
        size = self.size("sums")
        forward.sums[N * self.chunks, ceil_div(W, size["BD"])](
            decay, found.resets, *sums, found.g, found.flag,
            self.S, self.H, *token_strides(decay), BONUS=bonus is not None, **self.of_sums, **size,
        )
        return sums

    def prepare(self, sums: _Sums, pairs: _Pairs, errors: Tensor) -> None:
        """Compute weights between tokens, and a delta rule's system, solved for v into `errors`."""
        q, k, v, decay, beta, bonus = self.given
        assert q is not None
        assert k is not None
        assert v is not None
        N, found = self.N, self.found
        inverse, solved = pairs.solved, pairs.solved
        if solved is not None and solved.dtype != torch.float32:
            solved = torch.empty_like(solved, dtype=torch.float32)
        forward.pairs[(N * self.chunks,)](
            q, k, decay, beta, bonus, found.resets, *sums[:3], pairs.weights, pairs.between_keys, solved,
            found.q, found.k, found.g, found.x, found.flag,
            self.S, self.H, self.K, *token_strides(q, k, decay, beta), self.scale, W=self.W, **self.of_dots,
            **self.size("pairs"),
        )
        if beta is not None:
            forward.invert[(N * self.chunks,)](
                solved, None if solved is inverse else inverse, L=self.L, num_warps=4)
            forward.solve[(N * self.chunks,)](
                k, v, sums.since, sums.blocks, inverse, pairs.of_state, errors, found.k, found.v, found.flag,
                self.S, self.H, self.K, self.V, *token_strides(k, v), W=self.W, **self.of_dots, **self.size("solve"),
            )


@custom_op("seqblocks::linear_attention_triton_chunks")
def chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, bonus: Maybe, state: Maybe, resets: Maybe,
    reverse: bool, scale: float, for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, the last state, and for the backward pass states per chunk, a delta rule's v - S'^T k, faults, and what
    depends on pairs of tokens: weights, a delta rule's A, inverse, and inverse times keys. Absent ones are empty."""
    q, k, v, decay, bonus, state = _laid_out((q, k, v, decay), (bonus, state))
    plan = _Chunks(q, k, v, decay, beta, bonus, resets, reverse, scale)
    y, last, C, errors, faults = plan.results(resets)
    with common.on(q):
        if resets is not None:
            plan.found = plan.inputs.searched((state, None, None), resets, faults)
        found, sums, pairs = plan.found, plan.sums(), plan.pair_tensors(for_backward)
        plan.prepare(sums, pairs, errors)
        size = plan.size("states")
        across, along = plan.tiles(size)
        forward.states[(plan.N * across * along,)](
            k, v, beta, state, *sums[1:], pairs.of_state, errors, C, last, found.k, found.v, found.x, found.flag,
            plan.S, plan.H, plan.K, plan.V, *token_strides(k, v, beta), W=plan.W, **plan.of_walks, **size,
        )
        size = plan.size("outputs")
        forward.outputs[(plan.N * plan.chunks * plan.tiles(size)[1],)](
            q, v, beta, sums.since, sums.blocks, errors, pairs.weights, C, y, found.q, found.v, found.x, found.flag,
            plan.S, plan.H, plan.K, plan.V, *token_strides(q, v, beta), plan.scale, W=plan.W, **plan.of_dots, **size,
        )
        if resets is not None:
            plan.inputs.spread(found, y, (last, None, None), reverse)
    return y, last, C, errors, faults, *pairs.as_outputs()


@chunks.register_fake
def _chunks_fake(  # type: ignore[no-untyped-def]
    q, k, v, decay, beta, bonus, state, resets, reverse, scale, for_backward
):
    plan = _Chunks(q, k, v, decay, beta, bonus, resets, reverse, scale)
    return *plan.results(resets), *plan.pair_tensors(for_backward).as_outputs()


@custom_op("seqblocks::linear_attention_triton_chunks_backward", outputs=7)
def chunks_backward(
    dy: Tensor, dlast: Maybe, q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, bonus: Maybe,
    state: Maybe, last: Tensor, C: Tensor, errors: Tensor, faults: Tensor, weights: Tensor, between_keys: Tensor,
    solved: Tensor, of_state: Tensor, reverse: bool, scale: float,
) -> list[Tensor]:
    """Return gradients of q, k, v, decay, beta, bonus and the state; empty for absent ones."""
    dy, q, k, v, decay, bonus, dlast = _laid_out((dy, q, k, v, decay), (bonus, dlast))
    resets = faults if faults.numel() else None
    pairs = _Pairs(weights, *(None if beta is None else x for x in (between_keys, solved, of_state)))
    results = _chunks_backward_fake(dy, dlast, q, k, v, decay, beta, bonus, state, *(None,) * 10)
    _, _, dv, ddecay, dbeta, _, dstate = results
    dq, dk = _for_value_heads(q, v), _for_value_heads(k, v)
    plan = _Chunks(q, k, v, decay, beta, bonus, resets, reverse, scale)
    N, wide = plan.N, torch.float32
    lengths = (plan.S, plan.H, plan.K, plan.V)
    of_weights = {"W": plan.W, **plan.of_dots}
    with common.on(q):
        if resets is not None:
            plan.found = plan.inputs.searched_with_gradients(dy, (dlast, None, None), faults, reverse)
        found, sums = plan.found, plan.sums()
        size = plan.size("state_gradients")
        across, along = plan.tiles(size)
        dC, dx = torch.empty_like(C), torch.empty_like(errors)
        flows = None
        if decay is not None:
            flows = plan.empty(along if plan.per_key else across * along, N, plan.chunks + 1, plan.W, dtype=wide)
        backward.state_gradients[(N * across * along,)](
            q, k, dy, beta, *sums, pairs.of_state, pairs.weights, C, last, dlast, dC, dx,
            _if(state, dstate), flows, found.q, found.k, found.dy, found.x, found.flag,
            *lengths, *token_strides(q, k, dy, beta), scale,
            W=plan.W, **plan.of_walks, **size,
        )
        size = plan.size("value_gradients")
        backward.value_gradients[(N * plan.chunks * plan.tiles(size)[1],)](
            k, dy, beta, sums.until, sums.blocks, pairs.weights, pairs.solved, dx, dC, dv,
            found.k, found.dy, found.x, found.flag, *lengths, *token_strides(k, dy, beta), **of_weights, **size,
        )
        of_queries = plan.empty(N, plan.places, plan.L)
        of_keys = None if beta is None else torch.empty_like(of_queries)
        of_heads = (None, None, None) if plan.per_key else (decay, found.resets, sums.blocks)
        backward.weight_gradients[(N * plan.chunks,)](
            v, dy, beta, *of_heads, errors, dx, dv, pairs.between_keys, of_queries, of_keys, _if(beta, dbeta),
            found.v, found.dy, found.g, found.x, found.flag,
            plan.S, plan.H, plan.V, *token_strides(v, dy, decay, beta, dv), scale, BONUS=bonus is not None,
            **{name: x for name, x in plan.of_dots.items() if name != "GROUP"}, **plan.size("weight_gradients"),
        )
        size = plan.size("key_gradients")
        columns = plan.tiles(size)[0]
        parts = 1 if plan.per_key else columns
        reads = None if decay is None else plan.empty(parts, N, plan.places, plan.W, dtype=wide)
        writes = torch.empty_like(reads) if reads is not None and bonus is not None else None
        dbonus = None
        if bonus is not None:
            dbonus = q.new_zeros(N * plan.places // 16, plan.K, dtype=wide)
        given = (beta, bonus, *sums[:3], errors, C, dC, of_queries, of_keys, dq, dk, dbonus, reads, writes)
        if plan.per_key:
            backward.key_gradients_per_key[(N * plan.places // 16 * columns,)](
                q, k, v, dy, dv, decay, found.resets, *given,
                found.q, found.k, found.v, found.dy, found.g, found.x, found.flag,
                *lengths, *token_strides(q, k, v, dy, dv, decay, beta), scale, **of_weights, **size,
            )
        else:
            backward.key_gradients[(N * plan.chunks * columns,)](
                q, k, v, dy, dv, *given, found.q, found.k, found.v, found.dy, found.x, found.flag,
                *lengths, *token_strides(q, k, v, dy, dv, beta), scale, **plan.of_dots, **size,
            )
        if decay is not None:
            assert flows is not None
            size = plan.size("decay_gradients")
            backward.decay_gradients[N * plan.chunks, ceil_div(plan.W, size["BD"])](
                found.resets, reads, writes, flows, ddecay, plan.S, plan.H, parts, flows.shape[0], FRESH=state is None,
                **plan.of_sums, **size,
            )
        if resets is not None:
            plan.inputs.fill(
                found, (dq, dk, dv, _if(decay, ddecay), _if(beta, dbeta), dbonus),
                (_if(state, dstate), None, None), reverse, plan.places,
            )
    results[0], results[1] = _summed(dq, q), _summed(dk, k)
    if bonus is not None and dbonus is not None:
        results[5] = dbonus.view(q.shape[0], *bonus.shape[:1], -1, plan.K).sum((0, 2)).to(bonus.dtype)
    return results


@chunks_backward.register_fake
def _chunks_backward_fake(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, v, decay, beta, bonus, state, last, C, errors, faults, weights, between_keys, solved, of_state,
    reverse, scale
):
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, decay, beta, bonus, state)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, _, ctx.reverse, ctx.scale, _ = inputs
    y, *kept = output
    ctx.shape = y.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *kept)
    ctx.mark_non_differentiable(*kept[1:])


def _differentiate(ctx, dy, dlast, *_):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    dy = saved[2].new_zeros(ctx.shape) if dy is None else dy
    grads = chunks_backward(dy, dlast, *saved, ctx.reverse, ctx.scale)
    return *(None if x is None else g for x, g in zip(saved[:7], grads, strict=True)), None, None, None, None


chunks.register_autograd(_differentiate, setup_context=_save)
chunks_backward.register_autograd(no_second_derivative("linear_attention", "Triton"))

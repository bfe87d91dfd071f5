"""Centaurus in Triton: a bank of complex diagonal states, walked in segments of the sequence at once.

A program owns BN channels with their M sub-states of one sequence, in registers, and walks along the tokens; nothing is
complex, and no exponential is taken on the way. Few sequences would leave a device idle, so their tokens are cut into
segments: one launch finds what each segment leaves to the next when it starts from nothing, one carries that across
(over T tokens a state turns by p^T), one walks all segments at once. Enough sequences go in one launch.

Backward. A state's gradient flows as the state does, the other way: the same kernels, entered by what a token reads and
read by what it enters. The gradient of p needs no state twice: ds/dp = w follows w' = p w + s, so one walk forward sums
dv r w and dv s over a segment, and the gradient that enters the segment from its end times w there.

Projections around it (modes neck and pointwise) are matrix products of the dtype at hand; B and C of dws and full are
folded into the reading, but for calls that carry a state, which B belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import centaurus_torch, tuning
from seqblocks.kernels import triton_common as common
from seqblocks.kernels.centaurus_reference import Bank
from seqblocks.kernels.dispatch import register
from seqblocks.kernels.self_check import large, normal
from seqblocks.kernels.triton_common import jit, lined, tl, up

SUBSTATES = 64  # of a channel, at most
SEGMENT = 128  # tokens
WARPS = 4 * 132  # one for every scheduler of an H100 or H200: with as many there is nothing to cut
AXES = {"BN": (8, 16, 32, 64, 128), "STEPS": (2, 4, 8), "num_warps": (1, 2, 4, 8)}  # for tuning

# ------------------------------------------------------------------------------
# The kernels.   Places: u [B, S, F] by strides over batch and tokens, channel n reads feature n mod F; v [B, S, N];
# p_re, p_im, r_re, r_im [N, M]; states [B, N, M, 2], starts and ends [B, K, N, M, 2]; passes [B, K].
# Token i of segment k is the (k T + i)th in the order of the scan. ADJOINT: from the last to the first.


@jit
@no_type_check
def _power(p_re, p_im, n, BITS: tl.constexpr):
    """p^n, by squaring: as exact as n products one after the other."""
    re = p_re * 0.0 + 1.0
    im = p_re * 0.0
    for bit in tl.static_range(BITS):
        takes = (n >> bit) % 2 == 1
        new_re = re * p_re - im * p_im
        im = tl.where(takes, re * p_im + im * p_re, im)
        re = tl.where(takes, new_re, re)
        p_re, p_im = p_re * p_re - p_im * p_im, 2.0 * p_re * p_im
    return re, im


@jit(do_not_specialize=["S", "K"])
@no_type_check
def _walk(
    u, p_re, p_im, r_re, r_im, starts, resets, v, last, passes,
    S, F, N, M, K, ub, us,
    T: tl.constexpr, ENDS: tl.constexpr, ADJOINT: tl.constexpr, REVERSE: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
):
    """v of every token and the state at the end; or, if ENDS, each segment's end when it starts from nothing, to last.

    T: tokens of a segment, or 0 where there is but one.
    """
    b = (tl.program_id(0) // K).to(tl.int64)
    k = tl.program_id(0) % K
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    is_n = n < N
    own = is_n[:, None] & (m < M)[None, :]
    cell = n[:, None] * M + m[None, :]
    turn_re = tl.load(p_re + cell, own, 0.0)
    turn_im = tl.load(p_im + cell, own, 0.0)
    to_re = tl.load(r_re + cell, own, 0.0)
    to_im = tl.load(r_im + cell, own, 0.0)
    re = tl.zeros((BN, BM), tl.float32)
    im = tl.zeros((BN, BM), tl.float32)
    at = ((b * K + k) * N * M + cell) * 2
    if not ENDS:
        re = tl.load(starts + at, own, 0.0)
        im = tl.load(starts + at + 1, own, 0.0)
    column = n % F
    first = k * T if T > 0 else 0
    length = min(T, S - first) if T > 0 else S
    whole = 1.0
    for i in range(0, length, STEPS):
        xs, fresh = (), ()
        for j in tl.static_range(STEPS):
            order = first + (length - 1 - i - j if ADJOINT else i + j)
            t = (S - 1 - order if REVERSE else order) + tl.cast(0, tl.int64)
            live = n < tl.where(i + j < length, N, 0)
            xs = xs + (tl.load(u + b * ub + t * us + column, live, 0.0),)
            if resets is not None:
                fresh = fresh + (tl.load(resets + b * S + t, i + j < length, 0),)
        for j in tl.static_range(STEPS):
            order = first + (length - 1 - i - j if ADJOINT else i + j)
            t = (S - 1 - order if REVERSE else order) + tl.cast(0, tl.int64)
            goes = i + j < length
            x = xs[j].to(tl.float32)[:, None]
            keep = tl.where(goes, 1.0, 0.0)
            if resets is not None:
                keep = tl.where(fresh[j] != 0, 0.0, keep)
                whole *= tl.where(fresh[j] != 0, 0.0, 1.0)
            a_re = tl.where(goes, turn_re * keep, 1.0)  # beyond the end nothing moves
            a_im = tl.where(goes, turn_im * keep, 0.0)
            if ADJOINT:
                re += x * to_re
                im += x * to_im
                out = tl.sum(re, 1)
                re, im = a_re * re - a_im * im, a_re * im + a_im * re
            else:
                re, im = a_re * re - a_im * im + x, a_re * im + a_im * re
                out = tl.sum(to_re * re - to_im * im, 1)
            if not ENDS:
                tl.store(v + (b * S + t) * N + n, out.to(v.dtype.element_ty), n < tl.where(goes, N, 0))
    if ENDS:
        tl.store(last + at, re, own)
        tl.store(last + at + 1, im, own)
        if passes is not None:
            if tl.program_id(1) == 0:
                tl.store(passes + b * K + k, whole)
    else:
        final = 0 if ADJOINT else K - 1
        mine = (n < tl.where(k == final, N, 0))[:, None] & (m < M)[None, :]
        tl.store(last + (b * N * M + cell) * 2, re, mine)
        tl.store(last + (b * N * M + cell) * 2 + 1, im, mine)


@jit(do_not_specialize=["S", "K"])
@no_type_check
def _carry(
    p_re, p_im, state, ends, passes, starts, S, N, M, K,
    T: tl.constexpr, BITS: tl.constexpr, ADJOINT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):
    """What enters every segment."""
    b = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    own = (n < N)[:, None] & (m < M)[None, :]
    cell = n[:, None] * M + m[None, :]
    turn_re = tl.load(p_re + cell, own, 0.0)
    turn_im = tl.load(p_im + cell, own, 0.0)
    all_re, all_im = _power(turn_re, turn_im, T, BITS)
    rest_re, rest_im = _power(turn_re, turn_im, S - (K - 1) * T, BITS)
    re = tl.load(state + (b * N * M + cell) * 2, own, 0.0)
    im = tl.load(state + (b * N * M + cell) * 2 + 1, own, 0.0)
    for i in range(K):
        k = K - 1 - i if ADJOINT else i
        at = ((b * K + k) * N * M + cell) * 2
        tl.store(starts + at, re, own)
        tl.store(starts + at + 1, im, own)
        a_re = tl.where(k == K - 1, rest_re, all_re)
        a_im = tl.where(k == K - 1, rest_im, all_im)
        if passes is not None:
            stays = tl.load(passes + b * K + k)
            a_re *= stays
            a_im *= stays
        re, im = (
            a_re * re - a_im * im + tl.load(ends + at, own, 0.0),
            a_re * im + a_im * re + tl.load(ends + at + 1, own, 0.0),
        )


@jit(do_not_specialize=["S", "K"])
@no_type_check
def _sums(
    u, dv, p_re, p_im, r_re, r_im, starts, afters, resets, parts,
    S, F, N, M, K, ub, us, gb, gs,
    T: tl.constexpr, REVERSE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
):
    """parts [B K, 4, N, M]: gradients of p_re, p_im, r_re, r_im. afters: what enters each segment from its end."""
    b = (tl.program_id(0) // K).to(tl.int64)
    k = tl.program_id(0) % K
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    own = (n < N)[:, None] & (m < M)[None, :]
    cell = n[:, None] * M + m[None, :]
    turn_re = tl.load(p_re + cell, own, 0.0)
    turn_im = tl.load(p_im + cell, own, 0.0)
    to_re = tl.load(r_re + cell, own, 0.0)
    to_im = tl.load(r_im + cell, own, 0.0)
    at = ((b * K + k) * N * M + cell) * 2
    re = tl.load(starts + at, own, 0.0)
    im = tl.load(starts + at + 1, own, 0.0)
    w_re = tl.zeros((BN, BM), tl.float32)
    w_im = tl.zeros((BN, BM), tl.float32)
    sum_re = tl.zeros((BN, BM), tl.float32)  # of dv w, and of dv s
    sum_im = tl.zeros((BN, BM), tl.float32)
    read_re = tl.zeros((BN, BM), tl.float32)
    read_im = tl.zeros((BN, BM), tl.float32)
    column = n % F
    first = k * T if T > 0 else 0
    length = min(T, S - first) if T > 0 else S
    for i in range(0, length, STEPS):
        xs, gs_, fresh = (), (), ()
        for j in tl.static_range(STEPS):
            order = first + i + j
            t = (S - 1 - order if REVERSE else order) + tl.cast(0, tl.int64)
            live = n < tl.where(i + j < length, N, 0)
            xs = xs + (tl.load(u + b * ub + t * us + column, live, 0.0),)
            gs_ = gs_ + (tl.load(dv + b * gb + t * gs + n, live, 0.0),)
            if resets is not None:
                fresh = fresh + (tl.load(resets + b * S + t, i + j < length, 0),)
        for j in tl.static_range(STEPS):
            goes = i + j < length
            x = xs[j].to(tl.float32)[:, None]
            g = gs_[j].to(tl.float32)[:, None]
            if resets is not None:
                keep = tl.where(fresh[j] != 0, 0.0, 1.0)
                re *= keep
                im *= keep
                w_re *= keep
                w_im *= keep
            new_re = turn_re * w_re - turn_im * w_im + re
            w_im = tl.where(goes, turn_re * w_im + turn_im * w_re + im, w_im)
            w_re = tl.where(goes, new_re, w_re)
            new_re = turn_re * re - turn_im * im + x
            im = tl.where(goes, turn_re * im + turn_im * re, im)
            re = tl.where(goes, new_re, re)
            sum_re += g * w_re
            sum_im += g * w_im
            read_re += g * re
            read_im += g * im
    after_re = tl.load(afters + at, own, 0.0)
    after_im = tl.load(afters + at + 1, own, 0.0)
    dp_re = to_re * sum_re - to_im * sum_im + after_re * w_re - after_im * w_im
    dp_im = to_re * sum_im + to_im * sum_re + after_re * w_im + after_im * w_re
    part = parts + tl.program_id(0).to(tl.int64) * 4 * N * M + cell
    tl.store(part, dp_re, own)
    tl.store(part + N * M, -dp_im, own)
    tl.store(part + 2 * N * M, read_re, own)
    tl.store(part + 3 * N * M, -read_im, own)


# ------------------------------------------------------------------------------
# Launching


def tiles(channels: int, substates: int, arch: str) -> dict[str, int]:
    """Channels and sub-states of a program, tokens loaded ahead, warps: at most eight states a thread."""
    BM = common.power_of_two(substates)
    BN = min(common.power_of_two(channels), max(4, min(32, 512 // BM)))
    return {"BN": BN, "BM": BM, "STEPS": 4, "num_warps": common.warps(BN * BM, 8, common.lanes(arch))}


def segments(rows: int, S: int, tile: dict[str, int], channels: int) -> int:
    """Into how many the tokens of each of `rows` sequences are cut: one where that fills a device."""
    if large() or rows * up(channels, tile["BN"]) * tile["num_warps"] >= WARPS or S <= 2 * SEGMENT:
        return 1
    return up(S, SEGMENT)


class _Plan:
    def __init__(self, u: Tensor, p: Tensor, reverse: bool) -> None:
        (self.B, self.S, self.F), (self.N, self.M) = u.shape, p.shape
        self.tile = tiles(self.N, self.M, common.arch(u))
        self.K = segments(self.B, self.S, self.tile, self.N)
        self.T = SEGMENT if self.K > 1 else 0
        self.reverse = reverse

    def about(self, u: Tensor, *more: Any) -> tuple[Any, ...]:
        """What the best launch hangs on."""
        return self.N, self.M, u.dtype, *more, *map(common.power_of_two, (self.B, self.S))

    def starts(
        self, u: Tensor, given: Sequence[Tensor], state: Tensor, resets: Tensor | None, adjoint: bool
    ) -> Tensor:
        """What enters each segment, [B, K, N, M, 2]."""
        if self.K == 1:
            return state
        starts, ends = (state.new_empty(self.B, self.K, self.N, self.M, 2) for _ in range(2))
        passes = None if resets is None else state.new_empty(self.B, self.K)

        def find(tile: tuning.Tile) -> Sequence[Tensor]:
            _walk[self.B * self.K, up(self.N, tile["BN"])](
                u, *given, None, resets, None, ends, passes, *self.sizes(u),
                ENDS=True, T=self.T, ADJOINT=adjoint, REVERSE=self.reverse, **tile,
            )
            return (ends,)

        tuning.launch("centaurus.ends", self.about(u, adjoint), u, self.tile, AXES, find)
        _carry[self.B, up(self.N, self.tile["BN"])](
            given[0], given[1], state, ends, passes, starts, self.S, self.N, self.M, self.K,
            T=self.T, BITS=self.T.bit_length(), ADJOINT=adjoint,
            **{key: self.tile[key] for key in ("BN", "BM", "num_warps")},
        )
        return starts

    def walk(
        self, u: Tensor, given: Sequence[Tensor], starts: Tensor, resets: Tensor | None, v: Tensor, last: Tensor,
        adjoint: bool,
    ) -> None:
        """v and last are written."""

        def go(tile: tuning.Tile) -> Sequence[Tensor]:
            _walk[self.B * self.K, up(self.N, tile["BN"])](
                u, *given, starts, resets, v, last, None, *self.sizes(u),
                ENDS=False, T=self.T, ADJOINT=adjoint, REVERSE=self.reverse, **tile,
            )
            return v, last

        tuning.launch("centaurus.walk", self.about(u, adjoint), u, self.tile, AXES, go)

    def sizes(self, u: Tensor) -> tuple[int, ...]:
        return self.S, u.shape[2], self.N, self.M, self.K, *u.stride()[:2]

    def sums(
        self, u: Tensor, dv: Tensor, given: Sequence[Tensor], starts: Tensor, afters: Tensor, resets: Tensor | None
    ) -> Tensor:
        parts = starts.new_empty(self.B * self.K, 4, self.N, self.M)

        def go(tile: tuning.Tile) -> Sequence[Tensor]:
            _sums[self.B * self.K, up(self.N, tile["BN"])](
                u, dv, *given, starts, afters, resets, parts,
                *self.sizes(u), *dv.stride()[:2],
                T=self.T, REVERSE=self.reverse, **tile,
            )
            return (parts,)

        tuning.launch("centaurus.sums", self.about(u), u, self.tile, AXES, go)
        return parts.sum(0)


@common.custom_op("seqblocks::centaurus_triton")
def _op(
    u: Tensor, p_re: Tensor, p_im: Tensor, r_re: Tensor, r_im: Tensor, state: Tensor, resets: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """v [B, S, N] in u's dtype, and the last state."""
    v, last = _op_fake(u, p_re, p_im, r_re, r_im, state, resets, reverse)
    u, *given = lined(u), *(x.contiguous() for x in (p_re, p_im, r_re, r_im))
    marks = None if resets is None else resets.contiguous()
    plan = _Plan(u, p_re, reverse)
    with common.on(u):
        plan.walk(u, given, plan.starts(u, given, state.contiguous(), marks, False), marks, v, last, False)
    return v, last


@_op.register_fake
def _op_fake(u, p_re, p_im, r_re, r_im, state, resets, reverse):  # type: ignore[no-untyped-def]
    return u.new_empty(*u.shape[:2], p_re.shape[0]), state.new_empty(state.shape)


@common.custom_op("seqblocks::centaurus_triton_backward")
def _op_backward(
    dv: Tensor, dlast: Tensor, u: Tensor, p_re: Tensor, p_im: Tensor, r_re: Tensor, r_im: Tensor, state: Tensor,
    resets: Tensor | None, reverse: bool,
) -> list[Tensor]:
    """Gradients of u, p_re, p_im, r_re, r_im and the initial state."""
    dv, u = lined(dv), lined(u)
    given = [x.contiguous() for x in (p_re, p_im, r_re, r_im)]
    marks = None if resets is None else resets.contiguous()
    plan = _Plan(u, p_re, reverse)
    du = u.new_empty(*u.shape[:2], plan.N)
    before = state.new_empty(state.shape)
    with common.on(u):
        afters = plan.starts(dv, given, _conjugate(dlast), marks, True)
        plan.walk(dv, given, afters, marks, du, before, True)
        starts = plan.starts(u, given, state.contiguous(), marks, False)  # again, rather than kept
        dp_re, dp_im, dr_re, dr_im = (x.clone() for x in plan.sums(u, dv, given, starts, afters, marks))
    if plan.F != plan.N:
        du = du.unflatten(-1, (-1, plan.F)).sum(2)
    return [du, dp_re, dp_im, dr_re, dr_im, _conjugate(before)]


def _conjugate(x: Tensor) -> Tensor:
    """Of complex numbers as pairs: the way that their gradients flow."""
    return torch.stack([x[..., 0], -x[..., 1]], -1)


@_op_backward.register_fake
def _op_backward_fake(dv, dlast, u, p_re, p_im, r_re, r_im, state, resets, reverse):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape) for x in (u, p_re, p_im, r_re, r_im, state)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:7])
    ctx.reverse = inputs[7]


def _differentiate(ctx, dv, dlast):  # type: ignore[no-untyped-def]
    return *_op_backward(dv, dlast, *ctx.saved_tensors, ctx.reverse), None, None


def _refuse(ctx, *grads):  # type: ignore[no-untyped-def]
    raise RuntimeError("the Triton form of centaurus has no second derivative; use backend='reference' for it")


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(_refuse)


def run(
    bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool, return_state: bool,
    plan: str | None,
) -> tuple[Tensor, Tensor | None]:
    """As `centaurus_torch.run`, with x as it is given; a plan by name is the torch form's."""
    if plan is not None or x.numel() == 0:
        return centaurus_torch.run(bank, x, state, resets, reverse, return_state, plan)
    H = x.shape[2]
    size = torch.exp(bank.decay)
    p_re, p_im = size * torch.cos(bank.turn), size * torch.sin(bank.turn)
    r_re, r_im, u = bank.read, bank.across, x
    if bank.B.dim() == 2:
        u = x @ bank.B.t().to(x.dtype)
    else:
        folded = bank.C
        if state is None and not return_state:
            folded = bank.B * bank.C
        else:
            u = x.repeat(1, 1, bank.B.shape[0] // H) * bank.B.to(x.dtype)
        r_re, r_im = r_re * folded.unsqueeze(-1), r_im * folded.unsqueeze(-1)
    start = bank.fresh(p_re.new_empty(x.shape[0])) if state is None else state
    v, last = _op(u, p_re, p_im, r_re, r_im, start, None if resets is None else resets.to(torch.uint8), reverse)
    if bank.C.dim() == 2:
        v = v @ bank.C.t().to(x.dtype)
    elif bank.mode == "full":
        v = v.unflatten(-1, (-1, H)).sum(-1)
    return v, last


def _can(**facts: Any) -> tuple[bool, str]:
    can, reason = common.can(**facts)
    if can and facts.get("substates", 1) > SUBSTATES:
        return False, f"{facts['substates']} sub-states of a channel; at most {SUBSTATES}"
    return can, reason


def _tiles(arch: str, channels: int, substates: int, **facts: Any) -> dict[str, dict[str, int]]:
    return dict.fromkeys(("forward", "backward"), tiles(channels, substates, arch))


def _example(
    channels: int, substates: int, mode: str = "dws", resets: bool = False, reverse: bool = False, **facts: Any
) -> Any:
    from seqblocks.kernels.centaurus import centaurus

    N = G = H = min(channels, 32)
    M, S = substates, 2 * SEGMENT + 10
    if mode == "full":
        G = min(N, 2)
        H = up(N, G)
        N = G * H
    tensors = {"x": normal(2, S, H), "A_real": -normal(N, M, seed=1).abs() - 0.1, "A_imag": normal(N, M, seed=2)}
    into, out_of = ((N, H), (G, N)) if mode in ("neck", "pointwise") else ((N,), (N,))
    tensors |= {"dt": normal(N, seed=3).abs() * 0.3 + 0.01, "B": normal(*into, seed=4), "C": normal(*out_of, seed=5)}
    if mode != "pointwise":  # which counts each sub-state as a channel, so that there is one of each
        tensors["E"] = normal(N, M, seed=6)
    # a call with a state hands each channel of mode full a feature of its own, others do not
    options: dict[str, Any] = {"reverse": reverse, "mode": mode, "return_state": mode != "full"}
    if resets:
        options["resets"] = (normal(2, S) > 1.5).to(facts["device"])
    return centaurus, tensors, options


register("centaurus", "triton", run, _can, _tiles, _example)

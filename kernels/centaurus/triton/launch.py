"""How the kernels of Centaurus are launched: sizes, segments, and the ops with their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.centaurus import torch as centaurus_torch
from seqblocks.kernels.centaurus.reference import Bank, within_sequences
from seqblocks.kernels.centaurus.triton.kernels import carry, sums, walk
from seqblocks.kernels.dispatch import register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import few_of, launch_size, normal
from seqblocks.kernels.numerics import filled, no_second_derivative
from seqblocks.kernels.triton_common import ceil_div, last_contiguous

CHANNEL_MAX_SUBSTATES = 64
SEGMENT_MIN_TOKENS = 128  # approximately
CELLS = 128  # per program of `carry`: one per thread
WARPS = 4 * 132  # one per warp scheduler of an H100 or H200; a launch with this many needs no segments


def tiles(channels: int, substates: int, arch: str) -> dict[str, int]:
    """Return channels and sub-states per program, tokens loaded ahead, and warps.

    A program has one warp with at most eight states per thread, so that sums over sub-states need no synchronisation
    between warps.
    """
    BM = common.power_of_two(substates)
    BN = min(common.power_of_two(channels), max(4, min(32, 256 // BM)))
    return {"BN": BN, "BM": BM, "STEPS": 8, "num_warps": common.warps(BN * BM, 8, common.lanes(arch))}


def segments(rows: int, S: int, tile: dict[str, int], channels: int) -> int:
    """Return the number of segments for each of `rows` sequences of S tokens.

    It is one where that fills a device. Otherwise segments have about SEGMENT_MIN_TOKENS, limited to eight warps per
    scheduler, since the state before each segment is stored.
    """
    rows, S = launch_size("batch", rows), launch_size("length", S)
    warps = rows * ceil_div(launch_size("channels", channels), tile["BN"]) * tile["num_warps"]
    if warps >= WARPS or S <= 2 * SEGMENT_MIN_TOKENS:
        return 1
    return min(ceil_div(S, SEGMENT_MIN_TOKENS), ceil_div(8 * WARPS, warps))


class _Plan:
    def __init__(self, u: Tensor, p: Tensor, reverse: bool) -> None:
        (self.B, self.S, self.F), (self.N, self.M) = u.shape, p.shape
        self.tile = tiles(self.N, self.M, common.arch(u))
        steps = self.tile["STEPS"]
        self.T = steps * ceil_div(ceil_div(self.S, segments(self.B, self.S, self.tile, self.N)), steps)
        self.K = ceil_div(self.S, self.T)
        self.reverse = reverse

    def sizes(self, u: Tensor) -> tuple[int, ...]:
        return self.S, self.K, self.T, u.shape[2], self.N, self.M, 0, *u.stride()[:2]

    def starts(
        self, u: Tensor, bank: Tensor, state: Tensor, resets: Tensor | None, adjoint: bool
    ) -> Tensor:
        """Return the state that enters each segment, [B, K, 2, M, N]; with one segment, the given state itself."""
        if self.K == 1:
            return state
        starts, ends = (state.new_empty(self.B, self.K, 2, self.M, self.N) for _ in range(2))
        passes = None if resets is None else state.new_empty(self.B, self.K)
        walk[self.B * self.K, ceil_div(self.N, self.tile["BN"])](
            u, bank, None, resets, None, ends, passes, *self.sizes(u), 1,
            ENDS=True, ADJOINT=adjoint, REVERSE=self.reverse, BF=1, **self.tile,
        )
        carry[self.B, ceil_div(self.N * self.M, CELLS)](
            bank, state, ends, passes, starts,
            self.S, self.K, self.T, self.T.bit_length(), self.N, self.M,
            ADJOINT=adjoint, BC=CELLS, STEPS=8, num_warps=CELLS // common.lanes(common.arch(u)),
        )
        return starts

    def walk(
        self, u: Tensor, bank: Tensor, starts: Tensor, resets: Tensor | None, last: Tensor, fan: int, adjoint: bool
    ) -> Tensor:
        """Return v, summed over groups of `fan` neighbouring channels, and write the last state to `last`."""
        BF = min(self.tile["BN"], common.power_of_two(fan))
        outputs, parts = self.N // fan, ceil_div(fan, BF)
        v = u.new_empty(self.B, self.S, outputs, parts, dtype=u.dtype if parts == 1 else torch.float32)
        walk[self.B * self.K, ceil_div(outputs, self.tile["BN"] // BF) * parts](
            u, bank, starts, resets, v, last, None, *self.sizes(u), fan,
            ENDS=False, ADJOINT=adjoint, REVERSE=self.reverse, BF=BF, **self.tile,
        )
        return v.squeeze(-1) if v.shape[-1] == 1 else v.sum(-1).to(u.dtype)

    def sums(
        self, u: Tensor, dv: Tensor, bank: Tensor, starts: Tensor, afters: Tensor, resets: Tensor | None, fan: int
    ) -> Tensor:
        """Return the gradients of the bank [4, M, N], see the kernel `sums`."""
        parts = starts.new_empty(self.B * self.K, 4, self.M, self.N)
        tile = {**self.tile, "STEPS": self.tile["STEPS"] // 2}  # half as many, since tokens of two tensors are loaded
        sums[self.B * self.K, ceil_div(self.N, tile["BN"])](
            u, dv, bank, starts, afters, resets, parts, *self.sizes(u), fan, *dv.stride()[:2],
            REVERSE=self.reverse, **tile,
        )
        return parts.sum(0)


def _together(*parts: Tensor) -> Tensor:
    """Stack bank parts into the layout of the kernels."""
    return torch.stack([x.t() for x in parts])


def _turned(state: Tensor) -> Tensor:
    """Convert states between [B, N, M, 2] and the kernels' layout [B, 2, M, N]."""
    return state.permute(0, 3, 2, 1)


def _across(x: Tensor, fan: int) -> Tensor:
    """Transpose the last axis, seen as groups of `fan`: each new group has one element of every old group."""
    return x if fan in (1, x.shape[-1]) else x.unflatten(-1, (-1, fan)).transpose(-1, -2).flatten(-2)


@custom_op("seqblocks::centaurus_triton")
def _op(
    u: Tensor, p_re: Tensor, p_im: Tensor, r_re: Tensor, r_im: Tensor, state: Tensor, resets: Tensor | None,
    reverse: bool, fan: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return v [B, S, N / fan] in u's dtype, and the last state."""
    u, marks = last_contiguous(u), common.marks(resets)
    last = torch.empty_like(_turned(state), memory_format=torch.contiguous_format)
    plan = _Plan(u, p_re, reverse)
    with common.on(u):
        bank = _together(p_re, p_im, r_re, r_im)
        starts = plan.starts(u, bank, _turned(state).contiguous(), marks, False)
        v = plan.walk(u, bank, starts, marks, last, fan, False)
    return v, _turned(last)


@_op.register_fake
def _op_fake(u, p_re, p_im, r_re, r_im, state, resets, reverse, fan=1):  # type: ignore[no-untyped-def]
    return u.new_empty(*u.shape[:2], p_re.shape[0] // fan), _turned(state.new_empty(_turned(state).shape))


@custom_op("seqblocks::centaurus_triton_backward", outputs=6)
def _op_backward(
    dv: Tensor, dlast: Tensor, u: Tensor, p_re: Tensor, p_im: Tensor, r_re: Tensor, r_im: Tensor, state: Tensor,
    resets: Tensor | None, reverse: bool, fan: int = 1,
) -> list[Tensor]:
    """Return the gradients of u, p_re, p_im, r_re, r_im and the initial state.

    Where all outputs read all features (fan = F), outputs and features are transposed, so that the channels of one
    feature are neighbours.
    """
    dv, u, marks = last_contiguous(dv), last_contiguous(u), common.marks(resets)
    plan = _Plan(u, p_re, reverse)
    back = plan.N // plan.F
    with common.on(u):
        bank = _together(p_re, p_im, r_re, r_im)
        swapped, after = (_across(x, plan.F).contiguous() for x in (bank, _turned(dlast)))
        before = torch.empty_like(after)
        afters = plan.starts(dv, swapped, after, marks, True)
        du = plan.walk(dv, swapped, afters, marks, before, back, True)
        afters, before = (_across(x, back).contiguous() for x in (afters, before))
        starts = plan.starts(u, bank, _turned(state).contiguous(), marks, False)  # recomputed rather than stored
        sums = plan.sums(u, dv, bank, starts, afters, marks, fan)
    return [du, *(x.t().clone(memory_format=torch.contiguous_format) for x in sums), _turned(before)]


@_op_backward.register_fake
def _op_backward_fake(dv, dlast, u, p_re, p_im, r_re, r_im, state, resets, reverse, fan=1):  # type: ignore[no-untyped-def]
    *grads, before = (x.new_empty(x.shape) for x in (u, p_re, p_im, r_re, r_im, _turned(state)))
    return [*grads, _turned(before)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:7])
    ctx.flags = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dv, dlast):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors  # With activation checkpointing, they can be read only once.
    u, p, *_, state, _ = saved
    if dv is None:
        dv = u.new_zeros(*u.shape[:2], p.shape[0] // ctx.flags[1])
    grads = _op_backward(dv, filled(dlast, state), *saved, *ctx.flags)
    return *grads, None, *(None for _ in ctx.flags)


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("centaurus", "Triton"))


@within_sequences
def run(
    bank: Bank, x: Tensor, state: Tensor | None, resets: Tensor | None, reverse: bool, return_state: bool,
    plan: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Run the layer, with the arguments of `centaurus_torch.run`. x has any dtype; a given `plan` selects torch."""
    if plan is not None or x.numel() == 0:
        return centaurus_torch.run(bank, x, state, resets, reverse, return_state, plan)
    H = x.shape[2]
    size = torch.exp(bank.decay)
    p_re, p_im = size * torch.cos(bank.turn), size * torch.sin(bank.turn)
    r_re, r_im, u, fan = bank.read, bank.across, x, 1
    if bank.B.dim() == 2:
        u = x @ bank.B.t().to(x.dtype)
    else:
        folded = bank.C
        if state is None and not return_state:
            folded = bank.B * bank.C
            fan = H if bank.mode == "full" else 1
        else:
            u = x.repeat(1, 1, bank.B.shape[0] // H) * bank.B.to(x.dtype)
        r_re, r_im = r_re * folded.unsqueeze(-1), r_im * folded.unsqueeze(-1)
    start = _turned(p_re.new_zeros(x.shape[0], 2, *p_re.t().shape)) if state is None else state
    v, last = _op(u, p_re, p_im, r_re, r_im, start, common.marks(resets), reverse, fan)
    if bank.C.dim() == 2:
        v = v @ bank.C.t().to(x.dtype)
    elif bank.mode == "full" and fan != H:
        v = v.unflatten(-1, (-1, H)).sum(-1)
    return v, last


@common.can_unless
def _can(**facts: Any) -> str:
    if facts.get("substates", 1) > CHANNEL_MAX_SUBSTATES:
        return f"{facts['substates']} sub-states per channel; at most {CHANNEL_MAX_SUBSTATES}"
    return ""


def _tiles(
    arch: str, channels: int, substates: int, batch: int = 0, length: int = 1, **facts: Any
) -> dict[str, dict[str, int]]:
    tile = tiles(channels, substates, arch)
    if batch:
        tile["SEGMENTS"] = int(segments(batch, length, tile, channels) > 1)
    return dict.fromkeys(("forward", "backward"), tile)


def _example(
    channels: int, substates: int, mode: str = "dws", features: int = 16, keeps: bool = True, resets: bool = False,
    reverse: bool = False, **facts: Any
) -> Any:
    from seqblocks.kernels.centaurus import centaurus

    N = G = H = few_of(channels, 32)
    M, S = substates, 2 * SEGMENT_MIN_TOKENS + 10
    if mode == "full":  # equally many channels per feature, and at most two
        H = few_of(features, 32)
        N = H * max(1, min(2, channels // features))
    tensors = {"x": normal(2, S, H), "A_real": -normal(N, M, seed=1).abs() - 0.1, "A_imag": normal(N, M, seed=2)}
    into, out_of = ((N, H), (G, N)) if mode in ("neck", "pointwise") else ((N,), (N,))
    tensors |= {"dt": normal(N, seed=3).abs() * 0.3 + 0.01, "B": normal(*into, seed=4), "C": normal(*out_of, seed=5)}
    if mode != "pointwise":  # mode pointwise counts each sub-state as a channel and has no E
        tensors["E"] = normal(N, M, seed=6)
    # in mode full, calls with a state read one input per channel; others share features between channels
    options: dict[str, Any] = {"reverse": reverse, "mode": mode, "return_state": keeps}
    if resets:
        options["resets"] = (normal(2, S) > 1.5).to(facts["device"])
    return centaurus, tensors, options


register("centaurus", "triton", run, _can, _tiles, _example)

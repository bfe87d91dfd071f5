"""Launches and torch ops: three launches forward (five for many chunks), four backward, and one for a single token.

Linear attention with a decay per head uses the same launches, except for the last.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import launch_size
from seqblocks.kernels.mlstm.triton import backward, forward, gates, sizes
from seqblocks.kernels.mlstm.triton.tensors import FACTORS, GATES
from seqblocks.kernels.numerics import filled, no_second_derivative
from seqblocks.kernels.resets import nonfinite_triton as nonfinite
from seqblocks.kernels.triton_common import ceil_div, tl, token_strides


class Plan:
    """Grids and arguments that the launches share.

    Linear attention uses the same without stabiliser, input gate and normaliser: i, m0, n0 and norm are then None, and
    f is the log of the forget gate, or None.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, reverse: bool, exp: bool = False, scale: float | None = None
    ) -> None:
        B, self.S, heads, self.DK = q.shape
        self.H, self.DV = v.shape[2:]
        self.N = B * self.H
        self.scale = self.DK**-0.5 if scale is None else scale
        narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v))
        self.narrow = narrow
        self.chunk = sizes.chunk(self.DK, self.DV, narrow)
        L = self.chunk["L"]
        self.chunks = ceil_div(self.S, L)
        self.each = ceil_div(launch_size("length", self.S), L) > sizes.WALK_MAX_CHUNKS
        self.places = self.chunks * L
        self.tiles = self.N * self.places // self.chunk["BT"]
        exact = narrow or all(x.dtype == torch.float32 for x in (q, k, v))
        dot = {"DOT": tl.bfloat16 if narrow else tl.float32, "PRECISION": "ieee" if exact else "tf32"}
        self.state_dtype = torch.bfloat16 if narrow else torch.float32  # of the states between chunks
        # Gates have one value per token: one warp scans those of a chunk without exchanges between warps.
        self.of_gates = {"REVERSE": reverse, "BT": L, "num_warps": 1}
        self.of_dots = {"GROUP": self.H // max(1, heads), "REVERSE": reverse, **dot, **self.chunk}
        self.exp, self.reverse = exp, reverse

    @property
    def scales(self) -> tuple[float, float]:
        """Return the scale of q, and its binary logarithm."""
        return self.scale, math.log2(self.scale)

    def workspaces(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for the gates of all tokens, and for the states before the chunks.

        The latter are not [N, K, ...], because a trace with one chunk would be valid for one chunk only.
        """
        planes = like.new_empty(GATES, self.N, self.places, dtype=torch.float32)
        return planes, like.new_empty(self.N, self.chunks * self.DK * self.DV, dtype=self.state_dtype)

    def segments(self, like: Tensor, resets: Tensor | None) -> Tensor:
        """Return memory for the segments [N, places], which is empty without resets."""
        return like.new_empty((self.N, self.places) if resets is not None else (0,), dtype=torch.int32)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor | None, f: Tensor | None, state: tuple[Tensor | None, ...],
        resets: Tensor | None, h: Tensor, last: tuple[Tensor | None, ...], planes: Tensor, segments: Tensor | None,
        C: Tensor, norm: Tensor | None, faults: Tensor, eps: float, normalize: bool,
    ) -> None:
        """Launch the forward pass. state, last: C, n, m before the first token and after the last."""
        found = nonfinite.Found()
        with common.on(q):
            if resets is not None:
                inputs = self.inputs(q, k, v, i, f)
                found = inputs.searched(state, resets, faults)
            self.gates(i, f, found, state[2], planes, segments, last[2])
            self.states(k, v, state[0], state[1], planes, segments, last[0], last[1], C, norm, found)
            size = self.size_of("outputs", q)
            forward.outputs[(self.tiles * self.v_tiles(size),)](
                q, k, v, C, norm, planes, segments, h, found.q, found.k, found.v, found.flag,
                self.S, self.H, self.DK, self.DV, *token_strides(q, k, v), *self.scales, eps,
                NORMALIZE=normalize, **self.of_dots, **size,
            )
            if resets is not None:
                inputs.spread(found, h, last, self.reverse)

    def backward(
        self, dh: Tensor, dlast: tuple[Tensor | None, ...], q: Tensor, k: Tensor, v: Tensor, i: Tensor | None,
        f: Tensor | None, h: Tensor, last: tuple[Tensor | None, ...], planes: Tensor, segments: Tensor | None,
        C: Tensor, norm: Tensor | None, faults: Tensor, grads: tuple[Tensor | None, ...], eps: float, normalize: bool,
    ) -> None:
        """Launch the backward pass. grads: memory for those of q, k, v, i, f, and C, n, m before the first token."""
        dq, dk, dv, di, df, dC0, dn0, dm0 = grads
        factors = planes.new_empty(FACTORS, self.N, self.places)
        links, ahead = (planes.new_empty(2, self.N, self.chunks) for _ in range(2))
        per_chunk = self.N * self.chunks
        lengths = (self.S, self.H, self.DK, self.DV)
        found = nonfinite.Found()
        with common.on(q):
            if faults.numel():
                inputs = self.inputs(q, k, v, i, f)
                found = inputs.searched_with_gradients(dh, dlast, faults, self.reverse)
            dC, dnorm = torch.empty_like(C), None if norm is None else torch.empty_like(norm)
            backward.factors[(per_chunk,)](
                dh, h, planes, segments, factors, links, found.dy, found.flag,
                self.S, self.H, self.DV, *token_strides(dh), self.scales[0], eps,
                EXP=self.exp, NORMALIZE=normalize, BV=min(64, max(16, common.power_of_two(self.DV))),
                **self.of_gates | {"num_warps": min(8, self.chunk["L"] // 16)},
            )
            size = self.size_of("state_gradients", q)
            state_tiles = self.k_tiles(size) * self.v_tiles(size)
            flows = planes.new_empty(self.N, self.chunks + 1, state_tiles)
            backward.state_gradients[(self.N * state_tiles,)](
                q, dh, C, norm, last[0], last[1], dlast[0], dlast[1], planes, factors, links if self.exp else None,
                dC, dnorm, dC0, dn0, flows, ahead, found.q, found.dy, found.flag,
                *lengths, *token_strides(q, dh), **self.of_dots, **size,
            )
            size = self.size_of("gradients", q)
            rows, columns = (planes.new_empty(self.k_tiles(size), self.N, self.places) for _ in range(2))
            backward.gradients[(self.tiles * (2 * self.k_tiles(size) + self.v_tiles(size)),)](
                q, k, v, dh, C, norm, dC, dnorm, planes, segments, factors, dq, rows, dk, columns, dv,
                found.q, found.k, found.v, found.dy, found.flag,
                *lengths, *token_strides(q, k, v, dh), self.scales[1], **self.of_dots, **size,
            )
            if df is not None:
                backward.gate_gradients[(per_chunk,)](
                    i, f, dlast[2], planes, segments, factors, links, ahead, rows, columns, flows, di, df, dm0,
                    found.g, found.x, found.flag,
                    self.S, self.H, *token_strides(i, f), rows.shape[0], columns.shape[0], flows.shape[2],
                    EXP=self.exp, FRESH=dC0 is None,
                    **{key: common.power_of_two(x.shape[at]) for key, x, at in (
                        ("ROWS", rows, 0), ("COLUMNS", columns, 0), ("STATES", flows, 2))},
                    **self.of_gates,
                )
            if faults.numel():
                inputs.fill(found, (dq, dk, dv, df, di, None), (dC0, dn0, dm0), self.reverse)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor | None, f: Tensor | None) -> nonfinite.Inputs:
        """Return the inputs of a call with resets. Closed gates (i or f of -inf) and open ones (f of inf) are valid."""
        kind = nonfinite.BELOW_INF if i is None else nonfinite.NOT_NAN
        return nonfinite.Inputs(q, k, v, f, i, kind, nonfinite.BELOW_INF)

    def gates(
        self, i: Tensor | None, f: Tensor | None, found: nonfinite.Found, m0: Tensor | None, planes: Tensor,
        segments: Tensor | None, m_out: Tensor | None,
    ) -> None:
        each, m_enters = self.each, None
        options = {"EXP": self.exp, **self.of_gates}
        if each and self.exp:
            passages = planes.new_empty(2, self.N, self.chunks, dtype=torch.float64)
            m_enters = planes.new_empty(self.N, self.chunks + 1, dtype=torch.float64)
            gates.totals[(self.N * self.chunks,)](
                i, f, found.resets, passages, found.g, found.x, found.flag,
                self.S, self.H, *token_strides(i, f), **options,
            )
            gates.entering[(self.N,)](
                passages, m0, m_enters, found.flag, self.chunks, BC=sizes.CHUNKS_AT_ONCE, num_warps=1
            )
        gates.gates[(self.N * self.chunks if each else self.N,)](
            i, f, found.resets, m0, m_enters, planes, segments, m_out, found.g, found.x, found.flag,
            self.S, self.N, self.H, *token_strides(i, f), EACH=each, **options,
        )

    def states(
        self, k: Tensor, v: Tensor, C0: Tensor | None, n0: Tensor | None, planes: Tensor, segments: Tensor | None,
        C_out: Tensor | None, n_out: Tensor | None, C: Tensor, norm: Tensor | None, found: nonfinite.Found,
    ) -> None:
        size = self.size_of("states", k)
        forward.states[(self.N * self.k_tiles(size) * self.v_tiles(size),)](
            k, v, C0, n0, planes, segments, C, norm, C_out, n_out, found.k, found.v, found.flag,
            self.S, self.H, self.DK, self.DV, *token_strides(k, v), **self.of_dots, **size,
        )

    def k_tiles(self, size: dict[str, int]) -> int:
        return ceil_div(self.DK, size["BK"])

    def v_tiles(self, size: dict[str, int]) -> int:
        return ceil_div(self.DV, size["BV"])

    def size_of(self, kernel: str, x: Tensor) -> dict[str, int]:
        return sizes.tiles(kernel, self.DK, self.DV, self.narrow, common.arch(x), launch_size("batch", self.N))


def _laid_out(lines: tuple[Tensor, ...], whole: tuple[Tensor | None, ...]) -> list[Any]:
    near = [common.near(x, sizes.CHUNK_MAX_TOKENS) for x in lines]
    return near + [None if x is None else x.contiguous() for x in whole]


@custom_op("seqblocks::mlstm_triton")
def scan(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return h, the last C, n, m (empty unless return_state), gates, segments, C and n of the chunks, and faults."""
    q, k, v, C0, n0, m0 = _laid_out((q, k, v), (C0, n0, m0))
    results = _scan_fake(q, k, v, i, f, C0, n0, m0, resets, reverse, eps, input_gate, normalize, return_state)
    h, C_out, n_out, m_out, planes, segments, C, norm, faults = results
    plan = Plan(q, k, v, reverse, input_gate == "exp")
    last = (C_out, n_out, m_out) if return_state else (None, None, None)
    marks = segments if resets is not None else None
    plan.forward(q, k, v, i, f, (C0, n0, m0), resets, h, last, planes, marks, C, norm, faults, eps, normalize)
    return results


@scan.register_fake
def _scan_fake(  # type: ignore[no-untyped-def]
    q, k, v, i, f, C0, n0, m0, resets, reverse, eps, input_gate, normalize, return_state
):
    B, _, H, DK = q.shape
    plan = Plan(q, k, v, reverse, input_gate == "exp")
    shapes = ((B, H, DK, v.shape[-1]), (B, H, DK), (B, H)) if return_state else ((0,),) * 3
    state = [f.new_empty(shape) for shape in shapes]
    planes, C = plan.workspaces(f)
    segments = plan.segments(f, resets)
    norm = f.new_empty(plan.N, plan.chunks * DK)
    return v.new_empty(v.shape), *state, planes, segments, C, norm, nonfinite.empty(v, resets)


@custom_op("seqblocks::mlstm_triton_backward", outputs=8)
def scan_backward(
    dh: Tensor, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, C0: Tensor | None, n0: Tensor | None, m0: Tensor | None,
    h: Tensor, C_out: Tensor | None, n_out: Tensor | None, planes: Tensor, segments: Tensor | None,
    C: Tensor, norm: Tensor, faults: Tensor, reverse: bool, eps: float, input_gate: str, normalize: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, i, f and of the initial C, n, m, which are empty without an initial state."""
    dh, q, k, v, dC_out, dn_out, dm_out, h = _laid_out((dh, q, k, v), (dC_out, dn_out, dm_out, h))
    plan = Plan(q, k, v, reverse, input_gate == "exp")
    results = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, i, f, C0, n0, m0)]
    given = tuple(results[5:]) if C0 is not None else (None, None, None)
    plan.backward(
        dh, (dC_out, dn_out, dm_out), q, k, v, i, f, h, (C_out, n_out, None), planes, segments, C, norm, faults,
        (*results[:5], *given), eps, normalize,
    )
    return results


@scan_backward.register_fake
def _scan_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, h, C_out, n_out, planes, segments,
    C, norm, faults, reverse, eps, input_gate, normalize
):
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, i, f, C0, n0, m0)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, resets = inputs[:9]
    h, C_out, n_out, _, planes, segments, C, norm, faults = output
    ctx.options, ctx.return_state = inputs[9:13], inputs[13]
    state = (C_out, n_out) if ctx.return_state else (None, None)
    ctx.set_materialize_grads(False)
    kept = segments if resets is not None else None
    ctx.save_for_backward(*tensors, h, *state, planes, kept, C, norm, faults)
    ctx.mark_non_differentiable(planes, segments, C, norm, faults)


def _differentiate(ctx, dh, dC, dn, dm, *_):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    h, C_out, n_out = saved[8:11]
    last = (dC, dn, dm)
    if any(x is not None for x in last):
        last = filled(dC, C_out), filled(dn, n_out), filled(dm, n_out[..., 0])
    grads = scan_backward(filled(dh, h), *last, *saved, *ctx.options)
    return *(None if x is None else g for x, g in zip(saved[:8], grads, strict=True)), *(None,) * 6


scan.register_autograd(_differentiate, setup_context=_save)
scan_backward.register_autograd(no_second_derivative("mlstm", "Triton"))


@custom_op("seqblocks::mlstm_step_triton")
def step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one token without gradients. Returns h and the next C, n, m, which are empty unless return_state."""
    q, k, v, C0, n0, m0, resets = _laid_out((q, k, v), (C0, n0, m0, resets))
    results = _step_fake(q, k, v, i, f, C0, n0, m0, resets, eps, input_gate, normalize, return_state)
    h, *last = results
    B, _, H, DK = q.shape
    DV = v.shape[-1]
    size = sizes.step_tiles(DK, DV, common.arch(q))
    with common.on(q):
        forward.step[B * H, ceil_div(DV, size["BV"])](
            q, k, v, i, f, resets, C0, n0, m0, h, *(last if return_state else (None,) * 3),
            H, DK, DV, *(x.stride(axis) for x in (q, k, v, i, f) for axis in (0, 2)), DK**-0.5, eps,
            EXP=input_gate == "exp", NORMALIZE=normalize, **size,
        )
    return results


@step.register_fake
def _step_fake(q, k, v, i, f, C0, n0, m0, resets, eps, input_gate, normalize, return_state):  # type: ignore[no-untyped-def]
    B, _, H, DK = q.shape
    shapes = ((B, H, DK, v.shape[-1]), (B, H, DK), (B, H)) if return_state else ((0,),) * 3
    return v.new_empty(v.shape), *(f.new_empty(shape) for shape in shapes)

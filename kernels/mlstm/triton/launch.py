"""Launches: three forward, or five of many chunks, four backward, and one for a single token; and their ops."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch.self_check import launch_size
from seqblocks.kernels.mlstm.triton import backward, forward, gates, sizes
from seqblocks.kernels.mlstm.triton.tensors import FACTORS, GATES
from seqblocks.kernels.numerics import no_second_derivative
from seqblocks.kernels.resets import nonfinite
from seqblocks.kernels.triton_common import ceil_div, tl


class _Plan:
    """The grids and the arguments that launches share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, reverse: bool, input_gate: str
    ) -> None:
        B, self.S, self.H, self.DK = q.shape
        self.DV = v.shape[-1]
        self.N = B * self.H
        narrow = all(x.dtype == torch.bfloat16 for x in (q, k, v))
        self.narrow = narrow
        self.chunk = sizes.chunk(self.DK, self.DV, narrow)
        L = self.chunk["L"]
        self.chunks = ceil_div(self.S, L)
        self.each = ceil_div(launch_size("length", self.S), L) > sizes.WALKED
        self.places = self.chunks * L
        self.tiles = self.N * self.places // self.chunk["BT"]
        exact = narrow or all(x.dtype == torch.float32 for x in (q, k, v))
        dot = {"DOT": tl.bfloat16 if narrow else tl.float32, "PRECISION": "ieee" if exact else "tf32"}
        self.state_dtype = torch.bfloat16 if narrow else torch.float32  # of the states between chunks
        # gates are a number a token: one warp scans those of a chunk without asking others
        self.of_gates = {"REVERSE": reverse, "BT": L, "num_warps": 1}
        self.of_dots = {"REVERSE": reverse, **dot, **self.chunk}
        self.exp = input_gate == "exp"

    @property
    def scales(self) -> tuple[float, float]:
        """1 / sqrt(DK), and its binary logarithm."""
        return self.DK**-0.5, -0.5 * math.log2(self.DK)

    def gates(
        self, i: Tensor, f: Tensor, resets: Tensor | None, m0: Tensor | None, planes: Tensor,
        segments: Tensor | None, m_out: Tensor | None,
    ) -> None:
        each, m_enters = self.each, None
        options = {"EXP": self.exp, **self.of_gates}
        if each and self.exp:
            passages = planes.new_empty(2, self.N, self.chunks, dtype=torch.float64)
            m_enters = planes.new_empty(self.N, self.chunks + 1, dtype=torch.float64)
            gates.totals[(self.N * self.chunks,)](
                i, f, resets, passages, self.S, self.H, *_strides(i, f), **options
            )
            gates.entering[(self.N,)](passages, m0, m_enters, self.chunks, BC=sizes.CHUNKS_AT_ONCE, num_warps=1)
        gates.gates[(self.N * self.chunks if each else self.N,)](
            i, f, resets, m0, m_enters, planes, segments, m_out,
            self.S, self.N, self.H, *_strides(i, f), EACH=each, **options,
        )

    def states(
        self, k: Tensor, v: Tensor, C0: Tensor | None, n0: Tensor | None, planes: Tensor, segments: Tensor | None,
        C_out: Tensor | None, n_out: Tensor | None, C: Tensor, norm: Tensor,
    ) -> None:
        size = self.size_of("states", k)
        forward.states[(self.N * self.k_tiles(size) * self.v_tiles(size),)](
            k, v, C0, n0, planes, segments, C, norm, C_out, n_out,
            self.S, self.H, self.DK, self.DV, *_strides(k, v), **self.of_dots, **size,
        )

    def k_tiles(self, size: dict[str, int]) -> int:
        return ceil_div(self.DK, size["BK"])

    def v_tiles(self, size: dict[str, int]) -> int:
        return ceil_div(self.DV, size["BV"])

    def size_of(self, kernel: str, x: Tensor) -> dict[str, int]:
        return sizes.tiles(kernel, self.DK, self.DV, self.narrow, common.arch(x), launch_size("batch", self.N))


def _strides(*tensors: Tensor) -> list[int]:
    """Over batch, tokens, heads."""
    return [n for x in tensors for n in x.stride()[:3]]


def _laid_out(lines: tuple[Tensor, ...], whole: tuple[Tensor | None, ...]) -> list[Any]:
    return [common.near(x, sizes.LONGEST_CHUNK) for x in lines] + [None if x is None else x.contiguous() for x in whole]


@common.custom_op("seqblocks::mlstm_triton")
def scan(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    reverse: bool, eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return h, the last C, n, m (empty if not wanted); for the backward pass gates, segments, C and n by chunks."""
    found = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
    q, k, v, C0, n0, m0, resets = _laid_out((q, k, v), (C0, n0, m0, resets))
    results = _scan_fake(q, k, v, i, f, C0, n0, m0, resets, reverse, eps, input_gate, normalize, return_state)
    h, C_out, n_out, m_out, planes, segments, C, norm = results
    plan = _Plan(q, k, v, i, f, reverse, input_gate)
    last = (C_out, n_out, m_out) if return_state else (None, None, None)
    marks = segments if resets is not None else None
    with common.on(q):
        plan.gates(i, f, resets, m0, planes, marks, last[2])
        plan.states(k, v, C0, n0, planes, marks, last[0], last[1], C, norm)
        size = plan.size_of("outputs", q)
        forward.outputs[(plan.tiles * plan.v_tiles(size),)](
            q, k, v, C, norm, planes, marks, h,
            plan.S, plan.H, plan.DK, plan.DV, *_strides(q, k, v), *plan.scales, eps,
            NORMALIZE=normalize, **plan.of_dots, **size,
        )
    if found is not None:
        found.mark(h, C_out, n_out, m_out)
    return results


@scan.register_fake
def _scan_fake(  # type: ignore[no-untyped-def]
    q, k, v, i, f, C0, n0, m0, resets, reverse, eps, input_gate, normalize, return_state
):
    B, _, H, DK = q.shape
    plan = _Plan(q, k, v, i, f, reverse, input_gate)
    shapes = ((B, H, DK, v.shape[-1]), (B, H, DK), (B, H)) if return_state else ((0,),) * 3
    state = [f.new_empty(shape) for shape in shapes]
    planes = f.new_empty(GATES, plan.N, plan.places)
    segments = f.new_empty((plan.N, plan.places) if resets is not None else (0,), dtype=torch.int32)
    # not [N, K, ...]: a trace with one chunk would be for one chunk only
    C = f.new_empty(plan.N, plan.chunks * DK * v.shape[-1], dtype=plan.state_dtype)
    norm = f.new_empty(plan.N, plan.chunks * DK)
    return v.new_empty(v.shape), *state, planes, segments, C, norm


@common.custom_op("seqblocks::mlstm_triton_backward")
def scan_backward(
    dh: Tensor, dC_out: Tensor | None, dn_out: Tensor | None, dm_out: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    h: Tensor, C_out: Tensor | None, n_out: Tensor | None, planes: Tensor, segments: Tensor | None,
    C: Tensor, norm: Tensor, reverse: bool, eps: float, input_gate: str, normalize: bool,
) -> list[Tensor]:
    """Return gradients of q, k, v, i, f and of the initial C, n, m, which are empty if there was none."""
    undefined = None
    if resets is not None and nonfinite.suspected(q, k, v, i, f, C0, n0, m0, dh, dC_out, dn_out, dm_out):
        found = nonfinite.find(q, k, v, i, f, (C0, n0, m0), resets, reverse)
        undefined = found.without_gradient(dh, dC_out, dn_out, dm_out)
        (q, k, v, i, f), (C0, n0, m0) = found.clean(q, k, v, i, f), found.clean_state(C0, n0, m0)
        dh, dC_out, dn_out, dm_out = found.clean_outputs(dh, dC_out, dn_out, dm_out)
        h, C_out, n_out = found.clean_outputs(h, C_out, n_out)
    dh, q, k, v, dC_out, dn_out, dm_out, h = _laid_out((dh, q, k, v), (dC_out, dn_out, dm_out, h))
    plan = _Plan(q, k, v, i, f, reverse, input_gate)
    results = [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, i, f, C0, n0, m0)]
    dq, dk, dv, di, df, dC0, dn0, dm0 = results
    given = C0 is not None
    factors = planes.new_empty(FACTORS, plan.N, plan.places)
    links, ahead = (planes.new_empty(2, plan.N, plan.chunks) for _ in range(2))
    per_chunk = plan.N * plan.chunks
    lengths = (plan.S, plan.H, plan.DK, plan.DV)

    with common.on(q):
        dC, dnorm = torch.empty_like(C), torch.empty_like(norm)
        backward.factors[(per_chunk,)](
            dh, h, planes, segments, factors, links, plan.S, plan.H, plan.DV, *_strides(dh), plan.scales[0], eps,
            EXP=plan.exp, NORMALIZE=normalize, BV=min(64, max(16, common.power_of_two(plan.DV))),
            **plan.of_gates | {"num_warps": min(8, plan.chunk["L"] // 16)},
        )
        size = plan.size_of("state_gradients", q)
        state_tiles = plan.k_tiles(size) * plan.v_tiles(size)
        flows = planes.new_empty(plan.N, plan.chunks + 1, state_tiles)
        backward.state_gradients[(plan.N * state_tiles,)](
            q, dh, C, norm, C_out, n_out, dC_out, dn_out, planes, factors, links if plan.exp else None, dC, dnorm,
            dC0 if given else None, dn0 if given else None, flows, ahead,
            *lengths, *_strides(q, dh), **plan.of_dots, **size,
        )
        size = plan.size_of("gradients", q)
        rows, columns = (planes.new_empty(plan.k_tiles(size), plan.N, plan.places) for _ in range(2))
        backward.gradients[(plan.tiles * (2 * plan.k_tiles(size) + plan.v_tiles(size)),)](
            q, k, v, dh, C, norm, dC, dnorm, planes, segments, factors, dq, rows, dk, columns, dv,
            *lengths, *_strides(q, k, v, dh), plan.scales[1], **plan.of_dots, **size,
        )
        backward.gate_gradients[(per_chunk,)](
            i, f, dm_out, planes, segments, factors, links, ahead, rows, columns, flows, di, df,
            dm0 if given else None,
            plan.S, plan.H, *_strides(i, f), rows.shape[0], columns.shape[0], flows.shape[2], EXP=plan.exp,
            **{key: common.power_of_two(x.shape[at]) for key, x, at in (
                ("ROWS", rows, 0), ("COLUMNS", columns, 0), ("STATES", flows, 2))},
            **plan.of_gates,
        )
    if undefined is not None:
        nonfinite.fill(results, *undefined)
    return results


@scan_backward.register_fake
def _scan_backward_fake(  # type: ignore[no-untyped-def]
    dh, dC_out, dn_out, dm_out, q, k, v, i, f, C0, n0, m0, resets, h, C_out, n_out, planes, segments,
    C, norm, reverse, eps, input_gate, normalize
):
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, i, f, C0, n0, m0)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, resets = inputs[:9]
    h, C_out, n_out, _, planes, segments, C, norm = output
    ctx.options, ctx.return_state = inputs[9:13], inputs[13]
    state = (C_out, n_out) if ctx.return_state else (None, None)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, resets, h, *state, planes, segments if resets is not None else None, C, norm)
    ctx.mark_non_differentiable(planes, segments, C, norm)


def _differentiate(ctx, dh, dC, dn, dm, *_):  # type: ignore[no-untyped-def]
    saved = ctx.saved_tensors
    h, C_out, n_out = saved[9:12]
    last = (dC, dn, dm)
    if any(x is not None for x in last):
        last = common.filled(dC, C_out), common.filled(dn, n_out), common.filled(dm, n_out[..., 0])
    grads = scan_backward(common.filled(dh, h), *last, *saved, *ctx.options)
    return *(None if x is None else g for x, g in zip(saved[:8], grads, strict=True)), *(None,) * 6


scan.register_autograd(_differentiate, setup_context=_save)
scan_backward.register_autograd(no_second_derivative("mlstm", "Triton"))


@common.custom_op("seqblocks::mlstm_step_triton")
def step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor,
    C0: Tensor | None, n0: Tensor | None, m0: Tensor | None, resets: Tensor | None,
    eps: float, input_gate: str, normalize: bool, return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take one token without a derivative: return h and the next C, n, m (empty if not wanted)."""
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

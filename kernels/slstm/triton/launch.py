"""Launches of the sLSTM's kernels, as torch ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import launch_size, normal
from seqblocks.kernels.numerics import filled, no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, backward_marks
from seqblocks.kernels.slstm.reference import SLSTMState
from seqblocks.kernels.slstm.triton.backward import scan_backward, scan_backward_by_team, scan_backward_by_tiles
from seqblocks.kernels.slstm.triton.forward import scan, scan_by_team, scan_by_tiles
from seqblocks.kernels.triton_common import ceil_div, last_contiguous, tl

ROWS = 16  # sequences of a program: the fewest rows that a dot supports
HEAD_MAX_CHANNELS = 1024
AT_ONCE = 1 if common.INTERPRETED else 1 << 31  # tokens of a team's launch; the interpreter runs programs in turn.
MAX_POLLS = 1 << 24  # polls until a program times out: seconds, where a microsecond is usual

_no_teams: set[torch.device] = set()  # devices where a team was refused or timed out; tiles are used there
_late: dict[torch.device, Tensor] = {}  # by device, whether a team timed out; in pinned memory, read without waiting


class TeamRefused(Exception):
    """Raised if the driver cannot run all programs of a launch at once."""


def _intercepted() -> bool:
    """Return whether a dispatch mode intercepts calls, such as fake tensor mode, whose tensors have no data."""
    return torch._C._len_torch_dispatch_stack() > 0


def _late_flag(x: Tensor) -> Tensor:
    """Return the flag [1], int32, in host memory to which the device of x can write."""
    if _intercepted():
        return torch.zeros(1, dtype=torch.int32, device="cpu")
    if x.device not in _late:
        _late[x.device] = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=x.is_cuda)
    return _late[x.device]


def _raise_if_late(x: Tensor) -> None:
    """Raise RuntimeError if an earlier launch timed out."""
    flag = None if _intercepted() else _late.get(x.device)
    if flag is not None and flag.item():
        flag.zero_()
        _no_teams.add(x.device)
        raise RuntimeError(
            f"an sLSTM kernel launched earlier on {x.device} timed out: programs that share a head "
            "waited too long for one another, and its outputs are NaN. This process now uses another kernel on this "
            "device, in which no programs wait. Repeat the computation from the last finite result."
        )


def _refusal(error: Exception) -> bool:
    """Return whether a launch failed because a cooperative grid is too large or not supported (MPS, vGPU)."""
    text = str(error).lower()
    return type(error).__name__ == "OutOfResources" or "cooperative" in text or "not supported" in text


def _whole_bytes(BD: int, dots: str, backward: bool) -> int:
    """Return an upper bound on the shared bytes of a program with the four matrices of a head of BD channels on chip.

    In addition to the matrices, the compiler uses 96 to 160 bytes per channel, and with two stages in the backward pass
    832 to 960.
    """
    return (8 if dots == "bf16" else 16) * BD * BD + (1024 if backward and BD <= 64 else 160) * BD


def tiles(
    width: int, dots: str, backward: bool, arch: str, heads: int = 1, batch: int = ROWS, processors: int = 0,
    room: int | None = None,
) -> dict[str, int]:
    """Return sequences (BB) and channels (BD) of a program, WHOLE if these are all of a head, warps and stages.

    If a team shares a head, which depends on the number of `processors` of the device, also the channels of each
    program (BU).

    dots: "bf16", "tf32" or "fp32". The four matrices of a head take 8 D^2 bytes on chip in bfloat16 and 16 D^2 in the
    others; values loaded ahead take as much again in the backward pass, which reads thirteen values per channel.
    room: bytes of shared memory available to a program; by default those of the architecture.
    """
    BD, narrow = max(16, common.power_of_two(width)), dots == "bf16"
    room = common.SHARED.get(arch, 0) if room is None else room
    # Registers: 64 channels of float32 spill on sm_8x, and 32 on AMD GPUs.
    fits = BD <= 32 or (BD <= 128 and narrow) or (BD <= 64 and not arch.startswith("sm_8"))
    whole = BD <= 16 or (arch.startswith("sm_") and fits and _whole_bytes(BD, dots, backward) <= room)
    team = {} if whole else _team(width, dots, backward, arch, heads, batch, processors, room)
    if team:
        return team
    BD = BD if whole else min(BD, 64 if narrow else 32)
    # Tokens run one after the other, so each is split among many threads: four channels each, as far as warps allow.
    warps = max(1, min(16 if whole and not backward else 8, ROWS * BD // (4 * common.lanes(arch))))
    stages = 1 if whole and backward and BD > 64 else 2
    return {"BB": ROWS, "BD": BD, "WHOLE": int(whole), "num_warps": warps, "num_stages": stages}


def _team(
    width: int, dots: str, backward: bool, arch: str, heads: int, batch: int, processors: int, room: int
) -> dict[str, int]:
    """Return the tile of a team, like `tiles`; empty if no team fits on the device or into registers.

    The time of a launch hardly depends on the work of each program per token. So the tiles with the fewest launches are
    chosen, and of these the smallest.
    """
    BD, size = common.power_of_two(width), 2 if dots == "bf16" else 4
    most_cells = {"bf16": 2048, "tf32": 1024, "fp32": 256 if backward else 512}[dots]
    limit = {"bf16": 1 << 18, "tf32": 1 << 17, "fp32": 1 << 17}[dots]
    if not backward:
        limit = {"bf16": 1 << 20, "tf32": 1 << 18, "fp32": 1 << 17}[dots]
    # Exchanged values are loaded at once or, if they do not fit, in parts.
    reads = [(4, 1), (1 if dots == "fp32" else 2, 0)] if backward else [(1, 0)]
    found = []
    for BU, BB in ((16, 16), (16, 32), (16, 64), (32, 16), (32, 32), (32, 64)):
        at_once = processors // ceil_div(width, BU)
        fits = [ahead for parts, ahead in reads if (4 * BU + parts * BB) * BD * size <= room]
        if arch.startswith("sm_") and at_once and fits and most_cells >= BU * BB and limit >= BD * BU * BB:
            found.append((ceil_div(heads * ceil_div(batch, BB), at_once), BU * BB, BB, BU, fits[0]))
    if not found:
        return {}
    _, cells, BB, BU, ahead = min(found)
    tile = {"BB": BB, "BD": BD, "BU": BU, "WHOLE": 0, "num_stages": 1}
    if backward:
        return tile | {"AHEAD": ahead, "EXACT": int(dots == "fp32"), "num_warps": 8}
    # On sm_90, four warps compute a product of 64 rows together; with more, each group would read all matrices.
    four = arch == "sm_90" and dots == "bf16" and cells == 256 and BD <= 512
    return tile | {"num_warps": 4 if four else 16 if cells > 1024 else 8}


class _Plan:
    def __init__(
        self, x: Tensor, others: tuple[Tensor, ...], H: int, D: int, reverse: bool, backward: bool = False
    ) -> None:
        self.B, self.S = x.shape[:2]
        self.H, self.D = H, D
        dtypes = {y.dtype for y in (x, *others)}
        narrow = dtypes == {torch.bfloat16}
        self.processors = 0 if x.device in _no_teams else common.processors(x)
        dots = "bf16" if narrow else "fp32" if dtypes == {torch.float32} else "tf32"
        about, room = (D, dots, backward, common.arch(x), H), common.shared(x)
        self.tile = tiles(*about, launch_size("batch", self.B), self.processors, room)
        self.team = "BU" in self.tile
        self.device = x.device
        self.whole = bool(self.tile.pop("WHOLE"))
        self.grid = (H, ceil_div(self.B, self.tile["BB"]))
        self.narrow, self.through_tf32 = narrow, dots == "tf32"
        self.dot = torch.bfloat16 if narrow else torch.float32
        self.options = {"REVERSE": reverse, "DOT": tl.bfloat16 if narrow else tl.float32}
        self.options |= {"PRECISION": "tf32" if dots == "tf32" else "ieee", **self.tile}

    def operand(self, x: Tensor) -> Tensor:
        """Convert x to an operand of a dot, like `triton_common.operand`."""
        if not self.through_tf32:
            return x.to(self.dot)
        x = x.to(self.dot).contiguous()
        nearest = (x.view(torch.int32) + 0x1000) & -0x2000
        return torch.where(x.isnan(), x, nearest.view(torch.float32))

    def exchange(self, planes: int, like: Tensor) -> Tensor:
        """Return the exchange buffer of the teams, zeros: [groups of sequences, H, 2, planes, BB, BD]."""
        shape = self.grid[1], self.H, 2, planes, self.tile["BB"], self.tile["BD"]
        return like.new_zeros(shape, dtype=self.dot)

    def counters(self, like: Tensor) -> Tensor:
        """Return the counters of the teams, zeros: a cache line each."""
        return like.new_zeros(self.H * self.grid[1], 32, dtype=torch.int32)

    def launch_teams(self, kernel: Any, steps: int, *args: Any) -> None:
        """Launch as many teams at once as the device can run.

        With more, programs would wait for others that never start, so launches are cooperative. Raises TeamRefused if
        the driver refuses a launch.
        """
        parts, teams = ceil_div(self.D, self.tile["BU"]), self.H * self.grid[1]
        at_once = max(1, self.processors // parts)
        for first in range(0, teams, at_once):
            grid = (parts, min(at_once, teams - first))
            for begin in range(0, steps, AT_ONCE):
                tokens = begin, min(steps, begin + AT_ONCE)
                try:
                    kernel[grid](*args, *tokens, first, MAX_POLLS, **self.options, launch_cooperative_grid=True)
                except Exception as error:
                    if not _refusal(error):
                        raise
                    _no_teams.add(self.device)
                    raise TeamRefused(str(error)) from error


@custom_op("seqblocks::slstm_triton")
def _op(
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, recurrent: Tensor, bias: Tensor,
    y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor, resets: Tensor | None, reverse: bool, for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y [B, S, H D], the last y, c, n, m, and states and gates, which are empty unless for_backward."""
    outputs = _op_fake(i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, reverse, for_backward)
    y, y1, c1, n1, m1, *kept = outputs
    H, D = recurrent.shape[:2]
    gates = [last_contiguous(x) for x in (i, f, z, o)]
    _raise_if_late(i)
    plan = _Plan(gates[0], tuple(gates[1:]), H, D, reverse)
    matrices, bias, *state = (x.contiguous() for x in (plan.operand(recurrent), bias, y0, c0, n0, m0))
    given = (*gates, matrices, bias)
    written = (common.marks(resets), y, *(kept if for_backward else [None] * 3))
    last = (y1, c1, n1, m1)
    sizes = (plan.S, plan.B, D, *(n for x in gates for n in x.stride()[:2]))
    with common.on(i):
        if plan.whole:
            scan[plan.grid](*given, *state, *written, *last, *sizes, **plan.options)
            return outputs
        _copy(last, state)
        if plan.team:
            try:
                _launch_forward_by_team(plan, given, state[0], written, last, sizes, reverse)
                return outputs
            except TeamRefused:
                plan = _Plan(gates[0], tuple(gates[1:]), H, D, reverse)
                _copy(last, state)
        y0 = state[0] if plan.narrow else plan.operand(state[0])
        exchange = torch.stack([y0, torch.empty_like(y0)])
        scan_by_tiles[plan.grid](*given, *written, exchange, *last, *sizes, **plan.options)
    return outputs


def _copy(to: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    for x, y in zip(to, given, strict=True):
        x.copy_(y)


def _launch_forward_by_team(
    plan: _Plan, given: tuple[Tensor, ...], y0: Tensor, written: tuple[Any, ...], last: tuple[Tensor, ...],
    sizes: tuple[int, ...], reverse: bool,
) -> None:
    """Launch the forward kernel by teams. `last` holds the state before the first token. Raises TeamRefused."""
    exchange, resets = plan.exchange(1, y0), written[0]
    first = y0
    if resets is not None:
        first = y0.masked_fill(along(resets[:, -1 if reverse else 0] != 0, y0), 0.0)
    first = F.pad(first, (0, 0, 0, 0, 0, exchange.shape[0] * exchange.shape[4] - plan.B))
    first = plan.operand(first).unflatten(0, (exchange.shape[0], -1))
    exchange[:, :, 0, 0, :, : plan.D] = first.transpose(1, 2)
    plan.launch_teams(
        scan_by_team, plan.S, *given, *written, exchange, plan.counters(y0), _late_flag(given[0]), *last, *sizes[:2],
        plan.H, *sizes[2:],
    )


@_op.register_fake
def _op_fake(i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, reverse, for_backward):  # type: ignore[no-untyped-def]
    B, S, E = i.shape
    shape = (B, S, E) if for_backward else (0, 0, 0)
    narrow = torch.bfloat16 if all(x.dtype == torch.bfloat16 for x in (i, f, z, o)) else torch.float32
    last = (y0.new_empty(y0.shape) for _ in range(4))
    kept = y0.new_empty(3, *shape), y0.new_empty(2, *shape), y0.new_empty(2, *shape, dtype=narrow)
    return i.new_empty(i.shape), *last, *kept


@custom_op("seqblocks::slstm_triton_backward", outputs=10)
def _op_backward(
    dy: Tensor, dy1: Tensor, dc1: Tensor, dn1: Tensor, dm1: Tensor,
    i: Tensor, f: Tensor, z: Tensor, o: Tensor, recurrent: Tensor, bias: Tensor,
    y0: Tensor, c0: Tensor, n0: Tensor, m0: Tensor, resets: Tensor | None,
    y: Tensor, states: Tensor, gates_if: Tensor, gates_zo: Tensor, reverse: bool,
) -> list[Tensor]:
    """Return the gradients of i, f, z, o, recurrent, bias and the initial y, c, n, m."""
    H, D = recurrent.shape[:2]
    dy = last_contiguous(dy)
    _raise_if_late(i)
    plan = _Plan(i, (f, z, o), H, D, reverse, True)
    first = [x.new_empty(x.shape) for x in (y0, c0, n0, m0)]
    # Not in float16: the gradients of earlier tokens and of the weights derive from them, and could underflow.
    grads = [x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, plan.dot)) for x in (i, f, z, o)]
    resets = backward_marks([dy], [dy1, dc1, dn1, dm1], resets, reverse)
    contiguous = (x.contiguous() for x in (plan.operand(recurrent), c0, n0, m0))
    last = [x.contiguous() for x in (dy1, dc1, dn1, dm1)]
    given = (*contiguous, resets, states, gates_if, gates_zo)
    sizes = (plan.S, plan.B, D, *dy.stride()[:2])
    with common.on(i):
        if plan.team:
            _copy(first[1:], last[1:])
            try:
                plan.launch_teams(
                    scan_backward_by_team, plan.S + 1, dy, last[0], *given, *grads, plan.exchange(4, y0),
                    plan.counters(y0), _late_flag(i), *first, *sizes[:2], H, *sizes[2:],
                )
            except TeamRefused:
                plan = _Plan(i, (f, z, o), H, D, reverse, True)
        if plan.whole:
            scan_backward[plan.grid](dy, *last, *given, *grads, *first, *sizes, **plan.options)
        elif not plan.team:
            _copy(first, last)
            exchange = y0.new_empty(4, *y0.shape) if plan.through_tf32 else None
            scan_backward_by_tiles[plan.grid](dy, *given, *grads, exchange, *first, *sizes, **plan.options)
    drecurrent, dbias = _weight_gradients(plan, tuple(grads), y, y0, resets, H, reverse)
    grads = [g.to(x.dtype) for g, x in zip(grads, (i, f, z, o), strict=True)]
    return [*grads, drecurrent.to(recurrent.dtype), dbias.to(bias.dtype), *first]


def _weight_gradients(
    plan: _Plan, grads: tuple[Tensor, ...], y: Tensor, y0: Tensor, resets: Tensor | None, H: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of recurrent and bias, from those of the gates of all tokens."""
    with without_autocast(y.device.type):
        return _summed(plan, grads, y, y0, resets, H, reverse)


def _summed(
    plan: _Plan, grads: tuple[Tensor, ...], y: Tensor, y0: Tensor, resets: Tensor | None, H: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    first = y0.flatten(1).unsqueeze(1).to(y.dtype)
    before = torch.cat([y[:, 1:], first] if reverse else [first, y[:, :-1]], 1)
    if resets is not None:
        before = before.masked_fill(resets.bool().unsqueeze(-1), 0.0)
    before = before.to(plan.dot).unflatten(-1, (H, plan.D)).flatten(0, 1).transpose(0, 1)  # [H, B S, D]
    parts = []
    for g in grads:
        rows = g.to(plan.dot).unflatten(-1, (H, plan.D)).flatten(0, 1).transpose(0, 1)
        parts.append(before.transpose(1, 2) @ rows)  # [H, D, D]
    dbias = torch.stack([g.sum((0, 1), dtype=torch.float32) for g in grads]).unflatten(-1, (H, plan.D))
    return torch.stack(parts, 2), dbias


@_op_backward.register_fake
def _op_backward_fake(  # type: ignore[no-untyped-def]
    dy, dy1, dc1, dn1, dm1, i, f, z, o, recurrent, bias, y0, c0, n0, m0, resets, y, states, gates_if, gates_zo, reverse
):
    return [x.new_empty(x.shape) for x in (i, f, z, o, recurrent, bias, y0, c0, n0, m0)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[0], *(x if x.numel() else None for x in output[5:]))
    ctx.reverse = reverse
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[5:])


def _differentiate(ctx, dy, *later):  # type: ignore[no-untyped-def]
    *tensors, y, states, gates_if, gates_zo = ctx.saved_tensors
    if states is None:  # The forward pass ran with for_backward=False.
        states, gates_if, gates_zo = _op(*tensors, ctx.reverse, True)[5:]
    last = (filled(grad, like) for grad, like in zip(later[:4], tensors[6:10], strict=True))
    grads = _op_backward(filled(dy, y), *last, *tensors, y, states, gates_if, gates_zo, ctx.reverse)
    return *grads, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("slstm", "Triton"))


def run(
    gates: tuple[Tensor, Tensor, Tensor, Tensor], recurrent: Tensor, bias: Tensor, state: SLSTMState,
    resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, SLSTMState]:
    """Run the scan like `slstm_reference.run`. y has the dtype of i."""
    H, D = recurrent.shape[:2]
    if gates[0].numel() == 0:
        return implementation("slstm", "torch").run(gates, recurrent, bias, state, resets, reverse)
    tensors = (*gates, recurrent, bias, *state)
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    marks = common.marks(resets)
    y, *last = _op(*tensors, marks, reverse, for_backward)[:5]
    return y.unflatten(-1, (H, D)), SLSTMState(*last)


@common.can_unless
def _can(**facts: Any) -> str:
    if facts.get("head_dim", 1) > HEAD_MAX_CHANNELS:
        return f"heads of {facts['head_dim']} channels; at most {HEAD_MAX_CHANNELS}"
    return ""


def _tiles(
    arch: str, head_dim: int, dtype: torch.dtype = torch.bfloat16, heads: int = 1, batch: int = ROWS,
    index: int | None = None, dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    kinds = {(dtypes or {}).get(name, dtype) for name in "ifzo"}
    about = head_dim, "bf16" if kinds == {torch.bfloat16} else "fp32" if kinds == {torch.float32} else "tf32"
    processors, room = common.PROCESSORS.get(arch, 0), common.SHARED.get(arch, 0)
    if index is not None:
        processors, room = common.processors_of(index), common.shared_of(index)
        if torch.device("cuda", index) in _no_teams:
            processors = 0
    size = heads, batch, processors, room
    return {phase: tiles(*about, phase == "backward", arch, *size) for phase in ("forward", "backward")}


def _example(head_dim: int, heads: int = 1, resets: bool = False, reverse: bool = False, **facts: Any) -> Any:
    from seqblocks.kernels.slstm import slstm

    tensors = {name: normal(3, 20, heads * head_dim, seed=at) for at, name in enumerate("ifzo")}
    tensors["recurrent"] = normal(heads, head_dim, 4, head_dim, seed=4) * head_dim**-0.5
    tensors["bias"] = normal(4, heads, head_dim, seed=5)
    options: dict[str, Any] = {"reverse": reverse, "return_state": True}
    if resets:
        options["resets"] = (normal(3, 20) > 1.0).to(facts["device"])
    return slstm, tensors, options


register("slstm", "triton", run, _can, _tiles, _example)

"""Launches of the selective scan's kernels, as torch ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import few_of, launch_size, normal
from seqblocks.kernels.numerics import filled, no_second_derivative
from seqblocks.kernels.resets import backward_marks
from seqblocks.kernels.selective_scan.reference import groups_of, per_token
from seqblocks.kernels.selective_scan.triton.backward import scan_backward
from seqblocks.kernels.selective_scan.triton.forward import carry_segments, scan, scan_ends
from seqblocks.kernels.selective_scan.triton.token import of_token
from seqblocks.kernels.triton_common import ceil_div

CHUNK = 16  # tokens between saved states, twice as many if a channel has more than 16: docs/kernels/selective_scan.md
CHANNEL_MAX_STATES = 256
SCHEDULERS = 4 * 132  # of an H100 or H200; each issues instructions of one warp at a time
AT_ONCE = 16 * SCHEDULERS  # approximate number of warps of a backward launch, which limits the scratch buffers


def tiles(
    states: int, width: int, backward: bool, arch: str, constant: bool = False, resets: bool = False
) -> dict[str, int]:
    """Return the channels and states of a program (BE, BN), tokens at a time (STEPS), and warps.

    A program has one warp with 16 states per thread (8 in the backward pass on AMD GPUs). With up to 16 states, a
    thread has a channel of its own; only sums over more states and, in the backward pass, over channels cross threads.
    With two tokens at a time, the backward pass writes half as many states. On sm_90 there are enough registers for
    this unless B or C is `constant` or, with Triton 3.6, there are 32 states.
    """
    BN = common.power_of_two(states)
    lanes = common.lanes(arch)
    each = 8 if backward and arch.startswith("gfx") else 16
    most = each * lanes // BN
    BE = min(common.power_of_two(width), max(8, min(lanes, most)) if backward else max(1, min(2 * lanes, most)))
    if backward and BN == 32 and width % BE:
        BE = min(BE, 8)  # Masks of an incomplete block take registers too.
    if backward and resets and arch.startswith("gfx"):
        BE = min(BE, 16)  # Marks take registers too.
    num_warps = common.warps(BE * BN, each, lanes) if backward else 1
    few = BN > 128 or BN == 32 or constant or arch.startswith(("sm_8", "gfx")) if backward else BN > 16
    steps = 1 if few else 2
    return {"BE": BE, "BN": BN, "STEPS": steps, "num_warps": num_warps}


def chunk(states: int) -> int:
    """Return the tokens between saved states. In the backward pass, the scratch of a program has those of one chunk."""
    return CHUNK if states <= 16 else 2 * CHUNK


def _each(arch: str, resets: bool, even: bool, BN: int) -> int:
    """Return the elements per thread of a tile of tokens and channels.

    It is four at most. Marks of resets, masks of an incomplete block and many states leave fewer registers; the
    compiler needs fewer for sm_90.
    """
    tight = (BN == 32) + (not even) + resets
    if arch.startswith("sm_8"):
        return 4 if tight == 0 or (BN == 32 and tight == 1) else 2 if tight == 1 else 1
    return 2 if BN == 32 and not even and not arch.startswith("gfx") else 4


def scratch_of(BE: int, BN: int, STEPS: int, num_warps: int) -> int:
    """Return the number of elements in the scratch buffer of a program of the backward pass.

    For the current chunk it has six values per token and channel, B and C, and the state before every STEPS tokens.
    """
    L = chunk(BN)
    return 6 * L * BE + 2 * L * BN + L // STEPS * BE * BN


def _summing(arch: str, B: Tensor, C: Tensor, tile: dict[str, int]) -> tuple[str | None, int]:
    """Return the arguments DOT and COLUMNS of `_store_sums`."""
    if tile["BE"] < 16 or tile["BN"] < 16:
        return None, 1
    if arch.startswith("gfx"):
        return "ieee", 16
    # "tf32" truncates, always towards zero, with a relative error of up to 2^-10. That is small compared to rounding dB
    # and dC to bfloat16 (up to 2^-8), but larger than the rounding error of float16 (2^-11).
    return ("tf32" if B.dtype == C.dtype == torch.bfloat16 else "twice"), 8


def segments(warps: int, S: int, backward: bool) -> int:
    """Return the number of segments of a sequence: 1 if each scheduler of a large GPU has more than one warp.

    A warp that is alone on its scheduler waits for its own results: about 1.8 times as long as it takes to issue its
    instructions in the forward pass, and 2.3 times in the backward pass. The warps of other segments can be issued
    meanwhile. There are as many segments as registers allow a scheduler to hold, three forward and two backward. They
    cost an additional scan, 0.7 of the forward instructions and 0.26 of the backward ones. No segment is shorter than
    128 tokens.
    """
    most = (2 if backward else 3) * SCHEDULERS // max(1, warps)
    return 1 if warps > SCHEDULERS else max(1, min(most, S // 128))


def _sizes(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[int, int, int, int, int]:
    """Return S, E, N, the number of groups, and the channels of a group."""
    groups = groups_of(B, C)
    return u.shape[1], *A.shape, groups, u.shape[2] // groups


def _laid_out(*tensors: Any) -> list[Any]:
    """Return parameters and constants contiguous, and the other tensors with the last axis contiguous."""
    far = 4 * CHUNK  # a chunk, and the tokens loaded ahead
    return [None if x is None else common.near(x, far) if x.dim() > 2 else x.contiguous() for x in tensors]


def _strides(*tensors: Tensor | None) -> list[int | None]:
    """Return the strides over batch and tokens of [B, S, E], and also over groups of [B, S, G, N].

    For constant tensors they are None, for absent ones 0.
    """
    out: list[int | None] = []
    for x in tensors:
        if x is None:
            out += [0, 0]
        else:
            out += [*x.stride()[:-1]] if x.dim() > 2 else [None] * 3
    return out


def _segments_for(
    tile: dict[str, int], batch: int, length: int, groups: int, width: int, backward: bool
) -> int:
    sizes = (launch_size(*of) for of in (("batch", batch), ("length", length), ("groups", groups), ("width", width)))
    batch, length, groups, width = sizes
    return segments(batch * groups * ceil_div(width, tile["BE"]) * tile["num_warps"], length, backward)


class _Segments:
    """The segments of a launch: their number K per sequence, their length L, and the grid."""

    def __init__(
        self, u: Tensor, A: Tensor, groups: int, W: int, tile: dict[str, int], backward: bool, K: int = 0
    ) -> None:
        self.batch, self.S, self.E = u.shape
        self.N, self.W, self.tile = A.shape[1], W, tile
        self.even = W % tile["BE"] == 0 and tile["BN"] == self.N
        programs = groups * ceil_div(W, tile["BE"])
        K = K or _segments_for(tile, self.batch, self.S, groups, W, backward)
        # Segments consist of whole chunks, because states are saved at the start of chunks.
        self.chunk = chunk(self.N)
        self.L = self.chunk * ceil_div(ceil_div(self.S, K), self.chunk)
        self.K = ceil_div(self.S, self.L)
        self.grid = (self.batch * self.K, programs)

    def starts(
        self, given: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, w: Tensor, z: Tensor | None, bias: Tensor | None,
        resets: Tensor | None, softplus: bool, reverse: bool, back: bool,
    ) -> Tensor:
        """Return the initial state [B K, N, E] of each segment, by launching `scan_ends` and `carry_segments`."""
        ends, starts = (A.new_empty(self.batch * self.K, self.N, self.E) for _ in range(2))
        sums = A.new_empty(self.batch * self.K, self.E)
        broken = None if resets is None else A.new_empty(self.batch * self.K, dtype=torch.int32)
        scan_ends[self.grid](
            x, dt, A.t().contiguous(), w, z, bias, resets, ends, sums, broken,
            self.S, self.K, self.L, self.E, self.N, self.W, 0, *_strides(x, dt, w, z),
            SOFTPLUS=softplus, REVERSE=reverse, BACK=back, EVEN=self.even, CHUNK=self.chunk, **self.tile,
        )
        tile = {"BE": min(32, common.power_of_two(self.E)), "BN": self.tile["BN"]}
        carry_segments[self.batch, ceil_div(self.E, tile["BE"])](
            given, A, ends, sums, broken, starts, self.K, self.E, self.N, BACK=back,
            num_warps=common.warps(tile["BE"] * tile["BN"], 16), **tile,
        )
        return starts


@custom_op("seqblocks::selective_scan_triton")
def _op(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None,
    h0: Tensor | None, resets: Tensor | None, softplus: bool, reverse: bool, for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last state, and the states between chunks: [B, chunks, E, N] flattened, or empty.

    The latter are empty unless for_backward.
    """
    if u.shape[1] == 1 and not for_backward and resets is None and B.dim() == C.dim() == 4:
        return *of_token(u, dt, A, B, C, D, z, bias, h0, softplus), A.new_empty(0)
    if u.shape[1] > 1:  # In each program, the conversion would take three instructions for two elements.
        B, C = B.float(), C.float()
    u, dt, A, B, C, D, z, bias = _laid_out(u, dt, A, B, C, D, z, bias)
    S, E, N, groups, W = _sizes(u, A, B, C)
    y, last, between = _op_fake(u, dt, A, B, C, D, z, bias, h0, resets, softplus, reverse, for_backward)
    h0, resets = None if h0 is None else h0.contiguous(), common.marks(resets)
    tile = tiles(N, W, False, common.arch(u))
    with common.on(u):
        cut = _Segments(u, A, groups, W, tile, False)
        if cut.K > 1:
            starts: Tensor | None = cut.starts(h0, u, dt, A, B, None, bias, resets, softplus, reverse, False)
        else:
            starts = None if h0 is None else h0.transpose(1, 2).contiguous()
        scan[cut.grid](
            u, dt, A.t().contiguous(), B, C, D, z, bias, starts, resets, y, last, between if for_backward else None,
            S, cut.K, cut.L, E, N, W, 0, *_strides(u, dt, B, C, z),
            SOFTPLUS=softplus, REVERSE=reverse, EVEN=cut.even, CHUNK=cut.chunk, **tile,
        )
    return y, last, between


@_op.register_fake
def _op_fake(u, dt, A, B, C, D, z, bias, h0, resets, softplus, reverse, for_backward):  # type: ignore[no-untyped-def]
    chunks = ceil_div(u.shape[1], chunk(A.shape[1])) if for_backward else 0
    return u.new_empty(u.shape), A.new_empty(u.shape[0], *A.shape), A.new_empty(u.shape[0] * chunks * A.numel())


def _ends_of_segments(
    cut: _Segments, groups: int, W: int, dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, A: Tensor, C: Tensor,
    z: Tensor | None, bias: Tensor | None, resets: Tensor | None, softplus: bool, reverse: bool,
) -> Tensor | None:
    """Return the gradient of the state after each segment, [B K, N, E]; None for zeros."""
    if cut.K == 1:
        return None if dlast is None else dlast.transpose(1, 2).contiguous()
    # This scan is like the forward pass, and is launched with the same tiles.
    forward = tiles(A.shape[1], W, False, common.arch(u))
    ahead = _Segments(u, A, groups, W, forward, True, cut.K)
    return ahead.starts(dlast, dy, dt, A, C, z, bias, resets, softplus, reverse, True)


def _backward_options(
    arch: str, tile: dict[str, int], even: bool, resets: Tensor | None, B: Tensor, C: Tensor
) -> dict[str, Any]:
    """Return how a program sums, and how many tokens it processes at a time where these are independent."""
    numbers = _each(arch, resets is not None, even, tile["BN"]) * common.lanes(arch) * tile["num_warps"]
    dot, columns = _summing(arch, B, C, tile)
    L = chunk(tile["BN"])
    rows, lines = min(L // 2, max(1, numbers // tile["BE"])), min(L, max(1, numbers // tile["BN"]))
    return {"DOT": dot, "COLUMNS": columns, "ROWS": rows, "LINES": lines, "SCRATCH": scratch_of(**tile), **tile}


@custom_op("seqblocks::selective_scan_triton_backward", outputs=9)
def _op_backward(
    dy: Tensor, dlast: Tensor | None, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None,
    z: Tensor | None, bias: Tensor | None, between: Tensor, resets: Tensor | None, softplus: bool, reverse: bool,
) -> list[Tensor]:
    """Return the gradients of u, dt, A, B, C, D, z, bias and the initial state; empty for those that are absent."""
    dy, u, dt, A, B, C, D, z, bias = _laid_out(dy, u, dt, A, B, C, D, z, bias)
    resets = backward_marks([dy], [dlast], resets, reverse)
    dlast = None if dlast is None else dlast.contiguous()
    S, E, N, groups, W = _sizes(u, A, B, C)
    batch = u.shape[0]

    def parts(*shape: int, of: Tensor | None = A) -> Tensor:
        return A.new_empty(shape if of is not None else 0)

    dh0 = parts(batch, E, N)
    du, ddt = (x.new_empty(x.shape) for x in (u, dt))
    dz = A.new_empty(0) if z is None else z.new_empty(z.shape)
    kept = ceil_div(S, chunk(N)) * E * N  # elements of a sequence
    tile = tiles(N, W, True, common.arch(u), 2 in (B.dim(), C.dim()), resets is not None)
    with common.on(u):
        cut = _Segments(u, A, groups, W, tile, True)
        ends = _ends_of_segments(cut, groups, W, dy, dlast, u, dt, A, C, z, bias, resets, softplus, reverse)
        transposed = A.t().contiguous()
        K, programs = cut.K, cut.grid[1]
        rows, even = batch * K, W % tile["BE"] == 0
        options = _backward_options(common.arch(u), tile, even, resets, B, C)
        dA, (dD, dbias) = parts(rows, E, N), (parts(rows, E, of=x) for x in (D, bias))
        constants = [parts(rows, E, N, of=x if x.dim() == 2 else None) for x in (B, C)]
        most = ceil_div(AT_ONCE, K * programs * tile["num_warps"])  # sequences per launch

        def walk(first: int) -> list[Tensor]:
            """Launch for up to `most` sequences, from `first` on. Return their parts of dB and dC."""
            count = min(most, batch - first)

            def some(x: Any, each: int = 1) -> Any:
                return x if x is None or count == batch else x[first * each : (first + count) * each]

            B_, C_ = (x if x.dim() == 2 else some(x) for x in (B, C))
            added = [
                some(of, K) if x.dim() == 2 else parts(programs // groups, count, S, groups, N)
                for x, of in zip((B, C), constants, strict=True)
            ]
            scan_backward[count * K, programs](
                some(dy), some(ends, K), some(u), some(dt), transposed, B_, C_, D, some(z), bias, some(between, kept),
                some(resets), parts(count * K * programs, options["SCRATCH"]),
                some(du), some(ddt), some(dA, K), *added, some(dD, K), some(dz), some(dbias, K), some(dh0),
                S, K, cut.L, E, N, W, 0, *_strides(dy, u, dt, B, C, z),
                SOFTPLUS=softplus, REVERSE=reverse, EVEN=even, CHUNK=cut.chunk, **options,
            )
            return [part if x.dim() == 2 else part.sum(0) for x, part in zip((B, C), added, strict=True)]

        walks = [walk(first) for first in range(0, batch, most)]
        dB, dC = walks[0] if len(walks) == 1 else map(torch.cat, zip(*walks, strict=True))
        dB, dC = (part.sum(0) if x.dim() == 2 else part for x, part in ((B, dB), (C, dC)))
        dD, dbias = (part if x is None else part.sum(0) for x, part in ((D, dD), (bias, dbias)))
    grads = du, ddt, dA.sum(0), dB, dC, dD, dz, dbias, dh0
    like = (u, dt, A, B, C, D, z, bias, None)
    return [x if of is None else x.to(of.dtype) for x, of in zip(grads, like, strict=True)]


@_op_backward.register_fake
def _op_backward_fake(dy, dlast, u, dt, A, B, C, D, z, bias, between, resets, softplus, reverse):  # type: ignore[no-untyped-def]
    of = (u, dt, A, B, C, D, z, bias)
    grads = [A.new_empty(0) if x is None else x.new_empty(x.shape) for x in of]
    return [*grads, A.new_empty(u.shape[0], *A.shape)]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, h0, resets, softplus, reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[2] if output[2].numel() else None, resets, h0)
    ctx.flags = softplus, reverse
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, dy, dlast, _):  # type: ignore[no-untyped-def]
    *tensors, between, resets, h0 = ctx.saved_tensors
    if between is None:  # The forward pass ran with for_backward=False.
        between = _op(*tensors, h0, resets, *ctx.flags, True)[2]
    grads = _op_backward(filled(dy, tensors[0]), dlast, *tensors, between, resets, *ctx.flags)
    present = [None if x is None else g for x, g in zip((*tensors, h0), grads, strict=True)]
    return *present, None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("selective_scan", "Triton"))


def _for_each_group(x: Tensor, shape: torch.Size, groups: int) -> Tensor:
    """Return a matrix as [B, S, G, N].

    If groups share it, it is repeated in float32, so that its gradient, a sum over these groups, is rounded only once.
    """
    shared = groups > (x.shape[2] if x.dim() == 4 else 1)
    return per_token(x.float() if shared else x, shape, groups)


def run(
    u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None,
    dt_bias: Tensor | None, softplus: bool, state: Tensor | None, resets: Tensor | None, reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run `selective_scan` with skip and gate. Returns y in the dtype of u, and the last state."""
    h0 = None if state is None else state.float()
    if u.numel() == 0:
        torch_run = implementation("selective_scan", "torch").run
        return torch_run(u, dt, A, B, C, D, z, dt_bias, softplus, state, resets, reverse)
    B, C = (x if x.dim() == 2 else _for_each_group(x, u.shape, groups_of(B, C)) for x in (B, C))
    for_backward = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (u, dt, A, B, C, D, z, dt_bias, state)
    )
    y, last, _ = _op(u, dt, A.float(), B, C, D, z, dt_bias, h0, common.marks(resets), softplus, reverse, for_backward)
    return y, last


@common.can_unless
def _can(**facts: Any) -> str:
    if facts.get("complex"):
        return "complex A: only supported by the reference implementation"
    if facts.get("states", 1) > CHANNEL_MAX_STATES:
        return f"{facts['states']} states of a channel; at most {CHANNEL_MAX_STATES}"
    return ""


def _tiles(
    arch: str, states: int, width: int, batch: int = 0, length: int = 1, groups: int = 1,
    constant: tuple[bool, bool] = (False, False), resets: bool = False, **facts: Any,
) -> dict[str, dict[str, int]]:
    kinds = any(constant), resets
    found = {way: tiles(states, width, way == "backward", arch, *kinds) for way in ("forward", "backward")}
    if not batch:
        return found
    sizes = batch, length, groups, width
    cut = {way: _segments_for(tile, *sizes, way == "backward") > 1 for way, tile in found.items()}
    return {way: {**tile, "SEGMENTS": int(cut[way])} for way, tile in found.items()}


def _example(
    states: int, width: int, groups: int = 1, constant: tuple[bool, bool] = (False, False), softplus: bool = False,
    resets: bool = False, reverse: bool = False, token: bool = False, **facts: Any,
) -> Any:
    from seqblocks.kernels.selective_scan import selective_scan

    G = min(groups, 2)
    E, S = G * few_of(width, 64), 1 if token else 70
    per_token = (2, S, G, states) if groups > 1 else (2, S, states)
    B, C = ((E, states) if of else per_token for of in constant)
    shapes = {"u": (2, S, E), "dt": (2, S, E), "z": (2, S, E), "B": B, "C": C, "D": (E,), "dt_bias": (E,)}
    shapes["state"] = (2, E, states)
    tensors = {name: normal(*shape, seed=at) for at, (name, shape) in enumerate(shapes.items())}
    tensors |= {"A": -normal(E, states, seed=7).exp(), "dt": tensors["dt"].abs(), "dt_bias": tensors["dt_bias"].abs()}
    options: dict[str, Any] = {"reverse": reverse, "return_state": True, "dt_softplus": softplus}
    if resets:
        options["resets"] = (normal(2, S) > 1.5).to(facts["device"])
    return selective_scan, tensors, options


register("selective_scan", "triton", run, _can, _tiles, _example)

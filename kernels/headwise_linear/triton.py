"""The block-diagonal map in Triton, for blocks of few channels: two methods, each with one launch forward and backward.

For 16-bit dtypes, a program joins the blocks of up to 64 channels to one matrix padded with zeros, and multiplies by it
on the matrix units: most products are with zeros, but the time is still limited by memory. Otherwise a program
processes a tile of BT tokens and BC output channels, and sums over the I inputs of each channel's block with I loads,
which hit the cache.

In the backward pass, the gradient of the input is the same map with transposed blocks. The gradient of the weight is
stored as partial sums, one for several tiles of tokens, and added afterwards. Products are summed in float32.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.dispatch import implementation, register
from seqblocks.kernels.dispatch.custom_op import custom_op
from seqblocks.kernels.dispatch.self_check import launch_size, normal
from seqblocks.kernels.numerics import autocast_dtype, no_second_derivative
from seqblocks.kernels.triton_common import ceil_div, jit, last_contiguous, tl

BLOCK = 16  # The most input or output channels of a block: for wider ones, batched matrix products are faster.
PROGRAM_MAX_TILES = 4  # of tokens, in the backward pass. With wide blocks it is 1, because registers would spill.
PROGRAMS = 64  # With fewer programs along the tokens, each processes only one tile.


# ------------------------------------------------------------------------------
# The kernels.   x [R, G * I], y [R, G * O], w [G, O, I]; xs, gs: row strides of x and dy.


@jit
@no_type_check
def _product(
    x, w, r, c, R, C, xs, P: tl.constexpr, Q: tl.constexpr, SP: tl.constexpr, SQ: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):
    """Return [BT, BC], whose channel c = g P + p is the sum over q of w[g P Q + p SP + q SQ] x[g Q + q]."""
    total = tl.zeros((BT, BC), tl.float32)
    block = c // P
    mask = (r < R)[:, None] & (c < C)[None, :]
    for q in tl.static_range(Q):
        weight = tl.load(w + block * (P * Q) + c % P * SP + q * SQ, c < C, 0.0).to(tl.float32)
        value = tl.load(x + r[:, None] * xs + (block * Q + q)[None, :], mask, 0.0).to(tl.float32)
        total += weight[None, :] * value
    return total


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _linear(x, w, y, R, G, xs, I: tl.constexpr, O: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    out = _product(x, w, r, c, R, G * O, xs, O, I, I, 1, BT, BC)
    mask = (r < R)[:, None] & (c < G * O)[None, :]
    tl.store(y + r[:, None] * (G * O) + c[None, :], out.to(y.dtype.element_ty), mask)


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _linear_backward(
    dy, x, w, dx, dw, R, G, gs, xs, I: tl.constexpr, O: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute gradients. Partial sums: dw [programs, G, O, I].

    A program processes the same channel indices of x and dy. It loops over several tiles of tokens before it sums over
    its threads, because that sum is a third of the work.
    """
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    sums = ()
    for _ in tl.static_range(I):
        sums = sums + (tl.zeros((BT, BC), tl.float32),)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        grad = _product(dy, w, r, c, R, G * I, gs, I, O, 1, I, BT, BC)
        inside = (r < R)[:, None] & (c < G * I)[None, :]
        tl.store(dx + r[:, None] * (G * I) + c[None, :], grad.to(dx.dtype.element_ty), inside)
        mask = (r < R)[:, None] & (c < G * O)[None, :]
        g = tl.load(dy + r[:, None] * gs + c[None, :], mask, 0.0).to(tl.float32)
        added = ()
        for i in tl.static_range(I):
            value = tl.load(x + r[:, None] * xs + (c // O * I + i)[None, :], mask, 0.0).to(tl.float32)
            added = added + (sums[i] + g * value,)
        sums = added
    part = dw + (tl.program_id(0).to(tl.int64) * (G * O) + c) * I
    for i in tl.static_range(I):
        tl.store(part + i, tl.sum(sums[i], 0), c < G * O)


# For 16-bit dtypes, the blocks of up to 64 channels are joined to one matrix padded with zeros, because matrix units
# are so fast that the products with zeros do not matter.


@jit
@no_type_check
def _matrix(w, g, G, down, across, P: tl.constexpr, Q: tl.constexpr, SP: tl.constexpr, SQ: tl.constexpr):
    """Load blocks g, g + 1, ... as one block-diagonal matrix.

    Element (p, q) of a block is w[block P Q + p SP + q SQ].
    """
    block = down // P
    own = (block[:, None] == (across // Q)[None, :]) & (g + block < G)[:, None]
    at = (g + block) * (P * Q) + down % P * SP
    return tl.load(w + at[:, None] + (across % Q * SQ)[None, :], own, 0.0)


@jit
@no_type_check
def _rows(x, r, c, R, C, xs):
    return tl.load(x + r[:, None] * xs + c[None, :], (r < R)[:, None] & (c < C)[None, :], 0.0)


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _linear_dot(
    x, w, y, R, G, xs, I: tl.constexpr, O: tl.constexpr, BLOCKS: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
    BT: tl.constexpr, TILES: tl.constexpr,
):
    g = tl.program_id(1) * BLOCKS
    i, o = tl.arange(0, BI), tl.arange(0, BO)
    inputs, outputs = tl.minimum(g + BLOCKS, G) * I, tl.minimum(g + BLOCKS, G) * O
    matrix = _matrix(w, g, G, i, o, I, O, 1, I)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        out = tl.dot(_rows(x, r, g * I + i, R, inputs, xs), matrix)
        to = y + r[:, None] * (G * O) + (g * O + o)[None, :]
        tl.store(to, out.to(y.dtype.element_ty), (r < R)[:, None] & (g * O + o < outputs)[None, :])


@common.kernel(do_not_specialize=["R"])
@no_type_check
def _linear_dot_backward(
    dy, x, w, dx, dw, R, G, gs, xs, I: tl.constexpr, O: tl.constexpr, BLOCKS: tl.constexpr, BI: tl.constexpr,
    BO: tl.constexpr, BT: tl.constexpr, TILES: tl.constexpr,
):
    """Compute gradients. Partial sums: dw [programs, G, O, I], the diagonal blocks of the whole product."""
    g = tl.program_id(1) * BLOCKS
    i, o = tl.arange(0, BI), tl.arange(0, BO)
    inputs, outputs = tl.minimum(g + BLOCKS, G) * I, tl.minimum(g + BLOCKS, G) * O
    matrix = _matrix(w, g, G, o, i, O, I, I, 1)
    part = tl.zeros((BO, BI), tl.float32)
    for tile in range(TILES):
        r = (tl.program_id(0).to(tl.int64) * TILES + tile) * BT + tl.arange(0, BT)
        grads = _rows(dy, r, g * O + o, R, outputs, gs)
        out = tl.dot(grads, matrix)
        to = dx + r[:, None] * (G * I) + (g * I + i)[None, :]
        tl.store(to, out.to(dx.dtype.element_ty), (r < R)[:, None] & (g * I + i < inputs)[None, :])
        turned = tl.load(
            dy + r[None, :] * gs + (g * O + o)[:, None], (r < R)[None, :] & (g * O + o < outputs)[:, None], 0.0
        )
        part += tl.dot(turned, _rows(x, r, g * I + i, R, inputs, xs))
    own = ((o // O)[:, None] == (i // I)[None, :]) & (g * O + o < outputs)[:, None] & (o < BLOCKS * O)[:, None]
    to = dw + ((tl.program_id(0).to(tl.int64) * G + g + o // O) * O + o % O)[:, None] * I + (i % I)[None, :]
    tl.store(to, part, own)


# ------------------------------------------------------------------------------
# Launching


def dot_tiles(blocks: tuple[int, int, int], rows: int) -> dict[str, int]:
    """Return the blocks joined to one matrix, its dimensions, the tokens of a product, and products per program."""
    G, O, I = blocks
    many = max(1, min(G, 64 // max(O, I)))
    BI, BO = (max(16, common.power_of_two(many * n)) for n in (I, O))
    TILES = PROGRAM_MAX_TILES if launch_size("rows", rows) >= PROGRAMS * PROGRAM_MAX_TILES * 64 else 1
    return {"BLOCKS": many, "BI": BI, "BO": BO, "BT": 64, "TILES": TILES, "num_warps": 4, "num_stages": 2}


def tiles(width: int, arch: str) -> dict[str, int]:
    """Return the tokens and channels of a program, and its warps."""
    BC = min(common.power_of_two(width), 64)
    BT = 2048 // BC
    return {"BT": BT, "BC": BC, "num_warps": common.warps(BT * BC, 8)}


def _tiles_of_a_program(I: int, rows: int, tile: dict[str, int]) -> int:
    return PROGRAM_MAX_TILES if I <= 8 and launch_size("rows", rows) >= PROGRAMS * PROGRAM_MAX_TILES * tile["BT"] else 1


def _narrow(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)


@custom_op("seqblocks::headwise_linear_triton")
def _op(x: Tensor, weight: Tensor) -> Tensor:
    """Apply weight [G, O, I] to x [R, G * I] and return [R, G * O]."""
    G, O, I = weight.shape
    x, weight = last_contiguous(x), weight.contiguous()
    y = _op_fake(x, weight)
    R = x.shape[0]
    tile = dot_tiles((G, O, I), R) if _narrow(x, weight) else tiles(G * O, common.arch(x))
    with common.on(x):
        if "TILES" in tile:
            _linear_dot[ceil_div(R, tile["BT"] * tile["TILES"]), ceil_div(G, tile["BLOCKS"])](
                x, weight, y, R, G, x.stride(0), I=I, O=O, **tile
            )
        else:
            _linear[ceil_div(R, tile["BT"]), ceil_div(G * O, tile["BC"])](
                x, weight, y, R, G, x.stride(0), I=I, O=O, **tile
            )
    return y


@_op.register_fake
def _op_fake(x, weight):  # type: ignore[no-untyped-def]
    width = weight.shape[0] * weight.shape[1]
    return x.new_empty(x.shape[0], width, dtype=torch.promote_types(x.dtype, weight.dtype))


@custom_op("seqblocks::headwise_linear_triton_backward")
def _op_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight."""
    G, O, I = weight.shape
    dy, x, weight = last_contiguous(dy), last_contiguous(x), weight.contiguous()
    R, width = x.shape[0], G * max(O, I)
    dx = x.new_empty(x.shape)
    narrow = _narrow(x, weight) and dy.dtype == x.dtype
    tile = dot_tiles((G, O, I), R) if narrow else tiles(width, common.arch(x))
    with common.on(x):
        many = tile.get("TILES") or _tiles_of_a_program(I, R, tile)
        programs = ceil_div(R, tile["BT"] * many)
        dw = x.new_empty(programs, G, O, I, dtype=torch.float32)
        given = (dy, x, weight, dx, dw, R, G, dy.stride(0), x.stride(0))
        if "TILES" in tile:
            _linear_dot_backward[programs, ceil_div(G, tile["BLOCKS"])](*given, I=I, O=O, **tile)
        else:
            _linear_backward[programs, ceil_div(width, tile["BC"])](*given, I=I, O=O, TILES=many, **tile)
    return dx, dw.sum(0).to(weight.dtype)


@_op_backward.register_fake
def _op_backward_fake(dy, x, weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, dy):  # type: ignore[no-untyped-def]
    return _op_backward(dy, *ctx.saved_tensors)


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("headwise_linear", "Triton"))


def run(x: Tensor, weight: Tensor) -> Tensor:
    """Run `headwise_linear` without a bias. Autocast applies to the operands, as for a matrix product."""
    narrow = autocast_dtype(x.device.type)
    if narrow is not None:
        x, weight = x.to(narrow), weight.to(narrow)
    G, O, _ = weight.shape
    if x.numel() == 0:
        return implementation("headwise_linear", "torch").run(x, weight)
    y = _op(x.reshape(-1, x.shape[-1]), weight)
    return y.view(*x.shape[:-1], G * O)


@common.can_unless
def _can(**facts: Any) -> str:
    if max(facts.get("block", (1, 1, 1))[1:]) > BLOCK:
        return f"blocks of more than {BLOCK} channels: torch's own matrix products are faster"
    return ""


def _tiles(
    arch: str, block: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, rows: int | None = None,
    dtypes: dict[str, Any] | None = None, **facts: Any,
) -> dict[str, dict[str, int]]:
    G, O, I = block
    kinds = {dtype} if dtypes is None else {dtypes["x"], dtypes["weight"]}
    if len(kinds) == 1 and torch.float32 not in kinds:
        return dict.fromkeys(("forward", "backward"), dot_tiles(block, 1 << 20 if rows is None else rows))
    backward = tiles(G * max(O, I), arch)
    many = {} if rows is None else {"TILES": _tiles_of_a_program(I, rows, backward)}
    return {"forward": tiles(G * O, arch), "backward": {**backward, **many}}


def _example(block: tuple[int, int, int], **facts: Any) -> Any:
    from seqblocks.kernels.headwise_linear import headwise_linear

    G, O, I = block
    return headwise_linear, {"x": normal(70, G * I), "weight": normal(G, O, I, seed=1), "bias": normal(G * O)}, {}


register("headwise_linear", "triton", run, _can, _tiles, _example)

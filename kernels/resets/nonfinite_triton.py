"""Keep NaN and infinities within their sequence in Triton's chunkwise kernels, without waiting for the device.

These launches do what `nonfinite.py` does with operations of torch. One searches all inputs and sets a flag on the
device; the others return at once unless it is set: copies with zeros for nonfinite values, which the kernels read in
place of the inputs, and NaN for the results that depend on such values.

`faults` is a tensor of bytes:

    [16]        the flag, in the first byte
    [N, S]      the tokens, N = B HV heads. Forward: nonfinite inputs, and after `spread` the outputs that depend on
                them. Backward: gradients that are undefined there, before that spreads to what they depend on
    [N]         the initial states, backward the last ones
    [B, S]      forward: a copy of the resets
"""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels import triton_common as common
from seqblocks.kernels.triton_common import ceil_div, constexpr, jit, tl, token_strides

Maybe = Tensor | None
FIRST = 16  # bytes of the flag
FINITE, BELOW_INF, NOT_NAN = constexpr(0), constexpr(1), constexpr(2)  # what values of a tensor have to be
TOKENS, CELLS = 32, 4096  # of a program: tokens of a head, values of a state
ONE_WARP = 1  # which reads marks before it overwrites them


# ------------------------------------------------------------------------------
# What other kernels use


@jit
@no_type_check
def chosen(x, clean, faults):
    """Return the tensor to read: x, or, if any input is not finite, its clean copy.

    For a choice between two arguments, compilers may load an argument from an address in a register.
    """
    if clean is None:
        return x
    else:
        SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
        distance = (clean.to(tl.int64) - x.to(tl.int64)) // SIZE  # see `twins`
        return x + tl.multiple_of(distance * tl.load(faults).to(tl.int64), [16])


@jit
@no_type_check
def finite(x, faults):
    """Return x with zeros for nonfinite values, or without resets x itself."""
    if faults is None:
        return x
    else:
        return tl.where(is_fault(x, FINITE), 0.0, x)


# ------------------------------------------------------------------------------
# Kernels


@jit
@no_type_check
def is_fault(x, KIND: tl.constexpr):
    x = x.to(tl.float32)
    if KIND == FINITE:
        return (tl.abs(x) < float("inf")) == 0
    elif KIND == BELOW_INF:
        return (x < float("inf")) == 0
    else:
        return x != x


@jit
@no_type_check
def _rows(x, n, t, H, xb, xs, xh):
    """Return pointers to tokens t of head n of H."""
    return x + (n // H).to(tl.int64) * xb + (n % H).to(tl.int64) * xh + t.to(tl.int64) * xs


@jit
@no_type_check
def _faults_of(
    x, n, t, is_t, H, xb, xs, xh, D: tl.constexpr, KIND: tl.constexpr, NONZERO: tl.constexpr, BD: tl.constexpr
):
    """Return which tokens [BT] have a fault among their D features, and, if NONZERO, which have a nonzero feature."""
    B: tl.constexpr = 1 if D == 1 else BD
    found = tl.zeros((t.shape[0], B), tl.int32)
    nonzero = tl.zeros((t.shape[0], B), tl.int32)
    rows = _rows(x, n, t, H, xb, xs, xh)
    for first in range(0, D, B):
        d = first + tl.arange(0, B)
        values = tl.load(rows[:, None] + d[None, :], is_t[:, None] & (d < D)[None, :], 0.0)
        found |= is_fault(values, KIND).to(tl.int32)
        if NONZERO:
            nonzero |= (values.to(tl.float32) != 0.0).to(tl.int32)
    return tl.max(found, 1), tl.max(nonzero, 1)


@jit
@no_type_check
def _faults_of_state(x, n, block, SIZE: tl.constexpr, CELLS: tl.constexpr):
    """Return whether a block of a state [N, SIZE] has a fault, and whether it has a nonzero value."""
    cell = block * CELLS + tl.arange(0, CELLS)
    values = tl.load(x + n.to(tl.int64) * SIZE + cell, cell < SIZE, 0.0)
    return tl.max(is_fault(values, FINITE).to(tl.int32), 0), tl.max((values != 0.0).to(tl.int32), 0)


@jit
@no_type_check
def _faults_of_states(C, n, m, at, block, K: tl.constexpr, V: tl.constexpr, CELLS: tl.constexpr):
    """Return the same for a block of C and, with the first, all of n and m, which may be None."""
    found, nonzero = _faults_of_state(C, at, block, K * V, CELLS)
    if n is not None:
        if block == 0:
            for part in range((K + CELLS - 1) // CELLS):
                more, other = _faults_of_state(n, at, part, K, CELLS)
                found |= more
                nonzero |= other
            more, other = _faults_of_state(m, at, 0, 1, 1)
            found |= more
            nonzero |= other
    return found, nonzero


@jit
@no_type_check
def _search_states(
    program, C, n, m, outputs, flag, faults, S, N, K: tl.constexpr, V: tl.constexpr, last, CELLS: tl.constexpr
):
    """Mark the state of a head if a block of it has a fault, or, with `outputs`, a nonzero gradient of a fault."""
    BLOCKS: tl.constexpr = (K * V + CELLS - 1) // CELLS
    head = program // BLOCKS
    found, nonzero = _faults_of_states(C, n, m, head, program % BLOCKS, K, V, CELLS)
    if outputs is not None:
        found |= nonzero & tl.load(outputs + head.to(tl.int64) * S + last).to(tl.int32)
    if found != 0:
        tl.store(faults + tl.cast(N, tl.int64) * S + head, 1)
        tl.store(flag, 1)


@common.kernel(do_not_specialize=["S", "N"])
@no_type_check
def search(
    q, k, v, g, x, C, n, m, resets, flag, faults, marks,
    S, N, H, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, xb, xs, xh,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, KIND_G: tl.constexpr, KIND_X: tl.constexpr, GROUP: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, CELLS: tl.constexpr,
):
    """Find faults in the inputs: a program per tile of tokens of a head, and then one per block of a state.

    g, x: gates of a token, W of g and one of x; KIND_G and KIND_X say what they have to be. marks: memory for a copy of
    the resets.
    """
    tiles = tl.cdiv(S, BT)
    program = tl.program_id(0)
    if program < N * tiles:
        head = program // tiles
        t = program % tiles * BT + tl.arange(0, BT)
        is_t = t < S
        found, _ = _faults_of(q, head // GROUP, t, is_t, H // GROUP, qb, qs, qh, K, FINITE, False, BD)
        more, _ = _faults_of(k, head // GROUP, t, is_t, H // GROUP, kb, ks, kh, K, FINITE, False, BD)
        found |= more
        more, _ = _faults_of(v, head, t, is_t, H, vb, vs, vh, V, FINITE, False, BD)
        found |= more
        if g is not None:
            more, _ = _faults_of(g, head, t, is_t, H, gb, gs, gh, W, KIND_G, False, BD)
            found |= more
        if x is not None:
            more, _ = _faults_of(x, head, t, is_t, H, xb, xs, xh, 1, KIND_X, False, BD)
            found |= more
        if tl.max(found, 0) != 0:
            tl.store(faults + head.to(tl.int64) * S + t, found.to(tl.uint8), is_t)
            tl.store(flag, 1)
        if head % H == 0:
            at = (head // H).to(tl.int64) * S + t
            tl.store(marks + at, tl.load(resets + at, is_t, 0), is_t)
    elif C is not None:
        _search_states(program - N * tiles, C, n, m, None, flag, faults, S, N, K, V, 0, CELLS)


@common.kernel(do_not_specialize=["S", "N"])
@no_type_check
def search_gradients(
    dy, C, n, m, outputs, flag, faults,
    S, N, H, gb, gs, gh, K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, CELLS: tl.constexpr,
):
    """Find undefined gradients of outputs and last states, with the programs of `search`.

    They are those that are not finite themselves, and those of a nonfinite result, if they are not zero. C, n, m:
    gradients of the last states. outputs: the faults of the forward pass.
    """
    tiles = tl.cdiv(S, BT)
    program = tl.program_id(0)
    if program < N * tiles:
        head = program // tiles
        t = program % tiles * BT + tl.arange(0, BT)
        is_t = t < S
        place = head.to(tl.int64) * S + t
        found, nonzero = _faults_of(dy, head, t, is_t, H, gb, gs, gh, V, FINITE, True, BD)
        reached = tl.load(outputs + place, is_t, 0).to(tl.int32)
        found |= nonzero & reached
        if tl.max(found | reached, 0) != 0:
            tl.store(faults + place, found.to(tl.uint8), is_t)
            tl.store(flag, 1)
    elif C is not None:
        last = 0 if REVERSE else S - 1
        _search_states(program - N * tiles, C, n, m, outputs, flag, faults, S, N, K, V, last, CELLS)


@jit
@no_type_check
def _copy_rows(
    x, clean, n, t, is_t, faults, H, xb, xs, xh, D: tl.constexpr, KIND: tl.constexpr, BD: tl.constexpr
):
    """Copy D features of tokens t, with zeros for faults, and for all of a token that `faults`, if given, marks."""
    B: tl.constexpr = 1 if D == 1 else BD
    rows = _rows(0, n, t, H, xb, xs, xh)
    for first in range(0, D, B):
        d = first + tl.arange(0, B)
        mask = is_t[:, None] & (d < D)[None, :]
        at = rows[:, None] + d[None, :]
        values = tl.load(x + at, mask, 0.0)
        zero = is_fault(values, KIND)
        if faults is not None:
            zero = zero | (tl.load(faults + t, is_t, 0) != 0)[:, None]
        tl.store(clean + at, tl.where(zero, 0.0, values).to(clean.dtype.element_ty), mask)


@common.kernel(do_not_specialize=["S"])
@no_type_check
def copy(
    q, k, v, g, x, dy, clean_q, clean_k, clean_v, clean_g, clean_x, clean_dy, flag, faults,
    S, H, qb, qs, qh, kb, ks, kh, vb, vs, vh, gb, gs, gh, xb, xs, xh, yb, ys, yh,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, KIND_G: tl.constexpr, KIND_X: tl.constexpr, GROUP: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):
    """If there are faults, copy the inputs, with zeros for these. The copies have the strides of the inputs.

    Forward, all gates of a token with a fault are zero: together, gates that are valid alone could give an m of -inf.
    """
    if tl.load(flag) != 0:
        tiles = tl.cdiv(S, BT)
        n = tl.program_id(0) // tiles
        t = tl.program_id(0) % tiles * BT + tl.arange(0, BT)
        is_t = t < S
        if n % GROUP == 0:
            _copy_rows(q, clean_q, n // GROUP, t, is_t, None, H // GROUP, qb, qs, qh, K, FINITE, BD)
            _copy_rows(k, clean_k, n // GROUP, t, is_t, None, H // GROUP, kb, ks, kh, K, FINITE, BD)
        _copy_rows(v, clean_v, n, t, is_t, None, H, vb, vs, vh, V, FINITE, BD)
        marks = None
        if dy is None:
            marks = faults + n.to(tl.int64) * S
        if g is not None:
            _copy_rows(g, clean_g, n, t, is_t, marks, H, gb, gs, gh, W, KIND_G, BD)
        if x is not None:
            _copy_rows(x, clean_x, n, t, is_t, marks, H, xb, xs, xh, 1, KIND_X, BD)
        if dy is not None:
            _copy_rows(dy, clean_dy, n, t, is_t, None, H, yb, ys, yh, V, FINITE, BD)


@jit
@no_type_check
def _after(began, found, begins, more):
    """Combine adjacent runs of tokens: whether a sequence begins there, and whether its last one has a fault."""
    return began | begins, tl.where(begins != 0, more, found | more)


@jit
@no_type_check
def _spread(found, begins, carried):
    """Return the tokens [BT] with a fault at or before them in their sequence, and whether the last is one."""
    began, found = tl.associative_scan((begins, found), 0, _after)
    found |= tl.where(began != 0, 0, carried)
    return found, tl.sum(tl.where(tl.arange(0, found.shape[0]) == found.shape[0] - 1, found, 0), 0)


@jit
@no_type_check
def _fill_rows(x, row, mask, D: tl.constexpr, BD: tl.constexpr):
    """Fill the rows of x [rows, D] with NaN where the mask is true."""
    B: tl.constexpr = 1 if D == 1 else BD
    for first in range(0, D, B):
        d = first + tl.arange(0, B)
        nan = tl.full((row.shape[0], B), float("nan"), tl.float32).to(x.dtype.element_ty)
        tl.store(x + row[:, None] * D + d[None, :], nan, mask[:, None] & (d < D)[None, :])


@jit
@no_type_check
def _fill(x, size, CELLS: tl.constexpr):
    for first in range(0, size, CELLS):
        cell = first + tl.arange(0, CELLS)
        tl.store(x + cell, tl.full((CELLS,), float("nan"), tl.float32).to(x.dtype.element_ty), cell < size)


@jit
@no_type_check
def _fill_states(C, n, m, at, K: tl.constexpr, V: tl.constexpr, CELLS: tl.constexpr):
    _fill(C + at * K * V, K * V, CELLS)
    if n is not None:
        _fill(n + at * K, K, CELLS)
        tl.store(m + at, float("nan"))


@common.kernel(do_not_specialize=["S"])
@no_type_check
def spread(
    flag, faults, resets, y, C, n, m,
    S, H, K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, CELLS: tl.constexpr,
):
    """If there are faults, fill the outputs and the last states that depend on them with NaN. A program per head."""
    if tl.load(flag) != 0:
        head = tl.program_id(0).to(tl.int64)
        places = faults + head * S
        carried = tl.load(faults + tl.num_programs(0).to(tl.int64) * S + head).to(tl.int32)
        for first in range(0, S, BT):
            at = first + tl.arange(0, BT)
            is_t = at < S
            t = S - 1 - at if REVERSE else at
            begins = tl.load(resets + head // H * S + t, is_t, 0).to(tl.int32)
            found, carried = _spread(tl.load(places + t, is_t, 0).to(tl.int32), begins, carried)
            tl.store(places + t, found.to(tl.uint8), is_t)
            _fill_rows(y, (head // H * S + t) * H + head % H, is_t & (found != 0), V, BD)
        if C is not None:
            if carried != 0:
                _fill_states(C, n, m, head, K, V, CELLS)


@common.kernel(do_not_specialize=["S", "places"])
@no_type_check
def fill(
    flag, faults, resets, dq, dk, dv, dg, dx, dbonus, C, n, m,
    S, H, places, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, REVERSE: tl.constexpr, BT: tl.constexpr,
    BD: tl.constexpr, CELLS: tl.constexpr,
):
    """If there are faults, fill undefined gradients with NaN. A program per head, from its last token to the first.

    dq, dk have a row per head of values, and dbonus [N, places / 16, K] one per 16 tokens in scan order. C, n, m:
    gradients of the initial states.
    """
    if tl.load(flag) != 0:
        head = tl.program_id(0).to(tl.int64)
        undefined = tl.load(faults + tl.num_programs(0).to(tl.int64) * S + head).to(tl.int32)
        marks = resets + head // H * S
        for first in range(0, S, BT):
            at = S - 1 - first - tl.arange(0, BT)
            is_t = at >= 0
            t = S - 1 - at if REVERSE else at
            ends = tl.load(marks + (t - 1 if REVERSE else t + 1), is_t & (at < S - 1), 0).to(tl.int32)
            found, undefined = _spread(tl.load(faults + head * S + t, is_t, 0).to(tl.int32), ends, undefined)
            mask = is_t & (found != 0)
            row = (head // H * S + t) * H + head % H
            _fill_rows(dq, row, mask, K, BD)
            _fill_rows(dk, row, mask, K, BD)
            _fill_rows(dv, row, mask, V, BD)
            if dg is not None:
                _fill_rows(dg, row, mask, W, BD)
            if dx is not None:
                _fill_rows(dx, row, mask, 1, BD)
            if dbonus is not None:
                _fill_rows(dbonus, (head * places + at) // 16, mask, K, BD)
        if C is not None:
            if undefined * (tl.load(marks + (S - 1 if REVERSE else 0)) == 0) != 0:
                _fill_states(C, n, m, head, K, V, CELLS)


# ------------------------------------------------------------------------------
# Launches


class Found(NamedTuple):
    """What a search found, if there are resets: parts of `faults`, and the memory of clean copies of the inputs."""

    flag: Maybe = None
    tokens: Maybe = None
    resets: Maybe = None
    q: Maybe = None
    k: Maybe = None
    v: Maybe = None
    g: Maybe = None
    x: Maybe = None
    dy: Maybe = None


class Inputs(NamedTuple):
    """Inputs of a call with resets, laid out: q, k [B, S, H, K], v [B, S, HV, V], g [B, S, HV(, K)], x [B, S, HV].

    kind_g, kind_x: what g and x have to be.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Maybe
    x: Maybe
    kind_g: int
    kind_x: int

    @property
    def heads(self) -> int:
        return self.v.shape[0] * self.v.shape[2]

    def _sizes(self) -> dict[str, int]:
        K, V = self.q.shape[3], self.v.shape[3]
        return {"K": K, "V": V, "BT": TOKENS, "BD": min(128, common.power_of_two(max(K, V)))}

    def _of_tokens(self) -> dict[str, int]:
        W = 1 if self.g is None or self.g.dim() == 3 else self.g.shape[3]
        of = {"KIND_G": int(self.kind_g), "KIND_X": int(self.kind_x), "GROUP": self.v.shape[2] // self.q.shape[2]}
        return self._sizes() | of | {"W": W}

    def _size(self) -> int:
        return FIRST + self.heads * (self.v.shape[1] + 1)

    def _programs(self, states: bool) -> int:
        cells = ceil_div(self.q.shape[3] * self.v.shape[3], CELLS) if states else 0
        return self.heads * (ceil_div(self.v.shape[1], TOKENS) + cells)

    def searched(self, state: tuple[Maybe, ...], resets: Tensor, faults: Tensor) -> Found:
        """Search the inputs and the initial C, n, m, and fill `faults`."""
        faults.zero_()
        S, H = self.v.shape[1:3]
        found = parts(faults, self.v)
        search[(self._programs(state[0] is not None),)](
            *self[:5], *state, as_bytes(resets), *found[:3], S, self.heads, H, *token_strides(*self[:5]), CELLS=CELLS,
            **self._of_tokens(),
        )
        return self._copied(found, None)

    def searched_with_gradients(
        self, dy: Tensor, dlast: tuple[Maybe, ...], faults: Tensor, reverse: bool
    ) -> Found:
        """Search the gradients of the outputs and of the last states. faults: those of the forward pass."""
        S, H = self.v.shape[1:3]
        forward = parts(faults, self.v)
        own = parts(torch.zeros_like(faults), self.v)
        search_gradients[(self._programs(dlast[0] is not None),)](
            dy, *dlast, forward.tokens, own.flag, own.tokens, S, self.heads, H, *token_strides(dy), REVERSE=reverse,
            CELLS=CELLS, **self._sizes(),
        )
        return self._copied(own._replace(resets=forward.resets), dy)

    def _copied(self, found: Found, dy: Maybe) -> Found:
        given = (*self[:5], dy)
        copies = twins(given)
        S, H = self.v.shape[1:3]
        copy[(self._programs(False),)](
            *given, *copies, found.flag, found.tokens, S, H, *token_strides(*given), **self._of_tokens()
        )
        return Found(*found[:3], *copies)

    def spread(self, found: Found, y: Tensor, last: tuple[Maybe, ...], reverse: bool) -> None:
        """Fill the outputs and last states that depend on faults with NaN, and mark those outputs."""
        S, H = self.v.shape[1:3]
        spread[(self.heads,)](
            *found[:3], y, *last, S, H, REVERSE=reverse, CELLS=CELLS, **self._sizes(), num_warps=ONE_WARP
        )

    def fill(
        self, found: Found, grads: tuple[Maybe, ...], dstate: tuple[Maybe, ...], reverse: bool,
        places: int = 0,
    ) -> None:
        """Fill undefined gradients of q, k, v, g, x, the bonus and the initial states with NaN."""
        S, H = self.v.shape[1:3]
        fill[(self.heads,)](
            *found[:3], *grads, *dstate, S, H, places, W=self._of_tokens()["W"], REVERSE=reverse, CELLS=CELLS,
            **self._sizes(), num_warps=ONE_WARP,
        )


def empty(v: Tensor, resets: Maybe) -> Tensor:
    """Return memory for faults, of no size without resets."""
    B, S, H = v.shape[:3]
    return v.new_empty(0 if resets is None else FIRST + B * H * (S + 1) + B * S, dtype=torch.uint8)


def parts(faults: Tensor, v: Tensor) -> Found:
    B, S = v.shape[:2]
    return Found(faults[:FIRST], faults[FIRST:], faults[-B * S :])


def as_bytes(resets: Tensor) -> Tensor:
    """Return resets with one byte per token, contiguous; without a launch if they are so already."""
    return (resets.view(torch.uint8) if resets.dtype == torch.bool else resets.to(torch.uint8)).contiguous()


def twins(tensors: tuple[Maybe, ...]) -> tuple[Maybe, ...]:
    """Return uninitialised tensors with the strides of these, at distances of multiples of 16 elements.

    Those of views of one tensor share memory likewise.
    """
    spans: dict[Any, tuple[Any, Any]] = {}
    for x in tensors:
        if x is not None:
            first, end = spans.get(_place(x), (x.storage_offset(), 0))
            reach = x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            spans[_place(x)] = min(first, x.storage_offset()), max(end, reach)
    memory: dict[Any, Tensor] = {}
    found: list[Maybe] = []
    for x in tensors:
        if x is None:
            found.append(None)
            continue
        first, end = spans[_place(x)]
        if _place(x) not in memory:
            memory[_place(x)] = x.new_empty(end - first + 16)
        offset = x.storage_offset() - first
        distance = x.data_ptr() // x.element_size() - offset - memory[_place(x)].data_ptr() // x.element_size()
        found.append(memory[_place(x)].as_strided(x.shape, x.stride(), offset + distance % 16))
    return tuple(found)


def _place(x: Tensor) -> Any:
    return x.untyped_storage().data_ptr(), x.dtype

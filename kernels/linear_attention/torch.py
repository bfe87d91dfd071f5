"""Linear attention chunk by chunk.

Within a chunk, G the running sum of log decays from its start and S the state before it, token t weighs what was
written at s by E_ts = exp(G_t - G_s). A rule writes keys with values that are given, or values X that depend on S:

    add      k with v
    delta    k with X      (I + L) X = beta (v - (k e^G) S)         L_ts = beta_t (k_t E_ts k_s), s < t
    dplr     k with v, and b with X      (I - M) X = (a e^(G-g)) S + N v
                                         M, N_ts = a_t E_ts e^(-g_t) b_s, k_s, s < t

X = X_0 + W S then, both for all chunks at once by substitution; what goes from chunk to chunk is the state alone.
Gradients are autograd's, of the chunks made again.

Sums of decays are float64 and exponents are differences of at most 0, so neither a strong decay nor what follows one
loses digits. A decay per key does not factor out of a product q . k: within 16 tokens it is multiplied out, and
between such blocks the exponents are taken from the start of the later one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.linear_attention import reference, separate
from seqblocks.kernels.linear_attention.reference import KINDS
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, contained

BLOCK = 16  # tokens between which decays per key are multiplied out
RANGE = 60.0  # e to this, times any reasonable number, is in the range of float32
RANGE_PER_HEAD = 8.0  # of exponents whose rounding costs no more than a few others
Maybe = Tensor | None  # an input that a rule may lack


class Decays:
    """Running sums of log decays in a chunk, float64 [..., L] or [..., L, K], and weights [..., L, K or 1].

    `before` leaves out the token's own. split: exponents of both signs are safe over the whole chunk.
    """

    def __init__(self, decay: Maybe, per_key: bool, split: bool, tracked: bool, dtype: torch.dtype) -> None:
        """tracked: for autograd."""
        self.per_key, self.split, self.dtype = per_key, split, dtype
        self.upto = None if decay is None else _running(decay, per_key, tracked)
        self._own = decay

    @cached_property
    def before(self) -> Maybe:
        return None if self.upto is None or self._own is None else self.upto - self._own

    @cached_property
    def last(self) -> Maybe:
        """Of the whole chunk, with the axis of tokens kept."""
        if self.upto is None:
            return None
        return self.upto[..., -1:, :] if self.per_key else self.upto[..., -1:]

    def factor(self, exponent: Tensor) -> Tensor:
        """e to it."""
        found = exponent.to(self.dtype).exp()
        return found if self.per_key else found.unsqueeze(-1)

    @cached_property
    def from_start(self) -> Maybe:
        return None if self.upto is None else self.factor(self.upto)

    @cached_property
    def from_start_before(self) -> Maybe:
        return None if self.before is None else self.factor(self.before)

    @cached_property
    def back_to_start(self) -> Tensor:
        """The inverse of `from_start`, where that is safe."""
        assert self.upto is not None
        return self.factor(-self.upto)

    @cached_property
    def to_end(self) -> Maybe:
        if self.upto is None or self.last is None:
            return None
        return self.factor(self.last) * self.back_to_start if self.split else self.factor(self.last - self.upto)


def _running(decay: Tensor, per_key: bool, tracked: bool) -> Tensor:
    """Sums over the axis of tokens, in float64."""
    if not per_key or tracked or decay.device.type != "cpu":
        return decay.double().cumsum(-2 if per_key else -1)
    found = decay.to(torch.float64, copy=True)
    for t in range(1, found.shape[-2]):  # several times as fast as `cumsum`, where tokens are not next to each other
        found[..., t, :] += found[..., t - 1, :]
    return found


class Masks(NamedTuple):
    """Where resets leave a chunk connected: pairs [B, 1, 1, N, L, L], tokens to its start and end, start to end."""

    pairs: Tensor
    from_start: Tensor
    to_end: Tensor
    through: Tensor


def _masks(resets: Tensor) -> Masks:
    """resets [B, N, L]."""
    segment = resets.long().cumsum(-1)[:, None, None]
    last = segment[..., -1:]
    return Masks(segment.unsqueeze(-1) == segment.unsqueeze(-2), segment == 0, segment == last, last == 0)


def _times(x: Tensor, factor: Maybe) -> Tensor:
    return x if factor is None else x * factor


def _weighted(x: Tensor, exponent: Tensor) -> Tensor:
    """x [..., L, K] times e to an exponent of at most 0."""
    return x * exponent.to(x.dtype).exp()


def _pairs(x: Tensor, y: Tensor, to: Maybe, since: Maybe, seen: Tensor, block: int) -> Tensor:
    """sum over K of x_t e^(to_t - since_s) y_s, 0 where s is not seen from t: [..., L, L]."""
    if to is None or since is None:
        return _where_seen(x @ y.transpose(-1, -2), seen)
    if to.dim() == 5:
        exponents = (to.unsqueeze(-1) - since.unsqueeze(-2)).to(x.dtype)
        return _where_seen((x @ y.transpose(-1, -2)) * exponents.clamp(max=0.0).exp(), seen)
    return _where_seen(_pairs_per_key(x, y, to, since, seen, block), seen)


def _where_seen(x: Tensor, seen: Tensor) -> Tensor:
    """x [..., L, L], but 0 for unseen pairs."""
    return torch.where(seen, x, 0.0)


def _pairs_per_key(x: Tensor, y: Tensor, to: Tensor, since: Tensor, seen: Tensor, block: int) -> Tensor:
    """`_pairs` of a decay per key; pairs that are not seen have no meaning, but finite gradients.

    `block`: tokens within which exponents of both signs are safe, so that the decay factors out; 0 if there is none.
    """
    L, rows = x.shape[-2], []
    for first in range(0, L, block or BLOCK):
        end = min(first + (block or BLOCK), L)
        now = slice(first, end)
        anchor = since[..., first - 1 : first, :] if first else torch.zeros_like(since[..., :1, :])
        later = _weighted(x[..., now, :], to[..., now, :] - anchor)
        if block:
            inside = later @ _weighted(y[..., now, :], anchor - since[..., now, :]).transpose(-1, -2)
        else:
            unseen = ~seen[..., now, now].unsqueeze(-1)  # whose exponents may be large
            exponent = (to[..., now, None, :] - since[..., None, now, :]).masked_fill(unseen, 0.0)
            inside = (x[..., now, None, :] * exponent.to(x.dtype).exp() * y[..., None, now, :]).sum(-1)
        earlier = _weighted(y[..., :first, :], anchor - since[..., :first, :]).transpose(-1, -2)
        rows.append(pad(torch.cat([later @ earlier, inside], -1), (0, L - end)))
    return torch.cat(rows, -2)


def _safe_block(decay: Maybe, reverse: bool, chunk_size: int) -> int:
    """The longest blocks of 16 tokens times a power of 2 in which decays add up to less than RANGE, or 0.

    Of a decay per head, which is exact without, to less than RANGE_PER_HEAD, in whole chunks. Found by looking at the
    values, and so on the CPU alone.
    """
    if decay is None or decay.device.type != "cpu" or chunk_size % BLOCK:
        return 0
    sums = (decay.flip(1) if reverse else decay).abs()
    most = RANGE if decay.dim() == 4 else RANGE_PER_HEAD
    tokens, found = 1, 0
    while tokens < chunk_size and chunk_size % (step := 2 if tokens > 1 else BLOCK) == 0:
        sums = pad(sums, (0, 0) * (sums.dim() - 2) + (0, -sums.shape[1] % step))
        sums = sums.reshape(sums.shape[0], -1, step, *sums.shape[2:]).sum(2)
        tokens *= step
        if chunk_size % tokens or not sums.max() < most:  # NaN too
            break
        found = tokens
    return found


def _chunks(x: Tensor, heads: int, L: int) -> Tensor:
    """[B, S, heads or more, ...] as [B, heads, groups, N, L, ...], zeros after the end."""
    B, S = x.shape[:2]
    N = -(-S // L)
    if S < N * L:
        x = pad(x, (0, 0) * (x.dim() - 2) + (0, N * L - S))
    x = x.reshape(B, N, L, heads, x.shape[2] // heads, *x.shape[3:]).movedim((3, 4), (1, 2))
    return x.contiguous()  # products would copy it one by one


class _Inputs(NamedTuple):
    """What a call is given, as chunks [B, H, groups, N, L, ...]; q scaled. `seen`, `earlier`: pairs of tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Maybe
    a: Maybe
    b: Maybe
    g: Decays
    masks: Masks | None
    seen: Tensor
    earlier: Tensor
    block: int  # see `_pairs_per_key`

    def pairs(self, x: Tensor, y: Tensor, seen: Tensor, before: bool = False) -> Tensor:
        """`_pairs`; before: x is read before its own decay."""
        g = self.g
        if g.split:
            return _where_seen(self.read(x, before) @ (y * g.back_to_start).transpose(-1, -2), seen)
        return _pairs(x, y, g.before if before else g.upto, g.upto, seen, self.block)

    def read(self, x: Tensor, before: bool = False) -> Tensor:
        """x as it reads the state that enters the chunk."""
        return _times(x, self.g.from_start_before if before else self.g.from_start)

    def kept(self, x: Tensor) -> Tensor:
        """What of x is in the state that leaves the chunk."""
        x = _times(x, self.g.to_end)
        return x if self.masks is None else x.masked_fill(~self.masks.to_end.unsqueeze(-1), 0.0)


def _each(function: Callable[[Tensor], Tensor], *tensors: Maybe) -> list[Any]:
    return [None if x is None else function(x) for x in tensors]


def _chunked(
    tensors: tuple[Any, ...], resets: Maybe, reverse: bool, scale: float, chunk_size: int, block: int, tracked: bool
) -> tuple[Tensor, Tensor]:
    """o [B, S, HV, V] and the last state, of inputs as `reference.run` has them. tracked: for autograd."""
    *sequences, bonus, state = tensors
    if reverse:
        *sequences, resets = _each(lambda x: x.flip(1), *sequences, resets)
    H, S = sequences[0].shape[2], sequences[0].shape[1]
    L = min(chunk_size, -(-S // BLOCK) * BLOCK)
    if resets is not None:
        state = state.masked_fill(along(resets[:, 0], state), 0.0)  # also where a product with 0 would be NaN
        resets = pad(resets, (0, -S % L)).reshape(resets.shape[0], -1, L)
    q, k, v, decay, beta, a, b = _each(lambda x: _chunks(x, H, L), *sequences)
    masks = None if resets is None else _masks(resets)
    seen = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
    seen = seen if masks is None else seen & masks.pairs
    g = Decays(decay, decay is not None and decay.dim() == 6, block >= L > 0, tracked, v.dtype)
    x = _Inputs(scale * q, k, v, beta, a, b, g, masks, seen, seen.tril(-1), block)

    before = bonus is not None
    weights = x.pairs(x.q, k, x.earlier if before else x.seen, before)
    solved = _solved(x, weights)
    direct = written = None
    if x.beta is None:
        direct, written = weights @ v, x.kept(k).transpose(-1, -2) @ v
    out, last = _states(direct, written, solved, x.read(x.q, before), x.g, masks, state.unflatten(1, (H, -1)), v)
    if bonus is not None:
        out = out + (x.q * bonus[None, :, None, None, None] * k).sum(-1, keepdim=True) * v
    y = out.movedim((1, 2), (3, 4)).flatten(1, 2)[:, :S].flatten(2, 3)
    return y.flip(1) if reverse else y, last.flatten(1, 2)


def _solved(x: _Inputs, weights: Tensor) -> _Solved | None:
    """The values that depend on the state, of the rules that have such; `weights`: those of keys, read by q."""
    if x.beta is not None:
        gain = x.beta.unsqueeze(-1)
        system = gain * x.pairs(x.k, x.k, x.earlier)
        return _Solved(system, gain * x.v, -gain * x.read(x.k), weights, x.kept(x.k))
    if x.a is not None and x.b is not None:
        given = x.pairs(x.a, x.k, x.earlier, True) @ x.v
        system = -x.pairs(x.a, x.b, x.earlier, True)
        weights = x.pairs(x.q, x.b, x.seen)
        return _Solved(system, given, x.read(x.a, True), weights, x.kept(x.b))
    return None


class _Solved:
    """Values X = X_0 + W S that depend on the state: with which weights they are read, with which keys kept."""

    def __init__(self, system: Tensor, given: Tensor, of_state: Tensor, weights: Tensor, keys: Tensor) -> None:
        """(I + system) X = given + of_state S, the system strictly lower triangular."""
        inverse = _inverse(system)
        self.values, self.of_state = inverse @ given, inverse @ of_state
        self.weights, self.keys = weights, keys


def _inverse(system: Tensor) -> Tensor:
    """(I + system)^-1 [..., L, L]: of blocks on the diagonal by substitution, and twice as large ones by products.

    No product has powers of the system, which may be large where its inverse is not.
    """
    L = system.shape[-1]
    if L <= BLOCK or L % 2:
        identity = torch.eye(L, dtype=system.dtype, device=system.device).expand_as(system)
        return torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    half = L // 2
    both = torch.stack([system[..., :half, :half], system[..., half:, half:]], -3)
    first, second = _inverse(both).unbind(-3)
    below = -second @ (system[..., half:, :half] @ first)
    above = torch.cat([first, torch.zeros_like(below)], -1)
    return torch.cat([above, torch.cat([below, second], -1)], -2)


def _states(
    direct: Maybe, written: Maybe, solved: _Solved | None, from_state: Tensor, g: Decays, masks: Masks | None,
    state: Tensor, v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry the state from chunk to chunk. Returns o [B, H, groups, N, L, V] and the last state."""
    shape, heads = (*state.shape[:3], v.shape[3]), state.shape[:3]

    def each(x: Tensor) -> Tensor:
        """Of every head, [M, N, ...], one axis for batch and heads: slices of it are operands of products."""
        return x.expand(*shape, *x.shape[4:]).flatten(0, 2)

    through = None
    if g.last is not None:
        through = each(g.factor(g.last).transpose(-1, -2))  # [M, N, K or 1, 1]
    if masks is not None:
        kept = each(masks.through.unsqueeze(-1))
        from_start = each(masks.from_start.unsqueeze(-1))
    written = None if written is None else each(written)
    if solved is not None:
        given, of_state, keys = each(solved.values), each(solved.of_state), each(solved.keys).transpose(-1, -2)
    state = state.flatten(0, 2)
    before, values = [], []
    for n in range(shape[3]):
        before.append(state)
        now = state if through is None else through[:, n] * state
        if masks is not None:
            now = now.masked_fill(~kept[:, n], 0.0)
        if written is not None:
            now = now + written[:, n]
        if solved is not None and masks is None:
            values.append(torch.baddbmm(given[:, n], of_state[:, n], state))
        elif solved is not None:
            values.append(given[:, n] + (of_state[:, n] @ state).masked_fill(~from_start[:, n], 0.0))
        state = now if solved is None else torch.baddbmm(now, keys[:, n], values[-1])
    out = None if direct is None else each(direct)
    if solved is not None:
        out = _added(out, each(solved.weights), torch.stack(values, 1))
    out = _added(out, each(from_state), torch.stack(before, 1), None if masks is None else from_start)
    return out.unflatten(0, heads), state.unflatten(0, heads)


def _added(x: Maybe, a: Tensor, b: Tensor, kept: Maybe = None) -> Tensor:
    """x + a @ b of [M, N, ...], of the product those rows that are kept."""
    if x is None or kept is not None:
        product = a @ b if kept is None else (a @ b).masked_fill(~kept, 0.0)
        return product if x is None else x + product
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, x.shape[:2])


@torch.library.custom_op("seqblocks::linear_attention", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe, bonus: Maybe,
    state: Tensor, resets: Maybe, reverse: bool, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor]:
    (q, k, v, decay, beta, a, b, state), found = separate.cleaned((q, k, v, decay, beta, a, b, state), resets, reverse)
    tensors = (q, k, v, decay, beta, a, b, bonus, state)
    with without_autocast(q.device.type):
        block = _safe_block(decay, reverse, chunk_size)
        # one by one, tokens take a third of the time of exponents that are multiplied out; their gradients do not
        by_token = not block and decay is not None and decay.dim() == 4 and decay.device.type == "cpu"
        if not by_token:
            y, last = _chunked(tensors, resets, reverse, scale, chunk_size, block, tracked=False)
        if by_token or (resets is not None and not _usable(y, last)):
            y, last = reference.scan(tensors, resets, reverse, scale)
    y, last = y.contiguous(), last.contiguous()
    if found is not None:
        found.mark(y, last)
    return y, last


def _usable(*results: Tensor) -> bool:
    """Whether chunks with resets may be used: masked products carry what overflows over a reset.

    The definition does not. On other devices than the CPU a look at the values would wait for them.
    """
    return any(x.device.type != "cpu" for x in results) or all(bool(x.sum().isfinite()) for x in results)


@_op.register_fake
def _op_fake(q, k, v, decay, beta, a, b, bonus, state, resets, reverse, scale, chunk_size):  # type: ignore[no-untyped-def]
    return v.new_empty(v.shape), state.new_empty(state.shape)


@torch.library.custom_op("seqblocks::linear_attention_backward", mutates_args=())
def _op_backward(
    dy: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe,
    b: Maybe, bonus: Maybe, state: Tensor, resets: Maybe, reverse: bool, scale: float, chunk_size: int,
) -> list[Tensor]:
    """Gradients of the tensors that are given, in their order."""
    sequences = (q, k, v, decay, beta, a, b, state)
    undefined = separate.without_gradient(dy, dlast, sequences, resets, reverse)
    if undefined is not None:
        (q, k, v, decay, beta, a, b, state), found = separate.cleaned(sequences, resets, reverse)
        if found is not None:
            dy, dlast = found.clean_outputs(dy, dlast)
    tensors = (q, k, v, decay, beta, a, b, bonus, state)

    block = _safe_block(decay, reverse, chunk_size)

    def chunks(*given: Tensor) -> tuple[Tensor, Tensor]:
        return _chunked(with_absent(given), resets, reverse, scale, chunk_size, block, tracked=True)

    def tokens(*given: Tensor) -> tuple[Tensor, Tensor]:
        return reference.scan(with_absent(given), resets, reverse, scale)

    def with_absent(given: tuple[Tensor, ...]) -> tuple[Maybe, ...]:
        rest = iter(given)
        return tuple(None if x is None else next(rest) for x in tensors)

    present = [x for x in tensors if x is not None]
    with without_autocast(q.device.type):
        out, pullback, *_ = torch.func.vjp(chunks, *present)
        if resets is not None and not _usable(*out):
            _, pullback, *_ = torch.func.vjp(tokens, *present)
        grads = [x.contiguous() for x in pullback((dy, dlast))]
    if undefined is not None:
        named = iter(grads)
        by_name = [None if x is None else next(named) for x in tensors]
        undefined.fill(grads[:3], [x for x in by_name[3:7] if x is not None], by_name[8], by_name[7])
    return grads


@_op_backward.register_fake
def _op_backward_fake(  # type: ignore[no-untyped-def]
    dy, dlast, q, k, v, decay, beta, a, b, bonus, state, resets, reverse, scale, chunk_size
):
    return [x.new_empty(x.shape) for x in (q, k, v, decay, beta, a, b, bonus, state) if x is not None]


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.reverse, ctx.scale, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, dy, dlast):  # type: ignore[no-untyped-def]
    tensors = ctx.saved_tensors
    grads = iter(_op_backward(dy, dlast, *tensors, ctx.reverse, ctx.scale, ctx.chunk_size))
    return *(None if x is None else next(grads) for x in tensors[:-1]), None, None, None, None


_op.register_autograd(_differentiate, setup_context=_save)
_op_backward.register_autograd(no_second_derivative("linear_attention", "torch"))


def run(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe, bonus: Maybe,
    state: Maybe, resets: Maybe, reverse: bool, scale: float, normalize: bool, chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """As `reference.run`."""
    tensors = reference.in_one_dtype(q, k, v, decay, beta, a, b, bonus, state)
    if v.numel() == 0 or q.shape[3] == 0 or (not unknown(q.shape[1]) and q.shape[1] == 1):
        return reference.run(q, k, v, decay, beta, a, b, bonus, state, resets, reverse, scale, normalize, chunk_size)

    size = chunk_size or (32 if q.device.type == "cpu" else 64)

    def whole(*x: Maybe) -> tuple[Tensor, Tensor]:
        return reference.read_out(_op(*x, resets, reverse, scale, size), normalize)

    unread = None if bonus is None else decay  # what a token's own output does not depend on
    y, last = contained(whole, tensors, KINDS, resets, reverse, unread)
    return y, last


register("linear_attention", "torch", run, always("chunk by chunk, on any device"), by_hand=True)

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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqblocks.kernels.dispatch import always, register
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.linear_attention import reference
from seqblocks.kernels.linear_attention.reference import KINDS
from seqblocks.kernels.numerics import no_second_derivative, without_autocast
from seqblocks.kernels.resets import along, contained

BLOCK = 16  # tokens between which decays per key are multiplied out
RANGE = 60.0  # e to this, times any reasonable number, is in the range of float32
Maybe = Tensor | None  # an input that a rule may lack


class Decays(NamedTuple):
    """Running sums of log decays in a chunk, float64 [..., L] or [..., L, K]; `before` leaves out the token's own."""

    upto: Maybe
    before: Maybe

    @property
    def last(self) -> Maybe:
        """Of the whole chunk, with the axis of tokens kept."""
        if self.upto is None:
            return None
        return self.upto[..., -1:, :] if self.per_key else self.upto[..., -1:]

    @property
    def per_key(self) -> bool:
        return self.upto is not None and self.upto.dim() == 6


class Masks(NamedTuple):
    """Where resets leave a chunk connected: pairs [B, 1, 1, N, L, L], tokens to its start and end, start to end."""

    pairs: Tensor
    from_start: Tensor
    to_end: Tensor
    through: Tensor


def _decays(decay: Maybe, per_key: bool) -> Decays:
    if decay is None:
        return Decays(None, None)
    g = decay.double()
    upto = g.cumsum(-2 if per_key else -1)
    return Decays(upto, upto - g)


def _masks(resets: Tensor) -> Masks:
    """resets [B, N, L]."""
    segment = resets.long().cumsum(-1)[:, None, None]
    last = segment[..., -1:]
    return Masks(segment.unsqueeze(-1) == segment.unsqueeze(-2), segment == 0, segment == last, last == 0)


def _weighted(x: Tensor, exponent: Maybe) -> Tensor:
    """x [..., L, K] times e to an exponent [..., L] or [..., L, K] of at most 0."""
    if exponent is None:
        return x
    factor = exponent.to(x.dtype).exp()
    return x * (factor if factor.dim() == x.dim() else factor.unsqueeze(-1))


def _pairs(x: Tensor, y: Tensor, to: Maybe, since: Maybe, seen: Tensor, block: int) -> Tensor:
    """sum over K of x_t e^(to_t - since_s) y_s, 0 where s is not seen from t: [..., L, L]."""
    if to is None or since is None:
        return (x @ y.transpose(-1, -2)).masked_fill(~seen, 0.0)
    if to.dim() == 5:
        weights = (to.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~seen, -torch.inf).to(x.dtype).exp()
        return (x @ y.transpose(-1, -2)) * weights
    return _pairs_per_key(x, y, to, since, seen, block).masked_fill(~seen, 0.0)


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
    """The longest blocks of 16 tokens times a power of 2 in which decays per key add up to less than RANGE, or 0.

    Found by looking at the values, and so on the CPU alone.
    """
    if decay is None or decay.dim() < 4 or decay.device.type != "cpu" or chunk_size % BLOCK:
        return 0
    sums = (decay.flip(1) if reverse else decay).abs()
    tokens, found = 1, 0
    while tokens < chunk_size and chunk_size % (step := 2 if tokens > 1 else BLOCK) == 0:
        sums = pad(sums, (0, 0, 0, 0, 0, -sums.shape[1] % step))
        sums = sums.reshape(sums.shape[0], -1, step, *sums.shape[2:]).sum(2)
        tokens *= step
        if chunk_size % tokens or not sums.max() < RANGE:  # NaN too
            break
        found = tokens
    return found


def _chunks(x: Tensor, heads: int, L: int) -> Tensor:
    """[B, S, heads or more, ...] as [B, heads, groups, N, L, ...], zeros after the end."""
    B, S = x.shape[:2]
    N = -(-S // L)
    x = pad(x, (0, 0) * (x.dim() - 2) + (0, N * L - S))
    return x.reshape(B, N, L, heads, x.shape[2] // heads, *x.shape[3:]).movedim((3, 4), (1, 2))


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

    def pairs(self, x: Tensor, y: Tensor, to: Maybe, seen: Tensor) -> Tensor:
        return _pairs(x, y, to, self.g.upto, seen, self.block)

    def kept(self, x: Tensor) -> Tensor:
        """What of x is in the state that leaves the chunk."""
        if self.g.upto is not None and self.g.last is not None:
            x = _weighted(x, self.g.last - self.g.upto)
        return x if self.masks is None else x.masked_fill(~self.masks.to_end.unsqueeze(-1), 0.0)


def _each(function: Callable[[Tensor], Tensor], *tensors: Maybe) -> list[Any]:
    return [None if x is None else function(x) for x in tensors]


def _chunked(
    tensors: tuple[Any, ...], resets: Maybe, reverse: bool, scale: float, chunk_size: int, block: int
) -> tuple[Tensor, Tensor]:
    """o [B, S, HV, V] and the last state, of inputs as `reference.run` has them."""
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
    g = _decays(decay, decay is not None and decay.dim() == 6)
    x = _Inputs(scale * q, k, v, beta, a, b, g, masks, seen, seen.tril(-1), block)

    reads = x.g.upto if bonus is None else x.g.before
    weights = x.pairs(x.q, k, reads, x.seen if bonus is None else x.earlier)
    solved = _solved(x, weights)
    direct = written = None
    if x.beta is None:
        direct, written = weights @ v, x.kept(k).transpose(-1, -2) @ v
    out, last = _states(direct, written, solved, _weighted(x.q, reads), x.g, masks, state.unflatten(1, (H, -1)), v)
    if bonus is not None:
        out = out + (x.q * bonus[None, :, None, None, None] * k).sum(-1, keepdim=True) * v
    y = out.movedim((1, 2), (3, 4)).flatten(1, 2)[:, :S].flatten(2, 3)
    return y.flip(1) if reverse else y, last.flatten(1, 2)


def _solved(x: _Inputs, weights: Tensor) -> _Solved | None:
    """The values that depend on the state, of the rules that have such; `weights`: those of keys, read by q."""
    if x.beta is not None:
        gain = x.beta.unsqueeze(-1)
        system = gain * x.pairs(x.k, x.k, x.g.upto, x.earlier)
        return _Solved(system, gain * x.v, -gain * _weighted(x.k, x.g.upto), weights, x.kept(x.k))
    if x.a is not None and x.b is not None:
        given = x.pairs(x.a, x.k, x.g.before, x.earlier) @ x.v
        system = -x.pairs(x.a, x.b, x.g.before, x.earlier)
        weights = x.pairs(x.q, x.b, x.g.upto, x.seen)
        return _Solved(system, given, _weighted(x.a, x.g.before), weights, x.kept(x.b))
    return None


class _Solved:
    """Values X = X_0 + W S that depend on the state: with which weights they are read, with which keys kept."""

    def __init__(self, system: Tensor, given: Tensor, of_state: Tensor, weights: Tensor, keys: Tensor) -> None:
        """(I + system) X = given + of_state S, the system strictly lower triangular."""
        V = given.shape[-1]
        shape = (system[..., 0, 0] + given[..., 0, 0] + of_state[..., 0, 0]).shape
        right = torch.cat([given.expand(*shape, *given.shape[-2:]), of_state.expand(*shape, *of_state.shape[-2:])], -1)
        found = torch.linalg.solve_triangular(
            system.expand(*shape, *system.shape[-2:]), right, upper=False, unitriangular=True
        )
        self.values, self.of_state = found[..., :V], found[..., V:]
        self.weights, self.keys = weights, keys

    def at(self, n: int, state: Tensor, from_start: Tensor | None) -> Tensor:
        """X of chunk n."""
        of_state: Tensor = self.of_state[:, :, :, n] @ state
        if from_start is not None:
            of_state = of_state.masked_fill(~from_start[:, :, :, n, :, None], 0.0)
        values: Tensor = self.values[:, :, :, n]
        return values + of_state


def _states(
    direct: Maybe, written: Maybe, solved: _Solved | None, from_state: Tensor, g: Decays, masks: Masks | None,
    state: Tensor, v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry the state from chunk to chunk. Returns o [B, H, groups, N, L, V] and the last state."""
    through = None
    if g.last is not None:
        last = g.last.to(v.dtype).exp()
        through = last.transpose(-1, -2) if g.per_key else last.unsqueeze(-1)  # [..., N, K or 1, 1]
    before, values = [], []
    for n in range(v.shape[3]):
        before.append(state)
        now = state if through is None else through[:, :, :, n] * state
        if masks is not None:
            now = now.masked_fill(~masks.through[:, :, :, n, :, None], 0.0)
        if written is not None:
            now = now + written[:, :, :, n]
        if solved is not None:
            values.append(solved.at(n, state, None if masks is None else masks.from_start))
            now = now + solved.keys[:, :, :, n].transpose(-1, -2) @ values[-1]
        state = now
    out = from_state @ torch.stack(before, 3)
    if masks is not None:
        out = out.masked_fill(~masks.from_start.unsqueeze(-1), 0.0)
    if direct is not None:
        out = out + direct
    if solved is not None:
        out = out + solved.weights @ torch.stack(values, 3)
    return out, state


@torch.library.custom_op("seqblocks::linear_attention", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, decay: Maybe, beta: Maybe, a: Maybe, b: Maybe, bonus: Maybe,
    state: Tensor, resets: Maybe, reverse: bool, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor]:
    tensors = (q, k, v, decay, beta, a, b, bonus, state)
    with without_autocast(q.device.type):
        block = _safe_block(decay, reverse, chunk_size)
        # one by one, tokens take a third of the time of exponents that are multiplied out; their gradients do not
        by_token = not block and decay is not None and decay.dim() == 4 and decay.device.type == "cpu"
        if not by_token:
            y, last = _chunked(tensors, resets, reverse, scale, chunk_size, block)
        if by_token or (resets is not None and not _usable(y, last)):
            y, last = reference.scan(tensors, resets, reverse, scale)
    return y.contiguous(), last.contiguous()


def _usable(*results: Tensor) -> bool:
    """Whether chunks with resets may be used: masked products carry what is not finite over a reset.

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
    tensors = (q, k, v, decay, beta, a, b, bonus, state)

    block = _safe_block(decay, reverse, chunk_size)

    def chunks(*given: Tensor) -> tuple[Tensor, Tensor]:
        return _chunked(with_absent(given), resets, reverse, scale, chunk_size, block)

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
        return [x.contiguous() for x in pullback((dy, dlast))]


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
    state: Maybe, resets: Maybe, reverse: bool, scale: float, normalize: bool, chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.run`."""
    tensors = reference.in_one_dtype(q, k, v, decay, beta, a, b, bonus, state)
    if v.numel() == 0 or q.shape[3] == 0 or (not unknown(q.shape[1]) and q.shape[1] == 1):
        return reference.run(*tensors, resets, reverse, scale, normalize, chunk_size)

    def whole(*x: Maybe) -> tuple[Tensor, Tensor]:
        return reference.read_out(_op(*x, resets, reverse, scale, chunk_size), normalize)

    unread = None if bonus is None else decay  # what a token's own output does not depend on
    y, last = contained(whole, tensors, KINDS, resets, reverse, unread)
    return y, last


register("linear_attention", "torch", run, always("chunk by chunk, on any device"), by_hand=True)

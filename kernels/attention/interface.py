"""Softmax attention, causal or not, with an optional window, rotary positions and a cache of keys and values.

B batch, S sequence, H query heads, G heads of keys and values (each shared by H / G query heads), D head width,
DV width of the values, K cached tokens.

    y[t] = sum_s p[t, s] v[s]      p[t, :] = softmax of scale q[t] . k[s] over the s visible to t

With a causal mask, a token sees itself and earlier tokens. It sees its own sequence only (resets), and only tokens
within its window or chunk if there is one. Scores may have a soft cap, linear biases and sinks (scores.py).

Implementations: `reference.py` (all pairs, explicitly), `torch.py` (torch's fused attention, windows block by block).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqblocks.kernels import dispatch
from seqblocks.kernels.attention.kept import Kept, indices, updated
from seqblocks.kernels.attention.scores import Scores
from seqblocks.kernels.dispatch.compiled import unknown
from seqblocks.kernels.positions import rotary as turned
from seqblocks.kernels.positions import running_positions
from seqblocks.kernels.resets import along, finite

__all__ = ["AttentionState", "attention", "attention_state"]

dispatch.load_implementations("attention")


class AttentionState(NamedTuple):
    """Cache of keys and values.

    k [B, K, G, D] (rotated), v [B, K, G, DV], newest token last; length [B] int64: tokens of the sequence so far.
    """

    k: Tensor
    v: Tensor
    length: Tensor


class FirstState(NamedTuple):
    """Like AttentionState, with keys and values of the first F tokens of the sequence, in order.

    first_k [B, F, G, D] (rotated), first_v [B, F, G, DV]: zeros for tokens that do not exist yet.
    """

    k: Tensor
    v: Tensor
    length: Tensor
    first_k: Tensor
    first_v: Tensor


State = AttentionState | FirstState | tuple[Tensor, ...]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    first: int | None = None,
    rotary: float | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    logsumexp: bool = False,
    segments: Tensor | None = None,
    state: State | None = None,
    keep: int | None = None,
    return_state: bool = False,
    resets: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, AttentionState | FirstState]:
    """Attend over a sequence.

    q [B, S, H, D], k [B, S, G, D], v [B, S, G, DV], G a divisor of H. window: number of visible tokens, the current
    one included (not causal: that many to either side, the current one included in each). chunk: a sequence is cut into
    chunks of so many tokens, and a token sees only its own chunk. first: number of first tokens of a sequence that stay
    visible outside the window, which is then required. rotary: base of the rotary positions, which count from the last
    reset. scale: 1/sqrt(D) if not given. soft_cap: scores s become soft_cap tanh(s / soft_cap). slopes
    [H]: subtracted from a score for each token between query and key (see `alibi_slopes`). sinks [H]: score of a
    further key with the value 0, which every query sees; the weights of the others then add up to less than 1. bias
    [H, S, S] or [H, B, S, S]: added to the scores. segments [B, S]: a token sees only those with its number, in any
    order. These two need causal=False, without window, chunk and resets. logsumexp: y has a further feature, the log of
    the sum of exponentials, in at least float32, by which results for several sets of keys can be merged. state: the
    state that the previous call returned. keep: number of tokens in the returned state (default: window - 1 with a
    window, chunk - 1 with chunks, else as many as in the given state, else all tokens).
    resets [B, S] bool: true where a token is the first of a new sequence, which cannot see earlier tokens.
    If not causal and without window, chunk, rotary and resets, k and v may be a memory [B, T, G, D] of another length.

    Returns y [B, S, H, DV] in v's dtype, and with return_state the next state: with `first`, a FirstState. Tokens
    dropped from the state are no longer visible: without a window, the caller must set `keep` to the final length of
    the sequence.
    The torch implementation has first derivatives only.
    Raises ValueError for shapes and options that do not fit, BackendError (see dispatch).
    """
    window = _narrower(window, chunk)
    _check_first(first, window, causal)
    _check(q, k, v, causal, window, rotary, state, return_state, resets, first or 0)
    check_scores(q.shape[2], soft_cap, slopes, sinks)
    if bias is not None or segments is not None:
        _check_pairs(q, k, bias, segments, causal or window is not None or resets is not None)
    B, S, _, _ = q.shape
    before = state[2] if state is not None else None
    index, length = running_positions(B, S, before, resets, q.device)
    place = index[:1] if before is None and resets is None else index  # one row for the whole batch
    if rotary is not None:
        q, k = turned(q, place, rotary), turned(k, place, rotary)
    past = 0
    keys, values = k, v
    if state is not None:
        past = state[0].shape[1]
        keys, values = torch.cat([state[0].to(k.dtype), k], 1), torch.cat([state[1].to(v.dtype), v], 1)
    sequence = _sequences(before, past, index, resets, chunk) if segments is None else segments
    kept = None
    if first:
        kept = Kept(first, indices(before, past, first, place), resets is None)
        if state is not None and sequence is not None:
            keys, values = (torch.cat([x.to(y.dtype), y], 1) for x, y in zip(state[3:], (keys, values), strict=True))
            places = kept.places[:, :first]
            hidden = places < 0
            if chunk is not None and before is not None:  # those of the last chunk only, like cached tokens
                hidden = hidden | (places // chunk != (before.unsqueeze(-1) - 1) // chunk)
            sequence = torch.cat([torch.where(hidden, -1, 0), sequence], 1)
    over = None  # keys of sequences that a reset ended: the next call must not read them
    if resets is not None and sequence is not None and S:
        over = sequence != sequence[:, -1:]
        if chunk is not None and not first:  # keys of earlier chunks stay in the state, as in one of single tokens
            ended = _sequences(before, past, index, resets, None)
            assert ended is not None
            over = ended != ended[:, -1:]
    several = over is not None and (unknown(S) or S > 1 or torch.is_grad_enabled())
    if over is not None and not several and past:
        keys, values = (x.masked_fill_(along(over, x), 0.0) for x in (keys, values))
    inputs = {"q": q, "k": keys, "v": values, "sequence": sequence, "slopes": slopes, "sinks": sinks, "bias": bias}
    run = dispatch.choose(
        "attention", backend, inputs, dtype=q.dtype, window=window, resets=resets is not None
    )
    scores = Scores(q.shape[-1] ** -0.5 if scale is None else scale, soft_cap, slopes, sinks, bias, logsumexp)
    if several:
        assert sequence is not None
        y = _contained(run, q, keys, values, sequence, causal, window, scores, kept)
    else:
        y = run(q, keys, values, sequence, causal, window, scores, kept)
    if not return_state:
        return y
    if keep is None:
        keep = window - 1 if window is not None else keys.shape[1] if state is None else past
    kind_k, kind_v = (k.dtype, v.dtype) if state is None else (state[0].dtype, state[1].dtype)
    if kept is not None and state is not None:  # the slots are not the last tokens
        keys, values = (x[:, kept.first :] for x in (keys, values))
        over = None if over is None else over[:, kept.first :]
    keys, values = (last_tokens(x, keep, own=state is not None) for x in (keys, values))
    if several and over is not None:
        over = last_tokens(over, keep)
        keys, values = (x.masked_fill(along(over, x), 0.0) for x in (keys, values))
    last = AttentionState(keys.to(kind_k), values.to(kind_v), length)
    return y, last if first is None else _with_slots(last, state, k, v, first)


def attention_state(
    k: Tensor, v: Tensor, *, state: AttentionState | FirstState, keep: int, chunk: int | None = None,
    rotary: float | None = None, resets: Tensor | None = None,
) -> AttentionState | FirstState:
    """Return the state that `attention` would return after k [B, S, G, D], v [B, S, G, DV], without computing y."""
    B, S = k.shape[:2]
    index, length = running_positions(B, S, state.length, resets, k.device)
    k = k if rotary is None else turned(k, index, rotary)
    keys, values = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
    sequence = _sequences(state.length, state.k.shape[1], index, resets, chunk)
    keys, values = last_tokens(keys, keep), last_tokens(values, keep)
    if resets is not None and sequence is not None and S:
        over = last_tokens(sequence != sequence[:, -1:], keep)
        keys, values = (x.masked_fill(along(over, x), 0.0) for x in (keys, values))
    last = AttentionState(keys, values, length)
    return _with_slots(last, state, k, v, state.first_k.shape[1]) if isinstance(state, FirstState) else last


def _with_slots(last: AttentionState, before: State | None, k: Tensor, v: Tensor, first: int) -> FirstState:
    """Return a state with the first tokens of the sequence, given the state before the tokens k and v."""
    if before is None:
        slots = [x.new_zeros(x.shape[0], first, *x.shape[2:]) for x in (k, v)]
    else:
        slots = [*before[3:]]
    return FirstState(*last, *(updated(old, x, last.length) for old, x in zip(slots, (k, v), strict=True)))


def _contained(
    run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, sequence: Tensor, causal: bool, window: int | None,
    scores: Scores, kept: Kept | None,
) -> Tensor:
    """Call `run` with zeros for NaN and inf, which masked products would carry into other sequences as 0 * NaN.

    The result is NaN for tokens that are nonfinite or see a nonfinite one.
    """
    if finite(q, k, v):
        return run(q, k, v, sequence, causal, window, scores, kept)
    past = k.shape[1] - q.shape[1]
    wrong_q, wrong_k, wrong_v = (~x.isfinite().flatten(2).all(-1) for x in (q, k, v))
    wrong = wrong_k | wrong_v
    q, k, v = (x.masked_fill(along(bad, x), 0.0) for x, bad in ((q, wrong_q), (k, wrong), (v, wrong)))
    y = run(q, k, v, sequence, causal, window, scores, kept)
    if kept is not None:  # equal weights of all visible tokens: is any wrong?
        none, marks = k.new_zeros(*k.shape[:2], 1, 1), wrong.to(k.dtype)[..., None, None]
        found = run(none[:, past:], none, marks, sequence, causal, window, Scores(1.0), kept)[..., 0, 0]
        return y.masked_fill(along((found > 0) | wrong_q, y), torch.nan)
    first, last = _visible(sequence, past, causal, window)
    count = pad(wrong.long().cumsum(1), (1, 0))
    seen = count.gather(1, last + 1) > count.gather(1, first)
    return y.masked_fill(along(seen | wrong_q, y), torch.nan)


def _visible(sequence: Tensor, past: int, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees, both [B, S]."""
    B, T = sequence.shape
    place = torch.arange(T, device=sequence.device).expand(B, T)
    # rolled rather than sliced, since an exporter would add a guard on the length of the slice
    first = torch.where(sequence != sequence.roll(1, 1), place, 0).cummax(1).values[:, past:]
    here = place[:, past:]
    last = here
    if not causal:
        ends = torch.where((sequence != sequence.roll(-1, 1)) | (place == T - 1), place, T)
        last = ends.flip(1).cummin(1).values.flip(1)[:, past:]
    if window is not None:
        first, last = torch.maximum(first, here - window + 1), torch.minimum(last, here + window - 1)
    return first, last


def _sequences(
    before: Tensor | None, past: int, index: Tensor, resets: Tensor | None, chunk: int | None
) -> Tensor | None:
    """Return the sequence of each key [B, past + S], -1 for unused slots; None if there is one sequence.

    index [B, S]: position of each token in its sequence. Chunks count as sequences.
    """
    if before is None and resets is None and chunk is None:
        return None
    if chunk is not None:
        now = (index % chunk == 0).long().cumsum(1)  # a reset also begins a chunk
    else:
        now = torch.zeros_like(index) if resets is None else resets.long().cumsum(1)
    if before is None:
        return now
    if chunk is not None:  # count the tokens of the last chunk only, which may be complete
        before = before - (before - 1).clamp(min=0) // chunk * chunk
    age = torch.arange(past, 0, -1, device=index.device)
    return torch.cat([torch.where(age <= before[:, None], 0, -1), now], 1)


def _narrower(window: int | None, chunk: int | None) -> int | None:
    """Return the number of tokens that a token sees at most, itself included, or None."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"attention: chunk must be at least 1; got {chunk}")
    if window is None or chunk is None:
        return chunk if window is None else window
    return min(window, chunk)


def last_tokens(x: Tensor, keep: int, own: bool = True) -> Tensor:
    """Return the last `keep` tokens of x [B, T, ...], padded in front with zeros.

    A view only if x is our own and has fewer than twice as many: it keeps the whole of x alive.
    """
    missing = keep - x.shape[1]
    if missing > 0:
        return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], 1)
    found = x[:, x.shape[1] - keep :]
    if torch.compiler.is_compiling() or (own and x.shape[1] < 2 * keep):
        return found
    return found.clone()


def _check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, rotary: float | None,
    state: State | None, return_state: bool, resets: Tensor | None, first: int,
) -> None:
    memory = not causal and window is None and rotary is None and resets is None  # k and v may differ in length from q
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    fits = fits and (memory or q.shape[1] == k.shape[1])
    if not fits or q.shape[3] != k.shape[3] or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(
            "attention expects q [B, S, H, D], k [B, S, G, D], v [B, S, G, DV] with G a divisor of H; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be at least 1; got {window}")
    if rotary is not None and q.shape[3] % 2:
        raise ValueError(f"attention: rotary positions need an even head width; got {q.shape[3]}")
    if not causal and (state is not None or return_state):
        raise ValueError("attention: a state needs causal=True")
    if resets is not None and (resets.shape != q.shape[:2] or resets.dtype != torch.bool):
        raise ValueError(f"attention expects resets bool {list(q.shape[:2])}; got {resets.dtype} {list(resets.shape)}")
    if state is not None:
        check_state(state, k, v, window, first)


def check_state(state: State, k: Tensor, v: Tensor, window: int | None, first: int = 0) -> None:
    """Raise ValueError unless a state has the shapes for new keys and values, and tokens for a window."""
    B, K = k.shape[0], state[0].shape[1] if state[0].dim() > 1 else 0
    shapes = [(B, K, *k.shape[2:]), (B, K, *v.shape[2:]), (B,)]
    shapes += [(B, first, *x.shape[2:]) for x in (k, v) if first]
    found = [tuple(t.shape) for t in state]
    if found != shapes:
        raise ValueError(f"attention expects a state of shapes {shapes}; got {found}")
    dispatch.check_real("attention", {f"state[{at}]": t for at, t in enumerate(state)})
    if window is not None and window - 1 > K:
        raise ValueError(f"attention: a state of {K} tokens is too short for a window of {window}")


def check_scores(heads: int, soft_cap: float | None, slopes: Tensor | None, sinks: Tensor | None) -> None:
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"attention: soft_cap must be positive; got {soft_cap}")
    for name, values in (("slopes", slopes), ("sinks", sinks)):
        if values is not None and values.shape != (heads,):
            raise ValueError(f"attention expects {name} [H] = [{heads}]; got {list(values.shape)}")


def _check_pairs(q: Tensor, k: Tensor, bias: Tensor | None, segments: Tensor | None, ordered: bool) -> None:
    """Raise ValueError unless a bias and segments fit. ordered: whether the order of tokens limits what they see."""
    B, S, H, _ = q.shape
    if ordered:
        raise ValueError("attention: bias and segments need causal=False, without window, chunk and resets")
    if bias is not None and bias.shape not in ((H, S, k.shape[1]), (H, B, S, k.shape[1])):
        raise ValueError(f"attention expects bias {[H, S, k.shape[1]]}; got {list(bias.shape)}")
    if segments is not None and not segments.shape == k.shape[:2] == (B, S):
        raise ValueError(f"attention expects segments [B, S] = {[B, S]}; got {list(segments.shape)}")


def _check_first(first: int | None, window: int | None, causal: bool) -> None:
    if first is not None and (first < 1 or window is None or not causal):
        raise ValueError(
            f"attention: first must be at least 1, with a window and causal=True; got first={first}, window={window}, "
            f"causal={causal}"
        )

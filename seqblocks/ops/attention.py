"""Softmax attention.   H heads, G heads of keys and values, D/DV head widths of q, k / v."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split, evenly
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Tokens, Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seqblocks.kernels.attention import AttentionState, FirstState
    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call
    from seqblocks.workspace.attention import Scores


class Heads(Op):
    """Base of the kinds of attention. Several query heads may share a head of keys and values."""

    heads: int = argument(..., "number of heads, H; must divide the width of q", ge=1)
    kv_heads: int = argument(0, "heads of keys and values, G; must divide heads (0: as many as heads)", ge=0)
    scale: float = argument(0.0, "factor of the scores (0: 1 / sqrt(D))", ge=0)
    soft_cap: float = argument(0.0, "limit of the scores s, which become soft_cap tanh(s / soft_cap) (0: none)", ge=0)
    sinks: bool = argument(
        False, "whether each head has a learned score `sinks` [H] of a further key, whose value is 0"
    )
    logsumexp: bool = argument(
        False, "whether each head has a further feature, the log of the sum of exponentials of its scores, "
        "for `merge_attention`"
    )

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether it returns float32 in a 16-bit model: 16 bits round a log to about 1 %."""
        return self.logsumexp

    @property
    def shared(self) -> int:
        """Return the number of heads of keys and values."""
        return self.kv_heads or self.heads

    def shape(self, q: Wire, k: Wire, v: Wire) -> Wire:
        width = must_divide(self.heads, q.features, "heads", "the width of q")
        must_divide(self.shared, self.heads, "kv_heads", "heads")
        if k.features != self.shared * width:
            note = k.origin_note("`k`")
            raise Fault(
                "E402",
                f"'k' must have {self.shared * width} features",
                at="k",
                expected=f"{self.shared * width} ({self.shared} heads as wide as q's, {width})",
                found=str(k.features),
                notes=[note] if note else [],
            )
        must_divide(self.shared, v.features, "kv_heads" if self.kv_heads else "heads", "the width of v", at="v")
        return q.with_features((v.features // self.shared + self.logsumexp) * self.heads)

    def parameters(self, q: Wire, k: Wire, v: Wire) -> dict[str, Parameter]:
        return {"sinks": Parameter((self.heads,), Init("zeros"), decay=False)} if self.sinks else {}

    def splits(self, ranks: int, q: Wire, k: Wire, v: Wire) -> list[Split]:
        """Split by heads. If all queries share one head of keys and values, each rank computes that head."""
        alone = self.shared == 1
        others = [None] * (len(self.ports) - 3)
        found = evenly(self, ranks, "heads", (q, k, v, *others), whole=("k", "v") if alone else ())
        if not alone and self.shared % ranks:
            raise Fault("E401", f"kv_heads {self.shared} cannot be dealt out to {ranks} ranks", at="kv_heads")
        kv_heads = self.kv_heads if alone else self.kv_heads // ranks
        return [each._replace(op=each.op.model_copy(update={"kv_heads": kv_heads})) for each in found]

    def cut_memory(self, tape: Tape, q: Value, k: Value, v: Value) -> list[Value]:
        """Record the views of all heads [batch, seq, heads, width] on a tape."""
        counts = (self.heads, self.shared, self.shared)
        return [tape.view(x, (*x.shape[:-1], n, x.shape[-1] // n)) for x, n in zip((q, k, v), counts, strict=True)]

    def pair(self, q: Wire, v: Wire) -> int:
        """Return the multiply-accumulates of a query with one visible key."""
        return q.features + v.features // self.shared * self.heads


@primitive("attention")
class Attention(Heads):
    """Multi-head attention, causal by default: a token attends to itself and earlier tokens of its sequence.

    q is [batch, seq, H * D], k [batch, seq, G * D], v [batch, seq, G * DV]; each head of k and v serves H / G of q.
    `soft_cap` is that of Gemma 2, `sinks` those of gpt-oss. With `bias: alibi`, each token of distance subtracts a
    head's slope from a score: 2^(-8 / H), 2^(-16 / H), …; with `learned_alibi`, `slopes` [H] begins with these. With
    `bias: relative`, each head adds a learned number for the position of the query relative to the key: of tokens with
    R rows and C columns, `relative` [(2 R - 1) * (2 C - 1), H], for the rows and columns between them (Swin), and of L
    tokens in a sequence, [2 L - 1, H].

    State per sequence: keys and values of the last `window` - 1 or `chunk` - 1 tokens (without these, of up to `cache`
    tokens), in the model's dtype, and the number of tokens. Keys and values may have another rate than the queries: a
    token sees those that are complete when it ends, and the result is 0 where there are none. `window` and `cache` then
    count keys. Rotary positions count on in a new chunk (Llama 4). With
    `keep_first`, keys and values of as many first tokens as well (StreamingLLM, whose positions are those in its cache,
    while here they are those in the sequence).

    `scores` are values that are added to the scores: H wide, one for each key and head (forgetting gates), or
    H * L wide without `causal`, for each of L keys, head by head (relative positions by a network). With `prefix`, the
    first tokens of a sequence see each other, also later ones (PrefixLM, PaliGemma). Such a step streams only if they
    come before the stream, as those of the verb `prefix` do.
    """

    ports = (Port("q", "queries"), Port("k", "keys", other_rate="keys"), Port("v", "values", other_rate="keys"),
             Port("scores", "values that are added to the scores", optional=True))  # fmt: skip
    reads = "past"
    window: int = argument(
        0, "visible tokens: the current one and window - 1 before it; if not causal, as many after it (0: all)", ge=0
    )
    keep_first: int = argument(0, "first tokens of a sequence that stay visible outside the window (0: none)", ge=0)
    chunk: int = argument(0, "cut sequences into chunks of this many tokens: a token sees its own (0: no chunks)", ge=0)
    rotary: float = argument(0.0, "base of rotary positions, for instance 10000 (0: none)", ge=0)
    bias: Literal["none", "alibi", "learned_alibi", "relative"] = argument(
        "none", "what is added to the scores: nothing, -slope times the distance of query and key, or a learned number "
        "for each relative position, which needs causal: false"
    )
    prefix: int = argument(0, "first tokens of a sequence that see each other, also later ones (0: none)", ge=0)
    causal: bool = argument(True, "whether a token attends to the past only; otherwise the step cannot stream")
    cache: int = argument(2048, "maximum number of tokens of a stream, if there is neither window nor chunk", ge=1)
    source = (
        "Vaswani et al. 2017 (arXiv:1706.03762); rotary: RoFormer (arXiv:2104.09864); soft_cap: Gemma 2 "
        "(arXiv:2408.00118); sinks: gpt-oss (arXiv:2508.10925); alibi: arXiv:2108.12409; relative: Swin "
        "(arXiv:2103.14030)"
    )

    def shape(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> Wire:
        found = super().shape(q, k, v)
        width = q.features // self.heads
        if q.rate != k.rate:
            self._check_rates(q, k)
            if scores:
                message = "values that are added to the scores need as many keys as queries"
                raise Fault("E210", message, at="scores", hint="remove `scores:`")
            return q.with_features(found.features)
        if 0 < self.rotary < 1:
            raise Fault(
                "E209", "the base of rotary positions must be 0 or at least 1", at="rotary", found=f"{self.rotary:g}",
                hint="rotary: 10000",
            )
        if self.window and self.chunk:
            hint = "remove `window:` or `chunk:`"
            raise Fault("E210", "the visible tokens are limited twice: by `window` and `chunk`", at="chunk", hint=hint)
        if self.keep_first and not (self.window and self.causal):
            hint = "add `window:`" if self.causal else "remove `causal:`"
            message = "first tokens are kept besides a causal window only"
            raise Fault("E210", message, at="keep_first", hint=hint)
        if self.rotary and width % 2:
            raise Fault("E401", f"rotary positions rotate pairs of features, but a head has {width}", at="rotary")
        if self.bias == "relative":
            self._check_relative(q)
        if self.prefix and not (self.causal and not (self.chunk or self.keep_first)):
            name = next((each for each in ("chunk", "keep_first") if getattr(self, each)), "causal: false")
            message = f"`prefix` does not go with `{name}`"
            raise Fault("E210", message, at="prefix", hint="remove `prefix:`")
        if scores:
            self._check_added(q, scores)
        return v.with_features(found.features)

    def _check_rates(self, q: Wire, k: Wire) -> None:
        """Raise Fault (E210) for an option that needs keys at the rate of the queries."""
        fitting = {"rotary": 0, "bias": "none", "chunk": 0, "keep_first": 0, "prefix": 0, "causal": True}
        for name, value in fitting.items():
            if getattr(self, name) != value:
                hints = {
                    "rotary": "rotate queries and keys by `rotary` before their tokens are merged",
                    "causal": "use cross_attention, whose tokens read all keys",
                }
                message = f"`{name}{'' if value is not True else ': false'}` needs as many keys as queries"
                found = f"queries of {_input_tokens(q)}, keys of {_input_tokens(k)}"
                raise Fault("E210", message, at=name, found=found, hint=hints.get(name, f"remove `{name}:`"))

    def _check_added(self, q: Wire, scores: Wire) -> None:
        """Raise Fault (E210, E402) unless the values that are added to the scores fit."""
        widths = [self.heads]
        if not self.causal and not self.span and isinstance(q.length, int):
            widths.append(self.heads * q.length)
        if scores.features not in widths:
            what = f"{self.heads} (a number for each head and key)", f"{widths[-1]} (for each head and pair of tokens)"
            expected = " or ".join(what[: len(widths)])
            raise Fault("E402", "'scores' must have a number for each head", at="scores", expected=expected,
                        found=str(scores.features))  # fmt: skip
        if scores.features == self.heads and (self.rotary or self.soft_cap):
            name = "rotary" if self.rotary else "soft_cap"
            hints = {"rotary": "rotate queries and keys by the verb `rotary`", "soft_cap": "remove `soft_cap:`"}
            message = f"`{name}` does not go with values that are added to the scores of keys"
            raise Fault("E210", message, at=name, hint=hints[name])
        if scores.features > self.heads and self.bias == "relative":
            raise Fault("E210", "scores of pairs are given twice", at="bias", hint="remove `bias:` or `scores:`")

    def adds_to_keys(self, scores: Wire | Tensor | Value | None) -> bool:
        """Return whether the values that are added to the scores are those of single keys."""
        if scores is None:
            return False
        return (scores.features if isinstance(scores, Wire) else scores.shape[-1]) == self.heads

    def _check_relative(self, q: Wire) -> None:
        """Raise Fault (E210, E412) unless relative positions can be learned: of a known number, to both sides."""
        if self.causal or self.span:
            hint = "causal: false" if self.causal else "remove `window:` or `chunk:`"
            message = "relative positions are learned for all pairs of tokens"
            raise Fault("E210", message, at="bias", hint=hint)
        if q.grid is None and not isinstance(q.length, int):
            message, hint = "relative positions need a known number of tokens", "give the input a length"
            raise Fault("E412", message, at="bias", found=f"{q}", hint=hint)

    def relative_grid(self, q: Wire) -> tuple[int, int]:
        """Return the rows and columns of the tokens; those of a sequence are one row."""
        assert q.grid or isinstance(q.length, int)
        return q.grid or (1, q.length)  # type: ignore[return-value]

    def is_upright(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> bool:
        return self.bias == "relative" and q.grid is not None

    def keeps_apart(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> bool:
        return not (self.causal or self.span)

    def parameters(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> dict[str, Parameter]:
        found = super().parameters(q, k, v)
        if self.bias == "relative":
            rows, columns = self.relative_grid(q)
            shape = ((2 * rows - 1) * (2 * columns - 1), self.heads)
            found["relative"] = Parameter(shape, Init("trunc_normal", (0.02,)), decay=False)
        if self.bias == "learned_alibi":
            found["slopes"] = Parameter((self.heads,), Init("alibi"), decay=False, full_precision=True)
        return found

    def splits(self, ranks: int, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> list[Split]:
        # a slope depends on the head's number, and a table has all heads
        return [] if scores or self.bias in ("alibi", "relative") else super().splits(ranks, q, k, v)

    def slopes(self, p: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
        """Return the slopes of the bias [H], or None."""
        from seqblocks.kernels.attention import alibi_slopes

        return alibi_slopes(self.heads, device) if self.bias == "alibi" else p.get("slopes")

    @property
    def span(self) -> int:
        """Return the number of tokens that a token sees at most, itself included (0: all)."""
        return self.window or self.chunk

    def cache_size(self) -> int:
        """Return the number of tokens in the state."""
        return self.span - 1 if self.span else self.cache

    def state(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> dict[str, State]:
        if not self.causal:
            return {}
        width = k.features + self.heads * self.adds_to_keys(scores)
        found = {
            "k": State((self.cache_size(), width), "model", per_token=not self.span),
            "v": State((self.cache_size(), v.features), "model", per_token=not self.span),
            "length": State((), "int64"),
        }
        if self.keep_first:
            widths = {"first_k": width, "first_v": v.features}
            found |= {name: State((self.keep_first, width), "model") for name, width in widths.items()}
        return found

    def cannot_stream(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> str | None:
        if self.causal and q.prefix < self.prefix:
            return f"its first {self.prefix} tokens see each other: they must come before the stream, as with `prefix`"
        return None if self.causal else "it is not causal: it reads the whole sequence"

    def looks_ahead(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> Tokens:
        if self.causal:
            return (self.prefix - 1) * q.rate if q.prefix < self.prefix else 0
        return (self.span - 1) * q.rate if self.span else math.inf

    def looks_back(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> Tokens:
        if q.rate != k.rate:
            return math.inf
        return (self.span - 1) * q.rate if self.span and not self.keep_first else math.inf

    def ignores_resets(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> str | None:
        if self.prefix:
            return "its first tokens see each other"
        if self.bias == "relative" or (scores and not self.adds_to_keys(scores)):
            return "its scores of pairs are those of one sequence"
        return None if q.rate == k.rate else "keys of merged tokens may be of two sequences"

    def macs(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> int:
        """Count those of a token with an average number of keys; for an open length, a full window or half a cache.

        Without `causal`, a window reaches as far to the other side, and all of the cache counts.
        """
        width = self.pair(q, v)
        if q.rate != k.rate and isinstance(q.length, int):
            rate, of_keys = (int(rate * q.rate.denominator * k.rate.denominator) for rate in (q.rate, k.rate))
            return complete_pairs(q.length, rate, of_keys, self.window) * width // q.length
        if isinstance(q.length, int):
            return self.seen(q.length) * width // q.length
        if self.chunk:
            return self.seen(self.chunk) * width // self.chunk
        if self.causal:
            return (self.window + self.keep_first if self.window else self.cache // 2) * width
        return (2 * self.window - 1 if self.window else self.cache) * width

    def seen(self, tokens: int) -> int:
        """Return the number of pairs of a query and a visible key in a sequence of `tokens`."""
        if self.chunk:
            whole, rest = divmod(tokens, self.chunk)
            return whole * self.pairs(self.chunk, self.chunk) + self.pairs(rest, rest)
        seen = self.pairs(tokens, min(self.window or tokens, tokens))
        outside = max(tokens - self.window, 0)  # tokens that the window has left behind, and how many of them are first
        kept = min(self.keep_first, outside)
        first = min(self.prefix, tokens)
        most = min(self.window or first, first)
        later = most * first - most * (most - 1) // 2 - first if first else 0  # pairs within the prefix, to later keys
        return seen + kept * outside - kept * (kept - 1) // 2 + later

    def pairs(self, tokens: int, most: int) -> int:
        """Return the number of pairs of a query and one of `most` visible keys, itself included."""
        causal = most * tokens - most * (most - 1) // 2  # the first tokens have fewer visible keys
        return causal if self.causal else 2 * causal - tokens

    def calls(self, q: Wire, k: Wire, v: Wire, scores: Wire | None = None) -> KernelCall:
        return ("attention", {"window": self.span or None}) if q.rate == k.rate else ("attention_between", {})

    def transition(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None = None
    ) -> Transition | None:
        from seqblocks.kernels.attention import attention_state

        k, v = (x.unflatten(-1, (self.shared, -1)) for x in (k, v))
        if scores is not None:
            _, k = self._with_added(q.unflatten(-1, (self.heads, -1)), k, scores)

        def move(state: dict[str, Tensor]) -> dict[str, Tensor]:
            before = self.in_heads(state)
            keep = self.span - 1 if self.span else before.k.shape[1] + k.shape[1]
            after = attention_state(
                k, v, state=before, keep=keep, chunk=self.chunk or None, rotary=self.rotary or None, resets=call.resets
            )  # fmt: skip
            return self.flat(after)

        return move

    def in_heads(self, state: dict[str, Tensor]) -> AttentionState | FirstState:
        """Return a state of the kernel, given that of the step."""
        from seqblocks.kernels.attention import AttentionState, FirstState

        parts = {name: x if name == "length" else x.unflatten(-1, (self.shared, -1)) for name, x in state.items()}
        return FirstState(**parts) if self.keep_first else AttentionState(**parts)

    def flat(self, state: AttentionState | FirstState) -> dict[str, Tensor]:
        """Return the state of the step, given one of the kernel."""
        return {name: x if name == "length" else x.flatten(-2) for name, x in state._asdict().items()}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        if self.keep_first or self.logsumexp:
            return None
        import torch

        from seqblocks.kernels.attention.token import prepare

        def prepared(scale: float | None) -> TokenFunction:
            return prepare(
                self.heads, self.shared, self.rotary or None, scale, window=self.span > 0, chunk=self.chunk or None,
                soft_cap=self.soft_cap or None, slopes=self.slopes(p, torch.device("cpu")), sinks=p.get("sinks"),
            )

        run = prepared(self.scale or None)

        def step(
            keys: Tensor, values: Tensor, length: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            made = run
            if scores is not None:
                made = prepared(self._scale(q.shape[-1] // self.heads))
                pair = q.unflatten(-1, (self.heads, -1)), k.unflatten(-1, (self.shared, -1))
                q, k = (x.flatten(-2) for x in self._with_added(*pair, scores))
            y, k, v, length = made.one(keys, values, length, q, k, v)
            if self.span:
                return y, k, v, length
            must_hold(self.cache, length, torch.compiler.is_compiling(), INSTEAD)
            return y, k, v, length

        return TokenFunction(step)

    def _scale(self, width: int) -> float:
        return self.scale or width**-0.5

    def _with_added(self, q: Tensor, k: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k with features whose products are `scores` [..., H], given a factor of all products.

        A head of k serves H / G heads of q: it gets a feature for each of these, of which q reads its own.
        """
        import torch

        each = self.heads // self.shared
        own = torch.eye(each, dtype=q.dtype, device=q.device).repeat(self.shared, 1)
        added = scores.to(k.dtype).unflatten(-1, (self.shared, each)) / self._scale(q.shape[-1])
        return torch.cat([q, own.expand(*q.shape[:-1], each)], -1), torch.cat([k, added], -1)

    def memory(
        self, tape: Tape, p: Mapping[str, Value], q: Value, k: Value, v: Value, added: Value | None = None
    ) -> Value:
        from seqblocks.workspace import attention

        q, k, v = self.cut_memory(tape, q, k, v)
        if q.shape[1] != k.shape[1]:
            scores = attention.Scores(self.soft_cap > 0, None, p.get("sinks"), None, self.logsumexp)
            return tape.view(attention.between(tape, q, k, v, self.window, scores), tape.out)
        if self.rotary:
            q, k = attention.rotary(tape, q), attention.rotary(tape, k)
        if added and self.adds_to_keys(added):
            each = self.heads // self.shared
            own = tape.new((*q.shape[:-1], each), q.item)
            numbers = tape.unary(tape.view(added, (*k.shape[:-1], each)), [])
            q, k = tape.cat([q, own]), tape.cat([k, numbers])
        slopes = tape.new((self.heads,), 8) if self.bias == "alibi" else p.get("slopes")
        bias = attention.relative(tape, p["relative"], q.shape[1]) if self.bias == "relative" else None
        if added and not self.adds_to_keys(added):
            bias = tape.view(added, (self.heads, q.shape[0], q.shape[1], k.shape[1]))
        scores = attention.Scores(self.soft_cap > 0, slopes, p.get("sinks"), bias, self.logsumexp)
        if self.prefix and self.prefix < q.shape[1]:
            y = self._memory_of_all(tape, q, k, v, scores)
            q, k, v = (tape.slice(x, (x.shape[0], self.prefix, *x.shape[2:])) for x in (q, k, v))
            first = attention.fused(tape, q, k, v) if scores.plain else attention.explicit(tape, q, k, v, scores)
            rest = tape.slice(y, (y.shape[0], y.shape[1] - self.prefix, *y.shape[2:]))
            return tape.view(tape.cat([first, rest], 1), tape.out)
        return tape.view(self._memory_of_all(tape, q, k, v, scores), tape.out)

    def _memory_of_all(self, tape: Tape, q: Value, k: Value, v: Value, scores: Scores) -> Value:
        """Record the attention of all heads [B, S, H, DV]."""
        from seqblocks.workspace import attention

        if self.keep_first:
            return attention.with_first(tape, q, k, v, self.window, self.keep_first, scores)
        if self.span and self.span < q.shape[1]:
            return attention.windowed(tape, q, k, v, self.span, self.causal, scores)
        run = attention.fused if scores.plain else partial(attention.blocks, scores=scores, causal=self.causal)
        return run(tape, q, k, v)

    def _relative(self, p: Mapping[str, Tensor], call: Call, q: Tensor) -> Tensor | None:
        """Return what relative positions add to the scores [H, S, S], or None. Raises RunError for another grid."""
        if self.bias != "relative":
            return None
        table, tokens = p["relative"], q.shape[1]
        size = call.grid.of(tokens) if call.grid else None
        size = size if size and (2 * size[0] - 1) * (2 * size[1] - 1) == table.shape[0] else (1, tokens)
        if (2 * size[0] - 1) * (2 * size[1] - 1) != table.shape[0]:
            raise RunError(
                f"attention has {table.shape[0]} relative positions, and these {tokens} tokens have others: pass an "
                "image of the size in the spec"
            )
        return relative_bias(table, size)

    def forward(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from seqblocks.kernels import attention

        q = q.unflatten(-1, (self.heads, -1))
        k, v = (x.unflatten(-1, (self.shared, -1)) for x in (k, v))
        state = self.in_heads(call.state) if call.state else None
        if q.shape[1] != k.shape[1]:
            return self._between(p, call, q, k, v, state)
        bias, scale = self._relative(p, call, q), self.scale or None
        if scores is not None and self.adds_to_keys(scores):
            scale = self._scale(q.shape[-1])
            q, k = self._with_added(q, k, scores)
        elif scores is not None:
            bias = scores.unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3)
        run = partial(
            attention, window=self.window or None, rotary=self.rotary or None, scale=scale,
            soft_cap=self.soft_cap or None, slopes=self.slopes(p, q.device), sinks=p.get("sinks"),
            logsumexp=self.logsumexp,
        )  # fmt: skip
        out = run(
            q,
            k,
            v,
            causal=self.causal,
            chunk=self.chunk or None,
            first=self.keep_first or None,
            bias=bias,
            segments=call.segments,
            state=state,
            keep=self.cache_size(),
            return_state=call.return_state,
            resets=call.resets,
        )
        if not self.prefix or call.state:  # a stream begins after the prefix
            return self._finished(call, out)
        if call.relay:
            raise RunError(f"attention with `prefix: {self.prefix}` needs all tokens of a sequence on one device")
        first = run(*(x[:, : self.prefix] for x in (q, k, v)), causal=False)
        assert not isinstance(first, tuple)
        if isinstance(out, tuple):
            return self._finished(call, (torch.cat([first, out[0][:, self.prefix :]], 1), out[1]))
        return self._finished(call, torch.cat([first, out[:, self.prefix :]], 1))

    def _between(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor,
        state: AttentionState | FirstState | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to keys of another rate, of which there are more or fewer than queries."""
        from seqblocks.kernels.attention import attention_between

        out = attention_between(
            q, k, v, window=self.window or None, scale=self.scale or None, soft_cap=self.soft_cap or None,
            sinks=p.get("sinks"), logsumexp=self.logsumexp, state=state, keep=self.cache_size(),
            return_state=call.return_state,
        )  # fmt: skip
        return self._finished(call, out)

    def _finished(
        self, call: Call, out: Tensor | tuple[Tensor, AttentionState | FirstState]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output and the state, from what a kernel returned. Raises RunError if the cache is too small."""
        if not isinstance(out, tuple):
            return out.flatten(-2), {}
        y, last = out
        if not self.span:
            must_hold(self.cache, last.length, call.compiling, INSTEAD)
        return y.flatten(-2), self.flat(last)


def _input_tokens(x: Wire) -> str:
    return f"{x.rate} input token{'s' if x.rate > 1 else ''} each"


def complete_pairs(queries: int, rate: int, of_keys: int, window: int) -> int:
    """Return the number of pairs of one of the queries and a key that it sees, at these rates."""
    seen = sum_of_floors(queries, rate, rate, of_keys)  # keys that are complete when a query ends
    if not window:
        return seen
    first = min(window * of_keys // rate, queries)  # the first query from which a window has moved on
    passed = sum_of_floors(queries - first, rate, (first + 1) * rate + of_keys - 1, of_keys)
    return seen - passed + (queries - first) * window


def sum_of_floors(count: int, a: int, b: int, by: int) -> int:
    """Return the sum of (a i + b) // by for i from 0 to count - 1, without a loop over i."""
    total = 0
    while count > 0:
        total += (a // by) * count * (count - 1) // 2 + (b // by) * count
        a, b = a % by, b % by
        last = a * count + b
        if last < by:
            break
        count, b, a, by = last // by, last % by, by, a
    return total


def relative_bias(table: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return the entries [H, S, S] of a table [(2 R - 1) * (2 C - 1), H] for each query and key of a grid."""
    import torch

    rows, columns = grid
    row, column = (torch.arange(n, device=table.device) for n in grid)
    by_row = (row[:, None] - row + rows - 1) * (2 * columns - 1)
    by_column = column[:, None] - column + columns - 1
    index = (by_row[:, None, :, None] + by_column[None, :, None, :]).reshape(-1)
    tokens = rows * columns
    return table[index].view(tokens, tokens, -1).permute(2, 0, 1)


def must_hold(cache: int, length: Tensor, compiling: bool, instead: str = "") -> None:
    """Raise RunError if a cache is too small for a sequence; in a compiled model, fail an assertion.

    length [B]: tokens of each sequence. instead: what else the message proposes.
    """
    import torch

    from seqblocks.kernels.dispatch.compiled import batched

    advice = f"tokens, but its cache has room for {cache}; set a larger `cache:`{instead}"
    if compiling:
        torch._assert_async((length <= cache).all(), f"attention has seen more {advice}")
    elif length.numel() and not batched(length) and int(length.max()) > cache:
        raise RunError(f"attention has seen {int(length.max())} {advice}")


INSTEAD = ", or a `window:` or `chunk:`"

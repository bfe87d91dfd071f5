"""Attention to blocks of keys that each token selects.   H heads, G of keys and values, I that score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault
from seqblocks.op import Port, argument, primitive
from seqblocks.ops.attention import Heads, complete_pairs, must_hold
from seqblocks.parameters import Parameter
from seqblocks.roles import Split
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("selected_attention")
class SelectedAttention(Heads):
    """Multi-head attention to the blocks of earlier keys whose scores are highest, chosen anew for each token.

    q is [batch, seq, H * D], k [batch, seq, G * D], v [batch, seq, G * DV]. `index_k` has a token for each `block` of
    keys: merged tokens, or as many tokens as k to select single keys.
    `index_q` [batch, seq, I * E] scores it: the sum over the I / groups heads of a group of

        activation(index_scale * index_q . index_k) * weight

    A token reads the `top` best blocks of those that are complete when it ends. The choice passes no gradient on, so
    `index_q`, `index_k` and `weight` learn only from what else reads them.

    State per sequence: keys and values of up to `cache` tokens, their blocks' `index_k`, and the number of tokens.
    """

    ports = (
        Port("q", "queries"), Port("k", "keys", other_rate="keys"), Port("v", "values", other_rate="keys"),
        Port("index_q", "queries that score blocks"),
        Port("index_k", "keys that are scored, one for each block", other_rate="blocks"),
        Port("weight", "a factor for the scores of each of the I heads", optional=True),
    )  # fmt: skip
    reads = "past"
    top: int = argument(..., "how many blocks a token reads", ge=1)
    block: int = argument(1, "keys of a block", ge=1)
    first: int = argument(0, "first blocks of a sequence that are always read; they count as chosen", ge=0)
    last: int = argument(
        0, "blocks that are always read, the one in which a token ends and those before it; they count as chosen", ge=0
    )
    groups: int = argument(0, "groups of heads, each of which chooses for itself (0: as many as kv_heads)", ge=0)
    index_heads: int = argument(0, "number of heads that score, I (0: as many as heads)", ge=0)
    index_scale: float = argument(0.0, "factor of their products (0: 1 / sqrt(E))", ge=0)
    activation: Literal["softmax", "relu", "none"] = argument(
        "softmax", "function of the products of a head: softmax over the complete blocks, relu, or none"
    )
    cache: int = argument(2048, "maximum number of keys of a stream, rounded up to whole blocks", ge=1)
    source = "NSA (arXiv:2502.11089); MoBA (arXiv:2502.13189); the indexer of DeepSeek-V3.2 (arXiv:2512.02556)"

    def shape(  # type: ignore[override]
        self, q: Wire, k: Wire, v: Wire, index_q: Wire, index_k: Wire, weight: Wire | None = None
    ) -> Wire:
        found = super().shape(q, k, v)
        entry = "index_heads" if self.index_heads else "heads"
        width = must_divide(self.scoring, index_q.features, entry, "the width of index_q", at="index_q")
        if index_k.features % width or self.scoring % (index_k.features // width):
            note = index_k.origin_note("`index_k`")
            raise Fault(
                "E402", f"'index_k' must have heads as wide as index_q's, {width}", at="index_k",
                expected=f"{width} times a divisor of {self.scoring}", found=f"{index_k.features}",
                notes=[note] if note else [],
            )  # fmt: skip
        if weight:
            must_match("weight", weight, self.scoring, "one for each head that scores")
        at = "groups" if self.groups else "kv_heads" if self.kv_heads else "heads"
        must_divide(self.choosing, self.heads, "groups", "heads", at=at)
        must_divide(self.choosing, self.scoring, "groups", entry, at=at)
        if self.shared % self.choosing and self.choosing % self.shared:
            expected = f"a divisor or a multiple of {self.shared}"
            raise Fault("E401", f"groups ({self.choosing}) do not fit {self.shared} heads of keys", at=at,
                        expected=expected)  # fmt: skip
        if index_k.rate != self.block * k.rate:
            each = index_k.rate / k.rate
            hint = f"block: {int(each)}" if each == int(each) else "merge the tokens of k"
            raise Fault("E210", f"a token of index_k must be made of {self.block} of k", at="block",
                        found=f"{float(each):g} of k", hint=hint)  # fmt: skip
        if self.first + self.last > self.top:
            raise Fault("E210", f"`first` and `last` are more than the {self.top} blocks that a token reads", at="top",
                        hint=f"top: {self.first + self.last}")  # fmt: skip
        return q.with_features(found.features)

    @property
    def scoring(self) -> int:
        """Return the number of heads that score."""
        return self.index_heads or self.heads

    @property
    def choosing(self) -> int:
        """Return the number of groups that choose."""
        return self.groups or self.shared

    def parameters(self, q: Wire, k: Wire, v: Wire, *_: Wire | None) -> dict[str, Parameter]:
        return super().parameters(q, k, v)

    def splits(  # type: ignore[override]
        self, ranks: int, q: Wire, k: Wire, v: Wire, index_q: Wire, index_k: Wire, weight: Wire | None = None
    ) -> list[Split]:
        """Split by heads, if all kinds of heads can be dealt out. Otherwise each rank computes all of them."""
        counts = {"heads": self.heads, "kv_heads": self.shared, "groups": self.choosing, "index_heads": self.scoring}
        scored = index_k.features * self.scoring // index_q.features
        if any(count % ranks for count in (scored, *counts.values())):
            return []
        local = self.model_copy(update={name: count // ranks for name, count in counts.items()})
        wires = (q, k, v, index_q, index_k, weight)
        parts = tuple(port.name for port, wire in zip(self.ports, wires, strict=True) if wire)
        return [Split(local, parts, dict.fromkeys(self.parameters(q, k, v), 0))]

    @property
    def cached_blocks(self) -> int:
        """Return the number of blocks in the state."""
        return -(-self.cache // self.block)

    def state(
        self, q: Wire, k: Wire, v: Wire, index_q: Wire, index_k: Wire, weight: Wire | None = None
    ) -> dict[str, State]:
        keys = self.cached_blocks * self.block
        return {
            "k": State((keys, k.features), "model", per_token=True),
            "v": State((keys, v.features), "model", per_token=True),
            "blocks": State((self.cached_blocks, index_k.features), "model"),
            "length": State((), "int64"),
        }

    def ignores_resets(self, *wires: Wire | None) -> str:
        return "it chooses among the blocks of one sequence"

    def macs(
        self, q: Wire, k: Wire, v: Wire, index_q: Wire, index_k: Wire, weight: Wire | None = None
    ) -> int:
        """Count the scores of all complete blocks and the keys that are read, on average."""
        width, most = self.pair(q, v), self.top * self.block
        if not isinstance(q.length, int):
            return self.cached_blocks // 2 * index_q.features + min(most, self.cache // 2) * width
        pairs = []
        for wire, window in ((index_k, 0), (k, most)):
            rate, of_keys = (int(x * q.rate.denominator * wire.rate.denominator) for x in (q.rate, wire.rate))
            pairs.append(complete_pairs(q.length, rate, of_keys, window))
        return (pairs[0] * index_q.features + pairs[1] * width) // q.length

    def memory(
        self, tape: Tape, p: Mapping[str, Value], q: Value, k: Value, v: Value, index_q: Value, index_k: Value,
        weight: Value | None = None,
    ) -> Value:
        from seqblocks.workspace import attention

        q, k, v = self.cut_memory(tape, q, k, v)
        scores = attention.Scores(self.soft_cap > 0, None, p.get("sinks"), None, self.logsumexp)
        shape = index_k.shape[1], self.scoring, self.choosing
        return tape.view(attention.selected(tape, q, k, v, shape, self.activation, scores), tape.out)

    def forward(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels.attention import Choice, selected_attention

        q, index_q = q.unflatten(-1, (self.heads, -1)), index_q.unflatten(-1, (self.scoring, -1))
        k, v = (x.unflatten(-1, (self.shared, -1)) for x in (k, v))
        width = index_q.shape[-1]
        index_k = index_k.unflatten(-1, (-1, width))
        state = None
        if call.state:
            heads = {"k": (self.shared, -1), "v": (self.shared, -1), "blocks": (-1, width)}
            state = [x.unflatten(-1, heads[n]) if n in heads else x for n, x in call.state.items()]
        choice = Choice(
            self.top, self.choosing, self.block, self.first, self.last, self.activation,
            self.index_scale or width**-0.5,
        )  # fmt: skip
        out = selected_attention(
            q, k, v, index_q, index_k, choice, weight=weight, scale=self.scale or None, soft_cap=self.soft_cap or None,
            sinks=p.get("sinks"), logsumexp=self.logsumexp, state=None if state is None else tuple(state),
            keep=self.cached_blocks, return_state=call.return_state,
        )  # fmt: skip
        if not isinstance(out, tuple):
            return out.flatten(-2), {}
        y, last = out
        must_hold(last.k.shape[1], last.length, call.compiling)
        return y.flatten(-2), {n: x if n == "length" else x.flatten(-2) for n, x in last._asdict().items()}

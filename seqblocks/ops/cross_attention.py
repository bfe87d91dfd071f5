"""Softmax attention over another sequence.   H heads, G heads of keys and values, D/DV head widths of q, k / v."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from seqblocks.errors import RunError
from seqblocks.op import Port, primitive
from seqblocks.ops.attention import Heads
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall
    from seqblocks.runtime.call import Call

EMPTY = "cross_attention needs a memory of at least one token, but it is empty"


@primitive("cross_attention")
class CrossAttention(Heads):
    """Multi-head attention over another sequence, the memory: each token attends to all of it.

    q is [batch, seq, H * D], k [batch, memory, G * D], v [batch, memory, G * DV]; each head of k and v serves H / G of
    q. It can stream if the memory does not depend on the streaming input.
    """

    ports = (
        Port("q", "queries"), Port("k", "keys of the memory", length="memory"),
        Port("v", "values of the memory", length="memory"),
    )  # fmt: skip
    source = "Vaswani et al. 2017 (arXiv:1706.03762), encoder-decoder attention"

    def macs(self, q: Wire, k: Wire, v: Wire) -> int:
        return k.length * self.pair(q, v) if isinstance(k.length, int) else 0

    def calls(self, q: Wire, k: Wire, v: Wire) -> KernelCall:
        return "attention", {"window": None}

    def memory(self, tape: Tape, p: Mapping[str, Value], q: Value, k: Value, v: Value) -> Value:
        from seqblocks.workspace import attention

        scores = attention.Scores(self.soft_cap > 0, None, p.get("sinks"), None, self.logsumexp)
        run = attention.fused if scores.plain else partial(attention.blocks, scores=scores, causal=False)
        return tape.view(run(tape, *self.cut_memory(tape, q, k, v)), tape.out)

    def forward(self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from seqblocks.kernels import attention

        if k.shape[1] == 0:
            raise RunError(EMPTY)
        q = q.unflatten(-1, (self.heads, -1))
        k, v = (x.unflatten(-1, (self.shared, -1)) for x in (k, v))
        out: Any = attention(
            q, k, v, causal=False, scale=self.scale or None, soft_cap=self.soft_cap or None, sinks=p.get("sinks"),
            logsumexp=self.logsumexp,
        )  # fmt: skip
        return out.flatten(-2)

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        if self.soft_cap or self.sinks or self.logsumexp:  # torch's fused attention has none of these
            return None
        from torch.nn.functional import scaled_dot_product_attention

        heads, shared, scale = self.heads, self.shared, self.scale or None

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if k.shape[1] == 0:
                raise RunError(EMPTY)
            q = q.unflatten(-1, (heads, 1, -1))
            k, v = (x.unflatten(-1, (shared, -1)).transpose(1, 2) for x in (k, v))
            return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=shared != heads).flatten(1)

        return TokenFunction(run)

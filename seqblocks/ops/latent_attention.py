"""Attention over keys and values computed from low-rank vectors.   H heads, N + R / V widths of keys / values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seqblocks.errors import Fault
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.ops.attention import must_hold
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call


@primitive("latent_attention")
class LatentAttention(Op):
    """Causal multi-head attention over keys and values computed from low-rank vectors, which alone are cached.

    c is [batch, seq, C]. Of a head's key, N features are W_k c, and R are those of r, the same for all heads; q is
    [batch, seq, H * (N + R)], and values are W_v c. Parameters: k_weight [H * N, C] and v_weight [H * V, C]. A step of
    a stream multiplies queries and outputs by these instead of every cached vector. State per sequence: c and r of up
    to `cache` tokens, in the model's dtype, and the number of tokens.
    """

    ports = (
        Port("q", "queries"), Port("c", "low-rank vectors of keys and values"),
        Port("r", "further features of the keys, for instance with rotary positions", optional=True),
    )  # fmt: skip
    reads = "past"
    heads: int = argument(..., "number of heads, H; must divide the width of q", ge=1)
    value: int = argument(..., "width of a value, V", ge=1)
    scale: float = argument(0.0, "factor of the scores (0: 1 / sqrt(N + R))", ge=0)
    cache: int = argument(2048, "maximum number of tokens of a stream", ge=1)
    source = "DeepSeek-V2 (arXiv:2405.04434)"

    def own(self, q: Wire, r: Wire | None) -> int:
        """Return the width of a head's own part of a key, N."""
        return q.features // self.heads - (r.features if r else 0)

    def shape(self, q: Wire, c: Wire, r: Wire | None = None) -> Wire:
        width = must_divide(self.heads, q.features, "heads", "the width of q")
        if r and r.features >= width:
            message = "r leaves no features of a key to its head"
            raise Fault("E402", message, at="r", expected=f"less than {width} features", found=str(r.features))
        return q.with_features(self.heads * self.value)

    def parameters(self, q: Wire, c: Wire, r: Wire | None = None) -> dict[str, Parameter]:
        rows = {"k_weight": self.heads * self.own(q, r), "v_weight": self.heads * self.value}
        return {name: Parameter((count, c.features), Init("fan_in_uniform")) for name, count in rows.items()}

    def state(self, q: Wire, c: Wire, r: Wire | None = None) -> dict[str, State]:
        width = c.features + (r.features if r else 0)
        return {"latent": State((self.cache, width), "model", per_token=True), "length": State((), "int64")}

    def macs(self, q: Wire, c: Wire, r: Wire | None = None) -> int:
        """Count those of a token with an average number of keys; for an open length, half a cache."""
        made = self.heads * (self.own(q, r) + self.value) * c.features
        seen = (q.length + 1) // 2 if isinstance(q.length, int) else self.cache // 2
        return made + seen * (q.features + self.heads * self.value)

    def splits(self, ranks: int, q: Wire, c: Wire, r: Wire | None = None) -> list[Split]:
        """Split by heads."""
        if self.heads % ranks:
            raise Fault("E401", f"heads {self.heads} cannot be split evenly over {ranks} ranks", at="heads")
        local = self.model_copy(update={"heads": self.heads // ranks})
        return [Split(local, ("q",), {"k_weight": 0, "v_weight": 0})]

    def calls(self, q: Wire, c: Wire, r: Wire | None = None) -> KernelCall:
        return "attention", {"window": None}

    def memory(self, tape: Tape, p: Mapping[str, Value], q: Value, c: Value, r: Value | None = None) -> Value:
        from seqblocks.workspace import attention

        def heads(x: Value) -> Value:
            return tape.view(x, (*x.shape[:-1], self.heads, x.shape[-1] // self.heads))

        q, k, v = heads(q), heads(tape.product(c, p["k_weight"])), heads(tape.product(c, p["v_weight"]))
        if r is not None:
            k = tape.cat([k, tape.expand(r, (*k.shape[:-1], r.shape[-1]))])
        return tape.view(attention.fused(tape, q, k, v), tape.out)

    def transition(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, c: Tensor, r: Tensor | None = None
    ) -> Transition | None:
        new = joined(c, r)
        return lambda state: after(
            state["latent"], state["length"], new, call.resets, state["latent"].shape[1] + new.shape[1]
        )

    def forward(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, c: Tensor, r: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from seqblocks.kernels.attention import AttentionState, attention

        new, rank = joined(c, r), c.shape[-1]
        state = None
        if call.state:
            state = AttentionState(*self.expanded(p, call.state["latent"].to(new.dtype), rank), call.state["length"])
        k, v = self.expanded(p, new, rank)
        q = q.unflatten(-1, (self.heads, -1))
        y: Any = attention(q, k, v, scale=self.scale or None, state=state, resets=call.resets)
        if not call.return_state:
            return y.flatten(-2), {}
        if call.state:
            latent, length = call.state["latent"], call.state["length"]
        else:
            latent, length = new[:, :0], torch.zeros(new.shape[0], dtype=torch.long, device=new.device)
        last = after(latent, length, new, call.resets, self.cache)
        must_hold(self.cache, last["length"], call.compiling)
        return y.flatten(-2), last

    def expanded(self, p: Mapping[str, Tensor], x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Return keys [B, T, H, N + R] and values [B, T, H, V] of the vectors x [B, T, C + R]."""
        import torch

        from seqblocks.kernels.products import linear

        low, common = x[..., :rank], x[..., rank:]
        k, v = (linear(low, p[name], None).unflatten(-1, (self.heads, -1)) for name in ("k_weight", "v_weight"))
        return torch.cat([k, common.unsqueeze(2).expand(*k.shape[:3], -1)], -1), v

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        keys, values = (p[name].unflatten(0, (self.heads, -1)) for name in ("k_weight", "v_weight"))
        own, rank = keys.shape[1:]

        def step(latent: Tensor, length: Tensor, q: Tensor, c: Tensor, r: Tensor | None) -> tuple[Tensor, ...]:
            latest = torch.cat([latent.narrow(1, 1, latent.shape[1] - 1), joined(c, r).unsqueeze(1)], 1)
            heads = q.unflatten(-1, (self.heads, -1)).transpose(0, 1)  # [H, B, N + R]
            query = torch.cat([heads[..., :own] @ keys, heads[..., own:]], -1).transpose(0, 1)
            age = torch.arange(latest.shape[1] - 1, -1, -1, device=q.device)
            y = scaled_dot_product_attention(
                query.unsqueeze(1), latest.unsqueeze(1), latest[..., :rank].unsqueeze(1),
                (age <= length.unsqueeze(1))[:, None, None], scale=self.scale or heads.shape[-1] ** -0.5,
            )  # [B, 1, H, C]
            y = (y.squeeze(1).transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)
            length = length + 1
            must_hold(self.cache, length, torch.compiler.is_compiling())
            return y.flatten(1), latest, length

        return TokenFunction(step)


def after(latent: Tensor, length: Tensor, new: Tensor, resets: Tensor | None, keep: int) -> dict[str, Tensor]:
    """Return the state with the last `keep` of the cached vectors and the new ones [B, S, C + R]."""
    from seqblocks.kernels.attention import AttentionState, attention_state

    before = AttentionState(latent.unsqueeze(2), latent[..., None, :0], length)
    last = attention_state(new.unsqueeze(2), new[..., None, :0], state=before, keep=keep, resets=resets)
    return {"latent": last.k.squeeze(2).to(latent.dtype), "length": last.length}


def joined(c: Tensor, r: Tensor | None) -> Tensor:
    """Return c and r (or None) as one vector."""
    import torch

    return c if r is None else torch.cat([c, r], -1)

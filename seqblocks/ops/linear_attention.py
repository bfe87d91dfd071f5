"""Linear attention and delta rules.   H query and key heads, HV value heads, K and V their widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from seqblocks.errors import Fault
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.roles import Split, evenly
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_divide, must_match

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call

Step = Callable[..., tuple["Tensor", "Tensor"]]  # (S, *inputs) -> (output, S), for one token
Rule = Literal["add", "delta", "dplr"]
OF_RULES: dict[str, tuple[str, ...]] = {"add": (), "delta": ("beta",), "dplr": ("a", "b")}


def _grows(what: str, port: str, expected: str, wire: Wire, hint: str) -> Fault:
    message = f"{what}: the state may grow without bound"
    return Fault("W904", message, at=port, expected=expected, found=str(wire.facts), hint=hint)


@primitive("linear_attention")
class LinearAttention(Op):
    """Linear attention: a matrix memory S [K, V] per value head, written by keys and read by queries: o = scale q^T S.

    add: S = e^g S + k v^T. delta: S = e^g S + beta k (v - (e^g S)^T k)^T, for keys of length 1 and beta of 0 to 2.
    dplr: S = (Diag(e^g) + b a^T) S + k v^T. The wire `decay` is the log decay g, at most 0: [batch, seq, HV] has one
    per head, [batch, seq, HV * K] one per key feature; without it, nothing decays. Value head j uses key head
    j * H // HV. With `writes` W, the state decays once per token and is then corrected W times: k, v and beta are W
    times as wide, in the order of the corrections. State per sequence: S [HV, K, V] float32, or [HV, K, V + 1] with
    `normalize`.
    """

    ports = (
        Port("q", "queries, H * K wide"),
        Port("k", "keys, as wide as q, times W"),
        Port("v", "values, W * HV * V wide"),
        Port("decay", "log decay, HV or HV * K wide", optional=True, gate=True),
        Port("beta", "rule delta: strength of the correction, W * HV wide", optional=True, gate=True),
        Port("a", "rule dplr: vector a that reads the state before the decay, HV * K wide", optional=True),
        Port("b", "rule dplr: vector b that writes the result, HV * K wide", optional=True),
    )
    reads = "past"
    reversible = True
    summary_cost = 0.4
    heads: int = argument(..., "heads of queries and keys, H; must divide their width", ge=1)
    value_heads: int = argument(0, "heads of values, HV; a multiple of heads (0: as many as heads)", ge=0)
    rule: Rule = argument("add", "update rule of the state")
    writes: int = argument(1, "rule delta: corrections per token, W", ge=1)
    fixed_decay: Literal["none", "retention"] = argument(
        "none", "a constant decay instead of a wire; retention: ln(1 - 2^(-5 - h)) for head h"
    )
    qk_norm: Literal["none", "l2"] = argument("none", "l2: normalise queries and keys to length 1")
    scale: float = argument(0.0, "factor of the scores (0: 1 / sqrt(K))", ge=0)
    bonus: bool = argument(False, "rule add: read before the write; weight the current token by u [H, K]")
    normalize: bool = argument(False, "rule add: divide by the sum of the scores")
    mixed = True
    source = (
        "arXiv:2006.16236, 2307.08621 (retention), 2312.06635 (GLA), 2406.06484 (delta), 2502.10297 (writes), "
        "2503.14456 (dplr)"
    )

    @property
    def of_values(self) -> int:
        """Return the number of value heads."""
        return self.value_heads or self.heads

    def shape(self, q: Wire, k: Wire, v: Wire, *others: Wire | None) -> Wire:
        width = must_divide(self.heads, q.features, "heads", "the width of q")
        times = f" times writes, {self.writes}" if self.writes > 1 else ""
        must_match("k", k, self.writes * q.features, f"the width of q{times}")
        must_divide(self.heads, self.of_values, "heads", "value_heads", at="value_heads")
        what = ("value_heads" if self.value_heads else "heads") + (" times writes" if times else "")
        must_divide(self.writes * self.of_values, v.features, what, "the width of v", at="v")
        wires = dict(zip(("decay", "beta", "a", "b"), others, strict=True))
        self.check_ports(wires)
        decay = wires["decay"]
        if decay and decay.features not in (self.of_values, self.of_values * width):
            expected = f"{self.of_values} (one per head) or {self.of_values * width} (one per key feature)"
            raise Fault("E402", "decay has the wrong width", at="decay", expected=expected, found=f"{decay.features}")
        if beta := wires["beta"]:
            must_match("beta", beta, self.writes * self.of_values, f"one for each head of values{times}")
        for name in ("a", "b"):
            if wire := wires[name]:
                must_match(name, wire, self.of_values * width, "heads of values times the width of a key")
        return v.with_features(v.features // self.writes)

    def splits(self, ranks: int, *wires: Wire | None) -> list[Split]:
        if self.fixed_decay != "none" or self.writes > 1:  # decays by a head's number; corrections before heads
            return []
        found = evenly(self, ranks, "heads", wires)
        values = self.value_heads // ranks
        return [each._replace(op=each.op.model_copy(update={"value_heads": values})) for each in found]

    def check_ports(self, wires: dict[str, Wire | None]) -> None:
        """Raise Fault unless the rule has exactly the wires and options that it takes."""
        needed = OF_RULES[self.rule]
        for name in ("beta", "a", "b"):
            if wires[name] and name not in needed:
                rule = next(rule for rule, names in OF_RULES.items() if name in names)
                raise Fault("E411", f"rule {self.rule} does not take `{name}`", at=name, hint=f"rule: {rule}")
            if name in needed and not wires[name]:
                hint = f"add `{name}: WIRE`, the name of the wire to read"
                raise Fault("E411", f"rule {self.rule} needs the input '{name}'", at="rule", hint=hint)
        if wires["decay"] and self.fixed_decay != "none":
            raise Fault("E210", "the decay is set twice: by a wire and by `fixed_decay`", at="fixed_decay")
        if self.rule != "add" and (self.bonus or self.normalize):
            key = "bonus" if self.bonus else "normalize"
            raise Fault("E209", f"'{key}' requires `rule: add`", at=key, found=f"rule: {self.rule}")
        if self.rule != "delta" and self.writes > 1:
            raise Fault("E209", "'writes' requires `rule: delta`", at="writes", found=f"rule: {self.rule}")
        if self.bonus and self.normalize:
            raise Fault("E209", "'bonus' and 'normalize' cannot be combined", at="normalize", hint="remove one of them")

    def warns(
        self, q: Wire, k: Wire, v: Wire, decay: Wire | None = None, beta: Wire | None = None, *others: Wire | None
    ) -> Iterator[Fault]:
        """Warn if the state may grow without bound."""
        if decay and decay.facts.high > 0:
            hint = "compute it with log_decay, for instance `- log_decay: softplus`"
            yield _grows("`decay` is a log decay but may be above 0", "decay", "at most 0", decay, hint)
        if beta and not (beta.facts.low >= 0 and beta.facts.high <= 2):
            hint = "end its steps with `- sigmoid`, followed by `- scale: 2` for negative eigenvalues"
            yield _grows("`beta` may be outside 0 to 2", "beta", "0 to 1, or 0 to 2", beta, hint)
        keys = self.heads * self.writes
        if self.rule == "delta" and self.qk_norm == "none" and k.facts.unit != keys:
            hint = f"`qk_norm: l2`, or end the steps of k with `- l2_norm: {{heads: {keys}}}`"
            message = "the keys of rule delta may be longer than 1: the state may grow without bound"
            yield Fault("W904", message, at="k", expected=f"{keys} heads of length 1", hint=hint)

    def parameters(self, q: Wire, *others: Wire | None) -> dict[str, Parameter]:
        if not self.bonus:
            return {}
        return {"u": Parameter((self.heads, q.features // self.heads), Init("zeros"), decay=False)}

    def state(self, q: Wire, k: Wire, v: Wire, *others: Wire | None) -> dict[str, State]:
        columns = v.features // (self.writes * self.of_values) + self.normalize
        return {"S": State((self.of_values, q.features // self.heads, columns))}

    def macs(self, q: Wire, k: Wire, v: Wire, decay: Wire | None = None, *others: Wire | None) -> int:
        """Count those of the recurrence: decay, correction, write and read of S."""
        decays = decay is not None or self.fixed_decay != "none"
        products = {"add": 2, "delta": 1 + 2 * self.writes, "dplr": 4}[self.rule] + decays
        return products * (q.features // self.heads) * v.features // self.writes

    def calls(
        self, q: Wire, k: Wire, v: Wire, decay: Wire | None = None, *others: Wire | None
    ) -> KernelCall:
        kind = "head" if self.fixed_decay != "none" else None
        if decay is not None:
            kind = "head" if decay.features == self.of_values else "key"
        columns = v.features // (self.writes * self.of_values) + self.normalize
        widths = (q.features // self.heads, columns)
        return "linear_attention", {"rule": self.rule, "widths": widths, "decay": kind, "bonus": self.bonus}

    def decays(self, v: Tensor, decay: Tensor | None) -> Tensor | None:
        """Return the log decays [B, S, HV] or [B, S, HV, K] of values v [B, S, W * HV, V], or None."""
        if self.fixed_decay != "none":
            return self.retention(v).expand(*v.shape[:2], -1)
        if decay is not None and decay.shape[-1] != self.of_values:
            return decay.unflatten(-1, (self.of_values, -1))
        return decay

    def transition(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None,
        *others: Tensor | None,
    ) -> Transition | None:
        """Return it for rule add only. The other rules multiply the state by K x K matrices, as slow as the tokens."""
        import torch

        from seqblocks.kernels.summaries import of_linear_attention

        if self.rule != "add":
            return None
        k, v = self.normed(k.unflatten(-1, (self.heads, -1))), v.unflatten(-1, (self.of_values, -1))
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1) if self.normalize else v
        summary = of_linear_attention(k, values, self.decays(v, decay), call.resets)
        return lambda state: {"S": summary(state["S"])}

    def memory(
        self, tape: Tape, p: Mapping[str, Value], q: Value, k: Value, v: Value, decay: Value | None = None,
        beta: Value | None = None, a: Value | None = None, b: Value | None = None,
    ) -> Value:
        from seqblocks.workspace import linear_attention

        def cut(x: Any, heads: int) -> Any:
            return None if x is None else tape.view(x, (*x.shape[:2], heads, x.shape[-1] // heads), dense=x.dense)

        q, k = (self._normed_memory(tape, cut(x, n)) for x, n in ((q, self.heads), (k, self.writes * self.heads)))
        v, a, b = cut(v, self.writes * self.of_values), cut(a, self.of_values), cut(b, self.of_values)
        if self.fixed_decay != "none":
            decay = tape.new((*v.shape[:2], self.of_values), 4)
        elif decay is not None and decay.shape[-1] != self.of_values:
            decay = cut(decay, self.of_values)
        if self.writes > 1:
            q, k, v, decay, beta = spread_memory(tape, self.writes, q, k, v, decay, beta)
        o = linear_attention.scan(tape, q, k, v, decay, beta, a, b, p.get("u"), self.normalize)
        if self.writes > 1:
            o = tape.slice(o, (o.shape[0], o.shape[1] // self.writes, *o.shape[2:]))
        return tape.view(o, tape.out)

    def _normed_memory(self, tape: Tape, x: Value) -> Value:
        """Record `normed` on a tape."""
        if self.qk_norm == "none":
            return x
        exact = tape.cast(x, max(x.item, 4))
        return tape.multiply(exact, tape.unary(tape.sum(tape.square(exact), (*x.shape[:-1], 1)), ["output"]))

    def forward(
        self, p: Mapping[str, Tensor], call: Call, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None,
        beta: Tensor | None = None, a: Tensor | None = None, b: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels import linear_attention

        q = self.normed(q.unflatten(-1, (self.heads, -1)))
        k = self.normed(k.unflatten(-1, (self.writes * self.heads, -1)))
        v = v.unflatten(-1, (self.writes * self.of_values, -1))
        a, b = (None if x is None else x.unflatten(-1, (self.of_values, -1)) for x in (a, b))
        decay, resets = self.decays(v, decay), call.resets
        if self.writes > 1:
            q, k, v, decay, beta, resets = spread(self.writes, q, k, v, decay, beta, resets, call.reverse)
        out = linear_attention(
            q, k, v, decay=decay, beta=beta, a=a, b=b, bonus=p.get("u"), scale=self.scale or None,
            normalize=self.normalize, state=call.state["S"] if call.state else None, return_state=call.return_state,
            resets=resets, reverse=call.reverse,
        )  # fmt: skip
        o, state = output_and_state(out, "S")
        if self.writes > 1:
            o = o[:, 0 if call.reverse else self.writes - 1 :: self.writes]
        return o.flatten(-2), state

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        import torch

        from seqblocks.kernels.linear_attention.token import prepare

        def one(fixed: Tensor | None) -> Step:
            return prepare(self.heads, self.scale or None, self.qk_norm == "l2", fixed, p.get("u"), self.normalize)

        def prepared(dtype: torch.dtype) -> Step:
            fixed = self.retention(torch.zeros(1, dtype=dtype, device="cpu")) if self.fixed_decay != "none" else None
            return one(fixed) if self.writes == 1 else corrected(self.writes, one(fixed), one(None))

        def by_dtype() -> Step:
            runs = {dtype: prepared(dtype) for dtype in (torch.float32, torch.float64)}
            return lambda S, *inputs: runs[S.dtype](S, *inputs)

        run = prepared(torch.float32) if self.fixed_decay == "none" else by_dtype()
        most = 12 if self.rule == "delta" or self.bonus or self.normalize else 16
        return TokenFunction(run, most_tokens=most if self.writes == 1 else None)

    def retention(self, like: Tensor) -> Tensor:
        """Return the log decay of each value head, in at least float32, as slow decays lose precision in 16 bits."""
        import torch

        dtype = torch.promote_types(like.dtype, torch.float32)
        decays = [math.log1p(-(2.0 ** (-5 - h))) for h in range(self.of_values)]
        return torch.tensor(decays, dtype=dtype, device=like.device)

    def normed(self, x: Tensor) -> Tensor:
        """Return queries or keys [B, S, H, K], normalised to length 1 if `qk_norm` is set, in at least float32."""
        import torch

        if self.qk_norm == "none":
            return x
        exact = x if x.dtype == torch.float64 else x.float()
        return exact * torch.rsqrt(exact.square().sum(-1, keepdim=True) + 1e-6)


def corrected(writes: int, first: Step, other: Step) -> Step:
    """Return a function for a token with several corrections, from those for the first one and for the others.

    Only the first correction decays the state. It returns a new state, to which the others write.
    """
    import torch

    in_place = not torch.compiler.is_compiling()

    def step(
        S: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (k, *keys), (v, *values), (beta, *betas) = (x.chunk(writes, -1) for x in (k, v, beta))
        o, S = first(S, q, k, v, decay, beta)
        for k, v, beta in zip(keys, values, betas, strict=True):
            o, S = other(S, q, k, v, None, beta, in_place=in_place)
        return o, S

    return step


def spread_memory(tape: Tape, writes: int, *given: Value | None) -> list[Value]:
    """Record `spread` on a tape, for q, k, v, decay and beta."""
    found: list[Any] = []
    for at, x in enumerate(given):
        if x is None:
            found.append(None)
            continue
        shape = (x.shape[0], x.shape[1] * writes, *x.shape[2:])
        if at in (0, 3):  # the tokens in between get zeros
            found.append(tape.pad(x, shape))
        else:
            found.append(tape.view(x, (*shape[:2], x.shape[2] // writes, *x.shape[3:])))
    return found


def spread(
    writes: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Any, resets: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Expand the corrections of each token into tokens: the first one applies decay and resets, the last one reads.

    k, v and beta hold the corrections of a token along their heads. In reverse order, the last one comes first.
    """
    import torch

    def turned(x: Tensor) -> Tensor:
        return (x.flip(2) if reverse else x).flatten(1, 2)

    def only(x: Tensor, first: bool) -> Tensor:
        none = torch.zeros_like(x).unsqueeze(2).expand(-1, -1, writes - 1, *[-1] * (x.dim() - 2))
        parts = [x.unsqueeze(2), none]
        return turned(torch.cat(parts if first else parts[::-1], 2))

    k, v, beta = (turned(x.unflatten(2, (writes, -1))) for x in (k, v, beta))
    decay, resets = (None if x is None else only(x, True) for x in (decay, resets))
    return only(q, False), k, v, decay, beta, resets

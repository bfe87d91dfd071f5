"""Shift tokens, or mix each token with an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from seqblocks.op import Op, Port, X, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Tokens, Wire
from seqblocks.widths import must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import Transition
    from seqblocks.runtime.call import Call


class Past(NamedTuple):
    """Tokens together with the tokens before them, as read by a window over the past."""

    tokens: Tensor  # [B, by + S, D]: `by` earlier tokens, then x
    limit: Tensor | None  # [B, S]: on the preceding tokens that belong to the same sequence; None without resets
    state: dict[str, Tensor]  # new state; empty if not requested


def with_past(x: Tensor, by: int, call: Call) -> Past:
    """Prepend to x [B, S, D] the `by` tokens before it, or zeros at the start of a sequence.

    The state holds the last `by` tokens of the current sequence, oldest first, zeros before its first one.
    """
    import torch

    from seqblocks.kernels.positions import running_positions

    before = call.state["window"] if call.state else x.new_zeros(x.shape[0], by, x.shape[2])
    tokens = torch.cat([before.to(x.dtype), x], 1)
    window, index = tokens[:, x.shape[1] :], None
    if call.resets is not None:
        # a state has zeros before the start of its sequence already, so each row counts as having `by` tokens before
        start = torch.full((x.shape[0],), by, device=x.device)
        index, length = running_positions(x.shape[0], x.shape[1], start, call.resets, x.device)
        age = torch.arange(by, 0, -1, device=x.device)
        window = torch.where((age <= length.unsqueeze(-1)).unsqueeze(-1), window, 0.0)
    return Past(tokens, index, {"window": window.to(before.dtype)} if call.return_state else {})


def next_window(window: Tensor, x: Tensor) -> Tensor:
    """Return the window [B, by, D] without its oldest token, and with x [B, D] at its end."""
    import torch

    return torch.cat([window.narrow(1, 1, window.shape[1] - 1), x.unsqueeze(1)], 1)


def window_after(x: Tensor, by: int, call: Call) -> Transition:
    """Return the last `by` tokens after tokens x [B, S, D], as a function of the previous ones (`roles.transition`)."""
    latest = slice(max(x.shape[1] - by, 0), None)
    x, resets = x[:, latest], None if call.resets is None else call.resets[:, latest]
    return lambda state: with_past(x, by, replace(call, state=state, return_state=True, resets=resets)).state


def lagged(past: Past, lag: int, by: int) -> Tensor:
    """Return the tokens [B, S, D] that are `lag` positions earlier, or zeros at the start of a sequence."""
    import torch

    earlier = past.tokens[:, by - lag : past.tokens.shape[1] - lag]
    return earlier if past.limit is None else torch.where((past.limit >= lag).unsqueeze(-1), earlier, 0.0)


def shifted(x: Tensor, by: int, call: Call) -> tuple[Tensor, dict[str, Tensor]]:
    """Shift x [B, S, D] by `by` tokens, with zeros at the start of a sequence. Also return the new state."""
    past = with_past(x, by, call)
    return lagged(past, by, by), past.state


def with_past_memory(tape: Tape, x: Value, by: int) -> Value:
    """Record `with_past` on a tape and return the tokens."""
    return tape.cat([tape.new((x.shape[0], by, x.shape[2]), x.item), x], 1)


def shifted_memory(tape: Tape, x: Value, by: int) -> Value:
    """Record `shifted` on a tape."""
    return tape.slice(with_past_memory(tape, x, by), x.shape)


class _Shifted(Op):
    """Base of the verbs that read an earlier token."""

    independent = "features"
    reads = "past"


@primitive("shift")
class Shift(_Shifted):
    """Replace each token by the one `by` positions earlier, or by zeros at the start of a sequence.

    State: the last `by` inputs [by, D], oldest first.
    """

    by: int = argument(..., "number of tokens to shift by", ge=1, le=65536)

    def facts(self, x: Wire) -> Facts:
        is_past_the_end = isinstance(x.length, int) and self.by >= x.length
        return Facts(0, 0) if is_past_the_end else x.facts.or_zero()

    def state(self, x: Wire) -> dict[str, State]:
        return {"window": State((self.by, x.features), "model")}

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        return window_after(x, self.by, call)

    def looks_ahead(self, x: Wire) -> Tokens:
        return -self.by * x.rate

    def looks_back(self, x: Wire) -> Tokens:
        return self.by * x.rate

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return TokenFunction(lambda window, x: (window.select(1, 0).clone(), next_window(window, x)))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return shifted_memory(tape, x, self.by)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return shifted(x, self.by, call)


@primitive("token_shift")
class TokenShift(_Shifted):
    """Interpolate each token with the previous one: x[t] + mix * (x[t - 1] - x[t]).

    `mix` is a wire, or a learned weight [D] per feature. State: the last input [1, D].
    """

    ports = (
        X,
        Port(
            "mix", "weight of the previous token, as wide as x (default: a learned weight)", optional=True,
            kinds=("sequence", "vector"), broadcast=True,
        ),
    )  # fmt: skip
    source = "RWKV (arXiv:2305.13048); with a wire as in RWKV-6 (arXiv:2404.05892)"

    def shape(self, x: Wire, mix: Wire | None = None) -> Wire:
        if mix:
            must_match("mix", mix, x.features, "the width of x")
        return x

    def parameters(self, x: Wire, mix: Wire | None = None) -> dict[str, Parameter]:
        return {} if mix else {"weight": Parameter((x.features,), Init("constant", (0.5,)), decay=False)}

    def state(self, x: Wire, mix: Wire | None = None) -> dict[str, State]:
        return {"window": State((1, x.features), "model")}

    def macs(self, x: Wire, mix: Wire | None = None) -> int:
        return x.features

    def looks_back(self, x: Wire, mix: Wire | None = None) -> Tokens:
        return x.rate

    def transition(
        self, p: Mapping[str, Tensor], call: Call, x: Tensor, mix: Tensor | None = None
    ) -> Transition | None:
        return window_after(x, 1, call)

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        weight: Any = p.get("weight")

        def step(window: Tensor, x: Tensor, mix: Tensor | None) -> tuple[Tensor, Tensor]:
            before = window.select(1, 0)
            return (before - x).mul_(weight if mix is None else mix).add_(x), next_window(window, x)

        return TokenFunction(step)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, mix: Value | None = None) -> Value:
        earlier = shifted_memory(tape, x, 1)
        return tape.add(x, tape.multiply(p["weight"] if mix is None else mix, tape.subtract(earlier, x)))

    def forward(
        self, p: Mapping[str, Tensor], call: Call, x: Tensor, mix: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        earlier, state = shifted(x, 1, call)
        return x + (p["weight"] if mix is None else mix) * (earlier - x), state

"""Gated linear recurrence of channels.   E channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from seqblocks.errors import Fault
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire
from seqblocks.widths import must_match

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call


@primitive("gated_recurrence")
class GatedRecurrence(Op):
    """Gated linear recurrence with one state per channel: h = e^g h + factor x, with the log decay g.

    factor full: 1. complement: 1 - e^g, so that h is a moving average (HGRN, minGRU, minLSTM). unit_variance:
    sqrt(1 - e^(2g)), so that inputs of variance 1 give states of variance 1 (RG-LRU); with `first_full` it is 1 for the
    first token of a sequence. State per sequence: h [E], float32; with `first_full` also whether it has started.
    """

    independent = "features"
    ports = (Port("x", "the input", main=True), Port("decay", "log decay, at most 0, as wide as x", gate=True))
    reads = "past"
    reversible = True
    summary_cost = 1.2
    factor: Literal["full", "complement", "unit_variance"] = argument("full", "factor of the input")
    first_full: bool = argument(False, "whether the factor is 1 for the first token of a sequence")
    source = "HGRN (arXiv:2311.04823), RG-LRU (arXiv:2402.19427), minGRU and minLSTM (arXiv:2410.01201)"

    def shape(self, x: Wire, decay: Wire) -> Wire:
        must_match("decay", decay, x.features, "the width of x")
        if self.first_full and self.factor == "full":
            hint = "remove first_full, or use factor: unit_variance"
            raise Fault(
                "E209", "'first_full' has no effect: the factor is full for all tokens", at="first_full", hint=hint
            )
        return x

    def warns(self, x: Wire, decay: Wire) -> Iterator[Fault]:
        """Warn if the state may grow without bound."""
        if decay.facts.high > 0:
            message = "`decay` is a log decay but may be above 0, so the state may grow without bound"
            hint = "compute it with log_decay, for instance `- log_decay: softplus`"
            yield Fault("W904", message, at="decay", expected="at most 0", found=str(decay.facts), hint=hint)

    def state(self, x: Wire, decay: Wire) -> dict[str, State]:
        begun = {"begun": State((), "int64")} if self.first_full else {}
        return {"h": State((x.features,)), **begun}

    def macs(self, x: Wire, decay: Wire) -> int:
        return x.features * (1 if self.factor == "full" else 2)

    def calls(self, x: Wire, decay: Wire) -> KernelCall:
        return "gated_recurrence", {}

    def scaled_input(self, call: Call, x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input multiplied by its share, and the decay, both in float32 or float64."""
        import torch

        dtype = torch.promote_types(torch.promote_types(x.dtype, decay.dtype), torch.float32)
        scaled, decay = x.to(dtype), decay.to(dtype)
        if self.factor != "full":
            factor = self.share(decay)
            if self.first_full:
                factor = factor.masked_fill(self.starts(call, x).unsqueeze(-1), 1.0)
            scaled = factor * scaled
        return scaled, decay

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor, decay: Tensor) -> Transition | None:
        from seqblocks.kernels import gated_recurrence
        from seqblocks.kernels.summaries import Affine, since_reset

        if self.first_full:  # the state says whether this is the first token
            return None
        scaled, decay = self.scaled_input(call, x, decay)
        out: Any = gated_recurrence(scaled, decay, return_state=True, resets=call.resets)
        since = since_reset(call.resets)
        summary = Affine(since, since.masked(decay).sum(1), out[1])
        return lambda state: {"h": summary(state["h"])}

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, decay: Value) -> Value:
        from seqblocks.workspace import gated_recurrence

        item = max(x.item, decay.item, 4)
        scaled, decay = tape.cast(x, item), tape.cast(decay, item)
        if self.factor != "full":
            scaled = tape.multiply(self._share_memory(tape, decay), scaled)
        return tape.cast(gated_recurrence.scan(tape, scaled, decay), x.item)

    def _share_memory(self, tape: Tape, decay: Value) -> Value:
        """Record `share` on a tape."""
        if self.factor == "complement":
            share = tape.unary(tape.unary(decay, ["output"]), ())
        else:
            grown = tape.unary(tape.unary(tape.unary(decay, ()), ["output"]), ())
            share = tape.unary(tape.unary(grown), ["output"])
        if not self.first_full:
            return share
        mask = tape.new((*decay.shape[:2], 1), 1)
        return tape.pointwise(share, keeps=[mask])

    def forward(
        self, p: Mapping[str, Tensor], call: Call, x: Tensor, decay: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from seqblocks.kernels import gated_recurrence

        scaled, decay = self.scaled_input(call, x, decay)
        out = gated_recurrence(
            scaled, decay, state=call.state["h"] if call.state else None, return_state=call.return_state,
            resets=call.resets, reverse=call.reverse,
        )  # fmt: skip
        y, state = output_and_state(out, "h")
        if not (state and self.first_full):
            return y.to(x.dtype), state
        begun = call.state["begun"] if call.state else torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return y.to(x.dtype), {**state, "begun": (begun + x.shape[1]).clamp(max=1)}  # a call may have no tokens

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        import torch

        def step(h: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            *begun, x, decay = given
            if self.factor != "full":
                factor = self.share(decay)
                if begun:
                    factor = factor.masked_fill_((begun[0] == 0).unsqueeze(-1), 1.0)
                x = factor * x
            h = torch.addcmul(x, decay.exp(), h)
            return h, h.clone(), *(torch.ones_like(z) for z in begun)

        return TokenFunction(step, most_tokens=12)

    def share(self, decay: Tensor) -> Tensor:
        """Return the factor of each input. The square root gets no gradient where nothing decays."""
        import torch

        if self.factor == "complement":
            return -torch.expm1(decay)
        return (-torch.expm1(2 * decay)).clamp(min=torch.finfo(decay.dtype).tiny).sqrt()

    def starts(self, call: Call, x: Tensor) -> Tensor:
        """Return a mask [B, S] of the first tokens of sequences."""
        import torch

        edge = torch.arange(x.shape[1], device=x.device) == (x.shape[1] - 1 if call.reverse else 0)
        first = edge.expand(x.shape[0], -1)
        if call.state:
            first = first & (call.state["begun"] == 0).unsqueeze(-1)
        return first if call.resets is None else first | call.resets

"""Centaurus: complex states, computed as a long convolution.   H features in, G out, N state channels, M sub-states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from seqblocks.errors import Fault
from seqblocks.op import Op, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State, output_and_state
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call


@primitive("centaurus")
class Centaurus(Op):
    """A time-invariant state space with the channel layouts of a convolution.

    With p = exp(dt A): s' = p s + dt B x, y = C sum_m E Re s'. The mode is the shape of B and C:

    neck: dense B [N, H] and C [G, N]; E [N, M] mixes the sub-states of a channel.
    pointwise (or s5): each sub-state is a channel: B [N M, H], C [G, N M], no E.
    dws: one channel per feature, B and C [H]. full: one channel per pair of features, B and C [G H].

    A = -softplus(A_real) + i A_imag, [N, M]; dt = exp(log_dt), [N], from 0.001 to 0.1. State per sequence
    [N, M, 2] (pointwise: [N M, 1, 2]), real and imaginary part, float32.
    """

    reads = "past"
    reversible = True
    summary_cost = 1.2
    mode: Literal["neck", "pointwise", "s5", "dws", "full"] = argument("neck", "how channels are connected to features")
    state_size: int | None = argument(
        None,
        "state channels, N (default: the width of x; determined by the widths in dws and full)",
        ge=1,
        alias="state",
    )
    sub_states: int = argument(8, "complex sub-states per channel, M", ge=1)
    features: int | None = argument(None, "width of the output, G (default: the width of x)", ge=1)
    hold: Literal["euler", "zoh"] = argument(
        "euler", "discretisation of the input: times dt, or integrated exactly over dt"
    )
    stable: bool = argument(True, "whether to keep the real part of A negative, as -softplus(A_real) instead of A_real")
    source = "Centaurus (ICLR 2025, openreview PkpNRmBZ32)"

    @property
    def dense(self) -> bool:
        return self.mode in ("neck", "pointwise", "s5")

    def sizes(self, x: Wire) -> tuple[int, int, int]:
        """Return the outputs G, the rows of A, and the channels."""
        out = self.features or x.features
        rows = {"dws": x.features, "full": x.features * out}.get(self.mode, self.state_size or x.features)
        return out, rows, rows * self.sub_states if self.mode in ("pointwise", "s5") else rows

    def shape(self, x: Wire) -> Wire:
        out, rows, _ = self.sizes(x)
        if self.mode == "dws" and out != x.features:
            raise Fault(
                "E402",
                "mode dws does not mix features, so the output width must equal the input width",
                at="features",
                expected=str(x.features),
                found=str(out),
                hint="to change the width, add a linear step after it",
            )
        if not self.dense and self.state_size not in (None, rows):
            raise Fault(
                "E402",
                f"mode {self.mode} has a channel for each {'feature' if self.mode == 'dws' else 'pair of features'}",
                at="state",
                expected=str(rows),
                found=str(self.state_size),
                hint=f"remove `state`, or set it to {rows}",
            )
        return x.with_features(out)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        out, rows, channels = self.sizes(x)
        half = math.log(math.expm1(0.5)) if self.stable else -0.5  # the initial real part is -1/2 in both cases
        A = {
            "A_real": Parameter((rows, self.sub_states), Init("constant", (half,)), False, full_precision=True),
            "A_imag": Parameter((rows, self.sub_states), Init("ramp", (math.pi,)), False, full_precision=True),
        }
        if self.mode not in ("pointwise", "s5"):
            A["E"] = Parameter((rows, self.sub_states), Init("normal", (0.0, math.sqrt(2))))
        span = (math.log(1e-3), math.log(1e-1))
        A["log_dt"] = Parameter((rows,), Init("linspace", span), False, full_precision=True)
        match self.mode:
            case "neck":
                B, C = Init("fan_in_uniform"), Init("fan_in_uniform")
            case "pointwise" | "s5":
                B, C = Init("constant", (x.features**-0.5,)), Init("normal", (0.0, math.sqrt(2 / channels)))
            case "dws":
                B, C = Init("ones"), Init("ones")
            case "full":
                B, C = Init("normal", (0.0, math.sqrt(2 / x.features))), Init("normal", (0.0, math.sqrt(2 / rows)))
        shapes = ((channels, x.features), (out, channels)) if self.dense else ((rows,), (rows,))
        return {**A, "B": Parameter(shapes[0], B), "C": Parameter(shapes[1], C)}

    def state(self, x: Wire) -> dict[str, State]:
        _, rows, channels = self.sizes(x)
        return {"s": State((channels, rows * self.sub_states // channels, 2))}

    def macs(self, x: Wire) -> int:
        """Count those of the recurrence: input, a complex product and read-out per sub-state, and output."""
        out, rows, channels = self.sizes(x)
        around = channels * (x.features + out) if self.dense else 2 * channels
        return around + 6 * rows * self.sub_states

    def calls(self, x: Wire) -> KernelCall:
        _, rows, channels = self.sizes(x)
        substates = rows * self.sub_states // channels
        return "centaurus", {"mode": self.kernel_mode, "channels": channels, "substates": substates}

    def bank(self, p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the real and the imaginary part of A [N, M], and dt [N], in float32 at least."""
        import torch
        from torch.nn.functional import softplus

        exact = (p[name] for name in ("A_real", "A_imag", "log_dt"))
        A_real, A_imag, log_dt = (t if t.dtype == torch.float64 else t.float() for t in exact)
        return -softplus(A_real) if self.stable else A_real, A_imag, torch.exp(log_dt)

    def transition(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Transition | None:
        import torch

        from seqblocks.kernels.summaries import since_reset

        A_real, A_imag, dt = self.bank(p)
        _, added = self.forward(p, replace(call, state=None, return_state=True), x)
        span = x.shape[1] * dt.unsqueeze(-1)
        factor = torch.polar((span * A_real).exp(), span * A_imag)
        since = since_reset(call.resets)

        def move(state: dict[str, Tensor]) -> dict[str, Tensor]:
            before = torch.view_as_complex(since.before(state["s"]).contiguous())
            return {"s": added["s"] + torch.view_as_real(factor.view(before.shape[1:]) * before)}

        return move

    @property
    def kernel_mode(self) -> str:
        return "pointwise" if self.mode == "s5" else self.mode

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        from seqblocks.kernels.centaurus.interface import discretised
        from seqblocks.kernels.centaurus.token import prepare

        return prepare(discretised(*self.bank(p), p["B"], p["C"], p.get("E"), self.kernel_mode, self.hold))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        from seqblocks.workspace import centaurus

        bank = centaurus.bank_of(tape, p, self.kernel_mode, self.hold, self.stable)
        return tape.cast(centaurus.run(tape, bank, x), x.item)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels import centaurus

        out = centaurus(
            x,
            *self.bank(p),
            p["B"],
            p["C"],
            p.get("E"),
            mode=self.kernel_mode,
            hold=self.hold,
            state=call.state["s"] if call.state else None,
            return_state=call.return_state,
            resets=call.resets,
            reverse=call.reverse,
        )
        return output_and_state(out, "s")

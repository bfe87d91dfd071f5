"""Selective state space: diagonal states with data-dependent parameters.   E channels, N states, G groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
    from torch import Tensor

    from seqblocks.roles import KernelCall, Transition
    from seqblocks.runtime.call import Call


@primitive("ssm")
class SSM(Op):
    """Selective scan: h = exp(dt A) h + dt B x, y = C h + D x, then y * silu(z) if there is a gate.

    x and dt are [batch, seq, E], B and C [batch, seq, G * N]; if B or C is omitted, it is a parameter [E, N].
    A = -exp(A_log), A_log [E, N] initialised to log(1..N); D [E] to 1. State per sequence: h [E, N], float32.
    """

    ports = (
        Port("x", "the channels", main=True),
        Port("dt", "step size of each channel, before the softplus", gate=True),
        Port("B", "input matrix B of the states", optional=True),
        Port("C", "output matrix C of the states", optional=True),
        Port("z", "gate: the output is multiplied by silu(z)", optional=True),
    )
    reads = "past"
    reversible = True
    summary_cost = 1.2
    state_size: int = argument(16, "states per channel, N", ge=1, alias="state")
    groups: int = argument(1, "groups of channels with separate B and C, G", ge=1)
    softplus: bool = argument(True, "whether to apply a softplus to dt")
    skip: bool = argument(True, "whether to add D x")
    source = "Mamba (arXiv:2312.00752), S6"

    def shape(self, x: Wire, dt: Wire, B: Wire | None, C: Wire | None, z: Wire | None) -> Wire:
        must_match("dt", dt, x.features, "the width of x")
        must_divide(self.groups, x.features, "groups", "the width of x")
        for name, wire in (("B", B), ("C", C)):
            if wire:
                must_match(name, wire, self.groups * self.state_size, "states of each group")
        if z:
            must_match("z", z, x.features, "the width of x")
        if self.groups > 1 and (B is None or C is None):
            raise Fault("E411", "groups requires both B and C", at="groups", hint="groups: 1")
        return x

    def parameters(
        self, x: Wire, dt: Wire, B: Wire | None, C: Wire | None, z: Wire | None
    ) -> dict[str, Parameter]:
        size = (x.features, self.state_size)
        out = {"A_log": Parameter(size, Init("log_range"), decay=False, full_precision=True)}
        if B is None:
            out["B"] = Parameter(size, Init("ones"), decay=False)
        if C is None:
            out["C"] = Parameter(size, Init("normal", (0.0, 1.0)), decay=False)
        if self.skip:
            out["D"] = Parameter(size[:1], Init("ones"), decay=False, full_precision=True)
        return out

    def splits(
        self, ranks: int, x: Wire, dt: Wire, B: Wire | None, C: Wire | None, z: Wire | None
    ) -> list[Split]:
        wires = (x, dt, B, C, z)
        if self.groups > 1:
            return evenly(self, ranks, "groups", wires)
        return evenly(self, ranks, "features", wires, whole=("B", "C"))

    def warns(self, x: Wire, dt: Wire, *others: Wire | None) -> Iterator[Fault]:
        if not self.softplus and dt.facts.low < 0:
            message = "`dt` is a step size but may be below 0, so the state may grow without bound"
            hint = "`softplus: true`, or end its steps with `- softplus`"
            yield Fault("W904", message, at="dt", expected="at least 0", found=str(dt.facts), hint=hint)

    def state(self, x: Wire, dt: Wire, B: Wire | None, C: Wire | None, z: Wire | None) -> dict[str, State]:
        return {"h": State((x.features, self.state_size))}

    def macs(self, x: Wire, dt: Wire, B: Wire | None, C: Wire | None, z: Wire | None) -> int:
        """Count those of the decay, input and read-out of each state."""
        return x.features * (4 * self.state_size + int(self.skip) + int(z is not None))

    def calls(
        self, x: Wire, dt: Wire, B: Wire | None, C: Wire | None, z: Wire | None
    ) -> KernelCall:
        return "selective_scan", {"states": self.state_size, "width": x.features // self.groups, "complex": False}

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        if self.groups > 1 or "B" in p or "C" in p:
            return None
        from seqblocks.kernels.selective_scan.token import prepare

        return prepare(p["A_log"], p.get("D"), self.softplus)

    def matrices(self, p: Mapping[str, Tensor], B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return A (in at least float32), B and C (by group if there are several)."""
        import torch

        def matrix(given: Tensor | None, own: str) -> Tensor:
            if given is None:
                return p[own]
            return given.unflatten(-1, (self.groups, self.state_size)) if self.groups > 1 else given

        A_log = p["A_log"]
        exact = A_log if A_log.dtype == torch.float64 else A_log.float()
        return -torch.exp(exact), matrix(B, "B"), matrix(C, "C")

    def transition(
        self, p: Mapping[str, Tensor], call: Call, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor
    ) -> Transition | None:
        from torch.nn.functional import softplus

        from seqblocks.kernels import selective_scan
        from seqblocks.kernels.summaries import Affine, since_reset

        A, B, C = self.matrices(p, B, C)
        out: Any = selective_scan(
            x, dt, A, B, C, dt_softplus=self.softplus, return_state=True, resets=call.resets
        )  # fmt: skip
        since = since_reset(call.resets)
        steps = since.masked(dt.to(A.dtype))
        steps = since.masked(softplus(steps)) if self.softplus else steps
        summary = Affine(since, steps.sum(1).unsqueeze(-1) * A, out[1])
        return lambda state: {"h": summary(state["h"])}

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value, dt: Value, B: Value, C: Value, z: Value) -> Value:
        from seqblocks.workspace import selective_scan

        rates = tape.cast(p["A_log"], max(p["A_log"].item, 4))
        A = tape.unary(tape.unary(rates, ["output"]), ())
        groups = 1 if B is not None and C is not None and self.groups == 1 else self.groups
        shape = (*x.shape[:2], groups, self.state_size)
        B, C = (
            tape.expand(p[name], (*x.shape[:2], *p[name].shape)) if given is None else
            tape.view(given, shape, dense=given.dense)
            for name, given in (("B", B), ("C", C))
        )
        return selective_scan.scan(tape, x, dt, A, B, C, p.get("D"), z, self.softplus)

    def forward(
        self, p: Mapping[str, Tensor], call: Call, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from seqblocks.kernels import selective_scan

        out = selective_scan(
            x,
            dt,
            *self.matrices(p, B, C),
            D=p.get("D"),
            z=z,
            dt_softplus=self.softplus,
            state=call.state["h"] if call.state else None,
            return_state=call.return_state,
            resets=call.resets,
            reverse=call.reverse,
        )
        return output_and_state(out, "h")


@primitive("layer_scale")
class LayerScale(Op):
    """Multiply each feature by a learned gain with a small initial value."""

    independent = "features"
    start: float = argument(1e-5, "initial value of the gains")
    source = "CaiT (arXiv:2103.17239)"

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        return {"weight": Parameter((x.features,), Init("constant", (self.start,)), decay=False)}

    def macs(self, x: Wire) -> int:
        return x.features

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.multiply(x, p["weight"])

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return x * p["weight"]

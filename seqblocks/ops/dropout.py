"""Dropout of features, and of whole samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, FLOATS, Op, Port, argument, primitive
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


def rescaled(facts: Facts, kept: float) -> Facts:
    """Return the facts about values that are kept with a probability and divided by it, else zeroed."""
    return facts.times(Facts(1 / kept, 1 / kept)).or_zero()


def drop_samples(x: Tensor, p: float) -> Tensor:
    """Zero each sample of x [batch, …] with probability p, and divide the others by 1 - p."""
    import torch

    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x * (torch.rand(shape, device=x.device, dtype=torch.float32) < 1 - p).to(x.dtype) / (1 - p)


def drop_samples_memory(tape: Tape, x: Value) -> Value:
    """Record `drop_samples` on a tape."""
    mask = tape.new((x.shape[0], *(1,) * (len(x.shape) - 1)))
    return tape.unary(tape.multiply(x, mask), ())


@primitive("dropout")
class Dropout(Op):
    """Zero features at random in training, and rescale the others by 1 / (1 - p)."""

    ports = (ANY,)
    random = True
    p: float = argument(0.1, "probability of zeroing a feature", ge=0, lt=1)

    def facts(self, x: Wire) -> Facts:
        return rescaled(x.facts, 1 - self.p)

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return TokenFunction(lambda x: x)  # it is only used in evaluation mode

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.dropout(x) if self.p else x

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import dropout

        return dropout(x, self.p, call.training)


@primitive("drop_path")
class DropPath(Op):
    """Zero whole samples at random in training, and rescale the others by 1 / (1 - p).

    At the end of a branch of `parallel`, it drops the branch. For a residual branch, use `residual: {drop_path: p}`.
    """

    ports = (Port("x", "the input", main=True, kinds=FLOATS),)
    random = True
    p: float = argument(..., "probability of zeroing a sample", ge=0, lt=1)
    source = "stochastic depth (arXiv:1603.09382)"

    def drops_samples(self) -> bool:
        return self.p > 0

    def facts(self, x: Wire) -> Facts:
        return rescaled(x.facts, 1 - self.p)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return drop_samples_memory(tape, x) if self.p else x

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return drop_samples(x, self.p) if self.p and call.training else x

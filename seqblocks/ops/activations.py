"""Activations as verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seqblocks.op import ANY, Op, argument, primitive
from seqblocks.ops.gate import activate, activated, activation_memory, activation_of_token
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Facts, Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


class Activation(Op):
    """Base of the activations."""

    independent = "features"
    ports = (ANY,)

    def facts(self, x: Wire) -> Facts:
        return activated(self.verb, x.facts)

    def prepare_token(self, p: Mapping[str, Tensor]) -> TokenFunction | None:
        return TokenFunction(activation_of_token(self.verb))

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return activation_memory(tape, self.verb, x)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        return activate(self.verb, x)


@primitive("silu")
class Silu(Activation):
    """x * sigmoid(x)."""


@primitive("gelu")
class Gelu(Activation):
    """x * Phi(x), with the exact normal distribution function."""


@primitive("gelu_tanh")
class GeluTanh(Activation):
    """GELU with the tanh approximation of the normal distribution function."""


@primitive("relu")
class Relu(Activation):
    """max(x, 0)."""


@primitive("leaky_relu")
class LeakyRelu(Activation):
    """x for x >= 0, slope * x for x < 0. As the activation of a gate, the slope is 0.01."""

    slope: float = argument(0.01, "slope for negative x", ge=0, le=1)
    source = "Maas et al. 2013"

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.unary(x)

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from torch.nn.functional import leaky_relu

        return leaky_relu(x, self.slope)


@primitive("squared_relu")
class SquaredRelu(Activation):
    """max(x, 0)^2."""

    source = "Primer (arXiv:2109.08668)"


@primitive("elu")
class Elu(Activation):
    """x for x >= 0, exp(x) - 1 for x < 0."""

    source = "Clevert et al. 2016 (arXiv:1511.07289)"


@primitive("selu")
class Selu(Activation):
    """1.0507 x for x >= 0, 1.7581 (exp(x) - 1) for x < 0; preserves mean 0 and variance 1."""

    source = "Klambauer et al. 2017 (arXiv:1706.02515)"


@primitive("sigmoid")
class Sigmoid(Activation):
    """1 / (1 + exp(-x))."""


@primitive("tanh")
class Tanh(Activation):
    """Hyperbolic tangent."""


@primitive("softplus")
class Softplus(Activation):
    """log(1 + exp(x))."""


@primitive("exp")
class Exp(Activation):
    """e^x: of a log decay, the part of the state that remains."""


@primitive("positive")
class Positive(Activation):
    """x + 0.5 for x >= 0, sigmoid(x) for x < 0; always positive."""

    source = "minGRU (arXiv:2410.01201), in log space"


@primitive("one_minus_exp")
class OneMinusExp(Activation):
    """1 - exp(x): for a log decay x, the fraction of the state that decays."""


@primitive("rational_exp")
class RationalExp(Activation):
    """1 + x for x >= 0, 1 / (1 - x) for x < 0: positive and smooth, and grows more slowly than exp."""

    source = "Mamba-3 (ICLR 2026)"


@primitive("elu_plus_one")
class EluPlusOne(Activation):
    """1 + x for x >= 0, exp(x) for x < 0: always positive."""

    source = "Katharopoulos et al. 2020 (arXiv:2006.16236), feature map of linear attention"

"""Map token ids to features, and features to logits.   D features, V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from seqblocks.errors import Fault, RunError
from seqblocks.op import Op, Port, argument, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.tape import Tape, Value
from seqblocks.token_function import TokenFunction
from seqblocks.types import Wire

if TYPE_CHECKING:
    from torch import Tensor

    from seqblocks.runtime.call import Call


@primitive("embed")
class Embed(Op):
    """Look up a learned vector for each token id. Weight [V, D], without weight decay."""

    ports = (Port("x", "token ids", main=True, kinds=("tokens",)),)
    matrix_names = ("weight",)
    features: int = argument(..., "width of a token, D", ge=1)

    def shape(self, x: Wire) -> Wire:
        return Wire("sequence", self.features, x.length, x.grid)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        shape = (x.features, self.features)
        return {"weight": Parameter(shape, Init("small", (float(self.features),)), decay=False)}

    def prepare_token(self, p: Mapping[str, Any]) -> TokenFunction | None:
        from torch import Tensor, embedding

        weight = p["weight"]
        if not isinstance(weight, Tensor):
            return TokenFunction(weight.rows)

        def step(x: Tensor) -> Tensor:
            try:
                return embedding(weight, x)
            except (IndexError, RuntimeError):
                return self.forward(p, None, x)

        return TokenFunction(step)

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        y = tape.new(tape.out)
        tape.function([p["weight"]], [y], [x])
        return y

    def forward(self, p: Mapping[str, Any], call: Call | None, x: Tensor) -> Tensor:
        import torch
        from torch.nn.functional import embedding

        x = x if x.dtype in (torch.int64, torch.int32) else x.long()
        try:
            return embedding(x, p["weight"]) if isinstance(p["weight"], torch.Tensor) else p["weight"].rows(x)
        except IndexError:  # raised on a CPU; other devices fail with their own assertion
            raise RunError(f"a token id is outside the vocabulary of {p['weight'].shape[0]}") from None


@primitive("unembed")
class Unembed(Op):
    """Compute the logits of each token id: W x + b, W [V, D]. `tie: embed` shares the weight of the embedding."""

    matrix_names = ("weight",)
    vocabulary: int | None = argument(
        None, "size of the vocabulary, V (default: that of the model's input)", ge=1, inherit="tokens"
    )
    bias: bool = argument(True, "whether to add a bias")

    def shape(self, x: Wire) -> Wire:
        if self.vocabulary is None:
            hint = "vocabulary: 50304"
            raise Fault("E202", "unembed needs `vocabulary`, because the model's input is not tokens", hint=hint)
        return x.with_features(self.vocabulary)

    def parameters(self, x: Wire) -> dict[str, Parameter]:
        vocabulary = self.vocabulary or 0
        out = {"weight": Parameter((vocabulary, x.features), Init("small", (float(x.features),)))}
        if self.bias:
            out["bias"] = Parameter((vocabulary,), Init("zeros"), decay=False)
        return out

    def macs(self, x: Wire) -> int:
        return x.features * (self.vocabulary or 0)

    def matrix(self, p: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        return p["weight"], p.get("bias")

    def memory(self, tape: Tape, p: Mapping[str, Value], x: Value) -> Value:
        return tape.product(x, p["weight"], p.get("bias"))

    def forward(self, p: Mapping[str, Tensor], call: Call, x: Tensor) -> Tensor:
        from seqblocks.kernels.products import linear

        return linear(x, p["weight"], p.get("bias"))

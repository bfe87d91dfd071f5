"""The arguments of experts: a token goes through a few of several bodies."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import MAX_REPEATS, Combinator, combinator
from seqblocks.op import argument


@combinator("experts")
class Experts(Combinator):
    """Mixture of experts: a router sends each token to some of several copies of the steps.

    Scores are softmax(W x), or sigmoid(W x), with `router.weight` W [C, I], in float32. A token goes to the `top`
    experts of the highest scores, without a limit of how many tokens an expert takes, and the result is the sum of
    theirs, each times its score. Each expert has parameters of its own: `0.…`, `1.…`. The steps read single tokens.
    The correction of `corrected` has a gradient of 0: a training loop moves it by a rule of its own (DeepSeek-V3,
    arXiv:2412.19437). After a call in training, `model.auxiliary_losses()` has the losses that balance the experts.
    """

    count: int = argument(..., "number of experts, C", ge=1, le=MAX_REPEATS)
    top: int = argument(2, "experts per token", ge=1)
    steps: Any = argument(..., "the steps of an expert")
    score: Literal["softmax", "sigmoid"] = argument("softmax", "how the router's outputs become scores")
    normalize: bool | None = argument(
        None, "whether the scores of a token's experts are divided by their sum (default: where there are several)"
    )
    corrected: bool = argument(
        False, "whether experts are chosen by their scores plus `router.correction` [C], which weighs none of them"
    )
    main_kinds = ("sequence", "vector")
    takes_init = True

    @property
    def normalizes(self) -> bool:
        return self.top > 1 if self.normalize is None else self.normalize

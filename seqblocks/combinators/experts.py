"""Arguments of `experts`: a token is processed by a few of several bodies."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import MAX_REPEATS, Combinator, combinator
from seqblocks.op import argument


@combinator("experts")
class Experts(Combinator):
    """Mixture of experts: a router sends each token to some of several copies of the steps.

    Scores are softmax(W x), or sigmoid(W x), with `router.weight` W [C, I], in float32. A token goes to the `top`
    experts with the highest scores, and the result is the sum of their outputs, each multiplied by its score. Each
    expert has separate parameters: `0.…`, `1.…`. The steps process tokens one by one. The output of `shared`, steps
    for all tokens (`shared.…`), is added.

    With `groups`, a token goes to experts of its `top_groups` best groups only; the score of a group is its highest one
    (DeepSeek-V2), with `corrected` the sum of its two highest (DeepSeek-V3). The correction of `corrected` has no
    gradient; a training loop updates it by its own rule (DeepSeek-V3, arXiv:2412.19437). After a call in training mode,
    `model.auxiliary_losses()` returns the load-balancing losses.

    With `capacity`, an expert computes at most ceil(capacity * top * T / C) of the T tokens of a call in training mode;
    the others get nothing from it (Switch). First choices come before second ones (GShard), earlier tokens before later
    ones. In evaluation mode and in streams there is no limit, so that whole sequences, chunks and steps agree.
    """

    holds = ("steps", "shared")
    count: int = argument(..., "number of experts, C", ge=1, le=MAX_REPEATS)
    top: int = argument(2, "experts per token", ge=1)
    steps: Any = argument(..., "the steps of an expert")
    shared: Any = argument(None, "steps for all tokens, whose output is added to that of the experts")
    score: Literal["softmax", "sigmoid"] = argument("softmax", "function that turns the router's outputs into scores")
    normalize: bool | None = argument(
        None, "whether to divide the scores of a token's experts by their sum (default: if there are several)"
    )
    corrected: bool = argument(
        False,
        "whether to choose experts by their scores plus `router.correction` [C], which does not affect their weights",
    )
    eps: float = argument(1e-20, "added to the sum of a token's scores before `normalize` divides by it", ge=0)
    bias: bool = argument(False, "whether the router adds `router.bias` [C] to W x")
    groups: int = argument(1, "number of groups of consecutive experts; must divide count", ge=1)
    top_groups: int = argument(1, "groups per token", ge=1)
    factor: float = argument(1.0, "factor of the sum of the experts' outputs, before that of `shared` is added")
    capacity: float | None = argument(
        None, "how many times the average number of tokens an expert computes at most, in training mode (default: any)",
        gt=0,
    )
    main_kinds = ("sequence", "vector")
    takes_init = True

    @property
    def normalizes(self) -> bool:
        return self.top > 1 if self.normalize is None else self.normalize

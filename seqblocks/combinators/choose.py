"""Arguments of `choose`: steps that run on some of the tokens."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any

from seqblocks.combinators import Combinator, combinator
from seqblocks.op import argument


@combinator("choose")
class Choose(Combinator):
    """Run the steps on some tokens of a sequence only, in their order. The other tokens pass unchanged.

    `by` is a wire with a score for each token. With `top`, the tokens of the sequence with the highest scores are
    chosen; equal scores go to the first token. This reads the whole sequence, so it cannot stream. With `above`, each
    token whose score exceeds the threshold is chosen: whole sequences, chunks and steps agree. With both, `top` applies
    to whole sequences in training mode, and `above` in evaluation mode and in streams.

    The choice has no gradient: to train the scores, multiply by them in the steps. States and positions inside are
    those of the chosen tokens, and skipped tokens have no keys there. Costs are those of the share `top` of the tokens,
    or of all tokens if only `above` is set.
    """

    wires = ("by",)
    by: Any = argument(..., "the wire of the scores: one feature, for each token of the input")
    top: float | None = argument(
        None, "how many tokens: a share of the sequence below 1, at least one token, or a number of tokens", gt=0
    )
    above: float | None = argument(None, "the threshold: tokens with a higher score are chosen")
    steps: Any = argument(..., "the steps to run on the chosen tokens; they keep the width of their input")
    main_kinds = ("sequence",)

    @property
    def is_causal(self) -> bool:
        """Return whether the choice of a token depends on its own score only, except in training mode."""
        return self.above is not None

    def count(self, tokens: int) -> int:
        """Return how many of some tokens are chosen: for a share, the whole number below it, but at least 1."""
        if self.top is None:
            return tokens
        return min(tokens, number_of(self.top, tokens))


def number_of(top: float, tokens: Any) -> Any:
    """Return how many tokens `top` stands for, at least 1, in a sequence of `tokens`, which may be longer than that."""
    if top >= 1:
        return int(top)
    return max(1, int(tokens * top + 1e-6))  # a share such as 0.1 is not exact: 0.1 * 30 is above 3, 0.7 * 10 below 7

"""Arguments of `choose`: steps that run on some of the tokens."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from fractions import Fraction
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

    wire_keys = ("by",)
    usual = ("top",)
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

    @property
    def share(self) -> tuple[int, int]:
        """Return `top` as a fraction of the tokens, in whole numbers: 0.1 is 1 / 10. (0, 1) if it is their number."""
        top = self.top or 1.0
        return (0, 1) if top >= 1 else Fraction(top).limit_denominator(1_000_000).as_integer_ratio()

    def count(self, tokens: int) -> int:
        """Return how many of some tokens are chosen: for a share, the whole number below it, but at least 1."""
        if self.top is None:
            return tokens
        above, below = self.share
        return min(tokens, int(self.top) if self.top >= 1 else max(1, tokens * above // below))

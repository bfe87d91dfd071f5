"""The arguments of residual."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any

from seqblocks.combinators import Combinator, combinator
from seqblocks.op import argument


@combinator("residual")
class Residual(Combinator):
    """Add what the steps make to what they were given: x + steps(x)."""

    steps: Any = argument(..., "the steps of the branch")
    drop_path: float = argument(
        0.0, "probability that a sample skips the branch while training; kept ones are rescaled", ge=0, lt=1
    )

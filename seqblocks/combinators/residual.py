"""Arguments of `residual`."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any

from seqblocks.combinators import Combinator, combinator
from seqblocks.op import argument


@combinator("residual")
class Residual(Combinator):
    """Add the output of the steps to their input: x + steps(x)."""

    steps: Any = argument(..., "the steps of the branch")
    drop_path: float = argument(
        0.0, "probability of skipping the branch for a sample in training; other samples are rescaled", ge=0, lt=1
    )

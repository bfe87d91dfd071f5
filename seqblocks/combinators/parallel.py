"""Arguments of `parallel`: branches that read the same input."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any

from seqblocks.combinators import Combinator, Merge, combinator
from seqblocks.op import argument


@combinator("parallel")
class Parallel(Combinator):
    """Apply several branches to the same input and merge their results."""

    branches: Any = argument(..., "a list of branches, each `name: [steps]`; the name becomes part of parameter names")
    merge: Merge = argument("sum", "how to merge the results")
    holds = ("branches",)

"""Arguments of `aside`."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any

from seqblocks.combinators import Combinator, combinator
from seqblocks.op import argument


@combinator("aside")
class Aside(Combinator):
    """Compute wires on the side: the step after it reads what it would read without it.

    The steps belong to the list around them: later steps read their outputs by `from:` and by ports, and their
    parameters have the names that they would have in that list. Name the last output with `as:`.
    """

    in_line = True
    steps: Any = argument(..., "the steps, of which the first one reads the output of the step above")

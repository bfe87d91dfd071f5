"""Arguments of `scan`: the order, or several orders."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import Combinator, Merge, Order, combinator
from seqblocks.op import argument


@combinator("scan")
class Scan(Combinator):
    """Run the steps over the sequence in another order, or in several orders whose results are merged.

    All input sequences are reordered, and the original order of the output is restored. With several orders, `own`
    lists the parameters that each order owns (named `fwd.…`, `rev.…`); all others are shared. `init:` initialises
    those of a single order: `init: {rev.c.bias: zeros}`.
    """

    steps: Any = argument(..., "the steps to run")
    order: Order | list[Order] = argument(
        "forward",
        "forward, reverse; for the tokens of an image also rows, rows_reverse, columns, columns_reverse; or a list",
    )
    merge: Merge = argument("sum", "how to merge the results of several orders")
    own: Literal["all", "none"] | list[str] = argument(
        "none", "parameters owned by each order: all, none, or a list of names such as ssm.A_log"
    )
    main_kinds = ("sequence",)
    takes_init = True

    @property
    def orders(self) -> tuple[str, ...]:
        return (self.order,) if isinstance(self.order, str) else tuple(self.order)

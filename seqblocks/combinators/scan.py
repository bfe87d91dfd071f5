"""The arguments of scan: other orders, or several."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any, Literal

from seqblocks.combinators import Combinator, Merge, Order, combinator
from seqblocks.op import argument


@combinator("scan")
class Scan(Combinator):
    """Run the steps over the sequence in another order, or in several orders whose results are merged.

    Every sequence that enters is re-ordered, and the order of what leaves is restored. With several orders, `own` says
    which parameters each order has for itself (named `fwd.…`, `rev.…`); all others are shared. `init:` says
    how those of one order start: `init: {rev.c.bias: zeros}`.
    """

    steps: Any = argument(..., "the steps to run")
    order: Order | list[Order] = argument(
        "forward",
        "forward, reverse; for the tokens of an image also rows, rows_reverse, columns, columns_reverse; or a list",
    )
    merge: Merge = argument("sum", "how the results of several orders become one")
    own: Literal["all", "none"] | list[str] = argument(
        "none", "what each order has for itself: all, none, or a list of parameter names such as ssm.A_log"
    )
    main_kinds = ("sequence",)
    takes_init = True

    @property
    def orders(self) -> tuple[str, ...]:
        return (self.order,) if isinstance(self.order, str) else tuple(self.order)

"""Arguments of `scan`: the order, or several orders."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from functools import lru_cache
from typing import Annotated, Any, Literal

from seqblocks.combinators import Combinator, Merge, Order, combinator
from seqblocks.errors import Fault
from seqblocks.language.expressions import Expression, parse
from seqblocks.op import Over, argument

SAMPLE = 256  # tokens for which an analysis computes a key


@combinator("scan")
class Scan(Combinator):
    """Run the steps over the sequence in another order, or in several orders whose results are merged.

    All input sequences are reordered, and the original order of the output is restored. With several orders, `own`
    lists the parameters that each order owns (named `fwd.…`, `rev.…`); all others are shared. `init:` initialises
    those of a single order: `init: {rev.c.bias: zeros}`. The order `sorted` is that of `key`, an expression of the
    `row` and the `column` of a token, counted from 0, and of the number of `rows` and `columns`; equal keys keep their
    order. Steps inside it cannot read rows and columns.
    """

    steps: Any = argument(..., "the steps to run")
    order: Order | list[Order] = argument(
        "forward",
        "forward, reverse; for the tokens of an image also rows, columns, sorted, and their reverse; or a list",
    )
    key: Annotated[str, Over(("row", "column", "rows", "columns"))] | None = argument(
        None, "the key of the order sorted: tokens with a smaller number come first"
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


def check_key(key: str, grid: tuple[int, int]) -> None:
    """Raise Fault if a key has no number for some tokens of an image, of which at most SAMPLE are tried."""
    rows, columns = grid
    tokens = rows * columns
    for at in range(0, tokens, max(tokens // SAMPLE, 1)):
        _number(parse(key), grid, *divmod(at, columns))


def _number(expression: Expression, grid: tuple[int, int], row: int, column: int) -> float:
    try:
        values = {"rows": grid[0], "columns": grid[1], "row": row, "column": column}
        return float(expression.evaluate(values))
    except Fault as fault:
        fault.at = "key"
        raise


def places_by_key(key: str, grid: tuple[int, int]) -> tuple[int, ...]:
    """Return the places of the tokens of an image in the order of a key. Raises Fault if one has no number."""
    return _places(key, grid)


@lru_cache(maxsize=64)
def _places(key: str, grid: tuple[int, int]) -> tuple[int, ...]:
    expression, columns = parse(key), grid[1]
    keys = [_number(expression, grid, *divmod(at, columns)) for at in range(grid[0] * columns)]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


places_by_key._dynamo_marked_constant = True  # type: ignore[attr-defined]  # not traced by compilers

"""Arguments of `cell`: a recurrence written as the steps for one token."""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from typing import Any

from pydantic import BaseModel, ConfigDict

from seqblocks.combinators import Combinator, combinator
from seqblocks.op import argument


class CellState(BaseModel):
    """One state wire of a cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    features: int = argument(..., "width", ge=1)
    start: Any = argument(0.0, "value before the first token: a number, or an initialiser if it is learned")
    learned: bool = argument(False, "whether the value before the first token is a parameter, `start_NAME`")


@combinator("cell")
class Cell(Combinator):
    """Run a recurrence of your own: steps for one token, which read and set state wires.

    `state` names the state wires with their widths: `state: {s: 64}`, or `s: {features: 64, start: 0.5}`. A step sets
    the state by its output, `as: s`; steps above it read the value after the previous token, steps below it the new
    one. The steps may read wires of the enclosing steps token by token, and must process each token by itself.

    The definition is a loop over the tokens. If `calc` sets the states by formulas in which they occur linearly, all
    tokens are computed by an associative scan. Otherwise only the steps that the next state depends on run in the loop,
    and in training the loop is computed again, part by part, in the backward pass.
    """

    state: Any = argument(..., "the state wires: `name: width`, or `name: {features, start, learned}`")
    steps: Any = argument(..., "the steps for one token")
    chunk: int | None = argument(
        None,
        "tokens that are computed again together in the backward pass, 0 for none (default: the square root of the "
        "length for a loop over more than 64 tokens, 0 for an associative scan)",
        ge=0,
    )
    main_kinds = ("sequence",)

"""The arguments of the verbs that hold steps: residual, scan, parallel, repeat, experts.

What a combinator does with its steps is in `seqblocks/analysis/combinators/`, a file for each.
"""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from seqblocks.op import argument
from seqblocks.types import Kind

Order = Literal["forward", "reverse", "rows", "rows_reverse", "columns", "columns_reverse"]
Merge = Literal["sum", "mean", "concat", "product"]
GRID_ORDERS = ("rows", "rows_reverse", "columns", "columns_reverse")
MAX_REPEATS = 4096


class Combinator(BaseModel):
    """Base of the verbs that hold steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True)

    verb: ClassVar[str] = ""
    holds: ClassVar[tuple[str, ...]] = ("steps",)
    """The arguments that are steps; their values are document nodes."""
    open_keys: ClassVar[bool] = False
    """Whether keys of the user's own hold steps too."""
    takes_init: ClassVar[bool] = False
    """Whether it has parameters that `init:` may start otherwise."""
    main_kinds: ClassVar[tuple[Kind, ...]] = ("sequence", "vector", "tokens", "image")


C = TypeVar("C", bound=type[Combinator])
COMBINATORS: dict[str, type[Combinator]] = {}


def combinator(verb: str) -> Callable[[C], C]:
    """Register a Combinator under its verb."""

    def register(cls: C) -> C:
        cls.verb = verb
        COMBINATORS[verb] = cls
        return cls

    return register


@combinator("residual")
class Residual(Combinator):
    """Add what the steps make to what they were given: x + steps(x)."""

    steps: Any = argument(..., "the steps of the branch")
    drop_path: float = argument(
        0.0, "probability that a sample skips the branch while training; kept ones are rescaled", ge=0, lt=1
    )


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


@combinator("parallel")
class Parallel(Combinator):
    """Give the same input to several branches and merge their results."""

    branches: Any = argument(..., "a list of branches, each `name: [steps]`; the name becomes part of parameter names")
    merge: Merge = argument("sum", "how the results become one")
    holds = ("branches",)


@combinator("repeat")
class Repeat(Combinator):
    """Run steps several times, one after the other, each with parameters of its own unless they are shared.

    `times: 12` with `steps`, or `pattern: m*3 s m*16 s` with the steps of each word under the word; `times` then
    repeats the pattern. Inside, `layer` is the index (from 0) and `layers` their number. With `share`, layers use
    parameters of the first layer (of a pattern: of the first layer of their word).
    """

    times: int = argument(1, "how often the steps, or the pattern, are repeated (0: not at all)", ge=0, le=MAX_REPEATS)
    pattern: str | None = argument(None, "words with counts, for instance `m*7 s`; each word is a key holding steps")
    index: str = argument("layer", "what the layer index is called inside; the number of layers is its plural")
    share: Literal["all", "none"] | list[str] | str = argument(
        "none",
        "what layers share: all, none, or a list of steps and parameters; or a step whose parameters the repeat uses",
    )
    steps: Any = argument(None, "the steps to repeat, if there is no pattern")
    open_keys = True


@combinator("experts")
class Experts(Combinator):
    """Mixture of experts: a router sends each token to some of several copies of the steps.

    Scores are softmax(W x), or sigmoid(W x), with `router.weight` W [C, I], in float32. A token goes to the `top`
    experts of the highest scores, without a limit of how many tokens an expert takes, and the result is the sum of
    theirs, each times its score. Each expert has parameters of its own: `0.…`, `1.…`. The steps read single tokens.
    After a call in training, `model.auxiliary_losses()` has the losses that balance the experts.
    """

    count: int = argument(..., "number of experts, C", ge=1, le=MAX_REPEATS)
    top: int = argument(2, "experts per token", ge=1)
    steps: Any = argument(..., "the steps of an expert")
    score: Literal["softmax", "sigmoid"] = argument("softmax", "how the router's outputs become scores")
    normalize: bool | None = argument(
        None, "whether the scores of a token's experts are divided by their sum (default: where there are several)"
    )
    main_kinds = ("sequence", "vector")
    takes_init = True

    @property
    def normalizes(self) -> bool:
        return self.top > 1 if self.normalize is None else self.normalize

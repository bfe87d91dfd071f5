"""Arguments of the combinators (verbs that contain steps): one file each, imported when a spec uses it.

The file of the same name in `seqblocks/analysis/steps/combinators/` lowers the steps of a combinator.
"""

# Without `from __future__ import annotations`, whose strings pydantic would evaluate anew for each subclass.

import importlib
from collections.abc import Callable
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from seqblocks.types import Kind

Order = Literal[
    "forward", "reverse", "rows", "rows_reverse", "columns", "columns_reverse", "sorted", "sorted_reverse"
]
Merge = Literal["sum", "mean", "concat", "product"]
GRID_ORDERS = ("rows", "rows_reverse", "columns", "columns_reverse", "sorted", "sorted_reverse")
MAX_REPEATS = 4096


class Combinator(BaseModel):
    """Base of the arguments of verbs that contain steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True)

    verb: ClassVar[str] = ""
    holds: ClassVar[tuple[str, ...]] = ("steps",)
    """The arguments of type `steps`; their values are document nodes."""
    usual: ClassVar[tuple[str, ...]] = ()
    """Optional arguments that most steps need, which editors therefore write with the verb."""
    open_keys: ClassVar[bool] = False
    """Whether user-defined keys contain steps too."""
    wire_keys: ClassVar[tuple[str, ...]] = ()
    """The arguments that are names of wires; their values are document nodes."""
    takes_init: ClassVar[bool] = False
    """Whether it has parameters that `init:` can initialise."""
    in_line: ClassVar[bool] = False
    """Whether its steps are steps of the list around it, so that it is no node of the graph."""
    main_kinds: ClassVar[tuple[Kind, ...]] = ("sequence", "vector", "tokens", "image")


Combinator.__annotations__ = {}  # pydantic knows the class variables by now, and would evaluate these for each subclass

# in the order of the documentation
COMBINATORS = ("residual", "scan", "parallel", "repeat", "experts", "choose", "each", "cell", "aside")
C = TypeVar("C", bound=type[Combinator])
_known: dict[str, type[Combinator]] = {}


def combinator(verb: str) -> Callable[[C], C]:
    """Register a Combinator under its verb."""

    def register(cls: C) -> C:
        cls.verb = verb
        _known[verb] = cls
        return cls

    return register


def find_combinator(verb: str) -> type[Combinator]:
    """Return the Combinator of a verb in COMBINATORS."""
    importlib.import_module(f"{__name__}.{verb}")
    return _known[verb]

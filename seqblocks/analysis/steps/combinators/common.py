"""Read the input and the arguments of any combinator, before the function that lowers it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.named_values import Names
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import read_arguments
from seqblocks.analysis.scope.wires import read_port, wire_at
from seqblocks.analysis.steps.init_and_tie import report_no_parameters
from seqblocks.analysis.steps.steps import lower_inside, lowers
from seqblocks.combinators import Combinator
from seqblocks.language.document import Node, Sequence
from seqblocks.language.expressions import UNKNOWN
from seqblocks.op import Port

Combine = Callable[[Context, Step, Any, int], graph.Node | None]
Check = Callable[[Context, Node, int], object]
Scope = Callable[[Context, Step], Names]


def combines(
    cls: type[Combinator], check: Check = lower_inside, scope: Scope = lambda ctx, step: ctx.names
) -> Callable[[Combine], Combine]:
    """Register the function that creates the node of a combinator from its arguments and its input value.

    check: reports faults in an argument that holds steps, if that function did not lower them. It may raise Fault.
    scope: returns the names that are visible to those steps.
    """

    def register(function: Combine) -> Combine:
        @lowers(cls)
        def lower(ctx: Context, step: Step, cls: type[Combinator]) -> graph.Node | None:
            x = _read_input(ctx, step, cls)
            # `repeat: {times: depth}` would be the layers around it, most likely meant as an entry of `let:`
            arguments = read_arguments(ctx._replace(layers=None) if cls.open_keys else ctx, step, cls)
            if arguments is None:
                _check_steps(ctx._replace(names=scope(ctx, step)), step, cls, check)
                return None
            steps = ctx.run.steps
            try:
                return function(ctx, step, arguments, x)
            finally:
                if ctx.run.steps == steps:
                    _check_steps(ctx._replace(names=scope(ctx, step)), step, cls, check, only_lists=True)

        return function

    return register


def _read_input(ctx: Context, step: Step, cls: type[Combinator]) -> int:
    """Return the input value of a combinator, or an unknown value if its kind is not accepted."""
    report_no_parameters(ctx, step, *(("tie",) if cls.takes_init else ("init", "tie")))
    port = Port("", main=True, kinds=cls.main_kinds)
    values = read_port(ctx, step, port) or (ctx.run.unknown(),)
    if ctx.run.types[values[0]] and not wire_at(ctx, step, port, values):
        return ctx.run.unknown()
    return values[0]


def _check_steps(ctx: Context, step: Step, cls: type[Combinator], check: Check, only_lists: bool = False) -> None:
    """Check the steps of a combinator if one of its other arguments is UNKNOWN, or if it does not run them.

    only_lists: do not report that something else is in their place, which was reported.
    """
    if cls.open_keys:  # the number of layers is not known
        ctx = ctx._replace(layers=UNKNOWN)
    x = ctx.run.unknown()
    for key, (_, node) in step.fields.items():
        is_list, is_word = isinstance(node, Sequence), cls.open_keys and key not in cls.model_fields
        if (key in cls.holds and not only_lists) or (is_list and (key in cls.holds or is_word)):
            check(ctx, node, x)

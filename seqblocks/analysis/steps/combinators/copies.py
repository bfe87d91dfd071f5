"""Wires from outside for steps that run on other tokens than those around them: chosen ones, or parts of a sequence.

The steps read copies, which have types of their own. Those that are read become ports of the body, as for a block.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.types import Wire


def copies_of(
    ctx: Context, own: dict[int, int], kind_of: Callable[[Wire], Wire | None], is_known: bool
) -> dict[str, int]:
    """Return the wires that the steps can read, by name: copies of those outside.

    own: values that have a copy already, such as the input. kind_of: returns the type of a copy, or None if the steps
    cannot read the wire. is_known: whether the type of the input is; if not, all wires have unknown copies.
    """
    run, found, known = ctx.run, dict[str, int](), dict(own)
    for name, value in ctx.body.wires.items():
        outer = run.types[value]
        kind = kind_of(outer) if outer and is_known else None
        if outer and is_known and kind is None:
            continue
        if value not in known:
            known[value] = run.value(kind, name)
            if value in run.makers:
                run.makers[known[value]] = run.makers[value]
        found[name] = known[value]
        if run.references is not None and (place := run.references.places.get((value, name))):
            run.references.define([known[value]], [(name, place)])
    return found


def give_copies(
    ctx: Context, body: graph.Graph, copies: dict[str, int], taken: Container[str]
) -> dict[str, tuple[int, ...]]:
    """Make the wires that a body reads its ports. Return the wires outside, by port.

    taken: the names of other inputs of the step.
    """
    names = {value: name for name, value in reversed(copies.items())}
    read = [value for value in body.captures if value in names]
    ports = {value: f"{names[value]}_" if names[value] in taken else names[value] for value in read}
    body.ports = {port: value for value, port in ports.items()}
    body.captures = tuple(value for value in body.captures if value not in names)  # unknown ones, after a fault
    return {port: (ctx.body.wires[names[value]],) for value, port in ports.items()}

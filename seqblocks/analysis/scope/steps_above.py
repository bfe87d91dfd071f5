"""Find the steps above a step, in its own list and the enclosing ones, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from seqblocks.analysis.scope.context import Body, Context
from seqblocks.analysis.scope.step import Step, find_verb
from seqblocks.graph import UnknownNode
from seqblocks.language.document import Scalar
from seqblocks.suggestions import nearest


def bodies_around(ctx: Context) -> Iterator[Body]:
    """Yield this body, then the enclosing ones."""
    body: Body | None = ctx.body
    while body:
        yield body
        body = body.outer


def refer_wire(ctx: Context, node: Scalar, start: int, name: str, value: int, bodies: Iterable[Body]) -> None:
    """Note that part of a text reads a wire, perhaps an output `NAME.WIRE` of a block, if references are collected.

    bodies: lists of steps, one of which has the step NAME.
    """
    if ctx.run.references is None:
        return
    step, dot, _ = name.partition(".")
    wire = name.rpartition(".")[2]
    if dot and (found := next((body.nodes[step] for body in bodies if step in body.nodes), None)):
        ctx.run.references.step(found, node.part(start, len(step)))
    ctx.run.references.wire(wire, node.part(start + len(name) - len(wire), len(wire)), value)


def may_be_step(ctx: Context, name: str) -> bool:
    """Return whether a step above may have this name: one has, or one that could not be read may have it."""
    return any(
        body.incomplete or name in body.nodes or _has_misspelt_verb(ctx, body, name) for body in bodies_around(ctx)
    )


def _has_misspelt_verb(ctx: Context, body: Body, name: str) -> bool:
    """Return whether a step without a name has an unknown verb that may be a misspelling of `name`."""
    unknown = (node for node in body.nodes.values() if isinstance(node, UnknownNode) and node.name == node.verb)
    close = [node.verb for node in unknown if name in node.verb.lower() or nearest(node.verb, (name,))]
    return any(verb not in ctx.passed and find_verb(ctx.file, verb) is None for verb in close)


def step_called(body: Body, name: str) -> Step | None:
    """Return the step with this name in a list of steps, except the current one."""
    if not body.named:
        body.named = {each.name: each for each in reversed(body.steps)}
    found = body.named.get(name)
    return None if found is body.current else found


def step_left_out(body: Body, name: str) -> Step | None:
    """Return the step with this name whose condition is false, or None if there is none."""
    found = step_called(body, name)
    return found if found and body.conditions.get(id(found)) is False else None


def renamed_steps(ctx: Context, verb: str) -> list[str]:
    """Return the names of the steps above that have this verb, but another name."""
    nodes = (node for body in bodies_around(ctx) for node in body.nodes.values())
    return [node.name for node in nodes if node.verb == verb != node.name]

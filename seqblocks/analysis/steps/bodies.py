"""Cache lowered bodies, so that steps with equal bodies share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.steps.steps import count_steps, spend


def lower_once(ctx: Context, key: tuple[Any, ...], lower: Callable[[], tuple[Context, graph.Graph]]) -> graph.Graph:
    """Return the body from `lower` and the context inside it, or the cached ones for an equal key.

    key: everything that the body depends on, except `depth`; first the block or the steps.
    """
    run, owner = ctx.run, key[0]
    if owner in run.by_depth:
        ctx.read_depth()
        key = (*key, ctx.layers)
    if key in run.bodies:
        body, steps, height = run.bodies[key]
        count_steps(ctx, steps, height)
        return body
    spend(ctx, 20)
    steps, ties, deepest, faults = run.steps, run.ties, run.deepest, run.report.calls
    run.deepest = ctx.depth + 1
    outside, run.reads_depth = run.reads_depth, False
    inner, body = lower()
    if run.reads_depth and owner not in run.by_depth:
        run.by_depth.add(owner)
        key = (*key, ctx.layers)
    run.reads_depth |= outside
    if not run.report:
        run.lowered.append((inner, body))
    # Ties contain the names of one layer. A fault inside may have another cause where the body is used again.
    if run.ties == ties and run.report.calls == faults:
        run.bodies[key] = (body, run.steps - steps, run.deepest - ctx.depth)
    run.deepest = max(run.deepest, deepest)
    return body

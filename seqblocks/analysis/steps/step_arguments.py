"""Arguments of type `steps`: the steps passed to a block, and how the block runs them.

The steps are evaluated in the scope where they are written, with the names, verbs and blocks visible there. The only
wire that they can read is the one that the block passes in.
"""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope.context import Body, Context, Passed
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import size
from seqblocks.analysis.scope.wires import read_port
from seqblocks.analysis.steps.bodies import lower_once
from seqblocks.analysis.steps.copies import words_in
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.steps import lower_steps, lowers, spend
from seqblocks.errors import Fault, Note, quote
from seqblocks.language.arguments import Argument
from seqblocks.language.document import Node, Scalar, Sequence, kind_of
from seqblocks.language.spec import Block
from seqblocks.op import Port

ANY_KIND = Port("", main=True)  # a body captures what its steps can read


def read_passed(ctx: Context, node: Node, block: Block, declared: Argument) -> Passed:
    """Return the steps passed for an argument."""
    if not isinstance(node, Sequence):
        word = node.text if isinstance(node, Scalar) and isinstance(node.value, str) else None
        message = f"{quote(declared.name)} of block {block.name} must be a list of steps"
        hint = f"{declared.name}: [{word or 'layer_norm, silu'}]"
        ctx.report(Fault("E203", message, found=kind_of(node), notes=[declared_here(declared)], hint=hint), node.span)
        return Passed(declared)
    return Passed(declared, node, ctx, _key(ctx, node))


def declared_here(argument: Argument) -> Note:
    return Note("the argument is declared here", argument.span)


def add_defaults(ctx: Context, block: Block) -> None:
    """Add the default steps of arguments to the context of a block. They see its names but cannot run its arguments."""
    place = ctx._replace(passed={})
    for name, declared in block.args.items():
        if declared.type == "steps" and name not in ctx.passed:
            ctx.run.unread[id(declared.default)] = False
            ctx.passed[name] = Passed(declared)
            if isinstance(steps := declared.default, Sequence):  # otherwise it was reported
                ctx.passed[name] = Passed(declared, steps, place, _key(place, steps))


def _key(ctx: Context, steps: Sequence) -> int:
    """Return a number that is equal for equivalent steps: equal text, and equal values of the names in it."""
    run = ctx.run
    if id(steps) not in run.words:
        spend(ctx, steps.size // 4)
        run.words[id(steps)] = frozenset(words_in([steps]))
    words = run.words[id(steps)]
    spend(ctx, len(words) // 4)
    values = [(name, ctx.names[name]) for name in words if name in ctx.names]
    spend(ctx, sum(size(value) for _, value in values))
    passed_on = [(name, ctx.passed[name]) for name in words if name in ctx.passed]
    for _, passed in passed_on:  # equal steps may have been lowered before, including these
        passed.used = True
    inner = tuple((name, passed.key) for name, passed in passed_on)
    key = (id(steps), tuple((name, repr(value)) for name, value in values), inner)
    return run.passed_keys.setdefault(key, len(run.passed_keys) + 1)


# --- running them -----------------------------------------------------------------------------------------------------


@lowers(Argument)
def lower_passed(ctx: Context, step: Step, declared: Argument) -> graph.Node | None:
    """Return the node of a step whose verb is an argument, or None if its steps are UNKNOWN."""
    report_no_primitive(ctx, step, is_block=False)
    (x,) = read_port(ctx, step, ANY_KIND) or (ctx.run.unknown(),)
    passed = ctx.passed[declared.name]
    passed.used = True
    if passed.place is None:
        return None
    note = Note(f"in the steps of {declared.name}, used", step.span)
    body = lower_once(ctx, (passed.key, ctx.run.types[x]), lambda: _enter(ctx, passed, x, step.name, note))
    return make_node(ctx, step, graph.BlockNode, {"x": (x,)}, ctx.run.types[body.result], bodies={"": body})


def report_no_primitive(ctx: Context, step: Step, is_block: bool) -> None:
    """Report `init` and `tie` on a step that is not a primitive."""
    for key in ("init", "tie"):
        if key in step.common:
            what = "is a block" if is_block else "stands for several steps"
            instead = "; to share all parameters, use `share: STEP`" if key == "tie" else ""
            message = f"`{key}` applies to the parameters of a primitive, but {step.verb} {what}"
            ctx.report(Fault("E201", message, hint=f"move `{key}` to a step inside{instead}"), step.key_span(key))


def _enter(ctx: Context, passed: Passed, x: int, name: str, note: Note) -> tuple[Context, graph.Graph]:
    assert passed.place
    entered = ctx.run.value(ctx.run.types[x], "input")
    body = Body({"input": entered}, (*ctx.body.path, name), place=passed.place.body)
    inner = passed.place._replace(body=body, trail=(*ctx.trail, note), depth=ctx.depth + 1, layers=ctx.layers)
    return inner, lower_steps(inner, passed.steps, entered)


def check_unrun(ctx: Context) -> None:
    """Check steps passed to a block that does not run them, because a condition is false."""
    for name, passed in ctx.passed.items():
        if not passed.used and passed.place:
            passed.used = True
            note = Note(f"in the steps of {name}, which are not run", passed.declared.span)
            _enter(ctx, passed, ctx.run.unknown(), name, note)

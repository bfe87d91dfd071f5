"""Lower steps to nodes: a list of steps becomes a body, and each step is lowered according to its verb.

The functions that lower ops, blocks and combinators are registered here (`@lowers`). A step that cannot be lowered
becomes an unknown node, whose outputs have no type, so that nothing that depends on it is reported.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from typing import Any, TypeVar

from seqblocks import graph
from seqblocks.analysis.scope.context import Body, Context, Layers
from seqblocks.analysis.scope.named_values import Names
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.wires import read_wires
from seqblocks.analysis.steps.conditions import is_absent, is_known, leave_out
from seqblocks.analysis.steps.read_step import InLine, Items, all_steps, read_items
from seqblocks.combinators import COMBINATORS
from seqblocks.errors import Fault, Note, Suggestion, listing, quote
from seqblocks.language.arguments import Argument
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import Block
from seqblocks.language.spec_files import bundled
from seqblocks.op import PRIMITIVES, Op, builtin_verbs, load_plugins
from seqblocks.suggestions import instead_of, key_hint, nearest

MAX_STEPS = 50_000
MAX_EFFORT = 600_000  # in all layers, see `values.effort`
MAX_NESTING = 64  # depth of nested bodies: calls of torch modules nest as deeply, and Python limits recursion

Lowering = Callable[[Context, Step, Any], graph.Node | None]
LOWERINGS: dict[type, Lowering] = {}
L = TypeVar("L", bound=Lowering)


def lowers(meaning: type) -> Callable[[L], L]:
    """Register the function that creates the node of a step whose verb is an Op, a Block or a certain combinator.

    The function takes the context, the step and the definition of the verb. It raises Fault, or returns None after a
    fault that it has reported, or if something is UNKNOWN.
    """

    def register(function: L) -> L:
        LOWERINGS[meaning] = function
        return function

    return register


def _lowering(meaning: Any) -> Lowering:
    if not isinstance(meaning, type):
        return LOWERINGS[type(meaning)]
    if issubclass(meaning, Op) and not meaning.names_results:
        return LOWERINGS[Op]
    if meaning not in LOWERINGS:  # importing the file of a combinator, or of `calc`, registers its function
        folder = "" if issubclass(meaning, Op) else "combinators."
        importlib.import_module(f"seqblocks.analysis.steps.{folder}{meaning.verb}")  # type: ignore[attr-defined]
    return LOWERINGS[meaning]


# --- lists of steps ---------------------------------------------------------------------------------------------------


def lower_inside(
    ctx: Context, steps: Node | None, x: int, *labels: str, names: Names | None = None,
    layers: dict[str, Layers] | None = None, states: dict[str, int] | None = None, incomplete: bool = False,
) -> graph.Graph:
    """Lower the steps of a combinator, which read value `x`. Outer wires stay visible.

    labels: parts of the names of parameters, after that of the combinator. names: the scope of the body, if separate.
    layers: those that its steps can read besides the ones that are visible outside. states: the state wires of a cell
    after the previous token. incomplete: whether some of its wires are UNKNOWN.
    """
    outer = ctx.body
    spend(ctx, 4 + len(outer.wires) // 512)  # a body without steps has a cost too
    assert outer.current
    path = (*outer.path, outer.current.name, *labels)
    states = states or {}
    body = Body({**outer.wires, "input": x, **states}, path, outer, outer.incomplete or incomplete, states=states)
    body.layers = {**outer.layers, **(layers or {})}
    outer.inner.append(body)
    names = ctx.names if names is None else names
    made = lower_steps(ctx._replace(names=names, body=body, depth=ctx.depth + 1), steps, x, ports=states)
    made.carried = {name: body.wires[name] for name in states}
    return made


def lower_steps(
    ctx: Context, steps: Node | None, x: int, ports: dict[str, int] | None = None, has_outputs: bool = False
) -> graph.Graph:
    """Lower a list of steps in `ctx.body`.

    ports: inner values, by the names of a block's wire arguments, or of a model's inputs after the first.
    has_outputs: whether the model has `outputs:`, so that its last step may have several outputs.
    """
    body, run = ctx.body, ctx.run
    first = len(run.types)
    out = graph.Graph(x, [], x, ports=ports or {})
    if run.full or not isinstance(steps, Sequence):
        if steps is not None and not run.full:
            _report_no_list(ctx, steps)
        body.incomplete = True
        out.result = run.unknown()
        return out
    body.value = x
    items = read_items(ctx, steps.items)
    body.steps = [*all_steps(items)]
    _lower_items(ctx, items, out)
    out.result = body.value
    if body.last and len(body.last.outputs) > 1 and not has_outputs:
        fault = Fault("E313", f"the last step has {len(body.last.outputs)} outputs, but must have one")
        ctx.report(fault, body.last.span)
        out.result = run.unknown()
    out.captures = _captures(out, first, {x, *(ports or {}).values()})
    return out


def _lower_items(ctx: Context, items: Items, out: graph.Graph, are_absent: bool = False) -> None:
    """Lower items of a list of steps, and add their nodes to the body."""
    body = ctx.body
    for item in items:
        if isinstance(item, InLine):
            _lower_in_line(ctx, item, out, are_absent)
            continue
        body.current = item
        if not body.wires.keys() >= set(item.possible_wires):
            body.incomplete = True
        if are_absent or ("when" in item.common and is_absent(ctx, item)):
            if ctx.run.references is not None:
                _refer_inside(ctx, item)
            leave_out(ctx, item)
            out.absent.append(item.name)
            continue
        if "when" not in item.common or is_known(ctx, item):
            body.last = lower_step(ctx, item)
        else:
            _check_inside(ctx, item)
            body.last = _unknown_node(ctx, item)
        body.value = body.last.outputs[0]
        out.nodes.append(body.last)


def _lower_in_line(ctx: Context, item: InLine, out: graph.Graph, are_absent: bool) -> None:
    """Lower steps that belong to this list, but do not change the input of the step after them."""
    step, body = item.step, ctx.body
    before = body.value, body.last
    body.current = step
    body.incomplete |= not body.wires.keys() >= set(step.possible_wires)
    for key in step.common.keys() - {"from", "when"}:
        fault = Fault("E201", f"`{key}` does not apply to {step.verb}", hint=f"move `{key}` to one of its steps")
        ctx.report(fault, step.key_span(key))
    if not isinstance(step.get("steps"), Sequence) and not (step.incomplete or step.unreadable):
        _report_no_list(ctx, step.get("steps") or Scalar(step.span, 1, 1, None, ""))
    if "from" in step.common:
        body.value, body.last = read_wires(ctx, step.common["from"][1])[0], None
    if "when" in step.common and not are_absent:
        are_absent = is_absent(ctx, step)
        if not is_known(ctx, step):
            unknown_steps = [*all_steps(item.items)]
            for each in unknown_steps:
                _check_inside(ctx, each)
                out.nodes.append(_unknown_node(ctx, each))
            body.value, body.last = before
            return
    _lower_items(ctx, item.items, out, are_absent)
    last = item.items[-1] if item.items else None
    if isinstance(last, Step) and last.found and not (last.defined_wires() or last.unreadable or last.misspelt):
        message = f"nothing can read the output of {last.verb}, the last step of {step.verb}"
        ctx.report(Fault("E315", message, hint="name it with `as:`, or remove the step"), last)
    body.value, body.last = before


def _report_no_list(ctx: Context, steps: Node) -> None:
    found, keys = kind_of(steps), steps.entries if isinstance(steps, Mapping) else ()
    hint = "indent its items at least as far as the key: `- silu`" if found == "nothing" else "- silu"
    if keys:
        hint = f"each step is an item of a list: put '- ' before {listing(keys)}"
    ctx.report(Fault("E203", "steps must be a list", found=found, hint=hint), steps.span)


def _captures(body: graph.Graph, first: int, own: set[int]) -> tuple[int, ...]:
    """Return the outer values that a body reads: those numbered before its first value."""
    made = set(own)
    seen: dict[int, None] = {}
    for node in body.nodes:
        seen |= dict.fromkeys(v for v in node.reads if v < first and v not in made)
        made.update(node.outputs)
    if body.result < first and body.result not in made:
        seen[body.result] = None
    return tuple(seen)


# --- one step ---------------------------------------------------------------------------------------------------------


def lower_step(ctx: Context, step: Step) -> graph.Node:
    """Lower a step to its node: an unknown node after a fault, or if it depends on something UNKNOWN."""
    try:
        if not (step.unreadable or ctx.run.full):
            count_steps(ctx, 1)
            spend(ctx, step.effort)
            if step.found is None:
                _report_no_verb(ctx, step)
            else:
                meaning = step.found.meaning
                if node := _lowering(meaning)(ctx, step, meaning):
                    if "share" in step.common:
                        from seqblocks.analysis.steps.sharing import read_share, share_parameters  # few specs need it

                        share_parameters(ctx, step, node, read_share(ctx, step))
                    return node
    except Fault as fault:
        ctx.report(fault, step)
    return _unknown_node(ctx, step)


def _check_inside(ctx: Context, step: Step) -> None:
    """Report the faults of a step whose condition is wrong, except those that depend on values.

    The condition may exclude the values that would be wrong, so all names have unknown values.
    """
    if not ctx.run.report:  # in an unused block, where the condition depends on an argument
        if ctx.run.references is not None:
            _refer_inside(ctx, step)
        return
    _lower_for_any_values(ctx, step)


def _refer_inside(ctx: Context, step: Step) -> None:
    """Note what a step reads that is left out, once in each block. Nothing else remains of it, and no fault."""
    assert ctx.run.references is not None
    key = id(step), id(ctx.callers[-1]) if ctx.callers else 0
    if key in ctx.run.references.tried or ctx.run.full or step.found is None:
        return
    ctx.run.references.tried.add(key)
    with ctx.run.trial():
        passed = {name: each._replace() for name, each in ctx.passed.items()}
        mine = ctx.body
        body = mine._replace(
            inner=[*mine.inner], layers={**mine.layers}, conditions={**mine.conditions}, numbers={**mine.numbers},
            named={}, formulas=None, incomplete=True,
        )  # fmt: skip
        _lower_for_any_values(ctx._replace(body=body, passed=passed), copy(step))


def _lower_for_any_values(ctx: Context, step: Step) -> None:
    """Lower a step in which all names have unknown values, and to which no other one is known to be equal."""
    names, body = Names(ctx.names, dict.fromkeys(ctx.names, UNKNOWN)), ctx.body
    names.incomplete = ctx.names.incomplete
    own = step.defined_wires()
    wires = {name: value for name, value in body.wires.items() if name not in own}
    nodes = {name: node for name, node in body.nodes.items() if name != step.name}
    lower_step(ctx._replace(names=names, body=body._replace(wires=wires, nodes=nodes)), step)


def _unknown_node(ctx: Context, step: Step) -> graph.Node:
    """Return the node of a step that cannot be lowered, and define its wires."""
    names = step.defined_wires()
    outputs = tuple(ctx.run.unknown() for _ in names or [""])
    for name, value in zip(names, outputs, strict=False):
        ctx.body.wires.setdefault(name, value)
    if ctx.run.references is not None:
        ctx.run.references.define(outputs, step.named_wires())
    if step.found and isinstance(step.found.meaning, Block):
        for item in step.found.meaning.outputs:
            ctx.body.wires.setdefault(f"{step.name}.{item.text}", ctx.run.unknown())
    node = graph.UnknownNode(step.name, step.verb, step.span, {}, outputs, None)
    ctx.body.nodes.setdefault(step.name, node)
    return node


def _report_no_verb(ctx: Context, step: Step) -> None:
    """Report an unknown verb, unless an unreadable part of the file may define it."""
    if ctx.file.incomplete:
        return
    message, notes = f"there is no verb {quote(step.verb)}", [Note(text) for text in load_plugins()]
    ctx.report(Fault("E301", message, hint=lambda: _verb_hint(ctx, step.verb), notes=notes), step)


def _verb_hint(ctx: Context, verb: str) -> str:
    """Return a hint for an unknown verb."""
    if ctx.callers and verb in ctx.callers[-1].args:
        return _argument_hint(ctx.callers[-1].args[verb])
    verbs = [*ctx.passed, *COMBINATORS, *builtin_verbs(), *PRIMITIVES, *ctx.file.visible]
    if found := _bundled_hint(ctx, verb) or instead_of(verb) or key_hint(verb, verbs):
        return found
    files = files_of_blocks()
    if block := nearest(verb, files):
        return _with_use(ctx, f"did you mean '{block}'? add `use: [{files[block]}]`", verb, block)
    return "`seqblocks ops` lists the verbs; your own primitives must be imported first (--import my_ops.py)"


def _argument_hint(argument: Argument) -> str:
    """Return a hint if the unknown verb is the name of an argument."""
    if argument.type == "steps":
        return "default steps can use numbers and words among the arguments, but cannot run arguments of type `steps`"
    return f"to run an argument, declare it as `{argument.name}: steps`, or with a list of steps as its default"


def _with_use(ctx: Context, hint: str, verb: str, block: str) -> str:
    """Return a hint with the edits that write a bundled block in place of a verb, and add its file to `use:`."""
    from seqblocks.language.uses import added  # only this hint needs it

    edit = added(ctx.file.root, files_of_blocks()[block])
    return Suggestion.of(hint, verb, block, [edit]) if edit else hint


def _bundled_hint(ctx: Context, verb: str) -> str | None:
    """Return a hint if a bundled file or one of its blocks has this name."""
    files = files_of_blocks()
    if verb in files:
        return _with_use(ctx, f"add `use: [{files[verb]}]`", verb, verb)
    path = bundled().get(verb)
    if path is None:
        return None
    if path.parent.name == "models":
        return f"{verb} is a complete model: `seqblocks build {verb}`"
    blocks = [block for block, file in files.items() if file == verb]
    in_use = all(block in ctx.file.visible for block in blocks)
    return f"`use: [{verb}]` {'is in use, and its blocks are' if in_use else 'brings in'} {listing(blocks)}"


@lru_cache(maxsize=1)
def files_of_blocks() -> dict[str, str]:
    """Return the bundled blocks, each with the name of its file."""
    paths = {name: path for name, path in bundled().items() if path.parent.name == "blocks"}
    texts = ((name, path.read_text(encoding="utf-8")) for name, path in paths.items())
    return {block: name for name, text in texts for block in re.findall(r"^  (\w+):$", text, re.MULTILINE)}


# --- limits -----------------------------------------------------------------------------------------------------------


def count_steps(ctx: Context, steps: int, height: int = 0) -> None:
    """Count steps, nested up to `height` bodies deep below this one.

    Raises Fault (E104) where there are too many, after which nothing is lowered.
    """
    run = ctx.run
    if run.full:  # already reported
        return
    run.steps += steps
    run.deepest = max(run.deepest, ctx.depth + height)
    if run.deepest > MAX_NESTING:
        run.full = True
        raise Fault("E104", "steps are nested too deeply", expected=f"at most {MAX_NESTING} levels")
    if run.steps > MAX_STEPS:
        run.full = True
        raise Fault("E104", "the model has too many steps", expected=f"at most {MAX_STEPS:,}")


def spend(ctx: Context, effort: int) -> None:
    """Add up the effort of reading arguments. Raises Fault (E104) like `count_steps`."""
    run = ctx.run
    run.effort += effort
    if run.effort > MAX_EFFORT and not run.full:
        run.full = True
        message = "the model's layers take too long to analyse"
        raise Fault("E104", message, hint="use fewer layers or shorter expressions")

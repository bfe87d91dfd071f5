"""Create nodes: the name of a step, the wires that it defines, and its outputs."""

from __future__ import annotations

import keyword
from itertools import count
from typing import Any, TypeVar

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import number
from seqblocks.errors import Fault, Note, Span, quote
from seqblocks.language.document import Mapping, Scalar, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.keys import is_name, is_taken
from seqblocks.op import Op, find_primitive
from seqblocks.state_layout import in_lanes
from seqblocks.types import Origin, Wire
from seqblocks.widths import ids_have_no_features

N = TypeVar("N", bound=graph.Node)


def make_node(
    ctx: Context, step: Step, cls: type[N], inputs: dict[str, tuple[int, ...]], wire: Wire | None, **more: Any
) -> N:
    """Create the node of a step, with its name and its outputs."""
    run, body = ctx.run, ctx.body
    origin = Origin(step.verb, step.span)
    if wire and not wire.origin:
        wire = wire.made_by(origin)
    op = more.get("op")
    fixed = op is not None and op.fixed
    run.has_context |= fixed
    if wire and run.has_context and wire.context != (fixed or _is_context(run, inputs, more.get("bodies", {}))):
        wire = wire._replace(context=not wire.context)
    folded = [read.lanes for values in inputs.values() for value in values if (read := run.types[value]) and read.lanes]
    if wire and cls is not graph.EachNode and (lanes := folded[0] if folded else ()) != wire.lanes:
        wire = wire._replace(lanes=lanes)  # axes that an enclosing `each` folded into the batch
    if wire and wire.context:
        more["state"] = {}  # computed once, before the first token
    if wire and wire.lanes and (state := more.get("state")):
        more["state"] = in_lanes(state, wire.lanes)
    made = cls(step.name, step.verb, step.span, inputs, (), wire, **more)
    made.name = name = _unique_name(ctx, step, made)
    types, labels, split = _outputs(ctx, step, wire, origin)
    first = len(run.types)
    values = tuple(range(first, first + len(types)))
    run.types |= zip(values, types, strict=True)
    run.labels |= zip(values, labels, strict=True)
    run.makers |= dict.fromkeys(values, origin)
    if run.references is not None:
        run.references.named[step.span, name] = step.name_span
        for value, (wire_name, span) in zip(values, step.named_wires(), strict=False):
            if body.may_set(wire_name):
                run.references.set_state(body.states[wire_name], [value], wire_name, span)
            else:
                run.references.define([value], [(wire_name, span)])
    if "as" in step.common:
        for label, value in zip(labels, values, strict=True):
            body.set_wire(label, value)
    made.outputs, made.split = values, split
    if name not in body.nodes or isinstance(body.nodes[name], graph.UnknownNode):
        body.nodes[name] = made
    return made


def _is_context(run: Run, inputs: dict[str, tuple[int, ...]], bodies: dict[str, graph.Graph]) -> bool:
    """Return whether a node depends on no streaming input."""
    at_ports = [value for values in inputs.values() for value in values]
    captured = [value for body in bodies.values() for value in body.captures]
    return all((each := run.types[value]) and each.context for value in (*at_ports, *captured))


# --- names ------------------------------------------------------------------------------------------------------------


def may_be_name(ctx: Context, name: str, span: Span) -> bool:
    """Return whether a word is a valid name of a wire or a state; report it if not."""
    if name == "input":
        ctx.report(Fault("E311", "'input' is the name of the input of the steps", hint="choose another name"), span)
    elif name.startswith("_"):
        ctx.report(_is_attribute(name), span)
    else:
        return is_name(ctx.run.report, name, span)
    return False


def may_own(ctx: Context, name: str, span: Span) -> bool:
    """Return whether a word is a valid namespace; report it if not."""
    if is_taken(name) and name != "input":
        ctx.report(_is_attribute(name), span)
        return False
    return may_be_name(ctx, name, span)


def _is_attribute(name: str) -> Fault:
    because = "it is a keyword of Python" if keyword.iskeyword(name) else "built models have an attribute of that name"
    message = f"{quote(name)} is reserved: {because}"
    other = (name.strip("_0123456789") or "a") + "_step"
    return Fault("E311", message, hint=f"choose another name, such as {quote(other)}")


def _unique_name(ctx: Context, step: Step, node: graph.Node) -> str:
    """Return the namespace of a step; report it if it is invalid or already used.

    Steps without parameters and without `name:` are numbered instead: nothing in a state_dict has their name.
    """
    name, span = step.name, step.name_span
    given = step.common.get("name")
    if given and not isinstance(given[1], Scalar):
        ctx.report(Fault("E203", "name must be a word", found=kind_of(given[1])), given[1].span)
    elif given and not may_own(ctx, name, span):
        return f"{step.verb}@{span.line}"
    clash = ctx.body.nodes.get(name)
    if clash is None or isinstance(clash, graph.UnknownNode):
        return name
    if not step.misspelt.isdisjoint(("name", "as")):
        return f"{name}@{span.line}:{span.column}"
    if not given and not _may_own(node):
        return _numbered(ctx, name)
    first = next(each for each in ctx.body.steps if each.span is clash.span)
    if "name" not in first.common and not _may_own(clash):
        clash.name = _numbered(ctx, name)
        ctx.body.nodes[clash.name] = ctx.body.nodes.pop(name)
        return name
    message = f"two steps here have the name {quote(name)}"
    hint = f"{_other_name(ctx, step, name)}: parameters are stored under the name of their step"
    fault = Fault("E304", message, hint=hint, notes=[Note("the other step is here", clash.span)])
    ctx.report(fault, step.alias or span)
    return f"{name}@{span.line}:{span.column}"


def _may_own(node: graph.Node) -> bool:
    """Return whether a node may have parameters, also where its arguments are UNKNOWN."""
    if node.parameters or isinstance(node, graph.ExpertsNode):
        return True
    if isinstance(node, graph.PrimitiveNode) and node.type is None:
        op = find_primitive(node.verb)
        return op is None or op.parameters is not Op.parameters
    return any(_may_own(inner) for body in node.bodies.values() for inner in body.nodes)


def _numbered(ctx: Context, name: str) -> str:
    """Return an unused name for another step of this name."""
    numbers = ctx.body.numbers = ctx.body.numbers or dict.fromkeys((each.name for each in ctx.body.steps), 1)
    number = next(n for n in count(numbers[name] + 1) if f"{name}_{n}" not in numbers)
    numbers[name] = number
    return f"{name}_{number}"


def _other_name(ctx: Context, step: Step, name: str) -> str:
    """Return a hint with an unused name for a step."""
    other = _numbered(ctx, name)
    if step.alias:
        return f"an alias repeats the name too: write out the step, with `name: {other}`"
    if "name" in step.common:
        return f"write `name: {other}`"
    if step.fields or step.common:
        return f"add `name: {other}`"
    return f"write `{step.verb}: {{name: {other}}}`"


# --- outputs ----------------------------------------------------------------------------------------------------------


def _outputs(
    ctx: Context, step: Step, wire: Wire | None, origin: Origin
) -> tuple[list[Wire | None], list[str], tuple[int, ...]]:
    """Return the types and labels of a step's outputs: its result, or the parts into which `as:` splits it.

    The third value has the widths of the parts.
    """
    entry = step.common.get("as")
    if entry is None:
        return [wire], [step.verb], ()
    node = entry[1]
    if isinstance(node, Scalar) and isinstance(node.value, str):
        define_wire(ctx, node.value, node.span)
        return [wire], [node.value], ()
    if wire and wire.kind == "tokens" and isinstance(node, Sequence | Mapping):
        ctx.report(ids_have_no_features(wire, "split", "the result"), node.span)
        wire = None
    if isinstance(node, Mapping) and node.entries:
        labels, widths = _named_widths(ctx, node, wire)
    elif isinstance(node, Sequence) and len(node.items) > 1 and all(isinstance(item, Scalar) for item in node.items):
        labels, widths = _equal_parts(ctx, node, wire)
    else:
        expected = "a name, a list of names (equal parts), or a mapping name: width"
        ctx.report(Fault("E203", "`as` must name the outputs", expected=expected, found=kind_of(node)), node.span)
        ctx.body.incomplete = True
        return [None], ["?"], ()
    if wire is None or widths is None:
        return [None] * len(labels), labels, ()
    return [wire.part(width).made_by(origin) for width in widths], labels, tuple(widths)


def _equal_parts(ctx: Context, node: Sequence, wire: Wire | None) -> tuple[list[str], list[int] | None]:
    """Return the names in a list, and the width of each part (no widths if UNKNOWN)."""
    labels: list[str] = []
    defined: set[str] = set()
    for item in node.items:
        assert isinstance(item, Scalar)
        if item.text in defined:
            ctx.report(Fault("E305", f"two parts are named {quote(item.text)}"), item.span)
        else:
            define_wire(ctx, item.text, item.span)
        defined.add(item.text)
        labels.append(item.text)
    if wire is None:
        return labels, None
    width, rest = divmod(wire.features, len(labels))
    if rest:
        message = f"{wire.features} features cannot be split into {len(labels)} equal parts"
        widths = ", ".join(f"{label}: {width + (at < rest)}" for at, label in enumerate(labels))
        ctx.report(Fault("E405", message, hint=f"specify the widths: as: {{{widths}}}"), node.span)
        return labels, None
    return labels, [width] * len(labels)


def _named_widths(ctx: Context, node: Mapping, wire: Wire | None) -> tuple[list[str], list[int] | None]:
    """Return the names and widths in a mapping (no widths if UNKNOWN)."""
    ctx.body.incomplete |= node.incomplete
    labels = [define_wire(ctx, key, span) for key, span, _ in node]
    widths = [number(ctx, value, whole=True) for _, _, value in node]
    if wire is None or UNKNOWN in widths or node.incomplete:
        return labels, None
    if sum(widths) != wire.features:
        message, expected = "the widths must add up to the number of features", str(wire.features)
    elif min(widths) < 1:
        message, expected = "each part needs at least one feature", "1 or more each"
    else:
        return labels, widths
    note = wire.origin_note("the result")
    found = f"{' + '.join(map(str, widths))} = {sum(widths)}"
    ctx.report(Fault("E405", message, expected=expected, found=found, notes=[note] if note else []), node)
    return labels, None


def define_wire(ctx: Context, name: str, span: Span) -> str:
    """Define a wire; report its name if it is invalid or already used."""
    if not may_be_name(ctx, name, span):
        ctx.body.incomplete = True
    elif name in ctx.body.wires and not ctx.body.may_set(name):
        maker = ctx.run.makers.get(ctx.body.wires[name])
        is_state = name in ctx.body.states
        notes = [Note(f"it is {'set' if is_state else 'defined'} here", maker.span)] if maker and maker.span else []
        message = f"the state {quote(name)} is set twice" if is_state else f"there is already a wire {quote(name)}"
        around = ctx.body.outer if not is_state else None
        while around and name not in around.states:
            around = around.outer
        hint = "only a step of the cell's own list can set its state: give this wire another name" if around else None
        ctx.report(Fault("E305", message, notes=notes, hint=hint), span)
    return name

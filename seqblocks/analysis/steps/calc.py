"""Lower `calc`: a formula over wires, numbers and learned scalars becomes one op."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping as MappingOf
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.wires import read_port, read_wires, wire_hint
from seqblocks.analysis.steps.init_and_tie import find_ties, initialised, read_initial
from seqblocks.analysis.steps.nodes import make_node, may_be_name
from seqblocks.analysis.steps.steps import lowers
from seqblocks.errors import Fault, listing, quote
from seqblocks.language.arguments import DEPTH
from seqblocks.language.document import Mapping, Node, Scalar, kind_of
from seqblocks.language.expressions import FUNCTIONS, UNKNOWN, byte_to_character
from seqblocks.language.formulas import PartFault, fold, names_in, parse
from seqblocks.language.keys import namespace_of
from seqblocks.op import FLOATS
from seqblocks.ops.calc import Calc, X, result
from seqblocks.parameters import Init
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean

_INSIDE_ANOTHER_STEP = r"[A-Za-z_]\w*(?:\.-?\d+|\[[^\]]*\])?\.[A-Za-z_]\w*"  # `layers.0.v`, or the output of a block


class _Formulas(Record):
    """What the formulas of one step share: the wire `x` and its learned scalars, which the first formula owns."""

    step: Step
    x: tuple[int, graph.Node | None]
    learned: dict[str, Any] | None  # the initial values by name; None after a fault
    first: list[graph.Node]  # the node of the first formula, once there is one


class _Reading(Record):
    """What the names of a formula stand for."""

    inputs: dict[str, tuple[int, ...]]
    learned: list[str]
    names: list[ast.Name]  # in the order of the text
    known: bool  # whether all names stand for something known


@lowers(Calc)
def lower_calc(ctx: Context, step: Step, cls: type[Calc]) -> graph.Node | None:
    """Return the node of one formula, or None after a fault or if something is UNKNOWN."""
    shared = _shared(ctx, step)
    learned = shared.learned
    node = step.get("formula")
    if not isinstance(node, Scalar) or not isinstance(node.value, str | int | float) or isinstance(node.value, bool):
        _report_no_formula(ctx, step, node)
        return None
    if learned is None:
        return None
    try:
        tree = parse(node.text)
        reading = _read_names(ctx, step, node, tree, learned, shared)
        tensors = {*reading.inputs, *reading.learned}
        folded = fold(node.text, tree, tensors, ctx.scope(node.text)) if reading.known else None
        if folded is None or UNKNOWN in learned.values():
            return None
        if not reading.inputs:
            raise _no_wire(node.text)
        return _make(ctx, step, shared, reading, folded, learned)
    except PartFault as fault:
        place = fault.place(node.text)
        ctx.report(fault, node.part(*place) if place else node)
    except Fault as fault:
        if wire := re.search(_INSIDE_ANOTHER_STEP, node.text):
            fault.hint = f"give the wire a name first: `- aside: [{{identity: {{from: '{wire[0]}', as: other}}}}]`"
        ctx.report(fault, node)
    return None


def _no_wire(text: str) -> Fault:
    hint = f"numbers belong into `let:`; multiply learned scalars by a wire, such as `{X.name}`"
    return Fault("E411", f"the formula {quote(text)} reads no wire", hint=hint)


def _make(
    ctx: Context, step: Step, shared: _Formulas, reading: _Reading, tree: ast.expr, learned: MappingOf[str, Any]
) -> graph.Node | None:
    """Return the node of a formula whose names and parts are valid. Raises PartFault if its wires do not fit."""
    wires = {name: wire for name, (value,) in reading.inputs.items() if (wire := ctx.run.types[value])}
    if len(wires) < len(reading.inputs):
        return None
    for name in reading.names:
        if name.id in wires and wires[name.id].kind not in FLOATS:
            message, hint = f"{step.verb} cannot read token ids", "embed the tokens first, with embed"
            raise PartFault(Fault("E403", message, found=f"{wires[name.id]}", hint=hint), name)
    made = result(tree, wires)
    assert made
    owned = reading.learned if shared.first else [*learned]
    op = Calc(formula=ast.unparse(tree), learned={name: learned[name] for name in owned})
    read = [wires[name] for name in op.wires()]
    made = made.with_facts(op.facts(*read))
    parameters = initialised(ctx, step, op, read, op.parameters(*read), True) if step.common else op.parameters(*read)
    ties = find_ties(ctx, step, parameters) if "tie" in step.common else {}
    vectors = [name for name, wire in wires.items() if wire.kind == "vector" and made.kind != "vector"]
    ctx.run.may_look_ahead |= bool(vectors)
    vectors_as_long = (made._replace(features=wire.features, facts=wire.facts) for wire in read)
    seen = tuple(wide if wire.kind == "vector" else wire for wire, wide in zip(read, vectors_as_long, strict=True))
    inputs = {name: reading.inputs[name] for name in op.wires()}
    node = make_node(
        ctx, step, graph.OpNode, inputs, made, op=op, parameters=parameters, ties=ties, macs=op.macs(*seen),
        wires=seen, vectors=tuple(inputs[name][0] for name in vectors),
    )  # fmt: skip
    if shared.first and reading.learned:
        (first,) = shared.first
        node.shared = {own: (2, graph.join(first.name, own)) for own in map(namespace_of, reading.learned)}
        node.owner, node.owner_name = first, first.name
    shared.first[:] = shared.first or [node]
    return node


# --- names ------------------------------------------------------------------------------------------------------------


def _shared(ctx: Context, step: Step) -> _Formulas:
    """Return what the formulas of a step share; the first one decides what `x` is."""
    body, whole = ctx.body, step.part_of or step
    if step.is_start or body.formulas is None or body.formulas.step is not whole:
        learned = _read_learned(ctx, step)
        body.formulas = _Formulas(whole, (body.value, body.last), learned if _may_read(ctx, step) else None, [])
    found: _Formulas = body.formulas
    return found


def _read_names(
    ctx: Context, step: Step, node: Scalar, tree: ast.expr, learned: MappingOf[str, Any], shared: _Formulas
) -> _Reading:
    """Look up the names of a formula, and report unknown ones."""
    numbers, wires = ctx.scope(node.text), ctx.body.wires
    inputs: dict[str, tuple[int, ...]] = {}
    scalars: dict[str, None] = {}
    names, known = names_in(tree), True
    for part in names:
        name = part.id
        if name in learned:
            scalars[name] = None
        elif name == X.name and (name not in wires or "from" in step.common or name in step.fields):
            inputs[name] = _read_x(ctx, step, shared)
        elif name in wires and name in numbers:
            message = f"{quote(name)} is the name of a wire and of a number"
            raise PartFault(Fault("E309", message, hint="rename one of the two"), part)
        elif name in wires:
            inputs[name] = read_wires(ctx, _named(node, part))
        elif name not in numbers:
            known = False
            if not ctx.body.incomplete:
                _report_unknown(ctx, node, part, learned)
    numbers_read = [part for part in names if part.id not in inputs and part.id not in scalars]
    ctx.refer(node.text, node, [(part.id, byte_to_character(node.text, part.col_offset)) for part in numbers_read])
    return _Reading(inputs, [*scalars], names, known)


def _read_x(ctx: Context, step: Step, shared: _Formulas) -> tuple[int, ...]:
    """Return the value of `x`: the wire of `from:`, or the output of the step above the whole `calc`."""
    value, last = shared.x
    return read_port(ctx._replace(body=ctx.body._replace(value=value, last=last)), step, X) or (ctx.run.unknown(),)


def _named(node: Scalar, part: ast.Name) -> Scalar:
    """Return a name in a formula as a node of its own, with its place."""
    span = node.part(byte_to_character(node.text, part.col_offset), len(part.id)) if part.lineno == 1 else node.span
    return Scalar(span, 1, 1, part.id, part.id)


def _report_unknown(ctx: Context, node: Scalar, part: ast.Name, learned: MappingOf[str, Any]) -> None:
    name = part.id
    known = [*learned, *ctx.body.wires, *ctx.names]

    def hint() -> str:
        if name in FUNCTIONS:
            return f"{name} is a function: {name}(…)"
        if name == DEPTH:
            return "`depth` is the number of layers around a step: define your own in `let:` to use it here"
        return did_you_mean(name, known) or wire_hint(ctx, name)

    fault = Fault("E303", f"unknown name {quote(name)}", expected=f"{X.name}, or one of {listing(known)}", hint=hint)
    ctx.report(fault, _named(node, part).span)


# --- arguments --------------------------------------------------------------------------------------------------------


def _read_learned(ctx: Context, step: Step) -> dict[str, Any] | None:
    """Return the initial values of the learned scalars by name, numbers or initialisers as text; None after a fault."""
    node = step.get("learned")
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        message, hint = "`learned` maps names to initial values", "learned: {lam: 0.5}"
        ctx.report(Fault("E203", message, found=kind_of(node), hint=hint), node.span)
        return None
    found: dict[str, Any] = {}
    read = _words(step)
    for name, span, value in node:
        if name in ctx.body.wires:
            fault = Fault("E305", f"there is already a wire {quote(name)}", hint="choose another name for the scalar")
            ctx.report(fault, span)
        elif name not in read:
            message, hint = f"no formula reads the learned scalar {quote(name)}", "remove it, or use it in a formula"
            ctx.report(Fault("E315", message, hint=hint), span)
        found[name] = _read_initial(ctx, value) if may_be_name(ctx, name, span) else UNKNOWN
    return None if node.incomplete else found


def _words(step: Step) -> set[str]:
    """Return all words in the formulas of a step."""
    fields = (step.part_of or step).fields
    formulas = (each for key, (_, each) in fields.items() if key not in ("learned", X.name))
    return {word for each in formulas if isinstance(each, Scalar) for word in re.findall(r"\w+", each.text)}


def _may_read(ctx: Context, step: Step) -> bool:
    """Return whether `from:` or `x:` is a wire that a formula reads; report it if not."""
    key = X.name if X.name in step.fields else "from"
    node = step.get(key)
    if node is None:
        return True
    if key == X.name and _is_formula(node):
        message = f"`{key}` is the wire that formulas read, so it cannot be the name of a result"
        hint = "choose another name, also where the result is read"
        ctx.report(Fault("E311", message, hint=hint), step.key_span(key))
        return False
    if X.name in _words(step) or step.unreadable:
        return True
    if "when" in step.common:  # under a false condition, this wire replaces the results
        read_port(ctx, step, X)
        return True
    message, hint = f"no formula reads `{X.name}`", f"remove `{key}`, or read `{X.name}` in a formula"
    if key == X.name:
        fault = Fault("E315", message, hint=f"{hint}; a result needs another name")
    else:
        fault = Fault("E315", f"{message}, the wire of `{key}`", hint=hint)
    ctx.report(fault, step.key_span(key))
    return False


def _is_formula(node: Node) -> bool:
    """Return whether a node is a formula or a number instead of the name of a wire; indices may be expressions."""
    if not isinstance(node, Scalar):
        return False
    return not isinstance(node.value, str) or bool(re.search(r"[-+*/()]", re.sub(r"\[[^]]*\]", "", node.text)))


def _read_initial(ctx: Context, node: Node) -> Any:
    """Return a number, an initialiser as text with its numbers, or UNKNOWN."""
    init = read_initial(ctx, node)
    if not isinstance(init, Init):
        return init
    return f"{init.name}({', '.join(map(repr, init.values))})" if init.values else init.name


def _report_no_formula(ctx: Context, step: Step, node: Node | None) -> None:
    if node is None:
        if not step.incomplete and _may_read(ctx, step):
            ctx.report(Fault("E202", f"{step.verb} needs a formula", hint='calc: {y: "a - b"}'), step.span)
        return
    name = step.get("as")
    key = name.text if isinstance(name, Scalar) else "formula"
    hint = did_you_mean(key, ("learned", "from", "when", "init", "share", "tie", "name"))
    fault = Fault("E203", f"the formula of {quote(key)} must be text", found=kind_of(node), hint=hint)
    ctx.report(fault, step.span if hint else node.span)

"""Lower a step whose verb is a block: evaluate its arguments, and lower its body for them."""

from __future__ import annotations

from typing import Any

from seqblocks import graph
from seqblocks.analysis.checkpoint_maps.reading import has_sizes, read_map
from seqblocks.analysis.scope.context import Body, Context, Passed
from seqblocks.analysis.scope.layer_wires import define_outputs, read_block_outputs
from seqblocks.analysis.scope.named_values import Names
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.values import (
    add_let,
    argument,
    compute_let,
    effort,
    file_context,
    free_value,
    number,
    size,
)
from seqblocks.analysis.scope.wires import read_port, read_wires
from seqblocks.analysis.steps import copies
from seqblocks.analysis.steps.bodies import lower_once
from seqblocks.analysis.steps.copies import Original
from seqblocks.analysis.steps.init_and_tie import initialised
from seqblocks.analysis.steps.init_rules import read_rules
from seqblocks.analysis.steps.nodes import make_node
from seqblocks.analysis.steps.step_arguments import (
    ANY_KIND,
    add_defaults,
    check_unrun,
    declared_here,
    read_passed,
    report_no_primitive,
)
from seqblocks.analysis.steps.steps import count_steps, lower_steps, lowers, spend
from seqblocks.errors import Fault, Note, quote
from seqblocks.language.arguments import Argument
from seqblocks.language.document import Node, Scalar, kind_of, plain
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import Block
from seqblocks.op import FieldKind
from seqblocks.record import Record


class BlockUse(Record):
    """The inputs of one use of a block: the value that its steps read, its arguments, and their source nodes."""

    x: int
    values: dict[str, Any]
    ports: dict[str, int]  # its wire arguments
    written: dict[str, tuple[Node, Names]]
    passed: dict[str, Passed]  # its arguments that are steps


@lowers(Block)
def lower_block(ctx: Context, step: Step, block: Block) -> graph.Node:
    """Return the node of a step whose verb is a block. Raises Fault (E308) if the block uses itself."""
    report_no_primitive(ctx, step, is_block=True)
    if block in ctx.callers:
        names = [caller.name for caller in ctx.callers]
        ring = [*names[names.index(block.name) :], block.name]
        raise Fault("E308", f"block {quote(block.name)} uses itself: {' -> '.join(ring)}")
    ctx.run.used.add(id(block))
    (x,) = read_port(ctx, step, ANY_KIND) or (ctx.run.unknown(),)
    call = _read_call(ctx, step, block, x)
    body = block_body(ctx, block, call, step.name, _note(block, step))
    inputs: dict[str, tuple[int, ...]] = {name: (value,) for name, value in {"x": x, **call.ports}.items()}
    wire = ctx.run.types[body.result]
    node = make_node(ctx, step, graph.BlockNode, inputs, wire, bodies={"": body}, checkpoint=body.checkpoint)
    if body.exported:
        define_outputs(ctx, node, body.exported)
    return node


def check_unused(ctx: Context, block: Block) -> None:
    """Check a block that no step uses; arguments without a default are UNKNOWN."""
    ctx = ctx._replace(layers=UNKNOWN)
    values: dict[str, Any] = {}
    ports: dict[str, int] = {}
    passed: dict[str, Passed] = {}
    for name, each in block.args.items():
        if each.type == "wire":
            ports[name] = ctx.run.value(None, name)
        elif each.type != "steps":
            values[name] = UNKNOWN if each.default is None else _default(ctx, block, each, Names(None, values))
        elif each.default is None:
            passed[name] = Passed(each)
    call = BlockUse(ctx.run.value(None, "input"), values, ports, {}, passed)
    block_body(ctx, block, call, block.name, Note(f"in block {block.name}, which no step uses", block.span))


# --- arguments --------------------------------------------------------------------------------------------------------


def _read_call(ctx: Context, step: Step, block: Block, x: int) -> BlockUse:
    call = BlockUse(x, {}, {}, {}, {})
    for name, each in block.args.items():
        node = step.get(name) if name in step.fields else None
        if node is None and each.default is None and not step.incomplete:
            ctx.report(_missing(block, each), step.span)
        if each.type == "wire":
            (call.ports[name],) = read_wires(ctx, node) if node else (ctx.run.unknown(),)
        elif each.type == "steps":
            if node or each.default is None:
                call.passed[name] = read_passed(ctx, node, block, each) if node else Passed(each)
        elif node:
            call.values[name], call.written[name] = _read_argument(ctx, node, block, each), (node, ctx.names)
        elif each.default is not None:
            # in scope where the default is written
            earlier = Names(None, dict(call.values)) if each.by_depth else Names()
            call.values[name], call.written[name] = _default(ctx, block, each, earlier), (each.default, earlier)
            ctx.run.unread[id(each.default)] = False
        else:
            call.values[name] = UNKNOWN
    return call


def _missing(block: Block, argument: Argument) -> Fault:
    if argument.type == "wire":
        return Fault("E411", f"block {block.name} needs its input {quote(argument.name)}")
    message = f"block {block.name} needs {quote(argument.name)}"
    return Fault("E202", message, expected=f"{argument.name}: {argument.type}", notes=[declared_here(argument)])


def _read_argument(ctx: Context, node: Node, block: Block, declared: Argument) -> Any:
    value = _read_value(ctx, node, block, declared)
    return value if value is UNKNOWN else _within(ctx, value, node, declared, f" of block {block.name}")


def _within(ctx: Context, value: Any, node: Node, declared: Argument, where: str) -> Any:
    """Return a value; report it (E209) if it is outside the bounds of its argument."""
    low, high = declared.at_least, declared.at_most
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if (low is None or value >= low) and (high is None or value <= high):
        return value
    expected = f"at least {low:.10g}" if low is not None and value < low else f"at most {high:.10g}"
    message = f"{quote(declared.name)}{where} is out of bounds"
    notes = [declared_here(declared)]
    ctx.report(Fault("E209", message, expected=expected, found=f"{value:,.10g}", notes=notes), node.span)
    return UNKNOWN


def _read_value(ctx: Context, node: Node, block: Block, declared: Argument) -> Any:
    match declared.type:
        case "any":
            return free_value(ctx, node)
        case "bool":
            return argument(ctx, node, FieldKind("flag"))
        case "int" | "float":
            return argument(ctx, node, FieldKind("number", whole=declared.type == "int"))
    if not (isinstance(node, Scalar) and isinstance(node.value, int | float)):
        return argument(ctx, node, FieldKind("words"))
    message = f"argument {quote(declared.name)} of block {block.name} must be a word"
    hint = f"`{declared.name}: int`, float or bool in `args:` declares another type"  # it may be misspelt
    ctx.report(Fault("E208", message, found=kind_of(node), notes=[declared_here(declared)], hint=hint), node.span)
    return UNKNOWN


def _default(ctx: Context, block: Block, declared: Argument, earlier: Names) -> Any:
    """Return the value of a default: plain data, or an expression of `depth` and of earlier arguments."""
    node = declared.default
    assert node is not None
    if not declared.is_valid:
        return UNKNOWN
    if not declared.by_depth:
        value = plain(node)
    else:
        inside = ctx._replace(names=earlier, callers=(*ctx.callers, block))  # its names are arguments of the block
        if declared.type in ("int", "float"):
            value = number(inside, node, whole=declared.type == "int")
        elif declared.type == "bool":
            value = argument(inside, node, FieldKind("flag"))
        elif isinstance(node, Scalar):  # the name of an earlier argument
            value = earlier[str(node.value)]
            inside.refer(str(node.value), node)
        else:
            value = UNKNOWN
    return value if value is UNKNOWN else _within(ctx, value, node, declared, "")


# --- bodies -----------------------------------------------------------------------------------------------------------


def block_body(ctx: Context, block: Block, call: BlockUse, name: str, note: Note) -> graph.Graph:
    """Return the body of a block for one set of arguments. It is lowered once and shared by all steps with equal ones.

    name: of the step. note: added to diagnostics, says where the block is used.
    """
    run = ctx.run
    spend(ctx, _effort(run, block) + sum(map(size, call.values.values())))
    passed = tuple(each.key for each in call.passed.values())
    types = (run.types[value] for value in (call.x, *call.ports.values()))
    key = (id(block), repr(call.values), *types, passed)
    return lower_once(ctx, key, lambda: _lower_body(ctx, block, call, name, note))


def _lower_body(ctx: Context, block: Block, call: BlockUse, name: str, note: Note) -> tuple[Context, graph.Graph]:
    """Return the context inside a block, and its body."""
    run, values = ctx.run, dict(call.values)  # the scope of the block will add the names of its `let:` to them
    inner, entered, ports = _enter(ctx, block, call, name, note)
    types = tuple(run.types[value] for value in (call.x, *call.ports.values()))
    if original := copies.find(inner, block, values, types):
        return inner, _copy(ctx, inner, block, original)
    if faulty := copies.find_faulty(inner, block, values, types):
        run.report.calls += 1  # as if its faults were reported again
        return inner, _copy(ctx, inner, block, faulty)
    before, errors, warnings = run.steps, run.report.calls, run.warnings.calls
    body = lower_steps(inner, block.steps, entered, ports)
    if block.outputs:
        read_block_outputs(inner, block.outputs, body)
    compute_let(inner, block.let)
    check_unrun(inner)
    if id(block) not in run.maps or has_sizes(run.maps[id(block)]):
        run.maps[id(block)] = read_map(inner, block.checkpoint)
    body.checkpoint = run.maps[id(block)]
    read_rules(inner, block.init, body)
    if not run.types[call.x]:  # in an unused block the contents may be unknown
        return inner, body
    if not run.report or id(block) not in run.mapped:  # after a fault, a block is lowered again in each layer
        run.mapped.add(id(block))
        run.map_checks.append((inner, body.checkpoint, body, bool(block.args) or run.overridden))
    original = Original(inner, body, values, types, run.steps - before, run.deepest - ctx.depth)
    if run.report.calls > errors:
        copies.keep_faulty(run, block, original)
    elif run.warnings.calls == warnings:
        copies.keep(run, block, original)
    return inner, body


def _copy(ctx: Context, inner: Context, block: Block, original: Original) -> graph.Graph:
    """Return a body like another one, with the initial values for the arguments in the context inside the block."""
    run, before = ctx.run, ctx.run.steps
    place = inner._replace(body=original.ctx.body)
    changed: dict[int, graph.Node] = {}
    free = copies.free(run, block)
    for step in free.steps:
        node = place.body.nodes.get(step.name)
        if node and node.span is step.span and _is_known(node):  # otherwise the step is absent, or unknown
            spend(ctx, step.effort)
            changed[id(node)] = _changed(place, step, node)
    compute_let(inner, block.let, free.let)
    count_steps(ctx, original.steps - (run.steps - before), original.height)  # copied blocks inside are counted
    nodes = [changed.get(id(node), node) for node in original.body.nodes]
    body = original.body._replace(nodes=nodes, like=original.body)
    read_rules(inner, block.init, body)
    run.alone[id(body)] = body
    return body


def _is_known(node: graph.Node) -> bool:
    """Return whether a node is a block, or an op without a fault whose wires have types."""
    return isinstance(node, graph.BlockNode) or (node.op is not None and node.type is not None)


def _changed(ctx: Context, step: Step, node: graph.Node) -> graph.Node:
    """Return a node of an original with other initial values."""
    if node.op:
        declared = node.op.parameters(*node.wires)
        return node._replace(parameters=initialised(ctx, step, node.op, node.wires, declared, True))
    assert step.found
    block = step.found.meaning
    assert isinstance(block, Block)
    call = _read_call(ctx, step, block, *node.inputs["x"])
    return node._replace(bodies={"": block_body(ctx, block, call, step.name, _note(block, step))})


def _note(block: Block, step: Step) -> Note:
    return Note(f"in block {block.name}, used", step.span)


def _enter(
    ctx: Context, block: Block, call: BlockUse, name: str, note: Note
) -> tuple[Context, int, dict[str, int]]:
    """Return the context inside a block, and the values of its input and wire arguments there."""
    run = ctx.run
    outside = file_context(run, block.home)
    entered = run.value(run.types[call.x], "input")
    ports = {port: run.value(run.types[value], port) for port, value in call.ports.items()}
    if run.references is not None:
        run.references.define(ports.values(), ((port, block.args[port].span) for port in ports))
    names = Names(outside.names, call.values)
    names.written = call.written
    names.incomplete = block.incomplete
    body = Body({"input": entered, **ports}, (*ctx.body.path, name), incomplete=block.incomplete)
    trail, callers = (*ctx.trail, note), (*ctx.callers, block)
    inner = Context(run, block.home, names, body, trail, callers, ctx.depth + 1, dict(call.passed), ctx.layers)
    add_let(inner, block.let)
    if any(each.type == "steps" for each in block.args.values()):
        add_defaults(inner, block)
    return inner, entered, ports


def _effort(run: Run, block: Block) -> int:
    """Return the effort of lowering one use of a block."""
    if id(block) not in run.efforts:
        tables = [(5, block.let), (2, block.checkpoint)]
        run.efforts[id(block)] = len(block.args) + sum(times * effort(table) for times, table in tables if table)
    return run.efforts[id(block)]

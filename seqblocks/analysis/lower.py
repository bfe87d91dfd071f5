"""Lower a typed spec to a graph: the model of a file, and a check of each of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqblocks import graph
from seqblocks.analysis.checkpoint_maps.checks import check_map
from seqblocks.analysis.checkpoint_maps.reading import read_map
from seqblocks.analysis.passes.kept_context import mark_kept
from seqblocks.analysis.passes.liveness import find_idle, unused, unused_parts, without_gradient
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.references import Reference, References
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.values import compute_let, file_context
from seqblocks.analysis.steps import primitives  # noqa: F401  whose function registers itself
from seqblocks.analysis.steps.blocks import check_unused
from seqblocks.analysis.steps.init_rules import apply_rules, read_rules
from seqblocks.analysis.steps.inputs import Inputs, check_read, read_inputs, read_outputs
from seqblocks.analysis.steps.steps import lower_steps
from seqblocks.combinators import COMBINATORS
from seqblocks.errors import Fault, Report
from seqblocks.language.document import Mapping, Node
from seqblocks.language.keys import required
from seqblocks.language.spec import SpecFile
from seqblocks.op import builtin_verbs
from seqblocks.record import Record

if TYPE_CHECKING:
    from seqblocks.language.overrides import Override  # only specs with overrides need it


class Lowered(Record):
    """The result of lowering a file. After a fault, some steps are unknown nodes, which have no type.

    model: None if the file has none, or if its input is unknown. body: the steps of the model in any case.
    """

    model: graph.ModelSpec | None
    body: graph.Graph | None
    references: tuple[Reference, ...] = ()


def is_builtin(verb: str) -> bool:
    """Return whether a verb is a combinator or one of seqblocks' own primitives."""
    return verb in COMBINATORS or verb in builtin_verbs()


def lower_file(
    file: SpecFile,
    report: Report,
    warnings: Report,
    name: str,
    overrides: tuple[Override, ...] = (),
    references: bool = False,
) -> Lowered:
    """Check all blocks of a file, and return the graph of its model. references: also collect the references."""
    run = Run(report, warnings)
    run.references = References() if references else None
    run.unread = {id(each.default): True for block in file.blocks.values() for each in block.args.values()}
    ctx = file_context(run, file)
    changes = [each for each in overrides if each.node is not None and not each.path.startswith("expect")]
    run.overridden = bool(changes)
    body, model = _lower_model(ctx, file, name) if file.model else (None, None)
    compute_let(ctx, file.let)
    if model:
        model.overridden = tuple(map(str, changes))
        _check_overrides(run, model, overrides)
    for block in file.blocks.values():
        if id(block) not in run.used:
            check_unused(file_context(run, file), block)
    for each in () if run.full else run.map_checks:
        check_map(*each)
    if run.references is not None and file.expect is not None:
        from seqblocks.analysis.passes.expectations import refer_names, refer_outputs  # few readers need it

        refer_names(ctx, file.expect)
        refer_outputs(run.references, file)
    if not report:
        assert model is None or model.output is not None, "the result has no type, but no fault was reported"
        _report_idle(run)
        declared = file.expect.get("lookahead") if file.expect else None
        if model and run.may_look_ahead and not report and (declared is None or isinstance(declared, Mapping)):
            from seqblocks.analysis.passes.causality import check_future  # only models that may look ahead need it

            check_future(model, run.warnings, declared.entries if declared else ())
        if model:
            model.graph = body = apply_rules(run, model.graph)
    return Lowered(model, body, run.references.all() if run.references else ())


def _check_overrides(run: Run, model: graph.ModelSpec, overrides: tuple[Override, ...]) -> None:
    """Warn of overrides that no step uses. Add a note for those that repeat a value of the spec, as in a sweep."""
    same = [each for each in overrides if each.node is None]
    model.notes = tuple(f"the override {each} has no effect: the spec already has this value" for each in same)
    for each in overrides:
        if each.node is not None and run.unread.get(id(each.node)):
            hint = "check its name: `seqblocks show SPEC --stage spec` lists the names and the arguments of the steps"
            fault = Fault("W901", f"the override {each} has no effect: no step uses it", hint=hint)
            run.warnings.fault(fault, each.node.span)


def _report_idle(run: Run) -> None:
    """Report parameters that would not be trained, once per step: first unused ones, then those without a gradient."""
    bodies = [(body, graph.join(*ctx.body.path)) for ctx, body in run.lowered]
    idle = find_idle(bodies)
    for (ctx, body), found in zip(run.lowered, idle, strict=True):
        for node in found.steps:
            ctx.report(unused(node, body), node.span)
    if run.report:
        return
    idle = find_idle(bodies, by_gradient=True) if run.has_constants else idle
    for (ctx, body), found in zip(run.lowered, idle, strict=True):
        for node in found.steps:
            ctx.report(without_gradient(node, body), node.span)
        for node, values in found.parts:
            ctx.report(unused_parts(node, [run.labels[value] for value in values]), node.span)


def _lower_model(ctx: Context, file: SpecFile, name: str) -> tuple[graph.Graph, graph.ModelSpec | None]:
    assert file.model is not None
    run = ctx.run
    inputs = read_inputs(ctx, file.model, file.model_span)
    steps = required(ctx.report, file.model, "steps", Fault("E202", "the model has no steps"), file.model_span)
    body = _lower_steps(ctx, inputs, steps, file.model.get("outputs"))
    read_rules(ctx, file.init, body)
    table = read_map(ctx, file.checkpoint)
    run.map_checks.append((ctx, table, body, run.overridden))
    if not run.report:
        check_read(ctx, file.model.get("inputs"), body)
    known = {name: wire for name, wire in inputs.items() if wire}
    if not known:
        return body, None
    run.lowered.append((ctx, body))
    named = {} if "input" in known else known
    first = next(iter(known.values()))
    model = graph.ModelSpec(name, first, body, run.types, run.labels, file.expect, table, inputs=named)
    if run.has_context and not run.report:
        mark_kept(model)
    return body, model


def _lower_steps(ctx: Context, inputs: Inputs, steps: Node | None, outputs: Node | None) -> graph.Graph:
    """Lower the steps of a model. Its inputs are the first wires; `input` is the first of them."""
    run = ctx.run
    values = {name: run.value(wire, name) for name, wire in inputs.items()} or {"input": run.unknown()}
    first, *others = values
    if wire := inputs.get(first):
        run.input_kind, run.input_features = wire.kind, wire.features
    run.has_context = bool(others)
    ctx.body.wires |= {"input": values[first], **values}
    named = ctx.file.model and ctx.file.model.get("inputs")
    if run.references is not None and isinstance(named, Mapping):
        for name, place, _ in named:
            run.references.define([values[name]] if name in values else [], [(name, place)])
    node = ctx.file.model and ctx.file.model.get("inputs")
    ctx.body.incomplete |= not inputs or (isinstance(node, Mapping) and node.incomplete)
    ports = {name: values[name] for name in others}
    body = lower_steps(ctx._replace(layers=1), steps, values[first], ports, outputs is not None)
    body.captures = ()
    if outputs is not None:
        read_outputs(ctx, outputs, body)
    return body

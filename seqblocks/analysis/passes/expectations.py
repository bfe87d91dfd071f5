"""Check a model against the `expect:` section of its spec."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Table
from typing import TYPE_CHECKING, Any

from seqblocks import cost, graph
from seqblocks.analysis.passes import budgets
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.named_values import names_in
from seqblocks.analysis.scope.references import References
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.values import file_context, number
from seqblocks.errors import ExpectationError, Fault, Report, Span, SpecError, in_order
from seqblocks.graph import ModelSpec
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN, parse
from seqblocks.language.keys import known_keys
from seqblocks.language.spec import SpecFile
from seqblocks.record import Record
from seqblocks.types import Wire

if TYPE_CHECKING:
    from seqblocks.analysis.passes.lookahead import Ahead


def check_expectations(model: ModelSpec, file: SpecFile) -> None:
    """Raise ExpectationError if the model does not meet `expect:`, SpecError if an entry of `expect:` is invalid.

    A model changed by overrides is not checked: its numbers are expected to differ.

    E701 params, E702 state_bytes, E703 flops_per_token, E704 output, E705 lookahead, E706 latency_ms.
    """
    expect = file.expect
    if expect is None or model.overridden:
        return
    malformed, broken = Report(), Report()
    ctx = file_context(Run(malformed), file)
    _check_figures(ctx, expect, model, broken)
    _check_outputs(ctx, expect.get("output"), model, broken)
    _check_lookahead(ctx, expect.get("lookahead"), model, broken)
    _check_latency(ctx, expect, model, broken)
    if malformed:
        found = in_order([*malformed.diagnostics, *broken.diagnostics])
        raise SpecError([*found, *model.warnings], malformed.dropped + broken.dropped)
    if broken:
        raise ExpectationError([*broken.diagnostics, *model.warnings], broken.dropped)


def check_numbers(file: SpecFile, report: Report) -> None:
    """Report invalid numbers in `expect:` of a file without a valid model."""
    if file.expect is not None:
        ctx = file_context(Run(report), file)
        allowed = budgets.tolerance(ctx, file.expect)
        for key, units in (*((key, figure.units) for key, figure in _FIGURES.items()), ("latency_ms", budgets.TIMES)):
            if (node := file.expect.get(key)) is not None:
                budgets.limits(ctx, node, allowed, units)


def refer_names(ctx: Context, node: Node) -> None:
    """Note which names of `let:` are read in `expect:`, also where its values are not computed."""
    match node:
        case Mapping():
            for _, _, value in node:
                refer_names(ctx, value)
        case Sequence():
            for item in node.items:
                refer_names(ctx, item)
        case Scalar(value=str(text)):
            plain = budgets.without_sign(node, text)
            if names_in(plain.text):
                ctx.refer(plain.text, plain)


def refer_outputs(references: References, file: SpecFile) -> None:
    """Note that keys in `expect:` name outputs of the model, and that sizes in it name inputs: `[batch, text, 64]`."""
    inputs = file.model.get("inputs") if file.model else None
    if isinstance(inputs, Mapping) and file.expect:
        _refer_inputs(references, {name: span for name, span, _ in inputs}, file.expect.get("output"))
    outputs = file.model.get("outputs") if file.model else None
    keys = [node for key in ("output", "lookahead") if file.expect and (node := file.expect.get(key))]
    for item in outputs.items if isinstance(outputs, Sequence) else ():
        known = references.found.get(item.span)
        for node in keys if known else ():
            if known and isinstance(node, Mapping) and known.name in node.entries:
                references.add(known.kind, known.name, node.entries[known.name][0], known.definition)


def _refer_inputs(references: References, inputs: dict[str, Span], node: Node | None) -> None:
    """Note which lengths in the output of a model are those of inputs."""
    match node:
        case Mapping():
            for _, _, value in node:
                _refer_inputs(references, inputs, value)
        case Sequence():
            for item in node.items:
                _refer_inputs(references, inputs, item)
        case Scalar(value=str(text)):
            for name, offset in parse(text).names if names_in(text) else ():
                if name in inputs:
                    references.add("wire", name, node.part(offset, len(name)), inputs[name])


def figures(model: ModelSpec) -> dict[str, float | None]:
    """Return the figures of a model by their keys in `expect:`; None where they depend on an open length."""
    return {key: figure.of(model) for key, figure in _FIGURES.items()}


def _check_figures(ctx: Context, expect: Mapping, model: ModelSpec, broken: Report) -> None:
    tolerance = budgets.tolerance(ctx, expect)
    for key, figure in _FIGURES.items():
        node = expect.get(key)
        found = None
        for limit in () if node is None else budgets.limits(ctx, node, tolerance, figure.units) or ():
            found = figure.of(model) if found is None else found
            if found is None or not limit.allows(found):
                hint = _largest_parts(model) if key == "params" else None
                shown = _unknown(model) if found is None else f"{budgets.written(found)} ({limit.deviation(found)})"
                message = f"{key} {_VERBS[limit.kind]} `expect:`"
                broken.fault(Fault(figure.code, message, expected=str(limit), found=shown, hint=hint), limit.span)


def _unknown(model: ModelSpec) -> str:
    open_context = cost.open_context(model.graph)
    return f"unknown: the length of {open_context[0] if open_context else 'the sequence'} is open"


def _flops(model: ModelSpec) -> float | None:
    macs = cost.macs(model.graph, cost.tokens_of(model))
    return None if macs is None else 2 * macs


def _state_bytes(model: ModelSpec) -> int | None:
    return None if cost.open_context(model.graph) else cost.state_bytes(model.graph, "float32")


class _Figure(Record):
    """A figure of a model: the code of its fault, the units of its limits, and how it is computed."""

    code: str
    units: Table[str, float]
    of: Callable[[ModelSpec], float | None]


_FIGURES = {
    "params": _Figure("E701", budgets.COUNTS, lambda model: graph.count(model.graph)),
    "active_params": _Figure("E701", budgets.COUNTS, lambda model: graph.count(model.graph, active=True)),
    "state_bytes": _Figure("E702", budgets.BYTES, _state_bytes),
    "flops_per_token": _Figure("E703", budgets.COUNTS, _flops),
}
_VERBS = {"about": "differs from", "at_most": "exceeds", "at_least": "is below"}


def _check_latency(ctx: Context, expect: Mapping, model: ModelSpec, broken: Report) -> None:
    node = expect.get("latency_ms")
    limits = node and budgets.limits(ctx, node, budgets.tolerance(ctx, expect), budgets.TIMES)
    if not limits:
        return
    from seqblocks.analysis.passes import lookahead  # few specs expect a latency or a lookahead

    found = lookahead.latency_ms(model)
    hint = None
    if lookahead.latency(model) is None:
        shown = "undefined: an output depends on the whole sequence"
    elif found is None:
        shown, hint = "unknown: the input has no `sample_rate`", "input: {features: 1, sample_rate: 16000}"
    else:
        shown = f"{budgets.written(found)} ({lookahead.latency(model)} samples at {model.input.sample_rate:,g} Hz)"
    for limit in limits:
        rounded = limit._replace(tolerance=max(limit.tolerance, budgets.ROUNDING))  # of a division by the rate
        if found is None or not rounded.allows(found):
            message = f"latency_ms {_VERBS[limit.kind]} `expect:`"
            broken.fault(Fault("E706", message, expected=str(limit), found=shown, hint=hint), limit.span)


def _largest_parts(model: ModelSpec) -> str:
    largest = sorted(model.graph.nodes, key=graph.count_node, reverse=True)[:3]
    return "largest parts: " + ", ".join(f"{node.name} {graph.count_node(node):,}" for node in largest)


def _check_outputs(ctx: Context, node: Node | None, model: ModelSpec, broken: Report) -> None:
    if not (isinstance(node, Mapping) and model.outputs):
        _check_output(ctx, node, model.output, broken)
        return
    known_keys(ctx.run.report, node, model.outputs, "output")
    for name, wire in model.outputs.items():
        _check_output(ctx, node.get(name), wire, broken)


def _check_output(ctx: Context, node: Node | None, wire: Wire | None, broken: Report) -> None:
    if node is None or wire is None:
        return
    if not isinstance(node, Sequence) or not all(isinstance(i, Scalar) for i in node.items):
        hint = "output: [batch, 1000], or {policy: [batch, 4], value: [batch, 1]} for named outputs"
        ctx.report(Fault("E203", "the output must be a list of axes", found=kind_of(node), hint=hint), node.span)
        return
    axes = [i.value if i.text in map(str, wire.axes) else number(ctx, i) for i in node.items if isinstance(i, Scalar)]
    if UNKNOWN not in axes and tuple(axes) != wire.axes:
        fault = Fault("E704", "output differs from `expect:`", expected=str(axes).replace("'", ""), found=str(wire))
        broken.fault(fault, node.span)


def _check_lookahead(ctx: Context, node: Node | None, model: ModelSpec, broken: Report) -> None:
    if node is None:
        return
    from seqblocks.analysis.passes import lookahead

    if not isinstance(node, Mapping):
        _check_ahead(ctx, node, lookahead.find(model), "", model, broken)
        return
    if not model.outputs:
        message = "lookahead has a value for each output, but the outputs of this model have no names"
        hint = "lookahead: 0, or name the outputs: `outputs: [logits, next_logits]`"
        ctx.report(Fault("E203", message, hint=hint), node.span)
        return
    known_keys(ctx.run.report, node, model.outputs, "lookahead")
    found = lookahead.of_outputs(model)
    for name, _, value in node:
        if name in model.outputs:
            _check_ahead(ctx, value, found.get(name), name, model, broken)


def _check_ahead(
    ctx: Context, node: Node, ahead: Ahead | None, name: str, model: ModelSpec, broken: Report
) -> None:
    """Check the lookahead of one output, or the largest of all."""
    from seqblocks.analysis.passes.lookahead import shown

    expected: Any = "all" if isinstance(node, Scalar) and node.value == "all" else number(ctx, node, whole=True)
    if expected is UNKNOWN or (ahead and shown(ahead.tokens) == expected):
        return
    hint = None
    if ahead and ahead.first:
        path, step = ahead.first
        hint = f"the lookahead is introduced by {path} ({step.span})"
    message = f"lookahead{f' of `{name}`' if name else ''} differs from `expect:`"
    found = str(shown(ahead.tokens)) if ahead else _no_lookahead(model, name)
    broken.fault(Fault("E705", message, expected=str(expected), found=found, hint=hint), node.span)


def _no_lookahead(model: ModelSpec, name: str) -> str:
    """Return why an output has no lookahead, for a message. name: "" for the only output."""
    kind = {"image": "an image", "vector": "a vector"}.get(model.input.kind)
    output = model.outputs[name] if name else model.output
    return f"none: the input is {kind}" if kind else f"none: the output is {output}"

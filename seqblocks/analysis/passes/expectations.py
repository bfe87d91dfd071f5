"""Check a model against the `expect:` section of its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seqblocks import cost, graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.values import file_context, number
from seqblocks.errors import ExpectationError, Fault, Report, SpecError, in_order
from seqblocks.graph import ModelSpec
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import SpecFile, known_keys
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
        _tolerance(ctx, file.expect)
        for key in (*_FIGURES, "latency_ms"):
            _number(ctx, file.expect, key, None)


def _check_figures(ctx: Context, expect: Mapping, model: ModelSpec, broken: Report) -> None:
    tolerance = _tolerance(ctx, expect)
    for key, (code, compute) in _FIGURES.items():
        expected = _number(ctx, expect, key, None)
        if expected is None or expected is UNKNOWN or tolerance is UNKNOWN:
            continue
        found = compute(model)
        if found is None or abs(found - expected) > tolerance * abs(expected):
            hint = _largest_parts(model) if key == "params" else None
            shown = _unknown(model) if found is None else f"{found:,.10g} ({found - expected:+,.10g})"
            fault = Fault(code, f"{key} differs from `expect:`", expected=f"{expected:,.10g}", found=shown, hint=hint)
            broken.fault(fault, expect.entries[key][1].span)


def _unknown(model: ModelSpec) -> str:
    open_context = cost.open_context(model.graph)
    return f"unknown: the length of {open_context[0] if open_context else 'the sequence'} is open"


def _flops(model: ModelSpec) -> float | None:
    macs = cost.macs(model.graph, cost.tokens_of(model))
    return None if macs is None else 2 * macs


def _state_bytes(model: ModelSpec) -> int | None:
    return None if cost.open_context(model.graph) else cost.state_bytes(model.graph, "float32")


_FIGURES: dict[str, tuple[str, Callable[[ModelSpec], float | None]]] = {
    "params": ("E701", lambda model: graph.count(model.graph)),
    "active_params": ("E701", lambda model: graph.count(model.graph, active=True)),
    "state_bytes": ("E702", _state_bytes),
    "flops_per_token": ("E703", _flops),
}


def _check_latency(ctx: Context, expect: Mapping, model: ModelSpec, broken: Report) -> None:
    expected, tolerance = _number(ctx, expect, "latency_ms", None), _tolerance(ctx, expect)
    if expected is None or expected is UNKNOWN or tolerance is UNKNOWN:
        return
    from seqblocks.analysis.passes import lookahead  # few specs expect a latency or a lookahead

    found = lookahead.latency_ms(model)
    if found is not None and abs(found - expected) <= max(tolerance, 1e-9) * abs(expected):
        return
    if lookahead.latency(model) is None:
        fault = _latency(expected, "undefined: an output depends on the whole sequence")
    elif found is None:
        hint = "input: {features: 1, sample_rate: 16000}"
        fault = _latency(expected, "unknown: the input has no `sample_rate`", hint)
    else:
        rate, samples = model.input.sample_rate, lookahead.latency(model)
        fault = _latency(expected, f"{found:g} ({samples} samples at {rate:,g} Hz)")
    broken.fault(fault, expect.entries["latency_ms"][1].span)


def _latency(expected: float, found: str, hint: str | None = None) -> Fault:
    return Fault("E706", "latency_ms differs from `expect:`", expected=f"{expected:g}", found=found, hint=hint)


def _largest_parts(model: ModelSpec) -> str:
    largest = sorted(model.graph.nodes, key=graph.count_node, reverse=True)[:3]
    return "largest parts: " + ", ".join(f"{node.name} {graph.count_node(node):,}" for node in largest)


def _tolerance(ctx: Context, expect: Mapping) -> Any:
    tolerance = _number(ctx, expect, "tolerance", 0.0)
    if tolerance is UNKNOWN or 0 <= tolerance < 1:
        return tolerance
    message, hint = "the tolerance must be a relative deviation", "0.01 accepts a deviation of one percent"
    fault = Fault("E209", message, expected="0 or more, below 1", found=f"{tolerance:g}", hint=hint)
    ctx.report(fault, expect.entries["tolerance"][1].span)
    return UNKNOWN


def _number(ctx: Context, expect: Mapping, key: str, default: float | None) -> Any:
    node = expect.get(key)
    return default if node is None else number(ctx, node)


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

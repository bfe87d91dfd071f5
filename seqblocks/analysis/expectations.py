"""Check a model against the `expect:` section of its spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seqblocks import cost, graph, messages
from seqblocks.analysis.blocks import file_context
from seqblocks.analysis.context import Context
from seqblocks.analysis.run import Run
from seqblocks.analysis.values import number
from seqblocks.errors import ExpectationError, Report, SpecError, in_order
from seqblocks.graph import ModelSpec
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import SpecFile, known_keys
from seqblocks.types import Wire

if TYPE_CHECKING:
    from seqblocks.analysis.lookahead import Ahead


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
            open_context = cost.open_context(model.graph)
            missing = open_context[0] if open_context else "the sequence"
            hint = _largest_parts(model) if key == "params" else None
            fault = messages.expectations.figure_differs(code, key, expected, found, missing, hint)
            broken.fault(fault, expect.entries[key][1].span)


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
    from seqblocks.analysis import lookahead  # few specs expect a latency or a lookahead

    found = lookahead.latency_ms(model)
    if found is not None and abs(found - expected) <= max(tolerance, 1e-9) * abs(expected):
        return
    if lookahead.latency(model) is None:
        fault = messages.expectations.latency_is_undefined(expected)
    elif found is None:
        fault = messages.expectations.latency_is_unknown(expected)
    else:
        rate, samples = model.input.sample_rate, lookahead.latency(model)
        fault = messages.expectations.latency_differs(expected, found, samples, rate)
    broken.fault(fault, expect.entries["latency_ms"][1].span)


def _largest_parts(model: ModelSpec) -> str:
    largest = sorted(model.graph.nodes, key=graph.count_node, reverse=True)[:3]
    return messages.expectations.largest_parts((node.name, graph.count_node(node)) for node in largest)


def _tolerance(ctx: Context, expect: Mapping) -> Any:
    tolerance = _number(ctx, expect, "tolerance", 0.0)
    if tolerance is UNKNOWN or 0 <= tolerance < 1:
        return tolerance
    ctx.report(messages.expectations.tolerance(tolerance), expect.entries["tolerance"][1].span)
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
        ctx.report(messages.expectations.output_is_no_list(kind_of(node)), node.span)
        return
    axes = [i.value if i.text in map(str, wire.axes) else number(ctx, i) for i in node.items if isinstance(i, Scalar)]
    if UNKNOWN not in axes and tuple(axes) != wire.axes:
        broken.fault(messages.expectations.output_differs(axes, wire), node.span)


def _check_lookahead(ctx: Context, node: Node | None, model: ModelSpec, broken: Report) -> None:
    if node is None:
        return
    from seqblocks.analysis import lookahead

    if not isinstance(node, Mapping):
        _check_ahead(ctx, node, lookahead.find(model), "", model, broken)
        return
    if not model.outputs:
        ctx.report(messages.expectations.outputs_without_names("lookahead", "lookahead: 0"), node.span)
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
    from seqblocks.analysis.lookahead import shown

    expected: Any = "all" if isinstance(node, Scalar) and node.value == "all" else number(ctx, node, whole=True)
    if expected is UNKNOWN or (ahead and shown(ahead.tokens) == expected):
        return
    if ahead is None:
        output = model.outputs[name] if name else model.output
        fault = messages.expectations.no_lookahead(name, expected, model.input.kind, output)
    else:
        first = ahead.first and (ahead.first[0], ahead.first[1].span)
        fault = messages.expectations.lookahead_differs(name, expected, shown(ahead.tokens), first)
    broken.fault(fault, node.span)

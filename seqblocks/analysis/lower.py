"""Typed spec -> graph: numbers are computed, names are resolved, shapes are checked.

Blocks that nothing uses are analysed too, with UNKNOWN for arguments without a default.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seqblocks import graph
from seqblocks.analysis import combinators  # noqa: F401  whose functions register themselves
from seqblocks.analysis.frame import Frame, default_value
from seqblocks.analysis.inputs import read_input
from seqblocks.analysis.liveness import fault_of, idle_steps
from seqblocks.analysis.maps import check_map, read_map
from seqblocks.analysis.wiring import Shared
from seqblocks.combinators import COMBINATORS
from seqblocks.errors import Fault, Note, Report
from seqblocks.language.expressions import UNKNOWN
from seqblocks.language.spec import MODEL_KEYS, Block, SpecFile
from seqblocks.op import builtin_verbs

if TYPE_CHECKING:
    from seqblocks.language.overrides import Override  # only specs with overrides need it


def is_builtin(verb: str) -> bool:
    """Whether a verb is a combinator or one of seqblocks' own primitives."""
    return verb in COMBINATORS or verb in builtin_verbs()


def lower_file(
    file: SpecFile, report: Report, name: str, overrides: tuple[Override, ...] = ()
) -> graph.ModelSpec | None:
    """The graph of a file's model, and a check of every block in it. None if there is no sound model."""
    shared = Shared(report)
    shared.unread = {id(a.default): True for block in file.blocks.values() for a in block.args.values()}
    frame = Frame.top(shared, file)
    changes = [each for each in overrides if each.node is not None and not each.path.startswith("expect")]
    shared.overridden = bool(changes)
    model = _lower_model(frame, file, name) if file.model else None
    frame.settle(file.let)
    if model:
        model.overridden = tuple(map(str, changes))
        model.idle = tuple(e for e in overrides if e.node is None or shared.unread.get(id(e.node)))
    for block in file.blocks.values():
        if id(block) not in shared.used:
            _check_unused(frame, block)
    for each in () if report else shared.checks:
        check_map(*each)
    if not report:
        assert model is None or model.output is not None, "the result has no type, and no fault was reported"
        _report_idle(shared.lowered)
    return None if report else model


def _report_idle(lowered: list[tuple[Any, graph.Graph]]) -> None:
    """Report the steps with parameters whose output nothing uses, each once."""
    found = idle_steps((body, graph.join(*frame.path)) for frame, body in lowered)
    for (frame, _), nodes in zip(lowered, found, strict=True):
        for node in nodes:
            frame.fault(fault_of(node), node.span)


def _lower_model(frame: Frame, file: SpecFile, name: str) -> graph.ModelSpec | None:
    assert file.model is not None
    misspelt = any(key not in MODEL_KEYS for key in file.model.entries)  # told already, and perhaps this
    given = file.model.get("input")
    wire = read_input(frame, given, file.model_span) if given or not misspelt else None
    steps = file.model.get("steps")
    if steps is None and not misspelt:
        frame.fault(Fault("E202", "the model has no steps"), file.model_span)
    x = frame.value(wire, "input")
    frame.wires["input"] = x
    if wire:
        frame.shared.input_kind, frame.shared.input_features = wire.kind, wire.features
    body = frame.lower_steps(steps, x)
    body.captures = ()
    table = read_map(frame, file.checkpoint)
    if frame.report or wire is None:
        return None
    frame.shared.lowered.append((frame, body))
    frame.shared.checks.append((frame, table, body, frame.shared.overridden))
    types, labels = frame.shared.types, frame.shared.labels
    return graph.ModelSpec(name, wire, body, types, labels, file.expect, table)


def _check_unused(frame: Frame, block: Block) -> None:
    lost = Frame.top(frame.shared, frame.home)
    x = lost.value(None, "input")
    values: dict[str, Any] = {}
    ports: dict[str, int] = {}
    for name, argument in block.args.items():
        if argument.type == "wire":
            ports[name] = lost.value(None, name)
        else:
            values[name] = UNKNOWN if argument.default is None else default_value(argument)
    lost.call(block, x, values, ports, block.name, Note(f"in block {block.name}, which nothing uses", block.span))

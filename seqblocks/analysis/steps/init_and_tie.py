"""Read `init:` and `tie:`, which apply to the parameters of a step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from seqblocks import graph
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.steps_above import bodies_around, may_be_step, renamed_steps, step_left_out
from seqblocks.analysis.scope.values import explain_name, number
from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, kind_of
from seqblocks.language.expressions import FUNCTIONS, UNKNOWN, NameFault
from seqblocks.op import Op, fields_of
from seqblocks.parameters import DEFAULT, INITIALISERS, Init, Parameter, names_read, read_init
from seqblocks.record import Record
from seqblocks.suggestions import did_you_mean, is_renamed, key_hint
from seqblocks.types import Wire

Parameters = dict[str, Parameter]


def initialised(
    ctx: Context, step: Step, op: Op | None, wires: Sequence[Wire | None], declared: Parameters, is_typed: bool
) -> Parameters:
    """Return the parameters of an op as `init:` initialises them.

    op: None if its arguments are unknown. is_typed: whether the output has a type, so that `declared` is complete.
    """
    if is_typed and not declared:
        report_no_parameters(ctx, step, *(("tie",) if _may_leave_out(ctx, step, op, wires) else ("init", "tie")))
        return declared
    if "init" not in step.common:
        return declared
    return with_initialisers(ctx, step, declared, is_typed, lambda: sorted(_possible(op, wires)) if op else ())


def _possible(op: Op, wires: Sequence[Wire | None]) -> set[str]:
    """Return the names of the parameters that an op has with any other value of a single argument."""
    given, names = op.model_dump(by_alias=True), set(op.parameters(*wires))
    for key, kind in fields_of(type(op)).items():
        numbers = (0, 1, 2, None) if kind.kind == "number" else ()
        for value in (True, False) if kind.kind == "flag" else kind.choices or numbers:
            with contextlib.suppress(Exception):  # `shape` rejects some values, for which the rest may fail anyhow
                names.update(type(op).model_validate({**given, key: value}).parameters(*wires))
    return names


def report_no_parameters(ctx: Context, step: Step, *keys: str) -> None:
    """Report keys for parameters (E201) on a step that has none of its own."""
    for key in keys:
        if key in step.common:
            ctx.report(Fault("E201", f"{step.verb} has no parameters of its own to {key}"), step.key_span(key))


def _may_leave_out(ctx: Context, step: Step, op: Op | None, wires: Sequence[Wire | None]) -> bool:
    """Return whether `init:` assigns only `default`, to parameters that the op leaves out because of its arguments."""
    node = step.get("init")
    values = [value for _, _, value in node] if isinstance(node, Mapping) else []
    texts = [value.value for value in values if isinstance(value, Scalar) and isinstance(value.value, str)]
    if op is None or not isinstance(node, Mapping) or not texts or len(texts) < len(values):
        return False
    try:
        keeps = all(read_init(text, ctx.scope(text)) == DEFAULT for text in texts)
    except Fault:
        return False
    return keeps and _possible(op, wires).issuperset(node.entries)


def with_initialisers(
    ctx: Context,
    step: Step,
    parameters: Parameters,
    known: bool,
    possible: Callable[[], Collection[str]] | None = None,
) -> Parameters:
    """Return the parameters with the initialisers of `init:`.

    known: whether the parameters are complete. possible: the names that there may be with other arguments, for which
    the initialiser `default` is therefore allowed; all names by default.
    """
    node = step.get("init")
    if not isinstance(node, Mapping):
        if node is not None and (parameters or not known):  # otherwise there is nothing to initialise: reported
            _report_no_mapping(ctx, node, next(iter(parameters), "weight"))
        return parameters
    out = dict(parameters)
    for key, span, value in node:
        absent = known and parameters and key not in out
        init = None if absent and kind_of(value) == "nothing" else read_initialiser(ctx, value)  # the key may have both
        names = possible() if init == DEFAULT and absent and possible else parameters
        if init == DEFAULT and (not absent or names is parameters or key in names):
            if key in out:
                out[key] = out[key]._replace(settled=True)
            continue
        if absent:
            ctx.report(_no_parameter(step.verb, key, parameters, names), span)
        elif key in out and init:
            out[key] = out[key]._replace(init=init, settled=True)
    return out


def _report_no_mapping(ctx: Context, node: Node, parameter: str) -> None:
    text, invalid = None, None
    if isinstance(node, Scalar) and isinstance(node.value, str):
        try:
            read_init(node.value, ctx.scope(node.value))
            text = node.text
        except Fault as fault:
            invalid = fault
    notes = [] if invalid is None else [Note(_with_hint(invalid))]
    hint = f'init: {{{parameter}: "{text or "zeros"}"}}'
    message = "init must be a mapping of parameter: initialiser"
    ctx.report(Fault("E203", message, found=kind_of(node), hint=hint, notes=notes), node.span)


def _with_hint(fault: Fault) -> str:
    return f"{fault.message}: {fault.hint}" if isinstance(fault.hint, str) else fault.message


def read_initialiser(ctx: Context, node: Node) -> Init | None:
    """Return an initialiser, or None after a fault or if one of its numbers is UNKNOWN."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        expected = "a name such as zeros, or name(numbers)"
        ctx.report(Fault("E408", "invalid initialiser", expected=expected, found=kind_of(node)), node.span)
        return None
    try:
        if ctx.run.references is not None:
            ctx.refer(node.value, node, names_read(node.value))
        return read_init(node.value, ctx.scope(node.value))
    except NameFault as fault:
        explain_name(ctx, fault)
        place = re.search(rf"\b{re.escape(fault.name)}\b", node.text)
        span = node.part(place.start(), len(fault.name)) if place else node.span
        ctx.report(fault, span)
    except Fault as fault:
        ctx.report(fault, node)
    return None


def read_initial(ctx: Context, node: Node) -> Any:
    """Return the initial value of a single parameter: a number, an Init, or UNKNOWN."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str) or not _is_initialiser(ctx, node.value):
        value = number(ctx, node)
        return value if value is UNKNOWN else float(value)
    init = read_initialiser(ctx, node)
    return UNKNOWN if init is None else init


def _is_initialiser(ctx: Context, text: str) -> bool:
    """Return whether a text is an initialiser, perhaps misspelt, or a choice of several, and no expression."""
    first = re.match(r"\s*([A-Za-z_]\w*)\s*\(", text)
    words = re.findall(r"[A-Za-z_]\w*", text)
    named = any(word in INITIALISERS and word not in ctx.names for word in words)
    return named or bool(first and first[1] not in FUNCTIONS)


# --- tied parameters --------------------------------------------------------------------------------------------------


class _Tie(Record):
    ours: str
    target: str  # step.parameter
    node: Scalar
    of_step: bool  # whether `tie:` names a step instead of single parameters


def find_ties(ctx: Context, step: Step, parameters: Parameters) -> dict[str, str]:
    """Return the full names of the parameters that those of the step are tied to.

    `tie: embed` ties each parameter to the one with the same name there; `tie: {weight: embed.weight}` names them.
    """
    if not parameters:
        _check_step(ctx, step)
        return {}
    found: dict[str, str] = {}
    for tie in _written_ties(ctx, step, parameters):
        try:
            if target := _find_target(ctx, tie):
                found[tie.ours] = _checked_shape(step, tie, parameters[tie.ours], target)
        except Fault as fault:
            stem = tie.target.removesuffix(".bias")
            if tie.of_step and tie.ours == "bias" and "." not in stem and "weight" in parameters:
                fault.hint = f"set `bias: false`, or tie only the weight: `tie: {{weight: {stem}.weight}}`"
            ctx.report(fault, tie.node.span)
    _report_initialised(ctx, step, found)
    ctx.run.ties += len(found)
    return found


def _report_initialised(ctx: Context, step: Step, ties: dict[str, str]) -> None:
    """Report initialisers of tied parameters (E322), which have the initial values of another step's."""
    node = step.get("init")
    for key, span, _ in node if isinstance(node, Mapping) else ():
        if key in ties:
            message = f"{key} is tied to {ties[key]}, so it has no initial values of its own"
            ctx.report(Fault("E322", message, hint="move the initialiser to that step, or remove the tie"), span)


def _check_step(ctx: Context, step: Step) -> None:
    """Report a tie to a step that does not exist (E312), if the step's own parameters are UNKNOWN."""
    node = step.get("tie")
    if isinstance(node, Scalar) and isinstance(node.value, str):
        first = node.value.partition(".")[0]
        if not may_be_step(ctx, first):
            ctx.report(_no_step(ctx, first), node.span)


def _written_ties(ctx: Context, step: Step, parameters: Parameters) -> list[_Tie]:
    node = step.get("tie")
    assert node is not None
    if isinstance(node, Mapping):
        return [tie for key, span, value in node if (tie := _written_tie(ctx, step, key, span, value, parameters))]
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return [_Tie(key, f"{node.value}.{key}", node, True) for key in parameters]
    fault = Fault("E203", "tie must be the name of a step, or map parameters to step.parameter", found=kind_of(node))
    ctx.report(fault, node.span)
    return []


def _written_tie(
    ctx: Context, step: Step, key: str, span: Span, value: Node, parameters: Parameters
) -> _Tie | None:
    """Return an entry of `tie: {weight: embed.weight}`; None after a fault."""
    if key not in parameters:
        ctx.report(_no_parameter(step.verb, key, parameters, parameters), span)
    elif isinstance(value, Scalar) and isinstance(value.value, str):
        return _Tie(key, value.value, value, False)
    else:
        ctx.report(Fault("E203", "tie must name a parameter, as step.parameter", found=kind_of(value)), value.span)
    return None


def _no_parameter(verb: str, key: str, parameters: Iterable[str], possible: Collection[str]) -> Fault:
    """possible: those that the key may be a misspelling of, which are more with other arguments."""
    message = f"{verb} has no parameter {quote(key)} with these arguments"
    return Fault("E201", message, expected=f"one of {listing(parameters)}", hint=lambda: key_hint(key, possible))


def _checked_shape(step: Step, tie: _Tie, ours: Parameter, target: tuple[str, Parameter]) -> str:
    """Return the full name of the target. Raises Fault (E409) if the shapes differ."""
    name, theirs = target
    if theirs.shape != ours.shape:
        message = f"{step.verb}.{tie.ours} cannot be tied to {tie.target}: their shapes differ"
        raise Fault("E409", message, expected=f"{list(ours.shape)}", found=f"{list(theirs.shape)}")
    return name


def _find_target(ctx: Context, tie: _Tie) -> tuple[str, Parameter] | None:
    """Return the full name and the declaration of a tie's target, or None if UNKNOWN. Raises Fault (E312).

    The target is looked up in this body, then in enclosing ones.
    """
    first, _, rest = tie.target.partition(".")
    for body in bodies_around(ctx):
        node = body.nodes.get(first)
        if node:
            if ctx.run.references is not None:
                ctx.run.references.path(body.nodes, tie.node)
            there = ctx.run.parameters_of(node, graph.join(*body.path, first))
            if item := there.get(rest):
                return item.tied or item.name, item.parameter
            if ctx.run.is_known(node):
                names = [graph.join(first, name) for name in there]
                raise _no_target(tie, names)
            return None
    if may_be_step(ctx, first):
        return None
    raise _no_step(ctx, first)


def _no_target(tie: _Tie, names: list[str]) -> Fault:
    """Return the fault of a tie to a parameter that the step does not have. names: those that it has."""
    written = tie.target.rpartition(".")[0] if tie.of_step else tie.target

    def hint() -> str | None:
        if tie.of_step and written in names:
            return f"tie: {{{tie.ours}: {written}}}"
        known = dict.fromkeys(name.rpartition(".")[0] if tie.of_step else name for name in names)
        return did_you_mean(written, [name for name in known if name != written])

    expected = f"one of {listing(names)}" if names else f"{tie.target.partition('.')[0]} has no parameters"
    return Fault("E312", f"there is no parameter {quote(tie.target)}", expected=expected, hint=hint)


def _no_step(ctx: Context, name: str) -> Fault:
    """Return the fault of a name that is not a step above. The step may be left out."""
    if absent := next(filter(None, (step_left_out(body, name) for body in bodies_around(ctx))), None):
        message = f"{quote(name)} is left out, so it has no parameters to tie to"
        notes = [Note("its condition is false", absent.span)]
        return Fault("E312", message, hint="tie to a step that is present", notes=notes)

    def hint() -> str:
        if name == "model":
            return "leave out `model.`: names begin at this list of steps, or at an enclosing one"
        if names := renamed_steps(ctx, name):
            return is_renamed(name, names)
        known = dict.fromkeys(each for body in bodies_around(ctx) for each in body.nodes)
        return did_you_mean(name, known) or "tie to a step above this one"

    return Fault("E312", f"there is no step {quote(name)} to tie to", hint=hint)

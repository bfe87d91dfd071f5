"""`init:` and `tie:`: what a step says about the parameters it owns."""

from __future__ import annotations

from seqblocks import graph
from seqblocks.analysis.scope import Scope, Step
from seqblocks.analysis.wiring import Wiring
from seqblocks.errors import Fault, Span, listing, quote
from seqblocks.language.document import Mapping, Node, Scalar, kind_of
from seqblocks.language.expressions import NameFault
from seqblocks.language.vocabulary import did_you_mean, key_hint
from seqblocks.parameters import Init, Parameter, read_init


def initialised(scope: Scope, step: Step, parameters: dict[str, Parameter], known: bool) -> dict[str, Parameter]:
    """The parameters with the initialisers that `init:` gives."""
    entry = step.common.get("init")
    if entry is None:
        return parameters
    node = entry[1]
    if not isinstance(node, Mapping):
        hint = "init: {weight: zeros}"
        scope.fault(
            Fault("E203", "init is a mapping of parameter: initialiser", found=kind_of(node), hint=hint), node.span
        )
        return parameters
    torn = scope.comma_trap(node)
    out = dict(parameters)
    for key, span, value in node:
        if key in torn:
            continue
        unknown = known and parameters and key not in out
        if unknown and isinstance(value, Scalar) and value.value is None:  # what starts it may stand in the key
            init = None
        else:
            init = _init(scope, value)
        if key in out and init:
            out[key] = out[key]._replace(init=init)
        elif unknown:
            _no_parameter(scope, step, key, span, parameters)
    return out


def _init(scope: Scope, node: Node) -> Init | None:
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        expected = "a name such as zeros, or name(numbers)"
        scope.fault(Fault("E408", "not an initialiser", expected=expected, found=kind_of(node)), node.span)
        return None
    try:
        return read_init(node.value, scope.names)
    except Fault as fault:
        if not (isinstance(fault, NameFault) and scope.names.may_hold(fault.name)):
            scope.fault(fault, node.span)
        return None


def _no_parameter(scope: Scope, step: Step, key: str, span: Span, parameters: dict[str, Parameter]) -> None:
    fault = Fault(
        "E201",
        f"{step.verb} has no parameter {quote(key)} as it is used here",
        expected=f"one of {listing(parameters)}",
        hint=lambda: key_hint(key, parameters),
    )
    scope.fault(fault, span)


# --- tied parameters ---


def ties(scope: Wiring, step: Step, parameters: dict[str, Parameter]) -> dict[str, str]:
    """`tie: embed` ties every parameter to the like-named one there; `tie: {weight: embed.weight}` names them."""
    entry = step.common.get("tie")
    if entry is None or not parameters:
        return {}
    node = entry[1]
    pairs: list[tuple[str, str, Span]] = []
    if isinstance(node, Mapping):
        for key, span, value in node:
            if key not in parameters:
                _no_parameter(scope, step, key, span, parameters)
            elif isinstance(value, Scalar) and isinstance(value.value, str):
                pairs.append((key, value.value, value.span))
            else:
                fault = Fault("E203", "tie names a parameter, step.parameter", found=kind_of(value))
                scope.fault(fault, value.span)
    elif isinstance(node, Scalar) and isinstance(node.value, str):
        pairs = [(key, f"{node.value}.{key}", node.span) for key in parameters]
    else:
        fault = Fault("E203", "tie names a step, or maps parameters to step.parameter", found=kind_of(node))
        scope.fault(fault, node.span)
    found = {}
    for key, target, span in pairs:
        try:
            name, theirs = _tie_target(scope, target, of_step=not isinstance(node, Mapping))
        except Fault as unknown:
            other = target.removesuffix(".bias")
            if not isinstance(node, Mapping) and key == "bias" and "." not in other and "weight" in parameters:
                unknown.hint = f"`bias: false`, or tie the weight alone: `tie: {{weight: {other}.weight}}`"
            scope.fault(unknown, span)
            continue
        if theirs.shape != parameters[key].shape:
            fault = Fault(
                "E409",
                f"{step.verb}.{key} cannot be {target}: their shapes differ",
                expected=f"{list(parameters[key].shape)}",
                found=f"{list(theirs.shape)}",
            )
            scope.fault(fault, span)
        else:
            found[key] = name
    return found


def _tie_target(scope: Wiring, target: str, of_step: bool) -> tuple[str, Parameter]:
    """A tie's target by full name, and its declaration: looked up here, then in the bodies around.

    What a hint offers is what the tie is written as: a step's name if `of_step`, else a parameter's.
    """
    first = target.split(".")[0]
    frame: Wiring | None = scope
    while frame:
        node = frame.nodes.get(first)
        if node:
            there = scope.shared.parameters_of(node)
            item = there.get(target[len(first) + 1 :])
            if item:
                return item.tied or graph.join(*frame.path, first, item.name), item.parameter
            raise _not_there(target, [graph.join(first, name) for name in there], of_step)
        frame = frame.outer

    def hint() -> str:
        around: Wiring | None = scope
        known: dict[str, None] = {}
        while around:
            known |= dict.fromkeys(around.nodes)
            around = around.outer
        return did_you_mean(first, known) or "tie to a step that stands above"

    raise Fault("E312", f"there is no step {quote(first)} to tie to", hint=hint)


def _not_there(target: str, names: list[str], of_step: bool) -> Fault:
    first, written = target.split(".")[0], target.rpartition(".")[0] if of_step else target

    def hint() -> str | None:
        known = dict.fromkeys(name.rpartition(".")[0] if of_step else name for name in names)
        return did_you_mean(written, [name for name in known if name != written])

    return Fault(
        "E312",
        f"there is no parameter {quote(target)}",
        expected=f"one of {listing(names)}" if names else f"{first} has no parameters",
        hint=hint,
    )

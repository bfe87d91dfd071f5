"""Lower `share:`, by which a step or a layer of a repeat uses the parameters of another one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain, takewhile
from typing import NamedTuple

from seqblocks import graph
from seqblocks.analysis.scope.context import Body, Context
from seqblocks.analysis.scope.step import Step
from seqblocks.analysis.scope.steps_above import bodies_around, may_be_step, renamed_steps, step_called, step_left_out
from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.graph import Named, Source
from seqblocks.language.document import Scalar, kind_of
from seqblocks.suggestions import did_you_mean, is_renamed

MAX_DIFFERENCES = 3  # number of parameters listed in a message

Table = dict[str, Named]  # parameters by their relative names in a step or a layer


class _Owner(NamedTuple):
    """The step that `share:` refers to, or a step or a layer inside it."""

    node: graph.Node  # the innermost step that contains all of it
    span: Span
    parameters: Table


def read_share(ctx: Context, step: Step) -> str:
    """Return the name in `share:`, or "" after a fault."""
    node = step.common["share"][1]
    if isinstance(node, Scalar) and isinstance(node.value, str):
        return node.value
    message, found = "share must be the name of a step", kind_of(node)
    ctx.report(Fault("E203", message, found=found, hint="share: attention"), node.span)
    return ""


def share_parameters(ctx: Context, step: Step, node: graph.Node, written: str) -> None:
    """Apply `share:` to a step, or report why the parameters cannot be shared."""
    if not written:
        return
    try:
        _share(ctx, step, node, written)
    except Fault as fault:
        ctx.report(fault, step)


def _share(ctx: Context, step: Step, node: graph.Node, written: str) -> None:
    """Raise Fault (E312, E320 to E322)."""
    is_primitive, is_scan = isinstance(node, graph.PrimitiveNode), isinstance(node, graph.ScanNode)
    for key in ("init", "tie") if is_primitive else ("init",) if is_scan else ():  # other steps have neither
        if key in step.common:
            message = f"a step with `share` has no parameters to {key}"
            hint = f"move `{key}` to the step that owns the parameters, or remove `share`"
            ctx.report(Fault("E322", message, hint=hint), step.key_span(key))
    owner = _find_owner(ctx, step, node, written)
    if owner is None or not ctx.run.is_known(node):
        return
    name = graph.join(*ctx.body.path, node.name)
    own = ctx.run.parameters_of(node, name)
    if not own:
        if isinstance(node, graph.RepeatNode) and not node.bodies:  # without layers
            return
        raise Fault("E201", f"{step.verb} has no parameters of its own to share", at="share")
    ctx.run.effort += (len(own) + len(owner.parameters)) // 16
    _check_alike(own, owner.parameters, (step.name, step.span), (written, owner.span))
    _check_free(step, name, own, owner.parameters)
    del ctx.run.node_parameters[id(node)]  # computed before sharing
    node.shared = {key: _source(item.name, owner.parameters[key]) for key, item in own.items()}
    node.owner, node.owner_name = owner.node.owner or owner.node, written


def _source(own: str, owned: Named) -> Source:
    """Return the location of a shared parameter, relative to the name that an owned one would have."""
    ours, theirs = own.split("."), (owned.tied or owned.name).split(".")
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))))
    return len(ours) - same, ".".join(theirs[same:])


# --- the owner --------------------------------------------------------------------------------------------------------


def _find_owner(ctx: Context, step: Step, node: graph.Node, written: str) -> _Owner | None:
    """Find the owner in this body or an enclosing one. Return None if it is UNKNOWN."""
    first, _, rest = written.partition(".")
    for body in bodies_around(ctx):
        found = body.nodes.get(first)
        if found is node or _is_open(body, ctx.body, first):
            renamed = renamed_steps(ctx, first)
            hint = is_renamed(first, renamed) if renamed else "name a step above"
            what = "itself" if body is ctx.body else f"{quote(first)}, which contains it"
            raise Fault("E320", f"{step.name} cannot share parameters with {what}", at="share", hint=hint)
        if found:
            if ctx.run.references is not None and isinstance(place := step.get("share"), Scalar):
                ctx.run.references.path(body.nodes, place)
            return _owner_in(ctx, body, found, rest) if ctx.run.is_known(found) else None
    if may_be_step(ctx, first):
        return None
    raise _no_step(ctx, step, first)


def _is_open(body: Body, inner: Body, name: str) -> bool:
    """Return whether the step with this name contains the body `inner`."""
    return body is not inner and body.current is not None and body.current.name == name


def _owner_in(ctx: Context, body: Body, node: graph.Node, path: str) -> _Owner:
    """Return the owner at a dotted path inside a step (the step itself if empty). Raises Fault (E312, E320)."""
    table = ctx.run.parameters_of(node, graph.join(*body.path, node.name))
    if not path:
        if table:
            return _Owner(node, node.span, table)
        message = f"{node.name} has no parameters to share"
        raise Fault("E320", message, at="share", notes=[_is_here(node.name, node.span)])
    ctx.run.effort += len(table) // 16  # counted as steps, because a large step may be searched often
    inside = {name[len(path) + 1 :]: item for name, item in table.items() if name.startswith(f"{path}.")}
    if inside:
        found = _step_at(node, path.split("."))
        return _Owner(found, found.span, inside)
    if path in table:
        whole = f"{node.name}.{path}"
        hint = f"tie: {{{path.rpartition('.')[2]}: {whole}}}"
        raise Fault("E320", f"share must name a step, and {whole} is a parameter", at="share", hint=hint)
    raise _no_step_inside(graph.join(node.name, path), [graph.join(node.name, each) for each in _steps_of(table)])


def _no_step_inside(path: str, known: list[str]) -> Fault:
    """known: the paths of the steps with parameters, inside the named step."""
    message, expected = f"there is no step {quote(path)} with parameters", f"one of {listing(known)}" if known else None
    return Fault("E312", message, at="share", expected=expected, hint=lambda: did_you_mean(path, known))


def _step_at(node: graph.Node, path: list[str]) -> graph.Node:
    """Return the innermost step on a path, or an outer one that shares all its parameters."""
    for at in () if node.owner else range(len(path)):
        for label, body in node.bodies.items():
            rest = path[at:] if not label else path[at + 1 :] if label == path[at] else []
            inner = next((each for each in body.nodes if rest and each.name == rest[0]), None)
            if inner:
                return _step_at(inner, rest[1:])
    return node


def _steps_of(names: Iterable[str]) -> list[str]:
    """Return the steps and layers that contain the parameters with these names."""
    return list(dict.fromkeys(chain.from_iterable(_prefixes(name)[:-1] for name in names)))


def _prefixes(name: str) -> list[str]:
    """Return the names of the steps that contain a parameter, outermost first, and its own name."""
    return list(accumulate(name.split("."), "{}.{}".format))


def _no_step(ctx: Context, step: Step, name: str) -> Fault:
    """Return the fault of a name that is not a step above: the step may be below, or left out."""
    for body in bodies_around(ctx):
        same = step_called(body, name)
        if same and step_left_out(body, name):
            message = f"{quote(name)} is left out, so its parameters cannot be shared"
            other = f"give {step.name} the same `when`, or share with a step that is present"
            return Fault("E320", message, at="share", hint=other, notes=[Note("its condition is false", same.span)])
        if same:
            message, other = f"{quote(name)} is below {step.name}", "move `share` to the second of the two steps"
            return Fault("E320", message, at="share", hint=other, notes=[_is_here(name, same.span)])

    def hint() -> str:
        if renamed := renamed_steps(ctx, name):
            return is_renamed(name, renamed)
        words = ["all", "none"] if "share" in step.fields else []  # of a repeat
        known = [*dict.fromkeys(chain.from_iterable(body.nodes for body in bodies_around(ctx))), *words]
        inside = "steps of a block can only share with steps of the same block"
        return did_you_mean(name, known) or (inside if ctx.callers else "name a step above this one")

    return Fault("E312", f"there is no step {quote(name)} to share with", at="share", hint=hint)


# --- comparing declarations -------------------------------------------------------------------------------------------


def _check_alike(own: Table, owned: Table, ours: tuple[str, Span], theirs: tuple[str, Span]) -> None:
    """Raise Fault (E321) unless two steps declare parameters with the same names, shapes and precision.

    ours, theirs: the descriptions of the two for messages, and their spans.
    """
    names = [name for name in (owned if own.keys() == owned.keys() else {**owned, **own}) if _differ(name, own, owned)]
    if not names:
        return
    raise _declarations_differ(names, _Side(*ours, own), _Side(*theirs, owned))


class _Side(NamedTuple):
    """One of two steps, or layers, whose declarations differ."""

    label: str
    span: Span
    parameters: Table

    def declared(self, names: Iterable[str]) -> str:
        return listing(self._declared(name) for name in names)

    def _declared(self, name: str) -> str:
        if name not in self.parameters:
            return f"no {name}"
        parameter = self.parameters[name].parameter
        return f"{name} {list(parameter.shape)}{' in float32' if parameter.full_precision else ''}"


def _declarations_differ(names: list[str], sharing: _Side, owner: _Side) -> Fault:
    """names: the parameters that differ; sharing: the step that has `share:`."""
    more = len(names) - MAX_DIFFERENCES
    also = f" ({more} more differ)" if more > 0 else ""
    places = {owner.span: _is_here(owner.label, owner.span), sharing.span: None}
    for side in (owner, sharing):
        if item := side.parameters.get(names[0]):
            span = item.node.span
            places.setdefault(span, Note(f"the {names[0]} of {side.label} is declared here", span))
    return Fault(
        "E321",
        f"{sharing.label} cannot share the parameters of {owner.label}: their declarations differ",
        at="share",
        expected=f"{owner.declared(names[:MAX_DIFFERENCES])}, as in {owner.label}",
        found=f"{sharing.declared(names[:MAX_DIFFERENCES])}{also}",
        notes=[note for note in places.values() if note],
    )


def _is_here(name: str, span: Span) -> Note:
    return Note(f"{name} is here", span)


def _differ(name: str, *tables: Table) -> bool:
    found = [table[name].parameter for table in tables if name in table]
    facts = {(parameter.shape, parameter.full_precision) for parameter in found}
    return len(found) < len(tables) or len(facts) > 1


def _check_free(step: Step, name: str, own: Table, owned: Table) -> None:
    """Raise Fault (E322) if a step inside is already tied to, or shares, something other than the owner does."""
    for key, item in own.items():
        if item.tied is None:
            continue
        inside = item.tied[len(name) + 1 :] if item.tied.startswith(f"{name}.") else ""
        source = (owned[inside].tied or owned[inside].name) if inside else item.tied
        if source != (owned[key].tied or owned[key].name):
            already = f"{key} of {step.name} is already shared with {item.tied}"
            message, hint = f"{already}, and cannot be shared with {owned[key].name}", "remove one `share` or `tie`"
            notes = [Note("the step with the parameter is here", item.node.span)]
            raise Fault("E322", message, at="share", notes=notes, hint=hint)


# --- layers -----------------------------------------------------------------------------------------------------------


def share_layers(ctx: Context, step: Step, node: graph.Node, firsts: dict[str, str], names: list[str] | None) -> None:
    """Share parameters among the layers of a repeat. Raises Fault (E321).

    firsts: the owning layer of each layer, by label. names: the steps and parameters to share; None for all.
    """
    if not ctx.run.is_known(node):
        return
    table = ctx.run.parameters_of(node, graph.join(*ctx.body.path, node.name))
    layers: dict[str, Table] = {label: {} for label in firsts}
    others: Table = {}
    for key, item in table.items():
        label, _, inner = key.partition(".")
        (others if item.shared else layers[label])[inner] = item
    if names is not None:
        layers = _named_by(ctx, step, node, layers, names, others)
    spans = {label: _layer_span(step, node, label) for label in firsts}
    shared: dict[str, Source] = {}
    for label, first in firsts.items():
        if label != first:
            ours, theirs = (f"layer {label}", spans[label]), (f"layer {first}", spans[first])
            _check_alike(layers[label], layers[first], ours, theirs)
            items = layers[label].items()
            shared |= {f"{label}.{key}": _source(item.name, layers[first][key]) for key, item in items}
    del ctx.run.node_parameters[id(node)]  # computed before sharing
    node.shared = shared


def owner_of(name: str, shared: Table) -> str | None:
    """Return the owner of a shared parameter, or of the first one in the step with this name; None if there is none."""
    return next((each.tied for key, each in shared.items() if key == name or key.startswith(f"{name}.")), None)


def name_the_owner(name: str, owner: str) -> str:
    """Return a hint to name the owner instead of a step, or a parameter, that uses parameters of another step."""
    return f"{name} uses the parameters of another step: name the one that has them ({owner})"


def _named_by(
    ctx: Context, step: Step, node: graph.Node, layers: dict[str, Table], names: list[str], others: Table
) -> dict[str, Table]:
    """Return the named parameters of each layer; a name is a parameter or a step. Report names of nothing (E312).

    others: parameters that steps already share.
    """
    if ctx.run.references is not None:
        ctx.run.references.paths(step.get("share"), node.bodies.values())
    requested = set(names)
    known = dict.fromkeys(chain.from_iterable(layers.values()))
    found = {key: named for key in known if (named := [each for each in _prefixes(key) if each in requested])}
    missing = requested.difference(*found.values())
    for name in names:
        if name in missing:
            ctx.report(_not_in_layers(name, list(known), owner_of(name, others)), step)
    return {label: {key: item for key, item in table.items() if key in found} for label, table in layers.items()}


def _not_in_layers(name: str, known: list[str], owner: str | None) -> Fault:
    """known: the parameters of the layers; owner: of `name`, if a layer shares it."""
    return Fault(
        "E312",
        f"no layer of this repeat has a parameter {quote(name)}",
        at="share",
        entry=name,
        expected=f"one of {listing(known)}" if known else "the layers have no parameters",
        hint=name_the_owner(name, owner) if owner else lambda: did_you_mean(name, [*known, *_steps_of(known)]),
    )


def _layer_span(step: Step, node: graph.Node, label: str) -> Span:
    nodes = node.bodies[label].nodes
    return nodes[0].span if nodes else step.span

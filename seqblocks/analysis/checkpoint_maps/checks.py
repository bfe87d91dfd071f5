"""Check `checkpoint:` maps against the graph: unmatched keys, entries that cannot apply, axes that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain, islice
from typing import Any, get_args

from seqblocks import graph
from seqblocks.analysis.checkpoint_maps.translation import HOLE, Translator, index_pattern
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.references import References
from seqblocks.analysis.scope.steps_above import may_be_step
from seqblocks.combinators import Order
from seqblocks.errors import Fault, Note, listing, quote
from seqblocks.graph import Entry, Graph
from seqblocks.language.document import Scalar
from seqblocks.parameters import Parameter
from seqblocks.recipes import Name
from seqblocks.suggestions import did_you_mean, is_renamed

DIRECTIONS = tuple(map(graph.direction_name, get_args(Order)))
MAX_MATCHES = 2_000_000  # comparisons of a key's pattern with a name


def check_map(ctx: Context, table: tuple[Entry, ...], body: Graph, may_differ: bool) -> None:
    """Report keys that match nothing in `body`, entries that cannot apply, and axes and layouts that do not fit.

    Steps that are unknown after a fault may contain anything: entries that may be theirs are not checked.
    may_differ: whether the body could differ (a block has arguments, or something is overridden), so a key may match a
    parameter, a layer or a direction that this body does not have.
    """
    is_whole = not ctx.run.report or _is_whole(ctx, body)
    if not is_whole:
        table = tuple(entry for entry in table if _is_settled(ctx, entry, body))
    inner = not may_differ and any("." in entry.ours for entry in table)  # whether a key may name a part of a scan
    parted = inner and any(node.directions for each in graph.bodies(body) for node in each.nodes)
    patterns = {part for entry in table for part in entry.ours.split(".") if "{" in part and HOLE.sub("", part)}
    count = sum(1 + len(node.parameters) for node in graph.walk(body)) if patterns else 0
    if len(patterns) * count > MAX_MATCHES:
        message = f"{len(patterns):,} patterns are too many for {count:,} steps and parameters"
        expected = f"at most {MAX_MATCHES // count:,}, not counting parts that are a single index (blocks.{{layer}})"
        ctx.report(Fault("E104", message, expected=expected), table[0].span)
        return
    top, owners = _Places([body], _inside), _Places([_names(body) if parted else {}], dict)
    composed: set[int] = set()
    is_valid = is_whole
    for entry in table:
        places, is_known = _find(ctx, entry, top, may_differ)
        if entry.optional and not places:
            continue
        is_valid &= is_known
        if places is None:
            continue
        _check_axis(ctx, entry, places)
        _check_layout(ctx, entry, places)
        if (len(entry.theirs) > 1 or not isinstance(entry.theirs[0], Name)) and places.mapped:
            composed.add(id(entry))
        if parted and places.shapes:
            is_valid &= _check_owner(ctx, entry, owners)
    for layout in dict.fromkeys(entry.layout for entry in table) if is_valid else ():
        _check_use(ctx, table, layout, body, may_differ, composed)


def _is_whole(ctx: Context, body: Graph) -> bool:
    """Return whether all steps of a body are known."""
    return not ctx.body.incomplete and all(map(ctx.run.is_known, body.nodes))


def _is_settled(ctx: Context, entry: Entry, body: Graph) -> bool:
    """Return whether it is known what an entry matches, in a body with unknown steps."""
    first = entry.ours.partition(".")[0]
    if "{" in first:
        return _is_whole(ctx, body)
    nodes = [node for node in body.nodes if node.name == first]
    return all(map(ctx.run.is_known, nodes)) if nodes else not may_be_step(ctx, first)


def _names(body: Graph) -> dict[str, Any]:
    """Return the names of all parameters as nested dicts, one level for each part of a name."""
    names: dict[str, Any] = {}
    for item in graph.parameters(body, shared=True):
        level = names
        for part in item.name.split("."):
            level = level.setdefault(part, {})
    return names


def _find(ctx: Context, entry: Entry, places: _Places, may_differ: bool) -> tuple[_Places | None, bool]:
    """Return what an entry's key matches, or None, and whether it is known. Reports an unknown key."""
    start = 0
    for part in entry.ours.split("."):
        found = places.below(part, may_differ)
        if not found.members:
            otherwise = may_differ and any(isinstance(place, graph.Node) and place.op for place in places.members)
            is_known = bool(otherwise or places.without_layers or part in places.absent)
            if not is_known and not entry.optional:
                _unknown(ctx, entry, part, start, places)
            return None, is_known
        if ctx.run.references is not None and not entry.optional:
            _refer(ctx.run.references, entry, part, start, found)
        places, start = found, start + len(part) + 1
    return places, True


def _refer(references: References, entry: Entry, part: str, start: int, found: _Places) -> None:
    """Note the steps that a part of an entry's key names. Entries of a map with a name begin with the key."""
    text = entry.span.text.strip("\"'")
    for step in found.members if start < len(text) and entry.ours.startswith(text) else ():
        if isinstance(step, graph.Node) and step.name == part:
            references.step(step, Scalar(entry.span, 1, 1, text, text).part(start, len(part)))


def _check_use(
    ctx: Context, table: tuple[Entry, ...], layout: str, body: Graph, may_differ: bool, composed: set[int]
) -> None:
    """Report entries that are shadowed by longer keys of the same map, and recipes applied to recipes of a block's map.

    layout: the layout to check. composed: entries whose recipes or alternatives are combined with the map of a block.
    """
    translator = Translator(layout)
    tree = translator.tree(table)
    if not composed and (may_differ or not tree.overlaps()):
        return
    instead: dict[int, dict[int, Entry]] = {id(entry): {} for entry in table}  # entries that match instead
    used: set[int] = set()
    fixed = {part for entry in table for part in entry.ours.split(".")}
    whole = all(map(_has_whole_numbers, table))
    done: set[tuple[str, ...]] = set()
    for item in graph.parameters(body, shared=True):
        parts = item.name.split(".")
        # the same in other layers
        alike = tuple("{}" if whole and part.isdecimal() and part not in fixed else part for part in parts)
        if alike in done:
            continue
        found = tree.matches(parts)
        if not found or id(found[0].entry) not in composed:
            done.add(alike)
        if not found:
            continue
        first = found[0]
        used.add(id(first.entry))
        for other in found[1:]:
            instead[id(other.entry)][id(first.entry)] = first.entry
        if first.length < len(parts) and id(first.entry) in composed and first.entry.layout == layout:
            try:
                after = translator.after(body, parts, first.length)
            except Fault:  # belongs to the map of a block, where it is reported
                continue
            try:
                first.followed_by(after)
            except Fault as fault:
                fault.found = item.name
                ctx.report(fault, first.entry.span)
    for entry in () if may_differ else table:
        others = instead[id(entry)]
        if id(entry) not in used and others and entry.layout == layout and not entry.optional:
            ctx.report(_never_applies(entry, others.values()), entry.span)


def _never_applies(entry: Entry, others: Iterable[Entry]) -> Fault:
    """others: the entries of the same map that match instead."""
    message = f"{quote(entry.ours)} never applies: other keys of this map match everything that it matches"
    notes = [Note(f"{quote(other.ours)} is here", other.span) for other in islice(others, 3)]
    return Fault("E314", message, hint="remove it, or make the other keys more specific", notes=notes)


def _has_whole_numbers(entry: Entry) -> bool:
    """Return whether each placeholder of a key stands for a whole part of a name, and for one part only."""
    numbers = [part for part in entry.ours.split(".") if "{" in part]
    are_whole = all(part[0] == "{" and part.find("}") == len(part) - 1 for part in numbers)
    return are_whole and len({*numbers}) == len(numbers)


class _Places:
    """The places that keys with the same prefix match. Their contents are sorted by name once, for all keys."""

    def __init__(self, members: list[Any], inside: Callable[[Any], dict[str, Any]]) -> None:
        self.members, self.inside = members, inside
        self._below: dict[str, _Places] = {}

    @cached_property
    def named(self) -> dict[str, dict[int, Any]]:
        """Return the steps, bodies and parameters below, by the next part of their names."""
        found: dict[str, dict[int, Any]] = {}
        for member in self.members:
            for name, child in self.inside(member).items():
                found.setdefault(name, {})[id(child)] = child
        return found

    @cached_property
    def layers(self) -> tuple[int, dict[int, Any]]:
        """Return the smallest number of layers of a repeat among these, and the layers of all of them."""
        repeats = [member for member in self.members if isinstance(member, graph.RepeatNode)]
        inside = {id(body): body for node in repeats for body in node.bodies.values()}
        return min((len(node.bodies) for node in repeats), default=10**9), inside

    @cached_property
    def shapes(self) -> dict[tuple[int, ...], str]:
        """Return the shapes of the parameters, each with the relative name of the first that has it."""
        found: dict[tuple[int, ...], str] = {}
        for member in self.members:
            for name, parameter in _parameters(member):
                found.setdefault(parameter.shape, name)
        return found

    @cached_property
    def mapped(self) -> bool:
        """Return whether a block with a map of its own is here or below."""
        nodes = [member for member in self.members if isinstance(member, graph.Node)]
        bodies = [member for member in self.members if isinstance(member, Graph)]
        bodies += chain.from_iterable(node.bodies.values() for node in nodes)
        below = chain(nodes, chain.from_iterable(map(graph.walk, bodies)))
        return any(isinstance(node, graph.BlockNode) and node.checkpoint for node in below)

    @cached_property
    def absent(self) -> set[str]:
        """Return the names of steps here whose condition is false."""
        bodies = [member for member in self.members if isinstance(member, Graph)]
        nodes = (member for member in self.members if isinstance(member, graph.Node))
        bodies += chain.from_iterable(node.bodies.values() for node in nodes)
        return {name for body in bodies for name in body.absent}

    @cached_property
    def without_layers(self) -> bool:
        """Return whether one of these is a repeat without layers."""
        return any(isinstance(member, graph.RepeatNode) and not member.bodies for member in self.members)

    @cached_property
    def matrix(self) -> bool:
        """Return whether one of these is a parameter with two axes."""
        return any(isinstance(member, Parameter) and len(member.shape) == 2 for member in self.members)

    def below(self, part: str, may_differ: bool = False) -> _Places:
        """Return everything named `part` in any of the places."""
        absent = may_differ and part.isdecimal() and (len(part) > 9 or int(part) >= self.layers[0])
        key = "0+" if absent else HOLE.sub("{}", part)
        if key not in self._below:
            found: dict[int, Any] = {}
            if "{" in part:
                matches = str.isdecimal if key == "{}" else index_pattern(part).fullmatch
                for name, members in self.named.items():
                    found |= members if matches(name) else {}
            else:
                found |= self.layers[1] if absent else self.named.get(part, {})
            if may_differ and part in DIRECTIONS:
                scans = [t for t in self.members if isinstance(t, graph.ScanNode)]
                found |= {id(scan): scan for scan in scans if part not in scan.directions}
            self._below[key] = _Places(list(found.values()), self.inside)
        return self._below[key]

    def words(self) -> list[str]:
        """Return the names that a key may match here, for a message."""
        layers = any(isinstance(member, graph.RepeatNode) for member in self.members)
        return list(dict.fromkeys("{layer}" if layers and name.isdecimal() else name for name in self.named))

    def renamed(self, verb: str) -> list[str]:
        """Return the names of the steps here that have this verb, for a message."""
        below = (child for members in self.named.values() for child in members.values())
        return list(dict.fromkeys(node.name for node in below if isinstance(node, graph.Node) and node.verb == verb))


def _inside(place: Any) -> dict[str, Any]:
    """Return steps, bodies and parameters by the next part of their names."""
    if isinstance(place, Parameter):
        return {}
    return {**(place.parameters if isinstance(place, graph.Node) else {}), **graph.children(place)}


def _check_owner(ctx: Context, entry: Entry, owners: _Places) -> bool:
    """Report a key with a scan order for a shared parameter, or without one for a parameter that each order owns."""
    start = 0
    for part in entry.ours.split("."):
        found = owners.below(part)
        if not found.members:
            _unknown(ctx, entry, part, start, owners)
            return False
        owners, start = found, start + len(part) + 1
    return True


def _unknown(ctx: Context, entry: Entry, part: str, start: int, places: _Places) -> None:
    """Report a part of a key that matches no step or parameter. places: what the key matches before that part."""
    before = entry.ours[: max(start - 1, 0)]
    bare = len(entry.ours) == entry.span.end_column - entry.span.column  # not in quotes
    span = entry.span.within(start, len(part)) if bare else entry.span

    def expected() -> str:
        return f"one of {listing(places.words())}" if places.named else "nothing more"

    def hint() -> str | None:
        names = places.renamed(part)
        return is_renamed(part, names) if names else did_you_mean(part, places.words())

    message = f"there is no {quote(part)} in {before}" if before else f"there is no step {quote(part)} to map"
    if before and part not in entry.span.text:  # the name of a layout stands for several entries
        message = f"the layout maps {quote(entry.ours)}, but there is no {quote(part)} in {before}"
    ctx.report(Fault("E312", message, expected=expected, hint=hint), span)


def _parameters(place: Any) -> list[tuple[str, Parameter]]:
    """Return the parameters of a place, by their relative names."""
    if isinstance(place, Parameter):
        return [("", place)]
    below = (
        graph.parameters(place, shared=True)
        if isinstance(place, Graph)
        else graph.node_parameters(place, "", shared=True)
    )
    return [(item.name, item.parameter) for item in below]


def _check_axis(ctx: Context, entry: Entry, places: _Places) -> None:
    """Report a recipe that cannot make a tensor of one of our shapes."""
    for theirs, node in zip(entry.theirs, entry.node, strict=True):
        for shape, name in () if isinstance(theirs, Name) else places.shapes.items():
            if fault := theirs.misfit(graph.join(entry.ours, name), shape):
                ctx.report(fault, node.get(fault.at))
                return


def _check_layout(ctx: Context, entry: Entry, places: _Places) -> None:
    """Report a `kernel` of flax or Keras that is not transposed: it is [in, out], while ours are [out, in]."""
    for theirs, node in zip(entry.theirs, entry.node, strict=True):
        if places.matrix and isinstance(theirs, Name) and theirs.official.rpartition(".")[2] == "kernel":
            message = f"{quote(theirs.official)} is [in, out] by its name, and {entry.ours} is [out, in]"
            hint = f"{{transpose: {theirs.official}}}, or {{reshape: {theirs.official}}} if it is in fact [out, in]"
            ctx.report(Fault("E314", message, hint=hint), node.span)

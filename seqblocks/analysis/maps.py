"""`checkpoint:` maps: reading them, checking them against the graph, and translating our names into official ones.

A map's keys are our names (a parameter, or a namespace: then everything below it), its values the official names.
`{layer}` in a key matches an index; a value may use it in an expression: `blocks.{layer // 2}`. A list of values gives
alternatives, for releases with several layouts: the first one that a file holds is read.

A block's map covers the names inside the block, wherever the block is used. The longest matching key of the enclosing
map translates the part of a name that it matches; what follows is translated by the maps of the blocks it passes
through. A key of the enclosing map that reaches into a block takes precedence over the block's map for what it matches.

    head: classifier                             rename
    embed: [wte, backbone.embeddings]            alternatives
    qkv.weight: {concat: [q, k, v], axis: 0}     official tensors joined (or `stack`ed) into ours
    q.weight: {split: qkv, parts: 3, part: 0}    one of several equal parts that an official tensor joins or stacks,
                                                 or holds flat; `axis: 1`: parts of each of its rows
    q.weight: {slice: qkvo, start: 0}            as much of an official tensor as ours holds, from there on its axis 0
    w: {transpose: v}                            last two axes swapped; the last of ours may be one there
    w: {reshape: v}                              the same numbers in our shape
    w: {rearrange: v, pattern: "(head part d) gate -> gate (part head d)", head: heads, part: 3}
                                                 axes split, permuted and joined, in einops' notation
    A_real: {real: A}, A_imag: {imag: A}         one part of a complex tensor
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import Any, NamedTuple, get_args

from seqblocks import graph
from seqblocks.analysis.scope import Scope
from seqblocks.combinators import Order
from seqblocks.errors import Fault, Note, RunError, Span, listing, quote
from seqblocks.graph import Entry, Graph, Model
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import MAX_LENGTH, NameFault, parse, unknown_name
from seqblocks.language.spec import is_name, known_keys
from seqblocks.language.vocabulary import did_you_mean, hidden
from seqblocks.parameters import Parameter

RECIPES: dict[str, tuple[str, ...]] = {  # and what goes with each
    "concat": ("axis",), "stack": ("axis",), "split": ("parts", "part", "axis"), "slice": ("start", "axis"),
    "transpose": (), "reshape": (), "real": (), "imag": (), "rearrange": ("pattern",),
}  # fmt: skip
OPTIONAL = ("axis", "start")
SEVERAL = ("concat", "stack")
DIRECTIONS = tuple(map(graph.direction_name, get_args(Order)))
MAX_ALTERNATIVES = 16
MAX_MATCHES = 2_000_000  # a pattern of a key held against a name
_HOLE = re.compile(r"\{([^}]*)\}")

# --- reading --------------------------------------------------------------------------------------------------------


def read_map(scope: Scope, node: Mapping | None) -> tuple[Entry, ...]:
    """The entries of a map; what is at fault in itself is told and left out."""
    found = [_entry(scope, key, span, value) for key, span, value in node or ()]
    entries: dict[str, Entry] = {}
    for entry in filter(None, found):
        first = entries.setdefault(_HOLE.sub("{}", entry.ours), entry)
        if first is not entry:
            what = f"{quote(first.ours)} and {quote(entry.ours)} are one key: an index matches by any name"
            scope.fault(Fault("E210", what, notes=[Note("the first is here", first.span)]), entry.span)
    return tuple(entries.values())


def _entry(scope: Scope, key: str, span: Span, node: Node) -> Entry | None:
    indices = _HOLE.findall(key)
    if not all(is_name(scope.report, index, span) for index in indices):
        return None
    if len(set(indices)) < len(indices):
        scope.fault(Fault("E210", f"{quote(key)} has one index twice"), span)
        return None
    nodes = node.items if isinstance(node, Sequence) else [node]
    if not 0 < len(nodes) <= MAX_ALTERNATIVES:
        fault = Fault("E203", f"a list holds 1 to {MAX_ALTERNATIVES} alternative official names", found=str(len(nodes)))
        scope.fault(fault, node.span)
        return None
    theirs = [
        _recipe(scope, item, indices) if isinstance(item, Mapping) else _name(scope, item, indices) for item in nodes
    ]
    found = tuple(each for each in theirs if each is not None)
    return Entry(key, span, found, tuple(nodes)) if len(found) == len(nodes) else None


def has_sizes(table: Iterable[Entry]) -> bool:
    """Whether a map depends on the arguments of its block: the sizes of a `rearrange` may."""
    return any(isinstance(theirs, dict) and "sizes" in theirs for entry in table for theirs in entry.theirs)


def _recipe(scope: Scope, node: Mapping, indices: list[str]) -> dict[str, Any] | None:
    kinds = [key for key in RECIPES if key in node.entries]
    words = (kinds[0], *RECIPES[kinds[0]]) if len(kinds) == 1 else (*RECIPES, *chain(*RECIPES.values()))
    words = tuple(dict.fromkeys(words))
    if kinds == ["rearrange"]:
        return _rearrangement(scope, node, indices)
    if len(words) > 1:
        known_keys(scope.report, node, words, "a checkpoint map's recipe")
    else:
        alone = f"{words[0]} alone; what it makes has the shape of our parameter"
        for key, span, _ in node:
            if key not in words:
                scope.fault(Fault("E201", f"{words[0]} takes no {quote(key)}", expected=alone), span)
    if len(kinds) != 1:
        if all(key in words for key in node.entries):
            fault = Fault("E210" if kinds else "E202", "a recipe is of one kind", expected=f"one of {listing(RECIPES)}")
            scope.fault(fault, node.span)
        return None
    tensors = _tensors(scope, kinds[0], node.entries[kinds[0]][1], indices)
    numbers = _numbers(scope, kinds[0], node, words)
    return None if tensors is None or numbers is None else {kinds[0]: tensors, **numbers}


def _rearrangement(scope: Scope, node: Mapping, indices: list[str]) -> dict[str, Any] | None:
    """{rearrange: name, pattern: "(a b) c -> c (b a)", a: 4}: the sizes are expressions over the names of the scope."""
    name = _name(scope, node.entries["rearrange"][1], indices)
    pattern = node.get("pattern")
    if pattern is None:
        known_keys(scope.report, node, ("rearrange", "pattern"), "a checkpoint map's recipe")
        if not hidden(node.entries, "pattern", ("rearrange", "pattern")):
            hint = 'pattern: "(head part d) gate -> gate (part head d)"'
            scope.fault(Fault("E202", "rearrange needs 'pattern'", hint=hint), node.span)
        return None
    try:
        if not isinstance(pattern, Scalar) or not isinstance(pattern.value, str):
            raise Fault("E203", "a pattern is text", found=kind_of(pattern), hint='"row column -> column row"')
        axes = {axis for group in read_pattern(pattern.value)[0] for axis in group}
    except Fault as fault:
        scope.fault(fault, pattern.span)
        return None
    sizes: dict[str, int] = {}
    known_keys(scope.report, node, ("rearrange", "pattern", *sorted(axes)), "a checkpoint map's recipe")
    for key, _, value in node:
        if key in axes:
            sizes[key] = scope.number(value, whole=True)
            if isinstance(sizes[key], int) and sizes[key] < 1:
                scope.fault(Fault("E209", f"the size of {key} is out of range", expected="1 or more"), value)
    return None if name is None else {"rearrange": name, "pattern": pattern.value, "sizes": sizes}


def _numbers(scope: Scope, kind: str, node: Mapping, words: tuple[str, ...]) -> dict[str, int] | None:
    """What goes with a recipe's kind; None after a fault."""
    out: dict[str, int] = {}
    for key in words[1:]:
        number = node.get(key)
        if isinstance(number, Scalar) and type(number.value) is int:
            out[key] = number.value
        elif number is not None:
            scope.fault(Fault("E203", f"{key} is a whole number", found=kind_of(number)), number.span)
            return None
        elif key not in OPTIONAL:
            if not hidden(node.entries, key, words):
                hint = "{split: qkv, parts: 3, part: 0}"
                scope.fault(Fault("E202", f"{kind} needs {quote(key)}", hint=hint), node.span)
            return None
    for key, low, high in (("parts", 1, 10**9), ("part", 0, out.get("parts", 1) - 1), ("start", 0, 10**9)):
        value = out.get(key, low)
        if not low <= value <= high:
            expected = f"from {low} to {high}" if key == "part" else f"{low} or more"
            fault = Fault("E209", f"{key} of {kind} is out of range", expected=expected, found=f"{value}")
            scope.fault(fault, node.get(key))
            return None
    return out


def _tensors(scope: Scope, kind: str, node: Node, indices: list[str]) -> Any:
    """The official name behind a recipe's kind, or the names where it joins several; None where they are none."""
    if kind not in SEVERAL:
        return _name(scope, node, indices)
    if not isinstance(node, Sequence) or not node.items:
        what = "an empty list" if isinstance(node, Sequence) else kind_of(node)
        scope.fault(Fault("E203", f"{kind} takes a list of official names", found=what), node.span)
        return None
    names = [_name(scope, item, indices) for item in node.items]
    return None if None in names else names


def _name(scope: Scope, node: Node, indices: list[str]) -> str | None:
    """An official name whose expressions are sound and know their indices."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        text = node.text if isinstance(node, Scalar) and node.value is not None else None
        hint = f'in quotes it is one: "{text}"' if text else None
        scope.fault(Fault("E203", "an official name is a word", found=kind_of(node), hint=hint), node.span)
        return None
    bare = _HOLE.sub(lambda hole: " " * len(hole[0]), node.value)
    if odd := re.search(r"[{}]", bare):
        fault = Fault("E501", f"{quote(node.value)} has a '{odd[0]}' without its partner", hint="blocks.{layer // 2}")
        scope.fault(fault, node.span.within(node.offset + odd.start(), 1))
        return None
    for hole in _HOLE.finditer(node.value):
        start, length = hole.start(1), len(hole[1])
        try:
            expression = parse(hole[1])
            for name, at in expression.names:
                if name not in indices:
                    raise unknown_name(name, dict.fromkeys(indices, 0), at)
        except Fault as fault:
            if isinstance(fault, NameFault):
                start, length = start + fault.offset, len(fault.name)
                if not indices:
                    fault.expected, fault.hint = "no index: the key has none", "blocks.{layer}: layers.{layer}"
            scope.fault(fault, node.span.within(node.offset + start, length))
            return None
    return node.value


# --- against the graph ----------------------------------------------------------------------------------------------


def check_map(scope: Scope, table: tuple[Entry, ...], body: Graph, open: bool) -> None:
    """Report keys that name nothing in `body`, entries that cannot apply, and axes and layouts that do not fit.

    `open`: the body could have been made otherwise (a block has arguments, or something is overridden), so that a key
    may name a parameter, a layer or a direction that this one lacks.
    """
    parted = not open and any(node.directions for node in graph.walk(body))
    patterns = {part for entry in table for part in entry.ours.split(".") if "{" in part and _HOLE.sub("", part)}
    count = sum(1 + len(node.parameters) for node in graph.walk(body)) if patterns else 0
    if len(patterns) * count > MAX_MATCHES:
        message = f"{len(patterns):,} patterns are too many for {count:,} steps and parameters"
        expected = f"at most {MAX_MATCHES // count:,}; a part that is an index alone (blocks.{{layer}}) does not count"
        scope.fault(Fault("E104", message, expected=expected), table[0].span)
        return
    names: dict[str, Any] = {}
    for item in graph.parameters(body) if parted else ():
        level = names
        for part in item.name.split("."):
            level = level.setdefault(part, {})
    top, owners = _Places([body], _inside), _Places([names], dict)
    composed: set[int] = set()
    sound = True
    for entry in table:
        places = top
        start = 0
        for part in entry.ours.split("."):
            found = places.below(part, open)
            if not found.things:
                if not (open and any(isinstance(place, graph.Node) and place.op for place in places.things)):
                    _unknown(scope, entry, part, start, places)
                    sound = False
                break
            places, start = found, start + len(part) + 1
        else:
            _check_axis(scope, entry, places)
            _check_layout(scope, entry, places)
            if (len(entry.theirs) > 1 or isinstance(entry.theirs[0], dict)) and places.mapped:
                composed.add(id(entry))
            if parted and places.shapes:
                sound &= _check_owner(scope, entry, owners)
    if sound:
        _check_use(scope, table, body, open, composed)


def _check_use(scope: Scope, table: tuple[Entry, ...], body: Graph, open: bool, composed: set[int]) -> None:
    """Report entries that longer keys of the same map leave nothing for, and recipes made of a block's own recipes.

    `composed`: the entries whose recipes or alternatives meet the map of a block.
    """
    translator = Translator()
    tree = translator.tree(table)
    if not composed and (open or not tree.overlaps()):
        return
    instead: dict[int, dict[int, Entry]] = {id(entry): {} for entry in table}  # what takes what an entry matches too
    used: set[int] = set()
    for item in graph.parameters(body):
        parts = item.name.split(".")
        found = tree.matches(parts)
        if not found:
            continue
        first = found[0]
        used.add(id(first.entry))
        for other in found[1:]:
            instead[id(other.entry)][id(first.entry)] = first.entry
        if first.length < len(parts) and id(first.entry) in composed:
            try:
                after = translator.after(body, parts, first.length)
            except Fault:  # of a block's own map, where it is reported
                continue
            try:
                first.followed_by(after)
            except Fault as fault:
                fault.found = item.name
                scope.fault(fault, first.entry.span)
    for entry in () if open else table:
        others = instead[id(entry)]
        if id(entry) not in used and others:
            what = f"{quote(entry.ours)} never applies: other keys of this map cover everything that it matches"
            notes = [Note(f"{quote(other.ours)} is here", other.span) for other in list(others.values())[:3]]
            scope.fault(Fault("E314", what, hint="remove it, or make the other keys narrower", notes=notes), entry.span)


class _Places:
    """What the keys of a map that begin alike name so far. What is below is sorted by name once, for all keys."""

    def __init__(self, things: list[Any], inside: Callable[[Any], dict[str, Any]]) -> None:
        self.things, self.inside = things, inside
        self._below: dict[str, _Places] = {}

    @cached_property
    def named(self) -> dict[str, dict[int, Any]]:
        """Steps, bodies and parameters below, by the next part of their names."""
        found: dict[str, dict[int, Any]] = {}
        for thing in self.things:
            for name, child in self.inside(thing).items():
                found.setdefault(name, {})[id(child)] = child
        return found

    @cached_property
    def layers(self) -> tuple[int, dict[int, Any]]:
        """The fewest layers of a repeat among these, and all layers of the repeats."""
        repeats = [thing for thing in self.things if isinstance(thing, graph.Node) and thing.kind == "repeat"]
        inside = {id(body): body for node in repeats for body in node.bodies.values()}
        return min((len(node.bodies) for node in repeats), default=10**9), inside

    @cached_property
    def shapes(self) -> dict[tuple[int, ...], str]:
        """The shapes of the parameters, each with the name (from here) of the first that has it."""
        found: dict[tuple[int, ...], str] = {}
        for thing in self.things:
            for name, parameter in _parameters(thing):
                found.setdefault(parameter.shape, name)
        return found

    @cached_property
    def mapped(self) -> bool:
        """Whether a block with a map of its own is here or below."""
        nodes = [thing for thing in self.things if isinstance(thing, graph.Node)]
        bodies = [thing for thing in self.things if isinstance(thing, Graph)]
        bodies += chain.from_iterable(node.bodies.values() for node in nodes)
        return any(node.checkpoint for node in chain(nodes, chain.from_iterable(map(graph.walk, bodies))))

    @cached_property
    def matrix(self) -> bool:
        """Whether one of these is a parameter with two axes."""
        return any(isinstance(thing, Parameter) and len(thing.shape) == 2 for thing in self.things)

    def below(self, part: str, open: bool = False) -> _Places:
        """What is called `part` in any of the places."""
        absent = open and part.isdecimal() and (len(part) > 9 or int(part) >= self.layers[0])
        key = "0+" if absent else _HOLE.sub("{}", part)
        if key not in self._below:
            found: dict[int, Any] = {}
            if "{" in part:
                matches = _pattern(part).fullmatch
                for name, things in self.named.items():
                    found |= things if matches(name) else {}
            else:
                found |= self.layers[1] if absent else self.named.get(part, {})
            if open and part in DIRECTIONS:
                scans = [t for t in self.things if isinstance(t, graph.Node) and t.kind == "scan"]
                found |= {id(scan): scan for scan in scans if part not in scan.directions}
            self._below[key] = _Places(list(found.values()), self.inside)
        return self._below[key]

    def words(self) -> list[str]:
        """What may stand here, for a message."""
        layers = any(isinstance(thing, graph.Node) and thing.kind == "repeat" for thing in self.things)
        return list(dict.fromkeys("{layer}" if layers and name.isdecimal() else name for name in self.named))


def _inside(place: Any) -> dict[str, Any]:
    """Steps, bodies and parameters by the next part of their names."""
    if isinstance(place, Graph):
        return {node.name: node for node in place.nodes}
    out: dict[str, Any] = {}
    if isinstance(place, graph.Node):
        out |= place.parameters
        for label, body in place.bodies.items():
            out |= {label: body} if label else _inside(body)
            out |= dict.fromkeys(place.directions, body)
    return out


def _check_owner(scope: Scope, entry: Entry, owners: _Places) -> bool:
    """Report a key that names an order of a scan where the orders share a parameter, or none where each owns it."""
    start = 0
    for part in entry.ours.split("."):
        found = owners.below(part)
        if not found.things:
            _unknown(scope, entry, part, start, owners)
            return False
        owners, start = found, start + len(part) + 1
    return True


def _unknown(scope: Scope, entry: Entry, part: str, start: int, places: _Places) -> None:
    before = entry.ours[: max(start - 1, 0)]
    message = f"there is no {quote(part)} in {before}" if before else f"there is no step {quote(part)} to map"
    bare = len(entry.ours) == entry.span.end_column - entry.span.column  # not in quotes
    span = entry.span.within(start, len(part)) if bare else entry.span
    fault = Fault(
        "E312",
        message,
        expected=lambda: f"one of {listing(places.words())}" if places.named else "nothing more",
        hint=lambda: did_you_mean(part, places.words()),
    )
    scope.fault(fault, span)


def _parameters(place: Any) -> list[tuple[str, Parameter]]:
    """The parameters of a place, by their names in it."""
    if isinstance(place, Parameter):
        return [("", place)]
    below = graph.parameters(place) if isinstance(place, Graph) else graph.node_parameters(place, "")
    return [(item.name, item.parameter) for item in below]


def _check_axis(scope: Scope, entry: Entry, places: _Places) -> None:
    """An axis is one of ours; where tensors are split, it may be one after them too. Patterns fit our shapes."""
    for theirs, node in zip(entry.theirs, entry.node, strict=True):
        if isinstance(theirs, str) or not ("axis" in theirs or "pattern" in theirs):
            continue
        for shape, name in places.shapes.items():
            fault = _misfit(graph.join(entry.ours, name), shape, theirs)
            if fault:
                scope.fault(fault, node.get(fault.at))
                return


def _misfit(name: str, shape: tuple[int, ...], theirs: dict[str, Any]) -> Fault | None:
    """Why a recipe cannot make a tensor of this shape."""
    rank = len(shape)
    what = f"{name} has {rank} ax{'i' if rank == 1 else 'e'}s: {list(shape)}"
    if "pattern" in theirs:
        try:
            rearranged(theirs["pattern"], theirs["sizes"], shape)
        except ValueError as error:
            return Fault("E209", "the pattern does not end in our shape", at="pattern", found=f"{error}; {what}")
        return None
    axis, split = theirs["axis"], "split" in theirs
    low, high = (0, rank) if split else (-rank, rank - 1)
    if low <= axis <= high:
        return None
    return Fault("E209", "there is no such axis", at="axis", expected=f"from {low} to {high}", found=f"{axis}; {what}")


def _check_layout(scope: Scope, entry: Entry, places: _Places) -> None:
    """A `kernel` of flax or Keras is [in, out] and our matrices are [out, in]: a square one would fit as it is."""
    for theirs, node in zip(entry.theirs, entry.node, strict=True):
        if places.matrix and isinstance(theirs, str) and theirs.rpartition(".")[2] == "kernel":
            what = f"{quote(theirs)} is [in, out] by its name, and {entry.ours} is [out, in]"
            hint = f"{{transpose: {theirs}}}; or {{reshape: {theirs}}}, if it is [out, in] after all"
            scope.fault(Fault("E314", what, hint=hint), node.span)


@lru_cache(maxsize=1024)
def _pattern(ours: str) -> re.Pattern[str]:
    """A key, or a part of one, with its indices as named groups."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(ours)))


# --- patterns of `rearrange` ----------------------------------------------------------------------------------------

Groups = tuple[tuple[str, ...], ...]  # axes, in the groups that are one axis of a tensor


@lru_cache(maxsize=256)
def read_pattern(text: str) -> tuple[Groups, Groups]:
    """Both sides of an einops pattern without `...`, `_` and new or lost axes. Raises Fault E209."""
    if len(text) > MAX_LENGTH:
        raise Fault("E209", "the pattern is too long", expected=f"at most {MAX_LENGTH} characters")
    sides = []
    for side in text.split("->"):
        groups: list[tuple[str, ...]] = []
        inside: list[str] | None = None
        for token in re.findall(r"[^\W\d]\w*|\S", side):
            if token == "(" and inside is None:
                inside = []
            elif token == ")" and inside is not None:
                groups.append(tuple(inside))
                inside = None
            elif token == "1" and inside is None:
                groups.append(())
            elif token.isidentifier() and token != "_":
                groups.append((token,)) if inside is None else inside.append(token)
            else:
                raise Fault("E209", f"{quote(token)} has no place in a pattern", expected="names and parentheses")
        if inside is not None:
            raise Fault("E209", "a parenthesis of the pattern is open")
        sides.append(tuple(groups))
    if len(sides) != 2:
        raise Fault("E209", "a pattern has two sides", expected='"row column -> column row"', found=quote(text))
    left, right = (sorted(chain(*side)) for side in sides)
    if left != right or len(set(left)) < len(left):
        odd = [axis for axis in dict.fromkeys((*left, *right)) if not left.count(axis) == right.count(axis) == 1]
        raise Fault("E209", "each axis is on both sides of the pattern, once", found=listing(odd))
    return sides[0], sides[1]


def rearranged(pattern: str, sizes: dict[str, int], shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, int]]:
    """The official shape that a pattern turns into ours, and the size of every axis. ValueError if there is none."""
    left, right = read_pattern(pattern)
    if len(right) != len(shape):
        raise ValueError(f"the pattern ends in {len(right)} axes")
    known: dict[str, int] = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    for group, size in zip(right, shape, strict=True):
        open_axes = [axis for axis in group if axis not in known]
        rest, over = divmod(size, math.prod(known[axis] for axis in group if axis in known))
        if len(open_axes) > 1:
            raise ValueError(f"the sizes of {listing(open_axes)} are not given")
        if over or (rest != 1 and not open_axes):
            raise ValueError(f"({' '.join(group) or 1}) is not {size}")
        known |= dict.fromkeys(open_axes, rest)
    return tuple(math.prod(known[axis] for axis in group) for group in left), known


# --- from our names to theirs ---------------------------------------------------------------------------------------


def official_name(model: Model, name: str) -> Any:
    """What a parameter of ours is in the official release: a name, or a recipe such as {concat: […]}.

    Where the map gives alternatives, the first. Raises RunError where an index has no name.
    """
    return Translator().official(model, name)[0]


class _Match(NamedTuple):
    """An entry that matches the first `length` parts of a name."""

    length: int
    fixed: tuple[bool, ...]
    entry: Entry
    values: dict[str, int]

    def followed_by(self, after: list[Any]) -> list[Any]:
        """The entry's alternatives, each followed by each of these. Raises Fault."""
        pairs = list(product(self.entry.theirs, after))
        if len(pairs) > MAX_ALTERNATIVES:
            raise Fault("E314", f"a parameter has more than {MAX_ALTERNATIVES} alternative names")
        return [_placed(theirs, self.values, rest) for theirs, rest in pairs]


class _Tree:
    """A map's entries by the parts of their keys."""

    def __init__(self) -> None:
        self.fixed: dict[str, _Tree] = {}
        self.patterns: dict[str, _Tree] = {}
        self.entry: Entry | None = None

    @classmethod
    def of(cls, table: Iterable[Entry]) -> _Tree:
        root = cls()
        for entry in table:
            at = root
            for part in entry.ours.split("."):
                at = (at.patterns if "{" in part else at.fixed).setdefault(part, cls())
            at.entry = entry
        return root

    def overlaps(self) -> bool:
        """Whether two entries may match one name."""
        below = [*self.fixed.values(), *self.patterns.values()]
        here = (self.entry and below) or (self.patterns and len(below) > 1)
        return bool(here) or any(each.overlaps() for each in below)

    def matches(self, parts: list[str]) -> list[_Match]:
        """The entries that match the beginning of a name, the one that counts first.

        That is the longest; of two, the one with a fixed part where the other has an index.
        """
        found: list[_Match] = []
        self._match(parts, 0, (), {}, found)
        return sorted(found, key=lambda match: (match.length, match.fixed, match.entry.ours), reverse=True)

    def _match(
        self, parts: list[str], at: int, fixed: tuple[bool, ...], values: dict[str, int], found: list[_Match]
    ) -> None:
        if self.entry:
            found.append(_Match(at, fixed, self.entry, values))
        if at == len(parts):
            return
        if part := self.fixed.get(parts[at]):
            part._match(parts, at + 1, (*fixed, True), values, found)
        for key, below in self.patterns.items():
            if match := _pattern(key).fullmatch(parts[at]):
                more = {index: int(text) for index, text in match.groupdict().items()}
                below._match(parts, at + 1, (*fixed, False), values | more, found)


class Translator:
    """Translates our names. Keeps what it learns of maps and bodies, so one serves all names of a model."""

    def __init__(self) -> None:
        self._trees: dict[int, _Tree] = {}
        self._nodes: dict[int, dict[str, graph.Node]] = {}

    def official(self, model: Model, name: str) -> list[Any]:
        """The alternatives for a parameter, each an official name or a recipe. Raises RunError."""
        try:
            return self._translated(model.graph, name.split("."), model.checkpoint)
        except Fault as fault:  # an expression that has no value for these indices
            raise RunError(f"the checkpoint map has no name for {name}: {fault.message}") from None

    def tree(self, table: tuple[Entry, ...]) -> _Tree:
        if id(table) not in self._trees:
            self._trees[id(table)] = _Tree.of(table)
        return self._trees[id(table)]

    def _translated(self, body: Graph, parts: list[str], table: tuple[Entry, ...]) -> list[Any]:
        found = self.tree(table).matches(parts)
        if not found:
            return self.after(body, parts, 0)
        return found[0].followed_by(self.after(body, parts, found[0].length))

    def after(self, body: Graph, parts: list[str], count: int) -> list[Any]:
        """What follows the first `count` parts of a name: as it is, up to the next block, whose map has the rest."""
        node, end = self._block(body, parts, count)
        if node is None:
            return [".".join(parts[count:])]
        inside = self._translated(node.bodies[""], parts[end:], node.checkpoint)
        return [_placed(".".join(parts[count:end]), {}, rest) for rest in inside]

    def _block(self, body: Graph, parts: list[str], count: int) -> tuple[graph.Node | None, int]:
        """The first block on a name's way whose own name ends at or after part `count`, and where it ends."""
        at = 0
        while at < len(parts):
            if id(body) not in self._nodes:
                self._nodes[id(body)] = {node.name: node for node in body.nodes}
            node = self._nodes[id(body)].get(parts[at])
            at += 1
            if node is None or not node.bodies or at == len(parts):
                return None, at
            if node.kind == "block" and at >= count:
                return node, at
            if parts[at] in node.directions:
                at += 1
            if "" in node.bodies:
                body = node.bodies[""]
            elif at < len(parts) and parts[at] in node.bodies:
                body = node.bodies[parts[at]]
                at += 1
            else:
                return None, at
        return None, at


def _placed(theirs: Any, values: dict[str, int], rest: Any) -> Any:
    """The official side with its indices filled in and the rest of the name appended. Raises Fault."""

    def fill(text: str, tail: str) -> str:
        return graph.join(_HOLE.sub(lambda m: str(parse(m[1]).evaluate(values)), text), tail)

    if isinstance(rest, dict):
        if not isinstance(theirs, str):
            raise Fault("E314", "a recipe cannot be made of the recipe that a block's own map has for a parameter")
        return {k: _each_name(k, v, lambda text: fill(theirs, text)) for k, v in rest.items()}
    if isinstance(theirs, dict):
        return {k: _each_name(k, v, lambda text: fill(text, rest)) for k, v in theirs.items()}
    return fill(theirs, rest)


def _each_name(key: str, value: Any, change: Callable[[str], str]) -> Any:
    if key not in RECIPES:
        return value
    return [change(v) for v in value] if isinstance(value, list) else change(value)

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

import re
from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import Any, NamedTuple, get_args

from seqblocks import graph
from seqblocks.analysis.scope import Scope
from seqblocks.combinators import Order
from seqblocks.errors import Fault, Note, RunError, Span, listing, quote
from seqblocks.graph import Entry, Graph, ModelSpec
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import NameFault, parse, unknown_name
from seqblocks.language.spec import is_name, known_keys
from seqblocks.language.vocabulary import did_you_mean, hidden
from seqblocks.parameters import Parameter
from seqblocks.recipes import RECIPES, FromSeveral, Name, Rearrange, Recipe, read_pattern, words_of

DIRECTIONS = tuple(map(graph.direction_name, get_args(Order)))
MAX_ALTERNATIVES = 16
MAX_MATCHES = 2_000_000  # a pattern of a key held against a name
_HOLE = re.compile(r"\{([^}]*)\}")

# --- reading --------------------------------------------------------------------------------------------------------


def read_map(scope: Scope, node: Mapping | None) -> tuple[Entry, ...]:
    """Return the entries of a map; those at fault in themselves are reported and left out."""
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
    theirs = [_alternative(scope, item, indices) for item in nodes]
    found = tuple(each for each in theirs if each is not None)
    return Entry(key, span, found, tuple(nodes)) if len(found) == len(nodes) else None


def _alternative(scope: Scope, node: Node, indices: list[str]) -> Recipe | None:
    if isinstance(node, Mapping):
        return _recipe(scope, node, indices)
    name = _name(scope, node, indices)
    return None if name is None else Name(name)


def has_sizes(table: Iterable[Entry]) -> bool:
    """Whether a map depends on the arguments of its block: the sizes of a `rearrange` may."""
    return any(isinstance(theirs, Rearrange) for entry in table for theirs in entry.theirs)


def _recipe(scope: Scope, node: Mapping, indices: list[str]) -> Recipe | None:
    kinds = [key for key in RECIPES if key in node.entries]
    if kinds == ["rearrange"]:
        return _rearrangement(scope, node, indices)
    several = (*RECIPES, *chain.from_iterable(map(words_of, RECIPES)))
    words = tuple(dict.fromkeys((kinds[0], *words_of(kinds[0])) if len(kinds) == 1 else several))
    _check_words(scope, node, words)
    if len(kinds) != 1:
        if all(key in words for key in node.entries):
            fault = Fault("E210" if kinds else "E202", "a recipe is of one kind", expected=f"one of {listing(RECIPES)}")
            scope.fault(fault, node.span)
        return None
    tensors = _tensors(scope, kinds[0], node.entries[kinds[0]][1], indices)
    numbers = _numbers(scope, kinds[0], node, words)
    return None if tensors is None or numbers is None else RECIPES[kinds[0]](tensors, **numbers)


def _check_words(scope: Scope, node: Mapping, words: tuple[str, ...]) -> None:
    """Report keys that do not go with a recipe's kind."""
    if len(words) > 1:
        known_keys(scope.report, node, words, "a checkpoint map's recipe")
        return
    alone = f"{words[0]} alone; what it makes has the shape of our parameter"
    for key, span, _ in node:
        if key not in words:
            scope.fault(Fault("E201", f"{words[0]} takes no {quote(key)}", expected=alone), span)


def _rearrangement(scope: Scope, node: Mapping, indices: list[str]) -> Rearrange | None:
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
    known_keys(scope.report, node, ("rearrange", "pattern", *sorted(axes)), "a checkpoint map's recipe")
    sizes = {key: _size(scope, key, value) for key, _, value in node if key in axes}
    return None if name is None else Rearrange(name, pattern.value, sizes)


def _size(scope: Scope, axis: str, node: Node) -> Any:
    size = scope.number(node, whole=True)
    if isinstance(size, int) and size < 1:
        scope.fault(Fault("E209", f"the size of {axis} is out of range", expected="1 or more"), node)
    return size


def _numbers(scope: Scope, kind: str, node: Mapping, words: tuple[str, ...]) -> dict[str, int] | None:
    """The numbers that go with a recipe's kind; None after a fault."""
    out: dict[str, int] = {}
    for key, required in words_of(kind).items():
        number = node.get(key)
        if isinstance(number, Scalar) and type(number.value) is int:
            out[key] = number.value
        elif number is not None:
            scope.fault(Fault("E203", f"{key} is a whole number", found=kind_of(number)), number.span)
            return None
        elif required:
            if not hidden(node.entries, key, words):
                hint = "{split: qkv, parts: 3, part: 0}"
                scope.fault(Fault("E202", f"{kind} needs {quote(key)}", hint=hint), node.span)
            return None
    return out if _in_range(scope, kind, node, out) else None


def _in_range(scope: Scope, kind: str, node: Mapping, numbers: dict[str, int]) -> bool:
    for key, low, high in (("parts", 1, 10**9), ("part", 0, numbers.get("parts", 1) - 1), ("start", 0, 10**9)):
        value = numbers.get(key, low)
        if not low <= value <= high:
            expected = f"from {low} to {high}" if key == "part" else f"{low} or more"
            fault = Fault("E209", f"{key} of {kind} is out of range", expected=expected, found=f"{value}")
            scope.fault(fault, node.get(key))
            return False
    return True


def _tensors(scope: Scope, kind: str, node: Node, indices: list[str]) -> Any:
    """The official name of a recipe, or the names where it joins several; None after a fault."""
    if not issubclass(RECIPES[kind], FromSeveral):
        return _name(scope, node, indices)
    if not isinstance(node, Sequence) or not node.items:
        what = "an empty list" if isinstance(node, Sequence) else kind_of(node)
        scope.fault(Fault("E203", f"{kind} takes a list of official names", found=what), node.span)
        return None
    names = [_name(scope, item, indices) for item in node.items]
    return None if None in names else tuple(names)


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
            if (len(entry.theirs) > 1 or not isinstance(entry.theirs[0], Name)) and places.mapped:
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
    """Report a recipe that cannot make a tensor of one of our shapes."""
    for theirs, node in zip(entry.theirs, entry.node, strict=True):
        for shape, name in () if isinstance(theirs, Name) else places.shapes.items():
            if fault := theirs.misfit(graph.join(entry.ours, name), shape):
                scope.fault(fault, node.get(fault.at))
                return


def _check_layout(scope: Scope, entry: Entry, places: _Places) -> None:
    """A `kernel` of flax or Keras is [in, out] and our matrices are [out, in]: a square one would fit as it is."""
    for theirs, node in zip(entry.theirs, entry.node, strict=True):
        if places.matrix and isinstance(theirs, Name) and theirs.official.rpartition(".")[2] == "kernel":
            what = f"{quote(theirs.official)} is [in, out] by its name, and {entry.ours} is [out, in]"
            hint = f"{{transpose: {theirs.official}}}; or {{reshape: {theirs.official}}}, if it is [out, in] after all"
            scope.fault(Fault("E314", what, hint=hint), node.span)


@lru_cache(maxsize=1024)
def _pattern(ours: str) -> re.Pattern[str]:
    """A key, or a part of one, with its indices as named groups."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(ours)))


# --- from our names to theirs ---------------------------------------------------------------------------------------


def official_name(model: ModelSpec, name: str) -> Any:
    """What a parameter of ours is in the official release: a name, or a recipe such as {concat: […]}.

    Where the map gives alternatives, the first. Raises RunError where an index has no name.
    """
    return Translator().official(model, name)[0].as_data()


class _Match(NamedTuple):
    """An entry that matches the first `length` parts of a name."""

    length: int
    fixed: tuple[bool, ...]
    entry: Entry
    values: dict[str, int]

    def followed_by(self, after: list[Recipe]) -> list[Recipe]:
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

    def official(self, model: ModelSpec, name: str) -> list[Recipe]:
        """The alternatives for a parameter. Raises RunError."""
        try:
            return self._translated(model.graph, name.split("."), model.checkpoint)
        except Fault as fault:  # an expression that has no value for these indices
            raise RunError(f"the checkpoint map has no name for {name}: {fault.message}") from None

    def tree(self, table: tuple[Entry, ...]) -> _Tree:
        if id(table) not in self._trees:
            self._trees[id(table)] = _Tree.of(table)
        return self._trees[id(table)]

    def _translated(self, body: Graph, parts: list[str], table: tuple[Entry, ...]) -> list[Recipe]:
        found = self.tree(table).matches(parts)
        if not found:
            return self.after(body, parts, 0)
        return found[0].followed_by(self.after(body, parts, found[0].length))

    def after(self, body: Graph, parts: list[str], count: int) -> list[Recipe]:
        """What follows the first `count` parts of a name: as it is, up to the next block, whose map has the rest."""
        node, end = self._block(body, parts, count)
        if node is None:
            return [Name(".".join(parts[count:]))]
        inside = self._translated(node.bodies[""], parts[end:], node.checkpoint)
        return [_placed(Name(".".join(parts[count:end])), {}, rest) for rest in inside]

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


def _placed(theirs: Recipe, values: dict[str, int], rest: Recipe) -> Recipe:
    """The official side with its indices filled in and the rest of the name appended. Raises Fault."""

    def fill(text: str, tail: str) -> str:
        return graph.join(_HOLE.sub(lambda m: str(parse(m[1]).evaluate(values)), text), tail)

    if isinstance(rest, Name):
        return theirs.renamed(lambda text: fill(text, rest.official))
    if not isinstance(theirs, Name):
        raise Fault("E314", "a recipe cannot be made of the recipe that a block's own map has for a parameter")
    return rest.renamed(lambda text: fill(theirs.official, text))

"""`checkpoint:` maps: read, held against the graph, and followed from a name of ours to the official one.

A map's keys are names of ours (a parameter, or the namespace of a step: then everything below it), its values the
official names. `{layer}` in a key matches an index; in a value it stands in an expression: `blocks.{layer // 2}`.
A block's map covers the names inside it, so a model only maps where its blocks stand.

    head: classifier                             rename
    qkv.weight: {concat: [q, k, v], axis: 0}     official tensors joined (or `stack`ed) into ours
    q.weight: {split: qkv, parts: 3, part: 0}    one of several equal parts that an official tensor joins or stacks,
                                                 or holds flat; `axis: 1`: parts of each of its rows
    q.weight: {slice: qkvo, start: 0}            as much of an official tensor as ours holds, from there on its axis 0
    w: {transpose: v}                            last two axes swapped; the last of ours may be one there
    w: {reshape: v}                              the same numbers in our shape
    A_real: {real: A}, A_imag: {imag: A}         one part of a complex tensor
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from typing import Any, get_args

from seqblocks import graph
from seqblocks.analysis.combinators import Order
from seqblocks.analysis.scope import Scope
from seqblocks.errors import Fault, Note, RunError, Span, did_you_mean, hidden, listing, quote
from seqblocks.graph import Entry, Graph, Model
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import NameFault, parse, unknown_name
from seqblocks.language.spec import is_name, known_keys
from seqblocks.parameters import Parameter

RECIPES: dict[str, tuple[str, ...]] = {  # and what goes with each
    "concat": ("axis",), "stack": ("axis",), "split": ("parts", "part", "axis"), "slice": ("start", "axis"),
    "transpose": (), "reshape": (), "real": (), "imag": (),
}  # fmt: skip
OPTIONAL = ("axis", "start")
SEVERAL = ("concat", "stack")
ORDERS = get_args(Order)
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
    if isinstance(node, Mapping):
        recipe = _recipe(scope, node, indices)
        return Entry(key, span, recipe, node) if recipe else None
    name = _name(scope, node, indices)
    return Entry(key, span, name, node) if name is not None else None


def _recipe(scope: Scope, node: Mapping, indices: list[str]) -> dict[str, Any] | None:
    kinds = [key for key in RECIPES if key in node.entries]
    words = (kinds[0], *RECIPES[kinds[0]]) if len(kinds) == 1 else (*RECIPES, *chain(*RECIPES.values()))
    words = tuple(dict.fromkeys(words))
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


def check_map(scope: Scope, table: Iterable[Entry], body: Graph, open: bool) -> None:
    """Tell of keys that name nothing in `body`, and of axes that the parameters they name do not have.

    `open`: the body could have been made otherwise (a block has arguments, or something is overridden), so that a key
    may name a parameter, a layer or a direction that this one lacks.
    """
    parted = not open and any(node.directions for node in graph.walk(body))
    names = [item.name.split(".") for item in graph.parameters(body)] if parted else []
    for entry in table:
        places: list[Any] = [body]
        start = 0
        for part in entry.ours.split("."):
            found = _below(places, part, open)
            if not found:
                if not (open and any(isinstance(place, graph.Node) and place.op for place in places)):
                    _unknown(scope, entry, part, start, _names(places))
                break
            places, start = found, start + len(part) + 1
        else:
            _check_axis(scope, entry, places)
            if parted and any(_parameters(place) for place in places):
                _check_owner(scope, entry, names)


def _below(places: list[Any], part: str, open: bool) -> list[Any]:
    """What is called `part` in any of the places."""
    matches = _pattern(part).fullmatch if "{" in part else None
    found: dict[int, Any] = {}
    for place in places:
        inside = _inside(place)
        if matches:
            here = [thing for name, thing in inside.items() if matches(name)]
        else:
            here = [inside[part]] if part in inside else []
        kind = place.kind if isinstance(place, graph.Node) else None
        if open and not here and kind == "repeat" and part.isdecimal():
            here = list(inside.values())
        if open and not here and kind == "scan" and part in ORDERS:
            here = [place]
        found |= {id(thing): thing for thing in here}
    return list(found.values())


def _names(places: list[Any]) -> list[str]:
    """What there is in any of the places."""
    names: dict[str, None] = {}
    for place in places:
        layers = isinstance(place, graph.Node) and place.kind == "repeat"
        names |= dict.fromkeys("{layer}" if layers and name.isdecimal() else name for name in _inside(place))
    return list(names)


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


def _check_owner(scope: Scope, entry: Entry, names: list[list[str]]) -> None:
    """Tell of a key that names an order of a scan where the orders share a parameter, or none where each owns it."""
    start = 0
    for at, part in enumerate(entry.ours.split(".")):
        known = [name for name in names if len(name) > at]
        names = [name for name in known if _pattern(part).fullmatch(name[at])]
        if not names:
            _unknown(scope, entry, part, start, list(dict.fromkeys(name[at] for name in known)))
            return
        start += len(part) + 1


def _unknown(scope: Scope, entry: Entry, part: str, start: int, names: list[str]) -> None:
    before = entry.ours[: max(start - 1, 0)]
    message = f"there is no {quote(part)} in {before}" if before else f"there is no step {quote(part)} to map"
    expected = f"one of {listing(names)}" if names else "nothing more"
    bare = len(entry.ours) == entry.span.end_column - entry.span.column  # not in quotes
    span = entry.span.within(start, len(part)) if bare else entry.span
    scope.fault(Fault("E312", message, expected=expected, hint=lambda: did_you_mean(part, names)), span)


def _parameters(place: Any) -> list[tuple[str, Parameter]]:
    """The parameters of a place, by their names in it."""
    if isinstance(place, Parameter):
        return [("", place)]
    below = graph.parameters(place) if isinstance(place, Graph) else graph.node_parameters(place, "")
    return [(item.name, item.parameter) for item in below]


def _check_axis(scope: Scope, entry: Entry, places: list[Any]) -> None:
    """An axis is one of ours; where tensors are split, it may be one behind them too."""
    if isinstance(entry.theirs, str) or "axis" not in entry.theirs:
        return
    axis, split = entry.theirs["axis"], "split" in entry.theirs
    assert isinstance(entry.node, Mapping)
    for place in places:
        for below, parameter in _parameters(place):
            name = graph.join(entry.ours, below)
            rank = len(parameter.shape)
            low, high = (0, rank) if split else (-rank, rank - 1)
            if not low <= axis <= high:
                expected = f"from {low} to {high}"
                what = f"{name} has {rank} ax{'i' if rank == 1 else 'e'}s: {list(parameter.shape)}"
                fault = Fault("E209", "there is no such axis", expected=expected, found=f"{axis}; {what}")
                scope.fault(fault, entry.node.get("axis"))
                return


@lru_cache(maxsize=1024)
def _pattern(ours: str) -> re.Pattern[str]:
    """A key, or a part of one, with its indices as named groups."""
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[0-9]+)", re.escape(ours)))


# --- from our names to theirs ---------------------------------------------------------------------------------------


def official_name(model: Model, name: str) -> Any:
    """What a parameter of ours is in the official release: a name, or a recipe such as {concat: […]}."""
    return _translated(model.graph, name, model.checkpoint)


def _translated(body: Graph, name: str, table: tuple[Entry, ...]) -> Any:
    ours, theirs, values = _matching(name, table)
    rest = name[len(ours) :].lstrip(".") if ours else name
    inner = _block_at(body, ours) if ours else None
    if rest and inner is not None and inner.checkpoint:
        rest = _translated(inner.bodies[""], rest, inner.checkpoint)
    if not ours:
        return rest
    try:
        return _placed(theirs, values, rest)
    except Fault as fault:  # an expression that has no value for these indices
        raise RunError(f"the checkpoint map has no name for {name}: {fault.message}") from None


def _matching(name: str, table: tuple[Entry, ...]) -> tuple[str, Any, dict[str, int]]:
    """The longest entry that is a prefix of `name`: the matched part, the official side, the indices.

    Of two, the one with a fixed part where the other has an index; the order of the entries decides nothing.
    """
    best: tuple[str, Any, dict[str, int]] = ("", None, {})
    rank: tuple[Any, ...] = (0,)
    for entry in table:
        match = _pattern(entry.ours).match(name)
        if match and name[match.end() :][:1] in ("", "."):
            own = (match.end(), ["{" not in part for part in entry.ours.split(".")], entry.ours)
            if own > rank:
                best, rank = (match[0], entry.theirs, {k: int(v) for k, v in match.groupdict().items()}), own
    return best


def _block_at(body: Graph, path: str) -> graph.Node | None:
    """The block whose namespace is `path`, if that is one."""
    for node in body.nodes:
        for label, inner in node.bodies.items():
            prefix = graph.join(node.name, label)
            if prefix == path:
                return node if node.kind == "block" else None
            if path.startswith(prefix + "."):
                rest = path[len(prefix) + 1 :]
                order, _, below = rest.partition(".")
                return _block_at(inner, below if node.owned and order in node.directions else rest)
    return None


def _placed(theirs: Any, values: dict[str, int], rest: Any) -> Any:
    """The official side with its indices filled in and the rest of the name appended."""

    def fill(text: str, tail: str) -> str:
        return graph.join(_HOLE.sub(lambda m: str(parse(m[1]).evaluate(values)), text), tail)

    if isinstance(rest, dict):
        if not isinstance(theirs, str):
            raise RunError("a checkpoint map cannot build one tensor out of another's parts")
        return {k: _each_name(k, v, lambda text: fill(theirs, text)) for k, v in rest.items()}
    if isinstance(theirs, dict):
        return {k: _each_name(k, v, lambda text: fill(text, rest)) for k, v in theirs.items()}
    return fill(theirs, rest)


def _each_name(key: str, value: Any, change: Callable[[str], str]) -> Any:
    if key not in RECIPES:
        return value
    return [change(v) for v in value] if isinstance(value, list) else change(value)

"""Read `checkpoint:` maps, which translate our parameter names to official ones.

The keys of a map are our names (of a parameter, or of a namespace with everything below it), its values are official
names. `{layer}` in a key matches an index; the value may use it in an expression: `blocks.{layer // 2}`. A list of
values gives alternatives for releases with different layouts: the first one found in a file is read.

The map of a block covers the names inside the block, wherever the block is used. The longest matching key of the
enclosing map translates the part of a name that it matches; the rest is translated by the maps of the blocks on the
path. If a key of the enclosing map reaches into a block, it takes precedence over the map of the block.

    head: classifier                             rename
    embed: [wte, backbone.embeddings]            alternatives
    qkv.weight: {concat: [q, k, v], axis: 0}     official tensors joined (or `stack`ed) into ours
    q.weight: {split: qkv, parts: 3, part: 0}    one of several equal parts of an official tensor, which is joined,
                                                 stacked or flat; `axis: 1`: parts of each row
    q.weight: {slice: qkvo, start: 0}            a range of axis 0 of an official tensor, as long as ours
    v.weight: {cut: [q, k, v], start: 8, sizes: [6, 6, 12]}   a range of several joined tensors of these sizes
    w: {transpose: v}                            last two axes swapped; our last axes may be one official axis
    w: {reshape: v}                              the same elements in our shape
    w: {rearrange: v, pattern: "(head part d) gate -> gate (part head d)", head: heads, part: 3}
                                                 axes split, permuted and joined, in einops' notation
    w: {rearrange: v, pattern: "expert column row -> expert row column", expert: 8, index: 3}
                                                 the same, then one part along the first axis of the right side
    q.weight: {slice: qkv, start: 0, groups: heads}   a range of each head, if the rows are grouped by head
    A_real: {real: A}, A_imag: {imag: A}         one part of a complex tensor
    network.swiglu: {layout: swiglu, at: mlp}    the entries of a map that has a name, see named.py

Numbers may be expressions over the block's arguments. `shape: [...]` (split, transpose, reshape) is the shape of the
official tensor, and `sizes: [...]` (concat) are the sizes of the parts. They are needed for writing if our shape does
not imply them.

`layouts:` defines further layouts by their differences; the map itself is the layout `official`.

    embed: backbone.embedding
    layouts: {hub: {embed: backbone.embeddings}}
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from seqblocks.analysis.checkpoint_maps.named import NAMED
from seqblocks.analysis.checkpoint_maps.translation import HOLE, LAYOUTS, MAX_ALTERNATIVES, OFFICIAL
from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.values import number
from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.graph import Entry, join
from seqblocks.language.document import Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.expressions import NameFault, parse
from seqblocks.language.keys import is_name, known_keys, required
from seqblocks.patterns import read_pattern
from seqblocks.recipes import LISTS, RECIPES, FromSeveral, Name, Rearrange, Recipe, words_of
from seqblocks.suggestions import did_you_mean


def read_map(ctx: Context, node: Mapping | None) -> tuple[Entry, ...]:
    """Return the entries of a map; invalid ones are reported and skipped."""
    entries = _entries(ctx, node, "")
    layouts = node.get(LAYOUTS) if node else None
    if isinstance(layouts, Mapping) and len(layouts.entries) > MAX_ALTERNATIVES:
        ctx.report(Fault("E104", "a map has too many layouts", expected=f"at most {MAX_ALTERNATIVES}"), layouts.span)
        return tuple(entries)
    for layout, span, inside in layouts if isinstance(layouts, Mapping) else ():
        if layout == OFFICIAL:
            fault = Fault("E210", f"the map itself is the layout {quote(OFFICIAL)}", hint="move its keys there")
            ctx.report(fault, span)
        elif is_name(ctx.run.report, layout, span) and isinstance(inside, Mapping):
            entries += _entries(ctx, inside, layout)
        elif not isinstance(inside, Mapping):
            hint = f"layouts: {{{layout}: {{embed: backbone.embeddings}}}}"
            fault = Fault("E203", "a layout must be a mapping", found=kind_of(inside), hint=hint)
            ctx.report(fault, inside.span)
    return tuple(entries)


def _entries(ctx: Context, node: Mapping | None, layout: str) -> list[Entry]:
    """Return the entries of one layout: those of the map itself, or those below the name of the layout."""
    own = ((key, span, value) for key, span, value in node or () if not _has_layouts(key, value, layout))
    entries: dict[str, Entry] = {}
    for entry in chain.from_iterable(_read(ctx, *each, layout) for each in own):
        first = entries.setdefault(HOLE.sub("{}", entry.ours), entry)
        if first is not entry:
            both = f"{quote(first.ours)} and {quote(entry.ours)}"
            message, hint = f"{both} are the same key: the name of an index does not matter", None
            if first.ours == entry.ours:  # YAML has no key twice
                message = f"there are two entries for {quote(entry.ours)}, which is part of a map with a name"
                hint = "remove the entry, or write those of the map with a name one by one"
            notes = [Note("the first one is here", first.span)]
            ctx.report(Fault("E210", message, notes=notes, hint=hint), entry.span)
    return list(entries.values())


def _has_layouts(key: str, value: Node, layout: str) -> bool:
    return key == LAYOUTS and isinstance(value, Mapping) and not layout


def _read(ctx: Context, key: str, span: Span, node: Node, layout: str) -> list[Entry]:
    """Return the entry of a key, or those of the named map that stands for it; none after a fault."""
    if not isinstance(node, Mapping) or "layout" not in node.entries:
        entry = _entry(ctx, key, span, node, layout)
        return [] if entry is None else [entry]
    known_keys(ctx.run.report, node, ("layout", "at"), "a named layout")
    name, at = node.entries["layout"][1], node.get("at")
    if not isinstance(name, Scalar) or name.text not in NAMED:
        found = quote(name.text) if isinstance(name, Scalar) else kind_of(name)
        hint = did_you_mean(name.text, NAMED) if isinstance(name, Scalar) else None
        message, expected = "there is no layout of this name", f"one of {listing(NAMED)}"
        fault = Fault("E208", message, expected=expected, found=found, hint=hint)
        ctx.report(fault, name.span)
        return []
    prefix = _entry(ctx, key, span, name if at is None else at, layout)
    if prefix is None:
        return []
    starts = [each for each in prefix.theirs if isinstance(each, Name)] if at is not None else [Name("")]
    if at is not None and len(starts) < len(prefix.theirs):
        recipe = next(item for item, each in zip(prefix.node, prefix.theirs, strict=True) if not isinstance(each, Name))
        ctx.report(Fault("E203", "`at` is an official name", found=kind_of(recipe)), recipe.span)
        return []
    names = {
        ours: tuple(Name(join(start.official, theirs)) for start in starts) for ours, theirs in NAMED[name.text].items()
    }
    return [
        prefix._replace(ours=f"{key}.{ours}", theirs=theirs, optional=number > 0)
        for number, (ours, theirs) in enumerate(names.items())
    ]


def _entry(ctx: Context, key: str, span: Span, node: Node, layout: str) -> Entry | None:
    indices = HOLE.findall(key)
    if not all(is_name(ctx.run.report, index, span) for index in indices):
        return None
    if len(set(indices)) < len(indices):
        ctx.report(Fault("E210", f"{quote(key)} has the same index twice"), span)
        return None
    nodes = node.items if isinstance(node, Sequence) else [node]
    if not 0 < len(nodes) <= MAX_ALTERNATIVES:
        message = f"a list of alternatives must have 1 to {MAX_ALTERNATIVES} official names"
        ctx.report(Fault("E203", message, found=str(len(nodes))), node.span)
        return None
    theirs = [_alternative(ctx, item, indices) for item in nodes]
    found = tuple(each for each in theirs if each is not None)
    return Entry(key, span, found, tuple(nodes), layout) if len(found) == len(nodes) else None


def _alternative(ctx: Context, node: Node, indices: list[str]) -> Recipe | None:
    if isinstance(node, Mapping):
        return _recipe(ctx, node, indices)
    name = _name(ctx, node, indices)
    return None if name is None else Name(name)


def has_sizes(table: Iterable[Entry]) -> bool:
    """Return whether a map depends on the arguments of its block, through numbers in its recipes."""
    return any(isinstance(node, Mapping) and _has_expressions(node) for entry in table for node in entry.node)


def _has_expressions(node: Mapping) -> bool:
    values = (value for key, _, value in node if key not in (*RECIPES, "pattern"))
    flat = chain.from_iterable(value.items if isinstance(value, Sequence) else [value] for value in values)
    return any(isinstance(value, Scalar) and isinstance(value.value, str) for value in flat)


def _recipe(ctx: Context, node: Mapping, indices: list[str]) -> Recipe | None:
    kinds = [key for key in RECIPES if key in node.entries]
    if kinds == ["rearrange"]:
        return _rearrangement(ctx, node, indices)
    several = (*RECIPES, *chain.from_iterable(map(words_of, RECIPES)))
    words = tuple(dict.fromkeys((kinds[0], *words_of(kinds[0])) if len(kinds) == 1 else several))
    _check_words(ctx, node, words)
    if len(kinds) != 1:
        if not node.incomplete:
            message = "a recipe must have exactly one kind"
            ctx.report(Fault("E210" if kinds else "E202", message, expected=f"one of {listing(RECIPES)}"), node.span)
        return None
    tensors = _tensors(ctx, kinds[0], node.entries[kinds[0]][1], indices)
    numbers = _numbers(ctx, kinds[0], node)
    return None if tensors is None or numbers is None else RECIPES[kinds[0]](tensors, **numbers)


def _check_words(ctx: Context, node: Mapping, words: tuple[str, ...]) -> None:
    """Report keys that a recipe's kind does not take; they make it incomplete."""
    if len(words) > 1:
        known_keys(ctx.run.report, node, words, "a checkpoint map's recipe")
        return
    for key, span, _ in node:
        if key not in words:
            expected = f"only {words[0]}; the result has the shape of our parameter"
            ctx.report(Fault("E201", f"{words[0]} does not take {quote(key)}", expected=expected), span)
            node.incomplete = True


def _rearrangement(ctx: Context, node: Mapping, indices: list[str]) -> Rearrange | None:
    """Read {rearrange: name, pattern: "(a b) c -> c (b a)", a: 4}; the sizes may be expressions."""
    name = _name(ctx, node.entries["rearrange"][1], indices)
    pattern = node.get("pattern")
    if pattern is None:
        known_keys(ctx.run.report, node, ("rearrange", "pattern"), "a checkpoint map's recipe")
        hint = 'pattern: "(head part d) gate -> gate (part head d)"'
        required(ctx.report, node, "pattern", Fault("E202", "rearrange needs 'pattern'", hint=hint), node.span)
        return None
    try:
        if not isinstance(pattern, Scalar) or not isinstance(pattern.value, str):
            raise Fault("E203", "a pattern must be text", found=kind_of(pattern), hint='"row column -> column row"')
        axes = {axis for group in read_pattern(pattern.value)[0] for axis in group}
    except Fault as fault:
        ctx.report(fault, pattern.span)
        return None
    keys = ("rearrange", "pattern", "index", *sorted(axes - {"index"}))
    known_keys(ctx.run.report, node, keys, "a checkpoint map's recipe")
    sizes = {key: _size(ctx, key, value) for key, _, value in node if key in axes}
    given = None if "index" in axes else node.get("index")  # an axis of that name has a size
    index = None if given is None else number(ctx, given, whole=True)
    if isinstance(index, int) and index < 0:
        message = "'index' of rearrange is out of range"
        ctx.report(Fault("E209", message, expected="0 or more", found=f"{index}"), given)
        return None
    return None if name is None else Rearrange(name, pattern.value, sizes, index)


def _size(ctx: Context, axis: str, node: Node) -> Any:
    size = number(ctx, node, whole=True)
    if isinstance(size, int) and size < 1:
        ctx.report(Fault("E209", f"the size of {axis} is out of range", expected="1 or more", found=f"{size}"), node)
    return size


def _numbers(ctx: Context, kind: str, node: Mapping) -> dict[str, Any] | None:
    """Return the numbers of a recipe, or None after a fault or if one is UNKNOWN."""
    out: dict[str, Any] = {}
    for key, needed in words_of(kind).items():
        value = node.get(key)
        if value is not None:
            out[key] = _list(ctx, key, value) if key in LISTS else _whole(ctx, key, value)
            if out[key] is None:
                return None
        elif needed:
            if not node.incomplete:
                examples = {"split": "{split: qkv, parts: 3, part: 0}", "cut": "{cut: [q, k], start: 4, sizes: [6, 6]}"}
                ctx.report(Fault("E202", f"{kind} needs {quote(key)}", hint=examples[kind]), node.span)
            return None
    return out if _in_range(ctx, kind, node, out) else None


def _whole(ctx: Context, key: str, node: Node) -> int | None:
    if not isinstance(node, Scalar) or isinstance(node.value, bool) or not isinstance(node.value, int | str):
        ctx.report(Fault("E203", f"{key} must be a whole number", found=kind_of(node)), node.span)
        return None
    value = number(ctx, node, whole=True)
    return value if isinstance(value, int) else None


def _list(ctx: Context, key: str, node: Node) -> tuple[int, ...] | None:
    if not isinstance(node, Sequence) or not node.items:
        fault = Fault("E203", f"{key} must be a list of whole numbers", found=kind_of(node), hint=f"{key}: [768, 64]")
        ctx.report(fault, node.span)
        return None
    values = [_whole(ctx, key, item) for item in node.items]
    for item, value in zip(node.items, values, strict=True):
        if value is not None and value < 1:
            ctx.report(Fault("E209", f"a size in {key} is out of range", expected="1 or more", found=f"{value}"), item)
            return None
    return None if None in values else tuple(filter(None, values))


def _in_range(ctx: Context, kind: str, node: Mapping, numbers: dict[str, Any]) -> bool:
    last = numbers.get("parts", 1) - 1
    for key, low, high in (("parts", 1, 10**9), ("part", 0, last), ("start", 0, 10**9), ("groups", 1, 10**9)):
        value = numbers.get(key, low)
        if not low <= value <= high:
            expected = f"from {low} to {high}" if key == "part" else f"{low} or more"
            fault = Fault("E209", f"{quote(key)} of {kind} is out of range", expected=expected, found=f"{value}")
            ctx.report(fault, node.get(key))
            return False
    return True


def _tensors(ctx: Context, kind: str, node: Node, indices: list[str]) -> Any:
    """Return the official name of a recipe, or the names if it joins several; None after a fault."""
    if not issubclass(RECIPES[kind], FromSeveral):
        return _name(ctx, node, indices)
    if not isinstance(node, Sequence) or not node.items:
        what = "an empty list" if isinstance(node, Sequence) else kind_of(node)
        ctx.report(Fault("E203", f"{kind} takes a list of official names", found=what), node.span)
        return None
    names = [_name(ctx, item, indices) for item in node.items]
    return None if None in names else tuple(names)


def _name(ctx: Context, node: Node, indices: list[str]) -> str | None:
    """Return an official name, or None after a fault in it or its expressions."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        text = node.text if isinstance(node, Scalar) and node.value is not None else None
        hint = f'quote it: "{text}"' if text else None
        ctx.report(Fault("E203", "an official name must be a word", found=kind_of(node), hint=hint), node.span)
        return None
    bare = HOLE.sub(lambda hole: " " * len(hole[0]), node.value)
    if (odd := next((at for at, character in enumerate(bare) if character in "{}"), None)) is not None:
        message = f"{quote(node.value)} has an unmatched '{bare[odd]}'"
        ctx.report(Fault("E501", message, hint="blocks.{layer // 2}"), node.part(odd, 1))
        return None
    for hole in HOLE.finditer(node.value):
        start, length = hole.start(1), len(hole[1])
        try:
            parse(hole[1]).check_names(dict.fromkeys(indices, 0))
        except Fault as fault:
            if isinstance(fault, NameFault):
                start, length = start + fault.offset, len(fault.name)
                if not indices:
                    fault.expected, fault.hint = "no index, since the key has none", "blocks.{layer}: layers.{layer}"
            ctx.report(fault, node.part(start, length))
            return None
    return node.value

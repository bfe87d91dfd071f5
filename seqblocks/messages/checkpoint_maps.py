"""Faults of checkpoint maps: keys, layouts, official names; those of recipes are in `recipes.py`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages.suggestions import did_you_mean, is_renamed

MAX_SHADOWING = 3  # number of keys listed in a message

# ------------------------------------------------------------------------------
# Layouts


def too_many_layouts(most: int) -> Fault:
    return Fault("E104", "a map has too many layouts", expected=f"at most {most}")


def layout_of_the_map(name: str) -> Fault:
    return Fault("E210", f"the map itself is the layout {quote(name)}", hint="move its keys there")


def not_a_layout(layout: str, found: str) -> Fault:
    hint = f"layouts: {{{layout}: {{embed: backbone.embeddings}}}}"
    return Fault("E203", "a layout must be a mapping", found=found, hint=hint)


# ------------------------------------------------------------------------------
# Keys


def same_key(first: str, second: str, span: Span) -> Fault:
    """span: of the first."""
    message = f"{quote(first)} and {quote(second)} are the same key: the name of an index does not matter"
    return Fault("E210", message, notes=[Note("the first one is here", span)])


def same_index_twice(key: str) -> Fault:
    return Fault("E210", f"{quote(key)} has the same index twice")


def too_many_patterns(patterns: int, names: int, most: int) -> Fault:
    """names: the number of steps and parameters; most: the number of comparisons."""
    message = f"{patterns:,} patterns are too many for {names:,} steps and parameters"
    expected = f"at most {most // names:,}, not counting parts that are a single index (blocks.{{layer}})"
    return Fault("E104", message, expected=expected)


def matches_nothing(
    part: str, before: str, words: Callable[[], Sequence[str]], renamed: Callable[[], Sequence[str]], ends: bool
) -> Fault:
    """Describe a part of a key that matches no step or parameter.

    before: the part of the key that matches. words: returns what the next part may be; ends: whether there is nothing.
    renamed: returns the names of the steps there whose verb is `part`.
    """

    def hint() -> str | None:
        names = renamed()
        return is_renamed(part, names) if names else did_you_mean(part, words())

    message = f"there is no {quote(part)} in {before}" if before else f"there is no step {quote(part)} to map"
    expected = "nothing more" if ends else lambda: f"one of {listing(words())}"
    return Fault("E312", message, expected=expected, hint=hint)


def never_applies(key: str, others: Iterable[tuple[str, Span]]) -> Fault:
    """others: the keys of the same map that match instead, and their places."""
    message = f"{quote(key)} never applies: other keys of this map match everything that it matches"
    notes = [Note(f"{quote(other)} is here", span) for other, span in list(others)[:MAX_SHADOWING]]
    return Fault("E314", message, hint="remove it, or make the other keys more specific", notes=notes)


# ------------------------------------------------------------------------------
# Official names


def number_of_alternatives(found: int, most: int) -> Fault:
    return Fault("E203", f"a list of alternatives must have 1 to {most} official names", found=str(found))


def too_many_alternatives(most: int) -> Fault:
    return Fault("E314", f"a parameter has more than {most} alternative names")


def not_an_official_name(found: str, text: str | None) -> Fault:
    """text: as written, if quotes make it a name."""
    hint = f'quote it: "{text}"' if text else None
    return Fault("E203", "an official name must be a word", found=found, hint=hint)


def unmatched_brace(name: str, brace: str) -> Fault:
    return Fault("E501", f"{quote(name)} has an unmatched '{brace}'", hint="blocks.{layer // 2}")


def key_without_index(fault: Fault) -> Fault:
    """Change the fault of an unknown index in an official name whose key has no index."""
    fault.expected, fault.hint = "no index, since the key has none", "blocks.{layer}: layers.{layer}"
    return fault


def not_transposed(official: str, ours: str) -> Fault:
    """Describe a `kernel` of flax or Keras."""
    message = f"{quote(official)} is [in, out] by its name, and {ours} is [out, in]"
    hint = f"{{transpose: {official}}}, or {{reshape: {official}}} if it is in fact [out, in]"
    return Fault("E314", message, hint=hint)


# ------------------------------------------------------------------------------
# Recipes as they are written

_EXAMPLES = {"split": "{split: qkv, parts: 3, part: 0}", "cut": "{cut: [q, k], start: 4, sizes: [6, 6]}"}


def not_one_kind(found: Collection[str], kinds: Iterable[str]) -> Fault:
    """found: those of the kinds that the recipe has."""
    code = "E210" if found else "E202"
    return Fault(code, "a recipe must have exactly one kind", expected=f"one of {listing(kinds)}")


def takes_only_a_name(kind: str, key: str) -> Fault:
    """Describe another key in a recipe that has none."""
    expected = f"only {kind}; the result has the shape of our parameter"
    return Fault("E201", f"{kind} does not take {quote(key)}", expected=expected)


def needs_key(kind: str, key: str) -> Fault:
    return Fault("E202", f"{kind} needs {quote(key)}", hint=_EXAMPLES[kind])


def needs_pattern() -> Fault:
    return Fault("E202", "rearrange needs 'pattern'", hint='pattern: "(head part d) gate -> gate (part head d)"')


def pattern_is_no_text(found: str) -> Fault:
    return Fault("E203", "a pattern must be text", found=found, hint='"row column -> column row"')


def size_of_axis(axis: str, found: int) -> Fault:
    return Fault("E209", f"the size of {axis} is out of range", expected="1 or more", found=f"{found}")


def not_a_whole_number(key: str, found: str) -> Fault:
    return Fault("E203", f"{key} must be a whole number", found=found)


def not_a_list_of_sizes(key: str, found: str) -> Fault:
    return Fault("E203", f"{key} must be a list of whole numbers", found=found, hint=f"{key}: [768, 64]")


def size_in_list(key: str, found: int) -> Fault:
    return Fault("E209", f"a size in {key} is out of range", expected="1 or more", found=f"{found}")


def out_of_range(key: str, kind: str, found: int, low: int, high: int | None) -> Fault:
    expected = f"{low} or more" if high is None else f"from {low} to {high}"
    return Fault("E209", f"{quote(key)} of {kind} is out of range", expected=expected, found=f"{found}")


def not_a_list_of_names(kind: str, found: str) -> Fault:
    return Fault("E203", f"{kind} takes a list of official names", found=found)


def recipe_of_recipe() -> Fault:
    return Fault("E314", "a recipe cannot be applied to a recipe in the map of a block")

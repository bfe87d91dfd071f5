"""Faults of repeat, scan, parallel, residual and experts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.messages import wires
from seqblocks.messages.suggestions import did_you_mean
from seqblocks.types import Wire

# ------------------------------------------------------------------------------
# repeat

KEYS_OF_REPEAT = ("times", "steps", "pattern", "index", "share", "name", "from", "as", "when")


def no_layers() -> Fault:
    return Fault("E202", "repeat takes either `steps` or `pattern`", hint="times: 12 with steps: […]")


def steps_and_pattern() -> Fault:
    hint = "use `times` and `steps`, or a pattern and the steps of each of its words: m: […]"
    return Fault("E210", "repeat takes either `steps` or `pattern`", at="steps", hint=hint)


def too_many_layers(most: int) -> Fault:
    return Fault("E604", "too many layers", at="pattern", expected=f"at most {most}")


def empty_pattern() -> Fault:
    return Fault("E601", "the pattern is empty", at="pattern", expected="words such as m*7 s")


def not_a_word_of_a_pattern(text: str) -> Fault:
    hint = "a pattern has no parentheses: use `times:` to repeat it" if "(" in text or ")" in text else None
    message = f"{quote(text)} is not a word of a pattern"
    return Fault("E601", message, at="pattern", expected="m, or m*7", hint=hint)


def word_without_steps(word: str, words: Collection[str]) -> Fault:
    """words: those that have steps."""
    return Fault(
        "E602",
        f"the pattern's word {quote(word)} has no steps",
        at="pattern",
        expected=f"one of {listing(words)}" if words else "a key that holds its steps",
        hint=did_you_mean(word, words) or f"add `{word}: [steps]` next to the pattern",
    )


def word_not_in_pattern(word: str, pattern: str, words: Iterable[str]) -> Fault:
    """words: those of the pattern."""
    message = f"{quote(word)} is not in the pattern"
    return Fault("E603", message, found=pattern, hint=lambda: did_you_mean(word, words))


def unknown_key_of_repeat(key: str, holds_steps: bool) -> Fault:
    def hint() -> str | None:
        a_kind_of_layer = f"if {key} is a kind of layer, add a pattern, such as `pattern: {key}*6`"
        return did_you_mean(key, KEYS_OF_REPEAT) or (a_kind_of_layer if holds_steps else None)

    return Fault("E201", f"unknown key {quote(key)} in repeat", hint=hint)


def is_misspelt_pattern(key: str) -> bool:
    return did_you_mean(key, ("pattern",)) is not None


# ------------------------------------------------------------------------------
# scan


def no_orders() -> Fault:
    return Fault("E208", "the list of orders is empty", at="order", hint="for instance [forward, reverse]")


def order_twice(twice: str, orders: Sequence[str]) -> Fault:
    return Fault("E208", "an order appears twice", at="order", entry=twice, found=listing(orders))


def own_needs_orders() -> Fault:
    return Fault("E208", "`own` needs several orders", at="own", hint="order: [forward, reverse]")


def scan_changes_length(before: Wire, after: Wire) -> Fault:
    return Fault(
        "E406",
        "the output of a scan must be a sequence of the same length as its input",
        at="steps",
        expected=f"{before.with_features(after.features)}",
        found=str(after),
    )


def upright_step(verb: str, order: str, span: Span) -> Fault:
    """Describe a step that distinguishes rows from columns, in a scan of columns."""
    message = f"{verb} distinguishes rows from columns, but the order {order} exchanges them"
    note = Note("the step is here", span)
    return Fault("E407", message, at="order", entry=order, notes=[note], hint=f"move {verb} out of the scan")


def other_image(order: str, wire: Wire, other: Wire, label: str) -> Fault:
    """Describe a wire from outside a scan of columns, whose tokens are not those of its input, `wire`."""
    note = other.origin_note(f"`{label}`")
    return Fault(
        "E407",
        f"order {order} reorders every sequence that its steps read, "
        f"but {quote(label)} does not have the rows and columns of its input",
        at="order",
        entry=order,
        expected=f"{wire.with_features(other.features)}, {_rows_by_columns(wire)}",
        found=f"{other}, {_rows_by_columns(other)}",
        notes=[note] if note else [],
    )


def _rows_by_columns(wire: Wire) -> str:
    return f"{wire.grid[0]} x {wire.grid[1]}" if wire.grid else "without rows and columns"


def nothing_to_own(name: str, names: Sequence[str], owner: str | None) -> Fault:
    """names: the parameters in the scan. owner: of the parameter `name`, if a step inside only shares it."""
    steps = {each.rpartition(".")[0] for each in names}
    return Fault(
        "E312",
        f"there is no parameter {quote(name)} inside this scan",
        at="own",
        entry=name,
        expected=f"one of {listing(names)}" if names else "the steps have no parameters",
        hint=name_the_owner(name, owner) if owner else lambda: did_you_mean(name, [*names, *steps]),
    )


def name_the_owner(name: str, owner: str) -> str:
    """Return a hint to name the owner instead of a step, or a parameter, that uses parameters of another step."""
    return f"{name} uses the parameters of another step: name their owner ({owner})"


def two_scans_own() -> Fault:
    hint = "use `own: all`, or let only one of the two scans own parameters"
    message = "a scan that owns some parameters cannot contain another that does"
    return Fault("E208", message, at="own", hint=hint)


def tied_and_owned(step: str) -> Fault:
    message = f"{step} is tied, so a direction cannot own its parameters"
    return Fault("E208", message, at="own", hint="tie outside the scan, or set `own: none`")


def orders_own_nothing(orders: Sequence[str]) -> Fault:
    """Describe an `init:` of a scan whose orders share all parameters."""
    hint = "use `init` of the step inside"
    if len(orders) > 1:
        hint = f"set `own: all`, or {hint}"
    return Fault("E201", "no order of this scan owns parameters to initialise", hint=hint)


# ------------------------------------------------------------------------------
# parallel

_MERGED = {"concat": "joined", "product": "multiplied", "sum": "added", "mean": "added"}


def merges_ids(merge: str, wire: Wire, branch: str) -> Fault:
    """Describe branches whose results are token ids. wire: the result of `branch`."""
    return wires.ids_have_no_features(wire, _MERGED[merge], branch)


def no_branches(found: str, keys: Collection[str]) -> Fault:
    """keys: of a mapping in the place of the list."""
    hint = "[{left: [silu]}, {right: [gelu]}]"
    if keys:
        hint = f"each branch is an item of a list: put '- ' before {listing(keys)}"
    return Fault("E203", "branches must be a list of at least one", at="branches", found=found, hint=hint)


def not_a_branch(found: str) -> Fault:
    return Fault("E203", "a branch is written `name: [steps]`", found=found, hint="- left: [silu]")


def branch_twice(name: str) -> Fault:
    return Fault("E304", f"two branches are named {quote(name)}")


def branches_differ(merge: str, first: tuple[str, Wire], other: tuple[str, Wire]) -> Fault:
    """first, other: names of branches, and their results."""
    (name, before), (second, after) = first, other
    return Fault(
        "E406",
        f"branches {quote(name)} and {quote(second)} cannot be merged by {merge}",
        at="branches",
        expected=str(before),
        found=str(after),
        notes=[note for note in (before.origin_note(name), after.origin_note(second)) if note],
    )


# ------------------------------------------------------------------------------
# residual


def residual_changes_shape(before: Wire, after: Wire, bundled: bool) -> Fault:
    """bundled: whether the residual is in a bundled block, which users cannot change."""
    hint = f"end the branch with `proj_down: {{features: {before.features}}}`"
    if bundled:
        hint = f"the block is used on {before.features} features: give it arguments that fit"
    only_features = before.kind == after.kind and before.length == after.length
    return Fault(
        "E404",
        "a residual adds the output of its steps to its input, so their shapes must match",
        expected=str(before),
        found=str(after),
        notes=[note for note in (before.origin_note("the input"), after.origin_note("the result")) if note],
        hint=hint if only_features else None,
    )


# ------------------------------------------------------------------------------
# experts


def top_above_count(top: int, count: int) -> Fault:
    message = "a token cannot go to more experts than there are"
    return Fault("E209", message, at="top", expected=f"at most {count}, the count", found=str(top))


def score_of_only_expert() -> Fault:
    """Describe a single expert whose score is a softmax."""
    message = "the score of the only expert is always 1 and the router is never trained"
    return Fault("W905", message, at="count", hint="use more experts, or write the steps without `experts`")


def weight_of_only_expert() -> Fault:
    """Describe a single expert with another score, which is normalised."""
    message = "the normalised weight of the only expert is always 1 and the router is never trained"
    return Fault("W905", message, at="count", hint="use more experts, or set `normalize: false`")


def weight_of_single_choice() -> Fault:
    """Describe several experts of which one is chosen for each token, with a normalised weight."""
    hint = "set `normalize: false` to weight the expert by its score, as in Switch Transformers"
    message = "with one expert per token, the normalised weight is always 1 and the router is never trained"
    return Fault("W905", message, at="normalize", hint=hint)


def mixes_tokens(step: str, why: str, experts: Span) -> Fault:
    """why: one of the constants below, or the result of a function below them. experts: where they are."""
    hint = "move the step out of the experts, which process tokens one by one"
    return Fault("E417", f"{step} in an expert {why}", notes=[Note("the experts are here", experts)], hint=hint)


# Reasons for `mixes_tokens`
READS_EARLIER = "reads earlier tokens"
READS_OTHERS = "reads other tokens"
SAME_FOR_ALL = "does not depend on its token"


def changes_tokens(before: Wire, after: Wire) -> str:
    return f"changes the tokens: {before} becomes {after}"


def reads_in_orders(orders: Iterable[str]) -> str:
    return f"reads the sequence in the order {' and '.join(orders)}"


def other_tokens(label: str, wire: Wire, x: Wire) -> Fault:
    """Describe a wire from outside that an expert reads. x: the input of the experts."""
    message = f"an expert reads the wire {quote(label)}, whose tokens are not those of its input"
    notes = [note for note in (wire.origin_note(f"`{label}`"),) if note]
    expected = f"{x.with_features(wire.features)}"
    return Fault("E418", message, at="steps", expected=expected, found=f"{wire}", notes=notes)

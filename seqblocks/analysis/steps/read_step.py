"""Read nodes of the document as steps."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice

from seqblocks.analysis.scope.context import Context
from seqblocks.analysis.scope.references import References
from seqblocks.analysis.scope.step import Entries, Step, Verb, find_verb, passed_verb
from seqblocks.analysis.scope.values import effort
from seqblocks.combinators import Combinator
from seqblocks.errors import Fault, Note, Span, listing, quote
from seqblocks.language.arguments import STEP_KEYS, Argument
from seqblocks.language.document import SOLE, Mapping, Node, Scalar, Sequence, kind_of
from seqblocks.language.spec import Block
from seqblocks.op import Op
from seqblocks.record import Record
from seqblocks.suggestions import key_hint, missing_colon, nearest, why_needless


class InLine(Record):
    """A step whose steps belong to the list around it, and these; none if they are no list."""

    step: Step
    items: list[Step | InLine]


Items = list[Step | InLine]

MAX_MISSPELT = 20  # unknown keys of a step that are compared with all known ones, to leave out faults that follow


def read_step(ctx: Context, item: Node) -> Step:
    """Read an item of a list of steps as a step. The result is cached, since bodies may be lowered several times."""
    cache = ctx.run.step_cache
    key = (id(item), id(ctx.callers[-1])) if ctx.passed else id(item)  # an alias may occur in another block
    if key not in cache:
        cache[key] = step = _read(ctx, item)
        if ctx.run.references is not None and step.found:
            meaning = step.found.meaning
            if isinstance(meaning, Block | Argument):
                ctx.run.references.add("block", step.verb, step.span, meaning.span)
                if isinstance(meaning, Block):
                    _refer_keys(ctx.run.references, step, meaning)
            else:
                ctx.run.references.add("verb", step.verb, step.span, None)
        _check_keys(ctx, step)
        step.effort = _effort(step)
        step.is_plain = not step.found or not (_is_in_line(step.found) or _names_results(step.found))
    return cache[key]


def _refer_keys(references: References, step: Step, block: Block) -> None:
    """Note which arguments of a block the keys of a call set."""
    for key, (span, node) in step.fields.items():
        if key in block.args and span != node.span:  # otherwise only the value is written
            references.add("argument", key, span, block.args[key].span)


def read_items(ctx: Context, items: Iterable[Node]) -> Items:
    """Read the items of a list as steps."""
    found: Items = []
    for item in items:
        step = read_step(ctx, item)
        if step.is_plain:
            found.append(step)
        elif step.found and _is_in_line(step.found):
            inside = step.get("steps")
            found.append(InLine(step, read_items(ctx, inside.items if isinstance(inside, Sequence) else ())))
        else:
            found += _separated(ctx, step)
    return found


def all_steps(items: Items) -> Iterator[Step]:
    """Yield the steps of a list in order, in place of steps whose steps belong to the list."""
    for item in items:
        yield from [item] if isinstance(item, Step) else all_steps(item.items)


def _separated(ctx: Context, step: Step) -> list[Step]:
    """Return a step of a verb whose keys name its results as several, with one result each."""
    if not (results := _results(step)):
        return [step]
    for key in ("formula", "as", *(("name", "init", "tie", "share") if len(results) > 1 else ())):
        if key in step.fields or key in step.common:
            ctx.report(_of_one_result(step, key, list(results)), step.key_span(key))
    common = {key: entry for key, entry in step.common.items() if key in ("from", "when") or len(results) == 1}
    shared = {key: entry for key, entry in step.fields.items() if key in ("learned", "x")}
    made = [_one_result(step, name, entry, shared, common) for name, entry in results.items()]
    for each in made[1:]:
        each.is_start = False
    return made


def _results(step: Step) -> Entries:
    """Return the formulas of a step by the names of their results; none if its only formula has no name."""
    assert step.found
    own = {*step.found.own, *step.found.wires}
    return {key: entry for key, entry in step.fields.items() if key not in own}


def _of_one_result(step: Step, key: str, names: list[str]) -> Fault:
    if key in ("formula", "as"):
        message = f"`{key}` does not combine with formulas that have names"
        return Fault("E210", message, hint=f"remove `{key}`: the formulas here name {listing(names)}")
    message = f"`{key}` applies to one formula, and this {step.verb} has {len(names)}"
    return Fault("E210", message, hint=f"write a `{step.verb}` of its own for the formula that needs it")


def _one_result(step: Step, name: str, entry: tuple[Span, Node], shared: Entries, common: Entries) -> Step:
    span, node = entry
    label = Scalar(span, 1, 1, name, name)
    fields = {"formula": (span, node), **shared}
    made = Step(step.verb, span, fields, {"as": (span, label), **common}, step.found, step.incomplete, alias=step.alias)
    made.part_of, made.effort, made.unreadable = step, effort(node), step.unreadable
    if "name" in common:
        made.name, made.name_span = common["name"][1].text if isinstance(common["name"][1], Scalar) else name, span
    return made


def _find_verb(ctx: Context, verb: str) -> Verb | None:
    """Look up a verb that is visible here; return None if there is none."""
    if verb in ctx.passed:
        return passed_verb(ctx.passed[verb].declared)
    return find_verb(ctx.file, verb)


def _read(ctx: Context, item: Node) -> Step:
    match item:
        case Scalar(value=str(verb)):
            return Step(verb, item.span, {}, {}, found=_find_verb(ctx, verb))
        case Mapping(entries=entries) if len(entries) == 1:
            ((verb, span, node),) = list(item)
            return _read_arguments(ctx, item, verb, span, node)
        case Mapping(entries=entries) if entries:
            _report_several_verbs(ctx, item)
            return Step("?", item.span, {}, {}, possible_wires=("?",), unreadable=True)
        case _:
            ctx.report(Fault("E204", "a step is a verb, or `verb: {arguments}`", found=kind_of(item)), item.span)
    return Step("?", item.span, {}, {}, unreadable=True)


def _report_several_verbs(ctx: Context, item: Mapping) -> None:
    first, *others = item.entries
    hint = "one verb per step"
    if found := _find_verb(ctx, first):
        steps = [other for other in others if other not in found.keys and _find_verb(ctx, other)]
        separate = f"put '- ' before {listing(steps)}: this is a separate step" if steps else None
        hint = separate or _long_form(item, found) or _move_inside(item)
    message = f"a step is one verb with its arguments, not {len(item.entries)} keys"
    ctx.report(Fault("E204", message, found=listing(item.entries), hint=hint), item.entries[others[0]][0])


def _long_form(item: Mapping, found: Verb) -> str | None:
    """Return a step in short form (`linear: 64`) and the arguments next to it as one mapping, or None."""
    (verb, _, only), *others = item
    key = found.steps if isinstance(only, Sequence) else None
    if isinstance(only, Scalar) and only.value is not None and found.sole:
        key = found.sole
    if any(name == key for name, *_ in others):
        return f"`{verb}: {_shown(only)}` sets {key}: remove one of the two"
    rest = ((name, _shown(node)) for name, _, node in others)
    return key and _written(verb, [(key, _shown(only)), *rest])


def _move_inside(item: Mapping) -> str:
    (verb, _, arguments), *others = item
    span = arguments.span
    has_braces = isinstance(arguments, Mapping) and span.source.line(span.line)[span.column - 1] == "{"
    shown = listing(name for name, *_ in others)
    return f"move {shown} into the braces after `{verb}:`" if has_braces else f"indent {shown} below `{verb}:`"


def _shown(node: Node) -> str:
    """Return the text of a short scalar, or an ellipsis."""
    return node.text if isinstance(node, Scalar) and len(node.text) < 40 else "…"


def _read_arguments(ctx: Context, item: Mapping, verb: str, span: Span, node: Node) -> Step:
    found = _find_verb(ctx, verb)
    if isinstance(node, Scalar) and node.value is None:
        return Step(verb, span, {}, {}, found=found)
    if not isinstance(node, Mapping):
        alias = None if item.span.holds(span) else item.span
        if found is None or not found.is_known:
            return _without_arguments(ctx, verb, span, found)
        key = _sole_argument(ctx, verb, node, found)
        fields = {key: (node.span, node)} if key else {}
        return Step(verb, span, fields, {}, found=found, alias=alias, unreadable=not key)
    if SOLE in node.entries:  # set by an override
        entries = dict(node.entries)
        where, only = entries.pop(SOLE)
        sole = _sole_argument(ctx, verb, only, found) if found and found.is_known else None
        if sole is None:
            return Step(verb, span, {}, {}, found=found, unreadable=found is not None)
        node = node._replace(entries={sole: (where, only), **entries})
    own = found.own if found else ()  # repeat has its own `share`
    fields = {key: (s, n) for key, s, n in node if key not in STEP_KEYS or key in own}
    common = {key: (s, n) for key, s, n in node if key not in fields}
    inside = next((s for _, s, _ in node), node.span)
    alias = next((outer.span for outer, first in ((item, span), (node, inside)) if not outer.span.holds(first)), None)
    return Step(verb, span, fields, common, found=found, incomplete=node.incomplete, alias=alias)


def _without_arguments(ctx: Context, verb: str, span: Span, found: Verb | None) -> Step:
    """Return a step with an unknown verb, and thus unknown arguments. Report a verb that contains an argument too."""
    first = verb.partition(" ")[0]
    if first == verb or not _find_verb(ctx, first):
        return Step(verb, span, {}, {}, found=found)
    ctx.report(Fault("E301", f"there is no verb {quote(verb)}", hint=missing_colon(verb)), span.within(0, len(first)))
    return Step(verb, span, {}, {}, unreadable=True)


def _sole_argument(ctx: Context, verb: str, node: Node, found: Verb) -> str | None:
    """Return the argument that a short form sets (`linear: 64`, `residual: [silu]`), or None after a fault."""
    colon = missing_colon(node.text, found.keys) if isinstance(node, Scalar) else None
    if found.steps and isinstance(node, Sequence):
        return found.steps
    if found.sole and isinstance(node, Scalar) and not colon:
        return found.sole
    if not found.keys:
        hint = f"remove the value: `{verb}` has no arguments"
    elif found.steps:
        hint = f"{verb}: [{_shown(node)}]"
    elif found.required:
        hint = _written(verb, [(key, "…") for key in found.required])
    else:
        hint = f"name the argument: {verb} takes {listing(found.own)}"
    fault = Fault("E203", f"the arguments of {quote(verb)} must be a mapping", found=kind_of(node), hint=colon or hint)
    ctx.report(fault, node.span)
    return None


def _written(verb: str, arguments: Iterable[tuple[str, str]]) -> str:
    """Return a step as text. arguments: keys, and their values as shown."""
    return f"{verb}: {{{', '.join(f'{key}: {shown}' for key, shown in arguments)}}}"


# --- keys -------------------------------------------------------------------------------------------------------------


def _check_keys(ctx: Context, step: Step) -> None:
    """Report unknown arguments; they make the step incomplete."""
    found = step.found
    if found is None or not found.is_known or _names_results(found):
        return
    if _takes_words(found):
        _check_misspelt(ctx, step, found)
        return
    known = {*found.own, *found.wires}
    unknown: Entries = {key: entry for key, entry in step.fields.items() if key not in known}
    words = list(dict.fromkeys((*found.own, *found.wires, *found.common))) if unknown else []
    for key, (span, _) in unknown.items():
        ctx.report(_unknown_key(step, found, key, words), span)
        step.incomplete = True
    step.misspelt = frozenset(_misspelt(unknown, found, words))
    if "as" not in step.common:
        step.possible_wires = tuple(chain.from_iterable(_words(key, node) for key, (_, node) in unknown.items()))


def _misspelt(unknown: Iterable[str], found: Verb, words: list[str]) -> Iterator[str]:
    """Yield the keys common to all steps that unknown ones may stand for."""
    close = (key for key in unknown if nearest(key, found.common))  # Fewer words to compare than all.
    for key in islice(close, MAX_MISSPELT):
        word = nearest(key, words)
        if word in found.common:
            yield word


def _check_misspelt(ctx: Context, step: Step, found: Verb) -> None:
    """Report keys of an op with keys of the user's own that its values do not contain, and that are close to others."""
    if not (isinstance(found.meaning, type) and issubclass(found.meaning, Op)):
        return
    words = list(dict.fromkeys((*found.own, *found.wires, *found.common)))
    own = [node for key, (_, node) in step.fields.items() if key in found.own]
    used = {word for node in own if isinstance(node, Scalar) for word in re.findall(r"\w+", node.text)}
    for key, (span, _) in [*step.fields.items()]:
        if key not in words and key not in used and (word := nearest(key, words)):
            ctx.report(_unknown_key(step, found, key, words), span)
            del step.fields[key]
            step.incomplete, step.misspelt = True, step.misspelt | {word}


def _is_in_line(found: Verb) -> bool:
    """Return whether the steps of a combinator belong to the list around it."""
    return isinstance(found.meaning, type) and issubclass(found.meaning, Combinator) and found.meaning.in_line


def _names_results(found: Verb) -> bool:
    """Return whether the undeclared keys of a verb name its results."""
    return isinstance(found.meaning, type) and issubclass(found.meaning, Op) and found.meaning.names_results


def _takes_words(found: Verb) -> bool:
    """Return whether a verb takes user-defined keys, which the op or the combinator checks itself."""
    return isinstance(found.meaning, type) and found.meaning.open_keys


def _unknown_key(step: Step, found: Verb, key: str, words: list[str]) -> Fault:
    if isinstance(found.meaning, Argument):
        message = f"{step.verb} runs the steps passed to the block, and does not take {quote(key)}"
        notes = [Note("the argument is declared here", found.meaning.span)]
    elif isinstance(found.meaning, Block):
        message = f"block {step.verb} has no argument {quote(key)}"
        notes = [Note("the block is defined here", found.meaning.span)]
    else:
        message, notes = f"unknown key {quote(key)} in {step.verb}", []

    def hint() -> str | None:
        return (None if notes else why_needless(key)) or key_hint(key, words)

    return Fault("E201", message, expected=f"one of {listing(words, 16)}", hint=hint, notes=notes)


def _words(key: str, node: Node) -> list[str]:
    """Return the words of an unknown key's value. They are wires if the key is a misspelt `as:`."""
    match node:
        case Scalar(value=None):
            return key.split()[1:]  # the colon may be missing
        case Scalar(value=str(text)):
            return [text]
        case Mapping(entries=entries):
            return list(entries)
        case Sequence(items=items):
            return [item.text for item in items if isinstance(item, Scalar)]
    return []


def _effort(step: Step) -> int:
    """Return the effort of reading the arguments of a step once, not counting the steps inside it."""
    meaning = step.found.meaning if step.found else None
    cls = meaning if isinstance(meaning, type) and issubclass(meaning, Combinator) else None
    holds: Container[str] = cls.holds if cls else ()
    if isinstance(meaning, Block):
        holds = [name for name, argument in meaning.args.items() if argument.type == "steps"]
    total = 1
    for key, (_, node) in (*step.fields.items(), *step.common.items()):
        steps = key in holds or (cls and cls.open_keys and key in step.fields and key not in cls.model_fields)
        total += 1 + (len(node.items) if isinstance(node, Sequence) else 0) if steps else effort(node)
    return total

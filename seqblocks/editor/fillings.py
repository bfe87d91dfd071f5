"""Values for arguments that are missing or out of their range, each tried by an analysis."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from seqblocks.analysis.analyse import Analysis
from seqblocks.analysis.scope.step import find_verb
from seqblocks.descriptions import reference
from seqblocks.editor.completion import complete
from seqblocks.editor.edits import Edit, applied
from seqblocks.editor.naming import with_key
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.editor.steps import Written, as_step, trail
from seqblocks.errors import Diagnostic
from seqblocks.language.document import Scalar
from seqblocks.language.spec import Block

OFFERED = 3  # maximum values for one argument
TRIED = 8  # maximum values that are tried: each takes an analysis
_MARK = "value_of_the_argument"
_SAMPLES = ("1", "8", "0.5", "[identity]", "true")  # of each kind of value
_NUMBER = r"(-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)"
_LOW = re.compile(rf"(?:at least |greater than |more than |above ){_NUMBER}|{_NUMBER} or more")
_HIGH = re.compile(rf"(?:at most |less than |below ){_NUMBER}")


def missing(opened: Opened, each: Diagnostic) -> Iterator[tuple[str, list[Edit]]]:
    """Yield titles and edits that add the argument that a step misses."""
    step = _step_at(opened, each)
    verb = find_verb(opened.analysis.file, step.verb) if step and opened.analysis.file else None
    if step is None or verb is None:
        return
    named = re.findall(r"\w+", f"{each.message.partition(' needs ')[2]} {each.expected or ''} {each.hint or ''}")
    key = next((word for word in named if word in verb.own and step.get(word) is None), None)
    if key is None:
        return
    probe = with_key(opened, step, key, _MARK, step.verb)
    if probe is None:
        return
    for values in ([*_offered(opened, probe)], _SAMPLES):
        edits = [(value, [probe._replace(text=probe.text.replace(_MARK, value))]) for value in values]
        helping = _that_help(opened, each, edits)
        for value, edit in helping[: 1 if values is _SAMPLES else OFFERED]:
            yield f"Add `{key}: {value}`", edit
        if helping:
            return


def out_of_range(opened: Opened, each: Diagnostic) -> Iterator[tuple[str, list[Edit]]]:
    """Yield titles and edits that write the nearest allowed number, or the default, for a number out of its range."""
    assert each.span
    path = trail(opened.root, Spot(each.span.line, each.span.column)) if opened.root else []
    last = path[-1] if path else None
    if last is None or not isinstance(last.node, Scalar):
        return
    span = last.node.span
    if isinstance(last.node.value, str) and not re.fullmatch(_NUMBER, each.found or ""):
        return  # another value is needed elsewhere
    edits = [(value, [Edit(span, value)]) for value in dict.fromkeys(_nearest(opened, each, last.key))]
    for value, edit in _that_help(opened, each, edits)[:1]:
        yield f"Change `{span.text}` to {value}", edit


def _step_at(opened: Opened, each: Diagnostic) -> Written | None:
    assert each.span
    path = trail(opened.root, Spot(each.span.line, each.span.column)) if opened.root else []
    steps = (as_step(entry.node) for entry in reversed(path))
    return next((step for step in steps if step and step.span == each.span), None)


def _offered(opened: Opened, probe: Edit) -> Iterator[str]:
    """Yield the names and words that completion offers as the value of a new argument."""
    text = applied(opened.text, [probe])
    at = text.index(_MARK)
    now = Opened(text[:at] + text[at + len(_MARK) :], opened.path, opened.allow_use, opened, opened.name)
    found = complete(now, now.lines.spot_at(at))
    for item in found.items if found else ():
        if "$" not in item.text and not item.more:
            yield item.text


def _nearest(opened: Opened, each: Diagnostic, key: str | None) -> Iterator[str]:
    """Yield numbers for one out of its range: the bound that its message names, the default, and numbers near it."""
    text = f"{each.message} {each.expected or ''}"
    bounds = [
        (float(next(filter(None, found.groups())).replace(",", "")), step)
        for pattern, step in ((_LOW, 1), (_HIGH, -1))
        for found in pattern.finditer(text)
    ]
    yield from (_written(bound) for bound, _ in bounds)
    yield from _default(opened, each, key)
    for bound, step in bounds:
        yield from (_written(bound + step), _written(bound + step * (0.1 * abs(bound) or 0.1)))


def _written(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def _default(opened: Opened, each: Diagnostic, key: str | None) -> Iterator[str]:
    assert each.span
    path = trail(opened.root, Spot(each.span.line, each.span.column)) if opened.root else []
    steps = filter(None, (as_step(entry.node) for entry in reversed(path)))
    step, file = next(steps, None), opened.analysis.file
    verb = find_verb(file, step.verb) if step and file else None
    key = key if step and step.get(key or "") else verb.sole if verb else None
    if verb and isinstance(verb.meaning, Block):
        default = verb.meaning.args[key].default if key in verb.meaning.args else None
        if isinstance(default, Scalar) and default.value is not None:
            yield default.text
    elif verb and isinstance(verb.meaning, type):
        found = (reference.describe_default(each) for each in reference.arguments(verb.meaning) if each.name == key)
        yield from filter(None, found)


def _that_help(
    opened: Opened, each: Diagnostic, edits: Iterable[tuple[str, list[Edit]]]
) -> list[tuple[str, list[Edit]]]:
    """Return the edits that remove a diagnostic and add none but about types, those without any error first."""
    before, found = _codes(opened.analysis), []
    place = each.code, each.message
    for _, (value, edit) in zip(range(TRIED), edits, strict=False):
        after = opened.again(applied(opened.text, edit))
        codes = _codes(after)
        same = sum((other.code, other.message) == place for other in opened.analysis.diagnostics)
        if sum((other.code, other.message) == place for other in after.diagnostics) < same:
            if all(code.startswith("E4") for code in codes - before):
                found.append((sum((codes - before).values()), value, edit))
    return [(value, edit) for _, value, edit in sorted(found, key=lambda one: one[0])]


def _codes(analysis: Analysis) -> Counter[str]:
    return Counter(each.code for each in analysis.diagnostics)

"""Find the wires that written steps define, for the steps below them and for other layers."""

from __future__ import annotations

from collections.abc import Iterator

from seqblocks.analysis.scope.step import Verb, find_verb
from seqblocks.combinators import Combinator
from seqblocks.editor.steps import Written, as_step
from seqblocks.errors import Span
from seqblocks.language.document import Mapping, Node, Scalar, Sequence
from seqblocks.language.spec import Block, SpecFile
from seqblocks.op import Op

Wires = dict[str, Span | None]  # the verb of the step that makes each wire


def names_results(verb: Verb | None) -> bool:
    """Return whether the keys of a verb name wires, as in `calc: {y: 2 * x}`."""
    return bool(verb and isinstance(verb.meaning, type) and issubclass(verb.meaning, Op) and verb.meaning.names_results)


def formulas_of(step: Written, verb: Verb) -> list[str]:
    """Return the keys of a step that name the results of formulas, in order."""
    keys = step.arguments.entries if isinstance(step.arguments, Mapping) else ()
    return [key for key in keys if key not in verb.keys]


def defined(step: Written, file: SpecFile) -> Wires:
    """Return the wires that a step defines in its list."""
    found: Wires = {}
    match step.get("as"):
        case Scalar(text=text):
            found[text] = step.span
        case Sequence(items=items):
            found |= {item.text: step.span for item in items if isinstance(item, Scalar)}
        case Mapping(entries=entries):
            found |= dict.fromkeys(entries, step.span)
    verb = find_verb(file, step.verb)
    if verb and names_results(verb):
        found |= dict.fromkeys(formulas_of(step, verb), step.span)
    if verb and isinstance(verb.meaning, Block):
        found |= {f"{name_of(step)}.{item.text}": step.span for item in verb.meaning.outputs}
    if verb and isinstance(verb.meaning, type) and issubclass(verb.meaning, Combinator) and verb.meaning.in_line:
        for inner in inner_steps(step):
            found |= defined(inner, file)
    return found


def name_of(step: Written) -> str:
    """Return the name of a step: `name:`, a single `as:`, or its verb."""
    own = step.get("name") or step.get("as")
    return own.text if isinstance(own, Scalar) else step.verb


def in_layers(step: Written, file: SpecFile) -> Wires:
    """Return the wires of the layers of a `repeat` that other layers can read: those that one step of a layer makes."""
    found: Wires = {}
    several: set[str] = set()
    for name, maker in _in_layers(step, file):
        if name in found and found[name] != maker:
            several.add(name)
        found[name] = maker
    return {name: maker for name, maker in found.items() if name not in several}


def _in_layers(step: Written, file: SpecFile) -> Iterator[tuple[str, Span | None]]:
    for inner in inner_steps(step):
        if find_verb(file, inner.verb) is None and isinstance(inner.arguments, Sequence):  # a branch
            yield from _in_layers(inner, file)
            continue
        yield from defined(inner, file).items()
        if inner.verb in ("residual", "parallel") or (inner.verb == "scan" and inner.get("order") is None):
            yield from _in_layers(inner, file)


def inner_steps(step: Written) -> Iterator[Written]:
    """Yield the steps in the lists of a combinator."""
    lists: list[Node | None] = [step.arguments]
    if isinstance(step.arguments, Mapping):
        lists = [value for key, _, value in step.arguments if key not in ("as", "from", "share")]
    for each in lists:
        for item in each.items if isinstance(each, Sequence) else ():
            if found := as_step(item):
                yield found

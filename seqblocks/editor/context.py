"""What may be written at the cursor: which kind of word, and what is in scope there."""

from __future__ import annotations

import ast
from typing import Literal, NamedTuple

from seqblocks.analysis.scope.step import Verb, find_verb, passed_verb
from seqblocks.analysis.steps.inputs import ALLOWED
from seqblocks.combinators import Combinator
from seqblocks.editor.cursor import HOLE
from seqblocks.editor.defined import Wires, defined, formulas_of, in_layers, name_of, names_results
from seqblocks.editor.steps import PathEntry, Written, as_step
from seqblocks.errors import Fault
from seqblocks.language.arguments import ARGUMENT_KEYS, ARGUMENT_TYPES, Argument
from seqblocks.language.document import Mapping, Node, Scalar, Sequence
from seqblocks.language.expressions import has_syntax, parse
from seqblocks.language.spec import (
    BLOCK_KEYS,
    BUDGET_KEYS,
    EXPECT_KEYS,
    FIGURES,
    FILE_KEYS,
    MODEL_KEYS,
    Block,
    SpecFile,
)

_INPUT_KEYS = tuple(dict.fromkeys(key for keys in ALLOWED.values() for key in keys))
Kind = Literal[
    "key", "word", "use", "verb", "argument", "value", "names", "wire", "formula", "step", "parameter", "initialiser"
]  # fmt: skip


class Name(NamedTuple):
    """The name of a value. kind: of the value, "" if it is not known. about: what it is, or its value as written.

    word, number: the value, if it is a word or a number that `let:` gives.
    """

    kind: Literal["number", "flag", "word", ""]
    about: str
    word: str = ""
    number: float | None = None


Names = dict[str, Name]
_KINDS: dict[str, Name] = {
    "int": Name("number", ""), "float": Name("number", ""), "bool": Name("flag", ""), "word": Name("word", "")
}  # fmt: skip


class Layers(NamedTuple):
    """The wires that layers of a `repeat` define. above: whether they are those above the step, not of a repeat."""

    wires: Wires
    above: bool


class Scope:
    """What a step can refer to: names of values, wires with the verbs that make them, steps, steps passed to a block.

    steps: those above in the same list. beside: all others of the list, by name. layers: by the words for the layers
    of a `repeat`.
    """

    def __init__(self, names: Names, wires: Wires, passed: dict[str, Argument]) -> None:
        self.names, self.wires, self.passed = names, wires, passed
        self.steps: dict[str, Written] = {}
        self.beside: dict[str, Written] = {}
        self.layers: dict[str, Layers] = {}

    def inside(self, wires: bool = True, names: Names | None = None) -> Scope:
        """Return the scope of steps inside a step; those passed to a block read no wires from outside."""
        found = Scope({**self.names, **(names or {})}, dict(self.wires) if wires else {"input": None}, self.passed)
        found.layers = dict(self.layers) if wires else {}
        return found

    def add(self, step: Written, file: SpecFile) -> None:
        """Add what a step defines for those below it."""
        self.wires |= defined(step, file)
        self.steps[name_of(step)] = step
        if step.verb == "repeat":
            self.layers[name_of(step)] = Layers(in_layers(step, file), above=False)


class Context(NamedTuple):
    """The kind of word at the cursor.

    words: those that are allowed, of a key or a word. taken: keys that are there already. verb, key: the step around
    the cursor, and the argument whose value is written.
    """

    kind: Kind
    scope: Scope
    words: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    verb: Verb | None = None
    step: Written | None = None
    key: str = ""


def context_of(path: list[PathEntry], file: SpecFile) -> Context | None:
    """Return what may be written at the hole at the end of a path. file: the spec, as far as it can be read."""
    scope = Scope(_names(file.let), {}, {})
    if len(path) < 2 or not isinstance(path[0].node, Mapping):
        return None
    top = path[1]
    if top.on_key:
        return _key(FILE_KEYS, path[0].node, scope)
    match top.key:
        case "use":
            return Context("use", scope)
        case "let":
            return _let(path, scope)
        case "expect":
            return _expect(path, file, scope)
        case "init":
            return Context("initialiser", scope) if len(path) > 2 and not path[-1].on_key else None
        case "blocks":
            return _block(path[2:], file, scope)
        case "model":
            return _model(path[2:], top.node, file, scope)
    return None


def _key(words: tuple[str, ...], node: Node, scope: Scope) -> Context:
    taken = tuple(node.entries) if isinstance(node, Mapping) else ()
    return Context("key", scope, words, taken)


def _names(let: Node | None, outer: Names | None = None) -> Names:
    """Return the names that a `let:` defines. outer: others that its values may be."""
    found: Names = dict(outer or {})
    for key, _, node in let if isinstance(let, Mapping) else ():
        found[key] = Name("", "")
        if isinstance(node, Scalar):
            kind = found[node.text].kind if node.text in found else _kind_of(node, found)
            found[key] = Name(kind, node.text, node.text if kind == "word" else "", _number_of(node, found))
    return found


def _number_of(node: Scalar, names: Names) -> float | None:
    """Return the value of an entry of `let:` that is a number, or an expression of known ones."""
    if not isinstance(node.value, str):
        return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    known = {name: each.number for name, each in names.items() if each.number is not None}
    try:
        value = parse(node.value).evaluate(known)
    except Fault:  # of other names, or a word
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _kind_of(node: Scalar, names: Names) -> Literal["number", "flag", "word", ""]:
    if isinstance(node.value, bool):
        return "flag"
    if isinstance(node.value, int | float):
        return "number"
    if not isinstance(node.value, str):
        return ""
    if node.value.isidentifier() or not has_syntax(node.value):
        return "word"
    try:
        expression = parse(node.value)
    except Fault:
        return ""
    is_sum = isinstance(expression.tree, ast.BinOp | ast.Call) and all(name in names for name, _ in expression.names)
    return "number" if is_sum else ""  # others may be words, lists, or the patterns of layers


def _let(path: list[PathEntry], scope: Scope) -> Context | None:
    if len(path) < 3 or path[-1].on_key:
        return None
    others = {name: text for name, text in scope.names.items() if name != path[2].key}
    return Context("names", Scope(others, {}, {}))


def _expect(path: list[PathEntry], file: SpecFile, scope: Scope) -> Context | None:
    if len(path) == 3 and path[2].on_key:
        return _key(EXPECT_KEYS, path[1].node, scope)
    if len(path) == 2:
        return _key(EXPECT_KEYS, path[1].node, scope)
    if len(path) == 4 and path[3].on_key and path[2].key in FIGURES:
        return _key(BUDGET_KEYS, path[2].node, scope)
    inputs = file.model.get("inputs") if file.model and path[2].key == "output" else None
    lengths = {name: Name("", "") for name, _, _ in inputs} if isinstance(inputs, Mapping) else {}
    return Context("names", Scope({**scope.names, **lengths}, {}, {})) if not path[-1].on_key else None


def _block(path: list[PathEntry], file: SpecFile, scope: Scope) -> Context | None:
    """path: from the name of a block on."""
    if len(path) < 2:
        return _key(BLOCK_KEYS, path[0].node, scope) if path and not path[0].on_key else None
    node, section = path[0].node, path[1]
    if section.on_key:
        return _key(BLOCK_KEYS, node, scope)
    block = file.visible.get(path[0].key or "")
    args = block.args if block else {}
    wires: Wires = {name: None for name, each in args.items() if each.type == "wire"}
    passed = {name: each for name, each in args.items() if each.type == "steps"}
    values = {
        name: _KINDS.get(each.type, Name("", ""))._replace(about=each.about)
        for name, each in args.items()
        if name not in wires and name not in passed
    }
    let = node.get("let") if isinstance(node, Mapping) else None
    inner = Scope(_names(let, {**scope.names, **values}), {"input": None, **wires}, passed)
    match section.key:
        case "args":
            return _arguments(path[1:], inner)
        case "let":
            return _let(path, inner)
        case "init":
            return Context("initialiser", inner) if not path[-1].on_key else None
        case "steps":
            return _steps(path[1:], file, inner)
    return None


def _arguments(path: list[PathEntry], scope: Scope) -> Context | None:
    """path: from `args:` of a block on."""
    if len(path) == 2 and not path[1].on_key:
        return Context("word", scope, ARGUMENT_TYPES)
    if len(path) == 3:
        if path[2].on_key:
            return _key(ARGUMENT_KEYS, path[1].node, scope)
        return Context("word", scope, ARGUMENT_TYPES) if path[2].key == "type" else None
    return None


def _model(path: list[PathEntry], node: Node, file: SpecFile, scope: Scope) -> Context | None:
    """path: from a key of the model on."""
    if not path or path[0].on_key:
        return _key(MODEL_KEYS, node, scope)
    inputs = node.get("inputs") if isinstance(node, Mapping) else None
    wires = dict.fromkeys(inputs.entries) if isinstance(inputs, Mapping) else {}
    inner = Scope(scope.names, {"input": None, **wires}, {})
    steps = node.get("steps") if isinstance(node, Mapping) else None
    match path[0].key:
        case "steps":
            return _steps(path, file, inner)
        case "input" | "inputs":
            around = path[-2] if path[-1].on_key and len(path) > 1 else None
            is_input = around and around.key not in ("inputs", "image")
            return _key(_INPUT_KEYS, around.node, scope) if around and is_input else _value(path, inner)
        case "outputs":
            for item in steps.items if isinstance(steps, Sequence) else ():
                if step := as_step(item):
                    inner.add(step, file)
            inner.wires = {name: maker for name, maker in inner.wires.items() if maker}  # no inputs
            return Context("wire", inner) if isinstance(path[0].node, Sequence) else None
    return None


def _value(path: list[PathEntry], scope: Scope) -> Context | None:
    return None if path[-1].on_key or len(path) < 2 else Context("names", scope)


# --- steps ------------------------------------------------------------------------------------------------------------


def _steps(path: list[PathEntry], file: SpecFile, scope: Scope) -> Context | None:
    """Return what may be written in a list of steps, the first node of the path."""
    if len(path) < 2 or not isinstance(path[0].node, Sequence):
        return None
    item = path[1].node
    for above in path[0].node.items:
        if above is item:
            break
        if step := as_step(above):
            scope.add(step, file)
    others = (as_step(each) for each in path[0].node.items if each is not item)
    scope.beside = {name_of(step): step for step in others if step}
    if isinstance(item, Scalar):
        return Context("verb", scope) if item.text == HOLE else None
    written = as_step(item)
    if written is None or len(path) < 3 or not isinstance(item, Mapping):
        return None
    if path[2].on_key:
        return Context("verb", scope) if path[2].key == HOLE else None
    verb = passed_verb(scope.passed[written.verb]) if written.verb in scope.passed else find_verb(file, written.verb)
    return _step(path[2:], written, verb, file, scope) if verb else None


def _step(path: list[PathEntry], step: Written, verb: Verb, file: SpecFile, scope: Scope) -> Context | None:
    """path: from the arguments of the step on."""
    arguments = path[0].node
    if isinstance(arguments, Scalar):
        if arguments.span.line > step.span.line:
            return Context("argument", scope, verb=verb, step=step)
        sole = verb.sole or ""
        return _argument(path, step, verb, sole, scope) if sole else None
    if isinstance(arguments, Sequence):
        return _inner_steps(path, step, verb, file, scope) if verb.steps else None
    if len(path) < 2:
        return None
    if path[1].on_key:
        taken = tuple(arguments.entries) if isinstance(arguments, Mapping) else ()
        return Context("argument", scope, taken=taken, verb=verb, step=step)
    key = path[1].key or ""
    if holds_steps(verb, key):
        return _inner_steps(path[1:], step, verb, file, scope)
    return _argument(path[1:], step, verb, key, scope)


def holds_steps(verb: Verb, key: str) -> bool:
    """Return whether the value of an argument is a list of steps."""
    meaning = verb.meaning
    if isinstance(meaning, Block):
        return key in meaning.args and meaning.args[key].type == "steps"
    if isinstance(meaning, type) and issubclass(meaning, Combinator):
        return key in meaning.holds or (meaning.open_keys and key not in verb.keys)
    return False


def _inner_steps(path: list[PathEntry], step: Written, verb: Verb, file: SpecFile, scope: Scope) -> Context | None:
    if isinstance(verb.meaning, Block):
        return _steps(path, file, scope.inside(wires=False))
    inner = scope.inside()
    match step.verb:
        case "repeat":
            index = step.get("index")
            name = index.text if isinstance(index, Scalar) else "layer"
            inner.names[name] = Name("number", "the index of the layer")
            inner.names[f"{name}s"] = Name("number", "the number of layers")
            inner.layers[f"{name}s"] = Layers(in_layers(step, file), above=True)
        case "cell":
            states = step.get("state")
            inner.wires |= {key: span for key, span, _ in states} if isinstance(states, Mapping) else {}
        case "parallel":
            if len(path) < 3 or path[2].on_key or not isinstance(path[1].node, Mapping):
                return None
            path = path[2:]  # from the steps of a branch on
    return _steps(path, file, inner)


def _argument(path: list[PathEntry], step: Written, verb: Verb, key: str, scope: Scope) -> Context | None:
    """Return what may be written as the value of an argument, the first node of the path."""
    if key == "init":
        if path[-1].on_key or len(path) == 1:
            taken = tuple(path[0].node.entries) if isinstance(path[0].node, Mapping) else ()
            return Context("parameter", scope, taken=taken, verb=verb, step=step)
        return Context("initialiser", scope)
    if key == "as" and len(path) > 1 and not path[-1].on_key and isinstance(path[0].node, Mapping):
        return Context("names", scope)  # the widths of the parts
    if names_results(verb) and (key == "formula" or key not in verb.keys) and len(path) == 1:
        return _formula(step, verb, key, scope)
    if key == "learned" and names_results(verb) and len(path) > 1 and not path[-1].on_key:
        return Context("initialiser", scope)
    if path[-1].on_key or key in ("as", "name"):
        return None
    is_port = isinstance(verb.meaning, Block) and key in verb.wires
    if key == "from" or is_port or key in verb.wires:
        return Context("wire", scope)
    if key == "share" and key not in verb.own:
        return Context("step", scope, step=step, key=key)
    if key == "tie":
        return Context("step", scope, step=step, key=key)
    if key == "when" or (step.verb == "cell" and key == "state" and len(path) > 1):
        return Context("names", scope)
    return Context("value", scope, verb=verb, step=step, key=key)


def _formula(step: Written, verb: Verb, key: str, scope: Scope) -> Context:
    """Return what a formula can read: also results of the formulas before it, `x`, and learned scalars."""
    keys = formulas_of(step, verb)
    scope.wires |= dict.fromkeys(keys[: keys.index(key)] if key in keys else (), step.span)
    learned = step.get("learned")
    scope.wires |= {name: span for name, span, _ in learned} if isinstance(learned, Mapping) else {}
    scope.wires.setdefault("x", None)
    return Context("formula", scope)

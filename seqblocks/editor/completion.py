"""Complete a word: keys, verbs, arguments, wires, names, by what is in scope at the cursor."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

from seqblocks import graph
from seqblocks.analysis.analyse import Analysis, analyse_text
from seqblocks.analysis.scope.step import Verb
from seqblocks.analysis.scope.values import inheriting
from seqblocks.combinators import Combinator
from seqblocks.descriptions import reference
from seqblocks.editor.context import Context, context_of, holds_steps
from seqblocks.editor.cursor import HOLE, Cursor, at_cursor
from seqblocks.editor.hover import COMMON, about_argument, about_block, about_verb
from seqblocks.editor.layers import half_written, tails
from seqblocks.editor.opened import Opened
from seqblocks.editor.positions import Spot
from seqblocks.errors import Span
from seqblocks.language.arguments import DEPTH, Argument
from seqblocks.language.document import Mapping, Node, Scalar, Sequence
from seqblocks.language.expressions import FUNCTIONS
from seqblocks.language.formulas import OF_WIRES
from seqblocks.language.spec import Block, SpecFile
from seqblocks.language.spec_files import bundled, specs_beside
from seqblocks.language.uses import added
from seqblocks.op import Op
from seqblocks.parameters import INITIALISERS
from seqblocks.types import Kind

_OPERAND = re.compile(r"(?:\b(?:if|and|or|not)|[-+*/<>=])\s*$")  # what a number follows in a condition
SHARING = ("E203", "E312", "E320", "E321", "E322")  # faults of what is shared or tied
TRIED = 8  # maximum steps that are tried as values of `share:` and `tie:`
ItemKind = Literal["key", "word", "verb", "block", "wire", "name", "file", "function"]


class Item(NamedTuple):
    """One word that may be written. text: what to insert, with $1, $2 where the values go. more: an edit elsewhere."""

    label: str
    kind: ItemKind
    text: str
    detail: str = ""
    about: str = ""
    more: tuple[Span, str] | None = None


class Completion(NamedTuple):
    """The items, in the order of their relevance, and the word that they replace."""

    span: Span
    items: list[Item]


def complete(opened: Opened, spot: Spot) -> Completion | None:
    """Return what may be written at a position, or None if nothing is known."""
    offset = opened.lines.offset_of(spot)
    if found := _of_layers(opened, offset):
        return found
    cursor = at_cursor(opened.text, offset)
    if cursor is None:
        return None
    maker, context = _context(opened, cursor)
    return Completion(opened.span(cursor.start, cursor.end), [*_items(context, maker)]) if context else None


def _context(opened: Opened, cursor: Cursor) -> tuple[_Maker, Context | None]:
    """Return what may be written at a cursor."""
    analysis = opened.again(cursor.text)
    file = analysis.file or opened.known.analysis.file or _unfinished(cursor.root)
    if opened.known.analysis.file:
        file.visible = {**opened.known.analysis.file.visible, **file.visible}
    return _Maker(opened, cursor, file, analysis), context_of(cursor.path, file)


def _of_layers(opened: Opened, offset: int) -> Completion | None:
    """Return how a reference to a wire of a layer may go on, or None if there is none at an offset."""
    half = half_written(opened.text, offset)
    if half is None:
        return None
    text = opened.text[: half.start] + opened.text[half.end :]  # the reference is a wire where a word could be one
    cursor = at_cursor(text, half.start)
    maker, context = _context(opened, cursor) if cursor else (None, None)
    if maker is None or context is None or context.kind != "wire" or half.word not in context.scope.layers:
        return None
    layers = context.scope.layers[half.word]
    items = [
        Item(label, "wire", written, maker.type_of(layers.wires.get(name)))
        for label, written, name in tails(half, layers.wires, layers.above)
    ]
    if half.needs_quotes(opened.text):
        first = opened.span(half.start, half.start), '"'
        items = [each._replace(text=f'{each.text}"', more=first) for each in items]
    if half.part == "index":
        items += maker.names(context)
    last = re.match(r"\w*", opened.text[offset:])
    return Completion(opened.span(half.at, offset + len(last[0] if last else "")), items)


def _unfinished(root: Node) -> SpecFile:
    """Return what is known of a file that defines neither a model nor a block yet."""
    tree = root if isinstance(root, Mapping) else Mapping(root.span, 1, 1, {})
    let = tree.get("let")
    return SpecFile(root.span.source, tree, let=let if isinstance(let, Mapping) else None)


def _items(context: Context, maker: _Maker) -> Iterator[Item]:
    match context.kind:
        case "key":
            yield from (maker.key(word, "") for word in context.words if word not in context.taken)
        case "word":
            yield from (Item(word, "word", word) for word in context.words)
        case "use":
            yield from maker.files()
        case "names":
            yield from maker.names(context, "")
        case "step":
            yield from maker.steps(context)
        case kind:
            yield from _BY_KIND[kind](maker, context)


class _Limits(NamedTuple):
    """The numbers that an argument may be: from low to high, without these if they are not included."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    whole: bool = False

    @classmethod
    def of(cls, argument: reference.Argument | Argument | None) -> _Limits:
        match argument:
            case reference.Argument(limits=limits, kind=kind):
                low, high = limits.get("ge", -math.inf), limits.get("le", math.inf)
                return cls(low, high, limits.get("gt", -math.inf), limits.get("lt", math.inf), kind.whole)
            case Argument(at_least=low, at_most=high, type=kind):
                return cls(-math.inf if low is None else low, math.inf if high is None else high, whole=kind == "int")
        return cls()

    def hold(self, number: float) -> bool:
        is_whole = not self.whole or float(number).is_integer()
        return self.low <= number <= self.high and self.above < number < self.below and is_whole


class _Maker:
    def __init__(self, opened: Opened, cursor: Cursor, file: SpecFile, analysis: Analysis) -> None:
        self.opened, self.cursor, self.file, self.analysis = opened, cursor, file, analysis

    def key(self, word: str, about: str, value: str = "$1", detail: str = "") -> Item:
        if value == "$1" and word in ("use", "needs"):
            value = "[$1]"
        text = word if self.cursor.colon else f"{word}: {value}"
        return Item(word, "key", text, detail, about)

    def files(self) -> Iterator[Item]:
        root = self.opened.root
        use = root.get("use") if root else None
        given = {item.text for item in use.items if isinstance(item, Scalar)} if isinstance(use, Sequence) else set()
        yield from (Item(name, "file", name, "bundled") for name in _bundled_blocks_by_file() if name not in given)
        if self.opened.path:
            others = sorted(specs_beside(self.opened.path))
            yield from (Item(f"./{name}", "file", f"./{name}") for name in others if name != self.opened.path.name)

    # --- verbs --------------------------------------------------------------------------------------------------------

    def verbs(self, context: Context) -> Iterator[Item]:
        for name in context.scope.passed:
            yield Item(name, "block", name, "steps that the block is given")
        for name, block in self.file.visible.items():
            if not block.incomplete:
                needs = _needs_of(block)
                yield self._verb(name, "block", needs, block.about, about_block(block), self._name(context, name))
        for name, verb in reference.verbs().items():
            needs = self._needs(name, verb)
            own = "" if issubclass(verb, Op) and verb.parameters is Op.parameters else self._name(context, name)
            yield self._verb(name, "verb", needs, _first_line(verb), about_verb(verb), own)
        for name, (file, block) in bundled_blocks().items():
            if name not in self.file.visible and name not in context.scope.passed:
                edit = self._use(file)
                if edit:
                    about = about_block(block)
                    own = self._name(context, name)
                    found = self._verb(name, "block", _needs_of(block), f"from {file}", about, own)
                    yield found._replace(more=edit)

    def _verb(
        self, name: str, kind: ItemKind, needs: list[tuple[str, str]], detail: str, about: str, own: str = ""
    ) -> Item:
        """Return the item of a verb. needs: its required arguments, and the brackets of their values. own: its name."""
        if self.cursor.colon or not (needs or own):
            return Item(name, kind, name, detail, about)
        values = [f"{key}: {_blank(brackets, at)}" for at, (key, brackets) in enumerate(needs, 1)]
        text = f"{name}: {{{', '.join([f'name: {own}'] * bool(own) + values)}}}"
        return Item(name, kind, f"{{{text}}}" if self.cursor.bracket == "[" else text, detail, about)

    def _name(self, context: Context, verb: str) -> str:
        """Return the name that a step with parameters needs, as another one is stored under its verb; "" if none is."""
        beside = context.scope.beside
        if verb not in beside or (beside[verb].get("name") is None and self.stored.get(beside[verb].span[1:]) is False):
            return ""
        return next(name for at in range(2, len(beside) + 3) if (name := f"{verb}_{at}") not in beside)

    def _needs(self, name: str, verb: reference.Verb) -> list[tuple[str, str]]:
        """Return the arguments that a verb requires here, and the brackets of those that are steps."""
        ports = [(port.name, "") for port in reference.ports(verb) if reference.is_required(port)]
        given = [(each.name, "[") for each in reference.arguments(verb) if each.holds_steps][: name != "parallel"]
        plain = [
            (each.name, "") for each in reference.arguments(verb)
            if not each.holds_steps and (each.required or each.name in verb.usual)
        ]  # fmt: skip
        plain += [(key, "") for key, source in inheriting(verb) if source not in (DEPTH, *_first_input(self.file))]
        return [*ports, *plain, *given]

    def _use(self, file: str) -> tuple[Span, str] | None:
        """Return the edit that adds a bundled file to `use:`, or None if there is no place for it."""
        edit = added(self.opened.root, file) if self.opened.root else None
        now = self.opened.now(edit[0]) if edit else None
        return (now, edit[1]) if edit and now else None

    # --- arguments ----------------------------------------------------------------------------------------------------

    def arguments(self, context: Context) -> Iterator[Item]:
        verb = context.verb
        assert verb
        abouts = _abouts(verb)
        ordered = [*verb.required, *(key for key in verb.own if key not in verb.required)]
        for key in (*ordered, *(key for key in verb.common if key not in verb.own)):
            if key in ("share", "tie") and key not in verb.own:
                others = self._others(context, key)[:1]
                if not others or (key == "share" and not self._is_shared(f"share: {others[0]}")):
                    continue
            if key not in context.taken and not (key in ("init", "tie") and _has_no_parameters(verb)):
                needed = "required" if key in verb.required else ""
                value = "[$1]" if holds_steps(verb, key) else "{$1}" if key == "init" else "$1"
                yield self.key(key, abouts.get(key, COMMON.get(key, "")), value, needed)

    def values(self, context: Context) -> Iterator[Item]:
        verb = context.verb
        assert verb
        found = argument = None
        if isinstance(verb.meaning, Block):
            argument = verb.meaning.args.get(context.key)
            kind = argument.type if argument else ""
            yield from _words(("true", "false") if kind == "bool" else ())
        elif isinstance(verb.meaning, type):
            found = next((each for each in reference.arguments(verb.meaning) if each.name == context.key), None)
            if found is None:
                return
            kind = found.kind.kind
            yield from _words(found.kind.choices or (("true", "false") if kind == "flag" else ()))
            if kind in ("mapping", "value"):
                return
        else:
            return
        allowed, limits = found.kind.choices if found else (), _Limits.of(found or argument)
        last = self.cursor.path[-1].node
        alone = isinstance(last, Scalar) and last.text == HOLE  # not a part of an expression
        for item in self.names(context, _VALUES.get(kind, "")):
            written = context.scope.names[item.label] if item.kind == "name" else None
            if allowed and written and written.word and written.word not in allowed:
                continue
            if not (alone and written and written.number is not None and not limits.hold(written.number)):
                yield item

    def names(self, context: Context, kind: str = "number") -> Iterator[Item]:
        """Yield the names of values of a kind, or of any kind if it is "", and of those that may be of it."""
        for name, (own, about, *_) in context.scope.names.items():
            if not kind or own in (kind, ""):
                yield Item(name, "name", name, about)
        if kind in ("number", ""):
            yield from (Item(name, "function", f"{name}($1)", "function") for name in FUNCTIONS)

    def initialisers(self, context: Context) -> Iterator[Item]:
        """Yield initialisers, and the names of values that their numbers and conditions may read."""
        last = self.cursor.path[-1].node
        before = last.text.partition(HOLE)[0] if isinstance(last, Scalar) else ""
        if before.count("(") > before.count(")") or _OPERAND.search(before):
            yield from self.names(context, "")
        else:
            yield from (Item(name, "function", name) for name in [*INITIALISERS, "default"])
            yield from self.names(context, "")

    def wires(self, context: Context) -> Iterator[Item]:
        for name, maker in reversed(context.scope.wires.items()):
            yield Item(name, "wire", name, self.type_of(maker))

    def formula(self, context: Context) -> Iterator[Item]:
        yield from (item for item in self.wires(context) if item.label.isidentifier() and item.label != "input")
        yield from (Item(name, "function", f"{name}($1)", "function") for name in OF_WIRES)
        yield from (Item(name, "name", name, about) for name, (_, about, *_) in context.scope.names.items())

    def steps(self, context: Context) -> Iterator[Item]:
        """Yield the steps above whose parameters a step can share or tie, the last one first.

        The nearest ones are tried; what a step with faults can share is not known. After a dot, and for a single
        parameter, what is inside these steps and has the same shapes.
        """
        word, parameter = self.opened.text[self.cursor.start : self.cursor.end], self._tied_parameter(context)
        if parameter or (context.key == "tie" and "." in word):
            yield from (Item(path, "word", path) for path in self._paths(context, parameter, whole="." in word))
            return
        for number, name in enumerate(self._others(context, context.key)):
            if number >= TRIED or self._is_shared(name):
                yield Item(name, "word", name)

    def _tied_parameter(self, context: Context) -> str:
        """Return the parameter that an entry of `tie: {parameter: …}` at the cursor ties, or ""."""
        last = self.cursor.path[-2:]
        is_entry = context.key == "tie" and len(last) == 2 and last[0].key == "tie" and not last[1].on_key
        return (last[1].key or "") if is_entry else ""

    def _paths(self, context: Context, parameter: str, whole: bool) -> Iterator[str]:
        """Yield the steps above, and those inside them, whose parameters can be tied to those of the step.

        parameter: if given, single parameters to which it can be tied. whole: also those inside steps.
        """
        body, step = self.analysis.lowered.body, context.step
        nodes = dict(graph.walk_named(body)) if body else {}
        places: dict[tuple[int, ...], str] = {}
        for path, node in nodes.items():
            places.setdefault(node.span[1:], path)
        own = nodes[places[step.span[1:]]].parameters if step and step.span[1:] in places else {}
        wanted = {name: x.shape for name, x in own.items() if name == parameter or not parameter}
        for name in self._others(context, "tie"):
            place = places.get(context.scope.steps[name].span[1:])
            for path, node in nodes.items() if place and wanted else ():
                if path != place and not (whole and path.startswith(f"{place}.")):
                    continue
                theirs = {key: x.shape for key, x in node.parameters.items()}
                written = name + path[len(place or "") :]
                if parameter:
                    yield from (f"{written}.{key}" for key, shape in theirs.items() if shape == wanted[parameter])
                elif wanted.items() <= theirs.items():
                    yield written

    def _is_shared(self, text: str) -> bool:
        """Return whether a text in the place of the word at the cursor shares or ties parameters without a fault."""
        hole = f"{HOLE}: " if ":" in text and f"{HOLE}: " in self.cursor.text else HOLE
        tried = self.opened.again(self.cursor.text.replace(hole, text, 1))
        start = self.opened.lines.spot_at(self.cursor.start)
        spans = (each.span for each in tried.diagnostics if each.span and each.code in SHARING)
        line = (span for span in spans if self.opened.is_own(span) and span.line == start.line)
        return not any(start.column <= span.column <= start.column + len(text) for span in line)

    def _others(self, context: Context, key: str) -> list[str]:
        """Return the names of the steps above that `share:` or `tie:` can refer to, the last one first."""
        steps = reversed(context.scope.steps.items())
        if key == "share" and context.step:
            verb = context.step.verb
            return [name for name, step in steps if step.verb == verb and self.stored.get(step.span[1:]) is not False]
        return [name for name, step in steps if self.stored.get(step.span[1:]) is not False]

    @cached_property
    def stored(self) -> dict[tuple[int, ...], bool]:
        """Whether the steps in this file have parameters, by the places of their verbs, where that is known."""
        known = (each for each in self.analysis.steps if self.opened.is_own(each.span) and each.params is not None)
        return {each.span[1:]: bool(each.params) for each in known}

    @cached_property
    def types(self) -> dict[tuple[int, ...], str | None]:
        """The types of the outputs of the steps in this file, by the places of their verbs."""
        return {step.span[1:]: step.type for step in self.analysis.steps if self.opened.is_own(step.span)}

    def type_of(self, maker: Span | None) -> str:
        return (self.types.get(maker[1:]) if maker else None) or ""

    def parameters(self, context: Context) -> Iterator[Item]:
        body, step = self.analysis.lowered.body, context.step
        assert step
        nodes = [node for node in graph.walk(body) if node.verb == step.verb] if body else []
        names = dict.fromkeys(name for node in nodes for name in node.parameters)
        yield from (self.key(name, "", value="$1") for name in names if name not in context.taken)


_BY_KIND: dict[str, Callable[[_Maker, Context], Iterator[Item]]] = {
    "verb": _Maker.verbs, "argument": _Maker.arguments, "value": _Maker.values, "wire": _Maker.wires,
    "formula": _Maker.formula, "parameter": _Maker.parameters, "initialiser": _Maker.initialisers,
}  # fmt: skip

# The kinds of arguments of verbs and of blocks, as those of names.
_VALUES = {
    "number": "number", "int": "number", "float": "number", "flag": "flag", "bool": "flag", "word": "word",
    "words": "word",
}  # fmt: skip


def _has_no_parameters(verb: Verb) -> bool:
    """Return whether no step of a verb has parameters of its own."""
    meaning = verb.meaning
    if isinstance(meaning, type) and issubclass(meaning, Combinator):
        return not meaning.takes_init
    return isinstance(meaning, type) and issubclass(meaning, Op) and meaning.parameters is Op.parameters


def _words(words: tuple[str, ...]) -> Iterator[Item]:
    return (Item(word, "word", word) for word in words)


def _blank(brackets: str, at: int) -> str:
    return f"[${at}]" if brackets else f"${at}"


def _first_line(verb: reference.Verb) -> str:
    return reference.about(verb).partition("\n")[0]


def _first_input(file: SpecFile) -> tuple[str, ...]:
    """Return the keys of the first input of a model, which say its kind; those of all kinds if there is no model."""
    inputs = file.model.get("inputs") if file.model else None
    first = next((node for _, _, node in inputs), None) if isinstance(inputs, Mapping) else None
    found = first or (file.model.get("input") if file.model else None)
    return tuple(found.entries) if isinstance(found, Mapping) else get_args(Kind)


def _needs_of(block: Block) -> list[tuple[str, str]]:
    required = (each for each in block.args.values() if each.default is None)
    return [(each.name, "[" if each.type == "steps" else "") for each in required]


def _abouts(verb: Verb) -> dict[str, str]:
    """Return the descriptions of the arguments of a verb."""
    if isinstance(verb.meaning, Block):
        return {name: f"{each.type}. {each.meaning()}" for name, each in verb.meaning.args.items()}
    if not isinstance(verb.meaning, type):
        return {}
    found = {each.name: about_argument(each) for each in reference.arguments(verb.meaning)}
    if issubclass(verb.meaning, Op):
        found |= {reference.port_key(port): reference.describe_port(port) for port in verb.meaning.ports}
    return found


@lru_cache(maxsize=1)
def bundled_blocks() -> dict[str, tuple[str, Block]]:
    """Return the blocks of the bundled files that are made to be used, each with the name of its file."""
    return {name: (file, block) for file, blocks in _bundled_blocks_by_file().items() for name, block in blocks.items()}


@lru_cache(maxsize=1)
def _bundled_blocks_by_file() -> dict[str, dict[str, Block]]:
    found = {}
    for name, path in bundled().items():
        if path.parent.name == "blocks":
            file = analyse_text(path.read_text("utf-8"), str(path), path.parent, kind="bundled").file
            found[name] = dict(file.blocks) if file else {}
    return found

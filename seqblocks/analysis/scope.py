"""What names stand for at one place of a spec, and how an argument's text becomes its value.

Whether a value is an expression, a word or a flag is decided by the argument's type, never by how it looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from seqblocks.errors import Fault, Note, Report, Span, listing, quote
from seqblocks.language import expressions
from seqblocks.language.document import MAX_DEPTH, SOLE, Mapping, Node, Scalar, Sequence, kind_of, plain
from seqblocks.language.expressions import MAX_MAGNITUDE, UNKNOWN
from seqblocks.language.spec import STEP_KEYS, is_name
from seqblocks.language.vocabulary import did_you_mean, missing_colon
from seqblocks.op import FieldKind

# A step's name becomes an attribute of a torch module; these are taken there, or are methods of a built model.
# tests/torch/test_module.py holds the list against the real thing.
RESERVED_NAMES = frozenset(
    (
        "forward", "fwd", "rev", "rows", "rows_reverse", "columns", "columns_reverse", "graph", "step", "init_state",
        "parameter_groups", "tie", "reset_parameters", "frame_size", "input", "T_destination", "add_module", "apply",
        "bfloat16", "buffers", "call_super_init", "children", "compile", "cpu", "cuda", "double", "dump_patches",
        "eval", "extra_repr", "float", "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu",
        "load_state_dict", "modules", "mtia", "named_buffers", "named_children", "named_modules", "named_parameters",
        "parameters", "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook",
        "register_full_backward_hook", "register_full_backward_pre_hook", "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook", "register_module", "register_parameter", "register_state_dict_post_hook",
        "register_state_dict_pre_hook", "requires_grad_", "set_extra_state", "set_submodule", "share_memory",
        "spec", "state_dict", "to", "to_empty", "train", "training", "type", "xpu", "zero_grad",
    )
)  # fmt: skip


MAX_VALUES = 100_000  # in a list, with those of the lists in it
MAX_WRITTEN = 4  # notes about where a value was written
MAX_TRAIL = 8  # notes about the blocks that led to a fault


class Names(MappingABC[str, Any]):
    """Numbers and words by name. `let` entries are computed when first asked for, so their order does not matter."""

    def __init__(self, outer: MappingABC[str, Any] | None = None, values: dict[str, Any] | None = None) -> None:
        self.outer: MappingABC[str, Any] = outer if outer is not None else {}
        self.known: dict[str, Any] = values or {}
        self.pending: dict[str, Callable[[list[str]], Any]] = {}  # each is told the ring of names that it closes
        self.written: dict[str, tuple[Node, Names]] = {}  # where a value comes from, and what its own names stand for
        self.spoilt: set[str] = set()  # expressions over names of this scope whose value was at fault
        self.vague = False  # whether there are names here that could not be read
        self.of_block = False  # whether these are the arguments and the `let:` of a block

    def __getitem__(self, name: str) -> Any:
        if name in self.pending:
            self._compute(name)
        return self.known[name] if name in self.known else self.outer[name]

    def _compute(self, name: str) -> None:
        # what an entry needs is computed before it, so that a long chain of entries is no deep recursion
        coming = {name: iter(_needed(self.written[name][0]))}
        while coming:
            last = next(reversed(coming))
            ring: list[str] = []
            for each in coming[last]:
                if each in coming:
                    names = [*coming]
                    ring = [*names[names.index(each) :], each]
                elif each in self.pending:
                    coming[each] = iter(_needed(self.written[each][0]))
                else:
                    continue
                break
            if ring or next(reversed(coming)) == last:
                compute = self.pending.pop(last)
                self.known[last] = compute(ring)
                del coming[last]

    def __contains__(self, name: object) -> bool:
        return name in self.known or name in self.pending or name in self.outer

    def __iter__(self) -> Iterator[str]:
        return iter({**self.known, **self.pending, **dict.fromkeys(self.outer)})

    def __len__(self) -> int:
        return len(list(iter(self)))

    def may_hold(self, name: str) -> bool:
        """Whether a name that is not known may be one that could not be read, which is told."""
        here: Any = self
        while isinstance(here, Names):
            if here.vague and name.isidentifier():
                return True
            here = here.outer
        return False

    def home(self, names: Iterable[str]) -> Names | None:
        """The innermost scope that holds one of these names: what is made of them has one value there."""
        here: Any = self
        wanted = tuple(names)
        while isinstance(here, Names):
            if any(name in here.known or name in here.pending for name in wanted):
                return here
            here = here.outer
        return None

    def source(self, name: str) -> tuple[Node, Names] | None:
        """The text that gave a name its value, and the names that were in scope there."""
        home = self.home([name])
        return None if home is None else home.written.get(name)

    def spoil(self, text: str, names: tuple[str, ...], blamed: bool = True) -> None:
        """An expression's value was at fault: from here on it is UNKNOWN, and so is what is made of it.

        A bare name leads on to the text behind it, so that a value handed from block to block is at fault once. Which
        name of a longer expression is to blame, nobody knows: inside a block all of them are UNKNOWN, for the rest of
        that block hangs on the same arguments; outside it only that very expression is.
        """
        coming = [(self, text, names, blamed)]
        while coming:
            scope, text, names, blamed = coming.pop()
            home = scope.home(names)
            if home is None or text in home.spoilt:
                continue
            home.spoilt.add(text)
            if text.isidentifier():
                home.known[text] = UNKNOWN
                node, behind = home.written.get(text, (None, home))
                if isinstance(node, Scalar) and isinstance(node.value, str) and (blamed or behind is home):
                    coming.append((behind, node.value, tuple(_names_in(node.value)), blamed))
            elif home.of_block:
                coming += [(home, name, (name,), False) for name in names if scope.home([name]) is home]

    def settle(self) -> None:
        """Compute every `let` entry, so that a fault in one that nobody uses is told too."""
        for name in list(self.pending):
            self[name]


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """One step, its keys sorted: what every verb has, and the verb's own."""

    verb: str
    span: Span  # of the verb
    fields: dict[str, tuple[Span, Node]]
    common: dict[str, tuple[Span, Node]]
    alias: Span | None = None  # where it, or its arguments, are repeated with `*anchor`, and written elsewhere
    torn: bool = False  # whether a comma has cut its keys, which is told
    effort: int = 1  # what reading its arguments costs each time, about 5 us each

    def key_span(self, key: str) -> Span:
        entry = self.fields.get(key) or self.common.get(key)
        return entry[0] if entry else self.span

    def value_span(self, key: str | None) -> Span:
        entry = (self.fields.get(key) or self.common.get(key)) if key else None
        return entry[1].span if entry else self.span


@dataclass(slots=True, eq=False, repr=False)
class Scope:
    """The report, the names in scope, and the trail of blocks that led here."""

    report: Report
    names: Names
    trail: tuple[Note, ...] = ()
    looked_up: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by a value's node: names, which are no wires

    # --- faults -----------------------------------------------------------------------------------------------------

    def fault(self, fault: Fault, where: Step | Node | Span | None) -> None:
        """Report a fault: at the argument it names, with where its value was written and the trail of blocks."""
        node: Node | None = None
        span: Span | None
        if isinstance(where, Step):
            span = where.value_span(fault.at)
            node = where.fields[fault.at][1] if fault.at in where.fields else None
        elif where is None or isinstance(where, Span):
            span = where
        else:
            span, node = where.span, where
        inner = span if span and span.source.bundled else None
        own = self._own_line(inner, node) if inner else span
        self.report.fault(fault, own, lambda: self._notes(node, own, inner), inner)
        if isinstance(node, Scalar) and id(node) in self.looked_up:
            self.names.spoil(node.text, self.looked_up[id(node)])

    def _own_line(self, inner: Span, node: Node | None) -> Span:
        """The innermost place of the reader's own files that led to a line of a bundled block.

        It is the argument that gave the value at fault, where it is known to be that one alone, else the step that
        uses the block.
        """
        names, seen = self.names, set[int]()
        while isinstance(node, Scalar) and isinstance(node.value, str) and id(node) not in seen:
            seen.add(id(node))
            found = names.source(node.text)
            if found is None:
                break
            node, names = found
            if not node.span.source.bundled:
                if node.span.source.is_override:
                    break
                return node.span
        steps = (note.span for note in reversed(self.trail) if note.span)
        return next((span for span in steps if not span.source.bundled), inner)

    def _notes(self, node: Node | None, own: Span | None, inner: Span | None) -> list[Note]:
        """Where the value at fault was written, the line of a bundled block, and the blocks that led there."""
        trail = tuple(note for note in self.trail[::-1] if not inner or note.span != own)
        if len(trail) > MAX_TRAIL:
            between = Note(f"… and {len(trail) - MAX_TRAIL + 1} blocks between")
            trail = (*trail[: MAX_TRAIL // 2], between, *trail[1 - MAX_TRAIL // 2 :])
        notes = [*self._written(node)] if node else []
        if inner and inner != own:
            line = inner.source.line(inner.line).strip()
            notes.append(Note(f"the line of the bundled block: `{line[:100]}{'…' if len(line) > 100 else ''}`", inner))
        return [*notes, *trail]

    def _written(self, node: Node) -> Iterator[Note]:
        """Where the numbers behind a value stand: entries of `let:`, arguments of a block, and what those name."""
        each = node.items if isinstance(node, Sequence) else [node]
        coming = [(name, self.names) for item in each for name in self.looked_up.get(id(item), ())]
        seen: set[int] = set()
        count = 0
        while coming and count < MAX_WRITTEN and len(seen) < 4 * MAX_WRITTEN:
            name, names = coming.pop(0)
            found = names.source(name)
            if found is None or id(found[0]) in seen or names[name] is UNKNOWN:
                continue
            text, behind = found
            seen.add(id(text))
            shown = f"`{name}` is {_shown(names[name])}"
            bare = isinstance(text, Scalar) and isinstance(text.value, str) and text.value.isidentifier()
            override = text.span.source.is_override  # which is no place in a file
            if not (bare and text.span.source.bundled):  # a block that only hands the value on
                count += 1
                yield Note(f"{shown}: {text.span.source.name}") if override else Note(shown, text.span)
            if isinstance(text, Scalar) and isinstance(text.value, str):
                coming += [(other, behind) for other in _names_in(text.value) if other in behind]

    def is_name(self, name: str, span: Span) -> bool:
        """Whether `name` may be a namespace; told if not."""
        if name == "input":
            self.fault(Fault("E311", "'input' is what the steps were given", hint="choose another name"), span)
            return False
        if name in RESERVED_NAMES or name.startswith("_"):
            self.fault(Fault("E311", f"{quote(name)} is reserved: a torch module has it already"), span)
            return False
        return is_name(self.report, name, span)

    # --- arguments --------------------------------------------------------------------------------------------------

    def number(self, node: Node, whole: bool = False, optional: bool = False) -> Any:
        """A number or an expression's value; UNKNOWN after a fault."""
        value = self._number(node, optional)
        if isinstance(value, float) and not math.isfinite(value):
            self.fault(Fault("E203", "a finite number is needed here", found=f"{value:g}"), node)
            return UNKNOWN
        if isinstance(value, int | float) and abs(value) > MAX_MAGNITUDE:
            self.fault(Fault("E504", "the number is too large", expected="at most 10^18"), node)
            return UNKNOWN
        if whole and isinstance(value, float):
            if value == int(value):
                return int(value)
            hint = "use ceil(…), floor(…) or // for a whole number"
            self.fault(Fault("E503", "a whole number is needed here", found=f"{value:g}", hint=hint), node)
            return UNKNOWN
        return value

    def _number(self, node: Node, optional: bool) -> Any:
        match node:
            case Scalar(value=None) if optional:
                return None
            case Scalar(value=bool()):
                pass
            case Scalar(value=int() | float() as value):
                return value
            case Scalar(value=str(text)):
                value = self.evaluate(text, node)
                if value is None and optional:
                    return None
                if value is not UNKNOWN and (isinstance(value, bool) or not isinstance(value, int | float)):
                    found = f"{quote(text)}, which is {_shown(value)}"
                    self.fault(Fault("E203", "a number is needed here", found=found), node)
                    return UNKNOWN
                return value
        self.fault(Fault("E203", "a number or an expression is needed here", found=kind_of(node)), node.span)
        return UNKNOWN

    def evaluate(self, text: str, node: Scalar) -> Any:
        """An expression's value in this scope; UNKNOWN after a fault. A bare name may stand for any kind of value."""
        try:
            if text.isidentifier() and text in self.names:
                self.looked_up[id(node)] = (text,)
                return self.names[text]
            expression = expressions.parse(text)
            names = self.looked_up[id(node)] = tuple(dict.fromkeys(name for name, _ in expression.names))
            home = self.names.home(names)
            return UNKNOWN if home is not None and text in home.spoilt else expression.evaluate(self.names)
        except expressions.NameFault as fault:
            if self.names.may_hold(fault.name):
                return UNKNOWN
            self.fault(fault, node.span.within(node.offset + fault.offset, len(fault.name)))
        except Fault as fault:
            self.fault(fault, node)
        return UNKNOWN

    def argument(self, node: Node, kind: FieldKind) -> Any:
        """The value of an argument whose field is of `kind`; UNKNOWN after a fault."""
        match kind.kind:
            case "number":
                return self.number(node, kind.whole, kind.optional)
            case "flag":
                return self._flag(node, kind)
            case "word":
                return self.word(node, kind)
            case "words":
                if isinstance(node, Sequence):
                    each = kind._replace(choices=()) if kind.free else kind
                    items = [self.word(item, each) for item in node.items]
                    return UNKNOWN if any(i is UNKNOWN for i in items) else items
                return self.word(node, kind)
        return node

    def _flag(self, node: Node, kind: FieldKind) -> Any:
        if isinstance(node, Scalar):
            if isinstance(node.value, bool) or (node.value is None and kind.optional):
                return node.value
            if isinstance(node.value, str):
                word = node.text.lower()
                if word in _TRUTHS and node.text not in self.names:
                    hint = f"YAML 1.2 knows only true and false: write {_TRUTHS[word]}"
                    self.fault(Fault("E203", "true or false is needed here", found=kind_of(node), hint=hint), node.span)
                    return UNKNOWN
                if word in ("true", "false") and node.text not in self.names:
                    hint = f"leave the quotes out: {word}"
                    fault = Fault("E203", "true or false is needed here", found="text in quotes", hint=hint)
                    self.fault(fault, node.span)
                    return UNKNOWN
                value = self.evaluate(node.text, node)
                if isinstance(value, bool) or value is UNKNOWN:
                    return value
        self.fault(Fault("E203", "true or false is needed here", found=kind_of(node)), node)
        return UNKNOWN

    def word(self, node: Node, kind: FieldKind) -> Any:
        """A legal word, or what a name of this scope stands for."""
        if not isinstance(node, Scalar) or (node.value is None and not kind.optional):
            self.fault(Fault("E203", "a word is needed here", expected=_choices(kind), found=kind_of(node)), node.span)
            return UNKNOWN
        if node.value is None:
            return None
        text = node.text
        if text in kind.choices:
            return text
        if text in self.names:
            self.looked_up[id(node)] = (text,)
            value = self.names[text]
            if value is None and kind.optional:
                return None
            if value is UNKNOWN or not kind.choices or value in kind.choices:
                return value
            if isinstance(value, list) and kind.kind == "words":
                return value
            message = f"{_shown(value)} is not a legal word for {text}"
            hint = partial(_word_hint, value, kind) if isinstance(value, str) else None
            self.fault(Fault("E208", message, expected=_choices(kind), hint=hint), node)
            return UNKNOWN
        if not kind.choices and isinstance(node.value, str):
            return text
        if self.names.may_hold(text):
            return UNKNOWN
        self.fault(
            Fault(
                "E208",
                f"{quote(text)} is not a legal word here",
                expected=_choices(kind),
                hint=lambda: _word_hint(text, kind, self.names),
            ),
            node.span,
        )
        return UNKNOWN

    def comma_trap(self, node: Mapping) -> frozenset[str]:
        """Keys that are the torn halves of a call with a comma inside { }; told once, as what it is."""
        torn: set[str] = set()
        keys = list(node)
        for at, (key, _, value) in enumerate(keys):
            if not isinstance(value, Scalar) or value.text.count("(") <= value.text.count(")"):
                continue
            pieces = [value.text]
            for other, _, empty in keys[at + 1 :]:
                if not (isinstance(empty, Scalar) and empty.value is None):
                    break
                pieces.append(other)
                if ")" in other:
                    break
            if len(pieces) > 1:
                text = ", ".join(pieces)
                message = f"the comma in {quote(text)} ends the value: inside braces, quote a call that has a comma"
                self.fault(Fault("E110", message, hint=f'{key}: "{text}"'), value.span)
                torn |= {key, *pieces[1:]}
        return frozenset(torn)

    def let(self, node: Mapping | None) -> None:
        """Add `let:` entries to the names of this frame."""
        if node is None:
            return
        torn = self.comma_trap(node)
        for key, span, value in node:
            if key in torn:
                self.names.known[key] = UNKNOWN
            elif is_name(self.report, key, span, key=True):
                self.names.pending[key] = self._thunk(span, value)
                self.names.written[key] = (value, self.names)
            else:
                self.names.vague = True

    def _thunk(self, span: Span, node: Node) -> Callable[[list[str]], Any]:
        def compute(ring: list[str]) -> Any:
            if not ring:
                return self.free_value(node)
            self.fault(Fault("E505", f"let entries need each other: {' -> '.join(ring)}"), span)
            return UNKNOWN

        return compute

    def free_value(self, node: Node) -> Any:
        """The value of something whose type nobody declares (`let`, a default): number, word, flag, list."""
        if isinstance(node, Sequence):
            values = Values(self.free_value(item) for item in node.items)
            if values.size > MAX_VALUES or values.depth > MAX_DEPTH:
                expected = f"at most {MAX_VALUES:,} values, {MAX_DEPTH} lists in one another"
                self.fault(Fault("E104", "the list is too large", expected=expected), node.span)
                return UNKNOWN
            return values
        if isinstance(node, Mapping):
            return plain(node)
        assert isinstance(node, Scalar)
        if not isinstance(node.value, str):
            return node.value
        text = node.value
        if text.isidentifier() and text not in self.names:
            return text  # a word
        return self.evaluate(text, node)

    # --- steps

    def read_step(self, item: Node, keys: Callable[[str], Keys | None]) -> Step | None:
        """A document node as a step; None after a fault. `keys` says what a verb takes; None where there is none."""
        match item:
            case Scalar(value=str(verb)):
                return Step(verb, item.span, {}, {})
            case Mapping(entries=entries) if len(entries) == 1:
                ((verb, span, node),) = list(item)
            case Mapping(entries=entries) if entries:
                verb, span, node = next(iter(item))
                others = [key for key in entries if key != verb]
                steps = [other for other in others if keys(other)]
                hint = f"indent {listing(others)} below `{verb}:`" if keys(verb) else "one verb a step"
                if steps and keys(verb):
                    hint = f"put '- ' before {listing(steps)}: that is a step of its own"
                message = f"a step is one verb with its arguments, not {len(entries)} keys"
                self.fault(Fault("E204", message, found=listing(entries), hint=hint), entries[others[0]][0])
                return None
            case _:
                self.fault(Fault("E204", "a step is a verb, or `verb: {arguments}`", found=kind_of(item)), item.span)
                return None
        if isinstance(node, Scalar) and node.value is None:
            return Step(verb, span, {}, {})
        if not isinstance(node, Mapping):
            alias = None if item.span.holds(span) else item.span
            known = keys(verb)
            if known is None:
                return self._unknown_verb(verb, span, node, keys)
            key = self._sole(verb, node, known)
            return Step(verb, span, {key: (node.span, node)}, {}, alias) if key else None
        if SOLE in node.entries:  # put there by an override
            entries = dict(node.entries)
            where, only = entries.pop(SOLE)
            known = keys(verb)
            key = self._sole(verb, only, known) if known else None
            if key is None:
                return None
            node = replace(node, entries={key: (where, only), **entries})
        torn = self.comma_trap(node)
        fields = {key: (s, n) for key, s, n in node if key not in STEP_KEYS}
        common = {key: (s, n) for key, s, n in node if key in STEP_KEYS}
        inside = next((s for _, s, _ in node), node.span)
        alias = next((o.span for o, first in ((item, span), (node, inside)) if not o.span.holds(first)), None)
        return Step(verb, span, fields, common, alias, bool(torn))

    def _unknown_verb(self, verb: str, span: Span, node: Node, keys: Callable[[str], Keys | None]) -> Step | None:
        """A step whose verb there is not, which is reported when it is lowered, or here if a colon is missing."""
        first = verb.partition(" ")[0]
        if first == verb or not keys(first):
            return Step(verb, span, {}, {})
        fault = Fault("E301", f"there is no verb {quote(verb)}", hint=missing_colon(verb))  # `- embed {features: 64}`
        self.fault(fault, span.within(0, len(first)))
        return None

    def _sole(self, verb: str, node: Node, known: Keys) -> str | None:
        """The argument that `linear: 64` and `residual: [silu]` give; None after a fault."""
        colon = missing_colon(node.text, known.all) if isinstance(node, Scalar) else None
        if known.steps and isinstance(node, Sequence):
            return known.steps
        if len(known.required) == 1 and not known.steps and isinstance(node, Scalar) and not colon:
            return known.required[0]
        hint = f"{verb}: {{{', '.join(f'{key}: …' for key in known.required)}}}"
        if not known.all:
            hint = f"write `{verb}` alone: it has no arguments"
        elif known.steps:
            hint = f"{verb}: [{node.text if isinstance(node, Scalar) and len(node.text) < 40 else '…'}]"
        elif not known.required:
            own = (key for key in known.all if key not in STEP_KEYS)
            hint = f"name the argument; {verb} takes {listing(own)}"
        message = f"the arguments of {quote(verb)} must be a mapping"
        self.fault(Fault("E203", message, found=kind_of(node), hint=colon or hint), node.span)
        return None


class Values(list[Any]):
    """A list that `let:` or an argument holds, with how many values are in it (lists in lists count for theirs)."""

    __slots__ = ("depth", "size")
    size: int
    depth: int

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.size = 1 + sum(value.size if isinstance(value, Values) else 1 for value in self)
        self.depth = 1 + max((value.depth for value in self if isinstance(value, Values)), default=0)


def effort(node: Node) -> int:
    """What reading a value costs, in units of about 5 us: a long expression counts for several."""
    match node:
        case Scalar():
            return 1 + len(node.text) // 8
        case Sequence():
            return 1 + sum(map(effort, node.items))
        case Mapping():
            return 1 + sum(effort(value) for _, _, value in node)
    return 1


class Keys(NamedTuple):
    """What a verb takes: the argument that a list is, the ones it cannot do without, and all of them."""

    steps: str | None
    required: tuple[str, ...]
    all: tuple[str, ...]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{listing('[…]' if isinstance(each, list) else _shown(each) for each in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quote(value) if isinstance(value, str) else str(value)[:60]


def _names_in(text: str) -> list[str]:
    try:
        return [name for name, _ in expressions.parse(text).names]
    except Fault:
        return []


def _needed(node: Node) -> list[str]:
    """The names that a value of `let:` is made of, and perhaps words."""
    if isinstance(node, Sequence):
        return [name for item in node.items for name in _needed(item)]
    return _names_in(node.value) if isinstance(node, Scalar) and isinstance(node.value, str) else []


_TRUTHS = {**dict.fromkeys(("yes", "on", "y"), "true"), **dict.fromkeys(("no", "off", "n"), "false")}


def _word_hint(word: str, kind: FieldKind, names: Iterable[str] = ()) -> str | None:
    """What may be meant by a word that is not legal."""
    if word.lower() in ("bidirectional", "bidirection", "bidir", "bi", "both") and "reverse" in kind.choices:
        return "[forward, reverse] runs both ways"
    return did_you_mean(word, [*kind.choices, *names])


def _choices(kind: FieldKind) -> str:
    return f"one of {listing(kind.choices)}" if kind.choices else "a word"

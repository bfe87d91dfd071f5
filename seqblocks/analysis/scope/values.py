"""Evaluate arguments.

Whether a text is an expression, a word or a boolean depends on the type of the argument, never on the text itself.
Invalid values are reported and become UNKNOWN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

from seqblocks.analysis.scope.context import Body, Context
from seqblocks.analysis.scope.named_values import Compute, Names, shown_value
from seqblocks.analysis.scope.run import Run
from seqblocks.analysis.scope.step import Step
from seqblocks.errors import Fault, Span, listing, quote
from seqblocks.language.arguments import DEPTH
from seqblocks.language.document import MAX_DEPTH, Mapping, Node, Scalar, Sequence, kind_of, plain, resolve
from seqblocks.language.expressions import MAX_MAGNITUDE, RESERVED, UNKNOWN, NameFault, has_syntax, parse
from seqblocks.language.keys import is_name
from seqblocks.language.spec import SpecFile
from seqblocks.op import FieldKind, Op, field_infos, fields_of
from seqblocks.suggestions import did_you_mean, nearest

MAX_VALUES = 100_000  # in a list, including nested lists
# Where they are not booleans of YAML 1.2.
_TRUTHS = {**dict.fromkeys(("true", "yes", "on", "y"), "true"), **dict.fromkeys(("false", "no", "off", "n"), "false")}


# --- all arguments of a step ------------------------------------------------------------------------------------------


def read_arguments(ctx: Context, step: Step, cls: type[BaseModel]) -> Any:
    """Return the arguments of a step as a pydantic model, or None after a fault or if a value is UNKNOWN."""
    fields = fields_of(cls)
    values: dict[str, Any] = {}
    for key, (_, node) in step.fields.items():
        if key in fields:
            value = argument(ctx, node, fields[key])
            values[key] = plain(node) if value is node and issubclass(cls, Op) else value
        elif issubclass(cls, Op) and cls.open_keys and step.value(key):
            values[key] = number(ctx, node, whole=True)
    _inherit(ctx, cls, values)
    unknown = [key for key, x in values.items() if x is UNKNOWN or (isinstance(x, list) and UNKNOWN in x)]
    for key in unknown:
        del values[key]
    if unknown and not ctx.run.report:  # in an unused block; building a validator takes milliseconds
        return None
    try:
        made = cls.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            if not item["loc"] or item["loc"][0] not in unknown:
                _report_invalid(ctx, step, cls, item)
        return None
    return None if step.incomplete or unknown else made


def _inherit(ctx: Context, cls: type[BaseModel], values: dict[str, Any]) -> None:
    """Add the defaults that come from around the step: the size of the model's input, and `depth`."""
    for key, source in inheriting(cls):
        if key in values:
            continue
        if source == ctx.run.input_kind:
            values[key] = ctx.run.input_features
        elif source == DEPTH and ctx.layers is not UNKNOWN:
            values[key] = ctx.read_depth()


@lru_cache(maxsize=1024)
def inheriting(cls: type[BaseModel]) -> list[tuple[str, str]]:
    """Return the arguments that inherit their default, each with what from: a kind of the model's input, or `depth`."""
    extras = ((key, info.json_schema_extra) for key, info in field_infos(cls).items())
    return [(key, str(extra["inherit"])) for key, extra in extras if isinstance(extra, dict) and "inherit" in extra]


def _report_invalid(ctx: Context, step: Step, cls: type[BaseModel], item: Any) -> None:
    """Report a validation error of pydantic, unless an argument is missing from an incomplete step."""
    key = str(item["loc"][0]) if item["loc"] else None
    if item["type"] == "missing":
        info = field_infos(cls).get(key or "")
        if not step.incomplete:
            name = key or "?"
            hint = f"{name}: {info and info.description}"
            ctx.report(Fault("E202", f"{step.verb} needs {quote(name)}", hint=hint), step.span)
        return
    text = _limit(item)
    code = "E203" if "type" in item["type"] or "parsing" in item["type"] else "E209"
    message = f"{quote(key) if key else 'an argument'} of {step.verb} must be {text}"
    ctx.report(Fault(code, message, at=key, found=str(item["input"])[:60]), step)


def _limit(item: Any) -> str:
    """Return what a value must be, from a validation error of pydantic."""
    text: str = item["msg"][0].lower() + item["msg"][1:]
    text = text.removeprefix("input should be ").removeprefix("value error, ")
    text = text.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return text.replace("a valid tuple", "a list")


# --- one argument -----------------------------------------------------------------------------------------------------


def argument(ctx: Context, node: Node, kind: FieldKind) -> Any:
    """Return the value of an argument of this kind, or the node itself if the argument takes any value."""
    match kind.kind:
        case "number":
            return number(ctx, node, kind.whole, kind.optional)
        case "flag":
            return _flag(ctx, node, kind)
        case "word":
            return _word(ctx, node, kind)
        case "words":
            return _words(ctx, node, kind)
        case "mapping":
            return _entries(ctx, node, kind)
        case "formula":
            return _formula(ctx, node, kind)
    return node


def _formula(ctx: Context, node: Node, kind: FieldKind) -> Any:
    """Return an expression as text, with numbers in place of names in scope, except those that have several values."""
    if not isinstance(node, Scalar) or isinstance(node.value, bool) or (node.value is None and not kind.optional):
        ctx.report(Fault("E203", "expected an expression", found=kind_of(node)), node.span)
        return UNKNOWN
    if not isinstance(node.value, str):
        return node.value if node.value is None else node.text
    try:
        expression, names = parse(node.value), ctx.scope(node.value)
        used = [(name, offset) for name, offset in expression.names if name not in kind.over]
        expression.check_names({**dict.fromkeys(kind.over, 0), **names})
        ctx.refer(node.value, node, used)
        values = {name: names[name] for name, _ in used}
        if UNKNOWN in values.values():
            return UNKNOWN
        numbers = {name: x for name, x in values.items() if isinstance(x, int | float) and not isinstance(x, bool)}
        if wrong := values.keys() - numbers.keys():
            name = min(wrong)
            raise Fault("E203", "expected a number", found=f"{name}, which is {shown_value(values[name])}")
        return expression.bound(numbers)
    except NameFault as fault:
        explain_name(ctx, fault)
        ctx.report(fault, node.part(fault.offset, len(fault.name)))
    except Fault as fault:
        ctx.report(fault, node)
    return UNKNOWN


def _entries(ctx: Context, node: Node, kind: FieldKind) -> Any:
    """Return the entries of a mapping, or those of a mapping in `let:` or an argument, as a pydantic model."""
    assert kind.entries
    if isinstance(node, Scalar):
        value = node.value if node.text not in ctx.names else evaluate(ctx, node.text, node)
        if value is None and kind.optional:
            return None
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(value, dict):
            return _validated(ctx, kind.entries, value, dict.fromkeys(value, node.span), node.span)
    if not isinstance(node, Mapping):
        ctx.report(Fault("E203", "expected a mapping", expected=_keys(kind.entries), found=kind_of(node)), node.span)
        return UNKNOWN
    kinds, values = fields_of(kind.entries), {}
    spans = {}
    for key, span, each in node:
        spans[key] = each.span if key in kinds else span
        value = argument(ctx, each, kinds[key]) if key in kinds else plain(each)
        if value is each:
            value = [number(ctx, item) for item in each.items] if isinstance(each, Sequence) else plain(each)
        values[key] = value
    unknown = any(x is UNKNOWN or (isinstance(x, list) and UNKNOWN in x) for x in values.values())
    if node.incomplete or unknown:
        return UNKNOWN
    return _validated(ctx, kind.entries, values, spans, node.span)


def _validated(ctx: Context, cls: type[BaseModel], values: dict[str, Any], spans: dict[str, Span], whole: Span) -> Any:
    """Return values as a pydantic model, or UNKNOWN after reporting those that are invalid."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        for item in error.errors():
            key = str(item["loc"][0])
            if item["type"] == "extra_forbidden":
                hint = did_you_mean(key, fields_of(cls))
                ctx.report(Fault("E201", f"unknown entry {quote(key)}", expected=_keys(cls), hint=hint), spans[key])
            elif item["type"] == "missing":
                ctx.report(Fault("E202", f"the mapping needs {quote(key)}", expected=_keys(cls)), whole)
            else:
                fault = Fault("E209", f"{quote(key)} must be {_limit(item)}", found=str(item["input"])[:60])
                ctx.report(fault, spans[key])
    return UNKNOWN


def _keys(cls: type[BaseModel]) -> str:
    return f"entries {listing(fields_of(cls), 16)}"


def number(ctx: Context, node: Node, whole: bool = False, optional: bool = False) -> Any:
    """Return a number, or the value of an expression."""
    value: Any = node.value if isinstance(node, Scalar) else UNKNOWN
    if isinstance(node, Scalar) and isinstance(value, str) and not _is_pattern(value):
        value = evaluate(ctx, value, node)
        if value is UNKNOWN:
            return UNKNOWN
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        _report_not_a_number(ctx, node, value)
        return UNKNOWN
    return value if isinstance(value, int) and abs(value) <= MAX_MAGNITUDE else _in_range(ctx, node, value, whole)


def _report_not_a_number(ctx: Context, node: Node, value: Any) -> None:
    """Report an argument that is not a number, or an expression whose value is not."""
    if isinstance(node, Scalar) and isinstance(node.value, str) and value != node.value:
        word = value.partition("*")[0] if isinstance(value, str) else ""  # it may be a misspelt name in `let:`
        found = f"{quote(node.value)}, which is {shown_value(value)}"
        hint = (lambda: did_you_mean(word, ctx.names)) if word else None
        ctx.report(Fault("E203", "expected a number", found=found, hint=hint), node)
    else:
        ctx.report(Fault("E203", "expected a number or an expression", found=kind_of(node)), node.span)


def _in_range(ctx: Context, node: Node, value: float, whole: bool) -> Any:
    """Return a number; report it if it is too large, or if it must be whole and is not."""
    if isinstance(value, float) and not math.isfinite(value):
        fault = Fault("E203", "expected a finite number", found=f"{value:g}")
    elif abs(value) > MAX_MAGNITUDE:
        fault = Fault("E504", "the number is too large", expected="at most 10^18")
    elif whole and value != int(value):
        hint = "use ceil(…), floor(…) or // to get a whole number"
        fault = Fault("E503", "expected a whole number", found=f"{value:g}", hint=hint)
    else:
        return int(value) if whole else value
    ctx.report(fault, node)
    return UNKNOWN


def evaluate(ctx: Context, text: str, node: Scalar, instead: tuple[str, ...] = ()) -> Any:
    """Return the value of an expression. A single name may have any kind of value.

    instead: words that are allowed too, for the message about an unknown name.
    """
    try:
        ctx.refer(text, node)
        if text.isidentifier() and text in ctx.names:
            return ctx.names[text]
        return parse(text).evaluate(ctx.scope(text))
    except NameFault as fault:
        explain_name(ctx, fault)
        if instead and fault.name == text:
            fault.expected = lambda: f"one of {listing([*instead, *sorted(ctx.names)])}"
            fault.hint = lambda: did_you_mean(text, [*instead, *ctx.names])
        ctx.report(fault, node.part(fault.offset, len(fault.name)))
    except Fault as fault:
        ctx.report(fault, node)
    return UNKNOWN


def explain_name(ctx: Context, fault: NameFault) -> None:
    """Add a hint to the fault of an unknown name: it is a verb here, or `depth`."""
    if fault.name in ctx.passed:
        fault.hint = f"it is an argument of type `steps`, which is used as a verb: `- {fault.name}`"
    elif fault.name == DEPTH:
        fault.hint = "`depth` is the number of layers around a step: define your own in `let:` to use it here"
    elif ctx.layers is not None:
        name, hint = fault.name, fault.hint
        fault.hint = lambda: (hint() if callable(hint) else hint) or did_you_mean(name, [DEPTH])


def _flag(ctx: Context, node: Node, kind: FieldKind) -> Any:
    if isinstance(node, Scalar):
        if isinstance(node.value, bool) or (node.value is None and kind.optional):
            return node.value
        if isinstance(node.value, str):
            text = node.text.strip()
            if text.lower() in _TRUTHS and text not in ctx.names:
                ctx.report(_flag_as_text(text, node), node.span)
                return UNKNOWN
            value = text if _is_pattern(text) else evaluate(ctx, text, node, ("true", "false"))
            if isinstance(value, bool) or value is UNKNOWN:
                return value
    ctx.report(Fault("E203", "true or false is needed here", found=kind_of(node)), node)
    return UNKNOWN


def _flag_as_text(text: str, node: Scalar) -> Fault:
    """Return the fault of a text that means true or false: a block of text, quoted, or not a boolean of YAML 1.2."""
    word, span = text.lower(), node.span
    found, hint = kind_of(node), f"YAML 1.2 has only true and false: write {_TRUTHS[word]}"
    if span.source.line(span.line)[span.column - 1 : span.column] in ("|", ">"):
        found, hint = "a block of text", f"write {_TRUTHS[word]} on the line of its key"
    elif text in (word, word.upper(), word.title()) and word in ("true", "false"):
        found, hint = "text in quotes", f"remove the quotes: {word}"
    return Fault("E203", "true or false is needed here", found=found, hint=hint)


def _words(ctx: Context, node: Node, kind: FieldKind) -> Any:
    """Return a word, or a list of words."""
    if not isinstance(node, Sequence):
        return _word(ctx, node, kind)
    each = kind._replace(choices=()) if kind.free else kind
    items = [_word(ctx, item, each) for item in node.items]
    return UNKNOWN if UNKNOWN in items else items


def _word(ctx: Context, node: Node, kind: FieldKind) -> Any:
    """Return an allowed word, or the value of a name."""
    if not isinstance(node, Scalar) or (node.value is None and not kind.optional):
        fault = Fault("E203", "expected a word", expected=_one_of(kind.choices, kind.open), found=kind_of(node))
        ctx.report(fault, node.span)
        return UNKNOWN
    text = node.text.strip()  # a block scalar ends with a newline
    if node.value is None or text in kind.choices:
        return None if node.value is None else text
    if text in ctx.names:
        ctx.refer(text, node)
        return _named_word(ctx, node, text, ctx.names[text], kind)
    if text.endswith("]") and text.partition("[")[0].strip() in ctx.names:
        return _named_word(ctx, node, text, evaluate(ctx, text, node), kind)
    if (kind.open or not kind.choices) and isinstance(node.value, str):
        return text
    message = f"{quote(text)} is not allowed here"
    expected = _one_of(kind.choices, kind.open)
    ctx.report(Fault("E208", message, expected=expected, hint=lambda: _near(text, kind.choices, ctx.names)), node.span)
    return UNKNOWN


def _named_word(ctx: Context, node: Scalar, name: str, value: Any, kind: FieldKind) -> Any:
    """Return the value of a name, or of an entry of a list, if it is an allowed word."""
    if value is UNKNOWN or (value is None and kind.optional) or not kind.choices or value in kind.choices:
        return value
    if kind.open and isinstance(value, str):
        return value
    if isinstance(value, list) and kind.kind == "words":
        return value
    word = value if isinstance(value, str) and name in ctx.names else None  # the place of an entry is not known
    choices = list(dict.fromkeys((*kind.choices, *_compared_words(ctx, name))))
    message = f"{shown_value(value)} is not an allowed value of {name}"
    hint = None if word is None else lambda: _near(word, choices)
    ctx.report(Fault("E208", message, expected=_one_of(choices, kind.open), hint=hint), node)
    return UNKNOWN


def _one_of(choices: Collection[str], is_open: bool) -> str:
    """Return the words that an argument accepts, for a message. is_open: whether it accepts names too."""
    return f"one of {listing(choices)}{', or a name' if is_open else ''}" if choices else "a word"


def _near(word: str, choices: Collection[str], names: Iterable[str] = ()) -> str | None:
    if word.lower() in ("bidirectional", "bidirection", "bidir", "bi", "both") and "reverse" in choices:
        return "use [forward, reverse] for both directions"
    return did_you_mean(word, [*choices, *names])


def _compared_words(ctx: Context, name: str) -> list[str]:
    """Return the words that the conditions in this body compare a name with: a step is made for each."""
    whens = (step.get("when") for step in ctx.body.steps)
    texts = (node.text for node in whens if isinstance(node, Scalar))
    return [word for text in texts for word in re.findall(rf"\b{name} *[=!]= *['\"](\w+)['\"]", text)]


# --- values without a declared type -----------------------------------------------------------------------------------


class Values(list[Any]):
    """A list in `let:` or an argument, with its number of values (including nested lists)."""

    __slots__ = ("depth", "size")
    size: int
    depth: int

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.size = 1 + sum(value.size if isinstance(value, Values) else 1 for value in self)
        self.depth = 1 + max((value.depth for value in self if isinstance(value, Values)), default=0)


def free_value(ctx: Context, node: Node) -> Any:
    """Return the value of a `let:` entry or a default: a number, word, boolean, list or mapping."""
    if isinstance(node, Sequence):
        values = Values(free_value(ctx, item) for item in node.items)
        if values.size > MAX_VALUES or values.depth > MAX_DEPTH:
            expected = f"at most {MAX_VALUES:,} values, nested at most {MAX_DEPTH} deep"
            ctx.report(Fault("E104", "the list is too large", expected=expected), node.span)
            return UNKNOWN
        return values
    if isinstance(node, Mapping):
        return plain(node)
    assert isinstance(node, Scalar)
    if not isinstance(node.value, str):
        return node.value
    text = node.text.strip()  # a block scalar ends with a newline
    if _is_new_word(text, ctx.scope(text)) or _is_pattern(text):
        return text
    return evaluate(ctx, text, node)


def _is_pattern(text: str) -> bool:
    """Return whether a text is words or a pattern of `repeat` or einops rather than an expression."""
    if "->" in text:
        return True
    words = text.split()
    return len(words) > 1 and all(map(_is_word, words)) and not has_syntax(text)


def _is_word(text: str) -> bool:
    """Return whether a text is a word of a pattern, such as `m*7`."""
    name, times, count = text.partition("*")
    return name.isidentifier() and name[0].isascii() and (not times or (count.isdecimal() and count.isascii()))


def _is_new_word(text: str, names: Collection[str]) -> bool:
    """Return whether a text is a word that is not a name in scope, alone or with a count, such as `m*7`.

    A counted word like a name in scope is more likely a misspelt product, and so is a count of 0.
    """
    word, star, count = text.partition("*")
    if star and (not count.strip("0") or word in RESERVED or not isinstance(resolve(word), str)):
        return False
    return (text.isidentifier() or _is_word(text)) and word not in names and not (star and nearest(word, names))


def file_context(run: Run, file: SpecFile) -> Context:
    """Return the outermost context of a file, with the names of its `let:`."""
    known = run.top_names.get(id(file))
    names = run.top_names[id(file)] = known if known is not None else Names()
    ctx = Context(run, file, names, Body({}))
    if known is None:
        add_let(ctx, file.let)
    return ctx


def add_let(ctx: Context, let: Mapping | None) -> None:
    """Add the entries of `let:` to the names in scope."""
    if let is None:
        return
    ctx.names.incomplete |= let.incomplete
    for key, span, value in let:
        if is_name(ctx.run.report, key, span, key=True):
            ctx.names.pending[key] = _computed(ctx, span, value)
            ctx.names.written[key] = (value, ctx.names)
        else:
            ctx.names.incomplete = True


def _computed(ctx: Context, span: Span, node: Node) -> Compute:
    def compute(ring: list[str]) -> Any:
        if not ring:
            return free_value(ctx, node)
        nodes = (ctx.names.written[name][0] for name in ring)
        overridden = next((each.span for each in nodes if each.span.source.is_override), None)
        ctx.report(Fault("E505", f"circular definition in let: {' -> '.join(ring)}"), overridden or span)
        return UNKNOWN

    return compute


def compute_let(ctx: Context, let: Mapping | None, some: Container[str] | None = None) -> None:
    """After all steps of a scope, record the `let:` entries that no step used, and compute them or some of them."""
    for key, _, node in let or ():
        unused = key in ctx.names.pending
        ctx.run.unread[id(node)] = ctx.run.unread.get(id(node), True) and unused
    ctx.names.compute_all(some)


# --- effort of reading ------------------------------------------------------------------------------------------------


def effort(node: Node) -> int:
    """Return the effort of reading a value, in units of about 5 us; long expressions count as several."""
    match node:
        case Scalar():
            return 1 + len(node.text) // 8
        case Sequence():
            return 1 + sum(map(effort, node.items))
        case Mapping():
            return 1 + sum(effort(value) for _, _, value in node)
    return 1


def size(value: Any) -> int:
    """Return the effort of comparing a value, in the units of `effort`."""
    return value.size if isinstance(value, Values) else len(value) // 16 if isinstance(value, str) else 0

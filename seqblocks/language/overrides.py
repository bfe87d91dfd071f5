"""Apply `--set dim=384` and `set={...}`: replace values of a document, addressed by a path of names.

    dim, let.dim                     an entry of the file's own `let:`
    blocks.vil.heads                 the default of a block's argument (or an entry of its `let:`)
    blocks.vil.residual.drop_path    an argument of a step, addressed by the namespaces of the steps
    model.blocks.m.vil.heads         likewise inside the model (here through the word `m` of a repeat)
    input.image.size, expect.params  entries of other sections

A path to a value that does not exist is an error, except for arguments of a step: an argument that the step leaves at
its default can be set, and is checked as if it were written in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from collections.abc import Mapping as MappingABC
from itertools import count, islice
from typing import Any, NamedTuple

from seqblocks.errors import Fault, Report, Source, Span, UsageError, clip, listing, quote
from seqblocks.language import document
from seqblocks.language.document import Mapping, Node, Scalar, Sequence
from seqblocks.language.keys import namespace_of
from seqblocks.suggestions import did_you_mean, is_renamed

MAX_SHOWN = 200  # characters of an override where it is named
_SEVERAL = r"""((?:[^\[{("',]|\([^()]*\))+),\s*([A-Za-z_][\w.]*=.*)"""  # 64,heads=2


class Override(NamedTuple):
    """An override `path=text`. `node` is the new node of the document, None if the value was the same before."""

    path: str
    text: str
    node: Any = None

    def __str__(self) -> str:
        return clip(f"{self.path}={self.text}", MAX_SHOWN)


class Slot(NamedTuple):
    """A key of a mapping. For a step without arguments, `open` first inserts the mapping."""

    holder: Mapping
    key: str
    items: list[Node] | None = None
    at: int = 0

    def open(self) -> None:
        """Insert the mapping into the document."""
        if self.items is not None:
            self.items[self.at] = self.holder


def _plain(value: Any) -> Any:
    """Return a number or array of another library as Python's own; other values as they are."""
    convert = getattr(value, "tolist", None) or getattr(value, "item", None)
    if isinstance(value, type) or not callable(convert):
        return value
    try:
        found = convert()
        return float(found) if type(found) is type(value) else found  # numpy.longdouble
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"a value of `set` cannot be read: {error}") from None


def as_text(value: Any) -> str:
    """Return a Python value as YAML, also numbers and arrays of numpy, torch and other libraries.

    Raises UsageError for an array that has no values, such as a tensor on "meta".
    """
    value = _plain(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_text(v) for v in value) + "]"
    if isinstance(value, MappingABC):
        return "{" + ", ".join(f"{_key(str(k))}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    if isinstance(value, int | float):
        return (int if isinstance(value, int) else float).__repr__(value)  # that of an enum is no number
    return _quoted(str(value))


def _key(text: str) -> str:
    """Return a key of a mapping as YAML: patterns of `init:`, such as `*.bias`, need quotes."""
    return text if re.fullmatch(r"[A-Za-z_][\w.]*", text, re.ASCII) else _quoted(text)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def apply(
    root: Node, overrides: MappingABC[str, str], report: Report, keywords: Container[str] = ()
) -> tuple[Override, ...]:
    """Apply `path -> YAML text` to a document in place. Return the overrides whose path was found.

    Messages show overrides in `keywords` as Python keyword arguments, the others as command-line options.
    """
    done = []
    for path, text in overrides.items():
        source = _source(path, text, from_call=path in keywords)
        value = _parse(text, source, report)
        if value is None:
            continue
        slot = _find(root, path, source, report)
        if slot is None:
            continue
        holder, key = slot.holder, slot.key
        if (block := _block_with_steps(root, slot)) and not _is_steps(value):
            message = f"{quote(key)} of block {block} is steps, and only steps can replace them"
            fault = Fault("E203", message, found=document.kind_of(value), hint=f"{path}=[layer_norm, silu]")
            report.fault(fault, value.span)
            continue
        whole = Span(value.span.source, 1, 1, 1, len(value.span.source.text) + 1)
        span, old = holder.entries.get(key, (whole, None))
        if old is None or document.plain(old) != document.plain(value):
            holder.entries[key] = (span, value)
            done.append(Override(path, text, value))
        else:
            done.append(Override(path, text))
    return tuple(done)


def find_value(root: Node, path: str) -> Node | None:
    """Return the node that an override of `path` would replace, None if the document has no value there."""
    slot = _find(root, path, _source(path, "", from_call=False), Report())
    entry = slot.holder.entries.get(slot.key) if slot else None
    return entry[1] if entry else None


def _block_with_steps(root: Node, slot: Slot) -> str | None:
    """Return the name of the block of whose arguments that are steps the slot is one, or None."""
    blocks = root.get("blocks") if isinstance(root, Mapping) else None
    if isinstance(blocks, Mapping) and (known := slot.holder.get(slot.key)) and _is_steps(known):
        for name, _, block in blocks:
            if isinstance(block, Mapping) and block.get("args") is slot.holder:
                return name
    return None


def _is_steps(node: Node) -> bool:
    """Return whether the declaration of an argument says that it is steps."""
    return isinstance(node, Sequence) or (isinstance(node, Scalar) and node.value == "steps")


def _source(path: str, text: str, from_call: bool) -> Source:
    """Return the source text of an override as the user wrote it: in Python, or as a command-line option."""
    shown = f"set={{{path!r}: {text}}}" if from_call else f"--set {path}={text}"
    return Source.of(clip(shown, MAX_SHOWN), shown, "call" if from_call else "override")


def _parse(text: str, source: Source, report: Report) -> Node | None:
    if not text.strip():
        option = source.text if source.kind == "override" else None
        hint = f"{option.rstrip()}…" if option else "pass a number, a word or a list"
        report.fault(Fault("E310", "the override has no value", hint=hint), _whole(source))
        return None
    path = source.text.removeprefix("--set ").partition("=")[0]
    is_prose = path.rpartition(".")[2] == "about"
    if source.kind == "override" and not is_prose and (several := re.match(_SEVERAL, text)):
        fault = Fault("E310", "an override sets one value", hint=f"--set {path}={several[1]} --set {several[2]}")
        report.fault(fault, _whole(source))
        return None
    if text.strip() in ("null", "~"):  # an empty text is not a YAML document
        fault = Fault("E310", "an override cannot be null", hint="remove the override to use the default")
        report.fault(fault, _whole(source))
        return None
    try:
        node = document.parse(Source.of(source.name, text, source.kind), report)
    except RecursionError:
        node = None
    if node is None:
        return None
    return _shifted(node, source, source.text.rindex(text))


def _shifted(node: Node, source: Source, before: int) -> Node:
    """Return the value with its spans shifted to their place in the override."""
    a = node.span
    if a.line == a.end_line == 1:
        span = Span(source, 1, a.column + before, 1, a.end_column + before)
    else:
        span = Span(source, 1, 1, 1, len(source.text) + 1)
    if isinstance(node, Scalar):
        return node._replace(span=span)
    if isinstance(node, Sequence):
        return node._replace(span=span, items=[_shifted(item, source, before) for item in node.items])
    assert isinstance(node, Mapping)
    entries = {k: (span, _shifted(v, source, before)) for k, (_, v) in node.entries.items()}
    return node._replace(span=span, entries=entries)


def _whole(source: Source) -> Span:
    """Return the span of an override, as a user sees it."""
    shown = source._replace(name="the call" if source.kind == "call" else "command line")
    return Span(shown, 1, 1, 1, len(source.text) + 1)


def _find(root: Node, path: str, source: Source, report: Report) -> Slot | None:
    """Return the slot that a path names, or report an error and return None without changing the document."""
    parts = path.split(".")
    if isinstance(root, Mapping) and parts[0] not in root.entries:
        let = root.get("let")
        if isinstance(let, Mapping) and parts[0] in let.entries:
            parts = ["let", *parts]
        elif isinstance(model := root.get("model"), Mapping) and parts[0] in ("input", "inputs"):
            root = model
    node: Node = root
    of_step = False
    slots: list[Slot] = []
    for depth, part in enumerate(parts):
        choices = _choices(node)
        if part not in choices and of_step and depth == len(parts) - 1 and isinstance(node, Mapping):
            slots.append(Slot(node, part))
            break
        if part not in choices:
            known = sorted(choices)
            if depth == 0:
                let = root.get("let") if isinstance(root, Mapping) else None
                known = sorted({*known, *(let.entries if isinstance(let, Mapping) else ())})
            elsewhere, exists = _elsewhere(root, parts)
            renamed = [name for name, slot in choices.items() if slot.key == part]
            misspelt = is_renamed(part, renamed) if renamed else did_you_mean(part, known)
            if depth == len(parts) - 1 and not exists:  # a misspelt argument is likelier than a default elsewhere
                elsewhere = misspelt or elsewhere
            hint = elsewhere or misspelt or "an override replaces a value of the spec or sets an argument of a step"
            if part.isdecimal() and "pattern" in choices:
                hint = "in a path through a pattern, use the word instead of the layer number"
            if parts[0] == "blocks" and depth < 2 and isinstance(root, Mapping) and "use" in root.entries:
                hint = "defaults in a file imported with `use:` cannot be overridden: "
                hint += "; ".join(filter(None, ("set the argument where the block is used", elsewhere)))
            message = f"there is no {quote(part)} in {'.'.join(parts[:depth]) or 'the spec'}"
            fault = Fault("E310", message, expected=f"one of {listing(known)}" if known else None, hint=hint)
            report.fault(fault, _whole(source))
            return None
        slot = choices[part]
        slots.append(slot)
        of_step = slot.holder is not node
        node = slot.holder.entries[slot.key][1]
    for slot in slots:
        slot.open()
    return slots[-1]


def _elsewhere(root: Node, parts: list[str]) -> tuple[str | None, bool]:
    """Return a hint with the full path if only its end was given, if it has a layer number, or continues in a block.

    Also return whether the path exists; otherwise it is an argument that a step leaves at its default.
    """
    names = [part for part in parts if not part.isdecimal()]
    section = names[0] if names[:1] in (["model"], ["blocks"]) else None
    names = names[1:] if section else names
    paths = sorted(islice(_paths(root, []), 2000), key=lambda each: each[0][0] != section) if names else []
    blocks = root.get("blocks") if isinstance(root, Mapping) else None
    inside = [at for at, name in enumerate(names) if at and isinstance(blocks, Mapping) and name in blocks.entries]
    for end in [names, *(names[at:] for at in inside)]:
        for path, of_step in paths:
            exists = path[-len(end) :] == end
            if exists or (of_step and len(end) > 1 and path[1 - len(end) :] == end[:-1]):
                whole = ".".join(path if exists else [*path, end[-1]])
                return f"did you mean '{whole}'?", exists
    return None, False


def _paths(node: Node, before: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield all paths below a node, short ones first, and whether each one names a step."""
    below = []
    for name, slot in _choices(node).items():
        if before or name in ("let", "blocks", "model"):
            child = slot.holder.entries[slot.key][1]
            if name not in ("steps", "branches", "args", "checkpoint"):  # entries of these sections have shorter paths
                yield [*before, name], slot.holder is not node and not isinstance(child, Sequence)
                below.append((child, [*before, name]))
    for child, path in below:
        yield from _paths(child, path)


def _choices(node: Node) -> dict[str, Slot]:
    """Return the possible next parts of a path: keys, arguments of a block, namespaces of steps."""
    out: dict[str, Slot] = {}
    if isinstance(node, Mapping):
        for key, _, value in node:
            if key != document.SOLE:
                out[key] = Slot(node, key)
            if key in ("args", "let"):
                out |= {k: v for k, v in _choices(value).items() if k not in out}
            elif key in ("steps", "branches", document.SOLE):
                out |= {k: v for k, v in _steps(value, key != "branches").items() if k not in out}
    elif isinstance(node, Sequence):
        out |= _steps(node)
    return out


def _with_arguments(item: Node) -> Node:
    """Return a step with its arguments as a mapping, expanding the short forms `- silu` and `- linear: 64`."""
    match item:
        case Scalar(value=str(verb)):
            return Mapping(item.span, 2, 2, {verb: (item.span, Mapping(item.span, 1, 1, {}))})
        case Mapping(entries=entries) if len(entries) == 1:
            ((verb, span, arguments),) = list(item)
            given: dict[str, tuple[Span, Node]] = {}
            if isinstance(arguments, Sequence):
                given["branches" if verb == "parallel" else document.SOLE] = (arguments.span, arguments)
            elif isinstance(arguments, Scalar) and arguments.value is not None:
                given[document.SOLE] = (arguments.span, arguments)
            if not isinstance(arguments, Mapping):
                return item._replace(entries={verb: (span, Mapping(arguments.span, 1, 1, given))})
    return item


def _steps(node: Node, bare: bool = True) -> dict[str, Slot]:
    slots: dict[str, list[Slot]] = {}
    items = node.items if isinstance(node, Sequence) else []
    for at, written in enumerate(items):
        item = _with_arguments(written) if bare else written
        if isinstance(item, Mapping) and len(item.entries) == 1:
            ((verb, _, arguments),) = list(item)
            name = verb
            for key in ("as", "name"):
                given = arguments.get(key) if isinstance(arguments, Mapping) else None
                if isinstance(given, Scalar) and isinstance(given.value, str):
                    name = given.value
            if not (isinstance(arguments, Mapping) and "name" in arguments.entries):
                name = namespace_of(name)
            slots.setdefault(name, []).append(Slot(item, verb, items, at))
    out = {name: first for name, (first, *_) in slots.items()}
    for name, (_, *others) in slots.items():  # numbered as in the graph, where these have no parameters
        numbers = (f"{name}_{n}" for n in count(2) if f"{name}_{n}" not in slots)
        out |= dict(zip(numbers, others, strict=False))
    return out

"""Describe the verbs of the language, for `seqblocks ops`, the editor schema and docs/language/."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from seqblocks.combinators import COMBINATORS, Combinator, find_combinator
from seqblocks.language.arguments import DEPTH
from seqblocks.op import PRIMITIVES, FieldKind, Op, Port, field_infos, fields_of, load_builtin, load_plugins

Verb = type[Op] | type[Combinator]
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
TYPES = {
    "flag": "true or false", "words": "word, or list of words", "formula": "expression", "mapping": "mapping",
    "value": "mapping",
}  # fmt: skip


class Argument(NamedTuple):
    """One argument of a verb. `limits` maps pydantic's constraints (ge, gt, le, lt) to numbers."""

    name: str
    kind: FieldKind
    holds_steps: bool
    required: bool
    default: Any
    limits: dict[str, float]
    about: str
    is_wire: bool = False

    @property
    def type(self) -> str:
        """Return its type in words."""
        if self.holds_steps:
            return "steps"
        if self.is_wire:
            return "wire"
        if self.kind.kind == "number":
            return "whole number" if self.kind.whole else "number"
        return TYPES.get(self.kind.kind, "word")

    @property
    def limits_in_words(self) -> list[str]:
        """Return its limits in words, for instance "at least 1"."""
        return [f"{LIMITS[key]} {value:,}" for key, value in self.limits.items()]

    def as_data(self) -> dict[str, Any]:
        data = {"name": self.name, "type": self.type, "words": list(self.kind.choices), "required": self.required}
        return data | {"default": self.default, "limits": self.limits_in_words, "about": self.about}


def verbs() -> dict[str, Verb]:
    """Return all verbs: combinators, then primitives, including plug-ins."""
    load_builtin()
    load_plugins()
    return {**{verb: find_combinator(verb) for verb in COMBINATORS}, **dict(sorted(PRIMITIVES.items()))}


def about(verb: Verb) -> str:
    """Return the docstring of a verb without its indentation, also if Python leaves out docstrings (-OO)."""
    return inspect.cleandoc(verb.__doc__ or _docstring_in_source(verb))


def _docstring_in_source(verb: Verb) -> str:
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(verb))).body
        assert isinstance(found, ast.ClassDef)
        return ast.get_docstring(found) or ""
    return ""


def arguments(verb: type[BaseModel]) -> list[Argument]:
    """Return the arguments of a verb in the order of their declaration."""
    return [_argument(verb, name, kind) for name, kind in fields_of(verb).items()]


def _argument(verb: type[BaseModel], name: str, kind: FieldKind) -> Argument:
    info = field_infos(verb)[name]
    required = info.is_required()
    default = None if required or info.default is PydanticUndefined else info.default
    if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("inherit") == DEPTH:
        default = DEPTH
    limits = {key: getattr(limit, key) for limit in info.metadata for key in LIMITS if hasattr(limit, key)}
    holds_steps = name in getattr(verb, "holds", ())
    is_wire = name in getattr(verb, "wire_keys", ())
    return Argument(name, kind, holds_steps, required, default, limits, info.description or "", is_wire)


def ports(verb: Verb) -> tuple[Port, ...]:
    """Return the inputs of a primitive; a combinator has no ports of its own."""
    return verb.ports if issubclass(verb, Op) else ()


def facts(verb: Verb) -> dict[str, Any]:
    """Return all declarations of a verb as plain data."""
    op = verb if issubclass(verb, Op) else None
    return {
        "verb": verb.verb,
        "kind": "primitive" if op else "combinator",
        "about": about(verb),
        "arguments": [argument.as_data() for argument in arguments(verb)],
        "inputs": [_port_data(port) for port in ports(verb)],
        "reads": op.reads if op else None,
        "source": (op.source or None) if op else None,
    }


def _port_data(port: Port) -> dict[str, Any]:
    data = {"name": port_key(port), "about": port.about, "kinds": list(port.kinds), "joins": port.joins}
    data |= {"broadcast": port.broadcast, "length": port.length, "other_rate": bool(port.other_rate)}
    return data | {"required": is_required(port)}


def port_key(port: Port) -> str:
    """Return the key that sets a port in a spec."""
    return "from" if port.main else port.name


def is_required(port: Port) -> bool:
    """Return whether a step must name the port's wire."""
    return not (port.main or port.optional)


def text(verb: Verb) -> str:
    """Return the description of one verb for a terminal."""
    kind = "primitive" if issubclass(verb, Op) else "combinator"
    out = [f"{verb.verb} ({kind})", *("  " + line for line in about(verb).splitlines())]
    if ports(verb):
        out.append("inputs")
        out += [f"  {port_key(p)}{'' if is_required(p) else ' (optional)'}: {describe_port(p)}" for p in ports(verb)]
    if arguments(verb):
        out.append("arguments")
        out += [f"  {a.name}: {describe_type(a)}{_default(a)}. {a.about}" for a in arguments(verb)]
    if issubclass(verb, Op) and verb.source:
        out.append(f"source: {verb.source}")
    return "\n".join(out)


def describe_port(port: Port) -> str:
    """Describe the input of a port: "queries (sequence)"."""
    many = ", or a list of them" if port.joins else ""
    meets = "; a vector is broadcast to all tokens" if port.broadcast else ""
    length = f"; as long as {port.length}" if port.length else ""
    rate = "; at any rate" if port.other_rate else ""
    return f"{port.about} ({' or '.join(port.kinds)}{many}{meets}{length}{rate})"


def describe_type(argument: Argument) -> str:
    """Describe the type of an argument: "whole number, at least 1"."""
    words = " | ".join(argument.kind.choices)
    many = ", or a list" if argument.type == TYPES["words"] else ""
    many += ", or a name" if argument.kind.open else ""
    return ", ".join([f"{words}{many}" if words else argument.type, *argument.limits_in_words])


def describe_default(argument: Argument) -> str:
    """Return a default as YAML, or an empty string if there is none."""
    if argument.required or argument.default is None:
        return ""
    return str(argument.default).lower() if isinstance(argument.default, bool) else str(argument.default)


def _default(argument: Argument) -> str:
    if argument.required:
        return " (required)"
    default = describe_default(argument)
    return f" (default {default})" if default else ""

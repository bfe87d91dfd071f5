"""Define a step: a verb with its arguments, grouped by the code that reads them."""

from __future__ import annotations

from seqblocks.combinators import COMBINATORS, Combinator, find_combinator
from seqblocks.errors import Span
from seqblocks.language.arguments import STEP_KEYS, Argument
from seqblocks.language.document import Mapping, Node, Scalar, Sequence
from seqblocks.language.keys import namespace_of
from seqblocks.language.spec import Block, SpecFile
from seqblocks.op import Op, field_infos, find_primitive
from seqblocks.record import Record

BLOCK_STEP_KEYS = ("from", "as", "name", "share", "when")
IN_LINE_STEP_KEYS = ("from", "when")


class Verb(Record):
    """The definition of a verb, and the arguments that it takes."""

    meaning: type[Op] | type[Combinator] | Block | Argument
    required: tuple[str, ...]
    own: tuple[str, ...]
    """Its own arguments, without those common to all steps."""
    wires: tuple[str, ...] = ()
    """The arguments that are names of wires."""
    steps: str | None = None
    """The argument that is set if a list is written in place of the arguments."""
    common: tuple[str, ...] = STEP_KEYS

    @property
    def keys(self) -> tuple[str, ...]:
        """Return all keys that the verb accepts; none if it has no arguments at all."""
        return (*self.own, *self.common) if self.own else ()

    @property
    def sole(self) -> str | None:
        """Return the argument that is set if a scalar is written in place of the arguments, or None.

        It is the only required argument; if none is required, the only argument that is no wire.
        """
        if self.steps or len(self.required) > 1:
            return None
        values = self.required or (self.own if len(self.own) == 1 and self.own[0] not in self.wires else ())
        return values[0] if values else None

    @property
    def is_known(self) -> bool:
        """Return whether its arguments are known. Those of an invalid block may not be."""
        return not (isinstance(self.meaning, Block) and self.meaning.incomplete)


def find_verb(file: SpecFile, verb: str) -> Verb | None:
    """Look up a verb in a file; return None if there is none."""
    if verb in file.visible:
        return _block_verb(file.visible[verb])
    if verb in COMBINATORS:
        combinator = find_combinator(verb)
        infos, holds = field_infos(combinator), combinator.holds[0]
        required = tuple(key for key, info in infos.items() if info.is_required())
        keys = IN_LINE_STEP_KEYS if combinator.in_line else STEP_KEYS
        steps = holds if {*required} <= {holds} else None
        return Verb(combinator, required, tuple(infos), combinator.wire_keys, steps, keys)
    op = find_primitive(verb)
    if op is None:
        return None
    fields = field_infos(op)
    ports = tuple(port.name for port in op.ports)
    needed = tuple(port.name for port in op.ports if not (port.main or port.optional))
    own = (*(port.name for port in op.ports if not port.main), *fields)
    return Verb(op, (*needed, *(key for key, info in fields.items() if info.is_required())), own, ports)


def _block_verb(block: Block) -> Verb:
    required = tuple(name for name, argument in block.args.items() if argument.default is None)
    wires = (name for name, argument in block.args.items() if argument.type == "wire")
    sole = required[0] if len(required) == 1 and block.args[required[0]].type == "steps" else None
    return Verb(block, required, tuple(block.args), tuple(wires), sole, BLOCK_STEP_KEYS)


def passed_verb(argument: Argument) -> Verb:
    """Return the verb defined by an argument of type `steps`."""
    return Verb(argument, (), (), common=BLOCK_STEP_KEYS)


Entries = dict[str, tuple[Span, Node]]


class Step:
    """One step. If it is incomplete, missing arguments are not reported.

    This is not a dataclass, because defining one with so many fields would slow down `check`.
    """

    __slots__ = (
        "alias", "common", "effort", "fields", "found", "incomplete", "is_plain", "is_start", "misspelt", "name",
        "name_span", "part_of", "possible_wires", "span", "unreadable", "verb",
    )  # fmt: skip

    def __init__(
        self,
        verb: str,
        span: Span,
        fields: Entries,
        common: Entries,
        found: Verb | None = None,
        incomplete: bool = False,
        possible_wires: tuple[str, ...] = (),
        unreadable: bool = False,
        alias: Span | None = None,
    ) -> None:
        self.verb, self.span = verb, span  # the span of the verb
        self.fields = fields  # the verb's own arguments
        self.common = common  # the arguments common to all steps
        self.found = found  # None if there is no such verb
        self.incomplete = incomplete
        self.possible_wires = possible_wires  # values of invalid keys, one of which may be a misspelt `as:`
        self.unreadable = unreadable  # whether it cannot be lowered, for a reason already reported
        self.alias = alias  # span of the alias `*anchor` that repeats it, if any
        self.misspelt: frozenset[str] = frozenset()  # arguments that unknown keys may stand for: these are unknown too
        self.is_plain = True  # whether it is one step of its list, and neither several nor a list in line
        self.part_of: Step | None = None  # the step with several results, of which it computes one
        self.is_start = True  # whether it computes the first of these
        self.effort = 1  # effort of reading its arguments once, see `values.effort`
        self.name, self.name_span = verb, span  # its namespace: `name:`, else a single `as:`, else the verb
        for key in ("as", "name"):
            node = common[key][1] if key in common else None
            if isinstance(node, Scalar):
                self.name, self.name_span = node.text, node.span
        if "name" not in common:
            self.name = namespace_of(self.name)

    def get(self, key: str) -> Node | None:
        entry = self.fields.get(key) or self.common.get(key)
        return entry[1] if entry else None

    def key_span(self, key: str) -> Span:
        entry = self.fields.get(key) or self.common.get(key)
        return entry[0] if entry else self.span

    def value_span(self, key: str | None) -> Span:
        node = self.get(key) if key else None
        return node.span if node else self.span

    def value(self, key: str | None) -> Node | None:
        """Return the node of one of the verb's own arguments, unless it names a wire."""
        if key not in self.fields or (self.found and key in self.found.wires):
            return None
        return self.fields[key][1]

    def defined_wires(self) -> list[str]:
        """Return the names that `as:` defines."""
        return [name for name, _ in self.named_wires()]

    def named_wires(self) -> list[tuple[str, Span]]:
        """Return the names that `as:` defines, with their places."""
        match self.get("as"):
            case Scalar(text=name, span=span):
                return [(name, span)]
            case Sequence(items=items):
                return [(item.text, item.span) for item in items if isinstance(item, Scalar)]
            case Mapping(entries=entries):
                return [(name, span) for name, (span, _) in entries.items()]
        return []

"""Verbs that hold steps: residual, scan, parallel, repeat.

Each is a model of its arguments (documented like an op's) and a `lower` that says what its bodies see and what comes
out. They work on the `Frame` that `lower.py` hands them; nothing here knows how a step is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from seqblocks import graph
from seqblocks.errors import Fault, Note, did_you_mean, hidden, listing, quote
from seqblocks.language.document import Mapping, Node, Sequence, kind_of
from seqblocks.op import argument, ids_are_no_numbers, must_have_grid
from seqblocks.types import Wire

if TYPE_CHECKING:
    from seqblocks.analysis.lower import Frame
    from seqblocks.analysis.scope import Step
    from seqblocks.parameters import Init

Order = Literal["forward", "reverse", "rows", "rows_reverse", "columns", "columns_reverse"]
Merge = Literal["sum", "mean", "concat", "product"]
GRID_ORDERS = ("rows", "rows_reverse", "columns", "columns_reverse")
MAX_REPEATS = 4096


class Combinator(BaseModel):
    """Base of the verbs that hold steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True)

    verb: ClassVar[str] = ""
    holds: ClassVar[tuple[str, ...]] = ("steps",)
    """The arguments that are steps; they reach `lower` as document nodes."""
    open_keys: ClassVar[bool] = False
    """Whether keys of the user's own hold steps too."""
    takes_init: ClassVar[bool] = False
    """Whether it has parameters that `init:` may start otherwise."""
    main_kinds: ClassVar[tuple[str, ...]] = ("sequence", "vector", "tokens", "image")

    def lower(self, frame: Frame, step: Step, x: int) -> graph.Node | None:
        """The node for this step, whose input is value `x`."""
        raise AssertionError


C = TypeVar("C", bound=type[Combinator])
COMBINATORS: dict[str, type[Combinator]] = {}


def combinator(verb: str) -> Callable[[C], C]:
    """Register a Combinator under its verb."""

    def register(cls: C) -> C:
        cls.verb = verb
        COMBINATORS[verb] = cls
        return cls

    return register


@combinator("residual")
class Residual(Combinator):
    """Add what the steps make to what they were given: x + steps(x)."""

    steps: Any = argument(..., "the steps of the branch")
    drop_path: float = argument(
        0.0, "probability that a sample skips the branch while training; kept ones are rescaled", ge=0, lt=1
    )

    def lower(self, frame: Frame, step: Step, x: int) -> graph.Node | None:
        body = frame.body(self.steps, x)
        node = frame.node(step, "residual", {"x": (x,)}, frame.types[x], bodies={"": body}, arguments=self)
        before, after = frame.types[x], frame.types[body.result]
        if before and after and before.kind == after.kind == "tokens":
            raise ids_are_no_numbers(before, "added", "the input")
        if before and after and (before.kind, before.axes) != (after.kind, after.axes):
            same_kind = before.kind == after.kind and before.length == after.length
            notes = [n for n in (before.whence("the input"), after.whence("the result")) if n]
            hint = f"end the branch with `proj_down: {{features: {before.features}}}`"
            if frame.home.source.bundled:
                hint = f"the block is used on {before.features} features: give it arguments that fit"
            frame.fault(
                Fault(
                    "E404",
                    "a residual adds its result to its input, so their shapes must agree",
                    expected=str(before),
                    found=str(after),
                    notes=notes,
                    hint=hint if same_kind else None,
                ),
                step,
            )
        return node


@combinator("scan")
class Scan(Combinator):
    """Run the steps over the sequence in another order, or in several orders whose results are merged.

    Every sequence that enters is re-ordered, and the order of what leaves is restored. With several orders, `own` says
    which parameters each order has for itself (named `fwd.…`, `rev.…`); all others are shared. `init:` says
    how those of one order start: `init: {rev.c.bias: zeros}`.
    """

    steps: Any = argument(..., "the steps to run")
    order: Order | list[Order] = argument(
        "forward",
        "forward, reverse; for the tokens of an image also rows, rows_reverse, columns, columns_reverse; or a list",
    )
    merge: Merge = argument("sum", "how the results of several orders become one")
    own: Literal["all", "none"] | list[str] = argument(
        "none", "what each order has for itself: all, none, or a list of parameter names such as ssm.A_log"
    )
    main_kinds = ("sequence",)
    takes_init = True

    @property
    def orders(self) -> tuple[str, ...]:
        return (self.order,) if isinstance(self.order, str) else tuple(self.order)

    def lower(self, frame: Frame, step: Step, x: int) -> graph.Node | None:
        wire = frame.types[x]
        self._check(wire)
        before = frame.shared.steps
        body = frame.body(self.steps, x, path=("",))
        frame.grow((len(self.orders) - 1) * (frame.shared.steps - before))  # each order runs them
        result = frame.types[body.result]
        if result and wire and (result.kind, result.length) != (wire.kind, wire.length):
            raise Fault(
                "E406",
                "what leaves a scan must be a sequence of the length that entered",
                at="steps",
                expected=f"{wire.with_features(result.features)}",
                found=str(result),
            )
        self._check_columns(frame, wire, body)
        if result and self.merge == "concat":
            result = result.with_features(result.features * len(self.orders))
        owned = self._owned(body)
        return frame.node(
            step, "scan", {"x": (x,)}, result, bodies={"": body}, arguments=self, owned=owned,
            starts=self._starts(frame, step, body, owned),
        )

    def _starts(self, frame: Frame, step: Step, body: graph.Graph, owned: frozenset[str]) -> dict[str, Init]:
        """What `init:` says of the parameters of one order."""
        inside = [item for item in graph.parameters(body) if item.name in owned]
        directions = map(graph.direction_name, self.orders)
        table = {graph.join(name, item.name): item.parameter for name in directions for item in inside}
        known = frame.types[body.result] is not None and all(node.type for node in graph.walk(body))
        if "init" in step.common and known and not table:
            message = "no order of this scan has parameters of its own to init"
            hint = "own: all, or the init of the step inside" if len(self.orders) > 1 else "the init of the step inside"
            frame.fault(Fault("E201", message, hint=hint), step.key_span("init"))
        given = frame.initialised(step, table, known)
        return {name: given[name].init for name in table if given[name] is not table[name]}

    def _check(self, wire: Wire | None) -> None:
        if not self.orders:
            raise Fault("E208", "the list of orders is empty", at="order", hint="for instance [forward, reverse]")
        if len(set(self.orders)) != len(self.orders):
            raise Fault("E208", "an order appears twice", at="order", found=listing(self.orders))
        over_grid = [o for o in self.orders if o in GRID_ORDERS]
        if wire and over_grid:
            must_have_grid(wire, f"order {over_grid[0]}", at="order", instead="forward or reverse")
        if self.own not in ("none", []) and len(self.orders) < 2:
            raise Fault("E208", "`own` needs several orders", at="own", hint="order: [forward, reverse]")

    def _check_columns(self, frame: Frame, wire: Wire | None, body: graph.Graph) -> None:
        """What a scan by columns can do: its steps take an image on its side, and all it re-orders is of one image.

        Raises Fault (E407).
        """
        by_columns = next((order for order in self.orders if order.startswith("columns")), None)
        if by_columns is None or wire is None:
            return
        for node in graph.walk(body):
            if node.op and node.type and node.op.is_upright(*node.wires):
                message = f"{node.verb} needs rows as rows, and the order {by_columns} exchanges rows and columns"
                here = Note("it is here", node.span)
                raise Fault("E407", message, at="order", notes=[here], hint=f"move {node.verb} out of the scan")
        for value in body.captures:
            other = frame.types[value]
            alike = other and (other.grid, other.places) == (wire.grid, wire.places)
            if other and other.kind in ("sequence", "tokens") and not alike:
                label = frame.shared.labels[value]
                note = other.whence(f"`{label}`")
                raise Fault(
                    "E407",
                    f"order {by_columns} re-orders every sequence that its steps read, "
                    f"and {quote(label)} does not have the rows and columns of its input",
                    at="order",
                    expected=f"{wire.with_features(other.features)}, {_rows_by_columns(wire)}",
                    found=f"{other}, {_rows_by_columns(other)}",
                    notes=[note] if note else [],
                )

    def _owned(self, body: graph.Graph) -> frozenset[str]:
        names = [item.name for item in graph.parameters(body)]
        if self.own == "all":
            self._can_own(body, set(names), names)
            return frozenset(names)
        wanted_names = self.own if isinstance(self.own, list) else []
        below: dict[str, list[str]] = {name: [] for name in wanted_names}
        for name in names:
            parts = name.split(".")
            for prefix in accumulate(parts, "{}.{}".format):
                if prefix in below:
                    below[prefix].append(name)
        if any(node.type is None for node in graph.walk(body) if wanted_names):
            wanted_names = []  # what is not known yet may own what is missing
        for wanted in wanted_names:
            if not below[wanted]:
                raise Fault(
                    "E312",
                    f"no parameter is called {quote(wanted)} inside this scan",
                    at="own",
                    expected=f"one of {listing(names)}" if names else "the steps have no parameters",
                    hint=partial(did_you_mean, wanted, [*names, *{n.rpartition(".")[0] for n in names}]),
                )
        owned = set(chain.from_iterable(below.values()))
        self._can_own(body, owned, names)
        return frozenset(owned)

    def _can_own(self, body: graph.Graph, owned: set[str], names: list[str]) -> None:
        """What `own` cannot do: part the parameters of a scan that parts them itself, or of a tie."""
        for node in graph.walk(body) if owned else ():
            if node.directions and node.owned and owned != set(names):
                hint = "own: all, or let only one of the two own parameters"
                raise Fault(
                    "E208", "a scan that owns some parameters cannot hold another that does", at="own", hint=hint
                )
            if node.ties:
                message = f"{node.name} is tied, so a direction cannot have parameters of its own beside it"
                raise Fault("E208", message, at="own", hint="tie outside the scan, or own: none")


def _rows_by_columns(wire: Wire) -> str:
    return f"{wire.grid[0]} x {wire.grid[1]}" if wire.grid else "without rows and columns"


@combinator("parallel")
class Parallel(Combinator):
    """Give the same input to several branches and merge their results."""

    branches: Any = argument(..., "a list of branches, each `name: [steps]`; the name becomes part of parameter names")
    merge: Merge = argument("sum", "how the results become one")
    holds = ("branches",)

    def lower(self, frame: Frame, step: Step, x: int) -> graph.Node | None:
        bodies: dict[str, graph.Graph] = {}
        if not isinstance(self.branches, Sequence) or not self.branches.items:
            found = "an empty list" if isinstance(self.branches, Sequence) else kind_of(self.branches)
            raise Fault("E203", "branches must be a list of at least one", at="branches", found=found)
        for item in self.branches.items:
            name, steps = self._branch(item, frame)
            if name in bodies:
                frame.fault(Fault("E304", f"two branches are called {quote(name)}"), item.span)
                continue
            if name:
                bodies[name] = frame.body(steps, x, path=(name,))
        results = [(name, frame.types[body.result]) for name, body in bodies.items()]
        known = [(name, wire) for name, wire in results if wire]
        if not known or len(known) < len(results):
            return frame.node(step, "parallel", {"x": (x,)}, None, bodies=bodies, arguments=self)
        name, merged = known[0]
        if merged.kind == "tokens" and len(known) > 1:
            done = {"concat": "joined", "product": "multiplied"}.get(self.merge, "added")
            raise ids_are_no_numbers(merged, done, name)
        for other, wire in known[1:]:
            joined = wire.with_features(merged.features) if self.merge == "concat" else wire
            if (joined.kind, joined.axes) != (merged.kind, merged.axes):
                raise Fault(
                    "E406",
                    f"branches {quote(name)} and {quote(other)} cannot be merged by {self.merge}",
                    at="branches",
                    expected=str(merged),
                    found=str(wire),
                    notes=[n for n in (merged.whence(name), wire.whence(other)) if n],
                )
        if self.merge == "concat":
            merged = merged.with_features(sum(wire.features for _, wire in known))
        return frame.node(step, "parallel", {"x": (x,)}, merged, bodies=bodies, arguments=self)

    @staticmethod
    def _branch(item: Node, frame: Frame) -> tuple[str, Any]:
        if isinstance(item, Mapping) and len(item.entries) == 1:
            ((name, span, steps),) = list(item)
            return (name, steps) if frame.is_name(name, span) else ("", steps)
        frame.fault(
            Fault("E203", "a branch is written `name: [steps]`", found=kind_of(item), hint="- left: [silu]"), item.span
        )
        return "", item


REPEAT_KEYS = ("times", "steps", "pattern", "index", "name", "from", "as")
_WORD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\*([0-9]{1,4}))?\Z")


@combinator("repeat")
class Repeat(Combinator):
    """Run steps several times, one after the other, each with parameters of its own.

    `times: 12` with `steps`, or `pattern: m*3 s m*16 s` with the steps of each word under the word; `times` then
    repeats the pattern. Inside, `layer` is the index (from 0) and `layers` their number.
    """

    times: int = argument(1, "how often the steps, or the pattern, are repeated", ge=1, le=MAX_REPEATS)
    pattern: str | None = argument(None, "words with counts, for instance `m*7 s`; each word is a key holding steps")
    index: str = argument("layer", "what the layer index is called inside; the number of layers is its plural")
    steps: Any = argument(None, "the steps to repeat, if there is no pattern")
    open_keys = True

    def lower(self, frame: Frame, step: Step, x: int) -> graph.Node | None:
        words = {key: node for key, (_, node) in step.fields.items() if key not in type(self).model_fields}
        self._check_words(words, frame, step)
        if not self.index.isidentifier():
            raise Fault("E207", f"{quote(self.index)} is not a name", at="index", hint="index: layer")
        if self.steps is None and any(hidden(words, key, REPEAT_KEYS) for key in ("steps", "pattern")):
            return None
        sequence = self._sequence(words)
        bodies: dict[str, graph.Graph] = {}
        value = x
        for index, steps in enumerate(sequence):
            if frame.shared.full:  # which is reported
                return None
            names = {self.index: index, self.index + "s": len(sequence)}
            body = frame.body(steps, value, path=(str(index),), names=names)
            bodies[str(index)] = body
            value = body.result
        return frame.node(step, "repeat", {"x": (x,)}, frame.types[value], bodies=bodies, arguments=self)

    def _sequence(self, words: dict[str, Node]) -> list[Node]:
        if (self.pattern is None) == (self.steps is None):
            message = "repeat takes either `steps` or a `pattern`"
            if self.steps is None:
                raise Fault("E202", message, hint="times: 12 with steps: […]")
            hint = "keep `times` and `steps`, or the pattern with the steps of each of its words: m: […]"
            raise Fault("E210", message, at="steps", hint=hint)
        if self.pattern is None:
            return [self.steps] * self.times
        out: list[Node] = []
        for word in self.pattern.split():
            match = _WORD.match(word)
            if not match or match[2] == "0":
                raise Fault("E601", f"{quote(word)} is not a word of a pattern", at="pattern", expected="m, or m*7")
            if match[1] not in words:
                raise Fault(
                    "E602",
                    f"the pattern's word {quote(match[1])} has no steps",
                    at="pattern",
                    expected=f"one of {listing(words)}" if words else "a key that holds its steps",
                    hint=did_you_mean(match[1], words) or f"add `{match[1]}: [steps]` beside the pattern",
                )
            out += [words[match[1]]] * int(match[2] or 1)
            if len(out) * self.times > MAX_REPEATS:
                raise Fault("E604", "too many layers", at="pattern", expected=f"at most {MAX_REPEATS}")
        if not out:
            raise Fault("E601", "the pattern is empty", at="pattern", expected="words such as m*7 s")
        return out * self.times

    def _check_words(self, words: dict[str, Node], frame: Frame, step: Step) -> None:
        used = {w.partition("*")[0] for w in (self.pattern or "").split()}
        for word in words:
            if word not in used:
                span = step.key_span(word)
                message = f"{quote(word)} is not in the pattern" if self.pattern else f"unknown key {quote(word)}"
                hint = partial(did_you_mean, word, used or REPEAT_KEYS)
                frame.fault(Fault("E603" if self.pattern else "E201", message, found=self.pattern, hint=hint), span)

"""Steps that join wires and select tokens, for random specs (compose.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.compose_context import Contexts
from tests.composed import Body, Kind


class Sequences(Contexts):
    """Write joins along the features and along the tokens, and selections of tokens."""

    def another_of_its_length(self, first: Kind, wires: dict[str, Kind], inputs: dict[str, Any]) -> str:
        """Perhaps add an input with the open length of the first one. Return the word for this length."""
        word = self.fresh("t")
        if first.name == "sequence" and first.length is None and not self.streams and self.maybe(0.3):
            name, width = self.fresh("c"), self.width()
            wires[name], inputs[name] = Kind("sequence", width), {"features": width, "length": word}
            self.alongside.add(name)
        return word

    def side_by_side(self, body: Body) -> None:
        """Join the current wire with others, along the features."""
        now, names = body.now, [self.named(body)]
        names += [self.chance.choice(self.like(body) or names) for _ in range(self.chance.randint(1, 2))]
        self.chance.shuffle(names)
        widths = [now.width if name == "input" else body.wires[name].width for name in names]
        if sum(widths) > 30:
            names, widths = names[:1] * 2, widths[:1] * 2
        axis = self.chance.choice([None, "features"])
        self.add(body, "concat", replace(now, width=sum(widths)), **{"from": names, "axis": axis})

    def one_after_another(self, body: Body) -> None:
        """Join the current wire with others along the tokens, and perhaps select some of the tokens."""
        now = body.now
        if now.length is None:
            self.side_by_side(body)
            return
        names = [self.named(body)]
        names.append(self.chance.choice(self.like(body, now.width) or names))
        made = replace(now, length=2 * now.length, grid=None)
        self.add(body, "concat", made, **{"from": names, "axis": "tokens"})
        if not body.fixed and (made.length or 0) < 40 and self.maybe(0.3):
            return
        self.select(body, now.length)

    def learned(self, body: Body) -> None:
        """Write learned tokens, which the current tokens attend to."""
        now, source = body.now, self.named(body)
        self.attend(body, source, now, self.learned_tokens(body, self.width()))

    def learned_tokens(self, body: Body, wanted: int) -> str:
        """Write learned tokens of some width, which later steps may read like a context. Return their name."""
        now, name = body.now, self.fresh("w")
        kind = Kind("context", wanted, self.chance.randint(1, 4))
        width = None if wanted == now.width and self.maybe(0.5) else self.number(wanted)
        std = self.chance.choice([None, 0.5])
        inside = self.add(body, "learned_tokens", kind, count=kind.length, features=width, std=std, **{"as": name})
        inside.pop("name", None)
        body.wires[name] = kind
        return name

    def after_learned_tokens(self, body: Body) -> None:
        """Write some steps on the current wire with tokens before it, and then remove these."""
        now, count, source = body.now, self.chance.randint(1, 4), self.named(body)
        name = self.before(body)
        count = body.wires[name].length or count if name else count
        made = replace(now, length=now.length and now.length + count, grid=None, prefix=count)
        if name:
            self.add(body, "concat", made, **{"from": [name, source], "axis": "tokens"})
        else:
            self.add(body, "prefix", made, count=self.number(count), std=self.chance.choice([None, 0.5]))
        fixed, body.fixed = body.fixed, True
        self.fill(body, self.chance.randint(1, 3))
        self.restore(body, replace(made, width=body.now.width))
        body.fixed = fixed
        now = replace(now, width=body.now.width, grid=None)
        if count > 1 and self.maybe(0.2):
            self.add(body, "slice", replace(now, prefix=1, length=now.length and now.length + 1), first=count - 1)
            count = 1
        self.add(body, "slice", now, first=self.number(count))

    def before(self, body: Body) -> str:
        """Return the name of a context to put before the current tokens, or "" for a prefix."""
        width = body.now.width
        if self.maybe(0.25):
            return self.learned_tokens(body, width)
        kinds = body.wires.items()
        known = [name for name, kind in kinds if kind.name == "context" and kind.width == width and kind.length]
        return self.chance.choice(known) if known and self.maybe(0.5) else ""

    def select(self, body: Body, count: int) -> None:
        """Select this many of the tokens of the current wire."""
        length = body.now.length or count
        first = self.chance.randint(0, length - count)
        choices: list[dict[str, Any]] = [{"last": count}, {"first": length - count}, {"first": first, "count": count}]
        self.add(body, "slice", replace(body.now, length=count), **self.chance.choice(choices))

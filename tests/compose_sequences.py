"""Steps that join wires and select tokens, for random specs (compose.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.composed import Body, Writer


class Sequences(Writer):
    """Write joins along the features and along the tokens, and selections of tokens."""

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

    def select(self, body: Body, count: int) -> None:
        """Select this many of the tokens of the current wire."""
        length = body.now.length or count
        first = self.chance.randint(0, length - count)
        choices: list[dict[str, Any]] = [{"last": count}, {"first": length - count}, {"first": first, "count": count}]
        self.add(body, "slice", replace(body.now, length=count), **self.chance.choice(choices))

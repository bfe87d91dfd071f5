"""Recurrences of the composer of random specs (compose.py): cells whose states are vectors or matrices."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.composed import Body, Kind, Writer

# A new state from the old one, another state or itself (o), and the current wire (u): by linear formulas, and others.
LINEAR = ["0.5 * s + u", "sigmoid(u) * s + 0.3 * o", "u - (s + o) / 4", "u", "0.9 * o"]
CURVED = ["tanh(s + u)", "sigmoid(u * s)", "0.5 * s + o * u / (1 + o * o)"]


class Cells(Writer):
    """Write cells."""

    restore: Callable[[Body, Kind], None]

    def cell(self, body: Body) -> None:
        now = body.now
        wide = now.width in (2, 4, 6) and self.maybe(0.3)
        states = {self.fresh("s"): now.width for _ in range(1 if wide else self.chance.randint(1, 2))}
        own: dict[str, Any] = {"linears": list(body.linears), "owners": list(body.owners)}
        kinds = {name: replace(now, width=width, grid=None) for name, width in states.items()}
        inside = replace(body, fixed=True, alone=True, steps=[], depth=body.depth + 1, wires={**body.wires}, **own)
        if self.maybe(0.5):
            self.fill(inside, 1)
            self.restore(inside, now)
        if wide:
            states = self.matrix(inside, *states)
        else:
            inside.wires |= kinds
            self.formulas_of(inside, [*states])
        if self.maybe(0.4):
            self.fill(inside, 1)
        self.restore(inside, replace(now, width=inside.now.width))
        declared = {name: self.declared(width) for name, width in states.items()}
        chunk = self.chance.choice([None, None, 0, 3])
        self.add_maybe(body, "cell", inside.now, state=declared, chunk=chunk, steps=inside.steps)

    def declared(self, width: int) -> int | str | dict[str, Any]:
        """Return a state of this width as it is declared."""
        start = self.chance.choice([None, 0.5, "1 / 4"])
        if self.maybe(0.4):
            return {"features": width, "start": self.chance.choice([0.5, "normal(0, 0.3)"]), "learned": True}
        return {"features": self.number(width), "start": start} if start else self.number(width)

    def formulas_of(self, body: Body, states: list[str]) -> None:
        """Set each state by a formula of the current wire, and read the new ones."""
        formulas = LINEAR if self.maybe(0.5) else LINEAR + CURVED
        current = self.named(body)
        step = {}
        for at, name in enumerate(states):
            letters = {"s": name, "o": states[at - 1], "u": current}
            formula = self.chance.choice(formulas)
            step[name] = re.sub(r"\b[sou]\b", lambda found, letters=letters: letters[found[0]], formula)  # type: ignore[misc]
        unread = [name for name in states if name not in " ".join(step.values())]
        step[self.fresh("w")] = " + ".join([current, *unread, states[-1]])
        body.steps.append({"calc": step})

    def matrix(self, body: Body, name: str) -> dict[str, int]:
        """Move a matrix for each of two heads towards the current wire, and multiply by it. Return its width."""
        heads, current = 2, self.named(body)
        size = body.now.width // heads
        change, read, bounded = self.fresh("w"), self.fresh("w"), self.fresh("w")
        body.steps += [
            {"l2_norm": {"name": self.fresh("n"), "from": current, "heads": heads, "as": bounded}},
            {"matrix_product": {"matrix": name, "heads": heads, "as": read}},
            {"calc": {change: f"0.5 * ({current} - {read})"}},
            {"outer_product": {"with": bounded, "heads": heads, "name": self.fresh("n")}},
            {"calc": {name: f"{name} + x"}},
            {"matrix_product": {
                "from": bounded, "matrix": name, "heads": heads, "transposed": self.maybe(0.5), "name": self.fresh("n"),
            }},
        ]  # fmt: skip
        return {name: heads * size * size}

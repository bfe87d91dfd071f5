"""Inputs without streaming in random specs (compose.py): sequences that attention reads, vectors combined with tokens.

`Body.wires` stores them under the kinds "context" and "note", so that no other step reads them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.composed import Body, Kind, Step, Writer


class Contexts(Writer):
    """Write readers of an input that does not stream. Their steps are outside or inside the ones that stream."""

    def contexts(self) -> tuple[dict[str, Kind], dict[str, Any]]:
        """Return the inputs after the first: as wires, and as text of the spec."""
        wires: dict[str, Kind] = {}
        written: dict[str, Any] = {}
        if self.maybe(0.6):
            name, width, length = self.fresh("c"), self.width(), self.chance.choice([None, 6])
            wires[name] = Kind("context", width, length)
            written[name] = {"features": width} | ({"length": length} if length else {})
        if self.maybe(0.6):
            name, width = self.fresh("c"), self.width()
            wires[name], written[name] = Kind("note", width), {"vector": width}
        return wires, written

    def has_context(self, body: Body) -> bool:
        return any(kind.name in ("context", "note") for kind in body.wires.values())

    def context(self, body: Body) -> None:
        """Read an input that does not stream, after one or two steps that process it."""
        now, source = body.now, self.named(body)
        found = {name: kind for name, kind in body.wires.items() if kind.name in ("context", "note")}
        name, kind = self.chance.choice(list(found.items()))
        if body.chosen:
            self.read_by_chosen(body, source, now, name)
            return
        if kind.name == "context" and self.maybe(0.3):
            name, kind = self.encoded(body, name, kind)
        if kind.name == "context" and now.name == "sequence" and self.maybe(0.7):
            self.attend(body, source, now, name)
            return
        if kind.name == "context":
            kind = Kind("note", kind.width)
            mode = self.chance.choice(["mean", "last", "max"])
            name = self.mapped(body, "pool", kind, **{"from": name, "mode": mode})
        self.meet(body, source, now, name)

    def read_by_chosen(self, body: Body, source: str, now: Kind, name: str) -> None:
        """Read a context from the steps of `choose`, where no step may read only that."""
        width = body.wires[name].width
        if body.wires[name].name == "note":
            made = self.width()
            self.add(body, "linear", replace(now, width=made), **{"from": [source, name], "features": made})
            return
        q = self.features(body, source, now, width)
        self.add(body, "cross_attention", replace(now, width=width), q=q, k=name, v=name, heads=1)

    def mapped(self, body: Body, verb: str, kind: Kind, **arguments: Any) -> str:
        """Append a step on the context, and name its output."""
        name = self.fresh("w")
        self.add(body, verb, kind, **arguments, **{"as": name})
        body.steps[-1][verb].pop("name", None)
        body.wires[name] = kind
        return name

    def encoded(self, body: Body, name: str, kind: Kind) -> tuple[str, Kind]:
        """Apply steps to the context. They need not stream."""
        steps: list[Step] = [{"causal_conv": {"kernel": 2}}]
        order = self.chance.choice(["forward", "reverse", ["forward", "reverse"]])
        found = self.mapped(body, "scan", kind, **{"from": name, "order": order, "steps": steps})
        return found, kind

    def attend(self, body: Body, source: str, now: Kind, name: str) -> None:
        heads, shared = self.chance.choice([(1, 1), (2, 1), (2, 2)])
        width, values = self.chance.randint(1, 3), self.chance.randint(1, 3)
        memory = body.wires[name]
        q = self.features(body, source, now, heads * width)
        k, v = (self.features(body, name, memory, shared * each) for each in (width, values))
        made = replace(now, width=heads * values)
        soft_cap, sinks = self.chance.choice([(None, None), (None, None), (2, True)])
        more = {"soft_cap": soft_cap, "sinks": sinks}
        self.add(body, "cross_attention", made, q=q, k=k, v=v, heads=heads, kv_heads=shared, **more)

    def features(self, body: Body, source: str, kind: Kind, width: int) -> str:
        return self.mapped(body, "linear", replace(kind, width=width), **{"from": source, "features": width})

    def meet(self, body: Body, source: str, now: Kind, name: str) -> None:
        """Combine a vector with each token."""
        if self.maybe(0.3):
            width = self.width()
            both = [source, name]
            self.chance.shuffle(both)
            self.add(body, "linear", replace(now, width=width), **{"from": both, "features": width})
            return
        name = self.features(body, name, Kind("note", now.width), now.width)
        ports = [("add", "with"), ("multiply", "by"), ("gate", "by"), ("learnable_skip", "with")]
        verb, port = self.chance.choice(ports)
        first, second = (source, name) if self.maybe(0.7) else (name, source)
        self.add(body, verb, now, **{"from": first, port: second})

"""Mixers, and the steps that prepare their inputs, for random specs (compose.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.compose_tokens import Tokens
from tests.composed import TAKEN, Body, Kind


class Mixers(Tokens):
    """Write steps that depend on earlier tokens or on the position."""

    def project(self, body: Body, source: str, before: Kind, width: int) -> str:
        name, bias = self.fresh("w"), self.maybe(0.5)
        tied = [each for each in body.linears if each[1:] == (before.width, width, bias)]
        kind = replace(before, width=width)
        arguments: dict[str, Any] = {"from": source, "features": width, "bias": bias, "as": name}
        if tied and not body.owned and self.maybe(0.2):
            arguments["tie"] = self.chance.choice(tied)[0]
        else:
            body.linears.append((f"{name}_" if name in TAKEN else name, before.width, width, bias))
        self.add(body, "linear", kind, **arguments)
        del body.steps[-1]["linear"]["name"]
        body.wires[name] = kind
        return name

    def conv(self, body: Body) -> None:
        activation = self.chance.choice(["none", "silu"])
        kernel, mixing, bias = self.chance.randint(1, 4), self.maybe(0.3), self.maybe(0.5)
        self.add_maybe(body, "causal_conv", body.now, kernel=kernel, activation=activation, mixing=mixing, bias=bias)

    def earlier(self, body: Body) -> None:
        """Read earlier tokens or the position."""
        now, verb = body.now, self.chance.choice(["shift", "token_shift", "rotary", "sinusoids", "constant"])
        if verb == "shift":
            self.add_maybe(body, verb, now, by=self.chance.choice([1, 2, 3, 9]))
        elif verb == "token_shift":
            mix = [None, *self.like(body, now.width)]
            self.add_maybe(body, verb, now, mix=self.chance.choice(mix))
        elif now.width % 2 == 0 and verb == "sinusoids":
            layouts = ["interleaved", "halves"] if now.width > 2 else ["interleaved"]
            self.add_maybe(body, verb, now, layout=self.chance.choice(layouts))
        elif now.width % 2 == 0 and verb == "rotary":
            part = 2 if self.maybe(0.3) else None
            heads, base = self.divisor(now.width // 2), self.chance.choice([100, 10000])
            first = 2 if not part and now.width // heads > 3 and self.maybe(0.3) else None
            scaling = self.chance.choice([None, None, {"type": "yarn", "factor": 4, "original_length": 8}])
            on_grid = now.grid and not (self.streams or body.columns or part or first) and now.width // heads % 4 == 0
            where = self.chance.choice([None, "grid"]) if on_grid else None
            self.add_maybe(
                body, verb, now, heads=heads, base=base, features=part, first=first, positions=where,
                scaling=None if where else scaling,
                layout=self.chance.choice(["halves", "interleaved"]),
            )  # fmt: skip
        elif body.in_each or body.chosen:  # a constant does not depend on the tokens
            self.pointwise(body)
        else:
            source = self.named(body)
            formula = self.chance.choice([None, "feature / features", "0.5 if feature % 2 == 0 else -1"])
            learned, value = self.maybe(0.5), None if formula else 0.5
            kept = None if learned else self.chance.choice([None, True])
            self.add(
                body, "constant", now, features=now.width, learned=learned, value=value, formula=formula,
                persistent=kept, init={"weight": "normal(0, 0.5)"} if kept and self.maybe(0.5) else None,
            )  # fmt: skip
            self.add(body, "add", now, **{"from": source, "with": self.named(body)})

    def rotation(self, body: Body) -> None:
        """Split features into heads, repeat each head, and rotate them by angles that depend on the tokens."""
        heads, width, times = self.chance.randint(1, 2), 2 * self.chance.randint(1, 2), self.chance.randint(1, 2)
        self.linear(body, heads * width)
        self.add(body, "repeat_heads", replace(body.now, width=times * heads * width), heads=heads, times=times)
        now, source = body.now, self.named(body)
        self.project(body, source, now, times * heads * self.chance.randint(1, width // 2))
        self.add(body, "phase", body.now)
        self.add(body, "rotate", now, **{"from": source, "by": self.named(body), "heads": times * heads})
        if self.maybe(0.4):
            turned = self.named(body)
            more = self.project(body, source, now, times * heads)
            wider = replace(now, width=now.width + times * heads)
            self.add(body, "join_heads", wider, **{"from": turned, "with": more, "heads": times * heads})

    def centaurus(self, body: Body) -> None:
        mode = self.chance.choice(["neck", "pointwise", "s5", "dws", "full"])
        width = body.now.width if mode == "dws" else self.width()
        state = self.chance.randint(1, 4) if mode in ("neck", "pointwise", "s5") else None
        self.add(
            body, "centaurus", replace(body.now, width=width), mode=mode, features=width, state=state,
            sub_states=self.chance.randint(1, 3), hold=self.chance.choice(["euler", "zoh"]),
        )  # fmt: skip

    def ssm(self, body: Body) -> None:
        now, source = body.now, self.named(body)
        groups, state = self.divisor(now.width), self.chance.randint(1, 3)
        both = self.maybe(0.6)
        arguments: dict[str, Any] = {"dt": self.project(body, source, now, now.width), "state": state}
        if both:
            arguments |= {name: self.project(body, source, now, groups * state) for name in "BC"} | {"groups": groups}
        if self.maybe(0.4):
            arguments["z"] = self.project(body, source, now, now.width)
        arguments |= {"softplus": True, "skip": self.maybe(0.7)}
        self.add(body, "ssm", now, **{"from": source, **arguments})

    def memory(self, body: Body) -> None:
        now, source = body.now, self.named(body)
        heads = self.chance.randint(1, 2)
        q, v = heads * self.chance.randint(1, 3), heads * self.chance.randint(1, 3)
        widths = {"q": q, "k": q, "v": v, "i": heads, "f": heads}
        verb = self.chance.choice(["mlstm", "mlstm", "mlstm_memoroid"])
        wires = {port: self.project(body, source, now, width) for port, width in widths.items()}
        extra: dict[str, Any] = {}
        if verb == "mlstm" and self.maybe(0.3):
            extra = {"input_gate": "sigmoid", "normalize": self.maybe(0.5)}
        self.add(body, verb, replace(now, width=v), **wires, heads=heads, **extra)

    def matrix_memory(self, body: Body) -> None:
        """Append linear attention with a random rule and decay. Decays and beta are bounded by an activation."""
        now, source = body.now, self.named(body)
        heads, groups = self.chance.randint(1, 2), self.chance.randint(1, 2)
        rule = self.chance.choice(["add", "delta", "dplr"])
        # The delta rule normalises its keys. With one feature, a normalised key is 1 or -1 and its gradient is
        # rounding error.
        K, V, of_values = self.chance.randint(2 if rule == "delta" else 1, 3), self.chance.randint(1, 3), heads * groups
        writes = self.chance.randint(1, 3) if rule == "delta" else 1
        wires = {name: self.project(body, source, now, width)
                 for name, width in {"q": heads * K, "k": writes * heads * K, "v": writes * of_values * V}.items()}
        widths = {"decay": self.chance.choice([0, of_values, of_values * K])}
        widths |= {"beta": writes * of_values} if rule == "delta" else {}
        widths |= {"a": of_values * K, "b": of_values * K} if rule == "dplr" else {}
        for name, width in widths.items():
            if width:
                self.project(body, source, now, width)
                self.add(body, "sigmoid", replace(now, width=width))
                self.add(body, "scale", replace(now, width=width), by=1 if name == "beta" else -0.5)
                wires[name] = self.named(body)
        extra: dict[str, Any] = {"qk_norm": "l2" if rule == "delta" else "none"}
        extra["writes"] = writes if writes > 1 else None
        if rule == "add" and self.maybe(0.3):
            extra["bonus"] = True
        if not widths["decay"] and self.maybe(0.5):
            extra["fixed_decay"] = "retention"
        self.add(
            body, "linear_attention", replace(now, width=of_values * V), **wires, heads=heads,
            value_heads=of_values if groups > 1 else None, rule=rule, **extra,
        )  # fmt: skip

    def channel_memory(self, body: Body) -> None:
        """Append a gated recurrence with a random decay."""
        now, source = body.now, self.named(body)
        kind = self.chance.choice(["softplus", "rate", "logsigmoid", "bounded", "sigmoid", "exp", "rg_lru"])
        self.project(body, source, now, now.width)
        if kind == "rate":
            self.add(body, "time_step", now, most=self.chance.choice([None, 2.5]))
        gates = self.named(body)
        arguments = {"from": gates, "kind": kind, "heads": self.chance.choice([None, self.divisor(now.width)])}
        if kind == "logsigmoid" and self.maybe(0.6):
            self.add(body, "lower_decays", replace(now, width=2 * now.width), layers=2, features=now.width)
            self.add(body, "select", now, first=self.chance.choice([None, now.width]), features=now.width)
            arguments["lower"] = self.named(body)
        self.add(body, "log_decay", now, **arguments)
        decay, factor = self.named(body), self.chance.choice(["full", "complement", "unit_variance"])
        extra = {"factor": factor, "first_full": True if factor != "full" and self.maybe(0.5) else None}
        if self.maybe(0.3):
            self.add(body, "one_minus_exp", now, **{"from": decay})
            source = self.named(body)
        elif self.maybe(0.5):
            self.add(body, "positive", now, **{"from": source})
            source = self.named(body)
        self.add(body, "gated_recurrence", now, **{"from": source, "decay": decay, **extra})

    def slstm(self, body: Body) -> None:
        now, source = body.now, self.named(body)
        heads = self.chance.randint(1, 2)
        width = heads * self.chance.randint(1, 3)
        wires = {port: self.project(body, source, now, width) for port in "ifzo"}
        self.add(body, "slstm", replace(now, width=width), **wires, heads=heads)

    def attention(self, body: Body) -> None:
        now, source = body.now, self.named(body)
        shared = self.chance.randint(1, 2)
        heads, values = shared * self.chance.randint(1, 2), self.chance.randint(1, 3)
        width = 2 * self.chance.randint(1, 2)
        causal = self.streams or self.maybe(0.7)
        first = [{"window": 3, "keep_first": 2}] if causal else []
        spans: list[dict[str, Any]] = [{}, {}, {"window": 1}, {"window": 2}, {"window": 5}, {"chunk": 3}, *first]
        span = self.chance.choice(spans)
        biases = [None, None, "alibi", "learned_alibi"]
        if not causal and not span and (now.length or now.grid) and not body.columns:
            biases = [None, "relative", "relative"]
        rotary, soft_cap = self.chance.choice([0, 10000]), self.chance.choice([None, None, 2])
        more: dict[str, Any] = {}
        if self.maybe(0.3):
            pairs = bool(not causal and not span and now.length and "relative" not in biases and self.maybe(0.6))
            rotary, soft_cap = (rotary, soft_cap) if pairs else (0, None)
            more["scores"] = self.project(body, source, now, heads * (now.length if pairs and now.length else 1))
        if causal and not (self.streams or body.fixed or {"chunk", "keep_first"} & span.keys()) and self.maybe(0.7):
            more["prefix"] = self.chance.choice([1, 2, 5])
        self.add(
            body, "attention", replace(now, width=heads * values),
            q=self.project(body, source, now, heads * width), k=self.project(body, source, now, shared * width),
            v=self.project(body, source, now, shared * values), heads=heads, kv_heads=shared,
            rotary=rotary, **more, **span, causal=causal, cache=self.chance.choice([40, 100]), soft_cap=soft_cap,
            sinks=self.chance.choice([None, True]), bias=self.chance.choice(biases),
        )  # fmt: skip

    def latent_attention(self, body: Body) -> None:
        now, source = body.now, self.named(body)
        heads, own, value = self.chance.randint(1, 2), self.chance.randint(1, 3), self.chance.randint(1, 3)
        common = self.chance.choice([0, 2])
        wires = {"q": self.project(body, source, now, heads * (own + common))}
        wires["c"] = self.project(body, source, now, self.chance.randint(1, 3))
        if common:
            wires["r"] = self.project(body, source, now, common)
        scale = self.chance.choice([None, 0.3])
        self.add(
            body, "latent_attention", replace(now, width=heads * value), **wires, heads=heads, value=value,
            scale=scale, cache=self.chance.choice([40, 100]),
        )  # fmt: skip

    def positions(self, body: Body) -> None:
        now, learned = body.now, self.chance.choice([None, None, False])
        if now.length is None or (now.grid and (self.streams or body.columns)):
            self.add(body, "position_embed", now, length=max(60, now.length or 0))
        elif now.grid and self.maybe(0.3):
            self.add(body, "position_embed", now, rows=self.chance.randint(2, 4), columns=self.chance.randint(2, 4))
        else:
            init = {"weight": "grid_waves"} if learned is False else None
            self.add(body, "position_embed", now, learned=learned, init=init)

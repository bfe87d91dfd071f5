"""Steps that process each token separately, for random specs (compose.py)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tests.composed import Body, Kind, Step, Writer

ACTIVATIONS = (
    "silu", "gelu", "gelu_tanh", "relu", "leaky_relu", "squared_relu", "elu", "selu", "sigmoid", "tanh", "softplus",
    "elu_plus_one", "positive", "rational_exp", "exp",
)  # fmt: skip
INITS = (
    "zeros", "ones", "constant(0.5)", "normal(0, 0.1)", "uniform(-1, 1)", "trunc_normal", "linspace(-1, 1)", "small",
    "fan_in_uniform", "xavier_uniform", "wang(4, 2)", "powerlaw(0.5)", "ramp(0.1)", "log_range", "inverse_softplus",
    "log_of_uniform(1, 16)", "ring", "orthogonal", "falling(0.5)", "waves(-1, 1)",
)  # fmt: skip
# Formulas of the current wire `x`, another one `w` as wide, and the learned scalar `s`, whose values are bounded.
FORMULAS = (
    "x - s * w", "w * sigmoid(x) + 0.5", "tanh(x) / (1 + abs(w))", "max(x, s) - min(w, 1, x)", "2 ** -abs(x) * w",
    "s ** 2 + sin(x) * cos(w)", "exp(min(x, 0)) - log(1 + w ** 2)", "softplus(-w) + sqrt(1 + x * x) / (2 * sqrt(2))",
)  # fmt: skip


class Tokens(Writer):
    """Write maps, norms, activations, splits and joins."""

    def pointwise(self, body: Body) -> None:
        now, chance = body.now, self.chance
        gain = {"gain": chance.choice(["plain", "one_plus", "none"]), "bias": self.maybe(0.5)}
        heads = self.divisor(now.width)
        normed = heads if heads < now.width else 1
        shared = {"shared": self.maybe(0.4)}
        general: dict[str, Any] = chance.choice([{}, {}, {"limit": 2}, {"slope": 1.7, "offset": 1}])
        choices: list[tuple[str, dict[str, Any]]] = [
            ("identity", {}),
            ("scale", {"by": chance.choice([0.5, -1, 2])}),
            ("l2_norm", {"heads": normed}) if now.width > 1 else ("relu", {}),
            ("softmax", {"heads": normed}) if now.width > 1 else ("tanh", {}),
            ("roll_heads", {"heads": heads, "by": chance.randint(1, 3)}),
            (chance.choice(ACTIVATIONS), {}),
            (chance.choice(ACTIVATIONS), {}),
            (chance.choice(ACTIVATIONS), {}),
            ("soft_cap", {"cap": 3.0}),
            ("dropout" if now.width % 2 else "drop_path", {"p": 0.2}),
            # The norm of a single number is constant, so its gradient is rounding error.
            ("layer_norm", gain) if now.width > 1 else ("sigmoid", {}),
            ("rms_norm", {**gain, **shared, "groups": heads}),
            ("head_norm", {**gain, **shared, "heads": normed}) if now.width > 1 else ("gelu", {}),
            ("layer_scale", {"start": 0.5}) if now.name == "sequence" else ("tanh", {}),
            ("swiglu", {"hidden": self.number(self.width()), "bias": self.maybe(0.5), **general}),
        ]
        verb, arguments = chance.choice(choices)
        self.add_maybe(body, verb, now, **arguments)

    def linear(self, body: Body, width: int | None = None) -> None:
        before, bias = body.now.width, self.maybe(0.5)
        tied = [each for each in body.linears if each[1] == before and width in (None, each[2])]
        if tied and not body.owned and self.maybe(0.4):
            name, _, width, bias = self.chance.choice(tied)
            step = self.add(body, "linear", replace(body.now, width=width), features=self.number(width), bias=bias)
            step["tie"] = name if self.maybe(0.5) else {"weight": f"{name}.weight"}
            return
        width = width or self.width()
        made = replace(body.now, width=width)
        verb = self.chance.choice(["linear", "linear", "proj_up", "proj_down", "headwise_linear", "classifier"])
        if verb == "headwise_linear":
            groups = self.divisor(before)
            if width % groups:
                groups = 1
            shared = self.chance.choice([None, True])
            self.add(body, verb, made, block=before // groups, features=self.number(width), bias=bias, shared=shared)
            return
        if verb == "classifier":
            self.add(body, verb, made, classes=self.number(width), bias=bias)
            return
        inside = self.add(body, verb, made, features=self.number(width), bias=bias)
        if self.maybe(0.2):
            inside["init"] = {"weight": self.chance.choice(INITS)} | ({"bias": "zeros"} if bias else {})
        body.linears.append((inside["name"], before, width, bias))

    def shares(self, body: Body) -> None:
        """Divide the features of each head by their sum. They are positive, so the sum is not close to 0."""
        heads = self.divisor(body.now.width)
        self.add(body, "softplus", body.now)
        self.add(body, "sum_norm", body.now, heads=heads, eps=self.chance.choice([None, 0.5]))

    def split(self, body: Body) -> None:
        """Split the output of a step, and use one part or both."""
        a, b = self.fresh("w"), self.fresh("w")
        if self.maybe(0.5):
            width = self.width()
            self.linear(body, 2 * width)
            widths = [width, width]
            parts: Any = [a, b]
        else:
            widths = [self.width(), self.width()]
            self.linear(body, sum(widths))
            parts = {a: self.number(widths[0]), b: widths[1]}
        ((_, inside),) = body.steps[-1].items()
        inside["as"] = parts
        kinds = [replace(body.now, width=width) for width in widths]
        self.use_parts(body, (a, b), kinds)

    def use_parts(self, body: Body, names: tuple[str, str], kinds: list[Kind]) -> None:
        body.wires |= dict(zip(names, kinds, strict=True))
        a, b = names
        way = self.chance.randrange(4)
        if way == 0 and kinds[0] == kinds[1]:
            activation = self.chance.choice([*ACTIVATIONS, "none"])
            self.add(body, "gate", kinds[0], **{"from": a, "by": b, "activation": activation})
        elif way == 1 and kinds[0] == kinds[1]:
            self.add(body, "learnable_skip", kinds[0], **{"from": a, "with": b})
        elif way == 2:
            width = self.width()
            self.add(body, "linear", replace(kinds[0], width=width), **{"from": [a, b], "features": width})
        else:
            part = self.chance.randrange(2)
            self.add(body, self.chance.choice(ACTIVATIONS), kinds[part], **{"from": names[part]})

    def formulas(self, body: Body) -> None:
        """Compute one or two formulas of the current wire and another one, or of the current one alone."""
        now, scalar = body.now, self.fresh("s")
        wide = [name for name in self.like(body) if now.width == 1 or body.wires[name].width in (1, now.width)]
        other = self.chance.choice(wide) if wide else "x"
        width = body.wires[other].width if other != "x" else 1
        letters, step = {"w": other, "s": scalar}, Step()
        made, results = now, dict[str, Kind]()
        for at in range(self.chance.randint(1, 2)):
            formula = self.chance.choice(FORMULAS)
            if "w" in formula:
                made = replace(made, width=max(made.width, width))
            written = re.sub(r"\b[ws]\b", lambda found: letters[found[0]], formula)
            name = self.fresh("w")
            step[name] = f"{written} + {next(iter(results))}" if at else written
            results[name] = made
        if scalar in " ".join(step.values()):
            step = {"learned": {scalar: self.chance.choice([0.5, "normal(0, 0.1)", "1 / 2"])}} | step
        if made == now and self.maybe(0.15):
            step["when"] = self.condition(body)
        body.steps.append({"calc": step})
        body.wires |= results
        body.now = made

    def join(self, body: Body) -> None:
        """Combine the current wire with another one."""
        others = self.like(body)
        same = self.like(body, body.now.width)
        if same and self.maybe(0.8):
            other, now = self.chance.choice(same), body.now
            gated = {"activation": self.chance.choice(ACTIVATIONS)}
            verb, arguments = self.chance.choice(
                [
                    ("gate", {"by": other, **gated}),
                    ("learnable_skip", {"with": other}),
                    ("add", {"with": other}),
                    *[("multiply", {"by": other})] * 3,
                    *[("lerp", {"to": other})] * 3,
                    *[("divide", {"by": other})] * 3,
                    ("add", {"with": other}),
                    ("rms_norm", {"z": other, "gate": self.chance.choice(["before", "after"]), **gated}),
                ]
            )
            if verb == "divide":  # the divisor is not 0
                source = self.named(body)
                self.add(body, "sigmoid", now, **{"from": other})
                arguments = {"from": source, "by": self.named(body)}
            self.add(body, verb, now, **arguments)
        elif others:
            width = self.width()
            both = [self.named(body), self.chance.choice(others)]
            self.chance.shuffle(both)
            self.add(body, "linear", replace(body.now, width=width), **{"from": both, "features": width})
        else:
            self.named(body)
            self.pointwise(body)

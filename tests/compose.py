"""Random specs that are meant to be right: every verb and combinator, with wires, orders, merges, blocks and ties.

The composer follows the types of the wires as a person does who writes a spec, in a model of its own (`Kind`), so that
most of what it writes is accepted. It imports nothing of seqblocks: what the checker says of a spec is compared with
what a run of it does, not with this.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.composed import Body, Call, Kind, Step, Writer

ACTIVATIONS = ("silu", "gelu", "relu", "squared_relu", "selu", "sigmoid", "tanh", "softplus")
INITS = (
    "zeros", "ones", "constant(0.5)", "normal(0, 0.1)", "uniform(-1, 1)", "trunc_normal", "linspace(-1, 1)", "small",
    "fan_in_uniform", "xavier_uniform", "wang(4, 2)", "powerlaw(0.5)", "ramp(0.1)", "log_range", "inverse_softplus",
)  # fmt: skip

class Composer(Writer):
    """One random spec."""

    # --- one token

    def pointwise(self, body: Body) -> None:
        now, chance = body.now, self.chance
        gain = {"gain": chance.choice(["plain", "one_plus", "none"]), "bias": self.maybe(0.5)}
        heads = self.divisor(now.width)
        normed = heads if heads < now.width else 1
        shared = {"shared": self.maybe(0.4)}
        choices: list[tuple[str, dict[str, Any]]] = [
            ("identity", {}),
            ("scale", {"by": chance.choice([0.5, -1, 2])}),
            ("l2_norm", {"heads": normed}) if now.width > 1 else ("relu", {}),
            (chance.choice(ACTIVATIONS), {}),
            ("soft_cap", {"cap": 3.0}),
            ("dropout", {"p": 0.2}),
            # the norm of a single number is 0, and its gradient nothing but rounding
            ("layer_norm", gain) if now.width > 1 else ("sigmoid", {}),
            ("rms_norm", {**gain, **shared, "groups": heads}),
            ("head_norm", {**gain, **shared, "heads": normed}) if now.width > 1 else ("gelu", {}),
            ("layer_scale", {"start": 0.5}) if now.name == "sequence" else ("tanh", {}),
            ("swiglu", {"hidden": self.number(self.width()), "bias": self.maybe(0.5)}),
        ]
        verb, arguments = chance.choice(choices)
        inside = self.add(body, verb, now, **arguments)
        if self.maybe(0.1):
            inside["when"] = chance.choice([True, False, "1 > 2", "not 1 > 2 and 2 == 2"])

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
            self.add(body, verb, made, block=before // groups, features=self.number(width), bias=bias)
            return
        if verb == "classifier":
            self.add(body, verb, made, classes=self.number(width), bias=bias)
            return
        inside = self.add(body, verb, made, features=self.number(width), bias=bias)
        if self.maybe(0.2):
            inside["init"] = {"weight": self.chance.choice(INITS)} | ({"bias": "zeros"} if bias else {})
        body.linears.append((inside["name"], before, width, bias))

    def split(self, body: Body) -> None:
        """Cut what a step makes, and use one part, or both."""
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

    def join(self, body: Body) -> None:
        """Bring in another wire."""
        others = self.like(body)
        same = self.like(body, body.now.width)
        if same and self.maybe(0.6):
            other, now = self.chance.choice(same), body.now
            gated = {"activation": self.chance.choice(ACTIVATIONS)}
            verb, arguments = self.chance.choice(
                [
                    ("gate", {"by": other, **gated}),
                    ("learnable_skip", {"with": other}),
                    ("add", {"with": other}),
                    ("multiply", {"by": other}),
                    ("multiply", {"by": other}),
                    ("divide", {"by": other}),
                    ("add", {"with": other}),
                    ("rms_norm", {"z": other, "gate": self.chance.choice(["before", "after"]), **gated}),
                ]
            )
            if verb == "divide":  # by what is not 0
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

    # --- other tokens

    def project(self, body: Body, source: str, before: Kind, width: int) -> str:
        name, bias = self.fresh("w"), self.maybe(0.5)
        tied = [each for each in body.linears if each[1:] == (before.width, width, bias)]
        kind = replace(before, width=width)
        arguments: dict[str, Any] = {"from": source, "features": width, "bias": bias, "as": name}
        if tied and not body.owned and self.maybe(0.2):
            arguments["tie"] = self.chance.choice(tied)[0]
        else:
            body.linears.append((name, before.width, width, bias))
        self.add(body, "linear", kind, **arguments)
        del body.steps[-1]["linear"]["name"]
        body.wires[name] = kind
        return name

    def conv1d(self, body: Body) -> None:
        """A dense convolution at the same rate, or one that leaves fewer tokens, or more."""
        now, width, finer = body.now, self.width(), [s for s in (2, 3, 4) if body.now.rate % s == 0]
        groups = self.chance.choice([g for g in range(1, width + 1) if now.width % g == 0 and width % g == 0])
        coarser = [s for s in (2, 3, 4) if now.rate < 12 and (not now.length or now.length % s == 0)]
        arguments = {"features": self.number(width), "groups": groups, "bias": self.maybe(0.5)}
        if not self.streams and self.maybe(0.3):
            arguments["causal"] = False
        if finer and self.maybe(0.6):
            stride = self.chance.choice(finer)
            length = now.length and now.length * stride
            made = replace(now, width=width, length=length, rate=now.rate // stride, grid=None)
            self.add(body, "conv_transpose1d", made, kernel=self.chance.randint(1, 9), stride=stride, **arguments)
            return
        stride = self.chance.choice([1, *coarser])
        made = replace(now, width=width)
        if stride > 1:
            made = replace(made, length=now.length and now.length // stride, rate=now.rate * stride, grid=None)
        dilation = self.chance.choice([1, 1, 2, 3])
        kernel = self.chance.randint(1, 6)
        self.add(body, "conv1d", made, kernel=kernel, dilation=dilation, stride=stride, **arguments)

    def conv(self, body: Body) -> None:
        activation = self.chance.choice(["none", "silu"])
        kernel, mixing, bias = self.chance.randint(1, 4), self.maybe(0.3), self.maybe(0.5)
        self.add(body, "causal_conv", body.now, kernel=kernel, activation=activation, mixing=mixing, bias=bias)

    def earlier(self, body: Body) -> None:
        """Tokens before the current one, or their number."""
        now, verb = body.now, self.chance.choice(["shift", "token_shift", "rotary"])
        if verb == "shift":
            self.add(body, verb, now, by=self.chance.choice([1, 2, 3, 9]))
        elif verb == "token_shift":
            mix = [None, *self.like(body, now.width)]
            self.add(body, verb, now, mix=self.chance.choice(mix))
        elif now.width % 2 == 0:
            self.add(body, verb, now, heads=self.divisor(now.width // 2), base=self.chance.choice([100, 10000]))
        else:
            width = self.width()
            self.add(body, "constant", replace(now, width=width), features=width, learned=self.maybe(0.7), value=0.5)

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
        """Linear attention by any rule, with a decay of any kind. Decays and beta go through what bounds them."""
        now, source = body.now, self.named(body)
        heads, groups = self.chance.randint(1, 2), self.chance.randint(1, 2)
        K, V, of_values = self.chance.randint(1, 3), self.chance.randint(1, 3), heads * groups
        rule = self.chance.choice(["add", "delta", "dplr"])
        wires = {name: self.project(body, source, now, width)
                 for name, width in {"q": heads * K, "k": heads * K, "v": of_values * V}.items()}
        widths = {"decay": self.chance.choice([0, of_values, of_values * K])}
        widths |= {"beta": of_values} if rule == "delta" else {}
        widths |= {"a": of_values * K, "b": of_values * K} if rule == "dplr" else {}
        for name, width in widths.items():
            if width:
                self.project(body, source, now, width)
                self.add(body, "sigmoid", replace(now, width=width))
                self.add(body, "scale", replace(now, width=width), by=1 if name == "beta" else -0.5)
                wires[name] = self.named(body)
        extra: dict[str, Any] = {"qk_norm": "l2" if rule == "delta" and K > 1 else "none"}
        if rule == "add" and self.maybe(0.3):
            extra["bonus"] = True
        if not widths["decay"] and self.maybe(0.5):
            extra["fixed_decay"] = "retention"
        self.add(
            body, "linear_attention", replace(now, width=of_values * V), **wires, heads=heads,
            value_heads=of_values if groups > 1 else None, rule=rule, **extra,
        )  # fmt: skip

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
        self.add(
            body, "attention", replace(now, width=heads * values),
            q=self.project(body, source, now, heads * width), k=self.project(body, source, now, shared * width),
            v=self.project(body, source, now, shared * values), heads=heads, kv_heads=shared,
            window=self.chance.choice([0, 0, 1, 2, 5]), rotary=self.chance.choice([0, 10000]),
            causal=causal, cache=self.chance.choice([40, 100]),
        )  # fmt: skip

    def positions(self, body: Body) -> None:
        now = body.now
        if now.length is None or (now.grid and (self.streams or body.columns)):
            self.add(body, "position_embed", now, length=max(60, now.length or 0))
        elif now.grid and self.maybe(0.3):
            self.add(body, "position_embed", now, rows=self.chance.randint(2, 4), columns=self.chance.randint(2, 4))
        else:
            self.add(body, "position_embed", now)

    def conv2d(self, body: Body) -> None:
        if body.now.grid is None:
            self.conv(body)
            return
        self.add(body, "conv2d", body.now, kernel=self.chance.choice([1, 3]), activation="silu", bias=self.maybe(0.5))

    def through_an_image(self, body: Body) -> None:
        """Tokens as an image, and cut again."""
        if body.now.grid is None or body.columns:
            self.pointwise(body)
            return
        now = body.now
        if now.width > 1 and self.maybe(0.5):
            a, b, cut = self.fresh("w"), self.fresh("w"), self.chance.randint(1, now.width - 1)
            even = now.width % 2 == 0 and self.maybe(0.5)
            widths = [now.width // 2] * 2 if even else [cut, now.width - cut]
            image = Kind("image", widths[0], None, now.grid)
            self.add(body, "to_image", image, **{"as": [a, b] if even else dict(zip((a, b), widths, strict=True))})
            body.wires |= {a: image, b: replace(image, width=widths[1])}
            part = self.chance.choice([a, b])
            self.parallel_of_images(body, part)
        else:
            self.add(body, "to_image", Kind("image", now.width, None, now.grid))
        width = self.width()
        self.add(body, "patch_embed", replace(now, width=width), patch=1, features=width)

    def parallel_of_images(self, body: Body, source: str | None = None) -> None:
        now = body.wires[source] if source else body.now
        merge = self.chance.choice(["sum", "mean", "concat", "product"])
        count = self.chance.randint(1, 3)
        branches: list[dict[str, list[Step]]] = [{self.fresh("b"): []} for _ in range(count)]
        width = now.width * count if merge == "concat" else now.width
        arguments: dict[str, Any] = {"merge": merge, "branches": branches}
        self.add(body, "parallel", replace(now, width=width), **({"from": source} if source else {}), **arguments)

    # --- combinators

    def inner(self, body: Body, steps: int, fixed: bool = True, width: int | None = None, **more: Any) -> Body:
        """The steps of a combinator on what is current."""
        made = Body(body.now, dict(body.wires), [], list(body.linears), body.depth + 1, fixed, body.columns, body.owned)
        for key, value in more.items():
            setattr(made, key, value)
        self.fill(made, steps)
        self.restore(made, replace(body.now, width=width or made.now.width))
        return made

    def restore(self, body: Body, wanted: Kind) -> None:
        """End with a wire of this kind."""
        if body.now.name == "sequence":
            if body.now.rate > wanted.rate:
                factor = body.now.rate // wanted.rate
                length = body.now.length and body.now.length * factor
                made = replace(body.now, length=length, rate=wanted.rate, grid=None)
                self.add(body, "upsample", made, factor=factor)
            if body.now.rate < wanted.rate:
                factor = wanted.rate // body.now.rate
                length = body.now.length and body.now.length // factor
                made = replace(body.now, length=length, rate=wanted.rate, grid=None)
                self.add(body, "downsample", made, factor=factor)
            if body.now.width != wanted.width:
                self.linear(body, wanted.width)
        elif body.now.name == "vector" and body.now.width != wanted.width:
            self.linear(body, wanted.width)
        elif body.now.name == "image" and body.now.width != wanted.width:
            tokens = Kind("sequence", wanted.width, None, body.now.grid)
            self.add(body, "patch_embed", tokens, patch=1, features=wanted.width)
            self.add(body, "to_image", replace(body.now, width=wanted.width))

    def residual(self, body: Body) -> None:
        now = body.now
        inside = self.inner(body, self.chance.randint(0, 3), width=now.width)
        drop = 0.2 if self.maybe(0.2) else None
        self.add(body, "residual", now, steps=inside.steps, drop_path=drop)

    def parallel(self, body: Body) -> None:
        merge = self.chance.choice(["sum", "mean", "concat", "product"])
        width = None if merge == "concat" else self.width()
        if width and body.now.name == "image":
            width = body.now.width
        inside = [self.inner(body, self.chance.randint(0, 2), width=width) for _ in range(self.chance.randint(1, 3))]
        total = sum(branch.now.width for branch in inside) if merge == "concat" else inside[0].now.width
        made = replace(inside[0].now, width=total)
        branches = [{self.fresh("b"): branch.steps} for branch in inside]
        self.add(body, "parallel", made, merge=merge, branches=branches)

    def scan(self, body: Body) -> None:
        now, chance = body.now, self.chance
        choices = ["forward"] if self.streams else ["forward", "reverse"]
        if now.grid and not self.streams:
            choices += ["rows", "rows_reverse", "columns", "columns_reverse"]
        orders = chance.sample(choices, chance.randint(1, min(3, len(choices))))
        columns = any(order.startswith("columns") for order in orders)
        wires = dict(body.wires)
        if columns:
            alike = {name: kind for name, kind in wires.items() if (kind.place, kind.grid) == (now.place, now.grid)}
            wires = alike | {name: kind for name, kind in wires.items() if kind.name == "vector"}
        own: Any = None
        if len(orders) > 1 and not body.owned and self.maybe(0.6):
            own = chance.choice(["all", "some", "none"])
        owned = body.owned or own in ("all", "some")
        more: dict[str, Any] = {"wires": wires, "owned": owned, "columns": body.columns or columns, "linears": []}
        inside = self.inner(body, chance.randint(1, 3), **more)
        merge = chance.choice(["sum", "mean", "concat", "product"])
        width = inside.now.width * (len(orders) if merge == "concat" else 1)
        listed = len(orders) > 1 or self.maybe(0.3)
        arguments: dict[str, Any] = {"order": orders if listed else orders[0], "merge": merge}
        mine = [name for name, *_ in inside.linears]
        if own == "some":
            own = [chance.choice([f"{name}.weight", name]) for name in mine[:1]] or "none"
        if own:
            arguments["own"] = own
        if own == "all" and mine and self.maybe(0.5):
            order = chance.choice(orders)
            namespace = {"forward": "fwd", "reverse": "rev"}.get(order, order)
            arguments["init"] = {f"{namespace}.{mine[0]}.weight": chance.choice(INITS)}
        made = replace(inside.now, width=width)
        self.add(body, "scan", made, **arguments, steps=inside.steps)

    def repeat(self, body: Body) -> None:
        now = body.now
        if self.maybe(0.5):
            inside = self.inner(body, self.chance.randint(1, 3), width=now.width)
            if self.maybe(0.3) and now.name == "sequence":
                inside.steps.append({"dropout": {"name": self.fresh("n"), "p": "0.1 * layer / layers"}})
            made = replace(now, grid=inside.now.grid)
            self.add(body, "repeat", made, times=self.number(self.chance.randint(1, 3)), steps=inside.steps)
            return
        words = {self.fresh("m"): self.inner(body, self.chance.randint(1, 2), width=now.width) for _ in range(2)}
        pattern = " ".join(f"{word}*{self.chance.randint(1, 2)}" for word in words)
        grid = now.grid if all(inside.now.grid == now.grid for inside in words.values()) else None
        made = replace(now, grid=grid if now.name != "image" else now.grid)
        self.add(
            body, "repeat", made, pattern=pattern, times=self.chance.choice([None, 2]),
            **{word: inside.steps for word, inside in words.items()},
        )  # fmt: skip

    def block(self, body: Body) -> None:
        """Call a block that is there for such a wire, or write one."""
        now = body.now
        usable = [call for call in self.calls if call.reads == now]
        if not usable or self.maybe(0.5):
            usable = [self.define(body)]
        call = self.chance.choice(usable)
        arguments: dict[str, Any] = {key: self.number(value) for key, value in call.numbers.items()}
        for port in call.ports:
            same = self.like(body, now.width)
            arguments[port] = self.chance.choice(same) if same else self.named(body)
        for key, place in call.steps.items():
            inside = replace(place, steps=[], wires={}, linears=[], depth=body.depth + 2, owned=body.owned)
            inside.columns |= body.columns
            self.fill(inside, self.chance.randint(0, 2))
            self.restore(inside, place.now)
            arguments[key] = inside.steps
        self.add(body, call.block, call.makes, **arguments)

    def run_argument(self, body: Body) -> dict[str, Body]:
        """Run an argument that is steps, once or twice; return it by name, with the body that it is."""
        name = self.fresh("steps")
        place = replace(body, fixed=True)
        if self.maybe(0.3):
            body.steps.append({"repeat": {"name": self.fresh("n"), "times": 2, "steps": [name]}})
        elif self.maybe(0.3):
            body.steps.append({"residual": {"name": self.fresh("n"), "steps": [name, {name: {"name": "again"}}]}})
        else:
            self.add(body, name, body.now)
        return {name: place}

    def define(self, body: Body) -> Call:
        now, name = body.now, self.fresh("block")
        around, size = self.numbers, self.width()
        given = {self.fresh("a"): size} if self.maybe(0.6) else {}
        with_default = bool(given) and self.maybe(0.5)
        let = self.fresh("l")
        self.numbers = {**self.let, **given, let: size + 1}
        ports = [self.fresh("p")] if self.maybe(0.5) and now.name in ("sequence", "vector") else []
        inside = Body(now, dict.fromkeys(ports, now), [], [], body.depth + 1, True, body.columns, body.owned)
        self.fill(inside, self.chance.randint(1, 3))
        steps = self.run_argument(inside) if self.maybe(0.5) and inside.now.name in ("sequence", "vector") else {}
        for port in ports:
            both, width = [self.named(inside), port], self.width()
            if inside.now.place != now.place:
                self.restore(inside, now)
                both = [self.named(inside), port]
            self.add(inside, "linear", replace(inside.now, width=width), **{"from": both, "features": width})
        self.restore(inside, replace(now, width=inside.now.width))
        self.numbers = around
        arguments: dict[str, Any] = {key: value if with_default else "int" for key, value in given.items()}
        self.blocks[name] = {
            "args": arguments | dict.fromkeys(ports, "wire") | dict.fromkeys(steps, "steps"),
            "let": {let: f"{next(iter(given))} + 1" if given else size + 1},
            "steps": inside.steps,
        }
        call = Call(name, now, inside.now, ports, {} if with_default and self.maybe(0.5) else given, steps)
        self.calls.append(call)
        return call

    # --- bodies

    def fill(self, body: Body, steps: int) -> None:
        for _ in range(steps):
            if self.budget < 0:
                return
            self.budget -= 1
            self.move(body)(body)

    def move(self, body: Body) -> Callable[[Body], None]:
        """The next thing to do, of what the current wire allows."""
        deep = body.depth > 3
        nested = [] if deep else [self.residual, self.parallel, self.repeat, self.block]
        match body.now.name:
            case "tokens":
                return self.chance.choice([self.embed] * 4 + ([self.same_tokens] if not deep else []))
            case "vector":
                return self.chance.choice([self.pointwise, self.linear, self.split, self.join, *nested])
            case "image":
                if body.fixed:
                    return self.chance.choice([self.parallel_of_images, *nested[:2]])
                return self.chance.choice([self.patches, self.patches, self.parallel_of_images, *nested])
        moves = [
            self.pointwise, self.pointwise, self.linear, self.split, self.join, self.join, self.conv, self.conv1d,
            self.earlier, self.centaurus, self.ssm, self.memory, self.matrix_memory, self.slstm, self.attention,
            self.positions, *nested, *nested[:2],
        ]  # fmt: skip
        moves += [self.windows]
        moves += [self.down, self.up] if body.now.rate < 12 else [self.up]
        if not deep:
            moves += [self.scan] * (1 if self.streams else 3)
        if not self.streams:
            moves += [self.conv2d, self.through_an_image, self.merged_patches] * (3 if body.now.grid else 0)
            moves += [] if body.fixed else [self.class_token] * 2
        return self.chance.choice(moves)

    def embed(self, body: Body) -> None:
        if body.fixed:
            self.same_tokens(body)
            return
        width = self.width()
        self.add(body, "embed", replace(body.now, name="sequence", width=width), features=self.number(width))

    def same_tokens(self, body: Body) -> None:
        if self.maybe(0.3):
            self.add(body, "identity", body.now)
        else:
            self.add(body, "parallel", body.now, branches=[{self.fresh("b"): []}], merge="concat")

    def patches(self, body: Body) -> None:
        assert body.now.grid
        rows, columns = body.now.grid
        patch = self.chance.choice([p for p in (1, 2, 3) if rows % p == 0 and columns % p == 0])
        grid, width = (rows // patch, columns // patch), self.width()
        if patch == 2 and self.maybe(0.3):
            grid = (rows - 1, columns - 1)
        stride = 1 if grid == (rows - 1, columns - 1) else None
        made = Kind("sequence", width, grid[0] * grid[1], grid)
        self.add(body, "patch_embed", made, patch=patch, features=width, stride=stride)

    def down(self, body: Body) -> None:
        now = body.now
        factors = [f for f in (2, 3, 4) if not now.length or now.length % f == 0]
        if not factors:
            self.pointwise(body)
            return
        factor = self.chance.choice(factors)
        length = now.length and now.length // factor
        made = replace(now, length=length, rate=now.rate * factor, grid=None)
        self.add(body, "downsample", made, factor=factor, method=self.chance.choice(["mean", "last"]))

    def up(self, body: Body) -> None:
        now = body.now
        if now.rate == 1:
            self.pointwise(body)
            return
        factor = self.chance.choice([f for f in range(2, now.rate + 1) if now.rate % f == 0])
        made = replace(now, length=now.length and now.length * factor, rate=now.rate // factor, grid=None)
        self.add(body, "upsample", made, factor=factor)

    def windows(self, body: Body) -> None:
        """Tokens merged into features, or features split into tokens, by a pattern."""
        now = body.now
        factors = [f for f in (2, 3) if not now.length or now.length % f == 0]
        spread = [f for f in range(2, now.width + 1) if now.width % f == 0 and now.rate % f == 0]
        if spread and self.maybe(0.5):
            n = self.chance.choice(spread)
            length = now.length and now.length * n
            made = replace(now, width=now.width // n, length=length, rate=now.rate // n, grid=None)
            self.add(body, "rearrange", made, pattern="tokens (n features) -> (tokens n) features", n=self.number(n))
        elif factors and now.width < 30 and now.rate < 12:
            n, merged = self.chance.choice(factors), self.maybe(0.5)
            made = replace(now, length=now.length and now.length // n, rate=now.rate * n, grid=None)
            if merged:
                made = replace(made, width=n * now.width)
                self.add(body, "rearrange", made, pattern="(seq n) features -> seq (n features)", n=n)
            else:
                by = self.chance.choice(["mean", "sum", "max", "min", "std"])
                self.add(body, "reduce", made, pattern="(seq n) features -> seq features", n=n, by=by)
        else:
            heads = self.divisor(now.width)
            self.add(body, "rearrange", now, pattern="seq (heads d) -> seq (d heads)", heads=heads)

    def merged_patches(self, body: Body) -> None:
        """Neighbouring patches of an image as one token."""
        now = body.now
        if now.grid is None or body.columns or now.width > 12:
            self.windows(body)
            return
        rows, columns = now.grid
        p, q = (self.chance.choice([n for n in (1, 2, 3) if size % n == 0]) for size in now.grid)
        grid, rate = (rows // p, columns // q), now.rate * p * q
        made = Kind("sequence", now.width * p * q, grid[0] * grid[1], grid, rate)
        pattern = "(rows p) (columns q) features -> rows columns (p q features)"
        self.add(body, "rearrange", made, pattern=pattern, p=p, q=q)

    def class_token(self, body: Body) -> None:
        now = body.now
        if now.length is None:
            self.pointwise(body)
            return
        where = self.chance.choice(["first", "middle", "last"])
        self.add(body, "class_token", replace(now, length=now.length + 1, grid=None), position=where)

    # --- the whole

    def entering(self) -> tuple[Kind, dict[str, Any]]:
        chance = self.chance
        length = chance.choice([None, None, 6, 12]) if self.streams or self.maybe(0.7) else 12
        match chance.choice(["features", "features", "features", "tokens", "grid", "image"]):
            case "tokens":
                return Kind("tokens", 7, length), {"tokens": 7} | ({"length": length} if length else {})
            case "grid":
                grid, width = chance.choice([(2, 3), (3, 4), (2, 2), (1, 6)]), self.width()
                return Kind("sequence", width, grid[0] * grid[1], grid), {"features": width, "grid": list(grid)}
            case "image" if not self.streams:
                size, channels = chance.choice([(4, 6), (6, 6), (2, 4)]), chance.randint(1, 3)
                image = {"size": list(size) if size[0] != size[1] else size[0], "channels": channels}
                return Kind("image", channels, None, size), {"image": image}
        width = self.width()
        return Kind("sequence", width, length), {"features": width} | ({"length": length} if length else {})

    def compose(self) -> str:
        """The spec as text."""
        kind, written = self.entering()
        for _ in range(self.chance.randint(0, 2)):
            self.numbers[self.fresh("l")] = self.chance.choice([1, 2, 3, 4])
        self.let = let = dict(self.numbers)
        body = Body(kind, {})
        while self.budget > 0:
            self.fill(body, 1)
        match body.now.name:
            case "tokens" if self.maybe(0.8):
                self.embed(body)
            case "sequence" if self.maybe(0.3):
                modes = ["mean", "max", "first", "cls", "middle", "last", "bilateral_mean", "bilateral_concat"]
                mode = "last" if self.streams else self.chance.choice(modes)
                width = body.now.width * (2 if mode == "bilateral_concat" else 1)
                self.add(body, "pool", Kind("vector", width), mode=mode)
                self.fill(body, 1)
                self.pointwise(body)
            case "sequence" if kind.name == "tokens" and self.maybe(0.6):
                self.add(body, "unembed", replace(body.now, width=7), bias=self.maybe(0.5))
        model = {"input": written, "steps": body.steps}
        spec: dict[str, Any] = {"seqblocks": 1}
        spec |= {"let": let} if let else {}
        spec |= {"blocks": self.blocks} if self.blocks else {}
        return json.dumps(spec | {"model": model}) + "\n"


def compose(seed: int) -> str:
    """A random spec; the same one for the same seed."""
    return Composer(seed).compose()

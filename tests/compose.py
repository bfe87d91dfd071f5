"""Compose random specs that should be valid: all verbs and combinators, with wires, orders, merges, blocks and ties.

The composer tracks the type of each wire, as the author of a spec does, in a small model of its own (`Kind`), so that
most of the specs it writes are accepted. It imports nothing from seqblocks: the checker's verdict on a spec is compared
with a run of that spec, not with the composer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.compose_cells import Cells
from tests.compose_mixers import Mixers
from tests.compose_rates import Rates
from tests.compose_sequences import Sequences
from tests.compose_tokens import INITS
from tests.composed import SIZES, Body, Call, Kind, Step, has_own


class Composer(Cells, Mixers, Rates, Sequences):
    """Write one random spec."""

    def conv2d(self, body: Body) -> None:
        now, grid = body.now, body.now.grid
        if grid is None:
            self.conv(body)
            return
        width = self.chance.choice([None, self.width()])
        more = {"features": width, "dilation": self.chance.choice([None, 2])}
        made = replace(now, width=width or now.width)
        kernel, bias = self.chance.choice([1, 3]), self.maybe(0.5)
        self.add(body, "conv2d", made, kernel=kernel, activation="silu", bias=bias, **more)

    def image_windows(self, body: Body) -> None:
        """Append windows on a grid that keep it, or that halve it and perhaps double it again."""
        now, grid, mode, width = body.now, body.now.grid, self.chance.choice(["max", "mean"]), self.width()
        if grid is None:
            self.pointwise(body)
        elif now.rate > 6 or any(side % 2 for side in grid) or self.maybe(0.2):
            if self.maybe(0.2):
                self.add(body, "pool2d", now, kernel=3, stride=1, padding=1, mode=mode)
            elif self.maybe(0.3):
                self.add(body, "batch_norm", now, momentum=0.2, affine=self.maybe(0.5))
            elif self.maybe(0.8):
                self.add(body, "resize", now, rows=grid[0], columns=grid[1], mode="nearest")
            else:
                self.add(body, "conv_transpose2d", replace(now, width=width), features=width, kernel=3, padding=1)
        else:
            half = (grid[0] // 2, grid[1] // 2)
            made = replace(now, length=half[0] * half[1], grid=half, rate=4 * now.rate)
            if self.maybe(0.3):
                self.add(body, "pool2d", made, mode=mode)
            elif self.maybe(0.7):
                self.add(body, "resize", made, factor=0.5, mode=self.chance.choice(["nearest", "bilinear"]))
            else:
                size = self.chance.choice([{"kernel": 2, "padding": 0}, {"kernel": 3}])
                self.add(body, "conv2d", replace(made, width=width), features=width, stride=2, **size)
            if self.maybe(0.6):
                self.add(body, "batch_norm", body.now)
                self.add(body, "leaky_relu", body.now)
            if body.columns or self.maybe(0.6):
                back = replace(now, width=width)
                self.add(body, "conv_transpose2d", back, features=width, kernel=2, stride=2)

    def windows_of_an_image(self, body: Body) -> None:
        """Read an image by windows that make tokens."""
        grid, width = body.now.grid, self.width()
        assert grid
        length = grid[0] * grid[1]
        if self.maybe(0.5):
            made = Kind("sequence", body.now.width, length, grid)
            self.add(body, "pool2d", made, kernel=3, stride=1, padding=1, mode=self.chance.choice(["max", "mean"]))
        else:
            self.add(body, "conv2d", Kind("sequence", width, length, grid), features=width, kernel=3)

    def through_an_image(self, body: Body) -> None:
        """Reshape tokens into an image, and back into tokens."""
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
        """Write the steps of a combinator that starts at the current wire."""
        own: dict[str, Any] = {"wires": dict(body.wires), "linears": list(body.linears), "owners": list(body.owners)}
        made = replace(body, fixed=fixed, **{**own, "steps": [], "depth": body.depth + 1, **more})
        self.fill(made, steps)
        self.restore(made, replace(body.now, width=width or made.now.width))
        return made

    def restore(self, body: Body, expected: Kind) -> None:
        """End with a wire of the given kind."""
        if body.now.name == "sequence":
            factors = body.now.rate / expected.rate
            if (factor := factors.numerator) > 1:
                length = body.now.length and body.now.length * factor
                made = replace(body.now, length=length, rate=body.now.rate / factor, grid=None)
                self.add(body, "upsample", made, factor=factor)
            if (factor := factors.denominator) > 1:
                length = body.now.length and body.now.length // factor
                made = replace(body.now, length=length, rate=expected.rate, grid=None)
                self.add(body, "downsample", made, factor=factor)
            if body.now.width != expected.width:
                self.linear(body, expected.width)
        elif body.now.name == "vector" and body.now.width != expected.width:
            self.linear(body, expected.width)
        elif body.now.name == "image" and body.now.width != expected.width:
            tokens = Kind("sequence", expected.width, None, body.now.grid)
            self.add(body, "patch_embed", tokens, patch=1, features=expected.width)
            self.add(body, "to_image", replace(body.now, width=expected.width))

    def residual(self, body: Body) -> None:
        now = body.now
        inside = self.inner(body, self.chance.randint(0, 3), width=now.width)
        drop = 0.2 if self.maybe(0.2) else None
        self.add_maybe(body, "residual", now, steps=inside.steps, drop_path=drop)

    def parallel(self, body: Body) -> None:
        merge = self.chance.choice(["sum", "mean", "concat", "product"])
        width = None if merge == "concat" else self.width()
        if width and body.now.name == "image":
            width = body.now.width
        inside = [self.inner(body, self.chance.randint(0, 2), width=width) for _ in range(self.chance.randint(1, 3))]
        total = sum(branch.now.width for branch in inside) if merge == "concat" else inside[0].now.width
        made = replace(inside[0].now, width=total)
        branches = [{self.fresh("b"): branch.steps} for branch in inside]
        self.add_maybe(body, "parallel", made, merge=merge, branches=branches)

    def scan(self, body: Body) -> None:
        now, chance = body.now, self.chance
        choices = ["forward"] if self.streams or body.alone else ["forward", "reverse"]
        if now.grid and not (self.streams or body.alone):
            choices += ["rows", "rows_reverse", "columns", "columns_reverse", "sorted", "sorted_reverse"]
        orders = chance.sample(choices, chance.randint(1, min(3, len(choices))))
        by_key = any(order.startswith("sorted") for order in orders)
        columns = by_key or any(order.startswith("columns") for order in orders)
        wires = dict(body.wires)
        if columns:
            alike = {name: kind for name, kind in wires.items() if (kind.place, kind.grid) == (now.place, now.grid)}
            wires = alike | {name: kind for name, kind in wires.items() if kind.name == "vector"}
        own: Any = None
        if len(orders) > 1 and not body.owned and self.maybe(0.6):
            own = chance.choice(["all", "some", "none"])
        owned = body.owned or own in ("all", "some")
        more: dict[str, Any] = {"wires": wires, "owned": owned, "columns": body.columns or columns}
        more |= {"linears": [], "owners": []}
        place = replace(body, now=replace(now, grid=None)) if by_key else body  # no steps that read rows and columns
        if by_key:
            more["wires"] = {name: replace(kind, grid=None) for name, kind in wires.items()}
        inside = self.inner(place, chance.randint(1, 3), **more)
        merge = chance.choice(["sum", "mean", "concat", "product"])
        width = inside.now.width * (len(orders) if merge == "concat" else 1)
        listed = len(orders) > 1 or self.maybe(0.3)
        arguments: dict[str, Any] = {"order": orders if listed else orders[0], "merge": merge}
        if by_key:
            keys = ["row + column", "hilbert(row, column, rows + columns)", "(row // 2) * columns + column", "-column"]
            arguments["key"] = chance.choice(keys)
        mine = [name for name, *_ in inside.linears]
        if own == "some":
            own = [chance.choice([f"{name}.weight", name]) for name in mine[:1]] or "none"
        if own:
            arguments["own"] = own
        if own == "all" and mine and self.maybe(0.5):
            order = chance.choice(orders)
            namespace = {"forward": "fwd", "reverse": "rev"}.get(order, order)
            arguments["init"] = {f"{namespace}.{mine[0]}.weight": chance.choice(INITS)}
        made = replace(inside.now, width=width, grid=now.grid if by_key else inside.now.grid)
        self.add_maybe(body, "scan", made, **arguments, steps=inside.steps)

    def experts(self, body: Body) -> None:
        count = self.chance.randint(1, 4)
        top = self.chance.randint(1, count)
        inside = self.inner(body, self.chance.randint(0, 2), alone=True)
        score = self.chance.choice(["softmax", "sigmoid"])
        more: dict[str, Any] = {}
        if self.maybe(0.4):
            more["shared"] = self.inner(body, 1, width=inside.now.width, alone=True).steps
        self.add_maybe(
            body, "experts", inside.now, count=self.number(count), top=top, steps=inside.steps,
            score=score if count > 1 else "sigmoid",  # the softmax of one score is always 1 (W905)
            normalize=self.chance.choice([None, top > 1, False]),
            eps=self.chance.choice([None, 1e-6]),
            corrected=self.chance.choice([None, None, True]), bias=self.chance.choice([None, True]),
            factor=self.chance.choice([None, None, 2.5]),
            capacity=self.chance.choice([None, None, 1.25, 0.5]),
            **self.chance.choice(self.groupings(count, top)), **more,
        )  # fmt: skip

    def each(self, body: Body) -> None:
        """Run steps on each part of the current wire, which can read the same parts of other wires."""
        now, chance = body.now, self.chance
        sizes = [size for size in (2, 3, 4) if now.rate * size < 13 and (not now.length or now.length % size == 0)]
        choices = ["features"] + (["frames", "places"] * 2 if sizes and not (body.columns or body.chosen) else [])
        tiles = [size for size in (1, 2, 3) if now.grid and not any(side % size for side in now.grid)]
        if now.grid and not (self.streams or body.columns):
            choices += ["windows", "windows", "rows", "columns"]
        axis = "features" if body.alone else chance.choice(choices)
        size: int | None = None
        made = replace(now, grid=None)
        shift, padded = None, False
        if axis == "features":
            size = self.divisor(now.width)
            made = replace(now, width=size)
        elif axis in ("frames", "places"):
            size = chance.choice(sizes)
            length = size if axis == "frames" else now.length and now.length // size
            made = replace(made, length=length, rate=now.rate * (size if axis == "places" else 1))
        elif axis == "windows":
            assert now.grid
            padded = self.maybe(0.3)
            size = chance.choice([2, 3, 4] if padded else tiles[1:] or tiles)
            made = replace(now, length=size * size, grid=(size, size))
            shift = chance.randint(1, size - 1) if size > 1 and self.maybe(0.5) else None
        else:
            assert now.grid
            made = replace(made, length=now.grid[1 if axis == "rows" else 0])
        alone = bool(shift)  # steps that treat each token by itself; attention is tested elsewhere
        wires = {name: kind if axis == "features" else replace(made, width=kind.width)
                 for name, kind in body.wires.items()
                 if (kind.name, kind.place, kind.grid) == ("sequence", now.place, now.grid)
                 and name not in self.alongside}
        inside = replace(
            body, now=made, wires=wires, steps=[], linears=[], owners=[], depth=body.depth + 1, fixed=True,
            alone=body.alone or alone, in_each=True,
        )  # fmt: skip
        self.fill(inside, chance.randint(1, 2))
        self.restore(inside, replace(made, width=inside.now.width))
        if inside.now.place != made.place or inside.now.grid != made.grid:
            return self.pointwise(body)
        width = inside.now.width
        result = replace(now, width=width * (now.width // size) if axis == "features" and size else width)
        if result.width > 40:
            return self.pointwise(body)
        if axis == "frames" and self.maybe(0.3) and not (body.fixed or body.columns):
            assert size
            self.add(inside, "pool", Kind("vector", width), mode=chance.choice(["mean", "max", "last"]))
            result = replace(result, length=now.length and now.length // size, rate=now.rate * size, grid=None)
        self.add_maybe(body, "each", result, axis=axis, size=size, shift=shift, pad=padded or None, steps=inside.steps)
        return None

    def choose(self, body: Body) -> None:
        """Run steps on some tokens of the current wire, which read the same tokens of other wires."""
        now, chance, width = body.now, self.chance, body.now.width
        source, scores = self.named(body), self.fresh("w")
        self.add(body, "linear", replace(now, width=1), features=1, **{"as": scores})
        body.wires[scores] = body.now
        wires = {name: replace(kind, length=None, grid=None) for name, kind in body.wires.items()
                 if kind.name in ("sequence", "tokens") and (kind.length, kind.rate) == (now.length, now.rate)
                 and not kind.prefix and name not in self.alongside}
        wires |= {name: kind for name, kind in body.wires.items() if kind.name in ("context", "note")}
        place = replace(body, now=replace(now, length=None, grid=None), chosen=True, columns=False)
        inside = self.inner(place, chance.randint(1, 2), width=width, wires=wires, linears=[], owners=[])
        formula = {"calc": {"y": f"{scores} * {self.named(inside)}"}}
        top = chance.choice([0.125, 0.5, "1 / 3", 1, 3])
        above = chance.choice([-0.5137, 0.0137, 0.7137])
        given = chance.choice([{"above": above}, {"top": top, "above": above}] + [{"top": top}] * (not self.streams))
        body.steps.append({"identity": {"from": source}})
        body.now = now
        self.add_maybe(body, "choose", replace(now, grid=now.grid), by=scores, **given, steps=[*inside.steps, formula])

    @staticmethod
    def groupings(count: int, top: int) -> list[dict[str, int]]:
        """Return the ways to choose `top` of `count` experts in groups, and that without groups."""
        sizes = [(groups, some) for groups in range(2, count + 1) for some in range(1, groups + 1)]
        fit = [each for each in sizes if count % each[0] == 0 and top <= each[1] * (count // each[0])]
        return [{}, *({"groups": groups, "top_groups": some} for groups, some in fit)]

    def repeat(self, body: Body) -> None:
        now = body.now
        if self.maybe(0.5):
            shares = self.maybe(0.3) and not body.owned
            inside = self.inner(body, self.chance.randint(1, 3), width=now.width, layered=not shares)
            owners = [owner for owner in inside.owners if {owner.verb: owner.inside} in inside.steps and has_own(owner)]
            share = self.chance.choice(["all", [owners[0].inside["name"]]]) if shares and owners else None
            if self.maybe(0.3) and now.name == "sequence":
                inside.steps.append({"dropout": {"name": self.fresh("n"), "p": "0.1 * layer / layers"}})
            self.read_layers(body, inside)
            made = replace(now, grid=inside.now.grid)
            times = self.number(self.chance.randint(1, 3))
            self.add_maybe(body, "repeat", made, times=times, share=share, steps=inside.steps)
            return
        layers = [self.inner(body, self.chance.randint(1, 2), width=now.width, layered=True) for _ in range(2)]
        letters = self.maybe(0.3)
        words = {"pq"[at] if letters else self.fresh("m"): inside for at, inside in enumerate(layers)}
        pattern = ("" if letters else " ").join(words)
        longer = f"{pattern}*2" if letters else pattern
        pattern = self.chance.choice([longer, f"({pattern})*2", f"{pattern} ({pattern})"])
        if not letters and self.maybe(0.5):
            pattern = " ".join(f"{word}*{self.chance.randint(1, 2)}" for word in words)
        grid = now.grid if all(inside.now.grid == now.grid for inside in words.values()) else None
        made = replace(now, grid=grid if now.name != "image" else now.grid)
        self.add_maybe(
            body, "repeat", made, pattern=pattern, times=self.chance.choice([None, 2]),
            **{word: inside.steps for word, inside in words.items()},
        )  # fmt: skip

    def read_layers(self, body: Body, inside: Body) -> None:
        """Append a step to a layer that reads a wire of another one."""
        chance = random.Random(self.count)  # so that other choices stay as they are
        wires = [name for name in self.like(inside, inside.now.width) if name not in body.wires]
        if inside.now.name != "sequence" or chance.random() < 0.5:
            return
        name = chance.choice(wires) if wires else self.named(inside)
        layer = chance.choice(["layers[-1]", "layers[-2]", "layers.0", "layers[layers - 1 - layer]"])
        other = chance.choice([name, f"layers[-1].{name} or {name}"])
        if name in inside.wires and chance.random() < 0.3:
            width, now = inside.wires[name].width, inside.now
            wires_above = f"layers[{chance.choice(['', '0', '-2'])}:].{name}"
            self.add(inside, "linear", replace(now, width=width), **{"from": [name, wires_above], "features": width})
            self.restore(inside, now)
        elif name in inside.wires and inside.wires[name] == inside.now:
            self.add(inside, "add", inside.now, **{"with": f"{layer}.{name} or {other}"})

    def aside(self, body: Body) -> None:
        """Compute a wire on the side, and combine it with the current one."""
        own: dict[str, Any] = {"wires": dict(body.wires), "linears": list(body.linears), "owners": list(body.owners)}
        made = replace(body, fixed=True, steps=[{"identity": {}}], depth=body.depth + 1, **own)
        self.fill(made, self.chance.randint(1, 2))
        self.restore(made, replace(body.now, width=made.now.width))
        name, source = self.named(made), self.chance.choice([None, self.named(body)])
        when = self.condition(body) if made.now == body.now and self.maybe(0.4) else None
        keys = {key: value for key, value in (("from", source), ("when", when)) if value is not None}
        body.steps.append({"aside": {**keys, "steps": made.steps} if keys else made.steps})
        body.wires[name] = made.now
        if made.now == body.now and self.maybe(0.5):
            self.add(body, "gate", body.now, by=name)
        else:
            width, now = self.width(), self.named(body)
            self.add(body, "linear", replace(body.now, width=width), **{"from": [now, name], "features": width})

    def block(self, body: Body) -> None:
        """Call a block that fits the current wire: an existing one, or a new one."""
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
            inside = replace(place, steps=[], wires={}, linears=[], owners=[], depth=body.depth + 2, owned=body.owned)
            inside.columns, inside.layered = inside.columns or body.columns, body.layered
            self.fill(inside, self.chance.randint(0, 2))
            self.restore(inside, place.now)
            arguments[key] = inside.steps
        self.add_maybe(body, call.block, call.makes, **arguments)
        ((_, step),) = body.steps[-1].items()
        for wire, kind in call.outputs.items():
            if kind == body.now and "when" not in step:
                self.add(body, "add", body.now, **{"with": f"{step['name']}.{wire}"})

    def run_argument(self, body: Body) -> dict[str, Body]:
        """Run an argument that is a list of steps, once or twice. Return its name and body."""
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
        wires = {wire: kind for wire, kind in inside.wires.items() if wire not in ports and kind.name == "sequence"}
        if wires:
            self.blocks[name]["outputs"] = [*wires]
        call = Call(name, now, inside.now, ports, {} if with_default and self.maybe(0.5) else given, steps, wires)
        self.calls.append(call)
        return call

    # --- bodies

    def fill(self, body: Body, steps: int) -> None:
        for _ in range(steps):
            if self.budget < 0:
                return
            self.budget -= 1
            if not (self.maybe(0.1) and self.share(body)):
                self.move(body)(body)

    def move(self, body: Body) -> Callable[[Body], None]:
        """Append a random step that the current wire allows."""
        deep = body.depth > 3
        nested = [] if deep else [
            self.residual, self.parallel, self.repeat, self.block, self.experts, self.aside,
        ]  # fmt: skip
        if body.alone:
            nested = [] if deep else [self.residual, self.parallel, self.repeat, self.experts, self.aside]
            nested += [self.scan, self.each] if nested and body.now.name == "sequence" else []
            return self.chance.choice([
                self.pointwise, self.pointwise, self.linear, self.split, self.join, self.formulas, *nested,
            ])  # fmt: skip
        match body.now.name:
            case "tokens":
                return self.chance.choice([self.embed] * 4 + ([self.same_tokens] if not deep else []))
            case "vector":
                reads = [self.context] * 2 if self.has_context(body) else []
                return self.chance.choice([
                    self.pointwise, self.linear, self.split, self.join, self.formulas, *nested, *reads,
                ])  # fmt: skip
            case "image":
                if body.fixed:
                    return self.chance.choice([self.parallel_of_images, *nested[:2]])
                return self.chance.choice([
                    self.patches, self.patches, self.windows_of_an_image, self.parallel_of_images, *nested[:4],
                ])  # fmt: skip
        moves = [
            self.pointwise, self.pointwise, self.linear, self.split, self.join, self.join, self.formulas,
            self.conv, self.conv1d, self.shares, self.earlier, self.centaurus, self.ssm, self.memory,
            self.matrix_memory, self.channel_memory, self.rotation, self.slstm,
            self.attention, self.latent_attention, self.positions, *nested, *nested[:2],
            *([] if deep else [self.cell]),
        ]  # fmt: skip
        moves += [] if deep or body.now.prefix else [self.each, self.choose]
        moves += [self.windows, self.side_by_side]
        moves += [self.context] * 4 if self.has_context(body) else []
        moves += [self.down, self.up] if body.now.rate < 12 else [self.up]
        moves += [] if body.now.prefix or body.chosen else [self.chance.choice([self.between_rates, self.selected])]
        moves += [] if body.in_each or body.chosen else [self.after_learned_tokens, self.learned]
        if body.now.prefix:
            changing = (self.windows, self.down, self.up, self.conv1d, self.after_learned_tokens)
            moves = [move for move in moves if move not in changing]
        if body.chosen:
            moves = [move for move in moves if move not in (self.windows, self.down, self.up, self.block)]
        if not deep:
            moves += [self.scan] * (1 if self.streams else 3)
        if not self.streams:
            on_grids = [self.conv2d, self.image_windows, self.image_windows, self.through_an_image, self.merged_patches]
            moves += [*on_grids, *([] if deep or body.columns else [self.each] * 2)] * (3 if body.now.grid else 0)
            moves += [] if body.fixed or body.now.prefix else [self.class_token] * 2
            moves += [] if body.now.prefix else [self.one_after_another] * 2
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

    def class_token(self, body: Body) -> None:
        now = body.now
        if now.length is None:
            self.pointwise(body)
            return
        where = self.chance.choice(["first", "middle", "last"])
        self.add(body, "class_token", replace(now, length=now.length + 1, grid=None), position=where)

    # --- whole specs

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
        given = {"features": width} | ({"length": length} if length else {"sample_rate": 12.5})
        return Kind("sequence", width, length), given

    def compose(self) -> str:
        """Return the text of the spec."""
        kind, written = self.entering()
        for _ in range(self.chance.randint(0, 2)):
            self.numbers[self.fresh("l")] = self.chance.choice([1, 2, 3, 4])
        self.let = let = dict(self.numbers)
        wires, others = self.contexts() if self.maybe(0.3) and kind.name in ("tokens", "sequence") else ({}, {})
        word = self.another_of_its_length(kind, wires, others)
        body = Body(kind, wires)
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
        text = json.dumps([body.steps, self.blocks])
        others = {name: each for name, each in others.items() if re.search(rf"\b{name}\b", text)}
        if not others.keys().isdisjoint(self.alongside):
            written["length"] = word
        inputs = {"inputs": {"first": written, **others}} if others else {"input": written}
        model = {**inputs, "steps": body.steps}
        spec: dict[str, Any] = {"seqblocks": 1}
        let = {**let, "sizes": SIZES} if "sizes[" in json.dumps([model, self.blocks]) else let
        spec |= {"let": let} if let else {}
        spec |= {"blocks": self.blocks} if self.blocks else {}
        return json.dumps(spec | {"model": model}) + "\n"


def compose(seed: int) -> str:
    """Return a random spec; the same seed gives the same spec."""
    return Composer(random.Random(seed)).compose()

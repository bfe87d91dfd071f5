"""Random small models of images, whose memory is estimated and measured."""

from __future__ import annotations

import random

WIDTHS = [8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96]
ACTIVATIONS = ["silu", "gelu", "relu"]


class Images:
    """Write models of images from random numbers: a stem, some blocks on one or two grids, and a head."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.width = self.chance.choice(WIDTHS)
        self.size = self.chance.choice([16, 24, 32, 48, 64])
        self.batch = self.chance.randint(1, 8)
        self.count = 0

    def text(self) -> str:
        """Return the spec of a classifier, or of a model that returns tokens."""
        chance, channels = self.chance, self.chance.choice([3, 3, 3, 1])
        steps = self.stem()
        for _ in range(chance.randint(1, 4)):
            steps += self.block()
            if chance.random() < 0.3 and self.size >= 8:
                steps += self.smaller()
        if chance.random() < 0.2 and self.size <= 16:
            steps += self.larger()
        steps += self.head()
        model = f"  input: {{image: {{size: {self.image}, channels: {channels}}}}}\n  steps:\n"
        return "seqblocks: 1\nmodel:\n" + model + "".join(f"    - {step}\n" for step in steps)

    def name(self) -> str:
        self.count += 1
        return f"name: s{self.count}"

    def plain(self, verb: str) -> str:
        return f"{{{verb}: {{{self.name()}}}}}"

    def conv(self, more: str, width: int | None = None) -> str:
        """Return a dense convolution to a width, or a depthwise one."""
        features = f"features: {width}, " if width else ""
        return f"{{conv2d: {{{self.name()}, {features}{more}}}}}"

    def norm(self) -> list[str]:
        return [self.plain(self.chance.choice(["batch_norm", "layer_norm", "batch_norm"]))] * self.chance.randint(0, 1)

    def activation(self) -> str:
        return self.plain(self.chance.choice(ACTIVATIONS))

    def stem(self) -> list[str]:
        """Return what makes tokens of the image, and their size."""
        chance, self.image, width = self.chance, self.size, self.width
        kind = chance.choice(["one", "two", "patches", "whole", "linear"])
        if kind == "patches":
            patch = chance.choice([2, 4, 8])
            self.size //= patch
            return [f"{{patch_embed: {{{self.name()}, patch: {patch}, features: {width}}}}}", *self.norm()]
        if kind == "linear":  # tokens of pixels that lie one after the other
            self.size //= 4
            return [
                "{rearrange: {pattern: 'c (rows p) (columns q) -> rows columns (p q c)', p: 4, q: 4, name: cut}}",
                f"{{linear: {{{self.name()}, features: {width}}}}}",
            ]
        stride = 1 if kind == "whole" else 2
        kernel = chance.choice([3, 3, 5, 7])
        steps = [self.conv(f"kernel: {kernel}, stride: {stride}", width), *self.norm(), self.activation()]
        self.size //= stride
        if kind == "two":
            steps += [self.conv("kernel: 3, stride: 2", width), *self.norm()]
            self.size //= 2
        return steps

    def block(self) -> list[str]:
        """Return a residual branch, or a step without one."""
        chance, width = self.chance, self.width
        wide = chance.choice([1, 2, 4]) * width
        kind = chance.choice(["dense", "dense", "depthwise", "mixer", "mlp", "grouped", "pointwise", "scan"])
        if kind == "dense":
            steps = [*self.norm(), self.conv("kernel: 3", width), *self.norm(), self.activation(),
                     self.conv("kernel: 3", width), *self.norm()]
        elif kind == "depthwise":
            steps = [self.conv(f"kernel: {chance.choice([3, 5, 7])}"), self.plain("layer_norm"), self.linear(wide),
                     self.activation(), self.linear(width)]
        elif kind == "mlp":
            steps = [self.plain("layer_norm"), self.linear(wide), self.activation(), self.linear(width)]
        elif kind == "grouped":
            groups = chance.choice([2, 4])
            steps = [self.conv(f"kernel: 3, groups: {groups}", width), *self.norm(), self.activation()]
        elif kind == "pointwise":
            steps = [self.conv("kernel: 1", wide), *self.norm(), self.activation(), self.conv("kernel: 3"),
                     *self.norm(), self.activation(), self.conv("kernel: 1", width), *self.norm()]
        elif kind == "mixer":
            a, z = f"a{self.count}", f"z{self.count}"
            steps = [self.plain("layer_norm"), self.linear(2 * wide, f", as: [{a}, {z}]"),
                     self.conv(f"from: {a}, kernel: 3, activation: silu"), self.plain("layer_norm"),
                     f"{{gate: {{by: {z}, activation: silu, {self.name()}}}}}", self.linear(width)]
        else:
            steps = [self.plain("layer_norm"), self.linear(width),
                     self.conv("kernel: 3, activation: silu"), self.scan(width), self.linear(width)]
        if chance.random() < 0.15:
            return steps
        return [f"{{residual: {{{self.name()}, steps: [{', '.join(steps)}]}}}}", *self.norm()]

    def linear(self, width: int, more: str = "") -> str:
        return f"{{linear: {{{self.name()}, features: {width}{more}}}}}"

    def scan(self, width: int) -> str:
        """Return a state space that reads the rows and columns from either end, as in VMamba."""
        orders = self.chance.choice(["[rows, columns, rows_reverse, columns_reverse]", "[rows, rows_reverse]"])
        x, parts = f"u{self.count}", [f"{part}{self.count}" for part in ("dt", "b", "c")]
        sizes = ", ".join(f"{part}: {size}" for part, size in zip(parts, (width, 8, 8), strict=True))
        dt, b, c = parts
        return (
            f"{{scan: {{{self.name()}, order: {orders}, own: all, merge: sum, steps: [{{identity: {{as: {x}}}}}, "
            f"{self.linear(width + 16, f', as: {{{sizes}}}')}, "
            f"{{ssm: {{from: {x}, dt: {dt}, B: {b}, C: {c}, state: 8}}}}]}}}}"
        )

    def smaller(self) -> list[str]:
        """Return a step to a grid of half as many rows and columns."""
        self.size //= 2
        kind = self.chance.choice(["conv", "conv", "max", "mean", "merge"])
        if kind in ("max", "mean"):
            return [f"{{pool2d: {{{self.name()}, mode: {kind}}}}}"]
        self.width = min(2 * self.width, 96)
        if kind == "conv":
            kernel, padding = self.chance.choice([(3, 1), (2, 0)])
            return [self.conv(f"kernel: {kernel}, stride: 2, padding: {padding}", self.width), *self.norm()]
        pattern = "(rows p) (columns q) features -> rows columns (p q features)"
        return [f"{{rearrange: {{{self.name()}, pattern: '{pattern}', p: 2, q: 2}}}}", self.linear(self.width)]

    def larger(self) -> list[str]:
        """Return a step to a grid of twice as many rows and columns."""
        self.size *= 2
        if self.chance.random() < 0.5:
            mode = self.chance.choice(["nearest", "bilinear"])
            return [f"{{resize: {{{self.name()}, factor: 2, mode: {mode}}}}}"]
        return [f"{{conv_transpose2d: {{{self.name()}, features: {self.width}, kernel: 2, stride: 2}}}}"]

    def head(self) -> list[str]:
        chance = self.chance
        steps = self.norm()
        if chance.random() < 0.6:
            mode = chance.choice(["mean", "mean", "max"])
            return [*steps, f"{{pool: {{{self.name()}, mode: {mode}}}}}", self.linear(10)]
        return [*steps, self.linear(chance.choice([8, 21]))] if chance.random() < 0.5 else steps


def random_image_model(seed: int) -> tuple[str, int]:
    """Return a random spec, and the size of a batch."""
    images = Images(seed)
    return images.text(), images.batch

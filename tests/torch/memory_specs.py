"""Random small specs of cells and choices, whose memory is estimated and measured."""

from __future__ import annotations

import random
import re

# States are named s and t, wires of the width of the model x (the input) and z. Formulas that are linear in the states
# are scanned, others run in a loop.
LINEAR = ["sigmoid(z) * s + x", "0.9 * s + z", "s - 0.1 * x"]
CURVED = ["tanh(z * s + x)", "s / (1 + s * s) + z", "sigmoid(x) * s + tanh(s)"]
EARLIER = ["silu", "rms_norm", "layer_norm", "{swiglu: 48}", "{causal_conv: {kernel: 3}}", "{linear: 32}"]
LATER = ["gelu", "layer_norm", "{swiglu: {hidden: 64}}", "{linear: 32}"]


class Specs:
    """Write specs from random numbers."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.width = self.chance.choice([32, 64, 96])
        self.count = 0

    def text(self) -> str:
        """Return a spec with at least one cell or choice."""
        width, chance = self.width, self.chance
        kind = chance.choice(["features: 24", "tokens: 97"])
        first = "{linear: %d}" if "features" in kind else "{embed: %d}"
        steps = [first % width]
        for _ in range(chance.randint(1, 3)):
            steps += [self.plain(EARLIER)] * chance.randint(0, 1)
            part = chance.choice([self.cell, self.cell, self.choice])()
            z = f"{{linear: {{from: x, features: {width}, as: z}}}}, " if re.search(r"\bz\b", part) else ""
            steps.append(self.residual(f"{{identity: {{as: x}}}}, {z}{part}"))
        steps.append("{linear: {features: 8, name: last}}" if "features" in kind else "{unembed: {bias: false}}")
        return f"seqblocks: 1\nmodel:\n  input: {{{kind}}}\n  steps:\n" + "".join(f"    - {step}\n" for step in steps)

    def residual(self, steps: str) -> str:
        self.count += 1
        return f"{{residual: {{name: part_{self.count}, steps: [{steps}]}}}}"

    def plain(self, among: list[str]) -> str:
        """Return a step that keeps the width."""
        return self.residual(self.chance.choice(among).replace("linear: 32", f"linear: {self.width}"))

    def cell(self) -> str:
        chance, width = self.chance, self.width
        chunk = chance.choice(["", "", "chunk: 0, ", "chunk: 7, ", "chunk: 32, "])
        more = chance.choice(["", ", learned: true", ", start: 0.5"])
        state = f"{{features: {width}{more}}}"
        how = chance.choice(["scan", "scan", "curve", "curve", "loop", "gate", "pair", "matrix"])
        after = f", {self.plain(LATER)}" if chance.random() < 0.5 else ""
        if how == "matrix":
            heads = 4
            return (
                f"{{l2_norm: {{from: z, heads: {heads}, as: k}}}}, {{cell: {{from: x, {chunk}"
                f"state: {{s: {width * width // heads}}}, steps: ["
                f"{{matrix_product: {{from: k, matrix: s, heads: {heads}, as: r}}}}, {{calc: {{d: 0.5 * (x - r)}}}}, "
                f"{{outer_product: {{with: k, heads: {heads}, as: o}}}}, {{calc: {{s: s + o}}}}, "
                f"{{matrix_product: {{from: k, matrix: s, heads: {heads}, name: read}}}}{after}]}}}}"
            )
        steps = {
            "scan": f"{{calc: {{s: {chance.choice(LINEAR)}}}}}",
            "curve": f"{{calc: {{s: {chance.choice(CURVED)}}}}}",
            "pair": "{calc: {s: tanh(z) * s + x - 0.1 * t, t: t + s / 9}}",
            "loop": f"{{linear: {{from: [x, s], features: {width}, name: mix}}}}, {{tanh: {{as: s}}}}",
            "gate": (
                f"{{linear: {{from: [x, s], features: {2 * width}, as: [r, u], name: gates}}}}, "
                f"{{calc: {{g: sigmoid(r) * s}}}}, {{linear: {{from: [z, g], features: {width}, as: c}}}}, "
                "{calc: {s: s + sigmoid(u) * (tanh(c) - s)}}"
            ),
        }[how]
        states = f"s: {state}, t: {width}" if how == "pair" else f"s: {state}"
        return f"{{cell: {{from: x, {chunk}state: {{{states}}}, steps: [{steps}{after}]}}}}"

    def choice(self) -> str:
        """Return a choice of tokens. All are above -1000, and how many are above another score is not known before."""
        chance = self.chance
        how = chance.choice(["top: 0.25", "top: 0.5", "top: 9", "top: 0.5, above: 0.1", "above: -1000"])
        if chance.random() < 0.4:
            inner = self.cell()
        else:
            inner = ", ".join(self.plain([*EARLIER, *LATER]) for _ in range(chance.randint(1, 2)))
        reads = f"{inner}, {{identity: {{as: y}}}}, {{calc: r * y}}"
        return f"{{linear: {{from: x, features: 1, as: r}}}}, {{choose: {{from: x, by: r, {how}, steps: [{reads}]}}}}"


def random_text(seed: int) -> str:
    """Return a random spec."""
    return Specs(seed).text()

"""Compare `calc` with the same formulas written in torch."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.testing import check_law

HEAD = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - identity: {as: x0}
    - tanh: {as: b}
"""
# Every operator and function, of wires `x` and `b`, and of the learned scalar `s`, which is 0.75.
FORMULAS = {
    "x - s * b": lambda x, b, s: x - s * b,
    "-x / (2 + b * b)": lambda x, b, s: -x / (2 + b * b),
    "(x + b) ** 2 - 2 ** x + abs(x) ** s": lambda x, b, s: (x + b) ** 2 - 2**x + x.abs() ** s,
    "1 / (1 + exp(-b)) + sigmoid(x)": lambda x, b, s: 1 / (1 + (-b).exp()) + x.sigmoid(),
    "log(1 + x ** 2) * log2(3 + sin(b))": lambda x, b, s: (1 + x**2).log() * (3 + b.sin()).log2(),
    "sqrt(softplus(x)) + cos(b) * tanh(s)": lambda x, b, s: (1 + x.exp()).log().sqrt() + b.cos() * s.tanh(),
    "min(x, 0.5) + max(0.25, b) * max(s, x, b)": (
        lambda x, b, s: x.clamp(max=0.5) + b.clamp(min=0.25) * torch.maximum(torch.maximum(x, b), s)
    ),
    "exp(-1) * x + +b - (3 // 2)": lambda x, b, s: math.exp(-1) * x + b - 1,
}


def built(formula: str) -> seqblocks.SequenceModel:
    learned = "learned: {s: 0.75}, " if re.search(r"\bs\b", formula) else ""
    text = f'{HEAD}    - calc: {{{learned}from: x0, y: "{formula}"}}\n'
    return seqblocks.build_text(text, dtype=torch.float64)


@pytest.mark.parametrize("formula", FORMULAS)
def test_values_and_gradients(formula: str) -> None:
    model = built(formula)
    x = torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = model(x)
    s = torch.tensor([0.75], dtype=torch.float64, requires_grad=True)
    b = x.tanh()
    expected = FORMULAS[formula](x, b, s)
    # at most a dozen operations on numbers below 100, in float64
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    weights = torch.randn_like(y)
    parameters = [*model.parameters()]
    found = torch.autograd.grad((y * weights).sum(), [x, *parameters])
    known = torch.autograd.grad((expected * weights).sum(), [x, s][: 1 + len(parameters)])
    torch.testing.assert_close(found, known, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("formula", FORMULAS)
def test_the_state_law(formula: str) -> None:
    check_law(built(formula), seq=7, tolerance=1e-12)


def test_vectors_and_images() -> None:
    model = seqblocks.build_text(
        """
seqblocks: 1
model:
  inputs: {image: {image: {size: 4, channels: 3}}, style: {vector: 3}, level: {vector: 1}}
  steps:
    - calc: {y: x * (1 + style) - level, z: y * y}
  outputs: [y, z]
"""
    )
    image, style, level = torch.randn(2, 3, 4, 4), torch.randn(2, 3), torch.randn(2, 1)
    y = image * (1 + style)[:, :, None, None] - level[:, :, None, None]
    found = model(image=image, style=style, level=level)
    torch.testing.assert_close(found, {"y": y, "z": y * y})


def shared() -> seqblocks.SequenceModel:
    steps = "    - calc: {learned: {s: 0.5}, y: s * x, z: y + s * b}\n    - linear: {features: 2, name: out}\n"
    return seqblocks.build_text(HEAD + steps)


def test_a_shared_scalar_is_one_parameter() -> None:
    model = shared()
    assert [name for name in model.state_dict() if name.startswith(("y", "z"))] == ["y.s"]
    with torch.no_grad():
        model.get_parameter("y.s").fill_(2.0)
    seen: list[Tensor] = []
    model.z.register_forward_hook(lambda _module, _inputs, y: seen.append(y))
    x = torch.randn(1, 3, 6)
    model(x)
    b = x.tanh()
    torch.testing.assert_close(seen[0], 2 * b + 2 * b)  # `x` is the output of the step above


def test_exports_and_dtypes() -> None:
    model, x = shared().eval(), torch.randn(2, 4, 6)
    y = model(x)
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), y)
    half = shared().to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16

"""Rules for initial values give the same numbers as an `init:` in each step."""

from __future__ import annotations

import torch

import seqblocks

BODY = """
model:
  input: {{tokens: 32}}
  steps:
    - embed: {{features: 16{embed}}}
    - repeat:
        times: 3
        steps:
          - residual:
              - rms_norm
              - linear: {{features: 32, name: up{up}}}
              - gelu
              - linear: {{features: 16, name: down{down}}}
    - unembed{last}
"""
RULES = """seqblocks: 1
init: {"*.weight": "normal(0, 0.02)", rms_norm.weight: default, "*.bias": zeros,
  down.weight: "normal(0, 0.02 / sqrt(2 * depth))"}"""


def test_the_same_numbers() -> None:
    ruled = seqblocks.build_text(RULES + BODY.format(embed="", up="", down="", last=""), seed=3)
    both = "init: {weight: W, bias: zeros}"
    steps = {"embed": ", init: {weight: W}", "up": f", {both}", "last": f": {{{both}}}"}
    steps["down"] = ', init: {weight: "normal(0, 0.02 / sqrt(6))", bias: zeros}'
    written = {key: text.replace("W", '"normal(0, 0.02)"') for key, text in steps.items()}
    expected = seqblocks.build_text("seqblocks: 1" + BODY.format(**written), seed=3).state_dict()
    found = ruled.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    assert found["repeat.0.residual.rms_norm.weight"].eq(1).all()

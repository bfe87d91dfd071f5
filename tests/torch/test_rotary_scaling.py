"""Rotary positions: angles and factors against transformers, rotations against complex numbers, the state law."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.rotary_scaling import Scaling
from seqblocks.testing import check_law

THEIRS = {"original_length": "original_max_position_embeddings"}
# transformers computes angles in float32: a power, products and quotients, each with a rounding of its argument. The
# exponent, up to log(base) = 14, is rounded to 2^-24.
FLOAT32 = 40 * 2**-24


def entries(kind: str, chance: random.Random, pairs: int) -> dict[str, Any]:
    """Return random entries of `scaling:`."""
    found: dict[str, Any] = {"type": kind, "factor": chance.choice([1.0, 2.0, 7.5, 40.0])}
    if kind != "linear":
        found["original_length"] = chance.choice([32, 4096, 8192])
    if kind == "dynamic":
        found["length"] = found["original_length"] * chance.choice([0.5, 1, 3, 8])
    elif kind == "yarn":
        found |= chance.choice([{}, {"beta_fast": 20.0, "beta_slow": 2.0}])
        found |= chance.choice([{}, {"mscale": 0.7, "mscale_all_dim": 1.1}, {"attention_factor": 1.3}])
        found |= chance.choice([{}, {"truncate": False}])
    elif kind == "longrope":
        found |= {name: [chance.uniform(1, 9) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
        found |= chance.choice([{}, {"length": found["original_length"] + 1}, {"length": found["original_length"]}])
        found |= chance.choice([{}, {"attention_factor": 1.3}])
    elif kind == "llama3":
        found |= {"low_freq_factor": chance.choice([1.0, 2.0]), "high_freq_factor": chance.choice([4.0, 8.0])}
    return found


def of_transformers(given: dict[str, Any], base: float, head: int, part: float) -> tuple[Tensor, float]:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = given.get("length")
    rope = {THEIRS.get(key, key): value for key, value in given.items() if key not in ("type", "length")}
    rope |= {"rope_type": given["type"], "rope_theta": base, "partial_rotary_factor": part}
    # for `dynamic`, the length of the training is the config's
    most = given.get("original_length", 2048)
    config = transformers.LlamaConfig(
        hidden_size=2 * head, num_attention_heads=2, head_dim=head, max_position_embeddings=most, rope_parameters=rope
    )
    rates, factor = ROPE_INIT_FUNCTIONS[given["type"]](config, torch.device("cpu"), seq_len=length)
    return rates, float(factor)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3"])
def test_angles_and_factors_of_transformers(kind: str) -> None:
    chance = random.Random(3)
    for _ in range(30):
        head, part, base = chance.choice([8, 64]), chance.choice([0.5, 1.0]), chance.choice([100.0, 1e4, 1e6])
        width = int(head * part)
        given = entries(kind, chance, width // 2)
        scaling = Scaling.model_validate(given)
        scaling.check(width, base)
        rates, factor = of_transformers(given, base, head, part)
        torch.testing.assert_close(torch.tensor(scaling.rates(width, base)), rates, rtol=FLOAT32, atol=1e-12)
        assert scaling.amplitude() == pytest.approx(factor, rel=1e-12)


def built(step: str, features: int = 12) -> Any:
    text = f"seqblocks: 1\nmodel: {{input: {{features: {features}}}, steps: [{{{step}}}]}}"
    return seqblocks.build_text(text, dtype=torch.float64)


SCALED = "scaling: {type: yarn, factor: 4, original_length: 8, attention_factor: 1.5}"


def test_interleaved_pairs_from_a_first_feature_on() -> None:
    """Features 2 to 5 of each of two heads rotate as complex numbers; the others stay."""
    x = torch.randn(2, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = built(f"rotary: {{heads: 2, first: 2, layout: interleaved, base: 50, {SCALED}}}")(x)
    rates = torch.tensor(Scaling(type="yarn", factor=4, original_length=8).rates(4, 50.0), dtype=torch.float64)
    angle = torch.arange(9, dtype=torch.float64)[:, None, None] * rates
    heads = x.view(2, 9, 2, 6)
    pairs = torch.view_as_complex(heads[..., 2:].reshape(2, 9, 2, 2, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.full_like(angle, 1.5), angle)).flatten(-2)
    expected = torch.cat([heads[..., :2], turned], -1).flatten(-2)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_the_two_layouts_are_permutations_of_each_other() -> None:
    x = torch.randn(2, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    halves = built("rotary: {heads: 1}", 6)(x[..., [0, 2, 4, 1, 3, 5]])
    torch.testing.assert_close(built("rotary: {heads: 1, layout: interleaved}", 6)(x)[..., [0, 2, 4, 1, 3, 5]], halves)


@pytest.mark.parametrize("more", ["layout: interleaved", f"first: 2, {SCALED}"])
def test_state_law(more: str) -> None:
    check_law(built(f"rotary: {{heads: 2, {more}}}"), seq=12, resets=[(0, 3), (0, 4), (1, 11)])


def test_entries_may_be_expressions_or_a_name() -> None:
    text = """
seqblocks: 1
let: {n: 20, given: {type: linear, factor: 40}}
model:
  input: {features: 4}
  steps:
    - rotary: {heads: 1, scaling: {type: linear, factor: 2 * n}, as: a}
    - rotary: {from: input, heads: 1, scaling: given, as: b}
  outputs: [a, b]
"""
    found = seqblocks.build_text(text, dtype=torch.float64)(torch.ones(1, 5, 4, dtype=torch.float64))
    assert torch.equal(found["a"], found["b"])
    assert found["a"][0, 4, 0].item() == pytest.approx(math.cos(0.1) - math.sin(0.1))  # position 4 turns by 4 / 40


def test_facts_know_the_factor() -> None:
    steps = "{{l2_norm: {{heads: 2}}}}, {{rotary: {{heads: 2{more}}}}}"
    for more, unit in (("", 2), (f", {SCALED}", 0)):
        text = f"seqblocks: 1\nmodel: {{input: {{features: 12}}, steps: [{steps.format(more=more)}]}}"
        _, model = seqblocks.load_text(text)
        assert model is not None
        assert model.output is not None
        assert model.output.facts.unit == unit

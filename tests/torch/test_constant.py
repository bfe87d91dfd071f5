"""Test `constant`: vectors that are trained, kept or computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import seqblocks
from seqblocks.analysis import check
from seqblocks.descriptions import listing
from seqblocks.testing import check_law

RATES = "formula: 4 ** (-feature / features) if feature % 2 == 0 else side"


def text(constant: str) -> str:
    return f"""
seqblocks: 1
let: {{side: 0.5}}
model:
  input: {{features: 3}}
  steps:
    - identity: {{as: h}}
    - constant: {{features: 4, {constant}, as: c}}
    - linear: {{from: [h, c], features: 4}}
    - multiply: {{by: c}}
"""


def built(constant: str, seed: int = 0) -> seqblocks.SequenceModel:
    return seqblocks.build_text(text(constant), dtype=torch.float64, seed=seed)


KEPT = "learned: false, persistent: true"
CASES = {
    "value: 2": (True, True),
    RATES: (True, True),
    f"{KEPT}, value: 2": (True, False),
    f"{KEPT}, {RATES}": (True, False),
    f'{KEPT}, init: {{weight: "normal(0, 1)"}}': (True, False),
    "learned: false, value: 2": (False, False),
    f"learned: false, {RATES}": (False, False),
}
EXPECTED = {"value": [2.0] * 4, "formula": [1.0, 0.5, 0.5, 0.5]}  # 4^0 and 4^(-1/2) at even indices


@pytest.mark.parametrize(("constant", "kept", "trained"), [(key, *flags) for key, flags in CASES.items()])
def test_where_the_numbers_are(constant: str, kept: bool, trained: bool) -> None:
    model, x = built(constant), torch.randn(2, 5, 3, dtype=torch.float64)
    y = model(x)
    own = dict(model.named_parameters())
    assert ("c.weight" in own) == ("c.weight" in model.state_dict()) == kept
    if kept:
        assert own["c.weight"].requires_grad == trained
    known = next((values for word, values in EXPECTED.items() if word in constant), None)
    numbers = own["c.weight"].detach() if known is None else torch.tensor(known, dtype=torch.float64)
    if kept:
        torch.testing.assert_close(own["c.weight"].detach(), numbers, rtol=0, atol=0)
    joined = torch.cat([x, numbers.expand(2, 5, 4)], -1)
    weight, bias = own["linear.weight"].detach(), own["linear.bias"].detach()
    # sums of at most 8 products of numbers below 10, in float64
    torch.testing.assert_close(y.detach(), (joined @ weight.T + bias) * numbers, rtol=1e-13, atol=1e-13)
    y.sum().backward()
    with_gradient = {name for name, p in own.items() if p.grad is not None}
    assert with_gradient == {name for name in own if trained or name != "c.weight"}
    check_law(model, seq=5, tolerance=1e-13)


def test_a_kept_vector_survives_saving_and_is_drawn_again(tmp_path: Path) -> None:
    constant = f'{KEPT}, init: {{weight: "normal(0, 1)"}}'
    model = built(constant, seed=1)
    weight = model.get_parameter("c.weight").clone()
    seqblocks.save(model, tmp_path / "saved")
    loaded = seqblocks.load(tmp_path / "saved")
    assert torch.equal(loaded.get_parameter("c.weight"), weight)
    assert not loaded.get_parameter("c.weight").requires_grad
    model.reset_parameters(2)
    assert not torch.equal(model.get_parameter("c.weight"), weight)
    assert not model.get_parameter("c.weight").requires_grad


def test_both_directions_of_a_scan_may_own_one() -> None:
    scan = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - identity: {as: h}
    - scan:
        order: [forward, reverse]
        own: all
        steps:
          - constant: {features: 4, learned: false, persistent: true, value: 1, as: c}
          - calc: {y: input * c}
"""
    model = seqblocks.build_text(scan)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == {
        "scan.fwd.c.weight": False, "scan.rev.c.weight": False,
    }  # fmt: skip


def test_listings_tell_what_is_not_trained() -> None:
    _, model = check.load_text(text(f"{KEPT}, {RATES}"))
    assert model
    assert "weight [4] listed(1, 0.5, 0.5, 0.5), not trained" in listing.text(model)


def test_an_unused_vector_is_no_error_unless_it_is_trained() -> None:
    unused = "    - aside: [{constant: {from: h, features: 4, as: unused, PLACE}}]\n"
    check.load_text(text("value: 1") + unused.replace("PLACE", KEPT))
    with pytest.raises(seqblocks.SpecError, match="E315"):
        check.load_text(text("value: 1") + unused.replace("PLACE", "value: 1"))


def test_it_compiles_and_exports() -> None:
    model, x = built(f"learned: false, {RATES}").float(), torch.randn(2, 5, 3)
    y = model(x)
    for strict in (False, True):
        torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), y)

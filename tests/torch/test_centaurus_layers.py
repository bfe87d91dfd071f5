"""Layers of Centaurus and of other rates: counts, initial values, frames, the law.

The kernel is tested in tests/kernels/test_centaurus.py and tests/kernels/test_conformance.py.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.cost import macs
from seqblocks.testing import check_law


def build(steps: str, features: int = 4) -> Any:
    text = f"seqblocks: 1\nmodel:\n  input: {{features: {features}}}\n  steps:\n{steps}"
    return seqblocks.build_text(text, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mode", "expected"), [("neck", 9_792), ("pointwise", 66_624), ("dws", 1_728), ("full", 110_592)]
)
def test_counts_of_the_reference(mode: str, expected: int) -> None:
    """64 features, 64 channels (full: 4,096), 8 sub-states. A complex number counts as two reals."""
    model = build(f"    - centaurus: {{mode: {mode}, sub_states: 8}}\n", 64)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_published_initial_values() -> None:
    own = dict(build("    - centaurus: {mode: neck, state: 5, sub_states: 4}\n").centaurus.named_parameters())
    torch.testing.assert_close(-torch.nn.functional.softplus(own["A_real"]), torch.full_like(own["A_real"], -0.5))
    torch.testing.assert_close(own["A_imag"][2].float(), math.pi * torch.arange(4))
    torch.testing.assert_close(own["log_dt"].exp().float(), torch.logspace(-3, -1, 5))
    assert own["B"].abs().max() <= 4**-0.5
    assert own["C"].abs().max() <= 5**-0.5


def test_a_rate_divides_and_restores() -> None:
    model = build("    - downsample: {factor: 4}\n    - upsample: {factor: 2}\n")
    x = torch.arange(32, dtype=torch.float64).reshape(1, 8, 4)
    torch.testing.assert_close(model(x)[0, :, 0], torch.tensor([6.0, 6.0, 22.0, 22.0], dtype=torch.float64))
    last = build("    - downsample: {factor: 4, method: last}\n")
    torch.testing.assert_close(last(x)[0, :, 0], torch.tensor([12.0, 28.0], dtype=torch.float64))
    with pytest.raises(seqblocks.RunError, match="a multiple of that many tokens, not 7"):
        model(x[:, :7])
    with pytest.raises(seqblocks.RunError, match="may span two sequences"):
        model(x, resets=torch.zeros(1, 8, dtype=torch.bool))


@pytest.mark.parametrize("tokens", [1000, 6, 7])
def test_a_wrong_number_of_tokens_is_that_of_the_input(tokens: int) -> None:
    """Steps that merge 16 tokens in two steps of 4 need a multiple of 16, whichever step is the first that fails."""
    model = build("    - downsample: {factor: 4}\n    - downsample: {factor: 4, name: again}\n")
    with pytest.raises(seqblocks.RunError, match=f"merges 16 tokens into one: pass a multiple of 16, not {tokens}$"):
        model(torch.zeros(1, tokens, 4, dtype=torch.float64))
    with pytest.raises(seqblocks.RunError, match=f"downsample by 4 .* not {tokens | 1}") as caught:
        build("    - downsample: {factor: 4}\n")(torch.zeros(1, tokens | 1, 4, dtype=torch.float64))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_stream_of_a_changed_rate_runs_by_frames() -> None:
    """Down by 2 and by 3, up by 3: frames of 6 tokens, for each of which the output has 3."""
    model = build(
        "    - causal_conv: {kernel: 3}\n    - downsample: {name: a, factor: 2}\n"
        "    - causal_conv: {name: coarse, kernel: 2}\n    - downsample: {name: b, factor: 3}\n"
        "    - centaurus: {mode: neck, state: 5}\n    - upsample: {factor: 3}\n"
    )
    assert model.frame_size == 6
    check_law(model, seq=5, cuts=(1, 3))
    x = torch.randn(2, 12, 4, dtype=torch.float64)
    y, state = model.step(x[:, :6])
    assert y.shape == (2, 3, 4)
    torch.testing.assert_close(torch.cat([y, model.step(x[:, 6:], state)[0]], 1), model(x))
    for call, why in (
        (lambda: model(x[:, :8], return_state=True), "streams 6 tokens at a time: pass a multiple, not 8"),
        (lambda: model.step(x[:, 0]), r"a step reads \[batch, 6, 4\], not \[2, 4\]"),
        (lambda: model.step(x[:, :5]), "streams 6 tokens at a time: pass a multiple, not 5"),
        (lambda: check_law(model, resets=[(0, 1)]), "may span two sequences"),
    ):
        with pytest.raises(seqblocks.RunError, match=why):
            call()
    vector = build("    - downsample: {factor: 4}\n    - pool: {mode: last}\n")
    check_law(vector, seq=3, cuts=(2,))


def test_costs_of_tokens_at_a_changed_rate() -> None:
    every, fourth = (
        macs(build(f"{first}    - linear: {{features: 8, bias: false}}\n").graph, None)
        for first in ("", "    - downsample: {factor: 4}\n")
    )
    assert every == 4 * fourth == 32

"""Resets: recovery from a state that is not finite, and rejection by steps that would mix sequences.

The kernels are tested by check_poison in tests/kernels/conformance.py, and by tests/kernels/test_mlstm_resets.py.
"""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.state import map_state

STREAMING = ("mamba_small", "mlstm_small", "hybrid_small", "memoroid_agent", "transformer_small", "centaurus_mlstm")


@pytest.mark.parametrize("name", STREAMING)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_an_agent_recovers(name: str, poison: float) -> None:
    """One step with a reset on a poisoned state equals a step on a new state, and nothing of the old state remains."""
    model = seqblocks.build(name, device="cpu", seed=0)
    first = model.init_state(3)
    shape = (3, *([model.frame_size] if model.frame_size > 1 else []))
    wire = model.spec.input
    x = torch.randint(0, 16, shape) if wire.kind == "tokens" else torch.randn(*shape, wire.features)
    poisoned = map_state(lambda t: torch.full_like(t, poison) if t.is_floating_point() else t + 3, first)
    with torch.no_grad():
        expected, after = model.step(x, first)
        found, state = model.step(x, poisoned, resets=torch.ones(3, dtype=torch.bool))
        later, _ = model.step(x, state)
        wanted_later, _ = model.step(x, after)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(later, wanted_later)
    map_state(lambda t: pytest.fail("not finite") if not t.isfinite().all() else t, state)


IMAGE = "{features: 4, grid: [2, 3]}"
MIXERS = {
    "conv2d": (IMAGE, "conv2d: {kernel: 3}", "it reads neighbouring tokens of an image"),
    "pool2d": (IMAGE, "pool2d: {}", "it reads neighbouring tokens of an image"),
    "class_token": ("{features: 4, length: 6}", "class_token", "it inserts one token into the whole sequence"),
    "to_image": (IMAGE, "to_image", "it reads the whole sequence"),
    "position_embed": (IMAGE, "position_embed", "it has a position for each row and column of an image"),
    "scan": (IMAGE, "scan: {order: columns, steps: [silu]}", "it reads the sequence in the order columns"),
    "downsample": ("{features: 4}", "downsample: {factor: 2}", "a window may span two sequences"),
    **{
        f"pool {mode}": ("{features: 4}", f"pool: {{mode: {mode}}}", f"mode {mode} reads the whole sequence")
        for mode in ("mean", "max", "first", "cls", "middle", "bilateral_mean", "bilateral_concat")
    },
}


def small(input: str, *steps: str) -> SequenceModel:
    return seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {input}, steps: [{', '.join(steps)}]}}\n")


@pytest.mark.parametrize("name", MIXERS)
def test_steps_that_would_mix_sequences_refuse_resets(name: str) -> None:
    """Such a step used to mix in tokens of other sequences without an error."""
    input, step, why = MIXERS[name]
    model = small(input, "linear: {features: 4}", step)
    x = torch.randn(1, 6, 4)
    first = torch.zeros(1, 6, dtype=torch.bool)
    verb = step.partition(':')[0]
    message = rf"{verb} \(.*:2:\d+\) would mix the sequences that resets or cu_seqlens separate: {why}"
    model(x)
    with pytest.raises(seqblocks.RunError, match=message):
        model(x, resets=first)
    with pytest.raises(seqblocks.RunError, match=message):
        model(x, cu_seqlens=torch.tensor([0, 3, 6]))


def test_the_last_token_is_that_of_the_last_sequence() -> None:
    model = small("{features: 4}", "causal_conv: {kernel: 3}", "pool: {mode: last}")
    x = torch.randn(2, 6, 4)
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[:, 4] = True
    torch.testing.assert_close(model(x, resets=first), model(x[:, 4:]))

"""The latency and lookahead in a summary match those measured on a streaming model."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks.analysis.passes import lookahead
from seqblocks.checkpoint import hf_config
from seqblocks.descriptions import listing
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_lookahead, random_input

HEAD = "seqblocks: 1\nmodel:\n  input: {features: 3, sample_rate: 8000}\n  steps: "
FRAMES = "[{downsample: {factor: 4}}, {causal_conv: {kernel: 2}}, {upsample: {factor: 4}}]"
TWO_RATES = (
    "[{parallel: [{a: [{downsample: {factor: 4}}, {upsample: {factor: 4}}]}, "
    "{b: [{downsample: {factor: 6}}, {upsample: {factor: 6}}]}]}]"
)
LATE = "[{downsample: {factor: 4, as: slow}}, {upsample: {factor: 4}}, {shift: {by: 3}}]"


def measured_latency(model: SequenceModel, samples: int) -> int:
    """Return the most samples that arrive after a sample before a stream returns the output at its position."""
    x = random_input(model, 1, samples)
    state, waited, returned = model.init_state(1), 0, 0
    for start in range(0, samples, model.frame_size):
        frame = x[:, start] if model.frame_size == 1 else x[:, start : start + model.frame_size]
        y, state = model.step(frame, state)
        arrived = start + model.frame_size
        waited = max(waited, arrived - 1 - returned)
        returned += 1 if model.frame_size == 1 else y.shape[1]
        assert returned == arrived
    return waited


def measured_lookahead(model: SequenceModel, samples: int) -> int:
    """Return the farthest later sample that changes an output, found by changing one sample at a time."""
    farthest = 0
    with torch.no_grad():
        x = random_input(model, 1, samples).detach()
        before = model(x)
        for at in range(samples):
            other = x.clone()
            other[:, at] += 1
            changed = (model(other) - before).abs().amax((0, 2)) > 1e-9  # allows for rounding
            farthest = max(farthest, at - int(changed.nonzero()[0])) if changed.any() else farthest
    return farthest


@pytest.mark.parametrize(
    ("steps", "latency", "lookahead"),
    [("[causal_conv]", 0, 0), (FRAMES, 3, 3), (TWO_RATES, 11, 5), (LATE, 3, 0)],
)
def test_latency_is_the_delay_of_a_stream(steps: str, latency: int, lookahead: int) -> None:
    model = seqblocks.build_text(HEAD + steps, dtype=torch.float64)
    found = seqblocks.summarise(model)
    assert found.latency == latency == measured_latency(model, 24)
    assert found.latency_ms == pytest.approx(latency / 8)
    assert measured_lookahead(model, 24) == lookahead <= int(found.lookahead or 0)


CENTRED = "{conv1d: {features: 3, kernel: 6, causal: false}}"


@pytest.mark.parametrize(
    ("steps", "lookahead"),
    [
        ("[{scan: {order: reverse, steps: [{shift: 1}]}}]", 1),
        ("[{scan: {order: [forward, reverse], merge: concat, steps: [{shift: 3}]}}]", 3),
        ("[{scan: {order: reverse, steps: [{shift: 2}, token_shift, {causal_conv: {kernel: 3}}]}}]", 5),
        ("[{scan: {order: reverse, steps: [{shift: 4}]}}, {shift: {by: 3, name: back}}]", 1),
        (f"[{{scan: {{order: reverse, steps: [{CENTRED}]}}}}]", 3),
        (f"[{CENTRED}]", 2),
        ("[{scan: {order: reverse, steps: [{scan: {order: reverse, steps: [{shift: 2}]}}, {shift: 1}]}}]", 0),
        ("[{scan: {order: reverse, steps: [{attention: {q: input, k: input, v: input, heads: 1, window: 3}}]}}]", 2),
        ("[{downsample: 4}, {scan: {order: reverse, steps: [{shift: 1}]}}, {upsample: 4}]", 7),
    ],
)
def test_the_lookahead_of_a_reverse_scan_is_measured_too(steps: str, lookahead: int) -> None:
    model = seqblocks.build_text(HEAD + steps, dtype=torch.float64, seed=0).eval()
    assert seqblocks.summarise(model).lookahead == lookahead == measured_lookahead(model, 24)


def test_each_output_is_checked_against_its_own_lookahead(monkeypatch: pytest.MonkeyPatch) -> None:
    later = "{scan: {from: input, order: reverse, steps: [{shift: 2}], as: later}}"
    text = f"{HEAD}[{{linear: {{features: 2, as: now}}}}, {later}]\n  outputs: [later, now]"
    model = seqblocks.build_text(text, dtype=torch.float64)
    check_lookahead(model)
    wrong = {"later": lookahead.Ahead(extra=1, later=1), "now": lookahead.Ahead(extra=9, later=9)}
    monkeypatch.setattr(lookahead, "of_outputs", lambda _: wrong)
    with pytest.raises(AssertionError, match="lookahead 1 of later"):
        check_lookahead(model)


def test_a_second_head_that_looks_ahead_leaves_a_causal_language_model() -> None:
    text = (
        "seqblocks: 1\nmodel:\n  input: {tokens: 9}\n  steps: [{embed: {features: 4, as: h}}, {unembed: {as: logits}}, "
        "{scan: {from: h, order: reverse, steps: [{shift: 1}]}}, {unembed: {name: second, as: mtp}}]\n"
        "  outputs: [mtp, logits]\nexpect: {lookahead: {logits: 0, mtp: 1}}"
    )
    spec = seqblocks.load_text(text)[1]
    assert hf_config.causal_lm_obstacle(spec) is None
    assert not hf_config.is_causal(spec)  # as a whole


def test_the_denoiser() -> None:
    model = seqblocks.build("centaurus_denoiser", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found = seqblocks.summarise(model)
    assert found.latency == found.lookahead == measured_latency(model, 64) == measured_lookahead(model, 48) == 15
    assert found.latency_ms == 1000 * 15 / 16000
    data = found.as_data()
    assert {key: data[key] for key in ("latency", "sample_rate")} == {"latency": 15, "sample_rate": 16000}


def test_rate_and_lookahead_of_every_wire() -> None:
    model = seqblocks.build_text(HEAD + "[{linear: 4}, *REST".replace("*REST", FRAMES[1:]), dtype=torch.float64)
    rows = {row.names[0]: (row.rate, row.lookahead) for row in seqblocks.summarise(model).rows}
    assert rows == {"linear": (1, 0), "downsample": (4, 3), "causal_conv": (4, 3), "upsample": (1, 3)}
    text = listing.text(model.spec)
    assert "input %0" not in text
    assert "%0 sequence [batch, seq, 3], 8,000 Hz" in text
    assert "-> [batch, seq/4, 4], rate 4, lookahead 3\n" in text


def test_the_latency_without_streaming_is_the_lookahead() -> None:
    window = seqblocks.load_text(HEAD + "[{scan: {order: reverse, steps: [causal_conv]}}]")[1]
    found = seqblocks.summarise(window)
    assert (found.latency, found.latency_ms) == (3, pytest.approx(3 / 8))
    whole = seqblocks.load_text(HEAD + "[{scan: {order: reverse, steps: [{position_embed: {length: 9}}]}}]")[1]
    vector = seqblocks.load_text(HEAD + "[causal_conv, pool]")[1]
    for model in (whole, vector):
        found = seqblocks.summarise(model)
        assert (found.latency, found.latency_ms) == (None, None)

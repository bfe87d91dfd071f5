"""Joining wires along features and tokens, and selecting tokens: against torch's functions, and the state law."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_law, check_lookahead, check_shapes
from tests.draws import draw


def built(steps: str, given: str = "input: {features: 6}") -> SequenceModel:
    text = f"seqblocks: 1\nmodel:\n  {given}\n  steps: [{steps}]\n"
    return seqblocks.build_text(text, dtype="float64")


X = draw(2, 9, 6)
HALVES = "{identity: {as: {a: 2, b: 4}}}"


def test_features_are_joined_in_order() -> None:
    y = built(f"{HALVES}, {{concat: {{from: [b, a, b]}}}}")(X)
    torch.testing.assert_close(y, torch.cat([X[..., 2:], X[..., :2], X[..., 2:]], -1), rtol=0, atol=0)


def test_a_vector_and_channels_are_joined() -> None:
    y = built("{pool: {as: mean}}, {concat: {from: [mean, input]}}")(X)
    torch.testing.assert_close(y, torch.cat([X.mean(1, keepdim=True).expand(-1, 9, -1), X], -1))
    image = draw(2, 3, 4, 4)
    y = built("{concat: {from: [input, input]}}", "input: {image: {size: 4, channels: 3}}")(image)
    torch.testing.assert_close(y, torch.cat([image, image], 1), rtol=0, atol=0)


@pytest.mark.parametrize("given", ["input: {features: 6}", "input: {features: 6, length: 9}"])
def test_tokens_are_joined_in_order(given: str) -> None:
    model = built("{scale: {by: 2, as: twice}}, {concat: {from: [input, twice], axis: tokens}}", given)
    torch.testing.assert_close(model(X), torch.cat([X, 2 * X], 1), rtol=0, atol=0)
    check_shapes(model, seq=9)
    assert model.spec.output
    assert model.spec.output.length == (18 if "length" in given else "seq + seq")
    with pytest.raises(seqblocks.RunError, match="cannot stream: it joins whole sequences"):
        model.init_state(1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{first: 2}", X[:, 2:]), ("{first: 2, count: 3}", X[:, 2:5]), ("{count: 4}", X[:, :4]),
        ("{last: 4}", X[:, -4:]), ("{last: 9}", X), ("{first: 0}", X),
    ],
)  # fmt: skip
def test_slices(arguments: str, expected: torch.Tensor) -> None:
    model = built(f"{{slice: {arguments}}}", "input: {features: 6, length: 9}")
    torch.testing.assert_close(model(X), expected, rtol=0, atol=0)
    check_shapes(model)
    check_lookahead(model)


def test_a_slice_of_an_open_length_needs_enough_tokens() -> None:
    for arguments in ("{first: 8, count: 2}", "{last: 10}"):
        model = built(f"{{slice: {arguments}}}")
        with pytest.raises(seqblocks.RunError, match="slice needs at least 10 tokens, and the sequence has 9"):
            model(X)
        assert model(draw(1, 10, 6)).shape[1] in (2, 10)


def test_the_lookahead_of_a_slice_is_its_first_token() -> None:
    model = built("{causal_conv: {kernel: 2}}, {slice: {first: 3, count: 4}}")
    assert seqblocks.summarise(model).lookahead == 3
    check_lookahead(model, seq=9)


def test_joined_features_stream() -> None:
    steps = "{linear: {features: 4, as: a}}, {causal_conv: {kernel: 3, as: c}}, {concat: {from: [c, input, a]}}"
    check_law(built(f"{steps}, {{token_shift: {{name: t}}}}"), resets=((0, 5), (1, 1)))
    frames = "{downsample: {factor: 2, as: h}}, {causal_conv: {kernel: 2, as: c}}, {concat: {from: [c, h]}}"
    check_law(built(frames))

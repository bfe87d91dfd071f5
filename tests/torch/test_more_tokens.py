"""More tokens than the input has: of a fixed number, each may become several."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv_transpose1d

import seqblocks
from seqblocks.testing import check_lookahead

VOCODER = """
seqblocks: 1
model:
  input: {features: 6, length: 5}                            # a spectrogram of 5 frames
  steps:
    - conv_transpose1d: {features: 4, kernel: 4, stride: 2, causal: false, name: first}
    - residual: [{conv1d: {features: 4, kernel: 3, causal: false}}, silu]
    - conv_transpose1d: {features: 2, kernel: 3, stride: 3, name: second}
    - upsample: {factor: 2}
    - linear: 1
expect: {output: [batch, 60, 1], lookahead: all}
"""


def test_frames_become_samples() -> None:
    model, x = seqblocks.build_text(VOCODER, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    check_lookahead(model)
    y = model(x)
    assert y.shape == (2, 60, 1)
    h = conv_transpose1d(x.transpose(1, 2), model.first.weight, model.first.bias, stride=2)[..., 1:11]
    h = h + torch.nn.functional.silu(torch.nn.functional.conv1d(
        h, model.residual.conv1d.weight, model.residual.conv1d.bias, padding=1
    ))  # fmt: skip
    h = conv_transpose1d(h, model.second.weight, model.second.bias, stride=3).transpose(1, 2)
    torch.testing.assert_close(y, model.linear(h.repeat_interleave(2, 1)), rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("step", ["upsample: 2", "conv_transpose1d: {features: 4, kernel: 4, stride: 2}"])
def test_such_a_model_does_not_stream(step: str) -> None:
    text = f"seqblocks: 1\nmodel: {{input: {{features: 4, length: 6}}, steps: [{{{step}}}]}}\n"
    model = seqblocks.build_text(text)
    with pytest.raises(seqblocks.RunError, match="it makes more tokens than the input has"):
        model.init_state(1)
    assert seqblocks.summarise(model.spec).lookahead == "all"
    with pytest.raises(seqblocks.SpecError, match="downsample comes first, or the input has a length"):
        seqblocks.build_text(text.replace(", length: 6", ""))


def test_tokens_that_were_merged_become_more() -> None:
    """Six tokens are two after `downsample: 3`, and eight after `upsample: 4`."""
    steps = "[{downsample: 3}, {upsample: 4}, {causal_conv: {kernel: 2}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4, length: 6}}, steps: {steps}}}\n")
    assert model(torch.randn(2, 6, 4)).shape == (2, 8, 4)

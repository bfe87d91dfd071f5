"""More tokens than the input has: each may become several."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv_transpose1d

import seqblocks
from seqblocks.testing import check_law, check_lookahead

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
expect: {output: [batch, 60, 1], lookahead: 1}
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


CAUSAL = """
seqblocks: 1
model:
  input: {features: 6}
  steps:
    - conv_transpose1d: {features: 4, kernel: 5, stride: 2, name: first}
    - residual: {steps: [{conv1d: {features: 4, kernel: 3}}, silu], as: h}
    - linear_attention: {q: h, k: h, v: h, heads: 2}
    - upsample: {factor: 3}
    - rearrange: {pattern: "seq (n features) -> (seq n) features", n: 2}
expect: {output: [batch, "seq*12", 2], lookahead: 0}
"""


def test_a_causal_vocoder_streams() -> None:
    """One frame of the spectrogram at a time: the law, also without gradients, and the loops of the definition."""
    model = seqblocks.build_text(CAUSAL, dtype=torch.float64)
    check_law(model)
    check_lookahead(model)
    assert (model.frame_size, model.takes_frames) == (1, True)
    x, state, found = torch.randn(2, 7, 6, dtype=torch.float64), model.init_state(2), []
    for t in range(7):
        y, state = model.step(x[:, t : t + 1], state)
        assert y.shape == (2, 12, 2)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), model(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(seqblocks.RunError, match=r"a step reads \[batch, 1, 6\]"):
        model.step(x[:, 0], state)


@pytest.mark.parametrize(("steps", "frame", "length", "text"), [
    ("[{downsample: 3}, {upsample: 4}]", 3, 8, "seq*4/3"),
    ("[{upsample: 4}, {downsample: 6}]", 3, 4, "seq*2/3"),
    ("[{upsample: 4}, {downsample: 2}]", 1, 12, "seq*2"),
    ("[{upsample: 2}, {downsample: 2}]", 1, 6, "seq"),
])  # fmt: skip
def test_lengths_of_split_and_merged_tokens(steps: str, frame: int, length: int, text: str) -> None:
    steps = steps[:-1] + ", {causal_conv: {kernel: 2}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}\n")
    assert model(torch.randn(2, 6, 4)).shape == (2, length, 4)
    assert str(model.spec.output) == f"[batch, {text}, 4]"
    assert model.frame_size == frame
    check_law(model.double())
    check_lookahead(model)


@pytest.mark.parametrize(
    ("name", "backend"),
    [("open", "aot_eager"), ("fixed", "aot_eager"), pytest.param("open", "inductor", marks=pytest.mark.long)],
)
def test_compiled_and_exported(name: str, backend: str) -> None:
    text = CAUSAL
    if name == "fixed":
        text = text.replace("features: 6}", "features: 6, length: 5}").replace('"seq*12"', "60")
    model, x = seqblocks.build_text(text), torch.randn(2, 5, 6)
    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    seq = None if name == "fixed" else {1: torch.export.Dim("seq", min=2)}
    program = torch.export.export(model, (x,), dynamic_shapes={"x": seq} if seq else None)
    torch.testing.assert_close(program.module()(x), model(x))


def test_tokens_that_were_merged_become_more() -> None:
    """Six tokens are two after `downsample: 3`, and eight after `upsample: 4`."""
    steps = "[{downsample: 3}, {upsample: 4}, {causal_conv: {kernel: 2}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4, length: 6}}, steps: {steps}}}\n")
    assert model(torch.randn(2, 6, 4)).shape == (2, 8, 4)

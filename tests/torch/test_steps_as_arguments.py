"""Models whose blocks are called with steps equal models with the steps written in place, and stream."""

import copy

import pytest
import torch

import seqblocks
from seqblocks.testing import check_law

BLOCKS = """
seqblocks: 1
use: [prenorm, xlstm, transformer, mamba]
let: {dim: 16}
blocks:
  twice:
    args: {mixer: steps, after: [silu]}
    steps:
      - repeat: {times: 2, steps: [prenorm: [mixer, after]]}
model:
  input: {features: 16, length: 12}
  steps:
"""
MIXERS = ("{causal_conv: {kernel: 3}}", "{mlstm_layer: {dim: dim, heads: 2}}", "{mamba_mixer: {dim: dim, state: 4}}")
OTHERS = ("{scan: {order: [forward, reverse], own: all, steps: [causal_conv]}}", "silu", "{swiglu: 24}")


def renamed(name: str) -> str:
    """Translate a parameter name of the expanded spec into the name in the spec that passes the steps."""
    for inner in ("mixer.mixer.", "mixer.after.", "prenorm.", "norm.rms_", "residual.mixer."):
        name = name.replace(inner, {"norm.rms_": "rms_", "residual.mixer.": "residual."}.get(inner, ""))
    return name


@pytest.mark.parametrize("mixer", [*MIXERS, *OTHERS])
def test_values_are_those_of_the_steps_written_out(mixer: str) -> None:
    passed = seqblocks.build_text(f"{BLOCKS}    - twice: [{mixer}]\n", dtype=torch.float64)
    layer = f"residual: [{{rms_norm: {{name: rms_norm}}}}, {mixer}, silu]" if mixer != "silu" else ""
    layer = layer or "residual: [rms_norm, silu, {silu: {name: b}}]"
    written = f"{BLOCKS}    - repeat: {{name: twice, times: 2, steps: [{layer}]}}\n"
    plain = seqblocks.build_text(written, dtype=torch.float64)
    weights = {renamed(name).replace("twice.repeat.", "twice."): value for name, value in passed.state_dict().items()}
    assert [*weights] == [*plain.state_dict()]
    plain.load_state_dict(weights)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    torch.testing.assert_close(passed(x), plain(x), rtol=0, atol=0)
    again = copy.deepcopy(passed)
    torch.testing.assert_close(again(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_law(mixer: str) -> None:
    model = seqblocks.build_text(f"{BLOCKS}    - twice: {{mixer: [{mixer}], after: []}}\n", dtype=torch.float64)
    check_law(model)

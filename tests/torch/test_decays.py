"""Log decays, steps and their initialisers compared with their formulas, where no golden case of a layer covers them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.ops.decay import at_least

X = 4 * torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def built(step: str, features: int = 6, **options: Any) -> SequenceModel:
    return seqblocks.build_text(
        f"seqblocks: 1\nmodel: {{input: {{features: {features}}}, steps: [{{{step}}}]}}",
        dtype=torch.float64, seed=1, **options,
    )  # fmt: skip


def drawn(init: str, features: int = 64, rows: int = 64) -> Tensor:
    model = built(f'linear: {{features: {rows}, bias: false, init: {{weight: "{init}"}}}}', features)
    return model.linear.weight.detach()


def test_bounded_decays() -> None:
    model = built("log_decay: {kind: bounded, heads: 2, bound: -3}")
    with torch.no_grad():
        model.log_decay.A_log.copy_(torch.tensor([0.3, -0.5]))
    rate = model.log_decay.A_log.exp().repeat_interleave(3)
    expected = -3 * torch.sigmoid(rate * (X + model.log_decay.dt_bias))
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)


def test_steps_have_limits() -> None:
    model = built("time_step: {least: 0.5, most: 2}")
    expected = torch.nn.functional.softplus(X + model.time_step.bias)
    assert expected.min() < 0.5
    assert expected.max() > 2
    torch.testing.assert_close(model(X), expected.clamp(0.5, 2), rtol=1e-12, atol=1e-12)


def test_decays_are_float32_in_a_model_of_16_bits() -> None:
    model = seqblocks.build_text(
        "seqblocks: 1\nmodel: {input: {features: 6}, steps: [{log_decay: softplus}]}", dtype=torch.bfloat16
    )
    assert model.log_decay.A_log.dtype == torch.float32
    assert model(X.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("lower", [0.0, 1e-3, 0.4, 0.9])
def test_the_least_decay_has_a_gradient_also_where_it_is_0(lower: float) -> None:
    least = torch.full_like(X, lower).requires_grad_()
    x = X.clone().requires_grad_()
    found, expected = at_least(least, x), torch.log(least + (1 - least) * x.sigmoid())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    pairs = zip(*(torch.autograd.grad(y.sum(), [least, x]) for y in (found, expected)), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    far = torch.tensor([-1e4, 1e4])
    assert torch.isfinite(at_least(torch.full_like(far, lower), far)).all()


def test_least_decays_rise_from_layer_to_layer() -> None:
    model = built("lower_decays: {layers: 3, features: 4}")
    with torch.no_grad():
        model.lower_decays.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
    found = model(X)[0, 0].view(3, 4)
    shares = model.lower_decays.weight.softmax(0)
    expected = torch.stack([torch.zeros(4, dtype=torch.float64), shares[1], shares[1] + shares[2]])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_initialisers() -> None:
    uniform = drawn("log_of_uniform(2, 6)").exp()
    assert 2 <= uniform.min() < 2.1
    assert 5.9 < uniform.max() <= 6
    kept = torch.exp(-torch.nn.functional.softplus(drawn("ring")))
    assert 0.9 - 1e-6 <= kept.min() < 0.905
    assert 0.995 < kept.max() <= 0.999 + 1e-6
    assert abs(kept.square().mean().item() - (0.81 + 0.998) / 2) < 0.002
    for shape in ((64, 64), (16, 64), (64, 16)):
        w = drawn("orthogonal(0.5)", shape[1], shape[0])
        small = w @ w.T if shape[0] <= shape[1] else w.T @ w
        torch.testing.assert_close(small, 0.25 * torch.eye(len(small), dtype=w.dtype), rtol=0, atol=1e-6)
    n = torch.arange(64, dtype=torch.float64)
    torch.testing.assert_close(drawn("falling(0.4)")[0], 1 - (n / 64) ** 0.4, rtol=0, atol=1e-6)
    z = 2 * (n % 8) / 7 - 1
    expected = -5.5 + 6 * (n / 63) ** 1.3 + 2.5 * z * z.abs()
    torch.testing.assert_close(drawn("waves(-5.5, 0.5, 1.3, 2.5, 8)")[0], expected, rtol=0, atol=1e-5)


READERS = (
    "linear: 6", "layer_norm", "rms_norm", "swiglu: 8", "proj_up: 2", "proj_down: 4", "classifier: 5", "token_shift",
    "conv1d: {kernel: 3, features: 4}", "causal_conv: {kernel: 3}", "headwise_linear: {block: 3}",
    "slstm: {heads: 2, z: decay, i: decay, f: decay, o: decay}",
    "residual: [layer_norm, {linear: 6}]", "experts: {count: 2, steps: [{linear: 6}]}",
    "linear: {features: 6, from: [decay, x]}", "linear: {features: 6, from: [x, decay]}",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_float32_in_a_model_of_16_bits_can_be_read(reader: str, dtype: torch.dtype) -> None:
    text = f"""seqblocks: 1
model:
  input: {{features: 6}}
  steps:
    - identity: {{as: x}}
    - log_decay: {{kind: logsigmoid, as: decay}}
    - {reader}
"""
    precise, model = (seqblocks.build_text(text, dtype=kind, seed=2).eval() for kind in (torch.float32, dtype))
    precise.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    x = X.to(dtype)
    y, expected = model(x), precise(x.float())
    room = 16 * torch.finfo(dtype).eps  # one rounding for each of about ten operations, in sums of at most 12 terms
    assert (y - expected).abs().max() <= room * expected.abs().max()
    assert torch.equal(model(x, return_state=True)[0], y)


def test_an_input_of_more_bits_than_the_model_is_refused_all_the_same() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 6}, steps: [{log_decay: softplus}, {linear: 6}]}"
    model = seqblocks.build_text(text, dtype="bfloat16")
    with pytest.raises(seqblocks.RunError, match="the model is bfloat16 and its input float32"):
        model(X.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(X.float())


def test_a_tied_weight_decides_the_dtype() -> None:
    steps = "[{embed: 6}, {time_step: {}}, {unembed: {bias: false, tie: embed}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{tokens: 5}}, steps: {steps}}}", dtype="bfloat16")
    assert model(torch.tensor([[1, 2, 3]])).dtype == torch.bfloat16

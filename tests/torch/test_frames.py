"""Steps of models that change the rate of their tokens: planned frames equal the whole sequence, in float64.

A frame is computed by the same functions as single tokens, in another order of sums: 1e-12 of values around 1.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import seqblocks
from seqblocks.kernels import centaurus
from seqblocks.kernels.centaurus.interface import discretised
from seqblocks.kernels.centaurus.step import prepare
from seqblocks.runtime.model import SequenceModel
from seqblocks.runtime.reading import MOST_ROWS
from seqblocks.runtime.stepping import Stepper

DOUBLE = torch.float64


def build(steps: list[str], features: int = 8, **options: Any) -> SequenceModel:
    lines = "\n    - ".join(["  steps:", *steps])
    head = "seqblocks: 1\nuse: [centaurus, xlstm, mamba, transformer, deltaproduct]\nmodel:\n"
    text = f"{head}  input: {{features: {features}}}\n{lines}\n"
    return drawn(seqblocks.build_text(text, dtype=DOUBLE, device="cpu", seed=0, **options))


def drawn(model: SequenceModel) -> SequenceModel:
    """Add noise to all parameters, so that none is 0 or 1."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=DOUBLE)
    return model.eval()


def frames(model: SequenceModel, x: Tensor, state: Any = None) -> tuple[list[Any], Any]:
    """Return the outputs of the frames of x [batch, seq, ...], and the last state."""
    found = []
    with torch.no_grad():
        for part in x.split(model.frame_size, 1):
            y, state = model.step(part, state)
            found.append(y)
    return found, state


def assert_follows(model: SequenceModel, batch: int = 2, count: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, count * model.frame_size, model.spec.input.features, generator=generator, dtype=DOUBLE)
    found, state = frames(model, x)
    with torch.no_grad():
        expected, last = model(x, return_state=True)
    outputs = torch.cat(found, 1) if expected.dim() == 3 else found[-1]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


DOWN, UP = "downsample: {factor: 4}", "upsample: {factor: 4}"
STEPS = {
    "means": [DOWN, "linear: 6", UP],
    "last": ["downsample: {factor: 4, method: last}", "linear: 6"],
    "factor 1": ["linear: 8", "downsample: {factor: 2, name: d}", "downsample: 1", "upsample: 1"],
    "three rates": ["linear: {features: 8, name: l1, as: a}", "downsample: {factor: 2, name: d1}",
                    "linear: {features: 8, name: l2, as: b}",
                    "downsample: {factor: 3, name: d2}", "linear: {features: 8, name: l3}",
                    "upsample: {factor: 3, name: u1, as: c}", "linear: {from: [b, c], features: 8, name: l4}",
                    "upsample: {factor: 2, name: u2, as: d}",
                    "linear: {from: [a, d], features: 4, name: l5}"],
    "strided": ["conv1d: {features: 6, kernel: 5, stride: 2, name: c1}", "silu",
                "conv1d: {features: 8, kernel: 4, stride: 2, groups: 2, name: c2}",
                "conv_transpose1d: {features: 6, kernel: 6, stride: 4}"],
    "convolutions": ["conv1d: {features: 8, kernel: 3, dilation: 2, name: c1}",
                     "conv1d: {features: 8, kernel: 1, name: c2}", "causal_conv: {kernel: 3}", "downsample: 3",
                     "conv1d: {features: 8, kernel: 3, groups: 4, name: c3}"],
    "convolutions at two rates": [
        "identity: {as: x}", "linear: {from: x, features: 6, as: a}", "downsample: {from: x, factor: 2, as: low}",
        "causal_conv: {from: a, name: p, as: p}", "causal_conv: {from: x, name: q, as: q}",
        "causal_conv: {from: low, name: r}", "upsample: {factor: 2, as: t}",
        "linear: {from: [p, q, t], features: 5, name: last}"],
    "vectors of sequences": ["causal_conv", "downsample: 3", "pool: {mode: last}", "linear: 5"],
    "mixers": ["mamba_block: {dim: 8}", "mlstm_block: {dim: 8, heads: 2}", "downsample: 2",
               "slstm_block: {dim: 8, heads: 2}", "mamba_block: {dim: 8, name: slow}", "upsample: 2"],
    "long frames": ["mamba_block: {dim: 8}", "causal_conv: {kernel: 3}", "downsample: 24", "linear: 8",
                    "mlstm_block: {dim: 8, heads: 2}"],
    "attention": ["attention_layer: {dim: 8, heads: 2, window: 5}", "downsample: 2",
                  "attention_layer: {dim: 8, heads: 2, name: slow}"],
    "experts": ["downsample: 2", "upsample: 2", "linear: {features: 8, as: a}",
                "experts: {count: 3, steps: [{linear: {from: [input, a], features: 8}}, {headwise_linear: 2}]}"],
    "branches": ["parallel: {merge: sum, branches: [{a: [rms_norm, {causal_conv: {kernel: 3}}]}, {b: [{linear: 8}]}]}",
                 "repeat: {times: 2, steps: [{residual: {steps: [layer_norm, {linear: 8}]}}]}", "downsample: 2",
                 "scan: {order: forward, steps: [{causal_conv: {kernel: 3}}]}"],
    "windows": ["rearrange: {pattern: '(seq n) d -> seq (d n)', n: 4}", "linear: 8", "token_shift"],
    "positions": ["sinusoids", "downsample: 2", "position_embed: {length: 64}", "upsample: 2"],
    "corrections": ["gated_deltaproduct_mixer: {dim: 8, heads: 2}", "downsample: 2",
                    "gated_deltaproduct_mixer: {dim: 8, heads: 2, name: slow}"],
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_frames_are_the_whole_sequence(steps: list[str], batch: int) -> None:
    model = build(steps)
    assert model.frame_size > 1
    assert_follows(model, batch)
    assert isinstance(model._stepper, Stepper)


def test_a_long_frame_is_convolved_by_torch() -> None:
    """Copying all taps of each token would take longer, and more memory."""
    model = build(["conv1d: {features: 8, kernel: 65, dilation: 3}", "downsample: 96"])
    assert_follows(model, 3, 2)
    x = torch.zeros(3, 96, 8, dtype=DOUBLE)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model.step(x)
    assert max(event.self_cpu_memory_usage for event in recorded.events()) < x.nbytes * 65


def test_windows_of_tokens_are_read_by_all_tokens_of_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token after another would read and copy each window again."""
    monkeypatch.setattr("seqblocks.runtime.source.over_tokens", None)
    layers = ["shift: 5", "token_shift", "attention_layer: {dim: 8, heads: 2, window: 7}", "causal_conv: {kernel: 3}"]
    model = build([*layers, "downsample: 4"])
    assert_follows(model)
    assert model._stepper is not None
    assert model._stepper.suits(torch.zeros(100, 4, 8))


def test_corrections_of_a_token_write_to_one_new_state() -> None:
    """A token of two corrections allocates one state, and changes none that it was given."""
    model = build(["gated_deltaproduct_mixer: {dim: 8, heads: 1, head: 32}"])
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    with torch.inference_mode():
        _, state = model.step(x)
        before = copy.deepcopy(state)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            _, after = model.step(x, state)
    torch.testing.assert_close(state, before, rtol=0, atol=0)
    size = max(part.nbytes for part in tree_leaves(after))
    assert sum(event.self_cpu_memory_usage >= size for event in recorded.events()) == 1


@pytest.mark.parametrize("mode", ["neck", "pointwise", "dws", "full"])
@pytest.mark.parametrize("hold", ["euler", "zoh"])
def test_frames_of_centaurus(mode: str, hold: str) -> None:
    """Frames of 12, 3 and 40 tokens: products per channel, single tokens, and chunks."""
    layer = f"centaurus: {{mode: {mode}, hold: {hold}, sub_states: 3, name: "
    assert_follows(build([layer + "a}", "downsample: 12", layer + "b}", "upsample: 4", layer + "c}"]))
    assert_follows(build([layer + "a}", "downsample: 40"]), count=2)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("hold", ["euler", "zoh"])
@pytest.mark.parametrize("mode", ["neck", "pointwise", "dws", "full"])
def test_tokens_of_centaurus(mode: str, hold: str, tokens: int, dtype: torch.dtype) -> None:
    """The function for one token, and that for several, equal the recurrence in float64.

    float32: the recurrence of 33 tokens, and sums of 33 or 24 products, within 1e-5 of values around 1.
    """
    generator = torch.Generator().manual_seed(0)
    H, G, N, M, batch = 3, {"dws": 3}.get(mode, 4), {"dws": 3, "full": 12}.get(mode, 5), 4, 2

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=DOUBLE)

    dense = mode in ("neck", "pointwise")
    channels = N * M if mode == "pointwise" else N
    A_real, A_imag, dt = -draw(N, M).exp(), 3 * draw(N, M), draw(N).sigmoid()
    B, C = (draw(channels, H) / H, draw(G, channels) / channels) if dense else (draw(N), draw(N))
    E = None if mode == "pointwise" else draw(N, M)
    state, x = draw(batch, *((channels, 1) if mode == "pointwise" else (N, M)), 2), draw(batch, tokens, H)
    expected, last = centaurus(
        x, A_real, A_imag, dt, B, C, E, mode=mode, hold=hold, state=state, return_state=True, backend="reference"
    )
    parts = (None if part is None else part.to(dtype) for part in (A_real, A_imag, dt, B, C, E))
    run: Any = prepare(discretised(*parts, mode, hold))
    rows, given = x.transpose(0, 1).flatten(0, 1).to(dtype), state.to(dtype)
    before = given.clone()
    y, after = run(given, rows) if tokens == 1 else run.several(batch, given, rows)
    atol = 1e-12 if dtype is DOUBLE else 1e-5
    torch.testing.assert_close(y.view(tokens, batch, G).transpose(0, 1).double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(after.double(), last, rtol=0, atol=atol)
    assert torch.equal(given, before), "the state is a value"
    assert after.is_contiguous()
    assert after.untyped_storage().nbytes() == after.numel() * after.itemsize


def test_many_channels_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(["centaurus: {mode: pointwise, state: 3, sub_states: 2}", "downsample: 12"])
    assert_follows(model, 3)
    monkeypatch.setitem(prepare.__globals__, "MANY_CHANNELS", 1)
    monkeypatch.setitem(prepare.__globals__, "_prepare_channels", None)
    assert_follows(copy.deepcopy(model), 3)


def test_a_reading_of_other_lengths_prepares_few_matrices() -> None:
    bank = discretised(-torch.ones(2, 1), torch.ones(2, 1), torch.ones(2), torch.ones(2, 3), torch.ones(4, 2),
                       torch.ones(2, 1), "neck", "euler")  # fmt: skip
    run: Any = prepare(bank)
    for tokens in range(2, 20):
        run.several(1, torch.zeros(1, 2, 1, 2), torch.ones(tokens, 3))
    (blocks,) = [cell.cell_contents for cell in run.several.__closure__ if isinstance(cell.cell_contents, dict)]
    assert 1 <= len(blocks) <= 4


@pytest.mark.parametrize("name", ["centaurus_denoiser", "centaurus_voice"])
def test_no_module_of_the_bundled_models_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seqblocks.build(name, device="cpu", seed=0, dtype=DOUBLE).eval()
    generator = torch.Generator().manual_seed(1)
    x, sample = (torch.randn(2, 16 * n, 1, generator=generator, dtype=DOUBLE) for n in (3, 4))
    context = {"sample": sample} if name == "centaurus_voice" else {}
    with torch.no_grad():
        expected, last = model(x, return_state=True, **context)
        state = model.init_state(2, **context)
    monkeypatch.setattr(Stepper, "_call_module", None)
    monkeypatch.setattr(type(model), "forward", None)
    found, after = frames(model, x, state)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(after, last, rtol=0, atol=1e-12)


def test_outputs_by_name_have_the_tokens_of_their_rate() -> None:
    text = """
seqblocks: 1
model:
  inputs: {x: {features: 4}, by: {features: 6}}
  steps:
    - pool: {from: by, mode: mean}
    - linear: {features: 3, as: v}
    - linear: {from: x, features: 3, as: fine}
    - multiply: {by: v, as: scaled}
    - downsample: {factor: 4, as: slow}
    - add: {with: v, as: raised}
  outputs: [scaled, raised, v]
"""
    model = drawn(seqblocks.build_text(text, dtype=DOUBLE, seed=0))
    generator = torch.Generator().manual_seed(1)
    x, by = (torch.randn(2, *shape, generator=generator, dtype=DOUBLE) for shape in ((8, 4), (5, 6)))
    with torch.no_grad():
        expected = model(x, by=by)
        found, _ = frames(model, x, model.init_state(2, by=by))
    assert isinstance(model._stepper, Stepper)
    for name in ("scaled", "raised"):
        parts = [each[name] for each in found]
        assert all(part.is_contiguous() for part in parts)
        torch.testing.assert_close(torch.cat(parts, 1), expected[name], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[-1]["v"], expected["v"], rtol=0, atol=1e-12)


CONTEXT = """
seqblocks: 1
model:
  inputs: {x: {features: 4}, memory: {features: 6}, by: {vector: 4}}
  steps:
    - causal_conv: {from: x, as: u}
    - scale: {from: by, by: 2.0, as: v}
    - multiply: {from: u, by: v, as: scaled}
    - linear: {from: [scaled, v], features: 4, name: l1, as: q}
    - linear: {from: memory, features: 4, name: l2, as: k}
    - cross_attention: {q: q, k: k, v: k, heads: 2}
    - add: {with: v}
    - downsample: 4
    - experts: {count: 3, steps: [{linear: {from: [input, input], features: 4}}]}
    - multiply: {by: v, name: last}
"""


@pytest.mark.parametrize("hooked", [False, True])
def test_context(hooked: bool) -> None:
    """Vectors apply to each token, and queries of all tokens of a frame read the memory."""
    model = drawn(seqblocks.build_text(CONTEXT, dtype=DOUBLE, seed=0))
    generator = torch.Generator().manual_seed(1)
    x, memory, by = (torch.randn(3, *shape, generator=generator, dtype=DOUBLE) for shape in ((8, 4), (5, 6), (4,)))
    if hooked:
        for child in model.children():
            child.register_forward_hook(lambda module, inputs, output: None)
    with torch.no_grad():
        expected, last = model(x, memory=memory, by=by, return_state=True)
        found, state = frames(model, x, model.init_state(3, memory=memory, by=by))
    assert isinstance(model._stepper, Stepper)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_token_ids() -> None:
    text = "seqblocks: 1\nmodel: {input: {tokens: 9}, steps: [{embed: {features: 4}}, {downsample: 2}, {linear: 3}]}"
    model = drawn(seqblocks.build_text(text, dtype=DOUBLE, seed=0))
    x = torch.randint(9, (3, 8), generator=torch.Generator().manual_seed(0))
    found, _ = frames(model, x)
    assert isinstance(model._stepper, Stepper)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, 1), model(x), rtol=0, atol=1e-12)


def test_a_replaced_or_hooked_step_is_called() -> None:
    a, b = (f"linear: {{features: 8, name: {name}}}" for name in "ab")
    model = build([DOWN, a, "mamba_block: {dim: 8}", UP, b])
    assert_follows(model)
    model.a = nn.Linear(8, 8, dtype=DOUBLE)
    assert_follows(model)
    handle = model.mamba_block.register_forward_hook(lambda module, inputs, output: (output[0] * 2, output[1]))
    model.b.register_forward_hook(lambda module, inputs, output: (output[0] + inputs[0], output[1]))
    assert_follows(model)
    handle.remove()
    assert_follows(copy.deepcopy(model))
    with torch.no_grad():
        model.mamba_block.residual.mixer.in_proj.weight.mul_(1.5)
    assert_follows(model)


def test_many_sequences_use_the_kernels_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer whose tokens are computed one after another is faster as a sequence for many rows."""
    model, calls = build(["mlstm_block: {dim: 8, heads: 2}", DOWN]), []
    run = SequenceModel.forward
    monkeypatch.setattr(SequenceModel, "forward", lambda *given, **options: calls.append(1) or run(*given, **options))
    frames(model, torch.zeros(MOST_ROWS // 4, 4, 8, dtype=DOUBLE))
    assert not calls
    assert_follows(model, MOST_ROWS // 4 + 1, 2)
    assert len(calls) == 3, "two frames and the whole sequence"
    many, few = (build([DOWN, "linear: 8"]) for _ in range(2))
    assert_follows(many, 513, 1)
    assert_follows(few, 512, 1)
    assert len(calls) == 6, "each whole sequence, and a frame of more than 2048 rows"


def test_frames_with_gradients_and_compiled_frames() -> None:
    model = build([DOWN, "centaurus_block: {mode: neck, state: 4}", UP])
    x, state = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=DOUBLE), model.init_state(2)
    expected, _ = model.step(x, state)
    assert expected.requires_grad
    torch._dynamo.reset()
    step = torch.compile(model.step, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(step(x, state)[0], expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(model.step(x, state)[0], expected.detach(), rtol=0, atol=1e-12)


def test_other_sizes_than_a_frame() -> None:
    """Several frames are read as a sequence; other sizes and resets are errors."""
    model = build(["linear: 8", DOWN])
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    with torch.no_grad():
        _, state = model.step(x[:, :4])
        torch.testing.assert_close(model.step(x)[0], model(x))
        for wrong in (torch.zeros(1, 6, 8), torch.zeros(1, 8), torch.zeros(1, 4, 7)):
            with pytest.raises(seqblocks.RunError, match=r"4 tokens at a time|\[batch, 4, 8\]"):
                model.step(wrong.double(), state)
        with pytest.raises(seqblocks.RunError, match="resets"):
            model.step(x[:, :4], state, resets=torch.ones(2, dtype=torch.bool))


def test_the_number_of_operations_of_a_frame() -> None:
    """A frame of the denoiser, 16 samples in four resolutions: 7 layers, 6 linear maps and 4 changes of rate."""
    model = seqblocks.build("centaurus_denoiser", device="cpu", seed=0).eval()
    x = torch.randn(1, 16, 1)
    with torch.inference_mode():
        for _ in range(2):
            _, state = model.step(x)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model.step(x, state)
    computing = ("mm", "bmm", "addmm", "mul", "sum", "add", "add_", "cat", "mean", "silu")
    found = sum(event.count for event in recorded.key_averages() if event.key.removeprefix("aten::") in computing)
    assert found <= 110

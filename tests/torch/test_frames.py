"""Steps of models that change the rate of their tokens: planned frames equal the whole sequence, in float64.

A frame is computed by the same functions as single tokens, in another order of sums: 1e-12 of values around 1.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import seqblocks
from seqblocks.errors import UsageError
from seqblocks.kernels import centaurus
from seqblocks.kernels.centaurus.interface import discretised
from seqblocks.kernels.centaurus.token import prepare
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.op import PRIMITIVES, Op
from seqblocks.parameters import Init, Parameter
from seqblocks.state_layout import State
from seqblocks.streaming import cuda_graph
from seqblocks.streaming.plan import TokenPlan
from seqblocks.streaming.token_rows import over_tokens
from seqblocks.streaming.writer import PlanWriter
from seqblocks.token_function import TokenFunction
from tests.sampled import slow

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
    assert isinstance(model.token_plan, TokenPlan)


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
    monkeypatch.setattr("seqblocks.streaming.source.over_tokens", None)
    layers = ["shift: 5", "token_shift", "attention_layer: {dim: 8, heads: 2, window: 7}", "causal_conv: {kernel: 3}"]
    model = build([*layers, "downsample: 4"])
    assert_follows(model)
    assert model.token_plan is not None
    assert model.token_plan.suits(torch.zeros(100, 4, 8))


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
    y, after = run.one(given, rows) if tokens == 1 else run.several(batch, given, rows)
    atol = 1e-12 if dtype is DOUBLE else 1e-5
    torch.testing.assert_close(y.view(tokens, batch, G).transpose(0, 1).double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(after.double(), last, rtol=0, atol=atol)
    assert torch.equal(given, before), "the state is a value"
    assert after.is_contiguous()
    assert after.untyped_storage().nbytes() == after.numel() * after.itemsize


def test_many_channels_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(["centaurus: {mode: pointwise, state: 3, sub_states: 2}", "downsample: 12"])
    assert_follows(model, 3)
    monkeypatch.setitem(prepare.__globals__, "PART_MIN_CHANNELS", 1)
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
    monkeypatch.setattr(PlanWriter, "call_module", None)
    monkeypatch.setattr(type(model), "_run_call", None)
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
    assert isinstance(model.token_plan, TokenPlan)
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
    assert isinstance(model.token_plan, TokenPlan)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_token_ids() -> None:
    text = "seqblocks: 1\nmodel: {input: {tokens: 9}, steps: [{embed: {features: 4}}, {downsample: 2}, {linear: 3}]}"
    model = drawn(seqblocks.build_text(text, dtype=DOUBLE, seed=0))
    x = torch.randint(9, (3, 8), generator=torch.Generator().manual_seed(0))
    found, _ = frames(model, x)
    assert isinstance(model.token_plan, TokenPlan)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, 1), model(x), rtol=0, atol=1e-12)


def test_a_replaced_or_hooked_step_is_called() -> None:
    a, b = (f"linear: {{features: 8, name: {name}}}" for name in "ab")
    model = build([DOWN, a, "mamba_block: {dim: 8}", UP, b])
    assert_follows(model)
    model.a = nn.Linear(8, 8, dtype=DOUBLE)
    assert_follows(model)
    handle = model.mamba_block.register_forward_hook(lambda module, inputs, output: output * 2)
    model.b.register_forward_hook(lambda module, inputs, output: output + inputs[0])
    assert_follows(model)
    handle.remove()
    assert_follows(copy.deepcopy(model))
    with torch.no_grad():
        model.mamba_block.residual.mixer.in_proj.weight.mul_(1.5)
    assert_follows(model)


def test_frames_of_many_sequences_run_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    run = SequenceModel._run_call
    monkeypatch.setattr(SequenceModel, "_run_call", lambda *given: calls.append(1) or run(*given))
    many, few = (build(["mlstm_block: {dim: 8, heads: 2}", DOWN]) for _ in range(2))
    assert_follows(many, 513, 1)
    assert_follows(few, 512, 1)
    assert len(calls) == 3, "each whole sequence, and a frame of more than 2048 rows"


@pytest.mark.parametrize(
    ("size", "batch", "in_order"),
    [(16, 1, True), (17, 1, False), (5, 16, True), (5, 17, False), (4, 17, True), (3, 129, False), (2, 129, True)],
)
def test_many_tokens_and_large_states_are_read_as_sequences(
    size: int, batch: int, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of a frame would read and write the whole state, here of 16,384 numbers for each sequence."""
    run, calls = over_tokens, []
    monkeypatch.setattr("seqblocks.streaming.source.over_tokens", lambda *given: calls.append(1) or run(*given))
    mixer = "linear_attention: {q: a, k: a, v: a, heads: 1, fixed_decay: retention, qk_norm: l2}"
    model = build(["linear: {features: 128, as: a}", mixer, f"downsample: {size}", "linear: 3"])
    assert_follows(model, batch, 2)
    assert len(calls) == (2 if in_order else 0)


@pytest.mark.slow
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


def test_a_captured_stream_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """It overwrites its state in place, which no output and no later state may share. Each frame is run twice."""
    monkeypatch.setitem(cuda_graph.RECORDERS, "cpu", lambda function, device: (function(), function)[1])
    layers = ["token_shift", "attention_layer: {dim: 8, heads: 2, window: 7}", "mamba_block: {dim: 8}", DOWN]
    model = build([*layers, "centaurus: {mode: neck, state: 3, sub_states: 2}", "upsample: 2", "causal_conv"])
    x = torch.randn(2, 24, 8, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    stream = model.stream(2)
    stream.capture()
    found = [stream.step(part) for part in x[:, :16].split(4, 1)]
    assert isinstance(model.token_plan, TokenPlan)
    found.append(stream.read(x[:, 16:20]))
    found.append(stream.step(x[:, 20:]))
    with torch.no_grad():
        expected, last = model(x, return_state=True)
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(stream.state, last, rtol=0, atol=1e-12)


class Average(Op):
    """A moving average by a user: m = a m + (1 - a) x. Its functions count their tokens."""

    called: ClassVar[list[str]] = []
    attributes: ClassVar[dict[str, Any]] = {}
    reads = "past"

    def parameters(self, x: Any) -> dict[str, Parameter]:
        return {"a": Parameter((x.features,), Init("constant", (0.8,)))}

    def state(self, x: Any) -> dict[str, State]:
        return {"m": State((x.features,))}

    def forward(self, p: Any, call: Any, x: Tensor) -> Any:
        self.called.append("forward")
        m, found = call.state["m"] if call.state else torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            m = p["a"] * m + (1 - p["a"]) * x[:, t]
            found.append(m)
        return torch.stack(found, 1), {"m": m.clone()}

    def prepare_token(self, p: Any) -> TokenFunction:
        rest = 1 - p["a"]

        def step(m: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            self.called.append("one")
            m = p["a"] * m + rest * x
            return m, m.clone()

        def several(batch: int, m: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            self.called.append("several")
            parts = [m := p["a"] * m + rest * part for part in x.split(batch)]
            return torch.cat(parts), m.clone()

        together = several if "several" in self.attributes else None
        return TokenFunction(step, together, self.attributes.get("most_tokens"))


@pytest.mark.parametrize(
    ("tokens", "attributes", "calls"),
    [
        (8, {}, ["one"] * 8), (9, {}, ["forward"]), (12, {"most_tokens": 12}, ["one"] * 12),
        (2, {"most_tokens": 1}, ["forward"]), (16, {"several": True}, ["several"]),
        (17, {"several": True}, ["forward"]), (40, {"several": True, "most_tokens": 40}, ["several"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_a_plug_in_computes_several_tokens(
    batch: int, tokens: int, attributes: dict[str, Any], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame and a prompt of as many tokens call the same function of a user's primitive."""
    monkeypatch.setitem(PRIMITIVES, "average", Average)
    monkeypatch.setattr(Average, "attributes", attributes)
    of_frames = build(["average", f"downsample: {tokens}", "linear: 3"])
    assert_follows(of_frames, batch, 2)
    of_tokens = prompted(["average", "linear: 11"])
    ids = torch.randint(0, 11, (batch, tokens), generator=torch.Generator().manual_seed(0))
    state = of_tokens.init_state(batch)
    expected = of_tokens(ids, state=state, return_state=True)
    for model, run in (
        (of_frames, lambda: of_frames.step(torch.zeros(batch, tokens, 8, dtype=DOUBLE), of_frames.init_state(batch))),
        (of_tokens, lambda: of_tokens._read(ids, state, None)),
    ):
        run()
        Average.called.clear()
        y, after = run()
        assert Average.called == calls
        assert isinstance(model.token_plan, TokenPlan)
        assert model.token_plan.calls_modules
    torch.testing.assert_close(y, expected[0][:, -1:], rtol=0, atol=1e-12)
    torch.testing.assert_close(after, expected[1], rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_plug_in_that_prepares_a_bare_function_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRIMITIVES, "average", Average)
    monkeypatch.setattr(Average, "prepare_token", lambda self, p: lambda m, x: (x, m))
    with pytest.raises(UsageError, match=r"Average\.prepare_token must return a TokenFunction or None"):
        build(["average", "linear: 3"]).step(torch.zeros(1, 8, dtype=DOUBLE))


def prompted(steps: list[str]) -> SequenceModel:
    lines = "\n    - ".join(["  steps:", "embed: {features: 8}", *steps])
    uses = "use: [xlstm, mamba, transformer, griffin, linear_attention, deltanet]"
    text = f"seqblocks: 1\n{uses}\nmodel:\n  input: {{tokens: 11}}\n{lines}\n"
    return drawn(seqblocks.build_text(text, dtype=DOUBLE, device="cpu", seed=0))


PROMPTED = {
    "window": ["attention_layer: {dim: 8, heads: 2, window: 6}"],
    "cache": ["attention_layer: {dim: 8, heads: 2, cache: 40}"],
    "shifts": ["shift: {by: 3}", "token_shift", "linear: 8", "shift: {by: 1, name: again}"],
    "convolutions": ["causal_conv: {kernel: 4}", "conv1d: {features: 8, kernel: 3, groups: 2}",
                     "causal_conv: {kernel: 12, name: long}", "conv1d: {features: 8, kernel: 4, dilation: 2, name: d}"],
    "joined convolutions": ["gated_deltanet_mixer: {dim: 8, heads: 2, head: 4, expand_v: 1}"],
    "gates": ["slstm_block: {dim: 8, heads: 2}"],
    "mixers": ["mlstm_block: {dim: 8, heads: 2}", "mamba_block: {dim: 8}"],
    "griffin": ["griffin_mixer: {dim: 8, heads: 2}", "griffin_attention: {dim: 8, heads: 2, window: 5}"],
    "positions": ["sinusoids", "position_embed: {length: 64}", "rotary: {heads: 2}"],
    "patterns": ["rearrange: {pattern: 'seq (h d) -> seq (d h)', h: 2}"],
    "experts": ["experts: {count: 3, steps: [{swiglu: {hidden: 4}}]}", "causal_conv"],
}  # fmt: skip


@pytest.mark.parametrize("steps", PROMPTED.values(), ids=PROMPTED)
def test_prompts_of_any_length_are_the_whole_sequence(steps: list[str]) -> None:
    """Two prompts, the second from the state of the first, then single tokens; a reset at one of these."""
    model, generator = prompted([*steps, "linear: {features: 11, name: head}"]), torch.Generator().manual_seed(3)
    for _ in range(12):
        batch, first, second = (int(torch.randint(1, high, (1,), generator=generator)) for high in (5, 21, 21))
        ids = torch.randint(0, 11, (batch, first + second + 3), generator=generator)
        resets = torch.zeros(ids.shape, dtype=torch.bool)
        resets[batch // 2, -2] = True
        with torch.no_grad():
            expected, last = model(ids, return_state=True, resets=resets)
            found, state = [], model.init_state(batch)
            for part in ids[:, :-3].split([first, second], 1):
                planned = model._plan_for(part)
                assert planned is not None
                done = planned.read(state, part)
                assert done is not None
                y, state = done
                found.append(y)
            for t in range(first + second, ids.shape[1]):
                y, state = model.step(ids[:, t], state, resets=resets[:, t])
                found.append(y.unsqueeze(1))
        places = [first - 1, *range(first + second - 1, ids.shape[1])]
        torch.testing.assert_close(torch.cat(found, 1), expected[:, places], rtol=0, atol=1e-11)
        torch.testing.assert_close(state, last, rtol=0, atol=1e-11)


@pytest.mark.parametrize("steps", PROMPTED.values(), ids=PROMPTED)
def test_gradients_of_chunks_are_those_of_the_whole_sequence(steps: list[str]) -> None:
    model, generator = prompted([*steps, "linear: {features: 11, name: head}"]), torch.Generator().manual_seed(4)
    for _ in range(3):
        batch, first, second = (int(torch.randint(1, high, (1,), generator=generator)) for high in (4, 21, 21))
        ids = torch.randint(0, 11, (batch, first + second), generator=generator)
        weights = list(model.parameters())
        y, state = model(ids[:, :first], return_state=True)
        rest = model(ids[:, first:], state=state)
        whole = model(ids)
        torch.testing.assert_close(torch.cat([y, rest], 1), whole, rtol=0, atol=1e-11)
        found, expected = (
            torch.autograd.grad(out.square().mean(), weights) for out in (torch.cat([y, rest], 1), whole)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "name", ["strided", "attention", "windows", "mixers", "vectors of sequences", slow("corrections")]
)
def test_frames_and_chunks_of_any_number_are_the_whole_sequence(name: str) -> None:
    """Values of frames, values and gradients of two chunks of some frames each."""
    model, generator = build(STEPS[name]), torch.Generator().manual_seed(5)
    for _ in range(3):
        batch, first, second = (int(torch.randint(1, high, (1,), generator=generator)) for high in (5, 6, 6))
        assert_follows(model, batch, first + second)
        cut, seq = first * model.frame_size, (first + second) * model.frame_size
        x = torch.randn(batch, seq, 8, generator=generator, dtype=DOUBLE, requires_grad=True)
        y, state = model(x[:, :cut], return_state=True)
        rest, whole = model(x[:, cut:], state=state), model(x)
        found = torch.cat([y, rest], 1) if whole.dim() == 3 else rest
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-11)
        weights = [x, *model.parameters()]
        gradients = (torch.autograd.grad(out.square().mean(), weights) for out in (found, whole))
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_a_hooked_step_reads_all_tokens_of_a_prompt() -> None:
    model, seen = prompted(["causal_conv", "linear: 11"]), []
    model.causal_conv.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape)))
    ids = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, _ = model._read(ids, model.init_state(2), None)
        assert isinstance(model.token_plan, TokenPlan)
        torch.testing.assert_close(y, model(ids)[:, -1:], rtol=0, atol=1e-12)
    assert seen == [(2, 5, 8)] * 2


def test_values_of_a_prompt_are_freed_after_their_last_use() -> None:
    """The largest memory does not grow with the number of layers."""
    peaks = []
    for layers in (2, 12):
        model = prompted(
            [f"repeat: {{times: {layers}, steps: [{{linear: 8}}, {{causal_conv: {{kernel: 2}}}}]}}", "linear: 11"]
        )
        ids = torch.zeros(1, 200, dtype=torch.long)
        with torch.inference_mode():
            state = model.init_state(1)
            model._read(ids, state, None)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                model._read(ids, state, None)
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
        peaks.append(max(held))
    assert peaks[1] < 1.2 * peaks[0]

"""Joining wires along features and tokens, and selecting tokens: against torch's functions, and the state law."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import seqblocks
from benchmarks.memory import measure
from seqblocks.export.contract import interface
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
    with pytest.raises(seqblocks.RunError, match="more than the last one stream"):
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


# --- learned tokens, and tokens before a stream ---------------------------------------------------------------------

LAYERS = "{repeat: {times: 2, steps: [{mlstm_block: {dim: 6, heads: 2}}, {attention_layer: {dim: 6, heads: 1}}]}}"
INSIDE = "{repeat: {times: 2, steps: [{residual: [{prefix: {count: 2}}, token_shift, {slice: {first: 2}}]}]}}"
TWICE = "{prefix: {count: 3, name: a}}, {prefix: {count: 2, name: b}}, {slice: {first: 1}}, {causal_conv: {kernel: 7}}"
JOINED = "{learned_tokens: {count: 4, as: t}}, {concat: {from: [t, input], axis: tokens}}"
PARTS = "{linear: {features: 8, as: [a, b]}}, {shift: {from: a, by: 1}}, {gate: {by: b}}"
SENT = "{experts: {count: 3, top: 2, steps: [{swiglu: 4}]}}"


@pytest.mark.parametrize(
    "steps",
    [
        "{prefix: {count: 3}}, {causal_conv: {kernel: 3}}, {slice: {first: 3}}",
        f"{{prefix: {{count: 3}}}}, {LAYERS}, {{slice: {{first: 3}}}}, silu",
        f"{TWICE}, {{slice: {{first: 4}}}}",
        f"{JOINED}, token_shift, {{slice: {{first: 4}}}}",
        INSIDE,
        f"{{prefix: {{count: 3}}}}, {SENT}, {{shift: 2}}, {{slice: {{first: 3}}}}",
        "{prefix: {count: 3}}, {position_embed: {length: 26}}, {rotary: {heads: 1}}, {slice: {first: 3}}",
        f"{{prefix: {{count: 3}}}}, {PARTS}, {{slice: {{first: 3}}}}",
        "{downsample: {factor: 2}}, {prefix: {count: 3}}, {shift: 1}, {slice: {first: 3}}, {upsample: {factor: 2}}",
        "{prefix: {count: 3}}, {causal_conv: {kernel: 9}}, {pool: {mode: last}}",
        "{learned_tokens: {count: 4, as: m}}, {cross_attention: {q: input, k: m, v: m, heads: 2}}, {shift: 1}",
    ],
)
def test_a_stream_reads_a_prefix_once(steps: str) -> None:
    text = f"seqblocks: 1\nuse: [transformer, xlstm]\nmodel:\n  input: {{features: 6}}\n  steps: [{steps}]\n"
    check_law(seqblocks.build_text(text, dtype="float64"))


def test_a_prefix_is_before_the_tokens() -> None:
    steps = "{prefix: {count: 3}}, {causal_conv: {kernel: 4, bias: false}}"
    model, whole = built(f"{steps}, {{slice: {{first: 3}}}}"), built(steps)
    whole.load_state_dict(model.state_dict())
    tokens, weight = model.get_parameter("prefix.weight"), model.get_parameter("causal_conv.weight")
    x = torch.cat([tokens.expand(2, -1, -1), X], 1)
    y = torch.nn.functional.conv1d(torch.nn.functional.pad(x.mT, (3, 0)), weight, groups=6).mT
    torch.testing.assert_close(whole(X), y)
    torch.testing.assert_close(model(X), y[:, 3:])
    with pytest.raises(seqblocks.RunError, match=r"its first 3 tokens are not of the stream: `slice: \{first: 3\}`"):
        whole.init_state(1)


def test_the_state_has_read_the_prefix() -> None:
    """A step without a state begins a stream, as `init_state` does."""
    model = built("{prefix: {count: 3}}, {causal_conv: {kernel: 3}}, {slice: {first: 3}}")
    state = model.init_state(2)
    read = model.get_parameter("prefix.weight")[:, 1:].expand(2, -1, -1)
    torch.testing.assert_close(state["causal_conv"]["window"], read)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            y, _ = model.step(X[:, 0])
            torch.testing.assert_close(y, model.step(X[:, 0], state)[0])
            torch.testing.assert_close(y, model(X)[:, 0])


def test_resets_and_graphs_of_streams_are_refused() -> None:
    model = built("{prefix: {count: 3}}, {causal_conv: {kernel: 3}}, {slice: {first: 3}}")
    resets = torch.zeros(2, 9, dtype=torch.bool)
    for call in (lambda: model(X, resets=resets), lambda: model.step(X[:, 0], resets=resets[:, 0])):
        with pytest.raises(seqblocks.RunError, match="puts tokens before the first sequence only"):
            call()
    with pytest.raises(seqblocks.RunError, match="begins with learned tokens"):
        interface(model, "step", {})


def test_an_image_is_read_before_the_text() -> None:
    """A picture as the prefix of a language model: `init_state` reads it."""
    steps = """{patch_embed: {from: image, patch: 4, features: 8, as: seen}}, {embed: {from: text, features: 8, as: t}},
      {concat: {from: [seen, t], axis: tokens}}, {attention_layer: {dim: 8, heads: 2}},
      {mlstm_block: {dim: 8, heads: 2}}, {slice: {first: 4}}, {unembed: {}}"""
    inputs = "inputs: {text: {tokens: 16}, image: {image: {size: 8, channels: 3}}}"
    text = f"seqblocks: 1\nuse: [transformer, xlstm]\nmodel:\n  {inputs}\n  steps: [{steps}]\n"
    model = seqblocks.build_text(text, dtype="float64")
    check_law(model)
    ids, image = torch.tensor([[1, 2], [3, 4]]), draw(2, 3, 8, 8)
    made = torch.stack(seqblocks.generate(model, ids, 3, image=image))
    for _ in range(3):
        ids = torch.cat([ids, model(text=ids, image=image)[:, -1:].argmax(-1)], 1)
    assert made.tolist() == ids[:, 2:].tolist()


def test_resets_do_not_reach_learned_tokens() -> None:
    """Also in a model that does not stream: here, a convolution over four learned tokens beside nine of the input."""
    steps = "{learned_tokens: {count: 4}}, {scan: {order: forward, steps: [{causal_conv: {kernel: 2}}], as: c}}"
    read = "{cross_attention: {q: input, k: c, v: c, heads: 2}}"
    model = built(f"{steps}, {read}, {{scan: {{order: reverse, name: back, steps: [{{causal_conv: {{kernel: 3}}}}]}}}}")
    packed = model(X[:1], cu_seqlens=torch.tensor([0, 4, 9]))
    torch.testing.assert_close(packed, torch.cat([model(X[:1, :4]), model(X[:1, 4:])], 1), rtol=1e-12, atol=1e-12)


def test_learned_queries_read_a_sequence() -> None:
    steps = "{learned_tokens: {count: 5, features: 4, as: q}}, {cross_attention: {q: q, k: input, v: input, heads: 2}}"
    with pytest.raises(seqblocks.SpecError, match="as wide as"):
        built(steps)
    model = built(steps.replace(", features: 4", ""))
    check_shapes(model)
    assert model(X).shape == (2, 5, 6)
    with pytest.raises(seqblocks.RunError, match="it reads q token by token, which is context"):
        model.init_state(1)


COMPILED = f"""
seqblocks: 1
use: [transformer, xlstm]
model:
  input: {{features: 6}}
  steps: [{{prefix: {{count: 3}}}}, {LAYERS}, {{slice: {{first: 3}}}}]
"""


@pytest.mark.slow
def test_compiled_calls_and_steps_of_a_model_with_a_prefix() -> None:
    torch._dynamo.reset()
    model = seqblocks.build_text(COMPILED, dtype="float64")
    call = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(X), model(X))
    with torch.no_grad():
        state, step = model.init_state(2), torch.compile(model.step, backend="eager", fullgraph=True)
        for t in range(4):
            y, state = step(X[:, t], state)
            torch.testing.assert_close(y, model(X)[:, t])


MEASURED = """
seqblocks: 1
use: [transformer]
model:
  input: {features: 64}
  steps:
    - linear: {features: 64, as: a}
    - concat: {from: [a, input], as: wide}
    - linear: {features: 64, as: b, name: narrow}
    - learned_tokens: {count: 32, as: q}
    - concat: {from: [q, b], axis: tokens, as: all}
    - cross_attention: {q: q, k: all, v: all, heads: 4, as: found}
    - prefix: {from: b, count: 32}
    - attention_layer: {dim: 64, heads: 2}
    - slice: {first: 32, as: read}
    - concat: {from: [found, all, read], axis: tokens, as: longer}
    - slice: {from: longer, first: 64, count: 100}
    - linear: {features: 32, name: last}
"""


@pytest.mark.slow
def test_memory(tmp_path: Path) -> None:
    """The tokens added by steps count, and a fixed number of tokens is no length of the input."""
    torch.set_num_threads(1)
    path = tmp_path / "spec.yaml"
    path.write_text(MEASURED, encoding="utf-8")
    spec = seqblocks.load_model(str(path))
    found = seqblocks.memory(spec, batch=4, length=128)
    real = measure(seqblocks.build_model(spec), 4, 128, "adamw", "none")
    assert found.peak_bytes == pytest.approx(real.peak, rel=0.1)  # as in test_memory.py
    assert found.undeclared == ()

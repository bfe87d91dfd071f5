"""Models with several inputs and outputs: their values, and the state law where the first input streams."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

import seqblocks
from seqblocks import state as states
from seqblocks.analysis.passes import lookahead
from seqblocks.checkpoint import load, save
from seqblocks.errors import RunError
from seqblocks.kernels import use_backend
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.op import PRIMITIVES, Op, Port, primitive
from seqblocks.testing import check_law, check_shapes, random_context, random_input
from tests.draws import draw


def built(text: str, **more: Any) -> SequenceModel:
    return seqblocks.build_text(f"seqblocks: 1\n{text}", **{"dtype": "float64", **more})


CAPTIONER = """
use: [transformer, vil]
model:
  inputs:
    text: {tokens: 20}
    image: {image: {size: 8, channels: 3}}
    notes: {features: 5}
  steps:
    - patch_embed: {from: image, patch: 2, features: 8}
    - repeat: {name: encoder, times: 2, steps: [{vil: {dim: 8, order: reverse}}]}
    - layer_norm: {as: seen}
    - pool: {mode: mean, as: mean}
    - linear: {from: notes, features: 8, as: noted}
    - embed: {from: text, features: 8}
    - repeat:
        name: decoder
        times: 2
        as: h
        steps:
          - attention_layer: {dim: 8, heads: 2, window: 4}
          - cross_attention_layer: {dim: 8, memory: seen, heads: 2, kv_heads: 1}
          - cross_attention_layer: {dim: 8, memory: noted, heads: 2, name: of_notes}
          - multiply: {by: mean}
    - linear: {from: [h, mean], features: 6, name: join}
    - unembed: {bias: false, as: logits}
    - linear: {from: mean, features: 1, as: value}
  outputs: [logits, value]
"""
AGENT = """
use: [memoroid]
model:
  input: {features: 6}
  steps:
    - linear: 8
    - memoroid_layer: {dim: 8, heads: 2}
    - layer_norm: {as: h}
    - linear: {from: h, features: 3, as: policy}
    - linear: {from: h, features: 1, as: value}
  outputs: [policy, value]
"""
FILM = """
model:
  inputs: {sound: {features: 4}, speaker: {vector: 3}}
  steps:
    - linear: {from: speaker, features: 8, as: [gain, bias]}
    - multiply: {from: sound, by: gain}
    - add: {with: bias}
    - causal_conv: {kernel: 3}
    - gate: {by: gain}
"""
# The context is read directly and inside a scan, a parallel, a residual and a block, at two rates.
NESTED = """
blocks:
  reads:
    args: {memory: wire}
    steps:
      - linear: {from: memory, features: 8, as: [k, v]}
      - cross_attention: {q: input, k: k, v: v, heads: 2}
model:
  inputs: {sound: {features: 4}, other: {features: 4}, whole: {features: 4, length: 6}}
  steps:
    - downsample: {from: other, factor: 2, as: coarse}
    - downsample: {from: input, factor: 2}
    - scan:
        steps:
          - residual:
              - parallel:
                  merge: mean
                  branches:
                    - one: [{reads: {memory: coarse}}]
                    - two: [{reads: {memory: whole}}, silu]
                    - three:
                        - linear: {from: whole, features: 4, as: w}
                        - cross_attention: {q: input, k: w, v: whole, heads: 1}
    - causal_conv: {kernel: 2}
    - upsample: {factor: 2}
"""


@pytest.mark.parametrize("text", [CAPTIONER, AGENT, FILM, NESTED])
def test_the_law(text: str) -> None:
    model = built(text)
    resets = [(0, 3), (1, 5)] if model.frame_size == 1 else []
    check_law(model, seq=9, resets=resets)
    check_law(model, seq=9)


@pytest.mark.parametrize("text", [CAPTIONER, FILM, NESTED.replace("factor: 2", "factor: 1")])
def test_planned_steps_are_those_of_the_whole_sequence(text: str) -> None:
    model = built(text).eval()
    x = random_input(model, 2, 6).detach()
    context = {name: each.detach() for name, each in random_context(model, 2).items()}
    marks = torch.zeros(2, 6, dtype=torch.bool)
    marks[0, 2] = marks[1, 4] = True
    with torch.no_grad():
        for resets in (None, marks) if model.resets_obstacle is None else (None,):
            whole = model(x, resets=resets, **context)
            state = model.init_state(2, **context)
            for t in range(6):
                y, state = model.step(x[:, t], state, resets=None if resets is None else resets[:, t])
                for name, found in (y.items() if isinstance(y, dict) else [("", y)]):
                    expected = whole[name] if name else whole
                    torch.testing.assert_close(found, expected[:, t] if name != "value" else expected)
    assert model.token_plan is not None


def test_several_outputs_by_name() -> None:
    model = built(AGENT)
    x = draw(2, 5, 6)
    found = model(x)
    assert {name: tuple(y.shape) for name, y in found.items()} == {"policy": (2, 5, 3), "value": (2, 5, 1)}
    one, _ = model.step(x[:, 0])
    assert {name: tuple(y.shape) for name, y in one.items()} == {"policy": (2, 3), "value": (2, 1)}
    torch.testing.assert_close(one["value"], found["value"][:, 0])


def test_a_vector_joins_each_token() -> None:
    model = built(FILM.replace("    - causal_conv: {kernel: 3}\n    - gate: {by: gain}\n", ""))
    sound, speaker = draw(2, 5, 4), draw(2, 3, seed=2)
    gain, bias = linear(speaker, *model.linear.parameters()).split(4, -1)
    torch.testing.assert_close(model(sound=sound, speaker=speaker), sound * gain[:, None] + bias[:, None])


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("add: {with: v}", lambda x, v: x + v),
        ("add: {from: v, with: x}", lambda x, v: x + v),
        ("multiply: {from: v, by: x}", lambda x, v: x * v),
        ("gate: {by: v, activation: sigmoid}", lambda x, v: x * v.sigmoid()),
        ("gate: {from: v, by: x, activation: none}", lambda x, v: x * v),
        ("learnable_skip: {with: v}", lambda x, v: x + v),
        ("rms_norm: {z: v, gain: none, gate: after, activation: none, eps: 1e-12}",
         lambda x, v: x / x.square().mean(-1, keepdim=True).sqrt() * v),
        ("token_shift: {mix: v}", lambda x, v: x + v * (torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) - x)),
        ("linear: {from: [v, x, v], features: 2, bias: false, init: {weight: ones}}",
         lambda x, v: (x + 2 * v).sum(-1, keepdim=True).expand(2, 5, 2)),
    ],
)  # fmt: skip
def test_where_a_vector_can_join_a_sequence(step: str, expected: Callable[[Tensor, Tensor], Tensor]) -> None:
    inputs = "{x: {features: 4}, v: {vector: 4}}"
    model = built(f"model:\n  inputs: {inputs}\n  steps:\n    - {step}")
    x, v = draw(2, 5, 4), draw(2, 4, seed=2)
    torch.testing.assert_close(model(x, v=v), expected(x, v[:, None]))
    check_law(model, seq=6)


def test_a_vector_joins_each_pixel_of_an_image() -> None:
    inputs = "{x: {image: {size: 4, channels: 3}}, v: {vector: 3}}"
    model = built(f"model:\n  inputs: {inputs}\n  steps: [multiply: {{by: v}}]")
    x, v = draw(2, 3, 4, 4), draw(2, 3)
    torch.testing.assert_close(model(x=x, v=v), x * v[:, :, None, None])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cross_attention(kv_heads: int) -> None:
    """Against torch's own attention; the values may be wider than the keys."""
    steps = f"cross_attention: {{q: x, k: k, v: v, heads: 4, kv_heads: {kv_heads}, scale: 0.3}}"
    inputs = f"{{x: {{features: 8}}, m: {{features: {kv_heads * 5}}}}}"
    split = f"identity: {{from: m, as: {{k: {kv_heads * 2}, v: {kv_heads * 3}}}}}"
    model = built(f"model:\n  inputs: {inputs}\n  steps:\n    - {split}\n    - {steps}")
    x, m = draw(2, 5, 8), draw(2, 7, kv_heads * 5, seed=2)
    k, v = m.split([kv_heads * 2, kv_heads * 3], -1)
    q, k, v = (y.unflatten(-1, (-1, width)).transpose(1, 2) for y, width in ((x, 2), (k, 2), (v, 3)))
    expected = scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True).transpose(1, 2).flatten(-2)
    for backend in ("torch", "reference"):
        with use_backend(backend):
            torch.testing.assert_close(model(x=x, m=m), expected)
    check_law(model, seq=6)


def test_the_state_stores_the_context_that_the_stream_reads() -> None:
    model = built(CAPTIONER)
    image, notes = draw(2, 3, 8, 8), draw(2, 7, 5)
    state = model.init_state(2, image=image, notes=notes)
    assert state["decoder"]["1"]["cross_attention_layer"]["residual"]["kv"]["output"].shape == (2, 16, 8)
    assert state["decoder"]["1"]["of_notes"]["residual"]["kv"]["output"].shape == (2, 7, 16)
    assert "encoder" not in state
    assert "seen" not in state
    assert state["mean"]["output"].shape == (2, 8)
    swapped = states.index_select(state, torch.tensor([1, 0]))
    text = torch.tensor([3, 4])
    (a, _), (b, _) = model.step(text, state), model.step(text.flip(0), swapped)
    torch.testing.assert_close(a["logits"], b["logits"].flip(0))
    assert set(states.detach(states.to(state, "cpu"))) == set(state)


def test_an_input_that_a_stream_reads_directly_is_stored() -> None:
    model = built(NESTED)
    whole, other = draw(2, 6, 4), draw(2, 4, 4)
    state = model.init_state(2, other=other, whole=whole)
    assert state["input"]["whole"] is whole
    assert set(state["input"]) == {"whole"}


def test_resets_start_a_sequence_in_the_same_context() -> None:
    model = built(CAPTIONER)
    x, context = random_input(model, 2, 8), random_context(model, 2)
    marks = torch.zeros(2, 8, dtype=torch.bool)
    marks[:, 5] = True
    found = model(x, resets=marks, **context)["logits"]
    torch.testing.assert_close(found[:, 5:], model(x[:, 5:], **context)["logits"])


def test_a_context_may_be_bidirectional_and_read_in_a_reverse_scan() -> None:
    """The order of a scan applies to the stream; the context inside keeps its own order."""
    text = """
model:
  inputs: {x: {features: 4}, m: {features: 4}}
  steps:
    - scan:
        {from: m, order: [forward, reverse], own: all, merge: concat, as: seen, steps: [{causal_conv: {kernel: 2}}]}
    - scan:
        from: x
        order: reverse
        steps:
          - causal_conv: {from: seen, kernel: 2, as: k}
          - causal_conv: {from: input, kernel: 3}
          - linear: {features: 8, as: q}
          - cross_attention: {q: q, k: k, v: k, heads: 1}
"""
    model = built(text)
    x, m = draw(2, 5, 4), draw(2, 3, 4, seed=2)
    scan = dict(model.named_children())["scan"]
    seen = model.seen(m)
    k = scan.k(seen)
    c = scan.causal_conv(x.flip(1)).flip(1)
    q = linear(c, *scan.q.parameters())
    torch.testing.assert_close(model(x, m=m), scaled_dot_product_attention(q, k, k))
    with pytest.raises(RunError, match="reverse"):
        model.init_state(2, m=m)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, c: m(x), "the input image is missing: pass image=…, notes=…"),
        (lambda m, x, c: m(x, image=c["image"]), "the input notes is missing"),
        (lambda m, x, c: m(**c), "the model needs its input text: call model(text=…, image=…, notes=…)"),
        (lambda m, x, c: m(x, imag=c["image"]), "the model has no input 'imag': did you mean 'image'?"),
        (lambda m, x, c: m(x, text=x, **c), "the input text is given twice"),
        (lambda m, x, c: m(x, **c | {"image": c["image"][:1]}), "the batches differ: image has 1 and text 2"),
        (lambda m, x, c: m(x, **c | {"notes": c["notes"][0]}), "the input notes reads [batch, notes, 5], not [3, 5]"),
        (lambda m, x, c: m(x, **c | {"image": c["notes"]}), "the input image reads images [batch, 3, height, width]"),
        (lambda m, x, c: m(x, **c | {"image": None}), "the input image reads a tensor, not NoneType"),
        (lambda m, x, c: m(x, state=m.init_state(2, **c), **c), "the state already depends on image"),
        (lambda m, x, c: m.step(x[:, 0]), "state = model.init_state(batch, image=…, notes=…)"),
        (lambda m, x, c: m.step(x[:1, 0], m.init_state(2, **c)), "holds 2 sequences and the input 1"),
        (lambda m, x, c: m.init_state(2), "the input image is missing"),
        (lambda m, x, c: m.init_state(3, **c), "the batches differ: image has 2 and the state 3"),
        (lambda m, x, c: m.init_state(2, text=x, **c), "the input text streams"),
        (lambda m, x, c: m.init_state(2, picture=x, **c), "the model has no input 'picture'"),
        (lambda m, x, c: built(AGENT)(x, foo=x), "the model has no input 'foo': call model(x)"),
        (lambda m, x, c: built(AGENT)(x, done=x), "no input 'done': pass resets, which is True at the first"),
        (lambda m, x, c: built(AGENT)(x, attention_mask=x), "no input 'attention_mask': pass resets or cu_seqlens"),
        (lambda m, x, c: built(AGENT)(), "the model needs its input: call model(x)"),
        (lambda m, x, c: built(AGENT).init_state(2, foo=x), "the model has no input 'foo'"),
    ],
)  # fmt: skip
def test_a_wrong_call(call: Callable[[SequenceModel, Tensor, dict[str, Tensor]], Any], message: str) -> None:
    model = built(CAPTIONER)
    with pytest.raises(RunError, match=re.escape(message)):
        call(model, random_input(model, 2, 4), random_context(model, 2))


OBSTACLES = [
    ("- pool: {mode: last, as: v}\n    - multiply: {from: x, by: v}", "v, made of the whole sequence, meets"),
    ("- pool: {mode: last, as: v}\n    - linear: {from: [x, v], features: 2}", "v, made of the whole sequence"),
    ("- linear: 4\n    - add: {with: fixed}", "it reads fixed token by token, which is context"),
    ("- linear: {features: 4, as: h}\n    - linear: {from: [fixed, h], features: 2}", "it reads fixed token by token"),
    ("- cross_attention: {q: x, k: x, v: x, heads: 1}", "each token reads all of x"),
    ("- linear: 4\n    - residual: [{identity: {from: fixed}}]", "it reads identity token by token, which is context"),
    ("- residual: {from: fixed, steps: [{add: {with: x}}]}", "it reads fixed token by token"),
    ("- parallel: {branches: [{a: [{identity: {from: fixed}}]}, {b: [silu]}]}", "it reads identity token by token"),
    ("- pool: {mode: last, as: v}\n    - gate: {from: fixed, by: v}", "it reads fixed token by token"),
]


@pytest.mark.parametrize(("steps", "reason"), OBSTACLES)
def test_models_that_cannot_stream_report_why_and_run_whole(steps: str, reason: str) -> None:
    inputs = "{x: {features: 4, length: 5}, fixed: {features: 4, length: 5}}"
    both = "    - multiply: {by: mean, name: last}\n" if "fixed" in steps else ""
    head = "- pool: {from: fixed, as: mean}\n    - identity: {from: x}\n    "
    last = both or "    - multiply: {by: mean, name: last}"
    text = f"model:\n  inputs: {inputs}\n  steps:\n    {head}{steps}\n{last}"
    if "features: 2" in text:
        text = text.replace("{by: mean, name: last}", "{by: other, name: last}")
        more = "- linear: {from: mean, features: 2, as: other}\n    - identity: {from: x, name: again}\n    "
        text = text.replace(head, head + more)
    model = built(text)
    x, fixed = draw(2, 5, 4), draw(2, 5, 4, seed=2)
    assert model(x, fixed=fixed).isfinite().all()
    with pytest.raises(RunError, match=re.escape(reason)):
        model.init_state(2, fixed=fixed)


def test_a_user_op_reads_an_input_of_another_length() -> None:
    """The port alone declares that each token reads all of it, and that the rest may stream."""

    @primitive("nearness")
    class Nearness(Op):
        """Return the sum of another sequence, weighted by its products with the token."""

        ports = (Port("x", main=True), Port("other", length="other"))

        def forward(self, p: Any, call: Any, x: Tensor, other: Tensor) -> Tensor:
            return x @ other.transpose(1, 2) @ other

    try:
        text = "model:\n  inputs: {x: {features: 4}, m: {features: 4}}\n  steps: [{nearness: {other: m}}]"
        check_law(built(text), seq=5, resets=[(0, 2)])
        model = built("model: {input: {features: 4}, steps: [{nearness: {other: input}}]}")
        assert (found := lookahead.find(model.spec)) is not None
        assert found.tokens == lookahead.WHOLE
        with pytest.raises(RunError, match="each token reads all of input"):
            model.init_state(1)
        with pytest.raises(RunError, match="would mix the sequences"):
            model(draw(1, 3, 4), resets=torch.zeros(1, 3, dtype=torch.bool))
    finally:
        del PRIMITIVES["nearness"]


def test_the_lookahead_does_not_count_the_context() -> None:
    assert (found := lookahead.find(built(CAPTIONER).spec))
    assert found.tokens == 0
    inputs = "{x: {features: 4}, m: {features: 4}}"
    text = f"model:\n  inputs: {inputs}\n  steps: [{{pool: {{from: m, as: v}}}}, {{multiply: {{from: x, by: v}}}}]"
    assert (found := lookahead.find(built(text).spec))
    assert found.tokens == 0
    text = text.replace("from: m, as: v", "from: x, as: v")
    text = text.replace("from: x, by: v}}", "from: x, by: v}}, {add: {with: w}}")
    text = text.replace("[{pool", "[{pool: {from: m, as: w, name: p}}, {pool")
    found = lookahead.find(built(text).spec)
    assert found
    assert found.tokens == lookahead.WHOLE
    assert found.first
    assert found.first[0] == "multiply"


def test_a_saved_model_and_a_copy(tmp_path: Any) -> None:
    model = built(CAPTIONER)
    x, context = random_input(model, 2, 4), random_context(model, 2)
    expected = model(x, **context)["logits"]
    save(model, tmp_path / "m")
    torch.testing.assert_close(load(tmp_path / "m")(text=x, **context)["logits"], expected)
    torch.testing.assert_close(copy.deepcopy(model)(x, **context)["logits"], expected)


REVERSED = """
model:
  inputs: {x: {features: 4}, m: {features: 4}}
  steps:
    - scan:
        order: reverse
        steps:
          - causal_conv: {kernel: 2, as: q}
          - cross_attention: {q: q, k: m, v: m, heads: 1}
"""


def test_shapes_of_a_model_that_cannot_stream() -> None:
    check_shapes(built(REVERSED))


def test_the_parameters_of_a_layer_norm_of_a_context_get_gradients() -> None:
    inputs, steps = "{x: {features: 4}, v: {vector: 4}}", "[{layer_norm: {from: v, as: n}}, {add: {from: x, with: n}}]"
    model = built(f"model:\n  inputs: {inputs}\n  steps: {steps}")
    x, v = draw(2, 5, 4), draw(2, 4)
    y, _ = model(x, v=v, return_state=True)
    torch.testing.assert_close(y, x + layer_norm(v, (4,))[:, None])
    y.sum().backward()
    assert model.get_parameter("n.bias").grad is not None


SEGMENTS = """
model:
  inputs: {text: {tokens: 7, length: words}, segment: {tokens: 2, length: words}, note: {features: 4, length: ticks},
           more: {features: 4, length: ticks}}
  steps:
    - add: {from: note, with: more}
    - pool: {as: noted}
    - embed: {from: segment, features: 4, name: s, as: segments}
    - embed: {from: text, features: 4}
    - add: {with: segments}
    - add: {with: noted}
"""


def test_inputs_of_one_length_are_combined_token_by_token() -> None:
    model = built(SEGMENTS)
    check_shapes(model)
    assert model.spec.output
    assert model.spec.output.axes == ("batch", "words", 4)
    text, segment, note = torch.randint(7, (2, 5)), torch.randint(2, (2, 5)), draw(2, 3, 4)
    words, segments = (model.get_parameter(f"{name}.weight") for name in ("embed", "s"))
    y = model(text=text, segment=segment, note=note, more=note)
    torch.testing.assert_close(y, words[text] + segments[segment] + 2 * note.mean(1, keepdim=True))
    for wrong, why in (
        ({"segment": segment[:, :4]}, "text has 5 tokens and segment 4, %s words"),
        ({"more": note[:, :2]}, "note has 3 tokens and more 2, %s ticks"),
    ):
        with pytest.raises(RunError, match=why % "but the spec gives them the same length,"):
            model(**{"text": text, "segment": segment, "note": note, "more": note, **wrong})
    with pytest.raises(RunError, match="reads segments token by token, which is context"):
        model.init_state(2, segment=segment, note=note, more=note)


def test_context_of_one_length_streams() -> None:
    steps = "[{add: {from: note, with: more}}, {pool: {as: noted}}, {shift: {from: x, by: 1}}, {add: {with: noted}}]"
    inputs = "{x: {features: 4}, note: {features: 4, length: ticks}, more: {features: 4, length: ticks}}"
    model = built(f"model: {{inputs: {inputs}, steps: {steps}}}")
    check_law(model)
    note = draw(2, 3, 4)
    with pytest.raises(RunError, match="note has 3 tokens and more 2"):
        model.init_state(2, note=note, more=note[:, :2])


@pytest.mark.parametrize("step", ["{scale: 1}", "{shift: 1}"])  # in place, and with flipped copies
def test_a_scan_in_reverse_reverses_inputs_of_its_length(step: str) -> None:
    scan = f"{{scan: {{from: x, order: reverse, steps: [{{add: {{with: y}}}}, {step}]}}}}"
    inputs = "{x: {features: 3, length: t}, y: {features: 3, length: t}}"
    x, y = draw(2, 5, 3), draw(2, 5, 3)
    total = x + y
    if "shift" in step:
        total = torch.cat([total[:, 1:], torch.zeros(2, 1, 3, dtype=torch.float64)], 1)
    torch.testing.assert_close(built(f"model: {{inputs: {inputs}, steps: [{scan}]}}")(x=x, y=y), total)

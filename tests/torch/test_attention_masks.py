"""Scores of attention that wires add to, and first tokens that see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from benchmarks.memory import measure
from seqblocks.testing import check_law, check_lookahead
from tests.kernels.test_attention import near

GATE = "{linear: {from: src, features: 4, as: w}}, "
PAIRS = "{linear: {from: src, features: 36, as: w}}, "
FORGET = """
seqblocks: 1
let: {heads: 4}
model:
  input: {features: 8}
  steps:
    - identity: {as: src}
    - linear: {features: 4, as: f}
    - calc: {gone: softplus(-f)}                                # minus the log of a forget gate
    - cell: {state: {sum: heads}, steps: [{calc: {sum: sum + gone}}], as: since}
    - linear: {from: src, features: 24, as: [q, k, v]}
    - attention: {q: q, k: k, v: v, heads: heads, scores: since}
"""


def build(given: str, steps: str = "", head: str = "{features: 8}", before: str = "", after: str = "") -> Any:
    """Return a model of one attention with 4 heads of 2 features and 2 of keys; it reads the wire `src`."""
    linear = "{linear: {from: src, features: 16, as: {q: 8, k: 4, v: 4}}}"
    attention = f"{{attention: {{q: q, k: k, v: v, heads: 4, kv_heads: 2, {given}}}}}"
    steps = f"[{before}{{identity: {{as: src}}}}, {steps}{linear}, {attention}{after}]"
    text = f"seqblocks: 1\nmodel: {{input: {head}, steps: {steps}}}\n"
    return seqblocks.build_text(text, dtype=torch.float64, seed=1)


def by_pairs(model: Any, x: Tensor, added: Tensor, seen: Tensor) -> Tensor:
    """Return the attention of all pairs. added: to the scores [B, 4, S, S]. seen [S, S]: which keys a query sees."""
    q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in model.linear(x).split([8, 4, 4], -1))
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3) / 2**0.5 + added).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def earlier(tokens: int, prefix: int = 0) -> Tensor:
    place = torch.arange(tokens)
    return (place <= place[:, None]) | (torch.maximum(place, place[:, None]) < prefix)


def agree(found: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    weights = torch.randn_like(found)
    mine, theirs = (torch.autograd.grad((y * weights).sum(), leaves) for y in (found, expected))
    near([found, *mine], [expected, *theirs])


@pytest.mark.parametrize("prefix", [0, 3, 20])
def test_numbers_of_keys_and_a_prefix(prefix: int) -> None:
    model, x = build(f"scores: w, prefix: {prefix}", GATE), torch.randn(2, 7, 8, dtype=torch.float64)
    added = model.w(x).transpose(1, 2).unsqueeze(2)
    agree(model(x), by_pairs(model, x, added, earlier(7, prefix)), *model.parameters())
    check_lookahead(model)
    assert seqblocks.summarise(model.spec).lookahead == max(prefix - 1, 0)


def test_numbers_of_pairs() -> None:
    model = build("scores: w, causal: false", PAIRS, "{features: 8, length: 9}")
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    added = model.w(x).unflatten(-1, (4, 9)).transpose(1, 2)
    agree(model(x), by_pairs(model, x, added, torch.ones(9, 9, dtype=torch.bool)), *model.parameters())
    long = build("scores: w, causal: false, soft_cap: 2", PAIRS.replace("36", "2080"), "{features: 8, length: 520}")
    x = torch.randn(2, 520, 8, dtype=torch.float64)  # two blocks of queries
    with torch.no_grad():
        added = long.w(x).unflatten(-1, (4, 520)).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in long.linear(x).split([8, 4, 4], -1))
        scores = 2 * torch.tanh(q @ k.repeat_interleave(2, 1).transpose(2, 3) / 2**0.5 / 2) + added
        near([long(x)], [(scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)])


@pytest.mark.parametrize(
    "given", ["cache: 23", "window: 5", "chunk: 4", "window: 3, keep_first: 2", "sinks: true, bias: alibi, scale: 0.3"]
)
def test_numbers_of_keys_stream(given: str) -> None:
    """The second call of `check_law` also runs the plan of a token."""
    model = build(f"scores: w, {given}", GATE).eval()
    check_law(model, resets=((0, 3), (1, 22)))
    check_law(model)
    assert seqblocks.summarise(model.spec).state_bytes % 4 == 0


@pytest.mark.parametrize("given", ["", "window: 3, sinks: true", "scores: w, bias: alibi"])
@pytest.mark.parametrize("extra", [0, 2])
def test_a_prefix_before_the_stream(given: str, extra: int) -> None:
    place = f"{{prefix: {{count: {4 + extra}}}}}, "
    steps, after = GATE if "scores" in given else "", f", {{slice: {{first: {4 + extra}}}}}"
    model = build(f"prefix: 4, {given}", steps, before=place, after=after)
    check_law(model.eval())


def test_an_image_before_the_text() -> None:
    """As in PaliGemma (arXiv:2407.07726): all patches see each other, and words what is before them."""
    model = seqblocks.build_text("""
seqblocks: 1
model:
  inputs: {text: {tokens: 64}, image: {image: {size: 8, channels: 3}}}
  steps:
    - patch_embed: {from: image, patch: 4, features: 8, as: patches}
    - embed: {from: text, features: 8, as: words}
    - concat: {from: [patches, words], axis: tokens}
    - linear: {features: 24, as: [q, k, v]}
    - attention: {q: q, k: k, v: v, heads: 2, prefix: 4}
    - slice: {first: 4}
    - unembed: {as: logits}
  outputs: [logits]
""", dtype=torch.float64)
    check_law(model)


def test_forgetting_attention() -> None:
    """The forgetting transformer (arXiv:2503.02130) adds the sum of log gates between key and query to each score."""
    model, x = seqblocks.build_text(FORGET, dtype=torch.float64, seed=1), torch.randn(2, 9, 8, dtype=torch.float64)
    check_law(model, resets=((0, 3), (1, 22)))
    logs = torch.nn.functional.logsigmoid(model.f(x)).cumsum(1).transpose(1, 2)
    q, k, v = (t.unflatten(-1, (-1, 2)).transpose(1, 2) for t in model.linear(x).split(8, -1))
    scores = q @ k.transpose(2, 3) / 2**0.5 + logs.unsqueeze(3) - logs.unsqueeze(2)
    expected = scores.masked_fill(~earlier(9), -torch.inf).softmax(-1) @ v
    agree(model(x), expected.transpose(1, 2).flatten(2), *model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "steps", "head", "length"),
    [
        ("scores: w", GATE, "{features: 8}", 256), ("scores: w, causal: false", PAIRS.replace("36", "1024"),
         "{features: 8, length: 256}", 256), ("prefix: 200, sinks: true", "", "{features: 8}", 256),
    ],
)  # fmt: skip
def test_the_memory_of_training_is_estimated(given: str, steps: str, head: str, length: int) -> None:
    torch.set_num_threads(1)
    spec = build(given, steps, head).spec
    found = seqblocks.memory(spec, batch=2, length=length)
    assert found.peak_bytes == pytest.approx(measure(seqblocks.build_model(spec), 2, length).peak, rel=0.1)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("given", ["scores: w, cache: 20", "prefix: 3"])
def test_models_compile_and_export(given: str) -> None:
    model, x = build(given, GATE if "scores" in given else "").eval(), torch.randn(2, 11, 8, dtype=torch.float64)
    torch._dynamo.reset()
    near([torch.compile(model, fullgraph=True, backend="eager")(x)], [model(x)])
    length = torch.export.Dim("length", min=5, max=4096)  # prefix and 2 tokens
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}}, strict=False).module()
    for seq in (5, 37):
        x = torch.randn(2, seq, 8, dtype=torch.float64)
        near([program(x)], [model(x)])


@pytest.mark.parametrize(("wire", "scores"), [("", "bias: relative"), (PAIRS, "scores: w")])
def test_scores_of_pairs_are_those_of_one_sequence(wire: str, scores: str) -> None:
    attention = f"{{attention: {{q: src, k: src, v: src, heads: 4, causal: false, {scores}}}}}"
    steps = f"{{identity: {{as: src}}}}, {wire}{attention}"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 8, length: 9}}, steps: [{steps}]}}\n")
    with pytest.raises(seqblocks.RunError, match="its scores of pairs are those of one sequence"):
        model(torch.randn(1, 9, 8), cu_seqlens=torch.tensor([0, 4, 9]))

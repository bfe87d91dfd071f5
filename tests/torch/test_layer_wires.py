"""Test wires that layers read from other layers: values, gradients, streams, memory, and replaced modules."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

import seqblocks
from benchmarks.memory import measure
from seqblocks import graph
from seqblocks.distributed import pipeline_stage
from seqblocks.runtime.repeat import checkpoint_layers
from seqblocks.testing import check_law

EPS = 1.1920929e-7  # of float32, which torch's rms_norm adds by default

EVERYTHING = """
seqblocks: 1
let: {times: 4}
model:
  input: {features: 6}
  steps:
    - repeat:
        name: blocks
        times: times
        steps:
          - residual:
              name: mix
              as: h
              steps:
                - linear: {features: 6, as: v}
                - causal_conv: {kernel: 3}
                - multiply: {by: layers.0.v or v}
          - add: {with: "layers[times - 1 - layer].h or input"}
          - parallel:
              merge: sum
              branches:
                - a: [{linear: {features: 6, as: side}}]
                - b: [{add: {with: "layers[-2].side or layers[-1].side or h"}}]
          - repeat:
              index: inner
              times: 2
              steps: [{linear: {features: 6, as: w}}, {add: {with: "layers[-1].h or inners[-1].w or input"}}]
    - add: {with: "blocks[-1].input", as: z}
    - concat: {from: [z, blocks.1.side, "blocks[-2].v", input]}
    - linear: {features: 3, name: last}
"""


def everything() -> seqblocks.SequenceModel:
    return seqblocks.build_text(EVERYTHING, dtype=torch.float64, seed=1)


def by_hand(model: seqblocks.SequenceModel, x: Tensor) -> Tensor:
    """Compute EVERYTHING with the modules of its ops alone."""
    first, layers = x, []
    for at in range(4):
        get = model.blocks[at].get_submodule
        wires = {"input": x, "v": get("mix.v")(x)}
        product = get("mix.causal_conv")(wires["v"]) * (layers[0] if layers else wires)["v"]
        wires["h"] = x + product
        x = wires["h"] + (layers[3 - at]["h"] if 3 - at < at else wires["input"])
        wires["side"] = get("parallel.a.side")(x)
        x = wires["side"] + x + (layers[max(at - 2, 0)]["side"] if at else wires["h"])
        before: list[Tensor] = []
        for inner in range(2):
            given = x
            w = get(f"repeat.{inner}.w")(x)
            x = w + (layers[-1]["h"] if layers else before[-1] if before else given)
            before.append(w)
        layers.append(wires)
    x = x + layers[-1]["input"]
    return model.last(torch.cat([x, layers[1]["side"], layers[-2]["v"], first], -1))


def test_every_way_to_read_a_layer_has_the_values_of_a_loop() -> None:
    model, x = everything(), torch.randn(2, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), by_hand(model, x), rtol=1e-12, atol=1e-12)


def test_the_law_holds() -> None:
    check_law(everything(), seq=9, resets=[(0, 4), (1, 1)])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_of_recomputed_layers(reentrant: bool) -> None:
    model, x = everything(), torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x).pow(2).sum(), [x, *model.parameters()])
    checkpoint_layers(model, partial(checkpoint, use_reentrant=reentrant))
    model(x).pow(2).sum().backward()
    for found, wanted in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", ["blocks", "blocks.1", "blocks.0.mix", "blocks.2.parallel", "blocks.1.parallel.a"])
def test_a_stream_calls_observed_modules(path: str) -> None:
    model, x, seen = everything(), torch.randn(2, 4, 6, dtype=torch.float64), []
    expected = model(x)
    model.get_submodule(path).register_forward_hook(lambda *_: seen.append(path))
    state, outputs = model.init_state(batch_size=2), []
    with torch.no_grad():
        for token in x.unbind(1):
            y, state = model.step(token, state)
            outputs.append(y)
    torch.testing.assert_close(torch.stack(outputs, 1), expected, rtol=1e-12, atol=1e-12)
    assert len(seen) == 4


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *tensors: Tensor, **options: Any) -> Any:
        return self.inner(*tensors, **options)


def test_a_wrapper_of_a_layer_passes_its_wires_on_and_another_module_cannot() -> None:
    model, x = everything(), torch.randn(2, 4, 6, dtype=torch.float64)
    expected = model(x)
    model.blocks[1] = Wrapper(model.blocks[1])
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.blocks[1] = nn.Identity()
    with pytest.raises(seqblocks.RunError, match="layer 1: the module that replaces it does not make the wires that"):
        model(x)
    model = everything()
    model.blocks[0].mix = nn.Identity()
    with pytest.raises(seqblocks.RunError, match="mix: the module that replaces it does not make the wires"):
        model(x)


@pytest.mark.parametrize("stages", [2, 3, 6])
def test_stages_of_a_pipeline_pass_the_wires_on(stages: int) -> None:
    model, x = everything(), torch.randn(2, 5, 6, dtype=torch.float64)
    found: Any = (x,)
    for index in range(stages):
        results = pipeline_stage(model, index, stages)(*found)
        found = results if isinstance(results, tuple) else (results,)
    torch.testing.assert_close(found[0], model(x), rtol=1e-12, atol=1e-12)


def test_a_value_is_kept_until_its_last_reader_and_no_longer() -> None:
    text = """
    seqblocks: 1
    model:
      input: {features: 4}
      steps:
        - repeat:
            name: blocks
            times: 6
            steps:
              - linear: {features: 4, as: h}
              - silu
              - add: {with: "layers[-2].h or input"}
    """
    model, alive = seqblocks.build_text(text), []
    kept: list[weakref.ref[Tensor]] = []
    for layer in model.blocks:
        layer.h.register_forward_hook(lambda _module, _inputs, y: kept.append(weakref.ref(y)))
        layer.silu.register_forward_hook(lambda *_: alive.append([ref() is not None for ref in kept]))
    with torch.no_grad():
        model(torch.randn(1, 3, 4))
    # while layer i runs its silu: the outputs h of layers i - 2 and i - 1, if they are still to be read, and its own
    assert alive == [[each == at or at - 2 <= each < 4 for each in range(at + 1)] for at in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", ["none", "blocks"])
def test_the_memory_is_as_estimated(checkpointed: str) -> None:
    sizes = {"dim": 64, "depth": 6, "heads": 2, "vocabulary": 50}
    spec = seqblocks.load_model("unet_gpt", set=sizes)
    found = seqblocks.memory(spec, batch=2, length=256, optimizer="adamw", checkpoint=checkpointed)
    real = measure(seqblocks.build_model(spec), 2, 256, optimizer="adamw", checkpoint=checkpointed)
    assert found.peak_bytes == pytest.approx(real.peak, rel=0.1)  # as in test_memory.py


def test_deep_supervision_returns_wires_of_layers() -> None:
    text = """
    seqblocks: 1
    model:
      input: {features: 4}
      steps:
        - repeat: {name: blocks, times: 3, steps: [{residual: {as: h, steps: [{linear: 4}]}}]}
        - aside: [{linear: {from: blocks.0.h, features: 2, as: early}}]
        - linear: {features: 2, as: late}
      outputs: [late, early]
    """
    model, x = seqblocks.build_text(text, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x)["early"], model.early(x + model.blocks[0].h.linear(x)), rtol=1e-12, atol=1e-12)
    check_law(model, seq=5)


def test_layers_of_a_context_are_kept_for_the_tokens_that_read_them() -> None:
    text = """
    seqblocks: 1
    model:
      inputs: {x: {features: 4}, memory: {features: 4, length: 5}}
      steps:
        - repeat: {name: encoder, from: memory, times: 3, steps: [{linear: {features: 4, as: h}}, silu]}
        - repeat:
            name: decoder
            from: x
            times: 2
            steps:
              - linear: {from: memory, features: 4, as: k, when: layer == 0}
              - linear: {from: input, features: 4, as: q}
              - cross_attention: {q: q, k: layers.0.k or k, v: "encoder[2 - layer].h", heads: 2}
              - add: {with: input}
        - aside: [{pool: {from: "encoder[-1].h", as: all}}]
        - multiply: {by: all}
    """
    model = seqblocks.build_text(text, dtype=torch.float64)
    check_law(model, seq=6)
    state = model.init_state(batch_size=2, memory=torch.randn(2, 5, 4, dtype=torch.float64))
    assert set(state["encoder"]) >= {"wire_0", "wire_1"}


# --- outputs of blocks ------------------------------------------------------------------------------------------------

ATTEND = """
- rms_norm: {as: normed}
- linear: {features: 8, as: q}
- linear: {from: normed, features: 8, as: k}
- linear: {from: normed, features: 8, as: v}
- aside: [{identity: {from: FIRST, as: other}}]
- calc: {mixed: (other + v) / 2}
- attention: {q: q, k: k, v: mixed, heads: 2}
- linear: {features: 8, name: out}
"""
IN_A_BLOCK = """
seqblocks: 1
blocks:
  attend:
    args: {first: wire}
    outputs: [v, k]
    steps: [{residual: STEPS}]
model:
  input: {features: 8}
  steps:
    - repeat: {name: blocks, times: 3, steps: [{attend: {first: layers.0.attend.v or input}}]}
    - attend: {first: blocks.1.attend.v, name: last, as: z}
    - concat: {from: [z, last.v, last.k, blocks.0.attend.k]}
"""
WRITTEN_OUT = """
seqblocks: 1
model:
  input: {features: 8}
  steps:
    - repeat: {name: blocks, times: 3, steps: [{residual: {name: attend, steps: STEPS}}]}
    - repeat: {name: last, times: 1, steps: [{residual: {as: z, steps: LAST}}]}
    - concat: {from: [last.0.z, last.0.v, last.0.k, blocks.0.k]}
"""


class First(nn.Module):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + 0 * other


def steps(first: str) -> str:
    return "[" + ", ".join(f"{{{line[2:]}}}" for line in ATTEND.replace("FIRST", first).strip().splitlines()) + "]"


def test_a_block_returns_further_wires() -> None:
    """As the same steps do that are written out in the layers."""
    model = seqblocks.build_text(IN_A_BLOCK.replace("STEPS", steps("first")), dtype=torch.float64)
    text = WRITTEN_OUT.replace("STEPS", steps("layers.0.v or input")).replace("LAST", steps("blocks.1.v"))
    other = seqblocks.build_text(text, dtype=torch.float64)
    renamed = {name.replace(".residual", "").replace("last.", "last.0.z."): p for name, p in model.state_dict().items()}
    other.load_state_dict(renamed)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), other(x), rtol=1e-12, atol=1e-12)
    check_law(model, seq=9, resets=[(0, 4), (1, 1)])
    expected = model(x)
    model.blocks[0] = Wrapper(model.blocks[0])
    model.last = Wrapper(model.last)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.last = First()
    with pytest.raises(seqblocks.RunError, match="last: the module that replaces it does not make the wires that"):
        model(x)


# --- published models -------------------------------------------------------------------------------------------------


def small(name: str, **sizes: int) -> seqblocks.SequenceModel:
    model = seqblocks.build(name, set=sizes, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of features j and j + D / 2 of x [..., seq, D] by position / 10000^(2 j / D)."""
    half = x.shape[-1] // 2
    rates = 10000 ** (-torch.arange(half, dtype=x.dtype) / half)
    turns = torch.polar(torch.ones((), dtype=x.dtype), torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), rates))
    y = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([y.real, y.imag], -1)


def attended(q: Tensor, k: Tensor, v: Tensor, heads: int, window: int) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    ages = torch.arange(q.shape[-2])[:, None] - torch.arange(q.shape[-2])
    y = scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=(ages >= 0) & (ages < window))
    return y.transpose(1, 2).flatten(2)


def normed(x: Tensor, heads: int = 1) -> Tensor:
    x = x.unflatten(-1, (heads, -1))
    return rms_norm(x, x.shape[-1:], eps=EPS).flatten(-2)


def test_unet_gpt() -> None:
    """Outputs of layers wait on a stack, and each layer of the second half takes the latest one."""
    depth, heads, window = 6, 2, 5
    model = small("unet_gpt", dim=12, depth=depth, heads=heads, vocabulary=20, window=window)
    p, ids, stack = dict(model.named_parameters()), torch.randint(20, (2, 9)), []
    x = first = normed(p["embed.weight"][ids])
    for at in range(depth):
        own = {name.removeprefix(f"layers.{at}."): value for name, value in p.items()}
        if at >= depth // 2:
            x = x + own["joined.weight"] * stack.pop()
        x = own["mixed.a"] * x + own["mixed.b"] * first
        h = normed(x)
        q, k = (normed(linear(h, own[f"attention.{name}.weight"]), heads) for name in "qk")
        embedded = p[f"embeddings.{min(at, depth - 1 - at)}.v.weight"][ids]
        v = own["attention.values.a"] * linear(h, own["attention.v.weight"]) + own["attention.values.b"] * embedded
        x = x + linear(attended(q, k, v, heads, window), own["attention.out.weight"])
        x = x + linear(linear(normed(x), own["network.up.weight"]).relu().square(), own["network.down.weight"])
        if at < depth // 2:
            stack.append(x)
    logits = linear(normed(x), p["unembed.weight"])
    torch.testing.assert_close(model(ids), 30 * torch.tanh(logits / 30), rtol=1e-10, atol=1e-10)
    check_law(model, seq=8)


def test_resformer() -> None:
    model = small("resformer_82m", dim=8, depth=3, heads=2, hidden=12, vocabulary=20)
    p, ids, first = dict(model.named_parameters()), torch.randint(20, (2, 9)), None

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight, 1e-5)

    x = p["embed.weight"][ids]
    for at in range(3):
        own = {name.removeprefix(f"layers.{at}."): value for name, value in p.items()}
        h = norm(x, own["attention.norm.weight"])
        q, k, v = (linear(h, own[f"attention.{name}.weight"]) for name in "qkv")
        first = v if first is None else first
        x = x + linear(attended(q, k, (v + first) / 2, 2, 99), own["attention.out.weight"])
        h = norm(x, own["mlp.residual.norm.weight"])
        gate, up = linear(h, own["mlp.residual.swiglu.gate_weight"]), linear(h, own["mlp.residual.swiglu.up_weight"])
        x = x + linear(silu(gate) * up, own["mlp.residual.swiglu.down_weight"])
    y = linear(norm(x, p["norm.weight"]), p["unembed.weight"])
    torch.testing.assert_close(model(ids), y, rtol=1e-10, atol=1e-10)
    check_law(model, seq=8)


def test_counts_of_the_releases() -> None:
    """Each formula adds up the parameters of the official modules."""
    dim, ids = 768, 50304
    layer = 4 * dim * dim + 8 * dim * dim + 2 + 2  # attention, network, two pairs of factors
    expected = 12 * layer + 6 + ids * dim * (1 + 6 + 1)  # skips; embeddings, those of values, and the head
    assert graph.count(seqblocks.load_model("unet_gpt").graph) == expected == 394_002_486
    dim, ids, hidden = 512, 50277, 1792
    layer = 4 * dim * dim + 3 * dim * hidden + 2 * dim  # that of a LLaMA: mixing the values adds no parameter
    expected = 8 * layer + dim + 2 * ids * dim
    assert graph.count(seqblocks.load_model("resformer_82m").graph) == expected == 81_901_056

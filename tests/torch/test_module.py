"""Built models: names, state, orders, sharing, and what torch's own tools do with them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import seqblocks
from seqblocks import graph
from seqblocks import state as states
from seqblocks.language.keys import ATTRIBUTES
from seqblocks.language.spec_files import bundled
from seqblocks.parameters import INITIALISERS
from seqblocks.runtime.primitive import Primitive
from seqblocks.testing import check_law

STREAM = """
seqblocks: 1
use: [vil]
let: {dim: 8}
model:
  input: {features: dim}
  steps:
    - vil: {name: first, dim: dim, heads: 2, kernel: 3}
    - repeat:
        name: rest
        times: 2
        steps:
          - vil: {dim: dim, heads: 2}
          - residual: {steps: [layer_norm, {causal_conv: {kernel: 2, mixing: true}}]}
    - linear: {features: 3}
"""
# The recurrent stabiliser is the same in every split, so whole, chunks and steps differ only by rounding: about length
# * 2^-52 relative to intermediate values of order 1e2. 1e-9 leaves two decades of room at length 40.
ROUNDING = 1e-9


def built(text: str, **options: Any) -> Any:
    return seqblocks.build_text(text, dtype=torch.float64, **options).eval()


def randomised(model: Any, seed: int = 0) -> Any:
    """Redraw every parameter, so that gates initialised to zero have an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


@pytest.mark.slow
@settings(max_examples=8)
@given(
    seq=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    marks=st.lists(st.integers(0, 39), max_size=4),
    seed=st.integers(0, 3),
)
def test_whole_is_chunks_is_steps(seq: int, cuts: list[int], marks: list[int], seed: int) -> None:
    model = randomised(built(STREAM), seed)
    resets = [(mark % 2, mark % seq) for mark in marks]
    check_law(model, seq=seq, cuts=[cut for cut in cuts if 0 < cut < seq], resets=resets, seed=seed, tolerance=ROUNDING)


def test_the_law_detects_violations() -> None:
    model = randomised(built(STREAM))
    conv = model.first.residual.scan.c

    def forget(_module: Any, _inputs: Any, given: dict[str, Any], _y: torch.Tensor) -> None:
        given["call"].made = {name: 0 * x for name, x in given["call"].made.items()}

    conv.register_forward_hook(forget, with_kwargs=True)
    with pytest.raises(AssertionError, match="chunks: output: differs by"):
        check_law(model)


def test_packed_sequences_equal_separate_sequences() -> None:
    model = randomised(built(STREAM))
    x = torch.randn(1, 12, 8, dtype=torch.float64)
    packed = model(x, cu_seqlens=torch.tensor([0, 5, 6, 12]))
    pieces = torch.cat([model(x[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 12))], 1)
    torch.testing.assert_close(packed, pieces, rtol=ROUNDING, atol=ROUNDING)


def test_resets_in_reverse_order_equal_separate_sequences() -> None:
    text = "seqblocks: 1\nuse: [vil]\nmodel: {input: {features: 8}, steps: [{vil: {dim: 8, heads: 2, order: reverse}}]}"
    model = randomised(built(text))
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    packed = model(x, cu_seqlens=torch.tensor([0, 4, 9]))
    pieces = torch.cat([model(x[:, :4]), model(x[:, 4:])], 1)
    torch.testing.assert_close(packed, pieces, rtol=ROUNDING, atol=ROUNDING)


def test_packed_sequences_compile_without_a_break() -> None:
    """Boundaries are not read back from the device. Empty sequences are skipped, also at the end."""
    from seqblocks.kernels import packed_resets

    expected = torch.zeros(1, 9, dtype=torch.bool)
    expected[0, [0, 4]] = True
    torch._dynamo.reset()
    find = torch.compile(packed_resets, fullgraph=True, backend="eager")
    for bounds in ([0, 4, 9], [0, 0, 4, 4, 9, 9, 9]):
        assert torch.equal(find(torch.tensor(bounds), 9), expected)


def scan_text(order: str, more: str = "", steps: str = "{causal_conv: {kernel: 3}}") -> str:
    return f"""
seqblocks: 1
model:
  input: {{features: 4, grid: [3, 5]}}
  steps:
    - scan: {{order: {order}, steps: [{steps}]{more}}}
"""


ORDERS = {
    "forward": list(range(15)),
    "rows": list(range(15)),
    "reverse": list(range(14, -1, -1)),
    "rows_reverse": list(range(14, -1, -1)),
    "columns": [r * 5 + c for c in range(5) for r in range(3)],
    "columns_reverse": [r * 5 + c for c in range(4, -1, -1) for r in range(2, -1, -1)],
}


@pytest.mark.parametrize("order", ORDERS)
def test_orders_are_these_permutations(order: str) -> None:
    model, plain = randomised(built(scan_text(order))), randomised(built(scan_text("forward")))
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    index = torch.tensor(ORDERS[order])
    expected = torch.empty_like(x)
    expected[:, index] = plain(x[:, index])
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_steps_of_a_scan_over_a_grid_see_the_transposed_grid() -> None:
    model = randomised(built(scan_text("columns", steps="{conv2d: {kernel: 3}}")))
    turned = randomised(built(scan_text("forward", steps="{conv2d: {kernel: 3}}").replace("[3, 5]", "[5, 3]")))
    x = torch.randn(1, 15, 4, dtype=torch.float64)
    index = torch.tensor(ORDERS["columns"])
    expected = torch.empty_like(x)
    expected[:, index] = turned(x[:, index])
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


MERGES = {"sum": torch.add, "mean": lambda a, b: (a + b) / 2, "product": torch.mul}


@pytest.mark.parametrize("merge", MERGES)
def test_directions_are_merged(merge: str) -> None:
    model = randomised(built(scan_text("[forward, reverse]", f", merge: {merge}, own: none")))
    plain = randomised(built(scan_text("forward")))
    assert list(model.state_dict()) == ["scan.causal_conv.weight", "scan.causal_conv.bias"]
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    expected = MERGES[merge](plain(x), plain(x.flip(1)).flip(1))
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)


def test_owned_parameters_carry_the_order_and_shared_ones_no_prefix() -> None:
    model = built(scan_text("[forward, reverse]", ", own: [causal_conv.bias]"))
    names = ["scan.causal_conv.weight", "scan.fwd.causal_conv.bias", "scan.rev.causal_conv.bias"]
    assert sorted(model.state_dict()) == names
    assert names == sorted(item.name for item in graph.parameters(model.graph))
    with torch.no_grad():
        model.get_parameter(names[1]).fill_(1.0)
        model.get_parameter(names[2]).fill_(10.0)
        model.get_parameter(names[0]).zero_()
    torch.testing.assert_close(model(torch.randn(1, 15, 4, dtype=torch.float64)), torch.full((1, 15, 4), 11.0).double())


def test_directions_that_own_all_equal_two_scans() -> None:
    model = randomised(built(scan_text("[forward, reverse]", ", own: all, merge: concat")))
    one = built(scan_text("forward"))
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    results = []
    for direction, sight in (("fwd", x), ("rev", x.flip(1))):
        prefix = f"scan.{direction}."
        weights = {k.replace(prefix, "scan."): v for k, v in model.state_dict().items() if k.startswith(prefix)}
        one.load_state_dict(weights)
        results.append(one(sight))
    torch.testing.assert_close(model(x), torch.cat([results[0], results[1].flip(1)], -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("own", ["all", "[causal_conv.bias]"])
def test_directions_are_ordinary_modules(own: str) -> None:
    """Hooks run, children are found by name, and a torch.export program can be converted back to a module."""
    model = randomised(built(scan_text("[forward, reverse]", f", own: {own}")))
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    seen: list[str] = []
    for name in ("scan", "scan.fwd") if own == "all" else ("scan",):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    assert model.get_submodule("scan.rev") is model.scan.rev
    y = model(x)
    assert seen == (["scan.fwd", "scan"] if own == "all" else ["scan"])
    plain = built(scan_text("[forward, reverse]", f", own: {own}"))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.export.export(plain, (x,), strict=False).module()(x), y, rtol=0, atol=0)


def test_directions_within_directions() -> None:
    inner = "{scan: {order: [forward, columns_reverse], own: all, steps: [{causal_conv: {kernel: 2}}]}}"
    model = randomised(built(scan_text("[forward, reverse]", ", own: all", steps=inner)))
    names = {f"scan.{a}.scan.{b}.causal_conv.bias" for a in ("fwd", "rev") for b in ("fwd", "columns_reverse")}
    assert names <= set(model.state_dict())
    assert {item.name for item in graph.parameters(model.graph)} == set(model.state_dict())
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


TIED = """
seqblocks: 1
model:
  input: {tokens: 11}
  steps:
    - embed: {features: 8}
    - residual: {steps: [layer_norm, {causal_conv: {kernel: 2}}]}
    - unembed: {tie: {weight: embed.weight}}
"""


def test_tied_parameters_stay_tied() -> None:
    model = built(TIED)
    assert model.unembed.weight is model.embed.weight
    assert sum(p.numel() for p in model.parameters()) == graph.count(model.graph)
    twin = copy.deepcopy(model)
    assert twin.unembed.weight is twin.embed.weight
    assert twin.unembed.weight is not model.embed.weight
    real = seqblocks.build_text(TIED, device="meta").to_empty(device="cpu")
    real.reset_parameters(0)
    assert real.unembed.weight is real.embed.weight


def test_tied_parameters_stay_tied_on_another_device() -> None:
    models = [seqblocks.build_text(TIED, seed=seed) for seed in range(2)]
    skeleton = copy.deepcopy(models[0]).to("meta")
    assert skeleton.unembed.weight is skeleton.embed.weight
    x = torch.tensor([[1, 2, 3]])
    weights, buffers = torch.func.stack_module_state(models)
    found = torch.vmap(lambda *given: torch.func.functional_call(skeleton, given, (x,)))(weights, buffers)
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]))
    real = nn.Sequential(skeleton).to_empty(device="cpu")[0]
    assert real.unembed.weight is real.embed.weight
    real.load_state_dict(models[1].state_dict())
    torch.testing.assert_close(real(x), models[1](x))
    models[0].unembed.weight = nn.Parameter(torch.zeros_like(models[0].embed.weight))
    assert models[0].double().unembed.weight is not models[0].embed.weight  # untied by the user


def test_tied_parameters_stay_tied_when_others_are_assigned() -> None:
    text = "model: {input: {tokens: 13}, steps: [{embed: 8}, causal_conv, {unembed: {tie: embed, bias: false}}]}"
    model = seqblocks.build_text(f"seqblocks: 1\n{text}", seed=0)
    loaded = {name: 2 * x for name, x in model.state_dict().items()}
    holder = torch.nn.ModuleDict({"model": model})
    for target, prefix in ((model, ""), (holder, "model.")):
        target.load_state_dict({prefix + name: x.clone() for name, x in loaded.items()}, assign=True)
        assert model.embed.weight is model.unembed.weight
        torch.testing.assert_close(model.embed.weight.detach(), loaded["embed.weight"])
    model.unembed.weight = torch.nn.Parameter(torch.zeros(13, 8))
    model.load_state_dict(loaded | {"unembed.weight": torch.ones(13, 8)}, assign=True)
    assert model.embed.weight is not model.unembed.weight  # they were untied before


def test_the_same_seed_draws_the_same_weights_whatever_the_other_steps() -> None:
    a, b = seqblocks.build_text(TIED, seed=3), seqblocks.build_text(TIED, seed=3, dtype=torch.float64)
    c = seqblocks.build_text(TIED.replace("    - unembed", "    - silu\n    - unembed"), seed=3)
    other = seqblocks.build_text(TIED, seed=4)
    for name, weight in a.state_dict().items():
        torch.testing.assert_close(b.state_dict()[name].float(), weight)
        torch.testing.assert_close(c.state_dict()[name], weight)
    assert not torch.equal(other.embed.weight, a.embed.weight)
    late = seqblocks.build_text(TIED, device="meta").to_empty(device="cpu")
    late.reset_parameters(3)
    torch.testing.assert_close(late.embed.weight, a.embed.weight)


INITIALISED = {
    "constant": "constant(0.1)",
    "uniform": "uniform(-1, 1)",
    "linspace": "linspace(3, 6)",
    "ramp": "ramp(0.1)",
    "wang": "wang(8, 2)",
    "log_of_uniform": "log_of_uniform(1, 16)",
    "falling": "falling(0.5)",
    "waves": "waves(-1, 1, 2, 0.5, 4)",
}


@pytest.mark.parametrize("init", INITIALISERS)
def test_weights_do_not_depend_on_torchs_defaults(init: str) -> None:
    text = f"""
seqblocks: 1
model:
  input: {{features: 8}}
  steps: [{{linear: {{features: 8, init: {{weight: "{INITIALISED.get(init, init)}"}}}}}}]
"""
    expected = seqblocks.build_text(text).linear
    torch.set_default_dtype(torch.float64)
    try:
        wide = seqblocks.build_text(text).linear
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        here = seqblocks.build_text(text, device="cpu").linear
    for found in (wide, here):
        assert found.weight.dtype == torch.float32
        assert torch.equal(found.weight, expected.weight)
        assert torch.equal(found.bias, expected.bias)


def test_half_precision_models_run() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = seqblocks.build_text(STREAM, dtype=dtype)
        y, state = model(torch.randn(2, 5, 8, dtype=dtype), return_state=True)
        assert y.dtype == dtype
        assert state["first"]["residual"]["scan"]["mlstm"]["C"].dtype == torch.float32
        torch.testing.assert_close(states.map_state(torch.zeros_like, state), model.init_state(2))


def test_autocast() -> None:
    model = seqblocks.build_text(STREAM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.randn(2, 5, 8))
    y.float().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_a_norm_with_a_bias_only_in_autocast() -> None:
    """Its input is in bfloat16 and its bias in float32, which the backward pass of torch takes only with a gain."""
    text = "model: {input: {features: 4}, steps: [{linear: 4}, {layer_norm: {gain: none, bias: true}}]}"
    model, x = seqblocks.build_text(f"seqblocks: 1\n{text}"), torch.randn(2, 5, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().square().sum().backward()
    expected = copy.deepcopy(model)
    expected.zero_grad()
    expected(x).square().sum().backward()
    found = model.layer_norm.bias.grad  # twice the sum of 10 results, each of at most 3, rounded like their inputs
    torch.testing.assert_close(found, expected.layer_norm.bias.grad, rtol=0, atol=20 * 3 * 2**-8)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls torch's attention state by state
def test_vmap_over_states() -> None:
    """Lengths of streams, which are compared with the sizes of caches, cannot be read in vmap."""
    attention = "{attention: {q: x, k: x, v: x, heads: 2, cache: 9}}"
    steps = f"[{{position_embed: {{length: 9}}}}, {{linear: {{features: 4, as: x}}}}, {attention}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}", dtype="float64")
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        before = [model(each, return_state=True)[1] for each in x]
        stacked = torch.utils._pytree.tree_map(lambda *parts: torch.stack(parts), *before)
        found = torch.vmap(lambda x, state: model(x, state=state))(x[:, :, :4], stacked)
        expected = [model(each[:, :4], state=state) for each, state in zip(x, before, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("name", sorted(n for n in bundled() if n.endswith(("_tiny", "_digits", "_small_block"))))
def test_the_graph_counts_the_parameters_of_the_module(name: str) -> None:
    model = seqblocks.build(name, device="meta")
    declared = {item.name: item.parameter.shape for item in graph.parameters(model.graph)}
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == declared
    assert sum(p.numel() for p in model.parameters()) == graph.count(model.graph)


@pytest.mark.slow
def test_torch_compile_and_export_see_one_graph() -> None:
    model = seqblocks.build_text(STREAM).eval()
    x = torch.randn(2, 7, 8)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    exported = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-5)


IMAGES = """
seqblocks: 1
model:
  input: {image: {size: [8, 12], channels: 2}}
  steps:
    - patch_embed: {patch: 2, features: 4}
    - position_embed
    - conv2d: {kernel: 3}
    - scan: {order: columns, steps: [causal_conv: {kernel: 3}]}
    - to_image
"""


@pytest.mark.slow
def test_a_compiler_sees_one_graph_of_a_model_of_images() -> None:
    """einops arranges the tokens. Another size works too: the positions are resized to it."""
    model = seqblocks.build_text(IMAGES).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for size in ((8, 12), (4, 6)):
        x = torch.randn(2, 2, *size)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    exported = torch.export.export(model, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-5)


def test_tokens_of_an_image_by_columns() -> None:
    """A scan in that order reads the tokens of a grid column by column, and restores the order by rows."""
    text = "seqblocks: 1\nmodel: {input: {features: 1, grid: [2, 3]}, steps: [scan: {order: columns, steps: [%s]}]}\n"
    model = seqblocks.build_text(text % "causal_conv: {kernel: 2, bias: false}")
    with torch.no_grad():
        model.scan.causal_conv.weight.copy_(torch.tensor([[[10.0, 1.0]]]))  # ten times the previous token, plus this
    found = model(torch.arange(1.0, 7.0).view(1, 6, 1))
    assert found.flatten().tolist() == [1.0, 42.0, 53.0, 14.0, 25.0, 36.0]  # columns 1 4, 2 5, 3 6


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_model_with_attention() -> None:
    """While torch.jit.trace runs, sizes are tensors, which torch's attention does not take for flags."""
    model = seqblocks.build("transformer_small", set={"dim": 16, "depth": 1}, device="cpu", seed=0).eval()
    x = torch.randint(256, (2, 9))
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x.flip(1)), model(x.flip(1)))


def test_functional_call_deepcopy_pickle_and_checkpointing() -> None:
    model = seqblocks.build_text(STREAM)
    x = torch.randn(2, 7, 8)
    y = model(x)
    torch.testing.assert_close(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)
    torch.testing.assert_close(copy.deepcopy(model)(x), y)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), y)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    model.load_state_dict(torch.load(saved, weights_only=True))
    inner = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    torch.testing.assert_close(inner, y)


def test_functional_call_reaches_owned_parameters() -> None:
    model = randomised(built(scan_text("[forward, reverse]", ", own: [causal_conv.bias]")))
    x = torch.randn(2, 15, 4, dtype=torch.float64)
    doubled = {name: 2 * p for name, p in model.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(model, doubled, (x,)), 2 * model(x))
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), model(x))


def test_drop_path_skips_samples_and_keeps_the_mean() -> None:
    text = """
seqblocks: 1
model: {input: {features: 4}, steps: [{residual: {drop_path: 0.25, steps: [{linear: {features: 4}}]}}]}
"""
    model = built(text).train()
    x = torch.randn(1, 1, 4, dtype=torch.float64).expand(4000, 2, 4)
    branch = model.residual.linear
    full = x + torch.nn.functional.linear(x, branch.weight, branch.bias)
    y = model(x)
    skipped = (y == x).all(-1).all(-1)
    # The mean of 4000 Bernoulli(1/4) draws: five standard deviations are 5 * sqrt(3/16/4000) = 0.034.
    assert abs(skipped.double().mean() - 0.25) < 0.035
    torch.testing.assert_close(y[~skipped] - x[~skipped], (full - x)[~skipped] / 0.75)
    torch.testing.assert_close(model.eval()(x), full)


def test_images_of_another_size_get_their_positions_interpolated() -> None:
    model = seqblocks.build("vil2_tiny", set={"dim": 8, "depth": 1, "classes": 3, "input.image.size": 32}).eval()
    assert model(torch.randn(2, 3, 48, 64)).shape == (2, 3)
    weight = model.position_embed.weight
    resized = torch.nn.functional.interpolate(weight.permute(0, 3, 1, 2), size=(3, 4), mode="bicubic")
    x = torch.zeros(1, 3, 48, 64)
    with torch.no_grad():
        model.patch_embed.bias.zero_()
        seen = {}
        model.position_embed.register_forward_hook(lambda _m, _i, out: seen.update(y=out))
        model(x)
    torch.testing.assert_close(seen["y"], resized.flatten(2).transpose(1, 2))


def test_clear_errors() -> None:
    model = built(STREAM)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    _, state = model(x, return_state=True)
    with pytest.raises(seqblocks.RunError, match=r"holds 2 sequences and the input 3"):
        model(torch.randn(3, 5, 8, dtype=torch.float64), state=state)
    with pytest.raises(seqblocks.RunError, match=r"is on meta and the input on cpu; move it with"):
        model(x, state=states.to(state, "meta"))
    with pytest.raises(seqblocks.RunError, match=r"does not belong to this model"):
        model(x, state={"first": {}})
    with pytest.raises(seqblocks.RunError, match=r"\[batch, seq, 8\], not \[2, 5, 7\]"):
        model(x[..., :7])
    with pytest.raises(seqblocks.RunError, match=r"resets must be bool of shape \[2, 5\]"):
        model(x, resets=torch.zeros(2, 5))
    backwards = seqblocks.build_text(scan_text("[forward, reverse]"))
    with pytest.raises(seqblocks.RunError, match=r"scan \(<text>:6:7\) cannot stream: .* forward and reverse"):
        backwards.init_state(1)
    with pytest.raises(seqblocks.RunError, match="cannot stream"):
        backwards.step(torch.randn(1, 4))


def test_layers_are_indexed_like_a_module_list() -> None:
    rest = built(STREAM).rest
    layers = [rest.get_submodule(str(at)) for at in range(2)]
    assert len(rest) == 2
    assert list(rest) == rest[:] == layers
    assert rest[0] is layers[0]
    assert rest[-1] is layers[1]
    with pytest.raises(IndexError):
        rest[2]


def test_state_helpers() -> None:
    model = built(STREAM)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    _, state = model(x, return_state=True)
    some = state["first"]["residual"]["scan"]["mlstm"]["C"]
    assert some.requires_grad
    assert not states.detach(state)["first"]["residual"]["scan"]["mlstm"]["C"].requires_grad
    picked = states.index_select(state, torch.tensor([2, 0]))
    y, _ = model.step(x[[2, 0], 0], picked)
    expected, _ = model.step(x[:, 0], state)
    torch.testing.assert_close(y, expected[[2, 0]])
    saved = io.BytesIO()
    torch.save(states.detach(state), saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=True)
    torch.testing.assert_close(model.step(x[:, 0], again)[0], expected)


def test_positions_stream_and_restart() -> None:
    text = """
seqblocks: 1
model: {input: {features: 4}, steps: [{position_embed: {length: 8}}]}
"""
    model = built(text)
    x = torch.zeros(2, 6, 4, dtype=torch.float64)
    resets = torch.zeros(2, 6, dtype=torch.bool)
    resets[0, 4] = True
    table = model.position_embed.weight[0]
    y, state = model(x, resets=resets, return_state=True)
    torch.testing.assert_close(y[0], table[[0, 1, 2, 3, 0, 1]])
    torch.testing.assert_close(y[1], table[:6])
    torch.testing.assert_close(model.step(x[:, 0], state)[0], table[[2, 6]])
    with pytest.raises(seqblocks.RunError, match="position 8 is past the 8"):
        model(torch.zeros(1, 9, 4, dtype=torch.float64))
    with pytest.raises(seqblocks.RunError, match="position 8 is past the 8"):  # the first one, not the last
        model(x, state=state)


def test_parameter_groups_separate_weights_from_gains_and_biases() -> None:
    model = built(STREAM)
    decayed, plain = model.parameter_groups(0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
    assert all(p.ndim > 1 for p in decayed["params"])


def test_reserved_names_include_all_attributes_of_modules() -> None:
    scans = [scan_text("[forward, reverse]", f", own: {own}") for own in ("all", "[causal_conv.weight]")]
    added = {"smart_apply"}  # transformers adds these to every module when it makes a model in the same process
    made = [built(text) for text in (STREAM, *scans)]
    for instance in made:
        for part in instance.modules():
            if isinstance(part, Primitive) or part._parameters:
                continue  # a leaf: it contains no steps
            public = {name for name in dir(part) if not name.startswith("_")} - set(part._modules) - added
            assert public <= ATTRIBUTES, f"{type(part).__name__}: {public - ATTRIBUTES}"
    assert {n for n in dir(nn.Module) if not n.startswith("_")} - added <= ATTRIBUTES


def test_words_that_torch_or_python_use_as_names() -> None:
    text = """
    seqblocks: 1
    blocks: {rows: {args: {lambda: int}, steps: [{linear: lambda}]}}
    model:
      input: {features: 4}
      steps:
        - linear: {features: 4, as: lambda}
        - silu: {as: type}
        - rows: {lambda: 4}
        - calc: {step: "del * x + type", learned: {del: 0.5}}
        - cell: {state: {global: {features: 4, start: 1, learned: true}}, steps: [{calc: {global: "global / 2 + x"}}]}
    """
    model = built(text)
    names = ["lambda_.weight", "lambda_.bias", "rows_.linear.weight", "rows_.linear.bias", "step_.del_"]
    assert [name for name, _ in model.named_parameters()] == [*names, "cell.start_global"]
    check_law(randomised(model), seq=9, cuts=(1, 4), resets=((0, 5),))
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    expected = model(x)
    gate = x @ model.lambda_.weight.T + model.lambda_.bias
    y = torch.nn.functional.silu(gate)
    y = model.step_.del_ * (y @ model.rows_.linear.weight.T + model.rows_.linear.bias) + y
    memory = model.cell.start_global.expand(2, 4)
    for t in range(6):
        memory = memory / 2 + y[:, t]
        torch.testing.assert_close(expected[:, t], memory)
    torch.testing.assert_close(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), expected)
    flat = built("\n".join(line for line in text.splitlines() if "cell" not in line))
    torch.testing.assert_close(torch.export.export(flat, (x,)).module()(x), flat(x))  # as code with these names
    torch.testing.assert_close(torch.compile(flat, backend="eager")(x), flat(x))


def test_print_reads_like_the_spec_and_collapses_layers() -> None:
    text = str(seqblocks.build("vil_tiny", device="meta"))
    assert "(head_norm): head_norm(heads=4, out=[batch, 196, 384])" in text
    assert "(proj_up): Linear(in_features=192, out_features=768, bias=False)" in text
    assert text.count("(head_norm)") == 2, "both kinds of layer should be shown once"
    assert "12 x" in text


def test_a_model_is_called_with_keywords_that_help_shows() -> None:
    names = list(inspect.signature(seqblocks.build_text(TIED).forward).parameters)
    assert names == ["x", "state", "return_state", "resets", "cu_seqlens", "grid", "inputs"]


def test_pooling_by_the_largest() -> None:
    """Vision Mamba's `max` applies the head to every token, then returns the largest score of each class."""
    text = "seqblocks: 1\nmodel: {input: {features: 4}, steps: [{linear: {features: 3}}, {pool: {mode: max}}]}"
    model = seqblocks.build_text(text)
    x = torch.randn(2, 5, 4)
    scores = x @ model.linear.weight.t() + model.linear.bias
    torch.testing.assert_close(model(x), scores.max(1).values)
    with pytest.raises(seqblocks.RunError, match="mode max reads the whole sequence"):
        model.init_state(1)


def test_modules_are_called_with_the_wires_that_their_nodes_read() -> None:
    """Arguments are the ports in order, then the wires that bodies capture. The second layer of a repeat captures its
    input."""
    model = built(
        """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - linear: {features: 4, as: first}
    - silu: {as: second}
    - repeat:
        name: layers
        times: 2
        steps:
          - add: {with: second}
          - parallel:
              branches: [{a: [{add: {with: first}}]}, {b: [{multiply: {by: second}}]}]
              merge: sum
    - residual: [{gate: {by: second}}]
"""
    )
    reads = {name: node.reads for name, node in _nodes(model.graph.nodes)}
    _, first, second = (model.graph.input, *(node.outputs[0] for node in model.graph.nodes[:2]))
    layers, residual = reads["layers"], reads["residual"]
    assert layers == (second, first)
    assert reads["layers.1.add"] == (model.graph.nodes[2].bodies["0"].result, second)
    assert reads["layers.0.parallel"][1:] == (first, second)
    assert residual == (model.graph.nodes[2].outputs[0], second)
    seen: dict[str, int] = {}
    for name, part in model.named_modules():
        if name in reads:
            part.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: len(args)}))
    model(torch.randn(2, 5, 4, dtype=torch.float64))
    assert seen == {name: len(values) for name, values in reads.items()}


def _nodes(nodes: list[graph.Node], path: str = "") -> Iterator[tuple[str, graph.Node]]:
    for node in nodes:
        yield graph.join(path, node.name), node
        for label, body in node.bodies.items():
            yield from _nodes(body.nodes, graph.join(path, node.name, label))

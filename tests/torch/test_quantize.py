"""Models with matrices in 8 bits: their results, what is quantized, streams, saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.checkpoint.convert import convert
from seqblocks.distributed import pipeline_stage, tensor_parallel
from seqblocks.errors import RunError, UsageError
from seqblocks.kernels.int8 import Int8Matrix
from seqblocks.model.quantize import quantized
from seqblocks.op import PRIMITIVES, primitive
from seqblocks.ops.linear import Linear

TEXT = """seqblocks: 1
use: [mamba, transformer]
model:
  input: {tokens: 96}
  steps:
    - embed: 32
    - repeat:
        name: layers
        times: 2
        steps: [{mamba_block: {dim: 32}}, {attention_layer: {dim: 32, heads: 2}}, {swiglu_layer: {dim: 32}}]
    - rms_norm
    - unembed: {bias: false, tie: embed}
"""
IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> seqblocks.SequenceModel:
    return seqblocks.build_text(TEXT, seed=0).eval()


def by_definition(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of both operands rounded to multiples of their largest value / 127, in float64."""

    def rounded(x: Tensor) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 127).double()
        return (x / scale.float()).round().double() * scale

    y = rounded(x) @ rounded(weight).T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 7, 5), (3, 64, 9), (40, 33, 128), (0, 4, 4), (2, 1, 1)])
def test_a_product_is_that_of_rounded_operands(tokens: int, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, inputs, generator=generator) * torch.logspace(-3, 3, tokens)[:, None]
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    matrix = Int8Matrix.of(weight)
    for b in (None, bias):
        found, expected = matrix.product(x, b), by_definition(x, weight, b)
        # integers are exact; three products by scales and a sum are rounded
        torch.testing.assert_close(found.double(), expected, rtol=4 * 2**-24, atol=4 * 2**-24 * inputs)
    assert (matrix.dequantized() - weight).abs().max() <= weight.abs().amax() / 127 / 2 * 1.001
    ids = torch.tensor([[0, outputs - 1]])
    assert torch.equal(matrix.rows(ids), matrix.dequantized()[ids])


def test_a_token_does_not_depend_on_the_others() -> None:
    matrix = Int8Matrix.of(torch.randn(70, 33, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(2, 90, 33, generator=torch.Generator().manual_seed(1))
    whole = matrix.product(x)
    for at in (0, 17, 89):
        assert torch.equal(matrix.product(x[:, at]), whole[:, at])


@pytest.mark.parametrize("inputs", [1, 3, 64, 770])
@pytest.mark.parametrize("tokens", [0, 1, 2, 16, 17])
def test_a_stream_computes_the_same_product(tokens: int, inputs: int) -> None:
    """In every bit, also where sums of two products leave 16 bits, and where a token is not finite or zero."""
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(40, inputs, generator=generator)
    weight[3:9] = 1.0
    matrix, bias = Int8Matrix.of(weight), torch.randn(40, generator=generator)
    x = torch.randn(tokens, inputs, generator=generator) * torch.logspace(-42, 30, tokens)[:, None]
    for at, value in enumerate([1.0, float("inf"), float("nan"), -1.0, 0.0][:tokens]):
        x[at, at % inputs :] = value
    for b in (None, bias):
        prepared = matrix.prepare(b)
        for part in (x, *x[:5].split(1)):
            assert torch.equal(prepared(part).nan_to_num(7.0), matrix.product(part, b).nan_to_num(7.0))


def negate_values(matrix: Int8Matrix) -> None:
    matrix.values.neg_()


def scale_in_place(matrix: Int8Matrix) -> None:
    matrix.scale.mul_(1.5)


def replace_scale(matrix: Int8Matrix) -> None:
    matrix.scale = matrix.scale * 1.5


def replace_values(matrix: Int8Matrix) -> None:
    matrix.values = -matrix.values


@pytest.mark.parametrize("change", [negate_values, scale_in_place, replace_scale, replace_values])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_stream_reads_changed_numbers(
    model: seqblocks.SequenceModel, change: Callable[[Int8Matrix], None], dtype: torch.dtype
) -> None:
    small = seqblocks.quantize(model.to(dtype), smallest=0)
    before, _ = small.step(IDS[:, 0])
    assert small.token_plan is not None
    change(small.layers[0].mamba_block.residual.mixer.in_proj.weight)
    after, _ = small.step(IDS[:, 0])
    expected, _ = copy.deepcopy(small).step(IDS[:, 0])
    assert not torch.equal(before, after)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_new_stream_reads_numbers_written_without_a_trace(
    model: seqblocks.SequenceModel, dtype: torch.dtype
) -> None:
    small = seqblocks.quantize(model.to(dtype), smallest=0)
    small.step(IDS[:, 0])
    for matrix in quantized(small).values():
        matrix.scale.data.mul_(1.5)
    small.init_state(1)
    assert torch.equal(small.step(IDS[:, 0])[0], copy.deepcopy(small).step(IDS[:, 0])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@torch.no_grad()
def test_a_model_without_other_parameters(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its dtype, and that of its states, is the one of its matrices; it streams from a plan."""
    steps = "[{embed: 16}, {shift: {by: 1}}, {unembed: {bias: false}}]"
    text = f"seqblocks: 1\nmodel: {{input: {{tokens: 96}}, steps: {steps}}}"
    small = seqblocks.quantize(seqblocks.build_text(text, dtype=dtype, seed=0).eval(), smallest=0)
    assert not list(small.parameters())
    seqblocks.save(small, tmp_path / "small")
    for each in (small, seqblocks.load(tmp_path / "small")):
        assert each.own_dtype() == each.some_tensor().dtype == dtype
        assert each.init_state(2)["shift"]["window"].dtype == dtype
        (_, state), whole = each.step(IDS[:, 0]), each(IDS[:, :2])
        y, _ = each.step(IDS[:, 1], state)
        assert each.token_plan is not None
        assert y.dtype == dtype
        torch.testing.assert_close(y, whole[:, 1], rtol=0, atol=0.03 * whole.abs().max().item())


def test_save_refuses_what_load_would_not_read(model: seqblocks.SequenceModel, tmp_path: Path) -> None:
    """An earlier folder stays as it is."""
    small = seqblocks.quantize(model, smallest=1000)
    seqblocks.save(small, tmp_path / "small")

    def refused(changed: seqblocks.SequenceModel, match: str) -> None:
        with pytest.raises(RunError, match=match):
            seqblocks.save(changed, tmp_path / "small")

    untied, replaced = copy.deepcopy(small), copy.deepcopy(small)
    untied.unembed.weight = copy.deepcopy(untied.unembed.weight)
    untied.unembed.weight.scale.mul_(2)
    refused(untied, r"ties unembed.weight to embed.weight.*call model.tie\(\)")
    untied.tie()
    assert untied.unembed.weight is untied.embed.weight
    replaced.layers[0].attention_layer.residual.qkv = torch.nn.Linear(32, 96)
    refused(replaced, "no longer matches its spec: .*qkv.bias")
    refused(copy.deepcopy(small).to("meta"), "is on the meta device")
    with torch.no_grad():
        assert torch.equal(seqblocks.load(tmp_path / "small")(IDS), small(IDS))


def test_initial_values_are_those_of_the_original(model: seqblocks.SequenceModel) -> None:
    with pytest.raises(RunError, match="initialise the original, then quantize it"):
        seqblocks.quantize(model, smallest=0).reset_parameters()


@pytest.mark.parametrize("split", [tensor_parallel, lambda model: pipeline_stage(model, 0, 2)])
def test_it_cannot_be_split_over_ranks(model: seqblocks.SequenceModel, split: Callable[..., object]) -> None:
    with pytest.raises(UsageError, match="takes no model with matrices in 8 bits"):
        split(seqblocks.quantize(model, smallest=0))


def test_transformers_runs_it_but_neither_saves_nor_loads_it(model: seqblocks.SequenceModel, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from seqblocks.hf import SeqblocksForCausalLM, wrap

    small = seqblocks.quantize(model, smallest=0)
    wrapped = wrap(small).eval()
    with torch.no_grad():
        assert torch.equal(wrapped(IDS).logits, small(IDS))
    made = wrapped.generate(IDS[:1], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(made[0, 24:], seqblocks.generate(small, IDS[:1], 3)[0])
    with pytest.raises(UsageError, match=r"seqblocks.save\(model.model, DIR\)"):
        wrapped.save_pretrained(tmp_path / "wrapped")
    assert not (tmp_path / "wrapped").exists()
    seqblocks.save(small, tmp_path / "small")
    for load in (SeqblocksForCausalLM.from_pretrained, lambda path: seqblocks.from_pretrained(path, small.spec)):
        with pytest.raises(UsageError, match=r"weights in 8 bits, which only seqblocks\.load reads"):
            load(tmp_path / "small")


def test_extreme_tokens() -> None:
    matrix = Int8Matrix.of(torch.cat([torch.zeros(1, 4), torch.full((1, 4), 1e30), torch.full((1, 4), 1e-30)]))
    assert torch.equal(matrix.product(torch.zeros(1, 4)), torch.zeros(1, 3))
    torch.testing.assert_close(matrix.product(torch.ones(1, 4)), torch.tensor([[0, 4e30, 4e-30]]))
    x = torch.tensor([[float("nan"), 1, 1, 1], [1, 1, 1, 1]])
    found = matrix.product(x)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_what_is_quantized(model: seqblocks.SequenceModel) -> None:
    """Neither the step sizes of the state space, nor norms; a tied matrix once."""
    found = quantized(seqblocks.quantize(model, smallest=0))
    layer = {
        "mamba_block.residual.mixer.in_proj.weight", "mamba_block.residual.mixer.x_proj.weight",
        "mamba_block.residual.mixer.out_proj.weight", "attention_layer.residual.qkv.weight",
        "attention_layer.residual.out.weight",
        *(f"swiglu_layer.residual.swiglu.{name}_weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    layers = {f"layers.{at}.{name}" for at in range(2) for name in layer}
    assert found.keys() == {"embed.weight", "unembed.weight", *layers}
    assert found["embed.weight"] is found["unembed.weight"]
    assert quantized(model) == {}


def test_a_copy_in_which_nothing_is_quantized_comes_with_a_warning(model: seqblocks.SequenceModel) -> None:
    sizes = (model.get_parameter(name).numel() for name in quantized(seqblocks.quantize(model, smallest=0)))
    with pytest.warns(UserWarning, match=f"smallest={max(sizes)} stores that one") as caught:
        assert quantized(seqblocks.quantize(model)) == {}
    assert caught[0].filename == __file__
    none = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 4}, steps: [silu]}")
    with pytest.warns(UserWarning, match="has no matrix"):
        seqblocks.quantize(none, smallest=0)


@pytest.mark.parametrize("smallest", [0, 3000])
def test_the_original_with_rounded_weights(model: seqblocks.SequenceModel, smallest: int) -> None:
    """Its logits differ by what rounding the inputs adds: 2^-8 of the largest, in each of some thirty products."""
    small = seqblocks.quantize(model, smallest=smallest)
    with torch.no_grad():
        found, before = small(IDS), model(IDS)
        for name, matrix in quantized(small).items():
            model.get_parameter(name).copy_(matrix.dequantized())
        expected = model(IDS)
    assert (expected - before).abs().max() > 1e-4
    assert (found - expected).abs().max() < 0.1 * expected.abs().max()
    torch.testing.assert_close(found, before, rtol=0, atol=0.1 * before.abs().max().item())


@pytest.mark.parametrize("smallest", [0, 3000])
def test_streams(model: seqblocks.SequenceModel, smallest: int) -> None:
    """Whole = chunks = steps, up to a few roundings of inputs that fall to the other side."""
    small = seqblocks.quantize(model, smallest=smallest)
    with torch.no_grad():
        whole = small(IDS)
        state, out = small.init_state(2), []
        for at in range(10):
            y, state = small.step(IDS[:, at], state)
            out.append(y[:, None])
        for part in (IDS[:, 10:11], IDS[:, 11:]):
            y, state = small(part, state=state, return_state=True)
            out.append(y)
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=0, atol=0.03 * whole.abs().max().item())
    assert seqblocks.generate(small, IDS[:1], max_new_tokens=3)


def test_it_saves_and_loads(model: seqblocks.SequenceModel, tmp_path: Path) -> None:
    small = seqblocks.quantize(model, smallest=1000)
    seqblocks.save(small, tmp_path / "small")
    seqblocks.save(model, tmp_path / "model")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "model")]
    assert sizes[0] < 0.5 * sizes[1]
    loaded = seqblocks.load(tmp_path / "small")
    assert quantized(loaded).keys() == quantized(small).keys()
    assert quantized(loaded)["embed.weight"] is quantized(loaded)["unembed.weight"]
    with torch.no_grad():
        assert torch.equal(loaded(IDS), small(IDS))
        assert torch.equal(loaded.step(IDS[:, 0])[0], small.step(IDS[:, 0])[0])


def test_models_made_in_inference_mode_are_as_others(model: seqblocks.SequenceModel, tmp_path: Path) -> None:
    """torch counts no changes of tensors that are made in that mode, so that a stream would run the modules."""
    with torch.inference_mode():
        built = seqblocks.build_model(model.spec)
        stored = seqblocks.quantize(built, smallest=1)
        seqblocks.save(stored, tmp_path / "a")
        for made in (built, stored, seqblocks.load(tmp_path / "a")):
            assert not any(x.is_inference() for x in (*made.parameters(), *made.buffers()))
    built(torch.zeros(1, 4, dtype=torch.long)).sum().backward()


def test_what_cannot_read_8_bits_says_so(model: seqblocks.SequenceModel, tmp_path: Path) -> None:
    seqblocks.save(seqblocks.quantize(model, smallest=1000), tmp_path / "small")
    for layout in ("seqblocks", "official"):
        with pytest.raises(UsageError, match=r"weights in 8 bits, which only seqblocks\.load reads"):
            convert(tmp_path / "small", layout, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gates_are_declared_by_their_ops() -> None:
    """Whatever lies between the map and the port, and in a block around them."""
    text = """seqblocks: 1
use: [xlstm, deltanet]
model:
  input: {features: 16}
  steps: [{mlstm_block: {dim: 16, heads: 2}}, {gated_deltanet_mixer: {dim: 16, heads: 2}}]
"""
    model = seqblocks.build_text(text, seed=0)
    names = quantized(seqblocks.quantize(model, smallest=0))
    assert any(name.endswith("proj_up.weight") for name in names)
    kept = {name for name, p in model.named_parameters() if p.dim() == 2} - names.keys()
    gates = {"mlstm_block.residual.mlstm_layer.cell.i.weight", "mlstm_block.residual.mlstm_layer.cell.f.weight"}
    gates |= {f"gated_deltanet_mixer.{name}_proj.weight" for name in ("a", "b")}
    assert gates <= kept


GATED = """seqblocks: 1
blocks:
  memory:
    args: {decay: {type: wire}}
    steps: [{log_decay: {from: decay, kind: exp, as: g}}, {gated_recurrence: {from: input, decay: g}}]
model:
  input: {features: 8}
  steps:
    - identity: {as: x}
    - linear: {from: x, features: 8, name: gate, as: w}
    - WHERE
    - linear: {features: 8, name: last}
"""


@pytest.mark.parametrize(
    "where", [
        "memory: {from: x, decay: w}",
        "residual: {from: x, steps: [{memory: {decay: w}}]}",
        "repeat: {from: x, times: 2, steps: [{memory: {decay: w}}]}",
        "repeat: {from: w, times: 2, steps: [{log_decay: {kind: exp, as: d}}, {gated_recurrence: {decay: d}}]}",
        "scan: {from: x, order: [forward, reverse], own: all, merge: sum, steps: [{memory: {decay: w}}]}",
        "parallel: {from: x, merge: sum, branches: [a: [{memory: {decay: w}}], b: [silu]]}",
    ],
)  # fmt: skip
def test_gates_are_followed_out_of_bodies(where: str) -> None:
    model = seqblocks.build_text(GATED.replace("WHERE", where), seed=0)
    assert quantized(seqblocks.quantize(model, smallest=0)).keys() == {"last.weight"}


def test_gates_in_both_directions_of_a_scan() -> None:
    steps = "[{linear: {features: 8, name: own}}, {log_decay: {kind: exp, as: g}}, {gated_recurrence: {decay: g}}]"
    where = f"scan: {{from: w, order: [forward, reverse], own: all, merge: sum, steps: {steps}}}"
    model = seqblocks.build_text(GATED.replace("WHERE", where), seed=0)
    assert quantized(seqblocks.quantize(model, smallest=0)).keys() == {"gate.weight", "last.weight"}


@pytest.mark.parametrize("how", ["tie", "share"])
def test_a_matrix_that_also_computes_a_gate_stays(how: str, tmp_path: Path) -> None:
    """A tie would be broken otherwise, and what is saved would differ from what is loaded."""
    where = "memory: {from: x, decay: w}"
    text = GATED.replace("WHERE", where).replace("name: last", f"name: last, {how}: gate")
    model = seqblocks.build_text(text, seed=0).eval()
    with pytest.warns(UserWarning, match="has no matrix"):
        small = seqblocks.quantize(model, smallest=0)
    seqblocks.save(small, tmp_path / "small")
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(seqblocks.load(tmp_path / "small")(x), model(x))


@torch.no_grad()
def test_steps_in_float64() -> None:
    text = GATED.replace("features: 8}\n", "tokens: 96}\n", 1).replace("identity: {as", "embed: {features: 8, as")
    model = seqblocks.build_text(text.replace("WHERE", "memory: {from: x, decay: w}"), dtype="float64", seed=0).eval()
    small = seqblocks.quantize(model, smallest=0)
    y, _ = small.step(IDS[:, 0])
    assert small.token_plan is not None
    torch.testing.assert_close(y, small(IDS[:, :1])[:, 0], rtol=0, atol=0.03 * y.abs().max().item())


def test_16_bits(model: seqblocks.SequenceModel) -> None:
    half = model.bfloat16()
    small = seqblocks.quantize(half, smallest=0)
    with torch.no_grad():
        found = small(IDS)
        assert found.dtype is torch.bfloat16
        assert (found - half(IDS)).abs().max() < 0.1 * half(IDS).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_primitive_with_another_forward_keeps_its_matrices(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a plug-in's, which multiplies its matrix by functions of torch."""
    monkeypatch.setattr("seqblocks.op.PRIMITIVES", dict(PRIMITIVES))
    monkeypatch.setattr("seqblocks.streaming.half.MIN_ELEMENTS", 1)

    @primitive("unit_rows")
    class UnitRows(Linear):
        """A linear map whose rows have length 1."""

        def forward(self, p: Any, call: Any, x: Any) -> Tensor:
            return x @ torch.nn.functional.normalize(p["weight"]).t() + p["bias"]

    text = "{seqblocks: 1, model: {input: {features: 8}, steps: [{unit_rows: 8}, {linear: 8}]}}"
    model = seqblocks.build_text(text, dtype=dtype, seed=0).eval()
    small = seqblocks.quantize(model, smallest=0)
    assert quantized(small).keys() == {"linear.weight"}
    x = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for each in (model, small):
        y, _ = each.step(x[:, 0])
        torch.testing.assert_close(y, model(x)[:, 0], rtol=0, atol=0.05 * y.abs().max().item())


def test_it_changes_nothing_of_the_original(model: seqblocks.SequenceModel) -> None:
    before = {name: x.clone() for name, x in model.state_dict().items()}
    small = seqblocks.quantize(model, smallest=0)
    with torch.no_grad():
        for x in small.state_dict().values():
            x.zero_()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_refusals(model: seqblocks.SequenceModel) -> None:
    with pytest.raises(UsageError, match='must be "int8"'):
        seqblocks.quantize(model, "int4")
    with pytest.raises(UsageError, match="needs a model from"):
        seqblocks.quantize(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    matrix = Int8Matrix.of(torch.ones(2, 2))
    with pytest.raises(RunError, match="computes no gradients"):
        matrix.product(torch.ones(1, 2, requires_grad=True))
    with pytest.raises(RunError, match="computes no gradients"):
        torch.func.jvp(matrix.product, (torch.ones(1, 2),), (torch.ones(1, 2),))

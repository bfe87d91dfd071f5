"""The kind of a wire determines its handling at run time: images, token ids, sequences and vectors."""

from __future__ import annotations

import itertools
import typing

import pytest
import torch

import seqblocks
from seqblocks.errors import Fault
from seqblocks.ops.pool import Mode
from seqblocks.parameters import INITIALISERS, Parameter, read_init
from seqblocks.runtime.call import Call
from seqblocks.runtime.initialise import draw
from seqblocks.testing import check_law, check_shapes


def built(*steps: str, input: str = "{features: 4}") -> seqblocks.SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {input}, steps: [{', '.join(steps)}]}}\n"
    return seqblocks.build_text(text, dtype=torch.float64)


# --- images have their features on the second axis

IMAGE = "{image: {size: [2, 3], channels: 4}}"
TWICE = "{parallel: {merge: %s, branches: [{a: []}, {b: []}]}}"


def test_images_are_joined_along_their_channels() -> None:
    model = built(TWICE % "concat", input=IMAGE)
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    assert model.spec.output is not None
    assert model.spec.output.axes == ("batch", 8, 2, 3)
    torch.testing.assert_close(model(x), torch.cat([x, x], 1))


@pytest.mark.parametrize("how", ["sum", "mean", "product"])
def test_images_are_merged_number_by_number(how: str) -> None:
    x = torch.randn(2, 4, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(built(TWICE % how, input=IMAGE)(x), {"sum": 2 * x, "mean": x, "product": x * x}[how])
    torch.testing.assert_close(built("{residual: {steps: []}}", input=IMAGE)(x), 2 * x)


def test_images_are_split_along_their_channels() -> None:
    tokens = "{features: 6, grid: [2, 5]}"
    x = torch.randn(2, 10, 6, dtype=torch.float64)
    image = x.transpose(1, 2).unflatten(2, (2, 5))
    last = "{parallel: {from: %s, branches: [{a: []}]}}"
    equal = "{to_image: {as: [p, q]}}"
    unequal = "{to_image: {as: {p: 1, q: 5}}}"
    torch.testing.assert_close(built(equal, last % "q", input=tokens)(x), image[:, 3:])
    torch.testing.assert_close(built(unequal, last % "p", input=tokens)(x), image[:, :1])


# --- several grids in one model


def test_each_step_sees_the_grid_of_its_own_tokens() -> None:
    """Two steps cut the same image; the wires of the first still have its rows and columns."""
    model = built(
        "{patch_embed: {name: coarse, patch: 2, features: 3, as: wide}}",
        "{patch_embed: {name: fine, from: input, patch: 1, features: 3}}",
        "conv2d",
        "{pool: {as: whole}}",
        "{conv2d: {name: second, from: wide}}",
        "{pool: {name: last}}",
        "{gate: {by: whole}}",
        input="{image: {size: [4, 6], channels: 2}}",
    )
    check_shapes(model)
    assert model(torch.randn(2, 2, 8, 6, dtype=torch.float64)).shape == (2, 3)


# --- steps with parameters for each row and column do not stream


def test_positions_over_a_grid_do_not_stream() -> None:
    model = built("position_embed", input="{features: 4, grid: [2, 3]}")
    with pytest.raises(seqblocks.RunError, match=r"position_embed \(.*\) cannot stream: it has a position for each"):
        model.init_state(1)
    flat = built("{position_embed: {length: 6}}", input="{features: 4, grid: [2, 3]}")
    check_law(flat, seq=6)


def test_a_model_that_only_passes_images_on_does_not_stream() -> None:
    model = built(TWICE % "sum", input=IMAGE)
    with pytest.raises(seqblocks.RunError, match=r"the input \(.*\) cannot stream: it is a whole image"):
        model.init_state(1)


def test_positions_after_a_dropped_grid_stream() -> None:
    """Downsampling drops the grid, so a frame is one position instead of all."""
    check_law(built("{downsample: {factor: 2}}", "position_embed", input="{features: 4, grid: [2, 4]}"), seq=4)


@pytest.mark.parametrize("steps", ["position_embed", "position_embed, {causal_conv: {kernel: 2}}"])
def test_positions_of_a_reverse_scan_count_from_its_end(steps: str) -> None:
    """The first position is that of the last token, whether alone or next to a step that must be flipped."""
    model = built(f"{{scan: {{order: reverse, steps: [{steps}]}}}}", input="{features: 4, length: 5}")
    x = torch.zeros(1, 5, 4, dtype=torch.float64)
    y = x + model.scan.position_embed.weight.flip(1)
    if "causal_conv" in steps:
        conv = model.scan.causal_conv
        own = {"weight": conv.weight, "bias": conv.bias}
        y = conv.op.forward(own, Call(training=False, reverse=True), y)[0]
    torch.testing.assert_close(model(x), y)


# --- token ids


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_token_numbers_of_every_whole_dtype(dtype: str) -> None:
    model = built("{embed: {features: 3}}", input="{tokens: 7}")
    tokens = torch.tensor([[0, 6, 3]])
    torch.testing.assert_close(model(tokens.to(getattr(torch, dtype))), model(tokens))
    if not dtype.startswith("u"):
        with pytest.raises(seqblocks.RunError, match="outside the vocabulary of 7"):
            model(-tokens.to(getattr(torch, dtype)))


def test_a_step_of_token_numbers_gives_one_a_sequence() -> None:
    model = built(input="{tokens: 7}")
    y, _ = model.step(torch.tensor([3, 4]), model.init_state(2))
    assert y.tolist() == [3, 4]
    check_law(model)


# --- models without parameters, and invalid calls

CARRIES = "{attention: {q: input, k: input, v: input, heads: 2, cache: 8}}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_state_has_the_dtype_of_a_model_without_parameters(dtype: torch.dtype) -> None:
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{CARRIES}]}}", dtype=dtype)
    assert model.init_state(1)["attention"]["k"].dtype == dtype
    assert model.float().init_state(1)["attention"]["k"].dtype == torch.float32
    assert not model.state_dict()


def test_mlstm_without_parameters_carries_float64() -> None:
    model = built("{mlstm: {q: input, k: input, v: input, i: input, f: input, heads: 4}}")
    assert model.init_state(1)["mlstm"]["C"].dtype == torch.float64


@pytest.mark.parametrize("mode", typing.get_args(Mode))
def test_an_empty_sequence_cannot_be_pooled(mode: str) -> None:
    with pytest.raises(seqblocks.RunError, match="at least one token, but the sequence is empty"):
        built(f"{{pool: {{mode: {mode}}}}}")(torch.zeros(2, 0, 4, dtype=torch.float64))


@pytest.mark.parametrize("size", ["x", 2.0, None, True, -1, torch.tensor([1, 2])])
def test_a_state_is_of_a_number_of_sequences(size: object) -> None:
    with pytest.raises(seqblocks.UsageError, match="batch_size must be a number of sequences"):
        built(CARRIES).init_state(size)  # type: ignore[arg-type]


def test_running_out_of_memory_is_an_error_of_the_package() -> None:
    model = built(CARRIES)
    with pytest.raises(
        seqblocks.RunError, match="cpu has not enough memory for the state of 1,000,000,000,000,000 sequences"
    ):
        model.init_state(10**15)
    with pytest.raises(seqblocks.RunError, match="has not enough memory for the state"):
        model.init_state(10**30)
    with pytest.raises(seqblocks.UnavailableError, match="cpu has not enough memory for the parameters"):
        built("{linear: {features: 10 ** 15}}")


# --- initialisers

EDGES = (0.0, 1e-18, 1e-9, 1.0, 1e9, 1e18)


def test_every_initialiser_that_is_accepted_draws_finite_numbers() -> None:
    """Each argument is at the limits of its range, in all combinations that the rules allow."""
    drawn = 0
    for name, known in INITIALISERS.items():
        for values in itertools.product(EDGES, repeat=len(known.arguments)):
            try:
                init = read_init(f"{name}({', '.join(map(repr, values))})" if values else name, {})
            except Fault:
                continue
            assert init is not None
            target = torch.full((3, 40), float("nan"))
            draw(target, "x", Parameter((3, 40), init), 0)
            assert torch.isfinite(target).all(), init
            drawn += 1
    assert drawn > 2 * len(INITIALISERS)


def test_values_beyond_the_range_of_float16_are_an_error() -> None:
    large = "{linear: {features: 2, init: {weight: constant(1e6)}}}"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{large}]}}"
    with pytest.raises(seqblocks.UsageError, match=r"constant\(1e\+06\) draws numbers for linear.weight that float16"):
        seqblocks.build_text(text, dtype=torch.float16)
    assert torch.isfinite(seqblocks.build_text(text, dtype=torch.bfloat16).linear.weight).all()

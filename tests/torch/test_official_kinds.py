"""Tensors that cannot be weights, and models that cannot be filled or saved: one clear error, and no changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import seqblocks
from seqblocks import load, save
from seqblocks.checkpoint import load_official
from tests.torch.odd import ODD
from tests.torch.saved import model, same

pytest.importorskip("safetensors", reason="an optional extra; the test extra installs it")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind not in ("expanded", "transposed")])
@pytest.mark.parametrize("name", ["up.weight", "down.weight"])
def test_official_weights_of_another_kind_change_nothing(kind: str, name: str) -> None:
    made, others = model(), dict(model(1).state_dict())
    given = ODD[kind]
    if name == "down.weight" and isinstance(given, Tensor) and not given.is_nested and given.layout != torch.sparse_csr:
        given = given.t()  # this one fits
    with pytest.raises(seqblocks.RunError):
        load_official(made, {**others, name: given})
    assert same(made, model())
    load_official(made, others)
    assert same(made, model(1))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("integer", r"up\.weight of the official weights is of torch\.int64, but weights must be float64, float32"),
        ("bool", r"is of torch\.bool, but weights"),
        ("fp8", r"is of torch\.float8_e4m3fn, but weights"),
        ("sparse", r"is sparse \(torch\.sparse_coo\): to_dense\(\) it first"),
        ("quantised", r"is quantised \(torch\.qint8\): dequantize\(\) it first"),
        ("nested", r"is nested: pad it"),
        ("none", r"is not a tensor, but NoneType"),
    ],
)
def test_official_weights_of_another_kind_are_named(kind: str, message: str) -> None:
    with pytest.raises(seqblocks.RunError, match=message):
        load_official(model(), {**model().state_dict(), "up.weight": ODD[kind]})


def test_a_count_is_no_weight() -> None:
    """A buffer may be a single integer; a parameter may not."""
    step = "calc: {y: a * input, learned: {a: 1.0}}"
    made = seqblocks.build_text(f"{{seqblocks: 1, model: {{input: {{features: 4}}, steps: [{step}]}}}}")
    (name,) = made.state_dict()
    with pytest.raises(seqblocks.RunError, match=r"is of torch\.int64, but weights"):
        load_official(made, {name: torch.tensor(3)})


def test_weights_without_storage_are_an_error() -> None:
    unallocated = torch.ones(6, 4)
    unallocated.untyped_storage().resize_(0)  # sharding leaves remote weights like this
    with pytest.raises(seqblocks.RunError, match=r"up\.weight of the official weights has no storage"):
        load_official(model(), {**model().state_dict(), "up.weight": unallocated})
    made = model()
    made.up.weight.untyped_storage().resize_(0)
    with pytest.raises(seqblocks.RunError, match=r"up\.weight has no storage"):
        load_official(made, model(1).state_dict())


def test_a_model_that_cannot_be_written_is_not_half_filled() -> None:
    made = model()
    made.down.weight = nn.Parameter(torch.ones(1).expand(4, 6))
    with pytest.raises(seqblocks.RunError, match=r"down\.weight is an expanded tensor"):
        load_official(made, model(1).state_dict())
    assert torch.equal(made.up.weight, model().up.weight)
    made = model()
    with torch.inference_mode():
        made.down.weight = nn.Parameter(torch.ones(4, 6), requires_grad=False)
    with pytest.raises(seqblocks.RunError, match=r"down\.weight was created in inference mode"):
        load_official(made, model(1).state_dict())
    assert torch.equal(made.up.weight, model().up.weight)


def test_weights_that_a_dtype_does_not_hold_are_an_error(tmp_path: Path) -> None:
    made = model()
    large = {**model(1).state_dict(), "up.weight": torch.full((6, 4), 1e300, dtype=torch.float64)}
    with pytest.raises(seqblocks.RunError, match=r"up\.weight overflow float32"):
        load_official(made, large)
    assert torch.equal(made.down.weight, model().down.weight)
    with torch.no_grad():
        made.up.weight.fill_(1e5)
    save(made, tmp_path / "a")
    with pytest.raises(seqblocks.RunError, match="overflow float16"):
        load(tmp_path / "a", dtype="float16")
    with torch.no_grad():
        made.up.weight.fill_(torch.inf)
    load_official(model(1).half(), made.state_dict())  # already infinite


def test_integers_are_not_saved(tmp_path: Path) -> None:
    made = model()
    made.down.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(seqblocks.RunError, match=r"down\.weight is of torch\.int8, but weights must be float64"):
        save(made, tmp_path / "m")


def test_a_part_of_a_larger_storage_is_saved_alone(tmp_path: Path) -> None:
    made = model()
    everything = torch.zeros(100_000)
    everything[:24] = made.down.weight.detach().flatten()
    made.down.weight = nn.Parameter(everything[:24].view(4, 6))
    save(made, tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").stat().st_size < 20_000
    assert same(load(tmp_path / "m"), made)


def test_nan_is_tied_to_nan(tmp_path: Path) -> None:
    steps = "[embed: {features: 4}, unembed: {bias: false, tie: embed}]"
    text = f"seqblocks: 1\nmodel: {{input: {{tokens: 5}}, steps: {steps}}}"
    made = seqblocks.build_text(text, device="meta").to_empty(device="cpu")  # which separates tied parameters
    table = torch.full((5, 4), float("nan"))
    with torch.no_grad():
        made.embed.weight.copy_(table)
        made.unembed.weight.copy_(table)
    save(made, tmp_path / "m")
    assert load(tmp_path / "m").embed.weight.isnan().all()

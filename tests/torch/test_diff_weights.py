"""`seqblocks diff` of saved models: the values of tensors, and which of them fit, against loading them."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import seqblocks
from seqblocks.architect.diff import diff
from seqblocks.checkpoint.values import differences
from seqblocks.model.quantize import quantized

NAME = "layers.1.mlstm_block.residual.mlstm_layer.proj_up.weight"
Run = Callable[..., subprocess.CompletedProcess[str]]


def saved(folder: Path, name: str = "mlstm_small", **overrides: int) -> str:
    seqblocks.save(seqblocks.build(name, set={"dim": 16, **overrides}, seed=1), folder)
    return str(folder)


def test_equal_weights_do_not_differ(tmp_path: Path, run_main: Run) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert differences(first, second) == []
    done = run_main("diff", first, second, "--weights", "--exit-code")
    assert done.returncode == 0
    assert "the values" in done.stdout


def test_the_values_of_one_tensor_differ(tmp_path: Path, run_main: Run) -> None:
    first = saved(tmp_path / "a")
    model = seqblocks.load(first)
    with torch.no_grad():
        model.get_parameter(NAME).mul_(-3)
    seqblocks.save(model, tmp_path / "b")
    (change,) = differences(first, tmp_path / "b")
    assert change.name == NAME
    assert math.isclose(change.relative, 4, rel_tol=1e-6)
    assert math.isclose(change.cosine, -1, rel_tol=1e-6)
    assert not diff(first, str(tmp_path / "b"))  # which does not compare values
    command = ("diff", first, str(tmp_path / "b"), "--weights")
    done = run_main(*command, "--exit-code")
    assert done.returncode == 1
    assert NAME in done.stdout
    (row,) = json.loads(run_main(*command, "--format", "json").stdout)["tensors"]
    assert row["name"] == NAME


def test_matrices_in_8_bits_are_compared_as_the_weights_that_they_stand_for(tmp_path: Path) -> None:
    first = saved(tmp_path / "a")
    small = seqblocks.quantize(seqblocks.load(first), smallest=0)
    seqblocks.save(small, tmp_path / "b")
    assert differences(tmp_path / "b", tmp_path / "b") == []
    found = {change.name: change.relative for change in differences(first, tmp_path / "b")}
    assert found.keys() == quantized(small).keys()
    assert all(0 < relative < 1 / 127 for relative in found.values())
    quantized(small)[NAME].scale.mul_(2)
    seqblocks.save(small, tmp_path / "c")
    (change,) = differences(tmp_path / "b", tmp_path / "c")
    assert (change.name, change.relative) == (NAME, 1)


def test_json_has_no_infinity(tmp_path: Path, run_main: Run) -> None:
    """A bias that was zero has no relative difference, and JSON no number for it."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    model = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 2}, steps: [{linear: 2}]}\n", seed=0)
    for folder, value in (("a", 0.0), ("b", 1.0)):
        with torch.no_grad():
            model.get_parameter("linear.bias").fill_(value)
        seqblocks.save(model, tmp_path / folder)
    done = run_main("diff", "a", "b", "--weights", "--format", "json", cwd=tmp_path)
    (row,) = json.loads(done.stdout, parse_constant=refuse)["tensors"]
    assert row == {"name": "linear.bias", "relative": None, "cosine": 0.0}


@pytest.mark.parametrize("overrides", [{"depth": 7}, {"heads": 8}, {"dim": 32}, {}])
def test_what_fits_is_what_loads(overrides: dict[str, int]) -> None:
    """A copy of each tensor of the same name and shape is accepted, and of no other."""
    small = {"dim": 16}
    found = diff("mlstm_small@dim=16", "mlstm_small@" + "@".join(f"{k}={v}" for k, v in {**small, **overrides}.items()))
    assert found.checkpoint is not None
    old, new = (seqblocks.build("mlstm_small", set=each).state_dict() for each in (small, {**small, **overrides}))
    assert {*found.checkpoint.fits} == {name for name in old if name in new and old[name].shape == new[name].shape}
    assert {*found.checkpoint.missing} == new.keys() - old.keys()
    assert {*found.checkpoint.unused} == old.keys() - new.keys()
    shapes = {name: (tuple(old[name].shape), tuple(new[name].shape)) for name in old.keys() & new.keys()}
    assert found.checkpoint.reshaped == {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}

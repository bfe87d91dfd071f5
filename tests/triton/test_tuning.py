"""Any launch that tuning may choose computes the same, and the search keeps to its rules."""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seqblocks.errors import BackendError
from seqblocks.kernels import (
    causal_conv,
    causal_conv_triton,
    headwise_linear,
    headwise_linear_triton,
    mlstm,
    mlstm_triton,
    selective_scan,
    selective_scan_triton,
    shelf,
    tuning,
    use_autotune,
)
from tests.triton.compare import draw, interpreted, outputs_and_gradients
from tests.triton.test_mlstm import GRADIENT

GIVEN: dict[str, Any] = {
    "mlstm": (mlstm, mlstm_triton, {
        "q": draw(1, 40, 1, 70), "k": draw(1, 40, 1, 70, seed=1), "v": draw(1, 40, 1, 40, seed=2),
        "i": draw(1, 40, 1, seed=3), "f": draw(1, 40, 1, seed=4),
    }),
    "selective_scan": (selective_scan, selective_scan_triton, {
        "u": draw(1, 35, 20), "dt": draw(1, 35, 20, seed=1), "A": -draw(20, 4, seed=2).exp(),
        "B": draw(1, 35, 4, seed=3), "C": draw(1, 35, 4, seed=4),
    }),
    "causal_conv": (causal_conv, causal_conv_triton, {"x": draw(2, 35, 70), "weight": draw(70, 1, 4, seed=1)}),
    "headwise_linear": (headwise_linear, headwise_linear_triton, {"x": draw(35, 60), "weight": draw(15, 4, 4, seed=1)}),
}


@interpreted
@pytest.mark.parametrize("name", GIVEN)
def test_every_launch_on_an_axis_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, module, given = GIVEN[name]
    leaves = {key: x.float().requires_grad_() for key, x in given.items()}

    def everything() -> dict[str, torch.Tensor]:
        return outputs_and_gradients(kernel, leaves, {}, {"backend": "triton"})

    wanted = everything()
    tiles = {key: values for key, values in module.AXES.items() if not key.startswith("num_")}  # what it can tell apart
    for change in ({key: value} for key, values in tiles.items() for value in (values[0], values[-1])):
        monkeypatch.setattr(tuning, "launch", functools.partial(changed, change))
        for what, found in everything().items():
            # both orders of summation are within the bar of the kernels' own tests
            assert (found - wanted[what]).abs().max() <= 2 * GRADIENT * wanted[what].abs().max(), (change, what)


def changed(change: tuning.Tile, kernel: str, about: Any, x: Any, static: tuning.Tile, axes: Any, go: Any) -> Any:
    return go({**static, **change})


STATIC = {"BT": 16, "num_warps": 4}
AXES = {"BT": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)}


class Device:
    """Launches that take a known time; some compute something else, some do not compile."""

    def __init__(self, wrong: Any = (), broken: Any = ()) -> None:
        self.tile, self.wrong, self.broken, self.timed = STATIC, wrong, broken, 0

    def go(self, tile: tuning.Tile) -> list[torch.Tensor]:
        if tile in self.broken:
            raise RuntimeError("out of resource")
        self.tile = tile
        return [torch.ones(3) * (2 if tile in self.wrong else 1)]

    def milliseconds(self, call: Any) -> float:
        call()
        self.timed += 1
        return abs(self.tile["BT"] - 64) + abs(self.tile["num_warps"] - 1) + 1.0


def test_the_search_walks_as_long_as_it_helps() -> None:
    device = Device()
    assert tuning.search(STATIC, AXES, device.go, device.milliseconds) == {"BT": 64, "num_warps": 1}
    assert device.timed <= 8


def test_the_search_does_not_take_what_is_wrong_or_does_not_run() -> None:
    device = Device(wrong=[{"BT": 64, "num_warps": 4}], broken=[{"BT": 32, "num_warps": 2}])
    assert tuning.search(STATIC, AXES, device.go, device.milliseconds) == {"BT": 32, "num_warps": 4}


def test_the_search_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(tuning.time, "monotonic", lambda: float(next(clock)))
    device = Device()
    assert tuning.search(STATIC, AXES, device.go, device.milliseconds, seconds=1.5) == {"BT": 32, "num_warps": 4}


def test_parts_of_sums_are_compared_by_their_sum() -> None:
    assert tuning._agree(torch.ones(2, 5), torch.ones(5) * 2)
    assert not tuning._agree(torch.ones(2, 5), torch.ones(5))
    assert tuning._agree(torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("inf")]))
    assert not tuning._agree(torch.tensor([float("nan")]), torch.tensor([1.0]))


@pytest.fixture
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that is not there, and a cache of its own."""
    monkeypatch.setenv("SEQBLOCKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shelf, "here", lambda op, index: ("a device", "triton 3", "digest of " + op))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tuning._shelf.forget()
    return tmp_path / "cache" / "tiles.json"


X: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))


def launched(device: Device, x: Any = X, size: int = 1) -> tuning.Tile:
    tuning.launch("mlstm.states", (size,), x, STATIC, AXES, device.go)
    return device.tile


def test_modes(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(tuning, "_milliseconds", device.milliseconds)
    best = {"BT": 64, "num_warps": 1}
    assert launched(device) == STATIC
    with use_autotune("cached"):
        assert launched(device) == STATIC
    assert device.timed == 0
    assert not somewhere.exists()
    monkeypatch.setenv("SEQBLOCKS_AUTOTUNE", "on")
    assert launched(device, x=SimpleNamespace(is_cuda=False)) == STATIC
    assert launched(device) == best
    timed = device.timed
    assert launched(device) == best
    assert device.timed == timed
    tuning._shelf.forget()  # as another process
    with use_autotune("cached"):
        assert launched(device) == best
        assert launched(device, size=2) == STATIC
    with use_autotune("off"):
        assert launched(device) == STATIC
    assert json.loads(somewhere.read_text()) == {"mlstm.states|1|a device|triton 3|digest of mlstm": best}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert launched(device, size=2) == STATIC


def test_the_mode_holds_in_the_threads_of_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEQBLOCKS_AUTOTUNE", raising=False)
    with use_autotune("on"), ThreadPoolExecutor() as pool:
        assert pool.submit(tuning.autotune_mode).result() == "on"
    assert tuning.autotune_mode() == "off"


def test_what_others_found_stays(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(tuning, "_milliseconds", device.milliseconds)
    with use_autotune("on"):
        launched(device)
        somewhere.write_text('{"other": {"BT": 1}}')
        launched(device, size=2)
    assert len(json.loads(somewhere.read_text())) == 3
    assert [path.name for path in somewhere.parent.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"b": "c"}}'])
def test_a_cache_that_is_none(text: str, somewhere: Path) -> None:
    somewhere.parent.mkdir()
    somewhere.write_text(text)
    with use_autotune("cached"), pytest.warns(UserWarning, match="not a record of tuned kernels"):
        assert launched(Device()) == STATIC
    with use_autotune("cached"), warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        launched(Device())


def test_a_cache_that_cannot_be_written(somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(tuning, "_milliseconds", device.milliseconds)
    somewhere.parent.write_text("a file where the folder should be")
    with use_autotune("on"), pytest.warns(UserWarning, match="not kept|not a record"):
        assert launched(device)["BT"] == 64


def test_a_mode_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="off, cached, on"), use_autotune("always"):
        pass
    monkeypatch.setenv("SEQBLOCKS_AUTOTUNE", "yes")
    with pytest.raises(BackendError, match="'yes'"):
        tuning.autotune_mode()


@pytest.mark.parametrize("record", ['{"a": {"BT": 0}}', '{"a": {"BT": null}}', '{"a": {"BT": 1e400}}', "[" * 100_000])
def test_a_record_of_no_launch(record: str, somewhere: Path) -> None:
    somewhere.parent.mkdir()
    somewhere.write_text(record)
    with pytest.warns(UserWarning, match="is not a record of tuned kernels"):
        assert tuning._shelf.get("a") is None


def test_a_record_of_other_numbers_changes_none_that_the_kernel_lacks(
    somewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that another version wrote."""
    monkeypatch.setattr(shelf, "here", lambda op, index: ("a device",))
    somewhere.parent.mkdir()
    somewhere.write_text('{"op.way|a device": {"BT": 4, "BQ": 9}}')
    with use_autotune("cached"):
        found: list[Any] = []
        x: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
        tuning.launch("op.way", (), x, {"BT": 2, "num_warps": 1}, {}, lambda tile: found.append(tile) or [])
    assert found == [{"BT": 4, "num_warps": 1}]


def test_seconds_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQBLOCKS_AUTOTUNE_SECONDS", "20s")
    with pytest.raises(BackendError, match="'20s' is no number of seconds"):
        tuning.search({"BT": 1}, {}, lambda tile: [], lambda call: 1.0)


def test_no_home_and_nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEQBLOCKS_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert shelf.folder().name == "seqblocks"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SEQBLOCKS_CACHE", "~/mine")
    assert shelf.folder() == tmp_path / "mine"
    tuning._shelf.keep("a", {"BT": 1})
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["tiles.json"]

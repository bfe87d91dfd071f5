"""What a form gets wrong on a device is found before it is used, told, remembered, and stepped around."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seqblocks import kernels
from seqblocks.errors import BackendError
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch import self_check, shelf
from seqblocks.kernels.selective_scan import triton as selective_scan_triton
from tests.triton.compare import half, interpreted

CPU = {"device": "cpu", "dtype": torch.float32}
FACTS: dict[str, dict[str, Any]] = {
    "mlstm": {"head_dims": (16, 20), "input_gate": "exp", "resets": True, "reverse": True},
    "selective_scan": {"states": 4, "width": 8, "resets": True, "reverse": False},
    "causal_conv": {"width": 8, "taps": 3, "resets": True, "reverse": True},
    "headwise_linear": {"block": (4, 2, 3)},
    "head_norm": {"heads": 2, "width": 10},
    "centaurus": {"channels": 4, "substates": 3, "resets": True, "reverse": True},
    "slstm": {"heads": 2, "head_dim": 4, "resets": True, "reverse": True},
}


def example(op: str) -> self_check.Example:
    found = dispatch._ops[op]["triton"].example
    assert found is not None
    return found


def test_every_triton_form_has_an_example() -> None:
    forms = {op for op, forms in dispatch._ops.items() if "triton" in forms}
    assert forms == set(FACTS) == {op for op in forms if dispatch._ops[op]["triton"].example}


@interpreted
@half(
    ("op", FACTS),
    ("dtype", [torch.float32, torch.bfloat16]),
)
def test_sound_forms_pass(op: str, dtype: torch.dtype) -> None:
    assert self_check.fault(example(op), {**CPU, "dtype": dtype, **FACTS[op]}) == ""


@interpreted
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda y: y * 1.01, "its output is off by"),
        (lambda y: y * float("nan"), "its output is off by nan"),
        (lambda y: y + (y - y.detach()), "its gradient of"),
    ],
)
def test_a_wrong_one_is_told_apart(wrong: Callable[..., Any], told: str) -> None:
    right = example("headwise_linear")

    def spoilt(**facts: Any) -> Any:
        function, *rest = right(**facts)

        def changed(backend: str, **x: Any) -> Any:
            y = function(**x, backend=backend)
            return wrong(y) if backend == "triton" else y

        return changed, *rest

    assert told in self_check.fault(spoilt, {**CPU, **FACTS["headwise_linear"]})


@interpreted
def test_every_part_of_a_state_is_compared() -> None:
    """The last of them is not the only one."""
    right = example("slstm")

    def spoilt(**facts: Any) -> Any:
        function, *rest = right(**facts)

        def changed(backend: str, **x: Any) -> Any:
            y, (h, c, n, m) = function(**x, backend=backend)
            return y, (h, c * 1.1 if backend == "triton" else c, n, m)

        return changed, *rest

    assert "last state, part 2, is off by" in self_check.fault(spoilt, {**CPU, **FACTS["slstm"]})


@interpreted
def test_launches_of_large_calls_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is too short for segments, and still they are found to be wrong."""

    def nothing(cut: Any, *args: Any) -> torch.Tensor:
        return torch.zeros(cut.batch * cut.K, cut.N, cut.E)

    monkeypatch.setattr(selective_scan_triton._Cut, "starts", nothing)
    facts = {**CPU, **FACTS["selective_scan"], "resets": False}
    assert "is off by" in self_check.fault(example("selective_scan"), facts)


def test_one_that_does_not_run_is_told_too() -> None:
    def broken(**facts: Any) -> Any:
        def function(x: Any, backend: str) -> Any:
            if backend == "triton":
                raise RuntimeError("out of resource: shared memory\nand more")
            return x

        return function, {"x": torch.ones(2)}, {}

    with pytest.raises(self_check.Passing, match="out of resource: shared memory"):
        self_check.fault(broken, CPU)


def test_an_error_without_a_message_is_one_too() -> None:
    def broken(**facts: Any) -> Any:
        def function(x: Any, backend: str) -> Any:
            assert backend != "triton"
            return x

        return function, {"x": torch.ones(2)}, {}

    with pytest.raises(self_check.Passing, match="AssertionError"):
        self_check.fault(broken, CPU)


def test_without_room_for_the_definition_nothing_is_said() -> None:
    def large(**facts: Any) -> Any:
        def function(x: Any, backend: str) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        return function, {"x": torch.ones(2)}, {}

    with pytest.raises(self_check.Passing, match=r"^$"):
        self_check.fault(large, CPU)


@pytest.fixture
def a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device that is not there; returns what was checked on it. The next fault is the environment's FAULT."""
    checked: list[str] = []
    monkeypatch.setenv("SEQBLOCKS_CACHE", str(tmp_path))
    monkeypatch.setattr(shelf, "here", lambda op, index: ("a device", "triton 3", "digest"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(self_check, "fault", lambda example, facts: checked.append(facts["dtype"]) or "it is wrong")
    self_check.forget()
    return checked


def test_once_and_kept(a_device: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"device": "cuda", "dtype": torch.float32, "asked": "auto", **FACTS["headwise_linear"]}

    def verdict(**change: Any) -> str:
        return self_check.verdict("headwise_linear", example("headwise_linear"), {**facts, **change})

    with pytest.warns(UserWarning, match="headwise_linear is not used here: it is wrong"):
        assert verdict() == "it is wrong"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict() == verdict(asked="triton") == "it is wrong"
        self_check.forget()  # as another process
        assert verdict() == "it is wrong"
        assert verdict(device="cpu") == ""
        monkeypatch.setenv("SEQBLOCKS_SELF_CHECK", "0")
        assert verdict() == ""
        monkeypatch.delenv("SEQBLOCKS_SELF_CHECK")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert verdict(dtype=torch.float16) == ""
    assert a_device == [torch.float32]
    kept = json.loads((tmp_path / "checked.json").read_text())
    assert [*kept.values()] == ["it is wrong"]


def test_what_may_pass_is_not_kept(a_device: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(example: Any, facts: dict[str, Any]) -> str:
        a_device.append(facts["dtype"])
        raise self_check.Passing("it does not run (no compiler)")

    monkeypatch.setattr(self_check, "fault", fault)
    facts = {"device": "cuda", "dtype": torch.float32, "asked": "auto", **FACTS["headwise_linear"]}
    with pytest.warns(UserWarning, match="no compiler"):
        first = self_check.verdict("headwise_linear", example("headwise_linear"), facts)
    assert first == self_check.verdict("headwise_linear", example("headwise_linear"), facts)
    assert "no compiler" in first
    assert a_device == [torch.float32]
    assert not (tmp_path / "checked.json").exists()


@interpreted
@pytest.mark.parametrize("around", ["autocast", "checkpoint", "default device", "vmap"])
def test_the_callers_context_is_none_of_the_checks(
    around: str, a_device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    self_check.forget()
    kept: list[str] = []
    monkeypatch.setattr(shelf, "here", lambda op, index: ("a device", "triton 3", around))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(self_check._shelf, "keep", lambda name, value: kept.append(value))
    facts = {**CPU, "asked": "triton", **FACTS["headwise_linear"]}
    right = example("headwise_linear")

    def f(x: torch.Tensor) -> torch.Tensor:
        verdict = self_check.verdict("headwise_linear", lambda **_: right(**facts), {**facts, "device": "cuda"})
        assert verdict == ""
        return x.sin().sin()

    check = self_check.fault
    monkeypatch.setattr(self_check, "fault", lambda example, facts: check(example, {**facts, "device": "cpu"}))
    x = torch.ones(3, 2, requires_grad=True)
    if around == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            f(x)
    elif around == "checkpoint":
        torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]
    elif around == "default device":
        with torch.device("meta"):
            f(x)
    else:
        torch.func.vmap(f)(x.detach())
    assert kept[0] == ""


def test_nothing_is_checked_within_a_backward_pass(a_device: list[str]) -> None:
    """Its own backward would wait for the one under way, on a device for ever."""
    facts = {"device": "cuda", "dtype": torch.float32, "asked": "auto", **FACTS["headwise_linear"]}
    told: list[str] = []

    def hook(grad: torch.Tensor) -> None:
        told.append(self_check.verdict("headwise_linear", example("headwise_linear"), facts))

    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert told == [""]
    assert a_device == []
    with pytest.warns(UserWarning, match="it is wrong"):
        self_check.verdict("headwise_linear", example("headwise_linear"), facts)
    (x * 2).sum().backward()  # type: ignore[no-untyped-call]
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert told == ["", "it is wrong"]  # what is known holds there too: a checkpoint computes again by the same form


def test_the_device_of_the_tensors_is_checked(a_device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current one."""
    monkeypatch.setattr(shelf, "here", lambda op, index: (f"device {index}", "triton 3", "digest"))
    facts = {"device": "cuda", "dtype": torch.float32, "asked": "auto", **FACTS["headwise_linear"]}

    def verdict(index: int | None) -> str:
        return self_check.verdict("headwise_linear", example("headwise_linear"), {**facts, "index": index})

    for index in (0, 1):
        with pytest.warns(UserWarning, match="it is wrong"):
            verdict(index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict(None) == verdict(1) == "it is wrong"
    assert len(a_device) == 2


def test_a_record_that_is_no_text_is_left_out(a_device: list[str], tmp_path: Path) -> None:
    (tmp_path / "checked.json").write_text('{"a name": null}')
    with pytest.warns(UserWarning, match="is not a record of checked kernels"):
        assert self_check._shelf.get("a name") is None


def test_dispatch_steps_around_it_and_says_so(a_device: list[str]) -> None:
    facts = {"device": "cuda", "dtype": torch.float32, **FACTS["headwise_linear"]}
    with pytest.warns(UserWarning, match="not used here"):
        run = dispatch.choose("headwise_linear", None, **facts)
    assert run is dispatch._ops["headwise_linear"]["torch"].run
    told = "it failed its check on this device: it is wrong"
    assert kernels.fallbacks()["headwise_linear"] == {"triton": told}
    with pytest.raises(BackendError, match=told):
        dispatch.choose("headwise_linear", "triton", **facts)
    assert a_device == [torch.float32]
    assert dispatch.why("headwise_linear", **facts)[0].can  # who only asks causes no check


def test_what_auto_passed_over_is_remembered() -> None:
    x = torch.ones(2, 3, 8)
    kernels.head_norm(x, 2)
    assert "needs a CUDA or ROCm device" in kernels.fallbacks()["head_norm"]["triton"] or (
        "interpreter" in kernels.fallbacks()["head_norm"]["triton"]
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: kernels.headwise_linear(x, torch.ones(4, 2, 2)), fullgraph=True, backend="eager")
    compiled(x)
    assert "triton" in kernels.fallbacks()["headwise_linear"]


@interpreted
@pytest.mark.parametrize("how", ["compile", "export"])
def test_a_compiler_causes_the_check_and_an_export_does_not(
    how: str, a_device: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    facts = FACTS["headwise_linear"]
    monkeypatch.undo()
    self_check.forget()
    monkeypatch.setattr(shelf, "here", lambda op, index: ("a device", "triton 3", how))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(self_check._shelf, "keep", lambda name, value: found.append(value))
    check = self_check.fault
    monkeypatch.setattr(self_check, "fault", lambda example, facts: check(example, {**facts, "device": "cpu"}))

    class Caller(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dispatch.choose("headwise_linear", None, device="cuda", dtype=torch.float32, **facts)
            return x + 1

    torch._dynamo.reset()
    if how == "compile":
        torch.compile(Caller(), fullgraph=True, backend="eager")(torch.ones(2))
    else:
        torch.export.export(Caller(), (torch.ones(2),), strict=False)
    assert found == ([""] if how == "compile" else [])

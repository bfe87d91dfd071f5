"""Faults of a Triton implementation on a device are found before it is used, reported, recorded, and avoided."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from seqblocks import kernels
from seqblocks.errors import BackendError
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch import registry, self_check
from seqblocks.kernels.selective_scan.triton import launch as selective_scan_triton
from tests.kernels.conformance import INTERPRETED
from tests.triton import broken

CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
FACTS: dict[str, dict[str, Any]] = {
    "mlstm": {"head_dims": (16, 20), "input_gate": "exp", "resets": True, "reverse": True},
    "selective_scan": {"states": 4, "width": 8, "resets": True, "reverse": False},
    "causal_conv": {"width": 8, "taps": 3, "resets": True, "reverse": True},
    "headwise_linear": {"block": (4, 2, 3)},
    "head_norm": {"heads": 2, "width": 10},
    "residual_norm": {"width": 10, "residual": True, "one_plus": True},
    "centaurus": {"channels": 4, "substates": 3, "resets": True, "reverse": True},
    "slstm": {"heads": 2, "head_dim": 4, "resets": True, "reverse": True},
    "linear_attention": {"widths": (16, 20), "rule": "delta", "decay": "key", "resets": True},
}


def example(op: str) -> Any:
    return dispatch.implementation(op, "triton").example


def fault(op: str, other: Any = None, **change: Any) -> str:
    """Return the finding of an op's check on the CPU, with its example or another."""
    with with_example(op, other or example(op)):
        found, lasting = self_check.check(self_check.KernelCall(op, {**CPU, **FACTS[op], **change}))
    assert lasting
    return found


def with_example(op: str, other: Any) -> Any:
    return mock.patch.dict(registry.OPS[op], triton=dispatch.implementation(op, "triton")._replace(example=other))


def test_every_triton_implementation_has_an_example() -> None:
    found = {op for op in registry.OPS if "triton" in registry.OPS[op]} - {"broken"}
    assert found == set(FACTS) == {op for op in found if example(op)}


# ------------------------------------------------------------------------------
# What the check finds


SLOW = {  # a second or more in one dtype
    "linear_attention": torch.bfloat16, "centaurus": torch.float32, "causal_conv": torch.float32,
    "mlstm": torch.float32, "slstm": torch.bfloat16, "selective_scan": torch.bfloat16,
}  # fmt: skip


def sound() -> Iterator[Any]:
    """Yield each op with one dtype, and with the other one, which is long: test_conformance.py compares both."""
    dtypes = (torch.float32, torch.bfloat16)
    for at, op in enumerate(FACTS):
        first = SLOW.get(op, dtypes[at % 2])
        marks = (pytest.mark.slow if op in SLOW else (), pytest.mark.long)
        for dtype in dtypes:
            yield pytest.param(op, dtype, marks=marks[dtype != first], id=f"{op}-{dtype}")


@INTERPRETED
@pytest.mark.parametrize(("op", "dtype"), [*sound()])
def test_sound_implementations_pass(op: str, dtype: torch.dtype) -> None:
    assert fault(op, dtype=dtype) == ""


@INTERPRETED
@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (lambda y: y * 1.01, "its output is off by"),
        (lambda y: y * float("nan"), "its output is off by nan"),
        (lambda y: y + (y - y.detach()), "its gradient of"),
    ],
)
def test_a_wrong_one_is_found(wrong: Callable[..., Any], found: str) -> None:
    right = example("headwise_linear")

    def changed_example(**facts: Any) -> Any:
        function, *rest = right(**facts)

        def changed(backend: str, **x: Any) -> Any:
            y = function(**x, backend=backend)
            return wrong(y) if backend == "triton" else y

        return changed, *rest

    assert found in fault("headwise_linear", changed_example)


@INTERPRETED
def test_every_part_of_a_state_is_compared() -> None:
    """States with several parts are compared completely, not only in the last part."""
    right = example("slstm")

    def changed_example(**facts: Any) -> Any:
        function, *rest = right(**facts)

        def changed(backend: str, **x: Any) -> Any:
            y, (h, c, n, m) = function(**x, backend=backend)
            return y, (h, c * 1.1 if backend == "triton" else c, n, m)

        return changed, *rest

    assert "last state, part 2, is off by" in fault("slstm", changed_example)


@INTERPRETED
@pytest.mark.parametrize(
    "sizes", [{"batch": 1, "length": 1 << 16}, pytest.param(None, marks=pytest.mark.slow)]
)
def test_the_launches_of_a_large_call_are_checked(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is too short for segments, but wrong segments are still found; also where no size is known."""

    def nothing(cut: Any, *args: Any) -> torch.Tensor:
        return torch.zeros(cut.batch * cut.K, cut.N, cut.E)

    monkeypatch.setattr(selective_scan_triton._Segments, "starts", nothing)
    monkeypatch.setattr(selective_scan_triton.common, "processors", lambda x: 132)
    assert fault("selective_scan", resets=False) == ""
    facts = {**CPU, **FACTS["selective_scan"], "resets": False}
    assert "is off by" in self_check.check(self_check.KernelCall("selective_scan", facts, sizes=sizes))[0]


@INTERPRETED
def test_mixed_dtypes_are_checked_as_they_come() -> None:
    seen: list[torch.dtype] = []
    right = example("headwise_linear")

    def noted(**facts: Any) -> Any:
        function, *rest = right(**facts)

        def noting(x: torch.Tensor, weight: torch.Tensor, backend: str) -> Any:
            seen.extend([x.dtype, weight.dtype])
            return function(x, weight, backend=backend)

        return noting, *rest

    dtypes = {"x": torch.bfloat16, "weight": torch.float32, "bias": None}
    call = self_check.KernelCall("headwise_linear", {**CPU, **FACTS["headwise_linear"]}, dtypes)
    with with_example("headwise_linear", noted):
        assert self_check.check(call) == ("", True)
    assert set(zip(seen[2::2], seen[3::2], strict=True)) == {(torch.bfloat16, torch.float32)}


# ------------------------------------------------------------------------------
# In a process of its own


def check(how: str) -> tuple[str, bool]:
    return self_check.run_in_subprocess(self_check.KernelCall("broken", {**CPU, "how": how}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "found", "lasting"),
    [
        pytest.param("right", "", True, marks=pytest.mark.long),  # test_a_real_implementation_is_checked_there
        ("wrong", "its output is off by 0.1 on an example whose largest value is 2", True),
        ("abort", "its check crashed (exit status -6", True),
        pytest.param("killed", "its check crashed (exit status -9", False, marks=pytest.mark.slow),
    ],
)
def test_a_crash_in_a_check_does_not_affect_other_processes(how: str, found: str, lasting: bool) -> None:
    fault, kept = check(how)
    assert fault.startswith(found) if found else not fault
    assert kept is lasting


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("raise", "it does not run (RuntimeError: out of resource: shared memory)"),
        ("no memory", "its reference cannot be computed here (OutOfMemoryError: CUDA out of memory)"),
        ("no reference", "its reference cannot be computed here (NotImplementedError: not for this device)"),
    ],
)
def test_errors_in_a_check_are_temporary(how: str, found: str) -> None:
    assert self_check.check(self_check.KernelCall("broken", {**CPU, "how": how})) == (found, False)


def test_a_check_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "SECONDS", 1)
    assert check("hang") == ("its check did not finish within 1 s", True)


@pytest.mark.slow
def test_a_check_that_cannot_start_is_no_verdict_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(broken.triton, "__module__", "no_such_module")
        found, lasting = check("right")
    assert "cannot be started" in found
    assert "No module named 'no_such_module'" in found
    assert not lasting
    monkeypatch.setenv("BROKEN_ABORTS", "1")
    found, lasting = check("right")
    assert found.startswith("its check cannot be started (exit status -6")
    assert not lasting
    monkeypatch.setattr(self_check.sys, "executable", "/no/such/python")
    assert "cannot be started" in check("right")[0]
    assert not check("right")[1]


@pytest.mark.slow
@INTERPRETED
def test_a_real_implementation_is_checked_there() -> None:
    op = "headwise_linear"
    dtypes = {"x": torch.float32, "weight": torch.float32}
    call = self_check.KernelCall(op, {**CPU, **FACTS[op]}, dtypes, {"rows": 1 << 20})
    assert self_check.run_in_subprocess(call) == ("", True)


# ------------------------------------------------------------------------------
# What becomes of it


class Device:
    """A simulated device with given findings, which records its checks."""

    def __init__(self) -> None:
        self.fault, self.lasting = "it is wrong", True
        self.checked: list[self_check.KernelCall] = []

    def check(self, call: self_check.KernelCall) -> tuple[str, bool]:
        self.checked.append(call)
        return self.fault, self.lasting


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(self_check.VARIABLE, raising=False)
    monkeypatch.setattr(self_check, "device_and_source", lambda index: (f"{index}", "sm_90", "3", "digest"))
    monkeypatch.setattr(self_check, "run_in_subprocess", made.check)
    self_check.forget()
    return made


OP = "headwise_linear"
DTYPES: dict[str, torch.dtype | None] = {"x": torch.float32, "weight": torch.float32}


def verdict(rows: int | None = 100, dtypes: dict[str, torch.dtype | None] = DTYPES, **change: Any) -> str:
    facts = {"device": "cuda", "dtype": torch.float32, "index": 0, "requested_backend": "auto", **FACTS[OP]}
    return self_check.fault_of(
        self_check.KernelCall(OP, {**facts, **change}, dtypes, None if rows is None else {"rows": rows})
    )


def test_once_for_each_launch(device: Device) -> None:
    device.fault = ""
    assert verdict() == verdict(requested_backend="triton") == ""
    assert verdict(101) == ""  # another size, the same launch
    assert len(device.checked) == 1
    verdict(1 << 24)
    assert len(device.checked) == 2
    verdict(dtypes={**DTYPES, "weight": torch.bfloat16})
    verdict(index=1)
    verdict(None)
    assert len(device.checked) == 5


def test_another_thread_may_clear_the_results(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cleared(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            """Store nothing, as if the results were cleared at once."""

    device.fault = ""
    monkeypatch.setattr(self_check, "_faults", Cleared())
    assert verdict() == ""


def test_a_recorded_failure_warns_in_every_process_once(device: Device, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="^the Triton implementation of headwise_linear is not used here"):
            assert verdict() == "it is wrong"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert verdict() == verdict(101) == "it is wrong"
        self_check.forget()  # simulates another process
    assert len(device.checked) == 1
    (record,) = tmp_path.rglob(self_check.RECORD)
    assert json.loads(record.read_text())["fault"] == "it is wrong"


def test_temporary_failures_are_not_recorded(device: Device, tmp_path: Path) -> None:
    device.fault, device.lasting = "it does not run (no compiler)", False
    with pytest.warns(UserWarning, match="no compiler"):
        assert verdict() == verdict() == "it does not run (no compiler)"
    assert len(device.checked) == 1
    assert not [*tmp_path.rglob(self_check.RECORD)]
    self_check.forget()
    device.fault = ""
    assert verdict() == ""


def test_it_can_be_turned_off(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(self_check.VARIABLE, "0")
    assert verdict() == ""
    assert not device.checked


def test_a_record_that_is_not_one_is_replaced(device: Device, tmp_path: Path) -> None:
    device.fault = ""
    verdict()
    (record,) = tmp_path.rglob(self_check.RECORD)
    whole = record.read_text()
    for text in ("", "{", "null", "[]", "{}", whole[:-1], f"{whole}more"):
        record.write_text(text)
        self_check.forget()
        assert verdict() == ""
        assert record.read_text() == whole
    assert len(device.checked) == 8


def test_bytes_that_are_not_text_count_as_absent(device: Device, tmp_path: Path) -> None:
    self_check.write_record("one", "")
    (record,) = tmp_path.rglob(self_check.RECORD)
    record.write_bytes(b"\xff\xfe")
    assert self_check.read_record("one") is None


def test_records_of_other_keys_are_independent(device: Device) -> None:
    self_check.write_record("one", "it is wrong")
    assert self_check.read_record("another") is None
    self_check.write_record("another", "")
    assert (self_check.read_record("one"), self_check.read_record("another")) == ("it is wrong", "")


def test_a_cache_that_cannot_be_written_gives_a_warning(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file))
    device.fault = ""
    with pytest.warns(UserWarning, match="cannot be stored in Triton's cache"):
        assert verdict() == ""


def test_a_check_within_a_backward_pass(device: Device) -> None:
    """The check runs in another process, which does not wait for the current backward pass."""
    device.fault = ""
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    found: list[str] = []
    y.register_hook(lambda grad: found.append(verdict()))
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert found == [""]
    assert len(device.checked) == 1


def test_dispatch_falls_back_with_a_warning(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    run, can = dispatch.implementation(OP, "torch").run, dispatch.always("a test")
    monkeypatch.setitem(registry.OPS[OP], "triton", dispatch.implementation(OP, "triton")._replace(run=run, can=can))
    x, weight = torch.ones(3, 8), torch.ones(4, 2, 2)
    kernels.headwise_linear(x, weight, backend="triton")
    assert not device.checked  # the interpreter has no compiler
    monkeypatch.setattr(self_check, "DEVICE", "cpu")
    with pytest.warns(UserWarning, match="not used here") as caught:
        kernels.headwise_linear(x, weight)
    assert caught[0].filename == __file__  # the line of the caller, not one of the library
    found = "it failed its check on this device: it is wrong"
    assert kernels.fallbacks()[OP] == {"triton": found}
    with pytest.raises(BackendError, match=found):
        kernels.headwise_linear(x, weight, backend="triton")
    assert len(device.checked) == 1
    assert device.checked[0].sizes == {"rows": 3}
    assert dispatch.why(OP, device="cpu", dtype=torch.float32, **FACTS[OP])[0].can  # a query causes no check


def test_implementations_that_auto_skipped_are_remembered() -> None:
    x = torch.ones(2, 3, 8)
    kernels.head_norm(x, 2)
    assert "needs a CUDA or ROCm device" in kernels.fallbacks()["head_norm"]["triton"] or (
        "interpreter" in kernels.fallbacks()["head_norm"]["triton"]
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: kernels.headwise_linear(x, torch.ones(4, 2, 2)), fullgraph=True, backend="eager")
    compiled(x)
    assert "triton" in kernels.fallbacks()["headwise_linear"]


@pytest.mark.parametrize("how", ["compile", "export"])
def test_a_compiler_causes_the_check_and_an_export_does_not(
    how: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code serves other sizes too, so the check does not use the sizes of the call."""
    device.fault = ""
    monkeypatch.setattr(self_check, "DEVICE", "cpu")
    monkeypatch.setitem(
        registry.OPS[OP], "triton", dispatch.implementation(OP, "torch")._replace(
            can=dispatch.always("a test"), example=example(OP), tiles=dispatch.implementation(OP, "triton").tiles,
        )
    )

    class Caller(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return kernels.headwise_linear(x, torch.ones(4, 2, 2))

    torch._dynamo.reset()
    if how == "compile":
        torch.compile(Caller(), fullgraph=True, backend="eager")(torch.ones(3, 8))
        assert [call.sizes for call in device.checked] == [None]
    else:
        torch.export.export(Caller(), (torch.ones(3, 8),), strict=False)
        assert not device.checked

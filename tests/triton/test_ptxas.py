"""A ptxas that makes wrong code is replaced, or refused with a reason that `can` and `explain` report."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seqblocks.errors import BackendError
from seqblocks.kernels import dispatch, triton_common

WRONG = triton_common.WRONG_PTXAS
REFUSAL = "ptxas 12.8 makes wrong code: set TRITON_PTXAS_PATH to a ptxas of version 12.9 or later"


class Knobs:
    """Triton's settings of tools: assigned as paths and read as tools with a version. Absent ones raise an error."""

    def __init__(self, missing: type[Exception] = RuntimeError, **versions: str) -> None:
        self.__dict__.update({name: SimpleNamespace(path=f"/{name}", version=x) for name, x in versions.items()})
        self.__dict__["missing"] = missing

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else self.missing(name)

    def __setattr__(self, name: str, path: str) -> None:
        self.__dict__[name] = SimpleNamespace(path=path, version=self.__dict__[path[1:]].version)


Use = Callable[[Any], list[str]]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Return a function that replaces Triton by one with these knobs, and returns a list of calls of cache_clear."""

    def replace(nvidia: Any) -> list[str]:
        cleared: list[str] = []
        knobs = {} if nvidia is None else {"knobs": SimpleNamespace(nvidia=nvidia)}
        version = SimpleNamespace(cache_clear=lambda: cleared.append("version"))
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(**knobs))  # type: ignore[arg-type]
        compiler: Any = SimpleNamespace(get_ptxas_version=version)
        monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", compiler)
        monkeypatch.setattr(triton_common, "refused_ptxas", triton_common.refused_ptxas.__wrapped__)
        return cleared

    return replace


@pytest.mark.parametrize("knobs", [Knobs(ptxas="12.9"), Knobs(ptxas="12.9", ptxas_blackwell=WRONG), Knobs(), None])
def test_another_ptxas_is_left_alone(knobs: Any, use: Use) -> None:
    cleared = use(knobs)
    assert triton_common.refused_ptxas() == ""
    assert cleared == []
    assert knobs is None or knobs.__dict__.get("ptxas", SimpleNamespace(path="/ptxas")).path == "/ptxas"


@pytest.mark.parametrize("newer", ["12.9", "13.1"])
def test_the_newer_ptxas_replaces_the_wrong_one(newer: str, use: Use) -> None:
    knobs = Knobs(ptxas=WRONG, ptxas_blackwell=newer)
    cleared = use(knobs)
    assert triton_common.refused_ptxas() == ""
    assert (knobs.ptxas.path, knobs.ptxas.version) == ("/ptxas_blackwell", newer)
    assert cleared == ["version"]


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(ptxas=WRONG, ptxas_blackwell=WRONG),
        Knobs(ptxas=WRONG),  # its file is missing
        Knobs(AttributeError, ptxas=WRONG),  # Triton 3.5
    ],
)
def test_a_wrong_ptxas_without_a_newer_one_is_refused(knobs: Knobs, use: Use) -> None:
    cleared = use(knobs)
    assert triton_common.refused_ptxas() == REFUSAL
    assert knobs.ptxas.path == "/ptxas"
    assert cleared == []


@pytest.mark.parametrize(
    ("arch", "able"), [("sm_80", True), ("sm_89", True), ("sm_90", False), ("sm_100", False), ("gfx942", True)],
)
def test_can_reports_the_refusal_since_sm_90(
    arch: str, able: bool, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Knobs(ptxas=WRONG))
    monkeypatch.setattr(triton_common, "MISSING", "")
    expected = (True, "compiled for the device") if able else (False, REFUSAL)
    assert triton_common.can("cuda", arch=arch) == expected
    monkeypatch.setattr(triton_common, "_arch_at", lambda index: arch)
    assert triton_common.can("cuda", requested_backend="auto") == expected


def test_no_device_is_queried_for_facts_alone(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Knobs(ptxas=WRONG))
    monkeypatch.setattr(triton_common, "MISSING", "")
    monkeypatch.setattr(triton_common, "_arch_at", None)
    assert triton_common.can("cuda") == (True, "compiled for the device")


def test_a_requested_backend_is_refused_with_the_reason(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.load_implementations("mlstm")
    use(Knobs(ptxas=WRONG))
    monkeypatch.setattr(triton_common, "MISSING", "")
    facts: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "arch": "sm_90"}
    with pytest.raises(BackendError, match=f"backend 'triton' cannot run mlstm: {REFUSAL}"):
        dispatch.choose("mlstm", "triton", **facts)


def test_explain_reports_the_refusal(run_main: Callable[..., Any], use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_main("explain", "xlstm_125m_7_1", "--device", "cuda", "--dtype", "bf16")
    assert REFUSAL not in run.stdout
    use(Knobs(ptxas=WRONG))
    monkeypatch.setattr(triton_common, "MISSING", "")
    run = run_main("explain", "xlstm_125m_7_1", "--device", "cuda", "--dtype", "bf16")
    assert run.returncode == 0
    assert REFUSAL in run.stdout


@pytest.mark.skipif(triton_common.MISSING != "", reason="Triton is not installed")
def test_the_installed_triton_is_understood() -> None:
    """A Triton whose knobs have other names would be left alone, whatever its ptxas."""
    import triton

    triton_common.refused_ptxas()
    assert triton.knobs.nvidia.ptxas.version != WRONG or triton_common.refused_ptxas()

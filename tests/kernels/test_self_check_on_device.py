"""The check before the first use, on a device: it accepts sound kernels, runs once, and rejects wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seqblocks import kernels
from seqblocks.errors import BackendError, RunError
from seqblocks.kernels import triton_common
from seqblocks.kernels.dispatch import self_check
from tests.triton import broken  # noqa: F401  # which registers an op
from tests.triton.test_self_check import FACTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(triton_common.MISSING) or triton_common.INTERPRETED,
        reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
    ),
]
CHECKED: dict[str, dict[str, Any]] = {**FACTS, "mlstm": {**FACTS["mlstm"], "head_dims": (64, 128)}}


@pytest.fixture(autouse=True)
def cache(no_self_check: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(self_check.VARIABLE, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    self_check.forget()
    return tmp_path


def values(cache: Path) -> list[str]:
    return [json.loads(record.read_text("utf-8"))["fault"] for record in cache.rglob(self_check.RECORD)]


@pytest.mark.parametrize("op", CHECKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{}, None])
def test_sound_implementations_pass(op: str, dtype: torch.dtype, sizes: Any) -> None:
    facts = {"device": "cuda", "dtype": dtype, **CHECKED[op]}
    assert self_check.check(self_check.KernelCall(op, facts, sizes=sizes)) == ("", True)


def test_a_call_checks_once_and_a_wrong_one_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 32, device="cuda")
    assert kernels.head_norm(x, 4).isfinite().all()
    assert values(cache) == [""]
    monkeypatch.setattr(self_check, "run_in_subprocess", lambda call: ("its output is off", True))
    kernels.head_norm(x, 4, backend="triton")  # known to be correct
    with pytest.raises(BackendError, match="its output is off"), pytest.warns(UserWarning, match="is not used here"):
        kernels.head_norm(x, 8, backend="triton")
    assert sorted(values(cache)) == ["", "its output is off"]


def test_an_illegal_access_in_a_check_does_no_harm_here() -> None:
    facts = {"device": "cuda", "index": 0, "dtype": torch.float32, "how": "illegal access"}
    fault, lasting = self_check.run_in_subprocess(self_check.KernelCall("broken", facts))
    assert "crashes" in fault
    assert lasting
    torch.cuda.synchronize()


def test_inputs_on_another_device() -> None:
    with pytest.raises(RunError, match="weight on cpu"):
        kernels.head_norm(torch.randn(2, 8, device="cuda"), 2, torch.ones(8))

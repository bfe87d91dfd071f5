"""The check before the first use, on a device: sound forms pass it, it is made once, and a wrong one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seqblocks import kernels
from seqblocks.errors import BackendError
from seqblocks.kernels import dispatch, triton_common
from seqblocks.kernels.dispatch import self_check
from tests.triton.test_self_check import FACTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        bool(triton_common.MISSING) or triton_common.INTERPRETED,
        reason=triton_common.MISSING or "kernels are interpreted (TRITON_INTERPRET=1), not compiled for the device",
    ),
]
CALLED: dict[str, dict[str, Any]] = {**FACTS, "mlstm": {**FACTS["mlstm"], "head_dims": (64, 128)}}


@pytest.fixture(autouse=True)
def on(no_self_check: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(self_check.VARIABLE, raising=False)
    monkeypatch.setenv("SEQBLOCKS_CACHE", str(tmp_path))
    self_check._shelf.forget()
    self_check._passing.clear()
    return tmp_path / "checked.json"


@pytest.mark.parametrize("op", CALLED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_forms_pass(op: str, dtype: torch.dtype, on: Path) -> None:
    example = dispatch._ops[op]["triton"].example
    assert example is not None
    facts = {"device": "cuda", "dtype": dtype, **CALLED[op]}
    assert self_check.fault(example, facts) == ""
    assert self_check.verdict(op, example, facts) == ""
    assert [*json.loads(on.read_text("utf-8")).values()] == [""]


def test_a_call_checks_once_and_a_wrong_form_is_refused(on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 5, 32, device="cuda")
    assert kernels.head_norm(x, 4).isfinite().all()
    known = json.loads(on.read_text("utf-8"))
    assert len(known) == 1
    monkeypatch.setattr(self_check, "fault", lambda *a: "its output is off")
    kernels.head_norm(x, 4, backend="triton")  # known to be sound
    with pytest.raises(BackendError, match="its output is off"), pytest.warns(UserWarning, match="is not used here"):
        kernels.head_norm(x, 8, backend="triton")

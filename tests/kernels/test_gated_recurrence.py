"""The gated recurrence against flash-linear-attention's naive function, and lengths that do not fill their blocks.

The conformance suite tests the law, resets, dtypes and layouts.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seqblocks.kernels import gated_recurrence
from seqblocks.kernels.gated_recurrence import torch as blockwise
from tests.kernels.test_linear_attention import FOLDER

CASES = sorted(path.stem for path in FOLDER.glob("op_diagonal*.npz"))


def with_state(x: Tensor, decay: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = gated_recurrence(x, decay, return_state=True, **options)
    assert isinstance(out, tuple)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_the_naive_function(case: str, backend: str, dtype: torch.dtype) -> None:
    """float32: at most ten times the error of the naive function, plus 1e-6 of the largest number."""
    with np.load(FOLDER / f"{case}.npz") as file:
        stored = {name: torch.from_numpy(file[name]) for name in file.files if name != "cfg"}
        measured = json.loads(str(file["cfg"]))["measured"]
    x = {name[3:]: t.to(dtype).requires_grad_() for name, t in stored.items() if name.startswith("in/")}
    o, last = with_state(x["x"], x["g"], state=x.get("initial_state"), backend=backend)
    found = {"out/o": o, "out/final_state": last}
    loss = torch.stack([(y.double() * stored[n.replace("out", "cot")].double()).sum() for n, y in found.items()]).sum()
    found |= {f"grad/{n}": g for n, g in zip(x, torch.autograd.grad(loss, [*x.values()]), strict=True)}
    differences = {f"out/{n}": each for n, each in measured["maxdiff_f32_vs_f64"].items()}
    differences |= {f"grad/{n}": each for n, each in measured["maxdiff_grad_f32"].items()}
    for name, result in found.items():
        largest = max(1.0, stored[name].abs().max().item())
        bar = 1e-12 * largest if dtype == torch.float64 else 10 * differences[name] + 1e-6 * largest
        assert (result.double() - stored[name]).abs().max() <= bar, name


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("wide", [0, 10**9])
@pytest.mark.parametrize("numbers", [30, 10**9])
def test_blocks_of_every_remainder(numbers: int, wide: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block or several, all tokens at a time or five, with resets at their edges, equal the definition."""
    monkeypatch.setattr(blockwise, "TOKEN_MIN_ELEMENTS", wide)
    monkeypatch.setattr(blockwise, "PART_ELEMENTS", numbers)
    generator = torch.Generator().manual_seed(0)
    for length in range(2, 27):
        x, decay = (torch.randn(2, length, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        inputs = [x.requires_grad_(), (-decay.abs()).requires_grad_()]
        for resets in (None, torch.rand(2, length, generator=generator) < 0.3):
            results = []
            for backend in ("reference", "torch"):
                y, last = with_state(*inputs, resets=resets, reverse=reverse, backend=backend)
                loss = (y * y.detach()).sum() + last.sum()
                results.append([y, last, *torch.autograd.grad(loss, inputs)])
            for expected, found in zip(*results, strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

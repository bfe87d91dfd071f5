"""Centaurus against the published implementation (lrnnx), and against direct float64 sums made with it.

The official code computes in float32 for any dtype, so the float64 reference is `y64` and `grad64.*`, and the official
arrays show the error of float32. It discretises the input by dt although it names this zero-order hold: our `euler`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.checkpoint import load_official
from seqblocks.kernels import centaurus
from seqblocks.kernels.centaurus.reference import MODES

FOLDER = Path(__file__).parent.parent / "golden" / "centaurus"
CASES = sorted(path.stem for path in FOLDER.glob("*.npz"))
WAYS = [("reference", None), ("torch", "chunks"), ("torch", "project"), ("torch", "fold"), ("torch", None)]


def load(case: str, dtype: torch.dtype) -> tuple[str, dict[str, Tensor], Any]:
    """Return the mode, the leaves (x and the weights, A as two reals), and the file."""
    data = np.load(FOLDER / f"{case}.npz")
    A = torch.from_numpy(data["w.A"]).to(torch.complex128)
    leaves = {"x": torch.from_numpy(data["x"]), "A_real": A.real.clone(), "A_imag": A.imag.clone()}
    leaves |= {key[2:]: torch.from_numpy(data[key]) for key in data.files if key.startswith("w.") and key != "w.A"}
    return case.split("_")[0], {k: v.to(dtype).requires_grad_() for k, v in leaves.items()}, data


def run(mode: str, w: dict[str, Tensor], **options: Any) -> Any:
    return centaurus(
        w["x"], w["A_real"], w["A_imag"], w["log_delta"].exp(), w["B"], w["C"], w.get("E"), mode=mode, **options
    )


def official(data: Any, key: str, which: str) -> np.ndarray:
    """Return a gradient in the layout of the file, where the two parts of A are one complex number."""
    if key in ("A_real", "A_imag"):
        whole = data[f"{which}.A"]
        return whole.real if key == "A_real" else whole.imag
    return data[f"{which}.{key}"]


def differentiate(y: Tensor, w: dict[str, Tensor], data: Any) -> dict[str, np.ndarray]:
    grads = torch.autograd.grad((y * torch.from_numpy(data["cotangent"]).to(y)).sum(), list(w.values()))
    return {key: g.numpy() for key, g in zip(w, grads, strict=True)}


def test_every_mode_has_golden_cases() -> None:
    assert {case.split("_")[0] for case in CASES} == set(MODES)


@pytest.mark.parametrize(("form", "plan"), WAYS)
@pytest.mark.parametrize("case", CASES)
def test_float64(case: str, form: str, plan: str | None) -> None:
    """Relative to the largest value of each array: 1e-10, as for all golden numbers of the same computation."""
    mode, w, data = load(case, torch.float64)
    if plan == "fold" and mode == "dws":
        with pytest.raises(ValueError, match="no plan 'fold'"):
            run(mode, w, plan=plan, backend=form)
        return
    y = run(mode, w, plan=plan, backend=form)
    assert np.abs(y.detach().numpy() - data["y64"]).max() <= 1e-10 * np.abs(data["y64"]).max()
    for key, found in differentiate(y, w, data).items():
        expected = official(data, key, "grad64")
        assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max(), key


@pytest.mark.parametrize(("form", "plan"), WAYS)
@pytest.mark.parametrize("case", [case for case in CASES if "bigbatch" not in case])
def test_float32(case: str, form: str, plan: str | None) -> None:
    """Ten times the official float32 run's own error, and at least 16 units in the last place of the largest value,
    since the official error of a sum of few numbers can be zero by chance. The recurrence rounds once a step."""
    mode, w, data = load(case, torch.float32)
    if plan == "fold" and mode == "dws":
        return
    y = run(mode, w, plan=plan, backend=form)
    least = 2**-24 * (16 + (y.shape[1] if form == "reference" else 0))
    bars = {"y": (y.detach().numpy(), data["y64"], np.abs(data["y"] - data["y64"]).max())}
    for key, found in differentiate(y, w, data).items():
        expected = official(data, key, "grad64")
        bars[key] = (found, expected, np.abs(official(data, key, "grad") - expected).max())
    for key, (found, expected, error) in bars.items():
        assert np.abs(found - expected).max() <= 10 * error + least * np.abs(expected).max(), key


@pytest.mark.parametrize("form", ["reference", "torch"])
@pytest.mark.parametrize("case", [case for case in CASES if "bigbatch" not in case])
def test_the_last_state(case: str, form: str) -> None:
    """The official state is computed step by step in float32, and may err by a unit in the last place per step."""
    mode, w, data = load(case, torch.float64)
    _, last = run(mode, w, return_state=True, backend=form)
    found = torch.view_as_complex(last.detach().contiguous()).numpy().reshape(data["state_final"].shape)
    bar = data["x"].shape[1] * 2**-23 * max(1.0, np.abs(found).max())
    assert np.abs(found - data["state_final"]).max() <= bar


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("_L17")])
def test_an_official_state_dict(case: str) -> None:
    """Releases store A as a complex number: `stable: false` reads its real part unchanged."""
    mode, w, data = load(case, torch.float64)
    rows, subs = w["A_real"].shape
    given = f"mode: {mode}, stable: false, sub_states: {subs}"
    given += f", state: {rows}" if mode in ("neck", "pointwise") else ""
    text = f"seqblocks: 1\nmodel: {{input: {{features: {w['x'].shape[2]}}}, steps: [{{centaurus: {{{given}}}}}]}}\n"
    maps = "centaurus: '', centaurus.A_real: {real: A}, centaurus.A_imag: {imag: A}, centaurus.log_dt: log_delta"
    model = seqblocks.build_text(text + f"checkpoint: {{{maps}}}", dtype=torch.float64)
    load_official(model, {key[2:]: torch.from_numpy(data[key]) for key in data.files if key.startswith("w.")})
    assert np.abs(model(w["x"]).detach().numpy() - data["y64"]).max() <= 1e-10 * np.abs(data["y64"]).max()


@pytest.mark.parametrize("case", CASES)
def test_the_verb(case: str) -> None:
    """The same values are computed through a spec. A_real is converted by -softplus, its gradient by the chain rule."""
    mode, w, data = load(case, torch.float64)
    rows, subs = w["A_real"].shape
    given = f"mode: {mode}, sub_states: {subs}" + (f", state: {rows}" if mode in ("neck", "pointwise") else "")
    text = f"seqblocks: 1\nmodel: {{input: {{features: {w['x'].shape[2]}}}, steps: [{{centaurus: {{{given}}}}}]}}"
    model = seqblocks.build_text(text, dtype=torch.float64)
    own = dict(model.centaurus.named_parameters())
    with torch.no_grad():
        own["A_real"].copy_(torch.log(torch.expm1(-w["A_real"])))
        for name, source in (("A_imag", "A_imag"), ("log_dt", "log_delta"), ("B", "B"), ("C", "C"), ("E", "E")):
            if name in own:
                own[name].copy_(w[source])
    y = model(w["x"])
    (y * torch.from_numpy(data["cotangent"]).double()).sum().backward()
    assert np.abs(y.detach().numpy() - data["y64"]).max() <= 1e-10 * np.abs(data["y64"]).max()
    for name, parameter in own.items():
        expected = official(data, {"log_dt": "log_delta"}.get(name, name), "grad64")
        if name == "A_real":
            expected = -expected * torch.sigmoid(parameter.detach()).numpy()
        assert np.abs(parameter.grad.numpy() - expected).max() <= 1e-10 * np.abs(expected).max(), name

"""Compare specs with reference numbers of official implementations (tests/golden).

A case holds inputs, weights under their official names, a cotangent, and the outputs and gradients of the official
float64 run. Its meta record has the error of the official float32 run.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

import seqblocks

FOLDER = Path(__file__).parent.parent / "golden"


def read(case: str, record: str = "meta") -> tuple[Any, dict[str, Any]]:
    """Return the arrays of `folder/name` and its meta record, or the record that the folder names."""
    with np.load(FOLDER / f"{case}.npz") as file:
        data = dict(file)
    return data, json.loads(str(data[record]))


def run(
    data: Any, spec: str, dtype: torch.dtype, inputs: tuple[str, ...] = ("x",)
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return outputs and gradients under the official names. Several inputs are joined along the features, in this
    order."""
    from seqblocks.checkpoint import load_official, official_name  # needs pydantic, which a GPU machine may lack

    model = seqblocks.build_text(spec, dtype=dtype).eval()
    load_official(model, {k[2:]: torch.from_numpy(data[k]).to(dtype) for k in data if k.startswith("w/")})
    given = [torch.from_numpy(data[f"in/{name}"]) for name in inputs]
    given = [x.to(dtype).requires_grad_() if x.is_floating_point() else x for x in given]
    y = model(given[0] if len(given) == 1 else torch.cat(given, -1))
    (y * torch.from_numpy(data["ct"]).to(dtype)).sum().backward()
    results = {"out": y.detach()}
    results |= {f"grad_in/{name}": x.grad for name, x in zip(inputs, given, strict=True) if x.is_floating_point()}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        official = official_name(model.spec, name)
        if isinstance(official, str):
            results[f"grad_w/{official}"] = parameter.grad
        elif "transpose" in official:  # [H, D, 4, D] was made from [H, 4 D, D]
            results[f"grad_w/{official['transpose']}"] = parameter.grad.flatten(2).transpose(1, 2)
        else:
            parts.setdefault(official["split"], {})[official["part"]] = parameter.grad.flatten()
    results |= {f"grad_w/{name}": torch.cat([part[k] for k in sorted(part)]) for name, part in parts.items()}
    return results, model


def compare64(data: Any, meta: dict[str, Any], results: dict[str, torch.Tensor], bar: float) -> None:
    """Compare every output and gradient of the case, to `bar` relative to each value and to the largest of its array.
    """
    assert set(results) == {k for k in data if k == "out" or k.startswith("grad_")}
    for key, found in results.items():
        scale = max(meta["max_abs"].get(key, 1.0), 1.0)
        np.testing.assert_allclose(found.numpy(), data[key], rtol=bar, atol=bar * scale, err_msg=key)


def compare32(data: Any, meta: dict[str, Any], results: dict[str, torch.Tensor]) -> None:
    """Compare with a bound of ten times the error of the official float32 run, which adapts to each case's
    conditioning.

    A result of a few numbers, such as the gradient of a bias, may have a small official error by chance. So the median
    relative error of the case is used where it is larger.
    The bound is at least 1e-6, because implementations use different stabilisers, as in float64. With one token the
    official forget gate has no gradient at all, and ours has what eps leaves of it (5e-7 and less).
    """
    errors, sizes = meta["f32_max_abs_err"], {key: max(meta["max_abs"][key], 1.0) for key in results}
    typical = median(errors[key] / size for key, size in sizes.items())
    for key, found in results.items():
        bar = 10 * max(errors[key], typical * sizes[key]) + 1e-6 * sizes[key]
        assert np.abs(found.numpy() - data[key]).max() <= bar, key


def compare(data: Any, meta: dict[str, Any], results: dict[str, torch.Tensor]) -> None:
    """Compare a kernel with official code that computes the same: only rounding differs, in float64 or float32."""
    if results["out"].dtype == torch.float64:
        compare64(data, meta, results, 1e-12)
    else:
        compare32(data, meta, results)


def without_initial_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every mLSTM at m = -1e30 instead of 0."""
    from seqblocks import kernels

    real = kernels.mlstm

    def patched(q: Any, k: Any, v: Any, i: Any, f: Any, **options: Any) -> Any:
        batch, _, heads, dk = q.shape
        fresh = kernels.MLSTMState(
            q.new_zeros(batch, heads, dk, v.shape[-1]),
            q.new_zeros(batch, heads, dk),
            q.new_full((batch, heads), -1e30),
        )
        return real(q, k, v, i, f, **{**options, "state": options["state"] or fresh})

    monkeypatch.setattr(kernels, "mlstm", patched)

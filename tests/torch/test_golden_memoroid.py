"""The mLSTM memoroid against memorax: the release that this project started from (`seed`) and a later one (`head`).

The official state scales k by 1/sqrt(D); ours scales q, so C and n differ by that factor. Official gate kernels read q,
k, v head by head; ours read all of q, then k, then v. Official behaviour that is not reproduced:

- `head` cases with resets or a carry: the official convolution ignores both, so a chunk or an episode reads tokens of
its neighbour. The whole layer is compared where there is no boundary; in the other cases the convolution is run across
the boundary on purpose, around the same cell.
- `seed` read-out: the floor of the normaliser is 1 on the stabilised state; available only as `readout: unit_floor`.
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
from seqblocks.kernels import (
    MLSTMElement,
    associative_scan,
    causal_conv,
    head_norm,
    headwise_linear,
    mlstm,
    mlstm_algebra,
    mlstm_memoroid,
)
from seqblocks.kernels.mlstm.memoroid import elements

FOLDER = Path(__file__).parent.parent / "golden" / "memoroid"
CASES = sorted(path.stem for path in FOLDER.glob("*.npz"))
NAMES = {  # official -> ours
    "in_proj.kernel": "in_proj.weight", "out_proj.kernel": "out_proj.weight",
    "q.kernel": "q.weight", "k.kernel": "k.weight", "v.kernel": "v.weight",
    "wi.kernel": "i.weight", "wi.bias": "i.bias", "wf.kernel": "f.weight", "wf.bias": "f.bias",
    "up_projection.kernel": "up.weight", "output_projection.kernel": "down.weight",
    "query.kernel": "q.weight", "key.kernel": "k.weight", "value.kernel": "v.weight",
    "i_gate.kernel": "i.weight", "i_gate.bias": "i.bias", "f_gate.kernel": "f.weight", "f_gate.bias": "f.bias",
    "causal_conv.kernel": "c.weight", "causal_conv.bias": "c.bias",
    "learnable_skip": "learnable_skip.weight", "norm.weight": "head_norm.weight",
}  # fmt: skip


def ours(name: str, value: np.ndarray, heads: int) -> Tensor:
    """Return a weight, or its gradient, in our layout."""
    x = torch.from_numpy(value)
    if NAMES[name] in ("i.weight", "f.weight"):
        width = x.shape[0] // (3 * heads)
        return x.view(heads, 3, width, heads).permute(3, 1, 0, 2).reshape(heads, -1)
    if name == "causal_conv.kernel":
        return x.permute(2, 1, 0)
    if name == "norm.weight":
        return x.flatten()
    return x.t() if name.endswith("kernel") and x.dim() == 2 else x


def load(case: str, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, Tensor], int]:
    """Return the file, the weights under our names, and the number of heads."""
    data = np.load(FOLDER / f"{case}.npz")
    heads = data["elem.log_f"].shape[2]
    weights = {NAMES[k[2:]]: ours(k[2:], data[k], heads).to(dtype) for k in data.files if k.startswith("w.")}
    return data, {k: w.contiguous().requires_grad_() for k, w in weights.items()}, heads


def carry(data: Any, which: str, dtype: torch.dtype) -> MLSTMElement:
    """Return a carry of the file in our layout and scale."""
    width = data["elem.C"].shape[-1]
    f, C, n, m = (torch.from_numpy(data[f"{which}.{key}"])[:, 0].to(dtype) for key in ("log_f", "C", "n", "m"))
    return MLSTMElement(f[..., 0, 0], C * width**0.5, n[..., 0] * width**0.5, m[..., 0, 0])


def projected(data: Any, w: dict[str, Tensor], heads: int, x: Tensor) -> tuple[list[Tensor], Any]:
    """Return q, k, v, i, f, and a function from the cell's h to the layer's y. As in memorax, the convolution ignores
    boundaries."""
    if "in_proj.weight" in w:
        u = x @ w["in_proj.weight"].t()
        qkv = [u @ w[f"{name}.weight"].t() for name in "qkv"]

        def after(h: Tensor) -> Tensor:
            return h @ w["out_proj.weight"].t()
    else:
        u, z = (x @ w["up.weight"].t()).chunk(2, -1)
        c = causal_conv(u, w["c.weight"], w["c.bias"], activation="silu")
        qkv = [headwise_linear(t, w[f"{name}.weight"]) for t, name in ((c, "q"), (c, "k"), (u, "v"))]

        def after(h: Tensor) -> Tensor:
            inside = head_norm(h, heads, 1 + w["head_norm.weight"]) + w["learnable_skip.weight"] * c
            return (inside * torch.nn.functional.silu(z)) @ w["down.weight"].t()

    gates = [torch.cat(qkv, -1) @ w[f"{name}.weight"].t() + w[f"{name}.bias"] for name in "if"]
    return [*(t.unflatten(-1, (heads, -1)) for t in qkv), *gates], after


def layer(case: str, dtype: torch.dtype, backend: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return actual and expected values: y, all gradients, and the last state."""
    data, w, heads = load(case, dtype)
    x = torch.from_numpy(data["x"]).to(dtype).requires_grad_()
    inner, after = projected(data, w, heads, x)
    start = carry(data, "carry_in", dtype)
    h, last = mlstm_memoroid(
        *inner, state=(start.C, start.n, start.m), return_state=True, resets=torch.from_numpy(data["done"]).bool(),
        readout="unit_floor" if "seed" in case else "paper", backend=backend,
    )
    y = after(h.flatten(-2))
    grads = torch.autograd.grad((y * torch.from_numpy(data["cotangent"]).to(dtype)).sum(), [x, *w.values()])
    out = {"y": (y.detach().numpy(), data["y"]), "grad.x": (grads[0].numpy(), data["grad.x"])}
    names = [k for k in data.files if k.startswith("grad.") and k != "grad.x"]
    expected = {NAMES[k[5:]]: ours(k[5:], data[k], heads) for k in names}
    assert set(expected) == set(w)
    out |= {k: (g.numpy(), expected[k].numpy()) for k, g in zip(w, grads[1:], strict=True)}
    end = carry(data, "carry_out", dtype)
    return out | {k: (getattr(last, k).detach().numpy(), getattr(end, k).numpy()) for k in ("C", "n", "m")}


@pytest.mark.parametrize("form", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_float64(case: str, form: str) -> None:
    """Values, all gradients and the last state, resets and carries included: 1e-10 of the largest value of each."""
    for key, (found, expected) in layer(case, torch.float64, form).items():
        assert np.abs(found - expected).max() <= 1e-10 * max(1.0, np.abs(expected).max()), key


@pytest.mark.parametrize("form", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_float32(case: str, form: str) -> None:
    """Ten times the official float32 run's own error (recorded for y; relative to the largest value)."""
    data = np.load(FOLDER / f"{case}.npz")
    bar = 10 * np.abs(data["y_float32"] - data["y"]).max() / np.abs(data["y"]).max()
    found, expected = layer(case, torch.float32, form)["y"]
    assert np.abs(found - expected).max() <= bar * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_every_element_and_every_state(case: str) -> None:
    data, w, heads = load(case)
    inner, _ = projected(data, w, heads, torch.from_numpy(data["x"]))
    width = data["elem.C"].shape[-1]
    made = elements(tuple(inner))
    states, last = associative_scan(
        mlstm_algebra().combine, made, initial=carry(data, "carry_in", torch.float64),
        resets=torch.from_numpy(data["done"]).bool(),
    )
    for which, found in (("elem", made), ("state", states)):
        found = found._replace(C=found.C / width**0.5, n=found.n / width**0.5)
        for key, value in zip(("log_f", "C", "n", "m"), found, strict=True):
            expected = data[f"{which}.{key}"].reshape(value.shape)
            error = np.abs(value.detach().numpy() - expected).max()
            assert error <= 1e-10 * max(1.0, np.abs(expected).max()), (which, key)
    end = carry(data, "carry_out", torch.float64)
    torch.testing.assert_close(last.f.detach(), end.f, rtol=1e-10, atol=1e-10 * max(1.0, end.f.abs().max().item()))


@pytest.mark.parametrize("case", [c for c in CASES if "seed" in c or ("carry" not in c and "reset" not in c)])
def test_the_layer_as_a_spec(case: str) -> None:
    """The YAML layer, with its state passed under the step's name: y, all gradients and the state."""
    data, w, heads = load(case)
    seed = "seed" in case
    width, hidden = data["x"].shape[2], w["q.weight"].shape[0] * (1 if seed else w["q.weight"].shape[1])
    step = f"memoroid_layer: {{dim: {width}, hidden: {hidden}, heads: {heads}, readout: unit_floor}}" if seed else (
        f"memoroid_xlstm_layer: {{dim: {width}, hidden: {hidden}, heads: {heads}}}"
    )  # fmt: skip
    text = f"seqblocks: 1\nuse: [memoroid]\nmodel: {{input: {{features: {width}}}, steps: [{{{step}}}]}}"
    model = seqblocks.build_text(text, dtype=torch.float64)
    name = step.partition(":")[0]
    own = {k.removeprefix(f"{name}."): p for k, p in model.named_parameters()}
    assert set(own) == set(w)
    with torch.no_grad():
        for key, value in w.items():
            own[key].copy_(value)
    start = carry(data, "carry_in", torch.float64)
    state = model.init_state(data["x"].shape[0])
    state[name]["cell"] = {"C": start.C, "n": start.n, "m": start.m}
    x = torch.from_numpy(data["x"]).requires_grad_()
    y, last = model(x, state=state, return_state=True, resets=torch.from_numpy(data["done"]).bool())
    (y * torch.from_numpy(data["cotangent"])).sum().backward()
    assert np.abs(y.detach().numpy() - data["y"]).max() <= 1e-10 * np.abs(data["y"]).max()
    assert np.abs(x.grad.numpy() - data["grad.x"]).max() <= 1e-10 * np.abs(data["grad.x"]).max()
    for key in data.files:
        if key.startswith("grad.") and key != "grad.x":
            expected = ours(key[5:], data[key], heads).numpy()
            error = np.abs(own[NAMES[key[5:]]].grad.numpy() - expected).max()
            assert error <= 1e-10 * max(1.0, np.abs(expected).max()), key
    end = carry(data, "carry_out", torch.float64)
    torch.testing.assert_close(last[name]["cell"]["C"], end.C, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [c for c in CASES if "_T1" in c])
def test_official_kernels_are_read_through_the_map(case: str) -> None:
    """Gates that read q, k and v head by head, and kernels [in, out]: each weight equals the result of `ours`."""
    data, w, heads = load(case)
    name = "memoroid_layer" if "seed" in case else "memoroid_xlstm_layer"
    width, hidden = data["x"].shape[2], w["v.weight"].shape[0] * (w["v.weight"].shape[1] if "head" in case else 1)
    text = (
        f"seqblocks: 1\nuse: [memoroid]\ncheckpoint: {{{name}: cell}}\n"
        f"model: {{input: {{features: {width}}}, steps: [{name}: {{dim: {width}, hidden: {hidden}, heads: {heads}}}]}}"
    )
    model = seqblocks.build_text(text, dtype=torch.float64)
    official = {f"cell.{k[2:]}": torch.from_numpy(data[k]) for k in data.files if k.startswith("w.")}
    load_official(model, official)
    assert {f"{name}.{k}" for k in w} == set(model.state_dict())
    for key, value in w.items():
        assert torch.equal(model.state_dict()[f"{name}.{key}"], value), key
    for key in official:
        if key.endswith(("i.kernel", "f.kernel", "gate.kernel")):
            with pytest.raises(seqblocks.RunError, match=r"must be \[36, 3\], and is \[3, 36\]"):
                load_official(model, {**official, key: official[key].T})


def test_a_kernel_that_is_not_transposed_is_an_error() -> None:
    """A square kernel would fit untransposed, but its name implies [in, out]."""
    model = "{input: {features: 4}, steps: [linear: {features: 4}]}"
    text = f"seqblocks: 1\nmodel: {model}\ncheckpoint: {{linear.weight: RECIPE}}"
    with pytest.raises(seqblocks.SpecError, match=r"E314\].*'q\.kernel' is \[in, out\] by its name") as caught:
        seqblocks.build_text(text.replace("RECIPE", "q.kernel"))
    hint = "{transpose: q.kernel}, or {reshape: q.kernel} if it is in fact [out, in]"
    assert caught.value.diagnostics[0].hint == hint
    for recipe in ("{transpose: q.kernel}", "{reshape: q.kernel}"):
        seqblocks.build_text(text.replace("RECIPE", recipe))


@pytest.mark.parametrize("case", [c for c in CASES if "head" in c])
def test_it_is_the_mlstm(case: str) -> None:
    """The chunked kernel, started from the same stabiliser, computes the same h. Resets are excluded: they set m to 0
    in the kernel and change h by about eps = 1e-6."""
    data, w, heads = load(case)
    inner, _ = projected(data, w, heads, torch.from_numpy(data["x"]))
    start = carry(data, "carry_in", torch.float64)
    options: dict[str, Any] = {"state": (start.C, start.n, start.m), "resets": torch.from_numpy(data["done"]).bool()}
    a, b = mlstm_memoroid(*inner, **options), mlstm(*inner, **options)
    bar = 1e-6 if data["done"].any() else 1e-10
    assert (a - b).abs().max() <= bar * b.abs().max()

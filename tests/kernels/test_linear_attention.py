"""Linear attention against the naive functions of flash-linear-attention, run in float64: all outputs and gradients.

The conformance suite tests the law, resets, dtypes and layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from seqblocks.kernels import linear_attention
from seqblocks.kernels.linear_attention import torch as chunkwise
from seqblocks.kernels.summaries import of_linear_attention
from tests.kernels.conformance import of_models

FOLDER = Path(__file__).parents[1] / "golden" / "linear_attention"
CASES = sorted({path.stem for path in FOLDER.glob("op_*.npz")} - {path.stem for path in FOLDER.glob("op_diagonal*")})


def load(case: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with np.load(FOLDER / f"{case}.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files if name != "cfg"}
        return json.loads(str(file["cfg"])), arrays


def output(*x: Tensor, **options: Any) -> Tensor:
    o = linear_attention(*x, **options)
    assert isinstance(o, Tensor)
    return o


def with_state(*x: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out = linear_attention(*x, **options, return_state=True)
    assert isinstance(out, tuple)
    return out


def per_token(op: str, x: dict[str, Tensor]) -> dict[str, Any]:
    """Return the arguments besides q, k, v and the state, by the conventions of each function."""
    if op == "gdn2":  # an erase gate per key, and a write gate that is part of v
        return {"decay": x["g"], "a": -x["g"].exp() * x["b"] * x["k"], "b": x["k"]}
    out: dict[str, Any] = {"decay": x.get("g"), "beta": x.get("beta"), "a": x.get("a"), "b": x.get("b")}
    if "g_gamma" in x:
        out["decay"] = x["g_gamma"].expand(x["q"].shape[:3])
    return {**out, "bonus": x.get("u"), "resets": x.get("resets")}


def steps_of_products(x: dict[str, Tensor], steps: int) -> tuple[dict[str, Tensor], slice]:
    """Express DeltaProduct as a delta rule: `steps` tokens each, of which the first decays and the last is read."""
    q = torch.zeros_like(x["k"])
    q[:, steps - 1 :: steps] = x["q"]
    g = x["g"].new_zeros(*x["k"].shape[:3])
    g[:, ::steps] = x["g"]
    return {**x, "q": q, "g": g}, slice(steps - 1, None, steps)


def run(case: str, backend: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return actual and expected outputs and gradients."""
    cfg, stored = load(case)
    x = {n[3:]: t.to(dtype).requires_grad_() if t.is_floating_point() else t
         for n, t in stored.items() if n.startswith("in/")}
    given, read = x, slice(None)
    if cfg["op"] == "delta_product":
        given, read = steps_of_products(x, cfg["options"]["num_householder"])
    v = given["w"] * given["v"] if cfg["op"] == "gdn2" else given["v"]
    normalize = bool(cfg["options"].get("normalize"))
    state = given.get("initial_state")
    if normalize:
        state = torch.cat([given["initial_state"], given["initial_z"][:, 0].unsqueeze(-1)], -1)
    o, last = with_state(
        given["q"], given["k"], v, **per_token(cfg["op"], given), scale=cfg["scale"] or 1.0, normalize=normalize,
        state=state, backend=backend,
    )
    found = {"out/o": o[:, read], "out/final_state": last[..., :-1] if normalize else last}
    if normalize:
        found["out/final_z"] = last[..., -1].unsqueeze(1)
    loss = torch.stack([(y.double() * stored[n.replace("out", "cot")].double()).sum() for n, y in found.items()]).sum()
    names = [n for n in x if f"grad/{n}" in stored]
    grads = torch.autograd.grad(loss, [x[n] for n in names], allow_unused=True, materialize_grads=True)
    found |= {f"grad/{n}": g for n, g in zip(names, grads, strict=True)}
    return found, {n: stored[n] for n in found}


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_the_naive_functions(case: str, backend: str) -> None:
    found, references = run(case, backend, torch.float64)
    for name, expected in references.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_float32_is_as_exact_as_the_naive_functions(case: str, backend: str) -> None:
    """At most ten times their float32 error, plus 1e-6 of the largest number; ten times that where beta is close to 2.

    Substitution over a chunk then loses a digit compared with the recurrence, since keys may be reflected repeatedly.
    """
    cfg, _ = load(case)
    measured = cfg["measured"]
    differences = {f"out/{n}": x for n, x in measured["maxdiff_f32_vs_f64"].items()}
    differences |= {f"grad/{n}": x for n, x in measured["maxdiff_grad_f32"].items()}
    factor = 10 if cfg.get("beta") == "two" and backend == "torch" else 1
    for name, (found, expected) in zip(differences, _pairs(case, backend, differences), strict=True):
        error = (found.double() - expected).abs().max().item()
        assert error <= factor * (10 * differences[name] + 1e-6 * max(1.0, expected.abs().max().item())), name


def _pairs(case: str, backend: str, names: dict[str, float]) -> list[tuple[Tensor, Tensor]]:
    found, expected = run(case, backend, torch.float32)
    return [(found[name], expected[name]) for name in names]


def test_a_decay_per_key_of_any_strength() -> None:
    """Stronger decays need shorter blocks, in which the inverses of weights are safe. All block lengths agree."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, decay = (torch.randn(1, 150, 2, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    lengths = []
    for strength in (0.1, 1.0, 2.0, 20.0):
        g = -strength * decay.abs()
        lengths.append(chunkwise.Decays(g[:, :128].reshape(2, 1, 2, 1, 64, 4), 1, False).levels[0].size)
        expected = output(q, k, v, decay=g, backend="reference")
        found = output(*(x.float() for x in (q, k, v)), decay=g.float(), backend="torch")
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 64
    assert lengths[-1] == 1


def test_the_decays_of_retention_are_float32_in_a_model_of_16_bits() -> None:
    op = of_models("ops.linear_attention").LinearAttention(heads=8, fixed_decay="retention")
    found = op.retention(torch.zeros(1, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    expected = torch.log1p(-(2.0 ** -torch.arange(5, 13, dtype=torch.float64)))
    assert (found.double() / expected - 1).abs().max() <= 2**-24


def test_tokens_after_a_strong_decay_keep_their_digits() -> None:
    """Sums of log decays over a chunk are relative: after -1000 a decay of 0.001 still has an effect."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 64, 1, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    for shape in ((1, 64, 1), (1, 64, 1, 4)):
        g = torch.full(shape, -0.001, dtype=torch.float64)
        g[:, :8] = -1000.0
        expected = output(q, k, v, decay=g, backend="reference")
        found = output(*(x.float() for x in (q, k, v)), decay=g.float(), backend="torch")
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("rule", ["add", "delta", "dplr"])
def test_a_closed_gate_is_exact(rule: str, per_key: bool) -> None:
    """A decay of -inf clears the state: no difference of two such decays is NaN, forward or in gradients."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, g, a = (torch.randn(1, 100, 2, 4, generator=generator, dtype=torch.float64) for _ in range(5))
    a, decay = torch.nn.functional.normalize(a, dim=-1), -g.abs()
    decay[:, 30], decay[:, 31:40], decay[:, 70] = -torch.inf, -300.0, -1e30
    x = {"q": q, "k": k, "v": v, "decay": decay if per_key else decay[..., 0]}
    x |= {"add": {}, "delta": {"k": a, "beta": g[..., 1].sigmoid()}, "dplr": {"a": -a, "b": 0.5 * a}}[rule]
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    found, expected = (output(**leaves, backend=backend) for backend in ("torch", "reference"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), [*leaves.values()]) for y in (found, expected)), strict=True)
    for name, (a, b) in zip(x, pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("per_key", [False, True])
def test_a_closed_gate_in_a_summary(per_key: bool) -> None:
    """The effect of tokens on a state, which sequence parallelism passes on, is that of the recurrence."""
    generator = torch.Generator().manual_seed(4)
    k, v, decay = (torch.randn(1, 6, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    state = torch.randn(1, 2, 4, 4, generator=generator, dtype=torch.float64)
    decay = -decay.abs() if per_key else -decay[..., 0].abs()
    decay[:, 3, 0] = -torch.inf
    leaves = [x.clone().requires_grad_() for x in (k, v, decay, state)]
    found = of_linear_attention(*leaves[:3])(leaves[3])
    _, expected = with_state(k, *leaves[:2], decay=leaves[2], state=leaves[3], backend="reference")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    pairs = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected))
    torch.testing.assert_close(*pairs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("heads", [2, 4, 12])
@pytest.mark.parametrize("reverse", [False, True])
def test_parts_of_a_long_sequence(heads: int, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes some tokens of `heads` heads at a time, of 3 sequences with 4 value heads each."""
    monkeypatch.setattr(chunkwise, "PART_TOKENS", 32)
    monkeypatch.setattr(chunkwise, "PART_ELEMENTS", 32 * 8 * heads)
    generator = torch.Generator().manual_seed(5)
    q, k, g = (torch.randn(3, 110, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    v, k = torch.randn(3, 110, 4, 8, generator=generator, dtype=torch.float64), 0.1 * k
    resets = torch.rand(3, 110, generator=generator) < 0.02
    x = {"q": q, "k": k, "v": v, "decay": -0.1 * g.abs().repeat_interleave(2, 2), "beta": v[..., 0].sigmoid()}
    x["state"] = torch.randn(3, 4, 8, 8, generator=generator, dtype=torch.float64)
    leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
    results = []
    for backend in ("torch", "reference"):
        y, last = with_state(**leaves, resets=resets, reverse=reverse, backend=backend)
        results.append([y, last, *torch.autograd.grad(y.square().sum() + last.square().sum(), [*leaves.values()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_decay_that_no_output_shows_stays_before_a_reset(backend: str, reverse: bool) -> None:
    """With a bonus, a token is read before its decay is applied, so NaN there is in no output of its sequence."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, decay = (torch.randn(1, 8, 2, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    last, after = (5, slice(0, 5)) if reverse else (2, slice(3, 8))
    decay[:, last] = torch.nan
    resets = torch.zeros(1, 8, dtype=torch.bool)
    resets[:, last + (-1 if reverse else 1)] = True
    leaves = [x.requires_grad_() for x in (q, k, v, decay)]
    bonus = torch.ones(2, 4, dtype=torch.float64)
    out = linear_attention(*leaves[:3], decay=decay, bonus=bonus, resets=resets, reverse=reverse, backend=backend)
    out[:, after].sum().backward()
    for x in leaves:
        ended = torch.ones(8, dtype=torch.bool)
        ended[after] = False
        assert x.grad is not None
        assert not x.grad[:, ended].any()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("rule", ["bonus", "dplr"])
def test_gradients_after_a_strong_decay_per_key(rule: str) -> None:
    """Reads before a token's own decay exclude the token itself: the exponent is the negated decay."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, g, a = (torch.randn(1, 40, 2, 4, generator=generator, dtype=torch.float64) for _ in range(5))
    a, x = torch.nn.functional.normalize(a, dim=-1), {"q": q, "k": k, "v": v, "decay": -1000 * g.abs()}
    x |= {"bonus": a[0, 0]} if rule == "bonus" else {"a": -a, "b": 0.5 * a}

    def gradients(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = {name: t.to(dtype).requires_grad_() for name, t in x.items()}
        loss = linear_attention(**leaves, backend=backend).square().sum()  # type: ignore[arg-type, union-attr]
        return list(torch.autograd.grad(loss, [*leaves.values()]))

    exact = gradients(torch.float64, "reference")
    for name, found, expected in zip(x, gradients(torch.float32, "torch"), exact, strict=True):
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max(), name


@pytest.mark.parametrize("decay", [None, "head", "key", "strong, of a key"])
@pytest.mark.parametrize("rule", ["add", "delta", "dplr"])
def test_heads_of_values_may_share_keys(rule: str, decay: str | None) -> None:
    """Under each rule and decay, the result equals that of the same keys repeated for each value head."""
    generator = torch.Generator().manual_seed(0)
    B, S, H, groups, K, V = 2, 37, 2, 3, 4, 5

    def drawn(*shape: int) -> Tensor:
        return torch.randn(B, S, *shape, dtype=torch.float64, generator=generator)

    q, k, v, more = drawn(H, K), drawn(H, K), drawn(H * groups, V), dict[str, Tensor]()
    if decay:
        strength = 40 if decay.startswith("strong") else 1
        more["decay"] = -strength * drawn(H * groups, *([K] if decay.endswith("key") else [])).exp()
    if rule == "delta":
        more["beta"] = drawn(H * groups).sigmoid()
    if rule == "dplr":
        more |= {"a": -drawn(H * groups, K) / 4, "b": drawn(H * groups, K) / 4}
    inputs = [x.requires_grad_() for x in (q, k, v, *more.values())]
    dy = drawn(H * groups, V)

    def results(backend: str, times: int, **options: Any) -> list[Tensor]:
        y = linear_attention(*(x.repeat_interleave(times, 2) for x in (q, k)), v, **more, backend=backend, **options)
        return [y, *torch.autograd.grad((y * dy).sum(), inputs)]

    exact = results("reference", groups)
    for chunk_size in (None, 1):
        for found, expected in zip(results("torch", 1, chunk_size=chunk_size), exact, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * expected.abs().max().item())

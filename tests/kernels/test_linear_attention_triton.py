"""The Triton kernels of linear attention: stored cases, and known faults of other kernels."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seqblocks.kernels import linear_attention, triton_common
from seqblocks.kernels.dispatch import custom_op
from seqblocks.kernels.linear_attention import torch as chunkwise
from seqblocks.kernels.linear_attention.triton import sizes
from seqblocks.kernels.mlstm.triton.sizes import CHUNK_MAX_TOKENS
from tests.kernels import test_linear_attention as stored
from tests.kernels.conformance import IMPLEMENTATIONS, INTERPRETED, Precision, Subject, check, draw, on_device
from tests.kernels.linear_attention import LINEAR_ATTENTION

SHORT = ("op_key_T9", "op_head_T1")
SLOW = (
    "op_gated_delta_T9", "op_rwkv6_T9", "op_kda_T1",
    "op_gated_delta_T65_resets", "op_head_T130_strong", "op_linear_normalized_T33",
    "op_delta_product_T17", "op_delta_T63_beta2",
)
LONG = (
    "op_kda_T65_gva", "op_gated_delta_T130_beta2_strong", "op_key_T130_strong", "op_rwkv6_T65_strong",
    "op_key_T65_resets", "op_kda_T130_strong",
)


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize(
    "case",
    [
        *SHORT,
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(case, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_float32_is_as_exact_as_the_naive_functions(case: str) -> None:
    """As for the torch implementation: ten times that error, plus 1e-6 of the largest number; ten times that where beta
    is close to 2."""
    cfg, _ = stored.load(case)
    measured = cfg["measured"]
    differences = {f"out/{n}": x for n, x in measured["maxdiff_f32_vs_f64"].items()}
    differences |= {f"grad/{n}": x for n, x in measured["maxdiff_grad_f32"].items()}
    factor = 10 if cfg.get("beta") == "two" else 1
    found, expected = stored.run(case, "triton", torch.float32)
    for name, bound in differences.items():
        error = (found[name].double() - expected[name]).abs().max().item()
        assert error <= factor * (10 * bound + 1e-6 * max(1.0, expected[name].abs().max().item())), name


@pytest.mark.slow
@INTERPRETED
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("per_key", [False, True])
def test_tokens_after_a_strong_decay_keep_their_digits(per_key: bool, delta: bool) -> None:
    """A decay of -1000 or -inf is followed by -0.001, within a block of 16 and across blocks."""
    q, k, v, g = (draw(1, 40, 1, 4, seed=at) for at in range(4))
    k, beta = torch.nn.functional.normalize(k, dim=-1), g[..., 0].sigmoid() if delta else None
    decay = torch.full((1, 40, 1, 4) if per_key else (1, 40, 1), -0.001, dtype=torch.float64)
    decay[:, :3], decay[:, 20] = -1000.0, -torch.inf

    def call(dtype: torch.dtype, backend: str) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = linear_attention(*leaves, decay=decay.to(dtype), beta=None if beta is None else beta.to(dtype),
                               backend=backend)
        assert isinstance(out, Tensor)
        return out, list(torch.autograd.grad(out.square().sum(), leaves))

    (expected, exact), (found, grads) = call(torch.float64, "reference"), call(torch.float32, "triton")
    for x, y in zip((found, *grads), (expected, *exact), strict=True):
        assert (x - y).abs().max() <= 2e-6 * y.abs().max()


@pytest.mark.parametrize("op", ["linear_attention", "mlstm"])
def test_nothing_is_transposed_added_atomically_or_left_to_a_scan_of_several_warps(op: str, root: Path) -> None:
    """Compilers for sm_90 have miscompiled transposed accumulators; scans run only in programs of one warp.

    One transposed tile is no accumulator: keys that have just been decayed, in `_add_halves` of the forward pass.
    """
    files = sorted((root / "kernels" / op / "triton").glob("*.py"))
    assert files
    for file in files:
        source = file.read_text(encoding="utf-8").replace("tl.trans(b)", "b")
        called = {
            node.attr for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tl"
        }
        assert not called & {"trans", "permute", "reshape", "view", "flip", "sort"}, file
        assert not {name for name in called if name.startswith("atomic")}, file
        if op == "linear_attention":
            assert not called & {"cumsum", "associative_scan"}, file


@on_device
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["key", "bonus", "delta", "gated delta", "key delta"])
def test_gradients_at_any_number_of_warps(
    variant: str, dtype: torch.dtype, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels had wrong gradients at one number of warps, with chunks of 64 tokens, and right ones at the next.
    """
    chosen = sizes.tiles

    def changed(*args: Any) -> dict[str, int]:
        return {**chosen(*args), "num_warps": warps}

    monkeypatch.setattr(sizes, "tiles", changed)
    subject = Subject(LINEAR_ATTENTION, variant, IMPLEMENTATIONS["gpu"])
    check(subject, subject.inputs(S=200, K=64, V=64), precision=Precision(dtype))


@INTERPRETED
@pytest.mark.parametrize("decay", ["head", "key"])
@pytest.mark.parametrize("delta", [False, True])
def test_offsets_within_a_chunk_fit_into_32_bits(decay: str, delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels multiply strides over tokens by places in a chunk, without 64 bits: tensors with longer ones are copied.
    """
    found: dict[str, int] = {}

    def launch(kernel: Any, grid: Any) -> Any:
        names = inspect.signature(kernel.function.fn).parameters
        return lambda *args, **options: found.update(zip(names, args, strict=False))

    def far(width: int) -> Tensor:
        return torch.empty_strided((1, 100, 1, width), (1 << 40, 1 << 27, width, 1), requires_grad=True)

    monkeypatch.setattr(triton_common.Kernel, "__getitem__", launch)
    monkeypatch.setattr(custom_op, "is_seen", lambda args: False)
    with FakeTensorMode():
        x = {name: far(16) for name in ("q", "k", "v")}
        x["decay"] = far(16) if decay == "key" else torch.empty(1, 100, 1, requires_grad=True)
        x |= {"beta": torch.empty(1, 100, 1)} if delta else {}
        y = linear_attention(**x, backend="triton")  # type: ignore[arg-type]
        assert isinstance(y, Tensor)
        y.backward(torch.empty_like(y))
    strides = {name: value for name, value in found.items() if name in ("qs", "ks", "vs", "gs", "ys")}
    assert {"qs", "ks"} < {*strides}
    assert max(strides.values()) * CHUNK_MAX_TOKENS < 1 << 31, strides


@pytest.mark.parametrize("rule", ["add", "delta", "dplr"])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_reset_stops_nan_without_a_check_of_results(rule: str, reverse: bool) -> None:
    """Only a CPU falls back to the definition. On other devices no product may include values that are not finite."""
    x = {name: draw(2, 40, 2, 4, seed=at) for at, name in enumerate(("q", "k", "v"))}
    x["decay"] = -draw(2, 40, 2, 4, seed=3).abs()
    if rule == "delta":
        x["beta"] = draw(2, 40, 2, seed=4).sigmoid()
    elif rule == "dplr":
        x |= {"a": -x["k"], "b": 0.1 * x["k"]}
    resets = torch.zeros(2, 40, dtype=torch.bool)
    resets[:, 17] = True
    before, after = (slice(18, 40), slice(0, 18)) if reverse else (slice(0, 17), slice(17, 40))
    expected = linear_attention(**x, resets=resets, reverse=reverse, backend="reference")  # type: ignore[arg-type]
    for name in x:
        bad = {**x, name: x[name].clone()}
        bad[name][0, before][1] = torch.nan
        with mock.patch.object(chunkwise, "_usable", return_value=True):
            found = linear_attention(**bad, resets=resets, reverse=reverse, backend="torch")  # type: ignore[arg-type]
        assert isinstance(found, Tensor)
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(found[:, after], expected[:, after], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)
        assert found[0, before].isnan().any()


@INTERPRETED
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy in the interpreter warns about every NaN
@pytest.mark.parametrize(
    "rule", ["head", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("key", "bonus", "delta"))]
)
@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_depends_on_a_fault_is_what_the_torch_implementation_finds(rule: str, reverse: bool) -> None:
    """Faults in all inputs and gradients, in sequences of a few tokens over two chunks: the same values are NaN."""
    S = 36
    x = {name: draw(1, S, 1 if rule == "key" and name != "v" else 2, 4, seed=at) for at, name in enumerate("qkv")}
    x["decay"] = -draw(1, S, 2, *((4,) if rule != "head" else ()), seed=3).abs()
    x["state"] = draw(1, 2, 4, 4, seed=6)
    if rule == "delta":
        x["k"], x["beta"] = torch.nn.functional.normalize(x["k"], dim=-1), draw(1, S, 2, seed=4).sigmoid()
    if rule == "bonus":
        x["bonus"] = draw(2, 4, seed=5)
    x = {name: tensor.float() for name, tensor in x.items()}
    resets = draw(1, S, seed=7) > 1.0
    dy, dlast = draw(1, S, 2, 4, seed=8).float(), draw(1, 2, 4, 4, seed=10).float()
    dy[:, S // 2 :] = 0.0  # no loss reads these tokens
    for at, name in enumerate(name for name in x if name not in ("state", "bonus")):
        x[name].view(1, S, -1)[0, at * 7 + 3, 0] = torch.inf if at % 2 else torch.nan
    x["state"][0, 1, 1, 2] = dlast[0, 0, 0, 0] = torch.nan
    dy[0, 12, 1, 2] = -torch.inf

    def run(backend: str) -> list[Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in x.items()}
        options: dict[str, Any] = {"resets": resets, "reverse": reverse, "return_state": True, "backend": backend}
        y, last = linear_attention(**leaves, **options)
        return [y, last, *torch.autograd.grad((y, last), [*leaves.values()], (dy, dlast))]

    expected = run("torch")
    for a, b in zip(run("triton"), expected, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, equal_nan=True)  # float32, sums of 36 terms of about 1
    assert all(b.isnan().any() and b.isfinite().any() for b in (expected[0], *expected[2:6]))

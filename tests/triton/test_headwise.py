"""The Triton forms of head_norm and headwise_linear, run by triton's interpreter, against their formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks.kernels import head_norm, headwise_linear, why
from seqblocks.kernels.head_norm import triton as head_norm_triton
from seqblocks.kernels.headwise_linear import triton as headwise_linear_triton
from tests.triton import compare
from tests.triton.compare import draw, float32_bar

pytestmark = compare.interpreted


def norm(*shape: int, heads: int = 3, affine: str = "weight bias") -> tuple[dict[str, Tensor], float]:
    """Tensors, and the bar: statistics are sums over a head, the gain's gradient over all tokens."""
    out = {"x": draw(*shape), "weight": draw(shape[-1], seed=1), "bias": draw(shape[-1], seed=2)}
    kept = {k: v for k, v in out.items() if k == "x" or k in affine}
    return kept, float32_bar(out["x"].numel() // heads)


def linear(*lead: int, G: int = 3, O: int = 4, I: int = 4, bias: bool = False) -> tuple[dict[str, Tensor], float]:
    out = {"x": draw(*lead, G * I), "weight": draw(G, O, I, seed=1)}
    return (out | {"bias": draw(G * O, seed=2)} if bias else out), float32_bar(out["x"].numel() // (G * I))


@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight bias"])
def test_head_norm_with_and_without_gain_and_bias(affine: str) -> None:
    given, bar = norm(2, 7, 24, affine=affine)
    compare.check(head_norm, given, bar, heads=3)


@pytest.mark.parametrize(("shape", "heads"), [((5, 18), 6), ((130, 20), 4), ((3, 37, 8), 1), ((2, 600), 2)])
def test_head_norm_of_any_shape(shape: tuple[int, ...], heads: int) -> None:
    given, bar = norm(*shape, heads=heads)
    compare.check(head_norm, given, bar, heads=heads)


PARTS = ["skip", "gate", "skip gate"]


def tail(*shape: int, parts: str, heads: int = 3, affine: str = "weight bias") -> tuple[dict[str, Tensor], float]:
    """With what blocks put behind a norm."""
    given, bar = norm(*shape, heads=heads, affine=affine)
    if "skip" in parts:
        given |= {"skip": draw(*shape, seed=3), "skip_weight": draw(shape[-1], seed=4)}
    return (given | {"gate": draw(*shape, seed=5)} if "gate" in parts else given), bar


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("affine", ["", "weight", "weight bias"])
def test_norm_skip_and_gate_in_one(parts: str, affine: str) -> None:
    given, bar = tail(2, 37, 24, parts=parts, affine=affine)
    compare.check(head_norm, given, bar, heads=3)


@pytest.mark.parametrize("activation", head_norm_triton.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_of_every_kind_in_narrow_dtypes(activation: str, dtype: torch.dtype) -> None:
    given, bar = tail(5, 24, parts="skip gate")
    narrow = ("x", "skip", "gate")
    compare.check(head_norm, given, bar, heads=3, activation=activation, dtype=dtype, narrow=narrow)


@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_norm_skip_and_gate_in_any_layout(view: compare.View) -> None:
    given, bar = tail(2, 7, 24, parts="skip gate")
    compare.check(head_norm, given, bar, heads=3, views=dict.fromkeys(("x", "skip", "gate"), view))


def test_a_gate_far_out_is_open_or_shut() -> None:
    given, bar = tail(5, 24, parts="gate")
    given["gate"] = given["gate"].sign() * 200
    compare.check(head_norm, given, bar, heads=3)


def test_head_norm_centres_before_it_squares() -> None:
    """A mean that is large against the spread costs digits of the input, not of the variance."""
    given, _ = norm(4, 24)
    given["x"] = given["x"] * 0.01 + 10
    # the input itself is rounded to 10 * 2^-24, which the division by 0.01 makes 1000 times larger; both forms see that
    compare.check(head_norm, given, 1000 * float32_bar(8), heads=3)


@pytest.mark.parametrize("S", [1, 2, 31, 32, 33, 130])
def test_headwise_linear_of_any_length(S: int) -> None:
    given, bar = linear(2, S)
    compare.check(headwise_linear, given, bar)


@pytest.mark.parametrize("blocks", [(1, 1, 1), (5, 2, 3), (2, 3, 2), (9, 4, 4), (17, 4, 8), (2, 16, 16)], ids=str)
def test_headwise_linear_with_any_blocks(blocks: tuple[int, int, int]) -> None:
    given, bar = linear(2, 5, **dict(zip("GOI", blocks, strict=True)), bias=True)
    compare.check(headwise_linear, given, bar)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "blocks", [(1, 1, 1), (5, 2, 3), (2, 3, 2), (40, 4, 4), (17, 4, 8), (5, 16, 16), (7, 13, 5)], ids=str
)
def test_headwise_linear_as_one_matrix(blocks: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of 16-bit numbers as many blocks as 64 channels hold; some are left over."""
    given, bar = linear(2, 5, **dict(zip("GOI", blocks, strict=True)))
    compare.check(headwise_linear, given, bar, narrow=("x", "weight"), dtype=dtype)


def test_headwise_linear_as_one_matrix_over_several_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headwise_linear_triton, "PROGRAMS", 1)
    given, bar = linear(2, 150)
    compare.check(headwise_linear, given, bar, narrow=("x", "weight"), dtype=torch.bfloat16)


@pytest.mark.parametrize("S", [8, 15, 16, 19])
def test_headwise_linear_by_several_tiles(S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are many tokens: a program of the backward pass goes through four tiles, some without a token."""
    monkeypatch.setattr(headwise_linear_triton, "PROGRAMS", 1)
    monkeypatch.setattr(headwise_linear_triton, "tiles", lambda *a: {"BT": 4, "BC": 8, "num_warps": 1})
    given, bar = linear(2, S)
    compare.check(headwise_linear, given, bar)


CALLS: dict[str, Any] = {
    "head_norm": (head_norm, head_norm_triton, norm(2, 7, 24), {"heads": 3}),
    "headwise_linear": (headwise_linear, headwise_linear_triton, linear(2, 7), {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_float32_inside(name: str, dtype: torch.dtype) -> None:
    kernel, _, (given, bar), options = CALLS[name]
    narrow = ("x",) if name == "head_norm" else ("x", "weight")
    compare.check(kernel, given, bar, dtype=dtype, narrow=narrow, **options)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("view", [compare.wide, compare.scattered, compare.turned])
def test_any_layout(name: str, view: compare.View) -> None:
    kernel, _, (given, bar), options = CALLS[name]
    compare.check(kernel, given, bar, views={"x": view}, **options)

    def sliced(**more: Any) -> Any:  # slices, transposes and sums hand back gradients with strides of their own
        y = kernel(**more)
        return y[..., ::2], y.transpose(0, 1), y.sum()

    compare.check(sliced, given, bar, **options)


@pytest.mark.parametrize("name", CALLS)
def test_empty(name: str) -> None:
    kernel, _, (given, _), options = CALLS[name]
    leaves = {k: v.float() for k, v in given.items()}
    for x in (leaves["x"][:0], leaves["x"][:, :0]):
        assert kernel(**{**leaves, "x": x}, backend="triton", **options).shape == x.shape


@pytest.mark.parametrize("name", CALLS)
def test_compile_and_export(name: str) -> None:
    kernel, _, (given, _), options = CALLS[name]
    leaves = [v.float().requires_grad_() for v in given.values()]

    def run(*x: Tensor) -> Any:
        return kernel(**dict(zip(given, x, strict=True)), backend="triton", **options)

    def everything(f: Any) -> list[Tensor]:
        y = f(*leaves)
        return [y, *torch.autograd.grad(y.square().sum(), leaves)]

    torch._dynamo.reset()
    for a, b in zip(
        everything(torch.compile(run, fullgraph=True, backend="aot_eager")), everything(run), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

    class Caller(torch.nn.Module):
        def forward(self, *x: Tensor) -> Any:
            return run(*x)

    length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
    plain = tuple(x.detach() for x in leaves)
    shapes = {"x": (length, *[None] * (len(plain) - 1))}
    program = torch.export.export(Caller(), plain, dynamic_shapes=shapes)
    assert f"{name}_triton" in str(program.graph)
    longer = torch.cat([plain[0], plain[0]], 1)
    torch.testing.assert_close(program.module()(longer, *plain[1:]), run(longer, *plain[1:]), rtol=0, atol=0)


def test_the_registration_is_sound() -> None:
    x, w, b = (torch.randn(*s, requires_grad=True) for s in ((5, 12), (12,), (12,)))
    torch.library.opcheck(head_norm_triton._op.traced, (x, w, b, None, None, None, 3, 1e-5, "none"))
    torch.library.opcheck(head_norm_triton._op.traced, (x, None, None, x, w, x, 3, 1e-5, "silu"))
    torch.library.opcheck(headwise_linear_triton._op.traced, (x, torch.randn(3, 2, 4, requires_grad=True)))


def test_autocast_does_what_it_does_to_the_torch_forms() -> None:
    for kernel, _, (given, _), options in CALLS.values():
        leaves = {k: v.float() for k, v in given.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = (kernel(**leaves, backend=form, **options) for form in ("triton", "torch"))
        assert found.dtype == expected.dtype
        # the same rounded operands; the sum of 4 products is rounded once, by the interpreter cut off
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-6)


def test_what_they_cannot_do_they_say() -> None:
    assert why("headwise_linear", device="cuda", block=(4, 16, 16))[0].can
    assert "torch's own" in why("headwise_linear", device="cuda", block=(4, 17, 16))[0].reason
    assert "at most 8192" in why("head_norm", device="cuda", heads=2, width=20_000)[0].reason
    assert "float64" in why("head_norm", device="cuda", dtype=torch.float64)[0].reason

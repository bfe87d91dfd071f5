"""Properties specific to the causal convolution: official numbers, the fast gradient, memory, addresses.

Common properties are in test_conformance.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqblocks.kernels import causal_conv, numerics, use_backend
from seqblocks.kernels.causal_conv import interface
from seqblocks.kernels.causal_conv import token as token_of_conv
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    Subject,
    assert_close,
    check,
    crossed,
    draw,
    of_models,
    with_gradients,
)  # fmt: skip
from tests.kernels.families import CAUSAL_CONV
from tests.torch import golden

CASES = sorted(p.stem for p in (golden.FOLDER / "xlstm").glob("conv1d_*.npz"))
TORCH, TRITON = (Subject(CAUSAL_CONV, "plain", IMPLEMENTATIONS[name]) for name in ("torch", "triton"))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_official_numbers(case: str, dtype: torch.dtype, backend: str) -> None:
    data, meta = golden.read(f"xlstm/{case}")
    x = {name: torch.tensor(data[name], dtype=dtype, requires_grad=True)
         for name in ("in/x", "w/conv.weight", "w/conv.bias") if name in data}
    y, state = causal_conv(*x.values(), return_state=True, backend=backend)  # type: ignore[misc]
    grads = torch.autograd.grad((y * torch.tensor(data["ct"], dtype=dtype)).sum(), [*x.values()])
    found = {"out": y.detach(), **{f"grad_{name}": g for name, g in zip(x, grads, strict=True)}}
    golden.compare(data, meta, found)
    if "state/last_inputs" in data:
        assert torch.equal(state.detach().double(), torch.tensor(data["state/last_inputs"]))


def test_the_fast_gradient_is_right_on_a_long_sequence() -> None:
    """The sequence is longer than the rows that are summed side by side, and no multiple of them. float32 uses the fast
    path."""
    check(TORCH, TORCH.inputs(batch=3, S=203, D=7), bar=CAUSAL_CONV.bar(3 * 203))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_fast_gradient_can_be_differentiated(activation: str | None) -> None:
    x = {name: t.float().requires_grad_() for name, t in TORCH.inputs(batch=1, S=15, state=False).items()}
    second = []
    for backend in ("reference", "torch"):
        y = TORCH(x, backend=backend, activation=activation)["out"]
        (g,) = torch.autograd.grad(y.square().sum(), x["weight"], create_graph=True)
        second.append(with_gradients({"gradient": g.square().sum()}, x))
    assert_close(*second, CAUSAL_CONV.bar(3 * 15))


@pytest.mark.parametrize("part", [1, interface.PART_ELEMENTS])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taps", [1, 4])
def test_fast_gradients_of_several_losses_at_once(
    taps: int, reverse: bool, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interface, "PART_ELEMENTS", part)
    monkeypatch.setattr(interface, "SUM_TOKENS", 4)
    shapes = (2, 15, 3), (3, 1, taps), (3,), (2, taps - 1, 3)
    leaves = [draw(*shape, seed=at).float().requires_grad_() for at, shape in enumerate(shapes)]
    x, weight, bias, state = leaves
    y = causal_conv(x, weight, bias, activation="silu", state=state, reverse=reverse, backend="torch")
    losses = draw(2, *shapes[0], seed=4).float()
    found = torch.autograd.grad(y, leaves, losses, is_grads_batched=True, retain_graph=True)  # type: ignore[call-overload]
    for at, loss in enumerate(losses):
        expected = torch.autograd.grad(y, leaves, loss, retain_graph=True)  # type: ignore[arg-type]
        torch.testing.assert_close([g[at] for g in found], [*expected], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("limit", [0, numerics.SAVED_MAX_BYTES])
def test_the_second_derivative_includes_the_activation(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values before the SiLU that the forward pass saved are constants, and must not be used for it."""
    monkeypatch.setattr(numerics, "SAVED_MAX_BYTES", limit)
    given = [torch.randn(*shape) for shape in ((2, 15, 8), (8, 1, 4), (8,))]

    def second(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, weight, bias = (each.to(dtype, copy=True).requires_grad_() for each in given)
        y = causal_conv(x, weight, bias, activation="silu", backend=backend)
        assert isinstance(y, Tensor)
        first = torch.autograd.grad(y.square().sum(), (x, weight, bias), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), (x, weight, bias))  # type: ignore[arg-type]

    for found, expected in zip(second("torch", torch.float32), second("reference", torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_the_last_state_does_not_hold_on_to_the_sequence() -> None:
    _, last = causal_conv(draw(2, 1000, 3), draw(3, 1, 4), return_state=True)  # type: ignore[misc]
    assert last.untyped_storage().nbytes() == last.numel() * last.element_size()


def test_one_channel_is_depthwise_or_mixing() -> None:
    x, weight = draw(1, 5, 1), draw(3, 1, 2, seed=1)
    assert_close({"out": causal_conv(x, weight)[..., 1:2]}, {"out": causal_conv(x, weight[1:2])}, 2**-50)


@INTERPRETED
def test_offsets_beyond_31_bits() -> None:
    """Tokens are 2^30 elements apart, in memory that is reserved and never touched."""
    try:
        memory = torch.empty(3 * 2**30 + 3, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system does not provide 6 GB of address space")
    far = memory.as_strided((1, 4, 3), (0, 2**30, 1))
    x = {name: t.float() for name, t in TRITON.inputs(batch=1, S=4).items()}
    far.copy_(x["x"])
    found = causal_conv(**{**x, "x": far}, backend="triton")
    assert torch.equal(found, causal_conv(**{**x, "x": far.contiguous()}, backend="triton"))


def test_the_reference_is_compiled_and_exported_for_any_length() -> None:
    class Caller(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, state: Tensor) -> Tensor:
            return causal_conv(x, weight, state=state)

    x = {name: t.float() for name, t in TORCH.inputs(S=11).items() if name != "bias"}
    length = {1: torch.export.Dim("length", min=2, max=1 << 20)}
    torch._dynamo.reset()
    with use_backend("reference"):
        compiled = torch.compile(Caller(), fullgraph=True, backend="aot_eager")
        assert_close({"out": compiled(*x.values())}, {"out": Caller()(*x.values())}, CAUSAL_CONV.bar(11))
        program = torch.export.export(Caller(), (*x.values(),), dynamic_shapes=(length, None, None))
        longer = (F.pad(x["x"], (0, 0, 0, 9)), x["weight"], x["state"])
        assert_close({"out": program.module()(*longer)}, {"out": Caller()(*longer)}, CAUSAL_CONV.bar(20))


@pytest.mark.parametrize("limit", [0, numerics.SAVED_MAX_BYTES])
def test_nothing_of_full_length_is_saved_but_the_input(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window is computed again; the values before the SiLU too, unless they are small."""
    monkeypatch.setattr(numerics, "SAVED_MAX_BYTES", limit)
    x, weight, bias = torch.randn(1, 300, 64, requires_grad=True), torch.randn(64, 1, 4), torch.randn(64)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        y = causal_conv(x, weight.requires_grad_(), bias, activation="silu", backend="torch")
    first, *others = (t for t in saved if t.numel() >= y.numel())
    assert first.data_ptr() == x.data_ptr()
    assert len(others) == (1 if limit else 0)
    for before in others:
        assert torch.equal(F.silu(before), y)


@pytest.mark.parametrize("limit", [0, numerics.SAVED_MAX_BYTES])
@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_of_a_sequence_equal_the_whole(reverse: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens are convolved in 5 chunks. Values are the same bits; sums over tokens differ by rounding."""
    inputs = [torch.randn(*shape) for shape in ((2, 150, 16), (16, 1, 4), (16,), (2, 3, 16))]

    def run() -> list[Tensor]:
        x, weight, bias, state = (t.clone().requires_grad_() for t in inputs)
        y = causal_conv(x, weight, bias, activation="silu", state=state, reverse=reverse, backend="torch")
        assert isinstance(y, Tensor)
        return [y, *torch.autograd.grad(y.square().sum(), (x, state, weight, bias))]

    whole = run()
    monkeypatch.setattr(interface, "PART_ELEMENTS", 1)
    monkeypatch.setattr(numerics, "SAVED_MAX_BYTES", limit)
    assert len(interface._chunks(inputs[0])) == 5
    y, dx, dstate, *sums = run()
    assert torch.equal(y, whole[0])
    assert torch.equal(dx, whole[1])
    assert torch.equal(dstate, whole[2])
    for found, expected in zip(sums, whole[3:], strict=True):  # sums of 300 products, each rounded by up to 2^-24
        torch.testing.assert_close(found, expected, rtol=0, atol=300 * 2**-24 * expected.abs().max().item())


@pytest.mark.parametrize("tokens", [40, 3000])
def test_a_backward_pass_within_autocast_is_computed_like_the_forward_pass(tokens: int) -> None:
    x, weight = (torch.randn(1, tokens, 64, requires_grad=True), torch.randn(64, 1, 4, requires_grad=True))
    for activation in (None, "silu"):
        y = causal_conv(x, weight, activation=activation)
        assert isinstance(y, Tensor)
        dy = torch.randn_like(y)
        expected = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(y, (x, weight), dy)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@crossed(("seq", [1, 2, 7]), ("B", [1, 3]), ("K", [2, 4]), ("activation", [None, "silu"]), ("biased", [False, True]))
def test_several_tokens_are_single_tokens(seq: int, B: int, K: int, activation: str | None, biased: bool) -> None:
    over_tokens = of_models("streaming.token_rows").over_tokens
    sizes = (5, 1, K), (5,), (B, K - 1, 5), (seq * B, 5)
    weight, bias, window, x = (torch.randn(size, dtype=torch.float64) for size in sizes)
    step = token_of_conv.prepare(weight, bias if biased else None, activation)
    found = step.several(B, window, x)
    torch.testing.assert_close([*found], [*over_tokens(step.one, B, [window], [x])])
    assert found[1].is_contiguous()
    assert found[1].untyped_storage().nbytes() == window.untyped_storage().nbytes()

"""Forward mode and torch.func: forms whose derivative is written out are passed over, and nothing is silently zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from seqblocks import kernels
from seqblocks.errors import BackendError
from seqblocks.kernels import dispatch

B, S, E, N = 2, 12, 8, 4


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


HEADS, GATE, WIDE = (B, S, 2, 4), (B, S, 2), (B, S, E)
# all but the first input of each
REST: dict[str, list[Tensor]] = {
    "mlstm": [rand(*shape, seed=1 + at) for at, shape in enumerate((HEADS, HEADS, GATE, GATE))],
    "slstm": [rand(*shape, seed=1 + at) for at, shape in enumerate((WIDE, WIDE, WIDE, (2, 4, 4, 4), (4, 2, 4)))],
    "selective_scan": [rand(*WIDE, seed=1), -rand(E, N, seed=2).exp(), rand(B, S, N, seed=3), rand(B, S, N, seed=4)],
    "centaurus": [
        -rand(E, N, seed=1).exp(), rand(E, N, seed=2), rand(E, seed=3).exp(), rand(E, seed=4), rand(E, seed=5),
        rand(E, N, seed=6),
    ],
    "causal_conv": [rand(E, 1, 3, seed=1)],
    "head_norm": [],
    "headwise_linear": [rand(4, 2, 2, seed=1)],
}


def call(op: str, x: Tensor, backend: str | None = None) -> Tensor:
    options: dict[str, Any] = {"head_norm": {"heads": 2}, "centaurus": {"mode": "dws"}}.get(op, {})
    y: Tensor = getattr(kernels, op)(x, *REST[op], **options, backend=backend)
    return y


def first(op: str) -> Tensor:
    return rand(*(HEADS if op == "mlstm" else WIDE))


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert tangent is not None
        return tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "dual": dual,
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1])),
    "hessian": lambda f, x: torch.func.hessian(lambda s: f(s * x).square().sum())(torch.ones(())),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", REST)
def test_as_the_definition(op: str, transform: str) -> None:
    found = TRANSFORMS[transform](lambda x: call(op, x), first(op))
    wanted = TRANSFORMS[transform](lambda x: call(op, x, "reference"), first(op))
    # float32, sums of at most a few hundred terms of order 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["mlstm", "slstm", "selective_scan", "centaurus", "causal_conv"])
def test_asked_for_by_name_they_say_what_they_lack(op: str) -> None:
    with pytest.raises(BackendError, match="reverse mode alone"):
        dual(lambda x: call(op, x, "torch"), first(op))
    call(op, first(op), "torch")  # outside of it they run


def test_what_was_passed_over_is_remembered() -> None:
    dual(lambda x: call("mlstm", x), first("mlstm"))
    assert "reverse mode alone" in dispatch.fallbacks()["mlstm"]["torch"]

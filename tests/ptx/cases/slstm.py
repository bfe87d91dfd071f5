"""The sLSTM: one program per head, by tiles of the head, by teams of programs that wait for one another."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from seqblocks import kernels
from tests.ptx.cases import bf16, case, cast, f16, f32, marks, randn
from tests.ptx.compare import Call


def slstm(
    dtype: torch.dtype, batch: int, tokens: int, heads: int, width: int, *, state: bool = True, resets: bool = False,
    reverse: bool = False, view: bool = False,
) -> Call:
    x = cast({name: randn(batch, tokens, heads * width, seed=at) for at, name in enumerate("ifzo")}, dtype, view)
    x |= {"recurrent": randn(heads, width, 4, width, seed=4) * width**-0.5, "bias": randn(4, heads, width, seed=5)}
    if state:
        y, c, n, m = (randn(batch, heads, width, seed=seed) for seed in (6, 7, 8, 9))
        x |= {"y0": y * 0.5, "c0": c, "n0": n.abs() + 1, "m0": m}

    def call(y0: Tensor | None = None, c0: Any = None, n0: Any = None, m0: Any = None, **rest: Any) -> Any:
        given = None if y0 is None else (y0, c0, n0, m0)
        return kernels.slstm(**rest, state=given, return_state=True)

    return call, x, {"resets": marks(batch, tokens, 0.2) if resets else None, "reverse": reverse}


def no_teams() -> Any:
    from seqblocks.kernels.slstm.triton import launch

    return mock.patch.object(launch, "_no_teams", {torch.device("cpu")})


case("slstm bf16 D=16 S=5", lambda: slstm(bf16, 3, 5, 1, 16, resets=True), dots=True)
case("slstm f32 D=20 S=5 reverse", lambda: slstm(f32, 2, 5, 2, 20, resets=True, reverse=True), dots=True)
case("slstm f16 D=32 S=4", lambda: slstm(f16, 17, 4, 1, 32, resets=True, view=True), dots=True)
case("slstm bf16 D=64 S=4", lambda: slstm(bf16, 3, 4, 1, 64, resets=True), dots=True)
case("slstm f32 D=64 S=3", lambda: slstm(f32, 2, 3, 1, 64, resets=True), dots=True)
case("slstm f32 D=100 team S=3", lambda: slstm(f32, 2, 3, 1, 100, resets=True, reverse=True), dots=True)
case("slstm f16 D=70 team S=3", lambda: slstm(f16, 2, 3, 1, 70, resets=True), dots=True)
case("slstm f32 D=100 tiles S=3", lambda: slstm(f32, 2, 3, 1, 100, resets=True), context=no_teams, dots=True)
case("slstm bf16 D=136 tiles S=3", lambda: slstm(bf16, 2, 3, 1, 136, reverse=True), context=no_teams, dots=True)
case("slstm f16 D=70 tiles S=3", lambda: slstm(f16, 2, 3, 1, 70, resets=True), context=no_teams, dots=True)
case("slstm bf16 D=128 S=3", lambda: slstm(bf16, 2, 3, 1, 128, resets=True), slow=True, dots=True)
case("slstm bf16 D=240 team S=3", lambda: slstm(bf16, 2, 3, 1, 240, resets=True), slow=True, dots=True)

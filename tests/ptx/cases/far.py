"""Sequences of a batch 2^30 elements apart: offsets in 32 bits would overflow. The memory between is never touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.ptx.cases import bf16, case, f16
from tests.ptx.cases.chunks import MANY_CHUNKS, linear, mlstm
from tests.ptx.cases.rows import conv
from tests.ptx.cases.scans import SEGMENTS, bank, scan
from tests.ptx.cases.slstm import slstm
from tests.ptx.compare import Call

BATCH = 3


def apart(x: Tensor) -> Tensor:
    if not x.is_floating_point() or x.dim() < 3 or x.shape[0] != BATCH:
        return x
    far = torch.empty_strided(x.shape, (1 << 30, *x.stride()[1:]), dtype=x.dtype)
    far.copy_(x)
    return far


def far(name: str, make: Callable[[], Call], **facts: Any) -> None:
    def moved() -> Call:
        call, tensors, options = make()
        return call, {key: apart(x) for key, x in tensors.items()}, options

    case(f"far {name}", moved, slow=True, **facts)


far("causal_conv bf16", lambda: conv(bf16, BATCH, 5, 6, 4, state=False, resets=True), length=200)
far("scan bf16 N=16", lambda: scan(bf16, BATCH, 5, 6, 16, state=False, resets=True))
far("scan bf16 segments", lambda: scan(bf16, BATCH, 35, 6, 4, state=False, resets=True), sizes=SEGMENTS)
far("scan token", lambda: scan(bf16, BATCH, 1, 6, 16, 2, state=False), gradients=False)
far("centaurus bf16 dws", lambda: bank(bf16, "dws", 9, 5, 5, 2, BATCH, state=False, keeps=False), dots=True)
far("mlstm bf16", lambda: mlstm(bf16, BATCH, 17, 1, 16, 16, state=False, resets=True), dots=True)
far("mlstm many chunks", lambda: mlstm(bf16, BATCH, 70, 1, 16, 16, state=False, resets=True), sizes=MANY_CHUNKS,
    dots=True)
far("mlstm step", lambda: mlstm(bf16, BATCH, 1, 1, 16, 16, state=False), gradients=False)
for name, decay, delta in (("GLA", "key", False), ("retention", "head", False), ("GDN", "head", True)):
    far(f"{name} bf16", lambda decay=decay, delta=delta: linear(
        bf16, 17, 1, 1, 16, 16, decay, delta=delta, batch=BATCH, state=False, resets=True), dots=True)
far("slstm bf16", lambda: slstm(bf16, BATCH, 3, 1, 16, state=False, resets=True), dots=True)
far("slstm f16 team", lambda: slstm(f16, BATCH, 2, 1, 70, state=False), dots=True)

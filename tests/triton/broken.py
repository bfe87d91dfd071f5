"""An op whose Triton implementation crashes in ways that a check must survive. The process of the check imports it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor

from seqblocks.kernels import dispatch

if os.environ.get("BROKEN_ABORTS"):
    os.abort()  # like a driver that does not work at all


def double(x: Tensor, how: str = "", backend: str | None = None) -> Tensor:
    return dispatch.choose("broken", backend, {"x": x}, how=how)(x, how)


def triton(x: Tensor, how: str) -> Tensor:
    if how == "abort":
        os.abort()  # like an assertion of a driver
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)  # like a system without free memory
    if how == "hang":
        time.sleep(600)
    if how == "illegal access":
        x[torch.tensor([1 << 40], device=x.device)].sum().item()  # an assertion on the device
    if how == "raise":
        raise RuntimeError("out of resource: shared memory\nand more")
    return x * (2.1 if how == "wrong" else 2)


def reference(x: Tensor, how: str) -> Tensor:
    if how == "no memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if how == "no reference":
        raise NotImplementedError("not for this device")
    return x * 2


def example(how: str, **facts: Any) -> Any:
    print("what others print does not matter")
    return double, {"x": torch.ones(3)}, {"how": how}


dispatch.register("broken", "triton", triton, dispatch.always("a test"), lambda *a, **facts: {}, example)
dispatch.register("broken", "torch", reference, dispatch.always("a test"))
dispatch.register("broken", "reference", reference, dispatch.always("a test"))

"""What the Triton implementations share: whether they can run, where they run, and on which architecture.

A file that imports `jit` and `tl` from here can be imported where triton cannot: its kernels are then plain functions
that nobody calls, because `can` says no.

Under TRITON_INTERPRET=1 (set before triton is first imported) kernels run on the CPU, some thousand times slower. That
is for tests, so `auto` does not choose it; `backend="triton"` does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, no_type_check

import torch
from torch import Tensor

from seqblocks.kernels.dispatch.compiled import constant

MISSING = ""
tl: Any = None
try:
    jit: Any = importlib.import_module("triton").jit
    tl = importlib.import_module("triton.language")
except Exception as error:  # whatever ails an installation of triton must not take the other implementations down
    MISSING = f"triton cannot be imported here: {error}"

    def jit(function: Any = None, **options: Any) -> Any:
        return function or jit


def constexpr(value: float) -> Any:
    """A number that kernels may read as a global name."""
    return value if tl is None else tl.constexpr(value)


class Kernel:
    """A Triton function that Python launches as `kernel[grid](...)`, with the options that every launch has."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.function[grid], **launch_options())


def kernel(**options: Any) -> Callable[[Any], Kernel]:
    """Decorate a kernel. (Functions that kernels call are decorated with `jit`.)"""
    return lambda function: Kernel(jit(function, **options))


@cache
def launch_options() -> dict[str, bool]:
    """Options of every launch. Fused multiply-adds are asked for, because Triton 3.10 turns them off by default."""
    module, options = ("amd", "HIPOptions") if torch.version.hip else ("nvidia", "CUDAOptions")
    known = getattr(importlib.import_module(f"triton.backends.{module}.compiler"), options).__dataclass_fields__
    return {"enable_fp_fusion": True} if "enable_fp_fusion" in known else {}


# settled when kernels are decorated, which is when this file's importers are imported
INTERPRETED = not MISSING and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "y", "on")
# Shared bytes that a program may have (CUDA C programming guide, table of compute capabilities: 163, 99 or 227 KB)
SHARED = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_87": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448,
    "sm_103": 232_448, "sm_120": 101_376, "sm_121": 101_376, "gfx942": 65_536,
}
# of an A100, A40, L40S, H100 or H200, B200, RTX 5090, MI300X, where none is there
PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
OLDEST = (8, 0)  # compute capability; older ones are not compiled for in the tests
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can(
    device: str = "cuda", dtype: torch.dtype = torch.float32, requested_backend: str = "", arch: str = "",
    index: int | None = None, **facts: Any,
) -> tuple[bool, str]:
    """Return whether Triton can run here, and the reason: the part of `can` that does not depend on the op.

    Facts that are left out are no obstacle. `requested_backend` is empty in `why`, which probes no device; an
    architecture may be given there.
    """
    if MISSING:
        return False, MISSING
    if dtype not in DTYPES:
        return False, f"{str(dtype).removeprefix('torch.')}: Triton implementations compute in float32"
    if device == "cuda":
        if _too_old(arch or (_arch_at(index) if requested_backend else "")):
            return False, f"needs compute capability {'.'.join(map(str, OLDEST))} or later"
        return True, "compiled for the device"
    if device == "cpu" and INTERPRETED:
        return requested_backend == "triton", "triton's interpreter, for tests: only where backend='triton' asks for it"
    return False, f"needs a CUDA or ROCm device, not {device}"


def can_unless(refusal: Callable[..., str]) -> Callable[..., tuple[bool, str]]:
    """Return the `can` of an op from `refusal(**facts)`: the reason why its kernels do not take these facts, or ""."""

    def can_run(**facts: Any) -> tuple[bool, str]:
        able, reason = can(**facts)
        refused = refusal(**facts) if able else ""
        return (False, refused) if refused else (able, reason)

    return can_run


def _too_old(arch: str) -> bool:
    return arch.startswith("sm_") and int(arch[3:].rstrip("af")) < 10 * OLDEST[0] + OLDEST[1]


@constant
def _arch_at(index: int | None) -> str:
    """Of a device that a call is on; "" where there is none."""
    if not torch.cuda.is_available():
        return ""
    return arch_of(torch.cuda.current_device() if index is None else index)


@cache
def arch_of(index: int) -> str:
    """Architecture of a device: "sm_90", "gfx942", …"""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def arch(x: Tensor) -> str:
    """Of the device that holds x: "sm_90", "gfx942", …; "cpu" in the interpreter."""
    return arch_of(x.device.index) if x.is_cuda else "cpu"


def processors(x: Tensor) -> int:
    """Multiprocessors of the device that holds x; 0 in the interpreter."""
    if x.is_cuda:
        return processors_of(x.device.index)
    return PROCESSORS.get(arch(x), 0)


def processors_of(index: int) -> int:
    """Multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def shared(x: Tensor) -> int:
    """Shared bytes that a program on the device of x may have; 0 in the interpreter."""
    return shared_of(x.device.index) if x.is_cuda else SHARED.get(arch(x), 0)


def shared_of(index: int) -> int:
    """Shared bytes that a program on a device may have, as it says itself."""
    found = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    return int(found) or SHARED.get(arch_of(index), 0)


def on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on the device that holds x, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def last_contiguous(x: Tensor) -> Tensor:
    """x with its last axis contiguous: the one demand that the kernels make of a layout.

    Ops ask for it themselves, inside: a compiler may hand them other strides than the caller had.
    """
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def near(x: Tensor, tokens: int) -> Tensor:
    """x [B, S, E] or [B, S, G, N] in lines, with all of a token, and so many tokens from any one on, within 31 bits."""
    return last_contiguous(x) if max(x.stride(1) * tokens, x.stride(2) * x.shape[2]) < 2**31 else x.contiguous()


def marks(resets: Tensor | None) -> Tensor | None:
    """Resets as kernels read them: a byte a token, side by side. Of marks, themselves."""
    return None if resets is None else resets.to(torch.uint8).contiguous()


def warps(elements: int, each: int, lanes: int = 32) -> int:
    """As many warps of `lanes` threads, a power of two up to 8, as leave about `each` of `elements` to a thread."""
    return max(1, min(8, elements // (each * lanes)))


def lanes(arch: str) -> int:
    """Threads of a warp."""
    return 64 if arch.startswith("gfx9") else 32


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def filled(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient of an output that the loss may not contain. Autograd's own zeros would be made for every output,
    for what is only kept for the backward pass too: `ctx.set_materialize_grads(False)` keeps it from that."""
    return torch.zeros_like(like) if grad is None else grad


# ------------------------------------------------------------------------------
# What kernels share


@jit
@no_type_check
def binary(log):
    """A natural logarithm as a binary one."""
    return log * 1.4426950408889634


@jit
@no_type_check
def exp(x):
    """e^x. `tl.exp` compiles to five instructions, of which three serve results below 1e-38; this to two."""
    return tl.exp2(binary(x))


@jit
@no_type_check
def reciprocal(x):
    """1 / x of an x from 1 up, within 4e-7 of itself. A division is five instructions more, for smaller ones.

    NVIDIA's inverse square root is within 2^-22.9 of itself; its square within twice that, and a rounding. Where 1 / x
    is below 1.2e-38 it may be 0.
    """
    r = tl.math.rsqrt(x)
    return r * r


@jit
@no_type_check
def operand(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """x as a dot takes it. Of float32 that goes through tf32, tensor cores cut 13 bits off: rounded to nearest before,
    ties away from zero, these are zeros. (float16 and bfloat16 have fewer digits than tf32.)

    Added to the bits, half a unit carries into the exponent as it should, up to infinity; a NaN is left as it is.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x == x, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)
    else:
        return x.to(DOT)


@jit
@no_type_check
def log_sigmoid(x):
    """min(x, 0) - log(1 + e^-|x|), as 2 artanh(r), r = v / (2 + v) <= 1/3.

    The series leaves out 1.4e-8 of the logarithm at any x; `reciprocal` adds its 4e-7, and the exponential what its
    argument's rounding makes of it.
    """
    v = exp(-tl.abs(x))
    r = v * reciprocal(2.0 + v)
    y = r * r
    series = 1.0 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13))))))
    return tl.minimum(x, 0.0) - 2.0 * r * series


@jit
@no_type_check
def softplus(x):
    """log(1 + e^x), as exact as log_sigmoid, for values next to zero too."""
    return -log_sigmoid(-x)


@jit
@no_type_check
def silu(x):
    return x * reciprocal(1.0 + exp(-x))


@jit
@no_type_check
def sigmoid(x):
    """1 / (1 + e^-x), of an exponential that cannot overflow."""
    v = exp(-tl.abs(x))
    return tl.where(x < 0.0, v, 1.0) * reciprocal(1.0 + v)

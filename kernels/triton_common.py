"""Helpers of the Triton implementations: whether they can run, devices, architectures, launches, shared functions.

A file that imports `jit` and `tl` from here can be imported where triton is not installed: its kernels are then plain
functions, which are never called because `can` returns False.

Under TRITON_INTERPRET=1 (set before triton is first imported) kernels run on the CPU, about a thousand times slower.
This is for tests: it has to be requested by `backend="triton"`, and "auto" does not choose it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Collection
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
except Exception as error:  # A broken installation of triton must not disable the other implementations.
    MISSING = f"triton cannot be imported here: {error}"

    def jit(function: Any = None, **options: Any) -> Any:
        return function or jit


def constexpr(value: float) -> Any:
    """Return a number that kernels may read as a global variable."""
    return value if tl is None else tl.constexpr(value)


class Kernel:
    """A Triton function launched from Python as `kernel[grid](...)`, with the options common to all launches.

    general: names of arguments for whose values Triton does not compile anew.
    """

    def __init__(self, function: Any, general: Collection[str] = ()) -> None:
        self.function, self.general = function, general

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self.function[grid], **launch_options())


def kernel(**options: Any) -> Callable[[Any], Kernel]:
    """Return a decorator for kernels, with these options of `triton.jit`. Functions that kernels call use `jit`."""
    return lambda function: Kernel(jit(function, **options), options.get("do_not_specialize", ()))


@cache
def launch_options() -> dict[str, bool]:
    """Return the options of every launch.

    They enable fused multiply-adds, which Triton 3.10 disables by default.
    """
    refused_ptxas()
    module, options = ("amd", "HIPOptions") if torch.version.hip else ("nvidia", "CUDAOptions")
    known = getattr(importlib.import_module(f"triton.backends.{module}.compiler"), options).__dataclass_fields__
    return {"enable_fp_fusion": True} if "enable_fp_fusion" in known else {}


WRONG_PTXAS = "12.8"  # its code for sm_90 may read registers that nothing has written: docs/kernels/compiler_faults.md


@cache
def refused_ptxas() -> str:
    """Return why kernels for GPUs since sm_90 cannot be assembled here, or "".

    If the ptxas that Triton uses is wrong, this replaces it by the newer one that Triton brings for Blackwell GPUs, for
    all kernels of the process and, through TRITON_PTXAS_PATH, of its children. Triton 3.5 brings no newer one, and
    Triton 3.8 and later use newer ones themselves.
    """
    try:
        tools = importlib.import_module("triton").knobs.nvidia
        wrong = tools.ptxas.version == WRONG_PTXAS
    except (AttributeError, RuntimeError):  # a Triton with other names, or without ptxas
        return ""
    if not wrong:
        return ""
    with contextlib.suppress(AttributeError, RuntimeError):  # a Triton without the newer one
        newer = tools.ptxas_blackwell
        if newer.version != WRONG_PTXAS:
            tools.ptxas = newer.path
            importlib.import_module("triton.backends.nvidia.compiler").get_ptxas_version.cache_clear()
            return ""
    return f"ptxas {WRONG_PTXAS} makes wrong code: set TRITON_PTXAS_PATH to a ptxas of version 12.9 or later"


# Triton reads the variable when kernels are decorated, that is, when the files that import this one are imported.
INTERPRETED = not MISSING and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "y", "on")
# Bytes of shared memory available to a program (CUDA C programming guide, compute capabilities: 163, 99 or 227 KB)
SHARED = {
    "sm_80": 166_912, "sm_86": 101_376, "sm_87": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448,
    "sm_103": 232_448, "sm_120": 101_376, "sm_121": 101_376, "gfx942": 65_536,
}
# Multiprocessors of an A100, A40, L40S, H100 or H200, B200, RTX 5090 and MI300X, used if no device is present
PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
OLDEST = (8, 0)  # compute capability; the tests do not compile for older ones
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can(
    device: str = "cuda", dtype: torch.dtype = torch.float32, requested_backend: str = "", arch: str = "",
    index: int | None = None, **facts: Any,
) -> tuple[bool, str]:
    """Return whether Triton can run here, and the reason, as far as these do not depend on the op.

    Facts that are left out are assumed to be supported. `why` leaves requested_backend empty, so that no device is
    queried; it may pass arch.
    """
    if MISSING:
        return False, MISSING
    if dtype not in DTYPES:
        return False, f"{str(dtype).removeprefix('torch.')}: Triton implementations compute in float32"
    if device == "cuda":
        arch = arch or (_arch_at(index) if requested_backend else "")
        if _older(arch, OLDEST):
            return False, f"needs compute capability {'.'.join(map(str, OLDEST))} or later"
        refused = "" if not arch.startswith("sm_") or _older(arch, (9, 0)) else _refused_ptxas()
        return (False, refused) if refused else (True, "compiled for the device")
    if device == "cpu" and INTERPRETED:
        return requested_backend == "triton", "triton's interpreter, for tests: request it with backend='triton'"
    return False, f"needs a CUDA or ROCm device, not {device}"


def can_unless(refusal: Callable[..., str]) -> Callable[..., tuple[bool, str]]:
    """Return the `can` of an op from `refusal(**facts)`: why its kernels do not support these facts, or ""."""

    def can_run(**facts: Any) -> tuple[bool, str]:
        able, reason = can(**facts)
        refused = refusal(**facts) if able else ""
        return (False, refused) if refused else (able, reason)

    return can_run


def _older(arch: str, capability: tuple[int, int]) -> bool:
    return arch.startswith("sm_") and int(arch[3:].rstrip("af")) < 10 * capability[0] + capability[1]


@constant
def _refused_ptxas() -> str:
    return refused_ptxas()


@constant
def _arch_at(index: int | None) -> str:
    """Return the architecture of a device, by default the current one; "" without a device."""
    if not torch.cuda.is_available():
        return ""
    return arch_of(torch.cuda.current_device() if index is None else index)


@cache
def arch_of(index: int) -> str:
    """Return the architecture of a device: "sm_90", "gfx942", …"""
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def arch(x: Tensor) -> str:
    """Return the architecture of the device of x: "sm_90", "gfx942", …; "cpu" in the interpreter."""
    return arch_of(x.device.index) if x.is_cuda else "cpu"


def processors(x: Tensor) -> int:
    """Return the number of multiprocessors of the device of x; 0 in the interpreter."""
    if x.is_cuda:
        return processors_of(x.device.index)
    return PROCESSORS.get(arch(x), 0)


def processors_of(index: int) -> int:
    """Return the number of multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def shared(x: Tensor) -> int:
    """Return the bytes of shared memory available to a program on the device of x; 0 in the interpreter."""
    return shared_of(x.device.index) if x.is_cuda else SHARED.get(arch(x), 0)


def shared_of(index: int) -> int:
    """Return the bytes of shared memory available to a program, as reported by the device."""
    found = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    return int(found) or SHARED.get(arch_of(index), 0)


def on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that makes the device of x current for launches."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def last_contiguous(x: Tensor) -> Tensor:
    """Return x with its last axis contiguous, which is all that the kernels require of a layout.

    Ops call this in their bodies, because a compiler may pass them tensors with other strides than the caller's.
    """
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def near(x: Tensor, tokens: int) -> Tensor:
    """Return x [B, S, E] or [B, S, G, N] with its last axis contiguous and offsets that fit into 31 bits.

    This holds for offsets within a token, and for those of this many tokens from any token on.
    """
    return last_contiguous(x) if max(x.stride(1) * tokens, x.stride(2) * x.shape[2]) < 2**31 else x.contiguous()


def token_strides(*tensors: Tensor | None) -> list[int]:
    """Return the strides over batch, tokens and heads; zeros for absent tensors."""
    return [n for x in tensors for n in ((0, 0, 0) if x is None else x.stride()[:3])]


def marks(resets: Tensor | None) -> Tensor | None:
    """Return resets as kernels read them: one byte per token, contiguous. Marks are returned unchanged."""
    return None if resets is None else resets.to(torch.uint8).contiguous()


def warps(elements: int, each: int, lanes: int = 32) -> int:
    """Return the number of warps of `lanes` threads, at most 8, with which a thread has about `each` of `elements`."""
    return max(1, min(8, elements // (each * lanes)))


def tiles_of_rows(width: int, widest: int, backward: bool) -> dict[str, int]:
    """Return the rows BT and (padded) features BD that a program of a norm processes at a time, and its warps.

    widest: the largest width of the kernel, for which the backward pass uses 16 warps.
    """
    BD = power_of_two(width)
    BT = max(1, 2048 // BD)
    count = 16 if backward and widest == BD else warps(BT * BD, 8 if backward else 16)
    return {"BT": BT, "BD": BD, "num_warps": count}


def lanes(arch: str) -> int:
    """Return the number of threads of a warp."""
    return 64 if arch.startswith("gfx9") else 32


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


# ------------------------------------------------------------------------------
# Functions that kernels share


@jit
@no_type_check
def binary(log):
    """Convert a natural logarithm to a binary one."""
    return log * 1.4426950408889634


@jit
@no_type_check
def exp(x):
    """Return e^x in two instructions. `tl.exp` compiles to five, three of them for results below 1e-38."""
    return tl.exp2(binary(x))


@jit
@no_type_check
def reciprocal(x):
    """Return 1 / x for x >= 1, with a relative error of at most 4e-7.

    A division takes five more instructions, to support smaller x. The relative error of NVIDIA's inverse square root is
    at most 2^-22.9; that of its square is at most twice as large, plus a rounding. The result may be 0 if 1 / x is
    below 1.2e-38.
    """
    r = tl.math.rsqrt(x)
    return r * r


@jit
@no_type_check
def load_tile(x, rows, columns, is_row, is_column):
    """Load the tile at offsets rows and columns, with zeros where the masks are false."""
    return tl.load(x + rows[:, None] + columns[None, :], is_row[:, None] & is_column[None, :], 0.0)


@jit
@no_type_check
def operand(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Convert x to an operand of a dot: to the dtype DOT, or for tf32 rounded to nearest, ties away from zero.

    Tensor cores truncate float32 operands to tf32 by 13 bits; after this rounding, these bits are zeros. (float16 and
    bfloat16 have fewer digits than tf32.) Half a unit is added to the bit pattern: the carry into the exponent is
    correct, up to infinity. NaNs are unchanged.
    """
    if PRECISION == "tf32" and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        return tl.where(x == x, (bits + 0x1000) & -0x2000, bits).to(tl.float32, bitcast=True)
    else:
        return x.to(DOT)


@jit
@no_type_check
def log_sigmoid(x):
    """Return min(x, 0) - log(1 + v), v = e^-|x|, with the logarithm as 2 artanh(r), r = v / (2 + v) <= 1/3.

    Relative errors of the logarithm: at most 1.4e-8 from truncating the series, 4e-7 from `reciprocal`, and the effect
    of rounding the argument of the exponential.
    """
    v = exp(-tl.abs(x))
    r = v * reciprocal(2.0 + v)
    y = r * r
    series = 1.0 + y * (1 / 3 + y * (1 / 5 + y * (1 / 7 + y * (1 / 9 + y * (1 / 11 + y * (1 / 13))))))
    return tl.minimum(x, 0.0) - 2.0 * r * series


@jit
@no_type_check
def softplus(x):
    """Return log(1 + e^x), with the relative error of `log_sigmoid`, also for results close to zero."""
    return -log_sigmoid(-x)


@jit
@no_type_check
def silu(x):
    return x * reciprocal(1.0 + exp(-x))


@jit
@no_type_check
def sigmoid(x):
    """Return 1 / (1 + e^-x), computed from e^-|x|, which cannot overflow."""
    v = exp(-tl.abs(x))
    return tl.where(x < 0.0, v, 1.0) * reciprocal(1.0 + v)


@jit
@no_type_check
def normalised(value, mask, D, eps, CENTRED: tl.constexpr):
    """Return rows [BT, BD] of D columns scaled to mean square 1, after subtracting their mean if CENTRED, and the
    scales."""
    if CENTRED:
        value = tl.where(mask, value - (tl.sum(value, 1) / D)[:, None], 0.0)
    spread = tl.sum(value * value, 1) / D + eps
    # With eps = 0, a row after the end would divide by its mean square of 0.
    scale = 1.0 / tl.sqrt_rn(tl.where(spread > 0.0, spread, 1.0))
    return value * scale[:, None], scale


@jit
@no_type_check
def load_row(x, columns, mask):
    """Load a row of some columns in float32."""
    return tl.load(x + columns, mask, 0.0).to(tl.float32)[None, :]


@jit
@no_type_check
def load_gain(weight, columns, mask, ONE_PLUS: tl.constexpr):
    """Load the weights of some columns that a norm multiplies by; ONE_PLUS: 1 + weight."""
    gain = load_row(weight, columns, mask)
    if ONE_PLUS:
        gain += 1.0
    return gain

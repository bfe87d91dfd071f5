"""Types of PTX as numpy dtypes, and conversions from and to bfloat16, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LANES = 32
LANE = np.arange(LANES)

# bfloat16, tf32 and packed pairs are held as their bits.
TYPES: dict[str, Any] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32, "tf32": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
    "bf16x2": np.uint32, "f16x2": np.uint32, "pred": np.bool_,
}
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


class Fault(Exception):
    """Execution cannot go on, or would have no defined result."""


def size_of(dtype: str) -> int:
    """Return the size of a type in bytes."""
    return np.dtype(TYPES[dtype]).itemsize


def is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


def unsigned(size: int) -> Any:
    """Return the unsigned dtype of this many bytes."""
    return np.dtype(f"u{size}")


def from_bf16(bits: Array) -> Array:
    """Convert bfloat16, held as uint16, to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: Any) -> Array:
    """Round float32 or float64 to bfloat16, held as uint16: to nearest, ties to even. NaN becomes 0x7FFF."""
    values = np.asarray(values)
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
    if values.dtype == np.float64:  # Round to odd first, so that the second rounding cannot meet a tie that is none.
        single = bits.view(np.float32).astype(np.float64)
        away = np.where(np.abs(single) > np.abs(values), -1, 1).astype(np.int64)
        inexact = (single != values) & (bits & 1 == 0) & np.isfinite(single)
        bits = np.where(inexact, bits.astype(np.int64) + away, bits).astype(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def halves(pair: Array) -> tuple[Array, Array]:
    """Return the lower and upper 16 bits of 32."""
    return (pair & np.uint32(0xFFFF)).astype(np.uint16), (pair >> np.uint32(16)).astype(np.uint16)


def pair(low: Array, high: Array) -> Array:
    """Return 32 bits from two times 16."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def values_of(bits: Array, dtype: str) -> Array:
    """Return 16-bit floats of this type, held as uint16, as float64."""
    return (from_bf16(bits) if dtype == "bf16" else bits.view(np.float16)).astype(np.float64)


def bits_of(values: Array, dtype: str) -> Array:
    """Round float64 to 16-bit floats of this type, as uint16."""
    return to_bf16(values) if dtype == "bf16" else np.asarray(values).astype(np.float16).view(np.uint16)


def tf32_values(bits: Array) -> Array:
    """Return float32 as tensor cores read it as tf32, without its last 13 bits, as float64."""
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

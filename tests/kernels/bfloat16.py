"""Emulate bfloat16 and tf32 in Triton's interpreter, which multiplies the bits of bfloat16, truncates conversions to
it, and computes tf32 dots with all digits.

Importing this module installs the emulation: dots of bfloat16 use the values, and float32 is rounded to nearest, ties
to even, as on devices. Dots in tf32 drop the last 13 bits of their operands, as tensor cores do. All other arithmetic
on bfloat16 stays wrong; the kernels convert to float32 first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from seqblocks.kernels import triton_common


def widened(bits: Any) -> Any:
    """Convert bfloat16, stored as uint16, to float32 exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(values: Any) -> Any:
    """Convert float32 to bfloat16, stored as uint16, to nearest even; nan stays nan."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def cut(values: Any) -> Any:
    """Return float32 as tensor cores read it as tf32: without its last 13 bits."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def install() -> None:
    """Install the emulation in the interpreter. Repeated calls have no effect."""
    from triton import language as tl
    from triton._C.libtriton.ir import INPUT_PRECISION
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "knows_bfloat16", False):
        return
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        ends = (src.dtype.scalar, dst_type.scalar)
        if ends == (tl.bfloat16, tl.float32):
            return TensorHandle(widened(src.data), tl.float32)
        if ends == (tl.float32, tl.bfloat16):
            return TensorHandle(narrowed(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        if rest[0] == INPUT_PRECISION.TF32:
            a, b = (TensorHandle(cut(x.data), x.dtype) if x.dtype.scalar == tl.float32 else x for x in (a, b))
        return dot(self, a, b, d, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot
    InterpreterBuilder.knows_bfloat16 = True


if triton_common.INTERPRETED:
    install()

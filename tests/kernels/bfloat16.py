"""bfloat16 and tf32 for triton's interpreter, which keeps bfloat16 as its bits, multiplies those, and cuts off what
does not fit; and takes dots in tf32 of all digits.

Imported for what it does: dots of bfloat16 are taken of the values, and float32 is rounded to the nearest, ties to
even, as devices do. Dots in tf32 lose the last 13 bits of their operands, as in tensor cores. All other arithmetic on
bfloat16 stays wrong; the kernels convert to float32 first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from seqblocks.kernels import triton_common


def widened(bits: Any) -> Any:
    """bfloat16 as uint16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(values: Any) -> Any:
    """float32 -> bfloat16 as uint16, to nearest even; nan stays nan."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def cut(values: Any) -> Any:
    """float32 as tensor cores read it as tf32: without its last 13 bits."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def install() -> None:
    """Teach the interpreter; again is no harm."""
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

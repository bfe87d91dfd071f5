"""Emulate bfloat16 and tf32 in Triton's interpreter, which multiplies the bits of bfloat16, truncates conversions to
it, and computes tf32 dots with all digits. Prepare its language once per launch, instead of in every device function,
and each of its types once.

Importing this module installs all of it. Dots of bfloat16 use the values, and float32 is rounded to nearest, ties to
even, as on devices. Dots in tf32 drop the last 13 bits of their operands, as tensor cores do. All other arithmetic on
bfloat16 stays wrong; the kernels convert to float32 first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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


class PatchedLanguage:
    """Patch Triton's language for the interpreter, as its own function does, but once per module and launch, and find
    what to patch once.

    The interpreter also patches it in every call of a device function, with the same result. That took more than half
    of the time of these tests.
    """

    def __init__(self, patch: Callable[[Any], Any], scope: Callable[[], Any]) -> None:
        self.patch, self.scope = patch, scope
        self.modules: set[int] = set()  # whose names for the language are patched
        self.patches: dict[int, list[tuple[Any, str, Any]]] = {}  # by the module of the launched kernel

    def __call__(self, function: Any) -> Any:
        """Return an object whose `restore` ends the launch."""
        module = id(function.__globals__)
        if module in self.modules:
            return None  # a call of a device function: its caller ignores the result
        if not self.modules and module in self.patches:
            scope = self.scope()
            for place, name, value in self.patches[module]:
                scope.set_attr(place, name, value)
        else:
            scope = self.patch(function)
            if not self.modules:
                self.patches[module] = [(place, name, vars(place)[name]) for place, name, _ in scope._changes]
        self.modules.add(module)
        restore = scope.restore

        def end() -> None:
            self.modules.clear()
            restore()

        scope.restore = end
        return scope


def remember_types(interpreter: Any, tl: Any) -> None:
    """Make each type and shape once. The interpreter makes them again in every operation, in two fifths of its time."""
    block, tensor, dtype_of = tl.block_type, tl.tensor, interpreter._get_np_dtype
    make_block, make_tensor = block.__init__, tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}  # by the type of an element and the shape
    sizes: dict[int, tuple[Any, dict[str, Any]]] = {}  # of a tensor, by the identity of the shape, which is kept
    dtypes: dict[str, Any] = {}  # of numpy, by the name of a type

    def block_of(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def tensor_of(self: Any, handle: Any, kind: Any) -> None:
        shape = kind.shape if kind.is_block() else None
        if id(shape) not in sizes:
            make_tensor(self, handle, kind)
            sizes[id(shape)] = shape, {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(sizes[id(shape)][1], handle=handle, type=kind, dtype=kind.scalar)

    def dtype(kind: Any) -> Any:
        if kind.name not in dtypes:
            dtypes[kind.name] = dtype_of(kind)
        return dtypes[kind.name]

    block.__init__, tensor.__init__, interpreter._get_np_dtype = block_of, tensor_of, dtype


def install() -> None:
    """Install the emulation in the interpreter. Repeated calls have no effect."""
    from triton import language as tl
    from triton._C.libtriton.ir import INPUT_PRECISION
    from triton.runtime import interpreter
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
    if hasattr(interpreter, "_LangPatchScope"):  # Triton 3.5 leaves the patches in place after a launch
        interpreter._patch_lang = PatchedLanguage(interpreter._patch_lang, interpreter._LangPatchScope)
    remember_types(interpreter, tl)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # then a check that integers do not overflow is computed, and its result is not used
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


if triton_common.INTERPRETED:
    install()

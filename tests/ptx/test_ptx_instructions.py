"""Every instruction of the interpreter that computes, against numbers computed one at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ptx import written
from tests.ptx.dtypes import TYPES, Fault, from_bf16, size_of, to_bf16
from tests.ptx.execute import FAMILIES
from tests.ptx.instructions import INSTRUCTIONS

Scalar = Callable[..., Any]
assert FAMILIES  # they fill the table of instructions
rng = np.random.default_rng(0)


def values(dtype: str) -> Any:
    """Return 32 random values, some of them special."""
    if dtype == "pred":
        return rng.random(32) < 0.5
    kind = np.dtype(TYPES[dtype])
    if dtype in ("f16", "f32", "f64"):
        found = (rng.standard_normal(32) * 4).astype(kind)
        found[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-6, 2.5, -3.5]
        return rng.permutation(found)
    if dtype == "bf16":
        return to_bf16(values("f32"))
    if dtype in ("bf16x2", "f16x2"):
        low, high = (values(dtype[:-2]).view(np.uint16).astype(np.uint32) for _ in range(2))
        return low | high << np.uint32(16)
    limits = np.iinfo(kind)
    found = rng.integers(limits.min, limits.max, 32, kind, endpoint=True)
    found[:6] = [limits.min, limits.max, 0, 1, 2, 7]
    return rng.permutation(found)


def number(x: Any, dtype: str) -> Any:
    """Return one held value as a Python number."""
    if dtype == "bf16":
        return float(from_bf16(np.array([x], np.uint16))[0])
    return float(x) if dtype[0] == "f" else bool(x) if dtype == "pred" else int(x)


def held(x: Any, dtype: str) -> Any:
    """Return a Python number as it is held, rounded, or wrapped as integers are."""
    if dtype == "bf16":
        return to_bf16(np.array([x], np.float64))[0]
    if dtype[0] == "f":
        return TYPES[dtype](x)
    if dtype == "pred":
        return bool(x)
    bits = 8 * size_of(dtype)
    x = int(x) & ((1 << bits) - 1)
    return x - (1 << bits) if dtype[0] == "s" and x >> (bits - 1) else x


def expected(function: Scalar, sources: list[tuple[str, Any]], result: str) -> Any:
    """Apply a function to one lane after the other."""
    rows = zip(*([number(x, dtype) for x in of] for dtype, of in sources), strict=True)
    with np.errstate(all="ignore"):
        return np.array([held(function(*row), result) for row in rows], TYPES[result])


def same(found: Any, right: Any, dtype: str) -> None:
    if dtype == "bf16":
        found, right = from_bf16(found), from_bf16(right)
    np.testing.assert_array_equal(found, right)


def check(opcode: str, types: tuple[str, ...], result: str, function: Scalar, extra: str = "") -> None:
    """Run an instruction alone in some lanes, and four times in a row, which are computed together."""
    lines = written.Lines()
    sources = [(dtype, values(dtype)) for dtype in types]
    if opcode.startswith(("div.s", "div.u", "rem")):  # by zero there is no result
        sources[1] = types[1], np.where(sources[1][1] == 0, 3, sources[1][1]).astype(TYPES[types[1]])
    operands = ", ".join([*(lines.load(dtype, x) for dtype, x in sources), *filter(None, [extra])])
    active, before = rng.random(32) < 0.5, values(result)
    some, masked = lines.load("pred", active), lines.load(result, before)
    lines.text.append(f"@{some} {opcode} {masked}, {operands};")
    several = [lines.register(result) for _ in range(4)]
    lines.text += [f"{opcode} {x}, {operands};" for x in several]
    found = [lines.store(result, x) for x in (masked, *several)]
    assert not lines.run()
    right = expected(function, sources, result)
    same(found[0], np.where(active, right, before), result)
    for each in found[1:]:
        same(each, right, result)


def div(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def smaller(x: float, y: float) -> float:
    return y if math.isnan(x) else x if math.isnan(y) else min(x, y)


def larger(x: float, y: float) -> float:
    return -smaller(-x, -y)


def flushed(x: float) -> float:
    return x * 0.0 if abs(x) < 2.0**-126 else x


def ieee(function: Scalar) -> Scalar:
    """Return a function of numpy's float64, which has infinities where Python has errors."""
    return lambda *xs: function(*(np.float64(x) for x in xs))


INTEGERS = ("s16", "s32", "s64", "u16", "u32", "u64")
FLOATS = ("f32", "f64", "f16", "bf16")
LOGICAL = ("b16", "b32", "b64", "pred")
TABLE: dict[str, tuple[tuple[str, ...], str, Scalar]] = {}  # by opcode: types of sources and result, the function


def add(opcode: str, types: str, result: str, function: Scalar) -> None:
    TABLE[opcode] = tuple(types.split()), result, function


for t in INTEGERS:
    bits = 8 * size_of(t)
    for name, function in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul.lo", lambda x, y: x * y)):
        add(f"{name}.{t}", f"{t} {t}", t, function)
    add(f"min.{t}", f"{t} {t}", t, min)
    add(f"max.{t}", f"{t} {t}", t, max)
    add(f"mad.lo.{t}", f"{t} {t} {t}", t, lambda x, y, z: x * y + z)
    add(f"shr.{t}", f"{t} u32", t, lambda x, n: x >> n)
    add(f"setp.lt.{t}", f"{t} {t}", "pred", lambda x, y: x < y)
    add(f"setp.ge.{t}", f"{t} {t}", "pred", lambda x, y: x >= y)
    if t[0] == "s":
        add(f"neg.{t}", t, t, lambda x: -x)
        add(f"abs.{t}", t, t, abs)
    if bits < 64:
        wide = f"{t[0]}{2 * bits}"
        add(f"mul.wide.{t}", f"{t} {t}", wide, lambda x, y: x * y)
        add(f"mad.wide.{t}", f"{t} {t} {wide}", wide, lambda x, y, z: x * y + z)
        add(f"mul.hi.{t}", f"{t} {t}", t, lambda x, y, bits=bits: x * y >> bits)
    if bits > 16:
        def field(x: int, at: int, length: int, bits: int = bits, signed: bool = t[0] == "s") -> int:
            at, length = at & 255, length & 255
            sign = x >> (bits - 1) & 1 if at + length > bits or not length else x >> (at + length - 1) & 1
            found = ((x & ((1 << bits) - 1)) >> at) & ((1 << length) - 1)
            taken = max(0, min(length, bits - at))
            return found - (1 << taken) if signed and sign and length else found

        add(f"bfe.{t}", f"{t} u32 u32", t, field)
for t in ("b16", "b32", "b64"):
    bits = 8 * size_of(t)
    add(f"shl.{t}", f"{t} u32", t, lambda x, n: 0 if n >= 64 else x << n)
    add(f"selp.{t}", f"{t} {t} pred", t, lambda x, y, p: x if p else y)
    add(f"mov.{t}", t, t, lambda x: x)
    add(f"setp.eq.{t}", f"{t} {t}", "pred", lambda x, y: x == y)
    add(f"setp.ne.{t}", f"{t} {t}", "pred", lambda x, y: x != y)
for t in LOGICAL:
    for name, function in (("and", lambda x, y: x & y), ("or", lambda x, y: x | y), ("xor", lambda x, y: x ^ y)):
        add(f"{name}.{t}", f"{t} {t}", t, function)
    add(f"not.{t}", t, t, (lambda x: not x) if t == "pred" else lambda x: ~x)
add("mov.pred", "pred", "pred", lambda x: x)
for t in ("b32", "b64"):
    def inserted(x: int, into: int, at: int, length: int, bits: int = 8 * size_of(t)) -> int:
        mask = (((1 << (length & 255)) - 1) << (at & 255)) & ((1 << bits) - 1)
        return into & ~mask | x << (at & 255) & mask

    add(f"bfi.{t}", f"{t} {t} u32 u32", t, inserted)
for t in ("s32", "u32", "s64", "u64"):
    add(f"div.{t}", f"{t} {t}", t, div)
    add(f"rem.{t}", f"{t} {t}", t, lambda x, y: x - y * div(x, y))
for t in FLOATS:
    rn = "rn." if t in ("f16", "bf16") else ""
    for name, function in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul", lambda x, y: x * y)):
        add(f"{name}.{rn}{t}", f"{t} {t}", t, ieee(function))
    add(f"fma.rn.{t}", f"{t} {t} {t}", t, ieee(lambda x, y, z: x * y + z))
    add(f"neg.{t}", t, t, lambda x: -x)
    add(f"abs.{t}", t, t, abs)
    add(f"min.{t}", f"{t} {t}", t, smaller)
    add(f"max.{t}", f"{t} {t}", t, larger)
    add(f"min.NaN.{t}", f"{t} {t}", t, ieee(np.minimum))
    for name, function in (("eq", lambda x, y: x == y), ("lt", lambda x, y: x < y), ("le", lambda x, y: x <= y),
                           ("gt", lambda x, y: x > y), ("ge", lambda x, y: x >= y)):
        add(f"setp.{name}.{t}", f"{t} {t}", "pred", function)
        add(f"setp.{name}u.{t}", f"{t} {t}", "pred",
            lambda x, y, f=function: f(x, y) or math.isnan(x) or math.isnan(y))
    add(f"setp.ne.{t}", f"{t} {t}", "pred", lambda x, y: x != y and not math.isnan(x) and not math.isnan(y))
    add(f"setp.neu.{t}", f"{t} {t}", "pred", lambda x, y: x != y)
    add(f"setp.num.{t}", f"{t} {t}", "pred", lambda x, y: not math.isnan(x) and not math.isnan(y))
    add(f"setp.nan.{t}", f"{t} {t}", "pred", lambda x, y: math.isnan(x) or math.isnan(y))
for t in ("f32", "f64"):
    add(f"selp.{t}", f"{t} {t} pred", t, lambda x, y, p: x if p else y)
    add(f"sqrt.rn.{t}", t, t, ieee(np.sqrt))
for name in ("div.full.f32", "div.rn.f32", "div.rn.f64"):
    add(name, f"{name[-3:]} {name[-3:]}", name[-3:], ieee(lambda x, y: x / y))
for name, function in (("ex2.approx", np.exp2), ("lg2.approx", np.log2), ("rsqrt.approx", lambda x: 1 / np.sqrt(x)),
                       ("rcp.approx", lambda x: 1 / x)):
    add(f"{name}.f32", "f32", "f32", ieee(function))
    add(f"{name}.ftz.f32", "f32", "f32", lambda x, f=function: flushed(float(np.float32(f(np.float64(flushed(x)))))))
for of, to in (("f32", "bf16"), ("f64", "f32"), ("f32", "f16"), ("s32", "f32"), ("u32", "f32"), ("s64", "f64")):
    add(f"cvt.rn.{to}.{of}", of, to, float)
for of, to in (("bf16", "f32"), ("f16", "f32"), ("f32", "f64"), ("s32", "s64"), ("u32", "u64"), ("u64", "u32"),
               ("s64", "s32"), ("u32", "u16"), ("u16", "u32"), ("u16", "u64"), ("s16", "s32"), ("s32", "s16")):
    add(f"cvt.{to}.{of}", of, to, lambda x: x)
for t in ("s32", "u32", "s64", "u16"):
    for mode, function in (("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)):
        def whole(x: float, f: Scalar = function, t: str = t) -> int:
            limits = np.iinfo(TYPES[t])
            if math.isnan(x):
                return 0
            return min(max(f(x), limits.min), limits.max) if math.isfinite(x) else limits.max if x > 0 else limits.min

        add(f"cvt.{mode}.{t}.f32", "f32", t, whole)
add("cvt.rmi.f32.f32", "f32", "f32", ieee(np.floor))


@pytest.mark.parametrize("opcode", TABLE)
def test_of_numbers(opcode: str) -> None:
    types, result, function = TABLE[opcode]
    check(opcode, types, result, function)


def test_short_fields() -> None:
    """Random positions and lengths above are almost all beyond 32 bits; these are not."""
    for opcode in ("bfe.u32", "bfe.s32", "bfe.u64", "bfe.s64", "bfi.b32", "bfi.b64", "shl.b32", "shr.u32", "shr.s64"):
        types, result, function = TABLE[opcode]
        constants = [("5", 5), ("9", 9)] if opcode[:2] == "bf" else [("7", 7)]
        given = types[: len(types) - len(constants)]
        check(opcode, given, result, lambda *xs, f=function, c=constants: f(*xs, *(v for _, v in c)),
              ", ".join(text for text, _ in constants))


@pytest.mark.parametrize("opcode", ["add.rn.bf16x2", "mul.rn.f16x2", "fma.rn.bf16x2", "max.bf16x2", "neg.f16x2",
                                    "setp.lt.bf16x2", "setp.neu.f16x2"])
def test_of_pairs(opcode: str) -> None:
    """Both halves are as the instruction of one half computes them."""
    *_, packed = opcode.split(".")
    types, result, function = TABLE[opcode[:-2].replace("max.rn", "max").replace("neg.rn", "neg")]
    of = [values(packed) for _ in types]
    halves = [[(types[0], (x >> np.uint32(at)).astype(np.uint16).view(TYPES[types[0]])) for x in of] for at in (0, 16)]
    low, high = (expected(function, half, result) for half in halves)
    lines = written.Lines()
    registers = ", ".join(lines.load("b32", x) for x in of)
    if result == "pred":
        to = [lines.register("pred") for _ in range(2)]
        lines.text.append(f"{opcode} {'|'.join(to)}, {registers};")
        found = [lines.store("pred", x) for x in to]
    else:
        both = lines.register("b32")
        lines.text.append(f"{opcode} {both}, {registers};")
        to = [lines.register("b16") for _ in range(2)]
        lines.text.append(f"mov.b32 {{{', '.join(to)}}}, {both};")
        found = [lines.store("b16", x).view(TYPES[types[0]]) for x in to]
    lines.run()
    same(found[0], low, types[0] if result != "pred" else "pred")
    same(found[1], high, types[0] if result != "pred" else "pred")


def test_pairs_are_packed_and_taken_apart() -> None:
    x, y = values("f32"), values("f32")
    lines = written.Lines()
    a, b = lines.load("f32", x), lines.load("f32", y)
    lines.text += [f"mov.b64 %rd50, {{{a}, {b}}};", "mov.b64 {%r400, _}, %rd50;", "mov.b64 {_, %r401}, %rd50;",
                   f"cvt.rn.bf16x2.f32 %r402, {a}, {b};", f"cvt.rn.f16x2.f32 %r403, {a}, {b};",
                   f"cvt.rna.tf32.f32 %r404, {a};"]
    low, high, bf16, f16, tf32 = (lines.store("b32", f"%r{at}") for at in range(400, 405))
    lines.run()
    same(low.view(np.float32), x, "f32")
    same(high.view(np.float32), y, "f32")
    same((bf16 >> np.uint32(16)).astype(np.uint16), to_bf16(x), "bf16")
    same((bf16 & 0xFFFF).astype(np.uint16), to_bf16(y), "bf16")
    with np.errstate(over="ignore"):
        same((f16 >> np.uint32(16)).astype(np.uint16).view(np.float16), x.astype(np.float16), "f16")
    finite = np.isfinite(x)
    units = np.ldexp(1.0, np.frexp(np.where(finite, x, 0).astype(np.float64))[1] - 11)
    gap = np.abs(tf32.view(np.float32)[finite].astype(np.float64) - x[finite])
    assert (gap <= units[finite] / 2).all()
    assert not (tf32[finite] & 0x1FFF).any()


def test_predicates_are_combined() -> None:
    x, y, p = values("s32"), values("s32"), values("pred")
    for name, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        for sign, q in (("", p), ("!", ~p)):
            lines = written.Lines()
            a, b, c = lines.load("s32", x), lines.load("s32", y), lines.load("pred", p)
            lines.text.append(f"setp.lt.{name}.s32 %p40|%p41, {a}, {b}, {sign}{c};")
            found, other = lines.store("pred", "%p40"), lines.store("pred", "%p41")
            lines.run()
            np.testing.assert_array_equal(found, function(x < y, q))
            np.testing.assert_array_equal(other, function(x >= y, q))


def test_bytes_are_permuted() -> None:
    def permuted(x: int, y: int, selectors: int) -> int:
        eight = [x >> 8 * at & 255 for at in range(4)] + [y >> 8 * at & 255 for at in range(4)]
        out = 0
        for at in range(4):
            selector = selectors >> 4 * at & 15
            byte = eight[selector & 7]
            out |= (255 * (byte >> 7) if selector & 8 else byte) << 8 * at
        return out

    check("prmt.b32", ("b32", "b32", "b32"), "b32", permuted)


def test_unknown_instructions_are_named() -> None:
    for text, named in (("popc.b32 %r2, %r1;", "unknown instruction popc.b32"),
                        ("add.sat.f32 %r2, %r1, %r1;", "unknown modifier .sat of add.sat.f32"),
                        ("mov.u32 %r2, %clock;", "unknown register %clock"),
                        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r2}, {%r2}, {%r2}, {%r2};", "unknown"),
                        ("bar.sync 1;", "unknown instruction bar.sync 1")):
        with pytest.raises(Fault, match=named):
            written.run(f"mov.u32 %r1, %tid.x;\n{text}\nret;")


def test_every_instruction_is_tested() -> None:
    """Each name of the table occurs in the table above, or in the text of a test."""
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_ptx_*.py"))
    tested = {opcode.partition(".")[0] for opcode in TABLE}
    assert [name for name in INSTRUCTIONS if name not in tested and not re.search(rf'[\n"` ]{name}[.; ]', text)] == []

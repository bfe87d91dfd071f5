"""Lanes that exchange values, memory, and matrices: which element a lane holds, after the tables of the PTX manual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptx import written
from tests.ptx.dtypes import LANE, from_bf16, tf32_values, to_bf16
from tests.ptx.execute import Settings

rng = np.random.default_rng(0)


def numbers() -> Any:
    return rng.integers(-1 << 31, 1 << 31, 32, np.int32)


def flags() -> Any:
    return rng.random(32) < 0.5


@pytest.mark.parametrize(("mode", "by", "clamp"), [
    ("bfly", 1, 31), ("bfly", 16, 31), ("up", 1, 0), ("up", 4, 0x1800), ("down", 3, 31), ("idx", 5, 31),
    ("idx", 2, 0x181F),
])
def test_lanes_exchange(mode: str, by: int, clamp: int) -> None:
    """After "shfl.sync" in the PTX manual, a lane at a time."""
    x = numbers().view(np.uint32)
    segment, last = clamp >> 8 & 31, clamp & 31
    right, inside = [], []
    for lane in range(32):
        low, high = lane & segment, lane & segment | last & ~segment
        other = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": low | by & ~segment}[mode]
        inside.append(other >= high if mode == "up" else other <= high)
        right.append(x[other if inside[-1] else lane])
    lines = written.Lines()
    a = lines.load("b32", x)
    lines.text.append(f"shfl.sync.{mode}.b32 %r400|%p50, {a}, {by}, {clamp}, -1;")
    found, ok = lines.store("b32", "%r400"), lines.store("pred", "%p50")
    lines.run()
    np.testing.assert_array_equal(found, right)
    np.testing.assert_array_equal(ok, inside)


def test_lanes_vote_and_reduce() -> None:
    x, p = numbers(), flags()
    lines = written.Lines()
    a, q = lines.load("s32", x), lines.load("pred", p)
    lines.text += [f"redux.sync.{name}.s32 %r{400 + at}, {a}, -1;" for at, name in enumerate(("max", "min", "add"))]
    lines.text += [f"redux.sync.{name}.b32 %r{403 + at}, {a}, -1;" for at, name in enumerate(("and", "or", "xor"))]
    lines.text += [f"vote.sync.ballot.b32 %r406, {q}, -1;", f"vote.sync.any.pred %p40, {q}, -1;",
                   f"vote.sync.all.pred %p41, {q}, -1;", f"@{q} activemask.b32 %r407;", "mov.u32 %r408, %laneid;"]
    found = [lines.store("s32", f"%r{at}") for at in range(400, 409)]
    some, every = lines.store("pred", "%p40"), lines.store("pred", "%p41")
    lines.run()
    bits = x.view(np.uint32)
    right = [x.max(), x.min(), x.sum(dtype=np.int32), *(f.reduce(bits).view(np.int32) for f in (
        np.bitwise_and, np.bitwise_or, np.bitwise_xor)), np.uint32(sum(1 << at for at in LANE[p])).view(np.int32)]
    for each, value in zip(found, right, strict=False):
        np.testing.assert_array_equal(each, np.full(32, value))
    np.testing.assert_array_equal(found[7][p], np.full(p.sum(), right[6]))
    np.testing.assert_array_equal(found[8], LANE)
    assert some.all() == p.any()
    assert every.all() == p.all()


@pytest.mark.parametrize("space", ["global", "shared"])
def test_vectors_are_loaded_and_stored(space: str) -> None:
    x, y = rng.integers(0, 1 << 32, 128, np.uint32), np.zeros(128, np.uint32)
    middle = ["shl.b32 %r2, %r1, 4;", "st.shared.v2.b32 [%r2], {%r10, %r11};",
              "st.shared.v2.b32 [%r2+8], {%r12, %r13};", "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r2];"]
    body = ["mov.u32 %r1, %tid.x;", "ld.param.b64 %rd1, [test_param_0];", "ld.param.b64 %rd2, [test_param_1];",
            "mad.wide.u32 %rd1, %r1, 16, %rd1;", "mad.wide.u32 %rd2, %r1, 16, %rd2;",
            "ld.global.v4.b32 { %r10, %r11, %r12, %r13 }, [ %rd1 + 0 ];",
            *(middle if space == "shared" else [f"mov.b32 %r{20 + at}, %r{10 + at};" for at in range(4)]),
            "st.global.v4.b32 [ %rd2 + 0 ], { %r20, %r21, %r22, %r23 };", "ret;"]
    assert not written.run("\n".join(body), x, y, shared=512)
    np.testing.assert_array_equal(x, y)


def test_atomic_operations() -> None:
    places = np.array([100, 100, 0, 7], np.uint32)
    old = np.zeros(32, np.uint32)
    body = """mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [test_param_0];
ld.param.b64 %rd2, [test_param_1];
mad.wide.u32 %rd2, %r1, 4, %rd2;
atom.global.gpu.acq_rel.add.u32 %r2, [ %rd1 + 0 ], 1;
red.global.gpu.relaxed.max.u32 [ %rd1 + 4 ], %r1;
atom.global.or.b32 %r3, [ %rd1 + 8 ], %r1;
atom.global.exch.b32 %r3, [ %rd1 + 12 ], %r1;
st.global.b32 [ %rd2 + 0 ], { %r2 };
ret;"""
    written.run(body, places, old)
    assert places.tolist() == [132, 100, 31, 31]
    np.testing.assert_array_equal(old, 100 + LANE)


def test_lanes_diverge_and_meet() -> None:
    """Lanes below 10 count to 3, the others leave at once."""
    found = np.zeros(32, np.uint32)
    written.run("""mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [test_param_0];
mad.wide.u32 %rd1, %r1, 4, %rd1;
mov.b32 %r2, 0;
setp.ge.u32 %p1, %r1, 10;
@%p1 bra $END;
$LOOP:
add.s32 %r2, %r2, 1;
setp.lt.u32 %p2, %r2, 3;
@%p2 bra $LOOP;
$END:
bar.warp.sync -1;
st.global.b32 [ %rd1 + 0 ], { %r2 };
ret;""", found)
    np.testing.assert_array_equal(found, np.where(LANE < 10, 3, 0))


def test_copies_are_asynchronous() -> None:
    """Copies in the order of their groups; a copy of 0 bytes writes zeros."""
    x, y = rng.integers(0, 1 << 32, 64, np.uint32), np.zeros(64, np.uint32)
    for copies in ("late", "early"):
        assert not written.run("""mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [test_param_0];
ld.param.b64 %rd2, [test_param_1];
mad.wide.u32 %rd1, %r1, 8, %rd1;
mad.wide.u32 %rd2, %r1, 8, %rd2;
shl.b32 %r2, %r1, 3;
setp.lt.u32 %p1, %r1, 16;
selp.b32 %r3, 4, 0, %p1;
cp.async.ca.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x4;
cp.async.commit_group;
cp.async.ca.shared.global [ %r2 + 4 ], [ %rd1 + 4 ], 0x4, %r3;
cp.async.commit_group;
cp.async.wait_group 1;
ld.shared.b32 %r4, [%r2];
cp.async.wait_all;
ld.shared.b32 %r5, [%r2+4];
st.global.v2.b32 [ %rd2 + 0 ], { %r4, %r5 };
fence.proxy.async.shared::cta;
membar.gl;
nanosleep.u32 1;
ret;""", x, y, shared=256, settings=Settings(copies=copies))
        right = x.reshape(32, 2).copy()
        right[16:, 1] = 0
        np.testing.assert_array_equal(y.reshape(32, 2), right)


# ------------------------------------------------------------------------------
# Matrices


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_in_shared_memory(count: int, trans: str) -> None:
    x, y = rng.integers(0, 1 << 16, (4, 8, 8), np.uint16), np.zeros((4, 8, 8), np.uint16)
    held = np.zeros((32, count), np.uint32)
    registers = ", ".join(f"%r{20 + at}" for at in range(count))
    written.run(f"""mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [test_param_0];
ld.param.b64 %rd2, [test_param_1];
ld.param.b64 %rd3, [test_param_2];
mad.wide.u32 %rd1, %r1, 16, %rd1;
mad.wide.u32 %rd2, %r1, 16, %rd2;
mad.wide.u32 %rd3, %r1, {4 * count}, %rd3;
shl.b32 %r2, %r1, 4;
ld.global.v4.b32 {{ %r10, %r11, %r12, %r13 }}, [ %rd1 + 0 ];
st.shared.v4.b32 [%r2], {{%r10, %r11, %r12, %r13}};
ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r2];
{f"st.global.{f'v{count}.' if count > 1 else ''}b32"} [ %rd3 + 0 ], {{ {registers} }};
mov.b32 %r10, 0;
st.shared.v4.b32 [%r2], {{%r10, %r10, %r10, %r10}};
stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r2], {{{registers}}};
ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2];
st.global.v4.b32 [ %rd2 + 0 ], {{ %r10, %r11, %r12, %r13 }};
ret;""", x, y, held, shared=512)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for at in range(count):
            two = x[at, column : column + 2, row] if trans else x[at, row, column : column + 2]
            assert held[lane, at] == int(two[0]) | int(two[1]) << 16
    np.testing.assert_array_equal(y[:count], x[:count])
    assert not y[count:].any()


def packed(x: Any, dtype: str) -> Any:
    """Round a matrix to operands, and return their bits and their values."""
    if dtype == "tf32":
        bits = x.astype(np.float32).view(np.uint32)
        return bits, tf32_values(bits)
    bits = to_bf16(x) if dtype == "bf16" else x.astype(np.float16).view(np.uint16)
    return bits, (from_bf16(bits) if dtype == "bf16" else bits.view(np.float16)).astype(np.float64)


@pytest.mark.parametrize(("dtype", "K"), [("bf16", 16), ("f16", 16), ("bf16", 8), ("f16", 8), ("tf32", 8), ("tf32", 4)])
def test_products(dtype: str, K: int) -> None:
    a, left = packed(rng.standard_normal((16, K)), dtype)
    b, right = packed(rng.standard_normal((K, 8)), dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    each = 1 if dtype == "tf32" else 2

    def word(parts: list[int]) -> int:
        return sum(int(x) << 16 * at for at, x in enumerate(parts))

    lines = written.Lines()
    group, thread = LANE // 4, LANE % 4
    lanes = [*zip(group, thread, strict=True)]

    def load(element: Any) -> str:
        """Load a register whose numbers are those of element(g, t, n)."""
        return lines.load("b32", np.array([word([element(g, t, n) for n in range(each)]) for g, t in lanes], np.uint32))

    A = [load(lambda g, t, n, at=at: a[g + 8 * (at % 2), t * each + n + 4 * each * (at // 2)])
         for at in range(K // (2 * each))]
    B = [load(lambda g, t, n, at=at: b[t * each + n + 4 * each * at, g]) for at in range(K // (4 * each))]
    C = [lines.load("f32", c[group + 8 * (at // 2), 2 * thread + at % 2]) for at in range(4)]
    D = [lines.register("f32") for _ in range(4)]
    operands = ", ".join(f"{{{', '.join(x)}}}" for x in (D, A, B, C))
    lines.text.append(f"mma.sync.aligned.m16n8k{K}.row.col.f32.{dtype}.{dtype}.f32 {operands};")
    found = [lines.store("f32", x) for x in D]
    lines.run()
    exact = c + left @ right
    for at, x in enumerate(found):  # the sum is exact before one rounding, up to the order of float64 sums
        np.testing.assert_allclose(x, exact[group + 8 * (at // 2), 2 * thread + at % 2], rtol=2.0**-24, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "tf32"])
def test_group_products(dtype: str) -> None:
    """Operands whose rows of 128 bytes are swizzled: 16 bytes, part c of row r, are at part c ^ (r % 8)."""
    N, width = 16, 4 if dtype == "tf32" else 2
    K, columns = 32 // width, 128 // width
    a, left = packed(rng.standard_normal((64, columns)), dtype)
    b, right = packed(rng.standard_normal((N, columns)), dtype)
    image = np.zeros((64 + N, 8, 16 // width), a.dtype)
    for at, matrix in ((0, a), (64, b)):
        for row in range(matrix.shape[0]):
            for part in range(8):
                image[at + row, part ^ row % 8] = matrix[row].reshape(8, -1)[part]
    found = np.zeros((128, N // 2), np.float32)
    accumulators = ", ".join(f"%r{100 + at}" for at in range(N // 2))
    layout = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
    copies = [
        f"ld.global.v4.b32 {{ %r10, %r11, %r12, %r13 }}, [ %rd1 + {at} ];\n"
        f"st.shared.v4.b32 [%r2+{at}], {{%r10, %r11, %r12, %r13}};" for at in range(0, (64 + N) * 128, 2048)
    ]
    flags = "1, 1" if dtype == "tf32" else "1, 1, 0, 0"
    product = f"wgmma.mma_async.sync.aligned.m64n{N}k{K}.f32.{dtype}.{dtype} {{{accumulators}}}"
    newline = "\n"
    written.run(f"""mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [test_param_0];
ld.param.b64 %rd2, [test_param_1];
mad.wide.u32 %rd1, %r1, 16, %rd1;
mad.wide.u32 %rd2, %r1, {2 * N}, %rd2;
shl.b32 %r2, %r1, 4;
{newline.join(copies)}
fence.proxy.async.shared::cta;
bar.sync 0;
mov.b64 %rd3, {layout};
mov.b64 %rd4, {layout + (64 * 128 >> 4)};
mov.b64 %rd5, {layout + 2};
mov.b64 %rd6, {layout + (64 * 128 >> 4) + 2};
setp.ne.u32 %p1, %r1, %r1;
not.pred %p2, %p1;
wgmma.fence.sync.aligned;
{product}, %rd3, %rd4, %p1, {flags};
{product}, %rd5, %rd6, %p2, {flags};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
{newline.join(f"st.global.b32 [ %rd2 + {4 * at} ], {{ %r{100 + at} }};" for at in range(N // 2))}
ret;""", image, found, threads=128, shared=(64 + N) * 128)
    exact = left[:, : 2 * K] @ right[:, : 2 * K].T
    for thread in range(128):
        row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        for at in range(N // 2):
            value = exact[row + 8 * (at // 2 % 2), 8 * (at // 4) + column + at % 2]
            assert abs(found[thread, at] - value) <= 2.0**-22 * np.abs(exact).max()

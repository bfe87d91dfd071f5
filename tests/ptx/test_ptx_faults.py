"""Faults planted in small kernels are reported, with the line that they come from."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from tests.ptx import mutations, written
from tests.ptx.dtypes import Array, Fault, from_bf16, to_bf16
from tests.ptx.execute import Settings

START = """mov.u32 %r1, %tid.x;
ld.param.b64 %rd1, [test_param_0];
mad.wide.u32 %rd2, %r1, 4, %rd1;
shl.b32 %r2, %r1, 2;
xor.b32 %r3, %r2, 128;
"""  # rd1: the array; rd2, r2: a place per thread; r3: that of a thread of another warp


def lines(*body: str) -> str:
    return START + "\n".join([*body, "ret;"])


def line_of(text: str, statement: str) -> int:
    return next(at for at, each in enumerate(text.splitlines(), 1) if each.startswith(statement))


def only(notes: Counter[str], what: str, text: str, statement: str) -> None:
    """Check that there are notes of one kind, all at this statement."""
    assert notes
    for note in notes:
        assert note.startswith(what), note
        assert f", folder/source.py:{line_of(text, statement)}: {statement}" in note, note


EXCHANGE = lines("st.shared.b32 [%r2], %r1;", "bar.sync 0;", "ld.shared.b32 %r4, [%r3];",
                 "st.global.b32 [ %rd2 + 0 ], { %r4 };")


@pytest.mark.parametrize("order", ["up", "down", "random"])
@pytest.mark.parametrize("barrier", ["bar.sync", "barrier.sync.aligned"])
def test_a_barrier_orders_warps(order: str, barrier: str) -> None:
    text, found = EXCHANGE.replace("bar.sync", barrier), np.zeros(64, np.uint32)
    assert not written.run(text, found, threads=64, shared=256, settings=Settings(order))
    np.testing.assert_array_equal(found, np.arange(64) ^ 32)


@pytest.mark.parametrize("omit", ["barriers", "folder/source.py:7"])
def test_a_missing_barrier(omit: str) -> None:
    """One warp reads before the other has written, and the other writes after it has read."""
    notes = written.run(EXCHANGE, np.zeros(64, np.uint32), threads=64, shared=256, settings=Settings(omit=omit))
    kinds = {note.partition(",")[0] for note in notes}
    assert kinds == {"read of shared memory that nothing wrote", "write after another warp's read",
                     "read after another warp's write"}
    assert all(re.search(r"folder/source.py:(6|8): (st|ld).shared", note) for note in notes)


def test_a_race_in_global_memory() -> None:
    text = lines("st.global.b32 [ %rd1 + 0 ], { %r1 };")
    notes = written.run(text, np.zeros(64, np.uint32), threads=64)
    only(notes, "write after another warp's write, global", text, "st.global")


def test_copies_of_a_value_are_no_race() -> None:
    assert not written.run(lines("mov.b32 %r9, 7;", "st.global.b32 [ %rd1 + 0 ], { %r9 };"), np.zeros(1, np.uint32),
                           threads=64)


def test_one_warp_has_no_races() -> None:
    assert not written.run(EXCHANGE.replace("xor.b32 %r3, %r2, 128", "xor.b32 %r3, %r2, 4"), np.zeros(32, np.uint32),
                           shared=128)


@pytest.mark.parametrize("grid", [2, 3])
def test_a_race_between_programs(grid: int) -> None:
    text = lines("mov.u32 %r4, %ctaid.x;", "add.s32 %r4, %r4, 1;", "st.global.b32 [ %rd2 + 0 ], { %r4 };")
    only(written.run(text, np.zeros(32, np.uint32), grid=(grid,)), "write after another program's write, global", text,
         "st.global")
    text = lines("ld.global.b32 { %r4 }, [ %rd2 + 0 ];", "add.s32 %r4, %r4, 1;", "st.global.b32 [ %rd2 + 0 ], { %r4 };")
    notes = written.run(text, np.zeros(32, np.uint32), grid=(grid,))
    kinds = {note.partition(",")[0] for note in notes}
    assert kinds == {"read after another program's write", "write after another program's write"}
    text = lines("mov.u32 %r4, %ctaid.x;", "setp.eq.b32 %p1, %r4, 0;", "@%p1 ld.global.b32 %r5, [ %rd2 + 0 ];",
                 "@!%p1 st.global.b32 [ %rd2 + 0 ], { %r4 };")
    only(written.run(text, np.zeros(32, np.uint32), grid=(grid,)), "write after another program's", text, "@!%p1 st")


HANDING_ON = """mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
ld.param.b64 %rd1, [test_param_0];
ld.param.b64 %rd3, [test_param_1];
mad.wide.u32 %rd2, %r1, 4, %rd1;
setp.ne.b32 %p1, %r2, 0;
setp.eq.b32 %p2, %r1, 0;
@%p1 bra $WAIT;
add.s32 %r3, %r1, 5;
st.global.b32 [ %rd2 + 0 ], { %r3 };
bar.sync 0;
@%p2 atom.global.gpu.SEM.add.u32 %r4, [ %rd3 + 0 ], 1;
ret;
$WAIT:
mov.b32 %r4, 0;
@%p2 ld.global.gpu.acquire.b32 %r4, [ %rd3 + 0 ];
bar.sync 0;
shfl.sync.idx.b32 %r4, %r4, 0, 31, -1;
setp.eq.b32 %p3, %r4, 0;
@%p3 bra $WAIT;
ld.global.b32 { %r5 }, [ %rd2 + 0 ];
add.s32 %r5, %r5, 1;
st.global.b32 [ %rd2 + 0 ], { %r5 };
ret;"""


@pytest.mark.parametrize("order", ["up", "down"])
@pytest.mark.parametrize("sem", ["release", "relaxed"])
def test_programs_that_wait_for_one_another(order: str, sem: str) -> None:
    """The second program, which may run first, waits for the counter. Only a release makes what came before visible."""
    data, counter = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    notes = written.run(HANDING_ON.replace("SEM", sem), data, counter, grid=(2,), settings=Settings(order))
    np.testing.assert_array_equal(data, np.arange(32) + 6)
    assert bool(notes) == (sem == "relaxed")
    assert {note.partition(",")[0] for note in notes} <= {
        "read after another program's write", "write after another program's write"}


def test_a_release_before_the_barrier_hands_on_nothing() -> None:
    data, counter = np.zeros(32, np.uint32), np.zeros(1, np.uint32)
    early = HANDING_ON.replace("SEM", "release").replace("bar.sync 0;\n@%p2 atom", "@%p2 atom", 1)
    notes = written.run(early, data, counter, grid=(2,))
    assert any("another program's write" in note for note in notes)


# ------------------------------------------------------------------------------
# Places


@pytest.mark.parametrize(("statement", "message"), [
    ("ld.global.b32 { %r4 }, [ %rd2 + 4 ];", "global load out of bounds: array 0 has 128 bytes, not 132"),
    ("st.global.b32 [ %rd2 + 4 ], { %r1 };", "global store out of bounds: array 0 has 128 bytes, not 132"),
    ("ld.global.b32 { %r4 }, [ %rd2 + -4 ];", "global load out of bounds: an address that belongs to no tensor"),
    ("atom.global.add.u32 %r4, [ %rd1 + 128 ], 1;", "atomic out of bounds: array 0 has 128 bytes, not 132"),
    ("ld.shared.b32 %r4, [%r2+16];", "shared load out of bounds: a program has 128 bytes, not 144"),
    ("st.shared.v4.b32 [%r2], {%r1, %r1, %r1, %r1};", "shared store misaligned: 16 bytes at 4 of 16"),
    ("ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd2 + 0 ];", "global load misaligned: 16 bytes at 4 of 16"),
    ("st.global.b16 [ %rd1 + 1 ], { %rs1 };", "global store misaligned: 2 bytes at 1 of 16"),
    ("cp.async.cg.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x10;\ncp.async.wait_all;", "shared store misaligned"),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r2];", "shared load misaligned: 16 bytes at 4 of 16"),
    ("trap;", "trap"),
])
def test_places_and_traps(statement: str, message: str) -> None:
    """A fault ends the launch. Its message ends with the statement and its line."""
    with pytest.raises(Fault, match=re.escape(message)) as caught:
        written.run(lines(statement), np.zeros(32, np.uint32), shared=128)
    assert f"at test, folder/source.py:6: {statement.splitlines()[0].rstrip(';')}" in str(caught.value)


def test_an_offset_does_not_reach_the_next_array() -> None:
    with pytest.raises(Fault, match="array 0 has 128 bytes"):
        written.run(lines("ld.global.b32 { %r4 }, [ %rd2 + 1048576 ];"), np.zeros(32, np.uint32),
                    np.zeros(1 << 20, np.uint32))


def test_memory_that_nothing_wrote() -> None:
    held = np.full(32, 0xFFFFFFFF, np.uint32)
    text = lines("ld.global.b32 { %r4 }, [ %rd2 + 0 ];")
    only(written.run(text, held, fresh=(0,)), "read of memory that nothing wrote, array 0", text, "ld.global")
    text = lines("st.global.b32 [ %rd2 + 0 ], { %r1 };", "ld.global.b32 { %r4 }, [ %rd2 + 0 ];")
    assert not written.run(text, held, fresh=(0,))
    text = lines("ld.shared.b32 %r4, [%r2];")
    only(written.run(text, held, shared=128), "read of shared memory that nothing wrote", text, "ld.shared")


def test_barriers_that_not_all_reach() -> None:
    with pytest.raises(Fault, match=r"barrier in divergent code at test, folder/source\.py:8: bar\.sync 0"):
        written.run(lines("setp.eq.b32 %p1, %r1, 3;", "@%p1 bra $END;", "bar.sync 0;", "$END:"), np.zeros(1, np.uint32))
    with pytest.raises(Fault, match="some warps have ended, others wait at a barrier"):
        written.run(lines("setp.ge.u32 %p1, %r1, 32;", "@%p1 bra $END;", "bar.sync 0;", "$END:"),
                    np.zeros(1, np.uint32), threads=64)


def test_limits_of_a_launch() -> None:
    with pytest.raises(Fault, match=r"no grid: \(0, 1, 1\)"):
        written.run(lines(), np.zeros(1, np.uint32), grid=(0,))
    with pytest.raises(Fault, match="232449 bytes of shared memory, where a program has 232448"):
        written.run(lines(), np.zeros(1, np.uint32), shared=232_449)


# ------------------------------------------------------------------------------
# Asynchronous operations

COPY = lines("cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x4;", "cp.async.commit_group;",
             "cp.async.wait_group 0;", "ld.shared.b32 %r4, [%r2];", "add.s32 %r4, %r4, 1;",
             "st.global.b32 [ %rd2 + 0 ], { %r4 };")


def test_a_missing_wait_for_copies() -> None:
    data = np.arange(32, dtype=np.uint32)
    assert not written.run(COPY, data, shared=128)
    np.testing.assert_array_equal(data, np.arange(32) + 1)
    notes = written.run(COPY, data, shared=128, settings=Settings(omit="waits"))
    only(notes, "read of shared memory that nothing wrote", COPY, "ld.shared")
    assert not data.any()  # -1 + 1


def test_a_wait_that_leaves_a_group_pending() -> None:
    text = COPY.replace("wait_group 0", "wait_group 1")
    notes = written.run(text, np.arange(32, dtype=np.uint32), shared=128)
    only(notes, "read of shared memory that nothing wrote", text, "ld.shared")


DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16
SUMS = ", ".join(f"%r{100 + at}" for at in range(8))
COPIES = [f"ld.global.v4.b32 {{ %r10, %r11, %r12, %r13 }}, [ %rd3 + {2048 * at} ];\n"
          f"st.shared.v4.b32 [%r9+{2048 * at}], {{%r10, %r11, %r12, %r13}};" for at in range(5)]
STORES = [f"st.global.b32 [ %rd4 + {4 * at} ], {{ %r{100 + at} }};" for at in range(8)]


def product(between: str = "", wait: str = "wgmma.wait_group.sync.aligned 0;") -> str:
    """Multiply a tile of ones, 64 x 16, by one of 16 x 16, both swizzled, and store the sums of each thread."""
    return lines(
        "ld.param.b64 %rd4, [test_param_1];", "mad.wide.u32 %rd3, %r1, 16, %rd1;", "mad.wide.u32 %rd4, %r1, 32, %rd4;",
        "shl.b32 %r9, %r1, 4;", *COPIES, "fence.proxy.async.shared::cta;", "bar.sync 0;",
        f"mov.b64 %rd5, {DESCRIPTOR};", f"mov.b64 %rd6, {DESCRIPTOR + (8192 >> 4)};", "setp.ne.u32 %p1, %r1, %r1;",
        f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{{SUMS}}}, %rd5, %rd6, %p1, 1, 1, 0, 0;",
        "wgmma.commit_group.sync.aligned;", *between.splitlines(), wait, *STORES,
    )


def sums_of(text: str, copies: str = "late") -> tuple[Array, Counter[str]]:
    image, found = to_bf16(np.ones((80, 64), np.float32)), np.zeros((128, 8), np.float32)
    assert (from_bf16(image) == 1).all()
    return found, written.run(text, image, found, threads=128, shared=80 * 128, settings=Settings(copies=copies))


def test_a_product_is_waited_for() -> None:
    found, notes = sums_of(product())
    assert not notes
    assert (found == 16).all()


def test_sums_that_are_read_too_early() -> None:
    for wait in ("", "wgmma.wait_group.sync.aligned 1;"):
        found, _ = sums_of(product(wait=wait))
        assert np.isnan(found).all()


def test_an_operand_that_is_written_too_early() -> None:
    """The store after the barrier is no race, but the product has not been waited for."""
    store = "bar.sync 0;\nmov.b32 %r20, 0;\nst.shared.b32 [%r9], %r20;"
    found, _ = sums_of(product(between=store))
    assert (found != 16).any()


def test_an_operand_that_a_copy_overwrites() -> None:
    """A copy into a tile that a pending product reads: only copies that happen at their issue show it."""
    copy = ("bar.sync 0;\ncp.async.cg.shared.global [ %r9 + 0 ], [ %rd3 + 0 ], 0x10, 0;\ncp.async.commit_group;")
    late, _ = sums_of(product(between=copy))
    early, _ = sums_of(product(between=copy), "early")
    assert (late == 16).all()
    assert (early != 16).any()


def test_an_operand_without_a_barrier() -> None:
    text = product().replace("bar.sync 0;\n", "")
    _, notes = sums_of(text)
    kinds = {note.partition(",")[0] for note in notes}
    assert "read after another warp's write" in kinds
    assert any(f"folder/source.py:{line_of(text, 'wgmma.mma')}: wgmma.mma_async" in note for note in notes)


def test_operands_out_of_bounds() -> None:
    text = product().replace(f"mov.b64 %rd6, {DESCRIPTOR + (8192 >> 4)}", f"mov.b64 %rd6, {DESCRIPTOR + (16384 >> 4)}")
    with pytest.raises(Fault, match="wgmma operand out of bounds: a program has 10240 bytes"):
        sums_of(text)
    with pytest.raises(Fault, match="unknown layout of a wgmma operand"):
        sums_of(product().replace(str(DESCRIPTOR), "65536", 1))


# ------------------------------------------------------------------------------
# Faults planted in the kernels: `python -m tests.ptx.mutations` runs them


def test_every_barrier_is_removed_once() -> None:
    kernels = mutations.ROOT / "kernels"
    barriers = {
        path.relative_to(kernels).as_posix(): count for path in kernels.rglob("*.py")
        if (count := path.read_text("utf-8").count(mutations.BARRIER))
    }
    assert barriers == {file: len(each) for file, (_, each) in mutations.BARRIERS.items()}


@pytest.mark.parametrize("name", [name for name, planted in mutations.PLANTED.items() if planted.file])
def test_planted_faults_change_the_kernels(name: str) -> None:
    planted = mutations.PLANTED[name]
    text = (mutations.ROOT / "kernels" / planted.file).read_text("utf-8")
    assert mutations.changed(planted, text) != text

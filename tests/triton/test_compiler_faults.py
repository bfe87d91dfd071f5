"""Faults of compilers are found in recorded pieces of wrong kernels, and not in right ones."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

from seqblocks.kernels import triton_common
from tests.triton.compiler_faults import overwritten, registers, unwritten

# The loop of the mLSTM's `outputs` as Triton 3.9 compiled it for sm_90, when the tile of q (%a) also fed a sum.
LOOP = """
    %a = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x32xbf16, #shared, #smem, mutable> loc(#loc232)
    %state = ttg.local_alloc : () -> !ttg.memdesc<3x32x128xbf16, #shared1, #smem, mutable> loc(#loc233)
    %a_55 = ttg.memdesc_index %a[%c0_i32] : !ttg.memdesc<{buffers}x64x32xbf16> -> !ttg.memdesc<64x32xbf16>
    %a_56 = ttg.async_copy_global_to_local %a_54, %a_55 mask %a_42 : tensor<64x32x!tt.ptr<bf16>> -> <64x32xbf16>
    %state_63 = ttg.memdesc_index %state[%c0_i32] : !ttg.memdesc<3x32x128xbf16> -> !ttg.memdesc<32x128xbf16>
    %state_64 = ttg.async_copy_global_to_local %state_62, %state_63 : tensor<32x128x!tt.ptr<bf16>> -> <32x128xbf16>
    %a_71 = ttg.memdesc_index %a[%c1_i32] : !ttg.memdesc<{buffers}x64x32xbf16> -> !ttg.memdesc<64x32xbf16>
    %a_72 = ttg.async_copy_global_to_local %a_70, %a_71 mask %a_42 : tensor<64x32x!tt.ptr<bf16>> -> <64x32xbf16>
    %state_79 = ttg.memdesc_index %state[%c1_i32] : !ttg.memdesc<3x32x128xbf16> -> !ttg.memdesc<32x128xbf16>
    %state_80 = ttg.async_copy_global_to_local %state_78, %state_79 : tensor<32x128x!tt.ptr<bf16>> -> <32x128xbf16>
    %parts:12 = scf.for %i = %c0_i32 to %c128_i32 step %c32_i32 iter_args(%arg22 = %cst_7) -> (tensor<64x128xf32>) {{
      %a_179 = ttg.async_wait %a_166, %state_168 {{num = 2 : i32}} loc(#loc232)
      %a_180 = ttg.memdesc_index %a[%parts_178] : !ttg.memdesc<{buffers}x64x32xbf16> -> !ttg.memdesc<64x32xbf16>
      %a_181 = ttg.local_load %a_180 token %a_179 : !ttg.memdesc<64x32xbf16> -> tensor<64x32xbf16, #blocked1>
      %state_182 = ttg.memdesc_index %state[%parts_175] : !ttg.memdesc<3x32x128xbf16> -> !ttg.memdesc<32x128xbf16>
      %num_183 = ttng.warp_group_dot %a_180, %state_182, %arg22 {{isAsync = true}} : !ttg.memdesc<64x32xbf16>
      %num_184:3 = ttng.warp_group_dot_wait %num_183, %a_180, %state_182 {{pendings = {pending} : i32}} : TYPES
      %a_206 = ttg.memdesc_index %a[%parts_197] : !ttg.memdesc<{buffers}x64x32xbf16> -> !ttg.memdesc<64x32xbf16>
      %a_209 = ttg.async_copy_global_to_local %a_205, %a_206 mask %parts_208 : tensor<64x32x!tt.ptr<bf16>>
      %state_216 = ttg.memdesc_index %state[%parts_194] : !ttg.memdesc<3x32x128xbf16> -> !ttg.memdesc<32x128xbf16>
      %state_218 = ttg.async_copy_global_to_local %state_215, %state_216 mask %parts_217 : tensor<32x128x!tt.ptr<bf16>>
      scf.yield %num_184#0 : tensor<64x128xf32, #mma1> loc(#loc84)
    }} loc(#loc236)
""".replace("TYPES", "tensor<64x128xf32, #mma1>, !ttg.memdesc<64x32xbf16, #shared>, !ttg.memdesc<32x128xbf16>")


def test_a_tile_with_too_few_buffers_for_a_pending_product_is_found() -> None:
    found = overwritten(LOOP.format(buffers=2, pending=1))
    assert len(found) == 1
    assert found[0].startswith("2 buffers (line 2) for 2 copies in flight and %num_184:3 =")


@pytest.mark.parametrize(("buffers", "pending"), [(3, 1), (2, 0)])
def test_enough_buffers_or_no_pending_product_are_right(buffers: int, pending: int) -> None:
    assert overwritten(LOOP.format(buffers=buffers, pending=pending)) == []


def test_regions_that_use_a_name_again_are_told_apart() -> None:
    right = LOOP.format(buffers=3, pending=1)
    twice = f"    scf.if %0 {{\n{right}    }} else {{\n{right}    }} loc(#loc1)\n"
    assert overwritten(twice) == []
    assert len(overwritten(twice + LOOP.format(buffers=2, pending=1))) == 1


def test_an_operand_that_cannot_be_followed_is_found() -> None:
    (found,) = overwritten(LOOP.format(buffers=3, pending=1).replace("%num_183, %a_180, %", "%num_183, %arg30, %"))
    assert found.startswith("an operand of unknown buffers: %num_184:3 = ttng.warp_group_dot_wait")


# `state_gradients` of linear attention, assembled by ptxas 12.8.93: UR42 should be computed from UR36. UR7 is the
# address of the kernel's shared memory.
STATE_GRADIENTS = """
        /*07f0*/                   UMOV UR7, 0x400 ;
        /*16f0*/                   UIADD3 UR19, UR7, 0xc000, URZ ;
        /*1710*/                   UIADD3 UR42, UP0, UR42, 0x40, URZ ;
        /*17b0*/                   USHF.R.U32.HI UR19, URZ, 0x4, UR19 ;
        /*1850*/                   UIADD3.X UR43, UR43, -0x7fffffe0, URZ, UP0, !UPT ;
        /*1870*/                   UIADD3 UR46, UP0, UR42, 0x40, URZ ;
        /*1890*/                   USGXT.U32 UR36, UR19, 0xe ;
        /*19e0*/                   UIADD3.X UR47, UR43, URZ, URZ, UP0, !UPT ;
"""
# The same by ptxas 12.9.86
RIGHT = """
        /*07e0*/                   UMOV UR7, 0x400 ;
        /*1850*/                   UIADD3 UR17, UR7, 0xc000, URZ ;
        /*1890*/                   USHF.R.U32.HI UR17, URZ, 0x4, UR17 ;
        /*1910*/                   USGXT.U32 UR36, UR17, 0xe ;
        /*1a90*/                   UMOV UR9, URZ ;
        /*1b40*/                   UIADD3 UR42, UP3, UR36, 0x40, URZ ;
        /*1bf0*/                   UIADD3.X UR43, UR9, -0x7fffffe0, URZ, UP3, !UPT ;
        /*1df0*/                   UIADD3.64 UR46, UR42, 0x40, URZ ;
"""
# The mLSTM's `gradients` of keys of 16, values of 70, resets, assembled by ptxas 12.8.93.
GRADIENTS = """
        /*0020*/                   ULDC.64 UR20, c[0x0][0x208] ;
        /*0120*/                   UIADD3 UR22, UP0, UR22, 0x20, URZ ;
        /*0230*/                   UIADD3.X UR23, UR23, -0x3ffffff0, URZ, UP0, !UPT ;
        /*08d0*/                   LDGSTS.E [R19+0x1000], desc[UR20][R6.64] ;
"""


@pytest.mark.parametrize(
    ("code", "register", "address"), [(STATE_GRADIENTS, 42, "1710"), (GRADIENTS, 22, "0120")],
)
def test_a_register_that_nothing_has_written_is_found(code: str, register: int, address: str) -> None:
    low, high = unwritten(code)
    assert low.startswith(f"UR{register} is read at {address}, by UIADD3 UR{register}, UP0, UR{register}, 0x")
    assert high.startswith(f"UR{register + 1} is read at ")


def test_right_code_has_no_such_register() -> None:
    assert unwritten(RIGHT) == []
    # The PTX of a map of blocks of 3 by 5 packs bytes of registers that it does not write, either.
    assert unwritten("/*0030*/ UPRMT UR4, UR4, 0x3340, UR4 ;\n/*0090*/ IMAD.U32 R3, RZ, RZ, UR4 ;") == []


@pytest.mark.slow
@pytest.mark.skipif(triton_common.MISSING != "", reason="Triton is not installed")
def test_the_ptxas_that_is_used_here_is_right(root: Path, tmp_path: Path) -> None:
    """Assemble a reduced `state_gradients`: right unless this ptxas is refused."""
    refused = triton_common.refused_ptxas()
    compiler = importlib.import_module("triton.backends.nvidia.compiler")
    get_ptxas = compiler.get_ptxas  # without arguments in Triton 3.5
    ptxas = get_ptxas(90) if get_ptxas.__code__.co_argcount else get_ptxas()
    cubin = tmp_path / "cubin"
    source = root / "tests" / "triton" / "wrong_with_ptxas_12_8.ptx"
    subprocess.run([ptxas.path, "--gpu-name=sm_90a", source, "-o", cubin], check=True, capture_output=True)
    nvdisasm = Path(compiler.__file__).parent / "bin" / "nvdisasm"
    code = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    assert bool(unwritten(code)) == bool(refused)


@pytest.mark.parametrize(
    ("name", "operands", "reads", "writes"),
    [
        ("ULDC.64", "UR20, c[0x0][0x208]", [], [20, 21]),
        ("UIADD3.64", "UR46, UR42, 0x40, URZ", [42, 43], [46, 47]),
        ("UIMAD.WIDE.U32", "UR4, UR5, UR6, UR8", [5, 6, 8], [4, 5]),
        ("ULOP3.LUT", "UP0, UR19, UR22, 0x3fff, URZ, 0xc0, !UPT", [22], [19]),
        ("UISETP.GE.AND", "UP2, UPT, UR12, UR13, UPT", [12, 13], []),
        ("R2UR", "UR9, R28", [], [9]),
        ("LDCU.128", "UR8, c[0x0][0x380]", [], [8, 9, 10, 11]),
        ("UMOV", "URZ, UR4", [4], []),
        ("IMAD.U32", "R26, RZ, RZ, UR12", [12], []),
        ("LDS.64", "R4, [R6+UR7+0x80]", [7], []),
        ("LDG.E.128", "R8, desc[UR52][R20.64+0x10]", [52, 53], []),
        ("HGMMA.64x32x16.F32.BF16", "R24, gdesc[UR20].tnspB, RZ, !UPT", [20, 21, 22, 23], []),
        ("HGMMA.64x32x16.F32.BF16", "R40, R24, gdesc[UR8].tnspB, R40, gsb0", [10, 11], []),
        ("UTMALDG.2D", "[UR8], [UR4], desc[UR6]", [8, 4, 6, 7], []),
        ("BAR.SYNC.DEFER_BLOCKING", "0x0", [], []),
    ],
)
def test_registers_of_an_instruction(name: str, operands: str, reads: list[int], writes: list[int]) -> None:
    assert registers(name, operands.split(", ")) == (reads, writes)

"""How kernels are launched: lengths of chunks, tiles, warps and stages."""

from __future__ import annotations

from seqblocks.kernels import triton_common as common

WALKERS = 512  # programs that walk over chunks, at least: four for each multiprocessor of a large GPU
WALKED = 8  # chunks, at most, that one program goes through to find the gates; more are worth two more launches
LONGEST_CHUNK = 256
CHUNKS_AT_ONCE = 256  # chunks whose passages a program composes in one step


def chunk(dk: int, dv: int, narrow: bool) -> dict[str, int]:
    """Tokens of a chunk and of a tile of it.

    Not narrow: dots of float32, which take twice the room. A chunk is two tiles where states are larger than what the
    tokens of one tile bring, and four where they are twice that: then less of states is written and read, which takes
    longer than the products within a chunk where these are of bfloat16; where not, eight times. It does not depend on
    the length, which may be unknown when a program is exported.
    """
    BT = 64 if narrow else 32
    states, tokens = dk * dv, BT * (dk + dv)
    return {"L": BT * (1 if states < tokens else 2 if states < (2 if narrow else 8) * tokens else 4), "BT": BT}


def tiles(kernel: str, dk: int, dv: int, narrow: bool, arch: str, heads: int = 1 << 20) -> dict[str, int]:
    """Columns of keys and of values that a program of this kernel holds, its warps, and the stages of its pipelines;
    of gradients also the channels that a product takes at a time (of outputs: BK).

    A program that makes all weights between two tiles of tokens should not do so for few columns: it has twice as many
    of those it writes, and on NVIDIA's up to all of a wide head, by twice the warps. Programs that walk over chunks are
    few: those are wide where heads (of all sequences together) and tiles leave several for each multiprocessor.
    """
    most = 64 if narrow else 32
    walks, both = kernel in ("states", "state_gradients"), kernel == "gradients"
    amd = arch.startswith("gfx")
    wide = narrow and (not walks or (not amd and heads * dk * dv >= WALKERS * 2 * most**2))
    size = {name: max(16, common.power_of_two(n)) for name, n in (("BK", dk), ("BV", dv))}
    cap = {"BK": 2 * most if wide and both else most, "BV": 2 * most if wide else most}
    tile = {name: min(cap[name], n) for name, n in size.items()}
    columns = max(size.values()) if both else size["BV"]
    step, warps, ahead = min(most, max(size.values())), 4, 3
    if wide and not walks:
        widest = 512 if arch == "sm_90" else 256 if arch.startswith("sm_8") else 128  # columns that 8 warps can hold
        if columns > (64 if both and widest == 256 else 128) and widest > 128:
            tile["BV"], warps = min(widest, size["BV"]), 8
            if both:
                tile |= {"BK": min(256, size["BK"]), "BV": min(tile["BV"], 256 if dk > 256 else 512)}
        # short steps, of which compilers unroll the loop; but not so many that this takes registers
        step, ahead = (32, 3) if columns > most and (both or warps == 4 or dk <= 256) else (step, 2)
    elif walks and amd:
        ahead = 2  # more, or wider tiles, would take registers of the second half
    if both:
        tile["BD"] = step
    elif not walks:
        tile["BK"] = min(step, size["BK"])
    return {**tile, "num_warps": warps, "num_stages": ahead}


def step_tiles(dk: int, dv: int, arch: str) -> dict[str, int]:
    """Rows and columns of C that a program holds at a time: enough of them under way to fill the memory's pipe."""
    BK, BV = (max(16, min(64, common.power_of_two(n))) for n in (dk, dv))
    return {"BK": BK, "BV": BV, "num_warps": common.warps(BK * BV, 16)}

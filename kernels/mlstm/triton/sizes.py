"""Parameters of launches: lengths of chunks, tiles, warps and stages."""

from __future__ import annotations

from seqblocks.kernels import triton_common as common

MIN_WALKERS = 512  # programs that loop over chunks: four for each multiprocessor of a large GPU
WALK_MAX_CHUNKS = 8  # up to which one program computes the gates; for more, two additional launches are faster
CHUNK_MAX_TOKENS = 256
CHUNKS_AT_ONCE = 256  # chunks whose maps of m a program composes in one step


def chunk(dk: int, dv: int, narrow: bool) -> dict[str, int]:
    """Return the tokens of a chunk (L) and of a tile (BT).

    narrow: operands are bfloat16, not float32, which takes twice the space. A chunk has two tiles if a state is at
    least as large as the keys and values of one tile, and four if it is at least twice as large (eight times, if not
    narrow). Longer chunks read and write fewer states, which takes longer than bfloat16 products within a chunk. The
    result does not depend on the sequence length, which may be unknown when a program is exported.
    """
    BT = 64 if narrow else 32
    states, tokens = dk * dv, BT * (dk + dv)
    return {"L": BT * (1 if states < tokens else 2 if states < (2 if narrow else 8) * tokens else 4), "BT": BT}


def tiles(kernel: str, dk: int, dv: int, narrow: bool, arch: str, heads: int = 1 << 20) -> dict[str, int]:
    """Return the columns of keys (BK) and values (BV) of a program of this kernel, its warps and pipeline stages.

    For gradients the result also has the channels of a product at a time, BD; for outputs these are BK.

    A program that computes all weights between two tiles of tokens should use them for many columns. It therefore
    writes twice as many columns, and on NVIDIA GPUs up to all those of a wide head, with twice the warps. There are few
    programs that loop over chunks. They are wide only if heads (of all sequences together) and tiles leave several
    programs for each multiprocessor.
    """
    most = 64 if narrow else 32
    walks, both = kernel in ("states", "state_gradients"), kernel == "gradients"
    amd = arch.startswith("gfx")
    wide = narrow and (not walks or (not amd and heads * dk * dv >= MIN_WALKERS * 2 * most**2))
    size = {name: max(16, common.power_of_two(n)) for name, n in (("BK", dk), ("BV", dv))}
    cap = {"BK": 2 * most if wide and both else most, "BV": 2 * most if wide else most}
    tile = {name: min(cap[name], n) for name, n in size.items()}
    columns = max(size.values()) if both else size["BV"]
    step, warps, ahead = min(most, max(size.values())), 4, 3
    if wide and not walks:
        # widest: the most columns for the registers of 8 warps
        widest = 512 if arch == "sm_90" else 256 if arch.startswith("sm_8") else 128
        if columns > (64 if both and widest == 256 else 128) and widest > 128:
            tile["BV"], warps = min(widest, size["BV"]), 8
            if both:
                tile |= {"BK": min(256, size["BK"]), "BV": min(tile["BV"], 256 if dk > 256 else 512)}
        # Compilers unroll the loop of short steps; too many of them would take registers.
        step, ahead = (32, 3) if columns > most and (both or warps == 4 or dk <= 256) else (step, 2)
    elif walks and amd:
        ahead = 2  # More stages, or wider tiles, would need the second half of the register file.
    if both:
        tile["BD"] = step
    elif not walks:
        tile["BK"] = min(step, size["BK"])
    return {**tile, "num_warps": warps, "num_stages": ahead}


def step_tiles(dk: int, dv: int, arch: str) -> dict[str, int]:
    """Return the rows and columns of C that a program loads at a time, enough to saturate the memory bandwidth."""
    BK, BV = (max(16, min(64, common.power_of_two(n))) for n in (dk, dv))
    return {"BK": BK, "BV": BV, "num_warps": common.warps(BK * BV, 16)}

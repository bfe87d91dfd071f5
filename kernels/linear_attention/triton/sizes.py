"""Launch parameters of the kernels: tokens per chunk, channels per program, warps and stages."""

from __future__ import annotations

from seqblocks.kernels import triton_common as common

DELTA_MAX_KEYS = 256  # limit for delta rules, whose programs hold all keys


def chunk(narrow: bool, delta: bool, keys: int) -> int:
    """Return the tokens per chunk: fewer for wide keys and float32 dots (not narrow), which take twice the memory."""
    return 64 if narrow and not (delta and keys > 128) else 32


def tiles(kernel: str, keys: int, values: int, per_key: bool, delta: bool, narrow: bool, arch: str) -> dict[str, int]:
    """Return a kernel's block sizes, warps and stages; BK, BV: key and value columns per block."""
    BK, BV = (max(16, common.power_of_two(n)) for n in (keys, values))
    most = 64 if narrow else 32
    if kernel in ("sums", "decay_gradients"):
        return {"BD": min(64, common.power_of_two(keys)) if per_key else 1, "num_warps": 1}
    if kernel == "pairs":
        return {"BK": min(32 if per_key else most, BK), "num_warps": 4, "num_stages": 2}
    if kernel == "weight_gradients":
        return {"BV": min(most, BV), "num_warps": 4, "num_stages": 2}
    amd = arch.startswith("gfx")
    if kernel == "key_gradients":
        warps = (2 if per_key else 4) if narrow else (4 if per_key else 8)
        return {"BK": min(most, BK), "BV": min(most, BV), "num_warps": warps, "num_stages": 2}
    if not (delta and kernel in ("states", "state_gradients")):
        return {"BK": min(BK, most), "BV": min(BV, most), "num_warps": 4, "num_stages": 2}
    # Programs hold all keys of a chunk, so they take narrow blocks of values and more warps.
    large = BK > 128 or (BK > 64 and not narrow)
    spills = not narrow or (kernel == "state_gradients" and per_key)  # with 32 values
    BV = min(BV, 16 if (large and (spills or amd)) or (BK > 64 and amd) else 32)
    more = large or (BK > 64 and amd) or (kernel == "state_gradients" and ((BK > 64 and per_key) or not narrow))
    return {"BK": BK, "BV": BV, "num_warps": 8 if more else 4, "num_stages": 1 if amd or more else 2}

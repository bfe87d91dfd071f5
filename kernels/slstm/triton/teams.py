"""How the programs of a team wait for one another.

A team of programs owns a head of BB sequences: each program the gates of BU channels, whose matrices stay on chip.
What the programs exchange, [teams, 2, BB, BD] forward and [teams, 2, 4, BB, BD] backward, holds alternately the results
of a token and of the one before, with zeros after channel D. `arrived` is a counter for each team, a cache line each.
A launch walks the tokens from `begin` to `end`: a token needs what all of its team wrote at the one before, so
interpreted, one program after the other, a launch has one token.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels.triton_common import jit, tl


@jit
@no_type_check
def arrive(arrived):
    """Count this program. Whoever sees the count sees its stores too."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")


@jit
@no_type_check
def wait(arrived, wanted, patience):
    """Wait until `wanted` programs arrived. Returns the patience that is left: 0 if it ran out, so that no device
    hangs."""
    count = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    looks = 0
    while (count < wanted) & (looks < patience):
        count = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
        looks += 1
    tl.debug_barrier()
    return tl.where(count < wanted, 0, patience)


@jit
@no_type_check
def report(gave_up, patience):
    """Report to the host that this program gave up: what it wrote is NaN."""
    tl.store(gave_up, 1, patience <= 0)

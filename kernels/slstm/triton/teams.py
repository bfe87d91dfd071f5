"""Synchronisation of the programs of a team.

A team of programs processes one head of BB sequences. Each program computes the gates of BU channels, whose matrices
stay on chip. The exchange buffers, [teams, 2, BB, BD] forward and [teams, 2, 4, BB, BD] backward, alternately hold the
results of a token and of the previous one, with zeros after channel D. `arrived` has a counter for each team, in a
cache line of its own. A launch processes the tokens from `begin` to `end`. A token needs the results of the whole team
for the previous one; Triton's interpreter, which runs programs one after the other, therefore needs a launch per token.
"""

from __future__ import annotations

from typing import no_type_check

from seqblocks.kernels.triton_common import jit, tl


@jit
@no_type_check
def arrive(arrived):
    """Increment the counter. Programs that read the new count also see this program's stores."""
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release", scope="gpu")


@jit
@no_type_check
def wait(arrived, wanted, patience):
    """Wait until `wanted` programs have arrived.

    Returns patience, or 0 after that many polls without success, so that the device does not hang.
    """
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
    """Report to the host if this program timed out; its results are NaN then."""
    tl.store(gave_up, 1, patience <= 0)

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
def wait(arrived, expected, polls):
    """Wait until the `expected` number of programs has arrived.

    Returns `polls`, or 0 after that many attempts without success, so that the device does not hang.
    """
    count = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
    attempts = 0
    while (count < expected) & (attempts < polls):
        count = tl.atomic_add(arrived, 0, sem="acquire", scope="gpu")
        attempts += 1
    tl.debug_barrier()
    return tl.where(count < expected, 0, polls)


@jit
@no_type_check
def report(timed_out, polls):
    """Report to the host if this program timed out; its results are NaN then."""
    tl.store(timed_out, 1, polls <= 0)

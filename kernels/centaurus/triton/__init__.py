"""Centaurus in Triton: a bank of complex diagonal states, with the segments of a sequence in parallel.

A program holds BN channels of one sequence with their M sub-states in registers and iterates over the tokens. Complex
numbers are pairs of reals, and the loop computes no exponentials. A small batch would leave a device idle, so its
sequences are cut into segments: the first launch computes the state after each segment from a zero initial state, the
second carries states from segment to segment (over T tokens a state is multiplied by p^T), and the third runs all
segments in parallel. A batch large enough to fill the device needs a single launch.

Backward: gradients of states follow the same recurrence in the opposite direction, so the same kernels run, with input
and read-out weights exchanged. The gradient of p does not need the states twice: w = ds/dp follows w' = p w + s, so one
forward pass accumulates dv r w and dv s over a segment, plus the gradient that enters at the segment's end times w.

The projections of the modes neck and pointwise are matrix products in the input's dtype. B and C of dws and full are
folded into the read-out weights, except in calls with a state, since the state includes B. In mode full, a program sums
the channels of one output before it writes; in the backward pass, the channels of one feature.
"""

from seqblocks.kernels.centaurus.triton.launch import run

__all__ = ["run"]

"""Linear attention, delta rules and their gated variants: one recurrence on a matrix state."""

from seqblocks.kernels.linear_attention.interface import linear_attention

__all__ = ["linear_attention"]

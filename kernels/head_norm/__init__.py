"""Layer norm of each head by itself, the norm after a recurrent cell, and what blocks put behind it."""

from seqblocks.kernels.head_norm.interface import head_norm

__all__ = ["head_norm"]

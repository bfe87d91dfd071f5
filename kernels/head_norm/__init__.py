"""Layer norm of each head by itself, with the skip and the gate that follow it in blocks."""

from seqblocks.kernels.head_norm.interface import head_norm

__all__ = ["head_norm"]

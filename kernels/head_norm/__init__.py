"""Layer norm within each head, fused with the skip and the gate that follow it."""

from seqblocks.kernels.head_norm.interface import head_norm

__all__ = ["head_norm"]

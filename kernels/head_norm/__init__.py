"""Layer norm within each head, fused with a subsequent skip and gate."""

from seqblocks.kernels.head_norm.interface import head_norm

__all__ = ["head_norm"]

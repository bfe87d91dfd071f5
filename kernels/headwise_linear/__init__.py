"""Block-diagonal linear map: each block of channels has its own matrix."""

from seqblocks.kernels.headwise_linear.interface import headwise_linear

__all__ = ["headwise_linear"]

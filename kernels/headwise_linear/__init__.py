"""Block-diagonal linear map: each block of channels has a small matrix of its own."""

from seqblocks.kernels.headwise_linear.interface import headwise_linear

__all__ = ["headwise_linear"]

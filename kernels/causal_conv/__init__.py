"""Causal convolution along the sequence, with carried windows."""

from seqblocks.kernels.causal_conv.interface import causal_conv

__all__ = ["causal_conv"]

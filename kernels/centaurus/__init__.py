"""Centaurus: a bank of complex diagonal states as a long convolution (Pei et al., ICLR 2025)."""

from seqblocks.kernels.centaurus.interface import centaurus

__all__ = ["centaurus"]

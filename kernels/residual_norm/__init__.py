"""Normalisation of each token's features, fused with the preceding residual addition."""

from seqblocks.kernels.residual_norm.interface import residual_norm

__all__ = ["residual_norm"]

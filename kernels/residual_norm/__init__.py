"""Normalisation of each token's features, fused with the residual addition before it."""

from seqblocks.kernels.residual_norm.interface import residual_norm

__all__ = ["residual_norm"]

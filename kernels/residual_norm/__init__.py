"""Normalisation of each token's features, with the residual that is added before it."""

from seqblocks.kernels.residual_norm.interface import residual_norm

__all__ = ["residual_norm"]

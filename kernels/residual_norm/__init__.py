"""Normalisation of each token's features, with the residual that is added before it."""

from seqblocks.kernels.residual_norm.interface import replaces_operations, residual_norm

__all__ = ["replaces_operations", "residual_norm"]

"""The selective scan: a diagonal state space with data-dependent step, input and output matrices (Mamba)."""

from seqblocks.kernels.selective_scan.interface import selective_scan

__all__ = ["selective_scan"]

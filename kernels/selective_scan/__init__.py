"""The selective scan of Mamba: a diagonal state space model with data-dependent step, input and output matrices."""

from seqblocks.kernels.selective_scan.interface import selective_scan

__all__ = ["selective_scan"]

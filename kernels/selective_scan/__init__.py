"""The selective scan: a diagonal state space whose step, input and output depend on the token (Mamba)."""

from seqblocks.kernels.selective_scan.interface import selective_scan

__all__ = ["selective_scan"]

"""A scan over any associative operator, and the memoroid built on it (arXiv:2402.09900)."""

from seqblocks.kernels.associative_scan.interface import Memoroid, as_an_op, associative_scan

__all__ = ["Memoroid", "as_an_op", "associative_scan"]

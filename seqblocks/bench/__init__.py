"""Time a model step by step on this machine, beside the least time that its arithmetic and traffic need."""

from seqblocks.bench.measure import Bench, Row, bench

__all__ = ["Bench", "Row", "bench"]

"""How each combinator is lowered: its steps become bodies, and its node is made of them."""

from seqblocks.analysis.combinators import parallel, repeat, residual, scan

__all__ = ["parallel", "repeat", "residual", "scan"]

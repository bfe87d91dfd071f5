"""How each combinator is lowered: its steps become bodies, and its node is made of them."""

from seqblocks.analysis.combinators import experts, parallel, repeat, residual, scan

__all__ = ["experts", "parallel", "repeat", "residual", "scan"]

"""`python -m seqblocks.cli`."""

from seqblocks.cli import entry

entry()

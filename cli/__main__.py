"""`python -m seqblocks.cli`."""

from seqblocks.cli.main import entry

entry()

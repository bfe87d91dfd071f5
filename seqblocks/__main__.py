"""`python -m seqblocks`."""

from seqblocks.cli import entry

entry()

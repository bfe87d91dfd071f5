"""`python -m seqblocks`."""

from seqblocks.cli.main import entry

entry()

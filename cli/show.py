"""Print the summary of a model as a table."""

from __future__ import annotations

import argparse

from rich.console import Console

from seqblocks.cli import output
from seqblocks.descriptions import table
from seqblocks.descriptions.summary import Summary


def console(options: argparse.Namespace) -> Console:
    """Return rich's console for standard output, with colours as requested."""
    stream = output.stdout()
    colour = output.coloured(stream, options.color)
    return Console(file=stream, no_color=not colour, force_terminal=colour or None, highlight=False, soft_wrap=False)


def summary(found: Summary, options: argparse.Namespace) -> None:
    """Print the table and the totals."""
    out = console(options)
    with out.capture() as text:
        table.write(found, out, out.encoding, options.batch)
    output.write(text.get().rstrip("\n"), raw=True)

"""`seqblocks convert`: convert weights to another layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqblocks._version import __version__
from seqblocks.cli import output
from seqblocks.cli.check import overrides
from seqblocks.cli.imports import import_torch
from seqblocks.errors import UsageError, visible

NO_CONFIG = "there is no config.json, because none came with the weights. Other software needs one of the model"


def run(options: argparse.Namespace) -> int:
    """Convert, and print a summary of the files written."""
    import_torch("converting needs torch")
    from seqblocks.checkpoint.convert import convert, to_gguf
    from seqblocks.checkpoint.folder import CONFIG

    more = {"spec": options.spec, "set": overrides(options)}
    remarks = []
    if options.to == "gguf":
        kind, tokenizer = options.type or "f32", options.tokenizer
        _, tensors, size = to_gguf(options.path, options.out, dtype=kind, tokenizer=tokenizer, **more)
    elif options.type or options.tokenizer:
        raise UsageError("--type and --tokenizer are for --to gguf; other layouts keep the dtypes of the weights")
    else:
        written = convert(options.path, options.to, options.out, shard_size=options.shard_size, **more)
        tensors, size = len(written.headers), sum(header.nbytes for header in written.headers.values())
        remarks = [] if (Path(options.out) / CONFIG).exists() else [NO_CONFIG]
    facts = {"version": __version__, "ok": True, "out": options.out, "layout": options.to}
    output.notes(remarks, options)
    if options.format == "json":
        output.dump({**facts, "tensors": tensors, "bytes": size, "notes": remarks})
    elif not options.quiet:
        what = f"{tensors:,} tensors as {options.to}, {output.bytes_of(size)}"
        output.write(f"{visible(options.out)}: written, {what}")
    return 0

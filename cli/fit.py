"""`seqblocks fit`: choose values of a spec's options that meet a budget."""

from __future__ import annotations

import argparse

from seqblocks._version import __version__
from seqblocks.architect.fit import Fit, fit
from seqblocks.cli import INTERRUPTED, output
from seqblocks.cli.check import overrides
from seqblocks.cli.compare import designs
from seqblocks.cli.progress import progress
from seqblocks.errors import UsageError, quote, visible

UNREACHED = 1


def run(options: argparse.Namespace) -> int:
    """Print the best points of the grid, and write the best spec on request. Status 1: a target is out of reach.

    An interrupt prints the best of the points that were checked, and writes nothing.
    """
    if options.write == "-":
        raise UsageError("--write takes the name of a file, not -: standard output has the result of the fit")
    with progress(options, f"fitting {visible(options.spec)}") as advance:
        found = fit(
            designs([options.spec], options)[0], pairs(options.solve), options.to, set=overrides(options),
            top=options.top, length=options.length, dtype=options.dtype, exhaustive=options.exhaustive,
            allow_use=options.allow_use, strict=options.strict, advance=advance,
        )  # fmt: skip
    if not options.quiet:
        output.warnings(found.warnings, 0, options)
    if options.format == "json":
        output.dump({"version": __version__, "ok": found.reached, "spec": options.spec} | found.as_data())
    elif options.format == "text":
        _write(found, options)
    else:
        output.write(found.markdown() if options.format == "markdown" else found.csv())
    writes = options.write and found.reached and not found.interrupted
    unmet = found.write(options.write, options.allow_use) if writes else ()  # after the result, which took long
    if writes and not options.quiet:
        file = visible(options.write)
        output.notes([f"{file}: written"], options)
        output.notes([f"{file} does not meet its `expect:`: {each.message}" for each in unmet], options)
    if found.interrupted:
        return INTERRUPTED
    if not found.reached:
        nowhere = f"; {visible(options.write)} was not written" if options.write else ""
        output.problem(f"out of reach: {', '.join(map(str, found.unreached))}{nowhere}", options)
    return 0 if found.reached else UNREACHED


def _write(found: Fit, options: argparse.Namespace) -> None:
    output.write(found.text())
    if options.quiet:
        return
    invalid = f", {found.invalid:,} of them invalid" if found.invalid else ""
    until = " before an interrupt" if found.interrupted else ""
    output.write(f"\n{found.checks:,} of {found.points:,} points checked{until}{invalid}; the {_kind(found)} one is")
    output.write(f"  {visible(found.best.command)}")


def _kind(found: Fit) -> str:
    if found.interrupted:
        return "best checked"
    return "best" if found.reached else "nearest"


def pairs(texts: list[str]) -> dict[str, str]:
    """Return `PATH=VALUES` options as a mapping."""
    found: dict[str, str] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"an option is written PATH=VALUES, for instance dim=64..512:64, not {quote(text)}")
        if path.strip() in found:
            raise UsageError(f"{quote(path.strip())} has values twice")
        found[path.strip()] = values
    return found

"""`seqblocks spec`: print the spec that describes the weights in a folder of the Hugging Face Hub."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqblocks._version import __version__
from seqblocks.cli import output
from seqblocks.cli.imports import import_torch
from seqblocks.errors import UsageError, listing, visible
from seqblocks.language.writing import write_text

UNKNOWN = 1


def run(options: argparse.Namespace) -> int:
    """Print the spec, or write it with --out. Status 1: no family fits, and the result is only a start."""
    import_torch("reading weights of other software requires torch")
    config = _config(Path(options.path))
    text, notes = _spec(config)
    if options.out:
        _write(Path(options.out), text)
    if options.format == "json":
        output.dump({"version": __version__, "ok": not notes, "spec": text, "notes": notes})
    else:
        if not options.out:
            output.write(text.rstrip("\n"), raw=True)
        if not options.quiet:
            output.notes(notes, options)
    return UNKNOWN if notes else 0


def _config(place: Path) -> dict[str, Any]:
    file = place / "config.json" if place.is_dir() else place
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{visible(str(file))} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{visible(str(file))} is not JSON") from None
    if not isinstance(found, dict):
        raise UsageError(f"{visible(str(file))} is not a mapping")
    return found


def _spec(config: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the spec of a config, and remarks on what it does not say."""
    from seqblocks.checkpoint.families import COMPOSITE, FAMILIES, spec_text

    if isinstance(config.get("spec"), str) and config.get("model_type") == "seqblocks":
        return config["spec"], []
    kind = config.get("model_type")
    if kind is None or (isinstance(kind, str) and (kind in FAMILIES or kind in COMPOSITE)):
        return spec_text(config), []
    near, text, unread = nearest(config)
    start = f"# A start: {near} is the nearest known family of the unknown model_type {visible(str(kind))}."
    notes = [f"model_type {visible(str(kind))} is not known: this is a model of {near} with the same sizes"]
    if unread:
        start += f"\n# Not described: {visible(listing(unread, len(unread)))}"
        notes.append(f"entries that {near} does not have: {visible(listing(unread, len(unread)))}")
    return f"{start}\n{text}", notes


def nearest(config: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Return the family that understands most entries of a config, its spec, and the entries that it does not read."""
    from seqblocks.checkpoint.families import ALIASES, FAMILIES
    from seqblocks.checkpoint.families.unread import HARMLESS
    from seqblocks.checkpoint.families.values import Recorded, renamed

    harmless = {*HARMLESS.split()}
    found: list[tuple[int, str, str, list[str]]] = []
    for family, write in FAMILIES.items():
        try:
            entries = Recorded(renamed(config, ALIASES.get(family, {})))
            text = write(entries)
        except (UsageError, ZeroDivisionError):
            continue
        unread = [
            name for name, value in entries.unread()
            if value is not None and value is not False and name not in harmless
        ]  # fmt: skip
        found.append((len(unread), family, text, unread))
    if not found:
        raise UsageError(
            f"no known family has the entries of this config.json; the families are {listing(FAMILIES, len(FAMILIES))}"
        )
    _, family, text, unread = min(found, key=lambda each: each[0])
    return family, text, unread


def _write(path: Path, text: str) -> None:
    if path.exists():
        raise UsageError(f"--out {visible(str(path))} exists; choose another name, or remove it first")
    write_text(path, text)

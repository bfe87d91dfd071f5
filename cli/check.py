"""`seqblocks check`: check specs without importing torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from seqblocks import graph
from seqblocks._version import __version__
from seqblocks.analysis import check
from seqblocks.analysis.analyse import Analysis, analyse_text
from seqblocks.cli import output
from seqblocks.errors import SpecError, UsageError, visible
from seqblocks.graph import ModelSpec
from seqblocks.language.spec import SpecFile
from seqblocks.language.spec_files import locate


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """Return the `--set PATH=VALUE` options as a mapping."""
    found = {}
    for text in options.set:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"--set takes PATH=VALUE, for instance --set dim=384, not {text!r}")
        found[path.strip()] = check.yaml(value)
    return found


def load(
    spec: str, options: argparse.Namespace, more: dict[str, str] | None = None
) -> tuple[SpecFile, ModelSpec | None]:
    """Load and check a spec given on the command line; print its warnings and notes."""
    changes = {**overrides(options), **(more or {})}
    file, model = valid(analysed(spec, options, changes))
    if not options.quiet:
        output.warnings(file.warnings, file.dropped, options)
    if model is not None and not options.quiet:
        output.notes([f"{visible(spec)}: {text}" for text in model.notes], options)
    return file, model


def analysed(spec: str, options: argparse.Namespace, changes: dict[str, str], references: bool = False) -> Analysis:
    """Analyse a spec given on the command line. Raises SpecError only if there is no text to analyse."""
    given: dict[str, Any] = {"allow_use": options.allow_use, "strict": options.strict, "references": references}
    if spec != "-":
        return analyse_text(*locate(spec), changes, **given)
    from seqblocks.errors import Report
    from seqblocks.language.spec_files import read_stream

    report = Report()
    text = read_stream(sys.stdin.buffer, options.stdin_filename, report)
    report.raise_if_any()
    assert text is not None
    return analyse_text(text, options.stdin_filename, Path(), changes, **given)


def valid(found: Analysis) -> tuple[SpecFile, ModelSpec | None]:
    """Return the file and the model of an analysis. Raises SpecError for an invalid spec."""
    if found.file is None or not found.ok:
        raise found.error()
    return found.file, found.model


def run(options: argparse.Namespace) -> int:
    """Check all specs, continuing after errors."""
    if options.spec.count("-") > 1:
        raise UsageError("standard input can be read only once: write `-` once")
    if options.graph and options.format != "json":
        raise UsageError("--graph adds the steps and references to JSON: it needs --format json")
    records: list[dict[str, Any]] = []
    status = 0
    for spec in options.spec:
        graph_of: dict[str, Any] = {}
        try:
            if options.graph:
                found = analysed(spec, options, overrides(options), references=True)
                graph_of = {"graph": found.as_data()}
                file, model = valid(found)
            else:
                file, model = load(spec, options)
        except SpecError as error:
            # an invalid spec takes precedence over a broken `expect:`
            status = error.exit_status if status == 0 else min(status, error.exit_status)
            records.append({"spec": spec, **output.failed(error), **graph_of})
            if options.format != "json":
                output.diagnostics(error, options)
            continue
        if options.format != "text":
            records.append({"spec": spec, "ok": True, **_facts(file, model), **graph_of})
        elif not options.quiet:
            output.write(f"{visible(spec)}: ok, {_described(file, model)}")
    if options.format == "json":
        output.dump({"version": __version__, "ok": status == 0, "specs": records})
    elif options.format == "markdown":
        output.write(_table(records))
    return status


def _facts(file: SpecFile, model: ModelSpec | None) -> dict[str, Any]:
    if model is None:
        return {"blocks": list(file.blocks), "warnings": [each.as_data() for each in file.warnings]}
    facts = {"params": graph.count(model.graph), "input": model.input_text, "output": model.output_text}
    return facts | output.remarks_on(model)


def _described(file: SpecFile, model: ModelSpec | None) -> str:
    if model is None:
        return f"{len(file.blocks)} block{'s' if len(file.blocks) != 1 else ''} ({', '.join(file.blocks)})"
    changed = f" (with {', '.join(model.overridden)})" if model.overridden else ""
    return f"{graph.count(model.graph):,} parameters, {model.input_text} -> {model.output_text}{changed}"


def _table(records: list[dict[str, Any]]) -> str:
    from seqblocks.architect.tables import markdown

    rows = ([record["spec"], _outcome(record), *_shapes(record)] for record in records)
    return markdown(["spec", "result", "input", "output", "parameters"], rows, left=4)


def _outcome(record: dict[str, Any]) -> str:
    if record["ok"]:
        number, what = len(record["warnings"]), "warning"
        text = "ok"
    else:
        first = record["diagnostics"][0]
        number, what = len(record["diagnostics"]) - 1 + record["dropped"], "more error"
        text = first["code"] + (f", line {first['line']}" if "line" in first else "") + f": {first['message']}"
    return text + (f" ({number} {what}{'s' if number != 1 else ''})" if number else "")


def _shapes(record: dict[str, Any]) -> list[str]:
    return [record["input"], record["output"], f"{record['params']:,}"] if "params" in record else [""] * 3

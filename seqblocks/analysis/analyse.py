"""Analyse the text of a spec, valid or not: all that its readers need, without torch."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqblocks.analysis.lower import Lowered, is_builtin, lower_file
from seqblocks.analysis.scope.references import Reference
from seqblocks.errors import (
    MAX_DIAGNOSTICS,
    Diagnostic,
    ExpectationError,
    Fault,
    Report,
    Source,
    SourceKind,
    SpecError,
    UsageError,
    in_order,
)
from seqblocks.graph import ModelSpec, SpecSource
from seqblocks.language.document import Node
from seqblocks.language.spec import Reader, SpecFile, read_file
from seqblocks.op import has_plugin

if TYPE_CHECKING:
    from seqblocks.analysis.step_list import LocatedStep  # only readers of an analysis need it
    from seqblocks.language.overrides import Override  # only specs with overrides need it

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
GRAPH_VERSION = 1  # of the JSON of an analysis


class Analysis:
    """What is known of a spec, which may have faults.

    file: None if it cannot be read. model: the typed graph; with faults, some of its steps have no type, and it is
    None if even its input is unknown. diagnostics: errors, then warnings, those with an edit that removes them with
    their `fix`. dropped: number of further ones over the limit. references: where wires, names of `let:` and `args:`,
    and verbs are read.
    """

    def __init__(self, file: SpecFile | None, diagnostics: list[Diagnostic], dropped: int, status: int) -> None:
        self.file, self.diagnostics, self.dropped = file, diagnostics, dropped
        self.status = status  # the exit status of `seqblocks check`
        self.lowered = Lowered(None, None)
        self.files: tuple[tuple[str, str], ...] = ()  # texts of used files: by relative path, bundled ones by name

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return self.status == 0

    @property
    def model(self) -> ModelSpec | None:
        return self.lowered.model

    @property
    def references(self) -> tuple[Reference, ...]:
        return self.lowered.references

    @property
    def steps(self) -> list[LocatedStep]:
        """The steps of the model by their place in the file, also those above and below a fault."""
        from seqblocks.analysis.step_list import list_steps
        from seqblocks.cost import tokens_of

        if self.lowered.body is None:
            return []
        return list_steps(self.lowered.body, tokens_of(self.model) if self.model else None)

    def error(self) -> SpecError:
        """Return the exception that describes the faults."""
        kind = ExpectationError if self.status == ExpectationError.exit_status else SpecError
        return kind(self.diagnostics, self.dropped)

    def as_data(self) -> dict[str, Any]:
        """Return the analysis as plain data, without the diagnostics; `seqblocks/analysis/graph.schema.json`."""
        references = [
            {
                "kind": each.kind,
                "name": each.name,
                "range": each.span.as_data(),
                "definition": each.definition.as_data() if each.definition else None,
            }
            for each in self.references
        ]
        model = self.model if self.ok else None
        return {
            "version": GRAPH_VERSION,
            "input": model.input_text if model else None,
            "output": model.output_text if model else None,
            "steps": [each.as_data() for each in self.steps],
            "references": references,
        }


def analyse(
    text: str,
    name: str = "<text>",
    base: Path | None = None,
    set: Mapping[str, Any] | None = None,
    files: dict[str, str] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> Analysis:
    """Analyse a spec given as text, without raising for a faulty one: for editors and other readers of a spec.

    The arguments are those of `load_text`. Returns all diagnostics (not only the first 20), and what is known of the
    model and of its references in spite of them. Raises UsageError for an invalid call, as opposed to an invalid spec.
    """
    return analyse_text(text, name, base, set, files, allow_use, "text", strict, limit=None, references=True)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection, which finds almost nothing here but walks over all that the process holds.

    It takes a third of the time of a large spec, more in a process that has loaded torch.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
def analyse_text(
    text: str,
    name: str = "<text>",
    base: Path | None = None,
    set: Mapping[str, Any] | None = None,
    files: dict[str, str] | None = None,
    allow_use: Folders = (),
    kind: SourceKind = "own",
    strict: bool = False,
    limit: int | None = MAX_DIAGNOSTICS,
    references: bool = False,
) -> Analysis:
    """Do the same as `analyse`, with at most `limit` errors and as many warnings, and references only on request."""
    if not isinstance(text, str):
        raise UsageError(f"expected the text of a spec as str, not {type(text).__name__}; use load or build for a path")
    check_overrides(set)
    report, cautions = Report(limit), Report(limit)
    changes = Changes(set or {}, report)
    reader = Reader(report, is_builtin, has_plugin, base, files, allowed_folders(allow_use), cautions)
    file = read_file(reader, Source.of(name, text, kind), changes.apply)
    if file is not None and file.model is None and not file.blocks and not report:
        report.fault(Fault("E206", "the file defines nothing", hint="add a `model:` or `blocks:`"), file.root.span)
        file = None
    used = tuple(reader.texts.items())
    if file is None:
        found = Analysis(None, in_order(report.diagnostics), report.dropped, SpecError.exit_status)
        found.files = used
        return found
    lowered = lower_file(file, report, cautions, Path(name).stem, changes.applied, references)
    if report and file.expect is not None:
        from seqblocks.analysis.passes.expectations import check_numbers

        check_numbers(file, report)
    found = _of(file, report, cautions, strict)
    found.lowered, found.files = lowered, used
    model = lowered.model
    if model is not None and found.ok:
        model.warnings = file.warnings
        model.source = SpecSource(name, text, tuple(changes.texts.items()), used)
        if file.expect is not None:
            from seqblocks.analysis.passes.expectations import check_expectations  # only specs that have it need it

            try:
                check_expectations(model, file)
            except SpecError as error:
                found.diagnostics, found.dropped = [*error.diagnostics], error.dropped
                found.status = error.exit_status
    return found


def _of(file: SpecFile, report: Report, cautions: Report, strict: bool) -> Analysis:
    """Return the analysis of a file that could be read. Its warnings are errors if `strict`."""
    found = in_order(cautions.diagnostics)
    if strict:
        found = [each._replace(severity="error") for each in found]
    file.warnings, file.dropped = tuple(found), cautions.dropped
    if not report and not (strict and found):
        return Analysis(file, found, cautions.dropped, 0)
    dropped = report.dropped + (cautions.dropped if strict else 0)
    return Analysis(file, [*in_order(report.diagnostics), *found], dropped, SpecError.exit_status)


class Changes:
    """Overrides, and which of them were applied."""

    def __init__(self, given: Mapping[str, Any], report: Report) -> None:
        self.given, self.report = given, report
        self.texts: dict[str, str] = {}
        self.applied: tuple[Override, ...] = ()

    def apply(self, root: Node) -> None:
        """Apply the overrides to a document."""
        if not self.given:
            return
        from seqblocks.language import overrides  # only specs with overrides need it

        for key, value in self.given.items():
            self.texts[key] = str(value) if isinstance(value, RawText) else overrides.as_text(value)
        keywords = {key for key, value in self.given.items() if not isinstance(value, RawText)}
        self.applied = overrides.apply(root, self.texts, self.report, keywords)


def allowed_folders(folders: Folders) -> list[Path]:
    """Return the folders whose files may be used. Raises UsageError if one is not a folder."""
    each = [*folders] if isinstance(folders, Iterable) and not isinstance(folders, str) else [folders]
    found = []
    for folder in each:
        if not isinstance(folder, str | os.PathLike) or not os.path.isdir(folder):
            raise UsageError(f"allow_use (--allow-use) takes folders, and {folder!r} is not one")
        found.append(Path(os.fspath(folder)))
    return found


def check_overrides(given: Any) -> None:
    """Raise UsageError unless overrides are a mapping with strings as keys, or None."""
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        raise UsageError('overrides must be a mapping of names to values: set={"dim": 32}')


class RawText(str):
    """An override given as YAML text, not as a Python value."""

    __slots__ = ()


def yaml(text: str) -> str:
    """Mark an override as YAML text, as on the command line: `set={"dim": yaml("2 * 96")}`."""
    return RawText(text)

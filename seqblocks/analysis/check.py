"""From the text of a spec to its model: the whole half without torch in one call."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqblocks.analysis.lower import is_builtin, lower_file
from seqblocks.errors import (
    Diagnostic,
    OverrideWarning,
    Report,
    Source,
    SourceKind,
    SpecError,
    SpecWarning,
    UsageError,
    in_order,
)
from seqblocks.graph import ModelSpec, SpecSource
from seqblocks.language.document import Node
from seqblocks.language.spec import Reader, SpecFile, locate, read_file
from seqblocks.op import has_plugin

if TYPE_CHECKING:
    from seqblocks.language.overrides import Override  # only specs with overrides need it

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def load_text(
    text: str,
    name: str = "<text>",
    base: Path | None = None,
    set: Mapping[str, Any] | None = None,
    files: dict[str, str] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> tuple[SpecFile, ModelSpec | None]:
    """Validate a spec given as text. Returns the file and its model (None where it only holds blocks).

    Relative `use:` entries start from `base` (the working directory if None), and only .yaml and .yml files below it
    are read, or below a folder in `allow_use`. With `files` (relative path -> text) they are taken from there alone.
    Raises SpecError with every fault found, ExpectationError if only an `expect:` is not met. Warns (SpecWarning) of
    what is legal and most likely a mistake; with `strict` that is an error too. An override that no step uses is one
    (OverrideWarning); a value that the spec has already is none: a sweep passes through it.
    """
    return _warned(check_text(text, name, base, set, files, allow_use, "text", strict))


def _warned(checked: tuple[SpecFile, ModelSpec | None]) -> tuple[SpecFile, ModelSpec | None]:
    """Return a checked spec, after its warnings."""
    warn(checked[0].warnings)
    return checked


def warn(diagnostics: Iterable[Diagnostic]) -> None:
    """Issue warnings at the line outside seqblocks that led here."""
    for each in diagnostics:
        kind = OverrideWarning if each.code == "W901" else SpecWarning
        warnings.warn(kind(each), stacklevel=_depth())


def _depth() -> int:
    """Return the `stacklevel` of the first caller outside seqblocks."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "seqblocks":
        frame, depth = frame.f_back, depth + 1
    return depth


def check_text(
    text: str,
    name: str = "<text>",
    base: Path | None = None,
    set: Mapping[str, Any] | None = None,
    files: dict[str, str] | None = None,
    allow_use: Folders = (),
    kind: SourceKind = "own",
    strict: bool = False,
) -> tuple[SpecFile, ModelSpec | None]:
    """Do what `load_text` does, but leave the warnings to the caller: `model.warnings`."""
    if not isinstance(text, str):
        raise UsageError(f"a spec's text is a str, not {type(text).__name__}; load and build take a path")
    checked_overrides(set)
    report, cautions = Report(), Report()
    changes = _Changes(set or {}, report)
    reader = Reader(report, is_builtin, has_plugin, base, files, _allowed(allow_use))
    file = read_file(reader, Source.of(name, text, kind), changes.apply)
    if file is not None and file.model is None and not file.blocks and not report:
        message = "the file defines nothing"
        report.add(Diagnostic("E206", message, file.root.span, hint="add a `model:` or `blocks:`"))
        file = None
    if file is None:
        raise SpecError(in_order(report.diagnostics), report.dropped)
    model = lower_file(file, report, cautions, Path(name).stem, changes.applied)
    file.warnings, file.dropped = tuple(_raise_if_any(report, cautions, strict)), cautions.dropped
    if model is not None:
        model.warnings = file.warnings
        model.source = SpecSource(name, text, tuple(changes.texts.items()), tuple(reader.texts.items()))
        if file.expect is not None:
            from seqblocks.analysis.expectations import check_expectations  # only specs that have it need it

            check_expectations(model, file)
    return file, model


def _raise_if_any(report: Report, cautions: Report, strict: bool) -> list[Diagnostic]:
    """Raise SpecError where there is an error, or with `strict` a warning. Returns the warnings."""
    found = in_order(cautions.diagnostics)
    if strict:
        found = [each._replace(severity="error") for each in found]
    if report or (strict and found):
        dropped = report.dropped + (cautions.dropped if strict else 0)
        raise SpecError([*in_order(report.diagnostics), *found], dropped)
    return found


class _Changes:
    """Overrides, and what became of them."""

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
            self.texts[key] = str(value) if isinstance(value, _Raw) else overrides.as_text(value)
        called = {key for key, value in self.given.items() if not isinstance(value, _Raw)}
        self.applied = overrides.apply(root, self.texts, self.report, called)


def _allowed(folders: Folders) -> list[Path]:
    """Return the folders whose files may be used. Raises UsageError where one is not a folder."""
    each = [folders] if isinstance(folders, str | os.PathLike) else [*folders]
    found = []
    for folder in each:
        if not isinstance(folder, str | os.PathLike) or not os.path.isdir(folder):
            raise UsageError(f"allow_use (--allow-use) takes folders, and {folder!r} is none")
        found.append(Path(os.fspath(folder)))
    return found


def checked_overrides(given: Any) -> None:
    """Raise UsageError unless these are overrides, or None."""
    if given is not None and not (isinstance(given, Mapping) and all(isinstance(key, str) for key in given)):
        raise UsageError('overrides are a mapping of names to values: set={"dim": 32}')


class _Raw(str):
    """An override that is YAML text already, not a Python value."""

    __slots__ = ()


def yaml(text: str) -> str:
    """Mark an override as YAML text, as it comes from a command line: `set={"dim": yaml("2 * 96")}`."""
    return _Raw(text)


def load_spec(
    spec: str | os.PathLike[str],
    set: Mapping[str, Any] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> tuple[SpecFile, ModelSpec | None]:
    """Validate a spec given by path or bundled name; see `load_text`."""
    text, name, base = locate(spec)
    return _warned(check_text(text, name, base, set, allow_use=allow_use, strict=strict))


def load_model(
    spec: str | os.PathLike[str],
    set: Mapping[str, Any] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> ModelSpec:
    """Return the model of a spec; see `load_text`. Raises SpecError (E206) where the file only holds blocks."""
    file, model = load_spec(spec, set, allow_use, strict)
    return require_model(file, model)


def require_model(file: SpecFile, model: ModelSpec | None) -> ModelSpec:
    """Return the model. Raises SpecError (E206) that says what the file holds instead."""
    if model is None:
        block = next(iter(file.blocks.values()))
        arguments = ", ".join(f"{a.name}: …" for a in block.args.values() if a.default is None)
        raise SpecError(
            [
                Diagnostic(
                    "E206",
                    "the file holds blocks only, and there is no model to build",
                    block.span,
                    hint=f"model: {{input: {{features: 384}}, steps: [{block.name}: {{{arguments}}}]}}",
                )
            ]
        )
    return model

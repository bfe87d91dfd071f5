"""Load and validate a spec: from text to its model, without torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from seqblocks.analysis.lower import is_builtin, lower_file
from seqblocks.errors import (
    Diagnostic,
    Fault,
    OverrideWarning,
    Report,
    Source,
    SourceKind,
    SpecError,
    SpecWarning,
    UsageError,
    in_order,
    quote,
    user_stacklevel,
)
from seqblocks.graph import ModelSpec, SpecSource
from seqblocks.language.document import Node
from seqblocks.language.files import locate
from seqblocks.language.spec import Reader, SpecFile, read_file
from seqblocks.op import has_plugin

if TYPE_CHECKING:
    from seqblocks.language.overrides import Override  # only specs with overrides need it

F = TypeVar("F", bound=Callable[..., Any])
Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def names_overrides(function: F) -> F:
    """Have a function report unknown arguments as a UsageError that says where values of a spec go."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def call(*given: Any, **keywords: Any) -> Any:
        if len(given) > code.co_argcount:
            raise UsageError(_too_many(function.__name__, code.co_varnames[: code.co_argcount], known))
        for name in keywords:
            if name not in known:
                raise UsageError(_unknown_keyword(function.__name__, name, keywords[name], known))
        return function(*given, **keywords)

    return cast(F, call)


def _unknown_keyword(function: str, name: str, value: Any, known: Sequence[str]) -> str:
    from seqblocks.messages.suggestions import did_you_mean

    if name == "set":
        return f"{function} has no argument 'set': pass it to load_model"
    plain = isinstance(value, bool | int | float | str) and len(str(value)) < 40
    change = f"set={{{name!r}: {value!r}}}" if plain else f"set={{{name!r}: …}}"
    override = change if "set" in known else f"{change} to load_model"
    hint = did_you_mean(name, known) or f"to change a value of the spec, pass {override}".replace("'", '"')
    return f"{function} has no argument {quote(name)}: {hint}"


def _too_many(function: str, first: Sequence[str], known: Sequence[str]) -> str:
    others = ", ".join(f"{name}=…" for name in known if name not in first)
    return f"{function} takes only {', '.join(first)} without a name: pass the others as {others}"


@names_overrides
def load_text(
    text: str,
    name: str = "<text>",
    base: Path | None = None,
    set: Mapping[str, Any] | None = None,
    files: dict[str, str] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> tuple[SpecFile, ModelSpec | None]:
    """Validate a spec given as text. Returns the file and its model (None if it only defines blocks).

    Paths in `use:` are relative to `base` (the working directory if None). Only .yaml and .yml files below it, or below
    a folder in `allow_use`, are read. With `files` (relative path -> text), they are taken only from there.

    Raises SpecError with all faults found, or ExpectationError if only an `expect:` is not met. Issues a SpecWarning
    for anything valid that is probably a mistake, such as an override that no step uses (OverrideWarning); `strict`
    turns warnings into errors. An override that repeats the value of the spec produces no warning, as in a sweep.
    """
    return _warned(check_text(text, name, base, set, files, allow_use, "text", strict))


def _warned(checked: tuple[SpecFile, ModelSpec | None]) -> tuple[SpecFile, ModelSpec | None]:
    """Issue the warnings of a checked spec, and return it."""
    warn(checked[0].warnings)
    return checked


def warn(diagnostics: Iterable[Diagnostic]) -> None:
    """Issue warnings at the line of the caller outside seqblocks."""
    for each in diagnostics:
        kind = OverrideWarning if each.code == "W901" else SpecWarning
        warnings.warn(kind(each), stacklevel=user_stacklevel())


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
    """Do the same as `load_text`, but leave the warnings to the caller (`model.warnings`)."""
    if not isinstance(text, str):
        raise UsageError(f"expected the text of a spec as str, not {type(text).__name__}; use load or build for a path")
    check_overrides(set)
    report, cautions = Report(), Report()
    changes = _Changes(set or {}, report)
    reader = Reader(report, is_builtin, has_plugin, base, files, _allowed(allow_use), cautions)
    file = read_file(reader, Source.of(name, text, kind), changes.apply)
    if file is not None and file.model is None and not file.blocks and not report:
        report.fault(Fault("E206", "the file defines nothing", hint="add a `model:` or `blocks:`"), file.root.span)
        file = None
    if file is None:
        raise SpecError(in_order(report.diagnostics), report.dropped)
    model = lower_file(file, report, cautions, Path(name).stem, changes.applied)
    if report and file.expect is not None:
        from seqblocks.analysis.passes.expectations import check_numbers

        check_numbers(file, report)
    file.warnings, file.dropped = tuple(_raise_if_any(report, cautions, strict)), cautions.dropped
    if model is not None:
        model.warnings = file.warnings
        model.source = SpecSource(name, text, tuple(changes.texts.items()), tuple(reader.texts.items()))
        if file.expect is not None:
            from seqblocks.analysis.passes.expectations import check_expectations  # only specs that have it need it

            check_expectations(model, file)
    return file, model


def _raise_if_any(report: Report, cautions: Report, strict: bool) -> list[Diagnostic]:
    """Raise SpecError if there is an error, or with `strict` a warning. Returns the warnings."""
    found = in_order(cautions.diagnostics)
    if strict:
        found = [each._replace(severity="error") for each in found]
    if report or (strict and found):
        dropped = report.dropped + (cautions.dropped if strict else 0)
        raise SpecError([*in_order(report.diagnostics), *found], dropped)
    return found


class _Changes:
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
            self.texts[key] = str(value) if isinstance(value, _Raw) else overrides.as_text(value)
        keywords = {key for key, value in self.given.items() if not isinstance(value, _Raw)}
        self.applied = overrides.apply(root, self.texts, self.report, keywords)


def _allowed(folders: Folders) -> list[Path]:
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


class _Raw(str):
    """An override given as YAML text, not as a Python value."""

    __slots__ = ()


def yaml(text: str) -> str:
    """Mark an override as YAML text, as on the command line: `set={"dim": yaml("2 * 96")}`."""
    return _Raw(text)


@names_overrides
def load_spec(
    spec: str | os.PathLike[str],
    set: Mapping[str, Any] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> tuple[SpecFile, ModelSpec | None]:
    """Validate a spec given by path or bundled name; see `load_text`."""
    text, name, base = locate(spec)
    return _warned(check_text(text, name, base, set, allow_use=allow_use, strict=strict))


@names_overrides
def load_model(
    spec: str | os.PathLike[str],
    set: Mapping[str, Any] | None = None,
    allow_use: Folders = (),
    strict: bool = False,
) -> ModelSpec:
    """Return the model of a spec; see `load_text`. Raises SpecError (E206) if the file only defines blocks."""
    file, model = load_spec(spec, set, allow_use, strict)
    return require_model(file, model)


def require_model(file: SpecFile, model: ModelSpec | None) -> ModelSpec:
    """Return the model. Raises SpecError (E206) if the file only defines blocks."""
    if model is None:
        block = next(iter(file.blocks.values()))
        arguments = [each.name for each in block.args.values() if each.default is None]
        given = ", ".join(f"{name}: …" for name in arguments)
        hint = f"model: {{input: {{features: 384}}, steps: [{block.name}: {{{given}}}]}}"
        raise SpecError([Fault("E206", "the file defines blocks but no model", hint=hint).as_diagnostic(block.span)])
    return model

"""Load and validate a spec: from text to its model, without torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from seqblocks.analysis.analyse import Folders as Folders
from seqblocks.analysis.analyse import analyse_text
from seqblocks.analysis.analyse import check_overrides as check_overrides
from seqblocks.analysis.analyse import yaml as yaml
from seqblocks.errors import (
    Diagnostic,
    Fault,
    OverrideWarning,
    SourceKind,
    SpecError,
    SpecWarning,
    UsageError,
    listing,
    quote,
    user_stacklevel,
)
from seqblocks.graph import ModelSpec
from seqblocks.language.spec import SpecFile
from seqblocks.language.spec_files import bundled, locate

F = TypeVar("F", bound=Callable[..., Any])


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
    from seqblocks.suggestions import did_you_mean

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
    found = analyse_text(text, name, base, set, files, allow_use, kind, strict)
    if found.file is None or not found.ok:
        raise found.error()
    return found.file, found.model


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
        own = Path(block.span.source.name.removeprefix("<bundled ").removesuffix(">")).stem
        models = [name for name, path in bundled().items() if path.parent.name == "models" and own in name.split("_")]
        if models:
            hint = f"{hint}, or a bundled model: {listing(models, 4)}"
        raise SpecError([Fault("E206", "the file defines blocks but no model", hint=hint).as_diagnostic(block.span)])
    return model

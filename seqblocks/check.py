"""Text in, proven model out: the whole torch-free half in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seqblocks.document import Node
from seqblocks.errors import Diagnostic, Report, SpecError, UsageError
from seqblocks.graph import Model, Recipe
from seqblocks.lower import lower_file
from seqblocks.spec import Reader, SpecFile, locate, read_file


def load_text(
    text: str,
    name: str = "<text>",
    base: Path | None = None,
    set: Mapping[str, Any] | None = None,
    files: dict[str, str] | None = None,
) -> tuple[SpecFile, Model | None]:
    """Validate a spec given as text. Returns the file and its model (None where it only holds blocks).

    Relative `use:` entries start from `base`, or are taken from `files` (relative path -> text) where they are there.
    Raises SpecError with every fault found, ExpectationError if only an `expect:` is not met.
    """
    if not isinstance(text, str):
        raise UsageError(f"a spec's text is a str, not {type(text).__name__}; load and build take a path")
    if set is not None and not (isinstance(set, Mapping) and all(isinstance(key, str) for key in set)):
        raise UsageError('overrides are a mapping of names to values: set={"dim": 32}')
    report = Report()
    changed: tuple[str, ...] = ()
    texts: dict[str, str] = {}

    def edit(root: Node) -> None:
        nonlocal changed
        if set:
            from seqblocks import overrides  # imported where it is needed: `check` is as fast as its imports

            texts.update({k: str(v) if isinstance(v, _Raw) else overrides.as_text(v) for k, v in set.items()})
            changed = overrides.apply(root, texts, report)

    reader = Reader(report, base, files)
    file = read_file(reader, text, name, edit)
    if file is None or (file.model is None and not file.blocks and not report):
        if file is not None:
            report.add(
                Diagnostic("E206", "the file defines nothing", file.root.span, hint="add a `model:` or `blocks:`")
            )
        report.raise_if_any()
        raise SpecError([])
    model = lower_file(file, report, Path(name).stem, changed)
    report.raise_if_any()
    if model is not None:
        model.recipe = Recipe(name, text, tuple(texts.items()), tuple(reader.texts.items()))
        if file.expect is not None:
            from seqblocks.expect import check_expectations  # as above

            check_expectations(model, file)
    return file, model


class _Raw(str):
    """An override that is YAML text already, not a Python value."""

    __slots__ = ()


def yaml(text: str) -> str:
    """Mark an override as YAML text, as it comes from a command line: `set={"dim": yaml("2 * 96")}`."""
    return _Raw(text)


def load(spec: str | os.PathLike[str], set: Mapping[str, Any] | None = None) -> tuple[SpecFile, Model | None]:
    """Validate a spec given by path or bundled name; see `load_text`."""
    text, name, base = locate(spec)
    return load_text(text, name, base, set)


def load_model(spec: str | os.PathLike[str], set: Mapping[str, Any] | None = None) -> Model:
    """The proven model of a spec. Raises SpecError (E206) where the file only holds blocks."""
    file, model = load(spec, set)
    return require_model(file, model)


def require_model(file: SpecFile, model: Model | None) -> Model:
    """The model, or SpecError E206 that says what the file holds instead."""
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

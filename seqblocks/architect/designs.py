"""Find the designs that a command names: a spec with overrides, a saved model, a file of a git revision."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from seqblocks.analysis.analyse import Analysis, Folders, analyse_text, check_overrides, yaml
from seqblocks.errors import SpecError, UsageError, quote, visible
from seqblocks.graph import ModelSpec, SpecSource
from seqblocks.language.spec_files import bundled, locate
from seqblocks.record import Record

RECORD, SPEC = "seqblocks.json", "spec.yaml"  # files of a folder written by `save`
CHECKPOINT = "checkpoint"  # such a folder, in that of a run
_OVERRIDE = re.compile(r"@(?=[A-Za-z_][\w.]*=)")  # SPEC@dim=64@heads=4


class Design(Record):
    """A spec and what to change in it. `label`: what the user wrote; `files`: texts of `use:`, None to read them."""

    label: str
    text: str
    name: str
    base: Path | None = None
    files: Any = None  # a mapping of strings
    overrides: Mapping[str, Any] = {}
    folder: Path | None = None  # of a saved model

    def analyse(
        self, changes: Mapping[str, Any] | None = None, allow_use: Folders = (), strict: bool = False
    ) -> Analysis:
        """Analyse the spec. `changes` come after the overrides of the design."""
        given = {key: value for key, value in self.overrides.items() if key not in (changes or {})}
        return analyse_text(
            self.text, self.name, self.base, {**given, **(changes or {})}, self.files, allow_use, strict=strict
        )

    def load(
        self, changes: Mapping[str, Any] | None = None, allow_use: Folders = (), strict: bool = False
    ) -> ModelSpec:
        """Return the checked model. Raises SpecError, also if the file only defines blocks."""
        from seqblocks.analysis.check import require_model

        found = self.analyse(changes, allow_use, strict)
        if found.file is None or not found.ok:
            raise found.error()
        return require_model(found.file, found.model)


def find_design(given: Any, set: Mapping[str, Any] | None = None) -> Design:
    """Return the design that `given` names, changed by `set`.

    given: a path or bundled name, a folder written by `seqblocks.save` or `seqblocks try`, `git:REV:PATH`, each with
    overrides at its end (`SPEC@dim=64@heads=4`), or a checked or built model. Raises UsageError or SpecError if there
    is none.
    """
    check_overrides(set)
    if isinstance(given, Design):
        return given._replace(overrides={**given.overrides, **(set or {})}) if set else given
    spec = given if isinstance(given, ModelSpec) else getattr(given, "spec", None)
    if isinstance(spec, ModelSpec):
        found = _of_source(spec.name, spec.source)
    else:
        if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
            raise UsageError(f"expected a path or the name of a spec, or a model, not {type(given).__name__}")
        found = _named(os.fspath(given))
    return found._replace(overrides={**found.overrides, **(set or {})})


def _of_source(name: str, source: SpecSource | None) -> Design:
    if source is None:
        raise UsageError("the model was built without the text of its spec, so it cannot be compared")
    overrides = {key: yaml(text) for key, text in source.overrides}
    return Design(name, source.text, source.name, None, dict(source.files), overrides)


def _named(text: str) -> Design:
    spec, *pairs = [text] if os.path.exists(text) else _OVERRIDE.split(text)
    overrides = {}
    for pair in pairs:
        path, _, value = pair.partition("=")
        overrides[path] = yaml(value)
    if spec.startswith("git:"):
        found = _of_revision(spec)
    else:
        _check_override(spec)
        folders = (Path(spec), Path(spec, CHECKPOINT))
        saved = next((each for each in folders if os.path.isfile(each / RECORD)), None)
        if saved is None and os.path.isdir(spec):
            raise UsageError(f"{visible(spec)} has no model written by seqblocks.save or seqblocks try")
        found = _saved(saved) if saved else Design(text, *locate(spec))
    return found._replace(label=text, overrides={**found.overrides, **overrides})


def _check_override(text: str) -> None:
    """Raise UsageError for a spec followed by an override without a value."""
    spec, at, _ = text.partition("@")
    if at and not os.path.exists(text) and (os.path.exists(spec) or spec in bundled()):
        raise UsageError(f"{quote(text)}: an override is written PATH=VALUE, as in {visible(spec)}@dim=64")


# --- a folder written by `save` -----------------------------------------------------------------------------------


def _saved(folder: Path) -> Design:
    """Return the design of a saved model. Checksums are not verified: `seqblocks.load` does that."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        text = (folder / SPEC).read_text(encoding="utf-8")
        overrides = {str(key): yaml(str(value)) for key, value in record["overrides"].items()}
        files = {str(key): str(value) for key, value in record["files"].items()}
        name = str(record["name"])
    except OSError as error:
        raise UsageError(f"{visible(str(folder))} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UsageError(f"{visible(str(folder))} was not written by seqblocks.save, or it is damaged") from None
    return Design(str(folder), text, name, None, files, overrides, folder)


# --- a file of a git revision -------------------------------------------------------------------------------------


class _Revision(Mapping[str, str]):
    """The texts of the files beside a spec in a revision of a repository, read when they are used."""

    def __init__(self, revision: str, folder: str) -> None:
        self.revision, self.folder = revision, folder
        self.texts: dict[str, str | None] = {}

    def _read(self, name: str) -> str | None:
        if name not in self.texts:
            path = os.path.normpath(os.path.join(self.folder, name)).replace(os.sep, "/")
            try:
                self.texts[name] = None if name in bundled() else _git_show(self.revision, path)
            except UsageError:
                self.texts[name] = None
        return self.texts[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._read(name) is not None

    def __getitem__(self, name: str) -> str:
        text = self._read(name)
        if text is None:
            raise KeyError(name)
        return text

    def __iter__(self) -> Iterator[str]:
        return (name for name, text in self.texts.items() if text is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _of_revision(given: str) -> Design:
    revision, colon, path = given.removeprefix("git:").partition(":")
    if not colon or not path or not revision or revision.startswith("-"):
        raise UsageError(f"a file of git is named git:REV:PATH, for instance git:HEAD~1:spec.yaml, not {quote(given)}")
    text = _git_show(revision, path)
    return Design(given, text, given, None, _Revision(revision, os.path.dirname(path)))


def _git_show(revision: str, path: str) -> str:
    """Return the text of a file in a revision; the path is relative to the working directory."""
    where = f"{revision}:./{path}"
    try:
        done = subprocess.run(["git", "cat-file", "blob", where], capture_output=True, check=False)
    except OSError as error:
        raise UsageError(f"git cannot be run: {error.strerror}") from None
    if done.returncode:
        reason = done.stderr.decode("utf-8", "replace").strip().removeprefix("fatal: ")
        raise UsageError(f"git has no {visible(revision)}:{visible(path)}: {visible(reason)}")
    try:
        return done.stdout.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{visible(revision)}:{visible(path)} is not UTF-8 text") from None


def merged(errors: list[SpecError]) -> SpecError:
    """Return one error with the diagnostics of several specs."""
    if len(errors) == 1:
        return errors[0]
    worst = min(errors, key=lambda error: error.exit_status)
    found = dict.fromkeys(each for error in errors for each in error.diagnostics)
    return type(worst)([*found], sum(error.dropped for error in errors))

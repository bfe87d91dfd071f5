"""Find spec files by path or bundled name, and read them as text."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from seqblocks.errors import Fault, NoSpecError, Report, Span, UsageError, quote
from seqblocks.language import document
from seqblocks.suggestions import did_you_mean

ENDINGS = (".yaml", ".yml")


@lru_cache(maxsize=1)
def bundled() -> dict[str, Path]:
    """Return the bundled specs by name, blocks and models alike."""
    root = Path(__file__).parents[1] / "specs"
    if root.is_file():  # in place of a symbolic link
        root = Path(__file__).parents[2] / "specs"
    folders = root / "blocks", root / "models"
    files = ((folder, file) for folder in folders for file in sorted(os.listdir(folder)) if file.endswith(".yaml"))
    return {file.removesuffix(".yaml"): folder / file for folder, file in files}


def looks_like_path(name: str) -> bool:
    """Return whether a SPEC or `use:` entry is a path rather than the name of a bundled spec."""
    return name.endswith(ENDINGS) or "/" in name or os.sep in name


def read_stream(file: BinaryIO, shown: str, report: Report, used: Span | None = None) -> str | None:
    """Read an open file as text, up to the size limit of a spec, or report an error and return None."""
    most = 4 * document.MAX_BYTES  # UTF-8 has up to 4 bytes per character; `document.parse` counts characters
    data = file.read(most + 1)
    if len(data) > most:
        fault = Fault("E104", f"{shown} is too large for a spec", expected=f"at most {document.MAX_BYTES:,} bytes")
        report.fault(fault, used)
        return None
    return document.decode(data, shown, report)


def read_text(path: Path, shown: str, report: Report, used: Span | None = None) -> str | None:
    """Read a file as text, or report an error and return None.

    `used` is the entry of `use:` that names the file, if any. In that case the file must be a regular one, since
    reading a pipe or a device could block forever.
    """
    try:
        if used is None:
            with path.open("rb") as file:
                return read_stream(file, shown, report)
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return read_stream(file, shown, report, used)
        report.fault(cannot_be_read(shown, "it is not a regular file"), used)
    except OSError as error:
        reason = error.strerror or str(error)
        if os.path.lexists(path):  # also if it is a broken link
            spec = _spec_in(path)
            hint = f"this is a folder; its spec is {quote(spec)}" if spec else None
            report.fault(cannot_be_read(shown, reason, hint), used)
        else:
            report.fault(cannot_be_read(shown, reason, did_you_mean(path.name, specs_beside(path))), used)
    except ValueError as error:  # a null byte in the name
        report.fault(cannot_be_read(shown, str(error)), used)
    return None


def cannot_be_read(shown: str, reason: str, hint: str | None = None) -> Fault:
    """Return the fault (E803) of a file that cannot be read. shown: its name in messages."""
    return Fault("E803", f"{quote(shown)} cannot be read: {reason}", hint=hint)


def specs_beside(path: Path) -> list[str]:
    return [other.name for other in path.parent.glob("*.y*ml")] if os.path.isdir(path.parent) else []


def _spec_in(path: Path) -> str | None:
    """Return the path of the spec in a folder: `spec.yaml` of a saved model, or the only YAML file."""
    try:
        found = [name for name in os.listdir(path) if name.endswith(ENDINGS)]
    except OSError:
        return None
    name = "spec.yaml" if "spec.yaml" in found else found[0] if len(found) == 1 else None
    return str(path / name) if name else None


def locate(spec: str | os.PathLike[str]) -> tuple[str, str, Path | None]:
    """Find a spec by path or bundled name. Return (text, name shown in messages, folder).

    Raises NoSpecError if there is no such spec or it cannot be opened, SpecError for a text that cannot be read, and
    UsageError if `spec` is not a string or path.
    """
    if not isinstance(spec, str | os.PathLike) or not isinstance(os.fspath(spec), str):
        kind = type(spec).__name__
        raise UsageError(
            f"expected a path or the name of a bundled spec, not {kind}; use load_text or build_text for text"
        )
    name = os.fspath(spec)
    report = Report()
    is_path = looks_like_path(name) or os.path.isfile(name)
    if is_path or (name not in bundled() and os.path.isdir(name)):
        path, shown = Path(name), name
    else:
        found = bundled()
        if name not in found:
            file = next((name + end for end in ENDINGS if os.path.isfile(name + end)), None)
            raise NoSpecError([_no_bundled_spec(name, found, file).as_diagnostic(None)])
        path, shown = found[name], f"{name}.yaml"
    text = read_text(path, shown, report)
    if any(each.code == "E803" for each in report.diagnostics):
        raise NoSpecError(report.diagnostics)
    report.raise_if_any()
    assert text is not None
    return text, shown, path.parent


def _no_bundled_spec(name: str, known: Iterable[str], file: str | None) -> Fault:
    """file: an existing file with that name and an ending."""
    hint = f"did you mean '{file}'?" if file else did_you_mean(name, known)
    hint = hint or "`seqblocks list` shows the bundled specs; files end in .yaml"
    return Fault("E803", f"there is no bundled spec {quote(name)}", hint=hint)

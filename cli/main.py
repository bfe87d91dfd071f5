"""Run `seqblocks VERB …` and return the exit status.

0 success · 1 invalid spec · 2 invalid command · 3 an `expect:` is not met · 4 a dependency, a device, memory or disk
space is missing · 70 internal error. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from types import ModuleType
from typing import Any, NoReturn, cast

from seqblocks._version import __version__
from seqblocks.cli import INTERRUPTED, arguments, output
from seqblocks.errors import NO_ROOM, SeqblocksError, SpecError, UsageError, unwritable

INTERNAL = 70
BROKEN_PIPE = 141
DISK_ERRORS = (*NO_ROOM, errno.EROFS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    output.has_document = False
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    try:
        options = arguments.parse(words)
    except (UsageError, output.Unwritable) as error:
        return _report(error, None)
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as stop:  # --help and --version
        return int(stop.code or 0)
    try:
        return _run(options)
    except SeqblocksError as error:
        return _report(error, options)
    except BrokenPipeError:
        return _broken_pipe()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:  # SystemExit too: a primitive that exits must not make the command succeed
        return _internal(error, options)


def _run(options: argparse.Namespace) -> int:
    if hasattr(options, "imports"):
        # An editor opens folders that nobody has vetted yet: only the user's own configuration imports code there.
        table = b"" if options.verb == "lsp" else _project()
        if table or options.imports or os.environ.get("SEQBLOCKS_IMPORT"):
            from seqblocks.cli import imports

            imports.run(options, table)
    # import the module of a verb only when it runs, so that `check` loads neither rich nor torch
    if options.verb in ("list", "ops", "schema", "show"):
        run = getattr(importlib.import_module("seqblocks.cli.info"), options.verb)
    else:
        name = "trial" if options.verb == "try" else options.verb  # `try` is a word of Python
        run = importlib.import_module(f"seqblocks.cli.{name}").run
    status: int = run(options)
    return status


def _project() -> bytes:
    """Return the text of pyproject.toml in the working directory if it has a table `[tool.seqblocks]`."""
    try:
        with open("pyproject.toml", "rb") as file:
            text = file.read()
    except OSError:
        return b""
    plain = text.translate(None, b" \t\"'")  # TOML allows spaces and quotes around the parts of a name
    return text if any(table in plain for table in (b"tool.seqblocks", b"[tool]", b"tool={")) else b""


def _report(error: SeqblocksError, options: Any) -> int:
    """Print an error and return its exit status."""
    if options is not None and options.traceback:
        _traceback(error)
    if isinstance(error, SpecError):
        output.diagnostics(error, options)
    else:
        output.problem(str(error), None if isinstance(error, output.Unwritable) else options)
    return error.exit_status


def _internal(error: BaseException, options: argparse.Namespace) -> int:
    if options.traceback:
        _traceback(error)
    from seqblocks.cli import imports

    theirs = imports.failed_primitive(error)
    if theirs:
        output.problem(theirs, options)
        return UsageError.exit_status
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        file = "a file" if error.filename is None else os.fsdecode(error.filename)
        return _report(unwritable(file, error), options)
    output.problem(
        f"internal error ({type(error).__name__}: {error}).\n"
        f"This is a fault of seqblocks {__version__}, not of yours. Please report it with the spec and the command;\n"
        "--traceback shows where it happened.",
        options,
    )
    return INTERNAL


def _traceback(error: BaseException) -> None:
    import traceback

    output.write("".join(traceback.format_exception(error)).rstrip("\n"), output.stderr())


def _broken_pipe() -> int:
    output.silence(output.stdout())
    return BROKEN_PIPE


SHORT = (
    "check", "compare", "completion", "diff", "draw", "explain", "list", "memory", "new", "ops", "report", "schema",
    "show", "spec",
)  # fmt: skip


def process() -> NoReturn:
    """Run `main`, then end the process without cleaning up.

    Garbage collection and module finalisation at exit would take a quarter of the time of `check`. Commands that run
    for long, or analyse many specs, collect garbage.
    """
    gc.disable()
    sys.stdin, sys.stdout, sys.stderr = (  # a stream closed by the caller is None
        stream or open(os.devnull, mode)  # noqa: SIM115  # for as long as the process lives
        for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))
    )
    _separate_results()
    _disable_pydantic_plugins()
    warnings.filterwarnings(
        "ignore", "Failed to initialize NumPy"
    )  # torch warns on import if NumPy is absent, which is not needed here
    if sys.argv[1:2] and sys.argv[1] not in SHORT:
        gc.enable()
    status = _flushed(main())
    if sys.gettrace() is None:
        os._exit(status)
    sys.exit(status)


def _disable_pydantic_plugins() -> None:
    """Disable pydantic's search for plug-ins, unless the user configured it.

    The search reads the metadata of all installed packages, and importing `importlib.metadata` alone takes as long as
    checking a small spec. This is only an optimisation.
    """
    if os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__") == "__all__":
        loader = ModuleType("pydantic.plugin._loader")
        loader.get_plugins = tuple  # type: ignore[attr-defined]  # there are none
        sys.modules[loader.__name__] = loader


def _flushed(status: int) -> int:
    """Flush the streams; return the exit status, or that of a write error if results cannot be written."""
    try:
        output.stdout().flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
    except OSError as error:
        output.silence(output.stdout())
        status = _report(output.Unwritable(error), None)
    for stream in (sys.stdout, output.stderr()):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # write errors on stderr are ignored
            stream.flush()
    return status


def _separate_results() -> None:
    """Reserve standard output for results by redirecting prints of plug-ins and child processes to standard error."""
    try:
        results = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # a stream is closed or absent
        return
    output.results = open(  # noqa: SIM115  # for as long as the process lives
        results, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors
    )
    output.remarks = sys.stderr
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)

"""Import the user's modules with primitives (`--import`, SEQBLOCKS_IMPORT, pyproject.toml), and report failures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from seqblocks import op
from seqblocks.cli import output
from seqblocks.errors import SeqblocksError, UnavailableError, UsageError, visible
from seqblocks.suggestions import did_you_mean

VARIABLE = "SEQBLOCKS_IMPORT"
PROJECT = "pyproject.toml"


class Request(NamedTuple):
    """A module to import, and where it was requested."""

    name: str
    place: str = "--import"

    def __str__(self) -> str:
        return f"{self.place} {visible(self.name)}"


def run(options: argparse.Namespace, table: bytes) -> None:
    """Import what pyproject.toml, SEQBLOCKS_IMPORT and `--import` name, in that order.

    table: the text of pyproject.toml if it has a table for seqblocks. Raises UsageError if a module cannot be imported.
    """
    try:
        os.getcwd()
    except OSError:
        raise UsageError(
            "--import looks in the working directory, which has been removed: change to another one"
        ) from None
    names = (name.strip() for name in os.environ.get(VARIABLE, "").split(","))
    requests = [Request(name, f"{PROJECT}: import") for name in _configured(table)] if table else []
    requests += [Request(name, VARIABLE) for name in names if name]
    for request in [*requests, *map(Request, options.imports)]:
        before = dict(op.PRIMITIVES)
        module = _module(request)
        # a module imported earlier, by another module or a plug-in, has already registered its primitives
        theirs = any(cls.__module__.split(".")[0] == module.__name__.split(".")[0] for cls in op.PRIMITIVES.values())
        if before == op.PRIMITIVES and not theirs and not options.quiet:
            output.notes([f'{request} defines no primitive (with @primitive("verb"))'], options)


def _configured(table: bytes) -> list[str]:
    """Return the modules that `[tool.seqblocks]` of pyproject.toml names. Raises UsageError where it is malformed."""
    found = _parsed(table).get("tool", {}).get("seqblocks", {})
    if not isinstance(found, dict):
        raise UsageError(
            f'{PROJECT}: tool.seqblocks must be a table, for instance: [tool.seqblocks] import = ["my_ops"]'
        )
    for key in found.keys() - {"import"}:
        hint = did_you_mean(key, ("import",)) or "the only key is `import`"
        raise UsageError(f"{PROJECT}: [tool.seqblocks] has no key '{visible(key)}': {hint}")
    names = found.get("import", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f'{PROJECT}: import of [tool.seqblocks] must be a list of modules, for instance ["my_ops"]')
    return names


def _parsed(table: bytes) -> dict[str, Any]:
    try:
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ModuleNotFoundError:
        raise UsageError(f"{PROJECT}: reading [tool.seqblocks] needs Python 3.11, or pip install tomli") from None
    try:
        found: dict[str, Any] = toml.loads(table.decode())
    except ValueError as error:  # of the decoder too
        raise UsageError(f"{PROJECT} is not valid TOML: {visible(str(error))}") from None
    return found


def import_torch(why: str, otherwise: str = "", shares_cores: bool = False) -> Any:
    """Import and return torch. Raises UnavailableError if it is absent or fails to load.

    shares_cores: let threads that wait for others sleep soon. By default those of GNU's OpenMP spin for milliseconds;
    where other processes use the cores, a training step then takes many times as long.
    """
    if shares_cores and "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # what it takes itself if it knows of too few cores
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise UnavailableError(f"{why}: pip install torch{otherwise}") from None
        raise UnavailableError(f"{why}, which does not load: {op.one_line(error)}{otherwise}") from error
    except (ImportError, OSError) as error:  # a missing CUDA library
        raise UnavailableError(f"{why}, which does not load: {op.one_line(error)}{otherwise}") from error


def _module(request: Request) -> ModuleType:
    name = request.name
    is_file = name.endswith(".py")
    folder = Path(name).parent if is_file else Path()
    sys.path.append(str(folder.resolve()))  # last, so that installed modules take precedence
    try:
        module = _from_file(request) if is_file else importlib.import_module(name)
        package = Path(*name.split("."))
        if getattr(module, "__file__", name) is None and package.is_dir():  # to Python, a package without code
            raise UsageError(f"{request}: {_folder_hint(package)}")
        return module
    except SeqblocksError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and op.interrupts_raise():
            raise
        if not is_file and _not_found(error, name):
            raise UsageError(f"{request}: {_import_hint(request)}") from None
        at = f" at {where}" if (where := place(error)) else ""
        hint = "fix the error there; --traceback shows the traceback"
        if isinstance(error, ModuleNotFoundError):
            hint = "modules that it imports must be installed or in the same folder"
        elif is_file and "relative import" in str(error):
            dotted = request._replace(name=".".join(Path(name).with_suffix("").parts))
            hint = f"write a module of a package with dots: {dotted}"
        raise UsageError(f"{request} failed{at}: {op.one_line(error)}\n{hint}") from error


def _from_file(request: Request) -> ModuleType:
    path = Path(request.name).resolve()
    if path.is_dir():
        raise UsageError(f"{request}: {_folder_hint(Path(request.name))}")
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py") if p.is_file()])
        where = near or f"looked at {visible(str(path))}"
        raise UsageError(f"{request}: there is no such file; {where}")
    name = path.stem.replace(".", "_")
    found = importlib.util.find_spec(name)
    if found and Path(found.origin or "").resolve() != path:  # another module has this name and must not be replaced
        name += op.RENAMED
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _not_found(error: BaseException, name: str) -> bool:
    """Return whether the module itself was not found, or its name is invalid."""
    if isinstance(error, ModuleNotFoundError):
        return error.name == name or name.startswith(f"{error.name}.")
    return isinstance(error, (ValueError, TypeError)) and not place(error)


def _import_hint(request: Request) -> str:
    """Return why a module was not found, and what to write instead."""
    if Path(f"{request.name}.py").is_file():
        return f"there is no such module; write a file with its extension: {request}.py"
    if request.name and Path(request.name).is_dir():
        return _folder_hint(Path(request.name))
    if Path(request.name).is_file():
        return "a file must be Python code, with the extension .py"
    where = "searched the current folder and installed modules"
    return f"there is no such module; {where}; to import a file, write its path, such as my_ops.py"


def _folder_hint(folder: Path) -> str:
    file = min((file.name for file in folder.glob("*.py") if file.is_file()), default="my_ops.py")
    return f"this is a folder; write the path of a file in it, such as {visible(str(folder / file))}"


def failed_primitive(error: BaseException) -> str | None:
    """Return a message for an error raised by a plug-in's primitive, or None for any other error."""
    theirs = {cls.__module__.split(".")[0] for cls in op.PRIMITIVES.values()} - {"seqblocks"}
    where = place(error, theirs) if theirs else None
    hint = "fix the error there; --traceback shows the traceback"
    return where and f"a primitive failed at {where}: {op.one_line(error)}\n{hint}"


def place(error: BaseException, modules: Collection[str] = ()) -> str | None:
    """Return `file:line` of the innermost frame of an error outside seqblocks and Python.

    Files of the user take precedence over installed packages. With `modules`, only frames of these count.
    """
    if isinstance(error, SyntaxError) and error.filename and not modules:
        return f"{_shown(error.filename)}:{error.lineno}"
    walk = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_globals.get("__name__", ""), frame.f_code.co_filename, line) for frame, line in walk]
    known = {"seqblocks", *sys.stdlib_module_names}
    tops = [(name.split(".")[0], file, line) for name, file, line in reversed(frames)]
    theirs = [(file, line) for top, file, line in tops if (top in modules if modules else top not in known)]
    installed = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    own = [(file, line) for file, line in theirs if not file.startswith(installed)]
    return next((f"{_shown(file)}:{line}" for file, line in own + theirs), None)


def _shown(file: str) -> str:
    path = Path(file)
    return visible(str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file)

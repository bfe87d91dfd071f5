"""Check the structure of the repository: imports between files, files without torch, package contents.

The table ORDER has a row for each file and folder of the package. A file may import only from rows above its own,
whether at its top, inside a function or for type checkers. A new file fails these tests until it is listed there.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from seqblocks import graph
from seqblocks.combinators import COMBINATORS
from seqblocks.serve import playground

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

# The files and folders of seqblocks/, from the top down. `ops/*` means all files of the folder: each may import what is
# above the folder, and other files of the folder unless that creates an import cycle. A folder in it may have a row of
# its own.
ORDER = """
    _version
    errors
    record
    types
    markup
    state_layout
    token_function
    suggestions
    widths
    rotary_scaling
    language/*
    parameters
    patterns
    recipes
    tape
    workspace/*
    op
    roles
    combinators/*
    ops/*
    graph/*
    cost
    analysis/scope/*
    analysis/checkpoint_maps/*
    analysis/steps/*
    analysis/passes/*
    analysis/*
    descriptions/*
    picture/*
    serve/*
    editor/*
    architect/*
    ------ torch begins
    state
    runtime/*
    streaming/*
    model/*
    checkpoint/*
    distributed/*
    hf/*
    testing
    bench/*
    training/*
    probes/*
    export/*
    __init__
    __main__
"""

LINKS = {"kernels": "../kernels", "cli": "../cli", "specs": "../specs"}
TYPES_FROM_BELOW = {("ops/*", "seqblocks.runtime.call")}  # imports for annotations alone: what `forward` is passed
MAY_USE_KERNELS = "ops/*"  # the first row that may import torch; rows above it compute nothing
KERNELS_MAY_IMPORT = {"errors", "token_function"}
HEAVY = {"torch", "triton", "numpy"}  # packages that the rows above the torch line import only when something runs

# External packages that may be imported, and the requirement in pyproject.toml that installs each.
REQUIREMENTS = {
    "pydantic": "pydantic",
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",  # for type checkers
    "yaml": "pyyaml",
    "einops": "einops",
    "rich": "rich",
    "torch": "torch",
    "torchtitan": "torchtitan",  # an extra
    "triton": "triton",
    "safetensors": "safetensors",  # extras from here on: imported inside functions, never at the top of a file
    "transformers": "transformers",  # see below
    "onnx_ir": "onnxscript",
    "gguf": "gguf",
    "numpy": "numpy",
    "pygls": "pygls",
    "lsprotocol": "pygls",
}
ROWS_OF_EXTRAS = {  # imported only on request: also at the top of a file
    "hf/*": {"transformers"},
    "editor/*": {"pygls", "lsprotocol"},  # in server.py
}

TABLE = [line.strip() for line in ORDER.strip().splitlines()]
LINE = next(place for place, name in enumerate(TABLE) if name.startswith("---"))
PLACE = {name: place for place, name in enumerate(TABLE) if place != LINE}


# ------------------------------------------------------------------------------
# Reading the tree


class Import(NamedTuple):
    module: str  # absolute: "seqblocks.op", "torch.nn"
    line: int
    at_import: bool  # it runs when the file is imported, not inside a function
    annotation: bool = False  # for type checkers only: never executed


def python_files(folder: str) -> list[Path]:
    """Return every .py file below a root folder, at its real location (links are not followed)."""
    found = []
    for here, folders, files in os.walk(ROOT / folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not (Path(here) / name).is_symlink())
        found += [Path(here) / name for name in sorted(files) if name.endswith(".py")]
    return found


LIBRARY = [path for folder in ("seqblocks", "kernels", "cli") for path in python_files(folder)]


def module_name(path: Path) -> str:
    """kernels/mlstm/interface.py -> seqblocks.kernels.mlstm"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "seqblocks" else ("seqblocks", *parts)).removesuffix(".__init__")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = {module_name(path): path for path in LIBRARY}


@cache
def imports(path: Path) -> tuple[Import, ...]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    return tuple(_imports(ast.parse(path.read_text("utf-8")), package, at_import=True))


def _imports(node: ast.AST, package: str, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_import)
        elif isinstance(child, ast.ImportFrom):
            climbed = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            base = ".".join([*climbed, child.module] if child.module else climbed)
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in MODULES else base, child.lineno, at_import)
        elif isinstance(child, ast.expr):
            continue  # an import is a statement
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for each in _imports(child, package, at_import=False):
                yield each._replace(annotation=True)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports(child, package, at_import and not inside)


def row(module: str) -> str:
    """Return the row of the table for a module of seqblocks (not of kernels/ or cli/)."""
    first, *rest = module.split(".")[1:] or ["__init__"]
    if rest and (inner := f"{first}/{rest[0]}/*") in PLACE:
        return inner
    return f"{first}/*" if rest or (ROOT / "seqblocks" / first).is_dir() else first


def part(module: str) -> str:
    """Return the root folder that a module belongs to, or "" for an external module."""
    if module.split(".")[0] != "seqblocks":
        return ""
    second = [*module.split("."), ""][1]
    return second if second in LINKS else "seqblocks"


CORE = [path for path in LIBRARY if part(module_name(path)) == "seqblocks"]


# ------------------------------------------------------------------------------
# The arrows


def test_every_file_has_a_place():
    rows = {row(module_name(path)): path for path in CORE}
    homeless = sorted(relative(path) for name, path in rows.items() if name not in PLACE)
    assert not homeless, f"add {homeless} to ORDER, at the top of tests/test_layout.py"
    missing = sorted(set(PLACE) - set(rows))
    assert not missing, f"ORDER names {missing}, missing from seqblocks/: remove these rows"


def test_arrows_point_up():
    """A file imports only rows above its own."""
    wrong = []
    for path, (module, line, _, annotation) in ((file, each) for file in CORE for each in imports(file)):
        own, where = row(module_name(path)), part(module)
        if annotation and (own, module) in TYPES_FROM_BELOW:
            continue
        if where == "kernels" and PLACE[own] < PLACE[MAY_USE_KERNELS]:
            wrong.append(f"{relative(path)}:{line} imports {module}: kernels are used from {MAY_USE_KERNELS} on")
        if where == "seqblocks" and own != row(module) and PLACE[own] <= PLACE[row(module)]:
            wrong.append(f"{relative(path)}:{line} imports {module}, which is below {own}")
    assert not wrong, "\n".join(wrong)


def test_no_file_reaches_itself():
    """Imports have no circles, including those for annotations: files of a row import each other in one direction
    only."""
    edges = {
        name: {each.module for each in imports(path) if each.at_import or each.annotation} & set(MODULES) - {name}
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def walk(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "imports in a circle: " + " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for other in sorted(edges[name]):
                walk(other, (*trail, name))
            done.add(name)

    for name in MODULES:
        walk(name, ())


def test_kernels_stand_alone():
    """Kernels are functions on tensors, usable without YAML. They import only each other, the errors, and the class of
    functions of tokens.
    """
    allowed = {f"seqblocks.{name}" for name in KERNELS_MAY_IMPORT}
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in python_files("kernels")
        for module, line, *_ in imports(path)
        if part(module) in ("seqblocks", "cli", "specs") and module not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_the_command_line():
    wrong = [
        f"{relative(path)}:{line}"
        for path in LIBRARY
        for module, line, *_ in imports(path)
        if part(module) == "cli" and part(module_name(path)) != "cli" and path.name != "__main__.py"
    ]
    assert not wrong, f"seqblocks.cli is imported at {wrong}"


@pytest.mark.slow
def test_nobody_imports_a_root_folder_by_its_bare_name():
    """Nothing imports `kernels` from the root, which would work too but load a second copy of every module."""
    everywhere = [*LIBRARY, *(path for folder in ("tests", "benchmarks", "examples") for path in python_files(folder))]
    wrong = [
        f"{relative(path)}:{line} imports {module}"
        for path in everywhere
        for module, line, *_ in imports(path)
        if module.split(".")[0] in LINKS
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_from_outside_are_declared():
    """Imported packages are required by pyproject.toml. Packages of extras are imported inside functions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = {_distribution(text) for text in project["dependencies"]}
    optional = {_distribution(text) for extra in project["optional-dependencies"].values() for text in extra}
    wrong = []
    for path in LIBRARY:
        for module, line, at_import, _ in imports(path):
            name = module.split(".")[0]
            if name == "seqblocks" or name in sys.stdlib_module_names:
                continue
            brings = REQUIREMENTS.get(name)
            at_import = at_import and name not in ROWS_OF_EXTRAS.get(row(module_name(path)), ())
            if brings not in required and (at_import or brings not in optional):
                wrong.append(f"{relative(path)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_what_is_required_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    called = re.compile(r'import_module\("(\w+)')
    names = {name for path in LIBRARY for name in called.findall(path.read_text("utf-8"))}
    names |= {module.split(".")[0] for path in LIBRARY for module, *_ in imports(path)}
    imported = {REQUIREMENTS.get(name) for name in names}
    unused = {_distribution(text) for text in project["dependencies"]} - imported
    assert not unused, f"pyproject.toml requires {', '.join(unused)}, but no file imports it"


def _distribution(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower()


def test_primitives_have_types():
    """What a primitive computes with is a Tensor, a Value or a Call. `Any` is for what torch or Python leave open."""
    files = python_files("seqblocks/ops")
    found = {relative(path): len(re.findall(r"\bAny\b", path.read_text("utf-8"))) for path in files}
    assert sum(found.values()) < 60, found


# ------------------------------------------------------------------------------
# Nodes and combinators

OF_COMBINATORS = {"combinators", "analysis/steps/combinators", "runtime"}
OF_SEVERAL = {"__init__", "common", "by_token", "copies"}  # in the second folder: what several combinators share


@pytest.mark.slow
def test_code_asks_for_the_class_of_a_node_not_for_its_kind():
    """`kind` is the word for a node in JSON, tables and pictures. Elsewhere, each class has methods of its own."""
    kinds = {cls.kind for cls in vars(graph).values() if isinstance(cls, type) and issubclass(cls, graph.Node)} - {""}
    assert {"op", "block", "scan", "unknown"} < kinds
    wrong = []
    for path in LIBRARY:
        of_others = relative(path).startswith(("seqblocks/editor/", "seqblocks/picture/"))  # of references and boxes
        for node in ast.walk(ast.parse(path.read_text("utf-8"))) if not of_others else ():
            asked = getattr(node, "left" if isinstance(node, ast.Compare) else "subject", None)  # the latter of `match`
            if not isinstance(asked, ast.Attribute) or asked.attr != "kind":
                continue
            words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            if words & kinds:
                wrong.append(f"{relative(path)}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not wrong, "ask for isinstance, or give the class a method:\n" + "\n".join(wrong)


def test_a_combinator_has_one_file_in_each_of_three_folders():
    """Its arguments, how it becomes a node, and its module, all under the name of its verb."""
    for name in COMBINATORS:
        files = [path for path in CORE if name in (path.stem, path.parent.name)]
        folders = {relative(path).removeprefix("seqblocks/").partition(f"/{name}")[0] for path in files}
        assert folders == ({"combinators"} if name == "aside" else OF_COMBINATORS), name  # an aside is a list of steps
    stems = {path.stem for path in python_files("seqblocks/analysis/steps/combinators")}
    assert stems - OF_SEVERAL <= set(COMBINATORS)


# ------------------------------------------------------------------------------
# The torch line

# `import seqblocks` itself must stay light too, although its row is the last one.
LIGHT = [path for path in CORE if row(module_name(path)) == "__init__" or PLACE.get(row(module_name(path)), 0) < LINE]


def test_above_the_line_torch_waits():
    """By its source text, a file above the line imports no torch, no kernels and no row below the line."""
    wrong = []
    for path, (module, line, at_import, _) in ((file, each) for file in LIGHT for each in imports(file)):
        below = part(module) == "seqblocks" and module != "seqblocks" and PLACE[row(module)] > LINE
        if at_import and (module.split(".")[0] in HEAVY or part(module) == "kernels" or below):
            wrong.append(f"{relative(path)}:{line} imports {module}: import it inside the function that needs it")
    assert not wrong, "\n".join(wrong)


def test_above_the_line_torch_stays_unloaded():
    """At run time, importing all modules above the line and the whole command line loads no heavy package."""
    names = [module_name(path) for path in [*LIGHT, *python_files("cli")] if path.name != "__main__.py"]
    _run(
        f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
    came = {HEAVY} & set(sys.modules)
    assert not came, f"{{name}} loads {{came}}"
"""
    )


def test_the_page_in_the_browser_has_all_folders_above_the_line():
    above = {name.partition("/")[0] for name in TABLE[:LINE] if "/" in name}
    assert set(playground.FOLDERS) == above | {"specs"}


@pytest.mark.slow
def test_kernels_import_without_triton():
    """Triton exists only on Linux. Elsewhere all implementations must load, and those that need Triton must report it.
    """
    names = [module_name(path) for path in python_files("kernels")]
    _run(
        f"""
import importlib, sys
sys.modules['triton'] = None
for name in {names}:
    importlib.import_module(name)
from seqblocks.kernels import dispatch
from seqblocks.kernels.dispatch import registry
for op in registry.OPS:
    verdict = dispatch.why(op, device='cuda')[0]
    assert not verdict.can and 'triton' in verdict.reason, verdict
assert any('cannot be imported' in dispatch.why(op)[0].reason for op in registry.OPS)
"""
    )


def _run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------
# What is packaged, linked and committed


def test_every_folder_is_packaged():
    """Everything is named in `packages` and `package-data`. The wheel silently lacks what they do not name."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    files = [path for folder in ("seqblocks", "cli", "specs") for path in (ROOT / folder).rglob("*.yaml")]
    data = [path for path in files if path.is_file() and path.suffix not in (".py", ".pyc")]
    folders = {ROOT / "specs", *(path.parent for path in [*LIBRARY, *data])}
    assert sorted(build["packages"]) == sorted(module_name(folder / "__init__.py") for folder in folders)
    for path in data:
        package = module_name(path.parent / "__init__.py")
        assert f"*{path.suffix}" in build["package-data"].get(package, ()), f"package-data leaves out {relative(path)}"


@pytest.mark.parametrize("name", LINKS)
def test_the_links_lead_to_the_root(name):
    assert os.readlink(ROOT / "seqblocks" / name) == LINKS[name]
    tracked = _git("ls-files", "-s", f"seqblocks/{name}")
    if tracked is not None:
        assert tracked.startswith("120000 "), f"git must track seqblocks/{name} as a link: git add seqblocks/{name}"


def test_the_readme_and_ci_run_the_same_command():
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    command = next(line for line in lines if line.startswith("python3 -m venv"))
    assert command in (ROOT / "README.md").read_text("utf-8").splitlines(), f"README.md does not show: {command}"


@pytest.mark.slow
def test_no_file_names_a_place_on_somebodys_machine():
    somewhere = re.compile(rb"(?<![\w.:/-])/(?:work|home|root|Users)/[\w.]")
    names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if names is None:
        pytest.skip("not a git checkout, so what is committed is unknown")
    wrong = []
    for name in filter(None, names.split("\0")):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            lines = enumerate(path.read_bytes().splitlines(), 1)
            wrong += [f"{name}:{number}" for number, line in lines if somewhere.search(line)]
    assert not wrong, f"an absolute path at {wrong}"


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None without a checkout or without git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None

"""Check the installed package: built from the files that git tracks, installed into empty environments."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.pyc")


def run(*command: object, cwd: Path, **env: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """Return a clean copy, including links. A build in the checkout itself would read and leave old build folders."""
    copy = tmp_path_factory.mktemp("checkout") / "seqblocks"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=LEFT_OUT)
    shutil.copytree(ROOT / ".ci", copy / ".ci")
    return copy


@pytest.fixture(scope="module")
def built(checkout) -> tuple[Path, Path, str]:
    """Return the source archive, the wheel built from it after unpacking, and the output of the build."""
    output = run(sys.executable, "-m", "build", "--no-isolation", cwd=checkout)
    return *(checkout / "dist").glob("*.tar.gz"), *(checkout / "dist").glob("*.whl"), output


@pytest.fixture(scope="module")
def direct_wheel(checkout, built) -> Path:
    """Return the wheel built directly from the checkout."""
    out = checkout / "direct"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, cwd=checkout)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def clone_without_links(checkout, tmp_path_factory) -> Path:
    """Return a clone in which git has written a file in place of each symbolic link, as it does on Windows."""
    origin, clone = tmp_path_factory.mktemp("origin") / "seqblocks", tmp_path_factory.mktemp("clone") / "seqblocks"
    shutil.copytree(checkout, origin, symlinks=True, ignore=LEFT_OUT)
    owner = ["-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    run("git", "init", "-q", cwd=origin)
    run("git", "add", "-A", cwd=origin)
    run("git", *owner, "commit", "-q", "-m", "The files of the checkout", cwd=origin)
    run("git", "clone", "-q", "-c", "core.symlinks=false", origin, clone, cwd=origin.parent)
    assert all((clone / "seqblocks" / name).is_file() for name in ("kernels", "cli", "specs"))
    return clone


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def install(archive: Path, folder: Path) -> Path:
    """Install only this archive into an empty environment. Return its site-packages folder."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    if archive.name.endswith(".whl"):
        run(sys.executable, "-m", "pip", "--python", python, "install", *options, archive, cwd=folder)
    else:  # pip would build with the empty interpreter it installs into, so build here and install there
        run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, archive, cwd=folder)
        return install(next(folder.glob("*.whl")), folder / "from-source")
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())


# `built` has made the wheel from the unpacked source archive; pip would do so once more.
@pytest.fixture(scope="module", params=["wheel", pytest.param("sdist", marks=pytest.mark.long)])
def site_packages(request, built, tmp_path_factory) -> Path:
    sdist, wheel, _ = built
    return install({"wheel": wheel, "sdist": sdist}[request.param], tmp_path_factory.mktemp("env") / request.param)


def test_the_build_has_nothing_to_warn_of(built):
    output = built[2].lower()
    assert "would be ignored" not in output
    assert "deprecat" not in output


def test_only_seqblocks_is_installed(site_packages):
    version = importlib.import_module("seqblocks._version").__version__
    assert {path.name for path in site_packages.iterdir()} == {"seqblocks", f"seqblocks-{version}.dist-info"}


def test_every_file_arrives(site_packages):
    """The wheel contains every Python file, every spec and the `py.typed` marker at its import path."""
    expected = {"py.typed"}
    code = [(folder, "*.py") for folder in ("seqblocks", "kernels", "cli")]
    data = [*((folder, "*.yaml") for folder in ("seqblocks", "cli", "specs")), ("seqblocks", "*.schema.json")]
    pages = [("seqblocks", f"*.{ending}") for ending in ("css", "html", "js", "mjs")]
    for folder, pattern in (*code, *data, *pages):
        for path in (ROOT / folder).rglob(pattern):
            expected.add(path.relative_to(ROOT / "seqblocks" if folder == "seqblocks" else ROOT).as_posix())
    assert any(name.startswith("specs/models/") for name in expected)
    package = site_packages / "seqblocks"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert {name for name in found if "__pycache__" not in name} == expected


def test_the_command_is_there(site_packages):
    environment = next(parent for parent in site_packages.parents if (parent / "pyvenv.cfg").exists())
    commands = environment / ("Scripts" if sys.platform == "win32" else "bin")
    assert [path.stem for path in commands.glob("seqblocks*")] == ["seqblocks"]


def test_both_ways_make_the_same_wheel(built, direct_wheel):
    assert contents(built[1]) == contents(direct_wheel)


def test_the_source_archive_is_complete_and_small(built):
    """It has everything but the tests, whose reference data is much larger than the rest."""
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", "docs/language.md"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build/", "tests/"))]
    assert built[0].stat().st_size < 5_000_000


def test_the_metadata(built):
    lines = next(text for name, text in contents(built[1]).items() if name.endswith("/METADATA")).decode().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.10" in lines
    assert 'Requires-Dist: triton>=3.5; platform_system == "Linux"' in lines


# Run in a checkout without links. It prints where the folders of the root were found.
USES_ALL_FOLDERS = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if OWN or "editable" not in str(each)]  # of the checkout tested here
import seqblocks.cli, seqblocks.kernels
assert next(seqblocks.build("mlstm_small").parameters()).numel()
print(seqblocks.cli.__file__, seqblocks.kernels.__file__)
"""


def folders_in(clone: Path) -> list[str]:
    return [str(clone / name / "__init__.py") for name in ("cli", "kernels")]


def test_a_checkout_without_links_runs(clone_without_links):
    code = USES_ALL_FOLDERS.replace("OWN", "False")
    found = run(sys.executable, "-c", code, cwd=clone_without_links, PYTHONPATH=str(clone_without_links))
    assert found.split() == folders_in(clone_without_links)


def test_a_checkout_without_links_makes_the_same_wheel(built, clone_without_links):
    run(sys.executable, "-m", "build", "--no-isolation", cwd=clone_without_links)
    assert contents(next((clone_without_links / "dist").glob("*.whl"))) == contents(built[1])


def test_a_checkout_without_links_can_be_installed_as_editable(clone_without_links, tmp_path):
    code = f"import setuptools.build_meta as backend; backend.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", code, cwd=clone_without_links)
    site_packages = install(next(tmp_path.glob("*.whl")), tmp_path / "env")
    dependencies = Path(importlib.import_module("yaml").__file__).parents[1]
    (site_packages / "zz.pth").write_text(f"{dependencies}\n")  # searched last, and its own .pth files are not read
    python = tmp_path / "env" / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    found = run(python, "-c", USES_ALL_FOLDERS.replace("OWN", "True"), cwd=tmp_path, PYTHONPATH="")
    assert found.split() == folders_in(clone_without_links)

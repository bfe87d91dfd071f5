"""Check the installed package: built from the files that git tracks, installed into empty environments."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("packaging")]  # one worker does all builds, once

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.pyc")


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
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


@pytest.fixture(scope="module", params=["wheel", "sdist"])
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
    data = [("seqblocks", "messages/*.yaml"), ("seqblocks", "*.schema.json"), ("specs", "*.yaml")]
    pages = [("seqblocks", f"*.{ending}") for ending in ("css", "html", "js")]
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


def test_the_source_archive_can_test_itself(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "constraints.txt", ".ci/run", "tests/conftest.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", "build/"))]


def test_the_metadata(built):
    lines = next(text for name, text in contents(built[1]).items() if name.endswith("/METADATA")).decode().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.10" in lines
    assert 'Requires-Dist: triton>=3.5; platform_system == "Linux"' in lines

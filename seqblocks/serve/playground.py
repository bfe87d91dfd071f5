"""Write the page as a folder of files that needs no server behind it: Python and seqblocks run in the browser."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from seqblocks._version import __version__
from seqblocks.errors import UnavailableError, unwritable

# Pyodide of npm and the wheels that run in it. The ABI of both changes each year: change them together.
PYODIDE = "314.0.7"  # CPython 3.14.2
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
WASM = "pyemscripten_2026_0_wasm32"
WHEELS = {  # platform: requirements
    WASM: """
pydantic==2.14.3 --hash=sha256:3f7b347782ab7e4cf4c798496ae3a82787d9f21ec12676a9c564355eeef8daa8
pydantic-core==2.50.4 --hash=sha256:e6da138a1ecc1341c8b788a5ee822670b03788e1f5decf7af9d461de6e508b8e
typing-extensions==4.16.0 --hash=sha256:481caa481374e813c1b176ada14e97f1f67a4539ce9cfeb3f350d78d6370c2e8
typing-inspection==0.4.5 --hash=sha256:bc210535442b39e1bf2805e0c7a17dfd6a4ace760c84c7f7d16245d23a6b1c39
annotated-types==0.8.0 --hash=sha256:f072f4d804ea359e4eaf198b1af7a8b0943881a87f31bb764f8bf219bb9419e0
einops==0.8.2 --hash=sha256:54058201ac7087911181bfec4af6091bb59380360f069276601256a76af08193
""",
    # There is no wheel for WebAssembly; without its compiled reader, which is left out, PyYAML runs anywhere.
    "manylinux2014_x86_64": """
pyyaml==6.0.3 --hash=sha256:c458b6d084f9b935061bc36216e8a69a7e293a2f1e68bf956dcd9e6cbcd143f5
""",
}
LEFT_OUT = (".pyi", ".typed", "yaml/_yaml.cpython-314-x86_64-linux-gnu.so")  # names end so
FOLDERS = (  # all that run without torch: tests/test_layout.py compares them with its table
    "analysis", "architect", "combinators", "descriptions", "editor", "graph", "language", "ops", "picture", "serve",
    "specs", "workspace",
)  # fmt: skip
PAGE_FILES = ("page.css", "page.js", "worker.mjs")
POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self'; worker-src 'self'; connect-src 'self'"
)
NOTICE = f"""This folder contains

seqblocks {__version__}, Apache-2.0
Pyodide {PYODIDE}, MPL-2.0, https://github.com/pyodide/pyodide, with CPython 3.14, PSF-2.0
pydantic, pydantic-core, annotated-types, typing-inspection, einops, PyYAML: MIT; typing-extensions: PSF-2.0;
their licenses are in packages.zip.
"""


def write(folder: Path, name: str, text: str, used: dict[str, str]) -> int:
    """Write the page into a folder, which starts with a spec; return the number of bytes.

    used: the files that the spec uses. Raises UnavailableError without npm or pip, if either cannot fetch what is
    needed, or if a file is not the one expected; UsageError if the folder cannot be written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            pyodide, wheels = _pyodide(Path(scratch)), _wheels(Path(scratch))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "pyodide").mkdir(exist_ok=True)
            for each, content in {**pyodide, **_page(name, text, used), "packages.zip": _packages(wheels)}.items():
                (folder / each).write_bytes(content)
        except OSError as error:
            raise unwritable(folder, error) from None
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def _page(name: str, text: str, used: dict[str, str]) -> dict[str, bytes]:
    own = files(__package__)
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<title>'
    page = own.joinpath("page.html").read_text("utf-8").replace("<title>", head, 1)
    return {
        "index.html": page.encode(),
        "backend.js": own.joinpath("playground.js").read_bytes(),
        **{each: own.joinpath(each).read_bytes() for each in PAGE_FILES},
        "start.json": json.dumps({"name": name, "text": text, "files": used}).encode(),
        "NOTICE.txt": NOTICE.encode(),
    }


def _run(command: list[str], what: str, folder: Path) -> None:
    """Run a command that fetches something. Raises UnavailableError with what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=600)
    except FileNotFoundError:
        hint = "install Node.js 18 or later"
        raise UnavailableError(f"serve --static needs {command[0]} to fetch {what}: {hint}") from None
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{what} could not be fetched in ten minutes") from None
    if done.returncode:
        lines = [each for each in done.stderr.splitlines() if "err" in each.lower() or "No module" in each]
        reason = "\n".join(lines[:5] or done.stderr.splitlines()[-5:])
        raise UnavailableError(f"{what} could not be fetched by `{' '.join(command[:3])}`:\n{reason}")


def _pyodide(scratch: Path) -> dict[str, bytes]:
    """Return the files of Pyodide, with a list of packages that is empty: none is fetched when the page runs."""
    npm = shutil.which("npm") or "npm"
    _run([npm, "pack", f"pyodide@{PYODIDE}", "--silent", "--ignore-scripts"], f"Pyodide {PYODIDE}", scratch)
    archive = (scratch / f"pyodide-{PYODIDE}.tgz").read_bytes()
    if base64.b64encode(hashlib.sha512(archive).digest()).decode() != PYODIDE_SHA512:
        known = "the one that seqblocks was tested with"
        raise UnavailableError(f"npm's archive of Pyodide {PYODIDE} is not {known}: its sha512 differs")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        for name in (*PYODIDE_FILES, "pyodide-lock.json"):
            member = opened.extractfile(f"package/{name}")
            assert member, name  # the archive is the known one
            found[f"pyodide/{name}"] = member.read()
    lock = json.loads(found["pyodide/pyodide-lock.json"])
    return {**found, "pyodide/pyodide-lock.json": json.dumps({"info": lock["info"], "packages": {}}).encode()}


def _wheels(scratch: Path) -> list[Path]:
    for number, (platform, wanted) in enumerate(WHEELS.items()):
        requirements = scratch / f"wheels{number}.txt"
        requirements.write_text(wanted)
        options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.14", "--platform", platform]
        command = [sys.executable, "-m", "pip", "download", "--require-hashes", "-q", "--disable-pip-version-check"]
        _run([*command, *options, "-d", ".", "-r", requirements.name], "the wheels for Pyodide", scratch)
    return sorted(scratch.glob("*.whl"))


def _packages(wheels: list[Path]) -> bytes:
    """Return an archive of seqblocks and what it needs: equal files give equal bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted([*_of_wheels(wheels), *_own()]):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return made.getvalue()


def _of_wheels(wheels: list[Path]) -> Iterator[tuple[str, bytes]]:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                is_note = ".dist-info/" in name and "LICENSE" not in name
                if not (name.endswith(("/", *LEFT_OUT)) or is_note or name.startswith("_yaml/")):
                    yield name, archive.read(name)


def _own() -> Iterator[tuple[str, bytes]]:
    """Yield the files of seqblocks that run without torch."""
    root = Path(__file__).parents[1]
    yield from ((f"seqblocks/{each.name}", each.read_bytes()) for each in (*root.glob("*.py"), *root.glob("*.yaml")))
    for name in FOLDERS:
        # A clone without symbolic links has a file in the place of this folder.
        folder = root / name if (root / name).is_dir() else root.parent / name
        for path in folder.rglob("*"):
            if path.suffix in (".py", ".yaml", ".json", ".css", ".js"):
                yield f"seqblocks/{name}/{path.relative_to(folder).as_posix()}", path.read_bytes()

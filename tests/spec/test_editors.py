"""The configurations of editors in docs/editor.md, and the extension in editors/vscode."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "editor.md").read_text("utf-8")
NEOVIM = os.environ.get("SEQBLOCKS_NEOVIM") or shutil.which("nvim")
EMACS = os.environ.get("SEQBLOCKS_EMACS") or shutil.which("emacs")
NODE = shutil.which("node")
TEXT = """\
seqblocks: 1
let: {dim: 64}
model:
  input: {features: dim}
  steps:
    - linear: {features: 2 * dim, as: x}
    - sillu
    - linear: {from: x, features: dim}
"""


def configuration(after: str) -> str:
    """Return the first block of code on the page after a text."""
    found = re.search(r"```text\n(.*?)```", PAGE[PAGE.index(after) :], re.DOTALL)
    assert found
    return found[1]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `seqblocks` is this checkout's, and no editor finds the user's settings."""
    program = folder / "bin" / "seqblocks"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m seqblocks "$@"\n')
    program.chmod(0o755)
    homes = dict.fromkeys(("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"), str(folder))
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **homes, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.mark.skipif(not NEOVIM, reason="no nvim on the path or in SEQBLOCKS_NEOVIM")
def test_neovim(tmp_path: Path) -> None:
    assert NEOVIM
    version = subprocess.run([NEOVIM, "--version"], capture_output=True, text=True, check=True).stdout
    number = re.match(r"NVIM v0\.(\d+)", version)
    is_new = not number or int(number[1]) >= 11
    config = tmp_path / "init.lua"
    config.write_text(configuration("Neovim 0.11 or newer" if is_new else "Neovim 0.7 to 0.10"))
    spec = tmp_path / "spec.yaml"
    spec.write_text(TEXT)
    command = [NEOVIM, "--headless", "-n", "-u", str(config), "--cmd", "filetype on", str(spec)]
    script = ROOT / "tests" / "spec" / "in_neovim.lua"
    done = subprocess.run(
        [*command, "-c", f"luafile {script}"], env=environment(tmp_path), capture_output=True, text=True, timeout=120
    )
    found = json.loads(next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("{")))
    assert "problem" not in found
    ((line, column, end, code, message),) = found["faults"]
    assert (line, column, end, code) == (6, 6, 11, "E301")
    assert message == "there is no verb 'sillu'"
    assert "[batch, seq, 128] · 8,320 parameters" in found["hover"]
    assert found["definition"]["start"] == {"line": 5, "character": 38}
    fixed = TEXT.replace("sillu", "silu").replace("as: x", "name: x, as: wide").replace("from: x", "from: wide")
    assert found["text"] == fixed.splitlines()
    if is_new:
        assert found["hints"][1] == "[batch, seq, 128]"


# --- VS Code ----------------------------------------------------------------------------------------------------------

EXTENSION = ROOT / "editors" / "vscode"


def extension(**state: Any) -> Any:
    """Return what the extension starts, stops and says in an editor of some state."""
    assert NODE
    script = ROOT / "tests" / "spec" / "extension_in_node.mjs"
    words = [NODE, str(script), str(EXTENSION / "extension.js"), json.dumps(state)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout)


needs_node = pytest.mark.skipif(not NODE, reason="no node on the path")


@needs_node
def test_the_extension_starts_the_right_command(tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert extension()["started"][0] == ["seqblocks", "lsp"]
    assert extension(python=str(python))["started"][0] == ["seqblocks", "lsp"]  # it has no seqblocks
    (tmp_path / "seqblocks").touch()
    assert extension(python=str(python))["started"][0] == [str(tmp_path / "seqblocks"), "lsp"]
    assert extension(python=str(python), trusted=False)["started"][0] == ["seqblocks", "lsp"]
    own = extension(python=str(python), command=["env", "seqblocks"], arguments=["--import", "mine.py"])
    assert own["started"] == [["env", "seqblocks", "lsp", "--import", "mine.py"]] * 2  # the second after a restart
    assert own["stopped"] == 2
    assert own["isLog"]
    assert own["selector"] == [{"language": "yaml"}]


@needs_node
def test_the_extension_says_what_to_install() -> None:
    found = extension(fails=True)
    assert found["started"] == []
    assert "pip install 'seqblocks[lsp]'" in found["warnings"][0]


def test_the_extension_lists_what_it_packs() -> None:
    about = json.loads((EXTENSION / "package.json").read_text("utf-8"))
    packed = [line[1:] for line in (EXTENSION / ".vscodeignore").read_text().splitlines() if line.startswith("!")]
    assert about["main"].removeprefix("./") in packed
    settings = about["contributes"]["configuration"]["properties"]
    used = set(re.findall(r'\.get\("(\w+)"\)', (EXTENSION / "extension.js").read_text("utf-8")))
    assert {f"seqblocks.{name}" for name in used} == set(settings)
    # a folder that was opened may not choose what runs
    assert settings["seqblocks.arguments"]["scope"] == "machine"
    assert about["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"] == ["seqblocks.command"]


# --- Emacs ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not EMACS, reason="no emacs with eglot and yaml-mode on the path or in SEQBLOCKS_EMACS")
def test_emacs(tmp_path: Path) -> None:
    assert EMACS
    config, spec = tmp_path / "init.el", tmp_path / "spec.yaml"
    config.write_text(configuration("With Eglot"))
    spec.write_text(TEXT)
    script = ROOT / "tests" / "spec" / "in_emacs.el"
    words = [EMACS, "--batch", "-l", "yaml-mode", "-l", str(config), "-l", str(script), "--eval", f'(main "{spec}")']
    done = subprocess.run(words, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert (found["word"], found["line"]) == ("sillu", 7)
    assert "there is no verb 'sillu'" in found["text"]
    assert found["done"] == TEXT.replace("as: x", "name: x, as: wide").replace("from: x", "from: wide").splitlines()

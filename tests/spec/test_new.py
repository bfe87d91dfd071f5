"""`seqblocks new`: what it writes is valid, and nothing of the user's is overwritten."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from seqblocks.language.spec_files import bundled

Run = Callable[..., subprocess.CompletedProcess[str]]
MODELS = [name for name, path in bundled().items() if path.parent.name == "models"]


def test_a_new_spec_is_valid(run_main: Run, tmp_path: Path) -> None:
    done = run_main("new", "first", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "seqblocks check first.yaml" in done.stdout
    checked = run_main("check", "first.yaml", "--strict", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    text = (tmp_path / "first.yaml").read_text()
    (tmp_path / "first.yaml").write_text(text.replace("# expect:", "expect:").replace("#   params", "  params"))
    assert run_main("check", "first.yaml", cwd=tmp_path).returncode == 0


def test_commands_name_the_file_as_a_shell_reads_it(run_main: Run, tmp_path: Path) -> None:
    shown = run_main("new", "my first", cwd=tmp_path).stdout.splitlines()
    assert all(shlex.split(line)[2].startswith("my first.yaml") for line in shown[1:])
    run_main("new", "two\nlines", cwd=tmp_path)
    assert run_main("check", "two\nlines.yaml", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("name", MODELS[::4])
def test_a_copy_of_a_model_is_valid_and_has_its_size(name: str, run_main: Run, tmp_path: Path) -> None:
    assert run_main("new", "mine", "--like", name, "--quiet", cwd=tmp_path).stdout == ""
    sizes = [
        json.loads(run_main("compare", spec, "--format", "json", cwd=tmp_path).stdout)["specs"][0]["params"]
        for spec in ("mine.yaml", name)
    ]
    assert sizes[0] == sizes[1]
    assert (tmp_path / "mine.yaml").read_text().startswith(f"# mine: begun as a copy of {name}\n")


def test_faults(run_main: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    done = run_main("new", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.yaml exists" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    done = run_main("new", "other", "--like", "mamba_smal", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'mamba_small'?" in done.stderr
    assert run_main("new", "other", "--like", "xlstm", cwd=tmp_path).returncode == 2  # blocks, no model
    assert not (tmp_path / "other.yaml").exists()
    assert run_main("new", "no/such/folder", cwd=tmp_path).returncode == 2
    data = json.loads(run_main("new", "third.yml", "--format", "json", cwd=tmp_path).stdout)
    assert data["file"] == "third.yml"

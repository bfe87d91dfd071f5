"""`seqblocks completion`, in the shells themselves where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from seqblocks.cli import arguments

Run = Callable[..., subprocess.CompletedProcess[str]]

CASES = [
    ("seqblocks che", {"check"}),
    ("seqblocks check --format j", {"json"}),
    ("seqblocks build mamba_1", {"mamba_130m", "mamba_1_4b"}),
    ("seqblocks diff mamba_130m mamba_3", {"mamba_370m"}),
    ("seqblocks sweep spec.yaml --par", {"--pareto"}),
    ("seqblocks completion z", {"zsh"}),
    ("seqblocks bench --th", {"--threads"}),
    ("seqblocks build ./sp", {"./spec.yaml"}),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from seqblocks.cli.completion import SHELLS, _verbs
    from seqblocks.language.spec_files import bundled

    folder = tmp_path_factory.mktemp("scripts")
    for shell, write in SHELLS.items():
        (folder / shell).write_text(write([*_verbs()], [*bundled()]) + "\n")
    (folder / "spec.yaml").write_text("")
    return folder


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash(line: str, expected: set[str], scripts: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    words = line.split(" ")
    program = f"source ./bash; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _seqblocks; "
    done = subprocess.run(
        ["bash", "-c", program + 'printf "%s\\n" "${COMPREPLY[@]}"'], cwd=scripts, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert {*done.stdout.split()} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("seqblocks bui", ["+o", "build"]),  # as a file it would become `build/`, like the folder
        ("seqblocks check --format js", ["+o", "json"]),
        ("seqblocks check tw", ["-o", "two words.yaml"]),
        ("seqblocks draw spec.yaml --html tw", ["-o", "two words.yaml"]),
    ],
)
def test_bash_completes_files_as_files(words: str, expected: list[str], scripts: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    (scripts / "two words.yaml").write_text("")
    given = "compopt() { kind=$1; }; source ./bash; COMP_WORDS=(%s); COMP_CWORD=%d; _seqblocks; "
    program = given % (words, len(words.split(" ")) - 1) + 'printf "%s\\n" "$kind" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", program], cwd=scripts, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_fish(line: str, expected: set[str], scripts: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    done = subprocess.run(
        ["fish", "-N", "-c", f"source ./fish; complete -C '{line}'"], cwd=scripts, capture_output=True, text=True,
        env={"HOME": str(scripts), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    found = {each.split("\t")[0] for each in done.stdout.splitlines()}
    assert expected <= found
    if not line.endswith("./sp"):
        assert found == expected


def test_zsh_accepts_the_script(scripts: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    done = subprocess.run(["zsh", "-n", "zsh"], cwd=scripts, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_verb_and_option_is_in_each_script(shell: str, run_main: Run) -> None:
    script = run_main("completion", shell).stdout
    for verb in arguments.VERBS:
        assert verb in script
    for option in ("--set", "--stdin-filename", "--exit-code", "--fits"):
        assert (option if shell != "fish" else f"-l {option[2:]}") in script


def test_an_unknown_shell(run_main: Run) -> None:
    done = run_main("completion", "tcsh")
    assert done.returncode == 2
    assert "choose from" in done.stderr

"""The action for GitHub: its shell steps run as on a runner, with the options of `shell: bash`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.spec.texts import BAD, GOOD

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
INSTALL, CHECK = ACTION["runs"]["steps"]
PAGE = (ROOT / "docs" / "pull_requests.md").read_text("utf-8")

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the action's steps are scripts for bash")


class Runner:
    """A workspace, and the variables that GitHub's runner sets."""

    def __init__(self, folder: Path) -> None:
        self.workspace, self.temp, self.summary = folder / "work", folder / "temp", folder / "summary.md"
        self.action = ROOT
        self.workspace.mkdir()
        self.temp.mkdir()
        shim = folder / "bin" / "python3"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        shim.chmod(0o755)
        ours = ("PYTHON", "GITHUB", "PIP_T")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self.env = clean | {
            "PATH": f"{shim.parent}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }

    def add(self, name: str, text: str) -> None:
        path = self.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def step(self, step: dict[str, Any], **inputs: str) -> subprocess.CompletedProcess[str]:
        given = {name: each["default"] for name, each in ACTION["inputs"].items()} | inputs
        own = {name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], value)
               for name, value in step.get("env", {}).items()}  # fmt: skip
        script = self.temp / "step.sh"
        script.write_text(step["run"], "utf-8")
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        env = self.env | own | {"GITHUB_ACTION_PATH": str(self.action)}
        return subprocess.run(command, cwd=self.workspace, env=env, capture_output=True, text=True, timeout=300)

    def check(self, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run the second step with the seqblocks of this checkout, as after an installation in an earlier step."""
        self.env["PYTHONPATH"] = str(ROOT)
        return self.step(CHECK, **{"install": "false"} | inputs)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def commands(log: str) -> list[str]:
    """Return the lines that the runner obeys: those outside `::stop-commands::`."""
    found, resume = [], None
    for line in log.splitlines():
        if resume:
            resume = None if line == resume else resume
        elif stop := re.fullmatch(r"::stop-commands::(\w{32,})", line):
            resume = f"::{stop[1]}::"
        elif line.lstrip().startswith("::") or "##[" in line:
            found.append(line)
    assert resume is None
    return found


def rows(runner: Runner) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in runner.summary.read_text("utf-8").splitlines()]


def test_no_input_is_inserted_into_a_script() -> None:
    assert not [step["name"] for step in (INSTALL, CHECK) if "${{" in step["run"]]
    used = set(re.findall(r"inputs\.(\w+)", str(ACTION["runs"])))
    assert used == set(ACTION["inputs"])


def test_faults_are_annotated_and_shapes_listed(runner: Runner) -> None:
    runner.add("specs/good.yaml", GOOD)
    runner.add("specs/deep/er/bad one.yaml", BAD)
    done = runner.check()
    assert done.returncode == 1
    place = "file=specs/deep/er/bad one.yaml,line=3,col=42,endLine=3,endColumn=48,title=E301"
    message = "there is no verb 'linaer'; hint: did you mean 'linear'?"
    assert commands(done.stdout) == [f"::error {place}::{message}"]
    assert " --> specs/deep/er/bad one.yaml:3:42\n" in done.stdout  # the log, for people
    assert rows(runner)[2:] == [
        ["specs/deep/er/bad one.yaml", "E301, line 3: there is no verb 'linaer'", "", "", ""],
        ["specs/good.yaml", "ok", "[batch, seq, 8]", "[batch, seq, 4]", "36"],  # 8 x 4 weights and 4 biases
    ]


def test_options_and_several_patterns(runner: Runner) -> None:
    runner.add("a.yaml", GOOD)
    runner.add("-b.yml", GOOD)
    done = runner.check(specs="a.yaml\n\n  *.yml ", options="--strict\n --set=let.dim=16")
    assert done.returncode == 0, done.stdout
    assert [(row[0], row[4]) for row in rows(runner)[2:]] == [("a.yaml", "68"), ("-b.yml", "68")]  # 16 x 4 + 4
    assert runner.check(specs="vil_tiny").returncode == 0


def test_success_is_quiet(runner: Runner) -> None:
    runner.add("specs/good.yaml", GOOD)
    done = runner.check()
    assert (done.returncode, commands(done.stdout), done.stderr) == (0, [], "")


@pytest.mark.parametrize(
    ("inputs", "status", "message"),
    [
        ({"specs": "specs/*.yaml"}, 2, "'specs/*.yaml' cannot be read: No such file"),
        ({"specs": " \n"}, 2, "the input `specs` names no spec"),
        ({"specs": "a.yaml", "options": "--set *"}, 2, "--set takes PATH=VALUE, for instance --set dim=384, not '*'"),
    ],
)
def test_wrong_inputs_are_annotated(runner: Runner, inputs: dict[str, str], status: int, message: str) -> None:
    runner.add("a.yaml", GOOD)
    done = runner.check(**inputs)
    assert done.returncode == status
    (command,) = commands(done.stdout)
    assert command.startswith("::error ")
    assert message in command


def test_an_unknown_option_is_in_the_log(runner: Runner) -> None:
    done = runner.check(options="--strcit")
    assert done.returncode == 2
    assert "did you mean '--strict'?" in done.stdout


def test_inputs_and_specs_cannot_run_commands(runner: Runner) -> None:
    runner.add("specs/bad.yaml", BAD.replace("linaer", '"##[add-mask]linear"') + "# ::error::own\n")
    done = runner.check(specs='specs/*.yaml\n$(touch a)\n`touch b`\n";touch c', options="--set $(touch) --set `x`")
    assert done.returncode == 2
    done = runner.check(specs='specs/*.yaml\n$(touch a)\n`touch b`\n";touch c')
    assert done.returncode == 1
    assert "##[add-mask]" in done.stdout
    found = commands(done.stdout)
    assert len(found) == 4
    assert all(line.startswith("::error ") for line in found)
    assert {path.name for path in runner.workspace.iterdir()} == {"specs"}


def test_modules_of_the_repository_do_not_replace_others(runner: Runner) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH came with Python 3.11")
    runner.add("specs/good.yaml", GOOD)
    runner.add("yaml.py", "raise SystemExit(9)")
    runner.add("secrets.py", "raise SystemExit(9)")
    assert runner.check().returncode == 0


def test_the_example_of_the_page(runner: Runner) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M)
    step = yaml.safe_load(text)["jobs"]["check"]["steps"][1]
    assert step["uses"].startswith("OWNER/seqblocks@")
    assert set(step["with"]) <= set(ACTION["inputs"])
    runner.add("specs/a/b.yaml", GOOD)
    runner.add("experiments/1/model.yaml", GOOD)
    done = runner.check(**step["with"])
    assert done.returncode == 0, done.stdout
    assert [row[0] for row in rows(runner)[2:]] == ["specs/a/b.yaml", "experiments/1/model.yaml"]


def test_the_page_lists_the_inputs() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.M))
    assert listed == {name: f"`{each['default']}`" if each["default"] else "none"
                      for name, each in ACTION["inputs"].items()}  # fmt: skip


@pytest.mark.long
def test_the_installation(runner: Runner) -> None:
    """The first step installs what the second needs, without torch, into a folder of the runner."""
    pytest.importorskip("torch", reason="installs packages, which needs the registry that torch came from")
    runner.action = runner.temp / "action"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "docs", "benchmarks")
    shutil.copytree(ROOT, runner.action, symlinks=True, ignore=ignored)
    done = runner.step(INSTALL)
    assert done.returncode == 0, done.stdout + done.stderr
    installed = {path.name for path in (runner.temp / "seqblocks").iterdir()}
    assert {"seqblocks", "pydantic", "yaml"} <= installed
    assert not installed & {"torch", "triton", "einops", "rich"}
    runner.add("specs/good.yaml", GOOD)
    shim = Path(runner.env["PATH"].partition(os.pathsep)[0]) / "python3"
    shim.write_text(shim.read_text().replace('" "$@"', '" -S "$@"'))  # -S: nothing of this environment is seen
    done = runner.step(CHECK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(runner)[2][4] == "36"

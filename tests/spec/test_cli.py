"""The command line without torch: statuses, streams, formats, speed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqblocks.cli import arguments, output
from seqblocks.cli import main as command
from seqblocks.language.codes import CODES
from seqblocks.language.spec import bundled
from tests.processes import interrupted

Run = Callable[..., subprocess.CompletedProcess[str]]
GOOD = "seqblocks: 1\nlet: {dim: 8}\nmodel: {input: {features: dim}, steps: [{linear: {features: 4}}]}\n"
BAD = GOOD.replace("linear", "linaer")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    (tmp_path / "short.yaml").write_text(GOOD + "expect: {params: 1}\n")
    (tmp_path / "blocks.yaml").write_text("seqblocks: 1\nblocks: {b: {steps: [silu]}}\n")
    (tmp_path / "latin.yaml").write_bytes(b"seqblocks: 1\nabout: caf\xe9\n")
    return tmp_path


def test_check_prints_results_on_stdout_and_nothing_else(run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "good.yaml", "blocks.yaml", "vil_tiny", cwd=folder)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "good.yaml: ok, 36 parameters, [batch, seq, 8] -> [batch, seq, 4]",
        "blocks.yaml: ok, 1 block (b)",
        "vil_tiny: ok, 6,088,360 parameters, [batch, 3, 224, 224] -> [batch, 1000]",
    ]
    assert run_cli("check", "-q", "good.yaml", cwd=folder).stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check", "good.yaml"], 0),
        (["check", "bad.yaml"], 1),
        (["check", "latin.yaml"], 1),
        (["check", "short.yaml"], 3),
        (["check", "short.yaml", "bad.yaml", "good.yaml"], 1),
        (["check", "good.yaml", "short.yaml"], 3),
        (["check", "absent.yaml"], 1),
        (["check", "."], 1),
        (["check", "vil_tinny"], 1),
        (["check", "good.yaml", "--set", "dmi=3"], 1),
        (["check", "good.yaml", "--set", "dim=[4"], 1),
        (["check", "good.yaml", "--set", "dim"], 2),
        (["check", "good.yaml", "--set", "dim=16"], 0),
        (["chekc", "good.yaml"], 2),
        (["check"], 2),
        (["check", "good.yaml", "--formt", "json"], 2),
        (["build", "good.yaml", "--dtype", "floaty"], 2),
        (["build", "good.yaml", "--batch", "0"], 2),
        (["build", "good.yaml", "--depth", "x"], 2),
        (["build", "good.yaml", "--batch", "9" * 400], 2),
        (["build", "good.yaml", "--seed", "x"], 2),
        (["build", "good.yaml", "--image-size", "big"], 2),
        (["build", "good.yaml", "--image-size", "²"], 2),
        (["build", "good.yaml", "--image-size", "9" * 5000], 2),
        (["build", "good.yaml", "--image-size", ""], 2),
        (["explain", "good.yaml", "--arch", "sm_９０"], 2),
        (["build", "blocks.yaml"], 1),
        (["ops", "linaer"], 2),
        (["explain", "E999"], 2),
        ([], 2),
        (["--version"], 0),
        (["--help"], 0),
        (["build", "--help"], 0),
    ],
)
def test_exit_statuses_and_no_traceback(arguments: list[str], status: int, run_cli: Run, folder: Path) -> None:
    done = run_cli(*arguments, cwd=folder)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    if status == 0:
        assert done.stderr == ""
    elif "good.yaml" not in arguments[1:2]:
        assert done.stderr != ""


def test_close_matches_are_named(run_cli: Run, folder: Path) -> None:
    assert "did you mean 'check'?" in run_cli("chekc", "good.yaml").stderr
    assert "did you mean 'vil_tiny'?" in run_cli("check", "vil_tinny").stderr
    assert "did you mean 'linear'?" in run_cli("ops", "linaer").stderr
    assert "did you mean 'dim'?" in run_cli("check", "good.yaml", "--set", "dmi=3", cwd=folder).stderr
    assert ": did you mean 'json'?\nusage: " in run_cli("check", "good.yaml", "--format", "jsn", cwd=folder).stderr
    assert "did you mean 'good.yaml'?" in run_cli("check", "good", cwd=folder).stderr
    assert "did you mean 'good.yaml'?" in run_cli("check", "./goood.yaml", cwd=folder).stderr
    (folder / "loop.yaml").symlink_to("loop.yaml")
    assert "did you mean" not in run_cli("check", "loop.yaml", cwd=folder).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("build good.yaml --sumary", "build has no option --sumary: did you mean '--summary'?"),
        ("build good.yaml --deth=3", "build has no option --deth: did you mean '--depth'?"),
        ("check good.yaml -f json", "check has no option -f: did you mean '--format'?"),
        ("check good.yaml -set dim=3", "check has no option -set: did you mean '--set'?"),
        ("check good.yaml --summary", "check has no option --summary, but build has"),
        ("list --zzz", "list has no option --zzz: `seqblocks list --help` lists what list takes"),
        ("build good.yaml extra", "unexpected argument 'extra'; `seqblocks build --help` lists what build takes"),
        ("--versoin", "seqblocks itself has no option --versoin: did you mean '--version'?"),
        ("--format json list", "seqblocks itself has no option --format: options follow the verb"),
        ("check good.yaml —set dim=3", "'—set' begins with a different dash character; options begin"),
        ("buidl good.yaml", "there is no verb 'buidl': did you mean 'build'?"),
    ],
)
def test_a_misspelt_option(words: str, message: str, run_main: Run, folder: Path) -> None:
    done = run_main(*words.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_specs_may_follow_an_option_and_help_is_a_verb_too(run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "good.yaml", "--set", "dim=9", "good.yaml", cwd=folder)
    assert done.stdout.count("good.yaml: ok, 40 parameters") == 2, done.stderr
    assert run_cli("help").stdout == run_cli("--help").stdout
    assert run_cli("help", "build").stdout == run_cli("build", "--help").stdout


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--depth", "x", "argument --depth: 'x' is not a whole number"),
        ("--batch", "0", "argument --batch: '0' is not a whole number from 1"),
        ("--length", "1.5", "argument --length: '1.5' is not a whole number"),
        ("--seed", "²", "argument --seed: '²' is not a whole number"),
        ("--image-size", "32", "--image-size requires an image input, and good.yaml has none"),
        ("--image-size", "²", "--image-size takes N or HxW, for instance 224 or 192x256, not '²'"),
    ],
)
def test_invalid_numbers(option: str, given: str, message: str, run_main: Run, folder: Path) -> None:
    done = run_main("build", "good.yaml", option, given, cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr


def test_diagnostics_go_to_stderr(run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "bad.yaml", cwd=folder)
    assert done.stdout == ""
    assert "bad.yaml:3:42" in done.stderr
    assert "did you mean 'linear'?" in done.stderr


def test_where_a_bad_value_was_written(run_cli: Run, folder: Path) -> None:
    (folder / "let.yaml").write_text(GOOD.replace("features: 4", "features: dim - 8"))
    done = run_cli("check", "let.yaml", cwd=folder)
    assert "= note: `dim` is 8 (let.yaml:2:12)" in done.stderr
    data = json.loads(run_cli("check", "--format", "json", "let.yaml", cwd=folder).stdout)
    (fault,) = data["specs"][0]["diagnostics"]
    assert fault["notes"] == [{"text": "`dim` is 8", "file": "let.yaml", "line": 2, "column": 12}]
    done = run_cli("check", "let.yaml", "--set", "dim=5", cwd=folder)
    assert "= note: `dim` is 5: --set dim=5\n" in done.stderr


def test_json_is_one_document_good_or_bad(run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "--format", "json", "good.yaml", "bad.yaml", cwd=folder)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert (data["ok"], [spec["ok"] for spec in data["specs"]]) == (False, [True, False])
    assert data["specs"][0]["params"] == 36
    (fault,) = data["specs"][1]["diagnostics"]
    assert (fault["code"], fault["file"], fault["line"], fault["column"]) == ("E301", "bad.yaml", 3, 42)
    built = json.loads(run_cli("build", "--format", "json", "bad.yaml", cwd=folder).stdout)
    assert (built["ok"], built["diagnostics"][0]["code"]) == (False, "E301")


def test_github_annotations(run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "--format", "github", "bad.yaml", cwd=folder)
    expected = "::error file=bad.yaml,line=3,col=42,endLine=3,endColumn=48,title=E301::there is no verb 'linaer'"
    assert done.stdout.startswith(expected)


def test_standard_input(run_cli: Run) -> None:
    assert run_cli("check", "-", input=GOOD).stdout.startswith("-: ok, 36 parameters")
    done = run_cli("check", "-", "--stdin-filename", "mine.yaml", input=BAD)
    assert done.returncode == 1
    assert "mine.yaml:3:42" in done.stderr


def test_colours_on_request(run_cli: Run, folder: Path) -> None:
    assert "\x1b[" not in run_cli("check", "bad.yaml", cwd=folder).stderr
    assert "\x1b[1;31m" in run_cli("check", "bad.yaml", "--color", "always", cwd=folder).stderr
    forced = {"NO_COLOR": "", "FORCE_COLOR": "1"}
    assert "\x1b[" in run_cli("check", "bad.yaml", cwd=folder, env=forced).stderr
    assert "\x1b[" not in run_cli("check", "bad.yaml", "--color", "never", cwd=folder, env=forced).stderr


def test_ascii_terminals(run_cli: Run, folder: Path) -> None:
    (folder / "long.yaml").write_text(GOOD + "x" * 300 + ": 1\n")
    done = run_cli("check", "long.yaml", cwd=folder, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert "E201" in done.stderr


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize("words", ["--help", *(f"{verb} --help" for verb in arguments.VERBS), "list", "ops"])
def test_help_and_results_in_ascii(words: str, run_cli: Run) -> None:
    done = run_cli(*words.split(), env=ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout.splitlines()) > 5


ODD = "a\x1b]0;title\x07\n::error::b\u202e\x9b2J"
SHOWN = r"a\x1b]0;title\x07\n::error::b\u202e\x9b2J"


@pytest.mark.skipif(os.name != "posix", reason="such names are not legal elsewhere")
@pytest.mark.parametrize("form", ["text", "json", "github"])
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("check {}.yaml", GOOD),
        ("check {}.yaml", BAD),
        ("check {}.yaml --set dim=8", GOOD),
        ("check {}.yaml --set dmi=9", GOOD),
        ("check {}", None),
        ("check {}.yaml", None),
        ("check good.yaml --set {}", GOOD),
        ("check good.yaml --set {}=3", GOOD),
        ("check good.yaml --{}", GOOD),
        ("check good.yaml --import {}", GOOD),
        ("check good.yaml --import {}.py", GOOD),
        ("list {}", None),
        ("{}", None),
        ("ops {}", None),
        ("ops {}.yaml::b", "seqblocks: 1\nblocks: {a: {steps: [silu]}}\n"),
        ("ops {}.yaml::a", "seqblocks: 1\nblocks: {a: {about: \"x\\e[2J\", steps: [silu]}}\n"),
        ("ops {}.yaml", GOOD),
        ("show {}.yaml", GOOD),
        ("schema --for {}.yaml", BAD),
        ("explain {}.yaml --arch {}", GOOD),
        ("build good.yaml --dtype {}", GOOD),
        ("build good.yaml --batch {}", GOOD),
        ("build good.yaml --image-size {}", GOOD),
    ],
)
def test_untrusted_text_contains_no_terminal_controls(
    words: str, text: str | None, form: str, run_main: Run, tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    if text is not None and text != BAD:
        (tmp_path / f"{ODD}.yaml").write_text(text)
    elif text is not None:
        (tmp_path / f"{ODD}.yaml").write_text(text.replace("linaer", f'"{SHOWN}"'))
    given = [word.replace("{}", ODD) for word in words.split(" ")]
    done = run_main(*given, "--format", form, cwd=tmp_path)
    printed = done.stdout + done.stderr
    assert done.returncode in (0, 1, 2)
    assert printed or (form == "github" and text == GOOD)
    assert not [c for c in printed if c != "\n" and not c.isprintable()]
    assert not any(line.startswith("::error::b") for line in printed.splitlines())


def test_a_workflow_command_is_escaped(run_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "a,b:c%.yaml").write_text(BAD)
    done = run_cli("check", "a,b:c%.yaml", "--format", "github", cwd=tmp_path)
    assert done.stdout.startswith("::error file=a%2Cb%3Ac%25.yaml,line=3,")
    (tmp_path / "100%.yaml").write_text(GOOD)
    done = run_cli("check", "100%.yaml", "--set", "dim=8", "--format", "github", cwd=tmp_path)
    assert done.stdout.startswith("::notice ::100%25.yaml: the override dim=8")
    done = run_cli("check", "good.yaml", "--set", "50%", "--format", "github", cwd=tmp_path)
    assert done.stdout == "::error ::--set takes PATH=VALUE, for instance --set dim=384, not '50%25'\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 MACs"), (7, "7 MACs"), (999, "999 MACs"), (999.7, "1 kMACs"), (1000, "1 kMACs"), (1234, "1.23 kMACs"),
        (999_499, "999 kMACs"), (999_500, "1 MMACs"), (2.5e9, "2.5 GMACs"), (999.6e9, "1 TMACs"),
    ],
)  # fmt: skip
def test_three_digits_with_a_prefix(value: float, text: str) -> None:
    assert output.short(value, "MACs") == text
    assert output.short(value) == text.removesuffix("MACs").rstrip()


def test_traceback_on_request(run_cli: Run, folder: Path) -> None:
    assert (
        "Traceback"
        in run_cli("check", "--traceback", "absent.yaml", cwd=folder).stderr
        + run_cli("build", "--traceback", "bad.yaml", cwd=folder).stderr
    )


def test_an_internal_error_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: Any) -> int:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(command, "_run", broken)
    assert command.main(["list"]) == 70
    message = capsys.readouterr().err
    assert "internal error (RuntimeError: a fault of ours)" in message
    assert "Please report it" in message
    assert "Traceback" not in message


@pytest.mark.skipif(os.name != "posix", reason="shells of other systems break pipes in other ways")
@pytest.mark.parametrize("words", ["schema", "--help", "list", "check vil_tiny vil_small", "show vil_tiny"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_broken_pipe_ends_quietly(words: str, unbuffered: str, root: Path) -> None:
    script = f'"$PYTHON" -m seqblocks.cli {words}; echo "status $?" >&2'
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHON": sys.executable, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()  # type: ignore[union-attr]  # closed before the first byte
        assert child.stderr.read() == b"status 141\n"  # type: ignore[union-attr]


def test_ctrl_c_within_main(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert command.main(["list"]) == 130


def test_an_interrupt_at_any_moment_ends_quietly(root: Path) -> None:
    ended = [interrupted(root, 0.02 * n, "check", "vil_tiny", "mamba_small", "xlstm_125m_7_1") for n in range(8)]
    assert ended[0] == (130, "")
    assert set(ended) <= {(130, ""), (0, "")}  # the process may have finished before a late interrupt


def test_without_torch_only_building_fails(run_cli: Run, folder: Path, root: Path) -> None:
    fake = folder / "fake"
    fake.mkdir()
    (fake / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(fake), str(root)])}
    assert run_cli("check", "good.yaml", cwd=folder, env=env).returncode == 0
    done = run_cli("build", "good.yaml", cwd=folder, env=env)
    assert done.returncode == 4
    assert "building requires torch" in done.stderr
    done = run_cli("explain", "good.yaml", cwd=folder, env=env)
    assert done.returncode == 4
    assert "the kernels need torch" in done.stderr
    done = run_cli("show", "good.yaml", "--stage", "plan", cwd=folder, env=env)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "error: the kernels need torch: pip install torch\n"
    assert run_cli("explain", "E401", env=env).returncode == 0
    code = "import seqblocks\ntry: seqblocks.build\nexcept seqblocks.UnavailableError as e: print(e)"
    env = {**os.environ, **env}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out == "building a model needs torch: pip install torch\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "OSError: libcudart.so.12: cannot open"),
        ("raise ImportError('DLL load failed')", "ImportError: DLL load failed"),
        ("import nonesuch_anywhere", "ModuleNotFoundError: No module named 'nonesuch_anywhere'"),
    ],
)
def test_torch_fails_to_load(line: str, message: str, run_cli: Run, folder: Path, root: Path) -> None:
    fake = folder / "fake"
    fake.mkdir()
    (fake / "torch.py").write_text(f"{line}\n")
    env = {"PYTHONPATH": os.pathsep.join([str(fake), str(root)])}
    for words, needs in (("build", "building requires torch"), ("explain", "the kernels need torch")):
        done = run_cli(words, "good.yaml", cwd=folder, env=env)
        assert done.returncode == 4
        assert done.stderr.startswith(f"error: {needs}, which does not load: {message}")


def test_list_names_every_bundled_spec(run_cli: Run) -> None:
    printed = run_cli("list").stdout
    assert all(name in printed for name in bundled())
    data = json.loads(run_cli("list", "--format", "json").stdout)
    assert data["models"]["vil_small"]["params"] == 22_792_360
    assert data["blocks"]["vil"]["verbs"] == ["vil_layer", "vil", "vil2_layer", "vil2"]


def test_ops_explain_and_show(run_cli: Run) -> None:
    assert "headwise_linear" in run_cli("ops").stdout
    assert "heads: whole number, at least 1 (required)" in run_cli("ops", "mlstm").stdout
    assert json.loads(run_cli("ops", "scan", "--format", "json").stdout)["kind"] == "combinator"
    assert run_cli("explain", "e401").stdout.startswith(f"E401: {CODES['E401'].title}")
    assert "%0 sequence [batch, seq, 384]" in run_cli("show", "vil_small_block").stdout
    assert "3:8     " not in run_cli("show", "vil_small_block", "--stage", "graph").stdout
    assert "mapping" in run_cli("show", "vil_small_block", "--stage", "document").stdout


@pytest.mark.parametrize("name", bundled())
def test_show_prints_the_source_of_a_bundled_spec(name: str, run_main: Run) -> None:
    done = run_main("show", name, "--source")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == bundled()[name].read_text(encoding="utf-8")


def test_a_bundled_spec_can_be_forked(run_cli: Run, folder: Path) -> None:
    (folder / "mine.yaml").write_text(run_cli("show", "mamba", "--source").stdout)
    (folder / "model.yaml").write_text(
        "seqblocks: 1\nuse: [./mine.yaml]\nmodel: {input: {features: 8}, steps: [{mamba_block: {dim: 8}}]}\n"
    )
    assert run_cli("check", "model.yaml", cwd=folder).returncode == 0
    data = json.loads(run_cli("show", "mamba", "--source", "--format", "json").stdout)
    assert data["source"] == bundled()["mamba"].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("mamab --source", "there is no bundled spec 'mamab': did you mean 'mamba'?"),
        ("good.yaml --source", "--source prints bundled specs, and 'good.yaml' is a file"),
        ("- --source", "--source prints bundled specs, and '-' is a file"),
        ("mamba --source --stage graph", "cannot be combined with --stage"),
        ("mamba --source --set dim=4", "cannot be combined with --set"),
    ],
)
def test_a_source_that_cannot_be_shown(words: str, message: str, run_cli: Run, folder: Path) -> None:
    done = run_cli("show", *words.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


OUTLINED = """seqblocks: 1
about: one of each
use: [mamba]
let: {dim: 8}
blocks:
  mine:
    about: a block
    args: {dim: int, act: silu, rate: 0.5}
    let: {inner: 2 * dim}
    steps:
      - residual: {steps: [{linear: {features: inner}}, silu, {linear: {features: dim, name: out}}]}
      - parallel: {merge: sum, branches: [{a: [silu]}, {b: []}]}
model:
  input: {features: dim}
  steps: [{repeat: {pattern: m, m: [{mine: {dim: dim}}]}}]
expect: {output: [batch, seq, 8]}
"""


def test_the_stage_spec(run_cli: Run, folder: Path) -> None:
    (folder / "one.yaml").write_text(OUTLINED)
    assert run_cli("show", "one.yaml", "--stage", "spec", cwd=folder).stdout.splitlines() == [
        "one.yaml: one of each",
        "uses [mamba]",
        "let",
        "  dim: 8",
        "",
        "block mine: a block",
        "  arguments",
        "    dim   int, required",
        "    act   word, default silu",
        "    rate  float, default 0.5",
        "  let",
        "    inner: 2 * dim",
        "  steps",
        "    residual",
        "      steps",
        "        linear  features: inner",
        "        silu",
        "        linear  features: dim, name: out",
        "    parallel  merge: sum",
        "      branches",
        "        a: [silu]",
        "        b: []",
        "",
        "model",
        "  input: {features: dim}",
        "  steps",
        "    repeat  pattern: m",
        "      m",
        "        mine  dim: dim",
        "expect",
        "  output: [batch, seq, 8]",
    ]
    data = json.loads(run_cli("show", "one.yaml", "--stage", "spec", "--format", "json", cwd=folder).stdout)
    assert data["spec"]["blocks"]["mine"]["arguments"] == {
        "dim": {"type": "int"}, "act": {"type": "word", "default": "silu"}, "rate": {"type": "float", "default": 0.5}
    }  # fmt: skip
    assert data["spec"]["model"]["steps"] == [{"repeat": {"pattern": "m", "m": [{"mine": {"dim": "dim"}}]}}]


def test_a_library_of_blocks_is_shown_as_one(run_cli: Run) -> None:
    shown = run_cli("show", "mamba")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run_cli("show", "mamba", "--stage", "spec").stdout
    assert "block mamba_mixer: input projection, convolution" in shown.stdout
    assert "    dim        int, required\n" in shown.stdout
    for stage in ("graph", "plan"):  # the file has none
        done = run_cli("show", "mamba", "--stage", stage)
        assert done.returncode == 1
        assert "the file defines blocks but no model" in done.stderr


def test_every_stage_is_data_too(run_cli: Run) -> None:
    for stage in ("document", "spec", "graph"):
        data = json.loads(run_cli("show", "vil_small_block", "--stage", stage, "--format", "json").stdout)
        assert (data["ok"], data["stage"]) == (True, stage)
        assert data[stage]


def test_ops_lists_the_blocks_of_a_file(run_cli: Run, folder: Path) -> None:
    block = "{about: a block of mine, args: {dim: int, act: silu, bias: true}, steps: [silu]}"
    (folder / "blocks.yaml").write_text(f"seqblocks: 1\nblocks: {{b: {{steps: [silu]}}, mine: {block}}}\n")
    assert run_cli("ops", "blocks.yaml", cwd=folder).stdout == "  b\n  mine  a block of mine\n"
    assert run_cli("ops", "blocks.yaml::mine", cwd=folder).stdout == (
        "mine: a block of mine\n\na block; the spec says  use: [./blocks.yaml]\n\narguments:\n"
        "  dim   int, required\n  act   word, default silu\n  bias  bool, default true\n"
    )
    data = json.loads(run_cli("ops", f"{folder}/blocks.yaml::mine", "--format", "json").stdout)
    assert (data["name"], data["use"], len(data["arguments"])) == ("mine", f"{folder}/blocks.yaml", 3)
    assert json.loads(run_cli("ops", "xlstm::mlstm_cell", "--format", "json").stdout)["use"] == "xlstm"
    for name, status, message in (
        ("blocks.yaml::mien", 2, "blocks.yaml defines no block 'mien': did you mean 'mine'?"),
        ("good.yaml", 2, "good.yaml defines no blocks"),
        ("bad.yaml::mine", 1, "there is no verb 'linaer'"),
        ("absent.yaml::mine", 1, "'absent.yaml' cannot be read"),
    ):
        done = run_cli("ops", name, cwd=folder)
        assert (done.returncode, done.stdout) == (status, "")
        assert message in done.stderr


def test_check_leaves_torch_rich_and_numpy_alone(root: Path) -> None:
    """`check` does not load them, nor does it search for pydantic's plug-ins, which is slow."""
    code = (
        "import sys; before = set(sys.modules); from seqblocks.cli import main; main._disable_pydantic_plugins();"
        "main.main(['check', 'vil_tiny']); new = set(sys.modules) - before;"
        "sys.exit(bool({'torch', 'rich', 'numpy', 'importlib.metadata'} & new))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=False
    )
    assert done.returncode == 0


def cpu_of_children() -> float:
    """Return the seconds of CPU time used by child processes so far. Other programs on the machine add little to it."""
    import resource  # missing on Windows

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.timing
@pytest.mark.skipif(os.name != "posix", reason="CPU time of children is not known elsewhere")
def test_check_of_48_layers_is_as_fast_as_its_imports(tmp_path: Path, root: Path) -> None:
    """At most 0.4 s of CPU time, and 2.5 times that of importing pydantic and yaml: medians of whole processes."""
    spec = tmp_path / "deep.yaml"
    spec.write_text(
        "seqblocks: 1\nuse: [vil]\nlet: {dim: 4096}\nmodel:\n  input: {features: dim}\n  steps:\n"
        "    - repeat: {name: blocks, times: 48, steps: [{vil: {dim: dim}}]}\nexpect: {params: 4_848_943_488}\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(root)}
    commands = [["-c", "import pydantic, yaml"], ["-m", "seqblocks.cli", "check", str(spec)]]
    for attempt in range(4):  # programs on the same core share its caches: the best round is the measurement
        times: list[list[float]] = [[], []]
        for _ in range(11):  # the first run of each fills the caches
            for words, found in zip(commands, times, strict=True):
                before = cpu_of_children()
                subprocess.run([sys.executable, *words], env=env, check=True, capture_output=True)
                found.append(cpu_of_children() - before)
        imports, check = (statistics.median(found[1:]) for found in times)
        print(f"check {check * 1e3:.0f} ms, imports {imports * 1e3:.0f} ms, ratio {check / imports:.2f}")
        if check <= 2.5 * imports or attempt == 3:
            break
    assert check <= 0.4 * max(1.0, imports / 0.08)  # 0.4 s on a machine whose imports take 0.05 to 0.08 s when idle
    assert check <= 2.5 * imports


UNUSUAL: dict[str, tuple[str, int, str]] = {
    "a name that is too long for the system": ("check $(printf 'x/%.0s' $(seq 3000))y.yaml", 1, "File name too long"),
    "a part of a name that is too long": ("check $(printf 'x%.0s' $(seq 300)).yaml", 1, "File name too long"),
    "a name that is not UTF-8": (r"check $(printf '\377').yaml", 1, "cannot be read: No such file or directory"),
    "a file below a file": ("check good.yaml/x.yaml", 1, "Not a directory"),
    "a folder": ("check .", 1, "'.' cannot be read: Is a directory"),
    "a folder with a spec": ("check saved", 1, "hint: this is a folder; its spec is 'saved/spec.yaml'"),
    "a folder with a bundled name": ("list -q; mkdir vil_tiny; seqblocks check vil_tiny", 0, "ok"),
    "the root": ("check /", 1, "'/' cannot be read: Is a directory"),
    "a name that begins with a dash": ("check -dash.yaml", 2, "SPEC"),
    "the same, after two dashes": ("check -- -dash.yaml", 0, "-dash.yaml: ok"),
    "a working directory that is gone": ("check vil_tiny; cd gone; rmdir ../gone; seqblocks check vil_tiny", 0, "ok"),
    "an import from there": ("list -q; cd gone; rmdir ../gone; seqblocks check vil_tiny --import x.py", 2, "removed"),
    "docstrings stripped": ("list -q; PYTHONOPTIMIZE=2 seqblocks ops", 0, "layer_norm"),
    "warnings that are errors": ("list -q; PYTHONWARNINGS=error seqblocks check good.yaml", 0, "36 parameters"),
    "development mode": ("list -q; PYTHONDEVMODE=1 seqblocks check good.yaml", 0, "36 parameters"),
    "no HOME": ("list -q; env -u HOME -u USER $SEQBLOCKS check good.yaml", 0, "36 parameters"),
    "few files": ("list -q; ulimit -n 8; seqblocks check good.yaml", 0, "36 parameters"),
    "no room in files": ("list -q; ulimit -f 0; seqblocks list > list.txt", 4, "cannot be written: File too"),
    "a schema for standard input": ("schema --for - < good.yaml", 0, '"dim"'),
    "a schema for nothing": ("schema --for ''", 1, "there is no bundled spec ''"),
    "a module that closes the streams": ("check good.yaml --import closing.py", 0, "36 parameters"),
    "the same, and a fault": ("check bad.yaml --import closing.py", 1, ""),
    "a module that replaces the streams": ("check good.yaml --import replacing.py", 0, "36 parameters"),
    "the same with a fault": ("check bad.yaml --import replacing.py", 1, "did you mean 'linear'?"),
    "a module that never returns": ("check good.yaml --import deep.py", 2, "deep.py:1: RecursionError"),
    "a name with a null byte in --set": ("check good.yaml --set $(printf 'dim=\\377')", 1, "cannot be read as YAML"),
    "a huge number": ("check good.yaml --set dim=$(printf '9%.0s' $(seq 5000))", 1, "too long"),
    "terminals of one column": ("list -q; COLUMNS=1 seqblocks --help", 0, "usage: seqblocks"),
}


@pytest.mark.skipif(os.name != "posix", reason="shells of other systems do other things")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_situations(name: str, folder: Path, root: Path) -> None:
    """Each case has the documented exit status and a clear message, without a traceback or internal error."""
    line, status, message = UNUSUAL[name]
    (folder / "-dash.yaml").write_text(GOOD)
    (folder / "gone").mkdir()
    (folder / "saved").mkdir()
    (folder / "saved" / "spec.yaml").write_text(GOOD)
    (folder / "closing.py").write_text("import sys\nsys.stdout.close()\nsys.stderr.close()\n")
    (folder / "replacing.py").write_text("import sys\nsys.stdout = sys.stderr = None\n")
    (folder / "deep.py").write_text("def f(): f()\nf()\n")
    command = f'{sys.executable} -m seqblocks.cli'
    script = f"seqblocks() {{ {command} \"$@\"; }}\nSEQBLOCKS='{command}'\nseqblocks {line}"
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, check=False)
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == status, printed
    assert message in printed
    assert "Traceback" not in printed
    assert "internal error" not in printed


@pytest.mark.skipif(os.name != "posix", reason="what a shell of another system does to streams is another matter")
@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("list >&-", 0, ""),
        ("check good.yaml >&- 2>&-", 0, ""),
        ("check bad.yaml 2>&-", 1, ""),
        ("check - <&-", 1, "the spec is empty"),
        ("list > /dev/full", 4, "error: the result cannot be written: No space left on device\n"),
        ("schema > /dev/full", 4, "error: the result cannot be written: No space left on device\n"),
        ("check /dev/zero", 1, "error[E104]: /dev/zero is too large for a spec"),
        ("check - < /dev/zero", 1, "error[E104]: <stdin> is too large for a spec"),
    ],
)
def test_streams_that_are_closed_full_or_endless(
    line: str, status: int, message: str, folder: Path, root: Path
) -> None:
    if not Path("/dev/full").exists() and "/dev/full" in line:
        pytest.skip("no /dev/full here")
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHON": sys.executable}
    command = ["sh", "-c", f'exec "$PYTHON" -m seqblocks.cli {line}']
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith(message) if message.startswith("error") else message in done.stderr
    assert message or not done.stderr

"""The command line without torch: statuses, messages, formats. Most of it runs in this process.

Other topics: test_cli_show.py, test_cli_processes.py, test_cli_warnings.py.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqblocks.cli import arguments, output
from seqblocks.cli import main as command
from seqblocks.cli.codes import CODES
from seqblocks.language.spec_files import bundled
from tests.sampled import sampled
from tests.spec.texts import BAD, GOOD

Run = Callable[..., subprocess.CompletedProcess[str]]


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
    assert run_cli("check", "short.yaml", cwd=folder).returncode == 3


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check", "good.yaml"], 0),
        (["check", "bad.yaml"], 1),
        (["check", "latin.yaml"], 1),
        (["check", "short.yaml"], 3),
        (["check", "short.yaml", "bad.yaml", "good.yaml"], 1),
        (["check", "good.yaml", "short.yaml"], 3),
        (["check", "absent.yaml"], 2),
        (["check", "."], 2),
        (["check", "vil_tinny"], 2),
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
def test_exit_statuses_and_no_traceback(arguments: list[str], status: int, run_main: Run, folder: Path) -> None:
    done = run_main(*arguments, cwd=folder)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    if status == 0:
        assert done.stderr == ""
    elif "good.yaml" not in arguments[1:2]:
        assert done.stderr != ""


def test_close_matches_are_named(run_main: Run, folder: Path) -> None:
    assert "did you mean 'check'?" in run_main("chekc", "good.yaml").stderr
    assert "did you mean 'vil_tiny'?" in run_main("check", "vil_tinny").stderr
    assert "did you mean 'linear'?" in run_main("ops", "linaer").stderr
    assert "did you mean 'dim'?" in run_main("check", "good.yaml", "--set", "dmi=3", cwd=folder).stderr
    assert ": did you mean 'json'?\nusage: " in run_main("check", "good.yaml", "--format", "jsn", cwd=folder).stderr
    assert "did you mean 'good.yaml'?" in run_main("check", "good", cwd=folder).stderr
    assert "did you mean 'good.yaml'?" in run_main("check", "./goood.yaml", cwd=folder).stderr
    (folder / "loop.yaml").symlink_to("loop.yaml")
    assert "did you mean" not in run_main("check", "loop.yaml", cwd=folder).stderr


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


@pytest.mark.parametrize("verb", arguments.VERBS)
def test_examples_in_the_help_are_commands(verb: str) -> None:
    parser = arguments.Parser()
    arguments.declare(parser, arguments.VERBS[verb])
    lines = (parser.epilog or "").partition("examples:\n")[2].splitlines()
    examples = [line.split(" > ")[0].split(" # ")[0] for line in lines if line.startswith("  seqblocks ")]
    parsed = [arguments.parse(shlex.split(example)[1:]).verb for example in examples]
    assert verb in parsed


def test_overrides_may_follow_the_path(run_main: Run, folder: Path) -> None:
    shown = json.loads(run_main("memory", "mlstm_small@dim=64@heads=2", "--length", "8", "--format", "json").stdout)
    words = ("memory", "mlstm_small", "--set", "dim=64", "--set", "heads=2", "--length", "8", "--format", "json")
    assert shown["peak_bytes"] == json.loads(run_main(*words).stdout)["peak_bytes"]
    for verb in ("memory", "probe", "bench"):
        assert "there is no 'nothing'" in run_main(verb, "mlstm_small@nothing=3").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory", "good.yaml", "--fits", ""], "--fits has no value"),
        (["memory", "good.yaml", "--fits="], "--fits has no value"),
        (["new", ""], "the argument after new is empty"),
        (["check", "good.yaml", ""], "the argument after good.yaml is empty"),
    ],
)
def test_an_empty_argument_does_not_count_as_left_out(
    words: list[str], message: str, run_main: Run, folder: Path
) -> None:
    """It is what a variable of the shell becomes that is not set: a budget of nothing would always be met."""
    done = run_main(*words, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {message}: is a variable of the shell not set?\n"


def test_tasks_may_be_left_out(run_main: Run, folder: Path) -> None:
    assert "required: SPEC\n" in run_main("probe", cwd=folder).stderr


def test_an_override_without_a_value(run_main: Run, folder: Path) -> None:
    done = run_main("compare", "good.yaml@dim", cwd=folder)
    assert done.returncode == 2
    assert "'good.yaml@dim': an override is written PATH=VALUE, as in good.yaml@dim=64" in done.stderr


def test_specs_may_follow_an_option_and_help_is_a_verb_too(run_main: Run, folder: Path) -> None:
    done = run_main("check", "good.yaml", "--set", "dim=9", "good.yaml", cwd=folder)
    assert done.stdout.count("good.yaml: ok, 40 parameters") == 2, done.stderr
    assert run_main("help").stdout == run_main("--help").stdout
    assert run_main("help", "build").stdout == run_main("build", "--help").stdout


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


def test_diagnostics_go_to_stderr(run_main: Run, folder: Path) -> None:
    done = run_main("check", "bad.yaml", cwd=folder)
    assert done.stdout == ""
    assert "bad.yaml:3:42" in done.stderr
    assert "did you mean 'linear'?" in done.stderr


def test_where_a_bad_value_was_written(run_main: Run, folder: Path) -> None:
    (folder / "let.yaml").write_text(GOOD.replace("features: 4", "features: dim - 8"))
    done = run_main("check", "let.yaml", cwd=folder)
    assert "= note: `dim` is 8 (let.yaml:2:12)" in done.stderr
    data = json.loads(run_main("check", "--format", "json", "let.yaml", cwd=folder).stdout)
    (fault,) = data["specs"][0]["diagnostics"]
    place = {"file": "let.yaml", "line": 2, "column": 12, "end_line": 2, "end_column": 13}
    assert fault["notes"] == [{"text": "`dim` is 8", **place}]
    done = run_main("check", "let.yaml", "--set", "dim=5", cwd=folder)
    assert "= note: `dim` is 5: --set dim=5\n" in done.stderr


def test_json_is_one_document_good_or_bad(run_main: Run, folder: Path) -> None:
    done = run_main("check", "--format", "json", "good.yaml", "bad.yaml", cwd=folder)
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert (data["ok"], [spec["ok"] for spec in data["specs"]]) == (False, [True, False])
    assert data["specs"][0]["params"] == 36
    (fault,) = data["specs"][1]["diagnostics"]
    assert (fault["code"], fault["file"], fault["line"], fault["column"]) == ("E301", "bad.yaml", 3, 42)
    built = json.loads(run_main("build", "--format", "json", "bad.yaml", cwd=folder).stdout)
    assert (built["ok"], built["diagnostics"][0]["code"]) == (False, "E301")


def test_github_annotations(run_main: Run, folder: Path) -> None:
    done = run_main("check", "--format", "github", "bad.yaml", cwd=folder)
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


@pytest.mark.parametrize("words", sampled(["--help", *(f"{verb} --help" for verb in arguments.VERBS), "list", "ops"]))
def test_help_and_results_in_ascii(words: str, run_cli: Run) -> None:
    done = run_cli(*words.split(), env=ASCII)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert len(done.stdout.splitlines()) > 5


ODD = "a\x1b]0;title\x07\n::error::b\u202e\x9b2J"
SHOWN = r"a\x1b]0;title\x07\n::error::b\u202e\x9b2J"


@pytest.mark.skipif(os.name != "posix", reason="other systems refuse control characters in file names")
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


def test_a_workflow_command_is_escaped(run_main: Run, tmp_path: Path) -> None:
    (tmp_path / "a,b:c%.yaml").write_text(BAD)
    done = run_main("check", "a,b:c%.yaml", "--format", "github", cwd=tmp_path)
    assert done.stdout.startswith("::error file=a%2Cb%3Ac%25.yaml,line=3,")
    (tmp_path / "100%.yaml").write_text(GOOD)
    done = run_main("check", "100%.yaml", "--set", "dim=8", "--format", "github", cwd=tmp_path)
    assert done.stdout.startswith("::notice ::100%25.yaml: the override dim=8")
    done = run_main("check", "good.yaml", "--set", "50%", "--format", "github", cwd=tmp_path)
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


def test_ctrl_c_within_main(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupted)
    assert command.main(["list"]) == 130


@pytest.mark.slow
def test_list_names_every_bundled_spec(run_main: Run) -> None:
    printed = run_main("list").stdout
    assert all(name in printed for name in bundled())
    data = json.loads(run_main("list", "--format", "json").stdout)
    assert data["models"]["vil_small"]["params"] == 22_792_360
    assert data["blocks"]["vil"]["verbs"] == ["vil_layer", "vil", "vil2_layer", "vil2"]


def test_ops_explain_and_show(run_main: Run) -> None:
    assert "headwise_linear" in run_main("ops").stdout
    assert "heads: whole number, at least 1 (required)" in run_main("ops", "mlstm").stdout
    assert json.loads(run_main("ops", "scan", "--format", "json").stdout)["kind"] == "combinator"
    assert run_main("explain", "e401").stdout.startswith(f"E401: {CODES['E401'].title}")
    assert "%0 sequence [batch, seq, 384]" in run_main("show", "vil_small_block").stdout
    assert "3:8     " not in run_main("show", "vil_small_block", "--stage", "graph").stdout
    assert "mapping" in run_main("show", "vil_small_block", "--stage", "document").stdout


def test_ops_lists_the_blocks_of_a_file(run_main: Run, folder: Path) -> None:
    block = "{about: a block of mine, args: {dim: int, act: silu, bias: true}, steps: [silu]}"
    (folder / "blocks.yaml").write_text(f"seqblocks: 1\nblocks: {{b: {{steps: [silu]}}, mine: {block}}}\n")
    assert run_main("ops", "blocks.yaml", cwd=folder).stdout == "  b\n  mine  a block of mine\n"
    assert run_main("ops", "blocks.yaml::mine", cwd=folder).stdout == (
        "mine: a block of mine\n\na block; the spec says  use: [./blocks.yaml]\n\narguments:\n"
        "  dim   int, required\n  act   word, default silu\n  bias  bool, default true\n"
    )
    data = json.loads(run_main("ops", f"{folder}/blocks.yaml::mine", "--format", "json").stdout)
    assert (data["name"], data["use"], len(data["arguments"])) == ("mine", f"{folder}/blocks.yaml", 3)
    assert json.loads(run_main("ops", "xlstm::mlstm_cell", "--format", "json").stdout)["use"] == "xlstm"
    for name, status, message in (
        ("blocks.yaml::mien", 2, "blocks.yaml defines no block 'mien': did you mean 'mine'?"),
        ("good.yaml", 2, "good.yaml defines no blocks"),
        ("bad.yaml::mine", 1, "there is no verb 'linaer'"),
        ("absent.yaml::mine", 2, "'absent.yaml' cannot be read"),
    ):
        done = run_main("ops", name, cwd=folder)
        assert (done.returncode, done.stdout) == (status, "")
        assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "check specs, without importing torch\n"),
        (("explain", "mlstm"), 2, "mlstm is a verb, and explain takes a spec or a code: `seqblocks ops mlstm`"),
        (("explain", "repeat"), 2, "`seqblocks ops repeat` describes it"),
        (("explain", "mlstm_block"), 2, "`seqblocks ops mlstm_block` describes it"),
        (("ops", "attn"), 2, "there is no verb 'attn': did you mean 'attention'?"),
        (("ops", "xlstm"), 2, "it is a bundled spec: `seqblocks ops xlstm::` lists its blocks"),
        (("ops", "mamba_small"), 2, "it is a bundled spec: `seqblocks show mamba_small`"),
        (("ops", "xlstm::"), 0, ""),
    ],
)
def test_what_to_type_instead(words: tuple[str, ...], status: int, said: str, run_main: Run) -> None:
    done = run_main(*words)
    assert done.returncode == status
    assert said in done.stderr

"""Primitives of other packages: a file, a decorator, and optionally an entry point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from seqblocks import graph, op
from seqblocks.analysis import check
from seqblocks.types import Wire

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = '''
from seqblocks import Op, primitive
from seqblocks.op import argument
from seqblocks.parameters import Init, Parameter


@primitive("plugged_scale")
class Scale(Op):
    """Multiply every feature by a learned gain."""

    start: float = argument(1.0, "what the gain starts at")

    def parameters(self, x):
        return {"weight": Parameter((x.features,), Init("constant", (self.start,)))}

    def forward(self, p, call, x):
        return x * p["weight"]
'''
TEXT = "seqblocks: 1\nmodel: {input: {features: 5}, steps: [{plugged_scale: {start: 2 * 3}}]}"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_plugin_module.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    op.load_builtin()  # modules imported with another table do not register in ours
    monkeypatch.setattr(op, "PRIMITIVES", dict(op.PRIMITIVES))
    yield "my_plugin_module"
    sys.modules.pop("my_plugin_module", None)
    op.load_plugins.cache_clear()


def test_an_entry_point_is_found_when_an_unknown_verb_is_met(plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", plugin, op.PLUGIN_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry] if group == op.PLUGIN_GROUP else [])
    op.load_plugins.cache_clear()
    op.load_builtin()
    monkeypatch.setattr("seqblocks.analysis.steps.steps.PRIMITIVES", op.PRIMITIVES)
    file, model = check.load_text(TEXT)
    made = check.require_model(file, model)
    assert graph.count(made.graph) == 5
    (item,) = graph.parameters(made.graph)
    assert str(item.parameter.init) == "constant(6)"


def test_a_broken_plugin_is_named_and_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module_anywhere", op.PLUGIN_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    op.load_plugins.cache_clear()
    with pytest.raises(check.SpecError, match=r"plug-in 'broken' .* did not load"):
        check.load_text("seqblocks: 1\nmodel: {input: {features: 5}, steps: [nonesuch]}")
    check.load_text("seqblocks: 1\nmodel: {input: {features: 5}, steps: [silu]}")
    op.load_plugins.cache_clear()


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(0)", "the module exits the program; it should only define primitives"),
        pytest.param(
            "raise SystemExit", "the module exits the program; it should only define primitives", marks=pytest.mark.slow
        ),
        pytest.param("raise KeyboardInterrupt", "KeyboardInterrupt: no message", marks=pytest.mark.slow),
        pytest.param("raise GeneratorExit('stop')", "GeneratorExit: stop", marks=pytest.mark.slow),
        ("class Odd(BaseException): pass\nraise Odd('one\\ntwo\\x1b[2J')", "Odd: one"),
        pytest.param("raise Odd", "NameError: name 'Odd' is not defined", marks=pytest.mark.slow),
    ],
)
def test_an_installed_plugin_that_ends_the_program(code: str, message: str, run_cli: Run, tmp_path: Path) -> None:
    """It is named in a note, the exit status is that of the spec, and its output stays out of the results."""
    noise = "import os\nprint('printed')\nos.write(1, b'written\\n')\nos.system('echo called')\n"
    (tmp_path / "ending.py").write_text(noise + code + "\n")
    info = tmp_path / "ending-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ending\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[seqblocks.ops]\nending = ending\n")
    (tmp_path / "bad.yaml").write_text("seqblocks: 1\nmodel: {input: {features: 5}, steps: [nonesuch]}\n")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = run_cli("check", "bad.yaml", "--format", "json", cwd=tmp_path, env=env)
    assert done.returncode == 1
    (fault,) = json.loads(done.stdout)["specs"][0]["diagnostics"]
    assert [note["text"] for note in fault["notes"]] == [f"plug-in 'ending' (ending) did not load: {message}"]
    assert sorted(done.stderr.split()) == ["called", "printed", "written"]
    done = run_cli("check", "bad.yaml", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"= note: plug-in 'ending' (ending) did not load: {message}\n" in done.stderr
    done = run_cli("ops", "silu", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "silu (primitive)")
    assert f"note: plug-in 'ending' (ending) did not load: {message}\n" in done.stderr


def test_an_interrupt_by_the_user_is_not_a_failed_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(EntryPoint):
        def load(self) -> None:
            raise KeyboardInterrupt

    entry = Interrupted("slow", "slow", op.PLUGIN_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    op.load_plugins.cache_clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores interrupts
    try:
        with pytest.raises(KeyboardInterrupt):
            op.load_plugins()
    finally:
        signal.signal(signal.SIGINT, before)
        op.load_plugins.cache_clear()


def test_a_verb_can_be_registered_once() -> None:
    op.load_builtin()
    with pytest.raises(ValueError, match="'silu' is already defined by"):

        @op.primitive("silu")
        class Other(op.Op):
            """A verb that is already taken."""


def test_an_unused_built_in_verb_is_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "PRIMITIVES", {})
    with pytest.raises(ValueError, match=r"the verb 'silu' is built in; .*Other needs another"):

        @op.primitive("silu")
        class Other(op.Op):
            """A verb that is already taken."""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"ports": ("x", "other")}, r"Mine.ports must be a tuple of Port\(name, about, …\)"),
        ({"reads": "future"}, "Mine.reads must be one of token, past, all, not 'future'"),
        ({"start": (int, 2.5)}, "Mine.start has an invalid default: .* valid integer"),
        ({"start": (int, 0)}, "Mine.start has an invalid default: .* greater than or equal to 1"),
    ],
)
def test_declarations_of_a_class_are_checked(body: dict[str, Any], message: str) -> None:
    if "start" in body:
        kind, default = body["start"]
        body = {"__annotations__": {"start": kind}, "start": op.argument(default, "a number", ge=1)}
    with pytest.raises(TypeError, match=message):
        op.primitive("mine")(type("Mine", (op.Op,), {"__module__": __name__, "__doc__": "One's own.", **body}))
    assert "mine" not in op.PRIMITIVES


def test_a_primitive_is_an_op_and_has_a_name() -> None:
    with pytest.raises(TypeError, match=r"a primitive must be a subclass of Op, not <class 'object'>"):
        op.primitive("mine")(object)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="the verb 'z-z' is not a valid name"):
        op.primitive("z-z")(op.Op)


def test_wires_made_by_a_primitive() -> None:
    wire = Wire("sequence", features=8)
    assert wire._replace(features=4) == Wire("sequence", 4)
    with pytest.raises(TypeError, match="an argument is passed by position and by name"):
        Wire("sequence", 8, kind="tokens")  # type: ignore[misc]
    with pytest.raises(TypeError, match="unknown arguments: lenght"):
        Wire("sequence", 8, lenght=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing or unknown arguments: features"):
        Wire("sequence")  # type: ignore[call-arg]


# --- seqblocks VERB --import MODULE

DECORATOR = '@primitive("plugged_scale")\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("print('hello')\n" + PLUGIN)
    (tmp_path / "spec.yaml").write_text(TEXT)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "json.py").write_text("from helper import *\n")  # has the name of a standard module
    (tmp_path / "sub" / "helper.py").write_text(PLUGIN)
    return tmp_path


@pytest.mark.parametrize("module", ["mine", "mine.py", "./mine.py", "sub/json.py"])
def test_a_user_module_on_the_command_line(module: str, run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "spec.yaml", "--import", module, "--format", "json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["specs"][0]["params"] == 5  # output of the module stays out of the results
    assert done.stderr == ("hello\n" if "mine" in module else "")


@pytest.mark.slow
def test_every_verb_that_reads_specs_imports(run_cli: Run, folder: Path) -> None:
    for words in (["show", "spec.yaml"], ["ops", "plugged_scale"], ["ops"], ["schema"]):
        done = run_cli(*words, "--import", "mine", cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "plugged_scale" in done.stdout
    twice = run_cli("check", "-q", "spec.yaml", "--import", "mine.py", "--import", "mine", cwd=folder)
    assert (twice.returncode, twice.stderr) == (0, "hello\n")
    (folder / "other.yaml").write_text(TEXT.replace("plugged_scale: {start: 2 * 3}", "zwwz"))
    without = run_cli("check", "other.yaml", cwd=folder)
    assert (without.returncode, "must be imported first (--import my_ops.py)" in without.stderr) == (1, True)


def quick_and_slow(quick: list[Any], slow: list[Any]) -> list[Any]:
    return [*quick, *(pytest.param(*values, marks=pytest.mark.slow) for values in slow)]


FAILING = quick_and_slow(
    [
        ("mine.py", "import nonesuch\n", "at mine.py:8: ModuleNotFoundError: No module named 'nonesuch'\nmodules"),
        ("mine", "1 +\n", "failed at mine.py:8: SyntaxError: invalid syntax\nfix the error there"),
        ("mine", "x = [][1]\n", "failed at mine.py:8: IndexError: list index out of range\nfix the error there"),
        ("mine", "primitive('silu')(Op)\n", "failed at mine.py:8: ValueError: the verb 'silu' is built in"),
        ("mine", "raise SystemExit(0)\n", "failed at mine.py:8: the module exits the program"),
        ("mine.py", "from . import x\n", "write a module of a package with dots: --import mine\n"),
        ("mine", "raise ValueError('a' * 999)\n", "at mine.py:8: ValueError: " + 200 * "a" + "\n"),
        ("mnie.py", "", "there is no such file; did you mean 'mine.py'?"),
        ("sub/helper", "", "there is no such module; write a file with its extension: --import sub/helper.py"),
        ("spec.yaml", "", "a file must be Python code, with the extension .py"),
        ("", "", "has no value: is a variable of the shell not set?"),
        ("sub", "", "this is a folder; write the path of a file in it, such as sub/helper.py"),
        ("empty.py", "", "this is a folder; write the path of a file in it, such as empty.py/my_ops.py"),
        (".", "", "this is a folder; write the path of a file in it, such as mine.py"),
        ("sub.deep", "", "this is a folder; write the path of a file in it, such as sub/deep/my_ops.py"),
    ],
    [
        ("mine", "import nonesuch\n", "at mine.py:8: ModuleNotFoundError: No module named 'nonesuch'\nmodules"),
        ("mine", "raise KeyboardInterrupt\n", "failed at mine.py:8: KeyboardInterrupt: no message\nfix the"),
        ("mine", "raise GeneratorExit\n", "failed at mine.py:8: GeneratorExit: no message\nfix the error there"),
        ("mine.py", "from . import x\n", "at mine.py:8: ImportError: attempted relative import with no known parent"),
        ("mnie", "", "there is no such module; searched the current folder"),
        ("sub/mine", "", "there is no such module; searched the current folder"),
        (".mine", "", "there is no such module"),
    ],
)


@pytest.mark.parametrize(("module", "line", "message"), FAILING)
def test_a_module_that_fails(module: str, line: str, message: str, run_cli: Run, folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN.replace(DECORATOR, "\n" + line + DECORATOR))
    (folder / "empty.py").mkdir()
    (folder / "sub" / "deep").mkdir()
    done = run_cli("check", "spec.yaml", "--import", module, cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --import {module}")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_without_primitives_is_noted(run_cli: Run, folder: Path) -> None:
    (folder / "spec.yaml").write_text(TEXT.replace("plugged_scale: {start: 2 * 3}", "linear: {features: 5}"))
    (folder / "mine.py").write_text(PLUGIN.replace(DECORATOR, ""))
    done = run_cli("check", "spec.yaml", "--import", "mine", cwd=folder)
    assert done.returncode == 0
    assert done.stderr == 'note: --import mine defines no primitive (with @primitive("verb"))\n'


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("def shape(self, x): return x.width", "error: a primitive failed at mine.py:11: AttributeError: 'Wire'"),
        ("def shape(self, x): pass", "mine.Scale.shape must return a Wire, for instance x or x.with_features(8)"),
        ("def state(self, x): return []", "mine.Scale.state must return a dict of name: State(sizes), not []"),
        ("def state(self, x): return {'s': Parameter((1,), 0)}", "mine.Scale.state must return a dict of name: State"),
        ("def macs(self, x): pass", "mine.Scale.macs must return a number, not None"),
        ("def macs(self, x): exit(0)", "error: a primitive failed at mine.py:11: the module exits the program"),
    ],
)
def test_a_primitive_that_fails(method: str, message: str, run_cli: Run, folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN.replace("    start: float", f"    {method}\n    start: float"))
    done = run_cli("check", "spec.yaml", "--import", "mine", cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


WITH_A_BIAS = """
    parts: int = argument(1, "must divide the width")
    bias: bool = argument(False, "whether there is one")

    def parameters(self, x):
        weight = Parameter((x.features // self.parts,), Init("ones"))
        return {"weight": weight, "bias": weight} if self.bias else {"weight": weight}

"""


def test_an_initialiser_of_a_parameter_that_other_arguments_may_add(run_cli: Run, folder: Path) -> None:
    """The parameters for values that `shape` would reject may fail to compute; they are ignored."""
    before, _, after = PLUGIN.partition("    start: float")
    after = after.partition("    def forward")[2]
    (folder / "mine.py").write_text(f"{before}{WITH_A_BIAS}    def forward{after}")
    for name, valid in (("bias", True), ("bais", False)):
        text = TEXT.replace("{start: 2 * 3}", f"{{init: {{{name}: default}}}}")
        (folder / "spec.yaml").write_text(text)
        done = run_cli("check", "spec.yaml", "--import", "mine", cwd=folder)
        assert (done.returncode == 0) == valid, done.stderr
        assert valid or "has no parameter 'bais'" in done.stderr


def test_a_state_may_be_empty(run_cli: Run, folder: Path) -> None:
    """A convolution with a single tap has an empty state too."""
    state = "def state(self, x):\n        from seqblocks.state_layout import State\n        return {'s': State((0, 5))}"
    (folder / "mine.py").write_text(PLUGIN.replace("    start: float", f"    {state}\n    start: float"))
    assert run_cli("check", "spec.yaml", "--import", "mine", cwd=folder).returncode == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("(x.features,)", "parameters must return a dict of name: Parameter(sizes, Init(…))"),
        ("Parameter((x.features / 2,), Init('ones'))", "parameters must return a dict of name: Parameter(sizes"),
        ("Parameter((x.features,), Init('constant', 2.0))", "must return Init('constant', (value,)) with numbers, "),
        ("Parameter((x.features,), Init('normal', (0.0,)))", "must return Init('normal', (mean, std)) with numbers"),
        ("Parameter((x.features,), Init('onse'))", "parameters must return Init with one of zeros, ones,"),
    ],
)
def test_invalid_parameters(given: str, message: str, run_cli: Run, folder: Path) -> None:
    (folder / "mine.py").write_text(PLUGIN.replace('Parameter((x.features,), Init("constant", (self.start,)))', given))
    done = run_cli("check", "spec.yaml", "--import", "mine", cwd=folder)
    assert done.returncode == 2
    assert message in done.stderr


# --- needs: and the two other ways to import

NEEDY = TEXT.replace("seqblocks: 1\n", "seqblocks: 1\nneeds: [mine]\n")


def test_a_missing_plugin_is_one_error(run_cli: Run, folder: Path) -> None:
    (folder / "spec.yaml").write_text(NEEDY)
    done = run_cli("check", "spec.yaml", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error[E329]: the spec needs the plug-in 'mine', which was not imported\n")
    assert "= hint: if you trust it: `--import mine.py`, in Python `import mine`\n" in done.stderr
    assert done.stderr.endswith("\n\n1 error\n"), "the missing plug-in should be the only error"
    (folder / "mine.py").rename(folder / "other.py")
    done = run_cli("check", "spec.yaml", cwd=folder)
    assert "= hint: install the package that contains it, then import it: `--import mine`" in done.stderr


TABLE = '[tool.seqblocks]\nimport = ["mine"]\n'


IMPORTING = quick_and_slow(
    [
        (["--import", "mine.py"], {}, ""),
        ([], {"SEQBLOCKS_IMPORT": "mine"}, "not TOML, and not ours"),
        ([], {}, TABLE),
        (["--import", "mine"], {"SEQBLOCKS_IMPORT": "mine"}, TABLE),
    ],
    [
        (["--import", "mine"], {}, "[tool.other]\n"),
        ([], {"SEQBLOCKS_IMPORT": " mine.py ,"}, ""),
        ([], {}, '[tool]\nseqblocks = {import = ["mine.py"]}\n'),
    ],
)


@pytest.mark.parametrize(("words", "env", "project"), IMPORTING)
def test_the_user_imports(words: list[str], env: dict[str, str], project: str, run_cli: Run, folder: Path) -> None:
    (folder / "spec.yaml").write_text(NEEDY)
    (folder / "pyproject.toml").write_text(project)
    done = run_cli("check", "spec.yaml", *words, cwd=folder, env=env)
    assert (done.returncode, done.stderr) == (0, "hello\n")
    (folder / "sub" / "spec.yaml").write_text(NEEDY)
    from_parent = run_cli("check", "sub/spec.yaml", *words, cwd=folder, env=env)
    assert from_parent.returncode == 0, "the working directory should count, not the folder of the spec"


@pytest.mark.parametrize(
    ("project", "message"),
    [
        ("[tool.seqblocks]\nimport = [", "pyproject.toml is not valid TOML: "),
        ("[tool.seqblocks]\nimports = []\n", "[tool.seqblocks] has no key 'imports': did you mean 'import'?"),
        ("[tool.seqblocks]\nimport = 'mine'\n", 'import of [tool.seqblocks] must be a list of modules, for'),
        ("[tool.seqblocks]\nimport = [1]\n", "must be a list of modules"),
        ("[tool]\nseqblocks = 1\n", "tool.seqblocks must be a table"),
        ("[tool.seqblocks]\nimport = ['nonesuch']\n", "pyproject.toml: import nonesuch: there is no such module"),
        ("[tool.seqblocks]\nimport = ['sub/helper']\n", "a file with its extension: pyproject.toml: import sub"),
    ],
)
def test_a_malformed_table(project: str, message: str, run_cli: Run, folder: Path) -> None:
    (folder / "pyproject.toml").write_text(project)
    done = run_cli("check", "spec.yaml", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    record = run_cli("check", "spec.yaml", "--format", "json", cwd=folder)
    assert message in json.loads(record.stdout)["error"]


def test_a_variable_that_does_not_name_a_module(run_cli: Run, folder: Path) -> None:
    done = run_cli("check", "spec.yaml", cwd=folder, env={"SEQBLOCKS_IMPORT": "mnie.py"})
    assert done.returncode == 2
    assert done.stderr == "error: SEQBLOCKS_IMPORT mnie.py: there is no such file; did you mean 'mine.py'?\n"


def test_toml_is_read_only_where_there_is_a_table(run_cli: Run, folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "seqblocks"\n[tool.ruff]\n')
    run = "import sys; from seqblocks.cli.main import main; main(['check', '-q', 'mlstm_small'])"
    code = f"{run}; print('tomllib' in sys.modules or 'tomli' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for project, read in (("", "False"), (TABLE, "True")):
        with (folder / "pyproject.toml").open("a") as file:
            file.write(project)
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)
        assert done.stdout.split()[-1] == read, done.stderr


def test_an_installed_package_needs_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "seqblocks: 1\nneeds: [installed_ops]\nmodel: {input: {features: 5}, steps: [silu]}"
    with pytest.raises(check.SpecError, match="E329"):
        check.load_text(text)
    entry = EntryPoint("their_ops", "installed_ops.impl", op.PLUGIN_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    for name in ("their_ops", "installed_ops.impl", "installed_ops"):
        check.load_text(text.replace("installed_ops", name))
    assert "installed_ops.impl" not in sys.modules


def test_built_in_verbs_are_found_without_sources(tmp_path: Path) -> None:
    """All verbs are imported from an archive, where folders cannot be listed."""
    archive = tmp_path / "seqblocks.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for file in sorted((ROOT / "seqblocks").rglob("*.py")):
            target.write(file, file.relative_to(ROOT))
    code = "from seqblocks import op; assert op.find_primitive('silu'); print(op.__file__)"
    env = {**os.environ, "PYTHONPATH": str(archive)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(archive) in done.stdout


def test_a_primitive_has_few_methods_to_override() -> None:
    """What one part of the package alone asks for is in seqblocks/roles.py."""
    public = [name for name, each in vars(op.Op).items() if callable(each) and not name.startswith(("_", "model_"))]
    assert {"shape", "forward", "prepare_token"} <= {*public}
    assert len(public) <= 15, public

"""The command as a process: streams, signals, unusual systems, a missing torch, imports, speed."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from seqblocks.cli.arguments import VERBS
from seqblocks.cli.main import SHORT
from tests.processes import interrupted
from tests.sampled import slow
from tests.spec.texts import GOOD

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.skipif(os.name != "posix", reason="the lines are those of a POSIX shell")
@pytest.mark.parametrize(
    "words", ["--help", "check vil_tiny vil_small", "show vil_tiny", *map(slow, ("schema", "list"))]  # print as `show`
)
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.long)])
def test_a_broken_pipe_ends_quietly(words: str, unbuffered: str, root: Path) -> None:
    script = f'"$PYTHON" -m seqblocks.cli {words}; echo "status $?" >&2'
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHON": sys.executable, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(["sh", "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()  # type: ignore[union-attr]  # closed before the first byte
        assert child.stderr.read() == b"status 141\n"  # type: ignore[union-attr]


def test_an_interrupt_at_any_moment_ends_quietly(root: Path) -> None:
    ended = [interrupted(root, 0.02 * n, "check", "vil_tiny", "mamba_small", "xlstm_125m_7_1") for n in range(8)]
    assert ended[0] == (130, "")
    assert set(ended) <= {(130, ""), (0, "")}  # the process may have finished before a late interrupt


def test_commands_that_run_for_long_collect_garbage(root: Path, tmp_path: Path) -> None:
    """Analysed specs are cyclic garbage. A sweep of ten times as many points takes as much memory (in kB here)."""
    text = "seqblocks: 1\nlet: {dim: 8}\nmodel: {input: {features: 8}, steps: [linear: dim]}\n"
    (tmp_path / "a.yaml").write_text(text)
    env = {**os.environ, "PYTHONPATH": str(root)}
    code = (
        "import resource, sys, subprocess; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    taken = []
    for last in (50, 500):
        words = ("sweep", "a.yaml", "--set", f"dim=1..{last}", "--format", "csv")
        command = (sys.executable, "-c", code, sys.executable, "-m", "seqblocks", *words)
        done = subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
        taken.append(int(done.stdout))
    assert taken[1] < taken[0] + 3000  # without a collection, 450 more points took 8,600
    assert {*SHORT} < {*VERBS}
    assert not {"build", "serve", "lsp", "probe", "try", "sweep", "fit"} & {*SHORT}


def test_descriptions_do_not_depend_on_docstrings(root: Path) -> None:
    """With -OO, Python leaves them out."""
    env = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["-m", "seqblocks", "ops", "mlstm"]
    made = [
        subprocess.run([sys.executable, *options, *command], env=env, capture_output=True, text=True, check=True).stdout
        for options in ([], ["-OO"])
    ]
    assert "a matrix memory" in made[0]
    assert made[0] == made[1]


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


def test_check_leaves_slow_imports_alone(root: Path) -> None:
    """`check` does not load them, nor does it search for pydantic's plug-ins, which is slow."""
    code = (
        "import sys; before = set(sys.modules); from seqblocks.cli import main; main._disable_pydantic_plugins();"
        "main.main(['check', 'ttt_small']); new = set(sys.modules) - before;"
        "sys.exit(bool({'torch', 'rich', 'numpy', 'einops', 'importlib.metadata'} & new))"
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
@pytest.mark.skipif(os.name != "posix", reason="only POSIX systems report the CPU time of children")
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
    "a name that is too long for the system": (
        "seqblocks check $(printf 'x/%.0s' $(seq 3000))y.yaml", 2, "File name too long",
    ),
    "a part of a name that is too long": ("seqblocks check $(printf 'x%.0s' $(seq 300)).yaml", 2, "File name too long"),
    "a name that is not UTF-8": (
        r"seqblocks check $(printf '\377').yaml", 2, "cannot be read: No such file or directory",
    ),
    "a file below a file": ("seqblocks check good.yaml/x.yaml", 2, "Not a directory"),
    "a folder": ("seqblocks check .", 2, "'.' cannot be read: Is a directory"),
    "a folder with a spec": ("seqblocks check saved", 2, "hint: this is a folder; its spec is 'saved/spec.yaml'"),
    "a folder with a bundled name": ("mkdir vil_tiny; seqblocks check vil_tiny", 0, "ok"),
    "the root": ("seqblocks check /", 2, "'/' cannot be read: Is a directory"),
    "a name that begins with a dash": ("seqblocks check -dash.yaml", 2, "SPEC"),
    "the same, after two dashes": ("seqblocks check -- -dash.yaml", 0, "-dash.yaml: ok"),
    "a working directory that is gone": ("cd gone; rmdir ../gone; seqblocks check vil_tiny", 0, "ok"),
    "an import from there": ("cd gone; rmdir ../gone; seqblocks check vil_tiny --import x.py", 2, "removed"),
    "a text from there": ("cd gone; rmdir ../gone; seqblocks check - < ../good.yaml", 0, "ok"),
    "docstrings stripped": ("PYTHONOPTIMIZE=2 seqblocks ops", 0, "layer_norm"),
    "warnings that are errors": ("PYTHONWARNINGS=error seqblocks check good.yaml", 0, "36 parameters"),
    "development mode": ("PYTHONDEVMODE=1 seqblocks check good.yaml", 0, "36 parameters"),
    "no HOME": ("env -u HOME -u USER $SEQBLOCKS check good.yaml", 0, "36 parameters"),
    "few files": ("ulimit -n 8; seqblocks check good.yaml", 0, "36 parameters"),
    "no room in files": ("ulimit -f 0; seqblocks ops > list.txt", 4, "cannot be written: File too"),
    "standard input twice": ("seqblocks check - - < good.yaml", 2, "standard input can be read only once"),
    "an override without a value": ("seqblocks check good.yaml --set model.x=", 1, "hint: --set model.x=…"),
    "two overrides in one": ("seqblocks check good.yaml --set 'a=5, b.c=[2, 3]'", 1, "--set a=5 --set b.c=[2, 3]"),
    "two overrides after a call": ("seqblocks check good.yaml --set 'a=max(2, 3),b=4'", 1, "a=max(2, 3) --set b=4"),
    "a description with a comma": ("seqblocks check mlstm_small --set 'about=a, b=2'", 0, "580,136 parameters"),
    "a schema for standard input": ("seqblocks schema --for - < good.yaml", 0, '"dim"'),
    "a schema for nothing": ("seqblocks schema --for ''", 2, "--for has no value"),
    "a module that closes the streams": ("seqblocks check good.yaml --import closing.py", 0, "36 parameters"),
    "the same, and a fault": ("seqblocks check bad.yaml --import closing.py", 1, ""),
    "a module that replaces the streams": ("seqblocks check good.yaml --import replacing.py", 0, "36 parameters"),
    "the same with a fault": ("seqblocks check bad.yaml --import replacing.py", 1, "did you mean 'linear'?"),
    "a module that never returns": ("seqblocks check good.yaml --import deep.py", 2, "deep.py:1: RecursionError"),
    "a name with a null byte in --set": (
        "seqblocks check good.yaml --set $(printf 'dim=\\377')", 1, "cannot be read as YAML",
    ),
    "a huge number": ("seqblocks check good.yaml --set dim=$(printf '9%.0s' $(seq 5000))", 1, "too long"),
    "terminals of one column": ("COLUMNS=1 seqblocks --help", 0, "usage: seqblocks"),
}
REPEATED = (
    "a part of a name that is too long", "a folder", "the same, after two dashes", "an import from there",
    "development mode", "two overrides after a call", "a schema for nothing", "the same, and a fault",
    "the same with a fault", "a name with a null byte in --set", "docstrings stripped",
)  # like another case or test


@pytest.mark.skipif(os.name != "posix", reason="the lines are those of a POSIX shell")
@pytest.mark.parametrize("name", [slow(name) if name in REPEATED else name for name in UNUSUAL])
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
    script = f"seqblocks() {{ {command} \"$@\"; }}\nSEQBLOCKS='{command}'\n{line}"
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, check=False)
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == status, printed
    assert message in printed
    assert "Traceback" not in printed
    assert "internal error" not in printed


@pytest.mark.skipif(os.name != "posix", reason="the lines are those of a POSIX shell")
@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("ops >&-", 0, ""),
        ("check good.yaml >&- 2>&-", 0, ""),
        ("check bad.yaml 2>&-", 1, ""),
        ("check - <&-", 1, "the spec is empty"),
        ("show vil_tiny > /dev/full", 4, "error: the result cannot be written: No space left on device\n"),
        slow(("sweep good.yaml --set dim=4 --format csv > /dev/full", 4,
              "error: the result cannot be written: No space left on device\n")),
        slow(("schema > /dev/full", 4, "error: the result cannot be written: No space left on device\n")),
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

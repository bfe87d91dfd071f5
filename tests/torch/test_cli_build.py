"""`seqblocks build`: the table, the counts, the devices."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import interrupted

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("name", "arguments", "width"),
    [
        ("vil_tiny_100", ["vil_tiny"], 100),
        ("vil_tiny_80", ["vil_tiny", "--depth", "3"], 80),
        ("vil_tiny_140", ["vil_tiny", "--batch", "8", "--dtype", "bf16"], 140),
        ("vil_tiny_80_deep", ["vil_tiny"], 80),
        ("xlstm_80", ["xlstm_125m_7_1", "--device", "meta"], 80),
        ("xlstm_60", ["xlstm_125m_7_1", "--device", "meta"], 60),
        ("vil2_digits_100", ["vil_digits", "--image-size", "12x16"], 100),
        ("vim_tiny_80", ["vim_tiny", "--batch", "2", "--set", "drop_path=0.1", "--set", "classes=10"], 80),
        ("block_120", ["vil_small_block", "--length", "2048", "--batch", "2"], 120),
    ],
)
def test_the_table(name: str, arguments: list[str], width: int, run_main: Run, root: Path, update_golden: bool) -> None:
    done = run_main("build", *arguments, "--summary", env={"COLUMNS": str(width)})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines()[1:])) <= width
    golden = root / "tests" / "golden" / "cli" / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
    if update_golden:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ([0, 1], "0-1"),
        ([0, 2], "0, 2"),
        ([0, 1, 2, 3, 4], "0-4"),
        ([0, 1, 2, 4], "0-2, 4"),
        ([0, 2, 3, 4], "0, 2-4"),
        ([0, 2, 4], "0, 2, 4"),
        ([1, 3, 5, 7, 9], "1, 3, ..., 9"),
        ([0, 1, 2, 4, 5, 6, 8, 9, 12, 13], "0-2, 4-6, 8-9, 12-13"),
        ([0, 1, 3, 4, 6, 7, 9, 10, 12, 13], "0-1, 3-4, ..., 12-13"),
    ],
)
def test_layers_by_ranges(numbers: list[int], shown: str) -> None:
    from seqblocks.descriptions.table import _ranges

    assert _ranges(numbers) == shown


@pytest.mark.parametrize(
    ("own", "rows"),
    [
        ("all", [("fwd, rev (2 x)", 36)]),
        ("none", [("fwd", 36), ("rev", 0)]),
        ("[a]", [("fwd", 36), ("rev", 12)]),
        ("[b.bias]", [("fwd", 36), ("rev", 4)]),
    ],
)
def test_parameters_of_a_scan_of_two_orders(
    own: str, rows: list[tuple[str, int]], run_main: Run, tmp_path: Path
) -> None:
    steps = "[{causal_conv: {kernel: 2, name: a}}, {causal_conv: {kernel: 5, name: b}}]"
    scan = f"scan: {{order: [forward, reverse], own: {own}, steps: {steps}}}"
    (tmp_path / "two.yaml").write_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{{{scan}}}]}}\n")
    data = json.loads(run_main("build", "two.yaml", "--format", "json", cwd=tmp_path).stdout)
    (found,) = data["steps"]
    shown = [(", ".join(row["names"]), row["params"]) for row in found["steps"]]
    assert shown == [(name.removesuffix(" (2 x)"), params) for name, params in rows]
    assert found["params"] == sum(row["params"] * len(row["names"]) for row in found["steps"])
    assert found["macs"] == sum(row["macs"] * len(row["names"]) for row in found["steps"]) == 2 * 4 * 7
    table = run_main("build", "two.yaml", "--summary", cwd=tmp_path).stdout
    for name, _ in rows:
        assert f"\n  {name} " in table


@pytest.mark.parametrize(
    ("spec", "per", "tokens"), [("vil_digits", "image", 16), ("centaurus_keywords", "sequence", 16000)]
)
def test_figures_of_a_classifier_are_per_input(spec: str, per: str, tokens: int, run_main: Run) -> None:
    data = json.loads(run_main("build", spec, "--format", "json").stdout)
    assert data["counted_per"] == per
    # The figure per token, times the tokens, is the figure per input: tokens of all steps here divide these figures.
    assert data["input_macs"] == pytest.approx(data["macs_per_token"] * tokens, rel=1e-12)
    assert data["input_macs"] == sum(row["input_macs"] for row in data["steps"])
    table = run_main("build", spec, "--summary", "--batch", "3").stdout
    assert f"MACs/{per}" in table
    assert f"FLOPs per {per} ({tokens:,} tokens); " in table
    assert "MACs for 3\n" in table


@pytest.mark.parametrize("columns", ["0", "1", "20", "-3", "x"])
def test_a_terminal_too_narrow_for_a_table(columns: str, run_main: Run) -> None:
    """Wrapped lines are more readable than table cells without a letter."""
    lines = run_main("build", "vil_digits", "--summary", env={"COLUMNS": columns}).stdout.splitlines()
    (row,) = (line for line in lines if line.startswith("patch_embed"))
    assert "[batch, 16, 48]" in row
    assert "240" in row.split()
    assert "parameters  73,626" in "\n".join(lines)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_long_name_is_cut_before_its_verb(encoding: str, run_main: Run, tmp_path: Path) -> None:
    step = "linear: {features: 1234, name: a_name_that_says_all_there_is_to_say_of_a_step}"
    (tmp_path / "long.yaml").write_text(f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{{{step}}}]}}\n")
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding)) as printed:
        run_main("build", "long.yaml", "--summary", cwd=tmp_path, env={"COLUMNS": "60"})
        printed.flush()
        lines = printed.buffer.getvalue().decode(encoding).splitlines()
    row = next(line for line in lines if line.startswith("a_name"))
    assert ("...: linear " if encoding == "ascii" else "…: linear ") in row
    assert "[batch, seq, 1234]" in row
    assert row.endswith("11,106")
    assert len(row) <= 60


def test_build_reports_the_model(run_main: Run) -> None:
    assert run_main("build", "vil_digits").stdout == "vil_digits: built, 73,626 parameters, float32 on cpu, 295 kB\n"
    data = json.loads(run_main("build", "vil_digits", "--format", "json", "--dtype", "f64").stdout)
    assert (data["built_params"], data["params"], data["params_bytes"]) == (73626, 73626, 8 * 73626)
    assert data["steps"][0]["names"] == ["patch_embed"]


@pytest.mark.slow
def test_torch_without_numpy_prints_no_warning(run_cli: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    bare = [sys.executable, "-c", "import torch"]
    errors = subprocess.run(bare, env={**os.environ, **env}, capture_output=True, text=True, check=True).stderr
    assert "Failed to initialize NumPy" in errors  # otherwise there is nothing to test
    done = run_cli("build", "vil_digits", env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_missing_packages_are_reported(run_cli: Run, run_main: Run) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("tests the error without a CUDA device, and this machine has one")
    done = run_main("build", "vil_digits", "--device", "cuda")
    assert done.returncode == 4
    assert "device 'cuda' cannot be used here" in done.stderr
    assert run_main("build", "vil_digits", "--device", "gpu9").returncode == 2
    huge = run_cli("build", "vil_small_block", "--set", "dim=400_000")
    assert huge.returncode == 4
    assert "--device meta" in huge.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moments", [4, pytest.param(50, marks=pytest.mark.long)])
def test_an_interrupt_at_any_moment_of_a_build_ends_quietly(moments: int, root: Path) -> None:
    """The import of torch turns KeyboardInterrupt into errors of its own, so interrupts are tested there too."""
    ended = [interrupted(root, 3 / moments * n, "build", "vil_digits", "--summary") for n in range(moments)]
    assert ended[0] == (130, "")
    assert set(ended) <= {(130, ""), (0, "")}  # the process may have finished before a late interrupt


SEVEN_BILLION = """
seqblocks: 1
use: [vil]
let: {dim: 4096}
model:
  input: {tokens: 50304}
  steps:
    - embed: {features: dim}
    - repeat: {name: blocks, times: 64, steps: [{vil: {dim: dim, heads: 8}}]}
    - layer_norm: {bias: false}
    - unembed: {bias: false}
"""

# On Linux a process starts with the peak memory of its parent, and a pytest that has run other tests is larger than
# the
# process measured here. So a bare interpreter starts the command, and prints its CPU time in seconds and its peak
# memory
# in KiB.
PEAK = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(child.pid, 0)
print(usage.ru_utime + usage.ru_stime, usage.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
@pytest.mark.timing
def test_seven_billion_parameters_on_meta(tmp_path: Path, root: Path) -> None:
    """At most 8 s of CPU time and 1 GB."""
    (tmp_path / "big.yaml").write_text(SEVEN_BILLION)
    command = [
        sys.executable,
        "-m",
        "seqblocks.cli",
        "build",
        str(tmp_path / "big.yaml"),
        "--device",
        "meta",
        "--summary",
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-c", PEAK, *command], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "6,88" in done.stdout or "7," in done.stdout
    seconds, peak = map(float, done.stderr.split()[-2:])
    megabytes = peak / 1024
    assert megabytes > 50  # torch alone uses more: a smaller figure would measure something else
    print(f"{seconds:.1f} s, {megabytes:.0f} MB")
    assert seconds < 8  # 1.1 s on an idle machine
    assert megabytes < 1024

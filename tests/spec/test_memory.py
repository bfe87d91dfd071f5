"""`seqblocks memory`: what it prints, its limit, and its faults. tests/torch/test_memory.py compares with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import seqblocks
from seqblocks.architect.memory import KINDS, largest_batch, read_bytes
from seqblocks.op import PRIMITIVES, Op, load_builtin

Run = Callable[..., subprocess.CompletedProcess[str]]

WIDE = """
seqblocks: 1
let: {dim: 64}
model:
  input: {tokens: 100}
  steps:
    - embed: {features: dim}
    - repeat: {as: layers, times: 3, steps: [{residual: [layer_norm, {swiglu: {hidden: 2 * dim}}]}]}
    - unembed
"""


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    (tmp_path / "wide.yaml").write_text(WIDE)
    return tmp_path


def test_a_linear_map_by_hand() -> None:
    """One map of 2 tokens from 3 to 5 features, and AdamW. The mean square lies in memory as large as the output."""
    text = "seqblocks: 1\nmodel: {input: {features: 3, length: 2}, steps: [{linear: {features: 5}}]}\n"
    _, model = seqblocks.load_text(text)
    found = seqblocks.memory(model, batch=1)
    weights = 4 * (5 * 3 + 5)
    assert found.weights_bytes == found.gradients_bytes == weights
    assert found.optimizer_bytes == 2 * weights + 2 * 4
    # Weights, gradients, moments, steps, the root and the denominator of the larger weight, and the loss.
    update = 4 * weights + 2 * 4 + 2 * 4 * 15 + 4 * 2 * 5
    assert (found.phase, found.peak_bytes) == ("optimizer", update)
    assert found.activations_bytes == 4 * 2 * 5  # the output, for the mean square; the input is not counted


def test_rows_add_up(wide: Path) -> None:
    found = seqblocks.memory(wide / "wide.yaml", batch=32, length=64)
    for depth in (1, 2, None):
        rows = [row for _, row in found.rows(depth)]
        assert {kind: sum(row[kind] for row in rows) for kind in KINDS} == found.peak
    assert sum(found.peak.values()) == found.peak_bytes
    assert "layers.0 to 2" in found.text()
    assert found.csv().splitlines()[0] == "step,weights,gradients,optimizer,activations,temporaries,sum"
    assert found.csv().splitlines()[-1].startswith("loss,0,")


def test_checkpointing_keeps_one_layer(wide: Path) -> None:
    whole, again = (
        seqblocks.memory(wide / "wide.yaml", batch=8, length=64, checkpoint=how) for how in ("none", "blocks")
    )
    assert again.activations_bytes < whole.activations_bytes / 2
    assert again.peak_bytes < whole.peak_bytes


def test_sixteen_bits_take_half(wide: Path) -> None:
    full, half = (seqblocks.memory(wide / "wide.yaml", batch=8, length=64, dtype=x) for x in ("float32", "bf16"))
    assert half.weights_bytes * 2 == full.weights_bytes
    assert half.activations_bytes < 0.6 * full.activations_bytes


@pytest.mark.parametrize("limit", [500_000, 700_000, 3e6, 12_345_678])
def test_the_next_larger_batch_does_not_fit(limit: float, wide: Path) -> None:
    best = largest_batch(limit, wide / "wide.yaml", length=32)
    if best is None:
        assert seqblocks.memory(wide / "wide.yaml", length=32).peak_bytes > limit
        return
    assert best.peak_bytes <= limit
    assert seqblocks.memory(wide / "wide.yaml", batch=best.batch + 1, length=32).peak_bytes > limit


def test_command(run_main: Run, wide: Path) -> None:
    command = ("memory", "wide.yaml", "--batch", "4", "--length", "32")
    done = run_main(*command, "--format", "json", "--fits", "1GB", cwd=wide)
    data = json.loads(done.stdout)
    assert (done.returncode, data["ok"], data["fits"]) == (0, True, True)
    assert data["peak_bytes"] == seqblocks.memory(wide / "wide.yaml", batch=4, length=32).peak_bytes
    done = run_main(*command, cwd=wide)
    assert "peak of a training step" in done.stdout
    done = run_main(*command, "--fits", "800kB", cwd=wide)
    assert done.returncode == 1
    assert "exceeds 800 kB" in done.stderr
    assert run_main(*command, "--format", "csv", cwd=wide).stdout.startswith("step,weights")
    assert run_main(*command, "--format", "markdown", cwd=wide).stdout.startswith("| step |")
    assert run_main(*command, "--quiet", cwd=wide).stdout == ""


def test_an_interrupted_search_leaves_the_estimate(
    run_main: Run, wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []

    def interrupted(part: float) -> None:
        parts.append(part)
        if len(parts) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("seqblocks.cli.memory.progress", lambda options, what: nullcontext(interrupted))
    command = ("memory", "wide.yaml", "--batch", "4", "--length", "32", "--fits", "1GB", "--format", "json")
    done = run_main(*command, cwd=wide)
    data = json.loads(done.stdout)
    assert (done.returncode, done.stderr, data["largest_batch"]) == (130, "", None)
    assert data["peak_bytes"] == seqblocks.memory(wide / "wide.yaml", batch=4, length=32).peak_bytes
    assert parts == sorted(parts)
    assert 0 < parts[0] < parts[-1] < 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one, as in --length 1024"),
        (["--length", "5000000"], "at most 4,194,304 tokens"),
        (["--length", "32", "--fits", "24XB"], "a size is written as 24GB"),
        (["--length", "32", "--dtype", "float7"], "not a supported dtype"),
        (["--length", "32", "--optimizer", "adam"], "invalid choice: 'adam'"),
        (["--length", "32", "--batch", "0"], "not a whole number"),
    ],
)
def test_faults(words: list[str], message: str, run_main: Run, wide: Path) -> None:
    done = run_main("memory", "wide.yaml", *words, cwd=wide)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_without_so_many_positions(run_main: Run) -> None:
    done = run_main("memory", "transformer_125m", "--length", "1025")
    assert (done.returncode, done.stderr) == (2, "error: the model has positions for 1,024 tokens, not for 1,025\n")
    (facts,) = seqblocks.compare("transformer_125m", lengths=(1024, 1025)).facts
    assert facts["macs_per_token@1024"] > 1e8
    assert facts["macs_per_token@1025"] is None


def test_every_verb_declares_its_memory() -> None:
    load_builtin()
    ops = [op for op in PRIMITIVES.values() if op.builtin]
    missing = [op.verb for op in ops if op.memory is Op.memory]
    assert not missing, f"define `memory` (CONTRIBUTING.md) for {', '.join(missing)}"


def test_sizes() -> None:
    assert [read_bytes(text) for text in ("24GB", "1.5 MiB", "1_000", "8b")] == [24e9, 1.5 * 2**20, 1000, 8]


def test_without_torch(wide: Path) -> None:
    program = "import sys; from seqblocks.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", program, "memory", "wide.yaml", "--length", "32", "--fits", "1GB"]
    done = subprocess.run(command, cwd=wide, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

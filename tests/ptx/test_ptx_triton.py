"""Compiled Triton kernels in the interpreter of PTX: planted faults, products, and all kernels of the package.

Each test is a process of its own, because it needs Triton without its interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.slow,
]
ARCHS = ("sm_80", "sm_90")
OPS = ("causal_conv", "centaurus", "head_norm", "headwise_linear", "linear_attention", "mlstm", "residual_norm",
       "selective_scan", "slstm")
# What a GPU may choose, for each architecture. docs/kernels/compiled_code.md says how to run the others.
CHOICES = {"sm_80": ["--order", "up", "--copies", "late"], "sm_90": ["--order", "down", "--copies", "early"]}
SHORT = {  # cases that CI runs
    "sm_80": ["head_norm f16 gated", "causal_conv f32 2 taps", "slstm bf16 D=16", "GLA f32 S=17", "scan f32 N=1 S=17"],
    "sm_90": ["residual_norm f16", "headwise_linear bf16 x f32", "centaurus f32 dws M=1", "mlstm bf16 32",
              "delta bf16 S=1"],
}


def output(root: Path, cache: Path, *words: str, right: bool = True) -> str:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == right, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90"])
def test_planted_faults_products_and_replays(arch: str, root: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads(output(root, tmp_path, "tests.ptx.planted", arch))
    kinds = {
        "with a barrier": [],
        "without a barrier": ["read after another warp's write", "write after another warp's read"],
        "two programs overlap": ["write after another program's write"],
        "out of bounds": ["global store out of bounds: copy(y) has 920 bytes"],
        "nothing wrote it": ["read of memory that nothing wrote"],
        "misaligned": ["global load misaligned: 16 bytes at 4 of 16 at copy"],
        "transposed": [],
        "no barriers of the compiler": ["read after another warp's write", "read of shared memory that nothing wrote",
                                        "write after another warp's read"],
        "no wait for copies": ["read of shared memory that nothing wrote"],
    }
    assert {name: sorted({text.partition(",")[0] for text in texts}) for name, (texts, _) in found["faults"].items()
            } == kinds
    for name, (texts, line) in found["faults"].items():
        assert not line or any(line in text for text in texts), (name, texts, line)
    for name, (error, notes) in found["products"].items():
        assert error <= 128 * 2.0**-24, name  # sums of at most 128 exact products, in float32
        assert not notes, (name, notes)
    assert found["replayed"] == {"y": 1}


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90"])
def test_short_cases(arch: str, root: Path, tmp_path: Path) -> None:
    text = output(root, tmp_path, "tests.ptx", *SHORT[arch], "--arch", arch, *CHOICES[arch])
    assert text.count(f" {arch} ok ") >= len(SHORT[arch])


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_all_cases(op: str, arch: str, root: Path, tmp_path: Path) -> None:
    """Every case that takes no minutes, and every kernel that is compiled ahead of time."""
    text = output(root, tmp_path, "tests.ptx", "--op", op, "--arch", arch, *CHOICES[arch], "--kernels")
    ran = {each.split()[0] for each in text.partition("kernels:")[2].splitlines()[0].split(",")}
    lines = (root / "tests/golden/triton" / f"{op}.txt").read_text("utf-8").splitlines()[1:]
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert {kernel for _, kernel, of, *_ in rows if of == arch} <= ran


@pytest.mark.long
def test_a_missing_wait_is_reported(root: Path, tmp_path: Path) -> None:
    """The faults that `python -m tests.ptx.mutations` plants are too many for a test; this is one of them."""
    text = output(root, tmp_path, "tests.ptx", "GDN f32 32", "--omit", "waits", right=False)
    assert "read of shared memory that nothing wrote" in text

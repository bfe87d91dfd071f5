"""Failures say where results differ (benchmarks/differences.py), and launches can be recorded (launches.py)."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.differences import differences, pattern
from benchmarks.launches import Launch, chunks, launches, load_memory, pack, save, save_code, tensor_of
from tests.gpu_machine import plain_environment
from tests.kernels.conformance import (
    IMPLEMENTATIONS,
    INTERPRETED,
    SINGLE,
    Subject,
    assert_close,
    assert_equal,
    transposed,
)
from tests.kernels.families import CAUSAL_CONV, MLSTM


def test_a_wrong_tile_shows_in_the_positions() -> None:
    expected = torch.zeros(2, 300, 3)
    found = expected.clone()
    found[1, [64 * chunk + row for chunk in (0, 2, 4) for row in range(32, 40)]] = 0.5
    found[1, 32, 0] = float("nan")
    count, *axes = differences(found, expected, 0.25, [256]).splitlines()
    count, first = count.split("; first ")
    assert count == "72 of 1,800 numbers differ by more than 0.25, at most by 0.5, 1 not finite"
    assert first == "[1, 32, 0] is nan instead of 0; [1, 32, 1] is 0.5 instead of 0; [1, 32, 2] is 0.5 instead of 0"
    assert axes == [
        "    axis 0 of 2: 1",
        "    axis 1 of 300: 32-39, 160-167, 288-295; modulo 16: 0-7; modulo 64: 32-39; modulo 256: 32-39, 160-167",
        "    axis 2 of 3: all",
    ]
    assert differences(expected + 0.25, expected, 0.25) == ""
    assert differences(torch.zeros(0), torch.zeros(0), 0.0) == ""


def test_scattered_positions_are_counted() -> None:
    assert pattern([*range(0, 40, 3)], 50, [16]) == (
        "0, 3, 6, 9, 12, 15, 18, 21, … (14 in all); modulo 16: 0-9, 11-12, 14-15"
    )


def test_all_results_that_differ_are_named() -> None:
    right = {"out": torch.ones(4), "gradient of x": torch.ones(4), "gradient of y": torch.ones(4)}
    wrong = {**right, "out": torch.tensor([1.0, 1.0, 2.0, 1.0]), "gradient of y": torch.zeros(4)}
    with pytest.raises(AssertionError, match=r"out: 1 of 4 .*\n.*\ngradient of y: 4 of 4 ") as caught:
        assert_close(wrong, right, 0.1)
    assert "gradient of x" not in str(caught.value)
    with pytest.raises(AssertionError, match=r"out: 1 of 4 numbers differ by more than 0, .* \[2\] is 2 instead of 1"):
        assert_equal(wrong, right)


@INTERPRETED
def test_a_recorded_launch_can_be_repeated(tmp_path: Path) -> None:
    """Each launch, started from the memory before it, writes the memory after it, views and offsets included."""
    subject = Subject(CAUSAL_CONV, "silu", IMPLEMENTATIONS["triton"])
    x = subject.leaves(subject.inputs(batch=2, S=5, D=4), SINGLE[0])
    with launches(memory=True) as found:
        out = subject({name: transposed(t) for name, t in x.items()})
        torch.autograd.grad(out["out"].sum(), [*x.values()], allow_unused=True)
    assert len(found) >= 2
    save(found, tmp_path, "tests/a file.py::test[conv-float32]")
    (file,) = tmp_path.rglob("launches.pkl.gz")
    assert file.parent.name == "tests-a-file.py-test-conv-float32"
    changed = 0
    for name, module, grid, before, options, after in load_memory(file):
        arguments, expected = [*map(tensor_of, before)], [*map(tensor_of, after)]
        getattr(importlib.import_module(module), name)[grid](*arguments, **options)
        for a, b, old in zip(arguments, expected, before, strict=True):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
                changed += not torch.equal(b.nan_to_num(7.0), tensor_of(old).nan_to_num(7.0))
    assert changed >= 2


@INTERPRETED
def test_a_launch_that_fails_is_recorded_with_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject(CAUSAL_CONV, "silu", IMPLEMENTATIONS["triton"])
    x = subject.exact(batch=1, S=3, D=4)
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(interpreted, "run", broken)
    with pytest.raises(RuntimeError, match="illegal"), launches(memory=True) as found:
        subject(x)
    save(found, tmp_path, "crash")
    ((_, _, _, before, _),) = load_memory(tmp_path / "crash" / "launches.pkl.gz")
    assert before


@INTERPRETED
def test_the_chunks_of_a_call_are_known() -> None:
    subject = Subject(MLSTM, "exp", IMPLEMENTATIONS["triton"])
    with launches() as found, torch.no_grad():
        subject(subject.exact(batch=1, S=20))
    assert chunks(found)
    assert all(value >= 16 for value in chunks(found))


def test_compiled_code_is_kept_and_packed(tmp_path: Path) -> None:
    code = {"ttir": "not kept", "ttgir": "module {}", "ptx": ".version 8.7", "cubin": b"\x7fELF" + bytes(100)}
    compiled = SimpleNamespace(asm=code, metadata={"num_warps": 4})
    launch = Launch("outputs", "a.module", (1,), {"L": 64}, ("float32",), compiled)
    save_code([launch, launch], tmp_path / "code")
    assert sorted(path.suffix for path in (tmp_path / "code").iterdir()) == [".cubin", ".json", ".ptx", ".ttgir"]
    (tmp_path / "code" / "launches.pkl.gz").write_bytes(bytes(20_000))
    assert pack(tmp_path / "code", tmp_path / "all.tar.gz", most=10_000) == ["launches.pkl.gz"]
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        assert len(archive.getnames()) == 4


@INTERPRETED
@pytest.mark.slow
def test_launches_of_a_test_are_recorded_on_request(root: Path, tmp_path: Path) -> None:
    name = "tests/kernels/test_selective_scan.py::test_tokens_at_a_time[1-1]"
    command = [sys.executable, "-m", "pytest", "-m", "", "--record-launches", str(tmp_path), name]
    done = subprocess.run(
        command, cwd=root, env=plain_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.rglob("launches.pkl.gz")
    assert len(load_memory(file)) >= 2

"""The benchmark runs, its candidates compute the same, and it says what is absent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


def imported(root: Path, name: str) -> ModuleType:
    """A benchmark as a module; beside it lies what it shares with the others."""
    folder = root / "benchmarks"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cpu(root: Path) -> ModuleType:
    return imported(root, "cpu")


@pytest.fixture(scope="module")
def gpu(root: Path) -> ModuleType:
    return imported(root, "gpu")


@pytest.mark.parametrize("mode", ["neck", "pointwise", "dws", "full"])
def test_the_plain_fft_is_the_same_layer(cpu: ModuleType, mode: str) -> None:
    """float32 FFTs on both sides: 2^-24 of the largest value times some tens of roundings."""
    torch.manual_seed(0)
    ours, leaves = cpu.centaurus_ours(mode)(96)
    torch.manual_seed(0)
    plain, others = cpu.centaurus_fft(mode)(96)
    assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))
    a, b = ours(), plain()
    assert (a - b).abs().max() <= 100 * 2**-24 * b.abs().max()


@pytest.mark.parametrize("peer", ["mlstm_native", "mlstm_parallel"])
def test_the_peers_compute_the_same_mlstm(cpu: ModuleType, peer: str) -> None:
    """Where they are installed: float32, and their stabilisers differ, which eps shows (1e-6)."""
    pytest.importorskip({"mlstm_native": "mlstm_kernels", "mlstm_parallel": "xlstm"}[peer], reason="a peer, optional")
    ours, theirs = cpu.mlstm_ours(128)[0](), getattr(cpu, peer)(128)[0]().transpose(1, 2)
    assert (ours - theirs).abs().max() <= 1e-4 * ours.abs().max()


def test_it_runs_and_writes_a_table(root: Path, tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("memory is read from /proc, which is Linux's")
    command = [sys.executable, "benchmarks/cpu.py", "--case", "centaurus_dws", "--case", "slstm", "--length", "32"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [*command, "--budget", "0.2", "--out", str(tmp_path)],
        cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip())
    text = page.read_text(encoding="utf-8")
    assert "| 32 | plain FFT |" in text
    if importlib.util.find_spec("xlstm") is None:
        assert "| 32 | xlstm | not installed | | |" in text
    records = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert {r["candidate"] for r in records} == {"seqblocks", "plain FFT", "xlstm"}
    assert all(r["left_out"] or r["both_ms"] > 0 for r in records)


def test_a_floor_says_what_the_case_costs(cpu: ModuleType) -> None:
    ours = {"case": "mlstm", "length": 2048, "candidate": "seqblocks", "forward_ms": 20.0, "both_ms": 60.0}
    lines = cpu.growth([ours])
    assert "matrix products of the mLSTM at 2,048 tokens" in lines[-1]


def rehearse(root: Path, tmp_path: Path, *cases: str) -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is for Linux")
    arguments = [word for case in cases for word in ("--case", case)]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--rehearse", "--out", str(tmp_path), *arguments],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip())
    text = page.read_text(encoding="utf-8")
    assert "no figure means anything" in text
    told: dict[str, Any] = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert told["left_out"] == []
    return told


def test_the_gpu_benchmark_can_be_rehearsed(root: Path, tmp_path: Path) -> None:
    told = rehearse(root, tmp_path, "conv", "mlstm_step")
    assert [(r["case"], r["ok"]) for r in told["checks"]] == [("mlstm_step", True), ("conv", True)]
    ours = [r for r in told["times"] if r["candidate"] == "seqblocks"]
    assert [sorted(r.keys() & {"forward_ms", "both_ms"}) for r in ours] == [["forward_ms"], ["both_ms", "forward_ms"]]
    assert "not installed" in [r["left_out"] for r in told["times"]] or importlib.util.find_spec("causal_conv1d")


@pytest.mark.slow
def test_the_whole_gpu_benchmark_can_be_rehearsed(gpu: ModuleType, root: Path, tmp_path: Path) -> None:
    told = rehearse(root, tmp_path)
    assert {r["case"] for r in told["checks"]} == {r["case"] for r in told["times"]} == set(gpu.CASES)


def test_the_gpu_benchmark_sees_what_is_wrong(gpu: ModuleType) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is for Linux")
    case = gpu.CASES["conv"]
    wrong = case._replace(ours=lambda x, backend: case.ours(x, backend) * (1.01 if backend == "triton" else 1))
    shape = gpu.rehearsed(case.small)
    assert max(gpu.check(case, torch.float32, "cpu", shape).values()) <= 1e-4
    assert gpu.check(wrong, torch.float32, "cpu", shape)["output 0"] > 5e-3


def test_the_gpu_benchmark_tells_inputs_apart_and_sees_what_is_no_number(gpu: ModuleType) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is for Linux")
    case = gpu.CASES["mlstm"]
    shape = {"B": 1, "S": 8, "H": 1, "DK": 8, "DV": 8}

    def swapped(x: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
        turned = {**x, "q": x["k"], "k": x["q"]} if backend == "triton" else x
        return torch.as_tensor(case.ours(turned, "reference"))

    assert gpu.check(case._replace(ours=swapped), torch.float32, "cpu", shape)["output 0"] > 1e-2
    nothing = case._replace(ours=lambda x, b: case.ours(x, "reference") * (float("nan") if b == "triton" else 1))
    assert gpu.check(nothing, torch.float32, "cpu", shape)["output 0"] == float("inf")


def test_without_a_device_it_says_so(root: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"], cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr

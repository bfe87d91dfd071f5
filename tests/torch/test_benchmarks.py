"""Benchmarks run, their candidates compute the same values, and missing packages are reported."""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.gpu_machine import as_on_a_gpu_machine


def imported(root: Path, name: str) -> ModuleType:
    """Import a benchmark as a module. Modules that it shares with others are in the same folder."""
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
    pytest.importorskip("triton", reason="triton is for Linux")
    return imported(root, "gpu")


@pytest.fixture(scope="module")
def children(root: Path) -> ModuleType:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("needs fork, which this system lacks")
    return imported(root, "children")


@pytest.mark.slow
def test_every_script_can_be_imported(root: Path) -> None:
    names = sorted(path.stem for path in (root / "benchmarks").glob("*.py"))
    assert len(names) > 20
    others = "sys.modules.setdefault('llama_cpp', sys)"  # not in the tests' environment: stands for it
    code = f"import importlib, sys\n{others}\nfor name in {names}: importlib.import_module(name)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "benchmarks")))}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_products_are_compared(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    products = imported(root, "products")
    for name, value in {"MATRICES": ((256, 8),), "TOKENS": (1,), "BEYOND_CACHES": 1 << 14, "ROUND": 1 << 11}.items():
        monkeypatch.setattr(products, name, value)
    products.main(1)
    assert "256 x 8, 1 tokens, memory: " in capsys.readouterr().out


def test_waiting_of_ranks_is_estimated(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sequence_parallel.py", "mingru_small", "--tokens", "16", "--ranks", "2"])
    imported(root, "sequence_parallel").main()
    assert "| `mingru_small` | 8 | 7 | 2 | 2.00 |" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["neck", "pointwise", "dws", "full"])
def test_the_plain_fft_is_the_same_layer(cpu: ModuleType, mode: str) -> None:
    """Both sides use float32 FFTs: 2^-24 of the largest value times some tens of roundings."""
    torch.manual_seed(0)
    ours, leaves = cpu.centaurus_ours(mode)(96)
    torch.manual_seed(0)
    plain, others = cpu.centaurus_fft(mode)(96)
    assert all(torch.equal(a, b) for a, b in zip(leaves, others, strict=True))
    a, b = ours(), plain()
    assert (a - b).abs().max() <= 100 * 2**-24 * b.abs().max()


@pytest.mark.parametrize("peer", ["mlstm_native", "mlstm_parallel"])
def test_the_peers_compute_the_same_mlstm(cpu: ModuleType, peer: str) -> None:
    """Installed peers agree in float32. Their stabilisers differ, which eps makes visible (1e-6)."""
    pytest.importorskip({"mlstm_native": "mlstm_kernels", "mlstm_parallel": "xlstm"}[peer], reason="a peer, optional")
    ours, theirs = cpu.mlstm_ours(128)[0](), getattr(cpu, peer)(128)[0]().transpose(1, 2)
    assert (ours - theirs).abs().max() <= 1e-4 * ours.abs().max()


@pytest.mark.parametrize("case", ["delta_head", "delta_key", "mamba2", "channels_64"])
def test_the_torch_paths_of_transformers_compute_the_same(root: Path, case: str) -> None:
    """Installed candidates agree. The page of linear attention compares all of them before it times them."""
    pytest.importorskip("transformers", reason="a peer, optional")
    linear = imported(root, "linear_attention")
    found, absent = linear.compared(linear.CASES[case], linear.CASES[case].draw(70))
    assert len(found) >= 3
    assert set(absent.values()) <= {"not installed"}


def test_the_page_of_linear_attention(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = imported(root, "linear_attention")
    monkeypatch.setattr(linear, "ROUNDS", 2)
    text = linear.page(linear.measure("channels_64", [32, 64]))
    assert "| gated recurrence of 64 channels | 32 | seqblocks |" in text
    assert "- channels_64: " in text


@pytest.mark.slow
def test_it_runs_and_writes_a_table(
    cpu: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It starts processes itself, which measure memory."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("memory is read from /proc, which is Linux's")
    words = ["--case", "centaurus_dws", "--length", "32", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", ["cpu.py", *words, "--budget", "0.2", "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert cpu.main() == 0
    page = Path(capsys.readouterr().out.strip())
    text = page.read_text(encoding="utf-8")
    assert "| 32 | plain FFT |" in text
    records = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert {r["candidate"] for r in records} == {"seqblocks", "plain FFT"}
    assert all(r["left_out"] or r["both_ms"] > 0 for r in records)


@pytest.mark.slow
def test_a_floor_states_the_cost_of_a_case(cpu: ModuleType) -> None:
    ours = {"case": "mlstm", "length": 2048, "candidate": "seqblocks", "forward_ms": 20.0, "both_ms": 60.0}
    lines = cpu.growth([ours])
    assert "matrix products of the mLSTM at 2,048 tokens" in lines[-1]
    lines = cpu.growth([{**ours, "case": key} for key in cpu.FLOORS])
    assert all(any(line.startswith(f"{key} at 2,048 tokens:") for line in lines) for key in cpu.FLOORS)


def test_whole_models_are_compared_where_they_compute_the_same(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="a peer, optional")
    candidates, models = imported(root, "candidates"), imported(root, "models")

    def make() -> Any:
        model, made = candidates.mamba(8, 1, 16)()
        other = made["transformers"]().model
        torch.nn.init.normal_(other.lm_head.weight)
        wrong = candidates.of_transformers(other)
        rounded = wrong._replace(rounds=True, trains=False)
        return model, {models.OURS: made[models.OURS], "wrong": lambda: wrong, "rounded": lambda: rounded}

    monkeypatch.setattr(models, "CASES", {"small": candidates.Case("a small Mamba", make, (1, 8), 2)})
    for name, value in {"ROUNDS": 1, "peak": lambda key, name: None, "reading_rate": lambda: 1.0}.items():
        monkeypatch.setattr(models, name, value)
    text = models.table(models.measure("small"))
    assert "| wrong | other logits" in text
    row = next(line for line in text.splitlines() if line.startswith("| rounded, logits off by "))
    assert [bool(cell.strip()) for cell in row.split("|")[2:5]] == [True, False, True]  # it does not train
    assert "| seqblocks | " in text
    assert "| floor: weights read once | " in text


def test_times_of_processes_are_compared_by_turns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = imported(root, "models")
    late = {"left_out": "about 9 s"}
    turns = iter([
        {"generate": {"ms": 2.0}, "prefill": {"ms": 1.0}}, {"generate": {"ms": 1.0}, "prefill": {"ms": 1.0}}, None,
        {"generate": {"ms": 4.0}, "prefill": {"ms": 1.0}}, {"generate": {"ms": 4.0}, "prefill": late}, None,
        {"generate": {"ms": 3.0}, "prefill": {"ms": 1.0}}, {"generate": {"ms": 9.0}, "prefill": {"ms": 1.0}}, None,
    ])  # fmt: skip
    monkeypatch.setattr(models, "in_child", lambda option, key, name: next(turns))
    found = models.alone("mamba_128", [models.OURS, "other", "one that fails"])
    assert found[models.OURS]["generate"] == {"ms": 3.0, "ratio": 1.0}
    assert found["other"] == {"generate": {"ms": 4.0, "ratio": 1.0}, "prefill": late}
    assert found["one that fails"] == {}


def rehearse(root: Path, out: Path, *cases: str, **environment: str) -> dict[str, Any]:
    pytest.importorskip("triton", reason="triton is for Linux")
    arguments = [word for case in cases for word in ("--case", case)]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--rehearse", "--jobs", "2", "--out", str(out), *arguments],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1", **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip())
    text = page.read_text(encoding="utf-8")
    assert "no figure means anything" in text
    results: dict[str, Any] = json.loads(page.with_suffix(".json").read_text(encoding="utf-8"))
    assert results["left_out"] == results["unchecked"] == results["wrong"] == []
    return {**results, "page": page}


PEER = "def causal_conv1d_fn(x, weight, bias, activation):\n    raise RuntimeError('not on this device')\n"


@pytest.mark.slow
def test_the_gpu_benchmark_can_be_rehearsed(root: Path, tmp_path: Path) -> None:
    """A peer that can be imported but fails is a line in the table."""
    (tmp_path / "causal_conv1d.py").write_text(PEER, encoding="utf-8")
    results = rehearse(root, tmp_path, "conv", "mlstm_step", PYTHONPATH=f"{root}{os.pathsep}{tmp_path}")
    assert {r["case"]: r["ok"] for r in results["checks"]} == {"conv": True, "mlstm_step": True}
    assert {r["candidate"] for r in results["times"]} == {"seqblocks", "its torch implementation", "causal-conv1d"}
    ours = {r["case"]: r for r in results["times"] if r["candidate"] == "seqblocks"}
    assert all(r["ok"] and r["compared"] < 1e-5 and r["launches"] for r in ours.values())
    passes = {case: r.keys() & {"forward_ms", "both_ms"} for case, r in ours.items()}
    assert passes == {"conv": {"forward_ms", "both_ms"}, "mlstm_step": {"forward_ms"}}
    peer = next(r for r in results["times"] if r["candidate"] == "causal-conv1d")
    assert peer["left_out"] == "RuntimeError: not on this device"
    assert results["page"].stem.endswith("cpu-conv-mlstm_step")


@pytest.mark.long
def test_the_whole_gpu_benchmark_can_be_rehearsed(gpu: ModuleType, root: Path, tmp_path: Path) -> None:
    results = rehearse(root, tmp_path)
    assert {r["case"] for r in results["checks"]} == {r["case"] for r in results["times"]} == set(gpu.CASES)
    found = {r["candidate"]: r["left_out"] for r in results["times"]}
    for case in gpu.CASES.values():
        for name, peer in case.peers.items():
            absent = bool(peer.module) and importlib.util.find_spec(peer.module) is None
            assert (found[name] == "not installed") == absent, name


def test_a_table_is_never_overwritten(gpu: ModuleType, tmp_path: Path) -> None:
    def name(case: list[str] | None) -> str:
        options = argparse.Namespace(case=case, part=None, stage=None, out=tmp_path, rehearse=False, minutes=1.0)
        of = gpu.Run(["mlstm"], "cuda", options)
        of.results |= {"device": "NVIDIA H200", "date": "2026-01-02"}
        path: Path = of.file()
        path.touch()
        return path.name

    assert name(None) == "2026-01-02-nvidia-h200.md"
    assert name(["mlstm"]) == "2026-01-02-nvidia-h200-mlstm.md"
    assert name(None) == "2026-01-02-nvidia-h200-2.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # calls with resets copy faulty inputs
def test_the_gpu_benchmark_checks_every_launch_that_it_times(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run for sm_90 without launching kernels: tensors have only shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from seqblocks.kernels import triton_common
    from seqblocks.kernels.dispatch import custom_op
    from seqblocks.kernels.dispatch.self_check import launched_for

    monkeypatch.setattr(triton_common, "INTERPRETED", True)  # which also works on a CPU
    monkeypatch.setattr(triton_common, "arch", lambda x: "sm_90")
    monkeypatch.setattr(custom_op, "is_seen", lambda args: False)  # torch.library would stop at the shapes
    cases, checks, clock = (sys.modules[name] for name in ("gpu_cases", "gpu_checks", "gpu_clock"))
    monkeypatch.setattr(cases, "packed", cases.packed.__wrapped__)  # a cached tensor is of another FakeTensorMode

    def launched(case: Any, shape: dict[str, int], **sizes: int) -> set[str]:
        with FakeTensorMode(), launched_for(**sizes), gpu.launches(run=False) as found:
            leaves = gpu.draw_leaves(case, shape, "cpu", torch.bfloat16)
            for passes in clock._passes(case, leaves, lambda x: case.ours(x, "triton")):
                passes()
        return {*map(str, found)}

    for key, case in gpu.CASES.items():
        for shape in case.shapes:
            timed = launched(case, shape)
            assert timed
            sizes = checks.launch_sizes(case, shape)
            assert timed <= launched(case, cases.shortened(case, shape), **sizes), (key, shape)


def test_the_gpu_benchmark_has_a_case_for_every_triton_kernel(
    gpu: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from seqblocks.kernels import dispatch

    found, stop = set(), sys.modules["gpu_checks"].LaunchSizes

    def choose(op: str, *args: Any, **facts: Any) -> Any:
        found.add(op)
        raise stop({})

    monkeypatch.setattr(dispatch, "choose", choose)
    for case in gpu.CASES.values():
        with FakeTensorMode(), pytest.raises(stop):
            case.ours(gpu.draw_leaves(case, gpu.rehearsed(case.shapes[0]), "cpu", torch.float32), "triton")
    assert found == {path.parent.name for path in (root / "kernels").glob("*/triton*") if path.stem == "triton"}


def test_the_gpu_benchmark_detects_wrong_values(gpu: ModuleType) -> None:
    case = gpu.CASES["conv"]
    wrong = case._replace(ours=lambda x, backend: case.ours(x, backend) * (1.01 if backend == "triton" else 1))
    shape = gpu.rehearsed(case.shapes[0])
    right = gpu.check(case, torch.float32, "cpu", shape)
    assert right.error <= 1e-4
    assert right.where == {}
    found = gpu.check(wrong, torch.float32, "cpu", shape)
    assert found.errors["output 0"] > 5e-3
    assert "output 0" in found.where
    leaves = gpu.draw_leaves(case, shape, "cpu", torch.float32)
    assert gpu.compare(case, leaves).error <= 1e-4
    assert gpu.compare(wrong, leaves).error > 5e-3


def test_the_gpu_benchmark_detects_mixed_up_sequences(gpu: ModuleType) -> None:
    """Timing compares only two sequences, so the others must not affect them, nor be affected by them."""
    case = gpu.CASES["conv"]
    leaves = gpu.draw_leaves(case, {"B": 4, "S": 6, "D": 16, "K": 4}, "cpu", torch.float32)
    mixed = case._replace(ours=lambda x, b: case.ours(x, "torch").roll(1 if b == "triton" else 0, 0))
    assert gpu.compare(mixed, leaves).error > 0.1
    leaking = case._replace(ours=lambda x, b: case.ours({**x, "x": x["x"] + 0.0 * x["x"].sum(0)}, "torch"))
    assert gpu.compare(leaking, leaves).error <= 1e-4
    leaking = case._replace(ours=lambda x, b: case.ours(x, "torch") + (1e-6 * x["x"].sum(0) if b == "triton" else 0))
    found = gpu.compare(leaking, leaves)
    assert found.worst == "gradient of x, between"
    assert found.where[found.worst].startswith("192 of 192 numbers differ by more than 0")


def test_the_gpu_benchmark_detects_swapped_inputs_and_nan(gpu: ModuleType) -> None:
    case = gpu.CASES["mlstm"]
    shape = {"B": 1, "S": 8, "H": 1, "DK": 8, "DV": 8}

    def swapped(x: dict[str, torch.Tensor], backend: str) -> torch.Tensor:
        turned = {**x, "q": x["k"], "k": x["q"]} if backend == "triton" else x
        return torch.as_tensor(case.ours(turned, "reference"))

    assert gpu.check(case._replace(ours=swapped), torch.float32, "cpu", shape).errors["output 0"] > 1e-2
    nothing = case._replace(ours=lambda x, b: case.ours(x, "reference") * (float("nan") if b == "triton" else 1))
    found = gpu.check(nothing, torch.float32, "cpu", shape)
    assert found.errors["output 0"] == float("inf")
    assert "64 of 64 numbers differ" in found.where["output 0"]
    assert "64 not finite" in found.where["output 0"]


@pytest.mark.parametrize(("slowly", "late"), [(1.0, False), (5.0, True)])
def test_the_pause_covers_the_queueing_or_the_table_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, slowly: float, late: bool
) -> None:
    """Run on a fake device that only sleeps, with its own clock: queueing takes 3 ms, later `slowly` times that."""
    host, device, queued = [0.0], [0.0], [0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = device[0] = max(device[0], host[0])

        def query(self) -> bool:
            return self.at <= host[0]

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    def pause(cycles: int) -> None:
        device[0] = max(device[0], host[0]) + cycles / 1e6

    def call() -> None:
        queued[0] += 1
        host[0] += 3.0 * (slowly if queued[0] > 3 else 1.0)
        device[0] = max(device[0], host[0]) + 0.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", pause)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: host.__setitem__(0, max(host[0], device[0])))
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: host[0] / 1e3)
    clock = gpu.Clock("cpu")
    clock.cuda, clock.cycles = True, 1e6
    took = clock(call)
    assert took.late == late
    assert took.ms == pytest.approx(3.0 * slowly - 6.1 if late else 0.5)


forked = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # xdist has threads; none holds a lock here


@forked
@pytest.mark.slow
def test_a_crash_or_a_hang_does_not_affect_other_work(children: ModuleType) -> None:
    def work(what: str) -> Iterator[str]:
        yield f"{what} began"
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60 if what == "hangs" else 0)
        yield f"{what} ended"

    began = time.monotonic()
    jobs = [(what,) for what in ("dies", "hangs", "works")]
    found = [(job[0], str(x)) for job, x in children.records(work, jobs, 2, began + 60, 3.0)]
    assert time.monotonic() - began < 30
    assert sorted(found) == [
        ("dies", "dies began"), ("dies", "its process ended with -9"),
        ("hangs", "hangs began"), ("hangs", "more than 3 s"),
        ("works", "works began"), ("works", "works ended"),
    ]  # fmt: skip


@pytest.mark.slow
@forked
def test_all_work_stops_at_the_time_limit(children: ModuleType) -> None:
    def work(seconds: float) -> Iterator[str]:
        time.sleep(seconds)
        yield "done"

    found = [*children.records(work, [(0.0,), (60.0,), (0.0,)], 1, time.monotonic() + 2.5, 100.0)]
    assert found[0] == ((0.0,), "done")
    assert [(job, type(x)) for job, x in found[1:]] == [((60.0,), children.Late), ((0.0,), children.Late)]


def test_a_missing_device_is_reported(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests the error without a CUDA device, and this machine has one")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_wrong_check_keeps_its_launches(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpu.CASES["conv"]
    wrong = case._replace(ours=lambda x, backend: case.ours(x, backend) * (1.01 if backend == "triton" else 1))
    shape = {"B": 1, "S": 8, "D": 16, "K": 4}
    for name, of in (("right", case), ("wrong", wrong)):
        monkeypatch.setitem(gpu.CASES, name, of)
        (record,) = gpu.check_job(name, shape, torch.float32, "cpu", tmp_path)
        assert record["ok"] == (name == "right")
        assert bool(record["where"]) == (name == "wrong")
    (file,) = tmp_path.rglob("launches.pkl.gz")
    assert file.parent.name == "wrong-B-1-S-8-D-16-K-4-float32"
    checks = sys.modules["gpu_page"].checks([{"case": "conv", "shape": shape, "dtype": "float32", **record}])
    assert "axis 1 of 8: all" in "\n".join(checks)


def test_every_stage_has_its_share_of_the_time(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages end at fixed times, so that none takes the time of the next; the last one ends with the run."""
    ends = {}

    class Run:
        began, path, results = 100.0, "", {}

        def measure(self) -> None: ...
        def check(self, dtype: torch.dtype, end: float) -> None:
            ends[f"check {dtype}"] = end

        def time(self, peers: bool, end: float) -> None:
            ends[f"time {peers}"] = end

    monkeypatch.setattr(gpu, "Run", lambda *a: Run())
    gpu.run([], "cuda", argparse.Namespace(minutes=10.0, stage=None))
    assert [*ends] == ["check torch.bfloat16", "time False", "time True", "check torch.float32"]
    assert [*ends.values()] == pytest.approx([340.0, 490.0, 640.0, 700.0])
    ends.clear()
    gpu.run([], "cuda", argparse.Namespace(minutes=10.0, stage=["peers", "ours"]))
    assert ends == pytest.approx({"time False": 400.0, "time True": 700.0})


def test_first_shapes_come_first(gpu: ModuleType) -> None:
    found = gpu.cells(["mlstm", "conv", "kda"], "cuda", 2)
    assert [(key, shape["S"]) for key, shape in found] == [
        ("mlstm", 2048), ("conv", 2048), ("kda", 2048), ("mlstm", 8192), ("kda", 16384)
    ]  # fmt: skip


STAND_IN = '#!/bin/sh\nwhile [ "$1" != "$PYTHON" ]; do shift; done\nexec "$@"\n'  # for compute-sanitizer


def first_hour(root: Path, folder: Path, part: int, *arguments: str) -> tuple[str, set[str]]:
    """Rehearse a call of gpu.sh with the packages of a machine with a GPU. Return the output, and the files' names."""
    pytest.importorskip("triton", reason="triton is for Linux")
    (folder / "compute-sanitizer").write_text(STAND_IN, encoding="utf-8")
    (folder / "compute-sanitizer").chmod(0o755)
    environment = as_on_a_gpu_machine(root, folder)
    environment |= {"PYTHON": sys.executable, "WORKERS": "2", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "benchmarks/gpu.sh", str(folder / "out"), str(part), "--rehearse", *arguments],
        cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pydantic missing" in done.stdout
    return done.stdout, {path.name for path in (folder / "out").iterdir()}


@pytest.mark.long
def test_the_first_call_on_a_gpu_can_be_rehearsed(root: Path, tmp_path: Path) -> None:
    printed, files = first_hour(root, tmp_path, 1, "--case", "conv")
    assert "| conv | B 2, S 8, D 16, K 4 | float32 |" in printed
    assert {"benchmark-1.log", "preflight-1.log"} < files


@pytest.mark.long
def test_the_second_call_on_a_gpu_can_be_rehearsed(root: Path, tmp_path: Path) -> None:
    printed, files = first_hour(root, tmp_path, 2)
    assert "0 of 1" in (summary := (tmp_path / "out" / "tests.txt").read_text("utf-8")), "all tests begin"
    assert "failed" not in summary
    assert printed.count("ran scan_once") == 2
    assert {"tests.jsonl", "tests.log", "memcheck.log", "racecheck.log"} < files


@pytest.mark.long
def test_the_third_call_on_a_gpu_can_be_rehearsed(root: Path, tmp_path: Path) -> None:
    printed, _ = first_hour(root, tmp_path, 3, "--case", "conv", "--case", "mlstm_step")
    assert "| causal-conv1d | not installed |" in printed
    assert "| mlstm_step | B 2, H 1, DK 8, DV 8 | float32 |" in printed

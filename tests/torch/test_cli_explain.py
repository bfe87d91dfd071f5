"""`seqblocks explain SPEC`: which kernels would run, on this machine or another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.kernels import dispatch, fbgemm, half, numerics, products, triton_common
from seqblocks.runtime.kernel_report import kernel_of, kernel_uses
from seqblocks.testing import random_input

Run = Callable[..., subprocess.CompletedProcess[str]]
PLAIN = {"TRITON_INTERPRET": "0", dispatch.VARIABLE: ""}  # ignore settings of the environment that runs these tests

needs_triton = pytest.mark.skipif(bool(triton_common.MISSING), reason=triton_common.MISSING)


@needs_triton
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("explain_vil_tiny", ["vil_tiny", "--device", "cuda", "--dtype", "bf16"]),
        ("explain_mamba_gfx942", ["mamba_130m", "--device", "cuda:1", "--arch", "gfx942"]),
        ("explain_mamba_f64", ["mamba_130m", "--device", "cuda", "--dtype", "f64"]),
    ],
)
def test_the_text(name: str, arguments: list[str], run_main: Run, root: Path, update_golden: bool) -> None:
    compare(name, run_main("explain", *arguments, env=PLAIN), root, update_golden)


@pytest.mark.slow
@needs_triton
def test_the_text_of_a_cpu(run_cli: Run, root: Path, update_golden: bool) -> None:
    """Runs in a separate process, where Triton does not interpret."""
    done = run_cli("explain", "xlstm_125m_7_1", env=PLAIN)
    kernels, _, others = done.stdout.partition("products of each matrix")  # these depend on the processor
    kernels, _, torchs = kernels.partition("all matrix products")
    assert others or torchs
    done.stdout = kernels
    compare("explain_xlstm_cpu", done, root, update_golden)


@pytest.mark.parametrize(
    ("on_onednn", "on_amd", "on_slow_mkl"),
    [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_products(
    on_onednn: bool, on_amd: bool, on_slow_mkl: bool, run_main: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each matrix and number of tokens, the report names the product that a call uses, on every processor."""
    monkeypatch.setattr(products, "ON_ONEDNN", on_onednn)
    monkeypatch.setattr(products, "ON_SLOW_READING", on_amd)
    monkeypatch.setattr(products, "ON_SLOW_MKL", on_slow_mkl)
    data = json.loads(run_main("explain", "mamba_130m", "--format", "json", env=PLAIN).stdout)
    model = seqblocks.build("mamba_130m", device="meta", set={"depth": 1})
    maps = {name for name, p in model.named_parameters() if p.dim() == 2 and name.endswith(".weight")}
    assert {f"{each['names'][0]}.weight" for each in data["products"]} == {*maps, "unembed.weight"} - {"embed.weight"}
    used = set()
    for each in data["products"]:
        weight = torch.zeros(1, 1).expand(each["rows"], each["columns"])
        for tokens in (1, 2, 4, 5, 6, 7, 8, 68, 69, 70, 113, 114, 512):
            onednn = products._suits_onednn(torch.zeros(1, 1).expand(tokens, each["columns"]), weight, None)
            told = [one["product"] for one in each["products"] if one["from_tokens"] <= tokens][-1]
            expected = products.chosen(tokens * each["columns"], each["rows"], each["columns"])
            assert told == (expected if onednn else "torch"), (each, tokens)
            used.add(told)
    assert used == {"torch"} | ({"oneDNN"} if on_onednn else set()) | ({"rows"} if on_amd else set())
    text = run_main("explain", "mamba_130m", env=PLAIN).stdout
    assert ("all matrix products are torch's" in text) == (not on_onednn)
    if on_amd:
        found = "rows, oneDNN from 2, torch from 5, oneDNN from 8" + ", torch from 16" * (not on_slow_mkl)
        assert f"mixer.out_proj (24 x)  768 x 1536   {found}\n" in text
    for slow, on_fast_mv, expected in (
        (set(), False, "all matrix products are torch's"), (set(), True, "mv, torch from 2\n"),
        ({torch.bfloat16}, False, "torch, float32 from 8\n"),
    ):  # fmt: skip
        monkeypatch.setattr(numerics, "SLOW_KINDS", slow)
        monkeypatch.setattr(products, "ON_FAST_MV", on_fast_mv)
        monkeypatch.setattr(fbgemm, "HAS_HALF", False)
        assert expected in run_main("explain", "mamba_130m", "--dtype", "bf16", env=PLAIN).stdout
    monkeypatch.setattr(fbgemm, "HAS_HALF", True)
    monkeypatch.setitem(half.FBGEMM_MAX_TOKENS, torch.bfloat16, 8)
    text = run_main("explain", "mamba_130m", "--dtype", "bf16", env=PLAIN).stdout
    assert "50280 x 768  torch, float32 from 8; in streams FBGEMM up to 8\n" in text
    assert "80 x 1536    torch, float32 from 8\n" in text  # a small matrix


def compare(name: str, done: subprocess.CompletedProcess[str], root: Path, update_golden: bool) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    golden = root / "tests" / "golden" / "cli" / f"{name}.txt"
    if update_golden:
        golden.write_text(done.stdout, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == done.stdout


@needs_triton
@pytest.mark.parametrize(
    ("name", "launched"),
    [
        ("retnet_1_3b", {"states", "outputs", "state_gradients", "gradients"}),
        ("gla_1_3b", {"sums", "pairs", "states", "outputs", "state_gradients", "value_gradients", "weight_gradients",
                      "key_gradients", "decay_gradients"}),
        ("gated_deltanet_1_3b", {"sums", "pairs", "solve", "states", "outputs", "state_gradients", "value_gradients",
                                 "weight_gradients", "key_gradients", "decay_gradients"}),
        ("rwkv7_0_4b", None),
    ],
)
def test_linear_attention_shows_its_launches(name: str, launched: set[str] | None, run_main: Run) -> None:
    """The launches of the rule and the decay are listed; for dplr, the reason why there are none."""
    done = run_main("explain", name, "--device", "cuda", "--dtype", "bf16", "--format", "json", env=PLAIN)
    steps = [step for step in json.loads(done.stdout)["steps"] if step["kernel"] == "linear_attention"]
    assert steps
    for step in steps:
        assert step["implementation"] == ("torch" if launched is None else "triton")
        assert launched is None or set(step["tiles"]) == launched


@needs_triton
def test_json(run_main: Run) -> None:
    done = run_main("explain", "mamba_130m", "--device", "cuda", "--set", "depth=2", "--format", "json", env=PLAIN)
    data = json.loads(done.stdout)
    assert (data["ok"], data["device"], data["dtype"], data["arch"]) == (True, "cuda", "float32", "sm_90")
    conv, scan = data["steps"]
    assert (conv["kernel"], scan["kernel"]) == ("causal_conv", "selective_scan")
    assert [name.split(".")[1] for name in scan["names"]] == ["0", "1"]
    assert scan["implementation"] == "triton"
    assert {"forward", "backward"} <= set(scan["tiles"])
    assert [verdict["implementation"] for verdict in scan["implementations"]] == ["triton", "torch", "reference"]


@pytest.mark.parametrize(
    ("arguments", "env", "status", "message"),
    [
        (["vil_tiny"], {dispatch.VARIABLE: "torch"}, 0, "backend torch"),
        (["vil_tiny"], {dispatch.VARIABLE: "triton"}, 4, "cannot run"),
        (["vil_tiny"], {dispatch.VARIABLE: "cuda"}, 2, "unknown backend 'cuda'"),
        (["vil_tiny", "--device", "gpu9"], {}, 2, "--device gpu9 is not a device"),
        (["vil_tiny", "--device", "cuda", "--arch", "sm_75"], {}, 0, "needs compute capability 8.0 or later"),
        (["vil_tiny", "--arch", "sm_80"], {}, 0, "on cuda (sm_80)"),
        (["vil_tiny", "--arch", "sm_80", "--device", "cpu"], {}, 2, "is a GPU architecture, but --device is cpu"),
        (["vil_tiny", "--arch", "hopper"], {}, 2, "--arch takes an architecture"),
        (["vil_tiny", "--dtype", "int8"], {}, 2, "--dtype int8"),
        (["vil_tinny"], {}, 2, "did you mean 'vil_tiny'?"),
        (["mlstn"], {}, 2, "did you mean the verb mlstm? `seqblocks ops mlstm` describes it"),
        (["attn"], {}, 2, "did you mean the verb attention? `seqblocks ops attention` describes it"),
        (["vil"], {}, 1, ""),
        (["E999"], {}, 2, "there is no code E999"),
        (["e401"], {}, 0, "E401: does not divide"),
        (["-q", "vil_tiny"], {}, 0, ""),
    ],
)
def test_statuses(arguments: list[str], env: dict[str, str], status: int, message: str, run_main: Run) -> None:
    done = run_main("explain", *arguments, env=PLAIN | env)
    assert done.returncode == status, done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_plan_is_a_stage(run_main: Run) -> None:
    shown = run_main("show", "mamba_small", "--stage", "plan", env=PLAIN)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == run_main("explain", "mamba_small", "--device", "cpu", env=PLAIN).stdout
    data = json.loads(run_main("show", "mamba_small", "--stage", "plan", "--format", "json", env=PLAIN).stdout)
    assert {step["implementation"] for step in data["steps"]} == {"torch"}


def test_a_spec_without_kernels(run_main: Run, tmp_path: Path) -> None:
    (tmp_path / "silu.yaml").write_text("seqblocks: 1\nmodel: {input: {features: 8}, steps: [silu]}\n")
    assert "no step uses a kernel" in run_main("explain", "silu.yaml", cwd=tmp_path).stdout


SMALL: dict[str, dict[str, Any]] = {
    "xlstm_125m_7_1": {"dim": 16, "vocabulary": 11, "model.blocks.pattern": "m s"},
    "mamba_130m": {"dim": 16, "depth": 1, "vocabulary": 11},
    "vil_small_block": {"dim": 8},
}


@pytest.mark.parametrize("name", SMALL)
def test_ops_call_the_kernels_that_they_declare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels a step declares are those that its call requests from the dispatcher, and no others."""
    calls: list[tuple[str, dict[str, Any]]] = []
    choose = dispatch.choose

    def record(op: str, backend: str | None = None, inputs: Any = None, sizes: Any = None, **facts: Any) -> Any:
        calls.append((op, facts))
        return choose(op, backend, inputs, sizes, **facts)

    monkeypatch.setattr(dispatch, "choose", record)
    model = seqblocks.build(name, set=SMALL[name])
    model(random_input(model, 2, 5))
    declared = [used for node in graph.walk(model.graph) if (used := kernel_of(node))]
    assert [op for op, _ in calls] == [op for op, _ in declared]
    for (_, facts), (_, facts_declared) in zip(calls, declared, strict=True):
        assert {key: facts[key] for key in facts_declared} == facts_declared


def test_the_plan_of_a_cpu_matches_what_runs() -> None:
    """Every implementation in the plan is one that `choose` accepts."""
    steps = kernel_uses(check.load_model("xlstm_125m_7_1"), "cpu", torch.float32, "")
    assert {step.implementation for step in steps} == {"torch"}

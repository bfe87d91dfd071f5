"""`seqblocks bench`: what is timed, what is counted, and the form of the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import seqblocks
from seqblocks import bench as package
from seqblocks import graph
from seqblocks.bench import clocks, floors, measure
from seqblocks.cli.device import device_of
from seqblocks.descriptions.summary import summarise
from seqblocks.errors import UnavailableError, UsageError
from seqblocks.runtime.arguments import reason
from tests.sampled import sampled

RATE = 1e13  # of the machine in these tests: higher than any, so that no step takes less than its floor
TEXT = """seqblocks: 1
model:
  input: {tokens: 32}
  steps:
    - embed: 64
    - repeat:
        times: 3
        name: layers
        steps: [{residual: [rms_norm, {swiglu: {hidden: 128}}]}, {causal_conv: {kernel: 3}}]
    - unembed
"""


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with RATE operations and bytes a second, which is not measured."""
    limits = floors.Limits(RATE, dict.fromkeys(floors.SIZES, RATE))
    monkeypatch.setattr(measure, "measured", lambda device, dtype: limits)


@pytest.mark.parametrize("mode", measure.MODES)
def test_each_step_has_a_row(mode: str) -> None:
    model = seqblocks.build_text(TEXT, seed=0)
    found = package.bench(model, mode, batch=2, length=16, seconds=0.01)
    assert [(row.step, row.count, row.verb) for row in found.steps] == [
        ("embed", 1, "embed"), ("layers.*.residual.rms_norm", 3, "rms_norm"),
        ("layers.*.residual.swiglu", 3, "swiglu"), ("layers.*.causal_conv", 3, "causal_conv"),
        ("unembed", 1, "unembed"), (measure.BETWEEN, 1, ""),
    ]  # fmt: skip
    assert found.repetitions >= measure.MIN_TURNS
    assert found.clock == ("processor time" if torch.get_num_threads() == 1 else "elapsed time")
    assert all(row.seconds > 0 for row in found.steps[:-1])
    assert found.steps[3].kernel.startswith("causal_conv: ")
    json.dumps(found.as_data())


def test_the_floor_counts_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without traffic, it is two operations for each multiply-accumulate of the summary; in training, six."""
    model = seqblocks.build_text(TEXT, seed=0)
    embed, *_, unembed, _ = package.bench(model, batch=2, length=16, seconds=0.01).steps
    tokens = 2 * 16
    moved = 4 * (64 * 32 + 32 + tokens * (64 + 32))
    assert unembed.floor_seconds == pytest.approx(max(2 * 64 * 32 * tokens, moved) / RATE)
    assert embed.floor_seconds == pytest.approx(tokens * (8 + 2 * 4 * 64) / RATE)  # only the rows that it looks up
    limits = floors.Limits(RATE, dict.fromkeys(floors.SIZES, 1e30))
    monkeypatch.setattr(measure, "measured", lambda device, dtype: limits)
    forward = package.bench(model, batch=2, length=16, seconds=0.01)
    macs = summarise(model).macs_per_token
    assert macs
    assert forward.floor_seconds == pytest.approx(2 * macs * tokens / RATE, rel=1e-6)
    train = package.bench(model, "train", batch=2, length=16, seconds=0.01)
    assert train.floor_seconds == pytest.approx(3 * forward.floor_seconds)


def test_attention_costs_more_in_longer_sequences() -> None:
    steps = "[{attention_layer: {dim: 8, heads: 2}}]"
    text = f"seqblocks: 1\nuse: [transformer]\nmodel: {{input: {{features: 8}}, steps: {steps}}}\n"
    model = seqblocks.build_text(text, seed=0)
    for length in (16, 64):
        found = package.bench(model, length=length, seconds=0.01)
        (row,) = (row for row in found.steps if row.verb == "attention")
        (node,) = (node for node in graph.walk(model.graph) if node.verb == "attention")
        assert row.floor_seconds == pytest.approx(2 * node.macs_at(length) * length / RATE)


def test_matrices_in_8_bits_are_a_quarter_of_the_bytes() -> None:
    steps = "[{linear: {features: 64, bias: false}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 64}}, steps: {steps}}}")
    limits = floors.Limits(1e30, dict.fromkeys(floors.SIZES, RATE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "measured", lambda device, dtype: limits)
        full, small = (
            package.bench(each, length=1, seconds=0.01).steps[0].floor_seconds * RATE
            for each in (model, seqblocks.quantize(model, smallest=0))
        )
    assert full == pytest.approx(4 * (64 * 64 + 128))
    assert small == pytest.approx(64 * 64 + 4 * (64 + 128))


def test_no_floor_is_above_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates that were measured too low, on a busy machine, are corrected by what took less."""
    limits = floors.Limits(1.0, dict.fromkeys(floors.SIZES, 1.0))
    monkeypatch.setattr(measure, "measured", lambda device, dtype: limits)
    found = package.bench(seqblocks.build_text(TEXT, seed=0), batch=2, length=16, seconds=0.01)
    assert all(0 < row.floor_seconds <= row.seconds for row in found.steps[:-1])
    assert 0 < found.floor_seconds <= found.seconds


def test_a_view_needs_no_time() -> None:
    x = torch.ones(4, 8)
    assert floors.moved([x], [], x[:, :2]) == ([], 0)
    assert floors.moved([x], [x], x + 1) == ([128, 128], 128)
    assert floors.moved([x[:, :1].expand(4, 8)], [], x.clone()) == ([16, 128], 0)


def test_a_floor_uses_the_rate_of_a_size_that_is_not_larger() -> None:
    limits = floors.Limits(1e9, {size: 1e9 * (10 - at) for at, size in enumerate(floors.SIZES)})
    first, second = floors.SIZES[:2]
    assert limits.seconds(0, [first]) == pytest.approx(first / 1e10)
    assert limits.seconds(0, [second]) == pytest.approx(second / 9e9)
    assert limits.seconds(0, [second - 1]) == pytest.approx((second - 1) / 1e10)  # it may be as fast as the smaller one
    assert limits.seconds(0, [1]) == pytest.approx(1 / 1e10)
    assert limits.seconds(0, [8 * floors.MEMORY_BYTES]) == pytest.approx(8 * floors.MEMORY_BYTES / limits.memory)
    assert limits.seconds(1e9, [first]) == 1


def test_rates_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "SECONDS", 1e-4)
    monkeypatch.setattr(floors, "TRIALS", 2)
    limits = floors.measured(torch.device("cpu"), torch.float32)
    assert limits.flops > 1e8
    assert all(rate > 1e8 for rate in limits.traffic.values())


JOINED = """seqblocks: 1
model:
  input: {features: 8}
  steps:
    - repeat:
        times: 2
        name: layers
        steps:
          - linear: {features: 8, as: q}
          - linear: {from: input, features: 8, as: k}
          - gate: {from: q, by: k}
"""


def test_steps_that_a_stream_computes_together_have_one_row() -> None:
    """Their floor is that of the single steps."""
    model = seqblocks.build_text(JOINED, seed=0)
    whole, token = (package.bench(model, mode, length=1, seconds=0.01) for mode in ("forward", "step"))
    q, k = (row.floor_seconds for row in whole.steps if row.verb == "linear")
    joined = token.steps[0]
    assert (joined.step, joined.count) == ("layers.*.q, k", 2)
    assert joined.floor_seconds == pytest.approx(q + k)
    assert model.token_plan is None or not hasattr(model.token_plan, "marks")


def test_a_stream_begins_again_when_a_cache_is_full() -> None:
    text = """seqblocks: 1
use: [transformer]
model:
  input: {tokens: 11}
  steps: [{embed: 16}, {attention_layer: {dim: 16, heads: 2, cache: 5}}, unembed]
"""
    found = package.bench(seqblocks.build_text(text, seed=0), "step", seconds=0.05)
    assert found.repetitions * 4 > 5
    assert found.seconds > 0


def test_the_fastest_pass_counts() -> None:
    found = [clocks.Observed(seconds, {("a",): time}) for seconds, time in ((3.0, 2.0), (1.5, 1.0), (1.2, 1.1))]
    assert clocks.fastest(found) is found[1]


@pytest.mark.parametrize("mode", sampled(measure.MODES, every=3, ci=1))
def test_the_steps_add_up_to_the_whole(mode: str) -> None:
    """Within a half, on a busy machine too; `benchmarks/bench_bounds.py` has the bounds of a quiet one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = package.bench(seqblocks.build("mamba_small"), mode, length=None, seconds=2.0)
    finally:
        torch.set_num_threads(threads)
    assert sum(row.seconds for row in found.steps) == pytest.approx(found.seconds, rel=0.5)
    assert found.seconds_with_hooks == pytest.approx(found.seconds, rel=0.5)
    assert sum(row.share for row in found.steps) == pytest.approx(1, rel=0.1)


def test_a_backward_pass_comes_to_each_step_once_in_reverse() -> None:
    model = seqblocks.build_text(TEXT, seed=0)
    x = torch.zeros(2, 16, dtype=torch.long)
    hooks = clocks.Hooks(model, torch.device("cpu"), lambda: model(x).sum().backward(), backward=True)
    with hooks.observing() as observe:
        observe()
    steps = ("residual.rms_norm", "residual.swiglu", "causal_conv")
    layers = [f"layers.{at}.{step}" for at in range(3) for step in steps]
    assert [name for name, _ in hooks.turns if name] == ["embed", *layers, "unembed"][::-1]
    assert "" in [name for name, _ in hooks.turns]  # the sums of the residual branches are between the steps


def test_no_ratio_for_times_that_spread() -> None:
    row = measure.Row("a", 1, "linear", 2.0, 0.05, 1.0)
    assert row.ratio == 2
    row.spread = 0.2
    assert row.ratio is None


def test_the_model_is_as_before() -> None:
    model = seqblocks.build_text(TEXT, seed=0).eval()
    model.embed.weight.grad = gradient = torch.ones_like(model.embed.weight)
    package.bench(model, "train", length=8, seconds=0.01)
    assert not any(module.training for module in model.modules())
    assert model.embed.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(gradient))
    assert all(p.grad is None for p in model.parameters() if p is not model.embed.weight)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks


def test_modes_that_a_model_cannot_run() -> None:
    text = "seqblocks: 1\nmodel: {input: {image: {size: 8}}, steps: [{patch_embed: {patch: 4, features: 8}}]}"
    model = seqblocks.build_text(text)
    with pytest.raises(UsageError, match="cannot stream"):
        package.bench(model, "step")
    with pytest.raises(UsageError, match="mode is one of"):
        package.bench(model, "steps")
    fixed = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 8, length: 5}, steps: [silu]}")
    with pytest.raises(UsageError, match="has no other length"):
        package.bench(fixed, length=6)


Run = Callable[..., Any]


def test_the_command(run_main: Run, tmp_path: Any) -> None:
    (tmp_path / "a.yaml").write_text(TEXT)
    done = run_main("bench", "a.yaml", "--step", "--seconds", "0.01", "--format", "json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {"seconds", "floor_seconds", "ratio", "processor", "steps"} <= found.keys()
    assert {"step", "seconds", "floor_seconds", "ratio", "kernel", "why"} <= found["steps"][0].keys()
    shown = run_main("bench", "a.yaml", "--seconds", "0.01", cwd=tmp_path).stdout
    assert "layers.*.causal_conv (3 x)" in shown
    assert "between the steps" in shown
    table, _, remarks = shown.partition("\n\n  ")
    assert ("?: half of the times" in remarks) == ("  ?  " in table)
    wrong = {
        ("--seconds", "0"): "is not a number of seconds", ("--device", "meta"): "computes nothing",
        ("--threads", "99999"): "--threads 99,999: this machine has",
    }  # fmt: skip
    for words, message in wrong.items():
        failed = run_main("bench", "a.yaml", *words, cwd=tmp_path)
        assert failed.returncode == 2
        assert message in failed.stderr


@pytest.mark.parametrize(("given", "hint"), [(None, ". --device cpu computes without it"), ("cuda", "")])
def test_a_device_that_cannot_be_used(given: str | None, hint: str) -> None:
    """Also one that is chosen because there is one, such as a GPU that another process has for itself."""

    def busy(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: device is busy\nmore")

    found = SimpleNamespace(device=torch.device, zeros=busy, cuda=SimpleNamespace(is_available=lambda: True))
    with pytest.raises(UnavailableError, match=f"--device cuda: CUDA error: device is busy{hint}$"):
        device_of(argparse.Namespace(device=given), found)


def test_a_device_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"--device CPU is not a device: name cpu, cuda"):
        device_of(argparse.Namespace(device="CPU"), torch)


def test_lists_of_backends_are_left_out() -> None:
    error = NotImplementedError("Could not run 'aten::empty.memory_format' on 'MPS'. It is available for: [CPU, …]")
    assert reason(error) == "Could not run 'aten::empty.memory_format' on 'MPS'"

"""Steps that are planned once (seqblocks/streaming/plan.py): the same numbers as `forward`, and no stale plan."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import seqblocks
from seqblocks.errors import RunError, SpecWarning
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.streaming.plan import TokenPlan
from seqblocks.streaming.writer import PlanWriter
from tests.torch.planned import (
    CONVOLUTIONS,
    EXPERTS,
    GATES,
    LINEAR,
    SMALL,
    SPEC,
    add_to_all,
    assert_compiled_follows,
    assert_follows,
    assign_others,
    benchmark,
    build,
    compiled,
    hook_block,
    hook_inside,
    linear_attention,
    load_others,
    parametrize_last,
    replace_last,
    set_class,
    set_class_of_block,
    set_class_of_model,
    set_data,
    set_op,
    steps,
    tokens,
)  # fmt: skip


def test_the_same_numbers_as_the_whole_sequence() -> None:
    model = build()
    assert_follows(model)
    assert isinstance(model.token_plan, TokenPlan)


@pytest.mark.parametrize(
    "mixer",
    [*(f"linear_attention: {{q: q, k: k, v: v, {options}}}" for options in LINEAR),
     *(f"gated_recurrence: {{x: v, decay: gv, {options}}}" for options in ("factor: full", "factor: complement",
       "factor: unit_variance, first_full: true"))],
)  # fmt: skip
def test_tokens_of_linear_attention_and_of_gated_recurrences(mixer: str) -> None:
    """Planned steps of all rules and options equal the whole sequence."""
    model = linear_attention(mixer)
    x = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state, found = None, []
    with torch.no_grad():
        for t in range(9):
            y, state = model.step(x[:, t], state)
            found.append(y)
        torch.testing.assert_close(torch.stack(found, 1), model(x), rtol=0, atol=1e-12)


VERBS = [
    "rotary: {heads: 2}", "rotary: {heads: 2, features: 2}", "rotary: {heads: 2, layout: interleaved}",
    "rotary: {heads: 1, first: 4, layout: interleaved, scaling: {type: yarn, factor: 4, original_length: 8}}",
    "shift: {by: 1}", "shift: {by: 3}", "token_shift",
    "sinusoids", "position_embed: {length: 16}", "conv1d: {features: 6, kernel: 3, dilation: 2}", "sigmoid", "elu",
    "log_decay: {kind: exp}", "time_step", "phase", "conv1d: {features: 6, kernel: 1}",
    "conv1d: {features: 6, kernel: 4}", "centaurus: {mode: neck, state: 3, sub_states: 2}",
    "centaurus: {mode: pointwise, state: 3, sub_states: 2}", "centaurus: {mode: dws, hold: zoh, sub_states: 2}",
    "centaurus: {mode: full, features: 4, sub_states: 2}", "l2_norm", "rms_norm: {groups: 2, bias: true}",
    "rms_norm: {groups: 2, shared: true, bias: true}", "head_norm: {heads: 2, bias: true}",
    "scan: {order: forward, steps: [{causal_conv: {kernel: 3}}, {linear: 8}]}",
    "attention: {q: a, k: a, v: a, heads: 2, cache: 9}",
    "attention: {q: a, k: a, v: a, heads: 2, window: 1, rotary: 100}",
    "experts: {count: 3, steps: [{swiglu: {hidden: 4}}]}",
    "experts: {count: 3, top: 1, score: sigmoid, corrected: true, steps: [{linear: 8}, silu, {headwise_linear: 2}]}",
]  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_tokens_of_small_verbs(verb: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned tokens equal the whole sequence, and no module is called for them."""
    monkeypatch.setattr(PlanWriter, "call_module", None)
    steps = "linear: {features: 8, as: a}", verb, "linear: {features: 4, name: out}"
    text = "\n    - ".join(["seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:", *steps])
    model = seqblocks.build_text(text, dtype=torch.float64, seed=0).eval()
    x = torch.randn(batch, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state = found = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
        expected, last = model(x, return_state=True)
        for t in range(9):
            y, state = model.step(x[:, t], state)
            found = y[:, None] if found is None else torch.cat([found, y[:, None]], 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


@pytest.mark.parametrize("readout", ["paper", "unit_floor"])
def test_tokens_of_memoroids(readout: str) -> None:
    layer = f"memoroid_layer: {{dim: 16, heads: 2, readout: {readout}}}"
    model = build(SPEC.replace("mlstm_block: {dim: 16, heads: 2}", layer))
    assert_follows(model)
    resets = torch.zeros(2, 7, dtype=torch.bool)
    resets[0, 3] = resets[1, 0] = resets[1, 5] = True
    assert_follows(model, resets)
    assert isinstance(model.token_plan, TokenPlan)


@pytest.mark.parametrize("verb", ["rotary: {heads: 2}", "rms_norm: {groups: 2}", VERBS[-3]])
def test_tokens_of_no_sequence(verb: str) -> None:
    """A server may have a batch that is empty: the step is that of the whole, and so is the state."""
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{{linear: {{features: 8, as: a}}}}, {{{verb}}}]}}"
    model, x = seqblocks.build_text(text, dtype=torch.float64, seed=0).eval(), torch.zeros(0, 8, dtype=torch.float64)
    with torch.no_grad():
        y, state = model.step(x)
        torch.testing.assert_close(model.step(x, state), (y, state))
    assert y.shape == (0, 8)


def test_an_expert_that_is_replaced_or_hooked_is_called() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [experts: {count: 3, top: 3, steps: [{linear: 8}]}]}"
    model, x = seqblocks.build_text(text, seed=0).eval(), torch.ones(2, 8)
    with torch.no_grad():
        before, _ = model.step(x)
        model.experts.get_submodule("1").linear = nn.Linear(8, 8)
        replaced, _ = model.step(x)
        model.experts.get_submodule("2").register_forward_hook(lambda module, inputs, y: y + 1)
        hooked, _ = model.step(x)
        torch.testing.assert_close(hooked, model(x[:, None])[:, 0])
    assert (replaced - before).abs().min() > 1e-6
    assert (hooked - replaced).abs().min() > 1e-6


def test_a_step_is_planned_again_after_its_hook_is_removed() -> None:
    steps = "[{linear: 8}, {experts: {count: 2, steps: [{linear: 8}]}}]"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: {steps}}}"
    model, x = seqblocks.build_text(text, seed=0).eval(), torch.ones(2, 8)

    def calls_modules() -> bool:
        with torch.no_grad():
            model.step(x)
        assert model.token_plan
        return model.token_plan.calls_modules

    before = calls_modules()
    for name in ("linear", "experts.router"):
        handle = model.get_submodule(name).register_forward_hook(lambda module, inputs, y: 2 * y)
        assert calls_modules()
        handle.remove()
        assert calls_modules() == before


@pytest.mark.parametrize("step", ["linear: {features: 4", "causal_conv: {kernel: 3"])
def test_a_plan_takes_twice_the_calls_for_twice_the_steps(step: str) -> None:
    """Steps that one call may compute are looked up, not searched for among all later steps."""
    counts = []
    for count in (100, 200):
        steps = ", ".join(f"{{{step}, name: s{number}}}}}" for number in range(count))
        model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: [{steps}]}}").eval()
        calls: list[str] = []
        with torch.no_grad():
            sys.setprofile(lambda frame, event, _, calls=calls: calls.append(event))
            try:
                model.step(torch.zeros(1, 4))
            finally:
                sys.setprofile(None)
        assert isinstance(model.token_plan, TokenPlan)
        counts.append(len(calls))
    assert counts[1] < 2.1 * counts[0]


def test_windows_of_convolutions_have_their_own_memory() -> None:
    model = build(CONVOLUTIONS)
    assert_follows(model)
    assert_follows(model, torch.arange(7).expand(2, 7) % 3 == 1)
    _, state = steps(model)
    for window in torch.utils._pytree.tree_leaves(state):
        assert window.is_contiguous()
        assert window.untyped_storage().nbytes() == window.numel() * window.element_size()
    with torch.no_grad():
        model.q.weight += 1.0
        assert_follows(model)
        model.r.register_forward_hook(lambda module, inputs, out: 2 * out)
    assert_follows(model)


@pytest.mark.parametrize(
    ("block", "read", "products"),
    [(12, "w", 3), (12, "f", 0), (6, "w", 0)],  # all maps; one that another step reads; one with other blocks
)
def test_gates_that_only_the_cell_reads_are_computed_with_its_recurrence(block: int, read: str, products: int) -> None:
    """One product of blocks for each value that the gates are maps of, to which the recurrence is added."""
    model = build(GATES.replace("BLOCK", str(block)).replace("READ", read))
    assert_follows(model)
    assert_follows(model, torch.arange(7).expand(2, 7) % 3 == 1)
    _, state = steps(model)
    for part in torch.utils._pytree.tree_leaves(state):
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()
    with torch.no_grad():
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            both, after = model.step(tokens()[:, 0], state)
        one, first = model.step(tokens()[:1, 0], seqblocks.state.map_state(lambda x: x[:1], state))
    assert sum(event.count for event in recorded.key_averages() if event.key == "aten::baddbmm_") == products
    torch.testing.assert_close(one, both[:1], rtol=1e-10, atol=1e-10)
    for found, part in zip(*map(torch.utils._pytree.tree_leaves, (first, after)), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, part[:1], rtol=1e-10, atol=1e-10)


def test_a_changed_map_of_a_gate_is_seen() -> None:
    model = build(GATES.replace("BLOCK", "12").replace("READ", "w"))
    step = compiled(model)
    assert_follows(model)
    assert_compiled_follows(model, step)
    with torch.no_grad():
        model.z.bias += 1.0
        assert_follows(model)
        assert_compiled_follows(model, step)
        model.o.weight = nn.Parameter(2 * model.o.weight)
        assert_follows(model)
    model.f.register_forward_hook(lambda module, inputs, out: 2 * out)
    assert_follows(model)


def test_resets() -> None:
    resets = torch.zeros(2, 7, dtype=torch.bool)
    resets[0, 3] = resets[1, 0] = resets[1, 5] = True
    assert_follows(build(), resets)


def test_a_state_of_the_past_is_not_changed() -> None:
    model = build()
    with torch.no_grad():
        _, state = model.step(tokens()[:, 0])
        before = copy.deepcopy(state)
        model.step(tokens()[:, 1], state)
    torch.testing.assert_close(state, before, rtol=0, atol=0)


SEEN = [
    add_to_all, load_others, assign_others, replace_last, parametrize_last, hook_block, hook_inside, set_class,
    set_class_of_block, set_class_of_model, set_op,
]  # fmt: skip
CHANGES = [*SEEN, set_data]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_planned_again(change: Any) -> None:
    model = build()
    before, _ = steps(model)
    change(model)
    after, _ = steps(model)
    assert (after - before).abs().max() > 1e-3
    assert_follows(model)


@pytest.mark.parametrize("change", SEEN)
def test_a_change_applies_from_the_next_token_on(change: Any) -> None:
    model, x = build(), tokens()
    _, state = steps(model)
    change(model)
    with torch.no_grad():
        y, _ = model.step(x[:, 0], state)
        expected, _ = model(x[:, :1], state=state, return_state=True)
    torch.testing.assert_close(y, expected[:, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["p", "q", "s"])
def test_another_op_of_a_step_that_is_computed_with_others_is_used_from_the_next_token_on(name: str) -> None:
    model, x = build(CONVOLUTIONS), tokens()
    _, state = steps(model)
    module: Any = model.get_submodule(name)
    module.op = module.op.model_copy(update={"activation": "none"})
    with torch.no_grad():
        y, _ = model.step(x[:, 0], state)
        expected, _ = model(x[:, :1], state=state, return_state=True)
    torch.testing.assert_close(y, expected[:, 0], rtol=1e-10, atol=1e-10)
    assert_follows(model)


def test_an_undetectable_change_applies_from_the_next_stream_on() -> None:
    model = build()
    steps(model)
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    model.init_state(2)
    assert_follows(model)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_update_by_a_fused_optimiser_applies_from_the_next_token_on(optimizer: Any) -> None:
    """Such an optimiser changes parameters, but not their versions."""
    model, x = build(), tokens()
    _, state = steps(model)
    plan = model.token_plan
    assert plan is not None
    model(x).square().mean().backward()
    optimizer(model.parameters(), lr=0.1, fused=True).step()
    with torch.no_grad():
        y, _ = model.step(x[:, 0], state)
        expected, _ = model(x[:, :1], state=state, return_state=True)
    torch.testing.assert_close(y, expected[:, 0], rtol=1e-10, atol=1e-10)
    assert model.token_plan
    assert model.token_plan._make_run is plan._make_run  # the plan is not made again


def test_a_compiled_optimiser_is_compiled_once() -> None:
    model = build(SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            model(tokens()).square().mean().backward()
            step()
    assert_follows(model)


@pytest.mark.parametrize("spec", [SPEC, CONVOLUTIONS], ids=["mixers", "convolutions"])
def test_a_new_stream_computes_derived_values_again_without_a_new_plan(spec: str) -> None:
    model = build(spec)
    steps(model)
    plan = model.token_plan
    assert plan is not None
    for parameter in model.parameters():
        parameter.data.add_(0.1)
    model.init_state(2)
    assert_follows(model)
    assert model.token_plan
    assert model.token_plan._make_run is plan._make_run


def _to_float64(model: SequenceModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.double()


def _transpose(model: SequenceModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter.data


@pytest.mark.parametrize("change", [_to_float64, _transpose])
def test_a_new_stream_follows_parameters_that_were_moved(change: Any) -> None:
    model = build(dtype=torch.float32 if change is _to_float64 else torch.float64)
    steps(model)
    change(model)
    model.init_state(2)
    assert_follows(model)


def test_generating_from_a_state_is_a_new_stream() -> None:
    model, prompt = seqblocks.build("mamba_small", set={"depth": 1}).eval(), torch.arange(8)[None]
    with torch.inference_mode():
        _, state = model(prompt, return_state=True)
    seqblocks.generate(model, [9], 4, state=state)
    for name, parameter in model.named_parameters():
        if "conv1d" in name:
            parameter.data.mul_(-8)
    found = seqblocks.generate(model, [9], 12, state=state)
    assert torch.equal(found[0], seqblocks.generate(copy.deepcopy(model), [9], 12, state=state)[0])


def test_copies_and_pickles() -> None:
    model = build()
    steps(model)
    twin, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    add_to_all(model)
    assert_follows(twin)
    assert_follows(again)
    assert_follows(model)
    assert (steps(model)[0] - steps(twin)[0]).abs().max() > 1e-3


def test_torchs_default_device_is_not_used() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: {features: 24, as: [q, k, v]}}, MIXER]}"
    mixer = "{linear_attention: {q: q, k: k, v: v, heads: 2, fixed_decay: retention}}"
    model, x = build(text.replace("MIXER", mixer)), torch.ones(2, 8, dtype=torch.float64)
    with torch.no_grad():
        with torch.device("meta"):
            y, _ = model.step(x)
        torch.testing.assert_close(y, model(x[:, None])[:, 0])


@pytest.mark.parametrize("spec", [SPEC, EXPERTS], ids=["mixers", "experts"])
def test_a_deleted_model_frees_its_memory_at_once(spec: str) -> None:
    model = build(spec)
    next(iter(model.children())).register_forward_hook(lambda *_: None)
    steps(model)
    assert model.token_plan is not None
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not any(parameter() is not None for parameter in parameters)
    finally:
        gc.enable()


def test_training_and_gradients_do_not_use_the_plan() -> None:
    model = build()
    steps(model)
    state = model.init_state(2)
    y, _ = model.step(tokens()[:, 0], state)
    assert y.requires_grad
    model.train()
    with torch.no_grad():
        assert model._plan_for(tokens()[:, 0]) is None


def test_the_environment_and_hooks_are_checked_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(), tokens()[:, 0]
    steps(model)
    plan = model.token_plan
    with torch.no_grad():
        monkeypatch.setenv("SEQBLOCKS_BACKEND", "reference")
        assert model._plan_for(x) is None
        monkeypatch.delenv("SEQBLOCKS_BACKEND")
        nn.Linear(2, 2).register_forward_hook(lambda *_: None)  # of another model
        assert model._plan_for(x) is plan is not None
        handle = model.mlstm_block.register_forward_pre_hook(lambda *_: None)
        assert model._plan_for(x) is not plan
        handle.remove()
        assert_follows(model)
        del model.headwise_linear
        assert not model.token_plan.holds()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = build(dtype=dtype)
    found, _ = steps(model)
    with torch.no_grad():
        expected = model(tokens())
    bar = 40 * torch.finfo(dtype).eps  # some forty consecutive roundings of numbers below 1
    torch.testing.assert_close(found, expected, rtol=0, atol=bar * expected.abs().max().item())


def test_autocast_is_obeyed() -> None:
    model = build(dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = model.step(tokens()[:, 0])
    assert y.dtype == torch.bfloat16


def test_a_state_that_does_not_fit_is_an_error() -> None:
    model = build()
    _, state = steps(model)
    with torch.no_grad():
        for broken in ({}, {**state, "more": 1}, {**state, "mlstm_block": {}}, {**state, "mlstm_block": 3}, 3):
            with pytest.raises(RunError, match="state"):
                model.step(tokens()[:, 0], broken)  # type: ignore[arg-type]
        with pytest.raises(RunError, match="holds 2 sequences and the input 1"):
            model.step(tokens()[:1, 0], state)
        with pytest.raises(RunError, match="outside the vocabulary"):
            model.step(tokens()[:, 0] + 11, state)


def test_a_token_without_a_batch_is_an_error() -> None:
    model = build()
    with torch.no_grad():
        for state in (None, model.init_state(1)):
            with pytest.raises(RunError, match=r"a step reads token ids \[batch\], not torch.int64 \[\]"):
                model.step(torch.tensor(3), state)


def test_a_state_of_another_dtype_is_used_as_before() -> None:
    model = build(dtype=torch.float32)
    _, state = steps(model)
    double = seqblocks.state.map_state(lambda x: x.double() if x.is_floating_point() else x, state)
    with torch.no_grad():
        y, _ = model.step(tokens()[:, 0], double)
        expected, _ = model.step(tokens()[:, 0], state)
    torch.testing.assert_close(y, expected)


def test_states_have_memory_of_their_own() -> None:
    for part in torch.utils._pytree.tree_leaves(steps(build())[1]):
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


@pytest.mark.parametrize(
    "mixer",
    ["slstm: {i: a, f: b, z: c, o: d, heads: 2}", "mlstm: {q: a, k: b, v: c, i: i, f: d, heads: 8}",
     "gated_recurrence: {x: a, decay: b}", "shift: {from: a, by: 1}", "causal_conv: {from: a, kernel: 2}"],
)  # fmt: skip
def test_an_output_that_is_overwritten_does_not_change_the_state(mixer: str) -> None:
    used = [name for name in "abcdi" if re.search(rf": {name}[,}}]", mixer)]
    linear = "".join(f"    - linear: {{from: input, features: 8, as: {name}}}\n" for name in used)
    text = f"seqblocks: 1\nmodel:\n  input: {{features: 8}}\n  steps:\n{linear}    - {mixer}\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)  # the decay may be above 0
        model = build(text)
    x, state = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), None
    with torch.no_grad():
        for t, expected in enumerate(model(x).unbind(1)):
            token = x[:, t].clone()
            y, state = model.step(token, state)
            torch.testing.assert_close(y, expected)
            token.fill_(9.0)
            y.fill_(9.0)


@pytest.mark.parametrize(("width", "products"), [(16, 1), (1024, 2)])
def test_only_small_matrices_are_copied_into_one(width: int, products: int) -> None:
    text = f"""
seqblocks: 1
model:
  input: {{features: 1024}}
  steps:
    - linear: {{features: {width}, as: a}}
    - linear: {{from: input, features: {width}, name: b}}
    - add: {{with: a}}
"""
    model, x = seqblocks.build_text(text).eval(), torch.randn(1, 1024)
    with torch.inference_mode():
        _, state = model.step(x)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            model.step(x, state)
    keys = ("aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")  # as `prepare_linear` chooses
    assert sum(event.count for event in recorded.key_averages() if event.key in keys) == products


def test_a_stream_holds_its_state() -> None:
    model, x = build(), tokens()
    with torch.no_grad():
        expected = model(x)
    stream = model.stream(2)
    found = [stream.read(x[:, :3]), stream.step(x[:, 3])[:, None]]
    stream.select(torch.tensor([1]))
    torch.testing.assert_close(torch.cat(found, 1), expected[:, :4], rtol=1e-10, atol=1e-10)
    resets = torch.tensor([True])
    torch.testing.assert_close(stream.step(x[1:, 4]), expected[1:, 4], rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        alone = model(x[1:, 5:6])[:, 0]
    torch.testing.assert_close(stream.step(x[1:, 5], resets=resets), alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("mamba_small", 1.05), ("mlstm_small", 1.05), ("hybrid_small", 1.05), ("slstm", 1.05), ("gla", 1.05),
        ("centaurus", 1.05),
        ("gated_deltanet", 1.12),  # the convolutions of q, k and v have separate states, which are joined and split
    ],
)  # fmt: skip
def test_the_number_of_operations_is_close_to_code_by_hand(name: str, most: float) -> None:
    """The number of torch operations for one token is close to that of the benchmark's step written by hand."""
    by_hand = benchmark()
    assert by_hand.largest_difference(name, tokens=10) < 2e-6
    model = by_hand.build(name)
    step, state = by_hand.by_hand(model, 1)
    token, ours = torch.zeros(1, dtype=torch.long), model.init_state(1)
    with torch.inference_mode():
        _, ours = model.step(token, ours)
        found = _operations(lambda: model.step(token, ours))
        expected = _operations(lambda: step(token, state))
    assert found <= most * expected


def _operations(function: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    return sum(event.count for event in recorded.key_averages() if event.key.startswith("aten::"))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its attention
def test_transforms_of_functions_do_not_use_the_plan() -> None:
    """`vmap` over sequences gives the same result as a batch."""
    model, x = build(), tokens()[:, 0]
    with torch.no_grad():
        expected, _ = model.step(x)
        state = model.init_state(1)
        found = torch.func.vmap(lambda token: model.step(token[None], state)[0][0])(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

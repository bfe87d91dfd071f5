"""Steps under torch.compile (seqblocks/streaming/traced.py): one graph, no stale weights, few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import seqblocks
from seqblocks.kernels import use_backend
from seqblocks.streaming.plan import TokenPlan
from tests.torch.planned import (
    CONVOLUTIONS,
    SMALL,
    add_to_all,
    assert_compiled_follows,
    assign_others,
    benchmark,
    build,
    compiled,
    hook_block,
    hook_inside,
    load_others,
    parametrize_last,
    replace_last,
    set_class_of_model,
    set_data,
    set_op,
    tokens,
)  # fmt: skip


@pytest.mark.slow
def test_a_compiled_step_follows_a_changed_model() -> None:
    """It reads the current parameters, and is compiled again if a step was replaced."""
    model = build(SMALL)
    step = compiled(model)
    assert_compiled_follows(model, step)
    assert isinstance(model.traced_plan, TokenPlan)
    for change in (add_to_all, set_data, load_others, assign_others, set_op, parametrize_last, replace_last):
        change(model)
        assert_compiled_follows(model, step)


def test_functions_that_are_not_traced_take_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to torch 2.11, a compiler passes constants alone to a function that it calls instead of tracing it."""
    from torch._dynamo.variables import functions

    call, taken = functions.invoke_and_store_as_constant, []

    def watched(tx: Any, function: Any, name: str, args: Any, named: Any) -> Any:
        taken.append((name, [getattr(x, "value", None) for x in args]))
        return call(tx, function, name, args, named)

    monkeypatch.setattr(functions, "invoke_and_store_as_constant", watched)
    model = build(SMALL)
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True)(tokens())
        torch.compile(model.step, backend="eager", fullgraph=True)(tokens()[:, 0])
    assert taken
    assert not [name for name, values in taken if any(isinstance(x, nn.Module) for x in values)]


def test_a_compiled_step_calls_no_module_for_the_logits() -> None:
    model = build("""
seqblocks: 1
model: {input: {tokens: 16}, steps: [{embed: {features: 8}}, {unembed: {bias: false, tie: embed}}]}
""")
    assert_compiled_follows(model, compiled(model))
    assert isinstance(model.traced_plan, TokenPlan)
    assert not model.traced_plan.calls_modules


@pytest.mark.slow
def test_a_compiled_step_runs_the_forward_of_a_subclass() -> None:
    model = build(SMALL)
    set_class_of_model(model)
    assert_compiled_follows(model, compiled(model))


@pytest.mark.slow
def test_a_stream_that_begins_in_compiled_code_is_compiled_once() -> None:
    model, x = build(SMALL), tokens()[:, 0]
    torch._dynamo.reset()
    begin = torch.compile(lambda x: model.step(x, model.init_state(2)), backend="eager", fullgraph=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        expected, _ = model.step(x)
        for _ in range(3):
            torch.testing.assert_close(begin(x)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_compiled_step_with_experts_follows_a_changed_model() -> None:
    """Experts break the graph: what is read before the break has to be guarded there."""
    experts = "experts: {count: 3, top: 2, steps: [{linear: 8}]}"
    text = f"seqblocks: 1\nmodel: {{input: {{features: 8}}, steps: [{{{experts}}}, {{linear: 4}}]}}"
    model, x = seqblocks.build_text(text, seed=0, dtype=torch.float64).eval(), torch.ones(2, 8, dtype=torch.float64)
    step = torch.compile(model.step, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(step(x), model.step(x))
        model.linear = nn.Linear(8, 4, dtype=torch.float64)
        torch.testing.assert_close(step(x), model.step(x))


class Breaks(nn.Linear):
    """A user's module that breaks the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0 * x.sum().item())


@pytest.mark.slow
def test_a_compiled_step_with_a_break_follows_a_changed_model() -> None:
    text = "seqblocks: 1\nmodel: {input: {features: 8}, steps: [{linear: {features: 8, name: a}}, {linear: 4}]}"
    model, x = seqblocks.build_text(text, seed=0, dtype=torch.float64).eval(), torch.ones(2, 8, dtype=torch.float64)
    model.a = Breaks(8, 8, dtype=torch.float64)
    step = torch.compile(model.step, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(step(x), model.step(x))
        model.linear = nn.Linear(8, 4, dtype=torch.float64)
        torch.testing.assert_close(step(x), model.step(x))


@pytest.mark.long  # test_children.py compiles a model with a hook
def test_a_compiled_step_calls_hooks() -> None:
    model = build(SMALL)
    hook_block(model)
    hook_inside(model)
    assert_compiled_follows(model, compiled(model))


def test_a_compiled_step_marks_new_sequences() -> None:
    model = build(SMALL)
    step, x, resets = compiled(model), tokens(), torch.tensor([False, True])
    with torch.no_grad():
        _, state = model.step(x[:, 0])
        expected, _ = model.step(x[:, 1], state, resets=resets)
        found, _ = step(x[:, 1], state, resets=resets)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.long
def test_a_compiled_step_leaves_autocast_and_other_backends_to_forward() -> None:
    """It multiplies states as matrices, which autocast would round."""
    model = build(SMALL, dtype=torch.float32)
    state, x = model.init_state(2), tokens()[:, 0]
    with torch.no_grad(), use_backend("reference"):
        compiled(model)(x, state)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        compiled(model)(x, state)
    assert model.traced_plan is None


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("hybrid_small", "slstm")]


@pytest.mark.parametrize("name", ["mamba_small", pytest.param("mlstm_small", marks=pytest.mark.slow), *LONG])
def test_compiled_as_few_operations_as_by_hand(name: str) -> None:
    """One graph serves all tokens. The number of its nodes determines the compile time."""
    by_hand = benchmark()
    ours = by_hand.graphs_of(name, True, lambda graph, _: graph.forward, calls=3)
    hand = by_hand.graphs_of(name, False, lambda graph, _: graph.forward)
    nodes = [sum(node.op.startswith("call") for node in found[0].graph.nodes) for found in (ours, hand)]
    assert len(ours) == 1
    assert nodes[0] <= 1.35 * nodes[1]


@pytest.mark.parametrize(
    "name", ["gla", *(pytest.param(name, marks=pytest.mark.long) for name in ("slstm", "gated_deltanet"))]
)
def test_a_compiled_step_calls_no_library_for_one_row(name: str) -> None:
    """torch's compiler computes products of one row in its own kernels, but not `baddbmm`, which would divide them."""
    by_hand = benchmark()
    (graph,) = by_hand.graphs_of(name, True, lambda graph, _: graph.forward)
    assert torch.baddbmm not in {node.target for node in graph.graph.nodes}
    assert torch.bmm in {node.target for node in graph.graph.nodes}


def test_compiled_products_of_one_input_run_next_to_each_other() -> None:
    """A compiler calls a library for each product and makes a kernel of what lies between two calls."""
    by_hand = benchmark()
    (graph,) = by_hand.graphs_of("gated_deltanet", True, lambda graph, _: graph.forward)
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
    products = [at for at, node in enumerate(nodes) if node.target is torch._C._nn.linear]
    by_input: dict[Any, list[int]] = {}
    for at in products:
        by_input.setdefault(nodes[at].args[0], []).append(at)
    joined = [places for places in by_input.values() if len(places) > 1]
    assert [len(places) for places in joined] == [6, 6, 6]
    assert all(places == [*range(places[0], places[0] + 6)] for places in joined)


@pytest.mark.slow
def test_a_compiled_step_with_products_of_one_input_follows_a_changed_model() -> None:
    model = build(CONVOLUTIONS)
    step = compiled(model)
    assert_compiled_follows(model, step)
    with torch.no_grad():
        model.b.weight += 1.0
        model.q.weight += 1.0
    assert_compiled_follows(model, step)
    model.b.register_forward_hook(lambda module, inputs, out: 2 * out)
    assert_compiled_follows(model, compiled(model))

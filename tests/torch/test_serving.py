"""Serving models and training them with other tools: stored states, wrapped layers, exports for any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import seqblocks
from seqblocks import RunError
from seqblocks import state as states
from seqblocks.model.sequence_model import SequenceModel
from seqblocks.testing import check_law, random_input

STREAMING = {
    "hybrid_small": {"dim": 16, "depth": 1, "vocabulary": 11, "window": 5},
    "xlstm_125m_7_1": {"dim": 16, "vocabulary": 11, "model.blocks.pattern": "m s"},
    "mamba_130m": {"dim": 16, "depth": 1, "vocabulary": 11},
    "memoroid_agent": {"dim": 8, "observation": 5},
    "centaurus_mlstm": {"dim": 16, "depth": 1},
}
LAYERS = """
seqblocks: 1
model:
  input: {features: 4}
  steps:
    - linear: {features: 4, name: before, as: w}
    - repeat: {name: layers, times: 3, steps: [{linear: {features: 4, from: [input, w]}}, silu]}
    - parallel: {name: both, merge: sum, branches: [{a: [silu]}, {b: [{linear: {features: 4}}]}]}
    - causal_conv: {kernel: 2}
"""


def made(name: str, **options: Any) -> SequenceModel:
    return seqblocks.build(name, set=STREAMING[name], **options).eval()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", STREAMING)
def test_a_state_owns_its_memory(name: str, batch: int, mode: Callable[[], Any]) -> None:
    model = made(name)
    with mode():
        x = random_input(model, batch, 30)
        _, state = model(x, return_state=True)
        _, after = model.step(x[:, 0], state)
    for found in (state, after):
        for t, fresh in zip(*(pytree.tree_leaves(s) for s in (found, model.init_state(batch))), strict=True):
            assert (t.shape, t.dtype) == (fresh.shape, fresh.dtype)
            assert t.is_contiguous()
            assert t.untyped_storage().nbytes() == t.numel() * t.element_size()


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [name if name == "mamba_130m" else pytest.param(name, marks=pytest.mark.slow) for name in STREAMING]
)
def test_a_stream_is_compiled_once(name: str, batch: int) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = made(name)
    step, state = torch.compile(model.step, backend="eager"), model.init_state(batch)
    expected = state
    x = random_input(model, batch, 3).detach()
    with torch.no_grad():
        for t in range(3):
            found, state = step(x[:, t], state)
            y, expected = model.step(x[:, t], expected)
            torch.testing.assert_close((found, state), (y, expected), rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_state_of_other_dtypes_is_refused() -> None:
    model = made("hybrid_small")
    x = random_input(model, 2, 9)
    _, state = model(x, return_state=True)
    for dtype, kind in ((torch.bfloat16, "int64|float32"), (torch.int64, "float32|of the model's dtype")):
        wrong = states.map_state(lambda t, dtype=dtype: t.to(dtype), state)
        with pytest.raises(seqblocks.RunError, match=f"must be ({kind}), and is {str(dtype).removeprefix('torch.')}"):
            model.step(x[:, 0], wrong)
    with pytest.raises(seqblocks.RunError, match="its dtypes must stay"):
        states.to(state, torch.bfloat16)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "f64"])
def test_a_new_state_has_the_dtypes_of_a_returned_one(dtype: str) -> None:
    """Centaurus comes first, with parameters in float32."""
    model = made("centaurus_mlstm", dtype=dtype)
    check_law(model, seq=5)
    _, state = model(random_input(model, 1, 4), return_state=True)
    for t, fresh in zip(*(pytree.tree_leaves(s) for s in (state, model.init_state(1))), strict=True):
        assert t.dtype == fresh.dtype


class Around(nn.Module):
    """Pass on all arguments, as wrappers for sharding, compiling or checkpointing do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


@torch.no_grad()
def test_layers_and_branches_can_be_wrapped_and_replaced() -> None:
    model = seqblocks.build_text(LAYERS, dtype=torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    expected = model(x)
    layers: Any = model.layers
    first, wrapped = layers[0], Around(layers[1])
    layers[1] = wrapped
    layers[0] = torch.compile(first, backend="eager")
    branch = Around(model.both.b)
    model.both.b = branch
    torch.testing.assert_close(model(x), expected)
    model.init_state(2)
    torch.testing.assert_close(model(x, return_state=True)[0], expected)
    assert (wrapped.calls, branch.calls) == (2, 2)
    layers[0] = first
    layers[-1] = nn.Identity()
    assert model(x).shape == expected.shape
    layers[1] = nn.Linear(4, 4, dtype=torch.float64)  # it is called with the first of the layer's wires
    assert model(x).shape == expected.shape
    with pytest.raises(seqblocks.RunError, match="1: the Linear that replaces it carries no state"):
        model(x, return_state=True)


def test_directions_that_own_all_can_be_wrapped() -> None:
    steps = "[{scan: {name: s, order: [forward, reverse], own: all, steps: [{causal_conv: {kernel: 3}}]}}]"
    model = seqblocks.build_text(f"seqblocks: 1\nmodel: {{input: {{features: 4}}, steps: {steps}}}\n")
    x = torch.randn(2, 5, 4)
    expected = model(x)
    model.s._modules["rev"] = Around(model.s._modules["rev"])
    torch.testing.assert_close(model(x), expected)


def test_a_replacement_is_called_with_the_joined_input() -> None:
    model = seqblocks.build_text(
        "seqblocks: 1\nmodel: {input: {features: 4}, steps: "
        "[{linear: {features: 3, as: a}}, {linear: {from: [input, a], features: 2, name: both}}]}\n"
    )
    x = torch.randn(2, 5, 4)
    expected = model(x)
    other = nn.Linear(7, 2)
    other.load_state_dict(model.both.state_dict())
    model.both = other
    torch.testing.assert_close(model(x), expected)
    model.both = Around(other)  # ignores arguments that an ordinary module does not accept
    with pytest.raises(TypeError, match="call"):
        model(x)


def test_a_step_of_another_dtype_is_not_reported_as_a_fault_of_the_input() -> None:
    model = made("mamba_130m", dtype="bf16")
    name = "layers.0.mamba_block.residual.mixer.in_proj"
    step = model.get_submodule(name)
    model.set_submodule(name, nn.Linear(step.weight.shape[1], step.weight.shape[0], bias=False))
    with pytest.raises(RunError, match=f"{name}.weight is float32 and the model bfloat16") as error:
        model(random_input(model, 1, 4))
    assert "int64" not in str(error.value)


@pytest.mark.parametrize("name", ["mamba_130m", pytest.param("hybrid_small", marks=pytest.mark.slow)])
def test_exported_for_any_batch(name: str) -> None:
    model = made(name)
    x: Tensor = random_input(model, 3, 7)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    more = random_input(model, 400, 7, seed=1)
    torch.testing.assert_close(program.module()(more), model(more))

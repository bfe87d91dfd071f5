"""Fused steps compute the same bits as separate steps, and remain visible to hooks and other tools."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import seqblocks
from seqblocks import graph
from seqblocks.analysis import check
from seqblocks.runtime import fusion
from seqblocks.runtime.body import Body
from seqblocks.runtime.primitive import Primitive

BLOCKS = {
    "vil": ("vil", "vil: {dim: 8, heads: 2}"),
    "vil2": ("vil", "vil2: {dim: 8, heads: 2}"),
    "xlstm_large_block": ("xlstm", "xlstm_large_block: {dim: 16, heads: 2}"),
    "mlstm_block": ("xlstm", "mlstm_block: {dim: 16, heads: 2, multiple: 16}"),  # the norm is the cell's last step
}
TAIL = """
seqblocks: 1
model:
  input: {features: 8}
  steps:
    - linear: {features: 16, as: [u, z]}
    - head_norm: {from: u, heads: 2, bias: true, name: norm}
"""


def model(text: str) -> seqblocks.SequenceModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", seqblocks.errors.SpecWarning)  # some of these specs do not use every part
        made = seqblocks.build_text(text, seed=1)
    with torch.no_grad():
        for at, parameter in enumerate(made.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at)) * 0.3)
    return made


def block(name: str) -> seqblocks.SequenceModel:
    file, step = BLOCKS[name]
    features = 16 if "16" in step else 8
    return model(
        f"seqblocks: 1\nuse: [{file}]\nmodel: {{input: {{features: {features}, grid: [2, 3]}}, steps: [{{{step}}}]}}"
    )


def groups(made: nn.Module) -> list[list[str]]:
    groups = (group for m in made.modules() if isinstance(m, Body) for group in getattr(m, "_plan", ()))
    return [[node.verb for node in group.fused.nodes] for group in groups if group.fused]


def results(made: seqblocks.SequenceModel, x: Tensor, call: Any = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = (made if call is None else call)(x)
    leaves = [x, *made.parameters()]
    return [y, *torch.autograd.grad(y.square().sum(), leaves, allow_unused=True, materialize_grads=True)]


def one_by_one(made: seqblocks.SequenceModel) -> seqblocks.SequenceModel:
    """Return a copy with a hook on each step, which prevents fusion."""
    made = copy.deepcopy(made)
    for part in made.modules():
        if isinstance(part, Primitive):
            part.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("name", BLOCKS)
def test_the_same_bits(name: str) -> None:
    made = block(name)
    assert groups(made)
    x = torch.randn(2, 6, made.spec.input.features)
    for a, b in zip(results(made, x), results(one_by_one(made), x), strict=True):
        assert torch.equal(a, b)
    narrow = made.bfloat16()
    for a, b in zip(results(narrow, x.bfloat16()), results(one_by_one(narrow), x.bfloat16()), strict=True):
        assert torch.equal(a, b)


TAILS = {
    "": [],
    "- learnable_skip: {with: z}": [["head_norm", "learnable_skip"]],
    "- gate: {by: z, activation: sigmoid}": [["head_norm", "gate"]],
    "- learnable_skip: {with: z}\n    - gate: {by: z}": [["head_norm", "learnable_skip", "gate"]],
    "- learnable_skip: {with: z}\n    - gate: {by: z, as: [a, b]}\n    - linear: {from: b, features: 3, name: out}": [
        ["head_norm", "learnable_skip", "gate"]
    ],
    "- gate: {by: z, activation: gelu}": [],  # an activation that the kernel does not support
    "- learnable_skip: {with: z}\n    - gate: {by: z, activation: gelu}": [["head_norm", "learnable_skip"]],
    "- relu\n    - gate: {by: z}": [],  # a step between them
    "- gate: {from: z, by: norm}": [],  # the norm is the gate
}


@pytest.mark.parametrize("tail", TAILS, ids=range(len(TAILS)))
def test_fused_groups(tail: str) -> None:
    text = TAIL + (f"    {tail}\n" if tail else "")
    if "by: norm" in tail:
        text = text.replace("name: norm}", "name: norm, as: norm}")
    made = model(text)
    assert groups(made) == TAILS[tail]
    x = torch.randn(2, 5, 8)
    for a, b in zip(results(made, x), results(one_by_one(made), x), strict=True):
        assert torch.equal(a, b)


def test_outputs_with_other_readers_are_computed() -> None:
    text = TAIL.replace("name: norm}", "name: norm, as: n}")
    made = model(text + "    - gate: {by: z}\n    - gate: {by: n, name: again}\n")
    assert groups(made) == []


def test_a_hook_on_any_of_them_is_called() -> None:
    made = model(TAIL + "    - learnable_skip: {with: z}\n    - gate: {by: z}\n")
    x = torch.randn(1, 3, 8)
    expected = made(x)
    for name in ("norm", "learnable_skip", "gate"):
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            seen: list[str] = []
            handle = getattr(made.get_submodule(name), register)(lambda *_, seen=seen: seen.append("called"))
            assert torch.equal(made(x), expected)
            assert seen == ["called"]
            handle.remove()
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__))
    made(x)
    handle.remove()
    assert len(seen) == 5


CELL = """
seqblocks: 1
blocks:
  outer:
    steps: [{linear: {features: 8}}, inner]
  inner:
    steps: [{causal_conv: {kernel: 3}}, {head_norm: {heads: 2, name: norm}}]
model:
  input: {features: 8}
  steps:
    - linear: {features: 8, as: z}
    - outer: {from: input, name: cell}
    - gate: {by: z}
"""


def test_the_last_step_of_a_block_runs_as_one_with_what_follows() -> None:
    made = model(CELL)
    assert groups(made) == [["outer", "gate"]]
    x = torch.randn(2, 5, 8)
    for a, b in zip(results(made, x), results(one_by_one(made), x), strict=True):
        assert torch.equal(a, b)
    made.eval()
    whole, state = made(x), None
    for at in range(5):
        y, state = made.step(x[:, at], state)
        torch.testing.assert_close(y, whole[:, at])


@pytest.mark.parametrize("name", ["cell", "cell.inner", "cell.inner.norm", "gate"])
def test_every_step_inside_the_block_is_visible(name: str) -> None:
    made, x = model(CELL), torch.randn(1, 5, 8)
    expected, seen = made(x), []
    handle = made.get_submodule(name).register_forward_hook(lambda *_: seen.append("called"))
    assert torch.equal(made(x), expected)
    handle.remove()
    inside = made.get_submodule(name)
    first = inside.forward
    inside.forward = lambda *a, **k: seen.append("called") or first(*a, **k)  # type: ignore[method-assign,func-returns-value]
    assert torch.equal(made(x), expected)
    assert seen == ["called"] * 2


@pytest.mark.parametrize(
    "step",
    [
        "outer: {from: input, name: cell, as: y}\n    - gate: {by: y, name: twice}",  # another step reads it
        "outer: {from: input, name: cell, as: [y, w]}",  # it is split
        "outer: {from: input, name: cell}\n    - relu",
        "residual: {from: input, name: cell, steps: [outer]}",  # the norm's input is another wire
    ],
)
def test_the_output_of_the_block_must_be_the_norms_input(step: str) -> None:
    text = CELL.replace("outer: {from: input, name: cell}", step)
    if "[y, w]" in step:
        text = text.replace("gate: {by: z}", "linear: {from: [y, z], features: 8, name: last}")
    made, x = model(text), torch.randn(1, 5, 8)
    assert ["outer", "gate"] not in groups(made)
    for a, b in zip(results(made, x), results(one_by_one(made), x), strict=True):
        assert torch.equal(a, b)


def test_a_replacement_of_a_step_is_used() -> None:
    made = model(TAIL + "    - gate: {by: z}\n")

    class Wrapped(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, *tensors: Tensor, call: Any) -> Any:
            return 2 * self.inside(*tensors, call=call)

    x = torch.randn(1, 3, 8)
    expected = 2 * made(x)
    made._modules["gate"] = Wrapped(made.get_submodule("gate"))
    assert torch.equal(made(x), expected)


@pytest.mark.slow
def test_names_stay_and_a_compiler_sees_no_break() -> None:
    made = block("vil")
    assert "vil.residual.scan.learnable_skip.weight" in made.state_dict()
    x = torch.randn(2, 6, 8)
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for a, b in zip(results(made, x, compiled), results(made, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    program = torch.export.export(made, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), made(x))


def test_bundled_models_have_them() -> None:
    """Adjacent steps of these verbs are fused in every layer."""
    for name, layers in (("vil_tiny", 24), ("vil_digits", 4), ("xlstm_125m_7_1", 22)):
        built = check.load_model(name)
        bodies = [node.bodies[""] for node in graph.walk(built.graph) if "" in node.bodies]
        assert sum(len(fusion.find(body, built.types)) for body in bodies) == layers


def tail() -> seqblocks.SequenceModel:
    return model(TAIL + "    - learnable_skip: {with: z}\n    - gate: {by: z}\n")


def test_a_patched_forward_is_called() -> None:
    made, seen, x = tail(), [], torch.randn(2, 5, 8)
    before, inner = made(x), made.norm.forward

    def watched(*args: Any, **more: Any) -> Any:
        seen.append(1)
        return inner(*args, **more)

    made.norm.forward = watched
    assert torch.equal(made(x), before)
    assert seen == [1]


def test_another_step_in_place_of_one_runs() -> None:
    made, x = tail(), torch.randn(2, 5, 8)
    other = seqblocks.build_text("seqblocks: 1\nmodel: {input: {features: 8}, steps: [layer_norm: {}]}", seed=1)
    made.norm = other.layer_norm
    u, z = made.linear(x).split(8, -1)
    expected = (torch.nn.functional.layer_norm(u, (8,)) + made.learnable_skip.weight * z) * torch.nn.functional.silu(z)
    torch.testing.assert_close(made(x), expected)


def test_an_ordinary_module_may_replace_a_step() -> None:
    made, x = tail(), torch.randn(2, 5, 8)
    made.norm = nn.Identity()
    u, z = made.linear(x).split(8, -1)
    torch.testing.assert_close(made(x), (u + made.learnable_skip.weight * z) * torch.nn.functional.silu(z))
    scan = seqblocks.build("mlstm_small")
    stateful = next(m for m in scan.modules() if isinstance(m, Body) and "mlstm" in m._modules)
    stateful.mlstm = Second()
    with pytest.raises(seqblocks.RunError, match="mlstm: the Second that replaces it carries no state"):
        scan.step(torch.zeros(1, dtype=torch.long))


def test_a_compiled_step_is_called_as_it_was() -> None:
    made, x = tail(), torch.randn(2, 5, 8)
    before = made(x)
    torch._dynamo.reset()
    for step in ("linear", "norm"):
        made._modules[step] = torch.compile(made.get_submodule(step), backend="eager")
    with torch.no_grad():  # torch's compiler reads .grad of a tensor that is no leaf, which warns
        torch.testing.assert_close(made(x), before)


class Second(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
        return v


@pytest.mark.parametrize("step", ["norm", "linear", "learnable_skip"])
@pytest.mark.parametrize("how", ["parametrize", "prune"])
def test_computed_weights_are_read(step: str, how: str) -> None:
    """A doubled weight doubles the output, wherever torch stores the weight."""
    made, x = tail(), torch.randn(2, 5, 8)
    expected = copy.deepcopy(made)
    with torch.no_grad():
        expected.get_submodule(step).weight.mul_(2)
    if how == "parametrize":
        parametrize.register_parametrization(made.get_submodule(step), "weight", Doubled())
    else:
        weight = made.get_submodule(step).weight
        prune.custom_from_mask(made.get_submodule(step), "weight", torch.full_like(weight, 2))
    torch.testing.assert_close(made(x), expected(x))


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def test_a_vector_that_gates_tokens_is_not_fused() -> None:
    text = (
        "seqblocks: 1\nmodel:\n  input: {features: 8}\n  steps:\n    - linear: {features: 8, as: a}\n"
        "    - pool: {as: v}\n    - head_norm: {from: a, heads: 2}\n    - gate: {by: v}\n"
    )
    model, x = seqblocks.build_text(text), torch.randn(2, 6, 8)
    a = model.a(x)
    expected = model.head_norm(a) * torch.nn.functional.silu(a.mean(1, keepdim=True))
    torch.testing.assert_close(model(x), expected)

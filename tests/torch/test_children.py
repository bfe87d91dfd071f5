"""Each step, block and layer is an ordinary module: it takes the tensors that it reads, and returns a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import seqblocks
from seqblocks.runtime.modules import StepModule
from seqblocks.testing import random_context, random_input
from tests.sampled import sampled

MODELS = (
    "vil_digits", "caduceus_small", "captioner", "hybrid_small", "jamba_small", "looped_small", "memoroid_agent",
    "zamba2_small", "slstm_forecaster",
)  # fmt: skip


def children(model: nn.Module) -> list[tuple[str, StepModule]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, StepModule) and name]


@torch.no_grad()
@pytest.mark.parametrize("name", sampled(MODELS, every=4, ci=1))
def test_a_child_returns_by_itself_what_it_returns_in_the_model(name: str) -> None:
    """Within a scan from the right a step is called with tokens in their own order, and by itself it runs from the left
    or its scan has its parameters: such steps are left out."""
    model = seqblocks.build(name, seed=0, dtype="float64").eval()
    seen: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}
    plain: set[str] = set()

    def note(label: str, module: Any, given: tuple[Tensor, ...], named: dict[str, Any], y: Tensor) -> None:
        seen[label] = given, y
        if not named["call"].reverse and not named["call"].directed:
            plain.add(label)

    hooks = [each.register_forward_hook(partial(note, label), with_kwargs=True) for label, each in children(model)]
    length = model.spec.input.length if model.spec.input.kind != "image" else 0
    model(random_input(model, 2, length if isinstance(length, int) else 12, 0), **random_context(model, 2, 0))
    for hook in hooks:
        hook.remove()
    assert plain
    for label in plain:
        given, expected = seen[label]
        found = model.get_submodule(label)(*given)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=partial("{}: {}".format, label))


TEXT = """
seqblocks: 1
use: [mamba, xlstm]
let: {dim: 16}
model:
  input: {features: dim}
  steps:
    - repeat: {name: layers, times: 2, steps: [{mamba_block: {dim: dim}}, {mlstm_block: {dim: dim, heads: 2}}]}
    - linear: {features: 4, name: head}
"""


def built() -> seqblocks.SequenceModel:
    return seqblocks.build_text(TEXT, seed=0, dtype="float64")


X = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_children_compose_by_hand() -> None:
    model = built()
    x = X
    for layer in model.layers:
        x = layer.mlstm_block(layer.mamba_block(x))
    torch.testing.assert_close(model.head(x), model(X))


def test_children_are_differentiable_and_functional() -> None:
    block = built().layers[0].mamba_block
    x = X.clone().requires_grad_()
    weights = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    y = torch.func.functional_call(block, weights, (x,))
    torch.testing.assert_close(y, block(x))
    grads = torch.autograd.grad(y.square().sum(), [x, *weights.values()])
    own = torch.autograd.grad(block(x).square().sum(), [x, *block.parameters()])
    torch.testing.assert_close(grads, own)


def test_a_block_inside_a_sequential() -> None:
    model = built()
    chain = nn.Sequential(model.layers[0], nn.Linear(16, 16, dtype=torch.float64), model.layers[1])
    expected = model.layers[1](chain[1](model.layers[0](X)))
    torch.testing.assert_close(chain(X), expected)


HOOKED = [
    "layers.0", "layers.1.mamba_block", "layers.0.mlstm_block.residual", "layers.1.mamba_block.residual.mixer", "head",
]  # fmt: skip


def hooked(name: str) -> tuple[seqblocks.SequenceModel, Tensor]:
    """Return a model, one of whose modules has a hook that changes its output, and its output."""
    model = built().eval()
    before = model(X)
    model.get_submodule(name).register_forward_hook(lambda module, given, y: 1.5 * y)
    expected = model(X)
    assert (expected - before).abs().max() > 1e-3
    return model, expected


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_may_change_the_output_in_a_pass_and_in_steps(name: str) -> None:
    model, expected = hooked(name)
    if name == "head":
        torch.testing.assert_close(expected, 1.5 * built().eval()(X))
    with torch.no_grad():
        state, found = None, []
        for token in X.unbind(1):
            y, state = model.step(token, state)
            found.append(y)
        torch.testing.assert_close(torch.stack(found, 1), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_may_change_the_output_compiled_and_exported(name: str) -> None:
    model, expected = hooked(name)
    with torch.no_grad():
        program = torch.export.export(model, (X,), strict=False)
        torch.testing.assert_close(program.module()(X), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(X), expected)


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_see_tensors_forward_and_backward(name: str) -> None:
    model, seen = built(), []
    child = model.get_submodule(name)
    child.register_forward_pre_hook(lambda module, given: seen.extend(given))
    child.register_forward_hook(lambda module, given, y: seen.append(y))
    child.register_full_backward_hook(lambda module, inner, outer: seen.extend([*inner, *outer]))
    model(X.clone().requires_grad_()).sum().backward()
    assert len(seen) == 4
    assert all(isinstance(x, Tensor) for x in seen)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    return [*torch.autograd.grad(run(X).square().sum(), [*model.parameters()])]


def test_a_checkpointed_child_carries_its_state() -> None:
    model, other = built(), built()
    for at in range(2):
        other.layers[at] = checkpoint_wrapper(other.layers[at])

    def chunks(of: seqblocks.SequenceModel, x: Tensor) -> Tensor:
        y, state = of(x[:, :4], return_state=True)
        return torch.cat([y, of(x[:, 4:], state=state)], 1)

    found = gradients(other, partial(chunks, other))
    torch.testing.assert_close(found, gradients(model, partial(chunks, model)))
    torch.testing.assert_close(found, gradients(model, model))


@pytest.mark.slow
def test_a_compiled_child_carries_its_state() -> None:
    model, other = built().eval(), built().eval()
    torch._dynamo.reset()
    for at in range(2):
        other.layers[at] = torch.compile(other.layers[at], backend="eager")
    with torch.no_grad():
        expected, last = model(X, return_state=True)
        found, state = other(X, return_state=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(state, last)

"""Built models whose steps run in Triton, interpreted: whole, streamed, with resets, compiled, under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.kernels import use_backend
from tests.kernels.conformance import INTERPRETED, crossed, draw

pytestmark = INTERPRETED

DIM = 8
BLOCKS = {
    "mlstm": ("xlstm", f"mlstm_block: {{dim: {DIM}, heads: 2}}"),
    "mamba": ("mamba", f"mamba_block: {{dim: {DIM}, state: 4}}"),
    "vil": ("vil", f"vil: {{dim: {DIM}, heads: 2, order: reverse}}"),
    "vim_v1": ("mamba", f"vim_v1_mixer: {{dim: {DIM}, state: 4}}"),
    "vim_v2": ("mamba", f"vim_v2_mixer: {{dim: {DIM}, state: 4}}"),
}
STREAMING = ("mlstm", "mamba")


def model(name: str, dtype: torch.dtype = torch.float32) -> seqblocks.SequenceModel:
    """Return a model with random weights: some gates start at zero weights, which would hide errors in their inputs."""
    file, step = BLOCKS[name]
    text = f"seqblocks: 1\nuse: [{file}]\nmodel: {{input: {{features: {DIM}}}, steps: [{{{step}}}]}}"
    made = seqblocks.build_text(text, dtype=dtype, seed=1)
    with torch.no_grad():
        for at, parameter in enumerate(made.parameters()):
            parameter.add_(0.3 * draw(*parameter.shape, seed=at).to(dtype))
    return made


def results(made: seqblocks.SequenceModel, call: Any, x: Tensor) -> list[Tensor]:
    """Return y, and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    y = call(x)
    loss = (y.double() * draw(*y.shape, seed=99)).sum()
    return [y, *torch.autograd.grad(loss, [x, *made.parameters()], allow_unused=True, materialize_grads=True)]


def close(found: list[Tensor], expected: list[Tensor], bar: float) -> None:
    for at, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= bar * b.double().abs().max() + 1e-30, at


@crossed(
    ("name", BLOCKS),
    ("reset", [False, True]),
    rest="long",
    later=("vil", "vim_v2"),
)
def test_the_same_as_the_recurrence_in_float64(name: str, reset: bool) -> None:
    """float32: a dozen steps of 1e-6 each, the scan's and the gates' gradients 1e-5 at 12 tokens; 1e-4 leaves room for
    the divisor of a norm."""
    marks = torch.zeros(2, 12, dtype=torch.bool)
    marks[0, 5] = marks[1, 0] = marks[1, 11] = reset
    x = draw(2, 12, DIM)
    answers = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "triton")):
        made = model(name, dtype)
        with use_backend(backend):
            answers.append(results(made, lambda x, made=made: made(x, resets=marks if reset else None), x.to(dtype)))
    close(answers[1], answers[0], 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMING)
def test_steps_and_chunks_are_the_whole(name: str) -> None:
    made = model(name)
    x = draw(2, 9, DIM).float()
    with use_backend("triton"), torch.no_grad():
        whole, last = made(x, return_state=True)
        head, state = made(x[:, :4], return_state=True)
        outs = [head]
        for t in range(4, 9):
            y, state = made.step(x[:, t], state)
            outs.append(y.unsqueeze(1))
    close([torch.cat(outs, 1)], [whole], 2e-5)
    for name_, parts in last.items():
        close([*leaves(state[name_])], [*leaves(parts)], 2e-5)


def leaves(state: Any) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [x for part in state.values() for x in leaves(part)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mlstm", *(pytest.param(name, marks=pytest.mark.long) for name in ("mamba", "vim_v2"))]
)
def test_compiled_without_a_break_and_exported(name: str) -> None:
    made = model(name)
    x = draw(2, 6, DIM).float()
    torch._dynamo.reset()
    with use_backend("triton"):
        expected = results(made, made, x)
        close(results(made, torch.compile(made, fullgraph=True, backend="aot_eager"), x), expected, 1e-5)
        program = torch.export.export(made, (x,))
    assert "_triton" in str(program.graph)
    close([program.module()(x)], expected[:1], 1e-6)


@pytest.mark.parametrize("name", ["mamba", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mlstm", "vil"))])
def test_autocast_narrows_what_torch_narrows(name: str) -> None:
    """Dtypes equal those of the torch implementations. Errors are at most twice theirs, or 16 roundings of bfloat16,
    2^-9 each: a block has about eight on its longest path, and a gradient goes both ways."""
    x = draw(2, 6, DIM)
    exact = model(name, torch.float64)
    with use_backend("reference"):
        truth = results(exact, exact, x)
    made = model(name)
    answers = []
    for backend in ("torch", "triton"):
        with use_backend(backend), torch.autocast("cpu", dtype=torch.bfloat16):
            answers.append(results(made, made, x.float()))
    for right, a, b in zip(truth, *answers, strict=True):
        assert a.dtype == b.dtype
        off, bar = ((y.double() - right).abs().max() / right.abs().max() for y in (b, a))
        assert off <= max(2 * bar, 16 * 2**-9)

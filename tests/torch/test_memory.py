"""The memory of a training step is as estimated: peaks within 10 % of measured ones, and exact sums of the rest."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from benchmarks.memory import measure, small_models
from seqblocks.cost import tokens_of
from seqblocks.graph import ModelSpec

# Estimates leave out small tensors, such as those of one number per head, and know the temporaries of a kernel by the
# sizes of its largest ones.
TOLERANCE = 0.1
QUICK = {"transformer_small", "mamba_small", "mlstm_small", "hybrid_small"}

@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def check(name: str, batch: int, length: int, optimizer: str = "adamw", checkpoint: str = "none") -> None:
    """Compare the estimate of a spec with what its model needs."""
    compare(seqblocks.load_model(name), batch, length, optimizer, checkpoint)


def compare(spec: ModelSpec, batch: int, length: int, optimizer: str = "adamw", checkpoint: str = "none") -> None:
    length = tokens_of(spec) or length
    found = seqblocks.memory(spec, batch=batch, length=length, optimizer=optimizer, checkpoint=checkpoint)
    real = measure(seqblocks.build_model(spec), batch, length, optimizer, checkpoint)
    assert (found.weights_bytes, found.optimizer_bytes, found.gradients_bytes) == (
        real.weights, real.optimizer, real.gradients
    )
    assert found.peak_bytes == pytest.approx(real.peak, rel=TOLERANCE)
    assert sum(found.peak.values()) == found.peak_bytes
    assert found.undeclared == ()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in small_models()
])
def test_small_models(name: str) -> None:
    check(name, 4, 128)


@pytest.mark.parametrize(("optimizer", "checkpoint"), [("sgd", "none"), ("momentum", "blocks"), ("adamw", "blocks")])
def test_optimisers_and_checkpointing(optimizer: str, checkpoint: str) -> None:
    check("transformer_small", 4, 128, optimizer, checkpoint)
    check("mamba_small", 2, 64, optimizer, checkpoint)


# Each operator and function of `calc`, of wires and learned scalars, and constants that are computed or not trained.
@pytest.mark.parametrize("steps", [
    "calc: {y: a - lam * b / 8 + sigmoid(b) * tanh(a), learned: {lam: 0.5}}",
    'calc: {y: "max(b, 0) * exp(-abs(b)) + softplus(a)"}',
    "calc: {y: a / (1 + b ** 2) + 2 ** a, z: sin(y) + cos(b) - 1 / y}",
    'calc: {y: "sqrt(2 + a * a) - log(3 + abs(a)) + min(a, b)"}',
    "calc: {y: abs(a) ** b}",
    "constant: {features: 64, learned: false, persistent: true, as: y}",
    "constant: {features: 64, learned: false, formula: feature, as: y}",
])
def test_formulas_and_constants(steps: str) -> None:
    _, spec = seqblocks.load_text(f"""
seqblocks: 1
model:
  input: {{features: 64}}
  steps:
    - linear: {{features: 64, as: a}}
    - linear: {{features: 64, as: b}}
    - {steps}
    - calc: a * b * y
    - linear: 3
""")
    compare(spec, 4, 128)


def test_state_of_streams() -> None:
    model = seqblocks.build("hybrid_small")
    found = seqblocks.memory(model, batch=3, length=64)
    state = model.init_state(3)
    assert found.state_bytes == sum(x.nbytes for step in _leaves(state) for x in step)
    assert found.inference_bytes == found.state_bytes + found.weights_bytes


def _leaves(state):  # type: ignore[no-untyped-def]
    """Yield the tensors of each step."""
    for each in state.values():
        if isinstance(each, dict):
            yield from _leaves(each)
        else:
            yield [each]

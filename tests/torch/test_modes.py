"""Each step that draws random numbers follows its own training mode, which may differ from the model's."""

from __future__ import annotations

import pytest
import torch

import seqblocks
from seqblocks.distributed import pipeline_stage

SPECS = {
    "dropout": ("{dropout: {p: 0.5}}", "dropout"),
    "drop_path": ("{drop_path: {p: 0.5}}", "drop_path"),
    "residual": ("{residual: {drop_path: 0.5, steps: [{linear: 64}]}}", "residual"),
}


def build(step: str) -> seqblocks.SequenceModel:
    text = f"seqblocks: 1\nmodel: {{input: {{features: 64}}, steps: [{{linear: 64}}, {step}]}}"
    return seqblocks.build_text(text, seed=0)


def draws(model: seqblocks.SequenceModel, how: str) -> bool:
    """Return whether two calls with the same input differ."""
    x, state = torch.randn(32, 64), model.init_state(32)

    def run() -> torch.Tensor:
        return model.step(x, state)[0] if how == "step" else model(x.unsqueeze(1))

    with torch.no_grad():
        return not torch.equal(run(), run())


@pytest.mark.parametrize("how", ["whole", "step"])
@pytest.mark.parametrize("name", SPECS)
def test_a_step_follows_its_own_mode(name: str, how: str) -> None:
    text, module = SPECS[name]
    model = build(text)
    own = model.get_submodule(module)
    assert draws(model.train(), how)
    own.eval()
    assert not draws(model, how)
    assert not draws(model.eval(), how)  # makes a plan of a step
    own.train()
    assert draws(model, how)
    own.eval()
    assert not draws(model, how)


@pytest.mark.parametrize("name", ["dropout", "residual"])
def test_a_compiled_step_follows_the_mode_too(name: str) -> None:
    text, module = SPECS[name]
    model = build(text).eval()
    x, state = torch.randn(32, 64), model.init_state(32)
    torch._dynamo.reset()
    step = torch.compile(lambda x, state: model.step(x, state)[0], backend="eager", fullgraph=True)
    with torch.no_grad():
        found = []
        for training in (False, True, False):
            model.get_submodule(module).train(training)
            found.append(torch.equal(step(x, state), step(x, state)))
    assert found == [True, False, True]


def test_a_stage_of_a_pipeline_takes_the_modes_of_its_steps() -> None:
    model = build(SPECS["dropout"][0]).train()
    model.dropout.eval()
    stage = pipeline_stage(model, 0, 1)
    modes = {name: module.training for name, module in stage.named_modules()}
    assert modes["dropout"] is False
    assert modes[""] is modes["linear"] is True

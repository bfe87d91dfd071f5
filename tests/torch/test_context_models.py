"""Bundled models with several inputs or outputs: they run, stream under the law, and their state contains the context.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqblocks
from seqblocks.testing import check_law, random_context, random_input

SMALL: dict[str, dict[str, Any]] = {
    "captioner": {"dim": 16, "encoder_depth": 2, "decoder_depth": 2, "inputs.image.image.size": 16},
    "centaurus_voice": {"fine": 4, "middle": 6, "coarse": 8, "voice": 8},
    "memoroid_actor_critic": {"dim": 16, "observation": 5},
}
OUTPUTS = {
    "captioner": {"": (2, 7, 256)},
    "centaurus_voice": {"": (2, 112, 1)},
    "memoroid_actor_critic": {"policy": (2, 7, 6), "value": (2, 7, 1)},
}


@pytest.mark.parametrize("name", SMALL)
def test_it_runs_as_it_is(name: str) -> None:
    model = seqblocks.build(name)
    with torch.no_grad():
        found = model(random_input(model, 2, 7 * model.frame_size), **random_context(model, 2))
    found = found if isinstance(found, dict) else {"": found}
    assert {key: tuple(y.shape) for key, y in found.items()} == OUTPUTS[name]
    assert all(y.isfinite().all() for y in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_it_streams_under_the_law(name: str) -> None:
    model = seqblocks.build(name, set=SMALL[name], dtype="float64")
    with torch.no_grad():  # some maps start at zero, which would hide errors in their inputs
        for at, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
            parameter.add_(0.1 * noise)
    check_law(model, seq=5 if model.frame_size > 1 else 9, cuts=[2, 3])
    if model.frame_size == 1:
        check_law(model, seq=9, resets=[(0, 4), (1, 0), (1, 7)])


def test_a_captioner_reads_the_image_once() -> None:
    model = seqblocks.build("captioner", set=SMALL["captioner"])
    image = torch.randn(2, 3, 16, 16)
    calls = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    state = model.init_state(2, image=image)
    token = torch.tensor([1, 2])
    for _ in range(3):
        y, state = model.step(token, state)
        token = y.argmax(-1)
    assert len(calls) == 1
    assert "encoder" not in state


def test_an_agent_starts_an_episode_by_resets() -> None:
    model = seqblocks.build("memoroid_actor_critic", set=SMALL["memoroid_actor_critic"])
    x = random_input(model, 2, 2)
    with torch.no_grad():
        _, state = model.step(x[:, 0])
        again, _ = model.step(x[:, 1], state, resets=torch.tensor([True, False]))
        fresh, _ = model.step(x[:, 1])
    torch.testing.assert_close(again["value"][0], fresh["value"][0])
    assert not torch.allclose(again["value"][1], fresh["value"][1])


@pytest.mark.slow
def test_a_model_streams_as_before_after_an_export() -> None:
    """An export rebuilds the tuples in attributes of modules."""
    model = seqblocks.build("captioner", set=SMALL["captioner"]).eval()
    x = random_input(model, 2, 5)
    context = {name: each.detach() for name, each in random_context(model, 2).items()}
    exported = torch.export.export(model, (x,), kwargs=context)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x, **context), model(x, **context))
        torch.testing.assert_close(model(x, return_state=True, **context)[0], model(x, **context), rtol=1e-4, atol=1e-5)


def test_modules_may_be_wrapped_and_those_of_the_context_replaced() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **more: Any) -> Any:
            return self.inner(*args, **more)

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    model = seqblocks.build("captioner", set=SMALL["captioner"], dtype="float64").eval()
    x, context = random_input(model, 2, 5), random_context(model, 2)
    before = model(x, **context)
    model.decoder[0] = Wrapper(model.decoder[0])
    model.encoder[1] = Wrapper(model.encoder[1])
    torch.testing.assert_close(model(x, return_state=True, **context)[0], before)
    model.encoder = Twice()
    y, state = model.step(x[:, 0], model.init_state(2, **context))
    torch.testing.assert_close(y, model(x, **context)[:, 0])
    model.decoder[1] = Twice()
    with pytest.raises(seqblocks.RunError, match="carries no state"):
        model.step(x[:, 1], state)

"""latent_attention: values and gradients by definition, the state law, and the size of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.testing import check_law
from tests.kernels.test_attention import by_hand, near

TEXT = """
seqblocks: 1
model:
  input: {{features: 8}}
  steps:
    - linear: {{features: 12, as: q, name: q}}
    - linear: {{from: input, features: 3, as: c, name: c}}
    - linear: {{from: input, features: 2, as: r, name: r}}
    - latent_attention: {{q: q, c: c, {given}, heads: 2, value: 5, cache: 40}}
"""


def build(given: str = "r: r", **options: Any) -> Any:
    text = TEXT.format(given=given)
    if "r: r" not in given:
        text = "\n".join(line for line in text.splitlines() if "name: r" not in line)
    return seqblocks.build_text(text, dtype=torch.float64, seed=1, **options)


def expected(model: Any, x: Tensor, resets: Tensor | None = None) -> Tensor:
    """Compute keys and values of every token, and attend token by token."""
    op, c = model.latent_attention, model.c(x)
    k, v = ((c @ weight.t()).unflatten(-1, (2, -1)) for weight in (op.k_weight, op.v_weight))
    if hasattr(model, "r"):
        k = torch.cat([k, torch.stack([model.r(x)] * 2, 2)], -1)
    return by_hand(model.q(x).unflatten(-1, (2, -1)), k, v, True, None, None, resets).flatten(-2)


@pytest.mark.parametrize("given", ["r: r", "scale: 0"])
def test_values_and_gradients(given: str) -> None:
    model = build(given)
    x = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True)
    resets = torch.zeros(2, 11, dtype=torch.bool)
    resets[0, 4] = True
    leaves = [x, *model.parameters()]
    for marks in (None, resets):
        results = model(x, resets=marks), expected(model, x, marks)
        near(*([y, *torch.autograd.grad(y.square().sum(), leaves)] for y in results))


@pytest.mark.parametrize("given", ["r: r", "scale: 0.3"])
def test_the_law(given: str) -> None:
    check_law(build(given), resets=((0, 3), (1, 22)))
    check_law(build(given))


def test_the_cache_has_the_vectors_of_low_rank_only() -> None:
    model = build()
    sizes = {name: tuple(x.shape) for name, x in model.init_state(1)["latent_attention"].items()}
    assert sizes == {"latent": (1, 40, 3 + 2), "length": (1,)}


@torch.no_grad()
def test_a_step_and_a_full_cache() -> None:
    model = build().eval()
    x = torch.randn(1, 8, dtype=torch.float64)
    y, state = model.step(x, model.init_state(1))
    near([y], [model(x[:, None])[:, 0]])
    for _ in range(39):
        _, state = model.step(x, state)
    with pytest.raises(seqblocks.RunError, match="its cache has room for 40; set a larger `cache:`"):
        model.step(x, state)

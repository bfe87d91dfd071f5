"""Bundled models that read a whole input at once: each builds, runs, and trains all counted parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqblocks
from seqblocks.model.sequence_model import SequenceModel
from tests.draws import draw

SMALL: dict[str, dict[str, Any]] = {
    "vil_segmenter": {"input.image.size": [16, 32], "dim": 8, "classes": 3},
    "convnext_tiny": {"input.image.size": 64, "dim": 4, "depth": 1, "middle": 1, "classes": 5},
    "slstm_forecaster": {"series": 3, "window": 20, "horizon": 5, "dim": 8},
}
INPUTS = {"vil_segmenter": (2, 3, 16, 32), "convnext_tiny": (2, 3, 64, 64), "slstm_forecaster": (2, 20, 3)}
OUTPUTS = {"vil_segmenter": (2, 3, 16, 32), "convnext_tiny": (2, 5), "slstm_forecaster": (2, 5, 3)}


def small(name: str) -> SequenceModel:
    return seqblocks.build(name, set=SMALL[name], dtype=torch.float64, device="cpu", seed=0)


@pytest.mark.parametrize("name", SMALL)
def test_it_runs_and_everything_gets_a_gradient(name: str) -> None:
    model, x = small(name), draw(*INPUTS[name]).requires_grad_()
    y = model(x)
    assert y.shape == OUTPUTS[name]
    (y * draw(*y.shape)).sum().backward()
    for what, tensor in (("input", x), *model.named_parameters()):
        assert tensor.grad is not None, what
        assert tensor.grad.isfinite().all(), what
        assert tensor.grad.abs().max() > 0, what
    with pytest.raises(seqblocks.RunError, match="cannot stream"):
        model.init_state(1)


def test_patches_merge_in_the_order_of_the_official_code() -> None:
    """Swin joins the patches at even rows and columns, odd rows, odd columns, and both odd, in this order."""
    model = small("vil_segmenter")
    merge = model.get_submodule("merge1")
    seen: list[Tensor] = []
    merge.get_submodule("layer_norm").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    fine: list[Tensor] = []
    merge.get_submodule("rearrange").register_forward_pre_hook(lambda _, given: fine.append(given[0]))
    model(draw(*INPUTS["vil_segmenter"]))
    grid = fine[0].unflatten(1, (4, 8))
    parts = [grid[:, 0::2, 0::2], grid[:, 1::2, 0::2], grid[:, 0::2, 1::2], grid[:, 1::2, 1::2]]
    torch.testing.assert_close(seen[0], torch.cat(parts, -1).flatten(1, 2), rtol=0, atol=0)


def test_a_pixel_keeps_its_place() -> None:
    """Without the layers in the middle, the head's features return to the pixels of their patch."""
    model = small("vil_segmenter")
    made: list[Tensor] = []
    model.get_submodule("head").register_forward_hook(lambda _m, _i, out: made.append(out))
    y = model(draw(*INPUTS["vil_segmenter"]))
    features = made[0].unflatten(2, (4, 4, 3)).unflatten(1, (4, 8))  # rows, columns, p, q, classes
    for row, column, channel in ((0, 0, 0), (5, 30, 2), (15, 31, 1)):
        of_patch = features[:, row // 4, column // 4]
        torch.testing.assert_close(y[:, channel, row, column], of_patch[:, row % 4, column % 4, channel])


def perturbed(name: str) -> SequenceModel:
    """Return a small model with all parameters changed from their initial values."""
    model, generator = small(name), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def test_the_forecast_follows_scale_and_level_of_each_series() -> None:
    """The norm is reversible. The variance is near 1e6, so the added 1e-5 is 1e-11 of it."""
    model, x = perturbed("slstm_forecaster"), 1000 * draw(2, 20, 3)
    factor, level = torch.tensor([[0.5, 2.0, 3.0], [-1e4, 0, 1e3]], dtype=torch.float64)
    torch.testing.assert_close(model(factor * x + level), factor * model(x) + level, rtol=1e-8, atol=1e-5)


def test_the_norm_is_that_of_the_paper() -> None:
    model, x = perturbed("slstm_forecaster"), draw(2, 20, 3)
    seen: list[Tensor] = []
    model.get_submodule("embed").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    made: list[Tensor] = []
    model.get_submodule("forecast").register_forward_hook(lambda _m, _i, out: made.append(out))
    y = model(x)
    mean, deviation = x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    gain, offset = model.get_parameter("gain.weight"), model.get_parameter("offset.weight")
    torch.testing.assert_close(seen[0], (x - mean) / deviation * gain + offset)
    torch.testing.assert_close(y, (made[0].unflatten(1, (5, 3)) - offset) / gain * deviation + mean)

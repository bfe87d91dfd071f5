"""A linear map whose output is split is computed as separate products where nothing could observe it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import seqblocks
from seqblocks.op import PRIMITIVES, Op, Port, argument, builtin_verbs, primitive
from seqblocks.parameters import Init, Parameter
from seqblocks.runtime import primitive as primitive_module
from seqblocks.testing import check_law
from seqblocks.types import Wire

GATED = """
seqblocks: 1
model:
  input: {features: 8}
  steps:
    - linear: {features: FEATURES, as: [x, z], name: up}
    - gate: {from: x, by: z, activation: silu}
    - linear: {features: 8}
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Split maps of any length, and return a list to which each adds the sizes of its parts."""
    found: list[list[int]] = []
    run = primitive_module.split_linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> list[Tensor]:
        found.append([*sizes])
        return run(x, weight, bias, sizes)

    monkeypatch.setattr(primitive_module, "SPLIT_MIN_ELEMENTS", 0)
    monkeypatch.setattr(primitive_module, "split_linear", counted)
    return found


def built(features: int = 32) -> seqblocks.SequenceModel:
    return seqblocks.build_text(GATED.replace("FEATURES", str(features)), seed=0).double()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def derivatives(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output, the gradients, and the gradients of their squares."""
    leaves = [x.requires_grad_(), *model.parameters()]
    y = model(x)
    grads = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    return [y, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)]


def test_values_and_derivatives_are_those_of_one_product(
    calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = built(), drawn(2, 5, 8)
    found = derivatives(model, x)
    assert calls == [[16, 16]]
    monkeypatch.setattr(primitive_module, "SPLIT_MIN_ELEMENTS", 1 << 60)
    torch.testing.assert_close(found, derivatives(model, x))
    assert len(calls) == 1


def test_gradients_of_the_parts_are_not_joined(calls: list[list[int]]) -> None:
    tokens = 100
    with torch.profiler.profile(record_shapes=True) as recorded:
        y = built()(drawn(1, tokens, 8))
        y.sum().backward()
    joined = [event.input_shapes for event in recorded.events() if event.name == "aten::cat"]
    assert calls
    assert not any(tokens in shape for shapes in joined for shape in shapes)


@pytest.mark.parametrize("features", [12, 14])
def test_parts_narrower_than_the_input_are_one_product(features: int, calls: list[list[int]]) -> None:
    derivatives(built(features), drawn(2, 5, 8))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_rounded_once(dtype: torch.dtype, calls: list[list[int]]) -> None:
    model, x = built().to(dtype), drawn(2, 5, 8).to(dtype).requires_grad_()
    up = []
    with model.up.register_forward_hook(lambda *_: up.append(1)):
        expected = torch.autograd.grad(model(x).float().sum(), x)
    found = torch.autograd.grad(model(x).float().sum(), x)
    assert up == [1]
    assert not calls
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Wider(nn.Linear):
    """A replacement of the map."""


OBSERVED: dict[str, Callable[[nn.Module], object]] = {
    "hook": lambda model: model.up.register_forward_hook(lambda *_: None),
    "hook before": lambda model: model.up.register_forward_pre_hook(lambda *_: None),
    "parametrization": lambda model: parametrize.register_parametrization(model.up, "weight", Doubled()),
    "replacement": lambda model: setattr(model, "up", Wider(8, 32).double()),
}


@pytest.mark.parametrize("how", OBSERVED)
def test_a_map_that_is_observed_or_replaced_runs_as_one_module(how: str, calls: list[list[int]]) -> None:
    model = built()
    OBSERVED[how](model)
    derivatives(model, drawn(2, 5, 8))
    assert not calls


def test_a_global_hook_sees_the_whole_output(calls: list[list[int]]) -> None:
    widths = []
    handle = nn.modules.module.register_module_forward_hook(lambda _m, _i, y: widths.append(y[0].shape[-1]))
    with handle:
        built()(drawn(2, 5, 8))
    assert 32 in widths
    assert not calls


def test_transforms_modes_and_autocast_see_one_product(calls: list[list[int]]) -> None:
    model, x = built(), drawn(3, 2, 5, 8)
    alone = [model(each) for each in x]
    calls.clear()
    torch.testing.assert_close(torch.vmap(model)(x), torch.stack(alone))
    y, tangent = torch.func.jvp(model, (x[0],), (x[1],))
    torch.testing.assert_close(y, alone[0])
    torch.testing.assert_close((y + 1e-6 * tangent), model(x[0] + 1e-6 * x[1]), rtol=0, atol=1e-9)
    calls.clear()
    with torch.autocast("cpu"):
        built().float()(x[0].float())
    with torch.no_grad():
        model(x[0])
    with FlopCounterMode(display=False) as counter:
        model(x[0])
    assert counter.get_total_flops() == 2 * 10 * (8 * 32 + 16 * 8)
    assert not calls


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Define linear maps as a plug-in would."""
    for module in {*builtin_verbs().values()}:  # so that they are registered in the table that is restored
        import_module(module)
    monkeypatch.setattr("seqblocks.op.PRIMITIVES", dict(PRIMITIVES))

    @primitive("unit_rows")
    class UnitRows(Op):
        """Map of the features whose rows have length 1."""

        features: int = argument(..., "width of the output")
        has_matrix: bool = argument(True, "whether the matrix is declared for these arguments")
        in_blocks: bool = argument(False, "whether the matrix is declared as block-diagonal")

        def shape(self, x: Wire) -> Wire:
            return x.with_features(self.features)

        def parameters(self, x: Wire) -> dict[str, Parameter]:
            return {"weight": Parameter((self.features, x.features), Init("fan_in_uniform"))}

        def matrix(self, p: Any) -> tuple[Any, ...] | None:
            blocks = (1,) if self.in_blocks else ()
            return (normalize(p["weight"]), None, *blocks) if self.has_matrix else None

        def forward(self, p: Any, call: Any, x: Any) -> Tensor:
            return x @ normalize(p["weight"]).t()

    @primitive("unit_rows_and_more")
    class UnitRowsAndMore(UnitRows):
        """The same map, and a cubic term that no matrix describes."""

        def forward(self, p: Any, call: Any, x: Any) -> Tensor:
            return (y := super().forward(p, call, x)) + y**3

    @primitive("noisy_rows")
    class NoisyRows(UnitRows):
        """The same map, which may draw random numbers in training mode."""

        random = True

    @primitive("pixel_rows")
    class PixelRows(UnitRows):
        """The same map of each pixel of an image, whose features are not the last axis."""

        ports = (Port("x", "the image", main=True, kinds=("image",)),)

        def matrix(self, p: Any) -> tuple[Any, ...]:
            return normalize(p["weight"]), None

        def forward(self, p: Any, call: Any, x: Any) -> Tensor:
            return torch.einsum("oi,bihw->bohw", normalize(p["weight"]), x)


def derivatives_at_once(model: nn.Module, x: Tensor) -> list[Tensor]:
    with model.up.register_forward_hook(lambda *_: None):
        return derivatives(model, x)


@pytest.mark.parametrize(
    "step",
    [
        "unit_rows: {features: 32",
        "unembed: {vocabulary: 32",
        "proj_up: {features: 32",
        "linear: {bias: false, features: 32",
    ],
)
def test_any_op_with_a_matrix_is_split(step: str, calls: list[list[int]], plugins: None) -> None:
    model = seqblocks.build_text(GATED.replace("linear: {features: FEATURES", step), seed=0).double()
    x = drawn(2, 5, 8)
    found = derivatives(model, x)
    assert calls == [[16, 16]]
    torch.testing.assert_close(found, derivatives_at_once(model, x))
    assert len(calls) == 1
    check_law(model)


@pytest.mark.parametrize(
    "step",
    [
        "unit_rows: {features: 32, has_matrix: false",
        "unit_rows: {features: 32, in_blocks: true",
        "unit_rows_and_more: {features: 32",
        "noisy_rows: {features: 32",
        "headwise_linear: {features: 32, block: 4",
    ],
)
def test_an_op_without_one_dense_matrix_is_not(step: str, calls: list[list[int]], plugins: None) -> None:
    model = seqblocks.build_text(GATED.replace("linear: {features: FEATURES", step), seed=0).double()
    x = drawn(2, 5, 8)
    torch.testing.assert_close(derivatives(model, x), derivatives_at_once(model, x), rtol=0, atol=0)
    assert not calls
    check_law(model)


IMAGE = """
seqblocks: 1
model:
  input: {features: 8, grid: [16, 16]}
  steps:
    - to_image
    - pixel_rows: {features: 16, as: [a, b], name: up}
    - patch_embed: {from: a, patch: 1, features: 8, as: x}
    - patch_embed: {from: b, patch: 1, features: 8}
    - add: {with: x}
"""


def test_a_map_of_an_image_is_split_along_its_features(calls: list[list[int]], plugins: None) -> None:
    """The image has as many columns as features, so that its columns could be split instead."""
    model = seqblocks.build_text(IMAGE, seed=0).double()
    x = drawn(2, 256, 8)
    torch.testing.assert_close(derivatives(model, x), derivatives_at_once(model, x), rtol=0, atol=0)
    assert not calls

"""A kernel's Triton form against its recurrent definition in float64: outputs and every gradient.

Used on the CPU, in triton's interpreter (tests/triton), and on a device (tests/gpu).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from seqblocks.kernels import triton_common
from tests.triton import bfloat16  # noqa: F401  # teaches the interpreter

interpreted = pytest.mark.skipif(
    not triton_common.INTERPRETED,
    reason=triton_common.MISSING or "triton's interpreter is off: TRITON_INTERPRET=1, or no GPU, turns it on",
)

DEVICE = "cpu" if triton_common.INTERPRETED else "cuda"  # where kernels run

# One rounding to nearest on the way out, relative to the largest value: half the distance between neighbours.
# Everything before is float32, and adds 2 % to that at most.
ROUNDING = {torch.float16: 0.51 * 2**-10, torch.bfloat16: 0.51 * 2**-7}

View = Callable[[Tensor], Tensor]


def half(*axes: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Every combination, as one `parametrize` for each axis would give, but those whose places add to an odd number are
    marked long. So CI, which leaves them out, runs one of any two that differ by one place: all values, and of three
    axes and more all pairs of values. An axis may have several names, with commas between."""
    names = [name.strip() for text, _ in axes for name in text.split(",")]
    cases = []
    for combination in itertools.product(*(enumerate(values) for _, values in axes)):
        values = [v for (text, _), (_, x) in zip(axes, combination, strict=True) for v in (x if "," in text else (x,))]
        odd = sum(at for at, _ in combination) % 2
        cases.append(pytest.param(*values, marks=[pytest.mark.long] if odd else []))
    return pytest.mark.parametrize(names, cases)


def float32_bar(length: int) -> float:
    """For recurrences and sums over `length` tokens: each adds a few roundings of 2^-24, none of them grows."""
    return (16 + length) * 2**-23


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outputs_and_gradients(
    function: Callable[..., Any], leaves: dict[str, Tensor], views: dict[str, View], options: dict[str, Any]
) -> dict[str, Tensor]:
    """What `function` returns, and the gradient of each leaf for cotangents that no symmetry hides.

    They are numbers that bfloat16 can hold: autograd hands them on in the dtype of the output.
    """
    given = {name: views[name](x) if name in views else x for name, x in leaves.items()}
    out = function(**given, **options)
    out = out if isinstance(out, tuple) else (out,)
    loss = sum((x.double() * draw(*x.shape, seed=100 + at).bfloat16().to(x.device)).sum() for at, x in enumerate(out))
    grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True, materialize_grads=True)
    named = {f"output {at}": x for at, x in enumerate(out)}
    return named | {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True)}


def check(
    function: Callable[..., Any],
    tensors: dict[str, Tensor],
    bar: float,
    *,
    narrow: Collection[str] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    views: dict[str, View] | None = None,
    **options: Any,
) -> None:
    """Assert that the forms agree to `bar` of each result's largest value. `narrow` names the tensors in `dtype`.

    Both forms are given the same numbers: those that are left after rounding to the narrow dtype.
    """
    rounded = {name: x.to(dtype if name in narrow else torch.float32) for name, x in tensors.items()}
    exact = {name: x.double().requires_grad_() for name, x in rounded.items()}
    wanted = outputs_and_gradients(function, exact, {}, {**options, "backend": "reference"})
    leaves = {name: x.to(device).requires_grad_() for name, x in rounded.items()}
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    found = outputs_and_gradients(function, leaves, views or {}, {**moved, "backend": "triton"})
    for name, expected in wanted.items():
        actual = found[name]
        assert actual.shape == expected.shape, name
        if name.startswith("gradient"):
            assert actual.dtype == leaves[name.removeprefix("gradient of ")].dtype, name
        if expected.numel():
            scale = expected.abs().max().item()
            error = (actual.detach().cpu().double() - expected.detach()).abs().max().item()
            allowed = max(bar, ROUNDING.get(actual.dtype, 0.0)) * scale
            assert error <= allowed, f"{name}: differs by {error:.3g}, more than {allowed:.3g}"


def wide(x: Tensor) -> Tensor:
    """The same numbers as one half of rows twice as long, as a split projection gives them."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


def scattered(x: Tensor) -> Tensor:
    """The same numbers with no axis contiguous."""
    return torch.stack([x, x], -1)[..., 0]


def turned(x: Tensor) -> Tensor:
    """The same numbers with batch and tokens the other way round in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def resets(batch: int, length: int, every: int = 5) -> Tensor:
    """Marks at the very ends, next to each other, and here and there."""
    marks = draw(batch, length, seed=length).abs() > 1.6
    marks[:, ::every] |= draw(batch, -(-length // every), seed=1) > 0.5
    if batch and length > 3:
        marks[0, [0, 2, 3, -1]] = True
    return marks

"""Sums of residuals that the next norm adds (seqblocks/runtime/residual_sums.py), in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm
from torch.utils.checkpoint import checkpoint

import seqblocks
from seqblocks.kernels import same_backend, use_backend
from seqblocks.op import PRIMITIVES, primitive
from seqblocks.ops.norm import LayerNorm
from seqblocks.runtime.repeat import checkpoint_layers
from seqblocks.runtime.residual_sums import Sum
from tests.kernels.conformance import INTERPRETED, draw
from tests.triton.launch_counts import counting

SPEC = """
seqblocks: 1
blocks:
  layer:
    args: {dim: int}
    steps:
      - residual: [rms_norm, {linear: dim}]
      - residual: {name: second, drop_path: 0.2, steps: [{layer_norm: {gain: one_plus}}, {linear: dim}, silu]}
model:
  input: {features: 6}
  steps:
    - repeat: {name: layers, times: 2, steps: [layer: {dim: 6}]}
    - residual: {name: seen, steps: [silu, rms_norm, {add: {with: input}}]}
    - rms_norm: {name: last}
"""


def built(dtype: torch.dtype = torch.float32) -> seqblocks.SequenceModel:
    model = seqblocks.build_text(SPEC, dtype=dtype, seed=1)
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.add_(0.3 * draw(*parameter.shape, seed=at).to(dtype))
    return model


def results(model: seqblocks.SequenceModel, backend: str) -> list[Tensor]:
    """Return y, and the gradients of x and of all parameters."""
    x = draw(2, 3, 6).to(next(model.parameters()).dtype).requires_grad_()
    torch.manual_seed(0)
    with use_backend(backend):
        y = model(x)
    return [y, *torch.autograd.grad((y * draw(*y.shape, seed=9).to(y.dtype)).sum(), [x, *model.parameters()])]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)


@INTERPRETED
@pytest.mark.parametrize("training", [False, True])
def test_the_same_numbers_as_the_recurrence(training: bool) -> None:
    """Five consecutive float32 norms; both drop the same samples."""
    close(*(results(built(dtype).train(training), backend)
            for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference"))))  # fmt: skip


def added(model: seqblocks.SequenceModel) -> tuple[int, int]:
    """Count the sums of residuals as separate operations, and norms by a kernel."""
    with counting() as counts, torch.no_grad():
        model(torch.zeros(2, 3, 6))
    return counts.torch["add"] - 1, counts.triton["_norm"]  # one is the step `add`


@INTERPRETED
def test_only_sums_that_no_norm_reads_are_added() -> None:
    """Five residuals; `silu` reads the fourth, whose sum `seen` needs. The other four are added by norms."""
    assert added(built().eval()) == (1, 6)



@INTERPRETED
def test_a_norm_with_a_forward_of_its_own_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's norm inherits no kernel that adds, which would compute the norm that it replaces."""
    monkeypatch.setattr("seqblocks.op.PRIMITIVES", dict(PRIMITIVES))

    @primitive("doubled_norm")
    class DoubledNorm(LayerNorm):
        """Twice the layer normalisation."""

        def forward(self, p: Any, call: Any, x: Any) -> Tensor:
            return 2 * layer_norm(x, x.shape[-1:], p["weight"], p["bias"], self.eps)

    text = SPEC.replace("rms_norm: {name: last}", "doubled_norm: {name: last}").replace("[rms_norm,", "[doubled_norm,")
    model = seqblocks.build_text(text, seed=1).eval()
    close(results(model, "triton"), results(model.double(), "reference"))


@INTERPRETED
@pytest.mark.parametrize("kind", ["hook", "replaced", "global hook", "checkpointing"])
def test_observers_of_a_module_get_tensors(kind: str) -> None:
    model, seen = built().eval(), []
    expected = results(model, "triton")

    def note(*arguments: Any, **more: Any) -> None:
        given = [each if isinstance(each, tuple) else (each,) for each in (*arguments[1:], *more.values())]
        seen.extend(x for each in given for x in each)

    handles: list[Any] = []
    if kind == "hook":
        handles = [layer.register_forward_hook(note, with_kwargs=True) for layer in (*model.layers, model.last)]
    elif kind == "global hook":
        handles = [torch.nn.modules.module.register_module_forward_hook(note)]
    elif kind == "replaced":
        inner = model.layers[1]
        model.layers[1] = Wrapped(inner)
    else:
        checkpoint_layers(model, partial(checkpoint, use_reentrant=False, context_fn=same_backend))
    found = results(model, "triton")
    for handle in handles:
        handle.remove()
    assert not any(isinstance(x, Sum) for x in seen)
    assert seen or not handles
    close(sorted(found, key=torch.Tensor.numel), sorted(expected, key=torch.Tensor.numel))


SPLIT = """
seqblocks: 1
blocks:
  layer:
    args: {dim: int}
    steps: [{rms_norm: {as: [a, b]}}, {linear: {from: [b, a], features: dim}}]
model:
  input: {features: 6}
  steps:
    - residual: [{linear: 6}]
    - layer: {dim: 6}
"""


@INTERPRETED
def test_a_norm_whose_output_is_split_gets_the_sum() -> None:
    model = seqblocks.build_text(SPLIT, seed=1)
    close(*(results(model, backend) for backend in ("triton", "torch")))


class Wrapped(torch.nn.Module):
    """A wrapper that passes on its arguments."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **more: Any) -> Any:
        assert isinstance(x, Tensor)
        return self.inner(x, **more)


def test_sums_are_complete_without_these_kernels() -> None:
    model = built().eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 2, 6)), model.double().float()(torch.ones(1, 2, 6)))

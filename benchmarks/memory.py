"""Measure the memory of a training step on a CPU, and compare it with the estimate of `seqblocks memory`.

    python benchmarks/memory.py [SPEC …] [--batch 4] [--length 128] [--dtype bfloat16] [--checkpoint blocks]

Every allocation of torch's CPU allocator is counted, also those inside of kernels: the profiler reports them. A step is
a forward pass, a loss for each output, a backward pass and an update by AdamW(foreach=False). It is the second one, so
that the optimiser has its moments. Gradients of the first were freed; inputs and targets are not counted.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as recompute

import seqblocks
from seqblocks.cost import tokens_of
from seqblocks.graph import ModelSpec
from seqblocks.runtime.repeat import checkpoint_layers

LARGEST = 3_000_000  # parameters of the models that are measured by default


class Measured(NamedTuple):
    """Bytes. peak: the most in use during a step; kept: in use after the forward pass, besides weights and moments."""

    weights: int
    gradients: int
    optimizer: int
    kept: int
    peak: int


def measure(
    model: Any, batch: int, length: int, optimizer: str = "adamw", checkpoint: str = "none", seed: int = 0
) -> Measured:
    """Measure a training step of a built model."""
    torch.manual_seed(seed)
    inputs = inputs_of(model.spec, batch, length, next((x.dtype for x in model.parameters()), torch.float32))
    call = partial(model, **inputs) if model.spec.inputs else partial(model, inputs[""])
    targets = targets_of(model.spec, call)
    if checkpoint == "blocks":
        checkpoint_layers(model, partial(recompute, use_reentrant=False))
    updates = optimizer_of(optimizer, model)
    step(model.spec, call, targets, updates)
    updates.zero_grad()
    gc.collect()
    kept = 0

    def forward() -> Tensor:
        return loss_of(model.spec, call(), targets)

    with recorded() as forward_only:
        loss = forward()
    kept = sum(forward_only())
    del loss
    gc.collect()
    with recorded() as whole:
        step(model.spec, call, targets, updates)
    live = peak = 0
    for size in whole():
        live += size
        peak = max(peak, live)
    weights = sum(x.nbytes for x in model.parameters())
    moments = sum(x.nbytes for state in updates.state.values() for x in state.values() if isinstance(x, Tensor))
    gradients = sum(x.grad.nbytes for x in model.parameters() if x.grad is not None)
    return Measured(weights, gradients, moments, kept, weights + moments + peak)


def step(spec: ModelSpec, call: Callable[[], Any], targets: list[Tensor], updates: torch.optim.Optimizer) -> None:
    loss = loss_of(spec, call(), targets)
    loss.backward()
    updates.step()


class recorded:
    """A context in which allocations are recorded; it returns a function that yields their sizes, negative if freed."""

    def __enter__(self) -> Callable[[], Iterator[int]]:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self._sizes

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)

    def _sizes(self) -> Iterator[int]:
        results: Any = self._profile.profiler
        events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
        yield from (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def inputs_of(spec: ModelSpec, batch: int, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random inputs by name; the empty name is that of the only input."""
    found = {}
    for name, wire in (spec.inputs or {"": spec.input}).items():
        shape = [batch, *(length if isinstance(size, str) else size for size in wire.axes[1:])]
        found[name] = torch.randint(wire.features, shape) if wire.kind == "tokens" else torch.randn(shape, dtype=dtype)
    return found


def targets_of(spec: ModelSpec, call: Callable[[], Any]) -> list[Tensor]:
    """Return targets: token ids if the model reads token ids and returns a sequence, else numbers."""
    with torch.no_grad():
        outputs = _outputs(call())
    reads_ids = any(wire.kind == "tokens" for wire in (spec.input, *spec.inputs.values()))
    return [
        torch.randint(y.shape[-1], y.shape[:-1]) if reads_ids and y.dim() == 3 else torch.randn_like(y)
        for y in outputs
    ]


def loss_of(spec: ModelSpec, y: Any, targets: list[Tensor]) -> Tensor:
    outputs, total = _outputs(y), None
    del y
    for target in targets:
        found = outputs.pop(0)
        if target.is_floating_point():
            loss = mse_loss(found, target)
        else:
            loss = cross_entropy(found.flatten(0, 1), target.flatten())
        del found
        total = loss if total is None else total + loss
    assert total is not None
    return total


def _outputs(y: Any) -> list[Tensor]:
    return list(y.values()) if isinstance(y, dict) else [y]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), foreach=False)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if name == "momentum" else 0.0, foreach=False)


def small_models() -> list[str]:
    """Return the names of the bundled models of at most LARGEST parameters."""
    from seqblocks.language.files import bundled

    names = (name for name, path in bundled().items() if path.parent.name == "models")
    return [name for name in names if seqblocks.summarise(seqblocks.load_model(name)).params <= LARGEST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", nargs="*", help="specs (default: the small bundled models)")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimizer", choices=("adamw", "momentum", "sgd"), default="adamw")
    parser.add_argument("--checkpoint", choices=("none", "blocks"), default="none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'model':24}{'measured MB':>12}{'estimated':>12}{'ratio':>8}")
    for name in options.spec or small_models():
        spec = seqblocks.load_model(name)
        given = {"optimizer": options.optimizer, "checkpoint": options.checkpoint}
        length = tokens_of(spec) or options.length
        found = seqblocks.memory(
            spec, batch=options.batch, length=length, dtype=options.dtype, **given
        )
        built = seqblocks.build_model(spec, dtype=options.dtype)
        peak = measure(built, options.batch, length, **given).peak
        print(f"{name:24}{peak / 1e6:12.2f}{found.peak_bytes / 1e6:12.2f}{found.peak_bytes / peak:8.3f}", flush=True)


if __name__ == "__main__":
    main()

"""Measure the memory of a training step on a CPU, and compare it with the estimate of `seqblocks memory`.

    python benchmarks/memory.py [SPEC …] [--batch 4] [--length 128] [--dtype bfloat16] [--checkpoint blocks]

Every allocation of torch's CPU allocator is counted, also those inside of kernels: the profiler reports them. A step is
a forward pass, a loss for each output, a backward pass and an update by AdamW(foreach=False). It is the second one, so
that the optimiser has its moments. Gradients of the first were freed; inputs and targets are not counted.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable
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
from seqblocks.model.random_inputs import dtype_of
from seqblocks.runtime.repeat import checkpoint_layers

LARGEST = 3_000_000  # parameters of the models that are measured by default


class Measured(NamedTuple):
    """Bytes of a model, and the most that are in use during a step."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


class Run:
    """A built model with inputs and targets, after a first step: the optimiser has its moments."""

    def __init__(self, model: Any, batch: int, length: int, optimizer: str = "adamw", checkpoint: str = "none") -> None:
        torch.manual_seed(0)
        inputs = inputs_of(model.spec, batch, length, dtype_of(model))
        self.model, self.spec = model, model.spec
        self.call = partial(model, **inputs) if model.spec.inputs else partial(model, inputs[""])
        self.targets = targets_of(model.spec, self.call)
        if checkpoint == "blocks":
            checkpoint_layers(model, partial(recompute, use_reentrant=False))
        self.updates = optimizer_of(optimizer, model)
        self.step()

    def loss(self) -> Tensor:
        return loss_of(self.call(), self.targets)

    def step(self) -> None:
        self.loss().backward()
        self.updates.step()

    def measured(self) -> Measured:
        self.updates.zero_grad()
        gc.collect()
        live = peak = 0
        for size in allocations(self.step):
            live += size
            peak = max(peak, live)
        weights, moments = list(self.model.parameters()), list(self.updates.state.values())
        fixed = _bytes(weights), _bytes(x for state in moments for x in state.values() if isinstance(x, Tensor))
        return Measured(fixed[0], _bytes(x.grad for x in weights if x.grad is not None), fixed[1], sum(fixed) + peak)

    def kept(self) -> int:
        """Return the bytes that are in use after a forward pass, besides weights and moments."""
        self.updates.zero_grad()
        gc.collect()
        losses: list[Tensor] = []
        return sum(allocations(lambda: losses.append(self.loss())))


def measure(model: Any, batch: int, length: int, optimizer: str = "adamw", checkpoint: str = "none") -> Measured:
    """Measure a training step of a built model."""
    return Run(model, batch, length, optimizer, checkpoint).measured()


def allocations(work: Callable[[], Any]) -> list[int]:
    """Return the sizes of what is allocated, or (negative) freed, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    results: Any = found.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.nbytes for x in tensors)


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


def loss_of(y: Any, targets: list[Tensor]) -> Tensor:
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
        eps = max(1e-8, torch.finfo(dtype_of(model)).tiny)  # 1e-8 is 0 in float16, and weights would become NaN
        return torch.optim.AdamW(model.parameters(), eps=eps, foreach=False)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if name == "momentum" else 0.0, foreach=False)


def small_models() -> list[str]:
    """Return the sorted names of the bundled models of at most LARGEST parameters."""
    from seqblocks.language.spec_files import bundled

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
